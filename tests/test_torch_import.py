"""Modules of PyTorch become problems that compute the same, in the words of the vocabulary."""

from __future__ import annotations

import importlib
import json
import math
import operator
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import yaml  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import dispatcher  # noqa: E402
from dispatcher import cli  # noqa: E402
from dispatcher.errors import InputError, UnsupportedError  # noqa: E402
from dispatcher.interface import Device  # noqa: E402
from dispatcher.torch import Imported, import_module  # noqa: E402
from dispatcher.torch.modelrun import import_here  # noqa: E402


class Does(nn.Module):
    """Layers, then a function of what they make and of this module."""

    def __init__(self, function: Callable[..., Any], *layers: Any, **tensors: Any) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.function = function
        for name, value in tensors.items():
            setattr(self, name, value if isinstance(value, nn.Module) else nn.Parameter(value))

    def forward(self, x: Any) -> Any:
        """The function's result."""
        x = self.layers(x)
        return self.function(x, self) if self.function.__code__.co_argcount == 2 else self.function(x)


def random(*shape: int, seed: int = 0, dtype: Any = torch.float32) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def close(got: Any, wanted: Any, tolerance: float = 2e-5) -> None:
    assert got.shape == wanted.shape
    assert got.dtype == wanted.dtype
    scale = max(float(wanted.abs().max()), 1e-3)
    assert float((got.double() - wanted.double()).abs().max()) <= tolerance * scale


def imported(module: Any, *inputs: Any, device: str = "numpy", grow: bool = True) -> Imported:
    """The module's problem, which was found to compute what the module does, with these sizes and with others."""
    torch.manual_seed(7)
    for parameter in module.parameters():
        parameter.data = torch.randn_like(parameter) * 0.3 + 0.2
    found = import_module(module, inputs, name="found")
    close(found.run(*inputs, device=device), module(*inputs).detach())
    mapping = yaml.safe_load(found.yaml())
    assert dispatcher.load_problem(mapping) == found.problem
    assert {name: data.shape for name, data in found.tensors.items()} == {
        name: tuple(mapping["parameters"][name]) for name in found.tensors
    }
    if grow:
        assert found.problem.sizes
        larger = [
            random(
                *(
                    size + bool(extent.names)
                    for size, extent in zip(x.shape, shape_of(found, name, x.ndim), strict=True)
                )
            )
            for x, name in zip(inputs, found.inputs, strict=True)
        ]
        close(found.run(*larger, device=device), module(*larger).detach())
    return found


def shape_of(found: Imported, name: str | None, count: int) -> tuple[Any, ...]:
    """Of an input with ``count`` dimensions; what the parameter has more lies behind batch and channel."""
    parameter = found.problem.parameter(name or "")
    assert parameter is not None
    assert parameter.shape is not None
    return *parameter.shape[:2], *parameter.shape[2 + len(parameter.shape) - count :]


def steps(found: Imported) -> list[str]:
    return [step.op for step in found.problem.pipeline]


# ---- ways to write one thing -------------------------------------------------------------------------------
LAST, FIRST = (0, 2, 3, 1), (0, 3, 1, 2)
WAYS: dict[str, list[Callable[..., Any]]] = {
    "silu": [F.silu, lambda x: x * torch.sigmoid(x), lambda x: x.sigmoid() * x, lambda x: x / (1 + torch.exp(-x))],
    "mish": [
        F.mish,
        lambda x: x * torch.tanh(F.softplus(x)),
        lambda x: torch.multiply(torch.tanh(torch.log(1 + torch.exp(x))), x),
        lambda x: x * torch.log1p(x.exp()).tanh(),
    ],
    "gelu": [
        F.gelu,
        lambda x: 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0))),
        lambda x: x * (torch.erf(x * 0.70710678) + 1) / 2,
        lambda x: x * (0.5 * (1 + torch.erf(x / 2**0.5))),
    ],
    "gelu_tanh": [
        lambda x: F.gelu(x, approximate="tanh"),
        lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3)))),
        lambda x: 0.5 * x * (1 + torch.tanh(x * 0.7978845608 * (1 + 0.044715 * x * x))),
    ],
    "hardswish": [
        F.hardswish,
        lambda x: x * F.relu6(x + 3) / 6,
        lambda x: x * torch.clamp((x + 3) / 6, 0, 1),
        lambda x: x * F.hardsigmoid(x),
        lambda x: x * (torch.clamp(x + 3, min=0, max=6) / 6),
    ],
    "sigmoid": [torch.sigmoid, lambda x: 1 / (1 + torch.exp(-x)), lambda x: (1 + (-x).exp()).reciprocal()],
    "leaky_relu": [
        lambda x: F.leaky_relu(x, 0.2),
        lambda x: torch.max(x, 0.2 * x),
        lambda x: torch.where(x > 0, x, 0.2 * x),
        lambda x: torch.where(x < 0, 0.2 * x, x),
    ],
    "softplus": [F.softplus, lambda x: torch.log1p(torch.exp(x))],
    "softsign": [F.softsign, lambda x: x / (1 + x.abs())],
    "log_sum_exp": [
        lambda x: torch.logsumexp(x, dim=1, keepdim=True),
        lambda x: x.exp().sum(1, keepdim=True).log(),
        lambda x: torch.log(torch.exp(x - x.amax(-3, True)).sum(-3, True)) + x.amax(1, True),
    ],
    "softmax": [
        lambda x: F.softmax(x, dim=1),
        lambda x: x.permute(LAST).softmax(-1).permute(FIRST),
        lambda x: torch.exp(x) / torch.exp(x).sum(dim=1, keepdim=True),
        lambda x: (e := torch.exp(x - x.max(1, keepdim=True)[0])) / e.sum(1, keepdim=True),
    ],
    "log_softmax": [
        lambda x: F.log_softmax(x, 1),
        lambda x: x.softmax(1).log(),
        lambda x: x - x.logsumexp(1, keepdim=True),
    ],
    "layer_norm": [
        lambda x: F.layer_norm(x.permute(LAST), (x.shape[1],)).permute(FIRST),
        lambda x: F.layer_norm(x.movedim(1, -1).contiguous(), (x.shape[1],)).movedim(-1, 1),
        lambda x: (x - x.mean(1, keepdim=True)) / torch.sqrt(x.var(1, keepdim=True, unbiased=False) + 1e-5),
        lambda x: (
            (x - (u := x.mean(1, keepdim=True))) * torch.rsqrt((x - u).pow(2).mean(1, keepdim=True) + 1e-5)
        ),
    ],
    "instance_norm": [
        F.instance_norm,
        lambda x: (
            (x - x.mean((2, 3), keepdim=True)) / (x.var((2, 3), keepdim=True, correction=0) + 1e-5).sqrt()
        ),
    ],
    "group_norm": [
        lambda x: F.group_norm(x, 2),
        lambda x: (
            ((y := x.unflatten(1, (2, -1)).flatten(2)) - y.mean(-1, True))
            * torch.rsqrt(y.var(-1, unbiased=False, keepdim=True) + 1e-5)
        ).view_as(x),
        lambda x: F.instance_norm(x.reshape(x.shape[0], 2, -1)).reshape_as(x),
    ],
    "rms_norm": [
        lambda x: F.rms_norm(x.permute(LAST), (x.shape[1],), eps=1e-5).permute(FIRST),
        lambda x: x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-5),
        lambda x: x / (x.pow(2).mean(dim=1, keepdim=True) + 1e-5) ** 0.5,
    ],
}  # fmt: skip


@pytest.mark.parametrize(("op", "way"), [(op, way) for op, ways in WAYS.items() for way in range(len(ways))])
def test_a_step_is_told_by_what_it_computes(op: str, way: int) -> None:
    grow = op != "group_norm"  # whose groups would not divide the channels
    found = imported(Does(lambda x: WAYS[op][way](x + 0.25)), random(2, 6, 4, 5), grow=grow)
    assert steps(found) == ["add", op]


def near_misses() -> list[Callable[..., Any]]:
    """What is nearly one of the patterns."""
    return [
        lambda x: x * torch.sigmoid(1.702 * x),
        lambda x: x * torch.tanh(F.softplus(x + 1)),
        lambda x: x * torch.clamp(x + 3, 0, 5) / 6,
        lambda x: torch.exp(x) / torch.exp(x).sum(dim=1, keepdim=True).sum(dim=2, keepdim=True),
        lambda x: torch.log(torch.exp(x - x.amax(1, True)).sum(1, True)) + x.amax((1, 2), True),
        lambda x: (x - x.mean(1, keepdim=True)) / torch.sqrt(x.var((1, 2), keepdim=True, unbiased=False) + 1e-5),
        lambda x: x * (1 / (2 + torch.exp(-x))),
        lambda x: torch.max(x, 2 * x),
    ]


@pytest.mark.parametrize("way", range(len(near_misses())))
def test_what_is_nearly_a_pattern_stays_what_it_is(way: int) -> None:
    imported(Does(near_misses()[way]), random(2, 3, 4, 5))


# ---- layers and layouts ------------------------------------------------------------------------------------
MODULES: dict[str, tuple[Callable[[], Any], tuple[int, ...], str]] = {
    "every rank 1": (
        lambda: nn.Sequential(nn.Conv1d(3, 4, 3, 2, padding="valid"), nn.MaxPool1d(2, 1, 1), nn.Hardtanh()),
        (2, 3, 19),
        "conv1d max_pool1d clamp",
    ),
    "every rank 3": (
        lambda: nn.Sequential(
            nn.ConvTranspose3d(4, 6, 3, 2, 1, 1, groups=2), nn.AvgPool3d(3, 2, 1, ceil_mode=True),
            nn.AdaptiveMaxPool3d(1),
        ),
        (2, 4, 3, 4, 5),
        "conv_transpose3d avg_pool3d max",
    ),
    "an unbatched image": (lambda: nn.Conv2d(3, 4, 3, padding="same", dilation=2), (3, 7, 8), "conv2d squeeze"),
    "a pad before a convolution": (
        lambda: Does(lambda x, m: m.layers(F.pad(x, (1, 2, 3, 0))), nn.Conv2d(3, 3, 3, padding=1)),
        (2, 3, 7, 8),
        "conv2d conv2d",
    ),
    "batch norm in training": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)),
        (3, 3, 6, 7),
        "conv2d batch_norm relu",
    ),
    "batch norm in evaluation": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.3)).eval(),
        (2, 3, 6, 7),
        "conv2d scale add",
    ),
    "channels-last layer norm": (
        lambda: Does(lambda x, m: m.norm(x.permute(LAST)).permute(FIRST), nn.Conv2d(3, 5, 3)),
        (2, 3, 6, 7),
        "conv2d layer_norm",
    ),
    "layer norm of the last axis": (lambda: nn.LayerNorm(7), (2, 3, 6, 7), "layer_norm scale add"),
    "layer norm of all but the batch": (lambda: nn.LayerNorm((3, 6, 7)), (2, 3, 6, 7), "layer_norm scale add"),
    "group and instance norm": (
        lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True), nn.GroupNorm(1, 4)),
        (2, 4, 5, 6),
        "group_norm instance_norm layer_norm",
    ),
    "softmax of a view": (
        lambda: Does(lambda x: torch.softmax(x.view(x.size(0), x.size(1), -1), dim=2).view_as(x)),
        (2, 3, 4, 5),
        "softmax",
    ),
    "single channels put together": (
        lambda: Does(
            lambda x, m: x * m.attend(torch.cat([x.mean(1, True), x.amax(1, True)], 1)),
            attend=nn.Conv2d(2, 1, 3, padding=1),
        ),
        (2, 3, 4, 5),
        "mean conv2d max conv2d add scale",
    ),
    "a region without gradients": (
        lambda: Does(lambda x: torch.no_grad()(torch.relu)(x) * 2),
        (2, 3, 4, 5),
        "relu scale",
    ),
    "a size that is asked for": (
        lambda: Does(lambda x, m: m.up(x, output_size=(12, 15)), up=nn.ConvTranspose2d(3, 4, 3, 3)),
        (2, 3, 4, 5),
        "conv_transpose2d",
    ),
    "dropped axes": (lambda: Does(lambda x: x.relu().mean(dim=[2, 3]).sum(-1)), (2, 3, 4, 5), "relu mean sum squeeze"),
    "one number": (lambda: Does(lambda x: x.relu().mean()), (2, 3, 4, 5), "relu mean squeeze"),
    "minimum with its places": (
        lambda: Does(lambda x: torch.min(x, dim=-3, keepdim=True)[0].squeeze(1).tanh()),
        (2, 3, 4, 5),
        "min tanh squeeze",
    ),
    "nearest upsampling": (
        lambda: nn.Sequential(nn.Upsample(scale_factor=(2, 3)), nn.Conv2d(3, 4, 3, padding=1)),
        (2, 3, 4, 5),
        "conv_transpose2d conv2d",
    ),
    "bilinear upsampling": (
        lambda: nn.Sequential(nn.ReLU(), nn.Upsample(scale_factor=(2, 3), mode="bilinear")),
        (2, 3, 4, 5),
        "relu conv_transpose2d scale scale",
    ),
    "trilinear upsampling": (
        lambda: Does(lambda x: F.interpolate(x, (8, 3, 10), mode="trilinear").relu()),
        (2, 2, 2, 3, 2),
        "conv_transpose3d scale scale scale relu",
    ),
    "channels of a convolution": (
        lambda: Does(lambda x: F.glu(x[:, 2:8], 1) * x[:, -1:] - x.chunk(3, 1)[0], nn.Conv2d(3, 9, 3)),
        (2, 3, 6, 7),
        "",
    ),
    "a classifier": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)),
        (2, 3, 6, 7),
        "conv2d relu mean conv2d squeeze",
    ),
    "activations": (
        lambda: nn.Sequential(
            nn.ReLU6(), nn.ELU(0.7), nn.CELU(1.3), nn.SELU(), nn.Softplus(2.0), nn.Hardsigmoid(), nn.LogSigmoid(),
            nn.Tanhshrink(), nn.Softshrink(0.3), nn.PReLU(3), nn.RReLU().eval(), nn.Identity(),
        ),
        (2, 3, 4, 5),
        "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_layers_in_every_layout(name: str) -> None:
    make, shape, wanted = MODULES[name]
    module = make()
    if name == "channels-last layer norm":
        module.norm = nn.LayerNorm(5)
    found = imported(module, random(*shape), grow="linear" not in name)
    assert not wanted or steps(found) == wanted.split()


def test_linear_over_channels_is_a_pointwise_convolution(backend_device: Device) -> None:
    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(3, 6), nn.Linear(6, 3, bias=False)

        def forward(self, x: Any) -> Any:
            y = self.down(F.gelu(self.up(x.permute(0, 2, 3, 4, 1)))).permute(0, 4, 1, 2, 3)
            return x + y

    found = imported(Mixer(), random(2, 3, 2, 4, 5), device=backend_device.id)
    assert steps(found) == ["conv3d", "gelu", "conv3d", "add"]


def test_a_linear_layer_over_all_of_an_item_is_a_convolution() -> None:
    for order in ((0, 1, 2, 3), (0, 2, 3, 1)):
        module = Does(lambda x, m: m.head(x.permute(m.order).flatten(1)), nn.ReLU())
        module.order, module.head = order, nn.Linear(3 * 4 * 5, 6)
        assert steps(imported(module, random(2, 3, 4, 5))) == ["relu", "conv2d", "squeeze"]


MATRICES: dict[str, Callable[..., Any]] = {
    "conv1d batch_norm silu conv1d squeeze": lambda x, m: m.tail(x),
    "conv1d add softmax squeeze": lambda x, m: (x @ m.weight.t() + m.bias).softmax(dim=1),
    "conv1d group_norm max gelu squeeze": lambda x, m: F.gelu(
        F.group_norm(torch.addmm(m.bias, x, m.weight.T), 3).max(1, keepdim=True)[0]
    ),
    "conv1d layer_norm add squeeze": lambda x, m: (
        F.instance_norm(F.linear(x, m.weight[:4])[:, None, None]).squeeze(1).squeeze(1) + x
    ),
}


@pytest.mark.parametrize("wanted", MATRICES)
def test_a_linear_layer_takes_rows_of_features(wanted: str, backend_device: Device) -> None:
    module = Does(MATRICES[wanted], weight=random(6, 4), bias=random(6))
    if "silu" in wanted:
        module.layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.SiLU())
        module.tail = nn.Linear(6, 3)
    found = imported(module, random(5, 4), device=backend_device.id)
    assert steps(found) == wanted.split()
    result = found.run(random(5, 4).numpy(), device="numpy")
    close(torch.from_numpy(result), module(random(5, 4)).detach())


class Blocks(nn.Module):
    """Channels last: a mixer of tokens and channels, between convolutions of other layouts."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 9), nn.Linear(9, 6), nn.LayerNorm(6)
        self.conv = nn.Conv1d(6, 6, 3, padding=1)

    def forward(self, x: Any) -> Any:
        y = x + self.conv(self.norm(x).transpose(1, 2)).mT
        return y + self.down(F.gelu(self.up(y))) * torch.einsum("btf,gf->btg", x, self.down.weight[:, :6])


CHANNELS_LAST: dict[str, tuple[Callable[[], Any], tuple[int, ...], str]] = {
    "1 leading dimension more": (lambda: nn.Sequential(nn.Linear(6, 4), nn.GELU(), nn.Linear(4, 5)), (2, 5, 6),
                                 "conv1d gelu conv1d"),
    "3 of them": (lambda: nn.Sequential(nn.Linear(6, 4), nn.Softmax(-1)), (2, 2, 3, 5, 6), "conv3d softmax"),
    "a block": (Blocks, (2, 5, 6), "layer_norm conv1d add conv1d gelu conv1d conv1d scale add"),
    "a convolution": (lambda: Does(lambda x, m: m.conv(x.permute(FIRST)).permute(LAST) + m.last(x),
                                   conv=nn.Conv2d(6, 4, 3, padding=1), last=nn.Linear(6, 4)), (2, 4, 5, 6),
                      "conv2d conv2d add"),
    "channels first in the end": (lambda: Does(lambda x, m: m.conv(m.first(x).mT), conv=nn.Conv1d(3, 4, 2),
                                               first=nn.Linear(6, 3)), (2, 5, 6), "conv1d conv1d"),
    "a pool in the end": (lambda: Does(lambda x, m: m.first(x).mean(1), first=nn.Linear(6, 3)), (2, 5, 6),
                          "conv1d mean squeeze"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANNELS_LAST)
def test_channels_may_come_last(name: str, opencl: Device) -> None:
    make, shape, wanted = CHANNELS_LAST[name]
    module, x = make(), random(*shape)
    device = opencl.id if name == "a convolution" else "numpy"
    found = imported(module, x, grow=False)
    assert sorted(steps(found)) == sorted(wanted.split()) and "channels first" in found.problem.title
    more = random(3, shape[1] + 1, *shape[2:])
    for given in (x, more):
        close(found.run(given, device=device), module(given).detach())
    close(torch.from_numpy(found.run(more.numpy(), device="numpy")), module(more).detach())


def test_an_input_of_fewer_axes_than_a_later_step_has() -> None:
    layers = {"flat": nn.Conv2d(3, 4, 3), "deep": nn.Conv3d(4, 5, (1, 2, 2))}
    module = Does(lambda x, m: m.deep(m.flat(x)[:, :, None]), **layers)
    assert steps(imported(module, random(2, 3, 6, 7))) == ["conv3d", "conv3d"]
    with pytest.raises(UnsupportedError, match=r"local_response_norm|aten\.pad .*only spatial axes"):
        import_module(nn.Sequential(nn.Conv2d(3, 4, 3), nn.LocalResponseNorm(2)), (random(2, 3, 6, 7),))


IN_PARTS: dict[str, tuple[Callable[[], Any], str]] = {
    "a norm's": (lambda: (nn.Conv2d(2, 8, 3), nn.GroupNorm(4, 8), nn.PReLU(8)),
                 "conv2d group_norm minimum scale relu add"),
    "a depthwise convolution's": (lambda: (nn.Conv2d(2, 8, 1), nn.Conv2d(8, 8, 3, groups=8), nn.AvgPool2d(2)),
                                  "conv2d conv2d avg_pool2d"),
    "in groups": (lambda: (nn.ConvTranspose2d(2, 4, 1), nn.ConvTranspose2d(4, 8, 3, 2, groups=2),
                           nn.BatchNorm2d(8).eval()), "conv_transpose2d conv_transpose2d scale add"),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_PARTS)
def test_channels_are_made_in_parts_of_what_a_convolution_began_with(name: str) -> None:
    make, wanted = IN_PARTS[name]
    found = imported(Does(lambda x: F.glu(torch.cat([x, x.abs()], 1)[:, :8], 1), *make()), random(2, 2, 5, 6))
    assert steps(found) == f"{wanted} {wanted} sigmoid scale".split()
    with pytest.raises(UnsupportedError, match="part of a tensor"):  # groups, or the batch's statistics, would be cut
        import_module(Does(lambda x: x[:, 1:4].relu(), nn.Conv2d(2, 8, 1), nn.GroupNorm(2, 8)), (random(2, 2, 5, 6),))


def test_a_convolution_takes_channels_that_were_put_together() -> None:
    """As a U-Net does: it is the sum of one convolution of each part."""

    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = nn.Conv2d(2, 3, 2, stride=2), nn.ConvTranspose2d(3, 4, 2, stride=2)
            self.out, self.back = nn.Conv2d(8, 5, 3, padding=1), nn.ConvTranspose2d(7, 2, 3)

        def forward(self, x: Any) -> Any:
            y = self.up(self.down(x).relu())
            y = self.out(torch.cat([x, y, x.tanh()], dim=1))
            return self.back(torch.cat((x, y), 1))

    found = imported(Skip(), random(2, 2, 4, 6), grow=False)
    assert steps(found).count("conv2d") == 4
    assert found.tensors["out_weight_2"].shape == (5, 4, 3, 3)


PUT_TOGETHER: dict[str, tuple[Callable[[], Any], str]] = {
    "batch norm": (lambda: nn.Sequential(nn.BatchNorm2d(6), nn.PReLU(6)).eval(), "scale add minimum scale relu add"),
    "group norm": (lambda: nn.Sequential(nn.GroupNorm(3, 6), nn.SiLU()), "group_norm silu"),
    "instance norm": (lambda: nn.Sequential(nn.InstanceNorm2d(6, affine=True), nn.GELU()), "instance_norm gelu"),
    "depthwise": (lambda: nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(6, 12, 3, groups=6), nn.MaxPool2d(2),
                                        nn.Conv2d(12, 6, 1, groups=3)), "conv_transpose2d conv2d max_pool2d conv2d"),
}  # fmt: skip


@pytest.mark.parametrize("name", PUT_TOGETHER)
def test_what_stands_between_channels_put_together_and_a_convolution_is_done_to_each_part(name: str) -> None:
    make, wanted = PUT_TOGETHER[name]
    function = lambda x, m: m.last(m.between(torch.cat([x, torch.cat([m.layer(x), x.tanh()], 1)], 1)).mean((2, 3)))  # noqa: E731
    module = Does(function, between=make(), layer=nn.Conv2d(2, 2, 1), last=nn.Linear(6, 3))
    found = steps(imported(module, random(2, 2, 6, 7)))
    assert " ".join(found).count(f"{wanted} mean conv2d") == 3


# ---- operands, constants, memory ---------------------------------------------------------------------------
OPERANDS: list[Callable[..., Any]] = [
    lambda x, m: (2.0 - x) / 3 - 1 / (x.abs() + 1.5),
    lambda x, m: torch.sub(x, m.each[:, None, None], alpha=2) + torch.rsub(x, 1.5),
    lambda x, m: m.each.view(1, -1, 1, 1) * x / m.full.exp(),
    lambda x, m: m.one - x * torch.sigmoid(m.one),
    lambda x, m: torch.minimum(torch.max(x, torch.tensor(-0.5)), m.each[:, None, None]),
    lambda x, m: (x.permute(0, 2, 3, 1) + m.each).flatten(1, 2).transpose(1, 2).unflatten(2, x.shape[2:]) * m.rows,
    lambda x, m: x.clamp(min=m.each[:, None, None]) + torch.ones(3, 1, 1) * 2,
    lambda x, m: x / x.norm(dim=1, keepdim=True).clamp_min(1e-3).expand_as(x),
    lambda x, m: x * x.std(dim=(2, 3), keepdim=True) + x.var(1, keepdim=True),
    lambda x, m: F.normalize(x, dim=1) * x.mean((2, 3), keepdim=True) + x**3 - x**-2,
    lambda x, m: x.view(2, 3, -1).softmax(2).view(2, 3, 4, 5) + x.norm(p=3, dim=1, keepdim=True).repeat(1, 3, 1, 1),
    lambda x, m: F.softplus(3 * x, 2, 0.5) + x.abs() ** 1.5 + 2**x,
    lambda x, m: torch.lerp(x, torch.addcmul(x, x.tanh(), m.full), 0.3) + F.cosine_similarity(x, x * x, dim=1)[:, None],
    lambda x, m: torch.einsum("nchw,oc->nohw", x, m.full[0, :3, :3]) + (m.full[1, :3, :3] @ x.flatten(2)).view_as(x),
    lambda x, m: x[:, :1] * x.select(1, -1)[:, None] + x.unbind(1)[1].unsqueeze(1),
]


@pytest.mark.parametrize("place", range(len(OPERANDS)))
def test_operands_of_any_kind(place: int) -> None:
    tensors = {"each": random(3), "full": random(3, 4, 5), "one": random(1), "rows": random(4, 1)}
    module = Does(OPERANDS[place], nn.Conv2d(2, 3, 1), **tensors)
    imported(module, random(2, 2, 4, 5), grow=False)


def filled(x: Any, value: float) -> Any:
    x[x < value] = value
    return x


#: Choices, each of which makes a number of NaN.
CHOICES: list[Callable[..., Any]] = [
    lambda x, m: torch.where(x > 0.5, 2 * x.abs(), 0.25) + (x >= 0.5).float() + torch.where(x < 0.5, 3.0, m.each),
    lambda x, m: torch.where((x <= 0.5) & ~(x < -0.5) | (x == 2), torch.full_like(x, 5), -1.0) + (m.each < x).to(x),
    lambda x, m: (
        torch.sign(x)
        + 4 * (x != 0.5) * (x > 1).sum((2, 3), keepdim=True)
        + torch.where(x > m.each, 1.0, 2.0).masked_fill(x < 0, 7.0)
    ),
    lambda x, m: (
        x.isnan() + 2 * x.isinf() + 4 * torch.isneginf(x) + torch.isfinite(x) + torch.where(m.each > 0, 1.0, x.sign())
    ),
    lambda x, m: torch.where(x.nan_to_num(0.0).amax((2, 3), True) > 2, 0.5, torch.isposinf(x)) + (x > 0) * (m.each > 0),
]
#: Choices that leave NaN what it is.
KEPT: list[Callable[..., Any]] = [
    lambda x, m: F.hardshrink(x, 0.5) + 3 * F.threshold(x, 0.5, 20.0),
    lambda x, m: filled(x * 2, 1.0) + torch.where(x > 0, x, 1.5 * (torch.exp(x) - 1)) * (x > -1),
    lambda x, m: torch.where(x > 0.5, torch.full_like(x, 0.5), torch.where(x < -0.5, -0.5 * torch.ones(5), x)),
]


@pytest.mark.parametrize("way", range(len(CHOICES) + len(KEPT)))
def test_choices_and_masks(way: int, backend_device: Device) -> None:
    x = random(2, 3, 4, 5)
    x[0, :, 0] = torch.tensor([0.5, -0.5, math.nan, math.inf, 2.0])
    x[1, :, 3, :2] = torch.tensor([0.0, -math.inf])
    module = Does([*CHOICES, *KEPT][way], each=torch.tensor([0.5, -0.25, 0.0])[:, None, None])
    found = import_module(module, (x,))
    assert "where" in steps(found)
    wanted = module(x).detach()
    assert bool(wanted.isnan().any()) == (way >= len(CHOICES))
    torch.testing.assert_close(found.run(x, device=backend_device.id), wanted, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_masks_that_are_weights(backend_device: Device) -> None:
    """As of a causal softmax; what is masked is nothing, whatever it is."""
    module = Does(lambda x, m: x.masked_fill(m.mask == 0, -math.inf).softmax(-1) * m.mask)
    module.register_buffer("mask", torch.ones(5, 5, dtype=torch.bool).tril())
    x = random(2, 3, 5, 5)
    x[0, 0, 1, 3] = math.nan
    close(import_module(module, (x,)).run(x, device=backend_device.id), module(x))


def test_values_are_used_several_times_and_written_in_place() -> None:
    def function(x: Any) -> Any:
        kept = x.clone()
        view = x.view(x.shape[0], -1)
        view += 1.0  # which x shows
        x.mul_(kept).relu_()
        return F.relu(x, inplace=True) + kept * x

    found = imported(Does(function, nn.Conv2d(2, 3, 3)), random(2, 2, 5, 6))
    assert steps(found) == ["conv2d", "add", "scale", "relu", "relu", "scale", "add"]


@pytest.mark.parametrize("odd", [math.inf, math.nan])
def test_upsampling_carries_what_is_not_finite_as_far_as_pytorch_does(odd: float) -> None:
    module, x = nn.Upsample(scale_factor=(3, 2, 5), mode="trilinear"), random(1, 2, 4, 4, 4)
    x[0, 1, 2, 2, 2] = odd
    torch.testing.assert_close(
        import_module(module, (x,)).run(x, device="numpy"), module(x), rtol=1e-5, atol=1e-5, equal_nan=True
    )


def test_what_is_written_into_a_copy_is_written_into_nothing_else() -> None:
    def function(x: Any) -> Any:
        x.transpose(1, 2).reshape(x.shape[0], -1).add_(1.0)
        F.adaptive_avg_pool2d(x, 5).mul_(0.0)
        last = x.contiguous(memory_format=torch.channels_last).mul_(2.0)
        x.reshape(x.shape[0], -1).relu_()  # which x shows
        return last + x.to(torch.float32, copy=True).add_(1.0) * x

    imported(Does(function, nn.Conv2d(2, 3, 2)), random(2, 2, 6, 6), grow=False)


def test_a_module_of_several_inputs(backend_device: Device) -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.ConvTranspose2d(2, 3, 3, stride=2)

        def forward(self, scale: Any, x: Any, unread: Any, residual: Any) -> Any:
            y = self.conv(x)
            return y.mean((2, 3)) * scale + y.sum((2, 3)) - residual + (y * scale[:, :, None, None]).amax((2, 3))

    inputs = (random(2, 3), random(2, 2, 4, 5), random(4), random(2, 3, seed=3))
    found = import_module(Gate(), inputs)
    assert found.inputs[2] is None
    module = Gate()
    found = import_module(module, inputs)
    close(found.run(*inputs, device=backend_device.id), module(*inputs).detach())
    with pytest.raises(InputError, match="takes 4 inputs, got 1"):
        found.run(inputs[0])


def test_an_input_without_dimensions_is_a_number(backend_device: Device) -> None:
    class Tempered(nn.Module):
        def forward(self, x: Any, temperature: Any) -> Any:
            return (x.relu() / temperature).softmax(1)

    found = import_module(Tempered(), (random(2, 3, 4, 5), torch.tensor(1.0)))
    inputs = random(2, 3, 4, 5), torch.tensor(0.25, dtype=torch.float64)
    close(found.run(*inputs, device=backend_device.id), Tempered()(*inputs))


def test_sizes_follow_from_one_another_where_inputs_must_fit() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.ConvTranspose2d(2, 3, 3, stride=2)

        def forward(self, x: Any, residual: Any) -> Any:
            return residual + self.conv(x)

    module = Residual()
    found = import_module(module, (random(2, 2, 4, 5), random(2, 3, 9, 11)))
    assert [str(extent) for extent in found.problem.tensors[-1].shape or ()] == [
        "batch", "3", "2*height + 1", "2*width + 1"
    ]  # fmt: skip
    inputs = random(1, 2, 3, 6), random(1, 3, 7, 13)
    close(found.run(*inputs, device="numpy"), module(*inputs).detach())


def test_what_counts_with_sizes_holds_for_these_alone() -> None:
    module = Does(lambda x: x.sum((2, 3)) / (x.shape[2] * x.shape[3]))
    found = import_module(module, (random(2, 3, 4, 5),))
    close(found.run(random(2, 3, 4, 5), device="numpy"), module(random(2, 3, 4, 5)))
    assert [size.name for size in found.problem.sizes] == ["batch"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_dtypes(dtype: Any) -> None:
    module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.GroupNorm(3, 3), nn.GELU()).to(dtype)
    x = random(2, 2, 5, 6, dtype=dtype)
    found = import_module(module, (x,))
    close(found.run(x, device="numpy"), module(x).detach(), 1e-12 if dtype is torch.float64 else 4e-3)


def test_numpy_in_numpy_out_and_weights_share_memory() -> None:
    module = nn.Conv2d(2, 3, 3)
    found = import_module(module, (random(2, 2, 5, 6),))
    result = found.run(random(2, 2, 5, 6).numpy(), device="numpy")
    assert isinstance(result, np.ndarray)
    with torch.no_grad():
        module.weight.mul_(2.0)
        module.bias.mul_(2.0)
    np.testing.assert_allclose(found.run(random(2, 2, 5, 6).numpy(), device="numpy"), 2 * result, rtol=1e-5, atol=1e-6)


def test_exported_programs_before_and_after_decomposition() -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(48, 5))
    x = random(2, 3, 5, 6)
    program = torch.export.export(module, (x,))
    for each in (program, program.run_decompositions()):
        found = import_module(each, (x,))
        close(found.run(x, device="numpy"), module(x).detach())
        assert steps(found)[-4:] == ["batch_norm", "group_norm", "conv2d", "squeeze"]


# ---- what there is no step for -----------------------------------------------------------------------------
class Strange(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Dropout(0.5))

    def forward(self, x: Any) -> Any:
        y = torch.sort(self.inner(x), dim=1)[0]
        return torch.cumsum(y, 1) + torch.sin(x)


def test_all_nodes_without_counterpart_are_named_with_their_place() -> None:
    with pytest.raises(UnsupportedError, match="4 nodes have no counterpart") as caught:
        import_module(Strange(), (random(2, 3, 4, 5),))
    nodes = {node.operator: node for node in caught.value.nodes}  # type: ignore[attr-defined]
    assert set(nodes) == {"aten.dropout", "aten.sort", "aten.cumsum", "aten.sin"}
    assert nodes["aten.dropout"].module == "inner.1"
    assert "draws at random; call eval()" in nodes["aten.dropout"].reason
    first = Strange.forward.__code__.co_firstlineno
    assert nodes["aten.sort"].place == f"{__file__}:{first + 1}"
    assert nodes["aten.sin"].place == f"{__file__}:{first + 2}"
    assert "\n" not in str(caught.value)


def test_what_pytorch_can_take_apart_is_not_named() -> None:
    def function(x: Any, m: Any) -> Any:
        y = torch.einsum("nchw,oc->nohw", x, m.weight)
        y = torch.lerp(x, y, 0.3)
        y = torch.einsum("nchw,ndhw->ncdh", x, y)
        return torch.sin(y)

    with pytest.raises(UnsupportedError, match="2 nodes") as caught:
        import_module(Does(function, weight=random(4, 4)), (random(2, 4, 5, 5),))
    assert [each.operator for each in caught.value.nodes] == ["aten.einsum", "aten.sin"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: (x.relu(), x), "returns 2 tensors"),
        (lambda x: x.relu().permute(0, 2, 3, 1), "dimensions are"),
        (lambda x: x.relu().reshape(x.shape[0], 2, 2, 4, 5), "splits an axis"),
        (lambda x: x.view(2, 2, -1).softmax(-1).view_as(x), "splits an axis"),
        (lambda x: x.view(2, 2, -1).mul_(2).sum() + x, "splits an axis|writes into a part"),
        (lambda x: x.view(2, 2, -1) * torch.ones(2, 1), "each group of channels"),
        (lambda x: x, "nothing is computed"),
        (lambda x: torch.relu(x).double(), "one dtype"),
        (lambda x: x.mean(1, keepdim=True) + x.mean(2, keepdim=True), "lacks axes"),
        (lambda x: torch.erf(x + 1), "no step for it"),
        (lambda x: x**9 + x**0, "exponent is 9;.* exponent is 0;"),
        (lambda x: (-2.0) ** x, "raises -2 to computed powers"),
        (lambda x: x.norm(p=0, dim=1), "order of the norm is 0"),
        (lambda x: x.repeat(1, 1, 2, 1).relu(), "repeats values"),
        (lambda x: torch.autocast("cpu", enabled=False)(torch.relu)(x) * 2, "wrap_with_autocast"),
        (lambda x: x.max(1)[1] * 1.0, "this part of the result"),
        (lambda x: F.linear(F.max_pool2d(x, 2), torch.ones(2, 2)), "not the channels'"),
        (lambda x: torch.ones(3), "does not depend"),
        (lambda x: x + torch.randn(5), "at random"),
        (lambda x: F.pad(x, (1, 1)), "no step for it"),
        (lambda x: F.interpolate(x, size=(6, 5)), "equally often"),
        (lambda x: x[:, 1:].relu(), "part of a tensor"),
        (lambda x: x[:, ::2].relu(), "every other place"),
        (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True), "aligns corners"),
        (lambda x: F.pad(x.mean(3, keepdim=True).expand(-1, -1, -1, 5), (1, 1, 1, 1)).relu(), "expanded tensor"),
        (lambda x: x.mean(3, keepdim=True).expand(-1, -1, -1, 5).softmax(3).mean(3), "expanded tensor"),
        (lambda x: torch.where(x.transpose(1, 2) > 0, x, 0.1 * x), "different axes along one dimension"),
        (lambda x: torch.where(x.amax(1, True) > 0, x.mean(2, True), 0.0), "condition lacks axes"),
        (lambda x: x.relu() > 1, "the result is of torch.bool"),
        (lambda x: x * ((x > 0) + (x < 1)), "adds truth values"),
        (lambda x: (x > 0).sum(1), "the result is of torch.int64"),
        (lambda x: torch.ones_like(x).sum() * x, "as large as a computed tensor"),
        (lambda x: x.mean(1, True) * torch.ones_like(x), "larger than what it is combined with"),
        (lambda x: F.conv2d(x, x.mean(0, keepdim=True)), "weight is computed"),
        (lambda x: x @ x.mT, "no product with a matrix of weights"),
        (lambda x: x.permute(0, 2, 3, 1) @ torch.ones(4, 4, 3), "with several matrices"),
        (lambda x: F.dropout(torch.clamp(x, -1.0, 1.0)), "draws at random"),
        (lambda x: torch.cat([x, x.relu()], 1).tanh(), "aten.cat .*no step for it"),
        (lambda x: torch.cat([x, x.relu()], 2).tanh(), "only channels"),
    ],
)
def test_each_reason_is_true(function: Callable[..., Any], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        import_module(Does(function), (random(2, 4, 4, 5),))


def written_in_parts(y: Any, how: str) -> Any:
    """``y``, or a part of it, with something written in place that the other one sees."""
    part = y[:, 1:]
    if how == "the part":
        part.mul_(2)
    elif how == "the whole":
        y.relu_()
        return part.tanh()
    elif how == "out":
        torch.mul(part, 2, out=part)
    elif how == "a constant's part":
        factor = torch.ones(4, 1, 1)
        factor[:2].mul_(0)
        y = y * factor
    elif how == "several":
        torch._foreach_mul_([part], 2.0)
    else:
        y[:, 0] = 0.0
    return y.tanh()


@pytest.mark.parametrize("how", ["the part", "the whole", "an element", "out", "a constant's part", "several"])
def test_writing_in_place_where_a_part_is_seen_is_refused(how: str) -> None:
    with torch.no_grad(), pytest.raises(UnsupportedError, match=r"writes into|no step for it"):
        import_module(Does(lambda y: written_in_parts(y, how), nn.Conv2d(4, 4, 1)), (random(2, 4, 4, 5),))


def test_dropout_of_what_is_always_zero_is_zero() -> None:
    module = Does(lambda x: F.dropout(torch.clamp(torch.min(x, torch.tensor(0.0)), 0.0, 1.0), 0.4), nn.Conv2d(2, 3, 1))
    assert "clamp" in steps(imported(module, random(2, 2, 4, 5)))


@pytest.mark.parametrize(
    ("module", "inputs", "message"),
    [
        (operator.add, (), "expected a torch.nn.Module"),
        (nn.ReLU(), (), "not tensors"),
        (nn.ReLU(), (1.0,), "not tensors"),
        (nn.ReLU(), (torch.ones(0, 3),), "no elements"),
        (nn.Conv2d(3, 4, 3), (torch.ones(1, 2, 8, 8),), "cannot capture"),
    ],
)
def test_wrong_arguments(module: Any, inputs: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        import_module(module, inputs)


# ---- the command -------------------------------------------------------------------------------------------
FILE = """
import torch
import torch.nn as nn

print("said by the file")

class Model(nn.Module):
    def __init__(self, channels, factor):
        super().__init__()
        self.conv = nn.Conv2d(channels, 4, 3)
        self.factor = factor

    def forward(self, x):
        return torch.relu(self.conv(x)) * self.factor

def get_inputs():
    return [torch.rand(1 << 20, 3, 1 << 10, 1 << 10)]  # more than any memory has

def get_init_inputs():
    return [3, 1.5]
"""


def test_a_file_is_run_only_with_trust(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file, problem, weights = tmp_path / "model.py", tmp_path / "p.yaml", tmp_path / "w.npz"
    file.write_text(FILE)
    assert cli.main(["import", str(file)]) == 2
    output = capfd.readouterr()
    assert "give --trust" in output.err
    assert output.out == ""
    assert cli.main(["import", str(file), "--trust", "-o", str(problem), "--weights", str(weights), "--json"]) == 0
    answer = json.loads(capfd.readouterr().out)
    assert answer["tensors"] == {"conv_weight": [4, 3, 3, 3], "conv_bias": [4]}
    loaded = dispatcher.load_problem(problem)
    assert loaded == dispatcher.load_problem(yaml.safe_load(answer["yaml"]))
    x = random(2, 3, 5, 6)
    tensors = dict(np.load(weights))
    wanted = torch.relu(F.conv2d(x, *map(torch.from_numpy, (tensors["conv_weight"], tensors["conv_bias"])))) * 1.5
    result = dispatcher.run(loaded, device="numpy", x=x.numpy(), **tensors)
    np.testing.assert_allclose(result, wanted.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def Model(", "model.py:1: "),
        ("class Model: ...", "does not define get_inputs"),
        (
            FILE.replace('print("said by the file")', "import os, sys; print('bye', flush=True); os._exit(3)"),
            "exit code 3: bye",
        ),
        (FILE + "\nwhile True: pass\n", "not imported within 4 seconds"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_in_a_line(
    text: str, message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "model.py"
    file.write_text(text)
    limit = "4" if "while" in text else "60"
    assert cli.main(["import", str(file), "--trust", "--timeout", limit]) == 2
    (line,) = capfd.readouterr().err.strip().splitlines()
    assert message in line


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("return [3, 1.5]", "return [3]", "model.py: TypeError"),
        ("import torch.nn as nn", "import torch.nn as nn\nraise ValueError('no\\nway')", "model.py:4: ValueError: no"),
        ("torch.relu(", "torch.sin(", "aten.sin (at"),
    ],
)
def test_the_child_process_reports_what_is_wrong(
    old: str, new: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.py"
    file.write_text(FILE.replace(old, new))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "model_file", raising=False)
    reports: list[dict[str, Any]] = []
    import_here(reports.append, str(file), "", "found", "")
    (report,) = reports
    assert message in report["error"] and "\n" not in report["error"]


def test_init_inputs_may_be_positional_ones_and_named_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.py"
    file.write_text(FILE.replace("return [3, 1.5]", "return [[3], {'factor': 1.5}]"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "model_file", raising=False)
    reports: list[dict[str, Any]] = []
    import_here(reports.append, str(file), "", "found", "")
    assert "by: 1.5" in reports[0]["yaml"]


def test_the_guide_s_module_becomes_the_guide_s_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).resolve().parent.parent / "docs" / "pytorch.md").read_text(encoding="utf-8")
    chapter = text.partition("## Import a module")[2].partition("\n## ")[0]
    (program,), (problem,) = (
        re.findall(rf"^```{kind}\n(.*?)^```$", chapter, re.M | re.S) for kind in ("python", "yaml")
    )
    file = tmp_path / "guide.py"
    file.write_text(program)
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.import_module("guide").imported.yaml() == problem
