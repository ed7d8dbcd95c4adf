"""Finding problems: those that come with the package, files, and mappings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from dispatcher.errors import InputError, suggest
from dispatcher.problem.messages import show
from dispatcher.problem.model import Problem
from dispatcher.problem.schema import problem_from_mapping
from dispatcher.problem.yamlfile import read_yaml

#: A name, the path of a file, a mapping with the keys of a problem file, or a loaded problem.
ProblemLike = str | os.PathLike[str] | Mapping[str, Any] | Problem

_PROBLEM_FOLDER = Path(__file__).resolve().parent.parent / "problems"


@cache  # what comes with the package does not change
def _bundled_files() -> dict[str, Path]:
    return {path.stem: path for path in sorted(_PROBLEM_FOLDER.rglob("*.yaml"), key=lambda path: path.stem)}


def problem_names() -> tuple[str, ...]:
    """Names of the problems that come with the package, sorted."""
    return tuple(_bundled_files())


def _read_problem(path: Path) -> Problem:
    mapping, locate = read_yaml(path)
    return problem_from_mapping(mapping, path=path, locate=locate)


_bundled = cache(_read_problem)


def load_problem(problem: ProblemLike) -> Problem:
    """The problem that ``problem`` stands for.

    Args:
        problem: a problem (returned as it is), a mapping with the keys of a problem file, the name of a
            problem that comes with the package, or the path of a problem file: a text that has a path
            separator, ends in ``.yaml`` or ``.yml``, or is the name of an existing file.

    Raises:
        ProblemFileError: the file or the mapping does not follow the format.
        InputError: there is no problem of that name.
    """
    if isinstance(problem, Problem):
        return problem
    if isinstance(problem, Mapping):
        return problem_from_mapping(problem)
    if not isinstance(problem, str | os.PathLike):
        raise InputError(f"the problem is {show(problem)}; expected a name, the path of a file, a mapping or a Problem")
    text = os.fspath(problem)
    names = problem_names()
    if isinstance(problem, str) and problem in names:
        return _bundled(_bundled_files()[problem])
    looks_like_path = "/" in text or "\\" in text or text.lower().endswith((".yaml", ".yml"))
    if looks_like_path or isinstance(problem, os.PathLike) or os.path.isfile(text):
        return _read_problem(Path(text))
    beside = [f"{text}{suffix}" for suffix in (".yaml", ".yml") if os.path.isfile(f"{text}{suffix}")]
    raise InputError(
        f"there is no problem {show(text)}; expected one of the {len(names)} that `dispatcher problems` lists, or the "
        f"path of a problem file (.yaml){f'; did you mean {beside[0]!r}?' if beside else suggest(text, names)}"
    )
