"""``dispatcher verify`` rejects every mutant, on every seed, and lets every true backend pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import REQUIRED, Install

import dispatcher
from dispatcher import cli
from dispatcher.check.inputs import INPUT_SETS
from tests.fakes import FakeBackend
from tests.family import FIVE
from tests.honest import compute
from tests.mutants import MUTANTS, Target, table
from tests.strategies import EXAMPLES

#: As many as the guide says with DISPATCHER_TEST_EXAMPLES=4.
SEEDS = max(2, round(5 * EXAMPLES))
GUIDE = Path(__file__).resolve().parent.parent / "docs" / "verification.md"
#: Every set but the one that verify refuses.
SETS = [name for name in INPUT_SETS if name != "uniform"]


def verified(capsys: pytest.CaptureFixture[str], target: Target, *arguments: str) -> tuple[int, Any, str]:
    """Run ``dispatcher verify``: exit code, the one result, and what is on stderr."""
    command = ["verify", target.problem, "--case", target.case, "--device", "mutant", "--json"]
    code = cli.main([*command, "--inputs", ",".join(target.inputs), *target.arguments, *arguments])
    captured = capsys.readouterr()
    (result,) = json.loads(captured.out)["results"]
    return code, result, captured.err


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_rejected_on_every_seed(
    install_backends: Install, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    for target in MUTANTS[name].targets:
        install_backends(MUTANTS[name].backend())
        code, result, errors = verified(capsys, target, "--seeds", str(SEEDS))
        let_through = [check for check in result["checks"] if check["outcome"] != "failed"]
        assert let_through == [], (name, target)
        assert len(result["checks"]) == SEEDS * len(target.inputs)
        assert (code, result["outcome"]) == (1, "failed")
        assert errors.startswith(f"error: {target.problem} on mutant:0: ") and errors.count("\n") == 1


#: Faults that only the runs after the first one show.
STATEFUL = ("previous_result", "first_result", "wears_out", "stale_tail", "one_buffer")


@pytest.mark.parametrize("name", STATEFUL)
def test_a_single_check_finds_what_earlier_calls_leave_behind(
    install_backends: Install, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    for target in MUTANTS[name].targets:
        install_backends(MUTANTS[name].backend())
        code, result, _ = verified(capsys, target, "--seed", "5")
        assert code == 1 and len(result["checks"]) == 1
        assert "call" in result["reason"]


def test_the_normwise_criterion_finds_what_no_single_element_shows(
    install_backends: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    (target,) = MUTANTS["times_1.000004"].targets
    install_backends(MUTANTS["times_1.000004"].backend())
    _, result, errors = verified(capsys, target)
    assert result["comparison"]["max_error_over_bound"] < 1 < result["comparison"]["normwise_over_bound"]
    assert "every element is within its bound, but all together" in errors


def test_there_are_mutants_of_every_kind_and_sets_that_only_they_need() -> None:
    assert len(MUTANTS) >= 60
    used = {name for mutant in MUTANTS.values() for target in mutant.targets for name in target.inputs}
    assert used == set(SETS)


@pytest.mark.parametrize("problem", FIVE)
def test_without_a_fault_it_passes(install_backends: Install, problem: str) -> None:
    """Else the mutants would be rejected for the wrong reason."""
    cases = sorted({t.case for m in MUTANTS.values() for t in m.targets if t.problem == problem})
    install_backends(FakeBackend("honest", compute))
    for case in cases:
        (result,) = dispatcher.verify(problem, device="honest", case=case, inputs=SETS, seeds=5)
        assert result.outcome == "passed", result.reason
    (result,) = dispatcher.verify(problem, device="honest", dtype="float64", seeds=5)
    assert result.outcome == "passed", result.reason


@pytest.mark.parametrize("problem", FIVE)
def test_true_backends_pass_on_every_seed_and_set(problem: str) -> None:
    results = dispatcher.verify(problem, inputs=SETS, seeds=SEEDS)
    for result in results:
        assert result.outcome == "passed", (result.device.id, result.reason)
        assert len(result.checks) == SEEDS * len(SETS)
    ran = {result.device.backend for result in results}
    assert "numpy" in ran
    assert ran >= REQUIRED & {"opencl"}


@pytest.mark.parametrize(
    ("problem", "case"),
    [
        ("conv-transpose-3d-asym-input-sq-kernel", "depthwise"),
        ("conv-transpose-3d-asym-input-sq-kernel", "wide"),
        ("conv-transpose3d-layernorm-gelu-scaling", "unit_stride"),
    ],
)
def test_winograd_passes_where_it_is_asked_for(problem: str, case: str) -> None:
    """Its errors are larger than those of a direct sum, above all where a sum has few terms."""
    cpus = [d.id for d in dispatcher.devices() if (d.backend, d.kind, d.available) == ("opencl", "cpu", True)]
    if not cpus:
        pytest.skip("there is no usable OpenCL CPU device, and others have no Winograd kernels")
    (result,) = dispatcher.verify(
        problem, device=cpus[0], case=case, seeds=5, inputs="all", options={"algorithm": "winograd"}
    )
    assert result.outcome == "passed", result.reason
    assert result.comparison is not None and result.comparison.severity < 0.8


def test_the_guide_has_the_table_of_mutants() -> None:
    """``python -m tests.mutants`` prints it."""
    assert table() in GUIDE.read_text(encoding="utf-8")


def test_the_guide_has_the_table_of_sets() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    for name, inputs in INPUT_SETS.items():
        assert f"| `{name}` | {inputs.looks} | {inputs.reason} | {inputs.where} |" in text
