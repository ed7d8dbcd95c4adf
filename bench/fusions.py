"""What fusion is worth: pipelines fused and with option ``fusion=off``, interleaved in one process.

    python -m bench.fusions [--device opencl] [--rounds 7] [--scale 1.0]

Prints a Markdown table: launches and the median time of a call, both ways. Every fused result is first compared with
the unfused one.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np

import dispatcher
from dispatcher.problem.loader import problem_from_mapping

#: Batch, input channels, depth, height, width; output channels.
SHAPE, CHANNELS = (4, 16, 16, 32, 32), 32
CONVOLUTION = {
    "op": "conv_transpose3d",
    "weight": "w",
    "bias": "b",
    "stride": 2,
    "padding": 1,
    "output_padding": 1,
    "as": "c",
}
SPATIAL = {"axis": "spatial"}
PIPELINES: dict[str, list[Any]] = {
    "conv, gelu, add conv": ["gelu", {"op": "add", "value": "c"}],
    "conv, add tensor, hardswish, times itself": [
        {"op": "add", "value": "t", "as": "s"},
        "hardswish",
        {"op": "scale", "by": "s"},
    ],
    "conv, silu, group_norm, hardswish": ["silu", {"op": "group_norm", "groups": 8}, "hardswish"],
    "conv, instance_norm, relu, add tensor": ["instance_norm", "relu", {"op": "add", "value": "t"}],
    "conv, batch_norm, mean over space": ["batch_norm", {"op": "mean", **SPATIAL}],
    "conv, softmax over space": [{"op": "softmax", **SPATIAL}],
    "conv, clamp, softmax over space, times 2": [
        {"op": "clamp", "min": 0.0, "max": 1.0},
        {"op": "softmax", **SPATIAL},
        {"op": "scale", "by": 2.0},
    ],
    "conv, mean over space": [{"op": "mean", **SPATIAL}],
}


def tensors(scale: float) -> dict[str, np.ndarray]:
    """Random inputs, the batch multiplied by ``scale``."""
    random = np.random.default_rng(0)
    batch = max(1, round(SHAPE[0] * scale))
    output = (batch, CHANNELS, *(2 * extent for extent in SHAPE[2:]))
    shapes = {
        "x": (batch, *SHAPE[1:]),
        "w": (SHAPE[1], CHANNELS, 3, 3, 3),
        "b": (CHANNELS,),
        "t": output,
    }
    return {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def measure(after: list[Any], inputs: dict[str, np.ndarray], device: str, rounds: int) -> list[str]:
    """Launches and seconds of one pipeline, unfused and fused, as cells of the table.

    Raises:
        AssertionError: the two results differ.
    """
    used = {name: array for name, array in inputs.items() if name != "t" or "'t'" in repr(after)}
    parameters: list[dict[str, Any]] = [
        {"name": name, "type": "tensor", "const": True, "shape": list(array.shape)}
        for name, array in used.items()
    ]
    parameters.append({"name": "output", "type": "tensor", "const": False})
    problem = problem_from_mapping(
        {"name": "fusions", "parameters": parameters, "pipeline": [CONVOLUTION, *after]}
    )
    calls = [
        dispatcher.compile(problem, device=device, options=options) for options in ({"fusion": "off"}, {})
    ]
    results = [call(**used) for call in calls]
    np.testing.assert_allclose(results[1], results[0], rtol=1e-3, atol=1e-3 * np.abs(results[0]).max() + 1e-6)
    times: list[list[float]] = [[], []]
    for number in range(2 * rounds):
        for which in (0, 1) if number % 2 else (1, 0):
            start = time.perf_counter()
            calls[which](**used)
            times[which].append(time.perf_counter() - start)
    launches = [len(call.explain(**used).launches) for call in calls]
    medians = [statistics.median(each) for each in times]
    ratio = medians[0] / medians[1]
    return [*map(str, launches), *(f"{1e3 * each:.1f} ms" for each in medians), f"{ratio:.2f}"]


def main() -> None:
    """Measure all pipelines and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="opencl")
    parser.add_argument("--rounds", type=int, default=7, help="pairs of calls each way round")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the batch")
    arguments = parser.parse_args()
    inputs = tensors(arguments.scale)
    print("| pipeline | launches, unfused | fused | time, unfused | fused | ratio |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, after in PIPELINES.items():
        cells = measure(after, inputs, arguments.device, arguments.rounds)
        print("| " + " | ".join([name, *cells]) + " |", flush=True)


if __name__ == "__main__":
    main()
