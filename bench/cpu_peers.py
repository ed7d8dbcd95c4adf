"""Our OpenCL backend against PyTorch, ONNX Runtime and OpenVINO on the CPU, problem by problem.

    python bench/cpu_peers.py                 batch 2 (asym-input: batch 1), five problems, all peers
    python bench/cpu_peers.py --full          the `kernelbench` cases as well
    python bench/cpu_peers.py --isa avx2      what a processor without AVX-512 would do: see bench/isa.py
    python bench/cpu_peers.py --table         write README.md's table from the newest results as well
    python bench/cpu_peers.py --table --from bench/results/cpu_peers-2026-01-31.json        without measuring

Each contender takes a NumPy array (N, C, D, H, W) and gives one back; weights are known beforehand and
packed, optimised or compiled as the library likes it. All have the same number of threads and compute in
float32. Every result is checked against the NumPy reference before anything is timed. See bench/README.md.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import dispatcher
from bench import common
from bench.common import Run, bind_case, say
from bench.processes import Process
from dispatcher.check.inputs import random_tensors
from dispatcher.device.machine import available_bytes
from dispatcher.device.selection import describe
from dispatcher.errors import InputError
from dispatcher.interface import Timings
from dispatcher.problem.operator import Operator, bind, operator_dict
from dispatcher.timing import charts, contenders
from dispatcher.timing.contenders import OtherLibrary
from dispatcher.timing.peers import PEER_SLACK, PEERS, Peer
from dispatcher.timing.sampling import Probe, Times, ratio, seconds_since

PROGRAM, SCHEMA = "cpu_peers", 1
REPEATS = 9
SEED = 0
#: Processes have input tensors of their own up to this share of the memory that is available. Shared ones lie in small
#: pages, which cost ours 1 to 4 percent and PyTorch nothing.
OWN_SHARE = 0.25
SMALL, FULL = "small batches", "kernelbench cases"


# ---- one case ----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Contender:
    """Someone in the race.

    Attributes:
        name: key in the results.
        label: heading in tables.
        device: device of our backend; None for a peer.
    """

    name: str
    label: str
    device: str | None = None

    @cached_property
    def process(self) -> Process:
        """Its own, for all operators."""
        return Process(Seat, self.name, self.device)


def contenders_of(run: Run) -> list[Contender]:
    """The peers and the devices that take part in a run."""
    found = [Contender(name, PEERS[name].label) for name in run.settings.peers if name not in run.left_out]
    return found + [Contender(each.id, common.device_label(each), each.id) for each in run.devices]


class Ours(contenders.Contender):
    """A call of our compiled operator as users make it: weights are bound, the result is a new array."""

    def __init__(self, operator: Operator, tensors: Mapping[str, np.ndarray], device: str) -> None:
        super().__init__(operator, device, device)
        start = time.perf_counter()
        constants = {name: array for name, array in tensors.items() if name != operator.source}
        known: dict[str, Any] = {**operator.sizes, **operator.scalars, **constants}
        self._compiled = dispatcher.compile(operator.problem, device=device, **known)
        self.compile_s = seconds_since(start)
        self._x = {operator.source: tensors[operator.source]}

    def run(self, timings: Timings | None = None) -> np.ndarray:
        return np.asarray(self._compiled(**self._x))

    def facts(self) -> dict[str, Any]:
        return {"launches": self._compiled.explain().as_dict()["launches"]}


def contender(
    operator: Operator, tensors: Mapping[str, np.ndarray], name: str, device: str | None
) -> contenders.Contender:
    """A contender in this process; see :class:`Contender` for who it is."""
    return OtherLibrary(operator, tensors, name) if device is None else Ours(operator, tensors, device)


class Seat:
    """What a contender's process holds: the contender on the operator of the moment, and its latest result."""

    _contender: contenders.Contender | None = None

    def __init__(self, name: str, device: str | None) -> None:
        self._who = name, device

    def prepare(self, peer: Peer | None, folder: str | None, *task: Any) -> None:
        """Get ready for an operator, given as :func:`bind` takes it, on tensors in a folder, or of its own."""
        self._contender = None  # its memory comes first
        if peer is not None:
            contenders.PEERS[self._who[0]] = peer  # as the parent has it
        operator = bind(*task)
        tensors = random_tensors(operator, SEED) if folder is None else mapped(folder)
        self._contender = contender(operator, tensors, *self._who)
        self._contender.witness = self

    def see(self, _: contenders.Contender, result: np.ndarray) -> None:
        """Keep the result of a call, which may be overwritten afterwards."""
        self._result = np.array(result)

    def run(self) -> np.ndarray:
        """The result of a call."""
        self._contender.call()
        result, self._result = self._result, None
        return result

    def timed(self) -> float:
        """Seconds of a call."""
        return self._contender.timed()

    def facts(self) -> dict[str, Any]:
        """What a result file has to say of it."""
        setup_s = self._contender.compile_s + self._contender.first_s
        return {**self._contender.facts(), "setup_s": setup_s}


class Apart(contenders.Contender):
    """A contender in a process of its own, as its parent sees it."""

    def __init__(self, operator: Operator, entrant: Contender, folder: str | None) -> None:
        super().__init__(operator, entrant.name, entrant.device or f"{entrant.label} (cpu)")
        peer = None if entrant.device else contenders.PEERS[entrant.name]
        self.slack = PEER_SLACK if peer else 1.0
        self._ask = entrant.process.ask
        self._ask("prepare", peer, folder, operator.problem, operator.sizes, operator.scalars)

    def run(self, timings: Timings | None = None) -> np.ndarray:
        result: np.ndarray = self._ask("run")
        return result

    def timed(self) -> float:
        return float(self._ask("timed"))

    def facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = self._ask("facts")
        return facts


def race(
    operator: Operator, title: str, entrants: Sequence[Contender], probe: Probe, settings: argparse.Namespace
) -> dict[str, Any]:
    """Prepare, check and time every contender on one operator; see :func:`common.race`."""
    tensors = random_tensors(operator, SEED)
    with ExitStack() as stack:
        folder, available = None, available_bytes()
        if available and len(entrants) * sum(each.nbytes for each in tensors.values()) > OWN_SHARE * available:
            folder = stack.enter_context(TemporaryDirectory())
            for name, array in tensors.items():
                np.save(Path(folder, f"{name}.npy"), array)
            tensors = mapped(folder)
        makers = {each.name: partial(Apart, operator, each, folder) for each in entrants}
        return {"seed": SEED, **common.race(title, operator, tensors, makers, probe, settings)}


def mapped(folder: str) -> dict[str, np.ndarray]:
    """The tensors in the files of a folder, whose memory all processes share."""
    return {path.stem: np.asarray(np.load(path, mmap_mode="c")) for path in Path(folder).iterdir()}


def conclude(case: dict[str, Any], entrants: Sequence[Contender], threshold: float) -> None:
    """Put the statistics into a case: summaries, the best peer, ratios. Samples are kept as they are."""
    times: dict[str, Times] = {}
    for name, result in case["results"].items():
        times[name] = common.add_statistics(result, threshold)
        result["gflops"] = case["flops"] / times[name].median_s / 1e9
    mine = {entrant.name for entrant in entrants if entrant.device is not None}
    peers = [name for name in times if name not in mine]
    best = min(peers, key=lambda name: times[name].median_s) if peers else None
    case["best_peer"] = best
    case["ratios"] = {
        name: asdict(ratio(times[best], times[name])) for name in times if name in mine and best is not None
    }


# ---- the table ---------------------------------------------------------------------------------------------
#: README's table stands between these; the first one names the file with its results.
BEGIN, END = re.compile(r"<!-- cpu-peers: ?(\S*) -->"), "<!-- cpu-peers: end -->"


def milliseconds(result: Mapping[str, Any] | None, digits: int | None = None) -> str:
    """A median in milliseconds; ``~`` stands before one that no quiet sample backs."""
    if result is None:
        return "–"
    median = 1e3 * result["median_s"]
    digits = (1 if median < 100 else 0) if digits is None else digits
    return f"{'~' if result['noisy'] else ''}{median:.{digits}f}"


def table(report: Mapping[str, Any]) -> str:
    """The results as Markdown."""
    mine = [each for each in report["contenders"] if each["device"] is not None]
    everybody = [*(each for each in report["contenders"] if each["device"] is None), *mine]
    labels = {each["name"]: each["label"] for each in everybody}
    probe = report["probe"]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    lines = [
        f"{common.machine_text(report)}, with measured {probe['peak_gflops']:.0f} "
        f"GFLOP/s of float32 multiply-adds and {probe['copy_gbytes_per_s']:.0f} GB/s when copying; "
        f"{report['date']}. {versions}."
    ]
    titles = ["problem", *labels.values(), *(f"best peer / {each['label']}" for each in mine)]
    for label in dict.fromkeys(case["label"] for case in report["cases"]):
        rows = [
            [
                f"`{case['problem']}`, batch {case['batch']}",
                *(milliseconds(case["results"].get(name)) for name in labels),
                *(ratio_text(case["ratios"].get(each["name"])) for each in mine),
            ]
            for case in report["cases"]
            if case["label"] == label
        ]
        lines += ["", f"Milliseconds, {label} (medians); ratios with what the quartiles make of them.", ""]
        lines += common.markdown(titles, rows)
    notes = [
        f"{labels[name]}, `{case['problem']}`, {case['label']}: {reason}"
        for case in report["cases"]
        for name, reason in case["failures"].items()
    ]
    notes += [f"{name} is left out: {reason}" for name, reason in report["left_out"].items()]
    if notes:
        lines += ["", "Not measured:", "", *(f"- {note}" for note in notes)]
    results = [result for case in report["cases"] for result in case["results"].values()]
    return "\n".join([*lines, "", common.drop_note(report, results)])


def ratio_text(found: Mapping[str, Any] | None) -> str:
    """A ratio with its spread."""
    if found is None:
        return "–"
    mark = "~" if found["noisy"] else ""
    return f"{mark}**{found['value']:.2f}** ({found['low']:.2f}–{found['high']:.2f})"


def table_region(text: str) -> tuple[int, int, str]:
    """Where README's table starts and ends, and the result file that its first marker names (or nothing).

    Raises:
        ValueError: a marker is missing.
    """
    first = BEGIN.search(text)
    end = -1 if first is None else text.find(END, first.end())
    if first is None or end < 0:
        raise ValueError(f"the markers <!-- cpu-peers: FILE --> and {END} are missing")
    return first.start(), end, first[1]


def with_table(text: str, name: str, report: Mapping[str, Any]) -> str:
    """``text`` with the table of ``report``, which is in the file ``name``, between its markers."""
    first, end, _ = table_region(text)
    return f"{text[:first]}<!-- cpu-peers: {name} -->\n\n{table(report)}\n\n{text[end:]}"


# ---- the chart ---------------------------------------------------------------------------------------------
def chart(report: Mapping[str, Any], path: Path) -> None:
    """Bars of the times and a roofline, one row for each label.

    Raises:
        InputError: Matplotlib is not installed.
    """
    probe, machine = report["probe"], report["machine"]
    panels = []
    for label in dict.fromkeys(case["label"] for case in report["cases"]):
        entries = []
        for case in report["cases"]:
            if case["label"] != label:
                continue
            name, intensity = charts.short(case["problem"]), case["flops"] / case["ideal_bytes"]
            for each in report["contenders"]:
                result, mine = case["results"].get(each["name"]), each["device"] is not None
                if result is not None:
                    times_s = (result["median_s"], result["low_s"], result["high_s"])
                    reached = (intensity, result["gflops"]) if mine else None
                    entries.append(charts.Entry(name, each["label"], mine, times_s, reached))
            best = case["results"].get(case["best_peer"])
            if best is not None:
                entries.append(charts.Entry(name, "best peer", False, None, (intensity, best["gflops"])))
        titles = (f"Time of a call, {label} (median, quartiles)", f"Roofline, {label}")
        roofs = {"": (probe["peak_gflops"], probe["copy_gbytes_per_s"])}
        panels.append(charts.Panel(titles, entries, roofs))
    path.parent.mkdir(parents=True, exist_ok=True)
    title = f"{machine['cpu']}, {machine['cores']} cores, float32, {report['date']}"
    charts.draw(panels, title, path)


# ---- the program -------------------------------------------------------------------------------------------
def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = common.new_parser("cpu_peers", __doc__, REPEATS)
    names, add = list(dispatcher.problems()), parser.add_argument
    add("--problems", nargs="+", metavar="NAME", choices=names, default=list(common.FIVE),
        help="problems to measure (default: five)")  # fmt: skip
    peers = [name for name, peer in PEERS.items() if not peer.gpu]
    add("--peers", nargs="*", metavar="NAME", choices=peers, default=peers,
        help=f"of {', '.join(peers)} (default: all; none: just --peers)")  # fmt: skip
    add("--full", action="store_true", help="measure the kernelbench cases as well")
    common.add_sizes(parser)
    common.add_isa(parser)
    add("--table", action="store_true", help="write README.md's table")
    add("--readme", type=Path, default=ROOT / "README.md", help="the file with the table's markers")
    add("--from", dest="source", type=Path, metavar="FILE", help="measure nothing, take this file")
    return parser.parse_args(arguments)


def measure(settings: argparse.Namespace) -> dict[str, Any]:
    """Measure everything.

    Raises:
        SystemExit: see :meth:`bench.common.Run.start`.
    """
    operators = [(common.small_operator(problem, settings), SMALL) for problem in settings.problems]
    if settings.full:
        operators += [(bind_case(problem, None, dict(settings.set)), FULL) for problem in settings.problems]
    run = Run.start(PROGRAM, settings, settings.peers)
    entrants = contenders_of(run)

    def case(operator: Operator, label: str) -> dict[str, Any]:
        facts = {"label": label, **operator_dict(operator), "batch": operator.output_shape[0]}
        title = f"{operator.problem.name}, {label}"
        return {**facts, **race(operator, title, entrants, run.probe, settings)}

    cases = common.until_interrupted(partial(case, *each) for each in operators)
    for each in cases:
        conclude(each, entrants, run.threshold)
    return run.report(
        devices={device.id: {"name": device.name, **device.facts} for device in run.devices},
        contenders=[asdict(entrant) for entrant in entrants],
        cases=cases,
    )


def read_report(path: Path) -> dict[str, Any]:
    """A result file.

    Raises:
        ValueError: it is of another program or another schema.
    """
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    found = (report.get("program"), report.get("schema"))
    if found != (PROGRAM, SCHEMA):
        raise ValueError(f"{path} is of {found[0]}, schema {found[1]}; expected {PROGRAM}, schema {SCHEMA}")
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the results, print the table."""
    settings = parse(arguments)
    try:
        if settings.table:
            table_region(settings.readme.read_text(encoding="utf-8"))  # better now than after measuring
        report = None if settings.source is None else read_report(settings.source)
    except (OSError, ValueError) as error:
        say(f"cpu_peers: {error}")
        return 2
    if report is not None:
        path = settings.source.resolve()
    else:
        report = measure(settings)
        path = common.keep(report, settings.output)
    try:
        chart(report, path.with_suffix(".png"))
        say(f"chart: {path.with_suffix('.png')}")
    except InputError as error:
        say(f"no chart: {describe(error)}")
    print(table(report))
    if settings.table:
        readme = settings.readme
        name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
        readme.write_text(with_table(readme.read_text(encoding="utf-8"), name, report), encoding="utf-8")
        say(f"table: {readme}")
    wrong = [
        f"{case['problem']}, {case['label']}, {each['label']}: {case['failures'][each['name']]}"
        for case in report["cases"]
        for each in report["contenders"]
        if each["device"] is not None and each["name"] in case["failures"]
    ]
    for line in wrong:
        say(f"failed: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
