"""Arrays of more than 2^32 elements, and launches of more blocks than a grid holds.

An array is written and read near its end only, and of each launch only the blocks run that work there; so a case takes
little memory and time on the simulator. What they store is compared with the same operator on a short input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dispatcher
from dispatcher.backends.cuda import BACKEND, driver
from dispatcher.backends.cuda.driver import DeviceArray
from dispatcher.backends.cuda.tasks import MAX_HALO_EXTENT
from dispatcher.backends.numpy_ref import BACKEND as REFERENCE
from dispatcher.device import machine as host
from dispatcher.errors import KernelError
from dispatcher.problem.operator import Operator
from tests.cuda_support import Foreign, compiled, device, machine, plant, simulator_only
from tests.strategies import conv_operator, operator_of, tensors_of

pytestmark = simulator_only

POOL = {"op": "max_pool3d", "window": 2}
SUM = {"op": "sum", "axis": "channel"}
NORM = {"op": "instance_norm"}
SPACE = ["depth", "height", "width"]
SOFTMAX = [{"op": "clamp", "min": -10, "max": 10}, {"op": "softmax", "axis": SPACE}]
#: A grid whose threads take several items in turn has 32 blocks of 256 threads for each multiprocessor: 2^28 threads.
PROCESSORS = 1 << 15
#: More than 2^32 items, the same number for each of those threads, so that the last blocks have the last items.
MANY = 17 << 28
#: Makes a finite number of every dtype: sums that are not finite are made again, so that NaN would not show.
POISON = 0x4F


@dataclass(frozen=True)
class Case:
    """An operator on arrays that are long along one axis.

    Attributes:
        make: the operator for an extent along that axis.
        extent: the long one.
        axis: 0, the batch; 2, depth, in the last batch item; 4, width, in the last line.
        kernels: its launches.
        short: an extent whose last results are the same.
        keep: how many of them, along the axis.
        blocks: those that make them.
        inputs: kind of input.
        tolerance: relative.
        infinite: put an infinity among the inputs.
        strided: x is not contiguous.
        misplaced: bytes by which x is off its alignment.
        options: of the backend.
    """

    make: Callable[[int], Operator]
    extent: int
    axis: int
    kernels: tuple[str, ...]
    short: int = 12
    keep: int = 4
    blocks: tuple[int, int | None] = (-16, None)
    inputs: str = "integers"
    tolerance: float = 0.0
    infinite: bool = False
    strided: bool = False
    misplaced: int = 0
    options: tuple[tuple[str, str], ...] = ()


def deep(
    plane: tuple[int, int],
    channels: int,
    out: int,
    kernel: str,
    extent: int = 2**30 + 1,
    infinite: bool = False,
    **more: Any,
) -> Case:
    """A convolution of two batch items with a very long depth, by ``kernel``."""

    def make(depth: int) -> Operator:
        return conv_operator((2, channels, depth, *plane), out, (3, 3, 3), padding=1, **more)

    options = (("algorithm", kernel.removeprefix("conv_")),)
    return Case(make, extent, 2, (kernel,), infinite=infinite, options=options)


def plain(shape: tuple[int, ...], step: Any, dtype: str = "float32", **tensors: Any) -> Callable[[int], Operator]:
    """Steps without a convolution; an extent of -1 is the long one."""
    steps = step if isinstance(step, list) else [step]

    def make(extent: int) -> Operator:
        shapes = {"x": shape, **tensors}
        long = {name: [extent if n < 0 else n for n in part] for name, part in shapes.items()}
        return operator_of(long, steps, dtype)

    return make


FOLDED = {"stride": 2, "output_padding": 1, "extent": 2**29 + 2}
CASES: dict[str, Case] = {
    "halo pairs": deep(
        (4, 4), 2, 2, "conv_halo", stride=[1, 1, 2], output_padding=[0, 0, 1], bias=True
    ),
    "halo single": deep((4, 3), 2, 3, "conv_halo"),
    "halo infinity": deep((4, 1), 2, 2, "conv_halo", infinite=True),
    "halo sum": deep((4, 4), 1, 3, "conv_halo", after=[SUM]),
    "halo fold": deep((8, 4), 1, 2, "conv_halo", after=[POOL], **FOLDED),
    "halo two pools": deep((32, 4), 1, 2, "conv_halo", after=[POOL, POOL], **FOLDED),
    "halo two pools, sum": deep((32, 4), 1, 2, "conv_halo", after=[POOL, POOL, SUM], **FOLDED),
    "halo softmax": Case(
        lambda n: conv_operator((n, 8, 1, 1, 8), 64, (1, 1, 1), after=SOFTMAX),
        2**26 + 3, 0, ("conv_halo", "conv_halo"), inputs="signed", tolerance=1e-5,
    ),
    "fma": deep((4, 1), 4, 4, "conv_fma", groups=2, stride=[1, 1, 2], bias=True),
    "fma float16": deep((4, 1), 1, 2, "conv_fma", dtype="float16"),
    "fma float64": deep((4, 1), 2, 1, "conv_fma", dtype="float64"),
    "fma infinity": deep((4, 1), 2, 2, "conv_fma", infinite=True),
    "fma sum": deep((4, 1), 1, 3, "conv_fma", after=[SUM]),
    "fma fold": deep((8, 4), 1, 2, "conv_fma", after=[POOL], **FOLDED),
    "fma tiles": Case(
        lambda s: conv_operator(
            (1, 1, 1, 1, 1), 1, (2, 2, 2), bias=True, stride=s, dilation=s - 1
        ),
        2**11, 4, ("conv_fma",), short=2, keep=1, blocks=(0, 4),
    ),
    "halo gathered": Case(
        lambda n: conv_operator((n, 8, 1, 1, 16), 4, (1, 1, 1), after=[NORM]),
        2**26 + 3, 0, ("conv_halo", "gathered"), inputs="signed", tolerance=1e-4,
    ),
    "fma gathered": Case(
        lambda n: conv_operator((n, 2, 1, 1, 64), 4, (1, 1, 1), after=[NORM]),
        2**24 + 3, 0, ("conv_fma", "gathered"), inputs="signed", tolerance=1e-4, options=(("algorithm", "fma"),),
    ),
    "pool pairs": Case(plain((-1, 2, 16, 2, 2), POOL), MANY // 16, 0, ("pool",)),
    "pool window": Case(
        plain((-1, 1, 5, 5, 5), {"op": "avg_pool3d", "window": 5}, "float16"), 2**28, 0, ("pool",), tolerance=1e-3,
    ),
    "elementwise": Case(
        plain(
            (-1, 2, 1, 2, 2), [{"op": "add", "value": "t"}, {"op": "scale", "by": "c"}], "float16",
            t=(-1, 2, 1, 2, 2), c=(1, 2, 1, 1, 1),
        ),
        MANY // 8, 0, ("elementwise",),
    ),
    "copy with strides": Case(
        plain((-1, 2, 1, 2, 2), {"op": "relu"}), MANY // 8, 0, ("elementwise",), strided=True
    ),
    "copy for alignment": Case(
        plain((-1, 2, 1, 2, 2), {"op": "relu"}), MANY // 8, 0, ("elementwise",), misplaced=4
    ),
    "rows by block": Case(
        plain((-1, 3, 2, 4, 8), {"op": "softmax", "axis": SPACE}), 2**25 + 3, 0, ("rows_by_block",),
        inputs="signed", tolerance=1e-5,
    ),
    "rows by block, norm": Case(
        plain((-1, 3, 2, 4, 8), {"op": "layer_norm", "axis": SPACE, "eps": 1e-3, "weight": "w"}, w=(3,)),
        2**25 + 3, 0, ("rows_by_block",), inputs="signed", tolerance=1e-5,
    ),
    "rows by block, more than a grid": Case(
        plain((-1, 4, 1, 1, 2), {"op": "max", "axis": SPACE}), 2**29 + 1, 0, ("rows_by_block",),
        keep=1, blocks=(0, 8),
    ),
    "rows by thread": Case(
        plain((2, 2, -1, 8, 8), {"op": "softmax", "axis": "channel"}), MANY // 64, 2, ("rows_by_thread",),
        inputs="signed", tolerance=1e-5,
    ),
    "rows by thread, norm": Case(
        plain((2, 2, -1, 8, 8), {"op": "layer_norm", "eps": 1e-3, "weight": "w"}, w=(2,)), MANY // 64, 2,
        ("rows_by_thread",), inputs="signed", tolerance=1e-5,
    ),
    "rows by thread, sum": Case(plain((2, 2, -1, 8, 8), SUM), MANY // 64, 2, ("rows_by_thread",)),
    "between launches": Case(
        lambda n: conv_operator(
            (2, 1, n, 4, 8), 1, (3, 3, 3), padding=1, before=[{"op": "max_pool3d", "window": [1, 1, 2]}]
        ),
        MANY // 16, 2, ("pool", "conv_halo"), options=(("prologue", "separate"),),
    ),
    "halo softmax of what is kept": Case(
        lambda n: conv_operator(
            (n, 8, 1, 1, 16), 64, (1, 1, 1), before=[{"op": "max_pool3d", "window": [1, 1, 2]}], after=SOFTMAX
        ),
        2**26 + 3, 0, ("conv_halo", "conv_halo"), inputs="signed", tolerance=1e-5,
    ),
}  # fmt: skip


class Sparse(Foreign):
    """An array on the device of which only the tail is written, see :func:`lines`."""

    def __init__(self, case: Case, shape: tuple[int, ...], tail: np.ndarray, moved: bool) -> None:
        stored, strides = shape, None
        if case.strided and moved:  # a channel more, which is not part of the array
            stored = (shape[0], shape[1] + 1, *shape[2:])
            tail = np.pad(tail, [(0, 0), (0, 1), (0, 0), (0, 0), (0, 0)])
            strides = tuple(tail.itemsize * math.prod(stored[axis + 1 :]) for axis in range(5))
        size, offset = math.prod(stored) * tail.itemsize, case.misplaced if moved else 0
        super().__init__(0, shape, tail.dtype, strides, size, offset)
        with self.context.active():
            for at, values in lines(case, stored, tail):
                self.context.driver.memcpy_htod(self.address + at * tail.itemsize, np.ascontiguousarray(values))


def lines(case: Case, shape: tuple[int, ...], tail: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Where the last slices along the case's axis lie in an array of ``shape``, and their part of ``tail``."""
    outer, inner = math.prod(shape[: case.axis]), math.prod(shape[case.axis + 1 :])
    count = shape[1] if case.axis == 2 else 1
    found = tail.reshape(-1, tail.shape[case.axis], inner)[-count:]
    for line, values in zip(range(outer - count, outer), found, strict=True):
        yield ((line + 1) * shape[case.axis] - values.shape[0]) * inner, values


def on_the_backend(case: Case, op: Operator, tensors: Mapping[str, Any]) -> DeviceArray:
    """Run ``op``, which must have the case's launches."""
    run = compiled(op, **dict(case.options))
    assert tuple(launch.name for launch in run.launches) == case.kernels
    result: DeviceArray = run(tensors)
    return result


def by_the_public_call(case: Case, op: Operator, tensors: Mapping[str, Any]) -> DeviceArray:
    """Run ``op`` as a user does."""
    result: DeviceArray = dispatcher.run(op.problem, device="cuda:0", options=dict(case.options), **tensors)
    return result


def check(case: Case, run: Callable[..., DeviceArray] = on_the_backend) -> None:
    """Run the long operator and compare its last results with those of the short one."""
    long, short = case.make(case.extent), case.make(case.short)
    tensors: dict[str, Any] = tensors_of(short, case.inputs)
    if case.infinite:
        tensors["x"][-1, -1, -1] = np.inf
    wanted = REFERENCE.compile(short, REFERENCE.probe()[0], {})(tensors)
    wanted = wanted[(slice(None),) * case.axis + (slice(-case.keep, None),)]
    settings = {"memory_mb": 1 << 28, "poison": POISON, "processors": PROCESSORS, "blocks": slice(*case.blocks)}
    with machine(devices=1, arch="8.0", **settings), ExitStack() as stack:
        for name, tensor in tensors.items():
            shape = long.tensor_shapes[name]
            if shape != tensor.shape or name == "x":
                tensors[name] = Sparse(case, shape, tensor, name == "x")
                stack.callback(tensors[name].free)
        result: DeviceArray | None = run(case, long, tensors)
        assert result is not None
        address = result.__cuda_array_interface__["data"][0]
        context = driver.context(0)
        with context.active():
            found = []
            for at, values in lines(case, long.output_shape, wanted):
                found.append(np.empty_like(values))
                context.driver.memcpy_dtoh(found[-1], address + at * values.itemsize)
        result = None  # its memory is not to outlive the machine
        for here, (_, values) in zip(found, lines(case, long.output_shape, wanted), strict=True):
            np.testing.assert_allclose(here, values, rtol=case.tolerance)


@pytest.mark.parametrize("name", CASES)
def test_last_results(name: str) -> None:
    case = CASES[name]
    check(case)
    long = case.make(case.extent)
    assert max(math.prod(shape) for shape in (*long.tensor_shapes.values(), long.output_shape)) > 2**32


def test_a_result_on_the_device_takes_no_memory_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "available_bytes", lambda: 0)
    monkeypatch.setenv("DISPATCHER_SELF_TEST", "off")
    check(CASES["fma"], by_the_public_call)


# ---- faults ------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Fault:
    """An offset that is cut to 32 bits: ``old`` becomes ``new``, its first occurrence, in ``file``."""

    case: str
    file: str
    old: str
    new: str


def every_offset(case: str) -> Fault:
    """All offsets of a convolution kernel but those in its parameters; where it counts tiles, it would never end."""
    name = CASES[case].kernels[-1]
    parameters = {"conv_halo": "CHECK_PARAMS(HaloParams);", "conv_fma": "CHECK_PARAMS(ConvParams);"}[name]
    return Fault(case, f"{name}.cu", parameters, parameters + "\n#define index_t unsigned")


HALO_PLANE = "index_t plane = index_t(p.in[0]) * p.in[1] * p.in[2];"
FMA_PLANE = "index_t plane = index_t(p.out[0]) * p.out[1] * p.out[2];"
LONGEST = ("static_cast<index_t>(rest) * stride[0]", "static_cast<unsigned>(rest) * unsigned(stride[0])")
FAULTS: dict[str, Fault] = {
    **{
        case: every_offset(case)
        for case in ("halo pairs", "halo single", "halo infinity", "fma float16", "fma infinity", "fma fold")
    },
    "halo: plane of x": Fault(
        "halo single", "conv_halo.cu", HALO_PLANE, "unsigned plane = unsigned(p.in[0]) * p.in[1] * p.in[2];"
    ),
    "halo: line of x": Fault(
        "halo pairs", "conv_halo.cu", "(index_t(iz) * p.in[1] + iy)", "(unsigned(iz) * p.in[1] + iy)"
    ),
    **{
        f"{case}: line of y": Fault(case, "conv_halo.cu", "(index_t(at[0]) *", "(unsigned(at[0]) *")
        for case in ("halo sum", "halo fold", "halo two pools", "halo two pools, sum")
    },
    "halo: exact sums": Fault("halo infinity", "conv_halo.cu", "+ (((batch * ALL", "+ unsigned(((batch * ALL"),
    "halo: sums of exponentials": Fault(
        "halo softmax", "conv_halo.cu", "p.partial[(box.number *", "p.partial[(unsigned(box.number) *"
    ),
    "halo: factors": Fault(
        "halo softmax", "conv_halo.cu", "box.batch * boxes * pitch", "unsigned(box.batch * boxes * pitch)"
    ),
    "halo: windows": Fault(
        "halo softmax of what is kept", "conv_halo.cu", "+ (((batch * ALL", "+ unsigned(((batch * ALL"
    ),
    "halo: kept inputs": Fault(
        "halo softmax of what is kept", "conv_halo.cu", "p.kept + (((box.batch", "p.kept + (((unsigned(box.batch)"
    ),
    "halo: value before it": Fault(
        "between launches", "conv_halo.cu", HALO_PLANE, "unsigned plane = unsigned(p.in[0]) * p.in[1] * p.in[2];"
    ),
    "fma: x": Fault("fma", "conv_fma.cu", "index_t input;", "unsigned input;"),
    "fma: number of a voxel": Fault("fma sum", "conv_fma.cu", "index_t m0 =", "unsigned m0 ="),
    "fma: plane of y": Fault(
        "fma float64", "conv_fma.cu", FMA_PLANE, "unsigned plane = unsigned(p.out[0]) * p.out[1] * p.out[2];"
    ),
    "fma: number of a tile": Fault("fma tiles", "conv_fma.cu", "index_t rest = tile;", "unsigned rest = tile;"),
    "gathered: elements": Fault(
        "halo gathered", "gathered.cu", "const index_t at = ((set.n", "const unsigned at = ((set.n"
    ),
    "fma gathered: y": Fault(
        "fma gathered", "conv_fma.cu", "y[(first + c) * plane]", "y[unsigned((first + c) * plane)]"
    ),
    "pool: number of a plane": Fault("pool pairs", "pool.cu", "index_t plane =", "unsigned plane ="),
    "pool: offset in x": Fault("pool window", "pool.cu", "((plane * p.in[0]", "(unsigned(plane * p.in[0]"),
    "pool: index": Fault("pool pairs", "pool.cu", "run<unsigned long long>", "run<unsigned>"),
    "pool: y": Fault("pool pairs", "pool.cu", "p.y[i]", "p.y[unsigned(i)]"),
    "elementwise: y": Fault("elementwise", "elementwise.cu", "p.y[i]", "p.y[unsigned(i)]"),
    "elementwise: operands": Fault("elementwise", "chain.cuh", "[at.linear()]", "[unsigned(at.linear())]"),
    "elementwise: index": Fault("copy with strides", "chain.cuh", "decoded<unsigned long long>", "decoded<unsigned>"),
    "elementwise: strides": Fault("copy with strides", "chain.cuh", *LONGEST),
    "elementwise: copy": Fault("copy for alignment", "chain.cuh", *LONGEST),
    "rows: offset of a row": Fault("rows by block", "rows.cu", "return i *", "return unsigned(i) * unsigned"),
    "rows: place of an item": Fault("rows by block, norm", "rows.cu", "const index_t at =", "const unsigned at ="),
    "rows: number of a row": Fault(
        "rows by block, more than a grid", "rows.cu", "for (index_t row = blockIdx.x;", "for (int row = blockIdx.x;"
    ),
    "rows: y": Fault("rows by thread, sum", "rows.cu", "p.y[at] =", "p.y[unsigned(at)] ="),
    "rows: offset in softmax": Fault("rows by thread", "rows.cu", "index_t result = 0;", "unsigned result = 0;"),
    "rows: offset in norm": Fault("rows by thread, norm", "rows.cu", "index_t result = 0;", "unsigned result = 0;"),
    "rows: offset in sum": Fault("rows by thread, sum", "rows.cu", "index_t result = 0;", "unsigned result = 0;"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_an_offset_of_32_bits_is_noticed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS[name]
    plant(monkeypatch, tmp_path / "kernels", fault.file, (fault.old, fault.new))
    with pytest.raises((AssertionError, KernelError)):
        check(CASES[fault.case])


def test_every_case_notices_a_fault() -> None:
    assert {fault.case for fault in FAULTS.values()} == set(CASES)


# ---- limits ------------------------------------------------------------------------------------------------
def test_the_longest_axes() -> None:
    """A box of conv_halo.cu would end beyond 2^31; the general kernel has no boxes."""

    def depth(extent: int) -> Operator:  # the result is 2^31 - 4 long
        return conv_operator((2, 1, extent, 1, 8), 1, (1, 1, 1), stride=[3, 1, 1])

    def width(extent: int) -> Operator:
        return conv_operator((1, 1, 1, 1, extent), 1, (1, 1, 3), padding=[0, 0, 1])

    check(Case(depth, 715827882, 2, ("conv_fma",)))
    check(Case(width, 2**31 - 1, 4, ("conv_fma",), short=400))
    check(Case(width, MAX_HALO_EXTENT, 4, ("conv_halo",), short=400))


def test_more_boxes_than_a_grid_holds_take_the_general_kernel() -> None:
    with machine(devices=1, arch="8.0"):
        op = conv_operator((2**30, 1, 1, 1, 8), 256, (1, 1, 1))
        assert [launch.name for launch in compiled(op).launches] == ["conv_fma"]


@pytest.mark.parametrize(
    ("op", "reason"),
    [
        (conv_operator((1, 2**31, 1, 1, 1), 1, (1, 1, 1)), "an extent of 2147483648 is more than"),
        (conv_operator((1, 1, 1, 1, 2**30), 1, (1, 1, 2), stride=2), "an extent of 2147483648 is more than"),
        (conv_operator((1, 2**15, 1, 1, 1), 2**16, (1, 1, 1)), "2147483648 weights are more than"),
        (
            conv_operator((1, 1, 1, 1, 4), 1, (1, 1, 2), dilation=2**33, padding=[0, 0, 2**32]),
            "shift the input by 4294967296 voxels",
        ),
    ],
    ids=["input", "output", "weights", "taps"],
)
def test_what_the_kernels_cannot_count_is_refused(op: Operator, reason: str) -> None:
    assert reason in str(BACKEND.supports(op, device()))
