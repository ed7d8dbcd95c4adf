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
from dispatcher.arguments import bind_arguments, sort_arguments  # noqa: E402
from dispatcher.explanation import operator_dict  # noqa: E402
from dispatcher.inputs import random_tensors  # noqa: E402
from dispatcher.operator import Operator  # noqa: E402
from dispatcher.peers import PEER_SLACK, PEERS  # noqa: E402
from dispatcher.verification import bounded_reference, compare  # noqa: E402

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
#: Ours in one hue, the peers in muted ones that differ in lightness as well.
OUR_COLOURS = ("#c8401e", "#ef8a62", "#7f2a14")
PEER_COLOURS = ("#c9d3dc", "#9db4c5", "#6f93ad", "#4c7391", "#8c8c8c", "#4f4f4f")
MARKERS = "osD^vP"


def chart(report: Mapping[str, Any], path: Path) -> None:
    """Bars of the times and a roofline, one row for each label.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    labels = list(dict.fromkeys(case["label"] for case in report["cases"]))
    figure, axes = pyplot.subplots(
        len(labels),
        2,
        figsize=(17, 5.6 * len(labels)),
        squeeze=False,
        width_ratios=(1.7, 1),
        layout="constrained",
    )
    colours: dict[str, str] = {}
    for each in report["contenders"]:
        palette = PEER_COLOURS if each["device"] is None else OUR_COLOURS
        used = sum(1 for name in colours if colours[name] in palette)
        colours[each["name"]] = palette[used % len(palette)]
    for row, label in zip(axes, labels, strict=True):
        cases = [case for case in report["cases"] if case["label"] == label]
        _bars(row[0], report, cases, colours)
        _roofline(row[1], report, cases, colours)
        row[0].set_title(f"Time of a call, {label} (median, quartiles)", loc="left")
        row[1].set_title(f"Roofline, {label}", loc="left")
    machine = report["machine"]
    figure.suptitle(f"{machine['cpu']}, {machine['cores']} cores, float32, {report['date']}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def short(problem: str) -> str:
    """A problem's name without what all of them share."""
    return problem.replace("conv-transpose-3d-", "").replace("conv-transpose3d-", "")


def _bars(axis: Any, report: Mapping[str, Any], cases: Sequence[Any], colours: Mapping[str, str]) -> None:
    contenders = report["contenders"]
    width = 0.84 / len(contenders)
    for position, each in enumerate(contenders):
        places, heights, below, above = [], [], [], []
        for index, case in enumerate(cases):
            result = case["results"].get(each["name"])
            if result is None:
                continue
            places.append(index + (position - (len(contenders) - 1) / 2) * width)
            heights.append(1e3 * result["median_s"])
            below.append(1e3 * (result["median_s"] - result["low_s"]))
            above.append(1e3 * (result["high_s"] - result["median_s"]))
        if places:
            bars = axis.bar(
                places, heights, width * 0.94, yerr=(below, above), color=colours[each["name"]],
                label=each["label"], error_kw={"elinewidth": 0.8}, zorder=2,
            )  # fmt: skip
            axis.bar_label(
                bars,
                fmt=lambda ms: f"{ms:.3g}" if ms < 100 else f"{ms:.0f}",
                fontsize=6.5,
                padding=2,
                rotation=90,
            )
    axis.set_xticks(
        range(len(cases)), [short(case["problem"]).replace("-", "-\n", 2) for case in cases], fontsize=8
    )
    axis.set_yscale("log")
    axis.set_ylabel("milliseconds (log scale; lower is better)")
    bottom, top = axis.get_ylim()
    axis.set_ylim(bottom, top * 2.5)
    axis.grid(axis="y", which="major", color="#dddddd", zorder=0)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, ncols=4, loc="upper left", frameon=False)


def _roofline(axis: Any, report: Mapping[str, Any], cases: Sequence[Any], colours: Mapping[str, str]) -> None:
    peak, bandwidth = report["probe"]["peak_gflops"], report["probe"]["copy_gbytes_per_s"]
    intensities = [case["flops"] / case["ideal_bytes"] for case in cases]
    left, right = min([*intensities, peak / bandwidth]) / 2, max(intensities) * 2
    line = np.geomspace(left, right, 200)
    axis.plot(line, np.minimum(peak, bandwidth * line), color="#333333", linewidth=1.5, zorder=2)
    axis.annotate(f"{peak:.0f} GFLOP/s of multiply-adds", (right, peak), ha="right", va="bottom", fontsize=8)
    axis.annotate(
        f"{bandwidth:.0f} GB/s", (left, bandwidth * left), ha="left", va="bottom", fontsize=8,
        xytext=(4, 8), textcoords="offset points",
    )  # fmt: skip
    mine = [each for each in report["contenders"] if each["device"] is not None]
    for case, intensity, marker in zip(cases, intensities, MARKERS * len(cases), strict=False):
        best = case["best_peer"]
        if best is not None:
            axis.plot(
                intensity, case["results"][best]["gflops"], marker, color="white", markeredgecolor="#4c7391",
                markersize=8, zorder=3,
            )  # fmt: skip
        for each in mine:
            if each["name"] in case["results"]:
                rate = case["results"][each["name"]]["gflops"]
                axis.plot(intensity, rate, marker, color=colours[each["name"]], markersize=8, zorder=4)
        axis.plot([], [], marker, color="#777777", label=short(case["problem"]))
    for each in mine:
        axis.plot([], [], "s", color=colours[each["name"]], label=each["label"])
    axis.plot([], [], "s", color="white", markeredgecolor="#4c7391", label="best peer")
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("operations per byte (each input and output once)")
    axis.set_ylabel("GFLOP/s of the plain convolution; Winograd does fewer")
    axis.grid(which="major", color="#dddddd", zorder=0)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=7.5, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


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
