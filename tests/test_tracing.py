"""Traces in Chrome's format, and logs that are quiet unless asked for."""

from __future__ import annotations

import itertools
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Install
from fakes import CONV, LAYERNORM, FakeBackend, conv_tensors

import dispatcher
from dispatcher import cli
from dispatcher.errors import InputError, KernelError
from dispatcher.interface import Device


def events_of(path: Path) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """The spans of a trace, and the names of its lines."""
    trace = json.loads(path.read_text())
    events = trace["traceEvents"]
    lines = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    spans = [event for event in events if event["ph"] == "X"]
    assert len(lines) + len(spans) == len(events)
    for span in spans:
        assert span["ts"] >= 0
        assert span["dur"] >= 0
        assert span["tid"] in lines
    return spans, lines


def test_a_trace_shows_compile_upload_kernels_and_download(backend_device: Device, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    x = np.ones((2, 2, 3, 3, 3), np.float32)
    result = dispatcher.run(LAYERNORM, device=backend_device.id, input=x, kernel=x, trace=path)
    assert result.shape == (2, 2, 5, 5, 5)
    spans, lines = events_of(path)
    names = [span["name"] for span in spans]
    kernels = [launch.name for launch in dispatcher.explain(
        LAYERNORM, device=backend_device.id, input=x, kernel=x).launches]  # fmt: skip
    assert [name for name in names if name in kernels] == kernels
    assert {"compile", "upload", "download", "call"} <= set(names)
    order = [names.index(name) for name in ("upload", kernels[0], "download")]
    assert order == sorted(order)
    of_device = [span for span in spans if lines[span["tid"]] == backend_device.id]
    assert {span["name"] for span in of_device} >= {"upload", *kernels, "download"}
    for before, after in itertools.pairwise(of_device):
        assert after["ts"] >= before["ts"] + before["dur"] - 0.01


def test_a_trace_has_a_line_for_each_of_several_devices(install_backends: Install, tmp_path: Path) -> None:
    install_backends(FakeBackend("cuda", devices=["one", "two"]))
    path = tmp_path / "trace.json"
    dispatcher.run(CONV, device="all-of:cuda", trace=path, **conv_tensors())
    _, lines = events_of(path)
    assert sorted(lines.values()) == ["cuda:0", "cuda:1", "dispatcher"]


def test_a_trace_of_a_failure_is_written_too(install_backends: Install, tmp_path: Path) -> None:
    install_backends(FakeBackend("cuda", build_error=KernelError("no")))
    path = tmp_path / "trace.json"
    with pytest.raises(KernelError):
        dispatcher.run(CONV, device="cuda", trace=path, **conv_tensors())
    spans, _ = events_of(path)
    assert [span["name"] for span in spans] == ["compile"]


def test_a_trace_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match=r"the trace .* cannot be written: No such file"):
        dispatcher.run(CONV, device="numpy", trace=tmp_path / "no" / "trace.json", **conv_tensors())
    assert cli.main(["run", CONV, "--device", "numpy", "--trace", str(tmp_path / "no" / "trace.json")]) == 2
    assert "--trace" in capsys.readouterr().err
    both = str(tmp_path / "both.npy")
    assert cli.main(["run", CONV, "--device", "numpy", "--output", both, "--trace", both]) == 2
    assert "give each a file of its own" in capsys.readouterr().err and not list(tmp_path.glob("both*"))


def test_nothing_is_recorded_outside(install_backends: Install, tmp_path: Path) -> None:
    install_backends(FakeBackend("cuda"))
    compiled = dispatcher.compile(CONV, device="cuda")
    compiled(**conv_tensors())
    path = tmp_path / "trace.json"
    dispatcher.run(CONV, device="cuda", trace=path, **conv_tensors())
    compiled(**conv_tensors())
    spans, _ = events_of(path)
    assert [span["name"] for span in spans].count("call") == 1


def test_the_command_line_writes_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    assert cli.main(["run", CONV, "--device", "numpy", "--trace", str(path), "--repeat", "2"]) == 0
    spans, lines = events_of(path)
    assert [span["name"] for span in spans].count("call") == 3
    assert set(lines.values()) == {"dispatcher", "numpy"}
    assert capsys.readouterr().err == ""


# ---- logs --------------------------------------------------------------------------------------------------
def test_logs_are_quiet_unless_asked_for(install_backends: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install_backends(FakeBackend("cuda"))
    assert cli.main(["run", CONV]) == 0
    assert capsys.readouterr().err == ""
    for option in ("-v", "--verbose", "--debug"):
        assert cli.main(["run", CONV, option]) == 0
        captured = capsys.readouterr()
        assert "dispatcher.device.selection: " in captured.err
        assert f"{CONV} runs on cuda:0 (Fake One)" in captured.err
        assert "dispatcher.device.selection" not in captured.out
    assert cli.main(["run", CONV]) == 0
    assert capsys.readouterr().err == ""


def test_the_library_logs_to_the_logging_module(
    install_backends: Install, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    install_backends(FakeBackend("cuda"))
    dispatcher.compile(CONV, device="cuda", case="sample")
    assert capsys.readouterr().err == ""
    with caplog.at_level(logging.INFO, "dispatcher"):
        dispatcher.compile(CONV, device="cuda", case="sample")
    assert f"{CONV} runs on cuda:0 (Fake One)" in caplog.messages
