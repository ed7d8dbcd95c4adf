"""Arrays that a caller passes: what they are, as backends take them, and where a result may go.

Dtypes: float16, bfloat16, float32 and float64 stay what they are; integers and bool become float32; anything else is
an error. All tensors of a call share one dtype. A list or tuple has no dtype of its own: it takes the other
tensors', or float32 when there are none.
"""

from __future__ import annotations

import operator as python_operator
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar

import numpy as np

from dispatcher.errors import DtypeError, InputError, first_line
from dispatcher.problem import dlpack, torchtensors
from dispatcher.problem.messages import brief
from dispatcher.problem.operator import DTYPES

P = ParamSpec("P")
R = TypeVar("R")


def with_own_error_state(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, in which NumPy lets NaN, infinities and rounding to zero pass: here they are results. The caller's
    error state, which may make exceptions of them, holds again afterwards."""

    @wraps(function)  # np.errstate as a decorator is one object for all threads before NumPy 2
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        with np.errstate(all="ignore"):
            return function(*args, **kwargs)

    return wrapper


@dataclass(frozen=True)
class TensorArgument:
    """A tensor as the caller passed it, looked at but not converted.

    Attributes:
        array: a NumPy array in whatever layout, or an array on a device.
        shape: its extents.
        dtype: its dtype; None for a sequence of numbers, which takes the other tensors' dtype.
        on_device: True for an array on a CUDA device, which has ``__cuda_array_interface__``, and for one of PyOpenCL.
        of_torch: True where the caller passed a tensor of PyTorch.
    """

    array: Any
    shape: tuple[int, ...]
    dtype: np.dtype[Any] | None
    on_device: bool = False
    of_torch: bool = False


# ---- what was passed ---------------------------------------------------------------------------------------
def tensor_argument(name: str, value: Any) -> TensorArgument:
    """Look at a tensor: a NumPy array, a tensor of PyTorch, an array of PyOpenCL,
    anything NumPy can read as an array (by DLPack where it offers nothing else), or an
    array on a CUDA device that offers ``__cuda_array_interface__`` or DLPack.

    Nothing is copied where NumPy can avoid it, and nothing but Python's own sequences is read element by element. What
    has been looked at already is returned as it is.

    Raises:
        InputError: it cannot be read as an array.
        DtypeError: its dtype is not a real number's.
    """
    if isinstance(value, TensorArgument):
        return value
    if on_opencl(value):
        return TensorArgument(value, value.shape, _checked_dtype(name, value.dtype), True)
    if torchtensors.is_tensor(value):
        return _of_torch(name, value)
    if not isinstance(value, np.ndarray):
        found = _on_device(name, value)
        if found is None and dlpack.on_cuda(name, value):
            found = _on_device(name, dlpack.take(name, value))
        if found is not None:
            return found
    if isinstance(value, np.ma.MaskedArray):
        raise InputError(f"tensor {name} is a masked array; expected a plain one: use its filled() method")
    if isinstance(value, str | bytes | Mapping | set | frozenset):
        raise InputError(f"tensor {name} is {brief(value)}; expected an array")
    if _only_indexable(value):
        wanted = "an array, or an object that offers one as a whole (by __array__, DLPack or a buffer)"
        raise InputError(f"tensor {name} is or holds a sequence of a foreign type; expected {wanted}")
    only_dlpack = hasattr(value, "__dlpack__") and not any(hasattr(value, other) for other in _ARRAY_PROTOCOLS)
    try:
        array = np.from_dlpack(value) if only_dlpack else np.asarray(value)
    except Exception as error:  # whatever the object's own conversion raises
        raise InputError(f"tensor {name} cannot be read as an array: {first_line(error)}") from error
    dtype = _checked_dtype(name, array.dtype)
    return TensorArgument(array, array.shape, None if isinstance(value, list | tuple) else dtype)


def _of_torch(name: str, tensor: Any) -> TensorArgument:
    if tensor.device.type == "cuda":
        found = _on_device(name, torchtensors.device_view(name, tensor))
        assert found is not None
        return replace(found, of_torch=True)
    array = torchtensors.host_view(name, tensor)
    return TensorArgument(array, array.shape, array.dtype, of_torch=True)


#: What NumPy reads an array from by itself.
_ARRAY_PROTOCOLS = ("__array__", "__array_interface__", "__array_struct__")
_MOST_AXES = 32


def _only_indexable(value: Any, axes: int = 0) -> bool:
    """Would NumPy ask ``value``, or a part of a list, for one element after another, each perhaps from a device?"""
    if isinstance(value, int | float):
        return False
    if isinstance(value, list | tuple):
        return axes < _MOST_AXES and any(_only_indexable(part, axes + 1) for part in value)
    known = isinstance(value, Sequence) or any(hasattr(value, name) for name in (*_ARRAY_PROTOCOLS, "__dlpack__"))
    if known or not (hasattr(value, "__getitem__") and hasattr(value, "__len__")):
        return False
    try:
        memoryview(value)
    except TypeError:
        return True
    return False


# ---- arrays of PyOpenCL ------------------------------------------------------------------------------------
def on_opencl(value: Any) -> bool:
    """Whether ``value`` is an array of PyOpenCL, which whoever made it has imported."""
    module = sys.modules.get("pyopencl.array")
    return module is not None and isinstance(value, module.Array)


def fetched(name: str, array: Any) -> np.ndarray:
    """The elements of tensor ``name``, an array of PyOpenCL, in whatever layout; see :func:`mapped`.

    Raises:
        InputError: they cannot be read.
    """
    try:
        return mapped(array, sys.modules["pyopencl"].map_flags.READ)
    except Exception as error:  # whatever the driver raises
        raise InputError(f"tensor {name} cannot be read from its OpenCL device: {first_line(error)}") from error


def mapped(array: Any, flags: int) -> np.ndarray:
    """An array of PyOpenCL in the host's memory, where that of a CPU device is anyway. The base of what this gives is
    the map, which lasts until it is released, or nobody uses it."""
    cl = sys.modules["pyopencl"]
    if not array.size:
        return np.empty(array.shape, array.dtype)
    place = (array.offset, array.shape, array.dtype)
    if not array.flags.c_contiguous:
        place = (0, (array.base_data.size,), np.dtype(np.uint8))
    whole, _ = cl.enqueue_map_buffer(queue_of(array), array.base_data, flags, *place, wait_for=array.events)
    if array.flags.c_contiguous:
        return np.asarray(whole)
    view: np.ndarray = np.ndarray(array.shape, array.dtype, whole, array.offset, array.strides)
    return view


def queue_of(array: Any) -> Any:
    """The queue of an array of PyOpenCL; a new one where it has none."""
    return array.queue or sys.modules["pyopencl"].CommandQueue(array.context)


def in_kind(array: np.ndarray, like: Any) -> Any:
    """A new array of PyOpenCL in the context and by the queue of ``like``; on CPUs in the memory of ``array``."""
    cl, arrays, queue = sys.modules["pyopencl"], sys.modules["pyopencl.array"], queue_of(like)
    if not array.size or any(device.type != cl.device_type.CPU for device in like.context.devices):
        return arrays.to_device(queue, array)
    buffer = cl.Buffer(like.context, cl.mem_flags.READ_WRITE | cl.mem_flags.USE_HOST_PTR, hostbuf=array)
    return arrays.Array(queue, array.shape, array.dtype, data=buffer)


def check_opencl_output(output: Any, shape: tuple[int, ...], dtype: str, inputs: Mapping[str, Any], name: str) -> None:
    """:func:`check_output` for an array of PyOpenCL."""
    layout = np.lib.stride_tricks.as_strided(np.empty(1, output.dtype), output.shape, output.strides)
    check_output(layout, shape, dtype, {}, name)
    for tensor, array in inputs.items():
        if on_opencl(array) and array.base_data == output.base_data:
            raise InputError(f"{name} shares memory with tensor {tensor}; expected an array with a buffer of its own")


def _on_device(name: str, value: Any) -> TensorArgument | None:
    """An array that offers ``__cuda_array_interface__``; None for anything else.

    Raises:
        InputError: what it offers cannot be read.
        DtypeError: its dtype is not a floating-point one.
    """
    try:
        interface = getattr(value, "__cuda_array_interface__", None)
        if interface is None:
            return None
        dtype, shape = np.dtype(interface["typestr"]), tuple(map(python_operator.index, interface["shape"]))
    except Exception as error:  # a library's property may raise anything
        raise InputError(
            f"tensor {name} has a __cuda_array_interface__ that cannot be read: {first_line(error)}"
        ) from error
    if float_name(dtype) is None:
        raise DtypeError(f"tensor {name} has dtype {dtype} on its device; expected {', '.join(DTYPES)}")
    return TensorArgument(value, shape, _checked_dtype(name, dtype), True)


def float_name(dtype: np.dtype[Any]) -> str | None:
    """Which of :data:`DTYPES` a dtype is, in whatever byte order; None for others."""
    name = dtype.newbyteorder("=").name
    return name if name in DTYPES else None


def _checked_dtype(name: str, dtype: np.dtype[Any]) -> np.dtype[Any]:
    if dtype.kind in "biu" or float_name(dtype) is not None:
        return dtype
    raise DtypeError(f"tensor {name} has dtype {dtype}; expected {', '.join(DTYPES)}, an integer type or bool")


# ---- what backends take ------------------------------------------------------------------------------------
def host_tensor(array: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """``array`` as a read-only C-contiguous array of ``dtype``: a view where it is one already, else a copy.

    Read-only, so that a backend that tries to write to an input fails instead of changing the caller's data.
    """
    flags = array.flags
    fits = array.dtype == dtype and flags.c_contiguous and flags.aligned
    result = array.view() if fits else np.array(array, dtype=dtype, order="C")
    result.flags.writeable = False
    return result


def snapshot(name: str, tensor: TensorArgument) -> TensorArgument:
    """Tensor ``name``, which changes to the caller's array do not reach. On a CUDA device its library copies it, by the
    method ``copy``; one without it is used in place."""
    if on_opencl(tensor.array):
        return replace(tensor, array=in_kind(np.array(fetched(name, tensor.array), order="C"), tensor.array))
    if tensor.on_device:
        return replace(tensor, array=tensor.array.copy()) if hasattr(tensor.array, "copy") else tensor
    return replace(tensor, array=np.array(tensor.array, order="C"))


def check_output(
    output: Any, shape: tuple[int, ...], dtype: str, inputs: Mapping[str, Any], name: str = "output"
) -> None:
    """Check that a result may be written to ``output``.

    Args:
        output: the caller's array: on the host, or on a CUDA device where the backend takes such arrays.
        shape: what the operator makes.
        dtype: what the operator makes.
        inputs: the caller's tensors by name, unconverted.
        name: what the caller calls it.

    Raises:
        InputError: it has another shape, dtype or layout, is read-only, or overlaps an input.
    """
    wanted = f"expected a writeable C-contiguous {dtype} array of shape {shape}"
    on_host = isinstance(output, np.ndarray)
    look = _host_view if on_host else _device_view
    found = look(output)
    if found is None:
        raise InputError(f"{name} is {brief(output)}; {wanted}")
    if found.shape != shape:
        raise InputError(f"{name} has shape {found.shape}; {wanted}")
    if found.dtype != dtype:
        raise DtypeError(f"{name} has dtype {found.dtype}; {wanted}")
    for problem, holds in (
        ("a masked array", isinstance(found, np.ma.MaskedArray)),
        ("not C-contiguous", not found.flags.c_contiguous),
        ("read-only", not found.flags.writeable),
        ("not aligned", on_host and not found.flags.aligned),
    ):
        if holds:
            raise InputError(f"{name} is {problem}; {wanted}")
    file, place = _in_file(found) if on_host else (None, found)
    for tensor, array in inputs.items():
        other = look(array)
        if other is None:
            continue
        if np.may_share_memory(found, other):
            raise InputError(f"{name} shares memory with tensor {tensor}; {wanted} of its own")
        if file is not None and mapped_file(other) == file and np.may_share_memory(place, _in_file(other)[1]):
            raise InputError(f"{name} shares a place in {file!r} with tensor {tensor}; {wanted} of its own")


def mapped_file(array: Any) -> str | None:
    """The file that a NumPy array is mapped to; None for other objects."""
    return _in_file(array)[0] if isinstance(array, np.ndarray) else None


def _in_file(array: np.ndarray) -> tuple[str | None, np.ndarray]:
    """The file that an array is mapped to, and an array that lies in memory as that one in the file: nobody may look at
    its elements."""
    root = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    if not isinstance(root, np.memmap) or root.filename is None:
        return None, array
    at = 4096 + root.offset + array.ctypes.data - root.ctypes.data  # no array begins at 0
    interface = {**array.__array_interface__, "data": (at, True)}
    return os.path.realpath(root.filename), np.asarray(SimpleNamespace(__array_interface__=interface))


def _host_view(array: Any) -> np.ndarray | None:
    return array if isinstance(array, np.ndarray) else None


def _device_view(array: Any) -> np.ndarray | None:
    """A NumPy array that says where an array on a CUDA device lies, and how: nobody may look at its elements.

    None for other objects.
    """
    interface = getattr(array, "__cuda_array_interface__", None)
    return None if interface is None else np.asarray(SimpleNamespace(__array_interface__=interface))
