"""Arrays on a CUDA device, to and from other libraries by DLPack (https://dmlc.github.io/dlpack, version 0)."""

from __future__ import annotations

import ctypes
import math
import weakref
from typing import Any

import numpy as np

from dispatcher.errors import InputError

KDL_CUDA = 2
_KDL_CUDA_MANAGED = 13
_KDL_FLOAT = 2
_KDL_BFLOAT = 4
_LEGACY_DEFAULT_STREAM = 1


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("index", ctypes.c_int32)]


class _DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class ManagedTensor(ctypes.Structure):
    """``DLManagedTensor``."""

    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter)]


#: What must stay alive until another library lets go of it, by the address of its ``DLManagedTensor``.
_exported: dict[int, tuple[Any, ...]] = {}
_CapsuleDestructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_NAME = b"dltensor"  # a consumer renames the capsule and calls the deleter itself
_TAKEN_NAME = b"used_dltensor"


def _of_python(name: str, result: Any, *arguments: Any) -> Any:
    """A function of Python itself, with types of our own: those of ``ctypes.pythonapi`` belong to everybody."""
    return ctypes.PYFUNCTYPE(result, *arguments)((name, ctypes.pythonapi))


_is_valid = _of_python("PyCapsule_IsValid", ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)
_get_pointer = _of_python("PyCapsule_GetPointer", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
_set_name = _of_python("PyCapsule_SetName", ctypes.c_int, ctypes.py_object, ctypes.c_char_p)
_pointer_of = _of_python("PyCapsule_GetPointer", ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
_new_capsule = _of_python("PyCapsule_New", ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, _CapsuleDestructor)


def _forget(address: int) -> None:
    _exported.pop(address, None)


def _forget_unused(capsule: int) -> None:
    """When a capsule dies that nobody has taken."""
    if _is_valid(capsule, _NAME):
        _forget(_get_pointer(capsule, _NAME))


_delete = _Deleter(_forget)
_destroy = _CapsuleDestructor(_forget_unused)


def capsule(owner: Any, address: int, shape: tuple[int, ...], dtype: np.dtype[Any], device: int) -> Any:
    """A capsule for a C-contiguous array at ``address``; keeps ``owner`` alive as long as it is in use."""
    extents = (ctypes.c_int64 * len(shape))(*shape)
    steps = (ctypes.c_int64 * len(shape))(*(math.prod(shape[axis + 1 :]) for axis in range(len(shape))))
    code = _KDL_BFLOAT if dtype.name == "bfloat16" else _KDL_FLOAT
    kind = _DataType(code, 8 * dtype.itemsize, 1)
    tensor = _Tensor(address, _Device(KDL_CUDA, device), len(shape), kind, extents, steps, 0)
    managed = ManagedTensor(tensor, None, _delete)
    where = ctypes.addressof(managed)
    _exported[where] = (managed, extents, steps, owner)
    return _new_capsule(where, _NAME, _destroy)


class TakenArray:
    """An array that another library handed over, in the form that the CUDA backend reads."""

    def __init__(self, interface: dict[str, Any]) -> None:
        self.__cuda_array_interface__ = interface


def on_cuda(name: str, value: Any) -> bool:
    """Whether tensor ``name`` offers DLPack, and lies on a CUDA device.

    Raises:
        InputError: it cannot say where it lies.
    """
    where = getattr(value, "__dlpack_device__", None)
    if where is None:
        return False
    try:
        kind, _ = where()
        return int(kind) in (KDL_CUDA, _KDL_CUDA_MANAGED)
    except Exception as error:  # whatever the library raises, as PyTorch does for tensors without data
        raise InputError(
            f"tensor {name} cannot say by DLPack on which device it is: {error}; expected an array in host memory or "
            "on a CUDA device"
        ) from error


def take(name: str, value: Any) -> TakenArray:
    """The array of tensor ``name`` on a CUDA device, without a copy; the library keeps its memory as long as the
    result lives. It is complete on the legacy default stream.

    Raises:
        InputError: its elements are not floating-point numbers of 16, 32 or 64 bits, or the library refused.
    """
    try:
        handed = value.__dlpack__(stream=_LEGACY_DEFAULT_STREAM)
        address = _pointer_of(handed, _NAME)
    except Exception as error:  # whatever the library raises
        raise InputError(f"tensor {name} cannot be taken by DLPack: {error}") from error
    managed = ManagedTensor.from_address(address)
    tensor = managed.tensor
    kind = (tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes)
    known = {(_KDL_FLOAT, bits, 1): f"float{bits}" for bits in (16, 32, 64)} | {(_KDL_BFLOAT, 16, 1): "bfloat16"}
    if kind not in known:  # the capsule, not renamed, frees it
        raise InputError(
            f"tensor {name} has DLPack dtype (code, bits, lanes) {kind}; expected float16, bfloat16, float32 or float64"
        )
    size = tensor.dtype.bits // 8
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = tuple(size * step for step in tensor.strides[: tensor.ndim]) if tensor.strides else None
    _set_name(handed, _TAKEN_NAME)
    place = ((tensor.data or 0) + tensor.byte_offset, False)
    result = TakenArray(
        {
            "shape": shape,
            "typestr": known[kind],
            "data": place,
            "strides": strides,
            "version": 3,
            "stream": _LEGACY_DEFAULT_STREAM,
        }
    )
    weakref.finalize(result, _give_back, address)
    return result


def _give_back(address: int) -> None:
    managed = ManagedTensor.from_address(address)
    if managed.deleter:
        managed.deleter(address)
