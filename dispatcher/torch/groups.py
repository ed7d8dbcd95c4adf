"""Groups of a graph that run here, in the places of their nodes, and the report of what went where."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dispatcher.call.compiled import CompiledOperator, Settings
from dispatcher.torch.draft import example
from dispatcher.torch.importing import Imported
from dispatcher.torch.partition import Piece, pieces_of, places

_numbers = itertools.count(1)
#: Reports of the latest graphs.
_reports: deque[GraphReport] = deque(maxlen=64)


@dataclass
class GraphReport:
    """Where the parts of one graph run.

    Attributes:
        groups: for each part that runs here, its name, its operators, and the device (once it has run).
        left: for each operator that stays in PyTorch, where it stands in the source, and why.
    """

    groups: list[tuple[str, tuple[str, ...], str]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{name} on {place}: {', '.join(operators)}" for name, operators, place in self.groups]
        return "\n".join([*lines, *(f"PyTorch: {each}" for each in self.left)]) or "nothing to run"


@dataclass(frozen=True)
class Report:
    """What went where and why, for the latest graphs that were compiled."""

    graphs: tuple[GraphReport, ...]

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.graphs)) or "nothing has been compiled"


def new_report() -> GraphReport:
    """The report of a graph that is being compiled, to be filled in."""
    found = GraphReport()
    _reports.append(found)
    return found


def report() -> Report:
    """What the latest graphs that ``compile`` or ``torch.compile`` made run where, and why; ``print`` it."""
    return Report(tuple(_reports))


def cut(
    module: torch.fx.GraphModule,
    weights: Mapping[Any, torch.Tensor],
    found: GraphReport,
    group_of: Callable[[Piece], Group],
) -> None:
    """Put groups in the place of the nodes that can run here.

    Args:
        module: its graph has no dead code.
        weights: what nodes hold that are weights, buffers and constants.
        found: to be filled in.
        group_of: makes the group of a piece.
    """
    graph = module.graph
    pieces, left = pieces_of(graph, weights)
    found.left += places(left)
    made: dict[Any, Any] = {}
    for piece in pieces:
        group = group_of(piece)
        with graph.inserting_before(piece.output):
            call = graph.call_function(group, tuple(made.get(each, each) for each in group.inputs))
        made[piece.output] = call
        call.meta = dict(piece.output.meta)
        piece.output.replace_all_uses_with(call)
        for node in reversed(piece.nodes):
            graph.erase_node(node)
    graph.lint()
    module.recompile()


class Group:
    """Nodes that run here together; in PyTorch where only the reference could run them."""

    def __init__(self, piece: Piece, weights: frozenset[Any], device: str, found: GraphReport) -> None:
        self.__name__ = f"group_{next(_numbers)}"
        self.piece, self.device = piece, device
        #: Nodes of the graph whose values a call takes.
        self.inputs = piece.inputs
        self.weights = [(place, node) for place, node in enumerate(piece.inputs) if node in weights]
        #: Places of the inputs that a call takes from its caller.
        self.varying = [
            place
            for place, node in enumerate(piece.inputs)
            if node not in weights and isinstance(node.meta["val"], torch.Tensor)
        ]
        #: The dimensions as they lie in memory in eager mode, which code behind may rely on, as ``view`` does.
        strides = [example(stride) for stride in piece.output.meta["val"].stride()]
        order = sorted(range(len(strides)), key=strides.__getitem__, reverse=True)
        self.order = None if order == sorted(order) else order
        self.found, self.place = found, len(found.groups)
        found.groups.append((self.__name__, tuple(str(node.target) for node in piece.nodes), "(not run yet)"))
        self.lock = threading.Lock()
        self.imported: Imported | None = None
        self.compiled: CompiledOperator | None = None
        self.seen: list[Any] | None = None
        self.in_torch = False

    def __call__(self, *inputs: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(each, torch.Tensor) and each.requires_grad for each in inputs):
            return _Differentiable.apply(self, *inputs)
        return self.run(*inputs)

    def run(self, *inputs: Any) -> Any:
        """The value, without gradients."""
        if self.in_torch:
            return self.in_eager(inputs)
        compiled, imported = self._ready(inputs)
        named = imported.taken([inputs[place] for place in self.varying])
        prepared = compiled.prepare(**named) if self.found.groups[self.place][2].startswith("(") else None
        if prepared is not None and self._note(prepared.choice.device):
            return self.in_eager(inputs)
        result = imported.shown(compiled(**named))
        if self.order is None:
            return result.contiguous()
        laid = result.permute(self.order).contiguous()
        return laid.permute([self.order.index(place) for place in range(len(self.order))])

    def in_eager(self, inputs: Sequence[Any]) -> Any:
        """The value as PyTorch makes it."""
        return self.piece.module(*inputs)

    def _ready(self, inputs: Sequence[Any]) -> tuple[CompiledOperator, Imported]:
        """The operator, with the weights as they are now."""
        values = [inputs[place] for place, _ in self.weights]
        seen = [(value.data_ptr(), None if value.is_inference() else value._version) for value in values]
        with self.lock:
            if self.compiled is None or self.imported is None or seen != self.seen:
                held = {node: inputs[place] for place, node in self.weights}
                imported = self.piece.translated(held, self.__name__)
                if self.compiled is None:
                    settings = Settings(device=self.device)
                    self.compiled = CompiledOperator(imported.problem, settings, imported.tensors, eager=False)
                elif imported.tensors:
                    self.compiled.update(**imported.tensors)
                self.imported, self.seen = imported, seen
            return self.compiled, self.imported

    def _note(self, device: Any) -> bool:
        """Report the device; whether it is the reference, which nobody asked for by name."""
        name, operators, _ = self.found.groups[self.place]
        self.in_torch = device.kind == "reference" and "numpy" not in self.device
        where = "PyTorch, since only the reference could run it here" if self.in_torch else device.id
        self.found.groups[self.place] = (name, operators, where)
        return self.in_torch


class _Differentiable(torch.autograd.Function):  # type: ignore[misc]
    """A group with gradients: they are those of its nodes in PyTorch, which run once more for them."""

    @staticmethod
    def forward(ctx: Any, group: Group, *inputs: Any) -> Any:
        ctx.group = group
        ctx.plain = [None if isinstance(each, torch.Tensor) else each for each in inputs]
        ctx.save_for_backward(*(each if isinstance(each, torch.Tensor) else None for each in inputs))
        return group.run(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        wanted = ctx.needs_input_grad[1:]
        saved = zip(ctx.saved_tensors, ctx.plain, wanted, strict=True)
        inputs = [plain if each is None else each.detach().requires_grad_(want) for each, plain, want in saved]
        with torch.enable_grad():
            result = ctx.group.piece.module(*inputs)
            sources = [each for each, want in zip(inputs, wanted, strict=True) if want]
            found = iter(torch.autograd.grad(result, sources, gradient, allow_unused=True))
        return (None, *(next(found) if want else None for want in wanted))
