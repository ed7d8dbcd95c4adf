"""Modules that run here as far as they can: what goes where, results, gradients, and batches of any size."""

from __future__ import annotations

import copy
import importlib.metadata
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from conftest import Install

from dispatcher.errors import DeviceError, InputError
from dispatcher.interface import Device

torch = pytest.importorskip("torch")

import dispatcher.torch as dispatcher_torch  # noqa: E402
from dispatcher.torch.compiler import backend  # noqa: E402

nn = torch.nn


def block(ins: int, outs: int, stride: int = 1) -> Any:
    return nn.Sequential(
        nn.Conv3d(ins, outs, 3, stride=stride, padding=1),
        nn.InstanceNorm3d(outs, affine=True),
        nn.LeakyReLU(0.01, inplace=True),
    )


class UNet(nn.Module):
    """Two levels, with a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = block(1, 4), block(4, 8, 2)
        self.up, self.last, self.head = nn.ConvTranspose3d(8, 4, 2, stride=2), block(8, 4), nn.Conv3d(4, 3, 1)

    def forward(self, x: Any) -> Any:
        first = self.first(x)
        return self.head(self.last(torch.cat([self.up(self.second(first)), first], 1)))


class Sorting(nn.Module):
    """What the vocabulary has, around something that it lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.norm = nn.Conv3d(3, 4, 3, padding=1), nn.BatchNorm3d(4), nn.LayerNorm(4)

    def forward(self, x: Any) -> Any:
        y = self.bn(self.conv(x)).relu_()
        y = self.norm(y.permute(0, 2, 3, 4, 1)).permute(0, 4, 1, 2, 3)
        return torch.sort(y.flatten(2), 2)[0].view(y.shape[0], 4, -1)


class Residual(nn.Module):
    """A value that is used twice, and axes that are dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.ConvTranspose2d(4, 8, 4, 2, 1), nn.GroupNorm(2, 8), nn.Linear(8, 5)

    def forward(self, x: Any) -> Any:
        y = self.norm(self.conv(x))
        return self.head((y + nn.functional.silu(y)).mean((2, 3)))


MODULES = {"unet": (UNet, (2, 1, 4, 4, 8)), "sorting": (Sorting, (2, 3, 4, 5, 6)), "residual": (Residual, (2, 4, 5, 6))}


def made(name: str) -> tuple[Any, Any]:
    kind, shape = MODULES[name]
    torch.manual_seed(0)
    torch._dynamo.reset()
    return kind(), torch.randn(shape)


def close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_results_of_any_batch_and_gradients(name: str, training: bool, opencl: Device) -> None:
    module, x = made(name)
    module.train(training)
    plain = copy.deepcopy(module)
    compiled = dispatcher_torch.compile(module, (x,), device=opencl.id)
    assert isinstance(compiled, nn.Module)
    for buffer, before in zip(module.buffers(), plain.buffers(), strict=True):
        assert torch.equal(buffer, before)
    graphs = len(dispatcher_torch.report().graphs)
    with torch.no_grad():
        for batch in (2, 3, 5):
            y = torch.randn(batch, *x.shape[1:])
            close(compiled(y), plain(y))
            for buffer, before in zip(module.buffers(), plain.buffers(), strict=True):
                torch.testing.assert_close(buffer, before, rtol=1e-4, atol=1e-4)
        assert len(dispatcher_torch.report().graphs) == graphs
        for one, other in zip(module.parameters(), plain.parameters(), strict=True):
            other.copy_(one.mul_(1.5))
        close(compiled(x), plain(x))
    compiled(x).square().sum().backward()
    plain(x).square().sum().backward()
    for one, other in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-2, atol=1e-2)


def test_the_report_says_what_went_where_and_why(opencl: Device) -> None:
    module, x = made("sorting")
    compiled = torch.compile(module.eval(), backend=lambda graph, inputs: backend(graph, inputs, opencl.id))
    with torch.no_grad():
        compiled(x)
    latest = dispatcher_torch.report().graphs[-1]
    ((_, operators, place),) = latest.groups
    assert place == opencl.id
    assert operators[0] == "aten.conv3d.default" and "aten.layer_norm.default" in operators
    text = str(dispatcher_torch.report())
    assert re.search(r"PyTorch: aten\.sort \(.*test_torch_compile\.py:\d+\): the vocabulary has no step for it", text)
    module.train()
    with torch.no_grad():
        compiled(x)
    assert "in training mode it updates running statistics" in str(dispatcher_torch.report().graphs[-1])


def test_only_the_reference_leaves_a_group_to_pytorch(install_backends: Install) -> None:
    module, x = made("residual")
    install_backends()
    compiled = dispatcher_torch.compile(module, (x,))
    with torch.no_grad():
        assert torch.equal(compiled(x), module(x))
    assert "only the reference could run it" in str(dispatcher_torch.report().graphs[-1])
    torch._dynamo.reset()
    named = dispatcher_torch.compile(module, (x,), device="numpy")
    with torch.no_grad():
        close(named(x), module(x))
    assert dispatcher_torch.report().graphs[-1].groups[0][2] == "numpy"


def test_wrong_arguments_and_the_entry_point() -> None:
    with pytest.raises(InputError, match=r"expected a torch\.nn\.Module"):
        dispatcher_torch.compile(torch.relu, (torch.ones(1),))
    with pytest.raises(DeviceError):
        dispatcher_torch.compile(nn.ReLU(), (torch.ones(1),), device="nonsense")
    project = (Path(__file__).resolve().parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    section = project.partition("[project.entry-points.torch_dynamo_backends]\n")[2]
    (name, value) = re.match(r'(\w+) = "(.+)"', section).groups()  # type: ignore[union-attr]
    entry = importlib.metadata.EntryPoint(name, value, "torch_dynamo_backends")
    assert name == "dispatcher" and entry.load() is backend


@pytest.mark.parametrize("name", ["run_with_tensors", "train_a_block", "compile_a_network"])
def test_the_examples_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    torch._dynamo.reset()
    runpy.run_path(str(Path(__file__).resolve().parent.parent / "examples" / f"{name}.py"))
    assert capsys.readouterr().out
