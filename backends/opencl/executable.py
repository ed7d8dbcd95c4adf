"""A compiled operator on one OpenCL device: its launches, buffers and packed weights."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import pyopencl as cl

from dispatcher.backends.opencl.implementations import tasks_of
from dispatcher.backends.opencl.launches import Call, Kept, Launch, build
from dispatcher.backends.opencl.limits import limits_of
from dispatcher.backends.opencl.lowered import Rows, Tensor, Value
from dispatcher.backends.opencl.options import Options
from dispatcher.backends.opencl.render import defines, section
from dispatcher.backends.opencl.runtime import OpenClRuntime
from dispatcher.backends.opencl.target import Target
from dispatcher.errors import DeviceMemoryError, KernelError
from dispatcher.interface import PlannedLaunch, Tensors, Timings, bits_of
from dispatcher.ops.steps import Convolution
from dispatcher.problem.operator import Operator

#: Neighbouring elements that a CPU's work-item converts between 16-bit and 32-bit floats; other devices' convert one.
HALF_RUN = 1024
#: Operators of no more FLOPs and bytes than BRIEF are waited for without sleeping, for so many seconds: a thread that
#: slept is woken late, and with cold caches.
BRIEF, BRIEF_S = 1 << 20, 100e-6
#: FLOPs or bytes of operators whose workers are kept apart: shorter calls lose by it, and long ones gain little.
KEPT_APART = range(1 << 28, 1 << 33)


def launches_of(runtime: OpenClRuntime, operator: Operator, options: Options) -> list[Launch]:
    """The launches of an operator on a device, built."""
    target = Target(runtime.facts, limits_of(runtime), runtime.identity)
    refused: list[Convolution] = []
    while True:
        launches: list[Launch] = []
        for task in tasks_of(operator, target, options, refused):
            launch = build(runtime, task)
            if launch is None:
                # Its convolution is gathered then, and what would have run with it runs alone.
                assert task.group.convolution is not None and task.group.convolution not in refused
                refused.append(task.group.convolution)
                break
            launches.append(launch)
        else:
            return launches


def shared_storage(launches: Sequence[Launch]) -> dict[int, int]:
    """For each value that a launch makes, the value whose memory it lives in: its own, or a later one's.

    A step that writes each element after reading it may work in place, when nobody else reads its source.
    That saves the memory, and the traffic of writing to lines that no cache holds.
    """
    reads = Counter(value for launch in launches for value in launch.lowered.reads)
    storage: dict[int, int] = {}
    for launch in reversed(launches):
        lowered = launch.lowered
        if Value(lowered.output) not in lowered.arguments:
            continue
        home = storage.setdefault(lowered.output, lowered.output)
        if lowered.in_place and lowered.source and reads[lowered.source] == 1:
            storage[lowered.source] = home
    return storage


class Plan:
    """The launches of an operator by one algorithm, and what a call needs to know of them.

    Attributes:
        launches: in order.
        tensors: names of the tensors that launches read besides the pipeline's input and what is packed.
        packed: names of those that are packed.
        storage: see :func:`shared_storage`.
        in_result: values that live where the result does.
        rows_bytes: bytes of the statistics of each value.
    """

    def __init__(self, launches: Sequence[Launch], itemsize: int) -> None:
        arguments = [each for launch in launches for each in launch.lowered.arguments]
        self.launches = tuple(launches)
        self.tensors = tuple({each.name: None for each in arguments if isinstance(each, Tensor)})
        self.packed = tuple({name: None for launch in launches for name in launch.packed})
        self.storage = shared_storage(launches)
        self.in_result = [value for value, home in self.storage.items() if home == launches[-1].lowered.output]
        self.rows_bytes = {each.value: each.elements * itemsize for each in arguments if isinstance(each, Rows)}

    def prepare(self, kept: Kept, tensors: Tensors) -> str | None:
        """:meth:`Launch.prepare` of every launch; the algorithm to use instead of this one.

        A read-only array that was seen before holds a bound tensor, which nobody else has: of a caller's array each
        call gets a view of its own.
        """
        seen: dict[str, weakref.ref[np.ndarray]]
        instead: str | None
        seen, instead = kept.get((self, 0), ({}, None))
        changed = [name for name in self.packed if name not in seen or seen[name]() is not tensors[name]]
        if changed or (self, 0) not in kept:
            found = (name for launch in self.launches if (name := launch.prepare(kept, tensors, changed)))
            instead = max(found, default=None)
            seen |= {name: weakref.ref(tensors[name]) for name in changed if not tensors[name].flags.writeable}
            kept[self, 0] = seen, instead
        return instead


class OpenClExecutable:
    """See :class:`dispatcher.interface.Executable`. Calls from several threads take turns."""

    def __init__(self, runtime: OpenClRuntime, operator: Operator, options: Options) -> None:
        self._runtime, self._operator, self._options = runtime, operator, options
        self._half = operator.dtype in ("float16", "bfloat16")
        self._real = np.dtype(np.float64 if operator.dtype == "float64" else np.float32)
        self._lock = threading.Lock()
        self._queue = runtime.queue()
        work = max(operator.flops, operator.ideal_bytes)
        # A device of one unit may need the core that would wait.
        self._brief = runtime.facts.compute_units > 1 and work <= BRIEF
        self._apart = runtime.workers.apart if runtime.facts.cpu and work in KEPT_APART else nullcontext
        self._final = len(operator.steps)
        self._result_bytes = math.prod(operator.output_shape) * (2 if self._half else self._real.itemsize)
        self._plans: dict[Options, Plan] = {}
        # Tensors and result first: an operator that is far too large may take very long to plan.
        self._check_memory(self._outer_bytes())
        self._own = self._plan(options)
        self._kept: Kept = {}
        self._check_memory(self._outer_bytes() | self._inner_bytes())

    def _plan(self, options: Options) -> Plan:
        """The launches of one algorithm, made when first needed."""
        if options not in self._plans:
            launches = launches_of(self._runtime, self._operator, options)
            self._plans[options] = Plan(launches, self._real.itemsize)
        return self._plans[options]

    @property
    def launches(self) -> Sequence[PlannedLaunch]:
        return [launch.planned for launch in self._own.launches]

    @property
    def result_ready(self) -> bool:
        """Whether memory for a new result lies idle."""
        return self._runtime.host.ready(self._result_bytes)

    def _value_bytes(self, index: int) -> int:
        step = self._operator.steps[index - 1]
        return math.prod(step.shape) * self._real.itemsize

    def _outer_bytes(self) -> dict[str, int]:
        """Bytes of each tensor and of the result."""
        operator = self._operator
        named = {
            f"tensor {name}": math.prod(shape) * self._real.itemsize for name, shape in operator.tensor_shapes.items()
        }
        return named | {"output": self._value_bytes(self._final)}

    def _inner_bytes(self) -> dict[str, int]:
        """Bytes of the values between launches, and of scratch."""
        named: dict[str, int] = {}
        for home in set(self._own.storage.values()):
            if home != self._final:
                named[f"value {home} behind {self._operator.steps[home - 1].op}"] = self._value_bytes(home)
        for launch in self._own.launches:
            if launch.scratch_bytes:
                output = launch.lowered.output
                named[f"scratch of {launch.planned.name} for value {output}"] = launch.scratch_bytes
        for value, nbytes in self._own.rows_bytes.items():
            named[f"statistics of value {value}"] = nbytes
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
        try:
            with self._lock, self._apart():
                # A call that is broken off leaves nothing: what it had may be half made, or still be written to.
                kept, self._kept = self._kept, {}
                self._run(kept, tensors, bits_of(output), timings)
                self._kept = kept
        except BaseException as error:
            with suppress(cl.Error):
                self._queue.finish()  # the caller may use the output and the tensors for something else now
            if isinstance(error, cl.Error):
                raise self._failure(error) from error
            raise
        return output

    def _failure(self, error: Exception) -> KernelError:
        device = self._runtime.device.name.strip()
        names = ", ".join(launch.planned.name for launch in self._own.launches)
        if isinstance(error, cl.MemoryError):
            return DeviceMemoryError(f"{device}: out of memory while running {names}: {error}; use a smaller batch")
        return KernelError(f"{device}: running {names} failed: {error}")

    def _run(self, kept: Kept, tensors: Tensors, output: np.ndarray, timings: Timings | None) -> None:
        plan = self._own
        instead = plan.prepare(kept, tensors)
        if instead is not None:
            plan = self._plan(Options(instead, fusion=self._options.fusion))
            plan.prepare(kept, tensors)
        call = Call(self._queue, kept, {})
        self._run_launches(plan, call, tensors, output, timings)
        # Every guard is read, so that none stays set for the next call.
        if any([launch.met_nonfinite(call) for launch in plan.launches]):
            plan = self._plan(Options("direct", fusion=self._options.fusion))
            plan.prepare(kept, tensors)
            self._run_launches(plan, Call(self._queue, kept, {}), tensors, output, timings)

    def _run_launches(
        self, plan: Plan, call: Call, tensors: Tensors, output: np.ndarray, timings: Timings | None
    ) -> None:
        start = time.perf_counter()
        for name in plan.tensors:
            call.tensors[name] = self._upload(call, tensors[name])
        call.values[0] = self._upload(call, tensors[self._operator.source])
        target = self._target(output)
        final = self._runtime.buffer(self._value_bytes(self._final)) if self._half else target
        call.values |= dict.fromkeys((self._final, *plan.in_result), final)
        if (plan, 1) not in call.kept:
            call.kept[plan, 1] = self._memory_between(plan, call)
        call.between, call.rows = call.kept[plan, 1]
        call.values |= call.between
        if timings is not None:
            self._queue.finish()
            timings.upload_s += time.perf_counter() - start
        for launch in plan.launches:
            launch.enqueue(call)
        if self._half:
            name = f"float_to_{self._operator.dtype}"
            call.events.append((name, self._convert(name, call.values[self._final], target, output.size)))
        if timings is not None:
            self._queue.finish()
            spans = [(event.profile.start, event.profile.end) for _, event in call.events]
            timings.kernel_s += 1e-9 * (spans[-1][1] - spans[0][0])
            timings.launches += [
                (name, 1e-9 * (end - begin)) for (name, _), (begin, end) in zip(call.events, spans, strict=True)
            ]
            timings.clock, timings.shared_memory = "device", self._runtime.facts.unified
        start = time.perf_counter()
        self._fetch(target, output)
        if timings is not None:
            timings.download_s += time.perf_counter() - start

    def _memory_between(self, plan: Plan, call: Call) -> tuple[dict[int, Any], dict[int, Any]]:
        """Buffers of the values between a plan's launches, and of statistics: another plan's where it has some."""

        def buffer(kind: str, value: int, nbytes: int) -> Any:
            if (kind, value) not in call.kept:
                call.kept[kind, value] = self._runtime.buffer(nbytes)
            return call.kept[kind, value]

        homes = {value: home for value, home in plan.storage.items() if value not in plan.in_result}
        values = {value: buffer("value", home, self._value_bytes(home)) for value, home in homes.items()}
        return values, {value: buffer("rows", value, nbytes) for value, nbytes in plan.rows_bytes.items()}

    def _upload(self, call: Call, array: np.ndarray) -> Any:
        """A device buffer with the values of ``array`` as ``real``."""
        shared, array = self._runtime.facts.unified, bits_of(array)
        buffer = self._runtime.wrap(array) if shared else self._runtime.constant(array)
        if not self._half:
            return buffer
        real = self._runtime.buffer(array.size * self._real.itemsize)
        self._convert(f"{self._operator.dtype}_to_float", buffer, real, array.size)
        return real

    def _convert(self, kernel: str, source: Any, target: Any, count: int) -> Any:
        """Enqueue a conversion; returns its event."""
        run = HALF_RUN if self._runtime.facts.cpu else 1
        function = self._runtime.kernel(section("convert.cl", defines({"RUN": run})), kernel)
        return function.enqueue(self._queue, -(-count // run), None, source, target, np.uint64(count))

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
                self._queue, target, cl.map_flags.READ, 0, output.shape, output.dtype, is_blocking=False
            )
            self._finish(mapped.base.release(self._queue))
        else:
            cl.enqueue_copy(self._queue, output, target, is_blocking=True)

    def _finish(self, last: Any) -> None:
        """Wait for the queue, whose last command has the event ``last``."""
        if self._brief:
            self._queue.flush()
            end, complete = time.perf_counter() + BRIEF_S, cl.command_execution_status.COMPLETE
            while last.command_execution_status > complete and time.perf_counter() < end:
                pass
        self._queue.finish()
