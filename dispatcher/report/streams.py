"""The process around one command: its output streams, its log, its signals, and how it ends.

Results go to stdout, everything else to stderr. Whatever is changed for a command (log handlers, environment
variables, what SIGTERM does) is as before when :func:`prepared` ends.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dispatcher.errors import DispatcherError, InputError, KernelError

if TYPE_CHECKING:
    import numpy as np

INTERRUPTED = 130
CLOSED_PIPE = 141
TERMINATED = 143

#: What JSON calls an error of ours, by its exit code.
KINDS = {1: "verification", 2: "input", 3: "device", 4: "kernel"}

#: Takes the fraction done of something.
Advance = Callable[[float], None]

_LOGGER = "dispatcher"


class ClosedPipeError(Exception):
    """Nobody reads stdout any more."""


class Terminated(BaseException):
    """SIGTERM has come; nothing catches it before the command's end but what cleans up."""


@dataclass
class _Command:
    """What has to be known of the command that runs now.

    Attributes:
        as_json: --json is on its command line.
        debug: --debug is.
        answered: its JSON document was printed, or at least begun.
        told: what stderr has been told of devices that were passed over, so that it is told once.
        undo: takes back what was changed for it.
    """

    as_json: bool = False
    debug: bool = False
    answered: bool = False
    told: set[str] = field(default_factory=set)
    undo: ExitStack = field(default_factory=ExitStack)


_command = _Command()


# ---- before and after a command ----------------------------------------------------------------------------
@contextmanager
def prepared(arguments: Sequence[str]) -> Iterator[None]:
    """Get ready for the command that ``arguments`` make up, and take back afterwards what was changed for it."""
    global _command  # noqa: PLW0603 (one command runs at a time)
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    with ExitStack() as undo:
        _command = _Command(as_json="--json" in options, undo=undo)
        if sys.stderr is None:  # what goes there goes nowhere; without that, print() would take stdout
            undo.enter_context(redirect_stderr(undo.enter_context(open(os.devnull, "w", encoding="utf-8"))))
        undo.enter_context(warnings.catch_warnings())
        warnings.showwarning = _show_warning
        yield


def raise_when_terminated() -> None:
    """Turn SIGTERM into an exception, so that temporary files and child processes do not outlive this one."""

    def terminate(number: int, frame: Any) -> None:
        raise Terminated

    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        _command.undo.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, terminate))


def log_to_stderr(level: int) -> None:
    """Show our own log on stderr until the command ends; at the level of debugging, tracebacks too."""
    _command.debug = _command.debug or level == logging.DEBUG
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    logger = logging.getLogger(_LOGGER)
    _command.undo.callback(logger.setLevel, logger.level)
    _command.undo.callback(logger.removeHandler, handler)
    logger.addHandler(handler)
    logger.setLevel(level)


def change_environment(name: str, value: str) -> None:
    """Set an environment variable until the command ends."""
    before = os.environ.get(name)
    if before is None:
        _command.undo.callback(os.environ.pop, name, None)
    else:
        _command.undo.callback(os.environ.update, {name: before})
    os.environ[name] = value


# ---- stdout ------------------------------------------------------------------------------------------------
def say(text: str) -> None:
    """Write a line to stdout.

    Raises:
        ClosedPipeError: nobody reads it.
        InputError: it cannot be written, for instance because a disk is full.
    """
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise ClosedPipeError from None
    except OSError as error:
        raise InputError(f"stdout cannot be written: {one_line(error)}") from error


def answer(command: str | None, content: dict[str, Any]) -> None:
    """Print the JSON document of a command."""
    from dispatcher.report.documents import as_text

    _command.answered = True
    say(as_text(command, content))


# ---- stderr ------------------------------------------------------------------------------------------------
def complain(message: str) -> None:
    """Say on stderr what went wrong."""
    print(f"error: {message}", file=sys.stderr)


def note(message: str) -> None:
    """Say on stderr what is worth knowing beside the result."""
    print(f"note: {message}", file=sys.stderr)


def note_skipped(skipped: Sequence[tuple[str, str]]) -> None:
    """Say once on stderr what was passed over, where a warning has not said so."""
    for label, reason in skipped:
        if not any(text.startswith((f"{label} (", f"{label} is passed over")) for text in _command.told):
            text = f"{label} is passed over: {reason}"
            _command.told.add(text)
            note(text)


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    text = next(iter(str(message).strip().splitlines()), type(message).__name__)
    _command.told.add(text)
    print(f"warning: {text}", file=sys.stderr)


@contextmanager
def progress(what: str, steps: int = 2) -> Iterator[Advance]:
    """A progress bar on stderr for what takes a while; gives a function that takes the fraction done.

    Nothing is drawn where stderr is not a terminal or there is only one step.
    """
    if steps < 2 or sys.stderr is None or not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import Progress

    # No thread that redraws: it would disturb what is being timed.
    with Progress(console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
        task = bar.add_task(what, total=1.0)
        bar.refresh()
        yield lambda done: bar.update(task, completed=done, refresh=True)


def one_line(error: BaseException) -> str:
    """The message of an error of any origin, in one line."""
    return "; ".join(line.strip() for line in str(error).splitlines() if line.strip()) or type(error).__name__


# ---- how a command fails -----------------------------------------------------------------------------------
def fail(error: BaseException, command: str | None) -> int:
    """Say how a command failed: one line on stderr, and with --json a document, unless there is one already.

    Args:
        error: what ended it.
        command: its name, as far as known.

    Returns:
        The exit code.
    """
    if isinstance(error, ClosedPipeError):
        return _leave_pipe()
    kind, message, code = _failure(error, command)
    if _command.debug and isinstance(error, Exception):
        traceback.print_exception(error)
        log = getattr(error, "log", "")
        if log:
            print(log, file=sys.stderr)
    complain(message)
    if _command.as_json and not _command.answered and sys.stdout is not None:
        try:
            answer(command, {"error": {"kind": kind, "message": message, "exit_code": code}})
        except ClosedPipeError:
            _leave_pipe()
        except InputError as unwritten:
            complain(one_line(unwritten))
    return code


def _leave_pipe() -> int:
    """The interpreter flushes stdout once more when it ends; let it do that into nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return CLOSED_PIPE


def _failure(error: BaseException, command: str | None) -> tuple[str, str, int]:
    """What JSON calls an error, its message, and the exit code."""
    if isinstance(error, DispatcherError):
        return KINDS[error.exit_code], one_line(error), error.exit_code
    if isinstance(error, Terminated):
        return "terminated", "terminated", TERMINATED
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", "interrupted", INTERRUPTED
    if isinstance(error, MemoryError):
        text = f"the host has not enough memory: {one_line(error)}; take smaller sizes, with --set"
        return "memory", text, KernelError.exit_code
    format_message = getattr(error, "format_message", None)
    if format_message is not None:  # typer's own errors about usage have it
        # An error in an option without its value does not know its command.
        path = getattr(getattr(error, "ctx", None), "command_path", f"dispatcher {command or ''}".strip())
        return "usage", f"{' '.join(format_message().split())} (see {path} --help)", InputError.exit_code
    hint = "" if _command.debug else " (run again with --debug for the traceback)"
    text = f"unexpected {type(error).__name__}: {one_line(error)}{hint}"
    return "unexpected", text, KernelError.exit_code


# ---- files -------------------------------------------------------------------------------------------------
def output_path(option: str, text: str) -> Path:
    """The file that an option names, which will be written to.

    Raises:
        InputError: it cannot be written there.
    """
    path = Path(os.path.realpath(text))
    if not path.parent.is_dir():
        raise InputError(f"{option} {text!r}: the folder {str(path.parent)!r} does not exist; make it first")
    if path.exists() and not path.is_file():
        raise InputError(f"{option} {text!r} is not a regular file; name a new one or one to replace")
    if not text or not os.access(path.parent, os.W_OK):
        raise InputError(f"{option} {text!r}: the folder {str(path.parent)!r} cannot be written to")
    return path


def write_array(path: Path, array: np.ndarray) -> None:
    """Write a .npy file that is there complete or not at all.

    Raises:
        InputError: it cannot be written; a file that was there before is left as it was.
    """
    import numpy as np

    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "xb") as file:
            np.save(file, array, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        raise InputError(f"--output {str(path)!r} cannot be written: {one_line(error)}") from error
    finally:
        partial.unlink(missing_ok=True)
