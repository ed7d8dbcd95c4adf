"""A module of PyTorch as a problem."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.export.graph_signature import InputKind, OutputKind

from dispatcher.errors import InputError, UnsupportedError
from dispatcher.problem.messages import show
from dispatcher.problem.model import Problem
from dispatcher.problem.schema import problem_from_mapping
from dispatcher.torch.draft import SymbolicError, write, yaml_text
from dispatcher.torch.graph import NO_STEP, Constant, Graph
from dispatcher.torch.layers import HANDLERS
from dispatcher.torch.nodes import Unsupported

_CONSTANTS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


@dataclass(frozen=True)
class Imported:
    """A module as a problem, with its weights.

    Attributes:
        problem: what the module computes; sizes that may vary are parameters, and the case ``sample`` has those of the
            example inputs.
        tensors: the module's weights and buffers by parameter name, as the problem takes them; they share memory with
            the module's where that is possible.
        inputs: the parameter that each input of the module is; None for one that nothing reads. A parameter may have
            spatial axes of extent 1 that the module's input lacks, as in ``(batch, features, 1)``. Where the module has
            channels last, the problem has them behind the batch, in its input and its result; :meth:`taken` and
            :meth:`shown` convert.
    """

    problem: Problem
    tensors: Mapping[str, Any]
    inputs: tuple[str | None, ...]
    _mapping: Mapping[str, Any]
    _taken: tuple[str, tuple[int, ...]] | None  # the pipeline's input, and its axes among the problem's, if not all
    _shown: tuple[tuple[int, ...], ...]  # the dimensions of the problem's result along each of the module's

    def yaml(self) -> str:
        """The problem as the text of a problem file, which loads to an equal problem."""
        return yaml_text(self._mapping)

    def run(self, *inputs: Any, device: str = "auto", **options: Any) -> Any:
        """What the module returns for ``inputs``.

        Args:
            inputs: as the module takes them: tensors, or NumPy arrays.
            device: see :func:`dispatcher.run`, as for ``options``.

        Returns:
            A tensor, or an array where the first input is one.

        Raises:
            InputError: there are too few inputs or too many.
        """
        from dispatcher.call.compiled import run

        if len(inputs) != len(self.inputs):
            raise InputError(f"{self.problem.name} takes {len(self.inputs)} inputs, got {len(inputs)}")
        given = self.taken(inputs)
        of_torch = isinstance(next(iter(given.values())), torch.Tensor)
        weights = {name: data if of_torch else data.cpu().numpy() for name, data in self.tensors.items()}
        with torch.no_grad():
            result = self.shown(run(self.problem, device=device, **options, **given, **weights))
        return torch.from_numpy(result) if of_torch and not isinstance(result, torch.Tensor) else result

    @property
    def arranged(self) -> bool:
        """Whether the problem takes the module's first input in another shape, or with axes in another order."""
        return self._taken is not None

    def taken(self, inputs: Sequence[Any]) -> dict[str, Any]:
        """The problem's arguments for ``inputs`` of the module."""
        given = {name: value for name, value in zip(self.inputs, inputs, strict=True) if name is not None}
        if self._taken is not None:
            name, axes = self._taken
            x = _permuted(given[name], sorted(range(len(axes)), key=axes.__getitem__))
            size = dict(zip(sorted(axes), x.shape, strict=True))
            given[name] = x.reshape([size.get(axis, 1) for axis in range(len(self._mapping["parameters"][name]))])
        return given

    @cached_property
    def plain(self) -> bool:
        """Whether the problem takes and gives what the module does, as it is."""
        return self._taken is None and self._is_shown

    @cached_property
    def _is_shown(self) -> bool:
        return self._shown == tuple((place,) for place in range(len(self._shown)))

    def shown(self, result: Any) -> Any:
        """The module's result that the problem's ``result`` is."""
        if self._is_shown:
            return result
        order = [place for places in self._shown for place in places]
        if order != sorted(order):
            result = _permuted(result, order)
        if all(len(places) == 1 for places in self._shown):
            return result
        sizes = iter(result.shape)
        return result.reshape([math.prod(next(sizes) for _ in places) for places in self._shown])


def _permuted(x: Any, order: Sequence[int]) -> Any:
    return x.permute(*order) if isinstance(x, torch.Tensor) else x.transpose(order)


def import_module(module: Any, example_inputs: Sequence[Any], name: str | None = None) -> Imported:
    """Capture a module with ``torch.export``, and map its graph to a problem.

    What the module does in its present mode is what is imported: in training mode batch norm takes the statistics of
    the batch, and its running statistics are not updated. Extents of the inputs may vary where the module allows it,
    but for those that are 1 in the examples.

    Args:
        module: a ``torch.nn.Module``, or a ``torch.export.ExportedProgram``.
        example_inputs: the positional arguments of a call, all tensors; their values do not matter.
        name: of the problem; the name of the module's class by default.

    Returns:
        The problem, and the module's weights.

    Raises:
        UnsupportedError: nodes of the graph have no counterpart in the vocabulary; the message names them all.
        InputError: ``module`` or ``example_inputs`` is none, or the module cannot be captured.
    """
    title = f"{type(module).__name__}, imported from PyTorch"
    label = (
        re.sub(r"[^A-Za-z0-9_-]+", "-", type(module).__name__ if name is None else name).strip("-_")[:100] or "model"
    )
    if isinstance(module, torch.export.ExportedProgram):
        return _translated(module, "Exported program, imported from PyTorch", label)
    if not isinstance(module, torch.nn.Module):
        raise InputError(f"the module is {show(module)}; expected a torch.nn.Module or an ExportedProgram")
    inputs = tensor_inputs(example_inputs)
    for axes in (5, 1):  # the batch alone where the code computes with other sizes
        with contextlib.suppress(SymbolicError):
            return _translated(captured(module, inputs, axes), title, label)
    return _translated(captured(module, inputs, 0), title, label)


def tensor_inputs(example_inputs: Any) -> tuple[torch.Tensor, ...]:
    """The positional arguments of a module's call that it is captured with.

    Raises:
        InputError: there is none, or one is no tensor or has no elements.
    """
    inputs = (example_inputs,) if isinstance(example_inputs, torch.Tensor) else tuple(example_inputs)
    if not inputs or not all(isinstance(each, torch.Tensor) for each in inputs):
        raise InputError("example_inputs are not tensors; expected a tuple of the module's positional arguments")
    if not all(each.numel() for each in inputs):
        raise InputError("an example input has no elements; expected one or more")
    return inputs


def captured(module: Any, inputs: tuple[torch.Tensor, ...], axes: int) -> torch.export.ExportedProgram:
    """The module's graph, in which the first ``axes`` extents of each input may vary where they are above 1.

    Raises:
        InputError: the module cannot be captured.
    """
    auto = torch.export.Dim.AUTO
    each = [{place: auto for place, size in enumerate(value.shape[:axes]) if size > 1} for value in inputs]
    shapes = _by_parameter(module, each)
    try:
        with torch.no_grad():  # in which a region without gradients is no region of its own
            return torch.export.export(module, inputs, dynamic_shapes=shapes, strict=False)
    except Exception as error:
        line = next(iter(str(error).strip().splitlines()), "")
        raise InputError(f"torch.export cannot capture the module: {type(error).__name__}: {line}") from error


def _by_parameter(module: Any, each: list[Any]) -> Any:
    """What ``dynamic_shapes`` takes for positional arguments, some of which ``forward`` may gather as ``*args``."""
    import inspect

    kinds = [parameter.kind for parameter in inspect.signature(module.forward).parameters.values()]
    place = next((i for i, kind in enumerate(kinds) if kind is inspect.Parameter.VAR_POSITIONAL), None)
    return tuple(each) if place is None else (*each[:place], tuple(each[place:]))


def _translated(program: Any, title: str, name: str) -> Imported:
    """The problem that an exported program makes; what has no step is taken apart where PyTorch knows how."""
    try:
        return _mapped(program, title, name)
    except UnsupportedError as error:
        table = torch.export.default_decompositions()
        missing: list[Any] = list(error.nodes)
        without = {each.node.target for each in missing if each.reason == NO_STEP}
        parts = {target: table[target] for target in without if target in table}
        if not parts:
            raise
        try:
            return _mapped(program.run_decompositions(parts), title, name)
        except UnsupportedError as other:
            left: list[Any] = list(other.nodes)
        names = {origin.name for each in left for origin in each.node.meta.get("from_node", ())}
        still = [each for each in missing if each.node.target not in parts or each.node.name in names]
        raise _unsupported(still or missing) from error


def _unsupported(missing: Sequence[Unsupported]) -> UnsupportedError:
    many = f"{len(missing)} nodes have" if len(missing) > 1 else "a node has"
    return UnsupportedError(f"{many} no counterpart in the vocabulary: {'; '.join(map(str, missing))}", missing)


def constant_of(program: torch.export.ExportedProgram, spec: Any) -> torch.Tensor:
    """What an input of a program's graph holds that is a parameter, a buffer or a constant."""
    store = program.constants if spec.target in program.constants else program.state_dict
    value: torch.Tensor = store[spec.target]
    return value


def _mapped(program: Any, title: str, name: str) -> Imported:
    """The problem that an exported program makes."""
    placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    tensors: dict[Any, Constant] = {}
    inputs: list[Any] = []
    for spec in program.graph_signature.input_specs:
        node = placeholders.get(getattr(spec.arg, "name", None))
        if spec.kind is InputKind.USER_INPUT:
            inputs.append(node if node is not None and isinstance(node.meta.get("val"), torch.Tensor) else None)
        elif spec.kind in _CONSTANTS:
            data = constant_of(program, spec)
            tensors[node] = Constant(spec.target, data, tuple(data.shape), spec.kind is InputKind.CONSTANT_TENSOR)
    results = [
        spec.arg.name
        for spec in program.graph_signature.output_specs
        if spec.kind is OutputKind.USER_OUTPUT and hasattr(spec.arg, "name")
    ]
    return translate(list(program.graph.nodes), tensors, inputs, results, title, name)


def translate(
    nodes: Sequence[Any],
    tensors: Mapping[Any, Constant],
    inputs: Sequence[Any],
    results: Sequence[str],
    title: str,
    name: str,
    *,
    freely: bool = False,
) -> Imported:
    """The problem that a graph of ATen operators makes.

    Args:
        nodes: of a graph of :mod:`torch.fx`, in order, each with ``meta["val"]``; the last one is the output.
        tensors: what placeholders hold that are weights or buffers.
        inputs: the placeholders that are inputs; None for inputs that are no tensors.
        results: names of the nodes that the graph returns.
        title: of the problem.
        name: of the problem.
        freely: whether the result's dimensions may be any of the problem's axes, in any order.

    Raises:
        UnsupportedError: nodes have no counterpart in the vocabulary.
    """
    sources = [node for node in inputs if node is not None]
    if not sources:
        raise InputError("the module takes no tensor; expected one input or more")
    returned = [node for node in nodes if node.name in results]
    first = _first(nodes, sources)
    count, graphs, last = len(first.meta["val"].shape), list[Graph](), None
    for arranged in ("given", "batched", "channels last"):  # the latter two where linear layers want them
        if graphs and not (2 <= count < graphs[0].draft.rank + 2 if arranged == "batched" else count > 2):
            continue
        graphs.append(Graph(nodes, tensors, first, returned, HANDLERS, arranged=arranged, freely=freely))
        last = graphs[-1].finish(nodes[-1])
        if last is not None:
            break
    if last is None:
        graph = max(graphs, key=lambda each: nodes.index(next(iter(each.unsupported), nodes[-1])))
        raise _unsupported(list(graph.unsupported.values()))
    graph, (value, layout) = graphs[-1], last
    kept = sorted(axis for axes in layout for axis in axes)
    all_axes = (0, 1, *graph.draft.spatial)
    title += ", with channels first" if graph.arranged == "channels last" else ""
    written = write(graph.draft, value, [axis for axis in all_axes if axis not in kept], title, name)
    read = tuple(None if node is None else written.inputs.get(node.name) for node in inputs)
    axes = tuple(all_axes.index(axis) for axis in graph.axes)
    taken = None if graph.arranged == "given" else (written.inputs[first.name], axes)
    shown = tuple(tuple(map(kept.index, axes)) for axes in layout)
    problem = problem_from_mapping(written.mapping)
    return Imported(problem, written.tensors, read, written.mapping, taken, shown)


def _first(nodes: Sequence[Any], sources: Sequence[Any]) -> Any:
    """The input that the pipeline begins with: what the first convolution reads, by whatever way, else the largest."""
    for node in nodes:
        if node.op == "call_function" and ("conv" in str(node.target) or "pool" in str(node.target)):
            read = node
            while read not in sources and read.op == "call_function" and read.all_input_nodes:
                read = read.all_input_nodes[0]
            if read in sources:
                return read
    return max(sources, key=lambda node: len(node.meta["val"].shape))
