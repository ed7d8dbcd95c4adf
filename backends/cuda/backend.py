"""The CUDA backend: what devices there are, what they can run, and compiled operators."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from backends.cuda import driver, roofline, toolkit
from backends.cuda.executable import CudaExecutable
from backends.cuda.fusion import Options, Target
from backends.cuda.lowering import Program, lower
from backends.cuda.tiles import Triple
from backends.cuda.userkernel import load_kernel
from dispatcher.errors import DeviceError, InputError
from dispatcher.interface import Device, Roofline
from dispatcher.operator import Operator
from dispatcher.userkernel import LoadedKernel, UserKernel

_LARGEST_EXTENT = 2**31 - 1
#: Values of the option ``algorithm``.
ALGORITHMS = ("auto", "halo", "fma")
PROLOGUES = ("auto", "fused", "separate")


class CudaBackend:
    """See :class:`dispatcher.interface.Backend`. Arguments may be arrays that live on the device."""

    name = "cuda"
    device_arrays = True

    def probe(self) -> Sequence[Device]:
        """Every CUDA device; one that stands for the reason where there is none. Never raises."""
        try:
            loaded = driver.load()
            count = loaded.Device.count()
        except Exception as error:
            return [Device("cuda", 0, "CUDA", "unknown", False, str(error))]
        return [self._probe(loaded, index) for index in range(count)]

    def footprint(self) -> str:
        """What looking for devices depends on: it is tried in another process whenever this changes."""
        return driver.footprint()

    def _probe(self, loaded: Any, index: int) -> Device:
        try:
            known = driver.describe(loaded, index)
            version = loaded.get_driver_version()
            supported = (version // 1000, version % 1000 // 10)
            facts: dict[str, str | int | float] = {
                "compute_capability": f"{known.architecture // 10}.{known.architecture % 10}",
                "compute_units": known.processors,
                "memory_bytes": known.total_bytes,
                "shared_memory_bytes": known.shared_limit,
                "driver_cuda": "{}.{}".format(*supported),
            }
            found = toolkit.find()
            if isinstance(found, toolkit.Toolkit) and found.release is not None:
                facts["nvcc"] = "{}.{}".format(*found.release)
            reason = _unusable(found, known.architecture, supported)
            return Device("cuda", index, known.name, "gpu", reason is None, reason, facts)
        except Exception as error:
            return Device("cuda", index, f"CUDA device {index}", "gpu", False, str(error))

    def supports(self, operator: Operator, device: Device) -> str | None:
        """None when ``device`` can run ``operator``, else the reason why not."""
        shapes = [*operator.tensor_shapes.values(), *(step.shape for step in operator.steps)]
        for shape in shapes:
            if any(extent > _LARGEST_EXTENT for extent in shape):
                return (
                    f"an extent of {max(shape)} is more than the {_LARGEST_EXTENT} that the kernels count to"
                )
        for convolution in operator.convolutions:
            elements = math.prod(convolution.geometry.weight_shape)
            if elements > _LARGEST_EXTENT:
                return f"{elements} weights are more than the {_LARGEST_EXTENT} that the kernels count to"
            reach = max(abs(offset) for axis in convolution.geometry.axes for offset in axis.offset_range)
            if reach > _LARGEST_EXTENT:
                return (
                    f"padding and dilation shift the input by {reach} voxels, more than the "
                    f"{_LARGEST_EXTENT} that the kernels count to"
                )
        return None

    def compile(self, operator: Operator, device: Device, options: Mapping[str, Any]) -> CudaExecutable:
        """Build ``operator`` for ``device``.

        Options: ``algorithm`` (``auto``; ``halo``, tensor cores where they fit; ``fma``), ``tile`` (a box of
        voxels ``(z, y, x)`` or ``"ZxYxX"`` for the tensor-core kernel), ``prologue`` (``auto``; ``fused`` or
        ``separate``: where steps before a convolution run) and ``stream`` (a ``cudaStream_t`` as an integer, whose
        work each call waits for).

        Raises:
            InputError: an option is unknown or has a wrong value.
            DeviceError: the device does not exist or has no compiler.
            BuildError: the compiler refused a kernel.
        """
        chosen, stream = _options(options)
        context, compiler = _opened(device)
        target = Target(context.architecture, context.shared_limit, context.processors)
        program = Program(operator) if operator.empty else lower(operator, target, chosen)
        return CudaExecutable(program, context, compiler, stream)

    def load_kernel(self, kernel: UserKernel, device: Device, scratch: Path) -> LoadedKernel:
        """Build a user's own kernel; see :class:`dispatcher.userkernel.KernelHost`."""
        return load_kernel(*_opened(device), kernel, scratch)

    def roofline(self, device: Device, dtype: str) -> Roofline:
        """Multiply-adds and copies by two kernels; float16 operators are computed in float32.

        Tensor cores, which TF32 uses, can do more than these multiply-adds.
        """
        found = roofline.Microbenchmarks(*_opened(device), "float64" if dtype == "float64" else "float32")
        return Roofline(found.peak_gflops(), found.copy_gbytes_per_s(), found.dtype, found.method)

    def flush_caches(self, device: Device) -> None:
        """Empty the second-level cache."""
        roofline.flush(driver.context(device.index))


def _opened(device: Device) -> tuple[driver.Context, toolkit.Toolkit]:
    """The device's context and the compiler.

    Raises:
        DeviceError: the device does not exist or has no compiler.
    """
    context = driver.context(device.index)
    compiler = toolkit.find()
    if isinstance(compiler, str):
        raise DeviceError(f"{device.id} cannot be used: {compiler}")
    return context, compiler


def _options(options: Mapping[str, Any]) -> tuple[Options, int | None]:
    known = ("algorithm", "prologue", "stream", "tile")
    for name in options:
        if name not in known:
            raise InputError(
                f"option {name!r} is unknown to the cuda backend; expected one of {', '.join(known)}"
            )
    algorithm = options.get("algorithm", "auto")
    if algorithm not in ALGORITHMS:
        raise InputError(f"algorithm is {algorithm!r}; expected one of {', '.join(ALGORITHMS)}")
    prologue = options.get("prologue", "auto")
    if prologue not in PROLOGUES:
        raise InputError(f"prologue is {prologue!r}; expected one of {', '.join(PROLOGUES)}")
    stream = options.get("stream")
    if stream is not None and (type(stream) is not int or stream < 0):
        raise InputError(f"stream is {stream!r}; expected a cudaStream_t as an integer")
    return Options(algorithm, _box(options.get("tile")), prologue), stream


def _box(tile: Any) -> Triple | None:
    """The option ``tile``; ``"1x4x8"``, as it comes from a command line, is ``(1, 4, 8)``."""
    if tile is None:
        return None
    numbers = tile
    if isinstance(tile, str):
        numbers = [int(part) if part.isdecimal() else 0 for part in tile.split("x")]
    if (
        not isinstance(numbers, Sequence)
        or len(numbers) != 3
        or not all(type(n) is int and n > 0 for n in numbers)
    ):
        raise InputError(f"tile is {tile!r}; expected three positive integers, (z, y, x) or 'ZxYxX'")
    return numbers[0], numbers[1], numbers[2]


def _unusable(found: toolkit.Toolkit | str, architecture: int, supported: tuple[int, int]) -> str | None:
    """Why kernels cannot be made or run, or None."""
    if isinstance(found, str):
        return found
    if found.release is not None and found.release[0] > supported[0]:
        return (
            "the driver supports CUDA {}.{}, older than nvcc's {}.{}; "
            "update the driver or use an older toolkit"
        ).format(*supported, *found.release)
    known = toolkit.architectures(found)
    if known and architecture not in known:
        wanted = ", ".join(f"{number // 10}.{number % 10}" for number in sorted(known))
        return (
            f"this nvcc makes no code for compute capability {architecture // 10}.{architecture % 10}; "
            f"it knows {wanted}"
        )
    return None
