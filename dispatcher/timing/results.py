"""What comes of timing an operator: times by the state of the caches, on devices and in other libraries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from dispatcher.check.comparison import Comparison
from dispatcher.check.verifying import comparison_dict
from dispatcher.device.selection import skipped_list
from dispatcher.errors import DispatcherError
from dispatcher.interface import Device, Roofline, device_dict
from dispatcher.problem.messages import counted, picked
from dispatcher.problem.operator import Operator, operator_dict
from dispatcher.problem.shown import Drawn, Shown
from dispatcher.timing.sampling import Ratio, Times, rate, ratio

State = Literal["cold", "warm"]
STATES: tuple[State, ...] = ("cold", "warm")


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
        parts = [(name, getattr(self, name)) for name in ("wall", "upload", "kernel", "download")]
        return {name: None if times is None else times.as_dict() for name, times in parts}


@dataclass(frozen=True, repr=False)
class Measured(Shown):
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

    def _headline(self) -> str:
        checked = "not checked" if self.comparison is None else "checked"
        return (
            f"{self.operator.problem.name} on {self.name}: median {self.median_s:.3g} s of "
            f"{counted(len(self.times_s), 'warm call')}, {checked}"
        )

    def _facts(self) -> Mapping[str, object]:
        low, high = self.quartiles_s
        times = {"warm, seconds": f"{self.median_s:.3g}, quartiles {low:.3g} to {high:.3g}"}
        kernel = self.warm.kernel and f"{self.warm.kernel.median_s:.3g}"
        return {**times, "cold, seconds": f"{self.cold.wall.median_s:.3g}", "kernels, seconds": kernel}

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
            **picked(self, "compile_s", "first_s", "times_s", "median_s", "quartiles_s"),
            "min_s": self.warm.wall.min_s,
            "kernel_median_s": None if self.warm.kernel is None else self.warm.kernel.median_s,
            **picked(self, "gflops", "ideal_gbytes_per_s"),
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
class Benchmark(Measured, Drawn):
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
        computing_s = self.operator.flops / (1e9 * self.roofline.gflops)
        moving_s = self.operator.ideal_bytes / (1e9 * self.roofline.gbytes_per_s)
        return max(computing_s, moving_s) / (self.cold.kernel or self.cold.wall).median_s

    @property
    def ratios(self) -> dict[str, Ratio]:
        """For each peer, how many times as long its warm calls take."""
        return {peer.name: ratio(peer.warm.wall, self.warm.wall) for peer in self.peers}

    def _facts(self) -> Mapping[str, object]:
        return {
            **super()._facts(),
            "others take": [f"{name}: {found.value:.2f} times as long" for name, found in self.ratios.items()],
            "left out": [f"{name}: {reason}" for name, reason in self.left_out],
        }

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
            "ratios": {name: picked(found, "value", "low", "high") for name, found in self.ratios.items()},
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
    error: DispatcherError | None = field(default=None, compare=False)


@dataclass(frozen=True, repr=False)
class Race(Shown):
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

    def _headline(self) -> str:
        names = [each.name for each in (*self.results, *self.peers)]
        out = [failure.name for failure in self.failures]
        failed = f"; failed: {', '.join(out)}" if out else ""
        return f"of {', '.join(names) or 'nobody'}, {self.rounds} rounds{failed}"

    def _facts(self) -> Mapping[str, object]:
        return {each.name: f"{each.median_s:.3g} s" for each in (*self.results, *self.peers)}
