"""Classes of CPU devices: the register tiles that suit them, and what loads cost there."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files


@dataclass(frozen=True)
class DeviceClass:
    """Defaults for one class of CPU devices; see ``device_classes.json``.

    Attributes:
        name: for people.
        origin: where the numbers come from.
        vec: lanes of a vector of float.
        registers: vectors that the registers hold beside one that AVX-512 broadcasts as it multiplies.
        vector_load: cost of loading a vector from any address, in vector multiply-adds.
        broadcast: cost of loading one number into all lanes.
        register_tiles: ``(thread_c, thread_w)`` of the direct core that fit the registers, best first among equals.
        winograd_tiles: the same for the Winograd core.
        channel_tiles: vectors of output channels, and the most positions, of register tiles with these in the lanes;
            sums and weights fit the registers.
    """

    name: str
    origin: str
    vec: int
    registers: int
    vector_load: float
    broadcast: float
    register_tiles: tuple[tuple[int, int], ...]
    winograd_tiles: tuple[tuple[int, int], ...]
    channel_tiles: tuple[tuple[int, int], ...]

    def tile_cost(self, channels: int, width: int) -> float:
        """One input channel and tap of a register tile, in vector multiply-adds.

        Multiply-adds and loads run side by side, so that the larger share counts; the loop costs about one.
        """
        return max(channels * width, self.vector_load * width + self.broadcast * channels) + 1.0

    def channel_cost(self, vectors: int, positions: int) -> float:
        """The same with so many vectors of output channels and positions; each load feeds few multiply-adds."""
        return max(vectors * positions, vectors + positions) + 1.0


@cache
def device_classes() -> tuple[DeviceClass, ...]:
    """The shipped device classes."""
    text = (files("dispatcher.backends.opencl") / "device_classes.json").read_text(encoding="utf-8")
    return tuple(
        DeviceClass(
            entry["name"],
            entry["origin"],
            entry["vec"],
            entry["registers"],
            entry["vector_load"],
            entry["broadcast"],
            tuple((c, w) for c, w in entry["register_tiles"]),
            tuple((c, w) for c, w in entry["winograd_tiles"]),
            tuple((vectors, positions) for vectors, positions in entry["channel_tiles"]),
        )
        for entry in json.loads(text)["classes"]
    )


def device_class(vec: int) -> DeviceClass:
    """The class of a device with ``vec`` lanes of float: the widest that is not wider."""
    fitting = [entry for entry in device_classes() if entry.vec <= vec]
    return max(fitting, key=lambda entry: entry.vec) if fitting else device_classes()[-1]
