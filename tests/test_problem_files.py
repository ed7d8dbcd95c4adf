"""The problem files of the package: signatures, pipelines, legal cases; and the guide to writing one."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from dispatcher.backends.numpy_ref import reference
from dispatcher.check.inputs import random_tensors
from dispatcher.errors import ProblemFileError
from dispatcher.ops.binding import Field
from dispatcher.ops.vocabulary import VOCABULARY
from dispatcher.problem.expressions import Expression
from dispatcher.problem.loader import load_problem, problem_names
from dispatcher.problem.model import Problem
from dispatcher.problem.operator import Operator, bind

GUIDE = Path(__file__).resolve().parent.parent / "docs" / "adding-a-problem.md"

# The signatures, parameter by parameter: name, type, const.
INPUT = ("input", "tensor", True)
KERNEL = ("kernel", "tensor", True)
OUTPUT = ("output", "tensor", False)
SIZES = [
    ("batch_size", "size_t", False),
    ("in_channels", "size_t", False),
    ("out_channels", "size_t", False),
    ("depth", "size_t", False),
    ("height", "size_t", False),
    ("width", "size_t", False),
    ("kernel_d", "size_t", False),
    ("kernel_h", "size_t", False),
    ("kernel_w", "size_t", False),
]
STRIDE = [("stride_d", "size_t", False), ("stride_h", "size_t", False), ("stride_w", "size_t", False)]
PADDING = [("padding_d", "size_t", False), ("padding_h", "size_t", False), ("padding_w", "size_t", False)]
OUTPUT_PADDING = [
    ("output_padding_d", "size_t", False),
    ("output_padding_h", "size_t", False),
    ("output_padding_w", "size_t", False),
]
DILATION = [("dilation_d", "size_t", False), ("dilation_h", "size_t", False), ("dilation_w", "size_t", False)]

SIGNATURES: dict[str, list[tuple[str, str, bool]]] = {
    "conv-transpose-3d-asym-input-sq-kernel": [
        INPUT,
        KERNEL,
        OUTPUT,
        *SIZES,
        *STRIDE,
        *PADDING,
        *OUTPUT_PADDING,
        *DILATION,
        ("groups", "size_t", False),
    ],
    "conv-transpose3d-avgpool-clamp-softmax-multiply": [
        INPUT,
        KERNEL,
        ("scale", "tensor", True),
        OUTPUT,
        *SIZES,
        *STRIDE,
        *PADDING,
        *OUTPUT_PADDING,
        ("pool_kernel", "size_t", False),
        ("clamp_min", "double", False),
        ("clamp_max", "double", False),
    ],
    "conv-transpose3d-layernorm-gelu-scaling": [
        INPUT,
        KERNEL,
        OUTPUT,
        *SIZES,
        *STRIDE,
        *PADDING,
        *OUTPUT_PADDING,
        ("scaling_factor", "double", False),
    ],
    "conv-transpose3d-max-max-sum": [INPUT, KERNEL, ("conv_bias", "tensor", True), OUTPUT, *SIZES, *STRIDE, *PADDING],
    "conv-transpose3d-sum-layernorm-avgpool-gelu": [
        INPUT,
        KERNEL,
        OUTPUT,
        *SIZES,
        *STRIDE,
        *PADDING,
        *OUTPUT_PADDING,
        ("sum_weight", "double", False),
    ],
}

# Shapes of the tensors, the steps in order, the fields of those steps that are not the convolution, defaults.
INPUT_SHAPE = ["batch_size", "in_channels", "depth", "height", "width"]
KERNEL_SHAPE = ["in_channels", "out_channels", "kernel_d", "kernel_h", "kernel_w"]
NORM: dict[str, Any] = {"axis": (1,), "eps": 1e-5}
PIPELINES: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "conv-transpose-3d-asym-input-sq-kernel": [("conv_transpose3d", {})],
    "conv-transpose3d-avgpool-clamp-softmax-multiply": [
        ("avg_pool3d", {"window": ["pool_kernel"] * 3}),
        ("conv_transpose3d", {}),
        ("clamp", {"min": "clamp_min", "max": "clamp_max"}),
        ("softmax", {"axis": (2, 3, 4)}),
        ("scale", {"by": "scale"}),
    ],
    "conv-transpose3d-layernorm-gelu-scaling": [
        ("conv_transpose3d", {}),
        ("layer_norm", NORM),
        ("gelu", {}),
        ("scale", {"by": "scaling_factor"}),
    ],
    "conv-transpose3d-max-max-sum": [
        ("conv_transpose3d", {}),
        ("max_pool3d", {"window": [2, 2, 2]}),
        ("max_pool3d", {"window": [3, 3, 3]}),
        ("sum", {"axis": (1,)}),
    ],
    "conv-transpose3d-sum-layernorm-avgpool-gelu": [
        ("conv_transpose3d", {}),
        ("add", {"value": "sum_weight"}),
        ("layer_norm", NORM),
        ("avg_pool3d", {"window": [2, 2, 2]}),
        ("gelu", {}),
    ],
}

# The published sizes: input shape, kernel shape, output shape, scalars.
KERNELBENCH: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], dict[str, float]]] = {
    "conv-transpose-3d-asym-input-sq-kernel": ((8, 48, 96, 96, 96), (48, 24, 3, 3, 3), (8, 24, 98, 98, 98), {}),
    "conv-transpose3d-avgpool-clamp-softmax-multiply": (
        (32, 32, 32, 64, 64),
        (32, 64, 3, 3, 3),
        (32, 64, 32, 64, 64),
        {"clamp_min": 0.0, "clamp_max": 1.0},
    ),
    "conv-transpose3d-layernorm-gelu-scaling": (
        (32, 32, 16, 32, 32),
        (32, 64, 4, 4, 4),
        (32, 64, 32, 64, 64),
        {"scaling_factor": 1.0},
    ),
    "conv-transpose3d-max-max-sum": ((16, 32, 32, 32, 32), (32, 64, 5, 5, 5), (16, 1, 10, 10, 10), {}),
    "conv-transpose3d-sum-layernorm-avgpool-gelu": (
        (32, 32, 16, 32, 32),
        (32, 64, 3, 3, 3),
        (32, 64, 16, 32, 32),
        {"sum_weight": 1.0},
    ),
}
CASES = [(name, case) for name in SIGNATURES for case in load_problem(name).cases]


def bound(problem: Problem, case: str) -> Operator:
    values = {p.name: p.default for p in problem.parameters if p.default is not None} | dict(problem.cases[case])
    return bind(
        problem,
        {p.name: int(values[p.name]) for p in problem.sizes},
        {p.name: float(values[p.name]) for p in problem.scalars},
    )


def test_the_five_problems_are_there() -> None:
    assert set(SIGNATURES) <= set(problem_names())


@pytest.mark.parametrize("name", problem_names())
def test_each_file_is_complete(name: str) -> None:
    problem = load_problem(name)
    assert problem.name == name
    assert problem.title != name and problem.origin
    assert {"sample", "odd"} <= set(problem.cases)
    published = [values for case, values in problem.cases.items() if "=" in case or " " in case]
    kernelbench = problem.cases.get("kernelbench")
    assert published == [kernelbench] if kernelbench else len(published) > 3  # one with two names; or other sizes
    (conv, *_) = [step.op for step in problem.pipeline if step.op.startswith("conv")]
    assert problem.group == ("fused_" if "level 2" in problem.origin else "") + conv


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    assert [(p.name, p.type, p.const) for p in load_problem(name).parameters] == SIGNATURES[name]


@pytest.mark.parametrize("name", SIGNATURES)
def test_tensor_shapes(name: str) -> None:
    kernel = list(KERNEL_SHAPE)
    if name == "conv-transpose-3d-asym-input-sq-kernel":
        kernel[1] = "out_channels / groups"
    wanted = {
        "input": INPUT_SHAPE,
        "kernel": kernel,
        "scale": ["1", "out_channels", "1", "1", "1"],
        "conv_bias": ["out_channels"],
    }
    for tensor in load_problem(name).tensors:
        assert tensor.shape is not None
        assert [str(extent) for extent in tensor.shape] == wanted[tensor.name]


@pytest.mark.parametrize("name", SIGNATURES)
def test_pipeline(name: str) -> None:
    problem = load_problem(name)
    assert [step.op for step in problem.pipeline] == [op for op, _ in PIPELINES[name]]
    parameters = {p.name for p in problem.parameters}
    for step, (op, fields) in zip(problem.pipeline, PIPELINES[name], strict=True):
        wanted = dict(fields)
        if op == "conv_transpose3d":
            wanted["weight"] = "kernel"
            if "conv_bias" in parameters:
                wanted["bias"] = "conv_bias"
            for option in ("stride", "padding", "output_padding", "dilation"):
                if f"{option}_d" in parameters:
                    wanted[option] = [f"{option}_{axis}" for axis in "dhw"]
            if "groups" in parameters:
                wanted["groups"] = Expression.parse("groups")
        for key in ("window", "stride", "padding", "output_padding", "dilation"):
            if key in wanted:
                wanted[key] = tuple(Expression.parse(part) for part in wanted[key])
        assert (step.source, step.result, dict(step.fields)) == (None, None, wanted)


@pytest.mark.parametrize("name", SIGNATURES)
def test_defaults(name: str) -> None:
    wanted: dict[str, float] = {f"{option}_{axis}": 1 for option in ("stride", "dilation") for axis in "dhw"}
    wanted |= {f"{option}_{axis}": 0 for option in ("padding", "output_padding") for axis in "dhw"}
    wanted |= {"groups": 1, "pool_kernel": 2, "scaling_factor": 1.0, "sum_weight": 1.0}
    wanted |= {"clamp_min": 0.0, "clamp_max": 1.0}
    for parameter in load_problem(name).parameters:
        assert parameter.default == wanted.get(parameter.name)


@pytest.mark.parametrize("name", SIGNATURES)
def test_published_sizes(name: str) -> None:
    operator = bound(load_problem(name), "kernelbench")
    input_shape, kernel_shape, output_shape, scalars = KERNELBENCH[name]
    assert operator.tensor_shapes["input"] == input_shape
    assert operator.tensor_shapes["kernel"] == kernel_shape
    assert operator.output_shape == output_shape
    assert operator.scalars == scalars


@pytest.mark.parametrize(("name", "case"), CASES)
def test_every_case_is_a_legal_operator(name: str, case: str) -> None:
    operator = bound(load_problem(name), case)
    assert all(extent > 0 for extent in operator.output_shape)
    if case != "kernelbench" and " " not in case:  # such as "B8 C48->24 D96 H96 W96", which is published
        assert operator.flops < 100e6  # small enough for tests on every backend


@pytest.mark.parametrize("name", SIGNATURES)
def test_an_empty_batch_is_a_legal_operator(name: str) -> None:
    problem = load_problem(name)
    values = {p.name: p.default for p in problem.parameters if p.default is not None}
    values |= dict(problem.cases["sample"]) | {"batch_size": 0}
    operator = bind(
        problem,
        {p.name: int(values[p.name]) for p in problem.sizes},
        {p.name: float(values[p.name]) for p in problem.scalars},
    )
    assert operator.empty and operator.output_shape[0] == 0


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_odd_case_tells_the_axes_apart(name: str) -> None:
    case = load_problem(name).cases["odd"]
    assert case["batch_size"] == 3 and case["in_channels"] != case["out_channels"]
    for family in (("depth", "height", "width"), ("kernel_d", "kernel_h", "kernel_w")):
        assert len({case[key] for key in family}) == 3
    assert len({case[f"stride_{axis}"] for axis in "dhw"}) == 3


# ---- the guide ---------------------------------------------------------------------------------------------
def guide_block(language: str, after: str = "") -> str:
    """The first code block of a language behind a text."""
    text = GUIDE.read_text(encoding="utf-8")
    found = re.search(rf"```{language}\n(.*?)```", text[text.index(after) :], re.DOTALL)
    assert found is not None
    return found[1]


def field_cell(field: Field) -> str:
    if field.required:
        state = "needed"
    elif field.default is None:
        state = "optional"
    else:
        default = {math.inf: ".inf", -math.inf: "-.inf"}.get(field.default, field.default)
        state = f"default {default}"
    return f"`{field.name}` ({field.kind}, {state}): {field.meaning}"


def vocabulary_table() -> str:
    rows = [
        f"| `{op}` | {kind.meaning} | {'<br>'.join(map(field_cell, kind.fields)) or 'none'} |"
        for op, kind in VOCABULARY.items()
        if kind.rank is None
    ]
    return "\n".join(["| Step | What it computes | Fields |", "|---|---|---|", *rows])


def test_the_table_of_the_guide_is_the_vocabulary() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    found = re.search(r"<!-- vocabulary: .*? -->\n(.*?)<!-- end of vocabulary -->", text, re.DOTALL)
    assert found is not None
    assert found[1].strip() == vocabulary_table(), "the table must be:\n" + vocabulary_table()


def test_the_example_of_the_guide_works(tmp_path: Path) -> None:
    path = tmp_path / "example.yaml"
    path.write_text(guide_block("yaml"))
    problem = load_problem(path)
    assert [step.op for step in problem.pipeline] == ["conv_transpose3d", "softmax", "scale", "max_pool3d"]
    assert bound(problem, "sample").output_shape == (2, 6, 2, 3, 4)


def test_the_residual_of_the_guide_works() -> None:
    mapping = yaml.safe_load(guide_block("yaml"))
    mapping["pipeline"] = yaml.safe_load(guide_block("yaml", "residual connection"))["pipeline"]
    mapping["parameters"] = {
        "input": INPUT_SHAPE,
        "kernel": KERNEL_SHAPE,
        "bias": ["out_channels", 1, 1, 1],
        "output": "output",
    }
    del mapping["cases"]
    assert load_problem(mapping).pipeline[2].fields == {"by": "conv"}


SLIPS = [
    ("out_channels / groups", "out_chanels / groups"),
    ("weight: kernel", "wieght: kernel"),
    ("padding: 1", "padding: 1.0"),
    ("axis: channel", "axis: chanel"),
    ("by: factor", "by: factr"),
    ("out_channels: 6", "in_channels: 6"),
    ("out_channels: 6", "out_channels: 7"),
]


RECIPE = """\
name: recipe
parameters:
  input: [n, in_channels, h, w]
  kernel: [out, in_channels, 3, 3]
  bias: [out]
  bn_weight: [out]
  bn_bias: [out]
  depthwise: [in_channels, 1, 3, 3]
  pointwise: [out, in_channels, 1, 1]
  output: output
pipeline:
"""
RECIPE_SIZES = {"n": 2, "in_channels": 3, "h": 8, "w": 9, "out": 4}


def test_the_recipes_of_the_guide_work() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    recipes = text[text.index("<!-- recipes") : text.index("<!-- end of recipes")]
    blocks = re.findall(r"```yaml\n(.*?)```", recipes, re.DOTALL)
    assert len(blocks) == 7
    for block in blocks:
        pipeline = yaml.safe_load(block)
        named = {"input", "output"}.union(*(step.values() for step in pipeline if isinstance(step, dict)))
        mapping = yaml.safe_load(RECIPE)
        parameters = {name: value for name, value in mapping["parameters"].items() if name in named}
        mapping |= {"pipeline": pipeline, "parameters": parameters}
        problem = load_problem(mapping)
        sizes = {size.name: RECIPE_SIZES[size.name] for size in problem.sizes}
        operator = bind(problem, sizes, {})
        assert np.isfinite(reference(operator, random_tensors(operator, 0))).all()
    dimensions = re.search(r"```yaml\n(name: smooth.*?)```", text, re.DOTALL)
    assert dimensions is not None
    assert bound(load_problem(yaml.safe_load(dimensions[1])), "sample").output_shape == (40,)


def test_the_errors_of_the_guide_are_what_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    example = guide_block("yaml")
    messages = []
    for old, new in SLIPS:
        assert example.count(old) == 1
        Path("example.yaml").write_text(example.replace(old, new))
        with pytest.raises(ProblemFileError) as caught:
            load_problem("example.yaml")
        messages.append(str(caught.value))
    assert guide_block("text", "<!-- errors").splitlines() == messages, "\n".join(messages)
