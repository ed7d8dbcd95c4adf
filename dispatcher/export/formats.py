"""The formats that a problem can be exported in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dispatcher.errors import InputError, one_of
from dispatcher.export import cuda, kernelbench, opencl
from dispatcher.export.request import make_request
from dispatcher.interface import ExportRequest
from dispatcher.problem.messages import brief
from dispatcher.problem.model import Problem


@dataclass(frozen=True)
class Format:
    """A way to write programs.

    Attributes:
        write: makes the texts of the files, from what is exported and the path of the first of them.
        suffix: of that path.
        general: it runs other sizes than those of the cases too.
    """

    write: Callable[[ExportRequest, Path], Mapping[Path, str | bytes]]
    suffix: str
    general: bool = True


FORMATS = {
    "tensara": Format(cuda.tensara, ".cu"),
    "kernelbench": Format(kernelbench.write, ".py"),
    "cuda": Format(cuda.c_api, ".cu"),
    "opencl": Format(opencl.write, ".json", general=False),
}


def export(
    problem: Problem,
    to: str,
    target: Path,
    *,
    cases: Sequence[str] = (),
    dtype: str | None = None,
    precision: str = "fp32",
    device_class: str = "",
) -> Mapping[Path, str | bytes]:
    """A problem as a program that runs without this package.

    Args:
        problem: what it computes.
        to: one of :data:`FORMATS`.
        target: path of its first file; others lie beside it.
        cases: named cases that get the kernels that we would run; the published one if there is none.
        dtype: of every tensor; float32 if None.
        precision: ``fp32`` or ``tf32``.
        device_class: what kernels are chosen for; empty for the format's usual one.

    Returns:
        The content of each file; nothing is written.

    Raises:
        InputError: an argument is wrong.
    """
    if to not in FORMATS:
        raise InputError(f"--to is {brief(to)}; {one_of(to, FORMATS)}")
    form = FORMATS[to]
    if target.suffix != form.suffix:
        raise InputError(f"--output is {brief(str(target))}; a file for {to} ends in {form.suffix}")
    request = make_request(problem, cases, dtype, precision, device_class, general=form.general)
    return form.write(request, target)
