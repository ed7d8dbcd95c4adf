"""How fast ``dispatcher map`` is: items a second from file to file, beside one long call on arrays in memory.

    python bench/map.py [--problems NAME...] [--seconds 4] [--megabytes 1500] [--folder DIR] [--devices opencl:0]

The call is warm, and computes as many items as the file has. The mapping is all of it: compiling, reading,
computing in chunks of the usual length, and writing, with .npy files and with Zarr arrays that are not
compressed. ``steady`` leaves out what comes before its third chunk is done, as it matters for longer files. ``copy``
has an operator that copies: it is what reading and writing allow on this machine. They take turns. The results have to
be equal, byte for byte. The files lie in ``--folder``, in the system's folder for temporary files if left out.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import dispatcher
from bench import common
from bench.common import Run, bind_case, say
from dispatcher.check.inputs import random_tensors
from dispatcher.device.splitting import batch_parameter
from dispatcher.interface import Device
from dispatcher.scale.mapping import map_files
from dispatcher.scale.storage import make_array, read_items, write_items
from dispatcher.scale.work import BatchPlan
from dispatcher.timing.sampling import sample_beside, timed

PROGRAM, REPEATS = "map", 5
PROBLEMS = ("conv2d-relu-biasadd", "conv2d-subtract-hardswish-maxpool-mish", "conv-transpose3d-max-max-sum")
SUFFIXES = (".npy", ".zarr")
WHOLE, STEADY, COPY = KINDS = ("", " steady", " copy")
#: Chunks until those after them count as steady.
SETTLED = 3


class Copying:
    """Stands for the operator of a plan, and copies, for each thread into memory that it has."""

    def __init__(self, plan: BatchPlan) -> None:
        self.shape, self.spare, self.kept = plan.operator.output_shape[1:], deque[np.ndarray](), threading.local()

    def __call__(self, **tensors: np.ndarray) -> np.ndarray:
        """A result that begins with the bytes of the input, or with some of them."""
        (x,) = tensors.values()
        result: np.ndarray = getattr(self.kept, "result", None)
        if result is None or len(result) != len(x):
            result = self.kept.result = np.empty((len(x), *self.shape), x.dtype)
        for to, item in zip(result, x, strict=True):
            size = min(to.size, item.size)
            to.reshape(-1)[:size] = item.reshape(-1)[:size]
        return result


def remove(path: Path) -> None:
    """Remove an array, where there is one."""
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def measure(name: str, device: Device, run: Run, folder: Path) -> dict[str, Any]:
    """Samples of the call and of the mappings of one problem."""
    operator = bind_case(name)
    tensors, source = random_tensors(operator, 0), operator.source
    numbers = {**operator.sizes, **operator.scalars}
    numbers.pop(batch_parameter(operator)[0])
    given = numbers | {key: array for key, array in tensors.items() if key != source}
    item_mb = sum(array[0].nbytes for array in (tensors[source], np.empty(operator.output_shape, np.float32))) / 1e6
    compiled, one = dispatcher.compile(operator.problem, device=device.id, **given), tensors[source][:1]
    compiled(**{source: one})
    each_s = timed(lambda: compiled(**{source: one}))()
    items = max(1, round(min(run.settings.megabytes / item_mb, run.settings.seconds / each_s)))
    x = np.resize(tensors[source], (items, *one.shape[1:]))
    for suffix in SUFFIXES:
        make_array(folder / f"x{suffix}", x.shape, "float32", 8)
        write_items(folder / f"x{suffix}", 0, x)
    expected = compiled(**{source: x})

    def mapping(suffix: str, kind: str) -> Callable[[], float]:
        def seconds() -> float:
            target = folder / f"y{suffix if kind != COPY else COPY + suffix}"
            remove(target)
            done: list[tuple[float, float]] = []
            start = time.perf_counter()
            with patch.object(BatchPlan, "work", lambda plan, _: Copying(plan)) if kind == COPY else nullcontext():
                map_files(operator.problem, folder / f"x{suffix}", target, given, device=device.id,
                          progress=lambda share: done.append((time.perf_counter(), share)))  # fmt: skip
            if kind != STEADY or len(done) == 1:
                return time.perf_counter() - start
            (begin, before), (end, share) = done[min(SETTLED, len(done) - 1) - 1], done[-1]
            return (end - begin) / (share - before)

        return seconds

    ways = {"call": timed(lambda: compiled(**{source: x}))}
    ways |= {suffix + kind: mapping(suffix, kind) for suffix in SUFFIXES for kind in KINDS}
    sampling = sample_beside(run.probe, run.settings.quiet_limit, ways, run.settings.repeats)
    for way, reason in sampling.failures.items():
        raise SystemExit(f"map: {name}, {way}: {reason}")
    for suffix in SUFFIXES:
        if not np.array_equal(read_items(folder / f"y{suffix}", 0, items), expected):
            raise SystemExit(f"map: {name}: the result in {suffix} is not that of the call")
    results = {way: {"samples": common.sample_lists(samples)} for way, samples in sampling.samples.items()}
    return {"problem": name, "device": device.id, "label": common.device_label(device), "items": items,
            "item_mb": item_mb, "results": results}  # fmt: skip


def report_text(report: dict[str, Any]) -> str:
    """Items a second as a table."""
    rows = []
    for entry in report["entries"]:
        rates = {way: entry["items"] / result["median_s"] for way, result in entry["results"].items()}
        mark = "~" if any(result["noisy"] for result in entry["results"].values()) else ""
        shares = [
            f"{mark}{rates[way]:.1f} ({100 * rates[way] / rates['call']:.0f} %)" for way in rates if way != "call"
        ]
        first = (f"`{entry['problem']}`", entry["label"], str(entry["items"]), f"{entry['item_mb']:.1f}")
        rows.append([*first, f"{mark}{rates['call']:.1f}", *shares])
    titles = (
        "problem",
        "device",
        "items",
        "MB each",
        "one call, items/s",
        *(f"map, {suffix}{kind}" for suffix in SUFFIXES for kind in KINDS),
    )
    results = [result for entry in report["entries"] for result in entry["results"].values()]
    return "\n".join([*common.markdown(titles, rows), "", common.drop_note(report, results)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the results, print the table."""
    parser = common.new_parser(PROGRAM, __doc__, REPEATS)
    parser.add_argument("--problems", nargs="+", metavar="NAME", default=PROBLEMS)
    parser.add_argument("--megabytes", type=common.at_least(1), default=1500, help="of inputs and results, at most")
    parser.add_argument("--seconds", type=common.positive, default=4.0, help="of a call, about, at most")
    parser.add_argument("--folder", type=Path)
    settings = parser.parse_args(arguments)
    run = Run.start(PROGRAM, settings)

    def case(device: Device, name: str) -> dict[str, Any]:
        say(f"{device.name}: {name}")
        with tempfile.TemporaryDirectory(dir=settings.folder) as folder:
            return measure(name, device, run, Path(folder))

    entries = common.until_interrupted(partial(case, *each) for each in product(run.devices, settings.problems))
    for entry in entries:
        for result in entry["results"].values():
            common.add_statistics(result, run.threshold)
    report = run.report(entries=entries)
    common.keep(report, settings.output)
    print(report_text(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
