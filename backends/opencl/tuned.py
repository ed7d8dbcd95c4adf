"""Tiles that were measured to be best on a device: kept in the user's cache folder, used in place of estimates."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from backends.opencl.options import Options
from backends.opencl.tiles import Fold
from dispatcher.errors import InputError
from dispatcher.filecache import FileCache
from dispatcher.geometry import ConvGeometry

#: Changes when the meaning of an option does; older results are then left alone.
SCHEMA = 2
RESULTS = FileCache("tuning")


def _key(device: str, geometry: ConvGeometry, fold: Fold | None, dtype: str) -> str:
    # The batch only multiplies the number of work items.
    return "\0".join((str(SCHEMA), device, repr(replace(geometry, batch=1)), repr(fold), dtype))


def recall(
    device: str, geometry: ConvGeometry, fold: Fold | None, dtype: str
) -> tuple[Options, float] | None:
    """The options kept for a convolution on ``device``, and how many times faster than the default they were."""
    stored = RESULTS.get(_key(device, geometry, fold, dtype))
    if stored is None:
        return None
    try:
        entry: dict[str, Any] = json.loads(stored)
        return Options.parse(entry["options"]), float(entry["gain"])
    except (ValueError, KeyError, TypeError, InputError):
        return None  # written by a version that meant something else by it


def remember(
    device: str, geometry: ConvGeometry, fold: Fold | None, dtype: str, options: Options, gain: float
) -> None:
    """Keep ``options``, measured to be ``gain`` times as fast as the default."""
    entry = {"options": options.given(), "gain": round(gain, 4)}
    RESULTS.put(_key(device, geometry, fold, dtype), json.dumps(entry).encode())
