"""A compiled operator on one CUDA device: moves data, fills in pointers and launches."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import numpy as np

from dispatcher.backends.cuda.driver import Block, Context, DeviceArray, Lane, device_of, interface_of
from dispatcher.backends.cuda.program import Launch, PackedWeight, Program, Reference, strided_copy
from dispatcher.backends.cuda.toolkit import Toolkit
from dispatcher.errors import InputError
from dispatcher.interface import PlannedLaunch, Tensors, Timings, bits_of

_VECTOR_BYTES = 16
_COMPILERS = 4  # compilations at the same time
_MEMORY = "memory_in_stream"  # how an array offers memory of its library


class CudaExecutable:
    """See :class:`dispatcher.interface.Executable`."""

    def __init__(self, program: Program, context: Context, compiler: Toolkit, stream: int | None) -> None:
        self._program, self._context, self._compiler = program, context, compiler
        self._foreign_stream = stream
        self._lock = threading.Lock()
        # Packed weights by number, with what they were packed from. Whoever still uses older ones refers to them.
        self._packed: dict[int, tuple[np.ndarray, Block]] = {}
        launches = [*program.launches, *(packed.launch for packed in program.packed)]
        kernels = list(dict.fromkeys(launch.kernel for launch in launches))
        with ThreadPoolExecutor(_COMPILERS) as pool:
            list(pool.map(lambda kernel: context.module(kernel, compiler), kernels))
        with context.active():
            self._functions = {
                launch.kernel: context.function(launch.kernel, launch.name, launch.shared_bytes, compiler)
                for launch in launches
            }
            self._tables = context.allocate([table.nbytes for table in program.tables])
            with context.stream() as own:  # whose work is done at the end
                for block, table in zip(self._tables, program.tables, strict=True):
                    if table.nbytes:
                        context.driver.memcpy_htod_async(int(block), np.ascontiguousarray(table), own)

    @property
    def launches(self) -> Sequence[PlannedLaunch]:
        """The launches that one call makes, in order."""
        return tuple(self._program.planned)

    def __call__(self, tensors: Tensors, output: Any = None, timings: Timings | None = None) -> Any:
        """Run once; see :meth:`dispatcher.interface.Executable.__call__`.

        Tensors that expose ``__cuda_array_interface__`` are used in place; where any does, a new result stays
        on the device too, as a :class:`DeviceArray`. ``output`` may also expose the interface.

        The work goes in the stream of the option ``stream``, or else in the one that ``output`` names, and is not
        waited for where nothing but arrays on the device takes part in it. Without such a stream the call waits.
        """
        operator, target = self._program.operator, interface_of(output)
        on_device = target is not None or (
            output is None and any(interface_of(tensor) is not None for tensor in tensors.values())
        )
        if operator.empty:
            return self._empty(output, on_device)
        home = self._foreign_stream if self._foreign_stream is not None or target is None else target.get("stream")
        call = _Call(self, output, home, timings)
        with self._context.active(), closing(call), self._context.lane(home) as call.lane:
            return call.run(tensors, output, on_device)

    def _empty(self, output: Any, on_device: bool) -> Any:
        operator = self._program.operator
        if output is not None:
            return output
        if on_device:
            return DeviceArray(self._context, operator.output_shape, np.dtype(operator.dtype), None)
        return np.empty(operator.output_shape, operator.dtype)

    # ---- weights -------------------------------------------------------------------------------------------
    def _packed_weights(self, call: _Call, number: int, weight: np.ndarray) -> int:
        """Address of the packed form of host tensor ``weight``, made again only when its bytes changed."""
        with self._lock:
            packed = self._packed.get(number)
            if packed is None or not _same_bytes(packed[0], weight):
                recipe = self._program.packed[number]
                call.refuse_capture(
                    f"weight {recipe.tensor} in host memory is packed at the first call with it; make that call before "
                    "the capture"
                )
                size = recipe.elements * np.dtype(self._program.compute).itemsize
                packed = weight.copy(), self._context.allocate([size])[0]
                call.borrowed.append(packed[1])  # until nothing is written to it any more
                call.pack(recipe, call.upload(packed[0]), int(packed[1]))
                call.stream.synchronize()
                self._packed[number] = packed
            call.borrowed.append(packed[1])  # another thread may pack other weights meanwhile
            call.kept.append(packed[1])
        return int(packed[1])


def _same_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.array_equal(a.view(f"u{a.itemsize}"), b.view(f"u{b.itemsize}")))


def _c_contiguous(shape: Sequence[int], strides: Sequence[int] | None, itemsize: int) -> bool:
    """True when strides, in bytes, are those of C order; None stands for that."""
    if strides is None:
        return True
    step = itemsize
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and stride != step:
            return False
        step *= extent
    return True


class _Call:
    """One call: the memory it borrowed and the kernels in flight."""

    lane: Lane

    def __init__(self, executable: CudaExecutable, output: Any, home: int | None, timings: Timings | None) -> None:
        self.executable, self.timings = executable, timings
        self.context = executable._context
        self.driver = self.context.driver
        self.program = executable._program
        self.memory = getattr(output, _MEMORY, None)  # of a library that knows of streams and captures
        self.borrowed: list[Any] = []
        self.kept: list[Any] = [executable]  # as long as the work needs it
        self.home, self.joined = home, {home}  # the stream that it belongs in, and those that were waited for
        self.in_flight: list[str] = []
        self.events: list[tuple[str, Any, Any]] = []

    @property
    def stream(self) -> Any:
        """PyCUDA's stream for all of the call."""
        return self.lane.stream

    def close(self) -> None:
        """Give borrowed memory back; what is in flight still comes before what uses it next."""
        self.borrowed.clear()

    def refuse_capture(self, reason: str) -> None:
        """Refuse to become part of a CUDA graph.

        Raises:
            InputError: the call is in a capture.
        """
        if self.lane.capture:
            raise InputError(f"the call cannot become part of a CUDA graph: {reason}")

    def borrow(self, *sizes: int) -> list[int]:
        """Addresses of device memory for this call."""
        if self.memory is not None:
            taken = [self.memory(size) for size in sizes]
            self.borrowed += taken
            return [address for _, address in taken]
        blocks = self.context.allocate(sizes, self.lane.free)
        self.borrowed += blocks
        return [int(block) for block in blocks]

    def upload(self, array: np.ndarray, address: int | None = None) -> int:
        """Copy a host array to the device; returns its address."""
        if address is None:
            (address,) = self.borrow(array.nbytes)
        self.driver.memcpy_htod_async(address, bits_of(array), self.stream)
        return address

    # ---- launches ------------------------------------------------------------------------------------------
    def launch(self, launch: Launch, addresses: Mapping[Reference, int]) -> None:
        parameters = launch.parameters.copy()
        for path, reference in launch.pointers:
            place: Any = parameters
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = addresses[reference]
        start = self.event()
        try:
            self.executable._functions[launch.kernel](
                parameters[()], grid=(launch.blocks, 1, 1), block=(launch.threads, 1, 1),
                shared=launch.shared_bytes, stream=self.stream,
            )  # fmt: skip
        except self.driver.Error as error:
            raise self.context.failure(f"kernel {launch.name}", error) from error
        self.in_flight.append(launch.name)
        if start is not None:
            self.events.append((launch.name, start, self.event()))

    def event(self) -> Any:
        """A recorded event, or None where nobody wants times."""
        if self.timings is None:
            return None
        event = self.driver.Event()
        event.record(self.stream)
        return event

    def pack(self, packed: PackedWeight, weight: int, address: int) -> None:
        """Pack a weight tensor that lies at ``weight`` to ``address``."""
        tables = self.tables()
        tables[Reference("tensor", packed.tensor)] = weight
        for path, reference in packed.launch.pointers:
            if path == ("packed",):
                tables[reference] = address
        self.launch(packed.launch, tables)

    def tables(self) -> dict[Reference, int]:
        """Addresses of the program's tables."""
        return {Reference("table", number): int(block) for number, block in enumerate(self.executable._tables)}

    # ---- the whole -----------------------------------------------------------------------------------------
    def run(self, tensors: Tensors, output: Any, on_device: bool) -> Any:
        operator, program = self.program.operator, self.program
        dtype = np.dtype(operator.dtype)
        result_bytes = math.prod(operator.output_shape) * dtype.itemsize
        start = self.event()
        hosts = {name: tensor for name, tensor in tensors.items() if interface_of(tensor) is None}
        uploads = {name: tensor for name, tensor in hosts.items() if self._is_read(name)}
        waits = self.home is None or bool(uploads) or not on_device or self.timings is not None
        if waits:
            self.refuse_capture(
                f"{next(iter(uploads))} lies in host memory; give it on the device" if uploads
                else "its result goes to host memory" if not on_device else "its times are wanted"
            )  # fmt: skip
        sizes = [tensor.nbytes for tensor in uploads.values()]
        values = [program.value_bytes(index) for index in program.values]
        target = self._output_address(output) if output is not None and on_device else None
        blocks = self.borrow(*sizes, *values, *program.scratch_bytes, *([] if target else [result_bytes]))
        if target is None:
            target = blocks[-1]
        addresses = self.tables()
        for name, address in zip(uploads, blocks, strict=False):
            addresses[Reference("tensor", name)] = self.upload(uploads[name], address)
        for index, address in zip(program.values, blocks[len(sizes) :], strict=False):
            addresses[Reference("value", index)] = address
        for number, address in enumerate(blocks[len(sizes) + len(values) :][: len(program.scratch_bytes)]):
            addresses[Reference("scratch", number)] = address
        addresses[Reference("value", len(operator.steps))] = target
        for name, tensor in tensors.items():
            if name not in hosts:
                addresses[Reference("tensor", name)] = self._in_place(name, tensor)
        uploaded = self.event()
        for number, packed in enumerate(program.packed):
            if packed.tensor in hosts:
                address = self.executable._packed_weights(self, number, hosts[packed.tensor])
            else:
                (address,) = self.borrow(packed.elements * np.dtype(program.compute).itemsize)
                self.pack(packed, addresses[Reference("tensor", packed.tensor)], address)
            addresses[Reference("packed", number)] = address
        before = self.event()
        for launch in program.launches:
            self.launch(launch, addresses)
        after = self.event()
        maker = None if waits or self.lane.capture else self.lane  # what a graph makes is there after a replay
        result = self._result(output, on_device, target, result_bytes, maker)
        done = self.event()
        if waits:
            self._finish()
        else:
            self._go_on(tensors, output)
        if self.timings is not None:
            self.timings.upload_s = 1e-3 * uploaded.time_since(start)
            self.timings.kernel_s = 1e-3 * after.time_since(before)
            self.timings.download_s = 1e-3 * done.time_since(after)
            self.timings.launches = [(name, 1e-3 * b.time_since(a)) for name, a, b in self.events]
            self.timings.clock = "device"
        return result

    def _is_read(self, name: str) -> bool:
        """Do launches read tensor ``name`` itself, not only its packed form?"""
        reference = Reference("tensor", name)
        return any(reference == pointer for launch in self.program.launches for _, pointer in launch.pointers)

    def _finish(self) -> None:
        try:
            self.stream.synchronize()
        except self.driver.Error as error:
            names = ", ".join(dict.fromkeys(self.in_flight))
            raise self.context.failure(f"kernel {names}", error) from error

    def _go_on(self, tensors: Tensors, output: Any) -> None:
        """Return before the work is done."""
        if not self.lane.capture:  # what a graph reads and writes is its maker's business
            self.kept += [each for each in (*tensors.values(), output) if not hasattr(each, _MEMORY)]
        self.context.keep(self.lane, *self.kept)
        named = (interface_of(output) or {}).get("stream", self.home)  # where others look for the result
        if named not in (None, self.home) and self.context.capture(named) == self.lane.capture:
            self.context.order(self.stream.handle, named)

    def _result(self, output: Any, on_device: bool, target: int, size: int, lane: Lane | None) -> Any:
        operator = self.program.operator
        dtype = np.dtype(operator.dtype)
        if on_device and output is None:
            block = next(block for block in self.borrowed if int(block) == target)
            return DeviceArray(self.context, operator.output_shape, dtype, block, lane)
        if on_device:
            wanted = interface_of(output)
            assert wanted is not None
            if wanted["data"][0] != target:
                self.driver.memcpy_dtod_async(wanted["data"][0], target, size, self.stream)
            return output
        result = np.empty(operator.output_shape, dtype) if output is None else output
        try:
            self.driver.memcpy_dtoh_async(bits_of(result), target, self.stream)
        except self.driver.Error as error:
            names = ", ".join(dict.fromkeys(self.in_flight))
            raise self.context.failure(f"kernel {names}", error) from error
        return result

    # ---- arrays that live on the device --------------------------------------------------------------------
    def _check(self, name: str, interface: Mapping[str, Any], shape: tuple[int, ...]) -> int:
        """Address of an array that must have ``shape`` and the operator's dtype, and be on this device."""
        dtype = np.dtype(self.program.operator.dtype)
        if tuple(interface["shape"]) != tuple(shape) or np.dtype(interface["typestr"]) != dtype:
            raise InputError(
                f"{name} is {interface['typestr']} of shape {tuple(interface['shape'])}; expected {dtype} of {shape}"
            )
        address = int(interface["data"][0])
        device = device_of(address) if self.driver.Device.count() > 1 else None
        if device is not None and device != self.context.index:
            raise InputError(f"{name} is on cuda:{device}; expected cuda:{self.context.index}, or a host array")
        stream = interface.get("stream")
        if stream is not None and stream not in self.joined:
            self.context.join(self.lane, int(stream))
            self.joined.add(stream)
        return address

    def _in_place(self, name: str, tensor: Any) -> int:
        """Address of a tensor argument on the device, or of a copy where strides or alignment do not suit."""
        interface = interface_of(tensor)
        assert interface is not None
        shape = self.program.operator.tensor_shapes[name]
        address = self._check(name, interface, shape)
        itemsize = np.dtype(self.program.operator.dtype).itemsize
        strides = interface.get("strides")
        if any(number % itemsize for number in (address, *(strides or ()))):
            raise InputError(f"{name} has elements at addresses that are no multiple of {itemsize} bytes")
        if _c_contiguous(shape, strides, itemsize):
            strides = None
        if strides is None and address % _VECTOR_BYTES == 0:
            return address
        (copy,) = self.borrow(math.prod(shape) * itemsize)
        steps = None if strides is None else [stride // itemsize for stride in strides]
        launch = strided_copy(self.program, shape, steps)
        function = self.context.function(launch.kernel, launch.name, 0, self.executable._compiler)
        self.executable._functions[launch.kernel] = function
        self.launch(launch, {Reference("tensor", "from"): address, Reference("tensor", "to"): copy})
        return copy

    def _output_address(self, output: Any) -> int | None:
        """Address to write the result to in place, or None where a copy is needed afterwards."""
        interface = interface_of(output)
        assert interface is not None
        operator = self.program.operator
        address = self._check("output", interface, operator.output_shape)
        if interface["data"][1]:
            raise InputError("output is read-only; expected an array that can be written")
        if not _c_contiguous(operator.output_shape, interface.get("strides"), np.dtype(operator.dtype).itemsize):
            raise InputError("output is not C-contiguous; make it so, or leave it out")
        return address if address % _VECTOR_BYTES == 0 else None
