"""How good the cost model of the CUDA tiles is, and what follows from it: the tables of docs/cuda.md. No GPU is needed.

    python bench/cuda_model.py [bench/results/cuda-tiles-<gpu>-<date>.json] [--fit]

Reads the times of many tiles that ``bench/cuda_tiles.py`` measured, and prints, for the constants in
``backends/cuda/costs.json``: how far the estimates are from the times, at which clock (the one that fits best); for
each problem and precision the tile with the lowest estimate against the fastest one; and as Markdown

- the fastest times beside PyTorch's and the floor: the larger of ideal bytes at the speed of a copy and FLOPs at the
  rate of a TF32 matrix product (fp32: three times the FLOPs),
- estimates for an H100 beside published times.

``--fit`` looks for better constants (it needs SciPy) and prints them.
"""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.common import bind_case, markdown, plain_parser
from dispatcher.backends.cuda import tiles
from dispatcher.backends.cuda.groups import halo_tasks
from dispatcher.backends.cuda.options import Options
from dispatcher.backends.cuda.tasks import Setting, Target
from dispatcher.backends.cuda.tiles import HaloTask, HaloTile
from dispatcher.problem.operator import Operator
from dispatcher.timing import charts

MEASURED = ROOT / "bench" / "results" / "cuda-tiles-h200-2026-11-28.json"
#: Multiprocessors and shared memory of a block on an H100 and an H200.
HOPPER = Target(90, 227 << 10, 132)
FITTED = ("product_cycles", "epilogue_cycles", "store_cycles", "half_sectors", "load_cycles", "latency_cycles",
          "wanted_registers", "shortage")  # fmt: skip
#: KernelBench's published times on an H100, PyTorch 2.5 with TF32, in ms: eager and torch.compile.
PUBLISHED = {
    "conv-transpose3d-layernorm-gelu-scaling": (10.0, 2.35),
    "conv-transpose3d-sum-layernorm-avgpool-gelu": (10.1, 2.53),
    "conv-transpose3d-avgpool-clamp-softmax-multiply": (5.68, 2.76),
    "conv-transpose3d-max-max-sum": (47.4, 47.0),
    "conv-transpose-3d-asym-input-sq-kernel": (29.3, 29.3),
}


@dataclass(frozen=True)
class Sample:
    """A tile that was timed: ``ms`` is the convolution's launches alone."""

    problem: str
    precision: str
    task: HaloTask
    tile: HaloTile
    ms: float


def task_of(operator: Operator, prologue: str) -> HaloTask:
    """What the convolution's launch has to do, with the steps before it ``fused`` or ``separate``."""
    (task,) = halo_tasks(Setting(operator, HOPPER, Options(prologue=prologue)))
    assert task is not None
    return task


def samples(report: Mapping[str, Any]) -> Iterator[Sample]:
    """The rows of a result of ``cuda_tiles.py``. Older ones have all steps before a convolution separate, and the time
    of their launches is said for the whole report."""
    tasks: dict[tuple[str, str, str], HaloTask] = {}
    for row in report["rows"]:
        problem, precision, prologue = row["problem"], row["precision"], row.get("prologue", "separate")
        if (problem, precision, prologue) not in tasks:
            tasks[problem, precision, prologue] = task_of(bind_case(problem, precision=precision), prologue)
        task, fields = tasks[problem, precision, prologue], dict(row["tile"])
        fields = {name: fields[name] for name in (
            "tile", "warp_m", "paired", "fold_shared", "block_k", "ahead", "resident"
        )}  # fmt: skip
        channels = -(-task.geometry.in_channels // fields["block_k"]) * fields["block_k"]
        channels = row["tile"].get("slice_channels", channels)
        fields["tile"] = tuple(fields["tile"])
        tile = replace(tiles.halo_tiles(task).pick(0), slice_channels=channels, **fields)
        other = report.get("other_launches_ms", {}).get(problem, 0.0)
        yield Sample(problem, precision, task, tile, row.get("convolution_ms", row["median_ms"] - other))


def cycles(found: list[Sample]) -> NDArray[np.float64]:
    """The model's estimates."""
    return np.array([float(tiles.launch_cycles(sample.task, sample.tile)) for sample in found])


def constants(values: Mapping[str, float]) -> AbstractContextManager[Any]:
    """Use other constants meanwhile."""
    return patch.object(tiles, "COSTS", replace(tiles.COSTS, **values))


def clock_ghz(found: list[Sample]) -> float:
    """The clock at which the estimates fit best: the geometric mean of cycles over time."""
    times = np.array([sample.ms for sample in found])
    return float(np.exp(np.mean(np.log(cycles(found) / (times * 1e6)))))


def tensor_tflops(clock: float) -> float:
    """The rate of TF32 products that the model's constant stands for: m16n8k8 on four quarters."""
    return 2 * 16 * 8 * 8 * 4 * HOPPER.processors * clock / tiles.COSTS.product_cycles / 1e3


def errors(found: list[Sample], clock: float) -> NDArray[np.float64]:
    """Estimated over measured time, minus 1."""
    times = np.array([sample.ms for sample in found])
    return cycles(found) / (clock * 1e6) / times - 1


def choices(found: list[Sample]) -> Iterator[tuple[str, str, float, float]]:
    """Problem, precision, time of the tile with the lowest estimate, time of the fastest tile."""
    estimated = cycles(found)
    for key in dict.fromkeys((sample.problem, sample.precision, sample.task) for sample in found):
        part = [n for n, s in enumerate(found) if (s.problem, s.precision, s.task) == key]
        yield *key[:2], found[min(part, key=lambda n: estimated[n])].ms, min(found[n].ms for n in part)


def fit(found: list[Sample]) -> dict[str, float]:
    """Constants with the smallest errors, all held positive; the clock is not fitted, since it scales them all."""
    optimize = importlib.import_module("scipy.optimize")
    start = np.array([getattr(tiles.COSTS, name) for name in FITTED], np.float64)
    clock = clock_ghz(found)

    def residuals(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        with constants(dict(zip(FITTED, np.exp(logs), strict=True))):
            return np.log1p(errors(found, clock))

    done = optimize.least_squares(residuals, np.log(start), loss="soft_l1", f_scale=0.1)
    return dict(zip(FITTED, map(float, np.exp(done.x)), strict=True))


def short(name: str) -> str:
    """A problem's name as the tables have it."""
    return charts.short(name).removesuffix("-sq-kernel")


def floor_ms(operator: Operator, report: Mapping[str, Any]) -> float:
    """The least time that copies and matrix products of the machine allow."""
    products = 3 if operator.precision == "fp32" else 1
    by_bytes = operator.ideal_bytes / (report["copy_tbyte_per_s"] * 1e9)
    return max(by_bytes, products * operator.flops / (report["matmul_8192_tflops"]["tf32"] * 1e9))


def measured_table(report: Mapping[str, Any]) -> list[str]:
    """The fastest times beside PyTorch's."""
    rows = []
    for name in PUBLISHED:
        cells = [short(name)]
        for precision in ("fp32", "tf32"):
            found = [r for r in report["rows"] if (r["problem"], r["precision"]) == (name, precision)]
            best = min(row["median_ms"] for row in found)
            peer = report["torch_eager"][name][precision]["median_ms"]
            floor = floor_ms(bind_case(name, precision=precision), report)
            cells += [f"{best:.2f}", f"{peer:#.3g}", f"{peer / best:.1f}", f"{floor:#.2g}"]
        rows.append(cells)
    titles = ("PyTorch eager", "ratio", "floor")
    return markdown(("problem", "fp32", *titles, "tf32", *titles), rows)


def expected_table(clock: float) -> list[str]:
    """Estimates for an H100."""
    rows = []
    for name, published in PUBLISHED.items():
        estimates = (estimated_ms(bind_case(name, precision=precision), clock) for precision in ("fp32", "tf32"))
        rows.append([short(name), *(f"{ms:.1f}" for ms in estimates), *(f"{ms:#.3g}" for ms in published)])
    return markdown(("problem", "estimated fp32", "estimated tf32", "PyTorch eager", "torch.compile"), rows)


def estimated_ms(operator: Operator, clock: float) -> float:
    """Estimated time of all launches of an operator that is one convolution with what is fused around it."""
    (task,) = halo_tasks(Setting(operator, HOPPER, Options()))
    assert task is not None
    tile = tiles.halo_tile(task)
    assert tile is not None
    return float(tiles.launch_cycles(task, tile)) / (clock * 1e6)


def main() -> int:
    """Print what there is to say."""
    parser = plain_parser(__doc__)
    parser.add_argument("results", nargs="?", type=Path, default=MEASURED)
    parser.add_argument("--fit", action="store_true")
    given = parser.parse_args()
    report = json.loads(given.results.read_text(encoding="utf-8"))
    found = list(samples(report))

    def report_errors() -> float:
        clock = clock_ghz(found)
        off = errors(found, clock)
        typical, largest = math.sqrt(np.mean(off**2)), np.abs(off).max()
        print(
            f"{len(found)} tiles on {report['device']}: estimates are off by {100 * typical:.0f} % "
            f"(root mean square), {100 * largest:.0f} % at most, at {clock:.2f} GHz; "
            f"tensor cores at {tensor_tflops(clock):.0f} TFLOP/s"
        )
        for name, precision, chosen, best in choices(found):
            print(f"  {short(name):35} {precision}  chosen {chosen:.2f} ms  best {best:.2f} ms  {chosen / best:.2f}")
        return clock

    clock = report_errors()
    if given.fit:
        better = fit(found)
        print("\n".join(f"{name} = {value:.3g}" for name, value in better.items()))
        with constants(better):
            report_errors()
    else:
        if "torch_eager" in report:  # times of gpu_check.py, which cuda_tiles.py does not take
            print("\n".join(["", *measured_table(report)]))
        print("\n".join(["", *expected_table(clock)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
