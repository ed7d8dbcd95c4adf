"""Under what the options that were tuned for a convolution are kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from dispatcher.backends.opencl.options import Options
from dispatcher.backends.opencl.tiles import Fold
from dispatcher.errors import InputError
from dispatcher.ops.geometry import ConvGeometry
from dispatcher.timing.winners import store_all, stored

#: Changes when the meaning of an option does; older results are then left alone.
SCHEMA = 3


def _key(device: str, geometry: ConvGeometry, fold: Fold | None, dtype: str) -> tuple[str, ...]:
    # The batch only multiplies the number of work items.
    return (str(SCHEMA), device, repr(replace(geometry, batch=1)), repr(fold), dtype)


def recall(device: str, geometry: ConvGeometry, fold: Fold | None, dtype: str) -> tuple[Options, str] | None:
    """The options kept for a convolution on ``device``, and why to use them."""
    known = stored(_key(device, geometry, fold, dtype))
    if known is None:
        return None
    try:
        options = Options.parse(known.options)
    except (InputError, TypeError):
        return None  # written by a version that meant something else by it
    return None if options.tuned == "ignore" else (options, known.why)  # the default was the best


def remember(
    device: str,
    convolutions: Iterable[tuple[ConvGeometry, Fold | None]],
    dtype: str,
    options: Options,
    gain: float,
    about: Mapping[str, Any],
) -> bool:
    """Keep ``options``, measured to be ``gain`` times as fast as the default, for all convolutions or none."""
    keys = [_key(device, geometry, fold, dtype) for geometry, fold in convolutions]
    return store_all(keys, options.given(), gain, about)
