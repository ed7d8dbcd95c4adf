"""Tuning options of the OpenCL backend: what a user or a tuner may fix, checked once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dispatcher.backends.opencl.transforms import MOST_OUTPUTS
from dispatcher.errors import InputError, suggest
from dispatcher.problem.messages import brief

#: Algorithms of the convolution; ``auto`` leaves the choice to estimates, or to what was tuned on this device.
ALGORITHMS = ("auto", "direct", "winograd", "tiled", "gather")
LINES = ("rows", "flat", "channels")
#: Options of the Winograd core alone: outputs that a transform yields at once along depth, height and width.
OUTPUTS = ("planes", "rows", "columns")


@dataclass(frozen=True)
class Options:
    """What is fixed; None leaves a parameter to the backend.

    Attributes:
        algorithm: one of :data:`ALGORITHMS`.
        tile: ``"CxW"``: output channels and vectors of a register tile (direct and winograd).
        box: ``"DxH"``: positions along depth and height of a work item (direct and winograd).
        line: ``rows`` or ``flat`` (direct and winograd), see :mod:`dispatcher.backends.opencl.tiles`, or ``channels``
            (direct), where ``tile`` counts output channels and positions; see
            :mod:`dispatcher.backends.opencl.channels`.
        planes, rows, columns: ``1`` to ``3``: outputs along depth, height and width that one Winograd transform yields
            (winograd).
        tuned: ``ignore`` leaves alone what was tuned on this device.
        fusion: ``off`` makes every step a launch of its own, to see what fusion is worth; ``eager`` lets launches leave
            statistics for the next one also where that one would find its input in the cache.
    """

    algorithm: str = "auto"
    tile: str | None = None
    box: str | None = None
    line: str | None = None
    planes: str | None = None
    rows: str | None = None
    columns: str | None = None
    tuned: str | None = None
    fusion: str | None = None

    @staticmethod
    def parse(options: Mapping[str, Any]) -> Options:
        """Check a user's options.

        Raises:
            InputError: a key is unknown or a value is not one of its own.
        """
        known = list(asdict(Options()))
        unknown = sorted(set(options) - set(known))
        if unknown:
            wanted = f"it takes: {', '.join(known)}{suggest(unknown[0], known)}"
            raise InputError(f"option {brief(unknown[0])} is unknown to backend opencl; {wanted}")
        for name, value in options.items():
            if not isinstance(value, str | None):
                raise InputError(f"{name} is {brief(value)}; expected a text")
        parsed = Options(**options)
        if parsed.algorithm not in ALGORITHMS:
            wanted = f"backend opencl has {', '.join(ALGORITHMS)}{suggest(parsed.algorithm, ALGORITHMS)}"
            raise InputError(f"algorithm is {brief(parsed.algorithm)}; {wanted}")
        if parsed.line is not None and parsed.line not in LINES:
            raise InputError(f"line is {brief(parsed.line)}; expected one of {', '.join(LINES)}")
        for name in OUTPUTS:
            value = getattr(parsed, name)
            choices = [str(m) for m in range(1, MOST_OUTPUTS + 1)]
            if value is not None and value not in choices:
                raise InputError(f"{name} is {brief(value)}; expected one of {', '.join(choices)}")
            if value is not None and parsed.algorithm != "winograd":
                algorithm = brief(parsed.algorithm)
                raise InputError(f"{name} is {brief(value)} with algorithm {algorithm}; only algorithm winograd has it")
        if parsed.line == "channels" and parsed.algorithm not in ("auto", "direct"):
            raise InputError(
                f"line is 'channels' with algorithm {brief(parsed.algorithm)}; only algorithm direct has it"
            )
        if parsed.tuned not in (None, "ignore"):
            raise InputError(f"tuned is {brief(parsed.tuned)}; expected ignore")
        if parsed.fusion not in (None, "off", "eager"):
            raise InputError(f"fusion is {brief(parsed.fusion)}; expected off or eager")
        for name in ("tile", "box"):
            pair(name, getattr(parsed, name))
        return parsed

    @property
    def outputs(self) -> tuple[int | None, int | None, int | None]:
        """What is fixed of the outputs along depth, height and width of a Winograd transform."""
        planes, rows, columns = (None if text is None else int(text) for text in (self.planes, self.rows, self.columns))
        return planes, rows, columns

    def given(self) -> dict[str, str]:
        """The options that are fixed, as a mapping that :meth:`parse` reads."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def pair(name: str, text: str | None) -> tuple[int, int] | None:
    """``"4x2"`` as ``(4, 2)``.

    Raises:
        InputError: it is not two numbers from 1 to 64.
    """
    if text is None:
        return None
    parts = text.split("x") if isinstance(text, str) else []
    if len(parts) == 2 and all(part.isdecimal() and 1 <= int(part) <= 64 for part in parts):
        return int(parts[0]), int(parts[1])
    raise InputError(f"{name} is {brief(text)}; expected two numbers from 1 to 64 such as '4x2'")
