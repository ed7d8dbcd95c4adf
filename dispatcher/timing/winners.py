"""Options that were measured to be best on a device: kept in the user's cache folder, used in place of estimates.

A backend says what its options are filed under: everything that the result of a measurement depends on.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dispatcher.device.filecache import FileCache

logger = logging.getLogger(__name__)

RESULTS = FileCache("tuning")


@dataclass(frozen=True)
class Tuned:
    """What was kept.

    Attributes:
        options: as :func:`store` got them; not checked since.
        gain: how many times as fast as the default they were.
    """

    options: Mapping[str, Any]
    gain: float

    @property
    def why(self) -> str:
        """The reason to use them, for people."""
        return f"tuned on this device: {self.gain:.2f} times the speed of the default"


def stored(key: Sequence[str]) -> Tuned | None:
    """What is kept under ``key``; None where there is nothing, or nothing of use."""
    data = RESULTS.get("\0".join(key))
    if data is None:
        return None
    try:
        entry = json.loads(data)
        options, gain = entry["options"], float(entry["gain"])
    except (ValueError, KeyError, TypeError):
        return None  # written by a version that meant something else by it
    return Tuned(options, gain) if isinstance(options, dict) and math.isfinite(gain) else None


def store(key: Sequence[str], options: Mapping[str, Any], gain: float) -> None:
    """Keep ``options``, measured to be ``gain`` times as fast as the default, under ``key``."""
    entry = json.dumps({"options": dict(options), "gain": round(gain, 4)})
    if not RESULTS.put("\0".join(key), entry.encode()):
        logger.warning("what was tuned is not kept")  # the cache has said why
