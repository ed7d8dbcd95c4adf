"""Modules that are frozen when they are compiled: results, what does not show afterwards, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from conftest import Install

from dispatcher.errors import InputError
from dispatcher.interface import Device

torch = pytest.importorskip("torch")

import dispatcher.torch as dispatcher_torch  # noqa: E402

nn = torch.nn


class Mixed(nn.Module):
    """Several results, a weight that is computed, a module used twice, a constant, and what the vocabulary lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 3, padding=1))
        self.norm, self.drop, self.head = nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Linear(4, 5)
        self.register_buffer("factor", torch.tensor(0.5))

    def forward(self, x: Any, bias: Any) -> Any:
        y = torch.relu(self.norm(self.conv(x)) * self.factor) + bias
        y = self.drop(self.conv(y) + x * torch.linspace(1.0, 2.0, 4).view(4, 1, 1))
        return {"scores": self.head(y.mean((2, 3))), "sorted": [torch.sort(y.flatten(1), 1)[0], self.conv.bias]}


def made() -> tuple[Any, tuple[Any, Any]]:
    torch.manual_seed(0)
    module = Mixed()
    module(torch.randn(8, 4, 5, 6), torch.ones(1, 4, 1, 1))  # running statistics
    return module.eval(), (torch.randn(2, 4, 5, 6), torch.randn(1, 4, 1, 1))


def close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-4)


def test_a_frozen_module_stays_as_it_was(opencl: Device) -> None:
    module, (x, bias) = made()
    plain = copy.deepcopy(module)
    frozen = dispatcher_torch.compile(module, (x, bias), device=opencl.id, frozen=True)
    with torch.no_grad():
        for parameter in [*module.parameters(), module.factor, module.norm.running_var]:
            parameter.mul_(3.0)
        module.train().head = nn.Identity()
        for batch in (2, 1, 5):
            y = torch.randn(batch, *x.shape[1:])
            close(frozen(y, bias), plain(y, bias))
    close(frozen(x, bias), plain(x, bias))  # where gradients are recorded, but for nothing here
    assert not list(frozen.parameters()) and "Mixed" in repr(frozen)
    (latest,) = [
        graph for graph in dispatcher_torch.report().graphs if any("aten.sort" in each for each in graph.left)
    ][-1:]
    assert {place for _, _, place in latest.groups} == {opencl.id}


def test_a_frozen_network_is_one_call_and_keeps_no_second_copy(opencl: Device) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 4, 1), nn.Tanh()).eval()
    x = torch.randn(1, 3, 6, 7)
    frozen = dispatcher_torch.compile(module, x, device=opencl.id, frozen=True)
    with torch.no_grad():
        close(frozen(x), module(x))
    view = x.transpose(2, 3).contiguous().transpose(2, 3)
    with torch.no_grad(), np.errstate(all="raise"):  # whatever its memory is like, once it has run and at first
        for again in (x + 1.0, view, x.clone().requires_grad_(), x * 1e-30, x.to(memory_format=torch.channels_last), x):
            close(frozen(again), module(again))
    (group,) = [node.target for node in frozen._graph.graph.nodes if node.op == "call_function"]
    assert not list(frozen.buffers()) and not group.held
    with pytest.raises(InputError, match=r"input 0 is torch.float32 \(2, 3, 6, 7\) on cpu; expected .* \(1, 3, 6, 7\)"):
        frozen(torch.cat([x, x]))


def test_what_cannot_be_frozen_or_called_is_refused() -> None:
    module, (x, bias) = made()

    def frozen(each: Any, *inputs: Any) -> Any:
        return dispatcher_torch.compile(each, inputs, device="numpy", frozen=True)

    with pytest.raises(InputError, match=r"in training mode; .* call its eval\(\) first"):
        frozen(copy.deepcopy(module).train(), x, bias)
    with pytest.raises(InputError, match="example_inputs are not tensors"):
        frozen(module, x, 2.0)
    with pytest.raises(InputError, match=r"torch\.export cannot capture the module"):
        frozen(module, x)
    here = frozen(module, x, bias)
    for inputs, reason in {
        (x,): "Mixed takes 2 inputs, got 1",
        (x, 1.0): r"input 1 is 1\.0; expected torch\.float32 \(1, 4, 1, 1\) on cpu",
        (
            x.double(),
            bias,
        ): r"input 0 is torch\.float64 .* expected torch\.float32 \(N, 4, 5, 6\) on cpu, as the module",
        (x[..., :4], bias): r"input 0 is torch\.float32 \(2, 4, 5, 4\) on cpu",
        (x[:0], bias): r"input 0 is torch\.float32 \(0, 4, 5, 6\) on cpu",
        (x.clone().requires_grad_(), bias): "input 0 requires gradients, and a frozen module gives none",
    }.items():
        with pytest.raises(InputError, match=reason):
            here(*inputs)
    with torch.no_grad():
        close(here(x.clone().requires_grad_(), bias), module(x, bias))


class Counting(nn.Module):
    """Writes into a buffer in evaluation mode, and reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 2, 3)
        self.register_buffer("calls", torch.zeros(2, 1))

    def forward(self, x: Any) -> Any:
        self.calls.add_(1.0)
        return self.conv(x) * self.calls


def test_a_buffer_that_changes_in_calls_is_counted_from_where_it_stood(opencl: Device) -> None:
    module, x = Counting().eval(), torch.randn(2, 2, 9)
    plain = copy.deepcopy(module)
    frozen = dispatcher_torch.compile(module, x, device=opencl.id, frozen=True)
    with torch.no_grad():
        for _ in range(3):
            close(frozen(x), plain(x))
    assert not module.calls.any()


def test_only_the_reference_leaves_a_frozen_group_to_pytorch(install_backends: Install) -> None:
    module, inputs = made()
    install_backends()
    frozen = dispatcher_torch.compile(module, inputs, frozen=True)
    with torch.no_grad():
        close(frozen(*inputs), module(*inputs))
        close(frozen(*inputs), module(*inputs))
    assert "only the reference could run it" in str(dispatcher_torch.report().graphs[-1])
