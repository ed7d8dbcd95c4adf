"""What fusion is worth: pipelines fused and with option ``fusion=off``, interleaved in one process.

    python bench/fusions.py [--device opencl] [--rounds 15] [--scale 1.0] [--output FILE.json]

Prints a Markdown table: launches and the median time of a call, both ways. Every result is first compared with the
reference.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import dispatcher
from bench.common import markdown, plain_parser, write_json
from dispatcher.check.comparison import verify_results
from dispatcher.problem.schema import problem_from_mapping
from dispatcher.timing.racing import environment
from dispatcher.timing.sampling import Schedule, Times, ratio, take_turns, timed

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
    shapes = {"x": (batch, *SHAPE[1:]), "w": (SHAPE[1], CHANNELS, 3, 3, 3), "b": (CHANNELS,), "t": output}
    return {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def measure(after: list[Any], inputs: dict[str, np.ndarray], device: str, rounds: int) -> dict[str, Any]:
    """Launches and times of one pipeline, unfused and fused.

    Raises:
        VerificationError: a result is wrong.
    """
    used = {name: array for name, array in inputs.items() if name != "t" or "'t'" in repr(after)}
    parameters: list[dict[str, Any]] = [
        {"name": name, "type": "tensor", "const": True, "shape": list(array.shape)} for name, array in used.items()
    ]
    parameters.append({"name": "output", "type": "tensor", "const": False})
    problem = problem_from_mapping({"name": "fusions", "parameters": parameters, "pipeline": [CONVOLUTION, *after]})
    ways = {"unfused": {"fusion": "off"}, "fused": {}}
    calls = {way: dispatcher.compile(problem, device=device, options=options) for way, options in ways.items()}
    explained = {way: call.explain(**used) for way, call in calls.items()}
    for found in verify_results(explained["fused"].operator, used, [call(**used) for call in calls.values()]):
        if not found.passed:
            raise dispatcher.VerificationError(found.reason)
    output = np.empty(explained["fused"].operator.output_shape, np.float32)
    runs = {way: timed(lambda call=call: call(**used, output=output)) for way, call in calls.items()}
    seconds: dict[str, list[float]] = {way: [] for way in runs}
    schedule = Schedule(rounds, order="mirrored")
    take_turns(list(runs), schedule, lambda way: seconds[way].append(runs[way]()))
    return {way: {"launches": len(explained[way].launches), **Times(tuple(seconds[way])).as_dict()} for way in runs}


def cells(name: str, found: dict[str, Any]) -> list[str]:
    """A row of the table."""
    unfused, fused = (found[way] for way in ("unfused", "fused"))
    gain = ratio(*(Times(tuple(each["seconds"])) for each in (unfused, fused)))
    times = [f"{1e3 * each['median_s']:.1f} ms" for each in (unfused, fused)]
    launches = [str(each["launches"]) for each in (unfused, fused)]
    return [name, *launches, *times, f"{gain.value:.2f} ({gain.low:.2f}-{gain.high:.2f})"]


def main() -> None:
    """Measure all pipelines and print the table."""
    parser = plain_parser(__doc__)
    parser.add_argument("--device", default="opencl")
    parser.add_argument("--rounds", type=int, default=15, help="calls each way")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the batch")
    parser.add_argument("--output", type=Path, help="a JSON file to write")
    arguments = parser.parse_args()
    inputs = tensors(arguments.scale)
    found = {name: measure(after, inputs, arguments.device, arguments.rounds) for name, after in PIPELINES.items()}
    titles = ("pipeline", "launches, unfused", "fused", "time, unfused", "fused", "unfused / fused")
    print("\n".join(markdown(titles, [cells(name, each) for name, each in found.items()])))
    if arguments.output is not None:
        write_json(arguments.output, {**environment(), "shape": SHAPE, "channels": CHANNELS, "results": found})


if __name__ == "__main__":
    main()
