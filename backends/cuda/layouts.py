"""Structures that the host packs for the kernels, as NumPy dtypes that are read from the kernels' own source text."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from dispatcher.backends.cuda import toolkit

_NUMBERS = {"int": "i4", "index_t": "i8", "float": "f4", "double": "f8"}


def structure(file: str, name: str, **extents: int) -> np.dtype[Any]:
    """``struct name`` of a kernel file, or of ``chain.cuh``.

    Args:
        file: in the kernels folder.
        name: of the structure.
        extents: values of the macros that its arrays' extents name.
    """
    return _structure(toolkit.KERNELS, file, name, tuple(sorted(extents.items())))


@lru_cache(maxsize=256)
def _structure(folder: Path, file: str, name: str, extents: tuple[tuple[str, int], ...]) -> np.dtype[Any]:
    body = _body(folder, file, name)
    known = dict(extents)
    members: list[tuple[Any, ...]] = []
    for declaration in filter(None, (part.strip() for part in body.split(";"))):
        base, declarators = re.fullmatch(r"(?:const )?(\w+)\s*(.*)", declaration, re.DOTALL).groups()  # type: ignore[union-attr]
        for declarator in declarators.split(","):
            star, member, dimensions = re.fullmatch(r"\s*(\*?)(\w+)((?:\[\w+\])*)", declarator).groups()  # type: ignore[union-attr]
            kind = "u8" if star else _NUMBERS.get(base) or _structure(folder, file, base, extents)
            shape = tuple(int(known.get(size, size)) for size in re.findall(r"\w+", dimensions))
            members.append((member, kind, shape) if shape else (member, kind))
    return np.dtype(members, align=True)


def _body(folder: Path, file: str, name: str) -> str:
    """What stands between the braces, without comments."""
    for source in (file, "chain.cuh"):
        found = re.search(rf"struct {name} {{(.*?)}};", (folder / source).read_text(encoding="utf-8"), re.DOTALL)
        if found:
            return re.sub(r"//[^\n]*", "", found[1])
    raise KeyError(f"{file} has no struct {name}")
