"""The ground truth: plain NumPy in float64, written to be obviously right."""

from dispatcher.backends.numpy_ref.backend import (
    BACKEND,
    Meter,
    NumpyBackend,
    NumpyExecutable,
    chunks,
    for_each_chunk,
    output_chunk,
    reference,
    walk,
)

__all__ = [
    "BACKEND",
    "Meter",
    "NumpyBackend",
    "NumpyExecutable",
    "chunks",
    "for_each_chunk",
    "output_chunk",
    "reference",
    "walk",
]
