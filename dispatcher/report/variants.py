"""What an option makes of a command: ``verify --kernel``, ``tune --list`` and ``--forget``, ``bench --compare``."""

from __future__ import annotations

from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

import typer

from dispatcher.errors import InputError
from dispatcher.report import streams, words
from dispatcher.report.streams import answer, complain, note_skipped, progress


def given_options(context: typer.Context, beside: Container[str]) -> list[str]:
    """The options and arguments that the command line gives, as it calls them, beside some by parameter name."""
    found = []
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is not None and source.name == "COMMANDLINE" and parameter.name not in beside:
            names = [*parameter.opts[:1], *parameter.secondary_opts[:1]]
            is_option = parameter.param_type_name == "option"
            found.append("/".join(names) if is_option else str(parameter.name).upper())
    return found


def judge(
    problem: str,
    kernel: str,
    case: str | None,
    settings: Sequence[str] | None,
    given: dict[str, Any],
    as_json: bool,
    picture: Path | None,
    **more: Any,
) -> None:
    """Verify a user's own kernel, on a device or on all that can run it, and say how it went."""
    from dispatcher.check.judging import verify_kernel
    from dispatcher.device.childprocess import LONGEST_S
    from dispatcher.problem import commandline
    from dispatcher.problem.arguments import parse_assignments
    from dispatcher.problem.loader import load_problem

    loaded = load_problem(problem)
    more.update(parse_assignments(loaded, settings or [], "--set"))
    if "timeout" in given:
        more["timeout_s"] = commandline.seconds_above_zero("--timeout", given.pop("timeout"), LONGEST_S)
    if "repeat" in given:
        more["repeats"] = commandline.whole_number("--repeat", given.pop("repeat"), 1)
    chosen = case or commandline.default_case(loaded)
    with progress(f"judging {kernel}") as advance:
        judgements = verify_kernel(loaded, kernel, case=chosen, progress=advance, **given, **more)
    codes = [judgement.exit_code for judgement in judgements if judgement.exit_code]
    streams.draw(judgements, picture)
    if as_json:
        for judgement in judgements:
            note_skipped(judgement.skipped)
        answer("verify", {"passed": not codes, "results": [each.as_dict() for each in judgements]})
    for number, judgement in enumerate(judgements):
        if not as_json:
            words.say_judgement(judgement, apart=number > 0)
        if not judgement.passed:
            complain(f"{kernel} on {judgement.device.id}: {judgement.outcome}: {judgement.reason}")
    raise typer.Exit(min(codes, default=0))


def list_kept(names: Sequence[str], forget: bool, others: Sequence[str], as_json: bool) -> None:
    """List what ``tune`` has kept, or remove it; ``others`` are the options that make no sense beside that."""
    from dispatcher.problem.loader import load_problem
    from dispatcher.timing import winners

    if others:
        raise InputError(f"--{'forget' if forget else 'list'} measures nothing; leave {others[0]} out")
    known = {tuned.about.get("problem") for tuned in winners.everything().values()}
    # What was kept of a problem file that is gone can be named still.
    problems = [name if name in known else load_problem(name).name for name in names]
    found = winners.forget(problems) if forget else list(winners.everything(problems).values())
    if as_json:
        answer("tune", {"forgotten" if forget else "kept": [tuned.as_dict() for tuned in found]})
    else:
        words.say_kept(found, forget)


def compare_benchmarks(old: str, new: str, others: Sequence[str], as_json: bool) -> None:
    """Compare two results of ``bench --json``; ``others`` are the options that make no sense beside that."""
    from dispatcher.timing.differences import compare_results

    if others:
        raise InputError(f"--compare measures nothing, so {others[0]} says nothing; give one of them")
    found = compare_results(old, new)
    if as_json:
        answer("bench", {"comparison": found.as_dict()})
    else:
        words.say_differences(found)
    if not found.differences:
        raise InputError(f"--compare: {old!r} and {new!r} have nothing in common that can be compared")
