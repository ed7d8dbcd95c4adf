"""Who takes turns on an operator: devices of ours and other libraries, and the check of every result they give."""

from __future__ import annotations

import logging
import math
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dispatcher import registry
from dispatcher.check.comparison import Comparison, poisoned, refusal, verify_results
from dispatcher.check.verifying import checksums, compile_for
from dispatcher.device import machine
from dispatcher.device.selection import backend_devices, describe
from dispatcher.device.splitting import JoinedDevice, backend_of, batch_parameter, batched_tensors, with_batch
from dispatcher.errors import DispatcherError, InputError, KernelError, VerificationError
from dispatcher.interface import Device, Measurable, Roofline, Tensors, Timings, bits_of
from dispatcher.problem.operator import Operator
from dispatcher.timing.peers import PEER_SLACK, PEERS, PeerCall, Unsupported, environment_kept
from dispatcher.timing.results import STATES, Benchmark, Condition, Failure, PeerBenchmark, State
from dispatcher.timing.sampling import Times, host_caches, seconds_since, timed

_log = logging.getLogger(__name__)

#: Results that wait to be verified together are kept up to this many bytes.
PENDING_BYTES = 1 << 30
#: A device's clock may run this much faster than the host's before it counts as wrong.
CLOCK_SLACK = 1.1


# ---- those who compute -------------------------------------------------------------------------------------
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


class Contender:
    """Somebody who takes turns; knows how to call, how to empty the caches, and what came of it.

    Attributes:
        name: a device's id, or a peer's name.
        where: what messages call it.
        device: where it runs; None for the host, without a backend of ours.
        slack: factor on the error bound that it has to keep.
        calls: calls made until now.
        seen: digests of results that were right, or wait to be verified.
        comparison: the worst check of its results.
        witness: looks at every result; None for no checks.
    """

    slack = 1.0
    witness: Witness | None = None

    def __init__(self, operator: Operator, name: str, where: str, device: Device | None = None) -> None:
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

    def timed(self) -> float:
        """Seconds of one call, and of nothing around it."""
        return timed(self.run)()

    def facts(self) -> dict[str, Any]:
        """What else a result file has to say of it."""
        return {}

    def get_ready(self) -> None:
        """What has to be done before a call, outside the time."""

    def done(self, result: np.ndarray) -> None:
        """What has to be done after a call, outside the time."""

    def turn(self) -> None:
        """One sample of everything."""
        for state in STATES:
            samples = self.samples[state]
            samples.wall.append(self.call(state))
            timings = Timings()
            wall_s = self.call(state, timings)
            self._take(samples, timings, wall_s)

    def call(self, state: State | None = None, timings: Timings | None = None) -> float:
        """Seconds of a call, whose result is looked at outside the time.

        Args:
            state: what the caches are brought into first; None leaves them alone.
            timings: filled in by the call.
        """
        self.get_ready()
        if state == "cold":
            host_caches().flush()
            if self.device is not None:
                flush_device(self.device)
        elif state == "warm":
            self.run_aside()
        self.calls += 1
        start = time.perf_counter()
        result = self.run(timings)
        seconds = seconds_since(start)
        self.first_s = self.first_s or seconds
        if self.witness is not None:
            self.witness.see(self, result)
        self.done(result)
        return seconds

    def _take(self, samples: _Samples, timings: Timings, wall_s: float) -> None:
        parts = (timings.upload_s, timings.kernel_s, timings.download_s)
        if timings.kernel_s == 0.0:
            return
        if not all(0.0 <= part < math.inf for part in parts):
            self.clock_note = f"the device's clock gave {parts} seconds for upload, kernel and download"
        elif sum(parts) > CLOCK_SLACK * wall_s:
            took = f"{sum(parts):.3g} s for what took {wall_s:.3g} s on the host's"
            self.clock_note = f"the device's clock gave {took}"
        self.clocks.add(timings.clock or "unknown")
        self.shared_memory = timings.shared_memory
        samples.parts.append(parts)

    @property
    def uncertainty(self) -> float:
        """The uncertainty of the medians of its whole calls, the larger one; infinite where it is not known."""
        found = [Times(tuple(each.wall)).uncertainty for each in self.samples.values()]
        return max(math.inf if uncertainty is None else uncertainty for uncertainty in found)

    def note(self, comparison: Comparison) -> None:
        """Keep the worst comparison, as a share of the bound that ours must keep."""
        comparison = replace(comparison, max_error_over_bound=self.slack * comparison.max_error_over_bound)
        if self.comparison is None or not (
            comparison.passed and comparison.max_error_over_bound <= self.comparison.max_error_over_bound
        ):
            self.comparison = comparison

    def measured(self) -> dict[str, Any]:
        """The fields of a :class:`dispatcher.timing.results.Measured`."""
        known = not self.clock_note
        clock = self.clocks.pop() if len(self.clocks) == 1 else "host" if self.clocks else ""
        names = ("operator", "name", "comparison", "compile_s", "first_s", "clock_note", "shared_memory")
        return {
            **{name: getattr(self, name) for name in names},
            **{state: self.samples[state].condition(known) for state in STATES},
            "clock": clock if known else "",
        }


class OurDevice(Contender):
    """One of our devices."""

    device: Device

    def __init__(
        self, operator: Operator, tensors: Tensors, request: str | Device | None, options: Mapping[str, Any] | None
    ) -> None:
        start = time.perf_counter()
        self._prepared = compile_for(operator, request, options).prepare_bound(operator, tensors)
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

    def call(self, state: State | None = None, timings: Timings | None = None) -> float:
        seconds = super().call(state, timings)
        now = self._prepared.choice.device
        if now.id != self.device.id:
            if self.calls > 1:
                raise KernelError(f"{self.where} failed while it was timed, and {now.id} took over; time that one")
            # The first call may move on to the next device of the request; that one is timed from the start.
            self.device, self.name, self.where = now, now.id, f"{now.id} ({now.name})"
        return seconds

    def result(self, seed: int, peers: Sequence[PeerBenchmark], left_out: tuple[tuple[str, str], ...]) -> Benchmark:
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


class OtherLibrary(Contender):
    """A peer on the CPU, or on a CUDA device."""

    slack = PEER_SLACK

    def __init__(
        self, operator: Operator, tensors: Tensors, name: str, place: str = "cpu", device: Device | None = None
    ) -> None:
        super().__init__(operator, name, f"{PEERS[name].label} ({place})", device)
        self.place = place
        gpu = None
        if place != "cpu":
            if device is None or device.backend != "cuda":
                raise Unsupported(f"it runs on CUDA devices and on the CPU, and {place} is neither")
            gpu = device.index
        peer = PEERS[name]
        for backend in registry.BACKENDS.keys() & set(peer.after):
            backend_devices(backend)
        start = time.perf_counter()
        with environment_kept():
            self._peer: PeerCall = peer.make(operator, tensors, machine.cores(), gpu)
        self.compile_s = seconds_since(start)

    def call(self, state: State | None = None, timings: Timings | None = None) -> float:
        with environment_kept():
            return super().call(state, timings)

    def run(self, timings: Timings | None = None) -> np.ndarray:
        return self._peer(timings)

    def done(self, result: np.ndarray) -> None:
        if result.flags.writeable:  # it may write the next result there
            result.fill(np.nan)

    def result(self) -> PeerBenchmark:
        """What came of it."""
        return PeerBenchmark(**self.measured(), place=self.place)


# ---- checking every result ---------------------------------------------------------------------------------
@dataclass
class _Pending:
    contender: Contender
    call: int
    parts: list[np.ndarray]
    refused: str


class Witness:
    """Looks at every result: one with the checksum of a right one is right, any other one is verified.

    A wrong result passes as right with a probability of 2**-32, and never when it differs within 32 bits in a row.

    Args:
        operator: what is computed.
        tensors: every input tensor by name.
        items: batch items that are compared with the reference, while the others must be finite; None for all, which
            also holds where batch items are not independent.

    Attributes:
        items: those that are compared.
    """

    def __init__(self, operator: Operator, tensors: Tensors, items: Sequence[int] | None = None) -> None:
        self._operator = operator
        self._parts: list[tuple[slice, Operator, Tensors]] = [(slice(None), operator, tensors)]
        batch, _ = batch_parameter(operator)
        self._some = items is not None and bool(batch)
        self.items = list(items or ()) if self._some else list(range(operator.steps[-1].shape[0]))
        if items is not None and batch:
            batched = batched_tensors(operator, batch)
            one = with_batch(operator, batch, 1)
            self._parts = []
            for item in items:
                part = slice(item, item + 1)
                its = {name: array[part] if name in batched else array for name, array in tensors.items()}
                self._parts.append((part, one, its))
        self._pending: list[_Pending] = []

    @property
    def full(self) -> bool:
        """Whether so much waits to be verified that it should be done now."""
        return sum(part.nbytes for each in self._pending for part in each.parts) > PENDING_BYTES

    def see(self, contender: Contender, result: np.ndarray) -> None:
        """Take in the result of a call, which may be overwritten afterwards."""
        digest = (result.shape, str(result.dtype), zlib.crc32(bits_of(np.ascontiguousarray(result)).data))
        if digest in contender.seen:
            return
        contender.seen.add(digest)
        refused = ""
        if self._some:  # the comparisons see no more of it
            if result.shape != self._operator.output_shape:
                refused = f"the result has shape {result.shape}; expected {self._operator.output_shape}"
            elif not np.isfinite(result).all():
                refused = "the result is not finite everywhere"
        parts = [np.array(result[part]) for part, _, _ in self._parts]
        self._pending.append(_Pending(contender, contender.calls, parts, refused))

    def judge(self) -> list[tuple[Contender, VerificationError]]:
        """Verify what waits; gives the contenders with a wrong result."""
        pending, self._pending = self._pending, []
        if not pending:
            return []
        slacks = [each.contender.slack for each in pending]
        reasons = [each.refused for each in pending]
        for number, (_, operator, tensors) in enumerate(self._parts):
            results = [each.parts[number] for each in pending]
            found = verify_results(operator, tensors, results, slacks=slacks)
            for index, comparison in enumerate(found):
                pending[index].contender.note(comparison)
                reasons[index] = reasons[index] or comparison.reason
        wrong = []
        for each, reason in zip(pending, reasons, strict=True):
            if reason:
                if each.refused:
                    each.contender.note(refusal(reason))
                when = "" if each.call == 1 else f" (call {each.call})"
                error = VerificationError(f"wrong result on {each.contender.where}{when}: {reason}")
                wrong.append((each.contender, error))
        return wrong


class Lineup:
    """The contenders on one operator, and why others are out.

    Attributes:
        contenders: those who are in.
        failures: why the others are not.

    Args:
        tensors: every input tensor by name.
        witness: looks at every result; None for no checks.
    """

    def __init__(self, tensors: Tensors, witness: Witness | None) -> None:
        self.contenders: list[Contender] = []
        self.failures: list[Failure] = []
        self._tensors, self._before = tensors, checksums(tensors)
        self._witness = witness

    def enter(self, name: str, make: Callable[[], Contender], *, ours: bool = False) -> None:
        """Prepare a contender and call it once.

        Args:
            name: what a failure is listed under.
            make: prepares it.
            ours: only errors that are raised on purpose put it out, and an error about the input ends everything;
                a library may raise anything about an operator that it cannot run.
        """
        try:
            contender = make()
        except Exception as error:
            self._put_out(name, error, ours)
        else:
            contender.witness = self._witness
            self.contenders.append(contender)
            self.attempt(contender, contender.call)

    def attempt(self, contender: Contender, step: Callable[[], object]) -> None:
        """Let a contender take a step; if it fails, it is out."""
        try:
            step()
        except Exception as error:
            self._put_out(contender.name, error, isinstance(contender, OurDevice), contender)
        if self._witness is not None and self._witness.full:
            self.judge()

    def judge(self) -> None:
        """Verify the results that wait for it; contenders with a wrong one are out."""
        for contender, error in [] if self._witness is None else self._witness.judge():
            if contender in self.contenders:
                self._put_out(contender.name, error, isinstance(contender, OurDevice), contender)

    def _put_out(self, name: str, error: Exception, ours: bool, contender: Contender | None = None) -> None:
        if ours and (isinstance(error, InputError) or not isinstance(error, DispatcherError)):
            raise error
        reason = describe(error)
        if isinstance(error, ImportError):
            missing = isinstance(error, ModuleNotFoundError)
            reason = f"not installed ({reason})" if missing else f"it cannot be imported: {reason}"
        kept = error if ours and isinstance(error, DispatcherError) else None
        self.failures.append(Failure(name, reason, kept))
        if contender is not None:
            self.contenders.remove(contender)

    def check_inputs(self) -> None:
        """Check that everybody has left the input tensors as they were.

        Raises:
            VerificationError: somebody has not.
        """
        after = checksums(self._tensors)
        changed = [name for name, checksum in after.items() if checksum != self._before[name]]
        if changed:
            names = ", ".join(contender.name for contender in self.contenders)
            raise VerificationError(f"the input tensor {' and '.join(changed)} was changed by one of {names}")


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
