"""Options that were measured to be best on a device: kept in the user's cache folder, used in place of estimates.

A backend says what its options are filed under: everything that the result of a measurement depends on. Beside them
it is kept what they were measured with, so that people can see what there is.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from dispatcher.device.filecache import FileCache
from dispatcher.errors import InputError
from dispatcher.problem.messages import picked
from dispatcher.problem.operator import Operator

logger = logging.getLogger(__name__)

RESULTS = FileCache("tuning")


@dataclass(frozen=True)
class Tuned:
    """What was kept.

    Attributes:
        options: as :func:`store` got them; not checked since.
        gain: how many times as fast as the default they were.
        about: what was measured, as :func:`measured_with` says it; empty where an older version kept it.
    """

    options: Mapping[str, Any]
    gain: float
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def why(self) -> str:
        """The reason to use them, for people."""
        return f"tuned on this device: {self.gain:.2f} times the speed of the default"

    def as_dict(self) -> dict[str, Any]:
        """A dictionary for JSON."""
        return {**self.about, **picked(self, "options", "gain")}


def measured_with(operator: Operator, device: str) -> dict[str, Any]:
    """What is kept of a measurement for people: of what, on which device (by name), and when."""
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    found = picked(operator, "dtype", "precision", "sizes")
    return {"problem": operator.problem.name, "device": device, **found, "kept_at": now}


def stored(key: Sequence[str]) -> Tuned | None:
    """What is kept under ``key``; None where there is nothing, or nothing of use."""
    return _read(RESULTS.get(_name(key)))


def store(key: Sequence[str], options: Mapping[str, Any], gain: float, about: Mapping[str, Any] | None = None) -> bool:
    """Keep ``options`` under ``key``; see :func:`store_all`."""
    return store_all([key], options, gain, about)


def store_all(
    keys: Collection[Sequence[str]], options: Mapping[str, Any], gain: float, about: Mapping[str, Any] | None = None
) -> bool:
    """Keep ``options``, measured to be ``gain`` times as fast as the default, under all ``keys`` or under none.

    Returns:
        Whether they are kept.
    """
    entry = json.dumps({"options": dict(options), "gain": round(gain, 4), "about": dict(about or {})}).encode()
    names = dict.fromkeys(map(_name, keys))
    before = {name: RESULTS.get(name) for name in names}
    kept = False
    try:
        kept = all(RESULTS.put(name, entry) for name in names)
    finally:
        if not kept:
            for name, data in before.items():
                RESULTS.drop(name) if data is None else RESULTS.put(name, data)
    if not kept:
        logger.warning("what was tuned is not kept")  # the cache has said why
    return kept


def everything(problems: Collection[str] = ()) -> dict[Path, Tuned]:
    """What is kept, by file; of these problems alone, where any are named."""
    found = ((path, _read(data)) for path, data in RESULTS.entries())
    return {path: tuned for path, tuned in found if tuned and (not problems or tuned.about.get("problem") in problems)}


def forget(problems: Collection[str] = ()) -> list[Tuned]:
    """Remove what is kept, of these problems alone where any are named; gives what that was.

    Raises:
        InputError: something cannot be removed.
    """
    found = everything(problems)
    for path in found:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise InputError(f"{path} cannot be removed: {error.strerror}; remove it yourself") from error
    return list(found.values())


def _name(key: Sequence[str]) -> str:
    return "\0".join(key)


def _read(data: bytes | None) -> Tuned | None:
    with contextlib.suppress(ValueError, KeyError, TypeError):  # written by a version that meant something else by it
        entry = json.loads(data or b"")
        options, gain, about = entry["options"], float(entry["gain"]), entry.get("about", {})
        if isinstance(options, dict) and isinstance(about, dict) and math.isfinite(gain):
            return Tuned(options, gain, about)
    return None
