"""Where tests run, and random operators to run there.

Operators are drawn small: one that would take too long has its extents cut down, in a fixed order, until its
convolutions stay under :data:`MOST_PRODUCTS` products and their results under :data:`MOST_ELEMENTS` elements.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

import dispatcher
from dispatcher.call.compiled import PreparedCall
from dispatcher.check.comparison import Comparison, poisoned
from dispatcher.check.inputs import random_tensors
from dispatcher.check.verifying import checksums, compare_run, compile_for
from dispatcher.ops.steps import axis_names
from dispatcher.ops.vocabulary import VOCABULARY
from dispatcher.problem.model import Problem
from dispatcher.problem.operator import Operator, bind
from dispatcher.problem.schema import problem_from_mapping
from dispatcher.registry import BACKENDS

MOST_PRODUCTS = 400_000
MOST_ELEMENTS = 60_000
#: A factor on the number of random examples and seeds.
EXAMPLES = float(os.environ.get("DISPATCHER_TEST_EXAMPLES", "1"))
CHANNELS = (1, 2, 3, 4, 5, 7, 8, 16, 33, 257)
AXES = ("batch", "channel", "depth", "height", "width")

#: Backends whose absence is a failure and not a reason to skip, as for the fixture ``backend_device``.
REQUIRED = {name for name in os.environ.get("DISPATCHER_TEST_REQUIRE", "").lower().split(",") if name}


# ---- checked runs ------------------------------------------------------------------------------------------
def call_on(
    operator: Operator, tensors: Mapping[str, Any], device: str, options: Mapping[str, Any] | None = None
) -> PreparedCall:
    """Prepare a call of ``operator`` with ``tensors``, compiled for a device."""
    return compile_for(operator, device, options).prepare_bound(operator, tensors)


def checked_run(call: PreparedCall, tensors: Mapping[str, np.ndarray]) -> tuple[np.ndarray, Comparison]:
    """Run a call into a poisoned array and compare the result with the reference; a changed input is a failure."""
    before = checksums(tensors)
    result = call(output=poisoned(call.operator.output_shape, call.operator.dtype))
    return result, compare_run(call.operator, tensors, before, result)


# ---- where to run ------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Place:
    """A device and a way of computing there.

    Attributes:
        device: its id.
        algorithm: the value of the backend's option of that name; None where the backend has no choice.
        missing: why the device is not usable; empty when it is.
        slow: True when a kernel takes seconds to compile.
        main: True for the first algorithm of the device.
        brisk: False when that is so for every algorithm of the device.
        precision: of float32 operators.
    """

    device: str
    algorithm: str | None = None
    missing: str = ""
    slow: bool = False
    main: bool = True
    brisk: bool = True
    precision: str = "fp32"

    @property
    def backend(self) -> str:
        return self.device.partition(":")[0]

    @property
    def options(self) -> dict[str, Any]:
        return {} if self.algorithm is None else {"algorithm": self.algorithm}

    def __str__(self) -> str:
        parts = [self.device, self.algorithm, None if self.precision == "fp32" else self.precision]
        return "-".join(part for part in parts if part is not None)

    def need(self) -> None:
        """Skip the test where the device is missing, or fail it where its backend is required."""
        if self.missing:
            (pytest.fail if self.backend in REQUIRED else pytest.skip)(f"{self.backend}: {self.missing}")

    def compile(self, problem: Any, **arguments: Any) -> dispatcher.CompiledOperator:
        """:func:`dispatcher.compile` for this place."""
        self.need()
        arguments.setdefault("precision", self.precision)
        return dispatcher.compile(problem, device=self.device, options=self.options, **arguments)

    def run(self, problem: Any, **arguments: Any) -> np.ndarray:
        """:func:`dispatcher.run` at this place."""
        self.need()
        arguments.setdefault("precision", self.precision)
        result: np.ndarray = dispatcher.run(problem, device=self.device, options=self.options, **arguments)
        return result

    def check(self, operator: Operator, tensors: Mapping[str, np.ndarray]) -> tuple[np.ndarray, Comparison]:
        """Run into a poisoned output and compare with the reference; inputs must stay as they are."""
        self.need()
        if operator.dtype == "float32":
            operator = replace(operator, precision=self.precision)
        return checked_run(call_on(operator, tensors, self.device, self.options), tensors)


def algorithms(backend: str) -> tuple[str | None, ...]:
    """The algorithms of a backend that a user can name, without ``auto``, which means one of the others."""
    try:
        module = importlib.import_module(f"{BACKENDS[backend]}.backend")
    except ImportError:
        return (None,)
    return tuple(name for name in getattr(module, "ALGORITHMS", ()) if name != "auto") or (None,)


def ways(device: dispatcher.Device) -> list[tuple[str | None, str]]:
    """Algorithms and precisions to test on a device, its usual one first. The general CUDA kernel is the same on every
    GPU, so it runs on the first one."""
    first, *others = ((algorithm, "fp32") for algorithm in algorithms(device.backend))
    if device.backend != "cuda":
        return [first, *others]
    return [first, (first[0], "tf32"), *(others if device.index == 0 else [])]


def all_places() -> list[Place]:
    """Every device with each of its algorithms; a device that is not usable is one entry that skips."""
    result: list[Place] = []
    for device in dispatcher.devices():
        if not device.available:
            result.append(Place(device.id, missing=device.reason or "it is not available"))
            continue
        slow = device.backend == "cuda" or "intel" in device.name.lower()
        for number, (algorithm, precision) in enumerate(ways(device)):
            # Work-groups with barriers take a CPU's compiler long.
            slow_too, main = slow or algorithm == "tiled", number == 0
            result.append(Place(device.id, algorithm, "", slow_too, main, not slow, precision))
    return result


PLACES = all_places()
#: One place for each device, with the algorithm that the backend chooses.
DEVICES = [Place(place.device, None, place.missing, place.slow) for place in PLACES if place.main]
#: For tests of many kernels: where a device compiles slowly, only the algorithm that the backend chooses.
BRISK = [place for place in PLACES if place.brisk] + [place for place in DEVICES if place.slow]

every_place = pytest.mark.parametrize("place", PLACES, ids=str)
every_device = pytest.mark.parametrize("place", DEVICES, ids=str)
every_brisk_place = pytest.mark.parametrize("place", BRISK, ids=str)


def thorough(examples: int) -> settings:
    """Settings for so many examples, times :data:`EXAMPLES`, the same ones in every run, however long each takes."""
    return settings(
        max_examples=max(1, round(EXAMPLES * examples)),
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


# ---- problems out of shapes --------------------------------------------------------------------------------
#: A matrix product over channels with every kind of parameter: two factors, one for each channel and one for all.
SCALED_PRODUCT: dict[str, Any] = {
    "name": "scaled-product",
    "title": "Product over channels, scaled",
    "parameters": [
        {"name": "input", "type": "tensor", "const": True, "shape": ["n", "ic", "d", "h", "w"]},
        {"name": "weights", "type": "tensor", "const": True, "shape": ["ic", "oc", 1, 1, 1]},
        {"name": "scale", "type": "tensor", "const": True, "shape": [1, "oc", 1, 1, 1]},
        {"name": "output", "type": "tensor", "const": False},
        *({"name": name, "type": "size_t"} for name in ("n", "ic", "oc", "d", "h", "w")),
        {"name": "factor", "type": "double"},
    ],
    "pipeline": [
        {"op": "conv_transpose3d", "weight": "weights"},
        {"op": "scale", "by": "scale"},
        {"op": "scale", "by": "factor"},
    ],
    "cases": {"sample": {"n": 2, "ic": 5, "oc": 7, "d": 2, "h": 3, "w": 5, "factor": -1.25}},
}


def problem_of(shapes: Mapping[str, Sequence[int]], pipeline: Sequence[Any]) -> Problem:
    """A problem whose tensors have these shapes, the first one being the pipeline's input.

    An extent of zero becomes the size parameter ``zero``, since a file may not write it.
    """
    parameters: list[dict[str, Any]] = [
        {"name": name, "type": "tensor", "const": True, "shape": [extent or "zero" for extent in shape]}
        for name, shape in shapes.items()
    ]
    parameters.append({"name": "output", "type": "tensor", "const": False})
    if any(0 in shape for shape in shapes.values()):
        parameters.append({"name": "zero", "type": "size_t", "default": 0})
    return problem_from_mapping({"name": "test", "parameters": parameters, "pipeline": list(pipeline)})


def operator_of(shapes: Mapping[str, Sequence[int]], pipeline: Sequence[Any], dtype: str = "float32") -> Operator:
    """:func:`problem_of`, bound."""
    problem = problem_of(shapes, pipeline)
    return bind(problem, dict.fromkeys((size.name for size in problem.sizes), 0), {}, dtype=dtype)


@dataclass(frozen=True)
class Recipe:
    """The arguments of :func:`operator_of`; shows itself as the call that makes the operator."""

    shapes: Mapping[str, Sequence[int]]
    pipeline: Sequence[Any]
    dtype: str = "float32"

    def __repr__(self) -> str:
        return f"operator_of({dict(self.shapes)!r}, {list(self.pipeline)!r}, {self.dtype!r})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What Hypothesis shows of a failing example."""
        printer.text(repr(self))

    def bind(self) -> Operator:
        """The operator itself."""
        return operator_of(self.shapes, self.pipeline, self.dtype)


def conv_operator(
    shape: Sequence[int],
    out_channels: int,
    kernel: Sequence[int],
    *,
    bias: bool = False,
    before: Sequence[Any] = (),
    after: Sequence[Any] = (),
    dtype: str = "float32",
    extra: Mapping[str, Sequence[int]] | None = None,
    op: str = "conv_transpose3d",
    **options: Any,
) -> Operator:
    """A pipeline around one convolution of an input ``x`` with weights ``w`` and perhaps a bias ``b``.

    Args:
        shape: of the input.
        out_channels: of the convolution.
        kernel: extents of the kernel.
        before: steps before the convolution, which keep the channels.
        after: steps behind it.
        extra: shapes of the tensors that those steps read.
        op: ``conv_transpose3d`` or ``conv3d``.
        **options: fields of the convolution.
    """
    groups = options.get("groups", 1)
    weight = (out_channels, shape[1] // groups) if op == "conv3d" else (shape[1], out_channels // groups)
    shapes = {"x": tuple(shape), "w": (*weight, *kernel), **(extra or {})}
    step = {"op": op, "weight": "w", **options}
    if bias:
        shapes["b"], step["bias"] = (out_channels,), "b"
    return operator_of(shapes, [*before, step, *after], dtype)


# ---- random geometries -------------------------------------------------------------------------------------
@dataclass
class Axis:
    """One axis of a convolution that is being drawn."""

    extent: int
    kernel: int
    stride: int
    dilation: int
    output_padding: int
    padding: int
    ordinary: bool = False  # of an ordinary convolution, which has ``output_padding`` more zeros behind than before

    def output(self) -> int:
        window = self.dilation * (self.kernel - 1)
        if self.ordinary:
            return (self.extent + 2 * self.padding + self.output_padding - window - 1) // self.stride + 1
        return (self.extent - 1) * self.stride + window + self.output_padding + 1 - 2 * self.padding

    def make_legal(self) -> None:
        """Lower the padding until something is left of the output; raise it for that, of an ordinary convolution."""
        if self.ordinary:
            window = self.dilation * (self.kernel - 1) + 1
            self.padding = max(self.padding, (window - self.extent - self.output_padding + 1) // 2)
        elif self.output() < 1:
            self.padding -= (2 - self.output()) // 2


@st.composite
def axes(draw: st.DrawFn, most: int, extent: int | None = None) -> Axis:
    """An axis of at most ``most`` inputs, or of exactly ``extent``."""
    stride = draw(st.integers(1, 3))
    dilation = draw(st.integers(1, 3))
    axis = Axis(
        extent or draw(st.integers(1, most)),
        draw(st.integers(1, 5)),
        stride,
        dilation,
        draw(st.integers(0, max(stride, dilation) - 1)),
        draw(st.integers(0, 6)),
    )
    axis.make_legal()
    return axis


@st.composite
def channel_counts(draw: st.DrawFn, in_channels: int | None = None) -> tuple[int, int, int]:
    """Groups, input channels and output channels; those of the input may be given."""
    if in_channels is None:
        groups = draw(st.sampled_from((1, 1, 1, 2, 3, 5)))
        in_channels = groups * draw(st.sampled_from(CHANNELS if groups == 1 else (1, 2, 3, 4)))
    else:
        groups = draw(st.sampled_from([g for g in (1, 2, 3, 5) if in_channels % g == 0]))
    return groups, in_channels, groups * draw(st.sampled_from(CHANNELS if groups == 1 else (1, 2, 3, 9)))


@dataclass
class Conv:
    """A convolution that is being drawn, with its input's shape."""

    batch: int
    groups: int
    in_channels: int
    out_channels: int
    axes: list[Axis]
    ordinary: bool = False

    def __post_init__(self) -> None:
        for axis in self.axes:
            axis.ordinary = self.ordinary
            axis.make_legal()

    def shrink(self, *, keep_input: bool = False) -> None:
        """Cut down what is drawn until it is cheap; ``keep_input`` leaves the input's shape alone."""
        while True:
            inputs = self.batch * self.in_channels * math.prod(axis.extent for axis in self.axes)
            outputs = self.batch * self.out_channels * math.prod(axis.output() for axis in self.axes)
            kernel = math.prod(axis.kernel for axis in self.axes)
            products = inputs * self.out_channels // self.groups * kernel
            if products <= MOST_PRODUCTS and outputs <= MOST_ELEMENTS:
                return
            longest = max(self.axes, key=lambda axis: axis.extent)
            widest = max(self.axes, key=lambda axis: axis.kernel)
            if not keep_input and self.batch > 1:
                self.batch = 1
            elif not keep_input and longest.extent > 4:
                longest.extent = longest.extent * 2 // 3
            elif self.out_channels > 33 >= self.groups:
                self.out_channels = 33 // self.groups * self.groups
            elif not keep_input and self.in_channels > 33 and self.groups == 1:
                self.in_channels = 33
            elif widest.kernel > 1:
                widest.kernel -= 1
            elif self.out_channels > self.groups:
                self.out_channels = self.groups
            elif not keep_input and longest.extent > 1:
                longest.extent -= 1
            else:
                self.axes = [Axis(axis.extent, 1, 1, 1, 0, 0, self.ordinary) for axis in self.axes]
                return
            for axis in self.axes:
                axis.make_legal()

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (self.batch, self.in_channels, *(axis.extent for axis in self.axes))

    @property
    def output_shape(self) -> tuple[int, ...]:
        return (self.batch, self.out_channels, *(axis.output() for axis in self.axes))

    @property
    def weight_shape(self) -> tuple[int, ...]:
        channels = (self.in_channels, self.out_channels // self.groups)
        if self.ordinary:
            channels = (self.out_channels, self.in_channels // self.groups)
        return (*channels, *(axis.kernel for axis in self.axes))

    def step(self, weight: str, bias: str | None) -> dict[str, Any]:
        """The pipeline's step."""
        names = ("stride", "padding", "output_padding", "dilation")
        fields: dict[str, Any] = {name: [getattr(axis, name) for axis in self.axes] for name in names}
        if self.ordinary:
            more = fields.pop("output_padding")
            fields["padding"] = [[axis.padding, axis.padding + n] for axis, n in zip(self.axes, more, strict=True)]
        return {
            "op": "conv3d" if self.ordinary else "conv_transpose3d",
            "weight": weight,
            **({} if bias is None else {"bias": bias}),
            **fields,
            "groups": self.groups,
        }


#: An axis that a problem does not have.
HIDDEN = Axis(1, 1, 1, 1, 0, 0)
#: Spatial axes of drawn problems.
RANKS = st.sampled_from((3, 3, 2, 2, 1))


@st.composite
def convs(draw: st.DrawFn, batches: Sequence[int] = (1, 2, 3), rank: int = 3) -> Conv:
    """A convolution over a drawn input: wide rows, flat planes or cubes; with ones on the axes that ``rank`` lacks."""
    groups, in_channels, out_channels = draw(channel_counts())
    most = draw(st.sampled_from([(4, 4, 70), (3, 9, 20), (6, 6, 6), (1, 1, 70), (20, 2, 3)]))
    conv = Conv(
        draw(st.sampled_from(batches)),
        groups,
        in_channels,
        out_channels,
        [replace(HIDDEN)] * (3 - rank) + [draw(axes(extent)) for extent in most[3 - rank :]],
        draw(st.booleans()),
    )
    conv.shrink()
    return conv


def _of_rank(recipe: Recipe, rank: int) -> Recipe:
    """A recipe whose first ``3 - rank`` spatial axes are hidden, without these."""

    def shown(parts: Sequence[Any]) -> list[Any]:
        """Extents, or what a field has for each spatial axis, without the hidden ones."""
        return [*parts[: max(0, len(parts) - 3)], *parts[max(0, len(parts) - rank) :]]

    def field(key: str, value: Any) -> Any:
        if key == "op" and value[-2:] == "3d":
            return f"{value[:-2]}{rank}d"
        if key == "axis":
            return ["length" if name == "width" and rank == 1 else name for name in value]
        return shown(value) if isinstance(value, list) else value

    shapes = {name: shown(shape) for name, shape in recipe.shapes.items()}
    # An operand may have hidden axes alone.
    shapes = {name: shape or [1] for name, shape in shapes.items()}
    steps = [{key: field(key, value) for key, value in step.items()} for step in recipe.pipeline]
    return Recipe(shapes, steps, recipe.dtype)


DTYPES = st.sampled_from(("float32", "float32", "float32", "float64", "float16"))


@st.composite
def convolutions(draw: st.DrawFn, dtypes: st.SearchStrategy[str] = DTYPES) -> Recipe:
    """One convolution and nothing else."""
    rank = draw(RANKS)
    conv = draw(convs((1, 2, 3, 1, 2, 3, 1, 2, 3, 0), rank))
    shapes: dict[str, Sequence[int]] = {"x": conv.input_shape, "w": conv.weight_shape}
    bias = "b" if draw(st.booleans()) else None
    if bias:
        shapes["b"] = (conv.out_channels,)
    return _of_rank(Recipe(shapes, [conv.step("w", bias)], draw(dtypes)), rank)


# ---- random pipelines --------------------------------------------------------------------------------------
POINTWISE_SIMPLE = (
    *(
        "gelu",
        "gelu_tanh",
        "relu",
        "sigmoid",
        "tanh",
        "silu",
        "softplus",
        "hardswish",
        "mish",
        "elu",
        "selu",
        "softsign",
    ),
    *("abs", "square", "hardtanh"),
)
WITH_OPERAND = ("add", "subtract", "scale", "maximum", "minimum", "greater", "greater_equal", "where")
POINTWISE = (*POINTWISE_SIMPLE, "leaky_relu", "clamp", *WITH_OPERAND)
POOLS = ("avg_pool3d", "max_pool3d")
NORMS = ("group_norm", "instance_norm", "batch_norm")
OVER_AXES = ("layer_norm", "rms_norm", "softmax", "log_softmax", "sum", "mean", "max", "min", "log_sum_exp")
#: What makes NaN or overflows on numbers of any size and sign: tests of their own draw numbers that fit.
SENSITIVE = ("divide", "exp", "log", "sqrt", "reciprocal", "product")
PLAIN = {"conv_transpose3d", "conv3d", "squeeze", *POINTWISE, *POOLS, *NORMS, *OVER_AXES, *SENSITIVE}
assert {op for op, operation in VOCABULARY.items() if operation.rank in (None, 3)} == {
    *PLAIN,
    "conv",
    "conv_transpose",
    "avg_pool",
    "max_pool",
    *(f"adaptive_{kind}_pool{rank}" for kind in ("avg", "max") for rank in ("", "3d")),
}

NUMBERS = st.sampled_from((-1.75, -0.5, -0.0, 0.25, 1.0, 1.5, 2.0))


def broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    """True when ``shape`` stretches to ``to``."""
    return all(extent in (1, wanted) for extent, wanted in zip(shape, to, strict=True))


@dataclass
class Pipeline:
    """A pipeline that is being drawn.

    Attributes:
        shape: of the latest value.
        shapes: of every tensor.
        steps: so far.
        results: named results and the input, with their shapes.
        convolutions: how many there are.
        rank: spatial axes that are not hidden.
    """

    shape: tuple[int, ...]
    shapes: dict[str, tuple[int, ...]]
    steps: list[dict[str, Any]] = field(default_factory=list)
    results: dict[str, tuple[int, ...]] = field(default_factory=dict)
    convolutions: int = 0
    rank: int = 3

    def tensor(self, shape: Sequence[int]) -> str:
        """Declare a tensor of ``shape``."""
        name = f"t{len(self.shapes)}"
        self.shapes[name] = tuple(shape)
        return name

    def add(self, step: dict[str, Any], shape: Sequence[int], name: bool) -> None:
        """Append ``step``; ``name`` its result, so that a later step may read it."""
        self.shape = tuple(shape)
        if name:
            step["as"] = f"v{len(self.steps)}"
            self.results[step["as"]] = self.shape
        self.steps.append(step)


def _operand(draw: st.DrawFn, pipeline: Pipeline) -> Any:
    """A number, a tensor of any shape that broadcasts, or an earlier value."""
    earlier = [name for name, shape in pipeline.results.items() if broadcasts(shape, pipeline.shape)]
    kind = draw(st.sampled_from(("number", "channel", "any", "earlier", "earlier")))
    if kind == "earlier" and earlier:
        return draw(st.sampled_from(earlier))
    if kind == "number":
        return draw(NUMBERS)
    if kind == "channel":
        return pipeline.tensor((1, pipeline.shape[1], 1, 1, 1))
    shape = [extent if draw(st.booleans()) else 1 for extent in pipeline.shape]
    while len(shape) > 1 and shape[0] == 1 and draw(st.booleans()):
        del shape[0]
    return pipeline.tensor(shape)


def _affine(draw: st.DrawFn, pipeline: Pipeline) -> dict[str, Any]:
    """Weight and bias of a norm, or one of them, or neither."""
    channels = pipeline.shape[1]
    forms = [(channels,), (1, channels, 1, 1, 1), (channels, 1, 1, 1)]
    return {name: pipeline.tensor(draw(st.sampled_from(forms))) for name in ("weight", "bias") if draw(st.booleans())}


def _general_windows(draw: st.DrawFn, step: dict[str, Any], extents: Sequence[int]) -> list[int]:
    """Give a pool stride, padding and more; returns how many windows there are on each axis."""
    window = step["window"]
    step["stride"] = [draw(st.integers(1, 3)) for _ in window]
    step["padding"] = [[draw(st.integers(0, size // 2)), draw(st.integers(0, size // 2))] for size in window]
    step["ceil_mode"] = draw(st.booleans())
    reach = list(window)
    if step["op"] == "avg_pool3d":
        step["count_include_pad"] = draw(st.booleans())
        if draw(st.integers(0, 3)) == 0:
            step["divisor"] = draw(st.integers(1, 9))
    else:
        spread = [draw(st.integers(1, 3)) if 2 * (size - 1) < n else 1 for size, n in zip(window, extents, strict=True)]
        step["dilation"] = [min(3 if size == 1 else (n - 1) // (size - 1), each) for size, n, each in
                            zip(window, extents, spread, strict=True)]  # fmt: skip
        reach = [each * (size - 1) + 1 for size, each in zip(window, step["dilation"], strict=True)]
    counts = []
    for n, size, stride, (before, after) in zip(extents, reach, step["stride"], step["padding"], strict=True):
        left = n + before + after - size
        more = step["ceil_mode"] and left % stride != 0 and (left // stride + 1) * stride < n + before
        counts.append(left // stride + 1 + more)
    return counts


def _add_step(draw: st.DrawFn, pipeline: Pipeline, op: str) -> None:
    shape, step = pipeline.shape, {"op": op}
    name = draw(st.integers(0, 2)) == 0
    if op in ("conv3d", "conv_transpose3d"):
        groups, in_channels, out_channels = draw(channel_counts(shape[1]))
        drawn = [replace(HIDDEN)] * (3 - pipeline.rank) + [draw(axes(0, n)) for n in shape[5 - pipeline.rank :]]
        conv = Conv(shape[0], groups, in_channels, out_channels, drawn, op == "conv3d")
        conv.shrink(keep_input=True)
        bias = pipeline.tensor((conv.out_channels,)) if draw(st.booleans()) else None
        step = conv.step(pipeline.tensor(conv.weight_shape), bias)
        shape = conv.output_shape
        pipeline.convolutions += 1
    elif op in WITH_OPERAND:
        key = "by" if op == "scale" else "value"
        latest = list(pipeline.results)[-1] if pipeline.results else None
        # A residual the other way round: read an earlier value, and combine it with the latest one.
        wider = [n for n, s in pipeline.results.items() if n != latest and broadcasts(shape, s)]
        if wider and pipeline.steps and pipeline.steps[-1].get("as") == latest and draw(st.booleans()):
            source = draw(st.sampled_from(wider))
            step |= {"from": source, key: latest}
            shape = pipeline.results[source]
        else:
            step[key] = _operand(draw, pipeline)
        if op == "where":
            step["other"] = _operand(draw, pipeline) if shape == pipeline.shape else draw(NUMBERS)
    elif op == "clamp":
        low, high = (draw(st.sampled_from((-0.75, -0.1, -math.inf))), draw(st.sampled_from((0.6, 0.2, math.inf))))
        step |= {"min": low, "max": high}
    elif op == "leaky_relu":
        step["slope"] = draw(NUMBERS)
    elif op in POOLS:
        window = [draw(st.integers(1, min(extent, 4))) for extent in shape[2:]]
        kind = draw(st.sampled_from(("plain", "plain", "general", "general", "adaptive")))
        if kind == "adaptive":
            pooled = [draw(st.integers(1, 5)) if axis >= 3 - pipeline.rank else 1 for axis in range(3)]
            step |= {"op": f"adaptive_{op}", "size": pooled}
        else:
            step["window"] = window
            pooled = [n // size for n, size in zip(shape[2:], window, strict=True)]
            if kind == "general":
                pooled = _general_windows(draw, step, shape[2:])
        shape = (*shape[:2], *pooled)
    elif op in NORMS:
        step |= {"eps": 1e-3, **_affine(draw, pipeline)}
        if op == "group_norm":
            divisors = [g for g in (1, 2, 3, 5, 8, 11, shape[1]) if shape[1] % g == 0]
            step["groups"] = draw(st.sampled_from(divisors))
    elif op in OVER_AXES:
        lacking = range(2, 5 - pipeline.rank)
        subset = sorted(draw(st.sets(st.integers(0, 4).filter(lambda axis: axis not in lacking), min_size=1)))
        step["axis"] = [AXES[axis] for axis in subset]
        if op == "layer_norm":
            step |= {"eps": 1e-3, **_affine(draw, pipeline)}
        elif op not in ("softmax", "log_softmax", "rms_norm"):
            shape = tuple(1 if axis in subset else extent for axis, extent in enumerate(shape))
    pipeline.add(step, shape, name)


_OPS = st.sampled_from((*POINTWISE, "add", "scale", *POOLS, *POOLS, *OVER_AXES, "layer_norm", "softmax", "sum", *NORMS))


@st.composite
def pipelines(draw: st.DrawFn, dtypes: st.SearchStrategy[str] = DTYPES) -> Recipe:
    """A pipeline over the whole vocabulary, with one or two convolutions and steps around them, of any rank; a
    reduction at its end may drop axes."""
    rank = draw(RANKS)
    conv = draw(convs(rank=rank))
    pipeline = Pipeline(conv.input_shape, {"x": conv.input_shape}, rank=rank)
    pipeline.results["x"] = conv.input_shape
    before = [draw(_OPS) for _ in range(draw(st.sampled_from((0, 0, 1, 2))))]
    behind = [draw(_OPS) for _ in range(draw(st.integers(0, 5)))]
    kinds = st.sampled_from(("conv_transpose3d", "conv3d"))
    ops = [*before, draw(kinds), *behind]
    if draw(st.integers(0, 3)) == 0:
        ops.insert(draw(st.integers(0, len(ops))), draw(kinds))
    for op in ops:
        _add_step(draw, pipeline, op)
    if pipeline.steps[-1]["op"] in ("sum", "mean", "max", "min", "log_sum_exp"):
        pipeline.steps[-1]["keepdim"] = draw(st.booleans())
    return _of_rank(Recipe(pipeline.shapes, pipeline.steps, draw(dtypes)), rank)


def in_dtype(op: Operator, dtype: str) -> Operator:
    """The same operator on another element type."""
    return Recipe(op.tensor_shapes, _pipeline(op), dtype).bind()


def _pipeline(op: Operator) -> list[dict[str, Any]]:
    """The pipeline of an operator, as a problem file has it."""

    def plain(key: str, value: Any) -> Any:
        if key == "axis":
            return [
                name
                for name, numbers in axis_names(op.problem.rank).items()
                if numbers[0] in value and name != "spatial"
            ]
        if isinstance(value, tuple):
            return [plain("", part) for part in value]
        return value.evaluate({}) if hasattr(value, "evaluate") else value

    return [
        {"op": spec.op, **{key: plain(key, value) for key, value in spec.fields.items()}}
        for spec in op.problem.pipeline
    ]


def tensors_of(operator: Operator, kind: str = "signed") -> dict[str, np.ndarray]:
    """Random inputs for ``operator``, always the same."""
    return random_tensors(operator, 0, kind=kind)
