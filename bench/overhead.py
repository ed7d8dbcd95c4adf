"""What a warm call costs besides the work: microseconds in the dispatcher and in the OpenCL backend.

    python bench/overhead.py [--devices opencl:0] [--calls 300]

A tiny operator is called through `CompiledOperator` (the whole call), through a prepared call (without
looking at the arguments), and straight through the backend's executable. The three take turns, block by
block, and each block gives one sample: its time divided by its calls. What the kernels take comes from the
device's clock, in calls of their own. See bench/README.md.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import dispatcher
from bench import common
from bench.common import Run, bind_case, say
from dispatcher.check.inputs import random_tensors
from dispatcher.interface import Timings
from dispatcher.timing.sampling import sample_beside, timed

PROGRAM = "overhead"
REPEATS, CALLS, CLOCKED_CALLS = 15, 300, 50
PROBLEM = "conv-transpose3d-max-max-sum"
TINY = {
    **{"batch_size": 1, "in_channels": 2, "out_channels": 2, "depth": 4, "height": 4, "width": 4},
    **{f"{name}_{axis}": size for name, size in (("kernel", 3), ("padding", 0)) for axis in "dhw"},
}
COLUMNS = ("call", "dispatcher", "dispatcher_arguments", "backend", "backend_kernels", "backend_host")


def block(call: Callable[[], Any], calls: int) -> Callable[[], None]:
    """``calls`` calls in a row."""

    def run() -> None:
        for _ in range(calls):
            call()

    return run


def measure_device(device: Any, run: Run) -> dict[str, Any]:
    """Samples of the three ways to call, in seconds a call, and the kernels' own time."""
    operator, settings = bind_case(PROBLEM, None, TINY), run.settings
    tensors = random_tensors(operator, 0)
    x = {operator.source: tensors[operator.source]}
    constants = {name: array for name, array in tensors.items() if name not in x}
    known: dict[str, Any] = {**operator.sizes, **operator.scalars, **constants}
    compiled = dispatcher.compile(operator.problem, device=device.id, **known)
    prepared = compiled.prepare(**x)
    executable = prepared.choice.executable
    assert executable is not None
    ways: dict[str, Callable[[], Any]] = {
        "call": lambda: compiled(**x),
        "prepared": prepared,
        "backend": lambda: executable(tensors, None, None),
    }
    for call in ways.values():
        block(call, 20)()
    blocks = {name: timed(block(call, settings.calls)) for name, call in ways.items()}
    sampling = sample_beside(run.probe, settings.quiet_limit, blocks, settings.repeats)
    for name, reason in sampling.failures.items():
        raise SystemExit(f"overhead: {device.id}, {name}: {reason}")
    kernels = []
    for _ in range(CLOCKED_CALLS):
        timings = Timings()
        executable(tensors, None, timings)
        kernels.append(sum(seconds for _, seconds in timings.launches))
    results = {}
    for name, samples in sampling.samples.items():
        calls = [replace(sample, seconds=sample.seconds / settings.calls) for sample in samples]
        results[name] = {"samples": common.sample_lists(calls)}
    launches = [launch.name for launch in executable.launches]
    return {"launches": launches, "kernel_median_s": statistics.median(kernels), "results": results}


def conclude(entry: dict[str, Any], threshold: float) -> None:
    """Put summaries and the split into a device's entry."""
    results = entry["results"]
    call, prepared, backend = (
        common.add_statistics(results[name], threshold).median_s for name in ("call", "prepared", "backend")
    )
    kernels = entry["kernel_median_s"]
    split = (call, call - backend, call - prepared, backend, kernels, backend - kernels)
    entry["split_us"] = {name: 1e6 * seconds for name, seconds in zip(COLUMNS, split, strict=True)}


def report_text(report: dict[str, Any]) -> str:
    """The split of each device as a table."""
    blocks = f"median of {report['repeats']} blocks of {report['calls']} calls"
    lines = [f"Microseconds of a warm call of {PROBLEM}, tiny sizes ({blocks}).", ""]
    rows = []
    for entry in report["entries"]:
        mark = "~" if any(result["noisy"] for result in entry["results"].values()) else ""
        rows.append([entry["label"], *(f"{mark}{entry['split_us'][name]:.1f}" for name in COLUMNS)])
    titles = ("call", "dispatcher", "of it arguments", "backend", "of it kernels", "of it host and driver")
    lines += common.markdown(("device", *titles), rows)
    results = [result for entry in report["entries"] for result in entry["results"].values()]
    return "\n".join([*lines, "", common.drop_note(report, results)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the results, print the table."""
    parser = common.new_parser("overhead", __doc__, REPEATS)
    parser.add_argument("--calls", type=common.at_least(1), default=CALLS, help="calls a block (default: %(default)s)")
    settings = parser.parse_args(arguments)
    run = Run.start(PROGRAM, settings)
    entries = []
    for device in run.devices:
        say(device.name)
        label = {"device": device.id, "label": common.device_label(device)}
        entries.append({**label, **measure_device(device, run)})
    for entry in entries:
        conclude(entry, run.threshold)
    report = run.report(problem=PROBLEM, sizes=TINY, calls=settings.calls, entries=entries)
    common.keep(report, settings.output)
    print(report_text(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
