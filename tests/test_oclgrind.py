"""The tiled kernel on a simulated device that reports data races and accesses out of bounds.

Oclgrind runs every work-item by itself and watches every access. Each test runs this file as a program in a process of
its own, since the simulator has to be the process's only OpenCL platform. The simulator is installed with
`apt-get install oclgrind`; without it these tests are skipped, or fail where DISPATCHER_TEST_REQUIRE names oclgrind.

The second half plants bugs in the kernel's text, to show that they would be found.
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

RUNTIMES = ("/usr/lib/oclgrind/liboclgrind-rt-icd.so", "/usr/lib/x86_64-linux-gnu/liboclgrind-rt-icd.so")
ROOT = Path(__file__).parent.parent
KERNEL = "conv_transpose3d_tiled.cl"
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
    """Run one small problem under the simulator.

    Args:
        tmp_path: for the log and the program cache.
        name: of the problem.
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
    return Outcome(
        answer["passed"], answer["algorithms"], log.read_text().splitlines() if log.exists() else []
    )


def main(request: dict[str, Any]) -> None:
    """What the simulating process does."""
    from backends.opencl import BACKEND, render, tiled
    from dispatcher.arguments import bind_arguments, sort_arguments
    from dispatcher.inputs import random_tensors
    from dispatcher.loader import load_problem
    from dispatcher.verification import poisoned, verify_result

    patches = {file: (old, new) for file, (old, new) in request["patches"].items()}
    original = render.kernel_source

    def patched(file: str) -> str:
        text = original(file)
        if file in patches:
            old, new = patches.pop(file)
            assert text.count(old) == 1, f"{file} holds {text.count(old)} times: {old}"
            text = text.replace(old, new)
        return text

    render.kernel_source = patched  # type: ignore[assignment]
    # A work-group of a GPU, with several slices of channels in the epilogue.
    tiled.limits_of = lambda runtime: tiled.Limits(64, 24 << 10, 64, 1)
    problem = load_problem(request["name"])
    sizes = CASES[request["name"]]
    operator = bind_arguments(problem, sort_arguments(problem, sizes), case="sample", dtype="float32")
    (device,) = BACKEND.probe()
    executable = BACKEND.compile(operator, device, {"algorithm": "tiled"})
    assert not patches, f"these files are not used: {', '.join(patches)}"
    tensors = random_tensors(operator, 0)
    result = executable(tensors, poisoned(operator.output_shape, operator.dtype))
    comparison = verify_result(operator, tensors, result)
    algorithms = [launch.algorithm for launch in executable.launches]
    print(json.dumps({"passed": comparison.passed, "algorithms": algorithms}))


# ---- the kernel as it is -----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", CASES)
def test_nothing_is_reported(tmp_path: Path, name: str) -> None:
    outcome = simulate(tmp_path, name)
    assert outcome.reports == []
    assert outcome.passed and "tiled" in outcome.algorithms


# ---- planted bugs ------------------------------------------------------------------------------------------
#: Where a barrier stands: the problem that needs it, the file, and the comment behind it.
BARRIERS = {
    "before_staging": (POOLED, KERNEL, "places are there, and nobody reads the results before"),
    "first_step": (PLAIN, KERNEL, "the first step is there"),
    "next_step": (PLAIN, KERNEL, "the next step is there"),
    "results": (PLAIN, KERNEL, "the phase's results are there"),
    "before_fold": (POOLED, KERNEL, "what the steps before the fold wrote is there"),
    "folded": (POOLED, KERNEL, "the folded results are there"),
    "slices_written": (POOLED, "tile_slices.cl", "all partial sums are there"),
    "slices_read": (POOLED, "tile_slices.cl", "everybody has read the sums"),
}


@pytest.mark.parametrize(("name", "file", "comment"), BARRIERS.values(), ids=BARRIERS)
def test_a_missing_barrier_is_reported(tmp_path: Path, name: str, file: str, comment: str) -> None:
    barrier = f"barrier(CLK_LOCAL_MEM_FENCE);  // {comment}"
    assert simulate(tmp_path, name, {file: (barrier, "// ")}).races > 0


#: An access out of bounds: the problem, a text in the kernel, what stands there instead.
OUTSIDE = {
    "read_in_front": (LAYER_NORM, "(uint)d >= ID", "d >= ID"),
    "read_behind": (PLAIN, "(uint)d >= ID", "d < 0"),
    "write_behind": (PLAIN, "d >= OUT_D ||", ""),
    "positions_behind": (PLAIN, "if (m >= POSITIONS) return (int4)(0, 0, 0, -1);", ""),
    "taps_behind": (PLAIN, "taps[slot < taps_left ? slot : 0]", "taps[slot + GROUP_IC * TAP_ROWS]"),
}


@pytest.mark.parametrize(("name", "old", "new"), OUTSIDE.values(), ids=OUTSIDE)
def test_an_access_out_of_bounds_is_reported(tmp_path: Path, name: str, old: str, new: str) -> None:
    assert simulate(tmp_path, name, {KERNEL: (old, new)}).invalid > 0


#: Reads and writes of the wrong element of the right buffer.
WRONG = {
    "halo_along_width": (PLAIN, "(uint)w >= IW", "w < 0"),
    "halo_along_height": (PLAIN, "(uint)h >= IH", "h < 0"),
    "halo_shifted": (PLAIN, "w = place.z + tap.z", "w = place.z + tap.z + 1"),
    "stray_columns": (PLAIN, "|| w >= OUT_W", ""),
    "channels_of_the_next_group": (PLAIN, "c >= GROUP_IC ||", ""),
    "taps_of_the_next_phase": (PLAIN, "slot >= taps_left ||", ""),
}


@pytest.mark.parametrize(("name", "old", "new"), WRONG.values(), ids=WRONG)
def test_a_wrong_element_is_noticed(tmp_path: Path, name: str, old: str, new: str) -> None:
    outcome = simulate(tmp_path, name, {KERNEL: (old, new)})
    assert not outcome.passed or outcome.reports


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
