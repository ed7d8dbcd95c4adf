"""What one launch does on CUDA: riders, residuals, skip tensors and statistics; operations that only the table knows;
and lowering without a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dispatcher.backends.cuda import BACKEND
from dispatcher.backends.cuda.groups import grouped
from dispatcher.backends.cuda.implementations import IMPLEMENTATIONS
from dispatcher.backends.cuda.layouts import structure
from dispatcher.backends.cuda.lowering import lower
from dispatcher.backends.cuda.options import Options
from dispatcher.backends.cuda.program import Program
from dispatcher.backends.cuda.sources import MAX_RIDERS
from dispatcher.backends.cuda.tasks import Setting, Target
from dispatcher.backends.numpy_ref import steps as reference_steps
from dispatcher.errors import KernelError
from dispatcher.ops.forms import SUM, PointwiseForm, ReductionForm
from dispatcher.ops.steps import Pool, Step
from dispatcher.ops.vocabulary import VOCABULARY, Field, pointwise, reduction
from dispatcher.problem.operator import Operator
from tests.cuda_support import check, compiled, device, machine, only_tiles, plant, poisoned, simulator_only
from tests.strategies import conv_operator, operator_of, tensors_of

H100 = Target(90, 227 << 10, 132)
TURING = Target(75, 64 << 10, 40)
CONV = {"op": "conv_transpose3d", "weight": "w", "stride": 2}
SHAPES = {"x": (2, 3, 3, 4, 8), "w": (3, 6, 3, 3, 3)}
MADE = (2, 6, 7, 9, 17)  # by that convolution
RELU, SILU, GELU, HARDSWISH = ({"op": name} for name in ("relu", "silu", "gelu", "hardswish"))
GROUPS = {"op": "group_norm", "groups": 3}
POOL = {"op": "avg_pool3d", "window": 2}
SUM_CHANNELS = {"op": "sum", "axis": "channel"}
MEAN_SPACE = {"op": "mean", "axis": "spatial"}


@dataclass(frozen=True)
class Case:
    """A pipeline and its launches; ``general`` are those of the general kernel where they differ."""

    steps: list[dict[str, Any]]
    launches: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]] = ()  # type: ignore[assignment]
    general: tuple[str, ...] = ()

    @property
    def operator(self) -> Operator:
        return self.of("float32")

    def of(self, dtype: str) -> Operator:
        """Bound, with tensors of ``dtype``."""
        convolved = any(step is CONV or step["op"] == "conv_transpose3d" for step in self.steps)
        start = SHAPES if convolved else {"x": (2, 6, 4, 6, 8)}
        return operator_of({**start, **dict(self.shapes)}, self.steps, dtype)


SKIP = {"t": MADE}
CASES = {
    # -- riders
    "norm": Case([GROUPS, RELU, {"op": "add", "value": "t"}], ("rows_by_block",), {"t": (2, 6, 4, 6, 8)}),
    "softmax": Case([{"op": "softmax"}, {"op": "scale", "by": "t"}], ("rows_by_thread",), {"t": (6, 1, 1, 8)}),
    "reduction": Case([MEAN_SPACE, GELU, {"op": "scale", "by": "t"}], ("rows_by_block",), {"t": (2, 6, 1, 1, 1)}),
    "pool": Case([RELU, POOL, GELU, {"op": "scale", "by": "t"}], ("pool",), {"t": (2, 1, 2, 3, 4)}),
    "chain": Case(
        [{"op": "add", "value": "t"}, GELU, {"op": "scale", "by": "c"}, {"op": "subtract", "value": "s"}],
        ("elementwise",),
        {"t": (2, 6, 4, 6, 8), "c": (6, 1, 1, 1), "s": (1, 1, 4, 1, 8)},
    ),
    "sum": Case([CONV, SUM_CHANNELS, {"op": "add", "value": "t"}, RELU], ("conv_halo",), {"t": (2, 1, 7, 1, 17)},
                ("conv_fma",)),
    "pools": Case(
        [CONV, POOL, {"op": "avg_pool3d", "window": [1, 2, 2]}, {"op": "subtract", "value": "t"}, GELU],
        ("conv_halo",), {"t": (1, 6, 3, 2, 4)}, ("conv_fma", "pool"),
    ),
    "pools, sum": Case(
        [CONV, POOL, {"op": "max_pool3d", "window": [3, 1, 2]}, {"op": "min", "axis": "channel"}, GELU],
        ("conv_halo",), {}, ("conv_fma", "pool", "rows_by_block"),
    ),
    # -- residuals
    "residual": Case([{**CONV, "as": "c"}, GELU, {"op": "add", "value": "c"}], ("conv_halo",), {}, ("conv_fma",)),
    "times itself": Case(
        [CONV, {"op": "add", "value": "t", "as": "s"}, HARDSWISH, {"op": "scale", "by": "s"}],
        ("conv_halo",), SKIP, ("conv_fma",),
    ),
    "over a norm": Case(
        [{**CONV, "as": "c"}, {**GELU, "as": "g"}, {"op": "scale", "by": 2.0}, {"op": "layer_norm"},
         {"op": "add", "value": "c"}, {"op": "layer_norm"}, {"op": "subtract", "value": "g"}],
        ("conv_halo",), {}, ("conv_fma", "elementwise", "elementwise", "rows_by_thread", "rows_by_thread"),
    ),
    "in a chain": Case([{**GELU, "as": "g"}, RELU, {"op": "scale", "by": "g"}], ("elementwise",)),
    "after a fold": Case(
        [CONV, {**POOL, "as": "p"}, GELU, {"op": "add", "value": "p"}], ("conv_halo",), {}, ("conv_fma",)
    ),
    # -- skip tensors
    "skip": Case([CONV, {"op": "add", "value": "t"}], ("conv_halo",), SKIP, ("conv_fma",)),
    "skip that broadcasts": Case(
        [CONV, {"op": "scale", "by": "t"}], ("conv_halo",), {"t": (2, 1, 1, 9, 1)}, ("conv_fma",)
    ),
    "skip before a fold": Case([CONV, {"op": "add", "value": "t"}, POOL], ("conv_halo",), SKIP, ("conv_fma",)),
    "skip after a fold": Case(
        [CONV, POOL, {"op": "add", "value": "t"}], ("conv_halo",), {"t": (2, 6, 3, 4, 8)}, ("conv_fma",)
    ),
    "earlier value": Case(
        [{"op": "layer_norm", "as": "n"}, {"op": "conv_transpose3d", "weight": "w", "padding": 1},
         {"op": "add", "value": "n"}],
        ("rows_by_thread", "conv_halo"), {"w": (3, 3, 3, 3, 3)}, ("rows_by_thread", "conv_fma"),
    ),
    # -- statistics
    "group_norm": Case(
        [CONV, SILU, {**GROUPS, "weight": "g", "bias": "b"}, HARDSWISH],
        ("conv_halo", "gathered"), {"g": (6,), "b": (6,)}, ("conv_fma", "gathered"),
    ),
    "instance_norm": Case(
        [CONV, {"op": "instance_norm"}], ("conv_halo", "gathered"), {}, ("conv_fma", "gathered")
    ),
    "batch_norm": Case(
        [CONV, {"op": "batch_norm", "weight": "g"}, RELU],
        ("conv_halo", "gathered"), {"g": (6,)}, ("conv_fma", "gathered"),
    ),
    "batch_norm, mean": Case(
        [CONV, {"op": "batch_norm", "weight": "g", "bias": "b"}, MEAN_SPACE, RELU],
        ("conv_halo", "gathered"), {"g": (6,), "b": (6,)}, ("conv_fma", "gathered"),
    ),
    "group_norm, mean": Case(
        [CONV, GROUPS, MEAN_SPACE], ("conv_halo", "gathered"), {}, ("conv_fma", "gathered")
    ),
    "spatial softmax": Case(
        [CONV, {"op": "softmax", "axis": "spatial"}, GELU], ("conv_halo", "gathered"), {}, ("conv_fma", "gathered")
    ),
    "global mean": Case([CONV, MEAN_SPACE, GELU], ("conv_halo", "gathered"), {}, ("conv_fma", "gathered")),
    "minimum of batch and space": Case(
        [CONV, {"op": "min", "axis": ["batch", "spatial"]}], ("conv_halo", "gathered"), {}, ("conv_fma", "gathered")
    ),
    "sum of channels and space": Case(
        [CONV, {"op": "sum", "axis": ["channel", "spatial"]}], ("conv_halo", "gathered"), {}, ("conv_fma", "gathered")
    ),
    "statistics of folds": Case([CONV, POOL, GROUPS], ("conv_halo", "gathered"), {}, ("conv_fma", "gathered")),
    "norm and residual": Case(
        [{**CONV, "as": "c"}, GROUPS, {"op": "add", "value": "c"}],
        ("conv_halo", "gathered"), {}, ("conv_fma", "gathered"),
    ),
    "mean of a stored norm": Case(
        [{**CONV, "as": "c"}, {"op": "batch_norm"}, {**MEAN_SPACE, "as": "m"}, {"op": "scale", "by": "m", "from": "c"}],
        ("conv_halo", "gathered", "elementwise"), {}, ("conv_fma", "gathered", "elementwise"),
    ),
    "mean of what is read again": Case(
        [{**CONV, "as": "c"}, {**MEAN_SPACE, "as": "m"}, {"op": "scale", "by": 2.0, "from": "c"},
         {"op": "add", "value": "m"}],
        ("conv_halo", "gathered", "elementwise"), {}, ("conv_fma", "gathered", "elementwise"),
    ),
}  # fmt: skip
ALGORITHMS = pytest.mark.parametrize("algorithm", ["halo", "fma"])
GATHERING = [name for name, case in CASES.items() if "gathered" in case.launches]


def names(op: Operator, **options: Any) -> tuple[str, ...]:
    """Kernels of the launches."""
    return tuple(launch.name for launch in compiled(op, **options).launches)


def has_tensor_cores() -> bool:
    return str(device().facts["compute_capability"]) >= "8.0"


@ALGORITHMS
@pytest.mark.parametrize("name", CASES)
def test_launches_and_results(name: str, algorithm: str) -> None:
    case = CASES[name]
    general = algorithm == "fma" or not has_tensor_cores()
    assert names(case.operator, algorithm=algorithm) == (case.general if general and case.general else case.launches)
    for kind in ("signed", "one_nan", "one_inf"):
        check(case.operator, tensors_of(case.operator, kind), algorithm=algorithm)


@ALGORITHMS
@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize(
    "name", ["times itself", "pools", "group_norm", "batch_norm, mean", "spatial softmax", "global mean", "norm"]
)
def test_other_dtypes(name: str, dtype: str, algorithm: str) -> None:
    op = CASES[name].of(dtype)
    check(op, tensors_of(op), algorithm=algorithm)


def test_unfused_chains_give_what_fused_ones_give() -> None:
    """A chain that is longer than a launch holds runs in several."""
    steps = [{"op": "add", "value": 1.0}] * (MAX_RIDERS + 3)
    op = operator_of({"x": (1, 2, 2, 3, 4)}, steps)
    assert names(op) == ("elementwise", "elementwise")
    tensors = tensors_of(op, "integers")
    np.testing.assert_array_equal(compiled(op)(tensors), tensors["x"] + len(steps))


def test_a_value_that_is_in_no_memory_and_in_no_register_ends_the_launch() -> None:
    """After the fold the convolution's own result is gone; it broadcasts, since it is one voxel large."""
    op = operator_of(
        {"x": (1, 3, 1, 1, 1), "w": (3, 4, 1, 1, 1)},
        [{"op": "conv_transpose3d", "weight": "w", "as": "c"}, {"op": "max_pool3d", "window": 1},
         {"op": "add", "value": "c"}],
    )  # fmt: skip
    assert len(names(op)) == 2
    check(op, tensors_of(op))


# ---- statistics --------------------------------------------------------------------------------------------
LARGE = operator_of(
    {"x": (2, 8, 6, 12, 20), "w": (8, 70, 3, 3, 3)}, [CONV, {"op": "group_norm", "groups": 2, "eps": 0.0}, RELU]
)


def test_a_set_is_shared_by_several_blocks() -> None:
    op = LARGE
    launch = lower(op, H100, Options()).launches[-1]
    assert launch.name == "gathered" and launch.blocks > 4 == int(launch.parameters["sets"])
    for kind in ("signed", "large_mean"):
        check(op, tensors_of(op, kind))


@ALGORITHMS
@pytest.mark.parametrize("factor", [1e24, 1e-22], ids=["large", "small"])
@pytest.mark.parametrize("name", ["instance_norm", "batch_norm, mean", "mean of a stored norm"])
def test_squares_beyond_the_range_of_float(name: str, factor: float, algorithm: str) -> None:
    steps = [{**step, "eps": 0.0} if step["op"].endswith("_norm") else step for step in CASES[name].steps]
    op = replace(CASES[name], steps=steps).operator
    tensors = tensors_of(op)
    tensors["x"] = tensors["x"] * np.float32(factor)
    check(op, tensors, algorithm=algorithm)


@ALGORITHMS
def test_a_softmax_over_minus_infinity(algorithm: str) -> None:
    """Lanes that have seen nothing else yet must not make NaN of it."""
    op = operator_of(
        {"x": (1, 2, 4, 4, 8), "w": (2, 2, 1, 1, 1)},
        [{"op": "conv_transpose3d", "weight": "w"}, {"op": "softmax", "axis": "spatial"}],
    )
    x = np.zeros((1, 2, 4, 4, 8), np.float32)
    x[0, 0, :3] = -np.inf
    w = np.zeros((2, 2, 1, 1, 1), np.float32)
    w[0, 0] = w[1, 1] = 1
    x[0, 1] = np.linspace(-3, 3, 128, dtype=np.float32).reshape(4, 4, 8)
    w[0, 1] = w[1, 0] = 0
    result = compiled(op, algorithm=algorithm)({"x": np.where(np.isinf(x), -3e38, x), "w": w}, poisoned(op))
    np.testing.assert_allclose(result[0, 0, 3], 1 / 32, rtol=1e-6)
    assert (result[0, 0, :3] == 0).all()
    check(op, {"x": x, "w": w}, algorithm=algorithm)


@ALGORITHMS
@pytest.mark.parametrize("name", ["group_norm", "spatial softmax", "batch_norm, mean"])
def test_statistics_repeat_to_the_bit(name: str, algorithm: str) -> None:
    op = CASES[name].operator
    run, tensors = compiled(op, algorithm=algorithm), tensors_of(op)
    first = run(tensors)
    assert all(np.array_equal(first, run(tensors)) for _ in range(3))


@simulator_only
@pytest.mark.parametrize("copies", ["late", "eager"])
@pytest.mark.parametrize("schedule", ["forward", "reverse"])
def test_order_of_threads_makes_no_difference(schedule: str, copies: str) -> None:
    for name in ("group_norm", "spatial softmax", "over a norm", "global mean"):
        op = CASES[name].operator
        for algorithm in ("halo", "fma"):
            with machine(devices=1, arch="8.0", schedule=schedule, async_copy=copies):
                check(op, tensors_of(op), algorithm=algorithm)


@simulator_only
def test_nothing_is_read_behind_an_allocation() -> None:
    for name in ("times itself", "skip that broadcasts", "pools", "group_norm", "global mean", "norm"):
        op = CASES[name].operator
        for algorithm in ("halo", "fma"):
            with machine(devices=1, arch="9.0", alignment=16):
                check(op, tensors_of(op), algorithm=algorithm)


def test_values_that_nobody_reads_are_not_stored() -> None:
    for name in ("batch_norm, mean", "global mean"):
        for target in (H100, TURING):
            program = lower(CASES[name].operator, target, Options())
            assert program.values == () and len(program.scratch_bytes) == 1
    assert lower(CASES["group_norm"].operator, H100, Options()).values == (2,)


def test_blocks_of_the_general_kernel_that_hold_many_batch_items_gather_nothing() -> None:
    op = conv_operator((40, 3, 1, 1, 2), 4, (1, 1, 1), after=[{"op": "instance_norm"}])
    assert [launch.name for launch in lower(op, TURING, Options()).launches] == ["conv_fma", "rows_by_block"]
    assert [launch.name for launch in lower(op, H100, Options()).launches] == ["conv_halo", "gathered"]


MUTANTS = {
    "voxels that do not exist": (
        "conv_halo.cu", "inside[m] = place_of(p, box, first_voxel + m * 8 + g, residue, whole).exists;",
        "inside[m] = true;", "instance_norm",
    ),
    "no barrier before lanes are joined": (
        "conv_halo.cu", "__syncthreads();\n  for (int c = threadIdx.x; c < box.channels",
        "for (int c = threadIdx.x; c < box.channels", "global mean",
    ),
    "another lane's channel": ("conv_halo.cu", "lane = c % 8 / 2; lane", "lane = c % 4; lane", "instance_norm"),
    "centre forgotten": (
        "gather.cuh", "double(state[0]) + double(state[PITCH])", "double(state[PITCH])", "instance_norm"
    ),
    "spread of the means forgotten": (
        "gather.cuh", "x.c + y.c + apart * apart", "x.c + y.c + 0. * apart", "instance_norm"
    ),
    "sums of another maximum": (
        "gather.cuh", "x.b * exp_below(x.a, top)", "x.b", "spatial softmax"
    ),
    "a lane's sums of another maximum": (
        "gather.cuh", "state[PITCH] * exp_below(before, top)", "state[PITCH]", "spatial softmax"
    ),
    "general: voxels that do not exist": (
        "conv_fma.cu", "if (partial[m] == COMPUTE(0)) continue;", "", "instance_norm"
    ),
    "general: always the first batch item": ("conv_fma.cu", "v.batch = item + rest;", "v.batch = rest;", "batch_norm"),
    "another set": ("gathered.cu", "% groups) * p.set_channels", "% groups)", "group_norm"),
    "statistics of the first batch item": ("gathered.cu", "(n + i / each) * p.boxes", "n * p.boxes", "batch_norm"),
    "skip of the first channel": ("chain.cuh", "+ c * stride[1]", "", "skip"),
    "residual of another channel": ("conv_halo.cu", "kept.v[number]", "kept.v[0]", "over a norm"),
}  # fmt: skip


@simulator_only
@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_is_noticed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, old, new, case = MUTANTS[name]
    plant(monkeypatch, tmp_path / "kernels", file, (old, new))
    only_tiles(monkeypatch, lambda task, tile: tile.warps > 1)
    op = CASES[case].operator
    caught = False
    for schedule in ("forward", "reverse"):
        with machine(devices=1, arch="8.0", schedule=schedule):
            try:
                check(op, tensors_of(op), algorithm="fma" if name.startswith("general") else "halo")
            except (AssertionError, KernelError):
                caught = True
    assert caught


# ---- operations that only the table and the reference know -------------------------------------------------
CUBE = pointwise(
    PointwiseForm("cube", "s * x * a", let=(("s", "x * x"),), arguments=1, role="factor"),
    "in ** 3 * by",
    Field("by", "operand", "the factor", True),
)
SUM_ABS = reduction(ReductionForm("sum_abs", SUM, lift="abs_v(x)", finish="sqrt_v(t) * share"), "")
NEW = [
    ([{"op": "cube", "by": "t"}], ("elementwise",)),
    ([CONV, {"op": "cube", "by": "t"}, POOL], ("conv_halo",)),
    ([{"op": "layer_norm"}, {"op": "cube", "by": 0.5}], ("rows_by_thread",)),
    ([{"op": "sum_abs", "axis": "channel"}], ("rows_by_thread",)),
    ([{"op": "sum_abs", "axis": ["batch", "width"]}, RELU], ("rows_by_block",)),
    ([CONV, {"op": "sum_abs", "axis": "channel"}], ("conv_halo",)),
    ([CONV, {"op": "sum_abs", "axis": "spatial"}], ("conv_halo", "gathered")),
]


@ALGORITHMS
@pytest.mark.parametrize(("steps", "launches"), NEW)
def test_an_operation_of_the_table_and_the_reference_alone(
    steps: list[dict[str, Any]], launches: tuple[str, ...], algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(VOCABULARY, "cube", CUBE)
    monkeypatch.setitem(VOCABULARY, "sum_abs", SUM_ABS)
    monkeypatch.setitem(reference_steps.POINTWISE, "cube", lambda x, a: x**3 * a)

    def sum_abs(x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
        count = np.prod([x.shape[axis] for axis in axes])
        return np.sqrt(np.abs(x).sum(axis=axes, keepdims=True)) / count

    monkeypatch.setitem(reference_steps.REDUCTIONS, "sum_abs", sum_abs)
    convolved = steps[0] is CONV
    shapes = dict(SHAPES) if convolved else {"x": (2, 6, 4, 6, 8)}
    if any(step.get("by") == "t" for step in steps):
        shapes["t"] = MADE if convolved else (2, 6, 1, 6, 8)
    op = operator_of(shapes, steps)
    wanted = tuple("conv_fma" if each == "conv_halo" else each for each in launches)
    general = algorithm == "fma" or not has_tensor_cores()
    assert names(op, algorithm=algorithm) == (wanted if general else launches)
    check(op, tensors_of(op), algorithm=algorithm)


# ---- what is refused before anything is compiled -----------------------------------------------------------
class Unheard(Step):
    """A class of steps that no backend knows."""


def refused(op: Operator, step: Step) -> str:
    reason = BACKEND.supports(replace(op, steps=(step,)), device())
    assert reason is not None
    return reason


def test_what_no_kernel_computes_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VOCABULARY, "erf", pointwise(PointwiseForm("erf", "erf_v(x)"), ""))
    op = operator_of({"x": (1, 2, 2, 3, 4)}, [{"op": "erf"}])
    reason = "erf: its form calls erf_v, which the cuda backend's kernels do not have"
    assert BACKEND.supports(op, device()) == reason
    unheard = Unheard("unheard", 0, op.steps[0].input_shape, op.steps[0].shape)
    assert refused(op, unheard) == "unheard: the cuda backend has no kernel for Unheard steps"
    shifted = ReductionForm("log_sum_exp", SUM, lift="exp_v(x)", finish="log_v(t)", shifted=True)
    pool = Pool("lse_pool", 0, op.steps[0].input_shape, op.steps[0].shape, shifted, (1, 1, 1), (1, 1, 1))
    assert refused(op, pool).startswith("lse_pool: the cuda backend's pools do not look for the largest")


# ---- lowering without a device -----------------------------------------------------------------------------
def test_the_text_holds_just_the_operations_that_are_used() -> None:
    (launch,) = lower(CASES["times itself"].operator, H100, Options()).launches
    text = launch.kernel.operations
    assert [f"op_{name}(" in text for name in ("add", "hardswish", "scale", "gelu", "relu")] == [True] * 3 + [False] * 2
    assert text.count("TENSOR(") == 1  # the residual is in a register
    assert launch.pointers[0][0] == ("operand", 0, "data")


@pytest.mark.parametrize("target", [H100, TURING], ids=["h100", "turing"])
@pytest.mark.parametrize("name", CASES)
def test_lowering_is_data(name: str, target: Target) -> None:
    """The same for the same operator, without a device; every launch says what it is and why it ends."""

    def data(program: Program) -> list[Any]:
        return [(each.kernel, each.blocks, repr(each.parameters), each.pointers) for each in program.launches]

    op = CASES[name].operator
    program = lower(op, target, Options())
    assert data(program) == data(lower(op, target, Options()))
    assert [launch.name for launch in program.planned] == [launch.name for launch in program.launches]
    assert sum((launch.steps for launch in program.planned), ()) == tuple(step.op for step in op.steps)
    rejected = [launch.rejected for launch in program.planned if launch.name == "conv_fma"]
    assert all(each == (("halo", "TF32 tensor cores need compute capability 8.0"),) for each in rejected)
    for group in grouped(Setting(op, target, Options())):
        assert group.implementation in IMPLEMENTATIONS and group.implementation.accepts(group.task) is None
        assert group.implementation.estimate(group.task) > 0


def test_estimates_are_comparable() -> None:
    """Tensor cores beat multiply-adds, and a convolution costs more than a pass over its result."""
    op = conv_operator((4, 32, 16, 16, 32), 64, (3, 3, 3), stride=2, padding=1, after=[{"op": "softmax"}])
    found: dict[str, Callable[..., float]] = {}
    for algorithm in ("halo", "fma"):
        for group in grouped(Setting(op, H100, Options(algorithm=algorithm))):
            found[group.implementation.name] = group.implementation.estimate(group.task)  # type: ignore[assignment]
    assert 0 < found["rows"] < found["halo"] < found["fma"]  # type: ignore[operator]


def test_structures_are_read_from_the_kernels() -> None:
    operand = structure("conv_halo.cu", "Operand")
    assert operand.itemsize == 56 and operand["stride"].shape == (5,)
    parameters = structure("conv_halo.cu", "HaloParams", OPERANDS=3)
    assert parameters["operand"].shape == (3,) and parameters.fields is not None
    assert parameters.fields["pass_count"][0].itemsize == 4
    assert structure("conv_halo.cu", "Pass")["residue"].shape == (2, 3)
    with pytest.raises(KeyError, match=r"pack\.cu has no struct Nothing"):
        structure("pack.cu", "Nothing")


# ---- the guide ---------------------------------------------------------------------------------------------
SHOWN: dict[str, list[dict[str, Any]]] = {
    "group_norm, relu, add tensor": [GROUPS, RELU, {"op": "add", "value": "t"}],
    "add, gelu, scale, clamp": [{"op": "add", "value": 1.0}, GELU, {"op": "scale", "by": 2.0}, {"op": "clamp"}],
    "conv as c, gelu, add c": CASES["residual"].steps,
    "conv, add tensor, hardswish, times itself": CASES["times itself"].steps,
    "conv, silu, group_norm, hardswish": [CONV, SILU, GROUPS, HARDSWISH],
    "conv, batch_norm, relu": [CONV, {"op": "batch_norm"}, RELU],
    "conv, batch_norm, mean over space": [CONV, {"op": "batch_norm"}, MEAN_SPACE],
    "conv, softmax over space": [CONV, {"op": "softmax", "axis": "spatial"}],
    "conv, mean over space, gelu": CASES["global mean"].steps,
}


@pytest.mark.parametrize("target", [H100, TURING], ids=["h100", "turing"])
def test_the_guide_says_how_many_launches_there_are(target: Target) -> None:
    guide = (Path(__file__).resolve().parents[1] / "docs" / "cuda.md").read_text(encoding="utf-8")
    table = guide.split("| pipeline | launches before | now |")[1].split("\n\n")[0].splitlines()[2:]
    rows = {cells[1].strip(): int(cells[3]) for cells in (line.split("|") for line in table)}
    assert set(rows) == set(SHOWN)
    for name, launches in rows.items():
        convolved = CONV in SHOWN[name] or SHOWN[name][0].get("as") == "c"
        shapes = dict(SHAPES) if convolved else {"x": MADE}
        shapes |= {"t": MADE} if any(step.get("value") == "t" for step in SHOWN[name]) else {}
        assert len(lower(operator_of(shapes, SHOWN[name]), target, Options()).launches) == launches, name
