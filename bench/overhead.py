"""What a warm call costs besides the work: microseconds in the dispatcher and in the OpenCL backend.

    python bench/overhead.py [--devices opencl:0] [--calls 300]

A tiny operator is called through `CompiledOperator` (the whole call), through a prepared call (without
looking at the arguments), and straight through the backend's executable. The three take turns, block by
block, and each block gives one sample: its time divided by its calls. What the kernels take comes from the
device's clock, in calls of their own. See bench/README.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import dispatcher  # noqa: E402
from bench import measure  # noqa: E402
from bench.cpu_peers import bind_case  # noqa: E402
from bench.measure import say  # noqa: E402
from dispatcher.check.inputs import random_tensors  # noqa: E402
from dispatcher.interface import Timings  # noqa: E402

PROGRAM, SCHEMA = "overhead", 1
DISTRIBUTIONS = ("kernel-dispatcher", "numpy", "pyopencl", "intel-opencl-rt")
REPEATS, CALLS, CLOCKED_CALLS = 15, 300, 50
PROBLEM = "conv-transpose3d-max-max-sum"
TINY = {
    "batch_size": 1,
    "in_channels": 2,
    "out_channels": 2,
    "depth": 4,
    "height": 4,
    "width": 4,
    **{f"kernel_{axis}": 3 for axis in "dhw"},
    **{f"padding_{axis}": 0 for axis in "dhw"},
}


def block(call: Callable[[], Any], calls: int) -> Callable[[], None]:
    """``calls`` calls in a row."""

    def run() -> None:
        for _ in range(calls):
            call()

    return run


def a_call(sample: measure.Sample, calls: int) -> measure.Sample:
    """A block's sample, as the time of one of its calls."""
    return replace(sample, seconds=sample.seconds / calls)


def measure_device(device: Any, probe: measure.FmaProbe, settings: argparse.Namespace) -> dict[str, Any]:
    """Samples of the three ways to call, in seconds a block, and the kernels' own time."""
    operator = bind_case(PROBLEM, None, TINY)
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
        for _ in range(20):
            call()
    sampling = measure.interleave(
        {name: block(call, settings.calls) for name, call in ways.items()},
        probe,
        repeats=settings.repeats,
        limit=settings.quiet_limit,
    )
    for name, reason in sampling.failures.items():
        raise SystemExit(f"overhead: {device.id}, {name}: {reason}")
    kernels = []
    for _ in range(CLOCKED_CALLS):
        timings = Timings()
        executable(tensors, None, timings)
        kernels.append(sum(seconds for _, seconds in timings.launches))
    return {
        "launches": [launch.name for launch in executable.launches],
        "kernel_median_s": statistics.median(kernels),
        "results": {
            name: {"samples": measure.sample_lists([a_call(sample, settings.calls) for sample in samples])}
            for name, samples in sampling.samples.items()
        },
    }


def conclude(entry: dict[str, Any], threshold: float) -> None:
    """Put summaries and the split into a device's entry."""
    for result in entry["results"].values():
        samples = [measure.Sample(*sample) for sample in result["samples"]]
        result.update(measure.summary_dict(samples, measure.summarise(samples, threshold)))
    call, prepared, backend = (entry["results"][name]["median_s"] for name in ("call", "prepared", "backend"))
    entry["split_us"] = {
        "call": 1e6 * call,
        "dispatcher": 1e6 * (call - backend),
        "dispatcher_arguments": 1e6 * (call - prepared),
        "backend": 1e6 * backend,
        "backend_kernels": 1e6 * entry["kernel_median_s"],
        "backend_host": 1e6 * (backend - entry["kernel_median_s"]),
    }


def report_text(report: dict[str, Any]) -> str:
    """The split of each device as a table."""
    lines = [
        f"Microseconds of a warm call of {PROBLEM}, tiny sizes (median of {report['repeats']} blocks of "
        f"{report['calls']} calls).",
        "",
        "| device | call | dispatcher | of it arguments | backend | of it kernels | of it host and driver |",
        "|---|---|---|---|---|---|---|",
    ]
    for entry in report["entries"]:
        mark = "~" if any(result["noisy"] for result in entry["results"].values()) else ""
        split = entry["split_us"]
        keys = ("call", "dispatcher", "dispatcher_arguments", "backend", "backend_kernels", "backend_host")
        cells = " | ".join(f"{mark}{split[key]:.1f}" for key in keys)
        lines.append(f"| {entry['label']} | {cells} |")
    results = [result for entry in report["entries"] for result in entry["results"].values()]
    return "\n".join([*lines, "", measure.drop_note(report, results)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the results, print the table."""
    parser = argparse.ArgumentParser(
        prog="overhead", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    measure.add_common_arguments(parser, REPEATS)
    parser.add_argument(
        "--calls", type=measure.at_least(1), default=CALLS, help="calls a block (default: %(default)s)"
    )
    settings = parser.parse_args(arguments)
    head = measure.header(PROGRAM, SCHEMA, DISTRIBUTIONS)
    devices, left_out, probe = measure.start(settings)
    entries = []
    for device in devices:
        say(device.name)
        label = {"device": device.id, "label": measure.device_label(device)}
        entries.append({**label, **measure_device(device, probe, settings)})
    for entry in entries:
        conclude(entry, measure.threshold_gflops(settings.quiet_limit, probe.best))
    report = {
        **head,
        "problem": PROBLEM,
        "sizes": TINY,
        "repeats": settings.repeats,
        "calls": settings.calls,
        "probe": measure.probe_facts(probe, settings.quiet_limit),
        "left_out": left_out,
        "entries": entries,
    }
    path = settings.output or measure.RESULTS / f"{PROGRAM}-{report['date']}.json"
    measure.write_json(path, report)
    print(report_text(report))
    say(f"results: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
