"""What each command says to people, in words and tables."""

from __future__ import annotations

import statistics
from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dispatcher.report.layout import (
    assignments,
    count,
    entry,
    first_sentence,
    listing,
    optional,
    options_text,
    seconds,
    share,
    table,
)
from dispatcher.report.streams import complain, note, say

if TYPE_CHECKING:
    from pathlib import Path

    from dispatcher.call.explanation import ConvolutionPlan, Explanation
    from dispatcher.check.comparison import Comparison
    from dispatcher.check.judging import Judgement
    from dispatcher.check.once import TimedRun
    from dispatcher.check.verifying import Verification
    from dispatcher.device.diagnosis import Diagnosis
    from dispatcher.errors import DispatcherError
    from dispatcher.interface import Device, PlannedLaunch
    from dispatcher.problem.model import Problem
    from dispatcher.problem.operator import Operator
    from dispatcher.scale.mapping import Mapped
    from dispatcher.timing.differences import BenchComparison
    from dispatcher.timing.results import Race
    from dispatcher.timing.tuning import TuneResult
    from dispatcher.timing.winners import Tuned


# ---- devices -----------------------------------------------------------------------------------------------
def say_devices(found: Sequence[Device], auto: str | None) -> None:
    """Every device, or why it cannot be used, and what ``auto`` picks."""
    rows = [
        (device.id, device.kind, "yes", _tested_as(device), device.name)
        if device.available
        else (device.backend if device.name == device.backend else device.id, *("", "no", "", device.reason or ""))
        for device in found
    ]
    say(table(("DEVICE", "KIND", "USABLE", "SELF-TEST", "NAME, OR WHY NOT"), rows))
    say(f"auto picks {auto}" if auto else "auto finds no usable device")


def _tested_as(device: Device) -> str:
    """What a usable device's self-test found, in few words."""
    speed = device.facts.get("self_test_gflops")
    return f"{speed:.3g} GFLOP/s" if isinstance(speed, float) else str(device.facts.get("self_test", ""))


def say_diagnosis(diagnosis: Diagnosis) -> None:
    """What was looked for and found, and the remedies."""
    width = max(len(each.topic) for each in diagnosis.findings)
    say(f"VERDICT  {'ABOUT':<{width}}  FOUND")
    for each in diagnosis.findings:  # paths are too long for a table's column
        say(listing(f"{each.verdict:<7}  {each.topic:<{width}}  ", [f"{each.subject}: {each.detail}"]))
    remedies = [each for each in diagnosis.findings if each.verdict != "ok" and each.remedy]
    if remedies:
        say("\nwhat would fix or undo that:")
        for each in remedies:
            say(listing("  ", [f"{each.subject}: {each.remedy}"]))
    names = ", ".join(device.id for device in diagnosis.working)
    say("\n" + listing("", [f"accelerated devices that work: {names or 'none'}"]))


# ---- problems ----------------------------------------------------------------------------------------------
def say_problems(found: Sequence[Problem]) -> None:
    """Names, titles and cases, group by group; of cases that are the same, the first."""
    for group in sorted({problem.group for problem in found}):
        rows = [(each.name, each.title, ", ".join(_cases(each))) for each in found if each.group == group]
        say(f"{group}:")
        say(table(("PROBLEM", "TITLE", "CASES"), rows))
        say("")


def _cases(problem: Problem) -> list[str]:
    """The names of cases, in quotes where they have spaces; of those that are the same, the first."""
    names = {tuple(values.items()): name for name, values in reversed(list(problem.cases.items()))}
    return [f'"{name}"' if " " in name else name for name in reversed(list(names.values()))]


def say_problem(described: dict[str, Any]) -> None:
    """A problem, from its document."""
    say(f"{described['name']}\n{listing('', [described['title']])}")
    for key in ("origin", "note"):
        if described[key]:
            say(listing("", [f"{key}: {described[key]}"]))
    say("")
    rows = [
        (
            parameter["name"],
            parameter["type"] + ("" if parameter["input"] or parameter["type"] != "tensor" else " (result)"),
            "" if parameter["shape"] is None else f"({', '.join(map(str, parameter['shape']))})",
            "" if parameter["default"] is None else str(parameter["default"]),
        )
        for parameter in described["parameters"]
    ]
    say(table(("PARAMETER", "TYPE", "SHAPE", "DEFAULT"), rows))
    short = [f"{name} ({', '.join(names)})" for name, names in described["shorthands"].items()]
    if short:
        say("\n" + listing("shorthands: ", short))
    say("\npipeline:")
    for position, step in enumerate(described["pipeline"], start=1):
        fields = ", ".join(f"{name}={_plain(value)}" for name, value in step["fields"].items())
        source = f" of {step['source']}" if step["source"] else ""
        result = f" -> {step['result']}" if step["result"] else ""
        say(listing(f"  {position}. ", [f"{step['op']}({fields}){source}{result}"]))
    say("\ncases:")
    for name, values in described["cases"].items():
        say(listing(f"  {name}: ", assignments(values)))


def _plain(value: Any) -> str:
    if not isinstance(value, list):
        return str(value)
    return str(value[0]) if len(set(value)) == 1 else f"({', '.join(map(str, value))})"


# ---- one operator on one device ----------------------------------------------------------------------------
def _say_head(operator: Operator, device: Device, skipped: Sequence[tuple[str, str]]) -> None:
    say(entry("problem", f"{operator.problem.name} ({operator.dtype}, {operator.precision})"))
    say(entry("device", f"{device.id} ({device.name})"))
    if operator.precision != "fp32" and device.kind == "reference":
        why = f"{operator.precision} is not used: NumPy computes in float64, which {operator.precision} allows"
        say(entry("precision", f"{why}; --device cuda insists on it"))
    for label, reason in skipped:
        say(entry("skipped", f"{label}: {first_sentence(reason)}"))
    *others, last = [f"{name} {shape}" for name, shape in operator.tensor_shapes.items()]
    say(entry("shapes", *others, f"{last} -> {operator.problem.output.name} {operator.output_shape}"))


def say_run(run: TimedRun, comparison: Comparison | None, read: Container[str], more: Mapping[str, Any]) -> None:
    """How a run went.

    Args:
        read: names of tensors that were given; the others were made up.
        more: ``seed``, ``inputs_s``, and ``output``, the file that the result is in.
    """
    _say_head(run.operator, run.choice.device, run.choice.skipped)
    made = [name for name in run.tensors if name not in read]
    given = [name for name in run.tensors if name in read]
    made_up = [f"{', '.join(made)} made up from seed {more['seed']}"] if made else []
    from_files = [f"{', '.join(given)} read from {'files' if len(given) > 1 else 'a file'}"] if given else []
    say(entry("inputs", *made_up, *from_files, f"in {seconds(more['inputs_s'])}"))
    then = [] if run.median_s is None else [f"then {seconds(run.median_s)} (median of {len(run.warm_s)})"]
    say(entry("time", f"compile {seconds(run.compile_s)}", f"first call {seconds(run.first_s)}", *then))
    if run.gflops is not None:
        say(entry("speed", f"{run.gflops:.4g} GFLOP/s"))
    if comparison is None:
        say(entry("verified", "no: left out"))
    elif run.operator.empty:
        say(entry("verified", "no: the result is empty"))
    else:
        verdict = "yes" if comparison.passed else "NO"
        itself = ", though NumPy is the reference itself" if run.choice.device.kind == "reference" else ""
        say(entry("verified", f"{verdict}{itself}: {_errors(comparison)}"))
    if more["output"] is not None:
        say(entry("output", more["output"]))


def say_mapped(mapped: Mapped, output: Path) -> None:
    """How an array in a file was worked on."""
    operator = mapped.plan.operator
    say(entry("problem", f"{operator.problem.name} ({operator.dtype}, {operator.precision})"))
    before = [f"{mapped.kept} were there"] if mapped.kept else []
    say(entry("items", f"{mapped.items} in chunks of {mapped.chunk}", *before))
    say(entry("time", seconds(mapped.time_s), f"{mapped.items / max(mapped.time_s, 1e-9):.4g} items/s"))
    say(entry("output", f"{output}, {' x '.join(map(str, operator.output_shape))}"))


def say_judgement(judgement: Judgement, apart: bool) -> None:
    """How a user's own kernel did; ``apart`` from what was said before."""
    if apart:
        say("")
    kernel = judgement.kernel
    _say_head(judgement.operator, judgement.device, judgement.skipped)
    launched = [
        f"{what} {' x '.join(map(str, sizes))}"
        for what, sizes in (("global size", kernel.global_size), ("local size", kernel.local_size))
        if sizes is not None
    ]
    say(f"kernel    {', '.join([f'{kernel.entry} in {kernel.file}', *launched])}")
    for check in judgement.checks:
        verdict = "right" if check.passed else "WRONG"
        say(entry("inputs", f"{check.inputs}, {check.launch} launch: {verdict}, {_errors(check.comparison)}"))
    for clock, times in (("device's", judgement.kernel_s), ("host's", judgement.times_s)):
        if times:
            spread = f"(median of {len(times)}, at least {seconds(min(times))})"
            say(entry("time", f"{seconds(statistics.median(times))} on the {clock} clock {spread}"))
    if judgement.gflops is not None:
        say(entry("speed", f"{judgement.gflops:.4g} GFLOP/s"))
    if judgement.log:
        say(judgement.log)
    say(entry("verdict", judgement.outcome))


def _errors(found: Comparison | None) -> str:
    over, largest, normwise = ("", "", "") if found is None else _figures(found)
    return f"error at most {over} of its bound, {largest} absolute, {normwise} normwise"


def _figures(found: Comparison) -> tuple[str, str, str]:
    """Error over bound, largest error, normwise error."""
    return f"{found.max_error_over_bound:.3g}", f"{found.max_abs_error:.3g}", f"{found.normwise:.3g}"


# ---- plans -------------------------------------------------------------------------------------------------
def say_explanation(explanation: Explanation) -> None:
    """What a call would do."""
    operator = explanation.operator
    _say_head(operator, explanation.device, explanation.skipped)
    work = f"{count(operator.flops)}FLOP", f"{count(operator.ideal_bytes)}B at least to move"
    say(entry("work", *work))
    for plan in explanation.convolutions:
        _say_convolution(plan)
    say("\nlaunches:" if explanation.launches else "\nlaunches:\n  none: the batch is empty")
    for number, launch in enumerate(explanation.launches, start=1):
        _say_launch(number, launch)


def _say_convolution(plan: ConvolutionPlan) -> None:
    shapes = f"{plan.input_shape} * {plan.weight_shape} -> {plan.output_shape}"
    say("\n" + listing("convolution ", [shapes]))
    rows = [tuple(map(str, vars(axis).values())) for axis in plan.axes]
    headers = ("AXIS", "INPUT", "KERNEL", "STRIDE", "PADDING", "OUTPUT PADDING", "DILATION", "OUTPUT")
    say(table(headers, rows))
    say("\n" + listing("", [f"as matrix products, one for each phase{' and group' if plan.groups > 1 else ''}:"]))
    rank = len(plan.axes)
    rows = [
        (str(group.phases), " ".join(map(str, group.taps[3 - rank :])),
         *map(str, (group.gemm_m, group.gemm_n, group.gemm_k)))
        for group in plan.phase_groups
    ]  # fmt: skip
    say(table(("PHASES", f"TAPS {'D H W'[6 - 2 * rank :]}", "GEMM M", "GEMM N", "GEMM K"), rows))


#: Reasons of implementations that are for other kinds of steps; the JSON document has them too.
_OTHER_KIND = ("a convolution", "not a convolution", "not a reduction")


def _say_launch(number: int, launch: PlannedLaunch) -> None:
    """A launch and, beneath, what is known of it; a detail that is a sentence has a line of its own."""
    say(f"  {number}. {launch.name}")
    sentences = {name: str(value) for name, value in launch.detail.items() if " " in str(value)}
    figures = {name: value for name, value in launch.detail.items() if name not in sentences}
    for label, items in (
        ("steps", launch.steps),
        ("algorithm", [launch.algorithm]),
        *((name, [sentence]) for name, sentence in sentences.items()),
        ("detail", assignments(figures)),
        ("note", [launch.note]),
    ):
        if any(items):
            say(listing(f"     {label:<10} ", items))
    rejected = [(name, reason) for name, reason in launch.rejected if reason not in _OTHER_KIND]
    for place, (name, reason) in enumerate(rejected):
        say(listing(f"     {'' if place else 'rejected':<10} ", [f"{name}: {reason}"]))


# ---- verification ------------------------------------------------------------------------------------------
def say_verification(results: Sequence[Verification]) -> None:
    """The outcomes, where each worst check is worst, and the largest error over its bound for each set of inputs.

    Args:
        results: the worst one first.
    """
    from dispatcher.check.inputs import INPUT_SETS

    outcomes, places = [], []
    for result in results:
        found = result.comparison
        over, largest, normwise = ("", "", "") if found is None else _figures(found)
        norm_over = "" if found is None else f"{found.normwise_over_bound:.3g}"
        name, device, checks = result.problem, result.device.id, str(len(result.checks))
        outcomes.append((name, result.case or "", device, result.outcome, checks, over, norm_over, largest))
        at = ("", "", "")
        if found is not None and found.worst_index is not None:
            index = ",".join(map(str, found.worst_index))
            at = (index, f"{found.worst_value:.9g}", f"{found.worst_reference:.9g}")
        places.append((name, device, result.inputs, str(result.seed), normwise, *at))
    headers = ("PROBLEM", "CASE", "DEVICE", "OUTCOME", "CHECKS", "ERROR/BOUND", "NORM/BOUND", "MAX ERROR")
    say(table(headers, outcomes))
    headers = ("THE WORST CHECK", "DEVICE", "INPUTS", "SEED", "NORMWISE", "WORST AT", "RESULT", "REFERENCE")
    names = [result.problem for result in results]
    places.sort(key=lambda row: names.index(row[0]))
    say("\n" + table(headers, places, stacked=True))
    sets = [name for name in INPUT_SETS if any(name == c.inputs for r in results for c in r.checks)]
    if len(sets) > 1:
        cells = [(result.problem, result.device.id, *result.worst_of(sets)) for result in results]
        cells.sort(key=lambda row: names.index(row[0]))
        say("\n" + table(("LARGER OF BOTH RATIOS", "DEVICE", *sets), cells, stacked=True))
    right = sum(check.outcome == "passed" for result in results for check in result.checks)
    say(f"\n{right} of {sum(len(result.checks) for result in results)} checks passed")


def complain_of_verification(results: Sequence[Verification], everywhere: bool) -> None:
    """Say on stderr what has not passed; results are the worst first, ``everywhere`` those of all devices."""
    from dispatcher.check.verifying import only_reference

    for result in results:
        if not result.passed:
            complain(f"{result.problem} on {result.device.id}: {result.reason}")
    if everywhere and only_reference(results):
        complain(
            "nothing was compared with the reference: no device but NumPy can run, and NumPy is the reference; "
            "see dispatcher doctor, or check NumPy alone with --device numpy"
        )


# ---- times -------------------------------------------------------------------------------------------------
def say_tuned(results: Sequence[TuneResult]) -> None:
    """The winners, and all candidates."""
    rows = []
    for result in results:
        best = options_text(result.best)
        times = seconds(result.best_s), seconds(result.default_s)
        kept = "yes" if result.kept else "no"
        rows.append((result.problem, result.device, best, result.clock, *times, f"{result.gain:.2f}", kept))
    say(table(("PROBLEM", "DEVICE", "BEST OPTIONS", "CLOCK", "MEDIAN", "DEFAULT", "GAIN", "KEPT"), rows))
    for result in results:
        say(
            "\n"
            + listing("", [f"candidates for {result.problem} on {result.device}{result.note and '; '}{result.note}:"])
        )
        cells = [
            (
                *(options_text(each.options), "" if each.time_s is None else seconds(each.time_s)),
                *(" to ".join(map(seconds, each.quartiles_s or ())), each.reason),
            )
            for each in result.candidates
        ]
        say(table(("OPTIONS", "MEDIAN", "QUARTILES", "OUT SINCE"), cells))


def say_kept(found: Sequence[Tuned], forgotten: bool) -> None:
    """What ``tune`` keeps, or kept until now."""
    if not found:
        say("nothing is kept")
        return
    headers = ("PROBLEM", "DEVICE", "DTYPE", "PRECISION", "OPTIONS", "GAIN", "KEPT AT")
    names = ("problem", "device", "dtype", "precision")
    rows = [
        (
            *(str(tuned.about.get(name, "unknown")) for name in names),
            *(options_text(tuned.options), f"{tuned.gain:.2f}", str(tuned.about.get("kept_at", "unknown"))),
        )
        for tuned in found
    ]
    say(table(headers, rows))
    if forgotten:
        say(f"\n{len(found)} forgotten")


def note_left_out(results: Sequence[TuneResult]) -> None:
    """Say on stderr which candidates were not timed, and why."""
    for result in results:
        for each in result.candidates:
            if each.time_s is None:
                options = " ".join(assignments(each.options))
                note(f"{result.problem} with {options} was left out: {each.reason}")


def say_races(races: Sequence[Race]) -> None:
    """Times, where they go, and ratios."""
    measured = [(each.operator.problem.name, each) for race in races for each in (*race.results, *race.peers)]
    if not measured:
        return
    times, rates, parts = [], [], []
    for name, each in measured:
        kernel = each.warm.kernel
        times.append(
            (
                *(name, each.name, "no" if each.comparison is None else "yes", seconds(each.median_s)),
                *(" to ".join(map(seconds, each.quartiles_s)), seconds(each.cold.wall.median_s)),
            )
        )
        rates.append(
            (
                *(name, each.name, seconds(each.warm.wall.min_s), "" if kernel is None else seconds(kernel.median_s)),
                *(optional(each.gflops), optional(each.ideal_gbytes_per_s)),
                share(getattr(each, "roofline_share", None)),
            )
        )
        where = [
            "" if part is None else seconds(part.median_s) for part in (each.warm.upload, kernel, each.warm.download)
        ]
        if each.shared_memory:  # nothing is uploaded or downloaded
            where = ["shared" if cell and at != 1 else cell for at, cell in enumerate(where)]
        spent = seconds(each.compile_s), seconds(each.first_s)
        parts.append((name, each.name, *spent, *where, each.clock or each.clock_note))
    say(table(("PROBLEM", "DEVICE", "VERIFIED", "MEDIAN", "QUARTILES", "COLD"), times))
    say("")
    say(table(("PROBLEM", "DEVICE", "MIN", "KERNEL", "GFLOP/S", "GB/S", "ROOFLINE"), rates))
    say("\nwhere the time goes:")
    headers = ("PROBLEM", "DEVICE", "COMPILE", "FIRST CALL", "UPLOAD", "KERNEL", "DOWNLOAD", "CLOCK")
    say(table(headers, parts))
    ratios = [
        (result.operator.problem.name, result.name, peer, f"{found.value:.2f}", f"{found.low:.2f} to {found.high:.2f}")
        for race in races
        for result in race.results
        for peer, found in result.ratios.items()
    ]  # fmt: skip
    if ratios:
        what = "how many times as long others take (warm medians, with what the quartiles make of them):"
        say("\n" + listing("", [what]))
        say(table(("PROBLEM", "DEVICE", "PEER", "RATIO", "SPREAD"), ratios))
    roofs = {each.name: each.roofline for race in races for each in race.results if each.roofline}
    if roofs:
        say("")
    for name, roof in roofs.items():
        best = f"{roof.gflops:.4g} GFLOP/s ({roof.dtype}), {roof.gbytes_per_s:.4g} GB/s"
        say(listing("", [f"roofline of {name}: {best}, measured"]))


def complain_of_race(problem: str, race: Race) -> list[DispatcherError]:
    """Say on stderr what was wrong with a race; gives the errors of our devices."""
    from dispatcher.device.machine import busy_reason

    load = race.foreign_cores
    if busy_reason(load) is not None:
        note(f"other programs kept {load:.2g} cores busy while {problem} was timed; trust no figure of it")
    for failure in race.failures:
        # What a peer cannot do is no failure of ours.
        (note if failure.error is None else complain)(f"{problem} on {failure.name}: {failure.reason}")
    return [failure.error for failure in race.failures if failure.error is not None]


def say_differences(found: BenchComparison) -> None:
    """What differs between two results of ``bench --json``."""
    from dispatcher.timing.differences import TEST

    if found.differences:
        rows = [
            (
                *(each.problem, each.where, each.what, seconds(each.old_s), seconds(each.new_s)),
                *(f"{each.ratio:.3f}", f"{each.low:.3f} to {each.high:.3f}", each.verdict),
            )
            for each in found.differences
        ]
        headers = ("PROBLEM", "WHERE", "TIME", "FIRST", "SECOND", "RATIO", "INTERVAL", "SECOND IS")
        say(table(headers, rows))
        say("\n" + listing("", [TEST]))
    for title, lines in (
        ("not compared", [f"{what}: {reason}" for what, reason in found.left_out]),
        ("changed in between", found.changes),
    ):
        if lines:
            say(f"\n{title}:")
            for line in lines:
                say(listing("  ", [line]))
