"""The process around one command: its output streams, its log, its signals, and how it ends.

Results go to stdout, everything else to stderr. Whatever is changed for a command (the streams, log handlers,
environment variables, what SIGTERM does) is as before when :func:`prepared` ends.
"""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from dispatcher.errors import DispatcherError, InputError, KernelError
from dispatcher.files import check_apart
from dispatcher.report.layout import duration, first_sentence

if TYPE_CHECKING:
    import numpy as np

INTERRUPTED = 130
CLOSED_PIPE = 141
TERMINATED = 143

#: What JSON calls an error of ours, by its exit code.
KINDS = {1: "verification", 2: "input", 3: "device", 4: "kernel"}

#: Where stderr is no terminal, nothing is said of what takes less time than this, and nothing before that time.
LONG_S, FIRST_WORD_S = 20.0, 10.0

#: Takes the fraction done of something.
Advance = Callable[[float], None]

_LOGGER = "dispatcher"


class ClosedPipeError(Exception):
    """Nobody reads stdout any more."""


class _Outlet(io.BufferedIOBase):
    """The bytes of stdout or stderr, whoever writes them: ourselves, the parser of the command line, the interpreter.

    After a failure they go nowhere, since whatever is left in a buffer is written once more when the interpreter ends.

    Args:
        target: where they go.
        failed: told the first failure; it may raise an error in its place.
    """

    def __init__(self, target: BinaryIO, failed: Callable[[OSError], None]) -> None:
        self._target, self._failed = target, failed

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._target.isatty()

    def fileno(self) -> int:
        return self._target.fileno()

    def write(self, data: Any) -> int:
        if len(data) > 0:  # nothing is written to find out whether a stream takes bytes, and errors then count as a no
            self._attempt(lambda: self._target.write(data))
        return len(data)

    def flush(self) -> None:
        self._attempt(self._target.flush)

    def _attempt(self, what: Callable[[], Any]) -> None:
        try:
            what()
        except OSError as error:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            self._failed(error)


def _unwritten(error: OSError) -> None:
    """What a failure of stdout means to a command."""
    if isinstance(error, BrokenPipeError):
        raise ClosedPipeError from None
    raise InputError(f"stdout cannot be written: {one_line(error)}") from error


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
        for stream, redirect, failed in (
            (sys.stdout, redirect_stdout, _unwritten),
            (sys.stderr, redirect_stderr, lambda error: None),  # there is nobody left to tell
        ):
            target = getattr(stream, "buffer", None)
            if target is not None:  # else somebody took its place with what takes text alone
                stream.flush()
                # What the encoding does not have is escaped: that the work was done counts for more.
                outlet: Any = _Outlet(target, failed)
                ours = io.TextIOWrapper(outlet, stream.encoding, "backslashreplace", write_through=True)
                undo.callback(ours.detach)
                undo.enter_context(redirect(ours))
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
    print(text, flush=True)


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
            text = f"{label} is passed over: {first_sentence(reason)}"
            _command.told.add(text)
            note(text)


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    text = next(iter(str(message).strip().splitlines()), type(message).__name__)
    _command.told.add(text)
    print(f"warning: {text}", file=sys.stderr)


@contextmanager
def progress(what: str, steps: int = 2, items: str = "") -> Iterator[Advance]:
    """Progress on stderr for what takes a while; gives a function that takes the fraction done.

    With ``items``, a number and what it counts, such as ``300 items``, it tells how many a second are done.

    That is a bar in a terminal, if there is more than one step. Elsewhere it is a line once it can be told that this
    will take long, and one whenever as much time has passed again.
    """
    start = time.monotonic()
    total, _, unit = items.partition(" ")

    def rate(done: float) -> str:
        spent_s = time.monotonic() - start
        return f", {done * int(total) / max(spent_s, 1e-9):.4g} {unit}/s" if items else ""

    if not sys.stderr.isatty():
        next_s = FIRST_WORD_S

        def tell(done: float) -> None:
            nonlocal next_s
            spent_s = time.monotonic() - start
            left_s = spent_s / done - spent_s if done > 0 else 0.0
            if spent_s >= next_s and spent_s + left_s >= LONG_S:
                next_s = 2 * spent_s
                note(f"{what}: {100 * done:.0f} % done{rate(done)}, about {duration(left_s)} to go")

        yield tell
        return
    if steps < 2:
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import Progress

    # No thread that redraws: it would disturb what is being timed.
    with Progress(console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
        task = bar.add_task(what, total=1.0)
        bar.refresh()
        yield lambda done: bar.update(task, completed=done, description=what + rate(done), refresh=True)


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
        return CLOSED_PIPE
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
            return code
        except InputError as unwritten:
            complain(one_line(unwritten))
    return code


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
def output_path(option: str, text: str, read: Iterable[str] = (), suffix: str = "") -> Path:
    """The file that an option names, which will be written to.

    Args:
        option: its name.
        text: what it says.
        read: the files that the command reads.
        suffix: how its name has to end.

    Raises:
        InputError: it cannot be written there, is one of those, or ends otherwise.
    """
    check_apart(option, text, read)
    path = Path(os.path.realpath(text))
    if not path.parent.is_dir():
        raise InputError(f"{option} {text!r}: the folder {str(path.parent)!r} does not exist; make it first")
    if path.exists() and not path.is_file():
        raise InputError(f"{option} {text!r} is not a regular file; name a new one or one to replace")
    if not text or not os.access(path.parent, os.W_OK):
        raise InputError(f"{option} {text!r}: the folder {str(path.parent)!r} cannot be written to")
    if not text.endswith(suffix):
        raise InputError(f"{option} is {text!r}; expected a path that ends in {suffix}")
    return path


def picture_path(text: str | None, read: Iterable[str] | None) -> Path | None:
    """The file that --plot names, where it is given; ``read`` are the files that the command reads.

    Raises:
        InputError: no picture can be drawn there.
    """
    if text is None:
        return None
    from dispatcher.timing.charts import require_matplotlib

    require_matplotlib(text)
    output_path("--plot", text, read or ())
    return Path(text).absolute()


def draw(found: Sequence[Any], path: Path | None) -> None:
    """Draw results of one kind to the file that --plot named, where it did."""
    if path is not None and found:
        from dispatcher.report import pictures

        pictures.draw(found, path)


def write_array(path: Path, array: np.ndarray) -> None:
    """Write a .npy file that is there complete or not at all.

    Raises:
        InputError: it cannot be written; a file that was there before is left as it was.
    """
    import numpy as np

    _write(path, lambda file: np.save(file, array, allow_pickle=False))


def write_content(path: Path, content: str | bytes) -> None:
    """Write a text or bytes, likewise."""
    _write(path, lambda file: file.write(content.encode() if isinstance(content, str) else content))


def _write(path: Path, write: Callable[[BinaryIO], object]) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        raise InputError(f"--output {str(path)!r} cannot be written: {one_line(error)}") from error
    finally:
        partial.unlink(missing_ok=True)
