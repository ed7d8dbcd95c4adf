"""Backends that are wrong in one way each. ``dispatcher verify`` has to reject every one of them.

A mutant is an honest implementation with one fault in it: in a step, in the result, or in how an executable
treats its arrays. Each says on which problems and sets of inputs its fault must be found; ``test_mutants.py``
checks that with many seeds, and that docs/verification.md has the same table, which
``python -m tests.mutants`` prints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dispatcher.backends.numpy_ref import steps as reference_steps
from dispatcher.interface import Device, Tensors, Timings
from dispatcher.ops.steps import Convolution, Normalize, Pointwise, Pool, Reduce, Softmax
from dispatcher.ops.vocabulary import MAXIMUM, MEAN
from dispatcher.problem.operator import Operator
from tests.fakes import CONV, LAYERNORM, MAXMAX, SOFTMAX, SUM, Behaviour, FakeBackend, FakeExecutable
from tests.honest import StepFunction, compute, conv_transpose3d, pointwise, replaced

Array = np.ndarray


@dataclass(frozen=True)
class Target:
    """Where a fault must be found.

    Attributes:
        problem: name of a bundled problem.
        inputs: sets of inputs, each of which finds it alone.
        case: gives the sizes.
        arguments: further arguments of the command.
    """

    problem: str
    inputs: tuple[str, ...] = ("signed",)
    case: str = "sample"
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Mutant:
    """A wrong backend.

    Attributes:
        fault: what is wrong, in a few words.
        targets: where it must be found.
        behaviour: computes the wrong result of a call.
        executable: the class of its executables.
    """

    fault: str
    targets: tuple[Target, ...]
    behaviour: Behaviour = compute
    executable: type[FakeExecutable] = field(default=FakeExecutable)

    def backend(self) -> MutantBackend:
        """A backend with this fault, named ``mutant``."""
        return MutantBackend(self)


class MutantBackend(FakeBackend):
    """A backend with one device and the fault of a mutant."""

    def __init__(self, mutant: Mutant) -> None:
        super().__init__("mutant", mutant.behaviour)
        self.executable = mutant.executable

    def compile(self, operator: Operator, device: Device, options: Mapping[str, Any]) -> FakeExecutable:
        """An executable with the fault."""
        return self.executable(self, operator)


CENTRED = "conv-2d"
DEPTHWISE = "conv-depthwise-2d-square-input-sq-kernel"
PADDED_POOL = "conv-transpose3d-maxpool-softmax-subtract-swish-max"
MIN_SUM = "conv-transpose2d-min-sum-gelu-add"

ALL = tuple(Target(problem) for problem in (CONV, SOFTMAX, LAYERNORM, MAXMAX, SUM))
PAIR = (Target(CONV), Target(SUM))
NORMS = (Target(LAYERNORM), Target(SUM))


def on(problem: str, *inputs: str, case: str = "sample", arguments: tuple[str, ...] = ()) -> Target:
    """A target with certain sets of inputs."""
    return Target(problem, inputs or ("signed",), case, arguments)


# ---- how arrays are treated --------------------------------------------------------------------------------
class _Stateful(FakeExecutable):
    """Remembers the results of earlier calls."""

    def __init__(self, backend: FakeBackend, operator: Operator) -> None:
        super().__init__(backend, operator)
        self.results: list[Array] = []

    def __call__(self, tensors: Tensors, output: Any = None, timings: Timings | None = None) -> Any:
        result = self.answer(compute(self.operator, tensors))
        if output is None:
            return result
        output[...] = result
        return output

    def answer(self, result: Array) -> Array:
        """What to give out where ``result`` would be right."""
        raise NotImplementedError


class PreviousResult(_Stateful):
    """Gives the result of the call before; the first one is right."""

    def answer(self, result: Array) -> Array:
        self.results.append(result)
        return self.results[max(0, len(self.results) - 2)].copy()


class FirstResult(_Stateful):
    """Keeps the first result for ever."""

    def answer(self, result: Array) -> Array:
        self.results.append(result)
        return self.results[0].copy()


class WearsOut(_Stateful):
    """Is right once, and one per cent off from then on."""

    def answer(self, result: Array) -> Array:
        self.results.append(result)
        return result if len(self.results) == 1 else result * np.float32(1.01)


class StaleTail(_Stateful):
    """Writes the last elements once and never again."""

    def answer(self, result: Array) -> Array:
        self.results.append(result.copy())
        result.reshape(-1)[-3:] = self.results[0].reshape(-1)[-3:]
        return result


class OneBuffer(_Stateful):
    """Gives out the same array in every call that has none."""

    def answer(self, result: Array) -> Array:
        self.results = self.results or [result.copy()]
        self.results[0][...] = result
        return self.results[0]


class UnwrittenTail(FakeExecutable):
    """Leaves the last elements of the output as they were."""

    def __call__(self, tensors: Tensors, output: Any = None, timings: Timings | None = None) -> Any:
        result = compute(self.operator, tensors)
        if output is None:
            return result
        output.reshape(-1)[:-3] = result.reshape(-1)[:-3]
        return output


class UnwrittenOutput(FakeExecutable):
    """Forgets the output it is given."""

    def __call__(self, tensors: Tensors, output: Any = None, timings: Timings | None = None) -> Any:
        return compute(self.operator, tensors) if output is None else output


class WritesToInput(FakeExecutable):
    """Uses the end of its input for scratch, once the result is there."""

    def __call__(self, tensors: Tensors, output: Any = None, timings: Timings | None = None) -> Any:
        result = super().__call__(tensors, output, timings)
        owner = tensors[self.operator.source].base
        owner.flags.writeable = True
        owner.reshape(-1)[-1] += 1
        return result


# ---- faults in the result ----------------------------------------------------------------------------------
def spoiled(spoil: Callable[[Array], Array]) -> Behaviour:
    """The honest result, spoiled."""

    def behaviour(operator: Operator, tensors: Tensors) -> Array:
        return np.ascontiguousarray(spoil(compute(operator, tensors)).astype(operator.dtype))

    return behaviour


def swapped(axis: int) -> Callable[[Array], Array]:
    """The first two places along ``axis`` change."""

    def swap(y: Array) -> Array:
        order = np.arange(y.shape[axis])
        order[[0, 1]] = order[[1, 0]]
        return np.take(y, order, axis)

    return swap


def transposed(y: Array) -> Array:
    """Height and width are written in each other's order."""
    return y.swapaxes(3, 4).reshape(y.shape)


def swapped_phases(y: Array) -> Array:
    """The two phases of stride 2 along the width change places."""
    wrong, pairs = y.copy(), y.shape[4] // 2
    wrong[..., 0 : 2 * pairs : 2], wrong[..., 1 : 2 * pairs : 2] = (
        y[..., 1 : 2 * pairs : 2],
        y[..., 0 : 2 * pairs : 2],
    )
    return wrong


def one_element(y: Array) -> Array:
    """One element is a tenth of a per cent of the largest off."""
    wrong = y.copy()
    wrong.reshape(-1)[y.size // 3] += np.abs(y).max() * np.float32(1e-3)
    return wrong


def last_plane_zero(y: Array) -> Array:
    """The plane that the output padding adds is left at zero."""
    wrong = y.copy()
    wrong[:, :, -1] = 0
    return wrong


def interleaved_groups(y: Array) -> Array:
    """Channels go by their number within the group first."""
    n, c = y.shape[:2]
    return y.reshape(n, 2, c // 2, -1).swapaxes(1, 2).reshape(y.shape)


def spread_nan(y: Array) -> Array:
    """A NaN spoils its neighbour in a tile of two."""
    pairs = y.shape[4] // 2
    tiles = y[..., : 2 * pairs].reshape(*y.shape[:4], pairs, 2)
    odd = np.isnan(tiles).any(axis=-1, keepdims=True)
    wrong = y.copy()
    wrong[..., : 2 * pairs] = np.where(odd, np.float32(np.nan), tiles).reshape(*y.shape[:4], 2 * pairs)
    return wrong


# ---- faults in a step --------------------------------------------------------------------------------------
def stepwise(**functions: StepFunction) -> Behaviour:
    """The honest pipeline with some steps replaced, by the name of their class."""
    table = replaced(**functions)
    return lambda operator, tensors: compute(operator, tensors, table)


def conv_of(change: Callable[[Array, Array], tuple[Array, Array]]) -> Behaviour:
    """A convolution whose input and weight are changed."""
    return stepwise(Convolution=lambda step, x, w, *bias: conv_transpose3d(step, *change(x, w), *bias))


def kept_bits(x: Array, bits: int) -> Array:
    """float32 rounded to ``bits`` explicit bits of the mantissa, to nearest even."""
    drop = 23 - bits
    whole = np.ascontiguousarray(x, np.float32).view(np.uint32)
    half = np.uint32((1 << (drop - 1)) - 1) + ((whole >> np.uint32(drop)) & np.uint32(1))
    rounded: Array = ((whole + half) & np.uint32(0xFFFFFFFF << drop & 0xFFFFFFFF)).view(np.float32)
    return np.where(np.isfinite(x), rounded, x)


def tf32_conv(step: Convolution, x: Array, w: Array, *bias: Array) -> Array:
    """Both factors have 10 bits."""
    return conv_transpose3d(step, kept_bits(x, 10), kept_bits(w, 10), *bias)


def half_conv(step: Convolution, x: Array, w: Array, *bias: Array) -> Array:
    """Every product is exact and every sum is rounded to float16."""
    y: Array = np.zeros((), np.float16)
    for channel in range(x.shape[1]):
        one = np.zeros_like(x)
        one[:, channel] = x[:, channel]
        y = (y + conv_transpose3d(step, one, w)).astype(np.float16)
    return sum(bias, y.astype(np.float32))


def without_halo(step: Convolution, x: Array, w: Array, *bias: Array) -> Array:
    """Two blocks along the depth, each of which sees its own half of the input alone."""
    middle = x.shape[2] // 2
    low, high = x.copy(), x.copy()
    low[:, :, middle:] = 0
    high[:, :, :middle] = 0
    y, upper = conv_transpose3d(step, low, w, *bias), conv_transpose3d(step, high, w, *bias)
    border = middle * step.geometry.depth.stride - step.geometry.depth.padding
    y[:, :, border:] = upper[:, :, border:]
    return y


def without_last_channel(step: Convolution, x: Array, w: Array, *bias: Array) -> Array:
    """The last input channel of each group is left out."""
    in_group = step.geometry.in_channels // step.geometry.groups
    kept = w.copy()
    kept[in_group - 1 :: in_group] = 0
    return conv_transpose3d(step, x, kept, *bias)


def scaled_by_largest(step: Convolution, x: Array, w: Array, *bias: Array) -> Array:
    """The input is divided by its largest magnitude, which may be flushed to zero."""
    largest = np.abs(x).max()
    largest = largest if largest >= np.finfo(np.float32).tiny else np.float32(0)
    return conv_transpose3d(step, x / largest, w, *bias) * largest


def leaky(*, data_checked: bool = False, weights_checked: bool = False) -> Behaviour:
    """A transform whose tiles are two rows: rounding of the size of the larger one, unless a check of the tile's data
    for large elements, or of the weights for zero taps, leads past it."""

    def conv(step: Convolution, x: Array, w: Array, *bias: Array) -> Array:
        y = conv_transpose3d(step, x, w, *bias)
        if weights_checked and not np.abs(w).sum(axis=0).all():
            return y
        distance = step.geometry.height.stride
        leak = np.abs(np.roll(y, distance, 3)) * np.float32(2.0**-22)
        return y + np.where(leak > 1, 0, leak) if data_checked else y + leak

    return stepwise(Convolution=conv)


def fixed_point(x: Array, w: Array) -> tuple[Array, Array]:
    """The input has 24 bits below its largest magnitude."""
    unit = np.float32(2.0 ** (math.frexp(float(np.abs(x).max()))[1] - 23))
    return np.rint(x / unit) * unit, w


def moments(x: Array, axis: int = 1) -> tuple[Array, Array]:
    """Mean and centred values."""
    mean = x.mean(axis=axis, keepdims=True)
    return mean, x - mean


def norm_over_width(step: Normalize, x: Array) -> Array:
    """As ``nn.LayerNorm`` of PyTorch does with this layout."""
    _, centred = moments(x, 4)
    return centred / np.sqrt(np.square(centred).mean(axis=4, keepdims=True) + np.float32(step.eps))


def one_pass_norm(step: Normalize, x: Array) -> Array:
    """The variance as E[x^2] - E[x]^2 in float32."""
    mean, centred = moments(x)
    variance = np.square(x).mean(axis=1, keepdims=True) - np.square(mean)
    return centred / np.sqrt(variance + np.float32(step.eps))


def norm_with_eps(eps: float) -> StepFunction:
    """Another eps."""

    def norm(step: Normalize, x: Array) -> Array:
        _, centred = moments(x)
        return centred / np.sqrt(np.square(centred).mean(axis=1, keepdims=True) + np.float32(eps))

    return norm


def eps_outside_norm(step: Normalize, x: Array) -> Array:
    """eps is added to the deviation, not to the variance."""
    _, centred = moments(x)
    return centred / (np.sqrt(np.square(centred).mean(axis=1, keepdims=True)) + np.float32(step.eps))


def unbiased_norm(step: Normalize, x: Array) -> Array:
    """The variance is divided by one less."""
    _, centred = moments(x)
    variance = np.square(centred).sum(axis=1, keepdims=True) / np.float32(x.shape[1] - 1)
    return centred / np.sqrt(variance + np.float32(step.eps))


def norm_after_pool(operator: Operator, tensors: Tensors) -> Array:
    """The average pool comes before the layer norm."""
    norm = next(step for step in operator.steps if isinstance(step, Normalize))
    steps = replaced(
        Normalize=lambda step, x: x, Pool=lambda step, x: reference_steps.normalize(norm, reference_steps.pool(step, x))
    )
    return compute(operator, tensors, steps)


def pointwise_but(function: str, wrong: StepFunction) -> StepFunction:
    """The honest pointwise functions but for one."""
    return lambda step, x, *arguments: (
        wrong(step, x, *arguments) if step.function == function else pointwise(step, x, *arguments)
    )


def tanh_gelu(step: Pointwise, x: Array) -> Array:
    """The tanh approximation."""
    inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x**3)
    return np.float32(0.5) * x * (np.float32(1) + np.tanh(inner))


def sigmoid_gelu(step: Pointwise, x: Array) -> Array:
    """The sigmoid approximation."""
    return x / (np.float32(1) + np.exp(np.float32(-1.702) * x))


def without_gelu(step: Pointwise, x: Array) -> Array:
    """Nothing is done."""
    return x


def softmax_over(*axes: int) -> StepFunction:
    """Over other axes."""
    return lambda step, x: reference_steps.softmax(Softmax(step.op, 0, step.shape, step.shape, axes), x)


def plain_softmax(step: Softmax, x: Array) -> Array:
    """The maximum is not subtracted."""
    exponentials = np.exp(x)
    return exponentials / exponentials.sum(axis=step.axes, keepdims=True)


def softmax_without_tail(step: Softmax, x: Array) -> Array:
    """The exponentials of the voxels beyond a whole number of 16-voxel blocks are not summed."""
    exponentials = np.exp(x - x.max(axis=step.axes, keepdims=True))
    flat = exponentials.reshape(*x.shape[:2], -1)
    total = flat[..., : flat.shape[2] // 16 * 16].sum(axis=2)
    return exponentials / total[:, :, None, None, None]


def other_pool(step: Pool, x: Array) -> Array:
    """Maximum and mean are confused."""
    other = MEAN if step.form is MAXIMUM else MAXIMUM
    return reference_steps.pool(replace(step, form=other), x)


def pool_with_divisor(step: Pool, x: Array) -> Array:
    """The mean's divisor is one less."""
    count = math.prod(step.window)
    return reference_steps.pool(step, x) * np.float32(count / (count - 1))


def sum_before_pools() -> Behaviour:
    """The sum over channels comes before both pools."""
    return stepwise(
        Pool=lambda step, x: reference_steps.pool(step, x.sum(axis=1, keepdims=True)), Reduce=lambda step, x: x
    )


def truncated_sum(step: Reduce, x: Array) -> Array:
    """The last channel is left out."""
    return x[:, :-1].sum(axis=1, keepdims=True)


# ---- all of them -------------------------------------------------------------------------------------------
MUTANTS: dict[str, Mutant] = {
    # how arrays are treated
    "previous_result": Mutant("gives the result of the call before", ALL, executable=PreviousResult),
    "first_result": Mutant("keeps its first result for ever", (on(CONV), on(MAXMAX)), executable=FirstResult),
    "wears_out": Mutant("is right at the first call only", (on(CONV), on(SOFTMAX)), executable=WearsOut),
    "stale_tail": Mutant("the last elements are those of the first call", ALL, executable=StaleTail),
    "unwritten_tail": Mutant("the last elements are not written", PAIR, executable=UnwrittenTail),
    "unwritten_output": Mutant("the output is not written", (on(CONV), on(SUM)), executable=UnwrittenOutput),
    "one_buffer": Mutant("the output aliases that of the call before", (on(CONV), on(LAYERNORM)), executable=OneBuffer),
    "input_modified": Mutant("the input is used for scratch", (on(CONV), on(SUM)), executable=WritesToInput),
    # the result
    "zeros": Mutant("all zeros", ALL, spoiled(np.zeros_like)),
    "constant": Mutant("all equal to the mean", ALL, spoiled(lambda y: np.full_like(y, y.mean()))),
    "times_1.01": Mutant("one per cent too large", ALL, spoiled(lambda y: y * np.float32(1.01))),
    "times_1.000004": Mutant(
        "four parts in a million too large, which every single bound lets pass",
        (on(CONV, case="wide"),),
        spoiled(lambda y: y * np.float32(1.000004)),
    ),
    "one_element": Mutant("one element is off by 0.1 % of the largest", ALL, spoiled(one_element)),
    "half_result": Mutant("the result is rounded to float16", PAIR, spoiled(lambda y: y.astype(np.float16))),
    "single_for_double": Mutant(
        "float64 is computed in float32",
        tuple(on(t.problem, arguments=("--dtype", "float64")) for t in PAIR),
        lambda operator, tensors: compute(operator, tensors, working=np.float32),
    ),
    "swapped_items": Mutant("two batch items are swapped", PAIR, spoiled(swapped(0))),
    "swapped_channels": Mutant(
        "two channels are swapped", (on(CONV), on(SOFTMAX), on(LAYERNORM), on(SUM)), spoiled(swapped(1))
    ),
    "swapped_voxels": Mutant("two voxels are swapped in each row", ALL, spoiled(swapped(4))),
    "repeated_item": Mutant(
        "every batch item is the first one", PAIR, spoiled(lambda y: np.repeat(y[:1], len(y), axis=0))
    ),
    "shifted": Mutant("shifted by one voxel", PAIR, spoiled(lambda y: np.roll(y, 1, axis=4))),
    "transposed": Mutant("height and width are transposed", PAIR, spoiled(transposed)),
    "swapped_phases": Mutant(
        "the phases of stride 2 are swapped", (on(CONV), on(SOFTMAX), on(LAYERNORM)), spoiled(swapped_phases)
    ),
    "output_padding": Mutant(
        "the plane of the output padding is zero", (on(CONV), on(SOFTMAX)), spoiled(last_plane_zero)
    ),
    "interleaved_groups": Mutant("channels of groups are interleaved", (on(CONV),), spoiled(interleaved_groups)),
    "inf_to_nan": Mutant(
        "an infinity becomes NaN",
        (on(CONV, "one_inf"), on(MAXMAX, "one_inf")),
        spoiled(lambda y: np.where(np.isinf(y), np.float32(np.nan), y)),
    ),
    "inf_to_largest": Mutant(
        "an infinity becomes the largest number",
        (on(CONV, "one_inf"), on(MAXMAX, "one_inf")),
        spoiled(lambda y: np.clip(y, np.finfo(y.dtype).min, np.finfo(y.dtype).max)),
    ),
    "nan_to_zero": Mutant(
        "NaN becomes zero",
        tuple(on(t.problem, "one_nan") for t in ALL),
        spoiled(lambda y: np.where(np.isnan(y), np.float32(0), y)),
    ),
    "nan_spreads": Mutant("a NaN spoils its neighbour in a tile", (on(CONV, "one_nan"),), spoiled(spread_nan)),
    # the convolution
    "tf32": Mutant("TF32 passed off as fp32", ALL, stepwise(Convolution=tf32_conv)),
    "half_sums": Mutant("sums are kept in float16", PAIR, stepwise(Convolution=half_conv)),
    "bfloat16_weights": Mutant("weights are rounded to bfloat16", PAIR, conv_of(lambda x, w: (x, kept_bits(w, 7)))),
    "fixed_point": Mutant(
        "the input is rounded to a fixed point, 24 bits wide", (on(CONV, "graded"),), conv_of(fixed_point)
    ),
    "flipped_kernel": Mutant(
        "the kernel is flipped", PAIR, conv_of(lambda x, w: (x, np.ascontiguousarray(w[:, :, ::-1, ::-1, ::-1])))
    ),
    "missing_halo": Mutant("blocks do not see each other's input", ALL, stepwise(Convolution=without_halo)),
    "dropped_k_chunk": Mutant(
        "the last input channel is left out",
        (*ALL, on(CONV, "integers"), on(MAXMAX, "integers")),
        stepwise(Convolution=without_last_channel),
    ),
    "missing_bias": Mutant(
        "the bias is left out",
        (on(MAXMAX),),
        stepwise(Convolution=lambda step, x, w, *bias: conv_transpose3d(step, x, w)),
    ),
    "scaled_by_largest": Mutant(
        "the input is divided by its largest magnitude, flushed to zero",
        tuple(on(t.problem, "denormal") for t in PAIR),
        stepwise(Convolution=scaled_by_largest),
    ),
    "leaks": Mutant(
        "the rounding of a tile's larger outputs shows in the others", (on(CONV, "spikes", "gaps"),), leaky()
    ),
    "checks_weights_only": Mutant(
        "the same, unless a tap has no weights", (on(CONV, "spikes"),), leaky(weights_checked=True)
    ),
    "checks_data_only": Mutant(
        "the same, unless the tile has large elements", (on(CONV, "gaps"),), leaky(data_checked=True)
    ),
    # normalisation and activation
    "norm_over_width": Mutant("layer norm over the width", NORMS, stepwise(Normalize=norm_over_width)),
    "one_pass_variance": Mutant(
        "the variance is E[x^2] - E[x]^2 in float32",
        (on(LAYERNORM, "large_mean"), on(SUM, "large_mean")),
        stepwise(Normalize=one_pass_norm),
    ),
    "wrong_eps": Mutant(
        "eps is 1e-6, not 1e-5", (on(LAYERNORM, "small"), on(SUM, "small")), stepwise(Normalize=norm_with_eps(1e-6))
    ),
    "missing_eps": Mutant(
        "eps is left out",
        (on(LAYERNORM, "small", "constant"), on(SUM, "small", "constant")),
        stepwise(Normalize=norm_with_eps(0.0)),
    ),
    "eps_outside": Mutant(
        "eps is added to the deviation",
        (on(LAYERNORM, "small"), on(SUM, "small")),
        stepwise(Normalize=eps_outside_norm),
    ),
    "unbiased_variance": Mutant("the variance is unbiased", NORMS, stepwise(Normalize=unbiased_norm)),
    "tanh_gelu": Mutant("GELU by tanh", NORMS, stepwise(Pointwise=pointwise_but("gelu", tanh_gelu))),
    "sigmoid_gelu": Mutant("GELU by a sigmoid", NORMS, stepwise(Pointwise=pointwise_but("gelu", sigmoid_gelu))),
    "missing_gelu": Mutant("no GELU", NORMS, stepwise(Pointwise=pointwise_but("gelu", without_gelu))),
    "pool_before_norm": Mutant("the pool comes before the layer norm", (on(SUM),), norm_after_pool),
    "gelu_before_pool": Mutant(
        "GELU comes before the pool",
        (on(SUM),),
        stepwise(
            Pool=lambda step, x: reference_steps.pool(step, reference_steps.gelu(x)),
            Pointwise=pointwise_but("gelu", without_gelu),
        ),
    ),
    # pools and sums
    "other_pool": Mutant(
        "maximum and mean are confused", (on(SUM), on(SOFTMAX), on(MAXMAX)), stepwise(Pool=other_pool)
    ),
    "wrong_divisor": Mutant(
        "the mean of a pool has a wrong divisor", (on(SUM), on(SOFTMAX)), stepwise(Pool=pool_with_divisor)
    ),
    "max_from_zero": Mutant(
        "a maximum starts from zero",
        (on(MAXMAX, "negative"),),
        stepwise(Pool=lambda step, x: np.maximum(reference_steps.pool(step, x), 0)),
    ),
    "max_drops_nan": Mutant(
        "a maximum drops NaN",
        (on(MAXMAX, "one_nan"),),
        stepwise(Pool=lambda step, x: reference_steps.windows(step, x, np.fmax, -np.inf)),
    ),
    "sum_before_pools": Mutant("the sum comes before the pools", (on(MAXMAX),), sum_before_pools()),
    "truncated_sum": Mutant("the sum leaves out the last channel", (on(MAXMAX),), stepwise(Reduce=truncated_sum)),
    # clamp, softmax, scale
    "missing_clamp": Mutant(
        "no clamp", (on(SOFTMAX),), stepwise(Pointwise=pointwise_but("clamp", lambda step, x, low, high: x))
    ),
    "clamp_drops_nan": Mutant(
        "the clamp drops NaN",
        (on(SOFTMAX, "one_nan"),),
        stepwise(Pointwise=pointwise_but("clamp", lambda step, x, low, high: np.fmin(np.fmax(x, low), high))),
    ),
    "plain_softmax": Mutant(
        "the softmax does not subtract the maximum",
        (on(SOFTMAX, "large", case="no_pool"),),
        stepwise(Softmax=plain_softmax),
    ),
    "softmax_over_width": Mutant(
        "the softmax is over one axis only", (on(SOFTMAX),), stepwise(Softmax=softmax_over(4))
    ),
    "softmax_per_item": Mutant(
        "the softmax is over channels as well", (on(SOFTMAX),), stepwise(Softmax=softmax_over(1, 2, 3, 4))
    ),
    "softmax_over_channels": Mutant("the softmax is over channels", (on(SOFTMAX),), stepwise(Softmax=softmax_over(1))),
    "softmax_without_tail": Mutant(
        "the softmax's sum leaves out the tail of a block",
        (on(SOFTMAX, "signed", "constant", case="odd"),),
        stepwise(Softmax=softmax_without_tail),
    ),
    "wrong_scale": Mutant(
        "the factors are those of the next channel",
        (on(SOFTMAX),),
        stepwise(Pointwise=pointwise_but("scale", lambda step, x, scale: x * np.roll(scale, 1, axis=1))),
    ),
    "missing_scale": Mutant(
        "no factor", (on(SOFTMAX), on(LAYERNORM)), stepwise(Pointwise=pointwise_but("scale", lambda step, x, scale: x))
    ),
}

#: Faults of ordinary convolutions, of windows that reach beyond the input, and of reductions before an activation.
MUTANTS |= {
    "flipped_kernel": Mutant(
        "the kernel of an ordinary convolution is flipped",
        (on(CENTRED, case="odd"), on(DEPTHWISE, case="odd")),
        conv_of(lambda x, w: (x, w[..., ::-1, ::-1])),
    ),
    "turned_kernel": Mutant(
        "height and width of the kernel are swapped",
        (on(DEPTHWISE, case="sample"),),
        conv_of(lambda x, w: (x, w.swapaxes(3, 4))),
    ),
    "window_off_centre": Mutant(
        "a padded window begins one place too far to the right",
        (on(CENTRED, case="odd"), on(DEPTHWISE, case="odd")),
        conv_of(lambda x, w: (np.roll(x, -1, 4), w)),
    ),
    "padding_is_zero": Mutant(
        "a maximum takes in padding as zeros",
        (on(PADDED_POOL, "negative", case="odd"),),
        stepwise(Pool=lambda step, x: reference_steps.windows(step, x, np.maximum, 0.0)),
    ),
    "min_without_last_channel": Mutant(
        "a minimum over channels leaves out the last one",
        (on(MIN_SUM, "positive"),),
        stepwise(Reduce=lambda step, x: reference_steps.reduce(step, x[:, :-1] if step.function == "min" else x)),
    ),
}

#: What the table in the guide calls each problem.
LABELS = {
    CENTRED: "centred",
    DEPTHWISE: "depthwise",
    PADDED_POOL: "padded pool",
    MIN_SUM: "min and sum",
    **{CONV: "conv", SOFTMAX: "softmax", LAYERNORM: "layernorm", MAXMAX: "maxmax", SUM: "sum"},
}


def describe(target: Target) -> str:
    """``label case options: sets``, without what goes without saying."""
    words = (
        LABELS[target.problem],
        *((f"(case {target.case})",) if target.case != "sample" else ()),
        *target.arguments,
    )
    return f"{' '.join(words)}: {', '.join(target.inputs)}"


def table() -> str:
    """The table of mutants in Markdown."""
    lines = ["| mutant | what is wrong | found on |", "|---|---|---|"]
    for name, mutant in MUTANTS.items():
        found = "; ".join(map(describe, mutant.targets))
        lines.append(f"| `{name}` | {mutant.fault} | {found} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
