"""The backends, in order of preference; the reference is last. They are imported only when asked for."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from dispatcher.interface import Backend

#: Backend name to the module that holds it as ``BACKEND``.
BACKENDS: dict[str, str] = {
    "cuda": "dispatcher.backends.cuda",
    "opencl": "dispatcher.backends.opencl",
    "numpy": "dispatcher.backends.numpy_ref",
}


@dataclass(frozen=True)
class KernelFiles:
    """How files of one suffix, with a user's own kernel, are run.

    Attributes:
        backend: the backend that runs them.
        host_functions: they may hold a function of the host, which launches kernels itself.
        groups_needed: a launch has to say how many work items (threads) are in a group (block).
    """

    backend: str
    host_functions: bool
    groups_needed: bool


#: Suffix of a file with a user's own kernel to how it is run.
KERNEL_FILES: dict[str, KernelFiles] = {
    ".cl": KernelFiles("opencl", host_functions=False, groups_needed=False),
    ".cu": KernelFiles("cuda", host_functions=True, groups_needed=True),
}


def backend(name: str) -> Backend:
    """Import and return the backend called ``name``, a key of :data:`BACKENDS`."""
    loaded: Backend = importlib.import_module(BACKENDS[name]).BACKEND
    return loaded


def error_bounds() -> Any:
    """The module whose ``bounded_parts`` computes the reference with error bounds, whatever backends there are."""
    return importlib.import_module("dispatcher.backends.numpy_ref.bounds")
