"""The kernels for GPUs on a simulated device that reports data races and accesses out of bounds.

Oclgrind runs every work-item by itself and watches every access. Each test runs this file as a program in a process of
its own, since the simulator has to be the process's only OpenCL platform. The simulator is installed with
`apt-get install oclgrind`; without it these tests are skipped, or fail where DISPATCHER_TEST_REQUIRE names oclgrind.

The second half plants bugs in the kernels' text, to show that they would be found.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dispatcher.problem.arguments import bind_arguments, sort_arguments
from dispatcher.problem.loader import load_problem
from dispatcher.problem.operator import Operator, bind
from dispatcher.problem.schema import problem_from_mapping

RUNTIMES = ("/usr/lib/oclgrind/liboclgrind-rt-icd.so", "/usr/lib/x86_64-linux-gnu/liboclgrind-rt-icd.so")
ROOT = Path(__file__).parent.parent
KERNEL = "conv_transpose3d_tiled.cl"
SLICES = "over_slices.cl"
REDUCTION = "group_reduction.cl"
LAYER_NORM = "conv-transpose3d-layernorm-gelu-scaling"
POOLED = "conv-transpose3d-sum-layernorm-avgpool-gelu"
PLAIN = "conv-transpose-3d-asym-input-sq-kernel"

#: Sizes that differ from each problem's sample: small, since the simulator is slow, but with every kind of edge.
CASES: dict[str, dict[str, int]] = {
    PLAIN: {
        "batch_size": 2,
        "in_channels": 6,
        "depth": 2,
        "height": 3,
        "width": 7,
        "output_padding_d": 0,
        "output_padding_h": 0,
        "output_padding_w": 0,
    },
    LAYER_NORM: {"batch_size": 1, "out_channels": 20, "depth": 2, "height": 3, "width": 5},
    POOLED: {"batch_size": 1, "out_channels": 20, "depth": 2, "height": 3, "width": 5},
    "conv-transpose3d-avgpool-clamp-softmax-multiply": {"batch_size": 1},
    "conv-transpose3d-max-max-sum": {"batch_size": 1, "depth": 7, "height": 7, "width": 7},
}

#: The same for pipelines of single steps: shapes of the tensors and the steps. All work-items of a group share a row
#: of `rows`; several share a result of `columns`, and several results a group; of `windows` each has its own.
STEPS: dict[str, tuple[dict[str, tuple[int, ...]], list[dict[str, Any]]]] = {
    "rows": ({"x": (1, 3, 3, 5, 9)}, [{"op": "layer_norm", "axis": "spatial"}, {"op": "softmax", "axis": "spatial"}]),
    "columns": (
        {"x": (1, 70, 1, 1, 3), "w": (70,)},
        [
            {"op": "layer_norm", "weight": "w"},
            {"op": "softmax", "axis": "channel"},
            {"op": "log_sum_exp", "axis": "channel"},
        ],
    ),
    "windows": (
        {"x": (1, 5, 4, 5, 11), "t": (5, 1)},
        [
            {"op": "add", "value": "t"},
            {"op": "group_norm", "groups": 5},
            {"op": "max_pool3d", "window": [2, 2, 3]},
            {"op": "avg_pool3d", "window": [1, 2, 1]},
            {"op": "sum", "axis": ["channel", "width"]},
        ],
    ),
}


@dataclass(frozen=True)
class Outcome:
    """What a run under the simulator showed.

    Attributes:
        passed: the result agrees with the reference.
        algorithms: of the launches.
        reports: the simulator's reports, one a line.
    """

    passed: bool
    algorithms: list[str]
    reports: list[str]

    @property
    def races(self) -> int:
        return sum("data race" in line for line in self.reports)

    @property
    def invalid(self) -> int:
        return sum("Invalid" in line for line in self.reports)


def simulate(tmp_path: Path, name: str, patches: Mapping[str, tuple[str, str]] | None = None) -> Outcome:
    """Run one small operator under the simulator.

    Args:
        tmp_path: for the log and the program cache.
        name: in CASES or STEPS.
        patches: for a kernel file, a text in it and what to put there instead.
    """
    runtime = next((path for path in RUNTIMES if os.path.exists(path)), None)
    if runtime is None:
        required = "oclgrind" in os.environ.get("DISPATCHER_TEST_REQUIRE", "").lower().split(",")
        (pytest.fail if required else pytest.skip)("oclgrind is not installed: apt-get install oclgrind")
    log = tmp_path / "oclgrind.log"
    vendors = tmp_path / "vendors"
    vendors.mkdir()
    (vendors / "oclgrind.icd").write_text(runtime)
    environment = {
        **os.environ,
        "OCL_ICD_VENDORS": str(vendors),
        "OCLGRIND_DATA_RACES": "1",
        "OCLGRIND_LOG": str(log),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    request = json.dumps({"name": name, "patches": patches or {}})
    done = subprocess.run(
        [sys.executable, "-m", "tests.test_oclgrind", request],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    return Outcome(answer["passed"], answer["algorithms"], log.read_text().splitlines() if log.exists() else [])


def operator_named(name: str) -> Operator:
    """The operator of that name in CASES or STEPS."""
    if name in CASES:
        problem = load_problem(name)
        return bind_arguments(problem, sort_arguments(problem, CASES[name]), case="sample", dtype="float32")
    shapes, pipeline = STEPS[name]
    tensors = [
        {"name": tensor, "type": "tensor", "const": True, "shape": list(shape)} for tensor, shape in shapes.items()
    ]
    output = {"name": "output", "type": "tensor", "const": False}
    problem = problem_from_mapping({"name": name, "parameters": [*tensors, output], "pipeline": pipeline})
    return bind(problem, {}, {}, dtype="float32")


def main(request: dict[str, Any]) -> None:
    """What the simulating process does."""
    from dispatcher.backends.opencl import BACKEND, executable, render
    from dispatcher.backends.opencl.target import Limits
    from dispatcher.check.comparison import poisoned, verify_result
    from dispatcher.check.inputs import random_tensors

    patches = {file: (old, new) for file, (old, new) in request["patches"].items()}
    original = render.kernel_source
    unused = set(patches)

    def patched(file: str) -> str:
        text = original(file)
        if file in patches:
            unused.discard(file)
            old, new = patches[file]
            assert text.count(old) == 1, f"{file} holds {text.count(old)} times: {old}"
            text = text.replace(old, new)
        return text

    render.kernel_source = patched  # type: ignore[assignment]
    # A work-group of a GPU, with several slices of channels in the epilogue.
    executable.limits_of = lambda runtime: Limits(64, 24 << 10, 64, 1)
    operator = operator_named(request["name"])
    (device,) = BACKEND.probe()
    executable = BACKEND.compile(operator, device, {"algorithm": "tiled"})
    assert not unused, f"these files are not used: {', '.join(unused)}"
    tensors = random_tensors(operator, 0)
    result = executable(tensors, poisoned(operator.output_shape, operator.dtype))
    comparison = verify_result(operator, tensors, result)
    algorithms = [launch.algorithm for launch in executable.launches]
    print(json.dumps({"passed": comparison.passed, "algorithms": algorithms}))


# ---- the kernels as they are -------------------------------------------------------------------------------
@pytest.mark.parametrize("name", CASES)
def test_nothing_is_reported(tmp_path: Path, name: str) -> None:
    outcome = simulate(tmp_path, name)
    assert outcome.reports == []
    assert outcome.passed and "tiled" in outcome.algorithms


@pytest.mark.parametrize("name", STEPS)
def test_nothing_is_reported_of_single_steps(tmp_path: Path, name: str) -> None:
    outcome = simulate(tmp_path, name)
    assert outcome.reports == []
    assert outcome.passed and set(outcome.algorithms) == {"step"}


# ---- planted bugs ------------------------------------------------------------------------------------------
#: Where a barrier stands: the problem that needs it, the file, and the comment behind it.
BARRIERS = {
    "before_staging": (POOLED, KERNEL, "places are there, and nobody reads the results before"),
    "first_step": (PLAIN, KERNEL, "the first step is there"),
    "next_step": (PLAIN, KERNEL, "the next step is there"),
    "results": (PLAIN, KERNEL, "the phase's results are there"),
    "before_fold": (POOLED, KERNEL, "what the steps before the fold wrote is there"),
    "folded": (POOLED, KERNEL, "the folded results are there"),
    "slices_written": (POOLED, SLICES, "all partial values are there"),
    "slices_read": (POOLED, SLICES, "everybody has read them"),
    "row_written": ("rows", SLICES, "all partial values are there"),
    "row_paired": ("rows", SLICES, "pairs are combined"),
    "row_read": ("rows", SLICES, "everybody has read them"),
    "columns_written": ("columns", SLICES, "all partial values are there"),
    "columns_paired": ("columns", SLICES, "pairs are combined"),
    "columns_read": ("columns", SLICES, "everybody has read them"),
}


@pytest.mark.parametrize(("name", "file", "comment"), BARRIERS.values(), ids=BARRIERS)
def test_a_missing_barrier_is_reported(tmp_path: Path, name: str, file: str, comment: str) -> None:
    barrier = f"barrier(CLK_LOCAL_MEM_FENCE);  // {comment}"
    assert simulate(tmp_path, name, {file: (barrier, "// ")}).races > 0


#: An access out of bounds: the problem, the kernel's file, a text in it, what stands there instead.
OUTSIDE = {
    "read_in_front": (LAYER_NORM, KERNEL, "(uint)d >= ID", "d >= ID"),
    "read_behind": (PLAIN, KERNEL, "(uint)d >= ID", "d < 0"),
    "write_behind": (PLAIN, KERNEL, "d >= OUT_D ||", ""),
    "positions_behind": (PLAIN, KERNEL, "if (m >= POSITIONS) return (int4)(0, 0, 0, -1);", ""),
    "taps_behind": (PLAIN, KERNEL, "taps[slot < taps_left ? slot : 0]", "taps[slot + GROUP_IC * TAP_ROWS]"),
    "read_behind_the_row": ("rows", REDUCTION, "min(first + STRETCH, terms)", "first + STRETCH"),
    "lanes_behind": ("columns", REDUCTION, "result < count ? COUNT : 0", "COUNT"),
    "store_behind": ("windows", REDUCTION, "slice == 0 && result < count", "slice == 0"),
    "shares_behind": ("windows", "step_pointwise.cl", "if (item >= count) return;", ""),
}


@pytest.mark.parametrize(("name", "file", "old", "new"), OUTSIDE.values(), ids=OUTSIDE)
def test_an_access_out_of_bounds_is_reported(tmp_path: Path, name: str, file: str, old: str, new: str) -> None:
    assert simulate(tmp_path, name, {file: (old, new)}).invalid > 0


#: Reads and writes of the wrong element of the right buffer.
WRONG = {
    "halo_along_width": (PLAIN, KERNEL, "(uint)w >= IW", "w < 0"),
    "halo_along_height": (PLAIN, KERNEL, "(uint)h >= IH", "h < 0"),
    "halo_shifted": (PLAIN, KERNEL, "w = place.z + tap.z", "w = place.z + tap.z + 1"),
    "stray_columns": (PLAIN, KERNEL, "|| w >= OUT_W", ""),
    "channels_of_the_next_group": (PLAIN, KERNEL, "c >= GROUP_IC ||", ""),
    "taps_of_the_next_phase": (PLAIN, KERNEL, "slot >= taps_left ||", ""),
    "first_of_each_slice": ("rows", REDUCTION, "i = slice; i < terms", "i = slice + SLICES; i < terms"),
    "half_of_the_pairs": ("rows", SLICES, "if (slice < left) partial", "if (slice < left / 2) partial"),
    "another_lane": ("columns", SLICES, "REAL total = partial[lane];", "REAL total = partial[0];"),
    "channel_of_another_slice": ("columns", REDUCTION, "AFFINE(value, CHANNEL(result, i))", "AFFINE(value, slice)"),
}


@pytest.mark.parametrize(("name", "file", "old", "new"), WRONG.values(), ids=WRONG)
def test_a_wrong_element_is_noticed(tmp_path: Path, name: str, file: str, old: str, new: str) -> None:
    outcome = simulate(tmp_path, name, {file: (old, new)})
    assert not outcome.passed or outcome.reports


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
