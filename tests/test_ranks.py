"""Problems of one, two and three spatial axes, and results that drop axes: through every door of the product."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Install
from fakes import FakeBackend, correct

import dispatcher
from dispatcher import cli
from dispatcher.check.comparison import verify_result
from dispatcher.check.inputs import random_tensors
from dispatcher.check.kernelfile import signature, size_names
from dispatcher.device.splitting import batch_parameter
from dispatcher.errors import GeometryError, InputError
from dispatcher.export.cuda import head
from dispatcher.export.request import make_request
from dispatcher.interface import Device
from dispatcher.problem.arguments import bind_arguments, shorthands, sort_arguments
from dispatcher.problem.loader import load_problem
from dispatcher.problem.operator import Operator
from dispatcher.problem.userkernel import spelled
from tests.family import operator_for
from tests.strategies import Place, every_device

#: Without batch and channel; a dropped channel; all but the batch dropped; none.
NAMES = ("conv-1d", "conv3d-multiply-instancenorm-clamp-multiply-max", "conv2d-avgpool-sigmoid-sum", "conv-2d")
NAMES = (*NAMES, "conv-transpose-1d", "conv2d-gelu-globalavgpool", "conv3d-min-softmax")
DROPPED = "conv2d-gelu-globalavgpool"


def bound(pipeline: list[Any], rank: int = 2, **sizes: int) -> Operator:
    """A pipeline on ``x``, whose axes are the sizes' names, with a tensor ``c`` of one value a channel."""
    parameters: dict[str, Any] = {"x": list(sizes), "output": "output"}
    if any("c" in step.values() for step in pipeline if isinstance(step, dict)):
        parameters["c"] = ["channels"]
    problem = load_problem({"name": "test", "rank": rank, "parameters": parameters, "pipeline": pipeline})
    return bind_arguments(problem, sort_arguments(problem, sizes))


@pytest.mark.parametrize("name", NAMES)
def test_all_doors_give_the_same(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    operator = operator_for(name, "odd")
    tensors = random_tensors(operator, 0)
    expected = correct(operator, tensors)
    assert expected.shape == operator.output_shape
    arguments: dict[str, Any] = {**operator.sizes, **operator.scalars, **tensors}
    np.testing.assert_array_equal(dispatcher.run(name, device="numpy", **arguments), expected)
    compiled = dispatcher.compile(name, device="numpy", case="odd")
    given = np.full(expected.shape, np.nan, np.float32)
    result = load_problem(name).output.name
    assert compiled(**tensors, **{result: given}) is given
    np.testing.assert_array_equal(given, expected)
    with pytest.raises(InputError, match="shape"):
        compiled(**tensors, **{result: np.empty((1, *expected.shape), np.float32)})
    (verification,) = dispatcher.verify(name, device="numpy", case="odd", inputs="signed")
    assert verification.outcome != "failed"
    assert dispatcher.explain(name, device="numpy", case="odd").operator.output_shape == expected.shape
    file = tmp_path / "result.npy"
    assert cli.main(["run", name, "--device", "numpy", "--case", "odd", "--output", str(file), "--json"]) == 0
    assert tuple(json.loads(capsys.readouterr().out)["output_shape"]) == np.load(file).shape == expected.shape
    assert cli.main(["explain", name, "--device", "numpy", "--case", "odd"]) == 0
    shown = capsys.readouterr().out
    assert str(expected.shape) in shown and ("depth" in shown) == (operator.problem.rank == 3)


@pytest.mark.parametrize("name", NAMES)
def test_the_worst_element_is_named_by_the_axes_of_the_result(name: str) -> None:
    operator = operator_for(name, "odd")
    tensors = random_tensors(operator, 0)
    wrong = correct(operator, tensors)
    place = tuple(extent - 1 for extent in wrong.shape)
    wrong[place] += 100
    found = verify_result(operator, tensors, wrong)
    assert not found.passed and found.worst_index == place
    assert not verify_result(operator, tensors, wrong[None]).passed  # of another shape


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("conv-1d", "conv-2d")])
def test_devices_share_a_batch_of_any_rank(name: str, install_backends: Install) -> None:
    backend = FakeBackend("cuda", devices=["one", "two"])
    install_backends(backend)
    operator = operator_for(name, "odd")
    tensors = random_tensors(operator, 0)
    compiled = dispatcher.compile(name, case="odd", device="all-of:cuda")
    np.testing.assert_array_equal(compiled(**tensors), correct(operator, tensors))
    assert sorted(len(seen["input"]) for seen in backend.seen) == [1, 2]


def test_what_cannot_be_shared_says_why() -> None:
    assert batch_parameter(operator_for("conv-1d", "odd")) == ("", "the result has no batch axis")
    assert "N is more than the batch" in batch_parameter(bound(["relu"], 1, N=5))[1]
    mixed = bound([{"op": "sum", "axis": "batch", "keepdim": False}], batch=2, channels=3, h=4, w=5)
    assert batch_parameter(mixed)[1] == "a step mixes batch items"


def test_an_empty_batch_of_dropped_axes() -> None:
    operator = operator_for(DROPPED, "odd")
    tensors = random_tensors(operator, 0) | {"input": np.zeros((0, *operator.tensor_shapes["input"][1:]), np.float32)}
    assert dispatcher.run(DROPPED, device="numpy", **tensors).shape == (0, operator.output_shape[1])


@pytest.mark.parametrize(("op", "value"), [("mean", np.nan), ("sum", 0.0), ("max", -np.inf), ("min", np.inf)])
def test_an_empty_batch_that_is_reduced(backend_device: Device, op: str, value: float) -> None:
    problem = load_problem(
        {
            "name": "test",
            "rank": 2,
            "parameters": {"x": ["n", "c", "h", "w"], "kernel": ["c", 1, "k", "k"], "output": "output"},
            "pipeline": [{"op": "conv2d", "weight": "kernel", "groups": "c"}, {"op": op, "axis": ["batch", "spatial"]}],
            "cases": {"none": {"n": 0, "c": 2, "h": 5, "w": 5, "k": 3}},
        }
    )
    x, kernel = np.zeros((0, 2, 5, 5), np.float32), np.ones((2, 1, 3, 3), np.float32)
    result = dispatcher.run(problem, device=backend_device.id, x=x, kernel=kernel)
    np.testing.assert_array_equal(result.ravel(), [value, value])
    with pytest.raises(InputError, match="the batch is empty, so there is nothing to export"):
        make_request(problem, ["none"], None, "fp32", "", general=False)


# ---- axes that are dropped, and what goes along them -------------------------------------------------------
def test_axes_are_dropped_and_named_by_rank() -> None:
    sizes = {"batch": 2, "channels": 3, "h": 4, "w": 5}
    for pipeline, shape in (
        ([{"op": "max", "axis": "height", "keepdim": False}], (2, 3, 5)),
        ([{"op": "max", "axis": "height"}, {"op": "squeeze", "axis": "height"}], (2, 3, 5)),
        ([{"op": "sum", "axis": ["channel", "spatial"], "keepdim": False}], (2,)),
        ([{"op": "mean", "axis": ["batch", "channel", "spatial"], "keepdim": False}], ()),
        ([{"op": "min", "axis": "channel", "keepdim": False}, {"op": "softmax", "axis": "width"}], (2, 4, 5)),
    ):
        operator = bound(pipeline, **sizes)
        assert operator.output_shape == shape
        tensors = random_tensors(operator, 0)
        assert correct(operator, tensors).shape == dispatcher.run(operator.problem, device="numpy", **tensors).shape


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        ([{"op": "squeeze", "axis": "height"}], r"step 1 \(squeeze\): axis height has extent 4; expected 1"),
        (
            [{"op": "max", "axis": "channel", "keepdim": False}, {"op": "softmax", "axis": "channel"}],
            r"step 2 \(softmax\): axis is an axis that an earlier step dropped",
        ),
        (
            [{"op": "max", "axis": "channel", "keepdim": False, "as": "m"}, {"op": "add", "from": "x", "value": "m"}],
            "only one of it and the step's input has all axes; keep them with keepdim: true",
        ),
        ([{"op": "adaptive_max_pool", "size": [2, 0]}], "size on axis width is 0; it must be 1 or more"),
        ([{"op": "add", "value": "c"}], "value has extent 3 on axis width; expected 1 or 5"),
        ([{"op": "avg_pool", "window": 3, "padding": 2}], "padding on axis height is 2; it must be at most half"),
        (
            [{"op": "sum", "axis": "channels"}, "relu", {"op": "sum", "axis": "w"}],
            "w .* is 5; expected an axis from 0 to 3",
        ),
    ],
)
def test_axes_that_are_not_there(pipeline: list[Any], message: str) -> None:
    with pytest.raises((InputError, GeometryError), match=message):
        bound(pipeline, batch=2, channels=3, h=4, w=5)


def test_a_tensor_of_one_value_a_channel_goes_along_it() -> None:
    operator = bound([{"op": "scale", "by": "c", "along": "channel"}], batch=2, channels=3, h=4, w=5)
    tensors = random_tensors(operator, 0)
    expected = tensors["x"] * tensors["c"][:, None, None]
    np.testing.assert_array_equal(correct(operator, tensors), expected)


@every_device
def test_pools_to_any_size(place: Place) -> None:
    """Sizes that do not divide the extent, that do, and larger ones."""
    pipeline = [
        "tanh",
        {"op": "adaptive_avg_pool2d", "size": [3, 12]},
        {"op": "adaptive_max_pool", "size": [3, 5]},
        {"op": "softmax", "axis": "width"},
        # A window larger than its input: PyTorch makes one output with ceil_mode.
        {"op": "avg_pool", "window": [4, 2], "stride": [2, 1], "ceil_mode": True},
    ]
    operator = bound(pipeline, batch=2, channels=3, h=7, w=5)
    assert operator.output_shape == (2, 3, 1, 4)
    _, comparison = place.check(operator, random_tensors(operator, 0))
    assert comparison.passed, comparison.reason


def test_padding_that_keeps_the_extent() -> None:
    x = np.arange(1, 8, dtype=np.float32)[None, None]
    parameters = {"x": ["n", "c", "length"], "w": ["o", "c", "k"], "output": "output"}
    for kernel, stride, expected in (
        ([1.0, 1.0, 1.0], 1, [3, 6, 9, 12, 15, 18, 13]),
        ([1.0, 1.0], 1, [3, 5, 7, 9, 11, 13, 7]),  # the odd zero is behind
        ([1.0, 1.0, 1.0, 1.0], 3, [6, 18, 13]),
    ):
        step = {"op": "conv", "weight": "w", "padding": "same", "stride": stride}
        w = np.array(kernel, np.float32)[None, None]
        result = dispatcher.run({"name": "t", "parameters": parameters, "pipeline": [step]}, x=x, w=w, device="numpy")
        np.testing.assert_array_equal(result[0, 0], expected)


# ---- names -------------------------------------------------------------------------------------------------
def test_shorthands_have_as_many_parts_as_there_are_axes() -> None:
    assert shorthands(load_problem("conv-depthwise-separable-2d"))["stride"] == ("stride_h", "stride_w")
    assert shorthands(load_problem("conv-transpose-1d")) == {}
    operator = operator_for("conv-transpose-1d", "odd")
    tensors = random_tensors(operator, 0)
    result = dispatcher.run("conv-transpose-1d", device="numpy", **tensors, stride=3, padding=2, output_padding=1,
                            dilation=2, groups=2)  # fmt: skip
    np.testing.assert_array_equal(result, correct(operator, tensors))


def test_signatures_in_three_languages() -> None:
    problem = load_problem("conv-depthwise-separable-2d")
    heads = {language: signature(problem, language) for language in ("c", "cu", "cl")}
    assert heads["c"].startswith("void solution(\n    const float* input,\n    const float* depthwise_kernel,\n")
    assert heads["cu"] == "__global__ " + heads["c"]
    assert "__global const float* input" in heads["cl"] and "ulong groups)" in heads["cl"]
    assert "const float* kernel," in signature(load_problem(DROPPED), "c")
    assert "const float* kernel_," in signature(load_problem(DROPPED), "cl")
    with pytest.raises(InputError, match="'rust'; expected one of c, cu, cl"):
        signature(problem, "rust")


def test_names_that_languages_have_taken_get_an_underscore() -> None:
    for name in "unsigned class sizeof blockIdx float4 M_PI NAN __half solution int_".split():  # noqa: SIM905
        assert {spelled(name, language) for language in ("c", "cu", "cl")} == {f"{name}_"}
    for name in ("uniform", "get_global_id", "ushort"):
        assert (spelled(name, "cu"), spelled(name, "cl")) == (name, f"{name}_")
    assert [spelled(name) for name in ("input", "a", "_", "points", "float_shape")] == [
        "input", "a", "_", "points", "float_shape",
    ]  # fmt: skip


def test_a_title_that_ends_in_a_backslash_does_not_swallow_the_next_line() -> None:
    problem = replace(load_problem(DROPPED), title="A \\", note="B \\")
    top = head(make_request(problem, ["sample"], None, "fp32", "", general=False), "make \\")
    assert not re.search(r"\\\s*$", top, re.MULTILINE)


def test_launch_sizes_know_the_axes_of_the_result() -> None:
    names = size_names(operator_for(DROPPED, "odd"))
    assert (names["output_batch"], names["output_channels"], names["output_height"]) == (3, 6, 1)
    assert names["output_elements"] == 18 and "output_depth" not in names
    assert size_names(operator_for("conv-transpose-1d", "odd"))["output_length"] > 1


# ---- finding problems --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--rank", "1", "--op", "conv"], {"conv-1d", "conv-1d-dilated-strided"}),
        (["depthwise", "--level", "1", "--op", "conv2d"], 5),
        (["--op", "batch_norm"], 6),
        (["--op", "batch_norm", "--level", "1"], 0),
        (["GROUPNORM", "--rank", "3"], 5),
        ([], 98),
    ],
)
def test_problems_are_found(options: list[str], names: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["problems", *options, "--json"]) == 0
    found = {each["name"] for each in json.loads(capsys.readouterr().out)["problems"]}
    assert found == names if isinstance(names, set) else len(found) == names
    assert cli.main(["problems", *options]) == 0
    shown = capsys.readouterr()
    assert all(f"\n{name} " in shown.out for name in found)
    assert bool(found) != ("no problem fits" in shown.err)


@pytest.mark.parametrize(("option", "value"), [("--rank", "4"), ("--level", "x"), ("--op", "swish")])
def test_filters_that_make_no_sense(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["problems", option, value]) == 2
    assert f"{option} is '{value}'" in capsys.readouterr().err


def test_show_prints_the_signature_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", "conv-1d", "--signature", "c"]) == 0
    wanted = "void solution(\n    const float* A,\n    const float* B,\n    float* C,\n    size_t N,\n    size_t K)\n"
    assert capsys.readouterr().out == wanted
    assert cli.main(["show", "conv-1d", "--signature", "cl", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["signature"].startswith("__kernel void solution(")
