"""Random transposed convolutions, ours against PyTorch on the CPU: where is the OpenCL backend slow?

    python bench/sweep.py                       40 geometries, every OpenCL CPU device
    python bench/sweep.py --table               also writes the table into docs/opencl-cpu.md
    python bench/sweep.py --count 10 --seed 7 --devices opencl:1

The geometries follow from the seed: strides 1 to 3 and kernels 1 to 5 on each axis, dilation 1 or 2, groups,
odd channel counts, and between 0.2 and 5 GFLOP of work. Results are checked against the NumPy reference, then
timed in turns with PyTorch (eager; and in its memory format channels_last_3d). The worst geometries come with
the plan that `explain` gives. See bench/README.md.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench import common
from bench.common import Run
from bench.cpu_peers import conclude, contender, contenders_of, milliseconds
from dispatcher import load_problem
from dispatcher.check.inputs import random_tensors
from dispatcher.errors import GeometryError
from dispatcher.problem.messages import picked
from dispatcher.problem.operator import bind
from dispatcher.timing.sampling import Times

PROGRAM = "sweep"
PROBLEM = "conv-transpose-3d-asym-input-sq-kernel"
PEER_NAMES = ("torch", "torch-channels-last")
GUIDE = ROOT / "docs" / "opencl-cpu.md"
COUNT, REPEATS, WORST = 40, 5, 5
LEAST_FLOPS, MOST_FLOPS = 2e8, 5e9
#: Elements of the input and of the output: larger ones would measure the memory only.
MOST_ELEMENTS = 24_000_000
CHANNELS = (1, 3, 5, 7, 8, 12, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 96, 128)
AXES = ("d", "h", "w")


# ---- geometries --------------------------------------------------------------------------------------------
def geometries(count: int, seed: int, scale: float = 1.0) -> list[dict[str, int]]:
    """``count`` sets of sizes, the same for the same seed.

    Args:
        scale: of the work, for quick trials.
    """
    source = random.Random(seed)
    problem = load_problem(PROBLEM)
    found: list[dict[str, int]] = []
    while len(found) < count:
        sizes = random_sizes(source, math.exp(source.uniform(math.log(LEAST_FLOPS), math.log(MOST_FLOPS))) * scale)
        try:
            operator = bind(problem, sizes, {})
        except GeometryError:
            continue
        elements = max(math.prod(operator.output_shape), math.prod(operator.tensor_shapes["input"]))
        if LEAST_FLOPS * scale <= operator.flops <= MOST_FLOPS * scale and elements <= MOST_ELEMENTS:
            found.append(sizes)
    return found


def random_sizes(source: random.Random, flops: float) -> dict[str, int]:
    """Sizes of about ``flops`` operations; they may turn out impossible."""
    groups = source.choice((1, 1, 1, 1, 2, 3, 4, 8))
    in_group = source.choice([channels for channels in CHANNELS if channels * groups <= 192])
    out_group = source.choice([channels for channels in CHANNELS if channels * groups <= 192])
    sizes = {
        "batch_size": source.choice((1, 1, 2, 3)),
        "in_channels": in_group * groups,
        "out_channels": out_group * groups,
        "groups": groups,
    }
    for axis in AXES:
        kernel, stride = source.choice((1, 2, 3, 3, 4, 5)), source.choice((1, 1, 2, 2, 3))
        dilation = source.choice((1, 1, 1, 2))
        sizes |= {
            f"kernel_{axis}": kernel,
            f"stride_{axis}": stride,
            f"dilation_{axis}": dilation,
            f"padding_{axis}": source.randint(0, dilation * (kernel - 1)) // source.choice((1, 2)),
            f"output_padding_{axis}": source.randint(0, max(stride, dilation) - 1),
        }
    taps = math.prod(sizes[f"kernel_{axis}"] for axis in AXES)
    voxels = flops / (2 * sizes["batch_size"] * sizes["in_channels"] * out_group * taps)
    side = voxels ** (1 / 3)
    depth = max(2, round(side * source.uniform(0.4, 1.2)))
    height = max(2, round(side * source.uniform(0.6, 1.5)))
    width = max(2, round(voxels / (depth * height)))
    return sizes | {"depth": depth, "height": height, "width": width}


def describe(sizes: Mapping[str, int]) -> str:
    """A geometry in one line."""

    def triple(name: str) -> str:
        return ",".join(str(sizes[f"{name}_{axis}"]) for axis in AXES)

    text = f"n{sizes['batch_size']} c{sizes['in_channels']}->{sizes['out_channels']}"
    text += f" g{sizes['groups']}" if sizes["groups"] > 1 else ""
    text += f" {sizes['depth']}x{sizes['height']}x{sizes['width']} k{triple('kernel')} s{triple('stride')}"
    for name, letter, usual in (("padding", "p", 0), ("output_padding", "op", 0), ("dilation", "dil", 1)):
        if any(sizes[f"{name}_{axis}"] != usual for axis in AXES):
            text += f" {letter}{triple(name)}"
    return text


# ---- results -----------------------------------------------------------------------------------------------
def overview(entries: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    """Minimum, quartiles and median of a device's ratios, and its worst geometries."""
    found = {position: entry["ratios"].get(name) for position, entry in enumerate(entries)}
    ratios = {position: ratio["value"] for position, ratio in found.items() if ratio is not None}
    if not ratios:
        return {"count": 0, "worst": []}
    values = Times(tuple(ratios.values()))
    low, high = values.quartiles_s
    return {
        "count": len(ratios),
        "min": values.min_s,
        "first_quartile": low,
        "median": values.median_s,
        "third_quartile": high,
        "max": max(values.seconds),
        "slower_than_peer": sum(value < 1 for value in values.seconds),
        "worst": sorted(ratios, key=ratios.__getitem__)[:WORST],
    }


# ---- reporting ---------------------------------------------------------------------------------------------
def plan(launches: Sequence[Mapping[str, Any]]) -> str:
    """Launches in one line: algorithm, tile, and why."""
    parts = []
    for launch in launches:
        detail = dict(launch["detail"])
        why = detail.pop("why", "")
        text = ", ".join(f"{key} {value}" for key, value in detail.items())
        parts.append(f"{launch['algorithm']} ({why}): {text}" if why else f"{launch['algorithm']}: {text}")
    return "; ".join(parts)


def report_text(report: Mapping[str, Any]) -> str:
    """The table of all geometries, and the worst ones with their plans."""
    labels = {each["name"]: each["label"] for each in report["contenders"]}
    mine = [each["name"] for each in report["contenders"] if each["device"] is not None]
    titles = ["", "geometry", "GFLOP", *(f"{label}, ms" for label in labels.values())]
    rows = []
    for entry in report["entries"]:
        cells = [str(entry["index"]), entry["geometry"], f"{entry['flops'] / 1e9:.2f}"]
        cells += [milliseconds(entry["results"].get(name), 2) for name in labels]
        ratios = entry["ratios"]
        rows.append([*cells, *(f"{ratios[name]['value']:.2f}" if name in ratios else "–" for name in mine)])
    lines = common.markdown([*titles, *(f"ratio, {labels[name]}" for name in mine)], rows)
    for name in mine:
        found = report["overviews"][name]
        if not found["count"]:
            continue
        lines += [
            "",
            f"{labels[name]}: best PyTorch / ours over {found['count']} geometries: min {found['min']:.2f}, "
            f"quartiles {found['first_quartile']:.2f} and {found['third_quartile']:.2f}, median "
            f"{found['median']:.2f}, max {found['max']:.2f}; slower than PyTorch on "
            f"{found['slower_than_peer']}.",
        ]
        for position in found["worst"]:
            entry = report["entries"][position]
            lines += [
                f"- {entry['ratios'][name]['value']:.2f}: {entry['index']}, {entry['geometry']}, "
                f"{entry['results'][name]['gflops']:.0f} GFLOP/s",
                f"  {plan(entry['results'][name]['launches'])}",
            ]
    failures = [
        f"- {entry['geometry']}, {labels[name]}: {reason}"
        for entry in report["entries"]
        for name, reason in entry["failures"].items()
    ]
    failures += [f"- {name} is left out: {reason}" for name, reason in report["left_out"].items()]
    if failures:
        lines += ["", "Not measured:", *failures]
    results = [result for entry in report["entries"] for result in entry["results"].values()]
    return "\n".join([*lines, "", common.drop_note(report, results)])


# ---- the program -------------------------------------------------------------------------------------------
def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = common.new_parser("sweep", __doc__, REPEATS)
    add = parser.add_argument
    add("--count", type=common.at_least(1), default=COUNT, help="geometries (default: %(default)s)")
    add("--seed", type=common.at_least(0), default=0, help="of the geometries and the tensors")
    add("--scale", type=common.positive, default=1.0, help="factor on the work, for quick trials")
    add("--only", type=common.at_least(0), nargs="+", metavar="INDEX",
        help="measure only the geometries with these numbers")  # fmt: skip
    add("--peers", nargs="*", choices=PEER_NAMES, default=list(PEER_NAMES), metavar="NAME",
        help=f"of {', '.join(PEER_NAMES)} (default: both)")  # fmt: skip
    add("--table", action="store_true", help="write the table into docs/opencl-cpu.md")
    return parser.parse_args(arguments)


def measure(settings: argparse.Namespace) -> dict[str, Any]:
    """Measure every geometry.

    Raises:
        SystemExit: see :meth:`bench.common.Run.start`.
    """
    run = Run.start(PROGRAM, settings)
    entrants, problem = contenders_of(run), load_problem(PROBLEM)

    def entry(index: int, sizes: Mapping[str, int]) -> dict[str, Any]:
        operator, geometry = bind(problem, sizes, {}), describe(sizes)
        facts = {"index": index, "geometry": geometry, "sizes": sizes, "seed": settings.seed}
        facts |= picked(operator, "output_shape", "flops", "ideal_bytes")
        title = f"{index} of {settings.count}, {geometry}"
        tensors = random_tensors(operator, settings.seed)
        makers = {each.name: partial(contender, operator, tensors, each.name, each.device) for each in entrants}
        return {**facts, **common.race(title, operator, tensors, makers, run.probe, settings)}

    entries = common.until_interrupted(
        partial(entry, index, sizes)
        for index, sizes in enumerate(geometries(settings.count, settings.seed, settings.scale))
        if settings.only is None or index in settings.only
    )
    for each in entries:
        conclude(each, entrants, run.threshold)
    return run.report(
        seed=settings.seed,
        scale=settings.scale,
        contenders=[asdict(entrant) for entrant in entrants],
        entries=entries,
        overviews={each.name: overview(entries, each.name) for each in entrants if each.device is not None},
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the results, print the table."""
    settings = parse(arguments)
    report = measure(settings)
    common.publish(report, settings, report_text(report), GUIDE)
    mine = {each["name"] for each in report["contenders"] if each["device"] is not None}
    return 1 if any(mine & set(entry["failures"]) for entry in report["entries"]) else 0


if __name__ == "__main__":
    sys.exit(main())
