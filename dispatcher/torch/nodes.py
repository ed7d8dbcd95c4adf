"""Nodes of a graph of ATen operators: their names, where they stand in the source, and whose memory they show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dispatcher.torch.draft import example


@dataclass(frozen=True)
class Unsupported:
    """A node that has no counterpart.

    Attributes:
        node: of the graph.
        operator: its name, such as ``aten.sort``.
        module: path of the submodule that calls it; empty for the module itself.
        place: file and line, or empty.
        reason: why.
    """

    node: Any
    operator: str
    module: str
    place: str
    reason: str

    def __str__(self) -> str:
        module = f"in {self.module}" if self.module else ""
        where = " ".join(part for part in (module, f"at {self.place}" if self.place else "") if part)
        return f"{self.operator}{f' ({where})' if where else ''}: {self.reason}"


def describe(node: Any, reason: str) -> Unsupported:
    """A node that has no counterpart, with where it stands in the module's source."""
    stack = node.meta.get("nn_module_stack") or {}
    module = next(reversed([path for path, _ in stack.values()]), "") if stack else ""
    called = operator_name(node.target) or getattr(node.target, "__name__", str(node.target))
    name = node.name if node.op == "placeholder" else called
    return Unsupported(node, name, str(module), _place(node.meta.get("stack_trace") or ""), reason)


def _place(trace: str) -> str:
    """The innermost line of a traceback that is not PyTorch's own, as ``file:line``."""
    frames = [line.split('"') for line in trace.splitlines() if line.strip().startswith('File "')]
    own = [frame for frame in frames if "/torch/nn/" not in frame[1].replace("\\", "/")] or frames
    if not own:
        return ""
    return f"{own[-1][1]}:{own[-1][2].split('line ')[1].split(',')[0]}"


def operator_name(target: Any) -> str:
    """``aten.relu`` for any overload of it; empty for what is no operator."""
    packet = getattr(target, "overloadpacket", None)
    return "" if packet is None else str(packet)


def targets_of(node: Any) -> list[Any]:
    """The nodes that a node writes into."""
    schema = getattr(node.target, "_schema", None)
    given = [] if schema is None else [
        node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]  # fmt: skip
    return [each for each in leaves(given) if isinstance(each, torch.fx.Node)]


def base_of(node: Any) -> Any:
    """The node whose memory ``node`` shows, or a part of it."""
    while node.op == "call_function" and node.args and isinstance(node.args[0], torch.fx.Node) and shares_memory(node):
        node = node.args[0]
    return node


def shares_memory(node: Any) -> bool:
    """Whether the result of a node shows the memory of its first argument."""
    schema = getattr(node.target, "_schema", None)  # an item of several results has none
    name = operator_name(node.target).removeprefix("aten.")
    if schema is None or "dropout" in name or name in ("type_as", "lift", "atleast_1d"):
        return True
    if schema.arguments[0].alias_info is None:
        return False
    if name in ("contiguous", "to", "reshape", "reshape_as", "flatten", "ravel"):  # which copy where they have to
        before, after = (
            torch.empty_strided([*map(example, val.shape)], [*map(example, val.stride())], device="meta")
            for val in (node.args[0].meta["val"], node.meta["val"])
        )
        if name in ("contiguous", "to"):
            return before.stride() == after.stride() and not by_name(node.target, node.args, node.kwargs).get("copy")
        return bool(before.reshape(after.shape).untyped_storage()._cdata == before.untyped_storage()._cdata)
    return True


def leaves(value: Any) -> list[Any]:
    """What lists, tuples and dictionaries hold, however deep."""
    if isinstance(value, tuple | list):
        return [leaf for part in value for leaf in leaves(part)]
    if isinstance(value, dict):
        return leaves(list(value.values()))
    return [value]


def by_name(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by the names of the operator's schema, with its defaults; the first tensor is called ``x``."""
    given = {}
    for place, argument in enumerate(target._schema.arguments):
        name = "x" if argument.name in ("self", "input") else argument.name
        if place < len(args):
            given[name] = args[place]
        elif argument.name in kwargs:
            given[name] = kwargs[argument.name]
        elif argument.has_default_value():
            given[name] = argument.default_value
    return given
