"""Somebody's own kernel for a problem: its source, and how to call the function in it."""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

#: What a parameter is: a tensor to read, the tensor to write, a ``size_t`` or a ``double``.
Kind = Literal["input", "output", "size", "double"]

#: A folder for included files in a compiler's options, which may stand in the next of them (a NUL ends each).
_INCLUDE = re.compile(r"(?<![^\s\0])(-I[\s\0]*)([^\s\0\"']+)")
_PLAIN_PATH = re.compile(r"[\w./+-]+", re.ASCII)


@dataclass(frozen=True)
class UserKernel:
    """A kernel file and how to call the function in it.

    Attributes:
        file: path of the file, for messages; bytes that are no text are escaped.
        text: its contents.
        include_folder: where ``#include "..."`` looks: the folder of the file.
        entry: name of the function.
        parameters: (name, kind) of each of its parameters, in order.
        dtype: of every tensor: ``float16``, ``float32`` or ``float64``.
        global_size: work items, or threads, per dimension, x first, in whole groups; None for a function of the
            host that launches kernels itself.
        local_size: work items of a group, or threads of a block, per dimension; None leaves it to the runtime.
        build_options: for the compiler, as they are.
    """

    file: str
    text: str
    include_folder: str
    entry: str
    parameters: tuple[tuple[str, Kind], ...]
    dtype: str
    global_size: tuple[int, ...] | None = None
    local_size: tuple[int, ...] | None = None
    build_options: tuple[str, ...] = ()

    @staticmethod
    def from_dict(fields: Mapping[str, Any]) -> UserKernel:
        """The kernel whose fields, in JSON or not, are ``fields``: the inverse of :func:`dataclasses.asdict`."""
        whole = dict(fields)
        for name in ("global_size", "local_size", "build_options"):
            whole[name] = None if whole[name] is None else tuple(whole[name])
        whole["parameters"] = tuple((name, kind) for name, kind in whole["parameters"])
        return UserKernel(**whole)

    def declaration(self, types: Mapping[Kind, str]) -> str:
        """The function's head, such as ``solution(const float* input, size_t width)``; see :func:`spelled`."""
        typed = [f"{types[kind]} {spelled(name)}" for name, kind in self.parameters]
        return f"{self.entry}({', '.join(typed)})"

    def source(self) -> str:
        """The text, in which compilers find the file's name and lines."""
        return f"#line 1 {json.dumps(Path(self.file).name, ensure_ascii=False)}\n{self.text}\n"

    def include_path(self, scratch: Path) -> str:
        """The include folder under a name that no compiler splits; see :func:`plain_path`."""
        return plain_path(self.include_folder, scratch)

    def seen_from(self, folder: str, scratch: Path) -> UserKernel:
        """The kernel with every relative ``-I`` among its build options as seen from ``folder``.

        Args:
            folder: an absolute path.
            scratch: see :func:`plain_path`.
        """

        def absolute(found: re.Match[str]) -> str:
            if os.path.isabs(found[2]):
                return found[0]
            return found[1] + plain_path(os.path.normpath(os.path.join(folder, found[2])), scratch)

        options = _INCLUDE.sub(absolute, "\0".join(self.build_options)).split("\0")
        return replace(self, build_options=tuple(options) if self.build_options else ())


def plain_path(folder: str, scratch: Path) -> str:
    """A folder under a name that no compiler splits at a space or a comma: its own, or a link's.

    Args:
        folder: an absolute path.
        scratch: a folder to put a link into, where one is needed.
    """
    if _PLAIN_PATH.fullmatch(folder):
        return folder
    link = scratch / f"include-{zlib.crc32(os.fsencode(folder)):08x}"
    if not link.is_symlink():
        link.symlink_to(folder, target_is_directory=True)
    return str(link)


def spelled(name: str, language: str = "cl") -> str:
    """A parameter's name in C (``c``), CUDA (``cu``) or OpenCL C (``cl``): with one more underscore where it is taken.

    Parameters are known by their place.
    """
    word = name.rstrip("_")
    taken = word in _TAKEN or _TAKEN_FORM.match(word) or (language == "cl" and word in _TAKEN_IN_OPENCL)
    return f"{name}_" if taken else name


#: What starts with two underscores is the compilers', and types of vectors have numbers.
_TAKEN_FORM = re.compile(r"__|M_[A-Z]|(u?(char|short|int|long|longlong)|half|float|double)\d+$")
_TAKEN_IN_OPENCL = frozenset(
    re.findall(
        r"\w+",
        """
        kernel global local constant half read_only write_only read_write uniform pipe generic uchar ushort uint
        ulong event_t sampler_t barrier get_work_dim get_global_id get_global_size get_global_offset get_local_id
        get_local_size get_group_id get_num_groups
        """,
    )
)
#: Keywords of C and C++, then what CUDA and the headers define, and names of our own.
_TAKEN = frozenset(
    re.findall(
        r"\w+",
        """
        alignas alignof and and_eq asm auto bitand bitor bool break case catch char char8_t char16_t char32_t class
        compl concept const consteval constexpr constinit const_cast continue co_await co_return co_yield decltype
        default delete do double dynamic_cast else enum explicit export extern false float for friend goto if inline
        int long mutable namespace new noexcept not not_eq nullptr operator or or_eq private protected public
        register reinterpret_cast requires restrict return short signed sizeof static static_assert static_cast
        struct switch template this thread_local throw true try typedef typeid typename typeof union unsigned using
        virtual void volatile wchar_t while xor xor_eq _Bool _Complex _Imaginary _Generic _Atomic _Alignas _Alignof
        _Noreturn _Static_assert _Thread_local threadIdx blockIdx blockDim gridDim warpSize dim3 cudaStream_t size_t
        ptrdiff_t NULL NAN INFINITY HUGE_VAL EOF assert errno linux unix std main solution kernel_dispatcher
        work_memory cuda_stream all_tensors each_tensor
        """,
    )
)
