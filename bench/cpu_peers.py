"""Our OpenCL backend against PyTorch, ONNX Runtime and OpenVINO on the CPU, problem by problem.

    python bench/cpu_peers.py                 batch 2 (asym-input: batch 1), all problems, all peers
    python bench/cpu_peers.py --full          the `kernelbench` cases as well
    python bench/cpu_peers.py --table         write README.md's table from the newest results as well
    python bench/cpu_peers.py --table --from bench/results/cpu_peers-2026-01-31.json        without measuring

Each contender takes a NumPy array (N, C, D, H, W) and gives one back; weights are known beforehand and
packed, optimised or compiled as the library likes it. All have the same number of threads and compute in
float32. Every result is checked against the NumPy reference before anything is timed. See bench/README.md.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import dispatcher  # noqa: E402
from bench import measure  # noqa: E402
from bench.measure import Summary, say  # noqa: E402
from dispatcher.check.comparison import bounded_reference, compare  # noqa: E402
from dispatcher.check.inputs import random_tensors  # noqa: E402
from dispatcher.problem.arguments import bind_arguments, sort_arguments  # noqa: E402
from dispatcher.problem.operator import Operator, operator_dict  # noqa: E402
from dispatcher.timing import charts  # noqa: E402
from dispatcher.timing.peers import PEER_SLACK, PEERS  # noqa: E402

PROGRAM, SCHEMA = "cpu_peers", 1
DISTRIBUTIONS = (
    "kernel-dispatcher",
    "numpy",
    "pyopencl",
    "intel-opencl-rt",
    "torch",
    "onnx",
    "onnxruntime",
    "openvino",
)
REPEATS = 9
SEED = 0
SMALL, FULL = "small batches", "kernelbench cases"
SMALL_BATCH = 2
SMALL_BATCHES = {"conv-transpose-3d-asym-input-sq-kernel": 1}
#: Batch items that are compared with the reference; the others must be finite.
VERIFIED_IMAGES = 3

Tensors = Mapping[str, np.ndarray]
Call = Callable[[], np.ndarray]


# ---- operators ---------------------------------------------------------------------------------------------
def bind_case(problem: str, batch: int | None, overrides: Mapping[str, int] | None = None) -> Operator:
    """A problem at its `kernelbench` sizes, with another batch size and other sizes where given."""
    loaded = dispatcher.load_problem(problem)
    sizes = dict(overrides or {}) | ({} if batch is None else {"batch_size": batch})
    return bind_arguments(loaded, sort_arguments(loaded, sizes), case="kernelbench")


# ---- ours --------------------------------------------------------------------------------------------------
def ours(operator: Operator, tensors: Tensors, device: str) -> tuple[Call, Any]:
    """A call of our compiled operator, and the operator."""
    constants = {name: array for name, array in tensors.items() if name != operator.source}
    known: dict[str, Any] = {**operator.sizes, **operator.scalars, **constants}
    compiled = dispatcher.compile(operator.problem, device=device, **known)
    x = {operator.source: tensors[operator.source]}
    return lambda: np.asarray(compiled(**x)), compiled


# ---- checking ----------------------------------------------------------------------------------------------
@dataclass
class Checker:
    """The reference for some batch items of an operator, made once and compared with every contender."""

    operator: Operator
    images: list[int]
    parts: list[tuple[np.ndarray, np.ndarray]]

    @classmethod
    def of(cls, operator: Operator, tensors: Tensors) -> Checker:
        """Compute the reference of the first, the last and a middle batch item."""
        batch = operator.output_shape[0]
        images = sorted({0, batch // 2, batch - 1})[:VERIFIED_IMAGES]
        one = bind_arguments(
            operator.problem,
            sort_arguments(operator.problem, {**operator.sizes, **operator.scalars, "batch_size": 1}),
        )
        parts = [
            bounded_reference(one, {**tensors, operator.source: tensors[operator.source][image : image + 1]})
            for image in images
        ]
        return cls(operator, images, parts)

    def check(self, result: np.ndarray, slack: float) -> tuple[float, str]:
        """The largest error as a share of its bound, and why the result is wrong (empty: it is right)."""
        if result.shape != self.operator.output_shape:
            return float("inf"), f"the result has shape {result.shape}; expected {self.operator.output_shape}"
        worst, reason = 0.0, ""
        for image, (reference, bound) in zip(self.images, self.parts, strict=True):
            found = compare(result[image : image + 1], reference, slack * bound, dtype="float32")
            worst = max(worst, slack * found.max_error_over_bound)
            reason = reason or found.reason
        if not reason and not np.isfinite(result).all():
            reason = "the result is not finite everywhere"
        return worst, reason


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


def race(
    operator: Operator,
    title: str,
    contenders: Sequence[Contender],
    probe: measure.FmaProbe,
    settings: argparse.Namespace,
    seed: int = SEED,
) -> dict[str, Any]:
    """Prepare, check and time every contender on one operator.

    Args:
        title: what progress lines say of it.
        seed: of the tensors.

    Returns:
        Why contenders failed, and of the others the samples and what is known of them. Statistics come later,
        since they depend on the whole run's fastest probe; see :func:`conclude`.
    """
    tensors = random_tensors(operator, seed)
    say(f"{title}: reference")
    checker = Checker.of(operator, tensors)
    calls: dict[str, Call] = {}
    failures: dict[str, str] = {}
    details: dict[str, dict[str, Any]] = {}
    for contender in contenders:
        say(f"{title}: preparing {contender.label}")
        begun = time.perf_counter()
        try:
            detail: dict[str, Any] = {}
            if contender.device is not None:
                call, compiled = ours(operator, tensors, contender.device)
            else:
                call = PEERS[contender.name].make(operator, tensors, measure.cores())
            result = call()
            detail["setup_s"] = time.perf_counter() - begun
            slack = 1.0 if contender.device is not None else PEER_SLACK
            detail["error_over_bound"], reason = checker.check(result, slack)
            del result
            if reason:
                raise ArithmeticError(reason)
            if contender.device is not None:
                detail["launches"] = compiled.explain().as_dict()["launches"]
            call()
        except ImportError as error:
            failures[contender.name] = f"not installed ({measure.one_line(error)})"
        except Exception as error:
            failures[contender.name] = measure.one_line(error)
        else:
            calls[contender.name], details[contender.name] = call, detail
        if contender.name in failures:
            say(f"{title}: {contender.label} is out: {failures[contender.name]}")
    images = checker.images
    del checker
    gc.collect()
    sampling = measure.interleave(
        calls,
        probe,
        repeats=settings.repeats,
        limit=settings.quiet_limit,
        progress=lambda text: say(f"{title}: {text}"),
    )
    failures |= sampling.failures
    return {
        "seed": seed,
        "verified_images": images,
        "failures": failures,
        "results": {
            name: {**details[name], "samples": measure.sample_lists(samples)}
            for name, samples in sampling.samples.items()
            if name not in failures and samples
        },
    }


def conclude(case: dict[str, Any], contenders: Sequence[Contender], threshold: float) -> None:
    """Put the statistics into a case: summaries, the best peer, ratios. Samples are kept as they are."""
    summaries: dict[str, Summary] = {}
    for name, result in case["results"].items():
        samples = [measure.Sample(*sample) for sample in result["samples"]]
        summaries[name] = measure.summarise(samples, threshold)
        result.update(measure.summary_dict(samples, summaries[name]))
        result["gflops"] = case["flops"] / summaries[name].median_s / 1e9
    mine = {contender.name for contender in contenders if contender.device is not None}
    peers = {name: summary for name, summary in summaries.items() if name not in mine}
    best = min(peers, key=lambda name: peers[name].median_s) if peers else None
    case["best_peer"] = best
    case["ratios"] = {
        name: asdict(measure.ratio(peers[best], summaries[name]))
        for name in summaries
        if name in mine and best is not None
    }


# ---- the table ---------------------------------------------------------------------------------------------
#: README's table stands between these; the first one names the file with its results.
BEGIN, END = re.compile(r"<!-- cpu-peers: ?(\S*) -->"), "<!-- cpu-peers: end -->"


def milliseconds(result: Mapping[str, Any] | None) -> str:
    """A median in milliseconds; ``~`` stands before one that no quiet sample backs."""
    if result is None:
        return "–"
    median = 1e3 * result["median_s"]
    return f"{'~' if result['noisy'] else ''}{median:.{1 if median < 100 else 0}f}"


def table(report: Mapping[str, Any]) -> str:
    """The results as Markdown."""
    peers = [each for each in report["contenders"] if each["device"] is None]
    mine = [each for each in report["contenders"] if each["device"] is not None]
    machine, probe = report["machine"], report["probe"]
    vectors = ", ".join(machine.get("vector_instructions", [])) or "no known vector instructions"
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores ({vectors}), with measured {probe['peak_gflops']:.0f} "
        f"GFLOP/s of float32 multiply-adds and {probe['copy_gbytes_per_s']:.0f} GB/s when copying; "
        f"{report['date']}. "
        + ", ".join(f"{name} {version}" for name, version in report["versions"].items())
        + ".",
    ]
    notes: list[str] = []
    for label in dict.fromkeys(case["label"] for case in report["cases"]):
        titles = [each["label"] for each in (*peers, *mine)]
        titles += [f"best peer / {each['label']}" for each in mine]
        lines += [
            "",
            f"Milliseconds, {label} (medians); ratios with what the quartiles make of them.",
            "",
            "| problem | " + " | ".join(titles) + " |",
            "|---" * (1 + len(titles)) + "|",
        ]
        for case in report["cases"]:
            if case["label"] != label:
                continue
            results, ratios = case["results"], case["ratios"]
            cells = [milliseconds(results.get(each["name"])) for each in (*peers, *mine)]
            for each in mine:
                found = ratios.get(each["name"])
                cells.append("–" if found is None else ratio_text(found))
            lines.append(f"| `{case['problem']}`, batch {case['batch']} | " + " | ".join(cells) + " |")
            labels = {each["name"]: each["label"] for each in report["contenders"]}
            notes += [
                f"{labels[name]}, `{case['problem']}`, {label}: {reason}"
                for name, reason in case["failures"].items()
            ]
    notes += [f"{name} is left out: {reason}" for name, reason in report["left_out"].items()]
    if notes:
        lines += ["", "Not measured:", "", *(f"- {note}" for note in notes)]
    results = [result for case in report["cases"] for result in case["results"].values()]
    return "\n".join([*lines, "", measure.drop_note(report, results)])


def ratio_text(found: Mapping[str, Any]) -> str:
    """A ratio with its spread."""
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
        ImportError: matplotlib is not installed.
    """
    labels = list(dict.fromkeys(case["label"] for case in report["cases"]))
    figure, axes = charts.new_figure(len(labels))
    mine = [each["name"] for each in report["contenders"] if each["device"] is not None]
    peers = [each["name"] for each in report["contenders"] if each["device"] is None]
    colours = charts.colours_of(mine, peers)
    for row, label in zip(axes, labels, strict=True):
        cases = [case for case in report["cases"] if case["label"] == label]
        charts.draw_bars(
            row[0],
            [charts.short(case["problem"]) for case in cases],
            [
                charts.Bars(
                    each["label"],
                    colours[each["name"]],
                    [_times(case["results"].get(each["name"])) for case in cases],
                )
                for each in report["contenders"]
            ],
        )
        _roofline(row[1], report, cases, colours)
        row[0].set_title(f"Time of a call, {label} (median, quartiles)", loc="left")
        row[1].set_title(f"Roofline, {label}", loc="left")
    machine = report["machine"]
    figure.suptitle(f"{machine['cpu']}, {machine['cores']} cores, float32, {report['date']}")
    path.parent.mkdir(parents=True, exist_ok=True)
    charts.save(figure, path)


def _times(result: Mapping[str, Any] | None) -> tuple[float, float, float] | None:
    return None if result is None else (result["median_s"], result["low_s"], result["high_s"])


def _roofline(axis: Any, report: Mapping[str, Any], cases: Sequence[Any], colours: Mapping[str, str]) -> None:
    probe = report["probe"]
    roof = charts.Roof("#333333", probe["peak_gflops"], probe["copy_gbytes_per_s"])
    mine = [each for each in report["contenders"] if each["device"] is not None]
    best_colour = charts.PEER_COLOURS[3]
    points: list[charts.Point] = []
    markers: dict[str, str] = {}
    for number, case in enumerate(cases):
        marker = charts.MARKERS[number % len(charts.MARKERS)]
        markers[charts.short(case["problem"])] = marker
        intensity, results = case["flops"] / case["ideal_bytes"], case["results"]
        if case["best_peer"] is not None:
            rate = results[case["best_peer"]]["gflops"]
            points.append(charts.Point(intensity, rate, marker, best_colour, hollow=True))
        points += [
            charts.Point(intensity, results[each["name"]]["gflops"], marker, colours[each["name"]])
            for each in mine
            if each["name"] in results
        ]
    legend = {each["label"]: (colours[each["name"]], False) for each in mine}
    charts.draw_roofline(axis, [roof], points, markers, {**legend, "best peer": (best_colour, True)})


# ---- the program -------------------------------------------------------------------------------------------
def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="cpu_peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    measure.add_common_arguments(parser, REPEATS)
    names = list(dispatcher.problems())
    parser.add_argument("--problems", nargs="+", metavar="NAME", choices=names, default=names,
                        help="problems to measure (default: all)")  # fmt: skip
    parser.add_argument("--peers", nargs="*", metavar="NAME", choices=PEERS, default=list(PEERS),
                        help=f"of {', '.join(PEERS)} (default: all; none: just --peers)")  # fmt: skip
    parser.add_argument("--batch", type=measure.at_least(1), help="batch size, instead of 2 (asym-input: 1)")
    parser.add_argument("--full", action="store_true", help="measure the kernelbench cases as well")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", type=assignment,
                        help="another size, for all problems that have it")  # fmt: skip
    parser.add_argument("--table", action="store_true", help="write README.md's table")
    parser.add_argument(
        "--readme", type=Path, default=ROOT / "README.md", help="the file with the table's markers"
    )
    parser.add_argument(
        "--from", dest="source", type=Path, metavar="FILE", help="measure nothing, take this file"
    )
    return parser.parse_args(arguments)


def assignment(text: str) -> tuple[str, int]:
    """An argument type: ``NAME=VALUE`` with a whole number."""
    name, _, value = text.partition("=")
    if not name.isidentifier() or not value.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r}; expected NAME=VALUE with a whole number")
    return name, int(value)


def cases_of(settings: argparse.Namespace) -> list[tuple[Operator, str]]:
    """The operators to measure, with the label of the table that each belongs to."""
    cases = []
    for label in (SMALL, FULL) if settings.full else (SMALL,):
        for problem in settings.problems:
            batch = settings.batch or SMALL_BATCHES.get(problem, SMALL_BATCH)
            known = {parameter.name for parameter in dispatcher.load_problem(problem).sizes}
            sizes = {name: value for name, value in settings.set if name in known}
            cases.append((bind_case(problem, batch if label == SMALL else None, sizes), label))
    return cases


def run(settings: argparse.Namespace) -> dict[str, Any]:
    """Measure everything.

    Raises:
        SystemExit: see :func:`bench.measure.start`.
    """
    head = measure.header(PROGRAM, SCHEMA, DISTRIBUTIONS)
    devices, left_out, probe = measure.start(settings)
    contenders = [Contender(name, PEERS[name].label) for name in settings.peers]
    contenders += [Contender(device.id, measure.device_label(device), device.id) for device in devices]
    cases = []
    try:
        for operator, label in cases_of(settings):
            facts = {"label": label, **operator_dict(operator), "batch": operator.output_shape[0]}
            title = f"{operator.problem.name}, {label}"
            cases.append({**facts, **race(operator, title, contenders, probe, settings)})
    except KeyboardInterrupt:
        if not cases:
            raise
        say("interrupted: reporting the cases before")
    for case in cases:
        conclude(case, contenders, measure.threshold_gflops(settings.quiet_limit, probe.best))
    return {
        **head,
        "threads": measure.cores(),
        "precision": "float32",
        "repeats": settings.repeats,
        "probe": measure.probe_facts(probe, settings.quiet_limit),
        "devices": {device.id: {"name": device.name, **device.facts} for device in devices},
        "left_out": left_out,
        "contenders": [asdict(contender) for contender in contenders],
        "cases": cases,
    }


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
        report = run(settings)
        path = (settings.output or measure.RESULTS / f"{PROGRAM}-{report['date']}.json").resolve()
        measure.write_json(path, report)
        say(f"results: {path}")
    try:
        chart(report, path.with_suffix(".png"))
        say(f"chart: {path.with_suffix('.png')}")
    except ImportError as error:
        say(f"no chart: {measure.one_line(error)}")
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
