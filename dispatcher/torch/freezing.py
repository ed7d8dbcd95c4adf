"""A module as it is when it is compiled: its weights are packed once, and nothing of it is looked at in a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch.export.graph_signature import InputKind, OutputKind

from dispatcher.call.compiled import CompiledOperator, PreparedCall, Settings
from dispatcher.errors import InputError
from dispatcher.problem.torchtensors import host_view, tensor_of
from dispatcher.torch.groups import GraphReport, Group, cut, new_report
from dispatcher.torch.importing import Imported, captured, constant_of, tensor_inputs
from dispatcher.torch.partition import Piece, fold, without_writes

#: Dtypes that NumPy has as well.
DIRECT = (torch.float16, torch.float32, torch.float64)
#: Shapes of inputs, such as batches, that a group remembers.
MOST_SHAPES = 64


class Frozen(torch.nn.Module):  # type: ignore[misc]
    """What ``dispatcher.torch.compile(..., frozen=True)`` returns.

    It has no parameters, and gives no gradients. Its inputs have the dtypes, devices and shapes of the examples, but
    for the first axis, which varies where the example's extent is above 1 and the module's code allows it.
    """

    def __init__(self, module: torch.nn.Module, inputs: Sequence[Any], device: str) -> None:
        """See :func:`dispatcher.torch.compile`."""
        super().__init__()
        if module.training:
            raise InputError("the module is in training mode; expected one to freeze: call its eval() first")
        inputs = tensor_inputs(inputs)
        program = captured(module, inputs, 1)
        graph, found = program.graph_module, new_report()
        if any(spec.kind is not OutputKind.USER_OUTPUT for spec in program.graph_signature.output_specs):
            raise InputError("the module changes its buffers; expected one to freeze that changes nothing")
        self._title = type(module).__name__
        self._expected = [
            _Expected(place, value, node.meta["val"])
            for place, (value, node) in enumerate(zip(inputs, _hold_weights(program), strict=True))
        ]
        without_writes(graph.graph)
        graph.graph.eliminate_dead_code()
        known = fold(graph)
        cut(graph, known, found, partial(FrozenGroup, known=known, device=device, found=found))
        _drop_unused(graph)
        self._graph, self._result = graph, program.call_spec.out_spec
        before = [(buffer, buffer.clone()) for buffer in graph.buffers()]
        with torch.no_grad(), torch.random.fork_rng():
            self(*inputs)  # compiles
            for buffer, value in before:  # as those that count calls
                buffer.copy_(value)
        for node in graph.graph.nodes:
            if isinstance(node.target, FrozenGroup) and not node.target.in_torch:
                node.target.held.clear()

    def extra_repr(self) -> str:
        """The module that it was."""
        return self._title

    def forward(self, *inputs: Any) -> Any:
        """What the module returned for such inputs.

        Raises:
            InputError: an input is not like the example, or requires gradients.
        """
        if len(inputs) != len(self._expected):
            raise InputError(f"{self._title} takes {len(self._expected)} inputs, got {len(inputs)}")
        for value, expected in zip(inputs, self._expected, strict=True):
            expected.check(value)
        results = self._graph.forward(*inputs)
        return results[0] if self._result.is_leaf() else pytree.tree_unflatten(results, self._result)


class _Expected:
    """What an input has to be like.

    Args:
        place: of the input.
        example: a tensor.
        captured: as it stands in the graph, where the extent of its first axis may be a symbol.
    """

    def __init__(self, place: int, example: torch.Tensor, captured: Any) -> None:
        self.place, self.dtype, self.device, self.shape = place, example.dtype, example.device, example.shape
        self.varies = captured.ndim > 0 and not isinstance(captured.shape[0], int)

    def check(self, value: Any) -> None:
        """Raise an InputError for what is not as it should be."""
        alike = isinstance(value, torch.Tensor) and value.dtype is self.dtype and value.device == self.device
        if not alike or not self._fits(value.shape):
            sizes = ("N", *self.shape[1:]) if self.varies else self.shape
            got = f"{value.dtype} {tuple(value.shape)} on {value.device}" if isinstance(value, torch.Tensor) else value
            raise InputError(
                f"input {self.place} is {got}; expected {self.dtype} ({', '.join(map(str, sizes))}) on {self.device}, "
                "as the module was frozen for: compile it for others, or without frozen=True"
            )
        if value.requires_grad and torch.is_grad_enabled():
            raise InputError(
                f"input {self.place} requires gradients, and a frozen module gives none; call it inside "
                "torch.no_grad(), or compile without frozen=True"
            )

    def _fits(self, shape: torch.Size) -> bool:
        if shape == self.shape:
            return True
        return self.varies and len(shape) == len(self.shape) and shape[0] > 0 and shape[1:] == self.shape[1:]


class FrozenGroup(Group):
    """A group whose weights stay as they are: a call takes the other inputs alone.

    Contiguous tensors in host memory, of shapes that were seen before, are handed on without another look.
    """

    def __init__(self, piece: Piece, known: Mapping[Any, torch.Tensor], device: str, found: GraphReport) -> None:
        super().__init__(piece, frozenset(known), device, found)
        self.held = {node: known[node] for _, node in self.weights}
        self.inputs = [node for node in piece.inputs if node not in self.held]
        self.varying = [place for place, node in enumerate(self.inputs) if isinstance(node.meta["val"], torch.Tensor)]
        imported = piece.translated(self.held, self.__name__)
        compiled = CompiledOperator(imported.problem, Settings(device=device), imported.tensors, eager=False)
        self.ready = compiled, imported
        self.names = [
            (name, place) for name, place in zip(imported.inputs, self.varying, strict=True) if name is not None
        ]
        self.seen_before: dict[tuple[Any, ...], PreparedCall] = {}

    def run(self, *inputs: Any) -> Any:
        """The value, without gradients."""
        arrays = self._arrays(inputs)
        if arrays is None:
            return super().run(*inputs)
        key = tuple((array.shape, array.dtype) for array in arrays.values())
        prepared = self.seen_before.get(key)
        if prepared is not None:
            return tensor_of(prepared.on(arrays))
        result = super().run(*inputs)
        if not self.in_torch and len(self.seen_before) < MOST_SHAPES:
            self.seen_before[key] = self.ready[0].prepare(**arrays)
        return result

    def _arrays(self, inputs: Sequence[Any]) -> dict[str, np.ndarray] | None:
        """The inputs as arrays, where the operator takes and gives such as they are; else None."""
        if self.in_torch or self.order is not None or not self.ready[1].plain:
            return None
        arrays = {}
        for name, place in self.names:
            tensor = inputs[place]
            if tensor.device.type != "cpu" or tensor.dtype not in DIRECT or not tensor.is_contiguous():
                return None
            arrays[name] = host_view(name, tensor)
        return arrays

    def _ready(self, inputs: Sequence[Any]) -> tuple[CompiledOperator, Imported]:
        return self.ready

    def in_eager(self, inputs: Sequence[Any]) -> Any:
        """The value as PyTorch makes it; before anybody let go of the weights."""
        given = iter(inputs)
        return self.piece.module(*(self.held[n] if n in self.held else next(given) for n in self.piece.inputs))


def _hold_weights(program: torch.export.ExportedProgram) -> list[Any]:
    """Make copies of all that does not vary attributes of the graph's module; gives the inputs that are left."""
    module = program.graph_module
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    inputs = []
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        if spec.kind is InputKind.USER_INPUT:
            inputs.append(node)
            continue
        name = f"_held_{node.name}"
        module.register_buffer(name, constant_of(program, spec).detach().clone(), persistent=False)
        with module.graph.inserting_before(node):
            holder = module.graph.get_attr(name)
        holder.meta = dict(node.meta)
        node.replace_all_uses_with(holder)
        module.graph.erase_node(node)
    return inputs


def _drop_unused(module: torch.fx.GraphModule) -> None:
    """Let go of copies that groups have packed."""
    module.graph.eliminate_dead_code()
    used = {node.target for node in module.graph.nodes if node.op == "get_attr"}
    for name in [name for name, _ in module.named_buffers(recurse=False) if name not in used]:
        delattr(module, name)
    module.recompile()
