"""What a command line says, as values: numbers, ``NAME=VALUE`` texts, problems with their cases, tensors in files."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dispatcher.errors import InputError, first_line, one_of
from dispatcher.ops.vocabulary import VOCABULARY, near_operation
from dispatcher.problem.arguments import bind_numbers, parse_assignments
from dispatcher.problem.loader import load_problem, problem_names
from dispatcher.problem.messages import brief, show
from dispatcher.problem.model import Problem
from dispatcher.problem.operator import DTYPES, PRECISIONS, Operator


def whole_number(option: str, text: str, least: int, most: int | None = None) -> int:
    """The whole number that an option gives.

    Raises:
        InputError: it is not one, or out of range.
    """
    bounds = f"of {least} or more" if most is None else f"from {least} to {most}"
    try:
        number = int(text) if text.isascii() and "_" not in text else None
    except ValueError:
        number = None
    if number is None or number < least or (most is not None and number > most):
        raise InputError(f"{option} is {brief(text)}; expected a whole number {bounds}")
    return number


def seconds_above_zero(option: str, text: str, most: float = sys.float_info.max) -> float:
    """The seconds that an option gives.

    Raises:
        InputError: it is not a number above 0, or above ``most``.
    """
    try:
        seconds = float(text) if text.isascii() and "_" not in text else 0.0
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds <= most:
        bound = "" if most == sys.float_info.max else f" and up to {most:.0f}"
        raise InputError(f"{option} is {brief(text)}; expected a number of seconds above 0{bound}")
    return seconds


def check_choices(dtype: str | None, precision: str) -> None:
    """Check that --dtype and --precision have values that exist.

    Raises:
        InputError: one has not.
    """
    for option, value, allowed in (("--dtype", dtype, DTYPES), ("--precision", precision, PRECISIONS)):
        if value is not None and value not in allowed:
            raise InputError(f"{option} is {brief(value)}; {one_of(value, allowed)}")


def tuning_options(algorithm: str | None, given: Sequence[str] | None) -> dict[str, str]:
    """Tuning options from ``--algorithm`` and ``--option``.

    Raises:
        InputError: an assignment is not one, or names what another one names.
    """
    options = {} if algorithm is None else {"algorithm": algorithm}
    for text in given or ():
        name, sign, value = text.partition("=")
        if not sign or not name or not value:
            raise InputError(f"--option is {brief(text)}; expected NAME=VALUE, such as box=2x8")
        if name in options:
            raise InputError(f"--option {text} and {name}={options[name]} are both given; keep one")
        options[name] = value
    return options


def default_case(problem: Problem) -> str | None:
    """``sample``, where the problem has it."""
    return "sample" if "sample" in problem.cases else None


def bind_problems(
    verb: str,
    names: Sequence[str] | None,
    settings: Sequence[str] | None,
    case: str | None,
    dtype: str | None,
    precision: str,
) -> list[tuple[Operator, str | None]]:
    """The problems named, each once, or all, bound to what the options say, each with its case.

    Args:
        verb: what is done with them, for messages.
        names: names or paths of problems.
        settings: the texts of ``--set``.
        case: the case; for each problem its default one if None.
        dtype: of every tensor; float32 if None.
        precision: ``fp32`` or ``tf32``.

    Raises:
        InputError: something is wrong, there is nothing to do, or two problems have the same name.
    """
    check_choices(dtype, precision)
    result: dict[str, tuple[Operator, str | None]] = {}
    for problem in [load_problem(name) for name in names or problem_names()]:
        if problem.name in result:
            other = result[problem.name][0].problem
            if other != problem:
                raise InputError(
                    f"{other.path} and {problem.path} are different problems of one name, {problem.name}; name one"
                )
            continue
        chosen, arguments = case or default_case(problem), parse_assignments(problem, settings or [], "--set")
        operator = bind_numbers(problem, arguments, verb, case=chosen, dtype=dtype, precision=precision)
        result[problem.name] = (operator, chosen)
    return list(result.values())


def find_problems(word: str, rank: int | None, op: str | None, level: int | None) -> list[Problem]:
    """The bundled problems that fit.

    Args:
        word: a part of the name, the title, the origin or the note, in any case.
        rank: spatial axes.
        op: a step that the pipeline has; of several that differ in their rank alone, the name without it is any.
        level: of KernelBench.

    Raises:
        InputError: there is no such step.
    """
    if op is not None and op not in VOCABULARY:
        raise InputError(f"--op is {show(op)}; expected the name of a step{near_operation(op)}")

    def fits(problem: Problem) -> bool:
        text = " ".join((problem.name, problem.title, problem.origin, problem.note)).lower()
        steps = {name for step in problem.pipeline for name in (step.op, re.sub(r"[123]d$", "", step.op))}
        return (
            word.lower() in text
            and rank in (None, problem.rank)
            and (op is None or op in steps)
            and (level is None or f"KernelBench level {level} " in problem.origin)
        )

    return [problem for problem in map(load_problem, problem_names()) if fits(problem)]


def kernelbench_levels() -> list[int]:
    """The levels of KernelBench that bundled problems are of."""
    origins = "".join(load_problem(name).origin for name in problem_names())
    return sorted(set(map(int, re.findall(r"KernelBench level (\d+) ", origins))))


def read_tensors(problem: Problem, assignments: Sequence[str]) -> dict[str, np.ndarray]:
    """The arrays of ``NAME=FILE.npy`` texts, mapped into memory rather than read.

    Raises:
        InputError: a text is not understood, a name is not a tensor, or a file is not a .npy file.
    """
    names = [tensor.name for tensor in problem.tensors]
    result: dict[str, np.ndarray] = {}
    for assignment in assignments:
        name, equals, path = assignment.partition("=")
        if not equals or not path:
            raise InputError(f"--tensor {brief(assignment)} is not understood; expected NAME=FILE.npy")
        if name not in names:
            raise InputError(f"--tensor {name}: {problem.name} has no such tensor; {one_of(name, names)}")
        if name in result:
            raise InputError(f"--tensor {name} is given twice; give it once")
        result[name] = read_array(f"--tensor {name}: {path!r}", path)
    return result


def read_array(what: str, path: str | Path) -> np.ndarray:
    """The array of a .npy file, mapped into memory; ``what`` is the file in messages.

    Raises:
        InputError: there is none, or it is no such file.
    """
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        reason = error.strerror or first_line(error)
        raise InputError(f"{what} cannot be read: {reason}; expected a .npy file, as numpy.save makes it") from error
    except (ValueError, EOFError) as error:  # NumPy's words advise to load it unsafely
        objects = Path(path).read_bytes()[:6] == np.lib.format.MAGIC_PREFIX and "objects" in str(error)
        found = "holds Python objects" if objects else "is not a .npy file, or a damaged one"
        raise InputError(f"{what} {found}; expected what numpy.save makes of an array of numbers") from error
    if not isinstance(array, np.ndarray):
        raise InputError(f"{what} holds several arrays (.npz); expected a .npy file with one")
    return array
