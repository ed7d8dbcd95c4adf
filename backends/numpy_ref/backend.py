"""The reference as a backend, and the way it walks through a pipeline.

Batch items are worked on a few at a time, so that memory does not grow with the batch; a pipeline in which
some step mixes batch items is worked on as a whole.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import numpy as np

from dispatcher.backends.numpy_ref.steps import Array, Progress, apply
from dispatcher.device.machine import cores
from dispatcher.errors import InputError
from dispatcher.interface import Device, PlannedLaunch, Roofline, Tensors, Timings
from dispatcher.ops.steps import Pointwise, ScalarOperand, Step, TensorOperand, ValueOperand
from dispatcher.problem.operator import Operator

#: A chunk of the batch holds one item, or as many as keep its largest value below this many elements.
CHUNK_ELEMENTS = 1 << 22
#: Threads are started while their chunks together have fewer elements than this: a limit on memory.
BUSY_ELEMENTS = 1 << 25

#: Matrices and arrays with which the machine's limits are measured: the array is larger than common caches.
ROOFLINE_EXTENT = 1024
ROOFLINE_BYTES = 256 << 20
ROOFLINE_TRIES = 5

T = TypeVar("T")


def largest_item(operator: Operator) -> int:
    """Elements that one batch item has in the largest value of the pipeline."""
    shapes = [operator.steps[0].input_shape, *(step.shape for step in operator.steps)]
    return max(math.prod(shape[1:]) for shape in shapes)


def chunks(operator: Operator) -> list[slice]:
    """The parts of the batch that are worked on one after another."""
    batch = operator.batch
    if operator.mixes_batch:
        return [slice(0, batch)]
    items = max(1, CHUNK_ELEMENTS // largest_item(operator))
    return [slice(start, min(start + items, batch)) for start in range(0, batch, items)]


def output_chunk(operator: Operator, chunk: slice) -> slice:
    """The part of the last value that ``chunk`` of the input's batch makes; all of it where items are mixed."""
    return slice(0, operator.steps[-1].shape[0]) if operator.mixes_batch else chunk


def walk(
    operator: Operator,
    tensors: Tensors,
    chunk: slice,
    load: Callable[[Array], T],
    compute: Callable[[Step, T, Sequence[T | float]], T],
) -> T:
    """Take one chunk of the batch through the pipeline.

    Args:
        operator: whose pipeline.
        tensors: every input tensor by name, of any float dtype.
        chunk: which batch items, out of :func:`chunks`.
        load: makes a value out of an input tensor, given as float64 with five axes.
        compute: makes the value of a step out of the step, its source and its operands.

    Returns:
        The last step's value; its elements may lie in memory in any order.
    """
    batch = operator.batch
    last_read: dict[int, int] = {}  # value to the index of the last step that reads it
    for index, step in enumerate(operator.steps):
        last_read[step.source] = index
        last_read.update({operand.value: index for operand in step.operands if isinstance(operand, ValueOperand)})

    def tensor(name: str, shape: Sequence[int], per_item: bool) -> T:
        array = np.asarray(tensors[name]).reshape(shape)
        return load((array[chunk] if per_item and shape[0] == batch else array).astype(np.float64))

    values: dict[int, T] = {0: tensor(operator.source, operator.steps[0].input_shape, True)}
    for index, step in enumerate(operator.steps):
        operands: list[T | float] = []
        for operand in step.operands:
            match operand:
                case ScalarOperand():
                    operands.append(operand.value)
                case TensorOperand():
                    operands.append(tensor(operand.name, operand.shape, isinstance(step, Pointwise)))
                case ValueOperand():
                    operands.append(values[operand.value])
        values[index + 1] = compute(step, values[step.source], operands)
        for value in [value for value in values if last_read.get(value, index + 1) <= index]:
            del values[value]
    return values[len(operator.steps)]


def for_each_chunk(operator: Operator, work: Callable[[slice], None]) -> None:
    """Call ``work`` for each of :func:`chunks`, in several threads where that helps and memory allows."""
    parts = chunks(operator)

    def quiet(chunk: slice) -> None:
        with np.errstate(all="ignore"):
            work(chunk)

    largest = largest_item(operator) * max((part.stop - part.start for part in parts), default=0)
    threads = min(len(parts), BUSY_ELEMENTS // max(1, largest))
    if threads < 2 or (threads := min(threads, cores())) < 2:
        for part in parts:
            quiet(part)
        return
    pool = ThreadPoolExecutor(threads)
    try:
        for _ in pool.map(quiet, parts):
            pass
    finally:
        pool.shutdown(cancel_futures=True)


class Meter:
    """Adds up the progress of all convolutions of a run; threads may share it.

    Args:
        report: told the fraction of the whole that is done, never by two threads at once; or None.
        convolutions: how many there are in the whole run.
    """

    def __init__(self, report: Progress | None, convolutions: int) -> None:
        self._report = report
        self._convolutions = convolutions
        self._done = 0.0
        self._lock = threading.Lock()

    def __call__(self, fraction: float) -> None:
        """Take the further fraction of one convolution that is done."""
        with self._lock:
            self._done += fraction
            if self._report is not None:
                self._report(min(1.0, self._done / self._convolutions))


def run_steps(operator: Operator, tensors: Tensors, result: np.ndarray, progress: Progress | None = None) -> None:
    """Compute the operator in float64, rounding once while storing into ``result``.

    Args:
        operator: what to compute.
        tensors: every input tensor by name, of any float dtype.
        result: ``operator.output_shape``, of any float dtype; overwritten.
        progress: told the fraction done, from time to time.
    """
    meter = Meter(progress, len(chunks(operator)) * len(operator.convolutions))
    whole = operator.with_all_axes(result)

    def work(chunk: slice) -> None:
        whole[output_chunk(operator, chunk)] = walk(
            operator, tensors, chunk, lambda array: array, partial(apply, advance=meter)
        )

    for_each_chunk(operator, work)
    if progress is not None:
        progress(1.0)


def reference(operator: Operator, tensors: Tensors, *, progress: Progress | None = None) -> Array:
    """The operator's exact result as far as float64 goes, not rounded to the operator's dtype.

    Args:
        operator: what to compute.
        tensors: every input tensor by name, of any float dtype.
        progress: told the fraction done, from time to time.

    Returns:
        ``operator.output_shape``, float64.
    """
    result = np.empty(operator.output_shape, np.float64)
    run_steps(operator, tensors, result, progress)
    return result


class NumpyExecutable:
    """The reference for one operator. It has no state, so any number of threads may call it."""

    def __init__(self, operator: Operator, progress: Progress | None) -> None:
        self._operator = operator
        self._progress = progress

    @property
    def launches(self) -> Sequence[PlannedLaunch]:
        """One: the whole pipeline, step after step."""
        steps = tuple(step.op for step in self._operator.steps)
        return (
            PlannedLaunch(
                "reference", steps, "scatter", {"chunks": len(chunks(self._operator))}, "step by step in float64"
            ),
        )

    def __call__(
        self, tensors: Tensors, output: np.ndarray | None = None, timings: Timings | None = None
    ) -> np.ndarray:
        """Compute in float64 and round once to the operator's dtype; see ``Executable``."""
        start = time.perf_counter()
        result = np.empty(self._operator.output_shape, self._operator.dtype) if output is None else output
        run_steps(self._operator, tensors, result, self._progress)
        if timings is not None:
            timings.kernel_s = time.perf_counter() - start
            timings.launches = [("reference", timings.kernel_s)]
            timings.clock, timings.shared_memory = "host", True
        return result


class NumpyBackend:
    """Runs every operator, on every machine."""

    name = "numpy"

    def probe(self) -> Sequence[Device]:
        """The one device there is."""
        return (Device("numpy", 0, f"NumPy {np.__version__} (reference, float64)", "reference"),)

    def supports(self, operator: Operator, device: Device) -> str | None:
        """Always None: the reference runs whatever can be described."""
        return None

    def compile(self, operator: Operator, device: Device, options: Mapping[str, Any]) -> NumpyExecutable:
        """Make the executable.

        Args:
            operator: what to compute.
            device: the device that :meth:`probe` gave.
            options: ``progress``, a function that is told the fraction done from time to time, perhaps by
                another thread than the caller's; or nothing.

        Raises:
            InputError: another option is given.
        """
        unknown = sorted(set(options) - {"progress"})
        if unknown:
            raise InputError(f"option {unknown[0]} is not known to the numpy backend, which has no options")
        return NumpyExecutable(operator, options.get("progress"))

    def roofline(self, device: Device, dtype: str) -> Roofline:
        """The best of a few matrix products and copies in float64, in which the reference computes."""
        factor = np.full((ROOFLINE_EXTENT, ROOFLINE_EXTENT), 0.5)
        product = np.empty_like(factor)
        flops = 2.0 * ROOFLINE_EXTENT**3
        source = np.ones(ROOFLINE_BYTES, np.uint8)  # zeros might all be one page of memory
        target = np.ones_like(source)
        return Roofline(
            flops / _shortest(lambda: np.matmul(factor, factor, out=product)) / 1e9,
            2.0 * source.nbytes / _shortest(lambda: np.copyto(target, source)) / 1e9,
            "float64",
            f"numpy.matmul of {ROOFLINE_EXTENT} x {ROOFLINE_EXTENT}, numpy.copyto of {ROOFLINE_BYTES >> 20} MiB",
        )

    def flush_caches(self, device: Device) -> None:
        """Nothing: it works in the host's memory."""


def _shortest(work: Callable[[], Any]) -> float:
    """Seconds of the shortest of a few runs, the first of which does not count."""
    times = []
    for _ in range(ROOFLINE_TRIES + 1):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times[1:])


BACKEND = NumpyBackend()
