"""Timing a problem on a device: verify first, warm up, then time each call on the host's clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dispatcher.arguments import bind_arguments, sort_arguments
from dispatcher.compiled import ProblemLike
from dispatcher.errors import InputError, VerificationError
from dispatcher.explanation import device_dict, operator_dict, skipped_list
from dispatcher.inputs import check_seed, random_tensors
from dispatcher.interface import Device, Timings
from dispatcher.loader import load_problem
from dispatcher.operator import Operator
from dispatcher.selection import parse_request
from dispatcher.verification import Comparison, poisoned
from dispatcher.verifying import call_on, checksums, compare_run, comparison_dict

KERNEL_REPEATS = 3  # calls in which the device's clock is read


@dataclass(frozen=True)
class Benchmark:
    """How long one problem takes on one device.

    Attributes:
        operator: what was computed.
        device: where.
        skipped: (device or backend, reason) of each device that was preferred and passed over.
        seed: seed of the input tensors.
        comparison: the check before timing; None when it was left out.
        compile_s: seconds to compile.
        first_s: seconds of the first call after that, which may build and allocate more.
        times_s: seconds of each timed call on the host's clock (``time.perf_counter``), from arrays in host
            memory to the result in host memory.
        kernel_s: seconds that the launches took on the device's clock, in further calls, since measuring
            them may slow a call down; empty where the backend does not say.
    """

    operator: Operator
    device: Device
    skipped: tuple[tuple[str, str], ...]
    seed: int
    comparison: Comparison | None
    compile_s: float
    first_s: float
    times_s: tuple[float, ...]
    kernel_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """Median of ``times_s``."""
        return statistics.median(self.times_s)

    @property
    def quartiles_s(self) -> tuple[float, float]:
        """First and third quartile of ``times_s``."""
        low, high = np.quantile(self.times_s, [0.25, 0.75])
        return float(low), float(high)

    @property
    def gflops(self) -> float:
        """Billions of floating-point operations of the convolutions per second, at the median time."""
        return self.operator.flops / self.median_s / 1e9

    @property
    def ideal_gbytes_per_s(self) -> float:
        """Ideal bytes (each input and output once) per nanosecond, at the median time."""
        return self.operator.ideal_bytes / self.median_s / 1e9

    def as_dict(self) -> dict[str, Any]:
        """Plain lists, dicts, texts and numbers, ready for JSON."""
        return {
            **operator_dict(self.operator),
            "device": device_dict(self.device),
            "skipped": skipped_list(self.skipped),
            "seed": self.seed,
            "verified": None if self.comparison is None else self.comparison.passed,
            "comparison": comparison_dict(self.comparison),
            "clock": "time.perf_counter",
            "compile_s": self.compile_s,
            "first_s": self.first_s,
            "times_s": list(self.times_s),
            "median_s": self.median_s,
            "quartiles_s": list(self.quartiles_s),
            "min_s": min(self.times_s),
            "kernel_median_s": statistics.median(self.kernel_s) if self.kernel_s else None,
            "gflops": self.gflops,
            "ideal_gbytes_per_s": self.ideal_gbytes_per_s,
        }


def benchmark(
    problem: ProblemLike,
    *,
    device: str | Device | None = None,
    case: str | None = "sample",
    seed: int = 0,
    precision: str = "fp32",
    dtype: str | None = None,
    repeats: int = 10,
    warmup: int = 2,
    check: bool = True,
    options: Mapping[str, Any] | None = None,
    progress: Callable[[float], None] | None = None,
    **arguments: Any,
) -> Benchmark:
    """Time a problem on random inputs, after checking that its result is right.

    Each timed call takes arrays in host memory and writes into one result array that is allocated beforehand.

    Args:
        problem: see :func:`dispatcher.compile`, as for ``device``, ``precision``, ``dtype`` and ``options``.
        case: the case that the sizes come from; None when ``arguments`` give them all.
        seed: seed of the input tensors, from 0 to 2**64 - 1.
        repeats: timed calls, 1 or more.
        warmup: calls after the first one that are not timed.
        check: verify the first result before timing, and the last one where it differs.
        progress: told the fraction done of the check.
        **arguments: sizes and scalars that hold instead of the case's.

    Raises:
        VerificationError: the result is wrong; nothing is reported then.
        InputError: an argument is wrong, or the batch is empty, so that there is nothing to time.
        DeviceError: no device of the request can run the problem.
        KernelError: a kernel did not build or run on the device that was named.
    """
    check_seed(seed)
    for name, count, least in (("repeats", repeats, 1), ("warmup", warmup, 0)):
        if isinstance(count, bool) or not isinstance(count, int) or count < least:
            raise InputError(f"{name} is {count!r}; expected a whole number of {least} or more")
    loaded = load_problem(problem)
    parse_request(device)
    operator = bind_arguments(
        loaded, sort_arguments(loaded, arguments), case=case, dtype=dtype, precision=precision
    )
    if operator.empty:
        raise InputError(f"{loaded.name}: the batch is empty, so there is nothing to time")
    tensors = random_tensors(operator, seed)
    before = checksums(tensors)
    start = time.perf_counter()
    call = call_on(operator, tensors, device, options)
    compile_s = _since(start)
    result = poisoned(operator.output_shape, operator.dtype)
    start = time.perf_counter()
    call(output=result)
    first_s = _since(start)
    comparison = None
    if check:
        comparison = compare_run(operator, tensors, before, result, progress)
        _require(comparison, call.choice.device)
    timed = poisoned(operator.output_shape, operator.dtype)
    for _ in range(warmup):
        call(output=timed)
    times: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        call(output=timed)
        times.append(_since(start))
    kernels: list[float] = []
    for _ in range(min(repeats, KERNEL_REPEATS)):
        timings = Timings()
        call(output=timed, timings=timings)
        if timings.kernel_s > 0.0:
            kernels.append(timings.kernel_s)
    if check and (timed.tobytes() != result.tobytes() or checksums(tensors) != before):
        comparison = compare_run(operator, tensors, before, timed, progress)
        _require(comparison, call.choice.device)
    return Benchmark(
        operator,
        call.choice.device,
        call.choice.skipped,
        seed,
        comparison,
        compile_s,
        first_s,
        tuple(times),
        tuple(kernels),
    )


def _since(start: float) -> float:
    """Seconds since ``start``; never zero, whatever the clock's resolution."""
    return max(time.perf_counter() - start, 1e-9)


def _require(comparison: Comparison, device: Device) -> None:
    if not comparison.passed:
        raise VerificationError(f"wrong result on {device.id} ({device.name}): {comparison.reason}")
