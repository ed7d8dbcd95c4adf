"""Tuning on CUDA: tiles by name, what is measured, what is kept and for whom."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dispatcher
from dispatcher import cli
from dispatcher.backends.cuda import BACKEND, tuning
from dispatcher.backends.cuda.groups import halo_tasks
from dispatcher.backends.cuda.lowering import lower
from dispatcher.backends.cuda.options import Options, TileChoice, parse, tile_text
from dispatcher.backends.cuda.tasks import Setting, Target
from dispatcher.backends.cuda.tiles import halo_tiles
from dispatcher.check.comparison import bounded_reference, compare
from dispatcher.device.filecache import cache_root
from dispatcher.errors import InputError
from dispatcher.problem.operator import Operator, bind
from dispatcher.timing import winners
from dispatcher.timing.tuning import TuneResult, tune
from tests import cudasim
from tests.cuda_support import SIMULATED, compiled, device, machine, operator, plant, simulator_only
from tests.family import FIVE
from tests.strategies import conv_operator, operator_of, tensors_of

ROOT = Path(__file__).resolve().parents[1]
LGS = "conv-transpose3d-layernorm-gelu-scaling"
SOFTMAX = "conv-transpose3d-avgpool-clamp-softmax-multiply"
H100 = Target(90, 227 << 10, 132)
SMALL = conv_operator((2, 3, 3, 4, 8), 5, (3, 3, 3), stride=2, padding=1, bias=True)
POOLED = conv_operator(
    (1, 3, 4, 4, 16), 4, (2, 2, 2), stride=2, before=[{"op": "avg_pool3d", "window": 2}], after=[{"op": "gelu"}]
)
HALF = conv_operator((1, 4, 2, 3, 8), 8, (3, 3, 3), stride=2, dtype="float16")
TWO = operator_of(
    {"x": (1, 3, 3, 4, 8), "v": (3, 4, 2, 2, 2), "w": (4, 5, 3, 3, 3)},
    [
        {"op": "conv_transpose3d", "weight": "v", "stride": 2},
        {"op": "relu"},
        {"op": "conv_transpose3d", "weight": "w", "padding": 1},
    ],
)
CHOICE = {"tile": "1x4x8,warp_m=1,resident=2"}


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is tuned yet; all else that was cached is there."""
    root, own = cache_root(), tmp_path / "cache" / "kernel-dispatcher"
    own.mkdir(parents=True)
    for name in ("cuda", "cudasim", "selftest"):
        (root / name).mkdir(parents=True, exist_ok=True)
        (own / name).symlink_to(root / name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def tensor_cores() -> None:
    """A device that has them; the test is skipped elsewhere."""
    if str(device().facts["compute_capability"]) < "8.0":
        pytest.skip("the device has no TF32 tensor cores")


def search(op: Operator, keep: bool = False) -> TuneResult:
    """Tune ``op``, with every candidate compared with the reference."""
    tensors = tensors_of(op)
    wanted, bound = bounded_reference(op, tensors)

    def wrong(result: Any) -> str:
        return compare(result, wanted, bound, dtype=op.dtype).reason

    return tune(BACKEND, op, device(), tensors, wrong, keep=keep)


def why(op: Operator, **options: Any) -> str:
    """Where the convolution's tile comes from."""
    return str(compiled(op, **options).launches[-1].detail["why"])


def remember(op: Operator, options: dict[str, Any] = CHOICE) -> None:
    BACKEND.remember(op, device(), options, 1.25)


# ---- tiles by name -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("precision", ["fp32", "tf32"])
@pytest.mark.parametrize("name", FIVE)
def test_a_name_stands_for_one_tile_and_leads_to_it(name: str, precision: str) -> None:
    op = operator(name, "kernelbench", precision)
    (task,) = halo_tasks(Setting(op, H100, Options()))
    assert task is not None
    every = halo_tiles(task)
    found = tuning.one_of_each_kind(task, 100)
    assert len(found) >= 4 and [cycles for _, cycles in found] == sorted(cycles for _, cycles in found)
    for tile, _ in found:
        name = task.name(tile)
        only = replace(task, wanted=name)
        assert np.count_nonzero(only.matches(every)) == 1
        options = parse({"tile": str(name)}).options
        assert options.tile == (name,) and tile_text(options.tile) == str(name)
        launch = lower(op, H100, options).launches[-1]
        assert dict(launch.kernel.defines).items() >= {k: str(v) for k, v in tile.defines.items()}.items()
        assert (launch.threads, launch.shared_bytes) == (tile.threads, tile.shared_bytes)


def test_what_a_name_leaves_open_is_estimated() -> None:
    op = operator(LGS, "kernelbench")
    for text in ("4x4x16", "4x4x16,warp_m=1", "4x4x16,warp_m=1,paired=0"):
        (task,) = halo_tasks(Setting(op, H100, parse({"tile": text}).options))
        assert task is not None
        best = tuning.one_of_each_kind(task, 1)[0][0]
        (launch,) = lower(op, H100, parse({"tile": text}).options).planned
        assert launch.detail["option"] == f"tile={task.name(best)}" and launch.detail["why"] == "asked for"
    assert best.tile == (4, 4, 16) and best.warp_m == 1 and not best.paired
    box = lower(op, H100, parse({"tile": (4, 4, 16)}).options).launches
    assert box[0].kernel == lower(op, H100, parse({"tile": "4x4x16"}).options).launches[0].kernel


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tile": "4x4"}, "tile is '4x4'; expected three positive integers"),
        ({"tile": "4x4x0"}, "tile is '4x4x0'; expected three positive integers"),
        ({"tile": (4, 4)}, r"tile is \(4, 4\); expected three positive integers"),
        ({"tile": (4, 4, True)}, r"tile is \(4, 4, True\); expected three positive integers"),
        ({"tile": 5}, "tile is 5; expected three positive integers"),
        ({"tile": "4x4x16,warps=2"}, "expected warp_m, resident, .* got 'warps=2'"),
        ({"tile": "4x4x16,warp_m=1,warp_m=2"}, "each at most once, got 'warp_m=2'"),
        ({"tile": "4x4x16,warp_m"}, "expected warp_m to be a positive integer, got ''"),
        ({"tile": "4x4x16,paired=2"}, "expected paired to be 0 or 1, got '2'"),
        ({"tile": "4x4x16/auto"}, r"tile names 2 tiles, but .* has 1 convolution\(s\)"),
        ({"tile": "4x4x12"}, "tile is 4x4x12, which conv_transpose3d cannot have here"),
        ({"tile": "4x4x16,fold_shared=1,slice_channels=7"}, "tile is 4x4x16,slice_channels=7,fold_shared=1, w"),
        ({"tuned": "yes"}, "tuned is 'yes'; expected ignore"),
        ({"tiles": "4x4x16"}, "option 'tiles' is unknown to the cuda backend; expected one of .*tile, tuned"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        lower(operator(LGS, "kernelbench"), H100, parse(options).options)
    assert "\n" not in str(caught.value)


def test_each_convolution_has_a_tile_of_its_own() -> None:
    options = parse({"tile": "auto/1x4x8,warp_m=1"}).options
    assert options.tile == (None, TileChoice((1, 4, 8), 1))
    first, second = lower(TWO, H100, options).planned
    assert (first.detail["why"], second.detail["why"]) == ("lowest estimate", "asked for")
    assert first.detail == lower(TWO, H100, Options()).planned[0].detail
    assert str(second.detail["option"]).startswith("tile=1x4x8,warp_m=1,")
    both = lower(TWO, H100, parse({"tile": "1x4x8"}).options).planned
    assert all(str(launch.detail["option"]).startswith("tile=1x4x8,") for launch in both)


# ---- candidates --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("precision", ["fp32", "tf32"])
@pytest.mark.parametrize("name", FIVE)
def test_candidates_differ_and_the_default_is_first(name: str, precision: str) -> None:
    op = operator(name, "kernelbench", precision)
    found = tuning.candidates(op, H100)
    assert found[0] == {"tuned": "ignore"} and 4 <= len(found) <= 2 * tuning.TILES + 1
    launches = [lower(op, H100, parse(options).options).launches for options in found]
    assert len({(each[-1].kernel, each[-1].blocks, len(each)) for each in launches}) == len(found)
    assert all(launch.name != "conv_fma" for each in launches for launch in each)
    places = {options.get("prologue") for options in found[1:]}
    assert places == ({"fused", "separate"} if name == SOFTMAX else {None})


def test_where_there_is_no_choice_the_default_is_the_only_candidate() -> None:
    for op in (replace(SMALL, dtype="float64"), conv_operator((1, 4, 2, 2, 2), 4, (2, 2, 2), groups=2)):
        assert tuning.candidates(op, H100) == [{"tuned": "ignore"}]
    assert tuning.candidates(SMALL, Target(75, 64 << 10, 30)) == [{"tuned": "ignore"}]
    assert tuning.candidates(conv_operator((0, 2, 2, 2, 2), 3, (2, 2, 2)), H100) == []


def test_candidates_name_a_tile_for_each_convolution() -> None:
    found = tuning.candidates(TWO, H100)
    assert len(found) > 4 and all(len(options["tile"].split("/")) == 2 for options in found[1:])


@pytest.mark.usefixtures("tensor_cores")
@pytest.mark.parametrize("op", [SMALL, POOLED, HALF, TWO], ids=["small", "pooled", "half", "two"])
def test_every_candidate_is_right(op: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "TILES", 3)
    result = search(op)
    assert len(result.candidates) >= 3 and all(candidate.time_s for candidate in result.candidates)
    assert result.clock == "device" and result.candidates[0].options == {"tuned": "ignore"}
    assert json.loads(json.dumps(result.as_dict()))["clock"] == "device"
    why(op)
    assert winners.RESULTS.folder.exists() is False


@simulator_only
@pytest.mark.parametrize(
    ("fault", "reason"),
    [("#error this tile is not wanted", "nvcc refused"), ("#undef HAS_BIAS\n#define HAS_BIAS 0", "")],
    ids=["refused", "wrong"],
)
def test_a_candidate_that_fails_or_is_wrong_is_reported_and_never_kept(
    fault: str, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with machine(devices=1):
        default = compiled(SMALL).launches[0].detail["option"]
        good, bad = (f"1x4x8,warp_m=1,resident={number}" for number in (2, 3))
        planted = f"#if RESIDENT == 3\n{fault}\n#endif\n// Transposed"
        plant(monkeypatch, tmp_path / "kernels", "conv_halo.cu", ("// Transposed", planted))
        assert "resident=3" not in str(default)
    choices = [{"tuned": "ignore"}, {"tile": bad}, {"tile": good}]
    monkeypatch.setattr(tuning, "candidates", lambda *given: choices)
    with machine(devices=1):
        result = search(SMALL, keep=True)
        (left_out,) = (each for each in result.candidates if each.time_s is None)
        assert left_out.options == {"tile": bad} and left_out.reason.startswith(reason) and left_out.reason
        assert result.best in ({}, {"tile": good})
        assert "resident=3" not in str(compiled(SMALL).launches[0].detail["option"])


# ---- what is kept ------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("tensor_cores")
def test_what_was_tuned_is_used_where_nothing_is_asked_for() -> None:
    assert why(SMALL) == "lowest estimate"
    remember(SMALL)
    (launch,) = compiled(SMALL).launches
    assert str(launch.detail["option"]).startswith(f"tile={CHOICE['tile']},")
    assert launch.detail["why"] == "tuned on this device: 1.25 times the speed of the default"
    result = compiled(SMALL)(tensors_of(SMALL))
    wanted, bound = bounded_reference(SMALL, tensors_of(SMALL))
    assert compare(result, wanted, bound, dtype="float32").passed
    assert why(SMALL, stream=0).startswith("tuned")
    assert why(SMALL, tuned="ignore") == why(SMALL, algorithm="halo") == "lowest estimate"
    assert why(SMALL, tile=(1, 2, 16)) == "asked for"
    remember(SMALL, {"tuned": "ignore"})  # a later search found that nothing is better than the default
    assert why(SMALL) == "lowest estimate"


@pytest.mark.usefixtures("tensor_cores")
def test_both_kinds_of_options_are_kept() -> None:
    steps = [launch.steps for launch in compiled(POOLED).launches]
    place = "separate" if len(steps) == 1 else "fused"
    remember(POOLED, {**CHOICE, "prologue": place})
    assert [launch.steps for launch in compiled(POOLED).launches] != steps
    assert why(POOLED).startswith("tuned")


@pytest.mark.usefixtures("tensor_cores")
def test_explain_says_so_in_another_process_too() -> None:
    op = operator(LGS)
    chosen = str(BACKEND.candidates(op, device())[1]["tile"])
    remember(op, {"tile": chosen})
    detail = dispatcher.explain(LGS, device="cuda:0", case="sample").launches[0].detail
    assert detail["option"] == f"tile={chosen}" and "1.25 times" in str(detail["why"])
    code = (
        f"import dispatcher; detail = dispatcher.explain({LGS!r}, device='cuda:0', case='sample').launches[0].detail; "
        "print(detail['option'], detail['why'], sep=chr(10))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, env=environment()
    )
    assert done.stdout.splitlines() == [detail["option"], detail["why"]]


def environment() -> dict[str, str]:
    """Of a child process that finds the same devices, and the same cache."""
    return {**os.environ, **(cudasim.activate().child_environment() if SIMULATED else {})}


@simulator_only
@pytest.mark.parametrize(
    "settings", [{"arch": "8.0"}, {"memory_mb": 4096}, {"processors": 8}], ids=["arch", "memory", "processors"]
)
def test_another_gpu_has_results_of_its_own(settings: dict[str, Any]) -> None:
    with machine(devices=1):
        remember(SMALL)
        assert why(SMALL).startswith("tuned")
    with machine(devices=1, **settings):
        assert why(SMALL) == "lowest estimate"


@pytest.mark.usefixtures("tensor_cores")
def test_another_operator_has_results_of_its_own() -> None:
    remember(SMALL)
    relu = conv_operator((2, 3, 3, 4, 8), 5, (3, 3, 3), stride=2, padding=1, bias=True, after=[{"op": "relu"}])
    for other in (
        replace(SMALL, precision="tf32"),
        conv_operator((3, 3, 3, 4, 8), 5, (3, 3, 3), stride=2, padding=1, bias=True),
        conv_operator((2, 3, 3, 4, 9), 5, (3, 3, 3), stride=2, padding=1, bias=True),
        relu,
    ):
        assert why(other) == "lowest estimate"
    assert why(replace(SMALL, problem=replace(SMALL.problem, name="other"))).startswith("tuned")


@pytest.mark.usefixtures("tensor_cores")
def test_numbers_that_are_parameters_do_not_matter() -> None:
    op = operator(LGS)
    remember(op)
    scalars = {name: 2.0 * value + 1.0 for name, value in op.scalars.items()}
    assert why(bind(op.problem, op.sizes, scalars)).startswith("tuned")


@simulator_only
@pytest.mark.parametrize(("processors", "matters"), [(1, False), (64, True)])
def test_the_batch_matters_until_it_fills_the_device(processors: int, matters: bool) -> None:
    few, many = (conv_operator((batch, 3, 8, 32, 32), 5, (3, 3, 3), stride=2) for batch in (1, 2))
    with machine(devices=1, processors=processors):
        remember(few)
        assert why(few).startswith("tuned")
        assert why(many).startswith("tuned") != matters


@simulator_only
def test_changed_kernels_make_results_old(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with machine(devices=1):
        remember(SMALL)
        assert why(SMALL).startswith("tuned")
    plant(monkeypatch, tmp_path / "kernels", "pool.cu", ("\n", "\n\n"))
    with machine(devices=1):
        assert why(SMALL) == "lowest estimate"


@pytest.mark.usefixtures("tensor_cores")
@pytest.mark.parametrize(
    "entry",
    [
        b"\xff", b"[]", b"{}", b'{"options": 5, "gain": 2}', b'{"options": {}, "gain": "fast"}',
        b'{"options": {}, "gain": NaN}', b'{"options": {"speed": 1}, "gain": 2}',
        b'{"options": {"tile": "9x9x9"}, "gain": 2}', b'{"options": {"tile": [1, {}]}, "gain": 2}',
        b'{"options": {"tile": "auto/auto"}, "gain": 2}',
    ],
)  # fmt: skip
def test_entries_that_make_no_sense_do_no_harm(entry: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(winners.RESULTS, "get", lambda key: entry)
    assert why(SMALL) == "lowest estimate"


@pytest.mark.usefixtures("tensor_cores")
def test_damaged_files_do_no_harm() -> None:
    remember(SMALL)
    (path,) = winners.RESULTS.folder.iterdir()
    path.write_bytes(path.read_bytes()[:-3])
    assert why(SMALL) == "lowest estimate"
    remember(SMALL)
    assert why(SMALL).startswith("tuned")


# ---- the command -------------------------------------------------------------------------------------------
@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Operator]:
    """The operators that are tuned, with two candidates each."""
    found: list[Operator] = []
    every: Callable[..., list[dict[str, str]]] = tuning.candidates

    def two(op: Operator, target: Target) -> list[dict[str, str]]:
        found.append(op)
        return every(op, target)[:2]

    monkeypatch.setattr(tuning, "candidates", two)
    return found


@pytest.mark.usefixtures("tensor_cores")
@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_the_command(precision: str, asked: list[Operator], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["tune", LGS, "--device", "cuda:0", "--precision", precision]
    assert cli.main([*words, "--no-keep"]) == 0
    out = capsys.readouterr().out
    assert LGS in out and "CLOCK" in out and " device " in out
    assert cli.main([*words, "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result["clock"] == "device" and len(result["candidates"]) == 2
    assert [op.precision for op in asked] == [precision] * 2
    option = result["candidates"][1]["options"]["tile"]
    assert cli.main(["run", LGS, "--device", "cuda:0", "--option", f"tile={option}", "--no-verify"]) == 0


def test_a_wrong_precision(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", LGS, "--device", "cuda", "--precision", "bf16"]) == 2
    error = capsys.readouterr().err
    assert error == "error: --precision is 'bf16'; expected one of fp32, tf32\n"


@simulator_only
def test_a_device_that_cannot_run_the_operator(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BACKEND, "supports", lambda op, device: "it is too large", raising=False)
    assert cli.main(["tune", LGS, "--device", "cuda:0"]) == 3
    error = capsys.readouterr().err
    assert error == f"error: cuda:0 cannot run {LGS}: it is too large; name another device\n"
