"""From a graph of ATen operators to steps: what each tensor of the graph is among the values of a pipeline.

A value has five axes. A tensor of the graph shows a value in a layout of its own: for each of its dimensions, which
axes of the value lie along it, one after another, or none. So a permutation, a view, a squeeze or an expansion changes
the layout and computes nothing, and a step that works over dimensions knows over which axes: a layer norm of a
permuted tensor is one over channels. What is computed from weights alone is computed at once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from dispatcher.ops.steps import axis_names
from dispatcher.torch.draft import (
    GROUPS,
    Draft,
    Extent,
    RefusedError,
    SymbolicError,
    Tensor,
    Value,
    example,
    extents,
    is_one,
    settled,
)
from dispatcher.torch.patterns import PARTS, simplify

#: The axes of a value that lie along each dimension of a tensor.
Layout = tuple[tuple[int, ...], ...]

#: The reason of a node that only a larger pattern could be a step with, and of an operator that is in none.
NO_STEP = "the vocabulary has no step for it"
SPLITS = "it views the tensor in a shape that splits an axis"

#: Makes of an operator's arguments, by name, what its result is; see :mod:`dispatcher.torch.aten`.
Handler = Callable[..., Any]


def equal(left: Extent, right: Extent) -> bool:
    """Whether two extents are the same whatever the sizes are."""
    return bool(statically_known_true(left == right))


@dataclass(eq=False)
class Array:
    """A tensor of the graph that shows a value.

    Attributes:
        cell: holds the value; shared by all that share memory, so that one sees what is written into another.
        layout: the axes along each dimension. An axis of extent 1 lies nowhere.
        sizes: of the dimensions. One without axes whose size is not 1 is an expanded one.
    """

    cell: list[Value]
    layout: Layout
    sizes: tuple[Extent, ...]

    @property
    def value(self) -> Value:
        """What it shows."""
        return self.cell[0]

    def computed(self, value: Value) -> Array:
        """A new tensor of the same layout."""
        return replace(self, cell=[value])

    def covers(self, layout: Layout) -> bool:
        """Whether the value has all axes of ``layout``."""
        return {axis for axes in layout for axis in axes} <= set(self.value.axes)


@dataclass(eq=False)
class Constant:
    """A tensor that does not depend on the pipeline's input.

    Attributes:
        name: path in the module, or what it was computed by.
        data: the tensor; None for an input of the module that steps combine with.
        sizes: of its dimensions.
        literal: whether it is a number that was written in the code, where it has one element.
        given: sizes of the dimensions that an input is given with; this one may lack some of size 1, or have more.
    """

    name: str
    data: Any
    sizes: tuple[Extent, ...]
    literal: bool = False
    given: tuple[Extent, ...] = ()


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


class _Unknown:
    """What depends on a node that has no counterpart."""


UNKNOWN = _Unknown()


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


class Graph:
    """Translates the nodes of a graph, one after another.

    Args:
        nodes: of a graph of ATen operators, in order.
        tensors: of placeholders and attributes that hold weights and buffers.
        source: the placeholder that is the pipeline's input.
        returned: the nodes that the graph returns.
        handlers: of operators, by name.
        arranged: how the dimensions of the pipeline's input lie: ``given``, as the last axes of the problem;
            ``batched``, as batch, channel and the last spatial ones; ``channels last``, with channel behind these.
        freely: whether the result's dimensions may be any axes, in any order.

    Attributes:
        draft: the steps.
        unsupported: nodes that have no counterpart, in order.
        cut: what holds the values of tensors that are parts of others, and of these.
        axes: of the dimensions of the pipeline's input.
        node: the present one.
        name: of its operator, without ``aten.`` and the underscore of those that write in place.
    """

    def __init__(
        self,
        nodes: Sequence[Any],
        tensors: Mapping[Any, Constant],
        source: Any,
        returned: Sequence[Any],
        handlers: Mapping[str, Handler],
        *,
        arranged: str,
        freely: bool,
    ) -> None:
        self.draft = Draft(_rank(nodes, source), simplify)
        self.handlers, self.arranged, self.freely = handlers, arranged, freely
        self.axes: tuple[int, ...] = ()
        self.unsupported: dict[Any, Unsupported] = {}
        self.results: dict[Any, Any] = dict(tensors)
        self._tensors: dict[Any, Tensor] = {}
        self.cut: list[list[Value]] = []
        self.node: Any = None
        self.name = ""
        self.source = source
        self.returned = returned
        alive = _alive(nodes, returned)
        for node in nodes:
            if node in alive and node not in self.results and node.op != "output":
                self.node = self.draft.node = node
                try:
                    self.results[node] = self._result(node)
                except RefusedError as error:
                    self.unsupported[node] = describe(node, str(error))
                    self.results[node] = UNKNOWN

    # -- nodes
    def _result(self, node: Any) -> Any:
        if node is self.source:
            return self._input(node)
        if node.op == "placeholder":
            sizes = extents(node.meta["val"].shape)
            kinds = [each.meta["val"].dtype for each in (self.source, node)]
            if sizes and kinds[0] != kinds[1]:  # one without dimensions is a number
                raise RefusedError(f"it is of {kinds[1]}, and the first input of {kinds[0]}; a problem has one dtype")
            return Constant(node.name, None, sizes, given=sizes)
        if node.op == "get_attr":  # the code of a region, such as one of autocast
            return UNKNOWN
        meta = node.meta.get("val")
        if isinstance(meta, int | float | bool | torch.SymInt | torch.SymFloat | torch.SymBool):
            return settled(meta) if isinstance(meta, torch.SymInt) else meta
        arguments = self.look_up((node.args, node.kwargs))
        unknown = _contains(arguments, lambda each: each is UNKNOWN)
        if node.target is operator.getitem:
            (parts, place), _ = arguments
            if isinstance(parts, tuple | list) and parts[place] is not None:
                return parts[place]
            if unknown:
                return UNKNOWN
            raise RefusedError("this part of the result has no counterpart")
        name = operator_name(node.target).removeprefix("aten.")
        in_place = name.endswith("_") and not name.endswith("__")
        self.name = name.removesuffix("_") if in_place else name
        handler = self.handlers.get(self.name)
        if targets_of(node) and not in_place and any(each.is_out for each in node.target._schema.arguments):
            raise RefusedError("it writes into what is given as out")
        if not unknown and not _contains(arguments, lambda each: isinstance(each, Array) or _is_input(each)):
            return self._folded(node, *arguments, in_place=in_place)
        if handler is None:
            raise RefusedError(NO_STEP)
        if unknown:
            return UNKNOWN
        given = _by_name(node.target, *arguments)
        result = handler(self, **given)
        if isinstance(result, Array) and not _shares(node):
            result = result.computed(result.value)
        if in_place and isinstance(result, Array):
            return self._written(given["x"], result)
        return result

    def look_up(self, value: Any) -> Any:
        """An argument, with the results of nodes in the place of these."""
        if isinstance(value, tuple | list):
            return type(value)(self.look_up(part) for part in value)
        if isinstance(value, dict):
            return {key: self.look_up(part) for key, part in value.items()}
        return self.results[value] if isinstance(value, torch.fx.Node) else value

    def _input(self, node: Any) -> Array:
        """The pipeline's input; where its dimensions are not the last axes of the problem, this takes it with all."""
        sizes = extents(node.meta["val"].shape)
        axes = (0, 1, *self.draft.spatial)
        if not 1 <= len(sizes) <= len(axes):
            raise RefusedError(f"it has {len(sizes)} dimensions; expected 1 to {len(axes)}")
        given, spatial = axes[len(axes) - len(sizes) :], axes[len(axes) - len(sizes) + 2 :]
        orders = {"given": given, "batched": (0, 1, *spatial), "channels last": (0, *spatial, 1)}
        self.axes = orders[self.arranged]
        shape, layout = placed(self.axes, sizes)
        taken = sizes if self.arranged == "given" else tuple(shape[axis] for axis in axes)
        return Array([Value("input", None, {}, shape, node, Tensor(node.name, None, taken))], layout, sizes)

    def _folded(self, node: Any, args: Any, kwargs: Any, *, in_place: bool) -> Any:
        """The result of a node that depends on weights alone: computed on copies, for it may write into them."""
        tags = getattr(node.target, "tags", ())
        if torch.Tag.nondeterministic_seeded in tags:
            raise RefusedError("it draws at random")
        names = [each.name for each in _leaves((args, kwargs)) if isinstance(each, Constant)]

        def data(value: Any) -> Any:
            if isinstance(value, Constant):
                if value.data.ndim != len(value.sizes):
                    raise RefusedError(f"it computes with {value.name}, which is as large as a computed tensor")
                return value.data.clone() if in_place else value.data
            if isinstance(value, torch.SymInt):
                raise SymbolicError
            if isinstance(value, tuple | list):
                return type(value)(map(data, value))
            return {key: data(part) for key, part in value.items()} if isinstance(value, dict) else value

        with torch.no_grad():
            result = node.target(*data(args), **data(kwargs))
        literal = all(each.literal for each in _leaves((args, kwargs)) if isinstance(each, Constant))
        # A view of one tensor is that tensor still, under its name.
        name = names[0] if len(names) == 1 else node.name

        def constant(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return Constant(name, value, tuple(value.shape), literal)
            return type(value)(map(constant, value)) if isinstance(value, tuple | list) else value

        folded = constant(result)
        if not in_place:
            return folded
        target, held = args[0], [each for each in _leaves(list(self.results.values())) if isinstance(each, Constant)]
        if not isinstance(target, Constant):
            raise RefusedError("it writes into several tensors at once")
        if self.name != "detach" and any(each is not target and _one_memory(each, target) for each in held):
            raise RefusedError("it writes into a part of a tensor, or where a part was taken before")
        target.data, target.name = folded.data, folded.name
        return target

    def _written(self, target: Any, result: Array) -> Array:
        """A result that is written into the tensor ``target``."""
        if not isinstance(target, Array) or result.layout != target.layout:
            raise RefusedError("it writes into a tensor of another shape, or into a constant")
        if any(target.cell is cell for cell in self.cut):
            raise RefusedError("it writes into a part of a tensor, or where a part was taken before")
        target.cell[0] = result.value
        return target

    # -- what handlers ask for
    @property
    def sizes(self) -> tuple[Extent, ...]:
        """Sizes of the present node's result, or of the first of its results."""
        meta = self.node.meta["val"]
        return extents((meta[0] if isinstance(meta, tuple | list) else meta).shape)

    def tensor(
        self, constant: Constant, shape: Sequence[Extent] | None = None, order: Sequence[int] | None = None
    ) -> Tensor:
        """A constant as a parameter of the problem, in another shape where one is given.

        Args:
            constant: a weight, or an input of the module.
            shape: to take it in.
            order: of the axes of ``shape`` in the parameter.
        """
        shape = tuple(constant.sizes if shape is None else shape)
        order = tuple(range(len(shape)) if order is None else order)
        data, key = constant.data, (constant, str(shape), order)
        if key in self._tensors:
            return self._tensors[key]
        if data is None:
            if order != tuple(range(len(shape))) or shape != constant.given:
                raise RefusedError(f"it reads {constant.name} in another layout than it is given in")
        else:
            data = data.detach()
            if not data.is_floating_point():  # a mask, or whole numbers
                data = data.to(self.source.meta["val"].dtype)
            if data.shape != shape:
                data = data.reshape([*map(example, shape)])
            if order != tuple(range(len(shape))):
                data = data.permute(order).contiguous()
            shape = tuple(data.shape)
        self._tensors[key] = Tensor(constant.name, data, shape)
        return self._tensors[key]

    def operand(self, constant: Constant, beside: Array) -> Any:
        """A constant as what a step combines ``beside`` with: a number, or a tensor whose axes are those of it."""
        sizes, layout = constant.sizes, beside.layout[max(0, len(beside.layout) - len(constant.sizes)) :]
        long = [size for size in sizes[: len(sizes) - len(layout)] if not is_one(size)]
        sizes = sizes[len(sizes) - len(layout) :]
        if long or any(not axes and not is_one(size) for axes, size in zip(layout, sizes, strict=True)):
            raise RefusedError(f"{constant.name} is larger than what it is combined with, on some axis")
        if constant.data is not None and constant.literal and constant.data.numel() == 1:
            return float(constant.data)
        used = [() if is_one(size) else axes for axes, size in zip(layout, sizes, strict=True)]
        flat = [axis for axes in used for axis in axes]
        all_axes = (0, 1, *self.draft.spatial)
        standard = [axis for axis, size in zip(all_axes[-len(sizes) :], sizes, strict=False) if not is_one(size)]
        if constant.data is None:
            return self._placed_input(constant, [axes for axes in used if axes])
        if flat == standard and all(len(axes) < 2 for axes in used) and len(constant.sizes) <= len(all_axes):
            return self.tensor(constant, constant.sizes or (1,))
        if GROUPS in flat:
            raise RefusedError(f"{constant.name} has one value for each group of channels")
        extents = [beside.value.shape[axis] for axis in flat]
        order = sorted(range(len(flat)), key=flat.__getitem__)
        moved = self.tensor(constant, extents, order)
        first = min(flat, default=0)
        full = [beside.value.shape[axis] if axis in flat else 1 for axis in all_axes if axis >= first]
        key = (moved, str(full))
        if key not in self._tensors:
            data = moved.data.reshape([*map(example, full)])
            self._tensors[key] = Tensor(moved.name, data, tuple(data.shape))
        return self._tensors[key]

    def _placed_input(self, constant: Constant, used: Sequence[tuple[int, ...]]) -> Tensor:
        """An input of the module, whose dimensions that are not of size 1 lie along these axes."""
        all_axes = (0, 1, *self.draft.spatial)
        rest = iter(used)
        layout = tuple(() if is_one(size) else next(rest) for size in constant.given)
        axes = assign(layout, all_axes)
        if axes is None:
            raise RefusedError(f"it reads {constant.name} in another layout than it is given in")
        last = all_axes[len(all_axes) - len(axes) :]
        along = None if assign(layout, last) is not None else tuple(axes)
        key = (constant.name, along)
        if key not in self._tensors:
            self._tensors[key] = Tensor(constant.name, None, constant.given, along)
        return self._tensors[key]

    # -- the end
    def finish(self, output: Any) -> tuple[Value, Layout] | None:
        """The last value, and which of its axes lie along the result's dimensions; None where something has no
        counterpart.

        Args:
            output: the graph's output node.
        """
        if len(self.returned) != 1:
            reason = f"the module returns {len(self.returned)} tensors; expected one"
            self.unsupported[output] = describe(output, reason)
            return None
        (result,) = self.returned
        array = self.results.get(result)
        if not self.unsupported and isinstance(array, Array):
            for step in self.draft.order(array.value):
                if step.op in PARTS:
                    self.unsupported[step.node] = describe(step.node, SPLITS if step.op == "grouped" else NO_STEP)
        try:
            return None if self.unsupported or array is UNKNOWN else self._last(array)
        except RefusedError as error:
            self.unsupported[result] = describe(result, str(error))
            return None

    def _last(self, array: Any) -> tuple[Value, Layout]:
        if not isinstance(array, Array):
            raise RefusedError("the result does not depend on the module's input")
        if array.value.tensor is not None:
            raise RefusedError("the result is the module's input; nothing is computed")
        kinds = [each.meta["val"].dtype for each in (self.source, *self.returned)]
        if kinds[0] != kinds[1]:
            raise RefusedError(f"the result is of {kinds[1]}, and the input of {kinds[0]}; a problem has one dtype")
        whole(array)
        all_axes = (0, 1, *self.draft.spatial)
        orders = (all_axes, (0, *self.draft.spatial, 1)) if self.arranged == "channels last" else (all_axes,)
        found = [axes for order in orders if (axes := assign(array.layout, order)) is not None]
        if not found and self.freely and not any(GROUPS in each for each in array.layout):
            return array.value, array.layout
        if not found:
            names = {those[0]: name for name, those in axis_names(self.draft.rank).items() if len(those) == 1}
            shown = ", ".join(" x ".join(names.get(axis, "?") for axis in each) or "1" for each in array.layout)
            raise RefusedError(
                f"the result's dimensions are ({shown}); a problem's result has the axes batch, channel and spatial "
                "ones apart and in that order"
            )
        return array.value, tuple((axis,) for axis in found[0])


# ---- layouts -----------------------------------------------------------------------------------------------
def placed(axes: Sequence[int], sizes: Sequence[Extent]) -> tuple[tuple[Extent, ...], Layout]:
    """The shape of a value with one axis for each size, and the layout of a tensor with these dimensions."""
    shape: list[Extent] = [1, 1, 1, 1, 1]
    for axis, size in zip(axes, sizes, strict=True):
        shape[axis] = size
    return tuple(shape), tuple(() if is_one(size) else (axis,) for axis, size in zip(axes, sizes, strict=True))


def assign(layout: Layout, axes: Sequence[int]) -> list[int] | None:
    """One of ``axes`` for each dimension, in order; a dimension without axes takes one that is free."""
    if not layout:
        return []
    for place, axis in enumerate(axes):
        if layout[0] in ((), (axis,)):
            rest = assign(layout[1:], axes[place + 1 :])
            if rest is not None:
                return [axis, *rest]
    return None


def whole(array: Array, dims: Iterable[int] | None = None) -> None:
    """Check that no dimension, or none of ``dims``, is expanded.

    Raises:
        RefusedError: one is.
    """
    places = range(len(array.layout)) if dims is None or not array.layout else dims
    if any(not array.layout[place] and not is_one(array.sizes[place]) for place in places):
        raise RefusedError("it reads an expanded tensor, whose values would have to be repeated")


def relaid(array: Array, sizes: Sequence[Extent]) -> Array:
    """The same memory, with dimensions of other sizes.

    Raises:
        RefusedError: an axis would be split.
    """
    parts: list[tuple[Extent, tuple[int, ...]]] = []
    for axes, size in zip(array.layout, array.sizes, strict=True):
        if axes:
            parts += [(array.value.shape[axis], (axis,)) for axis in axes]
        elif not is_one(size):
            parts.append((size, ()))
    layout: list[tuple[int, ...]] = []
    for size in sizes:
        axes, total = (), 1
        while parts and not equal(total, size):
            extent, axis = parts.pop(0)
            known = axis == (1,) and not axes and isinstance(extent, int) and isinstance(size, int)
            if known and 1 < size < extent and extent % size == 0:  # groups of channels
                parts.insert(0, (extent // size, axis))
                extent, axis = size, (GROUPS,)
            if (not axis and not equal(extent, size)) or (axes == () and not equal(total, 1)):
                raise RefusedError("it views an expanded tensor in another shape")
            total, axes = total * extent, axes + axis
        if not equal(total, size):
            if not all(isinstance(each, int) for each in (total, size)):
                raise SymbolicError
            raise RefusedError(SPLITS)
        layout.append(axes)
    return Array(array.cell, tuple(layout), tuple(sizes))


def _rank(nodes: Iterable[Any], source: Any) -> int:
    """The spatial axes that a graph's values need: those of its windows, else what its input has."""
    rank = len(source.meta["val"].shape) - 2
    for node in nodes:
        name = operator_name(node.target) if node.op == "call_function" else ""
        if "conv" in name or "pool" in name:
            digits = [int(letter) for letter in name if letter in "123"]
            rank = max(rank, digits[-1] if digits else len(node.args[1].meta["val"].shape) - 2)
    return min(max(rank, 1), 3)


# ---- nodes and arguments -----------------------------------------------------------------------------------
def _alive(nodes: Sequence[Any], returned: Sequence[Any]) -> set[Any]:
    """The nodes that those returned depend on, by their arguments or by what is written into these."""
    alive = set(returned)
    written = {base_of(node) for node in returned}
    for node in reversed(nodes):
        if node in alive or any(base_of(each) in written for each in targets_of(node)):
            alive.update((node, *node.all_input_nodes))
            written.update(base_of(each) for each in node.all_input_nodes)
    return alive


def targets_of(node: Any) -> list[Any]:
    """The nodes that a node writes into."""
    schema = getattr(node.target, "_schema", None)
    given = [] if schema is None else [
        node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]  # fmt: skip
    return [each for each in _leaves(given) if isinstance(each, torch.fx.Node)]


def _one_memory(one: Constant, other: Constant) -> bool:
    """Whether two tensors share memory."""
    if one.data is None or other.data is None:
        return False
    return bool(one.data.untyped_storage()._cdata == other.data.untyped_storage()._cdata)


def base_of(node: Any) -> Any:
    """The node whose memory ``node`` shows, or a part of it."""
    while node.op == "call_function" and node.args and isinstance(node.args[0], torch.fx.Node) and _shares(node):
        node = node.args[0]
    return node


def _shares(node: Any) -> bool:
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
            return before.stride() == after.stride() and not _by_name(node.target, node.args, node.kwargs).get("copy")
        return bool(before.reshape(after.shape).untyped_storage()._cdata == before.untyped_storage()._cdata)
    return True


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, tuple | list):
        return [leaf for part in value for leaf in _leaves(part)]
    if isinstance(value, dict):
        return _leaves(list(value.values()))
    return [value]


def _contains(value: Any, wanted: Callable[[Any], bool]) -> bool:
    return any(wanted(leaf) for leaf in _leaves(value))


def _is_input(value: Any) -> bool:
    return isinstance(value, Constant) and value.data is None


def _by_name(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
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
