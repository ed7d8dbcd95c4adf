"""``verify``: which checks take place, what comes of them, and how they are reported."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from conftest import Install
from fakes import CONV, MAXMAX, SOFTMAX, FakeBackend, correct

import dispatcher
from dispatcher import cli
from dispatcher.check import verifying
from dispatcher.check.inputs import INPUT_SETS
from dispatcher.check.judging import Judgement
from dispatcher.errors import InputError, KernelError
from dispatcher.problem.userkernel import UserKernel


def one_percent_off(operator: Any, tensors: Any) -> np.ndarray:
    return correct(operator, tensors) * np.float32(1.01)


def nan_dropped(operator: Any, tensors: Any) -> np.ndarray:
    result = correct(operator, tensors)
    return np.where(np.isnan(result), np.float32(0), result)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["verify", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


# ---- which checks ------------------------------------------------------------------------------------------
def test_small_operators_are_checked_with_every_meaningful_set() -> None:
    (result,) = dispatcher.verify(CONV, device="numpy")
    names = [check.inputs for check in result.checks]
    assert names == ["signed", "graded", "large_mean", "integers", "spikes", "gaps", "denormal", "one_nan", "one_inf"]
    (named,) = dispatcher.verify(CONV, device="numpy", inputs="all")
    assert [check.inputs for check in named.checks] == names
    assert [check.seed for check in result.checks] == [0] * len(names)


def test_large_operators_are_checked_with_one_set_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "SMALL_FLOPS", 10)
    (result,) = dispatcher.verify(CONV, device="numpy")
    assert [check.inputs for check in result.checks] == ["signed"]
    (result,) = dispatcher.verify(CONV, device="numpy", inputs="all")
    assert len(result.checks) == 9


def test_the_bundled_cases_are_on_the_right_side_of_the_limit() -> None:
    for name in dispatcher.problems():
        for case, small in (("sample", True), ("odd", True), ("kernelbench", False)):
            if case not in dispatcher.load_problem(name).cases:
                continue
            flops = dispatcher.explain(name, device="numpy", case=case).operator.flops
            assert (flops <= verifying.SMALL_FLOPS) == small


def test_sets_and_seeds_that_are_named() -> None:
    for inputs in ("one_nan, signed,one_nan", ["one_nan", "signed"]):
        (result,) = dispatcher.verify(SOFTMAX, device="numpy", inputs=inputs, seed=7, seeds=3)
        places = [(check.inputs, check.seed) for check in result.checks]
        assert places == [(name, seed) for name in ("one_nan", "signed") for seed in (7, 8, 9)]
    (result,) = dispatcher.verify(SOFTMAX, device="numpy", inputs="integers")  # not exact here, but as wanted
    assert [check.inputs for check in result.checks] == ["integers"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"inputs": "normal"}, "inputs is 'normal'; expected all, or some of signed, graded"),
        ({"inputs": ""}, "inputs is ''"),
        ({"inputs": []}, "inputs is empty"),
        ({"inputs": "signed,all"}, "inputs is 'all'"),
        ({"inputs": ["signed", 3]}, "inputs is 3"),
        ({"inputs": "uniform"}, "hide many faults and are for timing only"),
        ({"seeds": 0}, "seeds is 0; expected an integer of 1 or more"),
        ({"seeds": 1.5}, "seeds is 1.5"),
        ({"seeds": True}, "seeds is True"),
        ({"seed": 2**64 - 1, "seeds": 2}, "seed is 18446744073709551616"),
    ],
)
def test_wrong_sets_and_seeds(install_backends: Install, arguments: dict[str, Any], message: str) -> None:
    fake = FakeBackend()
    install_backends(fake)
    with pytest.raises(InputError, match=message):
        dispatcher.verify(CONV, **arguments)
    assert fake.probes == 0


@pytest.mark.parametrize(
    "options", [["--inputs", "nope"], ["--inputs", "uniform"], ["--seeds", "0"], ["--seeds", "x"], ["--inputs", ""]]
)
def test_wrong_options(install_backends: Install, capsys: pytest.CaptureFixture[str], options: list[str]) -> None:
    fake = FakeBackend()
    install_backends(fake)
    code, out, err = run(capsys, CONV, *options)
    assert (code, out) == (2, "") and err.count("\n") == 1 and fake.probes == 0
    assert "seeds" in err or "inputs" in err


def test_an_empty_batch_is_refused_since_nothing_would_be_compared(
    install_backends: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeBackend()
    install_backends(fake)
    with pytest.raises(InputError, match="the batch is empty, so there is nothing to verify"):
        dispatcher.verify(CONV, batch_size=0)
    code, out, err = run(capsys, CONV, "--set", "batch_size=0")
    assert (code, out, err.count("\n")) == (2, "", 1) and "nothing to verify" in err
    assert fake.probes == 0


def test_the_help_names_every_set(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["verify", "--help"])
    words = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert ", ".join(name for name in INPUT_SETS if name != "uniform") in words


# ---- what comes of them ------------------------------------------------------------------------------------
def test_the_operator_is_compiled_once_and_run_three_times_a_check(install_backends: Install) -> None:
    fake = FakeBackend()
    install_backends(fake)
    (result,) = dispatcher.verify(CONV, device="fake", inputs="signed,one_nan", seeds=2)
    assert fake.compiles == 1 and len(result.checks) == 4 and fake.calls == 12


def other_problem(batch: str | int, *pipeline: dict[str, Any]) -> dict[str, Any]:
    """A problem with as many tensors as its pipeline names, all of one shape."""
    names = ["x", *(step["value"] for step in pipeline if "value" in step)]
    shape = [batch, 2, 2, 2, 2]
    tensors = [{"name": name, "type": "tensor", "const": True, "shape": shape} for name in names]
    sizes = [{"name": batch, "type": "size_t"}] if isinstance(batch, str) else []
    output = {"name": "y", "type": "tensor", "const": False}
    return {"name": "other", "parameters": [*tensors, output, *sizes], "pipeline": list(pipeline)}


def test_the_third_run_has_the_batch_reversed(install_backends: Install) -> None:
    fake = FakeBackend()
    install_backends(fake)
    problem = other_problem("n", {"op": "add", "value": "z"})
    (result,) = dispatcher.verify(problem, device="fake", case=None, n=3, inputs="signed")
    assert result.outcome == "passed"
    first, second, third = fake.seen
    for name in ("x", "z"):
        np.testing.assert_array_equal(second[name], first[name])
        np.testing.assert_array_equal(third[name], first[name][::-1])


@pytest.mark.parametrize(
    ("batch", "step"), [("n", {"op": "sum", "axis": "batch"}), (3, {"op": "scale", "by": 2.0})], ids=["sum", "fixed"]
)
def test_a_batch_that_cannot_be_reversed_is_negated(
    install_backends: Install, batch: str | int, step: dict[str, Any]
) -> None:
    fake = FakeBackend()
    install_backends(fake)
    sizes = {"n": 3} if batch == "n" else {}
    (result,) = dispatcher.verify(other_problem(batch, step), device="fake", case=None, inputs="signed", **sizes)
    assert result.outcome == "passed"
    np.testing.assert_array_equal(fake.seen[2]["x"], -fake.seen[0]["x"])


def test_the_worst_check_gives_the_figures_and_the_reason(install_backends: Install) -> None:
    install_backends(FakeBackend("bad", nan_dropped))
    (result,) = dispatcher.verify(CONV, device="bad", seeds=2)
    assert result.outcome == "failed" and result.inputs == "one_nan"
    assert [check.outcome for check in result.checks].count("failed") == 2
    assert f"(inputs one_nan, seed {result.seed}; 2 of 18 checks failed: one_nan)" in result.reason
    assert result.comparison is not None and result.comparison.worst_value == 0.0
    assert np.isnan(result.comparison.worst_reference)


def test_an_error_ends_the_checks_of_that_device_alone(install_backends: Install) -> None:
    def broken(operator: Any, tensors: Any) -> Any:
        raise KernelError("launch failed")

    backend = FakeBackend("broken", broken)
    install_backends(backend)
    results = {result.device.backend: result for result in dispatcher.verify(CONV)}
    assert results["broken"].outcome == "error" and len(results["broken"].checks) == 1
    assert results["numpy"].outcome == "passed" and len(results["numpy"].checks) == 9
    assert backend.calls == 1


def test_a_device_that_spoils_the_inputs_spoils_them_for_itself_alone(install_backends: Install) -> None:
    def spoils(operator: Any, tensors: Any) -> np.ndarray:
        result = correct(operator, tensors)
        owner = tensors["input"].base
        owner.flags.writeable = True
        owner[...] = 0
        return result

    install_backends(FakeBackend("a"), FakeBackend("b", spoils), FakeBackend("c"))
    results = {result.device.backend: result for result in dispatcher.verify(CONV)}
    assert {name: result.outcome for name, result in results.items()} == {
        "a": "passed", "b": "failed", "c": "passed", "numpy": "passed",
    }  # fmt: skip
    assert "changed the input tensor input" in results["b"].reason
    assert all(check.outcome == "failed" for check in results["b"].checks)


# ---- how it is reported ------------------------------------------------------------------------------------
def test_the_table_has_the_worst_first(install_backends: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install_backends(
        FakeBackend("good"), FakeBackend("refusing", unsupported="needs fp64"), FakeBackend("bad", one_percent_off)
    )
    code, out, err = run(capsys, CONV, MAXMAX)
    lines = [line.split() for line in out.split("\n\n")[0].splitlines()[1:]]
    assert [line[3] for line in lines] == ["failed"] * 2 + ["unsupported"] * 2 + ["passed"] * 4
    ratios = [float(line[5]) for line in lines if line[3] == "failed"]
    assert ratios == sorted(ratios, reverse=True) and ratios[-1] > 1
    assert code == 1
    assert err.count("on bad:0: ") == 2 and err.count("on refusing:0: ") == 2
    assert "LARGER OF BOTH RATIOS" in out


def test_json_names_the_worst_element_and_every_check(
    install_backends: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install_backends(FakeBackend("bad", one_percent_off))
    code, out, _ = run(capsys, CONV, "--inputs", "signed,one_inf", "--seeds", "2", "--json")
    report = json.loads(out)
    assert code == 1 and report["schema"] == 1 and report["passed"] is False
    assert report["only_reference"] is False
    assert [entry["device"]["id"] for entry in report["results"]] == ["bad:0", "numpy"]
    worst = report["results"][0]
    figures = worst["comparison"]
    assert len(figures["worst_index"]) == 5 and figures["max_error_over_bound"] > 1
    assert figures["worst_value"] == pytest.approx(1.01 * figures["worst_reference"], rel=1e-6)
    assert figures["normwise_over_bound"] > 1 and figures["normwise_error"] == pytest.approx(0.01, rel=1e-3)
    assert [(check["inputs"], check["seed"]) for check in worst["checks"]] == [
        ("signed", 0), ("signed", 1), ("one_inf", 0), ("one_inf", 1),
    ]  # fmt: skip
    assert {"inputs", "seed", "case", "checks", "reason"} <= set(worst)


@pytest.mark.parametrize("backend", [FakeBackend("gone", unavailable="no driver"), FakeBackend("no", unsupported="no")])
def test_all_devices_without_any_but_numpy_is_no_check(
    install_backends: Install, capsys: pytest.CaptureFixture[str], backend: FakeBackend
) -> None:
    install_backends(backend)
    code, out, err = run(capsys, CONV, "--json")
    assert code == 3
    assert json.loads(out)["only_reference"] is True and json.loads(out)["passed"] is False
    assert "nothing was compared with the reference" in err and "dispatcher doctor" in err
    code, out, err = run(capsys, CONV, "--device", "numpy")
    assert (code, err) == (0, "") and "passed" in out


def test_passed_and_a_short_repr(install_backends: Install) -> None:
    install_backends(FakeBackend("wrong", one_percent_off))
    results = {result.device.id: result for result in dispatcher.verify(CONV, inputs="signed,integers")}
    assert results["numpy"].passed and not results["wrong:0"].passed
    assert repr(results["wrong:0"]) == f"<Verification {CONV} on wrong:0: failed, 2 checks>"
    operator, device = results["wrong:0"].operator, results["wrong:0"].device
    kernel = UserKernel("mine.cl", "a long text", ".", "solution", (), "float32", (64,), None, ())
    judgement = Judgement(operator, kernel, None, 0, device, (), "wrong", log="a long log")
    assert repr(judgement) == f"<Judgement of solution in mine.cl for {CONV} on wrong:0: wrong>"


def test_one_set_needs_no_table_of_sets(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, CONV, "--device", "numpy", "--inputs", "signed")
    assert code == 0 and "LARGER OF BOTH" not in out
    outcomes, places, last = (part.splitlines() for part in out.split("\n\n"))
    assert len(outcomes) == 2 and last == ["1 of 1 checks passed"]
    row = outcomes[1].split()
    assert row[3] == "passed" and row[4] == "1"
    assert places[0] == "THE WORST CHECK" and places[2] == CONV
    assert places[1].split()[-4:] == ["WORST", "AT", "RESULT", "REFERENCE"]
    assert places[3].split()[:3] == ["numpy", "signed", "0"]
    assert max(map(len, out.splitlines())) <= 120
