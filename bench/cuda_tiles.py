"""How well the tiles of the tensor-core convolution are chosen: times many of them on a GPU beside their estimates.

    python bench/cuda_tiles.py [PROBLEM]... [--count 16] [--output bench/results/cuda-tiles-<gpu>-<date>.json]

For each problem at its `kernelbench` size, in float32 accuracy and in TF32, the tiles of different kinds with the
lowest estimates (``backends/cuda/tiles.py``) are compiled and timed one after the other, kernel time between CUDA
events, the median of 5 calls after a warm-up. Printed are, for each problem, the tile that is chosen, the best one, and
how much slower the choice is. The constants in ``tiles.py`` were fitted to such a table.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.common import FIVE, bind_case, plain_parser
from dispatcher.backends.cuda import BACKEND, driver
from dispatcher.backends.cuda.groups import halo_tasks
from dispatcher.backends.cuda.options import Options
from dispatcher.backends.cuda.tasks import Setting, Target
from dispatcher.backends.cuda.tuning import one_of_each_kind
from dispatcher.check.inputs import random_tensors
from dispatcher.errors import DeviceError
from dispatcher.interface import Device, Timings
from dispatcher.problem.operator import Operator

WARM_UP, REPEATS = 1, 5
SCHEMA = 1


def measure(
    operator: Operator, device: Device, tensors: dict[str, Any], options: dict[str, Any]
) -> tuple[list[float], list[float]]:
    """Milliseconds in each call: of all launches, and of those of the convolution."""
    run = BACKEND.compile(operator, device, options)
    times, convolution = [], []
    for _ in range(WARM_UP + REPEATS):
        timings = Timings()
        run(tensors, None, timings)
        times.append(1e3 * timings.kernel_s)
        convolution.append(1e3 * sum(seconds for name, seconds in timings.launches if name == "conv_halo"))
    return times[WARM_UP:], convolution[WARM_UP:]


def rows(name: str, precision: str, case: str, count: int, device: Device) -> Iterator[dict[str, Any]]:
    """One row for each tile of a problem; twice where steps before the convolution may be fused or separate."""
    from pycuda import gpuarray

    operator = bind_case(name, case=case, precision=precision)
    context = driver.context(device.index)
    with context.active():
        tensors = {key: gpuarray.to_gpu(array) for key, array in random_tensors(operator, 0).items()}
    choice = operator.steps[0] is not operator.convolutions[0]
    for prologue in ("separate", "fused") if choice else ("separate",):
        (task,) = halo_tasks(Setting(operator, Target.of(context), Options(prologue=prologue)))
        if task is None:
            raise DeviceError(f"{device.id} does not run {name} on tensor cores, so that there are no tiles to time")
        for tile, cycles in one_of_each_kind(task, count):
            options = {"tile": str(task.name(tile)), "prologue": prologue}
            times, convolution = measure(operator, device, tensors, options)
            yield {
                "problem": name, "precision": precision, "prologue": prologue, "tile": asdict(tile),
                "estimated_cycles": cycles, "median_ms": statistics.median(times), "min_ms": min(times),
                "max_ms": max(times), "convolution_ms": statistics.median(convolution),
            }  # fmt: skip
    with context.active():
        del tensors
        context.trim()


def summary(table: list[dict[str, Any]]) -> str:
    """For each problem and way the choice, the best tile, and the price of the choice."""
    lines = []
    for key in dict.fromkeys((row["problem"], row["precision"], row["prologue"]) for row in table):
        part = [row for row in table if (row["problem"], row["precision"], row["prologue"]) == key]
        chosen = min(part, key=lambda row: row["estimated_cycles"])
        best = min(part, key=lambda row: row["median_ms"])
        lines.append(
            f"{key[0]:48} {key[1]} {key[2]:8}  chosen {chosen['median_ms']:.3f} ms  best {best['median_ms']:.3f} ms "
            f"{tuple(best['tile']['tile'])} warp_m {best['tile']['warp_m']} resident {best['tile']['resident']}  "
            f"{chosen['median_ms'] / best['median_ms']:.2f}"
        )
    return "\n".join(lines)


def main() -> int:
    """Time tiles and write the table."""
    parser = plain_parser(__doc__)
    parser.add_argument("problem", nargs="*", default=list(FIVE))
    parser.add_argument("--case", default="kernelbench")
    parser.add_argument("--count", type=int, default=16, help="tiles of each problem")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    device = BACKEND.probe()[0]
    if not device.available:
        print(f"skipped: {device.reason}", file=sys.stderr)
        return 0
    table = []
    for name in given.problem:
        for precision in ("fp32", "tf32"):
            for row in rows(name, precision, given.case, given.count, device):
                table.append(row)
                print(f"{row['median_ms']:9.3f} ms  {name} {precision} {row['tile']}", file=sys.stderr)
    print(summary(table))
    if given.output:
        report = {"schema": SCHEMA, "date": time.strftime("%Y-%m-%d"), "case": given.case}
        report |= {"device": device.name, "facts": dict(device.facts), "rows": table}
        given.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
