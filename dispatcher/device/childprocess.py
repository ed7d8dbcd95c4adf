"""Running a function in a process of its own, within a time limit.

What such a function runs may abort the process, hang it, or print whatever it likes. So it reports by a pipe that
nothing else writes to, and of what it prints the end is kept. It does not outlive its parent, whatever ends that:
signals that can be handled unwind the parent first, and of the others the child's end of a pipe tells.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import math
import os
import queue
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from subprocess import Popen

#: Takes a value that JSON can hold; given to a child's function as its first argument.
Report = Callable[[Any], None]

#: Bytes kept of what a child prints.
KEPT_BYTES = 1 << 16

#: Signals that what a child ran can bring upon it; others come from outside and say nothing about that.
OWN_SIGNALS = frozenset(("SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV", "SIGSYS", "SIGTRAP"))

#: The longest time limit that the system's clocks and alarms are sure to take: a week.
LONGEST_S = 7 * 24 * 3600.0

#: Signals that ask a process to end, besides SIGINT, which Python turns into an exception itself.
_ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
#: A child that could not see its parent go ends itself this long after its limit.
_GRACE_S = 10
#: How long to wait for the end of a pipe that something the child started holds open.
_PATIENCE_S = 1.0
#: Run with this package's own folder at the front of sys.path.
_START = (
    "import dispatcher; del sys.path[0]; from dispatcher.device import childprocess; "
    "childprocess._child(float(sys.argv[1]), sys.argv[2], *childprocess.json.loads(sys.argv[3]))"
)


@dataclass(frozen=True)
class Ended:
    """How a child ended.

    Attributes:
        code: its exit code; None when it was ended for being too slow.
        signal: name of the signal that killed it, such as ``SIGSEGV``; empty when none did, or when it was too slow.
        reports: what its function reported, in order.
        printed: the end of what it printed, to stdout or stderr.
        starved_s: seconds for which its most delayed thread waited for a core, where it was too slow.
    """

    code: int | None
    signal: str
    reports: tuple[Any, ...]
    printed: str
    starved_s: float = 0.0

    @property
    def last_line(self) -> str:
        """The last line it printed, to go after a message: ``: line``, or nothing."""
        lines = [line.strip() for line in self.printed.splitlines() if any(map(str.isalnum, line))]
        return f": {lines[-1][:200]}" if lines else ""


class _TerminatedError(BaseException):
    """A signal asks this process to end."""


@contextlib.contextmanager
def unwound_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the body, as SIGINT does, before they end this process.

    Signals that are ignored, or that somebody handles, stay as they are; so do all outside of the main thread.
    """
    caught: list[int] = []
    inside = True

    def unwind(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        if inside and len(caught) == 1:  # a second one must not keep the first from clearing up
            raise _TerminatedError

    main = threading.current_thread() is threading.main_thread()
    unhandled = [number for number in _ENDING if main and signal.getsignal(number) is signal.SIG_DFL]
    try:
        for number in unhandled:
            signal.signal(number, unwind)
        yield
    finally:
        inside = False
        for number in unhandled:
            signal.signal(number, signal.SIG_DFL)
        if caught:
            os.kill(os.getpid(), caught[0])


def run_child(
    function: str,
    arguments: Sequence[str],
    limit_s: float,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Ended:
    """Run ``function(report, *arguments)`` in a process of its own.

    The process leads a group of its own, which is ended with it: when it is done, when the time is over, and when
    this process is interrupted, asked to end, or killed.

    Args:
        function: ``module:name``.
        arguments: texts.
        limit_s: seconds that the process may take; of more than :data:`LONGEST_S`, these.
        environment: variables besides those of this process.
        folder: removed where this process is killed, so that it cannot do that itself.

    Raises:
        OSError: no process could be started.
    """
    import subprocess

    if refusal := no_python():
        raise OSError(refusal)
    limit_s = min(limit_s, LONGEST_S)
    starved_s = 0.0
    with unwound_by_signals():
        # Before sys.path is set nothing may be imported: the child's own begins with the current folder.
        start = f"import sys; sys.path[:] = {_paths()!a}; {_START}"
        given = json.dumps([list(arguments), None if folder is None else str(folder)])
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined] # as multiprocessing does
        process = subprocess.Popen(
            [sys.executable, *flags, "-c", start, str(limit_s), function, given],
            stdin=subprocess.PIPE,  # nothing is written: its end tells of ours
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **(environment or {})},
            start_new_session=True,  # so that whatever it starts can be ended with it
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        reported, printed = _Reader(process.stdout), _Reader(process.stderr, KEPT_BYTES)
        # Popen.wait() may keep its lock when a signal's exception interrupts it; threads other than the main one get
        # none. The end is told twice: for the time limit, and for the clearing up, which an interruption may bring on.
        ends: queue.SimpleQueue[int] = queue.SimpleQueue()

        def tell_end() -> None:
            for code in [process.wait()] * 2:
                ends.put(code)

        threading.Thread(target=tell_end, daemon=True).start()
        code: int | None = None
        try:
            code = ends.get(timeout=limit_s)
        except queue.Empty:
            starved_s = _starved_s(process.pid)
        finally:
            _end(process)
            ends.get()
            process.stdin.close()
    lines = reported.text().splitlines()
    reports = tuple(json.loads(line) for line in lines)
    return Ended(code, _signal_name(code), reports, printed.text(), starved_s)


def sigchld_ignored() -> bool:
    """Whether nobody can wait for a child's end here: exit codes are lost, and some compilers fail."""
    return hasattr(signal, "SIGCHLD") and signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN


def no_python() -> str:
    """Why this process cannot start another Python; empty where it can."""
    if getattr(sys, "frozen", False):
        return "this application is frozen, and to start its executable would start it again"
    return "" if sys.executable else "this Python is embedded, and its executable is not known"


def _paths() -> list[str]:
    """The folder of this package, and ``sys.path`` for a process that may leave the current folder.

    The current folder comes last: what lies in it must not stand in for modules that are installed.
    """
    paths = [path for path in sys.path if isinstance(path, str)]
    with contextlib.suppress(OSError):  # it may be gone
        here = os.getcwd()
        paths = [os.path.abspath(path) if os.path.exists(path or os.curdir) else path for path in paths]
        paths.sort(key=here.__eq__)
    return [str(Path(__file__).absolute().parents[2]), *filter(None, paths)]


def _starved_s(pid: int) -> float:
    """Seconds for which the most delayed thread of a process waited for a core; 0 where the system does not tell."""
    delays = [0.0]
    with contextlib.suppress(OSError, ValueError, IndexError):  # another system than Linux
        for thread in Path(f"/proc/{pid}/task").iterdir():
            delays.append(int((thread / "schedstat").read_text().split()[1]) / 1e9)
    return max(delays)


class _Reader:
    """Reads a pipe in a thread, so that it never fills up, and keeps all of it or its end."""

    def __init__(self, pipe: IO[bytes], keep: int | None = None) -> None:
        self._pipe, self._keep, self._content = pipe, keep, bytearray()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with self._pipe:
            while part := os.read(self._pipe.fileno(), KEPT_BYTES):
                self._content += part
                if self._keep is not None:
                    del self._content[: -self._keep]

    def text(self) -> str:
        """What was read until the pipe's end; without the rest of a line that was cut off by the child's end."""
        self._thread.join(_PATIENCE_S)
        content = bytes(self._content).decode(errors="replace")
        return content if self._keep is not None else content[: content.rfind("\n") + 1]


def _end(process: Popen[bytes]) -> None:
    """End a child that may have ended already, and whatever it has started."""
    if hasattr(os, "killpg"):  # POSIX only, as is the fork below
        with contextlib.suppress(OSError):  # there is nobody left
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()


def _signal_name(code: int | None) -> str:
    if code is None or code >= 0:
        return ""
    return signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"


def _child(limit_s: float, function: str, arguments: Sequence[str], folder: str | None) -> None:
    """What the child process does."""
    if hasattr(signal, "alarm"):
        signal.alarm(math.ceil(limit_s) + _GRACE_S)
    lifeline, nothing = os.dup(0), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    threading.Thread(target=_outlived, args=(lifeline, folder), daemon=True).start()
    # Whatever else is printed, by C code too, goes to stderr.
    pipe = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def report(value: Any) -> None:
        print(json.dumps(value), file=pipe, flush=True)

    logging.getLogger("dispatcher").setLevel(logging.ERROR)  # the parent finds out itself what is worth a warning
    module, name = function.split(":")
    getattr(importlib.import_module(module), name)(report, *arguments)


def _outlived(lifeline: int, folder: str | None) -> None:
    """Wait for the end of a pipe that the parent holds, then end this process and all that it has started.

    Another process does that, out of their group: a folder can only be removed when nobody writes to it any more.
    """
    while os.read(lifeline, 1):
        pass
    group = os.getpid()
    if not hasattr(os, "fork"):
        os._exit(1)
    if os.fork() == 0:
        os.setpgid(0, 0)
        os.killpg(group, signal.SIGKILL)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)
