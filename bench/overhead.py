"""What a warm call costs besides the work: microseconds in the dispatcher and in the OpenCL backend.

    python bench/overhead.py [--devices opencl:0] [--calls 300] [--table]

Tiny operators of one and of three launches are called through `CompiledOperator` (the whole call), through a prepared
call (without looking at the arguments), and straight through the backend's executable; and PyOpenCL alone enqueues the
same kernels, with their arguments set, and waits for them. The four take turns, block by block, and each block gives
one sample: its time divided by its calls. What the kernels take comes from the device's clock, and the parts of a call
from a stopwatch around functions, in calls of their own. See bench/README.md.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import dispatcher
from bench import common
from bench.common import Run, bind_case, say
from dispatcher.call import compiled
from dispatcher.call.compiled import CompiledOperator
from dispatcher.check.inputs import random_tensors
from dispatcher.interface import Tensors, Timings
from dispatcher.timing.sampling import sample_beside

PROGRAM = "overhead"
GUIDE = ROOT / "docs" / "opencl-cpu.md"
REPEATS, CALLS, CLOCKED_CALLS, WATCHED_BLOCKS = 15, 300, 50, 5
PROBLEMS = ("conv-transpose3d-max-max-sum", "conv3d-hardswish-groupnorm-mean")
TINY = {
    **{"batch_size": 1, "in_channels": 2, "out_channels": 2, "depth": 4, "height": 4, "width": 4, "num_groups": 1},
    **{f"{name}_{axis}": size for name, size in (("kernel", 3), ("padding", 0)) for axis in "dhw"},
}
#: What of a call the stopwatch sees; binding is what the launches take besides enqueueing and waiting.
PARTS = ("arguments", "result array", "weights", "binding", "enqueueing", "waiting", "the rest")
COLUMNS = ("call", "dispatcher", "dispatcher_arguments", "backend", "backend_kernels", "backend_host", "bare")


def block(call: Callable[[], Any], calls: int) -> Callable[[], float]:
    """The seconds of ``calls`` calls in a row, behind as many that nobody times: the first ones find what the machine
    did before in the caches, and its clock."""

    def run() -> float:
        for _ in range(calls):
            call()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return time.perf_counter() - start

    return run


def bare(executable: Any, tensors: Tensors) -> Callable[[], None]:
    """A copy of the launches of ``executable``, an ``OpenClExecutable``, whose arguments are set for good."""
    import pyopencl as cl

    from dispatcher.backends.opencl.executable import OpenClExecutable

    again = OpenClExecutable(executable._runtime, executable._operator, executable._options)
    kept: list[Any] = []
    run_launches = again._run_launches

    def keep(*arguments: Any) -> None:
        kept.append(arguments)
        run_launches(*arguments)

    with patch.object(again, "_run_launches", keep):
        again(tensors, None, None)
    commands = [
        (launch._kernel.raw, (launch.lowered.items,), (launch.lowered.local,)) for launch in kept[0][0].launches
    ]

    def run(memory: Any = kept) -> None:  # kernels do not keep their arguments alive
        events = [cl.enqueue_nd_range_kernel(again._queue, *command) for command in commands]
        again._queue.finish()
        events.clear()

    return run


def parts_of(call: Callable[[], Any], calls: int) -> dict[str, float]:
    """Where the time of a call goes, in microseconds: means of a block of ``calls`` calls, the fastest of some."""
    import pyopencl as cl

    from dispatcher.backends.opencl.executable import OpenClExecutable, Plan
    from dispatcher.backends.opencl.memory import HostPool

    places: dict[str, tuple[tuple[Any, str], ...]] = {
        "arguments": ((CompiledOperator, "_analyse"), (compiled, "backend_inputs")),
        "result array": ((HostPool, "empty"),),
        "weights": ((Plan, "prepare"),),
        "binding": ((OpenClExecutable, "_run_launches"),),
        "enqueueing": ((cl, "enqueue_nd_range_kernel"),),
        "waiting": ((OpenClExecutable, "_fetch"),),
    }
    taken: dict[str, list[float]] = {name: [] for name in places}

    def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            start = time.perf_counter()
            result = function(*arguments, **named)
            taken[name][-1] += time.perf_counter() - start
            return result

        return run

    with contextlib.ExitStack() as stack:
        for name, owners in places.items():
            for owner, function in owners:
                stack.enter_context(patch.object(owner, function, watched(name, getattr(owner, function))))
        for _ in range(WATCHED_BLOCKS * calls):
            for each in taken.values():
                each.append(0.0)
            call()
    blocks = [
        {name: 1e6 * statistics.fmean(each[at : at + calls]) for name, each in taken.items()}
        for at in range(0, WATCHED_BLOCKS * calls, calls)
    ]
    found = min(blocks, key=lambda block: sum(block.values()))
    found["binding"] -= found["enqueueing"] + found["waiting"]
    return found


def measure_device(problem: str, device: Any, run: Run) -> dict[str, Any]:
    """Samples of the ways to call, in seconds a call, the kernels' own time, and the parts of a call."""
    operator, settings = bind_case(problem, None, TINY), run.settings
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
        "bare": bare(executable, tensors),
    }
    blocks = {name: block(call, settings.calls) for name, call in ways.items()}
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
    parts = parts_of(ways["call"], settings.calls)
    return {
        **{"problem": problem, "sizes": dict(operator.sizes), "launches": launches, "results": results},
        **{"kernel_median_s": statistics.median(kernels), "parts_us": parts},
    }


def conclude(entry: dict[str, Any], threshold: float) -> None:
    """Put summaries and the split into a device's entry."""
    results = entry["results"]
    call, prepared, backend, alone = (
        common.add_statistics(results[name], threshold).median_s for name in ("call", "prepared", "backend", "bare")
    )
    kernels = entry["kernel_median_s"]
    split = (call, call - backend, call - prepared, backend, kernels, backend - kernels, alone)
    entry["fastest_us"] = 1e6 * results["call"]["min_s"]
    entry["parts_us"]["the rest"] = entry["fastest_us"] - sum(entry["parts_us"].values())
    entry["split_us"] = {name: 1e6 * seconds for name, seconds in zip(COLUMNS, split, strict=True)}


def report_text(report: dict[str, Any]) -> str:
    """The parts of the calls as a table."""
    blocks = f"the fastest of {report['repeats']} blocks of {report['calls']} calls, as other programs only add to it"
    lines = [f"Microseconds of a warm call of tiny operators ({blocks}); {report['date']}.", ""]
    rows = []
    for entry in report["entries"]:
        split, parts = entry["split_us"], entry["parts_us"]
        mark = "~" if any(result["noisy"] for result in entry["results"].values()) else ""
        call, alone = entry["fastest_us"], 1e6 * entry["results"]["bare"]["min_s"]
        times = (call, alone, call - alone, *(parts[name] for name in PARTS), split["backend_kernels"])
        times = (*times, call - parts["waiting"])
        rows.append([f"{entry['label']}, {len(entry['launches'])}", *(f"{mark}{each:.1f}" for each in times)])
    titles = ("device, launches", "call", "bare runtime", "ours = call - bare", *PARTS, "kernels", "all but waiting")
    lines += common.markdown(titles, rows)
    results = [result for entry in report["entries"] for result in entry["results"].values()]
    return "\n".join([*lines, "", common.drop_note(report, results)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the results, print the table."""
    parser = common.new_parser("overhead", __doc__, REPEATS)
    parser.add_argument("--calls", type=common.at_least(1), default=CALLS, help="calls a block (default: %(default)s)")
    parser.add_argument("--table", action="store_true", help="write the table into docs/opencl-cpu.md")
    settings = parser.parse_args(arguments)
    run = Run.start(PROGRAM, settings)
    entries = []
    for device in run.devices:
        for problem in PROBLEMS:
            say(f"{problem} on {device.name}")
            label = {"device": device.id, "label": common.device_label(device)}
            entries.append({**label, **measure_device(problem, device, run)})
    for entry in entries:
        conclude(entry, run.threshold)
    report = run.report(calls=settings.calls, entries=entries)
    common.publish(report, settings, report_text(report), GUIDE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
