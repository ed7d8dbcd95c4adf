"""How fast the inner loops of register tiles run on a CPU device: measured after its self-test, and kept with it.

Compilers spill some tiles, and cores differ in how many loads they make beside multiply-adds. So the cores' own loops
(kernels/conv_tile.cl, kernels/winograd_product.cl) run on data that the caches hold, on one core.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from dispatcher.backends.opencl.classes import CORES, RATES, DeviceClass, Rates, device_class, rates_text
from dispatcher.backends.opencl.render import KernelOperands, defines, kernel_text, section, table, tail_macro
from dispatcher.backends.opencl.runtime import OpenClRuntime
from dispatcher.backends.opencl.tiles import odd_lines
from dispatcher.backends.opencl.winograd import SKEW
from dispatcher.interface import CALIBRATION

#: Input channels, output channels, taps along height and width, and components of a chunk.
DEPTH, CHANNELS, TAPS, PARTS = 48, 32, 3, 4
#: Vectors of a line.
LINE = 8
#: Operations of a turn, turns of each tile, and the seconds after which there are no more.
TURN_FLOPS, TURNS, LIMIT_S = 2e7, 24, 0.6
#: Seconds between turns: others, or the host of a virtual machine, slow a core down for spells.
PAUSE_S = 0.01


def measured_tiles(device: DeviceClass) -> list[tuple[str, int, int]]:
    """Core, channels and vectors of the tiles to measure.

    Those that fill half of the registers may spill; the single vectors behind them have few sums that go on at the same
    time, and many loads.
    """
    lists = device.register_tiles, device.winograd_tiles
    large = [
        (core, c, w)
        for core, tiles in zip(CORES, lists, strict=True)
        for c, w in tiles
        if 2 * (c + 1) * w > device.registers
    ]
    return list(dict.fromkeys(large + [(core, c, 1) for core, c, _ in large if c >= 4]))


def source(vec: int, tiles: list[tuple[str, int, int]]) -> str:
    """Source text of the kernel: the loops of all tiles, by their places in the list."""
    pitch = (LINE + 1) * vec
    values: dict[str, object] = {
        "GROUP_IC": DEPTH, "SUM_IC": DEPTH, "SUM_BLOCK": 16, "CHANNELS": CHANNELS, "PARTS": PARTS, "SKEW": SKEW,
        "WEIGHTS": TAPS * TAPS * DEPTH, "STRIDE_W": 1, "LINE": LINE * vec, "CHANNEL": odd_lines(TAPS * pitch),
        "row_of_tap(packed, d, h, rd, rh, td, th, md, chunk)": f"((packed) + (th) * {pitch} + (chunk) * VEC)",
    }  # fmt: skip
    parts = [defines(values), tail_macro("CONV_TAIL", ""), table("CHUNK_LINE", [0] * LINE)]
    parts += [table("TAPS_D", [1]), table("TAPS_H", [TAPS]), table("TAPS_W", [TAPS]), table("OFFSET_W", [[0, 1, 2]])]
    for core, c, w in tiles:
        name, file, function = {
            "direct": ("conv_tile_", "conv_tile.cl", "direct"),
            "winograd": ("winograd_product_", "winograd_product.cl", "product"),
        }[core]
        parts.append(section(file, defines({name: f"{function}_{c}x", "THREAD_C": c, "TILE_W": w})))
        parts.append(f"#undef {name}\n#undef THREAD_C\n#undef TILE_W\n")
    for name, core in (("DIRECT_TILES(DO)", "direct"), ("PRODUCT_TILES(DO)", "winograd")):
        calls = (f"DO({number}, {c}, {w})" for number, (of, c, w) in enumerate(tiles) if of == core)
        parts.append(defines({name: " ".join(calls)}))
    return kernel_text("float", vec, KernelOperands(), *parts, section("tile_probe.cl"))


def flops(vec: int, core: str, c: int, w: int) -> int:
    """Operations of a round."""
    loops = TAPS * TAPS * (LINE // w) if core == "direct" else PARTS
    return 2 * vec * w * c * (CHANNELS // c) * DEPTH * loops


def measure(runtime: OpenClRuntime) -> Rates:
    """The best rate of each tile in several turns, as a share of the best of all."""
    vec = runtime.facts.vec
    tiles = measured_tiles(device_class(vec))
    kernel, queue = runtime.kernel(source(vec, tiles), "tile_probe"), runtime.queue()
    inputs, weights, sums = (runtime.constant(np.full(1 << 17, 0.5, np.float32)) for _ in range(3))

    def rate(number: int) -> float:
        per_round = flops(vec, *tiles[number])
        rounds = int(-(-TURN_FLOPS // per_round))
        event = kernel.enqueue(queue, 1, 1, inputs, weights, sums, np.int32(number), np.int32(rounds))
        queue.finish()
        nanoseconds: float = event.profile.end - event.profile.start
        return rounds * per_round / max(1.0, nanoseconds)

    rate(0)  # some runtimes compile at the first launch, and a core that slept is slow at first
    rates, start = [0.0] * len(tiles), time.perf_counter()
    for _ in range(TURNS):
        rates = [max(known, rate(number)) for number, known in enumerate(rates)]
        if time.perf_counter() - start > LIMIT_S:
            break
        time.sleep(PAUSE_S)
        rate(0)
    return {tile: each / max(rates) for tile, each in zip(tiles, rates, strict=True)}


def tile_facts(runtime: OpenClRuntime) -> dict[str, str]:
    """What the self-test keeps of a CPU device: rates of its register tiles, and what follows, for people."""
    rates = measure(runtime)
    slower = replace(device_class(runtime.facts.vec), rates=rates).slower()
    which = ", ".join(f"{core} {c}x{w} by {100 * (ratio - 1):.0f} %" for (core, c, w), ratio in slower.items())
    found = f"cost more than estimated: {which}" if which else "cost what is estimated"
    return {RATES: rates_text(rates), CALIBRATION: f"{len(rates)} register tiles were measured, and {found}"}
