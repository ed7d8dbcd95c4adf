"""Every bundled problem at its published sizes: our OpenCL backend against the best of PyTorch's forms on the CPU.

    python bench/family.py                          all of them; those measured before are kept, so it can be broken off
    python bench/family.py --only conv2d-mish-mish conv-1d --again
    python bench/family.py --rank 2 --budget 10
    python bench/family.py --isa avx2               what a processor without AVX-512 would do: see bench/isa.py
    python bench/family.py --show                   the table of what there is, without measuring

A problem is measured with a batch of 2, or of 1 where 2 items take more than 16e9 operations, at its largest published
case that then takes no more than 4e9; the smallest one where all take more. PyTorch runs eagerly and compiled, each in
both memory formats; a form that is far from the best one at its first calls takes no further part. Its results are
compared with ours first. Each problem is a line of the file --lines as soon as it is measured, and all of them are the
report. See bench/README.md.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import dispatcher
from bench import common, isa
from bench.common import Run, bind_case, say
from bench.cpu_peers import SEED, Ours, milliseconds, ratio_text
from dispatcher.check.inputs import random_tensors
from dispatcher.device.machine import available_bytes, foreign_load
from dispatcher.device.selection import describe, first_usable, parse_request
from dispatcher.errors import InputError, VerificationError
from dispatcher.ops.steps import Convolution
from dispatcher.problem.operator import Operator, operator_dict
from dispatcher.timing import charts
from dispatcher.timing.contenders import Contender, Lineup, OtherLibrary
from dispatcher.timing.sampling import ratio, sample_beside

PROGRAM = "family"
REPEATS = 7
BUDGET_S = 15.0
LEAST_REPEATS = 3
#: Operations of a case where there are several, and of a batch of 2. (Of the former are convolutions of one channel, in
#: which PyTorch makes 1e9 operations a second or fewer.)
MOST_FLOPS, MOST_FLOPS_OF_TWO = 4e9, 16e9
#: A form whose first calls take this many times as long as the best one's is left behind.
FAR = 1.5
#: Compiling takes seconds, so only memory formats that are this near to the best one when run eagerly are compiled.
NEAR = 1.3
#: Who takes longer than this is called once before the rounds.
LONG_S = 1.0
#: Largest difference between a result of PyTorch and ours, as a share of the largest value.
TOLERANCE = 1e-4
#: Values as large as the largest one that exist at once: ours, a peer's, and what it makes that from.
COPIES = 5
EAGER = {"torch": "torch-compile", "torch-channels-last": "torch-compile-channels-last"}


# ---- what is measured --------------------------------------------------------------------------------------
def published_cases(name: str) -> list[str]:
    """The cases of a problem that others have published; the names of ours have no space."""
    return [case for case in dispatcher.load_problem(name).cases if " " in case or case == "kernelbench"]


def published(name: str) -> tuple[Operator, str]:
    """A problem at the sizes that are measured, and the name of the case."""
    found: list[tuple[Operator, str]] = []
    for case in published_cases(name):
        two = bind_case(name, 2, case=case)
        found.append((two if two.flops <= MOST_FLOPS_OF_TWO else bind_case(name, 1, case=case), case))
    found.sort(key=lambda each: each[0].flops)
    return next((each for each in reversed(found) if each[0].flops <= MOST_FLOPS), found[0])


def kind(operator: Operator) -> str:
    """The convolutions of an operator in a few words: ``conv2d 64->128 k3 s2``."""
    rank = operator.problem.rank
    texts = []
    for step in operator.steps:
        if isinstance(step, Convolution):
            geometry = step.geometry
            axes = geometry.axes[3 - rank :]
            strides = [axis.stride if step.transposed else axis.step for axis in axes]
            parts = [
                f"conv{'_transpose' if step.transposed else ''}{rank}d {geometry.in_channels}->{geometry.out_channels}"
            ]
            for letter, values, usual in (
                ("k", [axis.kernel for axis in axes], None), ("s", strides, None),
                ("d", [axis.dilation for axis in axes], 1), ("g", [geometry.groups], 1),
            ):  # fmt: skip
                if set(values) != {usual}:
                    parts.append(letter + ("x".join(map(str, values)) if len(set(values)) > 1 else str(values[0])))
            texts.append(" ".join(parts))
    return ", ".join(texts)


def lacking_memory(operator: Operator) -> str | None:
    """Why an operator is not measured here, or None."""
    largest = max(math.prod(shape) for step in operator.steps for shape in (step.input_shape, step.shape))
    needed, available = 4 * COPIES * largest, available_bytes()
    if available is None or needed <= available:
        return None
    return f"it takes some {needed / 1e9:.1f} GB of memory, and {available / 1e9:.1f} GB are available"


# ---- one problem -------------------------------------------------------------------------------------------
class Agreement:
    """Compares the results of others with the first one that it sees, which is ours."""

    full = False

    def __init__(self) -> None:
        self._ours: np.ndarray | None = None
        self._wrong: list[tuple[Contender, VerificationError]] = []
        self.differences: dict[str, float] = {}

    def see(self, contender: Contender, result: np.ndarray) -> None:
        """Take in the result of a call, which may be overwritten afterwards."""
        if self._ours is None:
            self._ours = np.array(result)
            self._largest = float(np.abs(result).max())
        elif result.shape != self._ours.shape:
            self._wrong.append((contender, VerificationError(f"its result has shape {result.shape}")))
            return
        difference = float(np.abs(result - self._ours).max()) / max(self._largest, 1e-30)
        self.differences[contender.name] = max(difference, self.differences.get(contender.name, 0.0))
        if not difference <= TOLERANCE:
            error = VerificationError(f"it differs from ours by {difference:.2g} of the largest value")
            self._wrong.append((contender, error))

    def judge(self) -> list[tuple[Contender, VerificationError]]:
        """The contenders with a wrong result since it was last asked."""
        wrong, self._wrong = self._wrong, []
        return wrong


def prepare(operator: Operator, device: str, lineup: Lineup) -> dict[str, float]:
    """Bring everybody in who may be the best, which nobody is where ours fails.

    Returns:
        Seconds of the first calls of each one who ran, the shorter one of two, for those left behind as well.
    """
    tensors = random_tensors(operator, SEED)
    looks: dict[str, float] = {}

    def look(contender: Contender) -> None:
        looks[contender.name] = contender.call()
        if looks[contender.name] < LONG_S:
            looks[contender.name] = min(looks[contender.name], contender.call())

    def enter(name: str, make: Callable[[], Contender]) -> None:
        lineup.enter(name, make)
        if name in [each.name for each in lineup.contenders]:
            lineup.attempt(lineup.contenders[-1], partial(look, lineup.contenders[-1]))

    enter(device, partial(Ours, operator, tensors, device))
    if device not in looks:
        return looks
    for name in EAGER:
        enter(name, partial(OtherLibrary, operator, tensors, name))
    eager = {name: looks[name] for name in EAGER if name in looks}
    for name, seconds in eager.items():
        if seconds <= NEAR * min(eager.values()):
            enter(EAGER[name], partial(OtherLibrary, operator, tensors, EAGER[name]))
    lineup.judge()
    right = [each.name for each in lineup.contenders]
    best = min((looks[name] for name in right if name != device), default=math.inf)
    for each in list(lineup.contenders):
        if each.name != device and looks[each.name] > FAR * best:
            lineup.contenders.remove(each)
    return looks


def measure_one(name: str, device: str, run: Run) -> dict[str, Any]:
    """The line of a problem: why it was left out, or what was measured."""
    start = time.perf_counter()
    operator, case = published(name)
    facts = {**operator_dict(operator), "case": case, "rank": operator.problem.rank, "kind": kind(operator)}
    facts |= {"batch": operator.steps[0].input_shape[0], "date": datetime.date.today().isoformat(), "device": device}
    facts["foreign_cores"] = foreign_load()
    lacking = lacking_memory(operator)
    if lacking is not None:
        return {**facts, "skipped": lacking}
    agreement = Agreement()
    lineup = Lineup({}, agreement)
    looks = prepare(operator, device, lineup)
    gc.collect()
    left_s = run.settings.budget - (time.perf_counter() - start)
    calls = {each.name: each.timed for each in lineup.contenders}
    round_s = sum(looks[name] + 0.1 for name in calls)
    repeats = max(LEAST_REPEATS, min(run.settings.repeats, int(left_s / round_s)))
    sampling = sample_beside(run.probe, run.settings.quiet_limit, calls, repeats)
    failures = {failure.name: failure.reason for failure in lineup.failures} | sampling.failures
    results: dict[str, Any] = {}
    for each in lineup.contenders:
        if each.name not in failures:
            result = {"samples": common.sample_lists(sampling.samples[each.name]), **each.facts()}
            result |= {"setup_s": each.compile_s + each.first_s, "difference": agreement.differences[each.name]}
            results[each.name] = result
    times = {each: common.add_statistics(result, run.threshold) for each, result in results.items()}
    peers = [each for each in times if each != device]
    line = {**facts, "failures": failures, "first_calls_s": looks, "results": results, "best_peer": None, "ratio": None}
    if device in times and peers:
        best = min(peers, key=lambda each: times[each].median_s)
        line |= {"best_peer": best, "ratio": asdict(ratio(times[best], times[device]))}
        results[device]["gflops"] = operator.flops / times[device].median_s / 1e9
    line["took_s"] = time.perf_counter() - start
    return line


def forget_compiled() -> None:
    """Have torch.compile forget its programs, of which it keeps so many only."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch._dynamo.reset()
    gc.collect()


# ---- lines -------------------------------------------------------------------------------------------------
def read_lines(path: Path) -> dict[str, dict[str, Any]]:
    """The last line of each problem."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return {line["problem"]: line for line in map(json.loads, text.splitlines())}


def add_line(path: Path, line: Mapping[str, Any]) -> None:
    """Append a line, so that a process that ends keeps those before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, allow_nan=False) + "\n")


def measure(names: Sequence[str], device: str, run: Run, path: Path) -> Iterator[str]:
    """Measure problems, one after another, and keep each one's line; gives a text for each."""
    for number, name in enumerate(names, 1):
        # What is there if the process is killed meanwhile; a resumed run goes on with the next problem.
        add_line(path, {"problem": name, "skipped": "the process ended while it was measured; try --again"})
        try:
            line = measure_one(name, device, run)
        except KeyboardInterrupt:
            add_line(path, {"problem": name})
            raise
        except MemoryError as error:
            line = {"problem": name, "skipped": describe(error)}
        add_line(path, line)
        forget_compiled()
        said = line.get("skipped") or "; ".join(f"{key}: {why}" for key, why in line["failures"].items())
        found = line.get("ratio")
        figure = f"{found['value']:.2f} ({line['took_s']:.0f} s)" if found else ""
        yield f"{number} of {len(names)}, {name}: {figure} {said}".rstrip()


# ---- the report --------------------------------------------------------------------------------------------
def overview(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The geometric mean of the ratios, the smallest one, and how many are below 1."""
    ratios = [line["ratio"]["value"] for line in lines if line.get("ratio")]
    if not ratios:
        return {"count": 0}
    found = {"geometric_mean": statistics.geometric_mean(ratios), "min": min(ratios)}
    return {"count": len(ratios), **found, "below_1": sum(value < 1 for value in ratios)}


def table(report: Mapping[str, Any]) -> str:
    """The report as Markdown, the worst ratio first."""
    measured = [line for line in report["lines"] if line.get("ratio")]
    rows = []
    for line in sorted(measured, key=lambda line: line["ratio"]["value"]):
        ours, peer = line["results"][line["device"]], line["results"][line["best_peer"]]
        rows.append([
            f"`{line['problem']}`", line["kind"], f"{line['case']}, batch {line['batch']}", f"{ours['gflops']:.0f}",
            milliseconds(ours), milliseconds(peer), line["best_peer"], ratio_text(line["ratio"]),
        ])  # fmt: skip
    titles = ("problem", "convolution", "case", "GFLOP/s", "ours, ms", "PyTorch, ms", "its best form", "ratio")
    found = report["overview"]
    lines = [f"{common.machine_text(report)}; {report['device_name']}; {report['date']}.", ""]
    if rows:
        lines += [
            f"Best of PyTorch over ours, {found['count']} problems: geometric mean {found['geometric_mean']:.2f}, "
            f"least {found['min']:.2f}, below 1: {found['below_1']}.",
            "",
            *common.markdown(titles, rows),
        ]
    left = [f"`{line['problem']}`: {reason}" for line in report["lines"] for reason in reasons(line)]
    if left:
        lines += ["", "Left out:", "", *(f"- {text}" for text in left)]
    results = [result for line in measured for result in line["results"].values()]
    return "\n".join([*lines, "", common.drop_note(report, results)])


def reasons(line: Mapping[str, Any]) -> list[str]:
    """Why a problem or a form of it has no times."""
    if "skipped" in line:
        return [line["skipped"]]
    return [f"{name}: {reason}" for name, reason in line.get("failures", {"all": "not measured"}).items()]


def chart(report: Mapping[str, Any], path: Path) -> None:
    """Bars of all ratios, the worst first.

    Raises:
        InputError: Matplotlib is not installed.
    """
    lines = sorted((line for line in report["lines"] if line.get("ratio")), key=lambda line: line["ratio"]["value"])
    places, values = range(len(lines)), [line["ratio"]["value"] for line in lines]
    spread = [[abs(line["ratio"][end] - line["ratio"]["value"]) for line in lines] for end in ("low", "high")]
    colours = [charts.OUR_COLOURS[0] if value < 1 else charts.PEER_COLOURS[2] for value in values]
    with charts.figure_for(path, 10, 1 + 0.17 * len(lines)) as figure:
        figure.set_layout_engine("constrained")
        axis = figure.subplots()
        axis.barh(places, values, xerr=spread, color=colours, error_kw={"elinewidth": 0.6})
        axis.axvline(1.0, color=charts.OTHER_ROOF, linewidth=0.8)
        axis.set_yticks(places, [line["problem"] for line in lines], fontsize=6)
        axis.set_xscale("log")
        axis.invert_yaxis()
        axis.margins(y=0.01)
        axis.set_xlabel("best of PyTorch over ours (log scale; right of the line ours is faster)")
        axis.set_title(f"{report['machine']['cpu']}, {report['device_name']}, {report['date']}", fontsize=9)


# ---- the program -------------------------------------------------------------------------------------------
def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = common.new_parser(PROGRAM, __doc__, REPEATS)
    add, names = parser.add_argument, list(dispatcher.problems())
    add("--only", nargs="+", metavar="NAME", choices=names, default=names, help="problems to measure (default: all)")
    add("--rank", type=int, nargs="+", choices=(1, 2, 3), default=[1, 2, 3], help="of the problems to measure")
    add("--budget", type=common.positive, default=BUDGET_S, metavar="SECONDS",
        help="of a problem, after which it has no more than three rounds (default: %(default)g)")  # fmt: skip
    add("--again", action="store_true", help="measure those that have a line already as well")
    add("--show", action="store_true", help="measure nothing")
    add("--lines", type=Path, help="the file with a line for each problem (default: one in bench/results)")
    common.add_isa(parser)
    settings = parser.parse_args(arguments)
    name = "family" if settings.isa is None else f"family-{settings.isa}"
    settings.lines = settings.lines or common.RESULTS / f"{name}.jsonl"
    return settings


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is not measured yet, write the results, print the table."""
    settings = parse(arguments)
    known = read_lines(settings.lines)
    names = [name for name in settings.only if dispatcher.load_problem(name).rank in settings.rank]
    if not settings.again:
        names = [name for name in names if not {"skipped", "results"} & set(known.get(name, {}))]
    if settings.show:
        names = []
    isa.limit(settings.isa)
    wanted = (settings.devices or ["opencl"])[0]
    device = first_usable(parse_request(wanted))[0]
    settings.devices, settings.force = [device.id], settings.force or settings.show
    run = Run.start(PROGRAM, settings, list(EAGER))
    try:
        for text in measure(names, device.id, run, settings.lines):
            say(text)
    except KeyboardInterrupt:
        say("interrupted: the next run goes on from here")
    lines = list(read_lines(settings.lines).values())
    report = run.report(device_name=device.name, lines=lines, overview=overview(lines))
    path = common.keep(report, settings.output)
    try:
        chart(report, path.with_suffix(".png"))
    except InputError as error:
        say(f"no chart: {describe(error)}")
    print(table(report))
    return 1 if any(line.get("device") in line.get("failures", {}) for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
