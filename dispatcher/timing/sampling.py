"""Samples: reading the clock, what samples come to, and emptying the caches before them."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from dispatcher.device.machine import cores, last_level_cache_bytes

#: No sample is shorter than this: what the clock cannot tell from nothing is not nothing.
CLOCK_RESOLUTION_S = max(time.get_clock_info("perf_counter").resolution, 1e-9)
#: Half the width of a median's notch, in interquartile ranges over the square root of the number of samples: notches
#: that do not overlap differ at about the 95 % level (McGill, Tukey and Larsen, "Variations of box plots", The American
#: Statistician 32, 1978).
NOTCH = 1.57
RESAMPLES = 4000


def seconds_since(start: float) -> float:
    """Seconds since ``start`` on ``time.perf_counter``; never less than the clock can tell."""
    return max(time.perf_counter() - start, CLOCK_RESOLUTION_S)


def rate(amount: float, seconds: float) -> float | None:
    """``amount`` in 1e9 a second; None where that would not be a number above zero."""
    if not (amount > 0 and 0 < seconds < math.inf):
        return None
    value = amount / seconds / 1e9
    return value if 0 < value < math.inf else None


# ---- times -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Times:
    """Samples of one thing.

    Attributes:
        seconds: every sample that counts, in the order in which it was taken; at least one.
        dropped: samples that were taken and do not count; see :func:`quiet_times`.
        noisy: no sample was quiet, so that all of them stand here for want of better ones.
    """

    seconds: tuple[float, ...]
    dropped: int = 0
    noisy: bool = False

    @property
    def median_s(self) -> float:
        """Their median."""
        return statistics.median(self.seconds)

    @property
    def quartiles_s(self) -> tuple[float, float]:
        """Their first and third quartile, interpolated linearly."""
        low, high = np.quantile(self.seconds, [0.25, 0.75])
        return float(low), float(high)

    @property
    def min_s(self) -> float:
        """The shortest."""
        return min(self.seconds)

    @property
    def uncertainty(self) -> float | None:
        """Half the width of the median's notch (see :data:`NOTCH`), as a share of the median; None of zeros."""
        if self.median_s <= 0.0:
            return None
        low, high = self.quartiles_s
        return NOTCH * (high - low) / math.sqrt(len(self.seconds)) / self.median_s

    def as_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, ready for JSON."""
        return {
            "median_s": self.median_s,
            "quartiles_s": list(self.quartiles_s),
            "min_s": self.min_s,
            "uncertainty": self.uncertainty,
            "seconds": list(self.seconds),
        }


@dataclass(frozen=True)
class Sample:
    """One timed call, and the machine's speed in GFLOP/s right before and right after it."""

    seconds: float
    before: float
    after: float

    def quiet(self, threshold: float) -> bool:
        """True when both readings reached ``threshold`` GFLOP/s."""
        return min(self.before, self.after) >= threshold


def quiet_times(samples: Sequence[Sample], threshold: float) -> Times:
    """The samples whose readings reached ``threshold`` GFLOP/s; all of them when none did.

    Raises:
        ValueError: there is no sample.
    """
    if not samples:
        raise ValueError("there are no samples to summarise")
    quiet = tuple(sample.seconds for sample in samples if sample.quiet(threshold))
    everything = tuple(sample.seconds for sample in samples)
    return Times(quiet or everything, len(samples) - len(quiet), not quiet)


@dataclass(frozen=True)
class Ratio:
    """How many times as long the other takes.

    Attributes:
        value: the other's median over ours.
        low: the other's first quartile over our third one.
        high: the other's third quartile over our first one.
        noisy: one of the two has no quiet sample.
    """

    value: float
    low: float
    high: float
    noisy: bool = False


def ratio(other: Times, ours: Times) -> Ratio:
    """How many times as long ``other`` takes as ``ours``, with the spread that the quartiles make."""
    (other_low, other_high), (low, high) = other.quartiles_s, ours.quartiles_s
    value = other.median_s / ours.median_s
    return Ratio(value, other_low / high, other_high / low, other.noisy or ours.noisy)


def bootstrap_ratio(new: Times, old: Times, confidence: float) -> tuple[float, float]:
    """A percentile bootstrap interval for the ratio of two medians, ``new`` over ``old``.

    Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13. The resampling is seeded, so that
    the same samples give the same interval.
    """
    generator = np.random.default_rng(0)
    tail = (1.0 - confidence) / 2.0
    medians = resampled_medians(new, generator) / resampled_medians(old, generator)
    low, high = np.quantile(medians, [tail, 1.0 - tail])
    return float(low), float(high)


def resampled_medians(times: Times, generator: np.random.Generator) -> np.ndarray:
    """Medians of :data:`RESAMPLES` resamples of ``times``, drawn with replacement; float64.

    Only the middle of each resample is drawn, so that many samples cost no more than few. A resample of ``n`` takes
    the element ``floor(n u)`` of the sorted samples for each of ``n`` uniform numbers ``u``. The smaller middle one of
    these, the k-th smallest of all, has the distribution Beta(k, n + 1 - k), and the next larger one is the smallest
    of ``n - k`` uniform numbers between it and 1 (Devroye, "Non-Uniform Random Variate Generation", 1986, chapter V).
    """
    values = np.sort(np.asarray(times.seconds))
    count = len(values)
    middle = (count + 1) // 2
    low = high = generator.beta(middle, count + 1 - middle, RESAMPLES)
    if count % 2 == 0:
        high = 1.0 - (1.0 - low) * generator.random(RESAMPLES) ** (1.0 / (count - middle))
    chosen = [np.minimum((count * uniform).astype(np.int64), count - 1) for uniform in (low, high)]
    result: np.ndarray = (values[chosen[0]] + values[chosen[1]]) / 2.0
    return result


# ---- caches ------------------------------------------------------------------------------------------------
class HostCaches:
    """The caches of the host's processor.

    Attributes:
        nbytes: how much memory :meth:`flush` touches: twice what the last-level caches hold.
    """

    def __init__(self) -> None:
        self.nbytes = 2 * last_level_cache_bytes()
        threads = cores()
        self._parts = [np.ones(self.nbytes // threads // 8, np.int64) for _ in range(threads)]
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="dispatcher-flush")

    def flush(self) -> None:
        """Push everything else out of the caches: every core reads and writes a part of a large buffer."""
        for _ in self._pool.map(lambda part: np.add(part, 1, out=part), self._parts):
            pass


@cache
def host_caches() -> HostCaches:
    """The one :class:`HostCaches` of this process."""
    return HostCaches()
