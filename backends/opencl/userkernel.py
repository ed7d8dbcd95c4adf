"""A user's own ``__kernel``: built, checked against the problem's parameter list, and run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyopencl as cl

from dispatcher.backends.opencl.runtime import BUILD_OPTIONS, OpenClRuntime, build, first_error
from dispatcher.errors import BuildError, DeviceError, DeviceMemoryError, InputError, KernelError
from dispatcher.interface import MARGIN, MARGIN_BYTES, Device
from dispatcher.problem.userkernel import Kind, UserKernel

_ELEMENTS = {"float16": "half", "float32": "float", "float64": "double"}
#: Bytes of the scalar types that a kernel may have as parameters, as clGetKernelArgInfo calls them.
_SCALARS = {
    **dict.fromkeys(("char", "uchar"), 1),
    **dict.fromkeys(("short", "ushort", "half"), 2),
    **dict.fromkeys(("int", "uint", "float"), 4),
    **dict.fromkeys(("long", "ulong", "double"), 8),
}
_VECTOR = re.compile(r"(\D+?)(2|3|4|8|16)?\*")
_GLOBAL = (cl.kernel_arg_address_qualifier.GLOBAL, cl.kernel_arg_address_qualifier.CONSTANT)
_NO_MEMORY = (
    cl.status_code.MEM_OBJECT_ALLOCATION_FAILURE,
    cl.status_code.OUT_OF_RESOURCES,
    cl.status_code.OUT_OF_HOST_MEMORY,
    cl.status_code.INVALID_BUFFER_SIZE,
)


def load_kernel(runtime: OpenClRuntime, kernel: UserKernel, device: Device, scratch: Path) -> OpenClUserKernel:
    """See :meth:`dispatcher.interface.KernelHost.load_kernel`."""
    doubles = [name for name, kind in kernel.parameters if kind == "double"]
    if not runtime.facts.vec_double and (doubles or kernel.dtype == "float64"):
        needed = f"parameter {doubles[0]}, a double," if doubles else "float64"
        raise DeviceError(
            f"{device.id} ({device.name}) has no double precision (cl_khr_fp64), which {needed} needs; "
            "choose another device"
        )
    program = _build(runtime, kernel, scratch)
    names = program.get_info(cl.program_info.KERNEL_NAMES).split(";")
    if kernel.entry not in names:
        raise InputError(
            f"{kernel.file} has no __kernel {kernel.entry!r}; it has {', '.join(filter(None, names)) or 'none'}; "
            "name one of its own (--entry)"
        )
    function = cl.Kernel(program, kernel.entry)
    _check_parameters(function, kernel)
    return OpenClUserKernel(runtime, _with_sizes(function, kernel, runtime.device), function)


def _build(runtime: OpenClRuntime, kernel: UserKernel, scratch: Path) -> Any:
    """The program of the kernel's file.

    Raises:
        BuildError: the compiler refused it.
    """
    named = any(option.startswith("-cl-std") for option in kernel.build_options)
    options = [
        *(() if named else BUILD_OPTIONS),
        "-cl-kernel-arg-info",
        *("-I", kernel.include_path(scratch)),
        *kernel.build_options,
    ]
    try:
        return build(cl._cl._Program(runtime.context, kernel.source()), options)
    except cl.RuntimeError as error:
        log = _compiler_log(str(error))
        first = first_error(log) if "error" in log.lower() else log.partition("\n")[0]
        raise BuildError(f"the OpenCL compiler refused {kernel.file}: {first}", log) from error


def _compiler_log(message: str) -> str:
    """The compiler's own words in PyOpenCL's message, which has a head."""
    _, found, rest = message.partition("\n\nBuild on ")
    log = rest.partition("\n")[2] if found else message
    return log.strip()


def _check_parameters(function: Any, kernel: UserKernel) -> None:
    """See to it that the kernel has the problem's parameters, as far as the runtime tells.

    Raises:
        InputError: it has others.
    """
    element = _ELEMENTS[kernel.dtype]
    types: dict[Kind, str] = {
        "input": f"__global const {element}*", "output": f"__global {element}*", "size": "ulong", "double": "double",
    }  # fmt: skip
    wanted = kernel.declaration(types)
    count = function.num_args
    if count != len(kernel.parameters):
        raise InputError(
            f"{kernel.entry} in {kernel.file} has {count} parameters; expected {len(kernel.parameters)}: {wanted}"
        )
    for index, (name, kind) in enumerate(kernel.parameters):
        try:
            found = function.get_arg_info(index, cl.kernel_arg_info.TYPE_NAME).replace(" ", "")
            space = function.get_arg_info(index, cl.kernel_arg_info.ADDRESS_QUALIFIER)
        except cl.Error:
            return  # this runtime does not tell
        if not _fits(found, space, kind, element):
            raise InputError(
                f"{kernel.entry} in {kernel.file}: parameter {index + 1} ({name}) is {found}; "
                f"expected {types[kind]}, as in {wanted}"
            )


def _fits(found: str, space: int, kind: Kind, element: str) -> bool:
    """Whether a parameter's type, without qualifiers, is right; types of the user's own are taken on trust."""
    if kind in ("input", "output"):
        pointee = _VECTOR.fullmatch(found)
        known = pointee is not None and pointee[1] in _SCALARS
        return found.endswith("*") and space in _GLOBAL and (not known or pointee[1] == element)  # type: ignore[index]
    if found not in _SCALARS:
        return not found.endswith("*")
    return _SCALARS[found] == 8 and (found == "double") == (kind == "double")


def _with_sizes(function: Any, kernel: UserKernel, device: Any) -> UserKernel:
    """The kernel, with the size of a group that it declares where none is given.

    Raises:
        InputError: the device does not take the sizes, or the kernel is declared for others.
    """
    information, whole, local = cl.kernel_work_group_info, kernel.global_size or (), kernel.local_size
    declared = tuple(function.get_work_group_info(information.COMPILE_WORK_GROUP_SIZE, device))
    if any(declared):
        local = local or declared[: len(whole)]
        if (*local, 1, 1)[:3] != declared or any(size % step for size, step in zip(whole, local, strict=True)):
            wanted = ",".join(map(str, declared)).removesuffix(",1").removesuffix(",1")
            raise InputError(
                f"local_size is {kernel.local_size}, and {kernel.entry} in {kernel.file} is declared with "
                f"reqd_work_group_size{declared}; give local_size {wanted} (--local-size)"
            )
    if local is None:
        return kernel
    most = function.get_work_group_info(information.WORK_GROUP_SIZE, device)
    limits = device.max_work_item_sizes
    product = int(np.prod(local))
    if product > most or any(size > limit for size, limit in zip(local, limits, strict=False)):
        raise InputError(
            f"local_size is {local}; this device takes {most} work items in a group of this kernel, "
            f"and {tuple(limits)} along its dimensions"
        )
    return replace(kernel, local_size=local)


class OpenClUserKernel:
    """See :class:`dispatcher.interface.LoadedKernel`."""

    def __init__(self, runtime: OpenClRuntime, kernel: UserKernel, function: Any) -> None:
        self._runtime, self._kernel, self._function = runtime, kernel, function
        self._queue = runtime.queue()
        self._buffers: dict[str, Any] = {}

    def place(self, name: str, array: np.ndarray, margin: int = MARGIN) -> None:
        """See :meth:`dispatcher.interface.LoadedKernel.place`."""
        size = array.nbytes + 2 * MARGIN_BYTES
        try:
            if name not in self._buffers:
                # Inputs too may be written to, so that it shows when a kernel does that.
                self._buffers[name] = cl.Buffer(self._runtime.context, cl.mem_flags.READ_WRITE, size)
            buffer = self._buffers[name]
            cl.enqueue_fill_buffer(self._queue, buffer, np.uint8(margin), 0, size)
            cl.enqueue_copy(self._queue, buffer, array, dst_offset=MARGIN_BYTES)
            self._queue.finish()
        except cl.Error as error:
            if isinstance(error, cl.MemoryError) or error.code in _NO_MEMORY:
                raise DeviceMemoryError(
                    f"{name} takes {size} bytes; the device has {self._runtime.facts.global_memory} and gives "
                    f"{self._runtime.facts.largest_buffer} at once: {error}"
                ) from error
            raise KernelError(f"{name} cannot be put on the device: {error}") from error

    def poison(self, name: str) -> None:
        """See :meth:`dispatcher.interface.LoadedKernel.poison`."""
        buffer = self._buffers[name]
        try:
            cl.enqueue_fill_buffer(self._queue, buffer, np.uint8(MARGIN), MARGIN_BYTES, buffer.size - 2 * MARGIN_BYTES)
            self._queue.finish()
        except cl.Error as error:
            raise KernelError(f"{name} cannot be filled: {error}") from error

    def fetch(self, name: str, array: np.ndarray) -> tuple[bytes, bytes]:
        """See :meth:`dispatcher.interface.LoadedKernel.fetch`."""
        before, behind = np.empty(MARGIN_BYTES, np.uint8), np.empty(MARGIN_BYTES, np.uint8)
        try:
            buffer = self._buffers[name]
            cl.enqueue_copy(self._queue, array, buffer, src_offset=MARGIN_BYTES)
            cl.enqueue_copy(self._queue, before, buffer)
            cl.enqueue_copy(self._queue, behind, buffer, src_offset=MARGIN_BYTES + array.nbytes)
        except cl.Error as error:
            raise KernelError(f"{name} cannot be read back: {error}") from error
        return before.tobytes(), behind.tobytes()

    def launch(self, numbers: Mapping[str, int | float]) -> float:
        """See :meth:`dispatcher.interface.LoadedKernel.launch`."""
        kernel = self._kernel
        regions = []  # alive until the kernel has ended
        try:
            for index, (name, kind) in enumerate(kernel.parameters):
                if kind == "size":
                    self._function.set_arg(index, np.uint64(numbers[name]))
                elif kind == "double":
                    self._function.set_arg(index, np.float64(numbers[name]))
                else:
                    buffer = self._buffers[name]
                    regions.append(buffer.get_sub_region(MARGIN_BYTES, buffer.size - 2 * MARGIN_BYTES))
                    self._function.set_arg(index, regions[-1])
            event = cl.enqueue_nd_range_kernel(
                self._queue, self._function, cast(Any, kernel.global_size), kernel.local_size
            )
            self._queue.finish()
            event.wait()
        except cl.Error as error:
            if error.code == cl.status_code.INVALID_ARG_SIZE:
                raise InputError(
                    f"{kernel.entry} in {kernel.file}: parameter {index + 1} ({name}) does not have the size of a "
                    f"{'double' if kind == 'double' else 'ulong'}, 8 bytes"
                ) from error
            raise KernelError(f"{kernel.entry} failed: {error}") from error
        return 1e-9 * (event.profile.end - event.profile.start)
