"""What passes between a caller's arrays, of whatever library, and a backend's."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from dispatcher.device.selection import Choice
from dispatcher.errors import InputError, KernelError
from dispatcher.problem import torchtensors
from dispatcher.problem.arrays import (
    TensorArgument,
    check_opencl_output,
    check_output,
    fetched,
    host_tensor,
    in_kind,
    mapped,
    on_opencl,
    queue_of,
)
from dispatcher.problem.operator import Operator


class Target:
    """Where a caller wants the result.

    Args:
        name: what the caller calls it.
        output: the caller's array.
        operator: what it is the result of.
        sources: the caller's tensors, unconverted.

    Attributes:
        array: what the backend is to write to, or None for an array of its own.

    Raises:
        InputError: no result may be written there.
    """

    array: Any = None

    def __init__(self, name: str, output: Any, operator: Operator, sources: Mapping[str, Any]) -> None:
        self._output = output
        shape, dtype = operator.output_shape, operator.dtype
        if on_opencl(output):
            check_opencl_output(output, shape, dtype, sources, name)
            self.array = mapped(output, sys.modules["pyopencl"].map_flags.WRITE)
        elif torchtensors.is_tensor(output) and output.device.type != "cuda":
            self.array = torchtensors.check_output(name, output, shape, dtype, sources)
        else:
            self.array = torchtensors.device_view(name, output) if torchtensors.is_tensor(output) else output
            check_output(self.array, shape, dtype, sources, name)

    def hand_over(self, result: Any) -> Any:
        """The caller's array, with the result in it."""
        if on_opencl(self._output):
            if result.size:
                result.base.release(queue_of(self._output)).wait()
        elif torchtensors.is_tensor(self._output):
            torchtensors.written(self._output)
        return self._output


def new_output(bound: Mapping[str, Any], tensors: Mapping[str, Any], choice: Choice, operator: Operator) -> Any:
    """A new tensor of PyTorch for a result that is to become one on a CUDA device; None for other results."""
    if not takes_device_arrays(choice) or not _answers_in_torch(bound, tensors):
        return None
    views = (bare(tensor) for tensor in (*tensors.values(), *bound.values()))
    view = next((view for view in views if isinstance(view, torchtensors.DeviceView)), None)
    return None if view is None else torchtensors.new_output(view, operator.output_shape, operator.dtype)


def _answers_in_torch(bound: Mapping[str, Any], tensors: Mapping[str, Any]) -> bool:
    deciding = tensors if tensors else bound
    return any(type(tensor) is TensorArgument and tensor.of_torch for tensor in deciding.values())


def in_kind_of(bound: Mapping[str, Any], tensors: Mapping[str, Any], choice: Choice, result: Any) -> Any:
    """A new result as an array of the library that the tensors of a call are of, or those bound where it has none.

    An array of PyOpenCL belongs to the context of whoever made it: the result is one where the device that ran has such
    an array among the tensors.
    """
    if _answers_in_torch(bound, tensors):
        return torchtensors.tensor_of(result)
    for tensor in (*bound.values(), *tensors.values()):
        if type(tensor) is TensorArgument and tensor.on_device and on_opencl(tensor.array):
            owns = getattr(choice.backend, "owns", None)
            is_here = owns is not None and owns(choice.device, tensor.array)
            return in_kind(result, tensor.array) if is_here else result
    return result


def bare(value: Any) -> Any:
    """An argument of a call without what was found out about it."""
    return value.array if isinstance(value, TensorArgument) else value


def takes_device_arrays(choice: Choice) -> bool:
    """Whether the device takes arrays that live on it."""
    return bool(getattr(choice.backend, "device_arrays", False))


def check_place(name: str, output: Any, choice: Choice) -> None:
    """Check that a device writes to the caller's output where it lies.

    Raises:
        InputError: it does not.
    """
    if output is not None and not isinstance(output, np.ndarray) and not takes_device_arrays(choice):
        raise InputError(
            f"{name} lives on a CUDA device, and {choice.device.id} makes arrays in host memory; "
            "give a NumPy array, or choose device='cuda'"
        )


def backend_inputs(
    constants: Mapping[str, np.ndarray | None],
    tensors: Mapping[str, Any],
    bound: Mapping[str, Any],
    choice: Choice,
    dtype: np.dtype[Any],
) -> dict[str, Any]:
    """Every tensor as a device's backend takes it, in the order of the parameters.

    Args:
        constants: for each parameter the bound tensor, ready for backends that take arrays in host memory; None for
            the others.
        tensors: the caller's others, unconverted; they come before the bound ones.
        bound: the bound tensors, unconverted.
        choice: the device.
        dtype: of arrays in host memory.

    Raises:
        InputError: a tensor lives where it cannot be read.
    """
    inputs: dict[str, Any] = dict(constants)
    for name in [*tensors, *(name for name, array in inputs.items() if array is None and name not in tensors)]:
        array = bare(tensors[name] if name in tensors else bound[name])
        if type(array) is np.ndarray:
            inputs[name] = host_tensor(array, dtype)
        elif takes_device_arrays(choice) and not on_opencl(array):
            inputs[name] = array
        else:
            inputs[name] = host_tensor(to_host(name, array, choice.device.id), dtype)
    return inputs


def to_host(name: str, array: Any, taker: str) -> np.ndarray:
    """A copy on the host of tensor ``name``, which lives on a device.

    Raises:
        InputError: its library makes none.
    """
    if on_opencl(array):
        return fetched(name, array)
    try:
        return np.asarray(array)
    except Exception as error:  # CuPy raises a TypeError, others what they like
        raise InputError(
            f"tensor {name} lives on a CUDA device, and {taker} takes arrays in host memory; "
            "copy it to the host, or choose device='cuda'"
        ) from error


def dtype_name(dtype: Any) -> Any:
    """``dtype`` as one of DTYPES where it means one, as ``np.float32`` and ``torch.float32`` do; else as it is, to be
    refused."""
    dtype = torchtensors.dtype_name(dtype)
    if dtype is None or isinstance(dtype, str):
        return dtype
    try:
        return str(np.dtype(dtype).name)
    except Exception:  # whatever the object's own attributes raise
        return dtype


def checked_result(operator: Operator, choice: Choice, inputs: Mapping[str, Any], output: Any, result: Any) -> Any:
    """The backend's result, or a copy of it where it is not an array of its own in C order. ``inputs`` are the call's
    own: a view of any other one cannot be written to.

    Raises:
        KernelError: it is not what the operator makes.
    """
    if output is not None:
        if result is not output:
            raise KernelError(f"{choice.device.id} returned another array than the output it was given")
        return output
    if not isinstance(result, np.ndarray):
        if hasattr(result, "__cuda_array_interface__"):
            return result
        raise KernelError(f"{choice.device.id} returned {type(result).__name__}; expected an array")
    if result.shape != operator.output_shape or result.dtype != operator.dtype:
        raise KernelError(
            f"{choice.device.id} returned a {result.dtype} array of shape {result.shape}; "
            f"expected {operator.dtype} of shape {operator.output_shape}"
        )
    flags = result.flags
    shares = any(isinstance(array, np.ndarray) and np.may_share_memory(result, array) for array in inputs.values())
    return result if flags.c_contiguous and flags.writeable and not shares else result.copy(order="C")
