"""Handing an array on the device to another library by DLPack (https://dmlc.github.io/dlpack, version 0)."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np

KDL_CUDA = 2
_KDL_FLOAT = 2


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


#: Functions of Python itself, with types of our own: those of ``ctypes.pythonapi`` belong to everybody.
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, _CapsuleDestructor)(
    ("PyCapsule_New", ctypes.pythonapi)
)


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
    managed = ManagedTensor(
        _Tensor(
            address,
            _Device(KDL_CUDA, device),
            len(shape),
            _DataType(_KDL_FLOAT, 8 * dtype.itemsize, 1),
            extents,
            steps,
            0,
        ),
        None,
        _delete,
    )
    where = ctypes.addressof(managed)
    _exported[where] = (managed, extents, steps, owner)
    return _new_capsule(where, _NAME, _destroy)
