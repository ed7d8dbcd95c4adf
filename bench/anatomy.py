"""Where the time of a call on the CPU goes: packing, transforms, products, fused steps, stores, waiting.

    python bench/anatomy.py                                  the five, and what was weakest in family.py
    python bench/anatomy.py --problems conv-1d --devices opencl:1
    python bench/anatomy.py --table                          also writes the table into docs/opencl-cpu.md
    python bench/anatomy.py --table --from bench/results/anatomy-2026-01-31.json     measures nothing

Convolutions are built once more with marks that read the processor's clock (MARK in the kernels), then without the
steps that ride on other parts, and, where no mark lies between, without stores. Such kernels stay in this program, and
out of all caches of ours. Their calls and those of the real operator take turns. See bench/README.md.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import dispatcher
from bench import common
from bench.common import FIVE, SMALL_BATCH, SMALL_BATCHES, Run, say
from bench.cpu_peers import milliseconds
from bench.family import published
from dispatcher.check.inputs import random_tensors
from dispatcher.device.machine import cores
from dispatcher.interface import Tensors, Timings
from dispatcher.problem.messages import picked
from dispatcher.problem.operator import Operator
from dispatcher.timing.sampling import SETTLE_S, Probe, sample_beside, threshold_gflops, timed

PROGRAM, REPEATS = "anatomy", 9
GUIDE = ROOT / "docs" / "opencl-cpu.md"
#: Those of the weakest beside PyTorch in the family that differ in kind.
WEAK = (
    "conv-transpose3d-scale-batchnorm-globalavgpool",
    "conv-transpose-3d-asym-input-asym-kernel",
    "conv-transpose-3d-square-input-asym-kernel",
    "conv-2d-square-input-asym-kernel",
    "conv2d-scaling-min",
    "conv3d-hardswish-groupnorm-mean",
    "conv3d-divide-max-globalavgpool-biasadd-sum",
    "conv2d-groupnorm-tanh-hardswish-residualadd-logsumexp",
    "conv2d-relu-hardswish",
    "conv-3d-asym-input-sq-kernel",
)
#: What kernels mark, and what it is called; then what of a call lies outside the convolution's parts.
MARKS = {
    "PACK": "packing",
    "INPUTS": "input sums",
    "PRODUCTS": "products",
    "OUTPUTS": "output sums",
    "EDGES": "edges",
    "STEPS": "fused steps",
    "STORE": "stores",
}
PARTS = (*MARKS.values(), "idle workers", "other launches", "host")
#: The file that a core's text begins with, behind all that the host defines.
CORES = {"winograd": "winograd_pack.cl", "direct": "core_direct.cl", "in place": "conv_in_place.cl"}
#: 64-bit words for each worker: times of the marks, first and last reading; from word 16 on, a place for stores.
WORDS, START, LAST = 32, 14, 15
CLOCK = """
long clock_now(void) __asm("llvm.readcyclecounter");
static void mark(global const void *operands, const int part) {
  global volatile long *clocks = (global volatile long *)((global char *)operands + PLACE) + WORDS * get_global_id(0);
  const long now = clock_now();
  if (part == MARK_START) clocks[part] = now;
  else clocks[part] += now - clocks[MARK_LAST];
  clocks[MARK_LAST] = now;
}
#define MARK(part) mark(operands, MARK_##part);
"""
#: Leaves out the steps that ride on other parts, and statistics of rows; sends all stores to one line of the cache.
BARE = """
#undef CONV_TAIL
#define CONV_TAIL(x, c)
#undef STORE_TAIL
#define STORE_TAIL(x)
#undef GATHER
#define GATHER(v, w, left)
"""
UNSTORED = """
#define store_lanes(value, p, count) \\
  (*(global volatile real_v *)((global char *)operands + PLACE + (get_global_id(0) * WORDS + 16) * 8) = (value))
"""


# ---- kernels that keep time --------------------------------------------------------------------------------
@dataclass
class Clocked:
    """An operator whose convolution keeps time: a warm executable of its own, and what its calls took.

    Attributes:
        executable: runs it.
        place: byte of the clocks in the buffer of operands.
        taken: of each call the seconds of the convolution, ticks of each mark of all workers, and the last tick with
            the time on ``time.perf_counter`` soon after.
    """

    executable: Any
    place: int
    taken: list[tuple[float, np.ndarray, float, float]] = field(default_factory=list)

    @classmethod
    def build(cls, real: Any, changes: str, tensors: Tensors) -> Clocked:
        """A copy of the executable ``real``.

        Args:
            real: an ``OpenClExecutable``.
            changes: OpenCL C between what the host defines and the core.
            tensors: of a first call.
        """
        import pyopencl as cl

        from dispatcher.backends.opencl.executable import OpenClExecutable, Plan
        from dispatcher.backends.opencl.launches import Launch
        from dispatcher.backends.opencl.runtime import BUILD_OPTIONS, Kernel, build

        runtime, options, itemsize = real._runtime, real._options, real._real.itemsize
        executable = OpenClExecutable(runtime, real._operator, options)
        launches = list(executable._own.launches)
        at = convolution_of(executable)
        launch, lowered = launches[at], launches[at].lowered
        place = -(-operands_of(launch).size * itemsize // 128) * 128
        begin = f'#line 1 "{CORES[launch.planned.algorithm]}"\n'
        assert lowered.text.count(begin) == 1
        numbers = {
            **{f"MARK_{name}": number for number, name in enumerate(MARKS)},
            "MARK_START": START,
            "MARK_LAST": LAST,
        }
        defines = "".join(
            f"#define {name} {value}\n" for name, value in {**numbers, "PLACE": place, "WORDS": WORDS}.items()
        )
        text = defines + CLOCK + lowered.text.replace(begin, changes + begin)
        # Not by the runtime, which keeps programs, also on disk.
        kernel = Kernel(build(cl._cl._Program(runtime.context, text), BUILD_OPTIONS), lowered.kernel)
        launches[at] = Launch(runtime, lowered, kernel, real._real, launch.planned)
        executable._plans[options] = executable._own = Plan(launches, itemsize)
        executable._own.prepare(executable._kept, tensors)
        room = np.zeros(place + 8 * WORDS * lowered.items, np.uint8)
        found = cls(executable, place)
        made = executable._kept[found.operands]
        cl.enqueue_copy(executable._queue, room[: made.buffer.size], made.buffer)
        flags = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
        buffer = cl.Buffer(runtime.context, flags, hostbuf=room)
        executable._kept[found.operands] = replace(made, buffer=buffer)
        kernel.raw.set_arg(found.operands[1], buffer)
        found.run(tensors)
        found.taken.clear()
        return found

    @property
    def operands(self) -> tuple[Any, int]:
        """Where the executable keeps the buffer of operands."""
        launch = self.executable._own.launches[convolution_of(self.executable)]
        return launch, launch.lowered.arguments.index(operands_of(launch))

    def run(self, tensors: Tensors) -> float:
        """Make a call; the seconds of its convolution."""
        import pyopencl as cl

        timings = Timings()
        self.executable(tensors, None, timings)
        now = time.perf_counter()
        launch, _ = self.operands
        buffer = self.executable._kept[self.operands].buffer
        clocks = np.zeros((launch.lowered.items, WORDS), np.int64)
        cl.enqueue_copy(self.executable._queue, clocks, buffer, src_offset=self.place)
        cl.enqueue_copy(self.executable._queue, buffer, np.zeros_like(clocks), dst_offset=self.place)
        _, seconds = timings.launches[convolution_of(self.executable)]
        self.taken.append((seconds, clocks[:, : len(MARKS)].sum(axis=0), float(clocks[:, LAST].max()), now))
        return seconds

    def seconds(self, kept: Sequence[int]) -> dict[str, float]:
        """Medians of the time of each part, and of idle workers, over the calls whose numbers are ``kept``."""
        (*_, first, begin), (*_, last, end) = self.taken[0], self.taken[-1]
        ticks = (last - first) / (end - begin) * cores()
        calls = np.array([[total, *(marks / ticks)] for total, marks, _, _ in self.taken])
        total, *parts = np.median(calls[kept], axis=0).tolist()
        return {**dict(zip(MARKS.values(), parts, strict=True)), "idle workers": max(0.0, total - sum(parts))}


def convolution_of(executable: Any) -> int:
    """The index of the launch that has marks."""
    (found,) = (i for i, launch in enumerate(executable._own.launches) if "MARK(START)" in launch.lowered.text)
    return found


def operands_of(launch: Any) -> Any:
    """A launch's ``KernelOperands``."""
    from dispatcher.backends.opencl.render import KernelOperands

    (found,) = (each for each in launch.lowered.arguments if isinstance(each, KernelOperands))
    return found


def multiply_adds(executable: Any) -> float:
    """Those that the convolution's core makes; Winograd's with the lanes behind the last tile."""
    from dispatcher.backends.opencl.implementations import tasks_of
    from dispatcher.backends.opencl.limits import limits_of
    from dispatcher.backends.opencl.lines import layout_of
    from dispatcher.backends.opencl.target import Target
    from dispatcher.backends.opencl.winograd import WinogradLayout, reads

    runtime, at = executable._runtime, convolution_of(executable)
    target = Target(runtime.facts, limits_of(runtime), runtime.identity)
    task = tasks_of(executable._operator, target, executable._options, [])[at]
    geometry, fold = task.geometry, task.group.fold
    if executable.launches[at].algorithm != "winograd":
        return geometry.flops / 2
    layout = layout_of(geometry, None if fold is None else fold[0], task.lines[0])
    assert isinstance(layout, WinogradLayout)
    geometry, tile, groups = layout.geometry, layout.tile, layout.geometry.groups
    channels = groups * -(-geometry.out_channels // groups // tile.thread_c) * tile.thread_c
    lanes = sum(count * vectors for count, vectors in layout.box_vectors) * tile.vec
    planes = sum(len(reads(phase, tile.planes)) for phase in geometry.depth.phases) * -(
        -layout.positions[0] // tile.planes
    )
    rows = sum(len(reads(phase, tile.rows)) for phase in geometry.height.phases)
    return geometry.batch * planes * rows * sum(layout.parts_w) * lanes * channels * (geometry.in_channels // groups)


# ---- one operator ------------------------------------------------------------------------------------------
def measure(
    operator: Operator,
    device: str,
    probe: Probe,
    settings: argparse.Namespace,
    options: Mapping[str, Any] | None = None,
    pause_s: float = SETTLE_S,
) -> dict[str, Any]:
    """Where the time of a call goes.

    Args:
        operator: with one convolution.
        device: to measure on.
        probe: of the machine's speed.
        settings: the program's options.
        options: of the backend.
        pause_s: before each sample.
    """
    tensors = random_tensors(operator, 0)
    x = {operator.source: tensors.pop(operator.source)}
    compiled = dispatcher.compile(
        operator.problem, device=device, options=options, **operator.sizes, **operator.scalars, **tensors
    )
    tensors |= x
    prepared = compiled.prepare(**x)
    real: Any = prepared.choice.executable
    at = convolution_of(real)
    launch = real._own.launches[at]
    core = launch.planned.algorithm
    rides = operands_of(launch).gathers or re.search(r"#define (CONV|STORE)_TAIL\(.*\) do \{ +\w", launch.lowered.text)
    changes = {"clocked": ""} | ({"bare": BARE} if rides else {})
    changes |= {"unstored": BARE + UNSTORED} if core == "in place" else {}
    clocked = {name: Clocked.build(real, text, tensors) for name, text in changes.items()}
    taken: list[list[float]] = []  # of each call what is not in a launch, the share of the cores' time, the launches

    def call() -> float:
        timings, used = Timings(), time.process_time()
        seconds = timed(partial(prepared, timings=timings))()
        launches = [each for _, each in timings.launches]
        taken.append([seconds - sum(launches), (time.process_time() - used) / seconds / cores(), *launches])
        return seconds

    prepared()
    calls: dict[str, Callable[[], float]] = {"call": call}
    calls |= {name: partial(each.run, tensors) for name, each in clocked.items()}
    sampling = sample_beside(probe, settings.quiet_limit, calls, settings.repeats, pause_s=pause_s)
    for name, reason in sampling.failures.items():
        raise SystemExit(f"{PROGRAM}: {operator.problem.name} on {device}, {name}: {reason}")
    threshold = threshold_gflops(settings.quiet_limit, probe.best)
    results: dict[str, Any] = {
        name: {"samples": common.sample_lists(found)} for name, found in sampling.samples.items()
    }
    for result in results.values():
        common.add_statistics(result, threshold)
    kept = {
        name: [i for i, sample in enumerate(found) if results[name]["noisy"] or sample.quiet(threshold)]
        for name, found in sampling.samples.items()
    }
    host, busy, *launches = np.median(np.array(taken)[kept["call"]], axis=0).tolist()
    parts = {name: each.seconds(kept[name]) for name, each in clocked.items()}
    split = parts["clocked"]
    for name, part in (("bare", "fused steps"), ("unstored", "stores")):
        if name in parts:
            before = parts["bare" if name == "unstored" and "bare" in parts else "clocked"]
            for source in ("products", "output sums", "stores"):
                moved = min(split[source], max(0.0, before[source] - parts[name][source])) if source != part else 0.0
                split[source] -= moved
                split[part] += moved
    cost = results["clocked"]["median_s"] / launches[at]
    split = {name: seconds / cost for name, seconds in split.items()}
    split |= {"other launches": sum(launches) - launches[at], "host": host}
    adds = multiply_adds(real)
    return {
        **{"problem": operator.problem.name, "batch": operator.output_shape[0], "device": device, "core": core},
        **picked(operator, "sizes", "flops", "ideal_bytes"),
        "launches": [planned.name for planned in real.launches],
        "results": results,
        "split_s": {part: split[part] for part in PARTS},
        "marks_cost": cost,
        "cores_busy": busy,
        "multiply_adds": adds,
        "products_gflops": 2e-9 * adds / split["products"],
        "peak_gflops": probe.best,
    }


# ---- the table ---------------------------------------------------------------------------------------------
def table(report: Mapping[str, Any]) -> str:
    """The parts of each call as shares of it."""
    peak = max(
        entry["peak_gflops"] for entry in report["entries"]
    )  # results of several runs may have been put together
    copy = report["probe"]["copy_gbytes_per_s"]
    lines = [
        f"{report['machine']['cpu']}, {report['machine']['cores']} cores, {peak:.0f} GFLOP/s of float32 multiply-adds, "
        f"{copy:.0f} GB/s when copying; {report['date']}. Medians; parts in percent of the call, the largest in bold."
    ]
    for label in dict.fromkeys(entry["label"] for entry in report["entries"]):
        rows = []
        for entry in (each for each in report["entries"] if each["label"] == label):
            call = entry["results"]["call"]
            whole = sum(entry["split_s"].values())
            shares = {part: 100 * seconds / whole for part, seconds in entry["split_s"].items()}
            most = max(shares, key=lambda part: shares[part])
            cells = [f"**{share:.0f}**" if part == most else f"{share:.0f}" for part, share in shares.items()]
            rate = entry["products_gflops"]
            moved = entry["ideal_bytes"] / call["median_s"] / 1e9
            head = (f"`{entry['problem']}` ({entry['batch']})", entry["core"], milliseconds(call, 2))
            rates = (f"{rate:.0f} ({100 * rate / peak:.0f} %)", f"{moved:.1f}", f"{100 * entry['cores_busy']:.0f}")
            rows.append((*head, *cells, *rates))
        titles = ("problem (batch)", "core", "call, ms", *PARTS)
        titles += ("products, GFLOP/s (of peak)", "bytes that have to be moved, GB/s", "cores busy, %")
        lines += ["", f"{label[0].upper()}{label[1:]}:", "", *common.markdown(titles, rows)]
    results = [entry["results"]["call"] for entry in report["entries"]]
    return "\n".join([*lines, "", common.drop_note(report, results)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the results, print the table."""
    parser = common.new_parser(PROGRAM, __doc__, REPEATS)
    add = parser.add_argument
    add("--problems", nargs="+", metavar="NAME", default=[*FIVE, *WEAK], help="instead of the usual ones")
    add("--table", action="store_true", help="write the table into docs/opencl-cpu.md")
    add("--from", dest="files", nargs="+", type=Path, help="show these results, and measure nothing")
    settings = parser.parse_args(arguments)
    if settings.files is None:
        run = Run.start(PROGRAM, settings)

        def entry(name: str, device: Any) -> dict[str, Any]:
            say(f"{name} on {device.name}")
            operator, case = published(name)
            if name in FIVE:
                operator = common.bind_case(name, SMALL_BATCHES.get(name, SMALL_BATCH))
            found = measure(operator, device.id, run.probe, settings)
            return {"label": common.device_label(device), "case": case, **found}

        entries = common.until_interrupted(
            partial(entry, name, device) for device in run.devices for name in settings.problems
        )
        report = run.report(entries=entries)
    else:
        reports = [json.loads(path.read_text(encoding="utf-8")) for path in settings.files]
        report = {**reports[0], "entries": [entry for each in reports for entry in each["entries"]]}
    shown = settings.files is not None and settings.output is None
    name = settings.files[0].name if shown else common.keep(report, settings.output).name
    print(table(report))
    if settings.table:
        common.write_table(GUIDE, PROGRAM, name, table(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
