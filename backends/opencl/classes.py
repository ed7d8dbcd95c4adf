"""Classes of CPU devices: the register tiles that suit them, and what loads cost there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files

#: Cores whose loops are measured, and the fact of a device that has the rates of their register tiles.
CORES, RATES = ("direct", "winograd"), "register_tile_rates"
#: A tile's rate, as a share of the best one of all, by core, channels and vectors.
Rates = Mapping[tuple[str, int, int], float]
#: What costs so much more than estimated was not made so by noise; below, estimates stand.
SLOWER = 1.15


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
        rates: of register tiles, where they were measured.
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
    rates: Rates = field(default_factory=dict, hash=False)

    def tile_cost(self, channels: int, width: int, core: str = "direct") -> float:
        """One input channel and tap of a register tile, in vector multiply-adds.

        Multiply-adds and loads run side by side, so that the larger share counts; the loop costs about one. What was
        measured counts where it is clearly more: less may be that a core's loop is not all that a tile costs.
        """
        estimated = max(channels * width, self.vector_load * width + self.broadcast * channels) + 1.0
        measured = channels * width / self.rates.get((core, channels, width), 1.0)
        return measured if measured > SLOWER * estimated else estimated

    def slower(self) -> Rates:
        """The tiles that cost clearly more than estimated: how many times as much."""
        estimates = replace(self, rates={})
        ratios = {(core, c, w): self.tile_cost(c, w, core) / estimates.tile_cost(c, w) for core, c, w in self.rates}
        return {tile: ratio for tile, ratio in ratios.items() if ratio > 1.0}

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


def rates_text(rates: Rates) -> str:
    """Rates in percent, 1 at least, as a text, such as ``direct 4x4 98, winograd 4x4 100``."""
    return ", ".join(f"{core} {c}x{w} {max(1.0, 100 * rate):.0f}" for (core, c, w), rate in rates.items())


def _rates(text: str) -> Rates:
    """The rates that a text of :func:`rates_text` has."""
    found = {}
    for core, tile, percent in (entry.split() for entry in text.split(", ") if entry):
        c, _, w = tile.partition("x")
        found[core, int(c), int(w)] = int(percent) / 100
    return found


@cache
def device_class(vec: int, rates: str = "") -> DeviceClass:
    """The class of a device with ``vec`` lanes of float: the widest that is not wider.

    Args:
        rates: of its register tiles, as :func:`rates_text` has them; empty where they were not measured.
    """
    fitting = [entry for entry in device_classes() if entry.vec <= vec]
    found = max(fitting, key=lambda entry: entry.vec) if fitting else device_classes()[-1]
    return replace(found, rates=_rates(rates))
