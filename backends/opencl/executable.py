"""A compiled operator on one OpenCL device: its launches, buffers and packed weights."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyopencl as cl

from dispatcher.backends.opencl import lines
from dispatcher.backends.opencl.fusion import LineFusion, sort_epilogue
from dispatcher.backends.opencl.launches import Call, Launch, Operands, Remembered, StepLaunch, step_launches
from dispatcher.backends.opencl.limits import Limits, limits_of
from dispatcher.backends.opencl.options import Options
from dispatcher.backends.opencl.render import defines, section
from dispatcher.backends.opencl.runtime import OpenClRuntime
from dispatcher.backends.opencl.tiles import LineLayout
from dispatcher.backends.opencl.winograd import pack_winograd_weights
from dispatcher.errors import DeviceMemoryError, KernelError
from dispatcher.interface import PlannedLaunch, Tensors, Timings
from dispatcher.ops.steps import ConvTranspose3d, Pointwise, Step
from dispatcher.plan.planner import Segment, plan
from dispatcher.problem.operator import Operator

#: Workers for each compute unit. A worker that finds no item left ends at once, so more than one costs
#: nothing, and no runtime can then pile all of them onto one thread.
WORKERS_PER_UNIT = 4
#: Neighbouring elements that a CPU's work-item converts between 16-bit and 32-bit floats; other devices' convert one.
HALF_RUN = 1024
#: Phases of a convolution over lines, each with weights and a table entry of its own; with more, most are holes.
MOST_PHASES = 512
#: A result larger than this is written past the caches. A value that the next launch reads has to be
#: larger than any cache first.
STREAM_BYTES = 8 << 20
STREAM_INTERMEDIATE_BYTES = 48 << 20


class LinesLaunch:
    """A convolution over lines with its fused steps, direct or Winograd."""

    def __init__(
        self,
        runtime: OpenClRuntime,
        operator: Operator,
        segment: Segment,
        real: np.dtype[Any],
        options: Options,
    ) -> None:
        facts = runtime.facts
        double = real == np.float64
        convolution = operator.steps[segment.convolution or 0]
        assert isinstance(convolution, ConvTranspose3d)
        epilogue = sort_epilogue(segment.epilogue(operator))
        tile, reason = lines.choose(convolution.geometry, epilogue.fold, runtime, real, options)
        self._layout = LineLayout(convolution.geometry, epilogue.fold, tile)
        self.guarded = tile.winograd
        self._pack = pack_winograd_weights if tile.winograd else lines.pack_direct_weights
        last = operator.steps[segment.last]
        prologue = [step for step in segment.prologue(operator) if isinstance(step, Pointwise)]
        final = segment.last + 1 == len(operator.steps)
        stays = STREAM_BYTES if final else STREAM_INTERMEDIATE_BYTES
        source = lines.render(
            self._layout,
            convolution,
            prologue,
            epilogue,
            last.shape,
            stream=math.prod(last.shape) * real.itemsize > stays,
            double=double,
        )
        self.source, self.output = operator.steps[segment.first].source, segment.last + 1
        self._runtime, self._real, self._weight = runtime, real, convolution.weight.name
        self._weights = Remembered()
        self._finite = True
        self._operands = Operands(runtime, source.operands, real)
        self._items = source.items * last.shape[0]
        self._workers = min(facts.compute_units * WORKERS_PER_UNIT, max(1, self._items))
        self._kernel = cl.Kernel(runtime.program(source.text), source.kernel)
        self.scratch_bytes = self._workers * source.scratch * real.itemsize
        self._scratch: Any = None
        self._counter = runtime.constant(np.zeros(3, np.int32))
        steps = operator.steps[segment.first : segment.last + 1]
        self.planned = PlannedLaunch(
            source.kernel,
            tuple(step.op for step in steps),
            "winograd" if tile.winograd else "direct",
            {
                "why": reason,
                "vector": tile.vec,
                "channels_x_vectors": f"{tile.thread_c}x{tile.thread_w}",
                "box": f"{tile.box_d}x{tile.box_h}",
                "line": "flat" if tile.flat else "rows",
                **({"rows": tile.rows} if tile.winograd else {}),
                "lanes_used": round(self._layout.lanes_used, 3),
                "scratch_bytes_per_worker": source.scratch * real.itemsize,
                "items": self._items,
                "workers": self._workers,
            },
            segment.note,
        )

    def prepare(self, tensors: Tensors) -> bool:
        self._operands.update(tensors)
        if self._weights.stale(tensors, [self._weight]):
            weight = np.asarray(tensors[self._weight], self._real)
            # Lines hold zeros for what lies outside the tensor, and zero times infinity is not zero.
            self._finite = bool(np.isfinite(weight).all())
            with np.errstate(invalid="ignore"):
                self._weights.buffer = self._runtime.constant(self._pack(weight, self._layout))
        return self._finite

    def met_nonfinite(self, queue: Any) -> bool:
        """Whether a finished Winograd launch met data that it is not right on; clears the flag."""
        if not self.guarded:
            return False
        flags = np.empty(3, np.int32)
        cl.enqueue_copy(queue, flags, self._counter, is_blocking=True)
        if flags[2]:
            cl.enqueue_copy(queue, self._counter, np.zeros(3, np.int32), is_blocking=True)
        return bool(flags[2])

    def enqueue(self, call: Call) -> None:
        if self._scratch is None:
            self._scratch = self._runtime.buffer(self.scratch_bytes)
            cl.enqueue_fill_buffer(call.queue, self._scratch, self._real.type(0), 0, self.scratch_bytes)
        self._kernel.set_args(
            call.values[self.source],
            self._weights.buffer,
            self._operands.buffer,
            call.values[self.output],
            self._scratch,
            self._counter,
            np.int32(self._items),
        )
        event = cl.enqueue_nd_range_kernel(call.queue, self._kernel, (self._workers,), (1,))
        call.events.append((self.planned.name, event))


def _phases(step: Step) -> int:
    """The phases of a convolution: the product of its strides."""
    assert isinstance(step, ConvTranspose3d)
    return math.prod(axis.stride for axis in step.geometry.axes)


def sharing_limits(runtime: OpenClRuntime) -> Limits | None:
    """The limits that single steps on a device keep to, as :class:`StepLaunch` takes them: None for CPUs."""
    return None if runtime.facts.cpu else limits_of(runtime)


def fused_launches(
    runtime: OpenClRuntime, operator: Operator, real: np.dtype[Any], options: Options
) -> list[Launch]:
    """The launches of an operator on a CPU device; the algorithm is auto, direct or winograd."""
    launches: list[Launch] = []
    limits = sharing_limits(runtime)
    segments = list(plan(operator, LineFusion()))
    position = 0
    while position < len(segments):
        segment = segments[position]
        if segment.convolution is not None and _phases(operator.steps[segment.convolution]) > MOST_PHASES:
            note = f"more than {MOST_PHASES} phases"
            launches += step_launches(runtime, operator, segment.first, segment.last, real, note, limits)
            position += 1
            continue
        if segment.convolution is not None:
            launches.append(LinesLaunch(runtime, operator, segment, real, options))
            position += 1
            continue
        end = position
        while end + 1 < len(segments) and segments[end + 1].convolution is None:
            end += 1
        launches += step_launches(
            runtime, operator, segment.first, segments[end].last, real, segment.note, limits
        )
        position = end + 1
    return launches


def plain_launches(runtime: OpenClRuntime, operator: Operator, real: np.dtype[Any]) -> list[Launch]:
    """The launches of an operator with every convolution gathered element by element."""
    limits = sharing_limits(runtime)
    return step_launches(runtime, operator, 0, len(operator.steps) - 1, real, "", limits)


def shared_storage(launches: Sequence[Launch]) -> dict[int, int]:
    """For each value that a launch makes, the value whose memory it lives in: its own, or a later one's.

    A step that writes each element after reading it may work in place, when nobody else reads its source.
    That saves the memory, and the traffic of writing to lines that no cache holds.
    """
    reads = Counter(launch.source for launch in launches)
    reads.update(
        value for launch in launches if isinstance(launch, StepLaunch) for value in launch.values_read
    )
    storage: dict[int, int] = {}
    for launch in reversed(launches):
        home = storage.setdefault(launch.output, launch.output)
        if isinstance(launch, StepLaunch) and launch.in_place and launch.source and reads[launch.source] == 1:
            storage[launch.source] = home
    return storage


class OpenClExecutable:
    """See :class:`dispatcher.interface.Executable`. Calls from several threads take turns."""

    def __init__(self, runtime: OpenClRuntime, operator: Operator, options: Options) -> None:
        self._runtime, self._operator = runtime, operator
        self._half = operator.dtype == "float16"
        self._real = np.dtype(np.float64 if operator.dtype == "float64" else np.float32)
        self._lock = threading.Lock()
        self._queue = runtime.queue()
        self._plans: dict[Options, list[Launch]] = {}
        # Tensors and result first: an operator that is far too large may take very long to plan.
        self._check_memory(self._outer_bytes())
        self._launches = self._plan(options)
        self._intermediate: dict[int, Any] = {}
        self._check_memory(self._outer_bytes() | self._inner_bytes())

    def _plan(self, options: Options) -> list[Launch]:
        """The launches of one algorithm, made when first needed."""
        if options not in self._plans:
            if options.algorithm == "gather":
                made = plain_launches(self._runtime, self._operator, self._real)
            elif options.algorithm == "tiled":
                from dispatcher.backends.opencl.tiled import tiled_launches

                made = tiled_launches(self._runtime, self._operator, self._real)
            else:
                made = fused_launches(self._runtime, self._operator, self._real, options)
            self._plans[options] = made
        return self._plans[options]

    @property
    def launches(self) -> Sequence[PlannedLaunch]:
        return [launch.planned for launch in self._launches]

    def _value_bytes(self, index: int) -> int:
        step = self._operator.steps[index - 1]
        return math.prod(step.shape) * self._real.itemsize

    def _outer_bytes(self) -> dict[str, int]:
        """Bytes of each tensor and of the result."""
        operator = self._operator
        named = {
            f"tensor {name}": math.prod(shape) * self._real.itemsize
            for name, shape in operator.tensor_shapes.items()
        }
        return named | {"output": self._value_bytes(len(operator.steps))}

    def _inner_bytes(self) -> dict[str, int]:
        """Bytes of the values between launches, and of scratch."""
        named: dict[str, int] = {}
        for home in set(shared_storage(self._launches).values()):
            if home != len(self._operator.steps):
                named[f"value {home} behind {self._operator.steps[home - 1].op}"] = self._value_bytes(home)
        for launch in self._launches:
            if isinstance(launch, LinesLaunch):
                named[f"scratch of {launch.planned.name} for value {launch.output}"] = launch.scratch_bytes
        return named

    def _check_memory(self, named: Mapping[str, int]) -> None:
        """See to it that all of ``named`` fits the device.

        Raises:
            DeviceMemoryError: it does not.
        """
        facts = self._runtime.facts
        name, largest = max(named.items(), key=lambda item: item[1])
        device = self._runtime.device.name.strip()
        if largest > facts.largest_buffer:
            raise DeviceMemoryError(
                f"{device}: the {name} takes {largest} bytes, more than the device's largest buffer of "
                f"{facts.largest_buffer} bytes; use a smaller batch, or device numpy"
            )
        if sum(named.values()) > facts.global_memory:
            raise DeviceMemoryError(
                f"{device}: the operator takes {sum(named.values())} bytes, more than the device's memory of "
                f"{facts.global_memory} bytes; use a smaller batch, or device numpy"
            )

    def __call__(
        self, tensors: Tensors, output: np.ndarray | None = None, timings: Timings | None = None
    ) -> np.ndarray:
        dtype = np.dtype(self._operator.dtype)
        if output is None:
            output = self._runtime.host.empty(self._operator.output_shape, dtype)
        with self._lock:
            try:
                self._run(tensors, output, timings)
            except cl.Error as error:
                raise self._failure(error) from error
        return output

    def _failure(self, error: Exception) -> KernelError:
        device = self._runtime.device.name.strip()
        names = ", ".join(launch.planned.name for launch in self._launches)
        if isinstance(error, cl.MemoryError):
            return DeviceMemoryError(
                f"{device}: out of memory while running {names}: {error}; use a smaller batch"
            )
        return KernelError(f"{device}: running {names} failed: {error}")

    def _run(self, tensors: Tensors, output: np.ndarray, timings: Timings | None) -> None:
        launches = self._launches
        if not all([launch.prepare(tensors) for launch in launches]):
            launches = self._plan(Options("gather"))
            for launch in launches:
                launch.prepare(tensors)
        self._run_launches(launches, tensors, output, timings)
        # Every guard is read, so that none stays set for the next call.
        if any([launch.met_nonfinite(self._queue) for launch in launches if isinstance(launch, LinesLaunch)]):
            launches = self._plan(Options("direct"))
            for launch in launches:
                launch.prepare(tensors)
            self._run_launches(launches, tensors, output, timings)

    def _run_launches(
        self, launches: Sequence[Launch], tensors: Tensors, output: np.ndarray, timings: Timings | None
    ) -> None:
        start = time.perf_counter()
        call = Call(self._queue, tensors, {})
        for name in {
            name for launch in launches if isinstance(launch, StepLaunch) for name in launch.tensor_names
        }:
            call.tensor_buffers[name] = self._upload(call, tensors[name])
        call.values[0] = self._upload(call, tensors[self._operator.source])
        final = len(self._operator.steps)
        target = self._target(output)
        call.values[final] = self._runtime.buffer(self._value_bytes(final)) if self._half else target
        for value, home in shared_storage(launches).items():
            if home != final and home not in self._intermediate:
                self._intermediate[home] = self._runtime.buffer(self._value_bytes(home))
            call.values[value] = call.values[final] if home == final else self._intermediate[home]
        if timings is not None:
            self._queue.finish()
            timings.upload_s += time.perf_counter() - start
        for launch in launches:
            launch.enqueue(call)
        if self._half:
            event = self._convert("float_to_half", call.values[final], target, output.size)
            call.events.append(("float_to_half", event))
        if timings is not None:
            self._queue.finish()
            spans = [(event.profile.start, event.profile.end) for _, event in call.events]
            timings.kernel_s += 1e-9 * (spans[-1][1] - spans[0][0])
            timings.launches += [
                (name, 1e-9 * (end - begin))
                for (name, _), (begin, end) in zip(call.events, spans, strict=True)
            ]
            timings.clock, timings.shared_memory = "device", self._runtime.facts.unified
        start = time.perf_counter()
        self._fetch(target, output)
        if timings is not None:
            timings.download_s += time.perf_counter() - start

    def _upload(self, call: Call, array: np.ndarray) -> Any:
        """A device buffer with the values of ``array`` as ``real``."""
        shared = self._runtime.facts.unified
        buffer = self._runtime.wrap(array) if shared else self._runtime.constant(array)
        if not self._half:
            return buffer
        real = self._runtime.buffer(array.size * self._real.itemsize)
        self._convert("half_to_float", buffer, real, array.size)
        return real

    def _convert(self, kernel: str, source: Any, target: Any, count: int) -> Any:
        """Enqueue a conversion; returns its event."""
        run = HALF_RUN if self._runtime.facts.cpu else 1
        function = cl.Kernel(self._runtime.program(section("convert.cl", defines({"RUN": run}))), kernel)
        function.set_args(source, target, np.uint64(count))
        return cl.enqueue_nd_range_kernel(self._queue, function, (-(-count // run),), None)

    def _target(self, output: np.ndarray) -> Any:
        if self._runtime.facts.unified:
            return self._runtime.wrap(output, writable=True)
        return self._runtime.buffer(output.nbytes)

    def _fetch(self, target: Any, output: np.ndarray) -> None:
        """Wait for the launches, and make the result visible in ``output``."""
        if self._runtime.facts.any_pointer:
            self._queue.finish()
        elif self._runtime.facts.unified:
            mapped, _ = cl.enqueue_map_buffer(
                self._queue, target, cl.map_flags.READ, 0, output.shape, output.dtype, is_blocking=True
            )
            mapped.base.release(self._queue)
            self._queue.finish()
        else:
            cl.enqueue_copy(self._queue, output, target, is_blocking=True)
