"""Modules of PyTorch that run here as far as they can: ``compile``, and the backend of ``torch.compile``."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx

from dispatcher.device.selection import parse_request
from dispatcher.errors import InputError, first_line
from dispatcher.problem.messages import show
from dispatcher.torch.freezing import Frozen
from dispatcher.torch.groups import GraphReport, Group, cut, new_report
from dispatcher.torch.partition import fold, without_writes

_EINSUM = torch.ops.aten.einsum.default  # which is a product that may be a convolution, as others are


def compile(
    module: Any, example_inputs: Sequence[Any], device: str = "auto", *, frozen: bool = False
) -> torch.nn.Module:
    """Run a module here as far as the vocabulary goes, and in PyTorch otherwise.

    The result is a module with the same parameters, which it reads at every call, so that it can be trained and moved
    on. Gradients are PyTorch's. The first axis of the inputs may vary without a new compilation.

    Args:
        module: a ``torch.nn.Module``.
        example_inputs: positional arguments of a call, with which it is compiled.
        device: see :func:`dispatcher.run`.
        frozen: take the module, in evaluation mode, as it is now: parameters, buffers, attributes, hooks. Nothing of it
            is looked at again, so that calls are shorter. The result has no parameters and gives no gradients, and
            takes inputs like the examples; see :class:`dispatcher.torch.freezing.Frozen`.

    Raises:
        InputError: an argument is wrong; or the module, where it is to be frozen, is in training mode or cannot be
            captured.
    """
    if not isinstance(module, torch.nn.Module):
        raise InputError(f"the module is {show(module)}; expected a torch.nn.Module")
    parse_request(device)
    inputs = (example_inputs,) if isinstance(example_inputs, torch.Tensor) else tuple(example_inputs)
    if frozen:
        return Frozen(module, inputs, device)
    compiled: torch.nn.Module = torch.compile(module, backend=partial(backend, device=device))
    for each in inputs:
        if isinstance(each, torch.Tensor) and each.ndim and each.shape[0] > 1:
            torch._dynamo.maybe_mark_dynamic(each, 0)
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    with torch.no_grad(), torch.random.fork_rng():
        compiled(*inputs)
        for buffer, before in buffers:  # running statistics
            buffer.copy_(before)
    return compiled


def backend(module: torch.fx.GraphModule, example_inputs: Sequence[Any], device: str = "auto") -> Callable[..., Any]:
    """What ``torch.compile(model, backend="dispatcher")`` calls with each graph."""
    found = new_report()
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    fakes = [node.meta.get("example_value", given) for node, given in zip(placeholders, example_inputs, strict=True)]
    static = ["_dynamo_static_input_type" in node.meta.get("tensor_dict", {}) for node in placeholders]
    # What an operator makes on the way, as an interpolation makes indices, is fake as well.
    fake = next((each.fake_mode for each in fakes if isinstance(each, FakeTensor)), contextlib.nullcontext())
    try:
        with torch.no_grad(), fake, torch.fx.traceback.preserve_node_meta():
            interpreted = partial(torch.fx.Interpreter.run, torch.fx.Interpreter(module))
            traced = make_fx(interpreted, {_EINSUM: _EINSUM.decompose}, pre_dispatch=True, _allow_non_fake_inputs=True)(
                *fakes
            )
        held = (getattr(traced, node.target) for node in traced.graph.nodes if node.op == "get_attr")
        if any(isinstance(each, FakeTensor) for each in held):
            raise InputError("a tensor leaves the graph, as by .data")
    except Exception as error:  # a higher-order operator, data-dependent sizes, ...
        found.left.append(f"the whole graph: it cannot be traced to operators of ATen: {first_line(error)}")
        forward: Callable[..., Any] = module.forward
        return forward
    return _Compiled(traced, static, device, found)


class _Compiled:
    """A graph that is cut into groups at its first call, when its weights are known."""

    def __init__(self, module: torch.fx.GraphModule, static: Sequence[bool], device: str, found: GraphReport) -> None:
        self.module, self.static, self.device, self.found = module, static, device, found
        self.lock = threading.Lock()
        self.cut = False

    def __call__(self, *arguments: Any) -> Any:
        if not self.cut:
            with self.lock:
                if not self.cut:
                    self._cut(arguments)
                    self.cut = True
        return self.module(*arguments)

    def _cut(self, arguments: Sequence[Any]) -> None:
        graph = self.module.graph
        without_writes(graph)
        graph.eliminate_dead_code()
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        weights = {
            node: value
            for node, value, fixed in zip(placeholders, arguments, self.static, strict=True)
            if fixed and isinstance(value, torch.Tensor)
        } | fold(self.module)
        cut(
            self.module,
            weights,
            self.found,
            partial(Group, weights=frozenset(weights), device=self.device, found=self.found),
        )
