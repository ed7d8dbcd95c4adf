"""Dask arrays of any length through an operator: chunks of the batch, each on whatever worker computes it.

Needs the extra ``scale``. Importing this module imports Dask.
"""

from __future__ import annotations

from typing import Any

import dask
import dask.array as da
import numpy as np

from dispatcher.errors import InputError
from dispatcher.problem.loader import ProblemLike, load_problem
from dispatcher.problem.operator import storage_dtype
from dispatcher.scale.work import Work, plan_batch, stand_in


def map(
    problem: ProblemLike,
    x: Any,
    *,
    device: str = "auto",
    precision: str = "fp32",
    case: str | None = None,
    dtype: str | None = None,
    **arguments: Any,
) -> da.Array:
    """A problem applied to a Dask array, chunk by chunk along the batch.

    Nothing is computed yet. Each worker process compiles the operator once, for the best device that it has; weights
    are in one node of the graph.

    Args:
        problem: see :func:`dispatcher.compile`, as for ``precision``, ``case`` and ``dtype``.
        x: the tensor that the pipeline begins with. Its chunks along the batch stay, other axes become one chunk each;
            what is no Dask array becomes one.
        device: a device request for each worker, such as ``auto`` or ``cuda``.
        **arguments: other tensors by name, of which those with a batch are cut as ``x`` is; sizes and scalars.

    Returns:
        The result, in chunks of the batch.

    Raises:
        InputError: an argument is wrong or missing, or a step mixes batch items.
    """
    loaded = load_problem(problem)
    source = loaded.source
    if source in arguments:
        raise InputError(f"tensor {source} is given twice: as x and by name; give it once")
    arrays: dict[str, Any] = {source: da.asarray(x)}
    for tensor in loaded.tensors:
        if isinstance(arguments.get(tensor.name), da.Array):
            arrays[tensor.name] = arguments[tensor.name]
    for name, array in arrays.items():
        if any(np.isnan(extent) for extent in array.shape):
            raise InputError(f"tensor {name} has chunks of unknown size; call its compute_chunk_sizes() first")
    known = {name: stand_in(array.shape, array.dtype) for name, array in arrays.items()}
    plan = plan_batch(loaded, {**arguments, **known}, case=case, dtype=dtype, precision=precision)
    operator, first = plan.operator, arrays[source]
    whole = [name for name in arrays if name not in plan.batched]
    if whole:
        raise InputError(f"tensor {whole[0]} is a Dask array, and the same for every chunk; give its compute()")
    rows = first.chunks[0]
    pieces = {
        name: da.asarray(arrays.get(name, arguments.get(name)))
        .rechunk((rows, *([-1] * (len(operator.tensor_shapes[name]) - 1))))
        .to_delayed()
        .ravel()
        for name in plan.batched
    }
    work = dask.delayed(plan.work(device), pure=False, traverse=False)
    compute = dask.delayed(_computed, pure=False, traverse=False)
    shape, kind = operator.output_shape, storage_dtype(operator.dtype)
    results = [
        da.from_delayed(
            compute(work, list(pieces), *(each[number] for each in pieces.values())),
            (count, *shape[1:]),
            meta=np.empty((0,) * len(shape), kind),
        )
        for number, count in enumerate(rows)
    ]
    return da.concatenate(results, axis=0)


def _computed(work: Work, names: list[str], *tensors: np.ndarray) -> np.ndarray:
    return work(**dict(zip(names, tensors, strict=True)))
