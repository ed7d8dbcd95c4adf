"""How large our errors are beside PyTorch's in float32, both against float64: every problem, dtype and set of inputs.

    python bench/accuracy.py [--problems NAME ...] [--dtypes float32 ...] [--seeds 3] [--output FILE.json]
    DISPATCHER_CUDA_SIM=1 python bench/accuracy.py          # the CUDA kernels as well, on the simulator
    python bench/accuracy.py --table --from bench/results/accuracy-2026-01-31.json    # measures nothing

Prints a Markdown table and writes a JSON file; ``--table`` also writes the table into docs/verification.md. What is
beyond the goal (rms 1 and maximum 2; Winograd 2 and 3) is bold, with the set of inputs. PyTorch's error counts for
no less than rounding the exact results, which single results may miss by luck. Needs PyTorch.
"""

from __future__ import annotations

import datetime
import importlib
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

if os.environ.get("DISPATCHER_CUDA_SIM") == "1":
    importlib.import_module("tests.cudasim").activate()

import dispatcher
from bench import common
from bench.common import markdown, plain_parser, say
from dispatcher.backends.numpy_ref import reference
from dispatcher.check.inputs import meaningful_sets, random_tensors
from dispatcher.check.verifying import compile_for
from dispatcher.device.machine import cores
from dispatcher.problem.operator import Operator
from dispatcher.timing.peers import PEERS
from dispatcher.timing.racing import environment

PROGRAM = "accuracy"
GUIDE = ROOT / "docs" / "verification.md"
BEGIN, END = "<!-- accuracy: {} -->\n", "<!-- accuracy: end -->"
ALGORITHMS = {"opencl": ("direct", "winograd", "tiled"), "cuda": ("halo", "fma")}
#: Largest ratios that are wanted: of the root of the mean square, of the maximum.
GOAL = (1.0, 2.0)
GOALS = {"winograd": (2.0, 3.0)}
#: By so much may two measurements of the same differ.
SLACK = 1.05
#: Results that a set of inputs has in all, within so many seeds: the ratio of a few errors is chance.
ENOUGH, MOST_SEEDS = 1000, 20


def ways() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """What to measure: a name for tables, a device and options, on the first usable device of each backend."""
    seen: set[str] = set()
    for device in dispatcher.devices():
        if device.available and device.backend not in seen:
            seen.add(device.backend)
            for algorithm in ALGORITHMS.get(device.backend, ("",)):
                options = {"algorithm": algorithm} if algorithm else {}
                yield f"{device.backend} {algorithm}".strip(), device.id, options


def error(results: Sequence[np.ndarray], truths: Sequence[np.ndarray]) -> tuple[float | None, float | None]:
    """Root of the mean square and maximum of the errors, where the truth is finite in that dtype; None, which JSON has,
    where the result is not finite there."""
    with np.errstate(all="ignore"):
        apart = [np.abs(r - t)[np.isfinite(t.astype(r.dtype))] for r, t in zip(results, truths, strict=True)]
    every = np.concatenate([[0.0], *(each.ravel() for each in apart)])  # perhaps everything is infinite
    rms, most = float(np.sqrt(np.square(every).mean())), float(every.max())
    return (rms, most) if np.isfinite(rms) else (None, None)


def rounding(truths: Sequence[np.ndarray], dtype: str) -> tuple[float, float]:
    """What :func:`error` is of exact results that are rounded to ``dtype``, on average and at most."""
    finite = np.concatenate([each[np.isfinite(each.astype(dtype))] for each in truths])
    units = np.spacing(np.abs(finite).astype(dtype)).astype(np.float64)
    return (float(np.sqrt(np.square(units).mean() / 12.0)), float(units.max() / 2.0)) if units.size else (0.0, 0.0)


def measure(operator: Operator, seeds: int) -> list[dict[str, Any]]:
    """An entry for each set of inputs: PyTorch's errors, and those of each way that runs the operator."""
    calls = {name: compile_for(operator, device, options) for name, device, options in ways()}
    single = replace(operator, dtype="float32")
    entries = []
    seeds = max(seeds, min(MOST_SEEDS, -(-ENOUGH // math.prod(operator.output_shape))))
    for kind in meaningful_sets(operator):
        tensors = [random_tensors(operator, seed, kind=kind) for seed in range(seeds)]
        truths = [reference(operator, each) for each in tensors]
        peers = []
        for each in tensors:
            inputs = {name: array.astype(np.float32) for name, array in each.items()}
            peers.append(PEERS["torch"].make(single, inputs, cores(), None)(None).astype(operator.dtype))
        entry = {"problem": operator.problem.name, "dtype": operator.dtype, "inputs": kind, "errors": {}}
        entry |= {"seeds": seeds, "rounding": rounding(truths, operator.dtype)}
        entry["errors"]["torch"] = error(peers, truths)
        for name, compiled in calls.items():
            results = [compiled.prepare_bound(operator, each)() for each in tensors]
            entry["errors"][name] = error(results, truths)
        entries.append(entry)
        say(f"{entry['problem']}, {operator.dtype}, {kind}")
    return entries


def ratio(ours: float | None, theirs: float | None, least: float) -> float:
    """Infinite where ours is an error and theirs is none, 0 where neither is, or where theirs has no bound."""
    if ours is None or theirs is None:
        return np.inf if theirs is not None else 0.0
    theirs = max(theirs, least)
    return ours / theirs if theirs > 0.0 else (np.inf if ours > 0.0 else 0.0)


def ratios(entry: Mapping[str, Any], name: str) -> tuple[float, float]:
    """Of the roots of the mean squares, and of the maxima."""
    pairs = zip(entry["errors"][name], entry["errors"]["torch"], entry.get("rounding", (0.0, 0.0)), strict=True)
    rms, most = (ratio(*each) for each in pairs)
    return rms, most


def table(entries: Sequence[Mapping[str, Any]]) -> str:
    """Ratios of rms and maximum for each way, bold beyond the goal; the worst of all sets but for the five, float32."""
    names = [name for name in dict.fromkeys(n for entry in entries for n in entry["errors"]) if name != "torch"]
    lines: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for entry in entries:
        alone = entry["dtype"] == "float32" and entry["problem"] in common.FIVE
        kind = f"`{entry['inputs']}`" if alone else "all"
        lines.setdefault((f"`{entry['problem']}`", entry["dtype"], kind), []).append(entry)
    rows = []
    for head, group in lines.items():
        cells = [*head, f"{max(entry['errors']['torch'][0] or 0.0 for entry in group):.1e}"]
        for name in names:
            goal = next((limits for word, limits in GOALS.items() if word in name), GOAL)
            found = {entry["inputs"]: ratios(entry, name) for entry in group if name in entry["errors"]}
            worst = [max(each) for each in zip(*found.values(), strict=True)]
            text = " / ".join(f"{each:.2g}" for each in worst)
            beyond = {kind: max(np.divide(each, goal)) for kind, each in found.items()}
            kind = max(beyond, key=lambda each: beyond[each])
            cells.append(text if beyond[kind] <= SLACK else f"**{text}**" + f" {kind}" * (len(group) > 1))
        rows.append(cells)
    return "\n".join(markdown(("problem", "dtype", "inputs", "PyTorch's rms error", *names), rows)) + "\n"


def with_table(text: str, name: str, lines: str) -> str:
    """``text`` with the table between its two marks, which name the results."""
    start = text.index(BEGIN.partition("{}")[0])
    return text[:start] + BEGIN.format(name) + "\n" + lines + "\n" + text[text.index(END) :]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the results, print the table."""
    parser = plain_parser(__doc__, PROGRAM)
    add = parser.add_argument
    add("--problems", nargs="+", metavar="NAME", default=list(dispatcher.problems()), help="default: the bundled ones")
    add("--case", default="sample", help="where sizes come from (default: %(default)s)")
    add("--dtypes", nargs="+", default=["float32", "float16", "float64"], help="default: all three")
    add("--seeds", type=common.at_least(1), default=3, help="inputs of each set (default: %(default)s)")
    add("--output", type=Path, help="the JSON file to write (default: a dated one in bench/results)")
    add("--from", dest="files", nargs="+", type=Path, help="show these results, and measure nothing")
    add("--table", action="store_true", help="write the table into docs/verification.md")
    settings = parser.parse_args(arguments)
    if settings.files:
        reports = [json.loads(path.read_text(encoding="utf-8")) for path in settings.files]
        report = {**reports[0], "entries": [entry for each in reports for entry in each["entries"]]}
    else:
        head = {"schema": 1, "program": PROGRAM, "date": datetime.date.today().isoformat(), **environment()}
        operators = [
            replace(common.bind_case(name, case=settings.case), dtype=dtype)
            for dtype in settings.dtypes
            for name in settings.problems
        ]
        entries = [entry for operator in operators for entry in measure(operator, settings.seeds)]
        report = {**head, "case": settings.case, "seeds": settings.seeds, "entries": entries}
    shown = settings.files and not settings.output
    name = settings.files[0].name if shown else common.keep(report, settings.output).name
    lines = table(report["entries"])
    print(lines, end="")
    if settings.table:
        text = GUIDE.read_text(encoding="utf-8")
        GUIDE.write_text(with_table(text, f"bench/results/{name}", lines), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
