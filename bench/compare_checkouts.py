"""Two checkouts of this repository against each other on the CPU, in one interleaved run: is the new one slower?

    python bench/compare_checkouts.py ../old ../new                      the five problems, batch 2 (asym-input: 1)
    python bench/compare_checkouts.py ../old . --problems my.yaml --batch 8 --devices opencl:0

Each checkout runs in a child process of its own, which stays alive and is told over a pipe when to take a sample: one
at a time, in the order A B, B A. Both get the same input tensors, and the results of both are checked against the NumPy
reference first. A sample is a warm call with ``output=`` on the host's clock, and the kernels of another call on the
device's clock. See bench/README.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import dispatcher
from bench import common
from bench.common import Run, say
from dispatcher.check.inputs import random_tensors
from dispatcher.interface import Device, Timings
from dispatcher.problem.operator import Operator, operator_dict
from dispatcher.timing.contenders import Contender
from dispatcher.timing.differences import judge
from dispatcher.timing.sampling import Sample, quiet_times, ratio

PROGRAM = "compare_checkouts"
REPEATS = 15
SIDES = ("old", "new")


class Checkout:
    """A checkout, and the child process that runs it."""

    def __init__(self, side: str, folder: Path) -> None:
        self.side, self.folder = side, folder.resolve()
        self._process = subprocess.Popen(
            [sys.executable, str(ROOT / "bench" / "checkout_child.py")],
            cwd=self.folder, env={**os.environ, "PYTHONPATH": str(self.folder)}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        package = self.ask("start")["package"]
        if not Path(package).is_relative_to(self.folder):
            self.close()
            raise RuntimeError(f"{folder} is no checkout: the child found {package}")
        self.devices = self.ask("devices")

    def ask(self, task: str, **request: Any) -> dict[str, Any]:
        """Have the child do something, and wait for its answer.

        Raises:
            RuntimeError: it failed, or the child ended.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"task": task, **request}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "the child process ended"}
        if "error" in answer:
            raise RuntimeError(f"the {self.side} checkout: {answer['error']}")
        return answer

    def close(self) -> None:
        """Let the child end."""
        self._process.communicate()

    def facts(self) -> dict[str, Any]:
        """What a result file says of it."""

        def git(*arguments: str) -> str:
            command = ["git", "-C", str(self.folder), *arguments]
            return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

        return {"commit": git("rev-parse", "HEAD") or None, "changed": bool(git("status", "--porcelain"))}


class Side(Contender):
    """A checkout on one operator."""

    def __init__(
        self, operator: Operator, checkout: Checkout, problem: str, device: Device, files: Mapping[str, str]
    ) -> None:
        super().__init__(operator, checkout.side, f"the {checkout.side} checkout")
        self._checkout, self._result = checkout, str(Path(files[operator.source]).parent / checkout.side)
        seen = checkout.devices.get(device.id)
        if seen != device.name:
            raise RuntimeError(f"{self.where} has {seen} as {device.id}; expected {device.name}")
        self.kernels: list[float] = []
        prepared = checkout.ask(
            "prepare", problem=problem, device=device.id, source=operator.source, files=files,
            numbers={**operator.sizes, **operator.scalars},
        )  # fmt: skip
        self.compile_s, self._launches = prepared["setup_s"], prepared["launches"]

    def run(self, timings: Timings | None = None) -> np.ndarray:
        self._checkout.ask("run", file=self._result + ".npy")
        result: np.ndarray = np.load(self._result + ".npy")
        return result

    def timed(self) -> float:
        answer = self._checkout.ask("sample")
        self.kernels.append(answer["kernel_s"])
        return float(answer["wall_s"])

    def facts(self) -> dict[str, Any]:
        return {"launches": self._launches, "kernel_seconds": self.kernels}


def compare(
    operator: Operator, problem: str, device: Device, checkouts: Sequence[Checkout], run: Run
) -> dict[str, Any]:
    """Samples of both checkouts on one operator and device."""
    tensors = random_tensors(operator, 0)
    with tempfile.TemporaryDirectory() as folder:
        files = {name: str(Path(folder) / f"{name}.npy") for name in tensors}
        for name, array in tensors.items():
            np.save(files[name], array)
        makers = {each.side: partial(Side, operator, each, problem, device, files) for each in checkouts}
        title = f"{operator.problem.name}, {device.id}"
        case = common.race(title, operator, tensors, makers, run.probe, run.settings, "mirrored")
    facts = {"device": device.id, "label": common.device_label(device), "batch": operator.output_shape[0]}
    return {**operator_dict(operator), **facts, **case}


def conclude(case: dict[str, Any], threshold: float) -> None:
    """Put statistics and differences into a case."""
    case["differences"] = {}
    results = case["results"]
    for result in results.values():
        common.add_statistics(result, threshold)
    for what in ("wall", "kernel") if set(results) == set(SIDES) else ():
        times = {}
        for side in SIDES:
            samples = [Sample(*sample) for sample in results[side]["samples"]]
            if what == "kernel":
                pairs = zip(samples, results[side]["kernel_seconds"], strict=True)
                samples = [replace(sample, seconds=seconds) for sample, seconds in pairs]
            times[side] = quiet_times(samples, threshold)
        if min(each.min_s for each in times.values()) > 0:  # else the kernels' time is not known
            case["differences"][what] = {
                **asdict(judge((case["problem"], case["device"]), what, times["old"], times["new"])),
                **{f"{side}_quartiles_s": list(each.quartiles_s) for side, each in times.items()},
                "ratio": asdict(ratio(times["new"], times["old"])),
            }


def report_text(report: Mapping[str, Any]) -> str:
    """The differences as a table."""
    rows, notes = [], []
    for case in report["cases"]:
        for what, found in case["differences"].items():
            spread = found["ratio"]
            mark = "~" if spread["noisy"] else ""
            cells = [f"`{case['problem']}`, batch {case['batch']}", case["label"], what]
            for side in SIDES:
                median, low, high = (1e3 * seconds for seconds in (found[f"{side}_s"], *found[f"{side}_quartiles_s"]))
                cells.append(f"{mark}{median:.2f} ({low:.2f}–{high:.2f})")
            cells.append(f"{mark}**{spread['value']:.3f}** ({spread['low']:.3f}–{spread['high']:.3f})")
            rows.append([*cells, f"{found['low']:.3f}–{found['high']:.3f}", found["verdict"]])
        notes += [f"- {case['problem']}, {case['device']}: {reason}" for reason in case["failures"].values()]
    titles = ("problem", "device", "time", "old, ms", "new, ms", "new / old", "99 % interval", "new is")
    lines = common.markdown(titles, rows)
    if notes:
        lines += ["", "Not measured:", "", *notes]
    results = [result for case in report["cases"] for result in case["results"].values()]
    return "\n".join([*lines, "", common.drop_note(report, results)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the results, print the table."""
    parser = common.new_parser(PROGRAM, __doc__, REPEATS)
    add = parser.add_argument
    add("old", type=Path, help="folder of the checkout to start from")
    add("new", type=Path, help="folder of the checkout that is judged")
    add("--problems", nargs="+", metavar="NAME", default=list(common.FIVE),
        help="bundled problems, or problem files (default: five of the bundled ones)")  # fmt: skip
    add("--case", default="kernelbench",
        help="where sizes come from; a problem without it gives its first (default: %(default)s)")  # fmt: skip
    common.add_sizes(parser)
    settings = parser.parse_args(arguments)
    operators = {}
    for name in settings.problems:
        cases_known = dispatcher.load_problem(name).cases
        case = settings.case if settings.case in cases_known else next(iter(cases_known), None)
        given = name if name in dispatcher.problems() else str(Path(name).resolve())
        operators[given] = common.small_operator(name, settings, case)
    run = Run.start(PROGRAM, settings)
    with ExitStack() as stack:
        try:
            checkouts = [stack.enter_context(closing(Checkout(each, getattr(settings, each)))) for each in SIDES]
        except RuntimeError as error:
            say(f"{PROGRAM}: {error}")
            return 2
        cases = common.until_interrupted(
            partial(compare, operator, problem, device, checkouts, run)
            for problem, operator in operators.items()
            for device in run.devices
        )
    for each in cases:
        conclude(each, run.threshold)
    sides = {checkout.side: checkout.facts() for checkout in checkouts}
    report = run.report(checkouts=sides, cases=cases)
    common.keep(report, settings.output)
    print(report_text(report))
    return 1 if any(each["failures"] for each in cases) else 0


if __name__ == "__main__":
    sys.exit(main())
