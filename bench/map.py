"""How fast ``dispatcher map`` is: items a second from file to file, beside one long call, in memory and file to file.

    python bench/map.py [--problems NAME...] [--seconds 4] [--megabytes 1500] [--folder DIR] [--devices opencl:0]

The call is warm, and computes as many items as the file has. The mapping is all of it: compiling, reading, computing in
chunks of the usual length, and writing, with .npy files and with Zarr arrays that are not compressed. ``steady`` leaves
out what comes before its third chunk is done, as it matters for longer files. ``one call`` is all of it too, in one
long call: its input comes from the same file, mapped or read by Zarr, and its result is saved by NumPy or Zarr. They
take turns, each with memory that was in use just before: a virtual machine's first use of it takes longer than most
problems do. The results have to be equal, byte for byte. The files lie in ``--folder``, in the system's folder for
temporary files if left out.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

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
from dispatcher.scale.storage import make_array, open_array, read_items, write_items
from dispatcher.timing.sampling import sample_beside, timed

PROGRAM, REPEATS = "map", 5
PROBLEMS = ("conv2d-relu-biasadd", "conv2d-subtract-hardswish-maxpool-mish", "conv-transpose3d-max-max-sum")
SUFFIXES = (".npy", ".zarr")
WHOLE, STEADY, LONG = KINDS = ("map, {}", "map, {} steady", "one call, {}")
#: Chunks until those after them count as steady.
SETTLED = 3


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

    steady: dict[str, list[float]] = {suffix: [] for suffix in SUFFIXES}

    def call() -> float:
        np.ones(2 * x.nbytes + 2 * expected.nbytes, np.uint8)
        return timed(lambda: compiled(**{source: x}))()

    def mapping(suffix: str) -> float:
        remove(folder / f"y{suffix}")
        np.ones(2 * expected.nbytes, np.uint8)
        done: list[tuple[float, float]] = []
        start = time.perf_counter()
        map_files(operator.problem, folder / f"x{suffix}", folder / f"y{suffix}", given, device=device.id,
                  progress=lambda share: done.append((time.perf_counter(), share)))  # fmt: skip
        seconds = time.perf_counter() - start
        (begin, before), (end, share) = done[min(SETTLED, len(done)) - 1], done[-1]
        steady[suffix].append((end - begin) / (share - before) if share > before else seconds)
        return seconds

    def long(suffix: str) -> float:
        target = folder / f"long{suffix}"
        remove(target)
        np.ones(2 * x.nbytes + 2 * expected.nbytes, np.uint8)
        start = time.perf_counter()
        warm = dispatcher.compile(operator.problem, device=device.id, **given)
        result = warm(**{source: open_array(folder / f"x{suffix}")[:]})
        if suffix == ".npy":
            np.save(target, result)
        else:
            make_array(target, result.shape, "float32", 8)
            open_array(target, "r+")[:] = result
        return time.perf_counter() - start

    ways: dict[str, Callable[[], float]] = {"call": call}
    for suffix in SUFFIXES:
        ways |= {WHOLE.format(suffix): partial(mapping, suffix), LONG.format(suffix): partial(long, suffix)}
    sampling = sample_beside(run.probe, run.settings.quiet_limit, ways, run.settings.repeats)
    for way, reason in sampling.failures.items():
        raise SystemExit(f"map: {name}, {way}: {reason}")
    for suffix in SUFFIXES:
        if not np.array_equal(read_items(folder / f"y{suffix}", 0, items), expected):
            raise SystemExit(f"map: {name}: the result in {suffix} is not that of the call")
        whole = sampling.samples[WHOLE.format(suffix)]
        sampling.samples[STEADY.format(suffix)] = [
            replace(sample, seconds=seconds) for sample, seconds in zip(whole, steady[suffix], strict=True)
        ]
    results = {way: {"samples": common.sample_lists(samples)} for way, samples in sampling.samples.items()}
    return {"problem": name, "device": device.id, "label": common.device_label(device), "items": items,
            "item_mb": item_mb, "results": results}  # fmt: skip


def report_text(report: dict[str, Any]) -> str:
    """Items a second as a table."""
    rows, ways = [], [kind.format(suffix) for suffix in SUFFIXES for kind in KINDS]
    for entry in report["entries"]:
        rates = {way: entry["items"] / result["median_s"] for way, result in entry["results"].items()}
        mark = "~" if any(result["noisy"] for result in entry["results"].values()) else ""
        shares = [f"{mark}{rates[way]:.1f} ({100 * rates[way] / rates['call']:.0f} %)" for way in ways]
        first = (f"`{entry['problem']}`", entry["label"], str(entry["items"]), f"{entry['item_mb']:.1f}")
        rows.append([*first, f"{mark}{rates['call']:.1f}", *shares])
    titles = ("problem", "device", "items", "MB each", "one call in memory, items/s", *ways)
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
