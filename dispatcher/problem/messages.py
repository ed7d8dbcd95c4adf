"""Values, names and places as messages have them, short and on one line; and as JSON has them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

KeyPath = tuple[str | int, ...]


def show(value: object) -> str:
    """``value`` on one short line, whatever it is; containers are not walked."""
    if value is None:
        return "nothing"
    if isinstance(value, str):
        return repr(value if len(value) <= 40 else value[:37] + "...")
    if isinstance(value, bool | float):
        return str(value)
    if isinstance(value, int):
        return str(value) if abs(value) <= 2**70 else f"an integer of {value.bit_length()} bits"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    return f"a value of type {type(value).__name__}"


def name_list(names: Collection[str]) -> str:
    """A list of names, cut short when it is long."""
    listed = list(names)
    return ", ".join(listed[:30]) + (f" and {len(listed) - 30} more" if len(listed) > 30 else "") or "none"


def counted(number: int, one: str) -> str:
    """``1 launch``, ``2 launches``."""
    return f"{number} {one}" if number == 1 else f"{number} {one}{'es' if one.endswith('ch') else 's'}"


def dotted(keys: KeyPath) -> str:
    """``parameters[2].type``."""
    text = ""
    for key in keys:
        if isinstance(key, int):
            text += f"[{key}]"
        else:
            text += ("." if text else "") + (key if key.isprintable() and len(key) <= 100 else show(key))
    return text


def show_path(path: Path) -> str:
    text = str(path)
    if len(text) > 300:
        text = "..." + text[-297:]
    return text if text.isprintable() else repr(text)


def brief(value: Any) -> str:
    """A value in a message: short, on one line."""
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape} and dtype {value.dtype}"
    try:
        text = " ".join(repr(value).split())
    except Exception as error:  # an integer with too many digits, or what an object's own code raises
        length = "too long to print" if isinstance(error, ValueError) else "that cannot be printed"
        return f"a {type(value).__name__} {length}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def plain(value: Any) -> Any:
    """``value`` with lists in place of tuples and dicts in place of other mappings, ready for JSON."""
    if isinstance(value, Mapping):
        return {name: plain(part) for name, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, list | tuple) else value


def picked(owner: object, *names: str) -> dict[str, Any]:
    """Attributes of ``owner`` by name, each as :func:`plain` gives it."""
    return {name: plain(getattr(owner, name)) for name in names}
