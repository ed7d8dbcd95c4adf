"""The CUDA backend: what devices there are, what they can run, and compiled operators."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dispatcher.backends.cuda import driver, exporting, roofline, toolkit, tuning
from dispatcher.backends.cuda.executable import CudaExecutable
from dispatcher.backends.cuda.lowering import lower
from dispatcher.backends.cuda.options import parse
from dispatcher.backends.cuda.program import Program
from dispatcher.backends.cuda.sources import unknown
from dispatcher.backends.cuda.tasks import Target
from dispatcher.backends.cuda.userkernel import check_kernel, load_kernel
from dispatcher.errors import DeviceError, InputError
from dispatcher.interface import Device, ExportRequest, LoadedKernel, Roofline
from dispatcher.ops.steps import Convolution, Normalize, Pointwise, Pool, Reduce, Softmax, Step
from dispatcher.problem.operator import Operator
from dispatcher.problem.userkernel import UserKernel

_LARGEST_EXTENT = 2**31 - 1


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
        for step in operator.steps:
            reason = _no_kernel(step)
            if reason is not None:
                return reason
        shapes = [*operator.tensor_shapes.values(), *(step.shape for step in operator.steps)]
        for shape in shapes:
            if any(extent > _LARGEST_EXTENT for extent in shape):
                return f"an extent of {max(shape)} is more than the {_LARGEST_EXTENT} that the kernels count to"
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

        Options: ``algorithm`` (``auto``; ``halo``, tensor cores where they fit; ``fma``), ``tile`` (for the tensor-core
        kernel: a box of voxels ``(z, y, x)``, or a text as :meth:`~dispatcher.backends.cuda.options.TileChoice.parse`
        reads it),
        ``prologue`` (``auto``; ``fused`` or ``separate``: where steps before a convolution run), ``tuned``
        (``ignore`` leaves alone what was tuned on this device) and ``stream`` (a stream of another library, or its
        ``cudaStream_t``, which the work of each call goes in).

        Raises:
            InputError: an option is unknown or has a wrong value.
            DeviceError: the device does not exist or has no compiler.
            BuildError: the compiler refused a kernel.
        """
        request = parse(options)
        context, compiler = _opened(device)
        if operator.empty:
            program = Program(operator)
        elif request.tuned:
            program = tuning.program(operator, context, compiler)
        else:
            program = lower(operator, Target.of(context), request.options)
        return CudaExecutable(program, context, compiler, request.stream)

    def candidates(self, operator: Operator, device: Device) -> Sequence[Mapping[str, Any]]:
        """Options worth measuring for ``operator``; see :func:`dispatcher.timing.tuning.tune`."""
        return tuning.candidates(operator, Target.of(driver.context(device.index)))

    def remember(self, operator: Operator, device: Device, options: Mapping[str, Any], gain: float) -> bool:
        """Use ``options`` for ``operator`` on GPUs of this model from now on."""
        return tuning.remember(operator, *_opened(device), options, gain)

    def export(self, request: ExportRequest) -> tuple[str, int]:
        """See :class:`dispatcher.interface.Exporter`, and :func:`exporting.export`."""
        for operator in request.cases.values():
            reason = self.supports(operator, Device("cuda", 0, "exported", "gpu"))
            if reason is not None:
                raise InputError(f"{request.problem.name} cannot be exported: {reason}")
        return exporting.export(request)

    def load_kernel(self, kernel: UserKernel, device: Device, scratch: Path) -> LoadedKernel:
        """Build a user's own kernel; see :class:`dispatcher.interface.KernelHost`."""
        return load_kernel(*_opened(device), kernel, scratch)

    def check_kernel(self, kernel: UserKernel, device: Device, scratch: Path) -> str:
        """Build a user's own kernel without a device; see :class:`dispatcher.interface.KernelHost`."""
        compiler = toolkit.find()
        if isinstance(compiler, str):
            raise DeviceError(compiler)
        return check_kernel(compiler, kernel, scratch)

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


def _no_kernel(step: Step) -> str | None:
    """Why no kernel of the cuda backend can compute a step of this kind, or None."""
    if not isinstance(step, Convolution | Pointwise | Normalize | Softmax | Pool | Reduce):
        return f"{step.op}: the cuda backend has no kernel for {type(step).__name__} steps"
    if isinstance(step, Pointwise | Pool | Reduce):
        missing = unknown(step.form)
        if missing is not None:
            return f"{step.op}: its form calls {missing}, which the cuda backend's kernels do not have"
    if isinstance(step, Pool) and step.form.shifted:
        return f"{step.op}: the cuda backend's pools do not look for the largest value of a window first"
    return None


def _unusable(found: toolkit.Toolkit | str, architecture: int, supported: tuple[int, int]) -> str | None:
    """Why kernels cannot be made or run, or None."""
    if isinstance(found, str):
        return found
    if found.release is not None and found.release[0] > supported[0]:
        return (
            "the driver supports CUDA {}.{}, older than nvcc's {}.{}; update the driver or use an older toolkit"
        ).format(*supported, *found.release)
    known = toolkit.architectures(found)
    if known and architecture not in known:
        wanted = ", ".join(f"{number // 10}.{number % 10}" for number in sorted(known))
        return (
            f"this nvcc makes no code for compute capability {architecture // 10}.{architecture % 10}; "
            f"it knows {wanted}"
        )
    return None
