"""Make torch_reference.npz: what PyTorch computes for the bundled problems, in float64 on a CPU.

Run it with PyTorch installed: ``python tests/data/make_torch_reference.py``. The tests need only its output.
Every entry ``N`` has arrays ``N/tensor/NAME`` (float32) and ``N/result`` (float64), and in ``index`` (JSON)
its problem and the values of its sizes and scalars. ``step/OP`` is what an operation of the vocabulary makes of the
tensors ``step tensor/NAME``, with the fields that ``index`` gives.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

Tensors = Mapping[str, torch.Tensor]
Numbers = Mapping[str, Any]


def triple(numbers: Numbers, name: str, default: int) -> list[int]:
    return [numbers.get(f"{name}_{axis}", default) for axis in "dhw"]


def conv(x: torch.Tensor, weight: torch.Tensor, n: Numbers, bias: torch.Tensor | None = None) -> torch.Tensor:
    return functional.conv_transpose3d(
        x,
        weight,
        bias,
        triple(n, "stride", 1),
        triple(n, "padding", 0),
        triple(n, "output_padding", 0),
        n.get("groups", 1),
        triple(n, "dilation", 1),
    )


def layer_norm(x: torch.Tensor) -> torch.Tensor:
    """Over the channels of each voxel."""
    last = functional.layer_norm(x.movedim(1, -1), (x.shape[1],), eps=1e-5)
    return last.movedim(-1, 1)


def asym_input(t: Tensors, n: Numbers) -> torch.Tensor:
    return conv(t["input"], t["kernel"], n)


def layernorm_gelu_scaling(t: Tensors, n: Numbers) -> torch.Tensor:
    return functional.gelu(layer_norm(conv(t["input"], t["kernel"], n))) * n["scaling_factor"]


def sum_layernorm_avgpool_gelu(t: Tensors, n: Numbers) -> torch.Tensor:
    summed = conv(t["input"], t["kernel"], n) + n["sum_weight"]
    return functional.gelu(functional.avg_pool3d(layer_norm(summed), 2))


def avgpool_clamp_softmax_multiply(t: Tensors, n: Numbers) -> torch.Tensor:
    pooled = functional.avg_pool3d(t["input"], n["pool_kernel"])
    clamped = conv(pooled, t["kernel"], n).clamp(n["clamp_min"], n["clamp_max"])
    return torch.softmax(clamped.flatten(2), 2).view_as(clamped) * t["scale"]


def max_max_sum(t: Tensors, n: Numbers) -> torch.Tensor:
    pooled = functional.max_pool3d(conv(t["input"], t["kernel"], n, t["conv_bias"]), 2)
    return functional.max_pool3d(pooled, 3).sum(1, keepdim=True)


PROBLEMS: dict[str, Callable[[Tensors, Numbers], torch.Tensor]] = {
    "conv-transpose-3d-asym-input-sq-kernel": asym_input,
    "conv-transpose3d-layernorm-gelu-scaling": layernorm_gelu_scaling,
    "conv-transpose3d-sum-layernorm-avgpool-gelu": sum_layernorm_avgpool_gelu,
    "conv-transpose3d-avgpool-clamp-softmax-multiply": avgpool_clamp_softmax_multiply,
    "conv-transpose3d-max-max-sum": max_max_sum,
}

Step = Callable[[torch.Tensor, Tensors], torch.Tensor]

#: Operations of the vocabulary: their fields, and what PyTorch calls them.
STEPS: dict[str, tuple[dict[str, Any], Step]] = {
    "conv3d": (
        {"weight": "v", "bias": "c", "padding": [1, 0, 2], "dilation": [1, 1, 2], "groups": 2},
        lambda x, t: functional.conv3d(x, t["v"], t["c"], 1, (1, 0, 2), (1, 1, 2), 2),
    ),
    "conv": (
        {
            "weight": "v",
            "bias": "c",
            "stride": [2, 1, 2],
            "padding": [[1, 2], [0, 1], 2],
            "dilation": [1, 1, 2],
            "groups": 2,
        },
        lambda x, t: functional.conv3d(
            functional.pad(x, (2, 2, 0, 1, 1, 2)), t["v"], t["c"], (2, 1, 2), 0, (1, 1, 2), 2
        ),
    ),
    "conv_transpose": (
        {
            "weight": "v",
            "stride": [2, 1, 3],
            "padding": [1, 0, 2],
            "output_padding": [1, 0, 2],
            "dilation": [1, 2, 1],
            "groups": 2,
        },
        lambda x, t: functional.conv_transpose3d(x, t["v"], None, (2, 1, 3), (1, 0, 2), (1, 0, 2), 2, (1, 2, 1)),
    ),
    "avg_pool": (
        {"window": [2, 3, 2], "stride": [1, 2, 3], "padding": [1, 1, 0], "ceil_mode": True, "count_include_pad": False},
        lambda x, t: functional.avg_pool3d(x, (2, 3, 2), (1, 2, 3), (1, 1, 0), True, False),
    ),
    "avg_pool3d": (
        {"window": [2, 3, 2], "stride": 2, "padding": 1, "ceil_mode": True, "divisor": 7},
        lambda x, t: functional.avg_pool3d(x, (2, 3, 2), 2, 1, True, True, 7),
    ),
    "max_pool": (
        {"window": [2, 2, 3], "stride": [2, 1, 2], "padding": [1, 0, 1], "dilation": [1, 2, 1], "ceil_mode": True},
        lambda x, t: functional.max_pool3d(x, (2, 2, 3), (2, 1, 2), (1, 0, 1), (1, 2, 1), True),
    ),
    "adaptive_avg_pool": ({"size": [2, 3, 7]}, lambda x, t: functional.adaptive_avg_pool3d(x, (2, 3, 7))),
    "adaptive_max_pool": ({"size": [4, 3, 2]}, lambda x, t: functional.adaptive_max_pool3d(x, (4, 3, 2))),
    "divide": ({"by": "t"}, lambda x, t: x / t["t"]),
    "maximum": ({"value": "t"}, lambda x, t: torch.maximum(x, t["t"])),
    "minimum": ({"value": 0.125}, lambda x, t: x.clamp(max=0.125)),
    "greater": ({"value": "t"}, lambda x, t: torch.gt(x, t["t"]).to(x.dtype)),
    "greater_equal": ({"value": 0.125}, lambda x, t: torch.ge(x, 0.125).to(x.dtype)),
    "where": ({"value": "t", "other": -0.5}, lambda x, t: torch.where(x != 0, t["t"], -0.5)),
    "hardtanh": ({}, lambda x, t: functional.hardtanh(x)),
    "relu": ({}, lambda x, t: torch.relu(x)),
    "leaky_relu": ({"slope": 0.2}, lambda x, t: functional.leaky_relu(x, 0.2)),
    "sigmoid": ({}, lambda x, t: torch.sigmoid(x)),
    "tanh": ({}, lambda x, t: torch.tanh(x)),
    "silu": ({}, lambda x, t: functional.silu(x)),
    "softplus": ({}, lambda x, t: functional.softplus(x, threshold=60.0)),
    "hardswish": ({}, lambda x, t: functional.hardswish(x)),
    "mish": ({}, lambda x, t: functional.mish(x)),
    "elu": ({"alpha": 0.75}, lambda x, t: functional.elu(x, 0.75)),
    "selu": ({}, lambda x, t: torch.selu(x)),
    "softsign": ({}, lambda x, t: functional.softsign(x)),
    "exp": ({}, lambda x, t: torch.exp(x)),
    "log": ({}, lambda x, t: torch.log(x)),  # NaN, too
    "sqrt": ({}, lambda x, t: torch.sqrt(x)),
    "abs": ({}, lambda x, t: torch.abs(x)),
    "square": ({}, lambda x, t: torch.square(x)),
    "reciprocal": ({}, lambda x, t: torch.reciprocal(x)),
    "group_norm": ({"groups": 2, "weight": "c"}, lambda x, t: functional.group_norm(x, 2, t["c"])),
    "instance_norm": ({}, lambda x, t: functional.instance_norm(x)),
    "batch_norm": (
        {"weight": "c", "bias": "c"},
        lambda x, t: functional.batch_norm(x, None, None, t["c"], t["c"], training=True),
    ),
    "rms_norm": (
        {"weight": "c", "eps": 0.5},
        lambda x, t: functional.rms_norm(x.movedim(1, -1), (4,), t["c"], 0.5).movedim(-1, 1),
    ),
    "log_softmax": ({"axis": "channel"}, lambda x, t: torch.log_softmax(x, 1)),
    "min": ({"axis": "spatial"}, lambda x, t: torch.amin(x, (2, 3, 4), keepdim=True)),
    "product": ({"axis": "channel"}, lambda x, t: torch.prod(x, 1, keepdim=True)),
    "log_sum_exp": ({"axis": "spatial"}, lambda x, t: torch.logsumexp(x, (2, 3, 4), keepdim=True)),
}
STEP_TENSORS = {"x": (2, 4, 3, 4, 5), "v": (4, 2, 2, 3, 2), "c": (4,), "t": (2, 1, 3, 1, 1)}

AXES = ("d", "h", "w")


def geometry(
    batch: int,
    channels: tuple[int, int],
    extents: tuple[int, int, int],
    kernel: tuple[int, int, int],
    **triples: tuple[int, int, int],
) -> dict[str, int]:
    """Values of the size parameters."""
    sizes = {"batch_size": batch, "in_channels": channels[0], "out_channels": channels[1]}
    sizes.update(zip(("depth", "height", "width"), extents, strict=True))
    for name, values in {"kernel": kernel, **triples}.items():
        sizes.update({f"{name}_{axis}": value for axis, value in zip(AXES, values, strict=True)})
    return sizes


#: For the plain convolution: groups and dilation too.
CONVOLUTIONS: tuple[dict[str, int], ...] = (
    geometry(1, (1, 1), (1, 1, 1), (1, 1, 1)),
    geometry(2, (3, 5), (3, 4, 5), (3, 3, 3)),
    geometry(2, (6, 4), (2, 3, 4), (2, 3, 1), stride=(1, 2, 3), padding=(0, 1, 0), output_padding=(0, 1, 2))
    | {"groups": 2},
    geometry(1, (4, 8), (3, 2, 4), (3, 2, 2), stride=(2, 1, 2), padding=(2, 1, 0), dilation=(2, 3, 1)) | {"groups": 4},
    geometry(3, (2, 3), (2, 2, 3), (1, 1, 1), stride=(3, 2, 4), output_padding=(2, 0, 3)),
    geometry(1, (2, 2), (4, 3, 2), (2, 4, 3), stride=(1, 1, 2), output_padding=(1, 0, 1), dilation=(3, 1, 2)),
)

#: For the fused problems.
FUSED: tuple[dict[str, int], ...] = (
    geometry(2, (3, 5), (4, 4, 4), (3, 3, 3), stride=(2, 2, 2), padding=(1, 1, 1), output_padding=(1, 1, 1)),
    geometry(1, (4, 6), (5, 4, 4), (4, 4, 4), stride=(2, 2, 2), padding=(1, 1, 1)),
    geometry(2, (2, 4), (4, 6, 4), (5, 2, 3), stride=(2, 1, 3), padding=(1, 0, 1), output_padding=(0, 0, 2)),
)

#: Values of the other numbers, tried in turn.
NUMBERS: dict[str, tuple[dict[str, Any], ...]] = {
    "conv-transpose-3d-asym-input-sq-kernel": ({},),
    "conv-transpose3d-layernorm-gelu-scaling": ({"scaling_factor": 1.0}, {"scaling_factor": -2.5}),
    "conv-transpose3d-sum-layernorm-avgpool-gelu": ({"sum_weight": 1.0}, {"sum_weight": -3.25}),
    "conv-transpose3d-avgpool-clamp-softmax-multiply": (
        {"pool_kernel": 2, "clamp_min": 0.0, "clamp_max": 1.0},
        {"pool_kernel": 1, "clamp_min": -3.0, "clamp_max": 2.0},
    ),
    "conv-transpose3d-max-max-sum": ({},),
}


def tensors_for(problem: str, n: Numbers, generator: np.random.Generator) -> dict[str, np.ndarray]:
    """Normally distributed inputs, as float32."""
    channels = n["out_channels"]
    shapes: dict[str, tuple[int, ...]] = {
        "input": (n["batch_size"], n["in_channels"], n["depth"], n["height"], n["width"]),
        "kernel": (n["in_channels"], channels // n.get("groups", 1), *triple(n, "kernel", 1)),
    }
    if problem.endswith("multiply"):
        shapes["scale"] = (1, channels, 1, 1, 1)
    if problem.endswith("max-max-sum"):
        shapes["conv_bias"] = (channels,)
    return {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def main() -> None:
    generator = np.random.default_rng(1)
    arrays: dict[str, np.ndarray] = {}
    index: list[dict[str, Any]] = []
    for problem, compute in PROBLEMS.items():
        for position, sizes in enumerate(CONVOLUTIONS if problem.endswith("sq-kernel") else FUSED):
            choices = NUMBERS[problem]
            numbers = {**sizes, **choices[position % len(choices)]}
            if problem.endswith("max-max-sum"):  # which has no output padding, and pools of 6 in all
                numbers = {name: value for name, value in numbers.items() if "output_padding" not in name}
            tensors = tensors_for(problem, numbers, generator)
            result = compute({name: torch.from_numpy(array).double() for name, array in tensors.items()}, numbers)
            for name, array in tensors.items():
                arrays[f"{len(index)}/tensor/{name}"] = array
            arrays[f"{len(index)}/result"] = result.numpy()
            index.append({"problem": problem, "numbers": numbers})
    drawn = {name: generator.standard_normal(shape).astype(np.float32) for name, shape in STEP_TENSORS.items()}
    arrays |= {f"step tensor/{name}": array for name, array in drawn.items()}
    tensors64 = {name: torch.from_numpy(array).double() for name, array in drawn.items()}
    for op, (_, step) in STEPS.items():
        arrays[f"step/{op}"] = step(tensors64["x"], tensors64).numpy()
    fields = {op: given for op, (given, _) in STEPS.items()}
    found = {"torch": torch.__version__, "entries": index, "steps": fields}
    arrays["index"] = np.array(json.dumps(found))
    np.savez_compressed(Path(__file__).with_name("torch_reference.npz"), **arrays)


if __name__ == "__main__":
    main()
