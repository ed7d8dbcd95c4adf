"""The backends, in order of preference; the reference is last. They are imported only when asked for."""

from __future__ import annotations

import importlib

from dispatcher.interface import Backend

#: Backend name to the module that holds it as ``BACKEND``.
BACKENDS: dict[str, str] = {
    "cuda": "backends.cuda",
    "opencl": "backends.opencl",
    "numpy": "backends.numpy_ref",
}


def backend(name: str) -> Backend:
    """Import and return the backend called ``name``, a key of :data:`BACKENDS`."""
    loaded: Backend = importlib.import_module(BACKENDS[name]).BACKEND
    return loaded
