"""A pipeline that is being drafted from a graph: values on five axes, and the problem that they make."""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dispatcher.errors import DispatcherError
from dispatcher.ops.binding import default_of
from dispatcher.ops.steps import RANKS, SPATIAL_NAMES, axis_names
from dispatcher.ops.vocabulary import VOCABULARY
from dispatcher.problem.schema import INTERFACE_NAMES

#: The axis of a value whose channels lie in groups that has one place for each group.
GROUPS = 5
#: An integer, or a symbol of torch.export (a SymInt) that stands for one.
Extent = Any


class RefusedError(DispatcherError):
    """Why a node has no counterpart in the vocabulary."""


class SymbolicError(Exception):
    """A number is needed where the graph has a size that varies: only a graph of fixed sizes has it."""


def extents(shape: Sequence[Any]) -> tuple[Extent, ...]:
    """A shape in which those symbols are integers that turned out to have one value alone."""
    return tuple(settled(extent) for extent in shape)


def settled(extent: Extent) -> Extent:
    """An extent, as an integer where it can have one value alone."""
    known = not isinstance(extent, int) and extent.node.expr.is_Integer
    return int(extent.node.expr) if known else extent


def example(extent: Extent) -> int:
    """What an extent is in the example inputs."""
    return extent if isinstance(extent, int) else int(extent.node.hint)


def fixed(extent: Extent) -> int:
    """An extent that does not vary.

    Raises:
        SymbolicError: it does.
    """
    if not isinstance(extent, int):
        raise SymbolicError
    return extent


@dataclass(eq=False)
class Tensor:
    """A tensor parameter of the problem.

    Attributes:
        name: that it would like to have.
        data: its values, as the problem takes them; None for an input of the module.
        shape: of the parameter.
        along: the axes that it has, where these are not the last ones.
    """

    name: str
    data: Any
    shape: tuple[Extent, ...]
    along: tuple[int, ...] | None = None


@dataclass(eq=False)
class Value:
    """The problem's input, or the result of a step.

    Attributes:
        op: in the vocabulary; ``input``; or what only a pattern may consume, such as ``erf``.
        source: the value that the step reads.
        fields: the step's others: numbers, tensors, values; axes by number.
        shape: extents of five axes.
        node: of the graph, from which it was made.
        tensor: of the problem's input.
    """

    op: str
    source: Value | None
    fields: Mapping[str, Any]
    shape: tuple[Extent, ...]
    node: Any
    tensor: Tensor | None = None

    @property
    def operand(self) -> Any:
        """What the step combines its source with; None for other steps."""
        return self.fields.get("value", self.fields.get("by"))

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes with more than one place."""
        return tuple(axis for axis, extent in enumerate(self.shape) if not is_one(extent))


def is_one(extent: Extent) -> bool:
    """Whether an extent is always 1."""
    return isinstance(extent, int) and extent == 1


@dataclass
class Draft:
    """Makes steps, each once, and the mapping of a problem in the end.

    Attributes:
        rank: spatial axes.
        simplify: what a step is called that those before it make up; see :mod:`dispatcher.torch.patterns`.
        node: of the graph that is being translated.
        shares: parts of tensors that were taken before.
    """

    rank: int
    simplify: Callable[[Draft, Value], Value | None]
    node: Any = None
    made: dict[Any, Value] = field(default_factory=dict)
    shares: dict[Any, Tensor] = field(default_factory=dict)

    @property
    def spatial(self) -> tuple[int, ...]:
        """The spatial axes out of five."""
        return axis_names(self.rank)["spatial"]

    def step(self, op: str, source: Value, shape: Sequence[Extent] | None = None, /, **fields: Any) -> Value:
        """The value of a step; the same one where it was made before, or a shorter way to it."""
        given = {name: value for name, value in fields.items() if value is not None}
        key = (op, source, *sorted(given.items(), key=lambda item: item[0]))
        if key not in self.made:
            value = Value(op, source, given, tuple(source.shape if shape is None else shape), self.node)
            self.made[key] = value
            self.made[key] = self.simplify(self, value) or value
        return self.made[key]

    def norm(self, x: Value, axes: Sequence[int], eps: float, **affine: Any) -> Value:
        """``x`` normalised over ``axes``, by the step that is made for them."""
        ones = {axis for axis, extent in enumerate(x.shape) if is_one(extent)}

        def fits(wanted: Sequence[int]) -> bool:
            return set(axes) <= set(wanted) <= {*axes, *ones}

        if x.op == "grouped" and x.source is not None and fits((1, *self.spatial)):
            groups = x.fields["groups"]
            return self.step(
                "grouped", self.step("group_norm", x.source, groups=groups, eps=eps), x.shape, groups=groups
            )
        if fits(self.spatial):
            return self.step("instance_norm", x, eps=eps, **affine)
        if fits((0, *self.spatial)):
            return self.step("batch_norm", x, eps=eps, **affine)
        return self.step("layer_norm", x, axis=tuple(sorted(axes)), eps=eps, **affine)

    def order(self, last: Value) -> list[Value]:
        """The steps that make ``last``, each after those that it reads."""
        found: dict[int, Value] = {}
        pending: list[tuple[Value, bool]] = [(last, False)]
        while pending:
            value, done = pending.pop()
            if value.tensor is not None or id(value) in found:
                continue
            if done:
                found[id(value)] = value
                continue
            pending.append((value, True))
            reads = [value.source, *(each for each in value.fields.values() if isinstance(each, Value))]
            pending.extend((each, False) for each in reversed(reads) if each is not None)
        return list(found.values())


class Names:
    """Names for parameters and results: Python identifiers, each once."""

    def __init__(self) -> None:
        self.taken = {*INTERFACE_NAMES, "output", "kernel"}

    def new(self, wish: str) -> str:
        """A name that is like ``wish`` and not taken yet."""
        stem = re.sub(r"\W", "_", wish, flags=re.ASCII)[:48].strip("_") or "value"
        if stem[0].isdigit() or keyword.iskeyword(stem):
            stem = f"_{stem}"
        name, number = stem, 1
        while name in self.taken:
            number += 1
            name = f"{stem}_{number}"
        self.taken.add(name)
        return name


@dataclass
class Written:
    """A drafted pipeline as a problem file has it.

    Attributes:
        mapping: with the keys of a problem file.
        tensors: the tensors that are no inputs of the module, by parameter name.
        inputs: the parameters that are the module's inputs, by the input's name.
    """

    mapping: dict[str, Any]
    tensors: dict[str, Any]
    inputs: dict[str, str]


def write(draft: Draft, last: Value, dropped: Sequence[int], title: str, name: str) -> Written:
    """The problem whose result is ``last`` without the axes ``dropped``.

    Args:
        draft: that made it.
        last: the last value.
        dropped: axes of extent 1 that the result lacks.
        title: of the problem.
        name: of the problem.
    """
    steps = draft.order(last)
    source = next(value.source for value in steps if value.source is not None and value.source.tensor is not None)
    names = Names()
    order = [source.tensor, *(each for value in steps for each in value.fields.values() if isinstance(each, Tensor))]
    tensors = {id(each): each for each in order if each is not None}
    called: dict[int, str] = {}
    inputs: dict[str, str] = {}
    for key, each in tensors.items():
        if each.data is None and each.name in inputs:  # along other axes here
            called[key] = inputs[each.name]
            continue
        called[key] = names.new(each.name)
        if each.data is None:
            inputs[each.name] = called[key]
    called[id(source)] = called[id(source.tensor)]
    sizes: dict[Any, str] = {}  # by symbol
    hints: dict[str, float] = {}
    parameters: dict[str, Any] = {}
    for key, each in tensors.items():
        words = _extent_words(draft.rank, each, is_source=each is source.tensor, name=called[key])
        extents: list[int | str] = []
        for extent, word in zip(each.shape, words, strict=True):
            if isinstance(extent, int):
                extents.append(extent)
                continue
            symbol = extent.node.expr
            if symbol.is_Symbol and symbol not in sizes:
                sizes[symbol] = names.new(word)
                hints[sizes[symbol]] = example(extent)
            extents.append(_expression(symbol, sizes))
        parameters[called[key]] = extents
        if not extents:  # a number
            parameters[called[key]], hints[called[key]] = "double", 1.0
    parameters["output"] = "output"
    axes = axis_names(draft.rank)
    pipeline = list(_steps(steps, called, names, axes, draft.rank))
    if dropped:
        pipeline.append({"op": "squeeze", "axis": _axis_words(tuple(dropped), axes)})
    mapping: dict[str, Any] = {"name": name, "title": title}
    given = len(next(iter(parameters.values()))) - 2
    if given != draft.rank or given not in RANKS:
        mapping["rank"] = draft.rank
    mapping |= {"parameters": parameters, "pipeline": pipeline, "cases": {"sample": hints}}
    inside = {called[key]: each.data for key, each in tensors.items() if each.data is not None}
    return Written(mapping, inside, inputs)


def _expression(extent: Any, sizes: Mapping[Any, str]) -> str:
    """An extent over the sizes that have names.

    Raises:
        SymbolicError: it is over others, or no polynomial of them.
    """
    symbols = extent.free_symbols
    text = str(extent)
    if not symbols <= sizes.keys() or not extent.is_polynomial(*symbols) or "**" in text or "/" in text:
        raise SymbolicError
    return re.sub(r"\bs\w+", lambda found: {str(each): sizes[each] for each in symbols}[found[0]], text)


def _extent_words(rank: int, tensor: Tensor, *, is_source: bool, name: str) -> list[str]:
    """What to call the extents of a tensor where they vary."""
    if not is_source:
        return [f"{name}_{place}" for place in range(len(tensor.shape))]
    return ["batch", "channels", *SPATIAL_NAMES[rank]][rank + 2 - len(tensor.shape) :]


def _axis_words(axes: tuple[int, ...], names: Mapping[str, tuple[int, ...]]) -> str | list[str]:
    for name, those in names.items():
        if those == axes:
            return name
    return [name for name, those in names.items() if len(those) == 1 and those[0] in axes and name != "spatial"]


def _steps(
    steps: Sequence[Value], called: dict[int, str], names: Names, axes: Mapping[str, tuple[int, ...]], rank: int
) -> Iterator[Any]:
    """The pipeline's entries; a value gets a name where a step reads it that is not the next one, or as an operand."""
    before = [None, *steps]
    named = {
        id(each)
        for value, latest in zip(steps, before, strict=False)
        for each in (*value.fields.values(), *([] if value.source is latest else [value.source]))
        if isinstance(each, Value)
    }
    for value, latest in zip(steps, before, strict=False):
        entry: dict[str, Any] = {"op": value.op}
        if latest is not None and value.source is not latest:
            entry["from"] = called[id(value.source)]
        for key in VOCABULARY[value.op].fields:
            if key.name in value.fields:
                written = _field(value.fields[key.name], key.kind, called, axes)
                default = default_of(key, rank)
                if key.kind in ("each", "padding") and default is not None:
                    default = default[0] if key.kind == "each" else default[0][0]
                default = getattr(default, "value", default)  # a number
                if written != default or key.required or isinstance(written, bool) != isinstance(default, bool):
                    entry[key.name] = written
            elif key.name == "along" and isinstance(value.operand, Tensor) and value.operand.along is not None:
                entry["along"] = _axis_words(value.operand.along, axes)
        if id(value) in named:
            called[id(value)] = names.new(value.node.name)
            entry["as"] = called[id(value)]
        yield value.op if list(entry) == ["op"] else entry


def _field(value: Any, kind: str, called: Mapping[int, str], axes: Mapping[str, tuple[int, ...]]) -> Any:
    if isinstance(value, Tensor | Value):
        return called[id(value)]
    if kind == "axes":
        return _axis_words(tuple(value), axes)
    if isinstance(value, tuple):
        parts = [list(part) if isinstance(part, tuple) else part for part in value]
        pairs = [part for part in parts if isinstance(part, list)]
        if all(part == parts[0] for part in parts) and not pairs:
            return parts[0]
        return parts
    if isinstance(value, float) and math.isfinite(value) and kind == "size":
        return int(value)
    return value


# ---- as text -----------------------------------------------------------------------------------------------
def yaml_text(mapping: Mapping[str, Any]) -> str:
    """A problem file."""
    import yaml

    def flow(value: Any) -> str:
        text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=math.inf, allow_unicode=True)
        return str(text).removesuffix("...\n").strip()

    lines = [f"{key}: {flow(value)}" for key, value in mapping.items() if not isinstance(value, dict | list)]
    lines += ["", "parameters:", *(f"  {name}: {flow(value)}" for name, value in mapping["parameters"].items())]
    lines += ["", "pipeline:", *(f"  - {flow(entry)}" for entry in mapping["pipeline"])]
    lines += ["", "cases:", *(f"  {name}: {flow(values)}" for name, values in mapping["cases"].items())]
    return "\n".join(lines) + "\n"
