"""Trying a device out in a child process before this process opens it.

A driver can abort the process that uses it, hang it, or compute nonsense, and none of that can be caught. So
before a device is first used, a child process compiles a small operator for it, runs it, compares the result
with the reference and takes the time, all within a time limit. What came of it is kept in the user's cache
folder, for each device, driver version, version of this package, and setting that the backend or a limit of this
process makes; but not what another day may mend, nor what this machine may have brought about.

The environment variable ``DISPATCHER_SELF_TEST`` switches this off (``off``), or sets the time limit in
seconds (60 without it).
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from dispatcher import registry
from dispatcher.device.childprocess import OWN_SIGNALS, no_python, run_child, sigchld_ignored
from dispatcher.device.filecache import FileCache
from dispatcher.errors import InputError
from dispatcher.interface import CALIBRATION, Device

VARIABLE = "DISPATCHER_SELF_TEST"
TIME_LIMIT_S = 60.0
#: What the child process does. It checks results, which nothing in this room does, and is named to it as text.
CHILD = "dispatcher.check.trial:child"

Outcome = Literal["ok", "wrong", "failed", "error", "closed", "unsupported", "crashed", "hung"]

#: Outcomes after which this process must not use the device.
BARRED = frozenset(("wrong", "failed", "closed", "crashed", "hung"))
#: Outcomes that are kept. The others may be mended without a new driver, and are harmless to find out again.
KEPT = frozenset(("ok", "unsupported", "crashed", "hung"))
#: A hang is not blamed on the device where its process waited for a core for this share of the time.
STARVED_SHARE = 0.5
#: Nor is a crash where less memory or disk space than this is left.
ROOM_BYTES = 256 << 20

_FORMAT = 3  # of a cache entry
#: Limits of this process that its children inherit.
_LIMITS = ("RLIMIT_AS", "RLIMIT_CPU", "RLIMIT_DATA", "RLIMIT_FSIZE", "RLIMIT_MEMLOCK", "RLIMIT_NOFILE", "RLIMIT_STACK")

_log = logging.getLogger(__name__)
_cache = FileCache("selftest")


@dataclass(frozen=True)
class SelfTest:
    """What came of trying a device, or of listing a backend's devices.

    Attributes:
        outcome: ``ok``; ``wrong`` result; ``failed`` to build or run the operator; ``closed``: the device cannot
            be opened; ``crashed`` or ``hung``: the child process was killed or had to be. ``error``: it could not
            be tried, and ``unsupported``: it was not, since it cannot run the test's operator or no child process
            can be started; these say nothing else about it.
        reason: one line; empty when ok.
        gflops: measured speed in GFLOP/s, the median of several readings, or None.
        spread: first and third quartile of these readings, or None.
        facts: of the device, from its backend's :meth:`~dispatcher.interface.Calibrated.calibrate`.
    """

    outcome: Outcome
    reason: str = ""
    gflops: float | None = None
    spread: Sequence[float] | None = None
    facts: Mapping[str, str | int | float] = field(default_factory=dict)


def time_limit_s() -> float | None:
    """The time that a self-test may take, or None when self-tests are switched off.

    Raises:
        InputError: the environment variable makes no sense.
    """
    text = os.environ.get(VARIABLE, "").strip().lower()
    if text in ("off", "0", "no", "false"):
        return None
    if text in ("", "on", "1", "yes", "true"):
        return TIME_LIMIT_S
    try:
        limit = float(text)
    except ValueError:
        limit = math.nan
    if not 0 < limit < math.inf:
        raise InputError(f"{VARIABLE} is {text!r}; expected on, off, or a time limit in seconds")
    return limit


def possible(module: str) -> bool:
    """Whether a child process can import the backend's module too.

    A package that the module is in is not imported.
    """
    try:
        return importlib.util.find_spec(module.partition(":")[0].partition(".")[0]) is not None
    except (ImportError, ValueError):
        return False


# ---- in this process ---------------------------------------------------------------------------------------
def try_device(device: Device, module: str, *, again: bool = False) -> SelfTest | None:
    """Test a device in a child process, or look up how that went before.

    Args:
        device: as its backend lists it.
        module: where the backend is, as in :data:`dispatcher.registry.BACKENDS`.
        again: test even if the outcome is known.

    Returns:
        The outcome; None where self-tests are switched off or the backend lives in this process only.
    """

    def key() -> str:
        # How much memory there is may change from day to day.
        facts = sorted((name, str(value)) for name, value in device.facts.items() if not name.endswith("_bytes"))
        footprint = getattr(registry.load(module), "footprint", str)()
        return _key("device", module, device.index, device.name, facts, footprint)

    arguments = (module, "device", str(device.index), device.name)
    return _known(key, arguments, f"{device.id} ({device.name})", again)


def try_listing(module: str, footprint: str, *, again: bool = False) -> SelfTest | None:
    """Find out in a child process whether looking for a backend's devices is safe.

    Args:
        module: where the backend is, as in :data:`dispatcher.registry.BACKENDS`.
        footprint: what the listing depends on; when it changes, the listing is tried again.
        again: try even if the outcome is known.
    """
    what = f"looking for devices of {module}"
    return _known(lambda: _key("listing", module, footprint), (module, "list"), what, again)


def _key(*parts: Any) -> str:
    from dispatcher import __version__

    limits = []
    with contextlib.suppress(ImportError):
        import resource  # POSIX only

        limits = [resource.getrlimit(getattr(resource, name))[0] for name in _LIMITS if hasattr(resource, name)]
    return json.dumps((_FORMAT, __version__, sys.prefix, limits, sigchld_ignored(), *parts))


def _known(key_of: Callable[[], str], arguments: Sequence[str], what: str, again: bool) -> SelfTest | None:
    """The outcome from the cache, or that of a child process."""
    limit_s = time_limit_s()
    if limit_s is not None and (refusal := no_python()):
        return SelfTest("unsupported", f"was left out: {refusal}")
    if limit_s is None or not possible(arguments[0]):
        return None
    key = key_of()
    found = None if again else _recall(key, limit_s)
    if found is not None:
        return found
    with _taking_turns(2 * limit_s):
        found = None if again else _recall(key, limit_s)  # another process may have done it meanwhile
        if found is not None:
            return found
        _log.info("%s: self-test in a child process, for %g s at most", what, limit_s)
        start = time.perf_counter()
        found, lasting = _run_child(arguments, limit_s)
        _log.info("%s: %s after %.1f s %s", what, found.outcome, time.perf_counter() - start, found.reason)
        if lasting and found.outcome in KEPT:
            _cache.put(key, json.dumps([limit_s, asdict(found)]).encode())
    return found


def _recall(key: str, limit_s: float) -> SelfTest | None:
    stored = _cache.get(key)
    if stored is None:
        return None
    try:
        kept_limit_s, fields = json.loads(stored)
        found = SelfTest(**fields)
        longer = found.outcome == "hung" and limit_s > kept_limit_s  # it may be done in that time
    except (TypeError, ValueError):
        return None
    return found if found.outcome in KEPT and not longer else None


@contextlib.contextmanager
def _taking_turns(patience_s: float) -> Iterator[None]:
    """Let one process test at a time: speeds can then be compared, and the others find the outcome cached.

    The lock goes away with the process that holds it. Without a folder to put it in, nobody waits.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, ImportError):
            import fcntl  # POSIX only

            _cache.folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(_cache.folder / "lock", "ab"))
            end = time.monotonic() + patience_s
            while time.monotonic() < end:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(0.05)
        yield


def _run_child(arguments: Sequence[str], limit_s: float) -> tuple[SelfTest, bool]:
    """Run :data:`CHILD` in a process of its own; the outcome, and whether it will be the same next time."""
    try:
        ended = run_child(CHILD, arguments, limit_s, {VARIABLE: "off"})
    except OSError as error:
        return SelfTest("error", f"could not be run: {error}"), False
    began = bool(ended.reports)  # before that, it is not the device that takes time or fails
    if len(ended.reports) == 3:  # a device that passed is not barred because it could not be measured
        how = ended.signal or ("took too long" if ended.code is None else f"exit code {ended.code}{ended.last_line}")
        return replace(SelfTest(**ended.reports[1]), facts={CALIBRATION: f"could not be measured: {how}"}), True
    if ended.code is None:
        lasting = began and ended.starved_s < STARVED_SHARE * limit_s
        return SelfTest("hung", f"hung: no answer within {limit_s:g} s"), lasting
    if ended.signal:
        lasting = ended.signal in OWN_SIGNALS and not _short_of_room()
        return SelfTest("crashed", f"crashed with {ended.signal}{ended.last_line}"), lasting
    if ended.code == 0 and len(ended.reports) > 1:
        return replace(SelfTest(**ended.reports[1]), facts=dict(*ended.reports[3:])), True
    if began and ended.code == 0:  # so it is with every crash where exit codes are lost
        hint = "; SIGCHLD is ignored, which drivers may not survive" if sigchld_ignored() else ""
        return SelfTest("crashed", f"ended without an answer{ended.last_line}{hint}"), False
    how = f"the process ended with exit code {ended.code}{ended.last_line}"
    return SelfTest("failed", f"failed: {how}") if began else SelfTest("error", f"could not be run: {how}"), False


def _short_of_room() -> bool:
    from dispatcher.device.machine import available_bytes

    room = [available_bytes()]
    with contextlib.suppress(OSError):
        room.append(shutil.disk_usage(tempfile.gettempdir()).free)
    return any(each is not None and each < ROOM_BYTES for each in room)


def apply(device: Device, found: SelfTest | None) -> Device:
    """``device`` with what its self-test found; unavailable when this process must not use it."""
    if found is None:
        return device
    facts: dict[str, str | int | float] = {**device.facts, **found.facts, "self_test": found.reason or found.outcome}
    if found.gflops is not None:
        facts["self_test_gflops"] = round(found.gflops, 3)
        if found.spread is not None:
            facts["self_test_spread_gflops"] = round(max(abs(found.gflops - end) for end in found.spread), 3)
    if found.outcome not in BARRED:
        return replace(device, facts=facts)
    advice = f"`dispatcher devices --retest` tries again, {VARIABLE}=off uses it untested"
    reason = f"its self-test {found.reason}; {advice}"
    return replace(device, available=False, reason=reason, facts=facts)


def speed(device: Device) -> float:
    """GFLOP/s that the device's self-test measured; 0 where there is no measure."""
    return float(device.facts.get("self_test_gflops", 0.0))


def fastest_first(devices: Sequence[Device]) -> list[Device]:
    """Devices of one kind by their measured speeds.

    Those whose speed is that of the fastest one within both spreads are equals: they keep their order, so that noise
    does not change which device is taken.
    """
    left, ranked = list(devices), []
    while left:
        best = max(left, key=speed)
        ranked.append(next(each for each in left if speed(best) - speed(each) <= _spread(best) + _spread(each)))
        left.remove(ranked[-1])
    return ranked


def _spread(device: Device) -> float:
    """GFLOP/s by which the device's readings differ from their median."""
    return float(device.facts.get("self_test_spread_gflops", 0.0))
