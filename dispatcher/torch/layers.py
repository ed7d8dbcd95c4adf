"""What the ATen operators of layers are among the steps of the vocabulary: norms, convolutions and pools.

Handlers are those of :mod:`dispatcher.torch.aten`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from dispatcher.torch.aten import (
    HANDLERS,
    along,
    array_of,
    axes_of,
    chain,
    combined,
    handles,
    number_of,
    reduced,
    unit_axes,
)
from dispatcher.torch.channels import some_channels
from dispatcher.torch.draft import RefusedError, example, extents, fixed, is_one
from dispatcher.torch.graph import Array, Constant, Graph, assign, equal, placed, whole

__all__ = ["HANDLERS"]  # with those of this module


# ---- norms -------------------------------------------------------------------------------------------------
def _affine(graph: Graph, x: Array, weight: Any, bias: Any, place: int | None = None) -> Array:
    """``x * weight + bias``; both with one value for each place of dimension ``place``, where one is given."""
    for op, constant in (("scale", weight), ("add", bias)):
        if constant is not None:
            x = combined(graph, op, x, constant if place is None else along(constant, place, len(x.layout)))
    return x


def _normalised(
    graph: Graph, x: Array, axes: tuple[int, ...], eps: Any, weight: Any, bias: Any, place: int | None
) -> Array:
    """``x`` normalised over ``axes``, then times ``weight`` plus ``bias``, which lie along dimension ``place``."""
    axes = axes or unit_axes(graph, x)
    by_channel = place is not None and x.layout[place] == (1,)
    if by_channel and all(each is None or len(each.sizes) == 1 for each in (weight, bias)):
        affine = {k: graph.tensor(v) for k, v in (("weight", weight), ("bias", bias)) if v is not None}
        return x.computed(graph.draft.norm(x.value, axes, number_of(eps), **affine))
    return _affine(graph, x.computed(graph.draft.norm(x.value, axes, number_of(eps))), weight, bias, place)


@handles("layer_norm", "native_layer_norm")
def _layer_norm(
    graph: Graph,
    x: Any,
    normalized_shape: Sequence[Any],
    weight: Any = None,
    bias: Any = None,
    eps: Any = 1e-5,
    **_: Any,
) -> Any:
    array = array_of(x)
    whole(array)
    first = len(array.layout) - len(normalized_shape)
    axes = axes_of(array, range(first, len(array.layout)))
    if len(normalized_shape) == 1:
        result = _normalised(graph, array, axes, eps, weight, bias, first)
    else:
        result = _affine(graph, _normalised(graph, array, axes, eps, None, None, None), weight, bias)
    return (result, None, None) if graph.name.startswith("native") else result


@handles("rms_norm", "_fused_rms_norm")
def _rms_norm(
    graph: Graph, x: Any, normalized_shape: Sequence[Any], weight: Any = None, eps: Any = None, **_: Any
) -> Any:
    array = array_of(x)
    whole(array)
    dtype = graph.node.args[0].meta["val"].dtype
    added = torch.finfo(dtype).eps if eps is None else number_of(eps)
    axes = axes_of(array, range(len(array.layout) - len(normalized_shape), len(array.layout)))
    value = graph.draft.step("rms_norm", array.value, axis=axes or unit_axes(graph, array), eps=added)
    result = _affine(graph, array.computed(value), weight, None)
    return (result, None) if graph.name.startswith("_") else result


@handles("group_norm", "native_group_norm")
def _group_norm(graph: Graph, x: Any, weight: Any = None, bias: Any = None, eps: Any = 1e-5, **given: Any) -> Any:
    array = array_of(x)
    whole(array)
    groups = fixed(given.get("num_groups", given.get("group")))
    if array.layout[0] not in ((), (0,)) or array.layout[1] not in ((), (1,)):
        raise RefusedError("its first two dimensions are not batch and channel")
    if groups == 1:
        axes = axes_of(array, range(1, len(array.layout)))
        result = _normalised(graph, array, axes, eps, weight, bias, 1)
    else:
        affine = {k: graph.tensor(v) for k, v in (("weight", weight), ("bias", bias)) if v is not None}
        value = graph.draft.step("group_norm", array.value, groups=groups, eps=number_of(eps), **affine)
        result = array.computed(value)
    return (result, None, None) if graph.name.startswith("native") else result


@handles("instance_norm")
def _instance_norm(
    graph: Graph, x: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, use_input_stats: bool, eps: Any,
    **_: Any,
) -> Array:  # fmt: skip
    array = array_of(x)
    whole(array)
    if not use_input_stats:
        return _by_running(graph, array, weight, bias, running_mean, running_var, eps)
    return _normalised(graph, array, axes_of(array, range(2, len(array.layout))), eps, weight, bias, 1)


@handles("batch_norm")
def _batch_norm(
    graph: Graph, x: Any, weight: Any = None, bias: Any = None, running_mean: Any = None, running_var: Any = None,
    training: bool = False, eps: Any = 1e-5, **_: Any,
) -> Array:  # fmt: skip
    array = array_of(x)
    whole(array)
    if not training:
        return _by_running(graph, array, weight, bias, running_mean, running_var, eps)
    dims = [place for place in range(len(array.layout)) if place != 1]
    return _normalised(graph, array, axes_of(array, dims), eps, weight, bias, 1)


@handles(
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_functional",
    "_batch_norm_with_update_functional",
    "_native_batch_norm_legit_no_training",
    "_batch_norm_no_update",
)
def _native_batch_norm(graph: Graph, x: Any, training: bool | None = None, **given: Any) -> tuple[Any, ...]:
    if training is None:
        training = "no_" not in graph.name
    return (_batch_norm(graph, x, training=training, **given), *(None,) * 4)


def _by_running(graph: Graph, x: Array, weight: Any, bias: Any, mean: Any, variance: Any, eps: Any) -> Array:
    """Batch norm by running statistics: an affine map of each channel."""
    given = [each for each in (weight, bias, mean, variance) if each is not None]
    if any(not isinstance(each, Constant) or each.data is None for each in given) or mean is None or variance is None:
        raise RefusedError("its statistics are computed; expected running statistics, or training mode")
    stem = mean.name.rpartition("running_mean")[0] or f"{mean.name}."
    with torch.no_grad():
        factor = (variance.data.double() + number_of(eps)).rsqrt()
        factor = factor if weight is None else factor * weight.data.double()
        term = -mean.data.double() * factor
        term = term if bias is None else term + bias.data.double()
        scale, shift = (
            Constant(stem + name, data.to(mean.data.dtype), mean.sizes)
            for name, data in (("scale", factor), ("shift", term))
        )
    return _affine(graph, x, scale, shift, 1)


# ---- windows -----------------------------------------------------------------------------------------------
def _each(given: Any, count: int) -> list[Any]:
    parts = list(given) if isinstance(given, list | tuple) else [given]
    return parts * count if len(parts) == 1 else parts


def _windows(graph: Graph, array: Array, count: int) -> tuple[list[int], list[int]]:
    """Over which axes windows run whose last ``count`` dimensions these are, and the dimensions' own axes.

    Raises:
        RefusedError: they are not the problem's spatial axes, in order.
    """
    whole(array)
    spatial = assign(array.layout[len(array.layout) - count :], graph.draft.spatial)
    lead = assign(array.layout[: len(array.layout) - count], (0, 1)[count + 2 - len(array.layout) :])
    if spatial is None or lead is None:
        raise RefusedError("its dimensions are not batch, channel and the spatial axes, in that order")
    return spatial, [*lead, *spatial]


def _spread_out(graph: Graph, values: Sequence[Any], axes: Sequence[int], other: Any) -> tuple[Any, ...]:
    """One value for each spatial axis of the problem: ``values`` on ``axes``, ``other`` on the others."""
    known = dict(zip(axes, values, strict=True))
    return tuple(known.get(axis, other) for axis in graph.draft.spatial)


def _result(graph: Graph, op: str, array: Array, axes: Sequence[int], fields: dict[str, Any]) -> Array:
    sizes = graph.sizes
    shape, layout = placed(axes, sizes)
    return Array([graph.draft.step(op, array.value, shape, **fields)], layout, sizes)


@handles("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution")
def _convolution(
    graph: Graph, x: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: Any = 1, output_padding: Any = 0, transposed: bool | None = None, **_: Any,
) -> Array:  # fmt: skip
    array = array_of(x)
    if transposed is None:
        transposed = "transpose" in graph.name
    if not isinstance(weight, Constant) or not (bias is None or isinstance(bias, Constant)):
        raise RefusedError("its weight is computed from the module's input")
    count = len(weight.sizes) - 2
    spatial, axes = _windows(graph, array, count)
    kernel = weight.sizes[2:]
    dilations = _each(dilation, count)
    padded: list[Any]
    if isinstance(padding, str):
        total = [fixed(d) * (fixed(k) - 1) if padding == "same" else 0 for d, k in zip(dilations, kernel, strict=True)]
        padded = [(each // 2, each - each // 2) for each in total]
    else:
        padded = [(fixed(each), fixed(each)) for each in _each(padding, count)]
    padded = list(_spread_out(graph, padded, spatial, (0, 0)))
    source = array
    if array.value.op == "pad" and not transposed:
        padded = [(a + c, b + d) for (a, b), (c, d) in zip(padded, array.value.fields["padding"], strict=True)]
        assert array.value.source is not None
        source = array.computed(array.value.source)
    shape = (*weight.sizes[:2], *_spread_out(graph, kernel, spatial, 1))
    fields: dict[str, Any] = {
        "weight": graph.tensor(weight, shape),
        "bias": None if bias is None else graph.tensor(bias),
        "stride": _spread_out(graph, _each(stride, count), spatial, 1),
        "padding": tuple(a if a == b else (a, b) for a, b in padded),
        "dilation": _spread_out(graph, dilations, spatial, 1),
        "groups": fixed(groups),
    }
    if any(isinstance(pair, tuple) for pair in fields["padding"]):
        fields["padding"] = tuple(padded)
    if transposed:
        fields["output_padding"] = _spread_out(
            graph, [fixed(each) for each in _each(output_padding, count)], spatial, 0
        )
    op = f"conv{'_transpose' if transposed else ''}{graph.draft.rank}d"
    return _result(graph, op, source, axes, fields)


@handles("cat", "concat", "concatenate")
def _cat(graph: Graph, tensors: Sequence[Any], dim: int = 0, **_: Any) -> Array:
    """Channels put together, which later steps take apart again, down to a convolution."""
    arrays = [array_of(each) for each in tensors]
    place = dim % len(arrays[0].layout)
    for i, each in enumerate(arrays):
        whole(each)
        if not each.layout[place] and is_one(each.value.shape[1]):  # a single channel
            arrays[i] = replace(each, layout=(*each.layout[:place], (1,), *each.layout[place + 1 :]))
    first, *others = arrays
    if first.layout[place] != (1,) or any(each.layout != first.layout for each in others):
        raise RefusedError("only channels of tensors of the same layout can be put together")
    value = first.value
    for each in others:
        shape = [*value.shape[:1], value.shape[1] + each.value.shape[1], *value.shape[2:]]
        value = graph.draft.step("cat", value, shape, value=each.value)
    return Array([value], first.layout, graph.sizes)


@handles("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d")
def _upsample_nearest(graph: Graph, x: Any, **given: Any) -> Array:
    """Repeating each place is a transposed convolution of each channel with ones."""
    return _repeated(graph, array_of(x), torch.ones, given)


@handles("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d")
def _upsample_linear(graph: Graph, x: Any, align_corners: bool = False, **given: Any) -> Array:
    """Weights that fall with the distance are a transposed convolution of each channel, too; at the edges, where fewer
    of them are used, it is divided by their sum."""
    if align_corners:
        raise RefusedError("it aligns corners, so that its weights differ from place to place")

    def triangle(factor: int) -> Any:
        if factor == 1:
            return torch.ones(1, dtype=torch.float64)
        # The next place has a tap of its own where its weight is 0, since infinities times 0 count.
        return 1 - (torch.arange(2 * factor, dtype=torch.float64) - factor + (factor + 1) % 2 / 2).abs() / factor

    array = array_of(x)
    result = _repeated(graph, array, triangle, given)
    for place in range(2, len(array.layout)):
        before, after = fixed(array.sizes[place]), fixed(graph.sizes[place])
        factor = after // before
        ones, taps = torch.ones(1, 1, before, dtype=torch.float64), triangle(factor)[None, None]
        more = taps.shape[-1] - factor
        used = torch.conv_transpose1d(ones, taps, None, factor, (more + 1) // 2, more % 2)
        name, dtype = f"{graph.node.name}_edges_{place - 2}", graph.node.meta["val"].dtype
        share = Constant(name, used.reciprocal().flatten().to(dtype), (after,))
        result = combined(graph, "scale", result, along(share, place, len(array.layout)))
    return result


def _repeated(graph: Graph, array: Array, taps: Callable[[int], Any], given: dict[str, Any]) -> Array:
    """A transposed convolution of each channel whose stride is how often each place is repeated.

    Args:
        taps: makes the weights along an axis of such a stride.
        given: the operator's arguments; those for scales, where it has them, tell where places lie, not the sizes.
    """
    count = len(array.layout) - 2
    spatial, axes = _windows(graph, array, count)
    channels = fixed(array.value.shape[1])
    factors = []
    for size, before in zip(graph.sizes[2:], array.sizes[2:], strict=True):
        factor = example(size) // example(before)
        if not equal(size, before * factor):
            raise RefusedError("it does not repeat each place equally often")
        factors.append(factor)
    scales = given.get("scale_factors") or [scale for name, scale in given.items() if name.startswith("scales")]
    if any(scale is not None and number_of(scale) != factor for scale, factor in zip(scales, factors, strict=False)):
        raise RefusedError("it scales by other factors than those of its sizes")
    kernel = torch.ones(channels, 1)
    for factor in _spread_out(graph, factors, spatial, 1):
        kernel = kernel[..., None] * taps(factor)
    kernel = kernel.to(graph.node.meta["val"].dtype)
    strides = _spread_out(graph, factors, spatial, 1)
    more = [size - stride for size, stride in zip(kernel.shape[2:], strides, strict=True)]
    fields = {
        "weight": graph.tensor(Constant(f"{graph.node.name}_taps", kernel, tuple(kernel.shape))),
        "stride": strides,
        "padding": tuple((each + 1) // 2 for each in more),
        "output_padding": tuple(each % 2 for each in more),
        "groups": channels,
    }
    return _result(graph, f"conv_transpose{graph.draft.rank}d", array, axes, fields)


@handles("glu")
def _glu(graph: Graph, x: Any, dim: int = -1, **_: Any) -> Array:
    array = array_of(x)
    half = fixed(array.sizes[dim]) // 2
    gate = chain(graph, _channels(graph, array, dim, half, half), ("sigmoid", {}))
    return combined(graph, "scale", _channels(graph, array, dim, 0, half), gate)


@handles("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "chunk", "unsafe_chunk")
def _split(graph: Graph, x: Any, dim: int = 0, **_: Any) -> tuple[Array, ...]:
    lengths = [fixed(extents(part.shape)[dim]) for part in graph.node.meta["val"]]
    ends = itertools.accumulate(lengths)
    return tuple(
        _channels(graph, array_of(x), dim, end - length, length) for end, length in zip(ends, lengths, strict=True)
    )


@handles("select", "unbind")
def _select(graph: Graph, x: Any, dim: int = 0, index: Any = None, **_: Any) -> Any:
    array = array_of(x)
    place, count = dim % len(array.layout), fixed(array.sizes[dim])

    def one(start: int) -> Array:
        part = _channels(graph, array, place, start, 1)
        return replace(part, layout=part.layout[:place] + part.layout[place + 1 :],
                       sizes=part.sizes[:place] + part.sizes[place + 1 :])  # fmt: skip

    return tuple(map(one, range(count))) if graph.name == "unbind" else one(fixed(index) % count)


@handles("slice", "narrow")
def _slice(graph: Graph, x: Any, dim: int = 0, start: Any = None, step: int = 1, **_: Any) -> Any:
    sizes = x.sizes if isinstance(x, Array | Constant) else ()
    if len(sizes) == len(graph.sizes) and all(map(equal, sizes, graph.sizes)):
        return x
    first = fixed(0 if start is None else start)
    if step != 1:
        raise RefusedError("it takes every other place of a tensor")
    array = array_of(x)
    return _channels(graph, array, dim, first + (fixed(sizes[dim]) if first < 0 else 0), fixed(graph.sizes[dim]))


def _channels(graph: Graph, array: Array, dim: int, start: int, length: int) -> Array:
    """Some of the channels of a tensor, which steps make of parts of a convolution's weights."""
    dim %= len(array.layout)
    made = some_channels(graph.draft, array.value, start, length) if array.layout[dim] == (1,) else None
    if made is None:
        raise RefusedError("it takes a part of a tensor, other than channels that come of a convolution's result")
    layout = [() if place == dim and length == 1 else axes for place, axes in enumerate(array.layout)]
    sizes = [length if place == dim else size for place, size in enumerate(array.sizes)]
    result = Array([made], tuple(layout), tuple(sizes))
    graph.cut += [array.cell, result.cell]
    return result


@handles("pad", "constant_pad_nd")
def _pad(graph: Graph, x: Any, pad: Sequence[Any], mode: str = "constant", value: Any = None, **_: Any) -> Array:
    """Zeros around the input, which a convolution may take for its padding."""
    array = array_of(x)
    whole(array)
    pairs = [(fixed(pad[i]), fixed(pad[i + 1])) for i in range(0, len(pad), 2)]
    if mode != "constant" or number_of(value or 0) != 0.0 or min(map(min, pairs)) < 0:
        raise RefusedError("only zeros can be padded with")
    while pairs and pairs[-1] == (0, 0):
        pairs.pop()
    if not pairs:
        return array
    spatial = assign(array.layout[-len(pairs) :], graph.draft.spatial[-len(pairs) :])
    if spatial is None:
        raise RefusedError("only spatial axes can be padded")
    shape = list(array.value.shape)
    for axis, (before, after) in zip(spatial, reversed(pairs), strict=True):
        shape[axis] = shape[axis] + before + after
    padding = _spread_out(graph, list(reversed(pairs)), spatial, (0, 0))
    layout = tuple((spatial[place - len(array.layout)],) if place >= len(array.layout) - len(spatial) else axes
                   for place, axes in enumerate(array.layout))  # fmt: skip
    value_made = graph.draft.step("pad", array.value, shape, padding=padding)
    return Array([value_made], layout, graph.sizes)


def _turned(array: Array) -> Array:
    """With its last two dimensions exchanged."""
    (*layout, a, b), (*sizes, m, n) = array.layout, array.sizes
    return Array(array.cell, (*layout, b, a), (*sizes, n, m))


@handles("linear", "addmm", "mm", "bmm", "matmul")
def _linear(graph: Graph, x: Any, weight: Any = None, bias: Any = None, **given: Any) -> Array:
    """A product with a matrix of weights over channels, or over all that a batch item has, is a convolution."""
    name = graph.name
    if name != "linear":
        matrix, bias = given.get("mat2", given.get("other")), None
        if name == "addmm":
            if (number_of(given.get("alpha", 1)), number_of(given.get("beta", 1))) != (1.0, 1.0):
                raise RefusedError("its alpha and beta are not 1")
            x, bias = given["mat1"], x
        if isinstance(x, Constant) and isinstance(matrix, Array) and bias is None:  # W x is the transpose of x' W'
            turned = Constant(x.name, None if x.data is None else x.data.mT, (*x.sizes[:-2], *x.sizes[:-3:-1]))
            return _turned(_linear(graph, _turned(matrix), mat2=turned))
        if not isinstance(matrix, Constant) or matrix.data is None or not 1 < len(matrix.sizes) <= len(graph.sizes):
            raise RefusedError("it is no product with a matrix of weights, which alone is a convolution")
        if any(size != 1 for size in matrix.sizes[:-2]):
            raise RefusedError("it multiplies with several matrices")
        data = matrix.data.reshape(matrix.sizes[-2:]).t()
        weight = Constant(matrix.name, data, tuple(data.shape))
    array = array_of(x)
    whole(array)
    if not isinstance(weight, Constant) or not (bias is None or isinstance(bias, Constant)):
        raise RefusedError("its weight is computed from the module's input")
    axes = array.layout[-1]
    shape = array.value.shape
    if 0 in axes or (1 not in axes and not is_one(shape[1])):
        raise RefusedError("it mixes values along an axis that is not the channels'")
    extents = [fixed(shape[axis]) for axis in axes]
    order = [place for _, place in sorted((axis, place) for place, axis in enumerate(axes))]
    full = [fixed(shape[axis]) if axis in axes else 1 for axis in (1, *graph.draft.spatial)]
    tensor = graph.tensor(weight, (weight.sizes[0], *extents), (0, *(1 + place for place in order)))
    if tensor.data is not None and tuple(tensor.shape) != (weight.sizes[0], *full):
        turned = Constant(weight.name, tensor.data, tuple(tensor.shape))
        tensor = graph.tensor(turned, (weight.sizes[0], *full))
    made = [1 if axis in axes else extent for axis, extent in enumerate(shape)]
    made[1] = weight.sizes[0]
    fields = {"weight": tensor, "bias": None if bias is None else graph.tensor(bias)}
    value = graph.draft.step(f"conv{graph.draft.rank}d", array.value, made, **fields)
    last = () if is_one(made[1]) else (1,)
    return Array([value], (*array.layout[:-1], last), (*array.sizes[:-1], made[1]))


@handles("avg_pool1d", "avg_pool2d", "avg_pool3d")
def _avg_pool(
    graph: Graph, x: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: Any = None, **_: Any,
) -> Array:  # fmt: skip
    given = {"count_include_pad": count_include_pad, "divisor": divisor_override}
    return _pool(graph, "avg_pool", x, kernel_size, stride, padding, ceil_mode, given)


@handles("max_pool1d", "max_pool2d", "max_pool3d")
def _max_pool(
    graph: Graph, x: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False, **_: Any,
) -> Array:  # fmt: skip
    return _pool(graph, "max_pool", x, kernel_size, stride, padding, ceil_mode, {"dilation": dilation})


@handles("max_pool1d_with_indices", "max_pool2d_with_indices", "max_pool3d_with_indices")
def _max_pool_with_indices(graph: Graph, x: Any, **given: Any) -> tuple[Any, ...]:
    return _max_pool(graph, x, **given), None


def _pool(
    graph: Graph, op: str, x: Any, window: Any, stride: Any, padding: Any, ceil_mode: bool, more: dict[str, Any]
) -> Array:
    array = array_of(x)
    count = int(graph.name.split("pool")[1][0])
    spatial, axes = _windows(graph, array, count)
    windows = _each(window, count)
    strides = _each(stride, count) if stride else windows
    fields: dict[str, Any] = {
        "window": _spread_out(graph, windows, spatial, 1),
        "stride": None if strides == windows else _spread_out(graph, strides, spatial, 1),
        "padding": _spread_out(graph, _each(padding, count), spatial, 0),
        "ceil_mode": ceil_mode,
        **more,
    }
    if "dilation" in more:
        fields["dilation"] = _spread_out(graph, _each(more["dilation"], count), spatial, 1)
    return _result(graph, f"{op}{graph.draft.rank}d", array, axes, fields)


@handles(
    "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d"
)
def _adaptive_avg_pool(graph: Graph, x: Any, output_size: Any, **_: Any) -> Array:
    return _adaptive(graph, "avg_pool", "mean", x, output_size)


@handles("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d")
def _adaptive_max_pool(graph: Graph, x: Any, output_size: Any, **_: Any) -> tuple[Any, ...]:
    return _adaptive(graph, "max_pool", "max", x, output_size), None


def _adaptive(graph: Graph, op: str, reduction: str, x: Any, output_size: Any) -> Array:
    array = array_of(x)
    count = int(graph.name.split("pool")[1][0])
    wanted = _each(output_size, count)
    if all(size == 1 for size in wanted):
        return reduced(graph, reduction, array, range(len(array.layout) - count, len(array.layout)), True)
    spatial, axes = _windows(graph, array, count)
    sizes = [fixed(size) for size in graph.sizes[-count:]]
    if all(equal(size, array.value.shape[axis]) for size, axis in zip(sizes, spatial, strict=True)):
        return array
    fields = {"size": _spread_out(graph, sizes, spatial, 1)}
    return _result(graph, f"adaptive_{op}{graph.draft.rank}d", array, axes, fields)
