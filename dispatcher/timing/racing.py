"""Timing problems on devices, and beside other libraries: verify first, then sample in turns.

docs/benchmarking.md says how, and why.
"""

from __future__ import annotations

import logging
import math
import random
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np

from dispatcher import __version__, registry
from dispatcher.call.compiled import PreparedCall
from dispatcher.check.comparison import Comparison, poisoned, verify_results
from dispatcher.check.inputs import check_seed, random_tensors
from dispatcher.check.verifying import call_on, checksums, comparison_dict
from dispatcher.device import machine
from dispatcher.device.joining import JoinedDevice, backend_of
from dispatcher.device.selection import describe, first_usable, parse_request, skipped_list
from dispatcher.errors import (
    BusyError,
    DeviceError,
    DispatcherError,
    InputError,
    KernelError,
    VerificationError,
)
from dispatcher.interface import Device, Measurable, Roofline, Timings, device_dict
from dispatcher.problem.arguments import bind_numbers, check_options
from dispatcher.problem.loader import ProblemLike, load_problem
from dispatcher.problem.operator import Operator, operator_dict
from dispatcher.timing.peers import DISTRIBUTIONS, PEER_SLACK, PEERS, PeerCall, Unsupported, parse_peers
from dispatcher.timing.sampling import Ratio, Times, host_caches, rate, ratio, seconds_since

_log = logging.getLogger(__name__)

#: Rounds that are made at least and at most, where the caller does not say how many.
LEAST_ROUNDS, MOST_ROUNDS = 5, 30
#: Sampling ends when the median's notch is narrower than this share of the median, for every contender.
SETTLED = 0.03
#: Seconds for each contender after which no further round begins, once there were a few, where the caller says neither
#: how many rounds nor how much time.
TIME_LIMIT_S, LEAST_ROUNDS_OF_LONG_CALLS = 5.0, 3
#: Seconds in which thread pools that spin after their work go to sleep, before another contender's turn.
SETTLE_S = 0.06
#: Results that wait to be verified together are kept up to this many bytes.
PENDING_BYTES = 1 << 30
#: A device's clock may run this much faster than the host's before it counts as wrong.
CLOCK_SLACK = 1.1

State = Literal["cold", "warm"]
STATES: tuple[State, ...] = ("cold", "warm")
Progress = Callable[[float], None]


# ---- what comes out ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Condition:
    """The times of calls that all found the caches in one state.

    Attributes:
        wall: whole calls, from arrays in host memory to the result in host memory, on ``time.perf_counter``.
        kernel: from the start of the first launch to the end of the last one, on the clock that
            :attr:`Measured.clock` names, in further calls, since measuring them may slow a call down; None where
            it is not known, as for ``upload`` and ``download``.
        upload: copying the inputs to the device.
        download: copying the result back.
    """

    wall: Times
    kernel: Times | None = None
    upload: Times | None = None
    download: Times | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain lists, dicts and numbers, ready for JSON."""
        parts = {
            "wall": self.wall, "upload": self.upload, "kernel": self.kernel, "download": self.download,
        }  # fmt: skip
        return {name: None if times is None else times.as_dict() for name, times in parts.items()}


@dataclass(frozen=True)
class Measured:
    """How long one operator takes one contender: a device of ours, or another library.

    Attributes:
        operator: what was computed.
        name: a device's id, or a peer's name.
        comparison: the worst check of all results, the first one's and those that differed from it; None when
            checks were left out.
        compile_s: seconds to compile.
        first_s: seconds of the first call after that, which may build, pack and allocate more.
        warm: calls that follow another one at once.
        cold: calls after which nothing of theirs is left in the caches.
        clock: that of the kernel times: ``device``, ``host``, ``unknown``, or empty where there are none.
        clock_note: why kernel times were thrown away; empty where they were not.
        shared_memory: the device works in the host's memory: nothing is uploaded or downloaded.
    """

    operator: Operator
    name: str
    comparison: Comparison | None
    compile_s: float
    first_s: float
    warm: Condition
    cold: Condition
    clock: str
    clock_note: str
    shared_memory: bool

    def __repr__(self) -> str:
        """Who took how long; everything else is in :meth:`as_dict`."""
        checked = "not checked" if self.comparison is None else "checked"
        return (
            f"<{type(self).__name__} {self.operator.problem.name} on {self.name}: median {self.median_s:.3g} s of "
            f"{len(self.times_s)} warm calls, {checked}>"
        )

    @property
    def times_s(self) -> tuple[float, ...]:
        """Seconds of each warm call on the host's clock."""
        return self.warm.wall.seconds

    @property
    def kernel_s(self) -> tuple[float, ...]:
        """Seconds of the launches of warm calls; empty where they are not known."""
        return () if self.warm.kernel is None else self.warm.kernel.seconds

    @property
    def median_s(self) -> float:
        """Median of ``times_s``."""
        return self.warm.wall.median_s

    @property
    def quartiles_s(self) -> tuple[float, float]:
        """First and third quartile of ``times_s``."""
        return self.warm.wall.quartiles_s

    @property
    def gflops(self) -> float | None:
        """Floating-point operations of the convolutions in 1e9 a second, at the warm median; None without any."""
        return rate(self.operator.flops, self.median_s)

    @property
    def ideal_gbytes_per_s(self) -> float | None:
        """Ideal bytes (each input and output once) in 1e9 a second, at the warm median."""
        return rate(self.operator.ideal_bytes, self.median_s)

    def as_dict(self) -> dict[str, Any]:
        """Plain lists, dicts, texts and numbers, ready for JSON."""
        return {
            "name": self.name,
            "verified": None if self.comparison is None else self.comparison.passed,
            "comparison": comparison_dict(self.comparison),
            "clock": "time.perf_counter",
            "kernel_clock": self.clock or None,
            "clock_note": self.clock_note or None,
            "shared_memory": self.shared_memory,
            "compile_s": self.compile_s,
            "first_s": self.first_s,
            "times_s": list(self.times_s),
            "median_s": self.median_s,
            "quartiles_s": list(self.quartiles_s),
            "min_s": self.warm.wall.min_s,
            "kernel_median_s": None if self.warm.kernel is None else self.warm.kernel.median_s,
            "gflops": self.gflops,
            "ideal_gbytes_per_s": self.ideal_gbytes_per_s,
            "warm": self.warm.as_dict(),
            "cold": self.cold.as_dict(),
        }


@dataclass(frozen=True, repr=False)
class PeerBenchmark(Measured):
    """How long it takes another library.

    Attributes:
        place: ``cpu``, or the CUDA device it ran on.
    """

    place: str = "cpu"

    def as_dict(self) -> dict[str, Any]:
        """See :meth:`Measured.as_dict`."""
        return {**operator_dict(self.operator), "peer": self.name, "place": self.place, **super().as_dict()}


@dataclass(frozen=True, repr=False)
class Benchmark(Measured):
    """How long one problem takes on one device.

    Attributes:
        device: where.
        skipped: (device or backend, reason) of each device that was preferred and passed over.
        seed: seed of the input tensors.
        roofline: what the device was measured to do at best; None where its backend does not measure that.
        peers: the other libraries that ran in turns with it, on the same kind of device.
        left_out: (peer, reason) of each other library that could not.
    """

    device: Device = field(kw_only=True)
    skipped: tuple[tuple[str, str], ...] = ()
    seed: int = 0
    roofline: Roofline | None = None
    peers: tuple[PeerBenchmark, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()

    @property
    def roofline_share(self) -> float | None:
        """The shortest time that the roofline allows over the cold median of the launches.

        It allows the longer one of all operations at the peak and all ideal bytes at the copying rate. Winograd
        and tensor cores can be above 1. Where the launches' time is not known, that of the whole call counts.
        """
        if self.roofline is None:
            return None
        best_s = max(
            self.operator.flops / (1e9 * self.roofline.gflops),
            self.operator.ideal_bytes / (1e9 * self.roofline.gbytes_per_s),
        )
        taken = self.cold.kernel or self.cold.wall
        return best_s / taken.median_s

    @property
    def ratios(self) -> dict[str, Ratio]:
        """For each peer, how many times as long its warm calls take."""
        return {peer.name: ratio(peer.warm.wall, self.warm.wall) for peer in self.peers}

    def as_dict(self) -> dict[str, Any]:
        """See :meth:`Measured.as_dict`."""
        return {
            **operator_dict(self.operator),
            "device": device_dict(self.device),
            "skipped": skipped_list(self.skipped),
            "seed": self.seed,
            **super().as_dict(),
            "roofline": None if self.roofline is None else asdict(self.roofline),
            "roofline_share": self.roofline_share,
            "ratios": {name: asdict(found) for name, found in self.ratios.items()},
            "left_out": [{"peer": name, "reason": reason} for name, reason in self.left_out],
        }


@dataclass(frozen=True)
class Failure:
    """Why a contender has no times.

    Attributes:
        name: the device that was asked for, or the peer.
        reason: one line.
        error: what was raised on one of our devices; None for a peer.
    """

    name: str
    reason: str
    error: DispatcherError | None = None


@dataclass(frozen=True)
class Race:
    """Contenders that took turns on one operator.

    Attributes:
        results: our devices that were measured.
        peers: the other libraries that were measured.
        failures: why the others were not.
        rounds: turns that each contender had.
        settled: whether sampling ended since every median was known well enough, or as many rounds were made as
            the caller asked for; False where time or rounds ran out first.
        foreign_cores: cores that other programs kept busy meanwhile; None where the system does not tell.
    """

    results: tuple[Benchmark, ...]
    peers: tuple[PeerBenchmark, ...]
    failures: tuple[Failure, ...]
    rounds: int
    settled: bool
    foreign_cores: float | None

    def __repr__(self) -> str:
        names = [each.name for each in (*self.results, *self.peers)]
        out = [failure.name for failure in self.failures]
        failed = f"; failed: {', '.join(out)}" if out else ""
        return f"<Race of {', '.join(names) or 'nobody'}, {self.rounds} rounds{failed}>"


def protocol() -> dict[str, Any]:
    """How everything here is measured, for result files."""
    caches = host_caches()
    return {
        "clock": "time.perf_counter",
        "clock_resolution_s": time.get_clock_info("perf_counter").resolution,
        "warm": "the same call came right before",
        "cold": f"{caches.nbytes} bytes of other memory were read and written on all cores right before; on a "
        "device with memory of its own, its cache was overwritten too",
        "order": "a round gives each contender one turn, in random order; a turn is a cold call, a cold call with "
        "the device's clock, a warm call, and a warm call with the device's clock",
        "rounds": f"{LEAST_ROUNDS} to {MOST_ROUNDS}, until 1.57 interquartile ranges over the square root of the "
        f"number of samples are below {SETTLED} of the median, or for {TIME_LIMIT_S:g} s for each contender, but "
        f"{LEAST_ROUNDS_OF_LONG_CALLS} at least; or as many, or for as long, as was asked for",
        "threads": machine.cores(),
    }


def environment() -> dict[str, Any]:
    """The machine and the versions of all that takes part, for result files."""
    known = ("kernel-dispatcher", "numpy", "pyopencl", "intel-opencl-rt", "pycuda", *DISTRIBUTIONS)
    versions = {**machine.versions(known), "kernel-dispatcher": __version__}
    return {"machine": machine.machine_facts(), "versions": versions}


# ---- one problem on one device -----------------------------------------------------------------------------
def benchmark(
    problem: ProblemLike,
    *,
    device: str | Device | None = None,
    case: str | None = "sample",
    seed: int = 0,
    precision: str = "fp32",
    dtype: str | None = None,
    repeats: int | None = None,
    warmup: int = 2,
    time_limit_s: float | None = None,
    against: str | Sequence[str] = (),
    check: bool = True,
    force: bool = False,
    options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    **arguments: Any,
) -> Benchmark:
    """Time a problem on random inputs, after checking that its result is right.

    Each timed call takes arrays in host memory and writes into one result array that is allocated beforehand. It
    holds NaN before every call, and what is in it afterwards is checked.

    Args:
        problem: see :func:`dispatcher.compile`, as for ``device``, ``precision``, ``dtype`` and ``options``.
        case: the case that the sizes come from; None when ``arguments`` give them all.
        seed: seed of the input tensors, from 0 to 2**64 - 1.
        repeats: rounds, 1 or more; without it, as many as it takes, within limits.
        warmup: calls after the first one that are not timed.
        time_limit_s: seconds after which no further round begins.
        against: peers that take turns with the device, such as ``["torch", "openvino"]``.
        check: verify the first result before timing, and each later one that differs from it.
        force: measure although other programs keep the machine busy.
        progress: told the fraction done.
        **arguments: sizes and scalars that hold instead of the case's.

    Raises:
        VerificationError: a result is wrong; nothing is reported then.
        InputError: an argument is wrong or a tensor, a peer is not installed, or the batch is empty, so that there
            is nothing to time.
        DeviceError: no device of the request can run the problem; as BusyError, the machine is busy.
        KernelError: a kernel did not build or run on the device that was named.
    """
    outcome = race(
        problem,
        [device],
        case=case,
        seed=seed,
        precision=precision,
        dtype=dtype,
        repeats=repeats,
        warmup=warmup,
        time_limit_s=time_limit_s,
        against=against,
        check=check,
        force=force,
        options=options,
        progress=progress,
        **arguments,
    )
    for failure in outcome.failures:
        if failure.error is not None:
            raise failure.error
    return outcome.results[0]


def refuse_when_busy() -> None:
    """See to it that other programs leave the machine alone.

    Raises:
        BusyError: they do not.
    """
    reason = machine.busy_reason(machine.foreign_load())
    if reason is not None:
        raise BusyError(f"{reason}; wait until it is quiet, or force it (--force; force=True in Python)")


# ---- several contenders ------------------------------------------------------------------------------------
def race(
    problem: ProblemLike,
    devices: Sequence[str | Device | None],
    *,
    case: str | None = "sample",
    seed: int = 0,
    precision: str = "fp32",
    dtype: str | None = None,
    repeats: int | None = None,
    warmup: int = 2,
    time_limit_s: float | None = None,
    against: str | Sequence[str] = (),
    check: bool = True,
    force: bool = False,
    options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    **arguments: Any,
) -> Race:
    """Time a problem on several devices and in other libraries, which take turns; see :func:`benchmark`.

    Args:
        devices: device requests. A device that fails is among the failures.

    Raises:
        InputError: an argument is wrong.
        BusyError: other programs keep the machine busy.
        VerificationError: some contender has changed the inputs.
    """
    check_seed(seed)
    if repeats is not None:
        _check_count("repeats", repeats, 1)
    _check_count("warmup", warmup, 0)
    if time_limit_s is not None and not (
        isinstance(time_limit_s, int | float)
        and not isinstance(time_limit_s, bool)
        and 0 < time_limit_s < math.inf
    ):
        raise InputError(f"time_limit_s is {time_limit_s!r}; expected a number of seconds above 0")
    check_options(options)
    peers = parse_peers(against)
    loaded = load_problem(problem)
    for device in devices:
        parse_request(device)
    operator = bind_numbers(loaded, arguments, "time", case=case, dtype=dtype, precision=precision)
    if not force and any(map(_is_usable, devices)):  # else nothing is timed, and that is what has to be said
        refuse_when_busy()
    tensors = random_tensors(operator, seed)
    before = checksums(tensors)
    witness = _Witness(operator, tensors) if check else None
    failures: list[Failure] = []
    contenders: list[_Contender] = []
    for device in devices:
        try:
            contenders.append(_Ours(operator, tensors, device, options))
        except InputError:
            raise
        except DispatcherError as error:
            failures.append(Failure(_label(device), describe(error), error))
            continue
        _try(contenders[-1], contenders[-1].first, witness, failures, contenders)
    for name in peers:
        for place, device in _places(contenders).items():
            try:
                peer = _Theirs(operator, tensors, name, place, device)
            except Unsupported as error:
                failures.append(Failure(name, str(error)))
            except ImportError as error:
                failures.append(Failure(name, f"it cannot be imported: {describe(error)}"))
            except Exception as error:  # a library may raise anything about an operator that it cannot run
                failures.append(Failure(name, describe(error)))
            else:
                contenders.append(peer)
                _try(peer, peer.first, witness, failures, contenders)
    _judge(witness, failures, contenders)
    if progress is not None:
        progress(0.3)
    for contender in list(contenders):
        for _ in range(warmup):
            if contender in contenders:
                _try(contender, contender.untimed, witness, failures, contenders)
    meter = machine.LoadMeter.start()
    rounds, settled = _sample(contenders, failures, witness, repeats, time_limit_s, progress)
    foreign_cores = meter.foreign_cores()
    _judge(witness, failures, contenders)
    changed = [name for name, checksum in checksums(tensors).items() if checksum != before[name]]
    if changed:
        names = ", ".join(contender.name for contender in contenders)
        raise VerificationError(f"the input tensor {' and '.join(changed)} was changed by one of {names}")
    theirs = tuple(each.result() for each in contenders if isinstance(each, _Theirs))
    left_out = tuple((failure.name, failure.reason) for failure in failures if failure.error is None)
    ours = tuple(each.result(seed, theirs, left_out) for each in contenders if isinstance(each, _Ours))
    if progress is not None:
        progress(1.0)
    return Race(ours, theirs, tuple(failures), rounds, settled, foreign_cores)


def _check_count(name: str, count: Any, least: int) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < least:
        raise InputError(f"{name} is {count!r}; expected a whole number of {least} or more")


def _is_usable(device: str | Device | None) -> bool:
    """Whether a device request reaches a device."""
    try:
        first_usable(parse_request(device))
    except DeviceError:
        return False
    return True


def _label(device: str | Device | None) -> str:
    return device.id if isinstance(device, Device) else device or "auto"


def _places(contenders: Sequence[_Contender]) -> dict[str, Device]:
    """Where peers have to run to be compared with the devices: a name, and one of the devices there."""
    places: dict[str, Device] = {}
    for contender in contenders:
        if isinstance(contender, _Ours):
            places.setdefault(contender.place, contender.device)
    return places


def _sample(
    contenders: list[_Contender],
    failures: list[Failure],
    witness: _Witness | None,
    repeats: int | None,
    time_limit_s: float | None,
    progress: Progress | None,
) -> tuple[int, bool]:
    """Let the contenders take turns; gives the rounds made, and whether the medians are known well enough."""
    least = 1
    if repeats is None and time_limit_s is None:
        least, time_limit_s = LEAST_ROUNDS_OF_LONG_CALLS, TIME_LIMIT_S * max(1, len(contenders))
    most = MOST_ROUNDS if repeats is None else repeats
    order = random.Random(0)
    start = time.perf_counter()
    rounds, settled = 0, False
    while contenders and rounds < most and not settled:
        elapsed = time.perf_counter() - start
        if rounds >= least and time_limit_s is not None and elapsed > time_limit_s:
            break
        for contender in order.sample(contenders, len(contenders)):
            if len(contenders) > 1:
                time.sleep(SETTLE_S)
            _try(contender, contender.turn, witness, failures, contenders)
        rounds += 1
        settled = repeats is None and rounds >= LEAST_ROUNDS and all(each.settled for each in contenders)
        if progress is not None:
            share = rounds / most if time_limit_s is None else max(rounds / most, elapsed / time_limit_s)
            progress(0.3 + 0.6 * min(1.0, share))
    return rounds, settled or rounds == repeats


def _try(
    contender: _Contender,
    step: Callable[[_Witness | None], None],
    witness: _Witness | None,
    failures: list[Failure],
    contenders: list[_Contender],
) -> None:
    """Run a step of a contender; if it fails, the contender is out."""
    try:
        step(witness)
    except InputError:
        raise
    except DispatcherError as error:
        failures.append(Failure(contender.name, describe(error), contender.error_of(error)))
        contenders.remove(contender)
    except Exception as error:
        if isinstance(contender, _Ours):
            raise
        failures.append(Failure(contender.name, describe(error)))
        contenders.remove(contender)
    if witness is not None and witness.full:
        _judge(witness, failures, contenders)


def _judge(witness: _Witness | None, failures: list[Failure], contenders: list[_Contender]) -> None:
    """Verify the results that wait for it; contenders with a wrong one are out."""
    if witness is None:
        return
    for contender, error in witness.judge():
        if contender in contenders:
            failures.append(Failure(contender.name, str(error), contender.error_of(error)))
            contenders.remove(contender)


# ---- checking every result ---------------------------------------------------------------------------------
@dataclass
class _Pending:
    contender: _Contender
    call: int
    result: np.ndarray


class _Witness:
    """Looks at every result: one with the checksum of a right one is right, any other one is verified.

    A wrong result passes as right with a probability of 2**-32, and never when it differs within 32 bits in a row.
    """

    def __init__(self, operator: Operator, tensors: Mapping[str, np.ndarray]) -> None:
        self._operator, self._tensors = operator, tensors
        self._pending: list[_Pending] = []

    @property
    def full(self) -> bool:
        """Whether so much waits to be verified that it should be done now."""
        return sum(each.result.nbytes for each in self._pending) > PENDING_BYTES

    def see(self, contender: _Contender, result: np.ndarray) -> None:
        """Take in the result of a call, which may be overwritten afterwards."""
        digest = (result.shape, str(result.dtype), zlib.crc32(np.ascontiguousarray(result).data))
        if digest in contender.seen:
            return
        contender.seen.add(digest)
        self._pending.append(_Pending(contender, contender.calls, np.array(result)))

    def judge(self) -> list[tuple[_Contender, VerificationError]]:
        """Verify what waits; gives the contenders with a wrong result."""
        pending, self._pending = self._pending, []
        if not pending:
            return []
        slacks = [each.contender.slack for each in pending]
        found = verify_results(
            self._operator, self._tensors, [each.result for each in pending], slacks=slacks
        )
        wrong = []
        for each, comparison in zip(pending, found, strict=True):
            each.contender.note(comparison)
            if not comparison.passed:
                when = "" if each.call == 1 else f" (call {each.call})"
                text = f"wrong result on {each.contender.where}{when}: {comparison.reason}"
                wrong.append((each.contender, VerificationError(text)))
        return wrong


# ---- contenders --------------------------------------------------------------------------------------------
@dataclass
class _Samples:
    """Samples of one state of the caches."""

    wall: list[float] = field(default_factory=list)
    parts: list[tuple[float, float, float]] = field(default_factory=list)  # upload, kernel, download

    def condition(self, known: bool) -> Condition:
        wall = Times(tuple(self.wall))
        if not known or not self.parts:
            return Condition(wall)
        upload, kernel, download = (Times(tuple(part)) for part in zip(*self.parts, strict=True))
        return Condition(wall, kernel, upload, download)


class _Contender:
    """Somebody who takes turns; knows how to call, how to empty the caches, and what came of it.

    Attributes:
        name: a device's id, or a peer's name.
        where: what messages call it.
        slack: factor on the error bound that it has to keep.
        calls: calls made until now.
        seen: digests of results that were right, or wait to be verified.
    """

    slack = 1.0

    def __init__(self, operator: Operator, name: str, where: str, device: Device) -> None:
        self.operator, self.name, self.where, self.device = operator, name, where, device
        self.calls = 0
        self.seen: set[Any] = set()
        self.comparison: Comparison | None = None
        self.compile_s = self.first_s = 0.0
        self.samples = {state: _Samples() for state in STATES}
        self.clocks: set[str] = set()
        self.clock_note = ""
        self.shared_memory = False

    def run(self, timings: Timings | None = None) -> np.ndarray:
        """One call."""
        raise NotImplementedError

    def run_aside(self) -> None:
        """One call that leaves alone what :meth:`get_ready` has made ready."""
        self.run()

    def get_ready(self) -> None:
        """What has to be done before a call, outside the time."""

    def done(self, result: np.ndarray) -> None:
        """What has to be done after a call, outside the time."""

    def error_of(self, error: DispatcherError) -> DispatcherError | None:
        """What a failure of this contender is to be reported as."""
        return None

    def first(self, witness: _Witness | None) -> None:
        """The first call."""
        self.first_s = self._call(witness)

    def untimed(self, witness: _Witness | None) -> None:
        """A call whose time does not count."""
        self._call(witness)

    def turn(self, witness: _Witness | None) -> None:
        """One sample of everything."""
        for state in STATES:
            samples = self.samples[state]
            samples.wall.append(self._call(witness, state))
            timings = Timings()
            wall_s = self._call(witness, state, timings)
            self._take(samples, timings, wall_s)

    def _call(
        self, witness: _Witness | None, state: State | None = None, timings: Timings | None = None
    ) -> float:
        """Seconds of a call, whose result is looked at outside the time.

        Args:
            witness: looks at the result.
            state: what the caches are brought into first; None leaves them alone.
            timings: filled in by the call.
        """
        self.get_ready()
        if state == "cold":
            host_caches().flush()
            flush_device(self.device)
        elif state == "warm":
            self.run_aside()
        self.calls += 1
        start = time.perf_counter()
        result = self.run(timings)
        seconds = seconds_since(start)
        if witness is not None:
            witness.see(self, result)
        self.done(result)
        return seconds

    def _take(self, samples: _Samples, timings: Timings, wall_s: float) -> None:
        parts = (timings.upload_s, timings.kernel_s, timings.download_s)
        if timings.kernel_s == 0.0:
            return
        if not all(0.0 <= part < math.inf for part in parts):
            self.clock_note = f"the device's clock gave {parts} seconds for upload, kernel and download"
        elif sum(parts) > CLOCK_SLACK * wall_s:
            self.clock_note = (
                f"the device's clock gave {sum(parts):.3g} s for what took {wall_s:.3g} s on the host's"
            )
        self.clocks.add(timings.clock or "unknown")
        self.shared_memory = timings.shared_memory
        samples.parts.append(parts)

    @property
    def settled(self) -> bool:
        """Whether its medians are known well enough."""
        found = [Times(tuple(each.wall)).uncertainty for each in self.samples.values()]
        return all(uncertainty is not None and uncertainty <= SETTLED for uncertainty in found)

    def note(self, comparison: Comparison) -> None:
        """Keep the worst comparison."""
        if self.comparison is None or not (
            comparison.passed and comparison.max_error_over_bound <= self.comparison.max_error_over_bound
        ):
            self.comparison = comparison

    def measured(self) -> dict[str, Any]:
        """The fields of a :class:`Measured`."""
        known = not self.clock_note
        clock = self.clocks.pop() if len(self.clocks) == 1 else "host" if self.clocks else ""
        return {
            "operator": self.operator,
            "name": self.name,
            "comparison": self.comparison,
            "compile_s": self.compile_s,
            "first_s": self.first_s,
            "warm": self.samples["warm"].condition(known),
            "cold": self.samples["cold"].condition(known),
            "clock": clock if known else "",
            "clock_note": self.clock_note,
            "shared_memory": self.shared_memory,
        }


class _Ours(_Contender):
    """One of our devices."""

    def __init__(
        self,
        operator: Operator,
        tensors: Mapping[str, np.ndarray],
        request: str | Device | None,
        options: Mapping[str, Any] | None,
    ) -> None:
        start = time.perf_counter()
        self._prepared: PreparedCall = call_on(operator, tensors, request, options)
        compile_s = seconds_since(start)
        device = self._prepared.choice.device
        super().__init__(operator, device.id, f"{device.id} ({device.name})", device)
        self.compile_s = compile_s
        self._output = poisoned(operator.output_shape, operator.dtype)
        self._aside = poisoned(operator.output_shape, operator.dtype)

    @property
    def place(self) -> str:
        """Where a peer has to run to be compared with it."""
        return self.device.id if self.device.backend == "cuda" or self.device.kind == "gpu" else "cpu"

    def get_ready(self) -> None:
        self._output.fill(np.nan)

    def run_aside(self) -> None:
        self._prepared(output=self._aside)

    def run(self, timings: Timings | None = None) -> np.ndarray:
        result: np.ndarray = self._prepared(output=self._output, timings=timings)
        return result

    def _call(
        self, witness: _Witness | None, state: State | None = None, timings: Timings | None = None
    ) -> float:
        seconds = super()._call(witness, state, timings)
        now = self._prepared.choice.device
        if now.id != self.device.id:
            if self.calls > 1:
                raise KernelError(
                    f"{self.where} failed while it was timed, and {now.id} took over; time that one"
                )
            # The first call may move on to the next device of the request; that one is timed from the start.
            self.device, self.name, self.where = now, now.id, f"{now.id} ({now.name})"
        return seconds

    def error_of(self, error: DispatcherError) -> DispatcherError | None:
        return error

    def result(
        self, seed: int, peers: Sequence[PeerBenchmark], left_out: tuple[tuple[str, str], ...]
    ) -> Benchmark:
        """What came of it."""
        return Benchmark(
            **self.measured(),
            device=self.device,
            skipped=self._prepared.choice.skipped,
            seed=seed,
            roofline=device_roofline(self.device, self.operator.dtype),
            peers=tuple(peer for peer in peers if peer.place == self.place),
            left_out=left_out,
        )


class _Theirs(_Contender):
    """A peer on the CPU, or on a CUDA device."""

    slack = PEER_SLACK

    def __init__(
        self, operator: Operator, tensors: Mapping[str, np.ndarray], name: str, place: str, device: Device
    ) -> None:
        where = f"{PEERS[name].label} ({place})"
        super().__init__(operator, name, where, device)
        self.place = place
        gpu = None
        if place != "cpu":
            if device.backend != "cuda":
                raise Unsupported(f"it runs on CUDA devices and on the CPU, and {place} is neither")
            gpu = device.index
        start = time.perf_counter()
        self._peer: PeerCall = PEERS[name].make(operator, tensors, machine.cores(), gpu)
        self.compile_s = seconds_since(start)

    def run(self, timings: Timings | None = None) -> np.ndarray:
        return self._peer(timings)

    def done(self, result: np.ndarray) -> None:
        if result.flags.writeable:  # it may write the next result there
            result.fill(np.nan)

    def note(self, comparison: Comparison) -> None:
        over = self.slack * comparison.max_error_over_bound  # of our bound
        super().note(replace(comparison, max_error_over_bound=over))

    def result(self) -> PeerBenchmark:
        """What came of it."""
        return PeerBenchmark(**self.measured(), place=self.place)


# ---- devices -----------------------------------------------------------------------------------------------
_rooflines: dict[tuple[str, str, str], Roofline | None] = {}


def device_roofline(device: Device, dtype: str) -> Roofline | None:
    """What ``device`` can do at best for operators of ``dtype``, measured once in a process.

    None where its backend does not measure that, or could not.
    """
    key = (registry.BACKENDS.get(device.backend, ""), device.id, dtype)  # as self-tests are kept: by module
    if key not in _rooflines:
        _rooflines[key] = None
        backend = backend_of(device)
        if isinstance(backend, Measurable):
            try:
                found = backend.roofline(device, dtype)
            except Exception as error:  # microbenchmarks must not cost the times that are there already
                _log.info("what %s can do at best could not be measured: %s", device.id, describe(error))
            else:
                limits = (found.gflops, found.gbytes_per_s)
                _rooflines[key] = found if all(0 < limit < math.inf for limit in limits) else None
    return _rooflines[key]


def flush_device(device: Device) -> None:
    """Empty the caches of a device that has memory of its own, as far as its backend can."""
    members = device.members if isinstance(device, JoinedDevice) else (device,)
    for member in members:
        backend = backend_of(member)
        if isinstance(backend, Measurable):
            backend.flush_caches(member)
