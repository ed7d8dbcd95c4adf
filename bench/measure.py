"""What the benchmark programs share: a probe of the machine's speed, interleaved sampling, statistics, facts.

A shared or virtual machine has slow spells. Beside every sample a short kernel of fused multiply-adds runs,
the *probe*; a sample whose probe is slow says more about the machine than about the library and is dropped,
by the same rule for every contender. How many were dropped is part of every result.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from dispatcher.device.machine import busy_reason, cores, foreign_load, machine_facts, versions  # noqa: E402

RESULTS = ROOT / "bench" / "results"

#: Share of the fastest probe that a probe has to reach for its sample to count.
QUIET_LIMIT = 0.7
#: Seconds before each sample in which thread pools that spin after their work go to sleep.
SETTLE_S = 0.06
#: A thread pool may still spin when the probe after its sample starts, so the probe may try again.
PROBE_TRIES = 6
PROBE_PAUSE_S = 0.005
#: Readings before the first sample.
CALIBRATION_RUNS = 50
#: Rounds for each quiet sample wanted, before sampling gives up.
ROUNDS_PER_REPEAT = 3
MEBIBYTE = 1 << 20

SHORT_PLATFORMS = {"Portable Computing Language": "PoCL", "Intel(R) OpenCL": "Intel"}


# ---- statistics --------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Sample:
    """One timed call, and the probe's rate in GFLOP/s right before and right after it."""

    seconds: float
    before: float
    after: float

    def quiet(self, threshold: float) -> bool:
        """True when both probes reached ``threshold`` GFLOP/s."""
        return min(self.before, self.after) >= threshold


@dataclass(frozen=True)
class Summary:
    """What a contender's samples come to.

    Attributes:
        median_s: median of the samples that count.
        low_s: their first quartile.
        high_s: their third quartile.
        min_s: the shortest.
        kept: how many count.
        dropped: how many do not, since a probe was slow.
        noisy: True when no sample was quiet, so that all of them count for want of better ones.
    """

    median_s: float
    low_s: float
    high_s: float
    min_s: float
    kept: int
    dropped: int
    noisy: bool


@dataclass(frozen=True)
class Ratio:
    """How many times faster: the ratio of two medians, and what the quartiles make of it.

    ``low`` is the other's first quartile over our third one, ``high`` the other way round.
    """

    value: float
    low: float
    high: float
    noisy: bool


def summarise(samples: Sequence[Sample], threshold: float) -> Summary:
    """Median, quartiles and counts of the quiet samples; of all samples when none is quiet.

    Raises:
        ValueError: there is no sample.
    """
    if not samples:
        raise ValueError("there are no samples to summarise")
    quiet = [sample.seconds for sample in samples if sample.quiet(threshold)]
    times = quiet or [sample.seconds for sample in samples]
    low, high = quartiles(times)
    return Summary(
        statistics.median(times), low, high, min(times), len(quiet), len(samples) - len(quiet), not quiet
    )


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """First and third quartile, interpolated linearly."""
    low, high = np.quantile(values, [0.25, 0.75])
    return float(low), float(high)


def ratio(other: Summary, ours: Summary) -> Ratio:
    """How many times faster ours is than the other."""
    return Ratio(
        other.median_s / ours.median_s,
        other.low_s / ours.high_s,
        other.high_s / ours.low_s,
        other.noisy or ours.noisy,
    )


def threshold_gflops(limit: float, best: float) -> float:
    """The rate that a probe has to reach: ``limit`` itself when above 1, else that share of ``best``."""
    return limit if limit > 1 else limit * best


# ---- the probe ---------------------------------------------------------------------------------------------
class Probe(Protocol):
    """Says how fast the machine is right now."""

    @property
    def best(self) -> float:
        """The highest rate that it ever read, GFLOP/s."""

    def read(self, limit: float) -> float:
        """The rate now, GFLOP/s; tries a few times to reach ``limit`` (see :func:`threshold_gflops`)."""


@dataclass
class FmaProbe:
    """Multiply-adds a second on all cores, by an OpenCL kernel of about a millisecond.

    Attributes:
        name: the OpenCL device.
        best: see :class:`Probe`.
        copy_gbytes_per_s: bytes read plus bytes written a second when copying memory, on all cores.
    """

    name: str = ""
    best: float = 0.0
    copy_gbytes_per_s: float = 0.0
    _run: Callable[[], float] = field(default=lambda: 0.0, repr=False)

    @classmethod
    def on(cls, index: int, *, copy_mebibytes: int = 256) -> FmaProbe:
        """A probe on the OpenCL CPU device of that index, calibrated.

        Args:
            index: position in the list of OpenCL devices.
            copy_mebibytes: size of the array that is copied to measure the memory; well above the caches.
        """
        from dispatcher.backends.opencl.roofline import probe
        from dispatcher.backends.opencl.runtime import OpenClRuntime, find_devices

        found = find_devices()[index]
        run, copy_rate = probe(OpenClRuntime(found.platform, found.device), copy_mebibytes * MEBIBYTE)
        calibrated = cls(found.name, copy_gbytes_per_s=copy_rate, _run=run)
        for _ in range(CALIBRATION_RUNS):
            calibrated.read(math.inf)
        return calibrated

    def read(self, limit: float) -> float:
        fastest = 0.0
        for attempt in range(PROBE_TRIES if math.isfinite(limit) else 1):
            if attempt:
                time.sleep(PROBE_PAUSE_S)
            fastest = max(fastest, self._run())
            self.best = max(self.best, fastest)
            if fastest >= threshold_gflops(limit, self.best):
                break
        return fastest


# ---- sampling ----------------------------------------------------------------------------------------------
@dataclass
class Sampling:
    """Samples by contender, and why a contender stopped in the middle."""

    samples: dict[str, list[Sample]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


def interleave(
    contenders: Mapping[str, Callable[[], Any]],
    probe: Probe,
    *,
    repeats: int,
    limit: float,
    settle_s: float = SETTLE_S,
    progress: Callable[[str], None] | None = None,
) -> Sampling:
    """Time the contenders in turns until each has ``repeats`` quiet samples, or too many rounds have passed.

    Each round times every contender that still lacks samples once, in an order of its own, so that slow
    spells and the state of the caches meet all alike. What a call returns is released outside the time.

    Args:
        contenders: name to a call, warm already.
        probe: reads the machine's speed before and after each sample.
        repeats: quiet samples wanted of each.
        limit: see :func:`threshold_gflops`.
        settle_s: pause before each sample.
        progress: told a line for each round.
    """
    sampling = Sampling({name: [] for name in contenders})
    order = random.Random(0)
    for round_number in range(1, ROUNDS_PER_REPEAT * repeats + 1):
        threshold = threshold_gflops(limit, probe.best)
        lacking = [
            name
            for name, samples in sampling.samples.items()
            if name not in sampling.failures and sum(s.quiet(threshold) for s in samples) < repeats
        ]
        if not lacking:
            break
        if progress is not None:
            progress(f"round {round_number}, {len(lacking)} contenders")
        for name in order.sample(lacking, len(lacking)):
            time.sleep(settle_s)
            before = probe.read(limit)
            start = time.perf_counter()
            try:
                result = contenders[name]()
            except Exception as error:
                sampling.failures[name] = one_line(error)
                continue
            seconds = time.perf_counter() - start
            after = probe.read(limit)
            del result
            sampling.samples[name].append(Sample(seconds, before, after))
    return sampling


# ---- files, refusing --------------------------------------------------------------------------------
def one_line(error: BaseException) -> str:
    """An error's type and the first line of its text, cut to a readable length."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


def header(program: str, schema: int, distributions: Iterable[str]) -> dict[str, Any]:
    """The first fields of every result file."""
    load = foreign_load()
    return {
        "schema": schema,
        "program": program,
        "date": datetime.date.today().isoformat(),
        "machine": machine_facts(),
        "versions": versions(distributions),
        "clock": "time.perf_counter",
        "foreign_cores_at_start": load,
        "busy": busy_reason(load),
    }


def probe_facts(probe: FmaProbe, limit: float) -> dict[str, Any]:
    """What the probe found, for a result file."""
    return {
        "device": probe.name,
        "peak_gflops": probe.best,
        "copy_gbytes_per_s": probe.copy_gbytes_per_s,
        "quiet_limit": limit,
        "threshold_gflops": threshold_gflops(limit, probe.best),
    }


def summary_dict(samples: Sequence[Sample], summary: Summary) -> dict[str, Any]:
    """A summary and the samples behind it, for a result file."""
    return {**asdict(summary), "samples": sample_lists(samples)}


def sample_lists(samples: Sequence[Sample]) -> list[list[float]]:
    """Samples for a result file, with as many digits as mean something."""
    return [[float(f"{value:.6g}") for value in (s.seconds, s.before, s.after)] for s in samples]


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as JSON, a line for each field and for each list of numbers; numbers must be finite."""
    text = json.dumps(value, indent=1, allow_nan=False)
    text = re.sub(r"\[\s+([-+.\de,\s]+?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")


def drop_note(report: Mapping[str, Any], results: Iterable[Mapping[str, Any]]) -> str:
    """How many samples were dropped, and what else says that the figures mean little."""
    found = list(results)
    kept, dropped = (sum(result[key] for result in found) for key in ("kept", "dropped"))
    text = f"{dropped} of {kept + dropped} samples were dropped, since the machine was slow beside them."
    if any(result["noisy"] for result in found):
        text += " Where `~` stands no sample was quiet: take no figure from there."
    if report["busy"]:
        text += f" **Take no figure from here**: {report['busy']}."
    return text


def say(text: str) -> None:
    """A line on stderr, where all that is no result goes."""
    print(text, file=sys.stderr, flush=True)


def at_least(least: int) -> Callable[[str], int]:
    """An argument type: a whole number of ``least`` or more."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r}; expected a whole number of {least} or more")
        return value

    return parse


def positive(text: str) -> float:
    """An argument type: a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a number above 0")
    return value


def add_common_arguments(parser: argparse.ArgumentParser, repeats: int) -> None:
    """Options that all programs have."""
    parser.add_argument(
        "--repeats", type=at_least(1), default=repeats, help="quiet samples of each contender"
    )
    parser.add_argument(
        "--devices",
        nargs="+",
        metavar="ID",
        help="OpenCL CPU devices to measure, such as opencl:1 (default: all)",
    )
    parser.add_argument(
        "--quiet-limit",
        type=positive,
        default=QUIET_LIMIT,
        help="share of the fastest probe that those of a sample must reach; above 1: GFLOP/s "
        "(default: %(default)s)",
    )
    parser.add_argument("--force", action="store_true", help="measure although the machine is busy")
    parser.add_argument(
        "--output", type=Path, help="the JSON file to write (default: a dated one in bench/results)"
    )


def cpu_devices(wanted: Sequence[str] | None) -> tuple[list[Any], dict[str, str]]:
    """The OpenCL CPU devices to measure, and the reason why each other one is left out.

    This also brings the OpenCL drivers in before OpenVINO is imported, which comes with an older copy of a
    library that one of them needs.
    """
    import dispatcher

    chosen, left_out = [], {}
    found = {device.id: device for device in dispatcher.devices() if device.backend == "opencl"}
    for name in wanted or []:
        if name not in found:
            left_out[name] = f"there is no such device; there is {', '.join(found) or 'none'}"
    for name, device in found.items():
        units = device.facts.get("compute_units")
        if wanted and name not in wanted:
            continue
        if not device.available:
            left_out[name] = device.reason or "not available"
        elif device.kind != "cpu":
            left_out[name] = f"{device.name} is not a CPU"
        elif units != cores():
            left_out[name] = f"it uses {units} threads, and this process may use {cores()} cores"
        else:
            chosen.append(device)
    return chosen, left_out


def device_label(device: Any) -> str:
    """What tables call our backend on a device."""
    platform = str(device.facts.get("platform", device.name))
    return f"ours on {SHORT_PLATFORMS.get(platform, platform)}"


def start(
    arguments: argparse.Namespace, *, copy_mebibytes: int = 256
) -> tuple[list[Any], dict[str, str], FmaProbe]:
    """Refuse a busy machine, find the devices, and calibrate the probe on the first of them.

    Raises:
        SystemExit: with exit code 3 when the machine is busy or there is no device.
    """
    reason = busy_reason(foreign_load())
    if reason is not None and not arguments.force:
        say(f"{reason}; wait until it is quiet, or pass --force to measure all the same")
        raise SystemExit(3)
    devices, left_out = cpu_devices(arguments.devices)
    for name, why in left_out.items():
        say(f"{name} is left out: {why}")
    if not devices:
        say("there is no OpenCL CPU device to measure; pip install '.[cpu]'")
        raise SystemExit(3)
    return devices, left_out, FmaProbe.on(devices[0].index, copy_mebibytes=copy_mebibytes)
