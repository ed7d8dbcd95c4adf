"""A user's own CUDA code: a ``__global__`` kernel, or a function of the host that launches kernels itself.

Behind the user's file, in the same translation unit, stands a check of the parameter list (``signature.cuh``): the
compiler then knows the function by its name, whatever its linkage, and tells when its parameters are others.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dispatcher.backends.cuda.driver import Context
from dispatcher.backends.cuda.toolkit import KERNELS, Toolkit, architectures, run
from dispatcher.errors import BuildError, DeviceMemoryError, InputError, KernelError
from dispatcher.interface import MARGIN, MARGIN_BYTES, LoadedKernel
from dispatcher.problem.userkernel import Kind, UserKernel

#: How compilers call the lines behind the user's file.
_BEHIND = "parameter list"
#: Elements as the check takes them (see ``signature.cuh``) and as users write them.
_CHECKED = {"float16": "unsigned short", "float32": "float", "float64": "double"}
_WRITTEN = {**_CHECKED, "float16": "__half"}
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_AXES = "XYZ"
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
#: What is compiled for where there is no device, as far as the compiler knows it.
_USUAL_ARCHITECTURE = 90


class Architecture(NamedTuple):
    """What code is made for where there is no context: a compute capability as one number, such as 90."""

    architecture: int


def load_kernel(context: Context, compiler: Toolkit, kernel: UserKernel, scratch: Path) -> LoadedKernel:
    """See :meth:`dispatcher.interface.KernelHost.load_kernel`."""
    image = _build(context, compiler, kernel, scratch)
    return (HostFunction if kernel.global_size is None else GlobalKernel)(context, kernel, image)


def check_kernel(compiler: Toolkit, kernel: UserKernel, scratch: Path) -> str:
    """See :meth:`dispatcher.interface.KernelHost.check_kernel`."""
    known = architectures(compiler)
    target = Architecture(max((each for each in known if each <= _USUAL_ARCHITECTURE), default=_USUAL_ARCHITECTURE))
    _build(target, compiler, kernel, scratch)
    return f"for compute capability {target.architecture // 10}.{target.architecture % 10}"


def _build(context: Context | Architecture, compiler: Toolkit, kernel: UserKernel, scratch: Path) -> Path:
    """The cubin or the library of a kernel whose form goes with its sizes; see :func:`_compile`."""
    on_host = kernel.global_size is None
    is_kernel = is_global(kernel)
    if is_kernel and "__cluster_dims__" in _declaration(kernel):
        raise InputError(
            f"{kernel.entry} in {kernel.file} has __cluster_dims__; kernels are launched here without clusters: give "
            "the name of a function of the host that launches it"
        )
    if on_host and is_kernel:
        raise InputError(
            f"{kernel.entry} in {kernel.file} is a __global__ kernel; give global_size and local_size, or the name of "
            "a function that launches it"
        )
    if not on_host and not is_kernel:
        raise InputError(
            f"{kernel.file} has no __global__ kernel {kernel.entry!r}; leave global_size and local_size out for a "
            "function of the host"
        )
    return _compile(context, compiler, kernel, scratch)


def is_global(kernel: UserKernel) -> bool:
    """Whether the text makes the function a ``__global__`` one."""
    return bool(_declaration(kernel))


def _declaration(kernel: UserKernel) -> str:
    """What stands before a ``__global__`` kernel's parameters; nothing where the function is none."""
    text = _COMMENT.sub(" ", kernel.text)
    found = re.search(rf"[^;{{}}]*\b__global__\b[^;{{}}]*?\b{kernel.entry}\s*\(", text)
    return found[0] if found else ""


def _types(elements: Mapping[str, str], dtype: str) -> dict[Kind, str]:
    element = elements[dtype]
    return {"input": f"const {element}*", "output": f"{element}*", "size": "size_t", "double": "double"}


def translation_unit(kernel: UserKernel) -> str:
    """The user's file, and behind it what checks and finds the function."""
    types = _types(_CHECKED, kernel.dtype)
    wanted = ", ".join(types[kind] for _, kind in kernel.parameters)
    lines = [
        kernel.source(),
        f'#line 1 "{_BEHIND}"',
        "#define KERNEL_DISPATCHER_HOST" if kernel.global_size is None else "",
        (KERNELS / "signature.cuh").read_text(encoding="utf-8"),
        f"static_assert(kernel_dispatcher::Parameters<{wanted}>::fit<decltype(&{kernel.entry})>());",
    ]
    if kernel.global_size is None:
        lines.append(f'extern "C" {{ void *kernel_dispatcher_entry = reinterpret_cast<void *>(&{kernel.entry}); }}')
    return "\n".join(lines) + "\n"


def command_line(
    kernel: UserKernel, architecture: int, compiler: Toolkit, scratch: Path, source: Path, output: Path
) -> list[str]:
    """How the compiler is called: for a cubin, or for a shared library with a function of the host."""
    host = ["-shared", "-Xcompiler", "-fPIC"]
    named = any(option.lstrip("-").startswith("std") for option in kernel.build_options)
    return [
        *compiler.command, *(host if kernel.global_size is None else ["-cubin"]), f"-arch=sm_{architecture}",
        *([] if named else ["-std=c++17"]), "-O3", "-I", kernel.include_path(scratch), *kernel.build_options,
        "-o", str(output), str(source),
    ]  # fmt: skip


def _compile(context: Context | Architecture, compiler: Toolkit, kernel: UserKernel, scratch: Path) -> Path:
    """Compile the user's file; returns the cubin or the library.

    Raises:
        InputError: the function is missing, or has other parameters.
        BuildError: the compiler refused the file.
    """
    source, output = (scratch / "kernel.cu", scratch / ("kernel.so" if kernel.global_size is None else "kernel.cubin"))
    source.write_text(translation_unit(kernel), encoding="utf-8")
    try:
        run(command_line(kernel, context.architecture, compiler, scratch, source, output), output, kernel.file)
    except BuildError as error:
        wrong = [line for line in error.log.splitlines() if re.search(r"\berror\b", line)]
        if wrong and wrong[0].startswith(_BEHIND):
            raise InputError(
                f"{kernel.entry} in {kernel.file} does not have the problem's parameters: "
                f"{wrong[0].partition('error:')[2].strip()}; expected "
                f"{kernel.declaration(_types(_WRITTEN, kernel.dtype))}"
            ) from error
        raise
    return output


class _OnDevice:
    """The tensors of a kernel in the device's memory."""

    def __init__(self, context: Context, kernel: UserKernel) -> None:
        self._context, self._kernel = context, kernel
        self._blocks: dict[str, Any] = {}
        self._sizes: dict[str, int] = {}
        # It does not wait for the default stream, so that it shows when a thread goes on putting work into that.
        with self._active("making a stream") as driver:
            self._stream = driver.Stream(_NON_BLOCKING)

    @contextmanager
    def _active(self, what: str) -> Iterator[Any]:
        """The driver, with the context current; its errors are failures of ``what``."""
        driver = self._context.driver
        with self._context.active():
            try:
                yield driver
            except driver.MemoryError as error:
                raise DeviceMemoryError(
                    f"{what} does not fit into the {self._context.total_bytes} bytes of {self._context.name}"
                ) from error
            except driver.Error as error:
                raise self._context.failure(what, error) from error

    def place(self, name: str, array: np.ndarray, margin: int = MARGIN) -> None:
        """See :meth:`dispatcher.interface.LoadedKernel.place`."""
        size = array.nbytes + 2 * MARGIN_BYTES
        with self._active(f"{name} of {size} bytes") as driver:
            if name not in self._blocks:
                self._blocks[name], self._sizes[name] = driver.mem_alloc(size), array.nbytes
            driver.memset_d8(self._blocks[name], margin, size)
            driver.memcpy_htod(self._address(name), np.ascontiguousarray(array))

    def poison(self, name: str) -> None:
        """See :meth:`dispatcher.interface.LoadedKernel.poison`."""
        with self._active(f"filling {name}") as driver:
            driver.memset_d8(self._address(name), MARGIN, self._sizes[name])
            driver.Context.synchronize()

    def fetch(self, name: str, array: np.ndarray) -> tuple[bytes, bytes]:
        """See :meth:`dispatcher.interface.LoadedKernel.fetch`."""
        before, behind = np.empty(MARGIN_BYTES, np.uint8), np.empty(MARGIN_BYTES, np.uint8)
        with self._active(f"reading {name} back") as driver:
            driver.memcpy_dtoh_async(array, self._address(name), self._stream)
            self._stream.synchronize()
            driver.memcpy_dtoh(before, self._address(name) - MARGIN_BYTES)
            driver.memcpy_dtoh(behind, self._address(name) + array.nbytes)
        return before.tobytes(), behind.tobytes()

    def _address(self, name: str) -> int:
        return int(self._blocks[name]) + MARGIN_BYTES


class GlobalKernel(_OnDevice):
    """A ``__global__`` kernel; see :class:`dispatcher.interface.LoadedKernel`."""

    def __init__(self, context: Context, kernel: UserKernel, cubin: Path) -> None:
        super().__init__(context, kernel)
        assert kernel.global_size is not None
        assert kernel.local_size is not None
        padding = (1,) * (3 - len(kernel.local_size))
        self._block = (*kernel.local_size, *padding)
        blocks = [size // step for size, step in zip(kernel.global_size, kernel.local_size, strict=True)]
        self._grid = (*blocks, *padding)
        image = cubin.read_bytes()
        with self._active(f"loading {kernel.file}") as driver:
            self._module = driver.module_from_buffer(image)
            self._function = self._module.get_function(_symbol(image, kernel.entry))
            self._check_sizes(driver)

    def _check_sizes(self, driver: Any) -> None:
        """See to it that the device takes the sizes.

        Raises:
            InputError: it does not.
        """
        device, attributes = driver.Device(self._context.index), driver.device_attribute
        most = self._function.get_attribute(driver.function_attribute.MAX_THREADS_PER_BLOCK)
        if int(np.prod(self._block)) > most:
            raise InputError(
                f"local_size is {self._kernel.local_size}; a block of this kernel has {most} threads at most on "
                f"{self._context.name}"
            )
        for what, sizes, name in (("threads in a block", self._block, "BLOCK"), ("blocks", self._grid, "GRID")):
            for axis, size in zip(_AXES, sizes, strict=True):
                limit = device.get_attribute(getattr(attributes, f"MAX_{name}_DIM_{axis}"))
                if size > limit:
                    raise InputError(
                        f"global_size {self._kernel.global_size} with local_size {self._kernel.local_size} makes "
                        f"{size} {what} along {axis.lower()}; {self._context.name} takes {limit} at most"
                    )

    def launch(self, numbers: Mapping[str, int | float]) -> float:
        """See :meth:`dispatcher.interface.LoadedKernel.launch`."""
        arguments = [
            np.float64(numbers[name])
            if kind == "double"
            else np.uint64(numbers[name] if kind == "size" else self._address(name))
            for name, kind in self._kernel.parameters
        ]
        with self._active(f"kernel {self._kernel.entry}") as driver:
            before, after = driver.Event(), driver.Event()
            before.record()
            self._function(*arguments, block=self._block, grid=self._grid)
            after.record()
            after.synchronize()
            return float(1e-3 * after.time_since(before))


def _symbol(image: bytes, entry: str) -> str:
    """The name that a kernel has in a cubin, which has a section for each: C++ adds the types of its parameters."""
    mangled = re.search(rb"\.text\.(_Z(?:L?)%d%s\w*)\0" % (len(entry), entry.encode()), image)
    return entry if mangled is None else mangled[1].decode()


class HostFunction(_OnDevice):
    """A function of the host that takes device pointers; see :class:`dispatcher.interface.LoadedKernel`."""

    def __init__(self, context: Context, kernel: UserKernel, library: Path) -> None:
        super().__init__(context, kernel)
        with context.active():  # libraries with CUDA code register it while they are loaded
            self._library = ctypes.CDLL(str(library))
        address = ctypes.c_void_p.in_dll(self._library, "kernel_dispatcher_entry").value
        assert address is not None
        types: dict[Kind, Any] = {"size": ctypes.c_size_t, "double": ctypes.c_double}
        prototype = ctypes.CFUNCTYPE(None, *(types.get(kind, ctypes.c_void_p) for _, kind in kernel.parameters))
        self._function = prototype(address)
        self._error: Any = getattr(self._library, "kernel_dispatcher_error", None)
        if self._error is not None:
            self._error.restype = ctypes.c_char_p

    def launch(self, numbers: Mapping[str, int | float]) -> None:
        """See :meth:`dispatcher.interface.LoadedKernel.launch`; only the host's clock can time it."""
        arguments = [
            numbers[name] if kind in ("size", "double") else self._address(name)
            for name, kind in self._kernel.parameters
        ]
        with self._active(f"{self._kernel.entry}") as driver:
            self._function(*arguments)
            driver.Context.synchronize()
        complaint = None if self._error is None else self._error()
        if complaint is not None:
            raise KernelError(f"the CUDA runtime reports for {self._kernel.entry}: {complaint.decode()}")
