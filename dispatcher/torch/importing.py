"""A module of PyTorch as a problem."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
            spatial axes of extent 1 that the module's input lacks, as in ``(batch, features, 1)``.
    """

    problem: Problem
    tensors: Mapping[str, Any]
    inputs: tuple[str | None, ...]
    _mapping: Mapping[str, Any]

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
        given = {name: value for name, value in zip(self.inputs, inputs, strict=True) if name is not None}
        source = self.problem.tensors[0]
        x = given[source.name]
        more = len(source.shape or ()) - x.ndim
        given[source.name] = x.reshape(*x.shape[:2], *[1] * more, *x.shape[2:]) if more > 0 else x
        of_torch = isinstance(next(iter(given.values())), torch.Tensor)
        weights = {name: data if of_torch else data.cpu().numpy() for name, data in self.tensors.items()}
        with torch.no_grad():
            result = run(self.problem, device=device, **options, **given, **weights)
        return torch.from_numpy(result) if of_torch and not isinstance(result, torch.Tensor) else result


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
        with contextlib.suppress(UnsupportedError):
            return _mapped(program.run_decompositions(parts), title, name)
        raise


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
            store = program.constants if spec.target in program.constants else program.state_dict
            data = store[spec.target]
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
    matrices: bool = True,
) -> Imported:
    """The problem that a graph of ATen operators makes.

    Args:
        nodes: of a graph of :mod:`torch.fx`, in order, each with ``meta["val"]``; the last one is the output.
        tensors: what placeholders hold that are weights or buffers.
        inputs: the placeholders that are inputs; None for inputs that are no tensors.
        results: names of the nodes that the graph returns.
        title: of the problem.
        name: of the problem.
        matrices: whether an input of fewer dimensions than the problem has axes may be batch and channel.

    Raises:
        UnsupportedError: nodes have no counterpart in the vocabulary.
    """
    sources = [node for node in inputs if node is not None]
    if not sources:
        raise InputError("the module takes no tensor; expected one input or more")
    returned = [node for node in nodes if node.name in results]
    first = _first(nodes, sources)
    graph = Graph(nodes, tensors, first, returned, HANDLERS, batched=False)
    last = graph.finish(nodes[-1])
    if matrices and last is None and 2 <= len(first.meta["val"].shape) < graph.draft.rank + 2:
        other = Graph(nodes, tensors, first, returned, HANDLERS, batched=True)
        last = other.finish(nodes[-1])
        graph = max(graph, other, key=lambda each: nodes.index(next(iter(each.unsupported), nodes[-1])))
    if last is None:
        missing = list(graph.unsupported.values())
        count = f"{len(missing)} nodes have" if len(missing) > 1 else "a node has"
        raise UnsupportedError(f"{count} no counterpart in the vocabulary: {'; '.join(map(str, missing))}", missing)
    written = write(graph.draft, *last, title, name)
    read = tuple(None if node is None else written.inputs.get(node.name) for node in inputs)
    return Imported(problem_from_mapping(written.mapping), written.tensors, read, written.mapping)


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
