"""Channels in parts: what is made of channels that were put together, and some of the channels that steps make."""

from __future__ import annotations

from typing import Any

from dispatcher.torch.draft import Draft, Tensor, Value, fixed, is_one


def apart(draft: Draft, value: Value) -> Value | None:
    """What a step makes of channels that were put together, made of each part: for a convolution, their sum."""
    whole = value.source
    if whole is None or whole.op != "cat" or value.op in ("cat", "grouped", "pad"):
        return None
    places = _places(whole)
    if _mixes(value):
        total = None
        for part, start in places:
            share = _share(draft, value.fields["weight"], int("transpose" not in value.op), start, part.shape[1])
            if share is None:
                return None
            bias = value.fields.get("bias") if total is None else None
            made = draft.step(value.op, part, value.shape, **{**value.fields, "weight": share, "bias": bias})
            total = made if total is None else draft.step("add", total, value=made)
        return total
    outs, ins = fixed(value.shape[1]), fixed(whole.shape[1])
    if any(start * outs % ins for _, start in places):
        return None
    spans = [(start * outs // ins, part.shape[1] * outs // ins) for part, start in places]
    return _together(draft, whole, [some_channels(draft, value, *span) for span in spans])


def some_channels(draft: Draft, value: Value, start: int, count: int) -> Value | None:
    """Some of the channels of a value, made without the others; None where that takes more than a part of the weights.

    Args:
        draft: of which the steps are.
        value: has more channels than one.
        start: the first channel.
        count: of channels.
    """
    source, channels = value.source, fixed(value.shape[1])
    if count == channels:
        return value
    if value.op == "cat":
        spans = [
            (part, max(0, start - first), min(part.shape[1], start + count - first)) for part, first in _places(value)
        ]
        return _together(
            draft, value, [some_channels(draft, p, low, high - low) for p, low, high in spans if low < high]
        )
    groups = value.fields.get("groups", 1)
    if source is None or value.op in ("grouped", "pad") or 1 in value.fields.get("axis", ()):
        return None
    fields = dict(value.fields)
    if not _mixes(value):
        if groups > 1 and (start * groups % channels or count * groups % channels):
            return None
        ins = fixed(source.shape[1])
        source = some_channels(draft, source, start * ins // channels, count * ins // channels)
        if groups > 1:
            fields["groups"] = groups * count // channels
    for name, each in fields.items():
        if isinstance(each, Value) and not is_one(each.shape[1]):
            fields[name] = some_channels(draft, each, start, count)
        elif isinstance(each, Tensor):
            axis = len(each.shape) - draft.rank - 1 if each.along is None else [*each.along, 1].index(1)
            if name in ("weight", "bias"):  # a convolution's, or one for each channel
                axis = int(name == "weight" and _mixes(value) and "transpose" in value.op)
            if 0 <= axis < len(each.shape) and each.shape[axis] != 1:
                size = each.shape[axis]
                fields[name] = _share(draft, each, axis, start * size // channels, count * size // channels)
    if source is None or None in fields.values():
        return None
    return draft.step(value.op, source, (value.shape[0], count, *value.shape[2:]), **fields)


def _mixes(value: Value) -> bool:
    """Whether each of a value's channels is made of all that it reads."""
    return value.op.startswith("conv") and value.fields.get("groups", 1) == 1


def _places(value: Value) -> list[tuple[Value, int]]:
    """What was put together, in order, each with its first channel."""
    if value.op != "cat" or value.source is None:
        return [(value, 0)]
    after = fixed(value.source.shape[1])
    return [*_places(value.source), *((part, after + start) for part, start in _places(value.operand))]


def _together(draft: Draft, whole: Value, parts: list[Value | None]) -> Value | None:
    """Values put together, as those that make up ``whole`` are; None where one is None."""
    result, *others = parts
    for each in others:
        if result is None or each is None:
            return None
        shape = (result.shape[0], result.shape[1] + each.shape[1], *result.shape[2:])
        result = draft.step("cat", result, shape, value=each)
        result.node = whole.node  # which is what there is no step for
    return result


def _share(draft: Draft, tensor: Tensor, axis: int, start: int, count: int) -> Any:
    """A part of a tensor, the same one each time; None of an input of the module."""
    if tensor.data is None:
        return None
    key = (tensor, axis, start, count)
    if key not in draft.shares:
        data = tensor.data.narrow(axis, start, count)
        draft.shares[key] = Tensor(tensor.name, data, tuple(data.shape))
    return draft.shares[key]
