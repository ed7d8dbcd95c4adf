"""The program that checks a machine with a GPU: what it makes of its steps' outcomes. Its steps run in a rehearsal."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dispatcher.timing import peers


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "bench"))
    yield importlib.import_module("gpu_check")
    sys.modules.pop("gpu_check")


def times(**kernel_ms: float) -> dict[str, Any]:
    labels = {"max": "torch.compile max-autotune, cudnn.benchmark", "compile": "torch.compile"}
    named = {" ".join(labels.get(word, word) for word in name.split("_")): ms for name, ms in kernel_ms.items()}
    return {"times": {label: {"kernel_ms": ms} for label, ms in named.items()}}


def test_the_worst_ratio_comes_first_against_the_best_of_the_peers(program: ModuleType) -> None:
    outcomes = {
        "fast": times(ours_fp32=1.0, ours_tf32=0.5, torch_fp32=8.0, compile_fp32=4.5, max_fp32=4.0, compile_tf32=3.0),
        "slow": times(ours_fp32=2.0, torch_fp32=3.0),
        "alone": times(ours_fp32=1.0),
        "device": {"seconds": 1},
    }
    lines = program.summary(outcomes)
    assert [line.split()[1:3] for line in lines] == [["slow", "fp32:"], ["fast", "fp32:"], ["fast", "tf32:"]]
    assert [float(line.split("x")[0]) for line in lines] == [1.5, 4.0, 6.0]
    assert "torch.compile max-autotune, cudnn.benchmark fp32 4.000 ms; 8.00x against eager without settings" in lines[1]


def test_pytorch_is_asked_in_every_way(program: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = types.SimpleNamespace
    asked: list[tuple[str, str, bool, bool]] = []

    def tensor(memory_format: str) -> Any:
        return flags(ndim=5, at=memory_format, to=tensor, contiguous=lambda: None)

    def pipeline(operator: Any, constant: Any) -> Any:
        def run(x: Any) -> Any:
            assert x.at == constant(operator.convolutions[0].weight).at
            asked.append(("eager", x.at, cudnn.benchmark, cudnn.allow_tf32))
            return x

        return run

    def compiled(function: Any, mode: str, **_: bool) -> Any:
        def run(x: Any) -> Any:
            result = function(x)
            asked[-1] = (mode, *asked[-1][1:])
            return result

        return run

    event = flags(record=lambda: None, elapsed_time=lambda end: 1.0)
    cudnn = flags(allow_tf32=None, benchmark=None)
    torch = flags(
        contiguous_format="first", channels_last_3d="last", compile=compiled, no_grad=contextlib.nullcontext,
        _dynamo=flags(config=flags(recompile_limit=8)), backends=flags(cudnn=cudnn, cuda=flags(matmul=flags())),
        cuda=flags(Event=lambda **_: event, synchronize=lambda: None),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(peers, "torch_pipeline", pipeline)
    op = program.bind_case("conv-transpose3d-max-max-sum", case="sample")
    there = dict.fromkeys(op.tensor_shapes, tensor("first"))
    result: dict[str, Any] = {}
    calls = program._torch_calls(torch, op, there, result)
    assert len(calls) == 2 * len(peers.TORCH_WAYS) and not result
    ways = [("eager", False), ("eager", True), ("default", False), ("max-autotune", True)]
    assert sorted(asked) == sorted(
        (mode, last, search, tf32) for mode, search in ways for last in ("first", "last") for tf32 in (False, True)
    )
    monkeypatch.setattr(program, "PREPARE_S", -1)
    assert program._torch_calls(torch, op, there, result) == {} and set(result) == set(calls)


@pytest.mark.parametrize(
    ("outcome", "good"),
    [
        ({"seconds": 1}, True),
        ({"skipped": "no library"}, True),
        ({"passed": True}, True),
        ({"passed": False}, False),
        ({"error": "not done after 60 s"}, False),
    ],
)
def test_an_error_and_a_failure_fail_the_check(
    outcome: dict[str, Any], good: bool, program: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    steps = {"one": (60, lambda case: {}), "two": (60, lambda case: {})}
    monkeypatch.setattr(program, "steps", lambda: steps)
    monkeypatch.setattr(program, "run_child", lambda name, *_: outcome if name == "two" else {"passed": True})
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--output", str(tmp_path / "check.json")])
    assert program.main() == (0 if good else 1)
    report = json.loads((tmp_path / "check.json").read_text())
    assert report["passed"] == good and report["steps"]["two"] == outcome
