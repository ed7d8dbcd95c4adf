"""Modules that run here as far as they can: what goes where, results, gradients, and batches of any size."""

from __future__ import annotations

import copy
import importlib.metadata
import json
import re
import runpy
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import Install

from dispatcher.errors import DeviceError, InputError
from dispatcher.interface import Device

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import dispatcher.torch as dispatcher_torch  # noqa: E402
from bench import common, networks  # noqa: E402
from dispatcher.check.inputs import random_tensors  # noqa: E402
from dispatcher.problem.operator import bind  # noqa: E402
from dispatcher.timing import sampling  # noqa: E402
from dispatcher.torch.compiler import backend  # noqa: E402
from dispatcher.torch.composition import torch_pipeline  # noqa: E402

nn = torch.nn


def block(ins: int, outs: int, stride: int = 1) -> Any:
    return nn.Sequential(
        nn.Conv3d(ins, outs, 3, stride=stride, padding=1),
        nn.InstanceNorm3d(outs, affine=True),
        nn.LeakyReLU(0.01, inplace=True),
    )


class UNet(nn.Module):
    """Three levels, with skips."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = block(1, 4), block(4, 8, 2), block(8, 8, 2)
        self.up, self.middle = nn.ConvTranspose3d(8, 8, 2, stride=2), block(16, 8)
        self.top, self.last = nn.Upsample(scale_factor=2, mode="trilinear"), nn.Conv3d(12, 3, 1)

    def forward(self, x: Any) -> Any:
        first = self.first(x)
        second = self.second(first)
        y = self.middle(torch.cat([self.up(self.third(second)), second], 1))
        return self.last(torch.cat([self.top(y), first], 1))


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


MODULES = {"unet": (UNet, (2, 1, 8, 4, 8)), "sorting": (Sorting, (2, 3, 4, 5, 6)), "residual": (Residual, (2, 4, 5, 6))}


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
    device = "numpy" if name == "unet" else opencl.id  # which would build many kernels
    compiled = dispatcher_torch.compile(module, (x,), device=device)
    assert isinstance(compiled, nn.Module)
    for buffer, before in zip(module.buffers(), plain.buffers(), strict=True):
        assert torch.equal(buffer, before)
    graphs = len(dispatcher_torch.report().graphs)
    assert name != "unet" or len(dispatcher_torch.report().graphs[-1].groups) == 1
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


def test_constants_are_part_of_a_group_unless_somebody_writes_into_them(opencl: Device) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.shift = nn.Conv2d(3, 4, 3), torch.linspace(-1, 1, 4)

        def forward(self, x: Any) -> Any:
            count = torch.zeros(4)
            count.view(2, 2).add_(1.0)
            y = torch.min(self.conv(x), torch.tensor(0.25)) + self.shift[:, None, None]
            y = nn.functional.interpolate(y, scale_factor=2) * torch.arange(4.0).view(4, 1, 1)
            return y, count, torch.ones(2).view(2, 1)

    torch._dynamo.reset()
    module, x = Model(), torch.randn(2, 3, 5, 6)
    compiled = dispatcher_torch.compile(module, (x,), device=opencl.id)
    with torch.no_grad():
        for _ in range(2):
            found = compiled(x)
            close(found, module(x))
            found[-1].zero_()
    ((_, operators, _),) = dispatcher_torch.report().graphs[-1].groups
    assert operators[0] == "aten.conv2d.default" and operators[-1] == "aten.mul.Tensor"


def test_what_has_a_meaning_only_with_what_follows_ends_no_group() -> None:
    """Channels put together before a norm, and a gelu by hand; where nothing takes it in, the next group begins."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Conv2d(2, 2, 1), nn.GroupNorm(2, 4), nn.Conv2d(4, 3, 1)

        def forward(self, x: Any) -> Any:
            y = self.norm(torch.cat([x, self.first(x)], 1))
            y = self.last(0.5 * y * (1 + torch.erf(y / 2**0.5)))
            return nn.functional.max_pool2d(torch.erf(y), 2)

    torch._dynamo.reset()
    module, x = Model(), torch.randn(2, 2, 4, 6)
    compiled = dispatcher_torch.compile(module, (x,), device="numpy")
    with torch.no_grad():
        close(compiled(x), module(x))
    latest = dispatcher_torch.report().graphs[-1]
    assert [operators[-1] for _, operators, _ in latest.groups] == ["aten.conv2d.default", "aten.max_pool2d.default"]
    assert len(latest.groups[0][1]) == 9 and [line.split()[0] for line in latest.left] == ["aten.erf"]


class Tokens(nn.Module):
    """Linear layers on (batch, tokens, features), with a convolution over tokens or without."""

    def __init__(self, conv: bool) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 4), nn.LayerNorm(4), nn.Linear(4, 3)
        self.conv = nn.Conv1d(4, 4, 3) if conv else nn.Identity()

    def forward(self, x: Any) -> Any:
        first = torch.einsum("btf,gf->btg", x, self.first.weight) if self.training else self.first(x)
        y = self.norm(nn.functional.gelu(first))
        return self.last(self.conv(y.mT).mT)


def test_linear_layers_run_where_a_convolution_stands_beside_them(opencl: Device) -> None:
    x = torch.randn(2, 5, 6)
    for conv in (True, False):
        torch._dynamo.reset()
        module = Tokens(conv).train(conv)
        compiled = dispatcher_torch.compile(module, (x,), device=opencl.id)
        with torch.no_grad():
            for y in (x, torch.cat([x, x])):
                torch.testing.assert_close(compiled(y), module(y), rtol=2e-4, atol=2e-4, check_stride=True)
        latest = dispatcher_torch.report().graphs[-1]
        assert len(latest.groups) == 1 and len(latest.left) == (0 if conv else 2)
        assert all("product of matrices is faster" in line for line in latest.left)


def test_numbers_and_data_taken_out_of_the_graph_stay_in_pytorch() -> None:
    class Taken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 3, 3)

        def forward(self, x: Any, number: Any) -> Any:
            y = self.conv(x)
            return y.data * number if self.training else y.mean((2, 3)) * number

    module, x = Taken(), torch.randn(2, 2, 5, 6)
    for training, reason in ((True, "leaves the graph"), (False, "given anew in each call")):
        module.train(training)
        compiled = torch.compile(module, backend=backend)
        with torch.no_grad():
            for number in (torch.tensor(0.5), torch.tensor(3.0, dtype=torch.float64)):
                torch.testing.assert_close(compiled(x, number), module(x, number))
        assert reason in str(dispatcher_torch.report().graphs[-1])


def test_what_stands_behind_several_results_is_a_group_of_its_own() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.spread, self.up = nn.Linear(6, 8), nn.Linear(6, 8), nn.ConvTranspose2d(2, 3, 3)

        def forward(self, x: Any) -> Any:
            mean, spread = self.mean(x), self.spread(x)
            return torch.sigmoid(self.up((mean * spread.exp()).view(-1, 2, 2, 2))), mean, spread

    torch._dynamo.reset()
    module, x = Model(), torch.randn(2, 6)
    compiled = dispatcher_torch.compile(module, (x,), device="numpy")
    with torch.no_grad():
        close(compiled(x), module(x))
    ((_, operators, _),) = dispatcher_torch.report().graphs[-1].groups
    assert operators == ("aten.conv_transpose2d.input", "aten.sigmoid.default")


@pytest.mark.parametrize(
    ("shape", "scale", "mode"),
    [
        ((9, 9), 2.05, "bilinear"),
        ((9, 9), (3.05, 3.0), "nearest"),
        ((8,), 4.1, "linear"),
        ((3, 4, 5), 2.05, "trilinear"),
    ],
)
def test_a_scale_counts_that_is_not_that_of_the_sizes(shape: tuple[int, ...], scale: Any, mode: str) -> None:
    torch._dynamo.reset()
    x = torch.randn(2, 3, *shape)
    for computed in (None, True):
        up = nn.Upsample(scale_factor=scale, mode=mode, recompute_scale_factor=computed)
        module = nn.Sequential({1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[len(shape)](3, 4, 1), up)
        compiled = dispatcher_torch.compile(module, (x,), device="numpy")
        with torch.no_grad():
            close(compiled(x), module(x))
        assert ("scales by other factors" in str(dispatcher_torch.report().graphs[-1])) == (computed is None)


class Layers(nn.Module):
    """Layers, then a function."""

    def __init__(self, function: Any, *layers: Any) -> None:
        super().__init__()
        self.layers, self.function = nn.Sequential(*layers), function

    def forward(self, x: Any) -> Any:
        return self.function(self.layers(x))


#: What is done to an image behind a convolution; or to a volume, where the layer is one of three axes.
LAID: dict[str, tuple[Any, ...]] = {
    "two results": (
        lambda x: (x, x.permute(0, 2, 3, 1).view(x.shape[0], -1)),  # which contiguous memory has no view for
        nn.BatchNorm2d(4),
        nn.ReLU(),
    ),
    "group norm": (nn.functional.silu, nn.GroupNorm(2, 4)),
    "instance norm": (torch.tanh, nn.InstanceNorm2d(4)),
    "softmax": (lambda x: x.softmax(1),),
    "a pool": (lambda x: x + 1, nn.MaxPool2d(2, 1)),
    "a mean": (lambda x: x.mean((2, 3), keepdim=True),),
    "a mean without its axes": (lambda x: x.mean((2, 3)),),
    "transposed": (torch.relu, nn.ConvTranspose2d(4, 5, 3, 2)),
    "upsampling": (torch.sigmoid, nn.Upsample(scale_factor=2)),
    "parts put together": (lambda x: nn.functional.max_pool2d(torch.cat([x, x.tanh()], 1), 2),),
    "flattened": (lambda x: x.flatten(2).transpose(1, 2) * 2,),
    "permuted": (lambda x: nn.functional.layer_norm(x.permute(0, 2, 3, 1), (4,)),),
    "and back": (lambda x: nn.functional.layer_norm(x.permute(0, 2, 3, 1), (4,)).permute(0, 3, 1, 2),),
    "a linear layer": (lambda x: x, nn.Flatten(2), nn.Linear(12, 3)),
    "a volume": (lambda x: x.exp(), nn.Conv3d(3, 4, 2), nn.BatchNorm3d(4)),
}


@pytest.mark.parametrize("name", LAID)
def test_a_result_lies_in_memory_as_in_eager_mode(name: str) -> None:
    function, *layers = LAID[name]
    volume = name == "a volume"
    last = torch.channels_last_3d if volume else torch.channels_last
    torch._dynamo.reset()
    module = Layers(function, *([] if volume else [nn.Conv2d(3, 4, 3)]), *layers).eval().to(memory_format=last)
    x = torch.randn(2, 3, 5, 6, *([4] if volume else []))
    compiled = dispatcher_torch.compile(module, (x,), device="numpy")
    with torch.no_grad():
        for y in (x, torch.cat([x, x]).to(memory_format=last)):
            torch.testing.assert_close(compiled(y), module(y), rtol=2e-4, atol=2e-4, check_stride=True)


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
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = project.partition("[project.entry-points.torch_dynamo_backends]\n")[2]
    (name, value) = re.match(r'(\w+) = "(.+)"', section).groups()  # type: ignore[union-attr]
    entry = importlib.metadata.EntryPoint(name, value, "torch_dynamo_backends")
    assert name == "dispatcher" and entry.load() is backend


def test_a_pipeline_is_compiled_before_its_shape_was_asked_for() -> None:
    known = common.bind_case("conv2d-mish-mish", case="sample")
    operator = bind(known.problem, known.sizes, known.scalars)
    tensors = {name: torch.from_numpy(array) for name, array in random_tensors(operator, 0).items()}
    function = torch_pipeline(operator, lambda operand: tensors[operand.name])
    found = torch.compile(function, backend="eager", fullgraph=True)(tensors[operator.source])
    assert tuple(found.shape) == operator.output_shape


def wrong(module: Any, x: Any) -> Any:
    """A contender that is wrong by little."""
    return lambda y: module(y) * 1.001


def test_the_benchmark_of_networks_checks_first(
    opencl: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = partial(networks.decoder, 1, (8, 8), 1)
    monkeypatch.setattr(networks, "NETWORKS", {"tiny": (tiny, (1, 8, 4))})
    monkeypatch.setattr(networks, "PEERS", {"eager": networks.PEERS["eager"], "wrong": wrong})
    monkeypatch.setattr(common, "probe_on", lambda index: sampling.Probe("a probe", 100.0, 1.0, lambda: 100.0))
    output = tmp_path / "networks.json"
    options = ["--repeats", "1", "--force", "--devices", opencl.id, "--output", str(output)]
    assert networks.main(options) == 0
    report = json.loads(output.read_text(encoding="utf-8"))
    (case,) = report["cases"]
    mine = {opencl.id, opencl.id + networks.GUARDED}
    assert set(case["results"]) == {"eager", *mine} and set(case["ratios"]) == mine
    assert "differs from float64" in case["failures"]["wrong"] and case["flops"] > 0
    assert "`tiny`, 1x8x4" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["run_with_tensors", "train_a_block", "compile_a_network"])
def test_the_examples_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    torch._dynamo.reset()
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"))
    assert capsys.readouterr().out
