"""Single steps on devices whose work-groups share out rows among their work-items: indices, groups, results.

Such devices are emulated: option ``algorithm="tiled"`` runs their kernels on the devices that are here. Data races and
accesses out of bounds are looked for in test_oclgrind.py.
"""

from __future__ import annotations

import math
import re
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.problem.operator import Operator
from tests.strategies import PLACES, Place, operator_of, pipelines, tensors_of, thorough

pytest.importorskip("pyopencl")

from dispatcher.backends.opencl import BACKEND, executable, grouped, launches
from dispatcher.backends.opencl.grouped import Axis, Grouping, axes_of, grouping, joined
from dispatcher.backends.opencl.implementations import tasks_of
from dispatcher.backends.opencl.options import Options
from dispatcher.backends.opencl.target import Limits, Target

TINY = Limits(work_items=16, local_memory=1 << 10, multiple=8, compute_units=2)
ALONE = Limits(work_items=64, local_memory=64, multiple=16, compute_units=2)
LARGE = Limits(work_items=1024, local_memory=48 << 10, multiple=32, compute_units=132)
LIMITS = {"tiny": TINY, "large": LARGE}

HERE = [place for place in PLACES if place.backend == "opencl" and place.algorithm in (None, "tiled")]
everywhere = pytest.mark.parametrize("place", HERE, ids=str)
each_limits = pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)


def over(op: str, *axes: str, **fields: Any) -> dict[str, Any]:
    return {"op": op, "axis": list(axes), **fields}


def pool(function: str, *window: int) -> dict[str, Any]:
    return {"op": f"{function}_pool3d", "window": list(window)}


#: Shapes of tensors, and steps none of which is a convolution.
PIPELINES: dict[str, tuple[dict[str, tuple[int, ...]], list[Any]]] = {
    "long_rows": ({"x": (2, 3, 5, 7, 61)}, [over("softmax", "spatial"), over("layer_norm", "width")]),
    "one_row": (
        {"x": (2, 3, 5, 7, 61)},
        [over("layer_norm", "batch", "channel", "spatial"), over("sum", "batch", "channel", "spatial")],
    ),
    "short_rows": ({"x": (3, 5, 7, 6, 3)}, [over("softmax", "width"), over("mean", "height", "width")]),
    "columns": (
        {"x": (2, 75, 2, 3, 5), "w": (75,), "b": (75,)},
        [{"op": "layer_norm", "weight": "w", "bias": "b"}, over("softmax", "channel"), over("max", "channel")],
    ),
    "few_columns": ({"x": (700, 1, 1, 1, 3)}, [over("softmax", "batch"), over("log_sum_exp", "batch")]),
    "gaps": (
        {"x": (3, 4, 5, 6, 7)},
        [over("layer_norm", "batch", "depth", "width"), over("log_sum_exp", "channel", "height")],
    ),
    "groups": (
        {"x": (2, 12, 3, 2, 19), "w": (12,), "b": (12,)},
        [{"op": "group_norm", "groups": 4, "weight": "w", "bias": "b"}, {"op": "group_norm", "groups": 12}],
    ),
    "channels_behind": (
        {"x": (2, 6, 3, 2, 9), "w": (6,)},
        [{"op": "layer_norm", "axis": ["width"], "weight": "w"}, over("max", "spatial"), "gelu"],
    ),
    "pools": ({"x": (2, 3, 7, 8, 23)}, [pool("avg", 2, 1, 3), pool("max", 1, 3, 2)]),
    "windows": ({"x": (2, 2, 1, 5, 150)}, [pool("avg", 1, 5, 75), pool("max", 1, 1, 2)]),
    "pointwise": (
        {"x": (2, 3, 4, 5, 17), "t": (4, 1, 17), "c": (1, 3, 1, 1, 1)},
        [{"op": "add", "value": "t"}, "silu", {"op": "scale", "by": "c"}, {"op": "subtract", "value": "x"}],
    ),
}


def agrees(place: Place, operator: Operator, kind: str = "signed") -> None:
    _, comparison = place.check(operator, tensors_of(operator, kind))
    assert comparison.passed, comparison.reason


def emulate(monkeypatch: pytest.MonkeyPatch, limits: Limits) -> None:
    """Make every device claim ``limits``."""
    monkeypatch.setattr(executable, "limits_of", lambda runtime: limits)


# ---- results -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", PIPELINES)
@each_limits
@everywhere
def test_steps_within_limits(place: Place, limits: Limits, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch, limits)
    agrees(place, operator_of(*PIPELINES[name]))


@pytest.mark.parametrize("name", ["long_rows", "columns"])
@everywhere
def test_without_local_memory_a_work_item_works_alone(place: Place, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch, ALONE)
    agrees(place, operator_of(*PIPELINES[name]))


@pytest.mark.parametrize("dtype", ["float64", "float16"])
@pytest.mark.parametrize("name", PIPELINES)
@everywhere
def test_other_dtypes(place: Place, name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch, LARGE)
    agrees(place, operator_of(*PIPELINES[name], dtype))


@pytest.mark.parametrize("kind", ["large_mean", "constant", "one_nan", "one_inf", "denormal"])
@pytest.mark.parametrize("name", ["long_rows", "columns", "gaps", "pools"])
@everywhere
def test_awkward_numbers(place: Place, name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch, LARGE)
    agrees(place, operator_of(*PIPELINES[name]), kind)


@pytest.mark.parametrize("value", [-math.inf, math.inf, math.nan])
@pytest.mark.parametrize("op", ["softmax", "max", "log_sum_exp", "mean"])
@everywhere
def test_rows_of_nothing_finite(place: Place, op: str, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN and infinities stand where the reference has them."""
    emulate(monkeypatch, LARGE)
    operator = operator_of({"x": (2, 3, 4, 5, 6)}, [over(op, "spatial")])
    x = tensors_of(operator)["x"]
    x[0, 1] = value
    with np.errstate(invalid="ignore"):
        expected = Place("numpy").run(operator.problem, x=x)
    np.testing.assert_allclose(place.run(operator.problem, x=x), expected, rtol=1e-5, atol=1e-6)


@everywhere
def test_sums_of_a_million_small_integers_are_exact(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch, LARGE)
    operator = operator_of({"x": (2, 1, 16, 256, 256)}, [over("sum", "spatial")])
    x = (np.arange(math.prod(operator.steps[0].input_shape)) % 3 - 1).astype(np.float32)
    x = x.reshape(operator.steps[0].input_shape)
    result = place.run(operator.problem, x=x)
    np.testing.assert_array_equal(result.ravel(), x.sum(axis=(1, 2, 3, 4), dtype=np.float64))


# ---- indices -----------------------------------------------------------------------------------------------
def evaluate(source: str, macro: str, places: dict[str, np.ndarray]) -> np.ndarray:
    """The values of a macro of the source text for all ``places``."""
    (line,) = [line for line in source.splitlines() if line.startswith(f"#define {macro} ")]
    text = line.removeprefix(f"#define {macro} ").replace(" / ", " // ")
    value = eval(re.sub(r"(\d)ul?", r"\1", text), {}, places)
    return np.broadcast_to(value, np.broadcast_shapes(*(place.shape for place in places.values())))


@thorough(100)
@given(pipelines())
def test_every_element_belongs_to_one_result(recipe: Any) -> None:
    """PLACE and OFFSET reach each element once, CHANNEL is its channel, and results lie in order."""
    for step in recipe.bind().steps:
        if not isinstance(step, grouped.Shared) or math.prod(step.input_shape) > 60_000:
            continue
        source, _ = grouped.lower_grouped(step, [], "float", LARGE)
        axes = axes_of(step)
        terms = math.prod(axis.extent for axis in axes if axis.reduced)
        channels = np.broadcast_to(np.arange(step.input_shape[1])[:, None, None, None], step.input_shape)
        seen = np.zeros(math.prod(step.input_shape), int)
        places: dict[str, np.ndarray] = {"result": np.arange(source.count)[:, None], "i": np.arange(terms)[None, :]}
        element = evaluate(source.text, "PLACE(result)", places) + evaluate(source.text, "OFFSET(i)", places)
        np.add.at(seen, element, 1)
        channel = evaluate(source.text, "CHANNEL(result, i)", places)
        np.testing.assert_array_equal(channel, channels.ravel()[element])
        if isinstance(step, grouped.Pool):
            extents = zip(step.input_shape[2:], step.window, strict=True)
            used = [slice(n // size * size) for n, size in extents]
            whole = np.zeros(step.input_shape, int)
            whole[:, :, used[0], used[1], used[2]] = 1
            np.testing.assert_array_equal(seen, whole.ravel())
        else:
            assert (seen == 1).all()


def test_neighbouring_axes_are_joined() -> None:
    axes = [Axis(4, 60, True), Axis(1, 7, True), Axis(5, 12, True), Axis(3, 2, True), Axis(2, 1, True)]
    assert joined(axes) == [Axis(20, 12, True), Axis(6, 1, True)]
    assert joined([Axis(1, 1, False)]) == []


# ---- groups ------------------------------------------------------------------------------------------------
@thorough(300)
@given(
    results=st.integers(1, 1 << 22),
    terms=st.integers(1, 1 << 22),
    contiguous=st.booleans(),
    itemsize=st.sampled_from((4, 8)),
    limits=st.builds(Limits, st.integers(1, 2048), st.integers(64, 1 << 17), st.integers(1, 128), st.integers(1, 200)),
)
def test_groups_keep_the_limits(results: int, terms: int, contiguous: bool, itemsize: int, limits: Limits) -> None:
    group = grouping(results, terms, terms if contiguous else 1, limits, itemsize)
    assert 1 <= group.work_items <= limits.work_items
    assert group.slices == 1 or group.work_items * itemsize <= limits.local_memory
    for part in (group.lanes, group.slices):
        assert part & (part - 1) == 0
    assert group.lanes < 2 * results and group.slices < 2 * terms


@pytest.mark.parametrize(
    ("results", "terms", "run", "expected"),
    [
        (64, 1 << 16, 1 << 16, Grouping(1, 1024, True)),  # softmax over space: fewer rows than units
        (4096, 1 << 12, 1 << 12, Grouping(1, 256, True)),
        (1 << 20, 64, 64, Grouping(8, 32, True)),  # a warp for a short row
        (1 << 20, 3, 3, Grouping(256, 1, False)),  # rows far shorter than a warp
        (1 << 20, 64, 1, Grouping(256, 1, False)),  # layer norm over channels of many voxels
        (1 << 10, 512, 1, Grouping(32, 8, False)),  # of few voxels
        (8, 1 << 16, 1, Grouping(8, 128, False)),
        (1, 3, 3, Grouping(1, 1, False)),
    ],
)
def test_groups_of_a_large_gpu(results: int, terms: int, run: int, expected: Grouping) -> None:
    limits = Limits(work_items=1024, local_memory=48 << 10, multiple=32, compute_units=132)
    assert grouping(results, terms, run, limits, 4) == expected


class Refusing:
    """Stands for a runtime whose compiler lets work-groups of ``most`` work-items run."""

    def __init__(self, most: int, local_bytes: int) -> None:
        self.most, self.local_bytes, self.device, self.raw = most, local_bytes, self, self

    def kernel(self, text: str, name: str) -> Any:
        return self

    def copy(self) -> Refusing:
        return self

    def set_arg(self, *_: Any) -> None:
        pass

    def get_work_group_info(self, name: int, device: Any) -> int:
        import pyopencl as cl

        return self.most if name == cl.kernel_work_group_info.WORK_GROUP_SIZE else self.local_bytes


@pytest.mark.parametrize(
    ("most", "local_bytes", "expected"),
    [(1024, 4096, 256), (100, 4096, 64), (1, 4096, 1), (1024, LARGE.local_memory + 1, 1)],
)
def test_a_kernel_that_needs_too_much_gets_smaller_groups(
    most: int, local_bytes: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator = operator_of({"x": (64, 64, 8, 8, 8)}, [over("softmax", "spatial")])
    target = Target(cast(Any, SimpleNamespace(cpu=False, lanes=lambda real: 1)), LARGE, "")
    (task,) = tasks_of(operator, target, Options("tiled"), [])
    launch = launches.build(cast(Any, Refusing(most, local_bytes)), task)
    assert launch is not None and launch.lowered.local == expected


@everywhere
def test_a_plan_shows_how_rows_are_shared_out(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.need()
    emulate(monkeypatch, LARGE)
    operator = operator_of(*PIPELINES["long_rows"])
    device = next(device for device in BACKEND.probe() if device.id == place.device)
    first = BACKEND.compile(operator, device, place.options).launches[0]
    assert first.name == "softmax_group"
    assert first.detail["results_per_group"] == 1
    assert cast(int, first.detail["work_items_per_result"]) >= 256
