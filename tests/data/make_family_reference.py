"""Make family_reference.npz: what PyTorch computes for every bundled problem, in float64 on a CPU.

Run it with PyTorch installed, in the root of the repository: ``python -m tests.data.make_family_reference``. The tests
need only its output: ``NAME/CASE`` holds values of the result (:func:`tests.family.kept`), ``index`` (JSON) the
result's shape and the numbers that it was made with.

Below, ``p.NAME`` is a tensor or a number of the problem. Nothing here is read from the pipelines of the problem files.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, relu, sigmoid, tanh
from torch.nn import functional
from torch.nn.functional import gelu, hardswish, leaky_relu, mish, silu

from dispatcher import problems
from tests.family import CASES, drawn_tensors, kept, operator_for


class P:
    """A problem's tensors and numbers as attributes, and the operations that depend on its rank."""

    def __init__(self, name: str, values: dict[str, Any]) -> None:
        self.__dict__.update(values)
        self.transposed = "transpose" in name
        self.rank = next(value for value in values.values() if isinstance(value, Tensor)).dim() - 2
        self.ends = {1: [""], 2: ["_h", "_w"], 3: ["_d", "_h", "_w"]}[self.rank] if self.rank > 0 else []
        self.space = tuple(range(2, 2 + self.rank))

    def each(self, option: str, default: int) -> list[int]:
        return [getattr(self, option + end, default) for end in self.ends]

    def of_rank(self, name: str) -> Any:
        return getattr(functional, f"{name}{self.rank}d")

    def conv(self, x: Tensor | None = None, bias: Tensor | None = None, grouped: bool = True) -> Tensor:
        x, groups = self.input if x is None else x, self.groups if grouped and hasattr(self, "groups") else 1
        options = [self.each("stride", 1), self.each("padding", 0)]
        if self.transposed:
            options += [self.each("output_padding", 0), groups, self.each("dilation", 1)]
            return self.of_rank("conv_transpose")(x, self.kernel, bias, *options)
        return self.of_rank("conv")(x, self.kernel, bias, *options, self.each("dilation", 1), groups)

    def centred(self, conv: Callable[..., Tensor]) -> Tensor:
        """``C``: one signal under a window that is centred on its output."""
        return conv(self.A[None, None], self.B[None, None], padding="same")[0, 0]

    def max_pool(self, x: Tensor, *window: int) -> Tensor:
        return self.of_rank("max_pool")(x, *window)

    def avg_pool(self, x: Tensor, window: int) -> Tensor:
        return self.of_rank("avg_pool")(x, window)

    def mean(self, x: Tensor) -> Tensor:
        """Over space."""
        return x.mean(self.space, keepdim=True)

    def batch_norm(self, x: Tensor) -> Tensor:
        return functional.batch_norm(x, None, None, self.bn_weight, self.bn_bias, training=True)

    def group_norm(self, x: Tensor, groups: int, eps: float = 1e-5) -> Tensor:
        return functional.group_norm(x, groups, self.gn_weight, self.gn_bias, eps)


def layer_norm(x: Tensor) -> Tensor:
    """Over channels."""
    return functional.layer_norm(x.movedim(1, -1), (x.shape[1],)).movedim(-1, 1)


def pooled_sum(x: Tensor, p: P) -> Tensor:
    return p.max_pool(p.max_pool(x, 2), 3).sum(1, keepdim=True)


def gated(s: Tensor) -> Tensor:
    return s * hardswish(s)


def plain(p: P) -> Tensor:
    return p.conv()


def spatial_softmax(x: Tensor) -> Tensor:
    return torch.softmax(x.flatten(2), 2).view_as(x)


def residuals(c: Tensor, p: P) -> Tensor:
    return ((c + p.bias) + c) * c + c


def lse_gate(x: Tensor, p: P) -> Tensor:
    x = torch.logsumexp(x, 1, keepdim=True)
    return (x * sigmoid(x + 3) / 6 - p.subtract_bias).clamp(-1, 1)


def less_mean(x: Tensor, p: P) -> Tensor:
    return x - p.mean(x)


def residual_lse(c: Tensor, p: P) -> Tensor:
    return torch.logsumexp(c + hardswish(tanh(p.group_norm(c, p.num_groups))), 1, keepdim=True)


Compute = Callable[[P], Tensor]
#: The problems that are more than a convolution.
PROBLEMS: dict[str, Compute] = {
    "conv-1d": lambda p: p.centred(functional.conv1d),
    "conv-2d": lambda p: p.centred(functional.conv2d),
    "conv-square-3d": lambda p: p.centred(functional.conv3d),
    "conv-depthwise-separable-2d": lambda p: functional.conv2d(
        functional.conv2d(
            p.input,
            p.depthwise_kernel,
            None,
            p.each("stride", 1),
            p.each("padding", 0),
            p.each("dilation", 1),
            p.groups,
        ),
        p.pointwise_kernel,
    ),
    # -- transposed, two axes
    "conv-transpose2d-add-min-gelu-multiply": lambda p: (
        gelu((p.conv(bias=p.conv_bias) + p.add_value).clamp(max=0)) * p.multiply_value
    ),
    "conv-transpose2d-batchnorm-tanh-maxpool-groupnorm": lambda p: p.group_norm(
        p.max_pool(tanh(p.batch_norm(p.conv(grouped=False))), 2), p.num_groups
    ),
    "conv-transpose2d-biasadd-clamp-scaling-clamp-divide": lambda p: (
        ((p.conv() + p.bias).clamp(0, 1) * p.scaling_factor).clamp(0, 1) / p.scaling_factor
    ),
    "conv-transpose2d-gelu-groupnorm": lambda p: p.group_norm(gelu(p.conv(grouped=False)), p.num_groups),
    "conv-transpose2d-globalavgpool-biasadd-logsumexp-sum-multiply": lambda p: (
        torch.logsumexp(p.mean(p.conv()) + p.bias, 1, keepdim=True).sum((2, 3)) * 10
    ),
    "conv-transpose2d-maxpool-hardtanh-mean-tanh": lambda p: tanh(
        p.mean(p.max_pool(p.conv(), p.maxpool_kernel, p.maxpool_stride).clamp(p.hardtanh_min, p.hardtanh_max))
    ),
    "conv-transpose2d-min-sum-gelu-add": lambda p: gelu(p.conv().amin(1, keepdim=True).sum(2, keepdim=True)) + p.bias,
    "conv-transpose2d-mish-add-hardtanh-scaling": lambda p: (mish(p.conv()) + p.add_value).clamp(-1, 1) * p.scale,
    "conv-transpose2d-multiply-globalavgpool-globalavgpool-mean": lambda p: p.mean(p.mean(p.conv() * p.multiplier)),
    "conv-transpose2d-softmax-biasadd-scaling-sigmoid": lambda p: sigmoid(
        (torch.softmax(p.conv(bias=p.conv_bias), 1) + p.add_bias) * p.scaling_factor
    ),
    "conv-transpose2d-subtract-tanh": lambda p: tanh(p.conv() - p.bias),
    # -- transposed, three axes
    "conv-transpose3d-add-hardswish": lambda p: gated(p.conv() + p.add_input),
    "conv-transpose3d-avgpool-clamp-softmax-multiply": lambda p: (
        spatial_softmax(p.conv(p.avg_pool(p.input, p.pool_kernel)).clamp(p.clamp_min, p.clamp_max)) * p.scale
    ),
    "conv-transpose3d-batchnorm-avgpool-avgpool": lambda p: p.avg_pool(
        p.avg_pool(p.batch_norm(p.conv(bias=p.conv_bias)), 2), 2
    ),
    "conv-transpose3d-batchnorm-subtract": lambda p: less_mean(p.batch_norm(p.conv()), p),
    "conv-transpose3d-clamp-min-divide": lambda p: p.conv(bias=p.conv_bias).clamp(min=p.min_value) / p.divisor,
    "conv-transpose3d-layernorm-gelu-scaling": lambda p: gelu(layer_norm(p.conv())) * p.scaling_factor,
    "conv-transpose3d-leakyrelu-multiply-leakyrelu-max": lambda p: p.max_pool(
        leaky_relu(leaky_relu(p.conv(bias=p.conv_bias), 0.2) * p.multiplier, 0.2), 2
    ),
    "conv-transpose3d-logsumexp-hardswish-subtract-clamp": lambda p: lse_gate(p.conv(bias=p.conv_bias), p),
    "conv-transpose3d-max-max-sum": lambda p: pooled_sum(p.conv(bias=p.conv_bias), p),
    "conv-transpose3d-maxpool-softmax-subtract-swish-max": lambda p: silu(
        torch.softmax(p.max_pool(p.conv(bias=p.conv_bias), p.pool_kernel, p.pool_stride, p.pool_padding), 1)
        - p.subtract.view(1, -1, 1, 1, 1)
    ).amax(1),
    "conv-transpose3d-mean-add-softmax-tanh-scaling": lambda p: (
        tanh(torch.softmax(p.conv().mean(2, keepdim=True) + p.bias, 1)) * p.scaling_factor
    ),
    "conv-transpose3d-multiply-max-globalavgpool-clamp": lambda p: p.mean(
        p.max_pool(p.conv(bias=p.conv_bias) * p.scale, p.maxpool_kernel)
    ).clamp(0, 1),
    "conv-transpose3d-relu-groupnorm": lambda p: p.group_norm(relu(p.conv(grouped=False)), p.groups),
    "conv-transpose3d-scale-batchnorm-globalavgpool": lambda p: p.mean(
        p.batch_norm(p.conv(bias=p.conv_bias) * p.scale_factor)
    ),
    "conv-transpose3d-scaling-avgpool-biasadd-scaling": lambda p: (
        (p.avg_pool(p.conv() * p.scale1, 2) + p.bias) * p.scale2
    ),
    "conv-transpose3d-softmax-sigmoid": lambda p: sigmoid(torch.softmax(p.conv(), 1)),
    "conv-transpose3d-sum-layernorm-avgpool-gelu": lambda p: gelu(p.avg_pool(layer_norm(p.conv() + p.sum_weight), 2)),
    "conv-transpose3d-sum-residualadd-multiply-residualadd": lambda p: residuals(p.conv(), p),
    "conv-transpose3d-swish-groupnorm-hardswish": lambda p: hardswish(
        p.group_norm(silu(p.conv(bias=p.conv_bias, grouped=False)), p.groups, p.eps)
    ),
    # -- two axes
    "conv2d-activation-batchnorm": lambda p: p.batch_norm(mish(p.conv(bias=p.bias))),
    "conv2d-add-scale-sigmoid-groupnorm": lambda p: p.group_norm(sigmoid((p.conv() + p.bias) * p.scale), p.num_groups),
    "conv2d-avgpool-sigmoid-sum": lambda p: sigmoid(p.avg_pool(p.conv(bias=p.bias), p.pool_kernel)).sum((1, 2, 3)),
    "conv2d-batchnorm-scaling": lambda p: p.batch_norm(p.conv(bias=p.bias)) * p.scaling_factor,
    "conv2d-divide-leakyrelu": lambda p: leaky_relu(p.conv(bias=p.bias) / p.divisor, 0.01),
    "conv2d-gelu-globalavgpool": lambda p: gelu(p.conv(bias=p.bias)).mean((2, 3)),
    "conv2d-groupnorm-scale-maxpool-clamp": lambda p: p.max_pool(
        p.group_norm(p.conv(bias=p.conv_bias), p.num_groups) * p.scale, p.pool_kernel
    ).clamp(p.clamp_min, p.clamp_max),
    "conv2d-groupnorm-tanh-hardswish-residualadd-logsumexp": lambda p: residual_lse(p.conv(bias=p.conv_bias), p),
    "conv2d-hardswish-relu": lambda p: relu(hardswish(p.conv(bias=p.bias))),
    "conv2d-instancenorm-divide": lambda p: functional.instance_norm(p.conv()) / p.divide_by,
    "conv2d-min-add-multiply": lambda p: (p.conv().clamp(max=p.constant_value) + p.bias) * p.scaling_factor,
    "conv2d-min-tanh-tanh": lambda p: tanh(tanh(p.conv().amin(1, keepdim=True))),
    "conv2d-mish-mish": lambda p: mish(mish(p.conv())),
    "conv2d-multiply-leakyrelu-gelu": lambda p: gelu(leaky_relu(p.conv(bias=p.bias) * p.multiplier, 0.01)),
    "conv2d-relu-biasadd": lambda p: relu(p.conv()) + p.bias,
    "conv2d-relu-hardswish": lambda p: hardswish(relu(p.conv(bias=p.bias))),
    "conv2d-scaling-min": lambda p: (p.conv() * p.scale_factor).amin(1, keepdim=True),
    "conv2d-subtract-hardswish-maxpool-mish": lambda p: mish(
        p.max_pool(hardswish(p.conv() - p.subtract_value), p.pool_kernel)
    ),
    "conv2d-subtract-subtract-mish": lambda p: mish(p.conv(bias=p.conv_bias) - p.subtract_value_1 - p.subtract_value_2),
    "conv2d-subtract-tanh-subtract-avgpool": lambda p: p.avg_pool(
        tanh(p.conv() - p.subtract1_value) - p.subtract2_value, p.pool_kernel
    ),
    "conv2d-tanh-scaling-biasadd-max": lambda p: p.max_pool(
        tanh(p.conv(bias=p.conv_bias)) * p.scaling_factor + p.add_bias, p.pool_kernel
    ),
    # -- three axes
    "conv3d-divide-max-globalavgpool-biasadd-sum": lambda p: (
        p.mean(p.max_pool(p.conv() / p.divisor, p.pool_size)) + p.bias
    ).sum(p.sum_dim),
    "conv3d-groupnorm-mean": lambda p: p.group_norm(p.conv(), p.num_groups).mean((1, 2, 3, 4)),
    "conv3d-groupnorm-min-clamp-dropout": lambda p: functional.dropout(
        p.group_norm(p.conv(bias=p.conv_bias), p.num_groups).clamp(max=p.min_value).clamp(p.min_value, p.max_value),
        p.dropout_p,
        training=False,
    ),
    "conv3d-hardswish-groupnorm-mean": lambda p: p.group_norm(hardswish(p.conv()), p.num_groups).mean((2, 3, 4)),
    "conv3d-leakyrelu-sum-clamp-gelu": lambda p: gelu(
        (leaky_relu(p.conv(bias=p.conv_bias), 0.2) + p.sum_tensor).clamp(-1, 1)
    ),
    "conv3d-max-logsumexp-relu": lambda p: relu(torch.logsumexp(p.max_pool(p.conv(), 2), 1, keepdim=True)),
    "conv3d-min-softmax": lambda p: torch.softmax(p.conv().amin(p.min_dim), 1),
    "conv3d-mish-tanh": lambda p: tanh(mish(p.conv())),
    "conv3d-multiply-instancenorm-clamp-multiply-max": lambda p: (
        functional.instance_norm(p.conv(bias=p.conv_bias) * p.multiplier).clamp(p.clamp_min, p.clamp_max) * p.multiplier
    ).amax(1),
    "conv3d-relu-leakyrelu-gelu-sigmoid-biasadd": lambda p: sigmoid(gelu(leaky_relu(relu(p.conv()), 0.01))) + p.bias,
    "conv3d-scaling-tanh-multiply-sigmoid": lambda p: sigmoid(tanh(p.conv() * p.scale) * p.bias),
    "conv3d-softmax-maxpool-maxpool": lambda p: p.max_pool(p.max_pool(torch.softmax(p.conv(), 1), 2), 2),
}


def main() -> None:
    arrays: dict[str, np.ndarray] = {}
    index: dict[str, Any] = {}
    for name in problems():
        for case in CASES:
            operator = operator_for(name, case)
            tensors = {key: torch.from_numpy(x).double() for key, x in drawn_tensors(operator, case).items()}
            numbers = {**operator.sizes, **operator.scalars}
            result = PROBLEMS.get(name, plain)(P(name, {**tensors, **numbers})).numpy()
            arrays[f"{name}/{case}"] = kept(result)
            index[f"{name}/{case}"] = {"shape": result.shape, "numbers": numbers}
    arrays["index"] = np.array(json.dumps({"torch": torch.__version__, "entries": index}))
    np.savez_compressed(Path(__file__).with_name("family_reference.npz"), **arrays)


if __name__ == "__main__":
    main()
