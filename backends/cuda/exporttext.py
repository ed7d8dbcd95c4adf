"""Kernels and data as text of one file: each kernel in a namespace of its own, with its defines and headers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from dispatcher.backends.cuda import toolkit
from dispatcher.backends.cuda.toolkit import Kernel
from dispatcher.ops.symbols import c_text
from dispatcher.problem.userkernel import spelled

_INCLUDE = re.compile(r'^#include "(\w+\.cuh)"\n', re.MULTILINE)
_LAYOUT_CHECK = re.compile(r"^(?:// Set by the host[^\n]*\n)?(?:#define )?CHECK_PARAMS\(.*\n", re.MULTILINE)
_HEAD = re.compile(r"\A(?://[^\n]*\n)+")
_HALF = re.compile(r"#ifdef CUSIM\nusing half_t.*?#endif\n", re.DOTALL)
#: What stands at the top of the file, once.
SHARED = "device.cuh"


class Sections:
    """The kernels of a file, each once.

    Attributes:
        texts: one for each kernel, in order.
    """

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._names: dict[Kernel, str] = {}
        self._documented: set[str] = set()

    def name(self, kernel: Kernel, function: str) -> str:
        """The namespace of a kernel, which is added where it is new; ``function`` is the kernel's."""
        if kernel not in self._names:
            self._names[kernel] = f"{function}_{len(self._names) + 1}"
            self.texts.append(self._section(kernel))
        return self._names[kernel]

    def add(self, text: str) -> None:
        """More text, behind the kernels so far."""
        self.texts.append(text)

    def _section(self, kernel: Kernel) -> str:
        body = self._expanded(kernel.file, kernel.operations, set())
        defines = {name: value for name, value in kernel.defines if name != "PARAMS_BYTES"}
        names = dict.fromkeys([*defines, *re.findall(r"^#define (\w+)", body, re.MULTILINE)])
        before = "".join(f"#define {name} {value}\n" for name, value in defines.items())
        after = "".join(f"#undef {name}\n" for name in names)
        return f"namespace {self._names[kernel]} {{\n{before}{body}{after}}}\n"

    def _expanded(self, file: str, operations: str, seen: set[str]) -> str:
        """A kernel file without its includes' names; what was said in a file's head is said once."""

        def included(found: re.Match[str]) -> str:
            name = found[1]
            if name == "operations.cuh":
                return operations
            if name == SHARED or name in seen:
                return ""
            seen.add(name)
            return self._expanded(name, operations, seen)

        text = plain(file)
        if file in self._documented:
            text = _HEAD.sub("", text)
        self._documented.add(file)
        return _INCLUDE.sub(included, text).replace('extern "C" __global__', "__global__")


def field(parameter: str) -> str:
    """A parameter of the problem in the functions of the host."""
    return f"a.{spelled(parameter, 'cu')}"


def plain(file: str) -> str:
    """A kernel file without what has no meaning in an exported one."""
    text = (toolkit.KERNELS / file).read_text(encoding="utf-8")
    return _LAYOUT_CHECK.sub("", text.replace("#pragma once\n", ""))


def common_text(file: str) -> str:
    """A header that all kernels of a file share, without its includes, which stand at the top of the file."""
    text = _HALF.sub("using half_t = __half;\nusing uint32_t = unsigned;\n", plain(file))
    return re.sub(r"^#include [^\n]*\n", "", text, flags=re.MULTILINE)


def braces(value: Any) -> str:
    """A structure, or an array of them, as an initialiser."""
    if isinstance(value, np.void):
        return "{" + ", ".join(braces(value[name]) for name in value.dtype.names or ()) + "}"
    if isinstance(value, np.ndarray):
        return "{" + ", ".join(map(braces, value)) + "}"
    return _number(value)


def assignments(path: str, value: Any) -> Iterator[str]:
    """Statements that give a structure at ``path``, which is all zeros, its numbers, a field a line."""
    if isinstance(value, np.void):
        for name in value.dtype.names or ():
            yield from assignments(f"{path}.{name}", value[name])
    elif isinstance(value, np.ndarray) and value.dtype.names:
        for number, each in enumerate(value):
            yield from assignments(f"{path}[{number}]", each)
    elif isinstance(value, np.ndarray):
        if value.any():
            yield ", ".join(f"{path}[{number}] = {_number(each)}" for number, each in enumerate(value)) + ";"
    elif value:
        yield f"{path} = {_number(value)};"


def parameters_type(kernel: Kernel, function: str) -> str:
    """The name of the structure that a kernel takes."""
    found = re.search(rf"\b{function}\(const (?:__grid_constant__ )?(\w+) p\)", plain(kernel.file))
    assert found is not None
    return found[1]


def _number(value: Any) -> str:
    return c_text(value.item() if isinstance(value, np.generic) else value)


def array(declaration: str, rows: Any) -> str:
    """A constant table."""
    texts = [braces(row) for row in rows] or ["{}"]
    return f"  static const {declaration} = {{\n" + _wrapped(texts) + "  };\n"


def _wrapped(texts: list[str], width: int = 110) -> str:
    lines, line = [], ""
    for text in texts:
        if len(line) + len(text) > width:
            lines.append(line)
            line = ""
        line += f" {text},"
    return "".join(f"   {each}\n" for each in [*lines, line])
