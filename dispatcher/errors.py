"""Every error that the dispatcher raises on purpose, and the exit code each one stands for.

Each class also derives from the built-in exception that a Python user would expect, so that
``except ValueError`` works as usual. Messages say what is wrong, what was got, what was expected
and what to do next, in one line.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar


class DispatcherError(Exception):
    """Base of all errors raised on purpose."""

    exit_code: ClassVar[int] = 2


class InputError(DispatcherError, ValueError):
    """A value given by the user is wrong: an argument, an option, a size, a file."""


class DtypeError(InputError, TypeError):
    """A tensor has a dtype that the operator does not take."""


class ProblemFileError(InputError):
    """A problem file, or a mapping that stands for one, does not follow the format; one line, whatever is in it."""

    def __init__(self, message: str) -> None:
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in message))


class GeometryError(InputError):
    """Sizes that are legal one by one do not make a legal operator together."""


class UnsupportedError(InputError, NotImplementedError):
    """What one library can do has no counterpart in the other: a module of PyTorch does what the vocabulary has no step
    for, say.

    Attributes:
        nodes: the nodes of its graph that have no counterpart, each with ``operator``, ``module``, ``place`` and
            ``reason``.
    """

    def __init__(self, message: str, nodes: Iterable[object] = ()) -> None:
        super().__init__(message)
        self.nodes = tuple(nodes)


class DeviceError(DispatcherError, RuntimeError):
    """A device does not exist, is not usable, or cannot run this operator."""

    exit_code: ClassVar[int] = 3


class BusyError(DeviceError):
    """Other programs keep the machine so busy that its times would mean nothing."""


class KernelError(DispatcherError, RuntimeError):
    """A kernel failed to build or to run on a device that was asked for."""

    exit_code: ClassVar[int] = 4


class BuildError(KernelError):
    """The device's compiler refused a kernel; the message holds the compiler's first line."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log


class DeviceMemoryError(KernelError, MemoryError):
    """An operator needs more memory than the device has or may allocate at once."""


class VerificationError(DispatcherError, AssertionError):
    """A result differs from the reference by more than its error bound."""

    exit_code: ClassVar[int] = 1


# ---- parts of messages -------------------------------------------------------------------------------------
def suggest(name: object, names: Iterable[str]) -> str:
    """``; did you mean ...?`` when one of ``names`` is close to ``name``, else nothing."""
    if not isinstance(name, str) or len(name) > 100:
        return ""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def one_of(name: object, names: Iterable[str]) -> str:
    """``expected one of ...``, and which of ``names`` may have been meant by ``name``."""
    known = list(names)
    return f"expected one of {', '.join(known)}{suggest(name, known)}"


def install(extra: str) -> str:
    """The command that installs what one of our extras brings."""
    return f"pip install 'kernel-dispatcher[{extra}]', or in a checkout: pip install '.[{extra}]'"


def first_line(error: BaseException) -> str:
    """The first line of an error's message; the name of its class where it has none."""
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__
