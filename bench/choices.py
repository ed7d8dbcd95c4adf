"""Whether the CPU kernels' estimates choose well: what is chosen against what else there was, on random geometries.

    python bench/choices.py                     the geometries of sweep.py, every OpenCL CPU device
    python bench/choices.py --count 10 --seed 7 --devices opencl:1 --table

Each geometry runs with what is chosen by default, with each register tile of the direct core, and with the Winograd
transforms that tuning would measure. They take turns. ``lost`` is how much longer the choice takes than the fastest
of them; of many that are equally fast one is the fastest by luck, so that a few percent mean nothing. See
bench/README.md.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import dispatcher
from bench import common
from bench.common import Run, say
from bench.sweep import COUNT, PROBLEM, describe, geometries
from dispatcher import load_problem
from dispatcher.check.inputs import random_tensors
from dispatcher.interface import Device
from dispatcher.problem.operator import bind
from dispatcher.timing.sampling import sample_beside, timed

PROGRAM, REPEATS = "choices", 5
GUIDE = ROOT / "docs" / "opencl-cpu.md"
#: What an estimate may lose.
MOST_LOST = 1.15
CHOSEN = "chosen"


def alternatives(device: Device, operator: Any) -> dict[str, dict[str, str]]:
    """Options by what tables call them, that which is chosen first."""
    from dispatcher.backends.opencl.tuning import transforms

    facts, geometry = common.opencl_runtime(device.index).facts, operator.convolutions[0].geometry
    ways = {CHOSEN: {"tuned": "ignore"}}
    for c, w in facts.device_class.register_tiles:
        ways[f"direct {c}x{w}"] = {"algorithm": "direct", "tile": f"{c}x{w}"}
    for each in transforms(geometry, None, facts, np.dtype(np.float32)):
        ways[f"F({each.planes}, {each.rows}, {each.columns})"] = each.given()
    return ways


def measure(sizes: Mapping[str, int], device: Device, run: Run) -> dict[str, Any]:
    """Samples of everything that a geometry can run with."""
    operator = bind(load_problem(PROBLEM), sizes, {})
    tensors, result = random_tensors(operator, 0), np.empty(operator.output_shape, np.float32)
    ways: dict[str, Any] = {}
    plans: dict[str, dict[str, Any]] = {}
    expected = None
    for name, options in alternatives(device, operator).items():
        compiled = dispatcher.compile(operator.problem, device=device.id, options=options, **operator.sizes)
        launch = compiled.explain(**tensors).launches[0]
        plan = {"algorithm": launch.algorithm, **launch.detail}
        if any({**known, "why": ""} == {**plan, "why": ""} for known in plans.values()):
            continue
        plans[name] = plan
        found = compiled(**tensors)
        expected = found if expected is None else expected
        if not np.allclose(found, expected, rtol=0, atol=1e-3 * float(np.abs(expected).max())):
            raise SystemExit(f"choices: {describe(sizes)}: {name} differs from what is chosen")
        ways[name] = timed(partial(compiled, **tensors, output=result))
    sampling = sample_beside(run.probe, run.settings.quiet_limit, ways, run.settings.repeats)
    for name, reason in sampling.failures.items():
        raise SystemExit(f"choices: {describe(sizes)}, {name}: {reason}")
    results = {name: {"samples": common.sample_lists(samples)} for name, samples in sampling.samples.items()}
    return {"geometry": describe(sizes), "sizes": dict(sizes), "device": device.id,
            "label": common.device_label(device), "plans": plans, "results": results}  # fmt: skip


def conclude(entry: dict[str, Any], threshold: float) -> None:
    """Put statistics, the fastest and what was lost into an entry."""
    medians = {name: common.add_statistics(each, threshold).median_s for name, each in entry["results"].items()}
    entry["fastest"] = min(medians, key=medians.__getitem__)
    entry["lost"] = medians[CHOSEN] / medians[entry["fastest"]]


def report_text(report: Mapping[str, Any]) -> str:
    """All geometries, those that lose most first, and what that comes to."""
    rows, lines = [], []
    for entry in sorted(report["entries"], key=lambda each: -float(each["lost"])):
        results, fastest = entry["results"], entry["fastest"]
        mark = "~" if results[CHOSEN]["noisy"] or results[fastest]["noisy"] else ""
        times = [f"{mark}{1e3 * results[name]['median_s']:.2f}" for name in (CHOSEN, fastest)]
        why = entry["plans"][CHOSEN].get("why", "")
        rows.append([entry["geometry"], entry["label"], str(len(results)), times[0], why, times[1], fastest,
                     f"{entry['lost']:.2f}"])  # fmt: skip
    titles = ("geometry", "device", "ways", "chosen, ms", "why", "fastest, ms", "which", "lost")
    for label in dict.fromkeys(entry["label"] for entry in report["entries"]):
        lost = [entry["lost"] for entry in report["entries"] if entry["label"] == label]
        within = sum(value <= MOST_LOST for value in lost)
        mean, median = statistics.geometric_mean(lost), statistics.median(lost)
        lines.append(f"{label}: within {MOST_LOST:.2f} on {within} of {len(lost)}, geometric mean {mean:.3f}, median "
                     f"{median:.3f}, most {max(lost):.2f}.")  # fmt: skip
    results = [result for entry in report["entries"] for result in entry["results"].values()]
    return "\n".join([*common.markdown(titles, rows), "", *lines, "", common.drop_note(report, results)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the results, print the table."""
    parser = common.new_parser(PROGRAM, __doc__, REPEATS)
    add = parser.add_argument
    add("--count", type=common.at_least(1), default=COUNT, help="geometries (default: %(default)s)")
    add("--seed", type=common.at_least(0), default=0, help="of the geometries")
    add("--scale", type=common.positive, default=1.0, help="factor on the work, for quick trials")
    add("--only", type=common.at_least(0), nargs="+", metavar="INDEX", help="only the geometries with these numbers")
    add("--table", action="store_true", help="write the table into docs/opencl-cpu.md")
    settings = parser.parse_args(arguments)
    run = Run.start(PROGRAM, settings)
    sizes = geometries(settings.count, settings.seed, settings.scale)
    chosen = range(len(sizes)) if settings.only is None else settings.only

    def case(index: int, device: Device) -> dict[str, Any]:
        say(f"{index} of {len(sizes)}: {describe(sizes[index])} on {device.name}")
        return measure(sizes[index], device, run)

    entries = common.until_interrupted(partial(case, *each) for each in product(chosen, run.devices))
    for entry in entries:
        conclude(entry, run.threshold)
    report = run.report(seed=settings.seed, scale=settings.scale, entries=entries)
    common.publish(report, settings, report_text(report), GUIDE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
