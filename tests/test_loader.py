"""Problem files: what is read, what is refused, and that each refusal is one helpful line."""

from __future__ import annotations

import copy
import os
import re
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dispatcher.errors import DispatcherError, InputError, ProblemFileError
from dispatcher.ops.vocabulary import VOCABULARY
from dispatcher.problem.arguments import bind_arguments, sort_arguments
from dispatcher.problem.expressions import Expression
from dispatcher.problem.loader import load_problem, problem_names
from dispatcher.problem.schema import INTERFACE_NAMES, problem_from_mapping
from dispatcher.problem.yamlfile import MAX_DEPTH, MAX_FILE_BYTES, MAX_NODES, read_yaml

VALID = """\
name: tiny
parameters:
  - {name: input, type: tensor, const: true, shape: [batch_size, in_channels, depth, height, width]}
  - {name: kernel, type: tensor, const: true, shape: [in_channels, out_channels, kernel_size_all, 1, 1]}
  - {name: output, type: tensor, const: false}
  - {name: batch_size, type: size_t}
  - {name: in_channels, type: size_t}
  - {name: out_channels, type: size_t}
  - {name: depth, type: size_t}
  - {name: height, type: size_t}
  - {name: width, type: size_t}
  - {name: kernel_size_all, type: size_t, default: 1}
  - {name: stride_d, type: size_t, default: 1}
  - {name: factor, type: double, default: 1.0}
  - {name: low, type: double, default: 0}
pipeline:
  - op: conv_transpose3d
    weight: kernel
    stride: [stride_d, 1, 1]
  - {op: layer_norm, eps: 1e-5}
  - {op: clamp, min: low}
  - {op: scale, by: factor}
cases:
  sample: {batch_size: 1, in_channels: 2, out_channels: 3, depth: 2, height: 2, width: 2}
"""


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(text: str | bytes) -> Path:
        path = tmp_path / "p.yaml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return write


def refused(path: Any, kind: type[InputError] = ProblemFileError) -> str:
    """The message of the refusal: checked to be one short line that came quickly."""
    started = time.perf_counter()
    with pytest.raises(kind) as caught:
        load_problem(path)
    assert time.perf_counter() - started < 2
    message = str(caught.value)
    assert len(message.splitlines()) == 1 and message.isprintable() and len(message) < 700
    assert "expected" in message or "; " in message or "missing" in message
    return message


def replaced(old: str, new: str) -> str:
    assert VALID.count(old) == 1
    return VALID.replace(old, new)


def line_of(text: str, part: str) -> int:
    return text[: text.index(part)].count("\n") + 1


def test_a_valid_file(write: Any) -> None:
    path = write(VALID)
    problem = load_problem(path)
    assert (problem.name, problem.title, problem.origin, problem.path) == ("tiny", "tiny", "", path)
    assert [p.name for p in problem.tensors] == ["input", "kernel"]
    assert problem.output.name == "output"
    assert problem.pipeline[0].fields["stride"] == tuple(map(Expression.parse, ("stride_d", 1, 1)))
    assert problem.pipeline[1].fields == {"eps": 1e-5}
    assert problem.pipeline[3].fields == {"by": "factor"}
    assert problem.tolerance == 1.0
    assert load_problem(str(path)).cases["sample"]["out_channels"] == 3


# ---- scalars that are not what they look like --------------------------------------------------------------
@pytest.mark.parametrize(
    ("old", "new", "parts"),
    [
        ("weight: kernel", "weight: kernel\n    bias: 'false'", ("bias", "'false'", "kernel")),
        ("weight: kernel", "weight: kernel\n    bias: no", ("bias", "'no'", "kernel")),
        ("weight: kernel", "weight: kernel\n    bias: off", ("bias", "'off'")),
        ("weight: kernel", "weight: kernel\n    bias: n", ("bias", "'n'")),
        ("weight: kernel", "weight: kernel\n    bias: false", ("bias", "False")),
        ("[stride_d, 1, 1]", "010", ("stride", "'010'", "decimal")),
        ("[stride_d, 1, 1]", "0x10", ("stride", "'0x10'", "decimal")),
        ("[stride_d, 1, 1]", "0o10", ("stride", "'0o10'", "decimal")),
        ("[stride_d, 1, 1]", "0b11", ("stride", "'0b11'", "decimal")),
        ("[stride_d, 1, 1]", "08", ("stride", "'08'", "decimal")),
        ("[stride_d, 1, 1]", "1:30", ("stride", "'1:30'", "decimal")),
        ("[stride_d, 1, 1]", "190:20:30.15", ("stride", "'190:20:30.15'", "decimal")),
        ("[stride_d, 1, 1]", "1_0", ("stride", "'1_0'", "decimal")),
        ("[stride_d, 1, 1]", "1_0.5", ("stride", "'1_0.5'", "decimal")),
        ("[stride_d, 1, 1]", "2.0", ("stride", "2.0", "integer", "write 2")),
        ("[stride_d, 1, 1]", "2.5", ("stride", "2.5", "integer")),
        ("[stride_d, 1, 1]", "1e0", ("stride", "1.0", "write 1")),
        ("[stride_d, 1, 1]", "true", ("stride", "truth value True", "integer")),
        ("[stride_d, 1, 1]", "True", ("stride", "truth value True", "integer")),
        ("[stride_d, 1, 1]", "-1", ("stride", "-1", "from 0")),
        ("[stride_d, 1, 1]", "99999999999999999999999", ("stride", "smaller")),
        ("[stride_d, 1, 1]", "9223372036854775808", ("stride", "9223372036854775808")),
        ("[stride_d, 1, 1]", "", ("stride", "nothing", "integer")),
        ("[stride_d, 1, 1]", "[1, 2]", ("stride", "a list of 2", "list of 3")),
        ("[stride_d, 1, 1]", "[1, 2, 3, 4]", ("stride", "a list of 4", "list of 3")),
        ("[stride_d, 1, 1]", "[1, 2, 2.0]", ("stride[2]", "2.0", "integer")),
        ("[stride_d, 1, 1]", "2,3,4", ("stride", "'2,3,4'")),
        ("[stride_d, 1, 1]", "'010'", ("stride", "'010'")),
        ("[stride_d, 1, 1]", "{d: 1}", ("stride", "a mapping")),
        ("eps: 1e-5", "eps: .nan", ("eps", "nan", "number")),
        ("eps: 1e-5", "eps: .inf", ("eps", "inf", "finite")),
        ("eps: 1e-5", "eps: -1", ("eps", "-1.0", "0 or more")),
        ("eps: 1e-5", "eps: true", ("eps", "True", "number")),
        ("eps: 1e-5", "eps: 1e999", ("eps", "'1e999'", "smaller")),
        ("eps: 1e-5", "eps: 1e", ("eps", "'1e'", "number")),
        ("eps: 1e-5", "eps: 1,5", ("'eps: 1'", "the line reads")),
        ("eps: 1e-5", "eps: depth", ("eps", "'depth'", "size_t parameter")),
        ("eps: 1e-5", "eps: kernel", ("eps", "'kernel'", "tensor parameter")),
        ("by: factor", "by: .nan", ("by", "nan", "number")),
        ("by: factor", "by: .inf", ("by", "inf", "finite")),
        ("by: factor", "by: inf", ("by", "'inf'", "write .inf")),
        ("by: factor", "by: [1]", ("by", "a list of 1", "number")),
        ("type: double, default: 1.0", "type: double, default: .nan", ("default", "nan")),
        ("type: double, default: 1.0", "type: double, default: .inf", ("default", "finite", "pipeline[3].by")),
        ("type: double, default: 1.0", "type: double, default: inf", ("default", "'inf'", "write .inf")),
        ("type: double, default: 1.0", "type: double, default: yes", ("default", "'yes'", "number")),
        ("kernel_size_all, type: size_t, default: 1", "kernel_size_all, type: size_t, default: 1.0", ("1.0",)),
        ("kernel_size_all, type: size_t, default: 1", "kernel_size_all, type: size_t, default: -1", ("-1",)),
        ("const: false", "const: 'false'", ("const", "'false'", "true")),
        ("const: false", "const: no", ("const", "'no'", "true")),
        ("const: false", "const: 0", ("const", "0", "true")),
        ("kernel_size_all, 1, 1]", "kernel_size_all, 1, 0]", ("shape[4]", "0")),
        ("kernel_size_all, 1, 1]", "kernel_size_all, 1, true]", ("shape[4]", "True")),
        ("kernel_size_all, 1, 1]", "kernel_size_all, 1, width + ]", ("shape[4]", "ends too early")),
        ("kernel_size_all, 1, 1]", "kernel_size_all, 1, factor]", ("shape[4]", "'factor'", "size_t")),
        ("kernel_size_all, 1, 1]", "kernel_size_al, 1, 1]", ("did you mean 'kernel_size_all'",)),
        ("depth: 2", "depth: 2.0", ("cases.sample.depth", "2.0", "write 2")),
        ("depth: 2", "depth: true", ("cases.sample.depth", "True", "integer")),
        ("depth: 2", "depth: '2'", ("cases.sample.depth", "'2'", "integer")),
        ("depth: 2", "depth: -2", ("cases.sample.depth", "-2")),
        ("depth: 2", "depth: 0", ("cases.sample", "depth", "0")),
        ("depth: 2", "depth: 2, factor: .inf", ("cases.sample.factor", "inf", "pipeline[3].by")),
        ("depth: 2", "depth: 2, factor: x", ("cases.sample.factor", "'x'", "number")),
    ],
)
def test_scalars_of_the_wrong_kind(write: Any, old: str, new: str, parts: tuple[str, ...]) -> None:
    text = replaced(old, new)
    path = write(text)
    message = refused(path)
    if "the line reads" in parts:
        return
    line = line_of(VALID, old) + new.count("\n")
    if "cases.sample" not in parts:
        assert message.startswith(f"{path}:{line}: "), message
    for part in parts:
        assert part in message


@pytest.mark.parametrize("spelling", ["1e-5", "1.0e-5", "0.00001", "1E-5", "+1e-05", ".00001", "1.e-5"])
def test_every_spelling_of_a_small_number_is_a_number(write: Any, spelling: str) -> None:
    problem = load_problem(write(replaced("eps: 1e-5", f"eps: {spelling}")))
    assert problem.pipeline[1].fields["eps"] == 1e-5


def test_infinite_bounds_are_numbers_where_they_make_sense(write: Any) -> None:
    text = replaced("{op: clamp, min: low}", "{op: clamp, min: low, max: .inf}")
    text = text.replace("low, type: double, default: 0", "low, type: double, default: -.inf")
    problem = load_problem(write(text))
    assert problem.pipeline[2].fields == {"min": "low", "max": float("inf")}
    assert problem.scalars[1].default == float("-inf")


def test_texts_that_yaml_1_1_takes_for_something_else_are_texts(write: Any) -> None:
    for word in ("yes", "no", "on", "off", "y", "n", "2024-01-01", "=", "Yes, we do"):
        assert load_problem(write(f"title: {word}\n" + VALID)).title == word


def test_a_size_of_a_case_may_be_zero_where_the_operator_allows_it(write: Any) -> None:
    assert load_problem(write(replaced("batch_size: 1,", "batch_size: 0,"))).cases["sample"]["batch_size"] == 0


# ---- structure ---------------------------------------------------------------------------------------------
BOMB = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10)
)


@pytest.mark.parametrize(
    ("text", "line", "parts"),
    [
        ("name: a\nname: b\n", 2, ("name", "duplicate key", "line 1")),
        (replaced("    weight: kernel\n", "    weight: kernel\n    weight: input\n"), 19, ("weight", "duplicate")),
        (replaced("depth: 2,", "depth: 2, depth: 3,"), 24, ("cases.sample.depth", "duplicate")),
        (replaced("    weight: kernel\n", "\tweight: kernel\n"), 18, ("tab", "weight: kernel", "spaces")),
        (replaced("    weight: kernel\n", "    \tweight: kernel\n"), 18, ("tab",)),
        (replaced("weight: kernel", "kernal: 3"), 18, ("unknown key 'kernal'", "weight")),
        (replaced("weight: kernel", "wieght: kernel"), 18, ("unknown key 'wieght'", "did you mean 'weight'")),
        (replaced("name: tiny", "name: tiny\nversion: 2"), 2, ("version", "unknown key")),
        (replaced("cases:", "case:"), 23, ("unknown key 'case'", "did you mean 'cases'")),
        (BOMB, 5, ("a4", "more than", str(MAX_NODES))),
        ("a: &a [1, *a]\n", 1, ("a[1]", "*a", "inside")),
        ("a: &a {b: *a}\n", 1, ("a.b", "*a", "inside")),
        ("&a {b: [*a]}\n", 1, ("*a", "inside")),
        ("a: *b\n", 1, ("*b", "no anchor")),
        ("a: &x 1\nb: &x 2\n", 2, ("&x", "twice")),
        ("a: {<<: {b: 1}}\n", 1, ("merge keys", "<<")),
        ("a: !!python/object/apply:os.system ['touch hacked']\n", 1, ("a", "tag", "python/object/apply")),
        ("!!python/object/new:os.system ['touch hacked']\n", 1, ("tag",)),
        ("a: !!python/name:os.system\n", 1, ("tag",)),
        ("a: !!str 5\n", 1, ("tag",)),
        ("a: ! 5\n", 1, ("tag",)),
        ("a: !local 5\n", 1, ("tag", "!local")),
        ("a: !undefined!x 5\n", 1, ("undefined",)),
        ("!!binary a: 5\n", 1, ("tag",)),
        ("", 1, ("empty", "name")),
        ("\n\n# nothing\n", 1, ("empty",)),
        ("---\n", 2, ("empty",)),
        ("---\n...\n", 2, ("empty",)),
        ("null\n", 1, ("empty",)),
        ("- a\n- b\n", 1, ("top level", "a list of 2")),
        ("hello\n", 1, ("top level", "'hello'")),
        ("7\n", 1, ("top level", "7")),
        ("name: a\n---\nname: b\n", 2, ("second document",)),
        (VALID + "---\n" + VALID, 25, ("second document",)),
        (VALID + "...\n---\n...\n", 26, ("second document",)),
        (replaced("stride: [stride_d, 1, 1]", "stride: [stride_d, 1"), 19, ("stride: [stride_d, 1", "not valid")),
        ("a:\n  b: [1,\n", 2, ("a.b", "b: [1,", "flow node")),
        ("a: {b: 1\n", 1, ("flow mapping",)),
        ("a: 'b\n", 1, ("a: 'b",)),
        ('a: 1\nb: "c\nd: 1\n', 2, ("b: ", "quoted scalar")),
        ("a: b: c\n", 1, ("mapping values",)),
        ("a: 1\n b: 2\n", 2, ("b: 2",)),
        ("a: @b\n", 1, ("a: @b",)),
        ("a: %b\n", 1, ("a: %b",)),
        ("%YAML 3.0\n---\na: 1\n", 1, ("version",)),
        ("%YAML " + "9" * 5000 + ".1\n---\na: 1\n", 1, ()),
        ('a: "\\UFFFFFFFF"\n', 1, ("escape",)),
        ('a: "\\q"\n', 1, ("unknown escape",)),
        ("? [a, b]\n: c\n", 1, ("a key is a list",)),
        ("? {a: b}\n: c\n", 1, ("a key is a list",)),
        ("a: &a b\n*a : c\n", 2, ("alias",)),
        ("3: x\n", 1, ("a key is 3",)),
        ("1.5: x\n", 1, ("a key is 1.5",)),
        ("true: x\n", 1, ("a key is True",)),
        (": x\n", 1, ("not valid",)),
        ("? \n: x\n", 1, ("a key is nothing",)),
        ("a: " + "[" * (MAX_DEPTH + 1) + "\n", 1, ("nested more than",)),
        ("a: " + "[" * 100_000 + "\n", 1, ("nested more than",)),
        ("a: " + "{b: " * 50_000 + "\n", 1, ("nested more than",)),
        ("- " * 100_000 + "\n", 1, ("nested more than",)),
        ("? " * 100_000 + "\n", 1, ("a key is a list",)),
        ("a: [" + "1," * 100_000 + "]\n", 1, ("more than",)),
        ("a: [" + "[]," * 50_000 + "]\n", 1, ("more than",)),
        ("".join(f"k{i}: 1\n" for i in range(20_000)), None, ("more than",)),
        ("a: " + "x" * 200_000 + "\n", 1, ("unknown key 'a'",)),
        ("x" * 200_000 + ": 1\n", 1, ("not valid",)),
        ('"' + "x" * 900 + '": 1\n', 1, ("unknown key",)),
        ('"a\\nb": 1\n', 1, ("unknown key 'a\\nb'",)),
        ("a: \0\n", 1, ("code 0",)),
        ("a: 1\nb: \x07\n", 2, ("code 7",)),
    ],
)
def test_structures_that_are_refused(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, line: int | None, parts: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(text)
    message = refused(path)
    assert message.startswith(f"{path}:" if line is None else f"{path}:{line}: "), message
    for part in parts:
        assert part in message
    assert list(tmp_path.iterdir()) == [path]  # nothing was executed


def test_depth_is_counted_through_aliases(write: Any) -> None:
    nest = "[" * 10
    text = f"a: &a {nest}{']' * 10}\nb: &b {nest}*a{']' * 10}\n"
    assert "nested more than" in refused(write(text))


def test_a_legitimate_anchor_works_once_and_twice(write: Any) -> None:
    text = replaced("sample: {", "sample: &base {")
    once = load_problem(write(text + "  again: *base\n"))
    twice = load_problem(write(text + "  again: *base\n  more: *base\n"))
    assert once.cases["again"] == once.cases["sample"]
    assert list(twice.cases) == ["sample", "again", "more"]


def test_errors_inside_an_alias_name_the_line_of_its_anchor(write: Any) -> None:
    head = VALID[: VALID.index("cases:")]
    text = head + "cases:\n  a: {x: &bad [1]}\n"
    assert "unknown key 'x'" in refused(write(text))


def test_a_byte_order_mark_and_windows_line_ends_are_fine(write: Any) -> None:
    assert load_problem(write(b"\xef\xbb\xbf" + VALID.replace("\n", "\r\n").encode())).name == "tiny"


def test_lines_are_counted_with_windows_line_ends(write: Any) -> None:
    path = write(replaced("weight: kernel", "wieght: kernel").replace("\n", "\r\n"))
    assert refused(path).startswith(f"{path}:18: ")


@pytest.mark.parametrize(
    "data",
    [
        b"name: \xff\n",
        VALID.encode("utf-16"),
        b"\x00" * 100,
        bytes(range(256)),
        b"\x7fELF\x02\x01\x01\x00",
        b"PK\x03\x04",
    ],
)
def test_files_that_are_not_text(write: Any, data: bytes) -> None:
    path = write(data)
    assert refused(path).startswith(f"{path}:")


def test_a_character_beyond_utf_8_names_its_line(write: Any) -> None:
    path = write(b"name: a\ntitle: \xe9\n")
    assert refused(path).startswith(f"{path}:2: byte 15 is not UTF-8")


def test_a_large_file_is_refused_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "large.yaml"
    with path.open("wb") as file:
        file.truncate(50 * 2**20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    message = refused(path)
    assert f"{50 * 2**20} bytes" in message and str(MAX_FILE_BYTES) in message
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20 * 1024  # KiB


def test_the_largest_file_is_read(write: Any) -> None:
    text = VALID + "#"
    assert load_problem(write(text + "x" * (MAX_FILE_BYTES - len(text)))).name == "tiny"
    assert "bytes" in refused(write(text + "x" * (MAX_FILE_BYTES - len(text) + 1)))


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    assert "a directory" in refused(tmp_path)
    assert "no such file" in refused(tmp_path / "none.yaml")
    assert "no such file" in refused("none.yml")
    assert "no such file" in refused("./none")
    assert "not a path" in refused("a\0b.yaml")
    assert "too long" in refused("x" * 5000 + ".yaml").lower()
    assert refused("a\nb.yaml").startswith("'a\\nb.yaml'")
    os.mkfifo(tmp_path / "pipe.yaml")
    assert "not a regular file" in refused(tmp_path / "pipe.yaml")
    assert "not a regular file" in refused("/dev/zero")


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser reads every file")
def test_an_unreadable_file(write: Any) -> None:
    path = write(VALID)
    path.chmod(0)
    assert "ermission" in refused(path)


def test_read_yaml_gives_the_lines_of_keys(write: Any) -> None:
    mapping, locate = read_yaml(write(VALID))
    assert mapping["name"] == "tiny"
    assert locate(("parameters", 1, "shape", 2)) == 4
    assert locate(("pipeline", 0, "stride")) == 19
    assert locate(("pipeline", 0, "none", 3)) == 17
    assert locate(()) == 1


# ---- the contents ------------------------------------------------------------------------------------------
def valid() -> dict[str, Any]:
    """A small valid mapping, to be changed by a test."""
    sizes = ("n", "c", "d", "h", "w")
    return {
        "name": "tiny",
        "parameters": [
            {"name": "x", "type": "tensor", "const": True, "shape": list(sizes)},
            {"name": "bias", "type": "tensor", "const": True, "shape": [1, "c", 1, 1, 1]},
            {"name": "y", "type": "tensor", "const": False},
            *({"name": name, "type": "size_t"} for name in sizes),
            {"name": "factor", "type": "double", "default": 2},
        ],
        "pipeline": [{"op": "scale", "by": "factor"}, {"op": "add", "value": "bias"}, "gelu"],
        "cases": {"sample": {"n": 1, "c": 2, "d": 3, "h": 4, "w": 5}},
    }


def parameter(mapping: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(p for p in mapping["parameters"] if p["name"] == name)
    return found


def test_a_mapping_is_a_problem() -> None:
    mapping = valid()
    kept = copy.deepcopy(mapping)
    problem = load_problem(mapping)
    assert mapping == kept
    assert load_problem(problem) is problem
    assert problem.path is None
    assert [step.op for step in problem.pipeline] == ["scale", "add", "gelu"]
    assert problem.scalars[0].default == 2.0 and isinstance(problem.scalars[0].default, float)


COMPACT = """\
name: compact
note: a line for people
parameters:
  input: [batch, channels, height, width]
  weight, other: [out, channels / groups, kernel, 3]
  output: output
  stride_h, stride_w: size_t = 2
  groups: size_t = 1
  idle: unused double = 0.5
  factor: double
pipeline:
  - {op: conv, weight: weight, stride: [stride_h, stride_w], padding: [0, [1, 2]], groups: groups}
  - {op: conv, weight: other, padding: same, groups: groups}
  - {op: scale, by: factor}
cases:
  "N=1, C=4 K3->3": {batch: 1, channels: 4, height: 9, width: 8, out: 4, kernel: 3, factor: 2}
"""


def test_parameters_may_be_written_compactly(write: Any) -> None:
    problem = load_problem(write(COMPACT))
    assert [p.name for p in problem.parameters] == [
        *("input", "weight", "other", "output", "stride_h", "stride_w", "groups", "idle", "factor"),
        *("batch", "channels", "height", "width", "out", "kernel"),  # as the shapes name them, behind all others
    ]
    assert (problem.rank, problem.note) == (2, "a line for people")
    assert problem.parameter("stride_w").default == 2 and problem.parameter("idle").unused  # type: ignore[union-attr]
    assert problem.tensors[1].shape == problem.tensors[2].shape
    operator = bind_arguments(problem, sort_arguments(problem, {}), case="N=1, C=4 K3->3")
    assert operator.output_shape == (1, 4, 4, 5)


@pytest.mark.parametrize(
    ("old", "new", "line", "parts"),
    [
        ("output: output", "output: outputs", 6, ("parameters.output", "'outputs'", "size_t = 1")),
        ("size_t = 2", "int = 2", 7, ("parameters.stride_h, stride_w", "'int = 2'")),
        ("size_t = 2", "size_t = 2.5", 7, ("default", "2.5", "integer")),
        ("stride_h, stride_w:", "stride_h, stride_h:", 7, ("'stride_h' is declared twice",)),
        ("factor: double", "factor: double\n  width: double", 11, ("width is an extent", "size_t")),
        ("idle: unused double = 0.5", "idle: double = 0.5", 9, ("idle is used by no step", "unused")),
        ("groups: size_t = 1", "groups: unused size_t = 1", 8, ("groups is declared as unused, but it is used",)),
        ("[0, [1, 2]]", "[0, [1, 2, 3]]", 12, ("padding[1]", "a list of 3", "pair")),
        ("[0, [1, 2]]", "[0, 1, 2]", 12, ("padding", "a list of 3", "height, width")),
        ("[stride_h, stride_w]", "[[1, 2], 1]", 12, ("stride[0]", "a list of 2")),
        ("stride: [stride_h, stride_w]", "stride: same", 12, ("stride", "'same'")),
        ("op: conv,", "op: conv3d,", 12, ("conv3d needs 3 spatial axes", "has 2", "write conv")),
        ("op: scale, by", "op: swish, by", 14, ("'swish'", "write silu")),
        ("op: scale, by", "op: Conv2D, by", 14, ("'Conv2D'", "did you mean 'conv2d'")),
        ("op: scale, by", "op: convolution2d, by", 14, ("write conv2d",)),
        ("op: scale, by", "op: hardsigmoid, by", 14, ("write add with value: 3, hardtanh",)),
        ("op: scale, by", "op: conv4d, by", 14, ("did you mean 'conv",)),
    ],
)
def test_compact_files_that_are_refused(write: Any, old: str, new: str, line: int, parts: tuple[str, ...]) -> None:
    assert old in COMPACT
    path = write(COMPACT.replace(old, new, 1))
    message = refused(path)
    assert message.startswith(f"{path}:{line}: "), message
    assert all(part in message for part in parts), message


def test_numpy_numbers_and_tuples_are_fine_in_python() -> None:
    mapping = valid()
    mapping["cases"]["sample"]["n"] = np.int64(3)
    mapping["parameters"] = tuple(mapping["parameters"])
    parameter(mapping, "factor")["default"] = np.float32(0.5)
    problem = load_problem(mapping)
    assert type(problem.cases["sample"]["n"]) is int
    assert problem.scalars[0].default == 0.5


def test_messages_for_mappings_name_the_key_path() -> None:
    mapping = valid()
    mapping["parameters"][2]["type"] = "tenser"
    assert refused(mapping) == (
        "problem mapping: parameters[2].type: got 'tenser'; expected one of tensor, size_t, double; "
        "did you mean 'tensor'?"
    )


def test_messages_for_mappings_may_name_a_file_without_lines() -> None:
    with pytest.raises(ProblemFileError, match=r"^some/p\.yaml: the key 'name' is missing; add it$"):
        problem_from_mapping({}, path=Path("some/p.yaml"))


CHANGES: list[tuple[str, Any, tuple[str, ...]]] = [
    # what is changed (a path of keys, "-" to delete), the new value, what the message must say
    ("name", None, ("name: ", "nothing")),
    ("name", "a b", ("name: ", "'a b'", "letters")),
    ("name", "../x", ("name: ", "'../x'")),
    ("name", "", ("name: ", "''")),
    ("name", "x" * 101, ("name: ", "100")),
    ("name", 5, ("name: ", "5")),
    ("title", "two\nlines", ("title: ", "one line")),
    ("title", "x" * 1000, ("title: ", "500")),
    ("title", "\ud800", ("title: ",)),
    ("title", 5, ("title: ", "5", "text")),
    ("origin", ["x"], ("origin: ", "a list of 1")),
    ("parameters", {}, ("parameters: ", "output tensors", "none")),
    ("parameters", [], ("parameters: ", "a list of 0")),
    ("parameters", "x", ("parameters: ", "'x'")),
    ("parameters.0", "x", ("parameters[0]: ", "'x'", "mapping")),
    ("parameters.0.name", "1x", ("parameters[0].name: ", "'1x'", "identifier")),
    ("parameters.0.name", "lambda", ("parameters[0].name: ", "'lambda'", "keyword")),
    ("parameters.0.name", "é", ("parameters[0].name: ", "identifier")),
    ("parameters.0.name", "x" * 65, ("parameters[0].name: ", "64")),
    ("parameters.0.name", True, ("parameters[0].name: ", "True")),
    ("parameters.0.name", [], ("parameters[0].name: ", "a list of 0")),
    ("parameters.0.name", "bias", ("parameters[1].name: ", "'bias'", "twice")),
    ("parameters.0.name", "output", ("parameters[0].name: ", "'output'", "argument")),
    ("parameters.0.type", [], ("parameters[0].type: ", "a list of 0", "size_t")),
    ("parameters.0.type", "float", ("parameters[0].type: ", "'float'", "double")),
    ("parameters.0.type", "size_t", ("parameters[0].const: ", "no 'const'")),
    ("parameters.0.const", "-", ("parameters[0].const: ", "true")),
    ("parameters.0.const", False, ("parameters[0].shape: ", "output", "follows from the pipeline")),
    ("parameters.0.const", 1, ("parameters[0].const: ", "got 1")),
    ("parameters.0.shape", "-", ("parameters[0]: ", "'shape'", "missing")),
    ("parameters.0.shape", "n", ("parameters[0].shape: ", "'n'", "list")),
    ("parameters.0.shape", [], ("parameters[0].shape: ", "a list of 0")),
    ("parameters.0.shape", ["n"] * 6, ("parameters[0].shape: ", "6 extents", "5")),
    ("parameters.0.shape", ["n", "c"], ("pipeline[0]: ", "2 axes", "1 to 3 spatial axes", "'rank'")),
    ("parameters.0.shape", ["n", "c", "d", "h"], ("parameters[7]: ", "w is used by no step")),
    ("rank", 0, ("rank: ", "1 to")),
    ("rank", 4, ("rank: ", "got 4", "1 to 3")),
    ("rank", 2, ("pipeline[0]: ", "5 axes", "4 at most")),
    ("note", "two\nlines", ("note: ", "one line")),
    ("parameters.0.shape", ["n", "c", "d", "h", "factor"], ("parameters[0].shape[4]: ", "'factor'")),
    ("parameters.0.shape", ["n", "c", "d", "h", "w - 9"], ("cases.sample: ", "w - 9", "-4")),
    ("parameters.0.shape", ["n", "c", "d", "h", "w / 2"], ("cases.sample: ", "w / 2", "5 is not divisible by 2")),
    ("parameters.0.default", 1, ("parameters[0].default: ", "no 'default'")),
    ("parameters.2.const", True, ("parameters[2]: ", "'shape'")),
    ("parameters.3.const", False, ("parameters[3].const: ", "no 'const'")),
    ("parameters.3.shape", ["n"], ("parameters[3].shape: ", "no 'shape'")),
    ("parameters.3.default", "1", ("parameters[3].default: ", "the text '1'", "integer")),
    ("parameters.3.default", True, ("parameters[3].default: ", "True")),
    ("parameters.3.default", 10**5000, ("parameters[3].default: ", "bits")),
    ("parameters.3.default", None, ("parameters[3].default: ", "nothing")),
    ("parameters.3.deflaut", 1, ("parameters[3].deflaut: ", "did you mean 'default'")),
    ("parameters.8.default", 10**5000, ("parameters[8].default: ", "bits")),
    ("parameters.8.default", 1j, ("parameters[8].default: ", "complex")),
    ("parameters.8.name", "unused", ("pipeline[0].by: ", "'factor'")),
    ("pipeline", [], ("pipeline: ", "a list of 0")),
    ("pipeline", "gelu", ("pipeline: ", "'gelu'", "list")),
    ("pipeline.2", "gelo", ("pipeline[2]: ", "'gelo'", "did you mean 'gelu'")),
    ("pipeline.2", 5, ("pipeline[2]: ", "5", "'op'")),
    ("pipeline.2", {}, ("pipeline[2]: ", "'op'")),
    ("pipeline.2", {"gelu": None}, ("pipeline[2]: ", "'op'")),
    ("pipeline.2", {"op": ["gelu"]}, ("pipeline[2].op: ", "a list of 1")),
    ("pipeline.2", {"op": "gelu", 5: 1}, ("pipeline[2]: ", "a key is 5")),
    ("pipeline.2", {"op": "gelu", "approximate": "tanh"}, ("pipeline[2].approximate: ", "unknown key")),
    ("pipeline.2", "add", ("pipeline[2]: ", "'value'", "missing")),
    ("pipeline.2", {"op": "max_pool3d"}, ("pipeline[2]: ", "'window'", "missing")),
    ("pipeline.2", {"op": "max_pool3d", "window": 4}, ("cases.sample: ", "step 3", "window", "depth")),
    ("pipeline.2", {"op": "max_pool3d", "window": "0 * n"}, ("cases.sample: ", "window", "1 or more")),
    ("pipeline.2", {"op": "softmax", "axis": "time"}, ("pipeline[2].axis: ", "time", "spatial")),
    ("pipeline.2", {"op": "softmax", "axis": []}, ("pipeline[2].axis: ", "a list of 0", "axes")),
    ("pipeline.2", {"op": "softmax", "axis": 1}, ("pipeline[2].axis: ", "got 1", "axes")),
    ("pipeline.2", {"op": "softmax", "axis": [["channel"]]}, ("pipeline[2].axis[0]: ", "a list of 1")),
    ("pipeline.2", {"op": "softmax", "axis": "a\nb"}, ("pipeline[2].axis: ",)),
    ("pipeline.2", {"op": "group_norm", "groups": 3}, ("cases.sample: ", "groups", "3", "2 channels")),
    ("pipeline.2", {"op": "layer_norm", "weight": "factor"}, ("pipeline[2].weight: ", "'factor'", "bias")),
    ("pipeline.2", {"op": "layer_norm", "weight": "y"}, ("pipeline[2].weight: ", "'y'")),
    ("pipeline.2", {"op": "layer_norm", "weight": 1.0}, ("pipeline[2].weight: ", "1.0")),
    ("pipeline.2", {"op": "layer_norm", "weight": "x"}, ("cases.sample: ", "one value")),
    ("pipeline.2", {"op": "add", "value": "y"}, ("pipeline[2].value: ", "'y'", "tensor parameter")),
    ("pipeline.2", {"op": "add", "value": "later", "as": "later"}, ("pipeline[2].value: ", "'later'")),
    ("pipeline.2", {"op": "gelu", "from": "bias"}, ("pipeline[2].from: ", "'bias'", "x")),
    ("pipeline.2", {"op": "gelu", "from": "nowhere"}, ("pipeline[2].from: ", "'nowhere'")),
    ("pipeline.2", {"op": "gelu", "from": None}, ("pipeline[2].from: ", "nothing")),
    ("pipeline.2", {"op": "gelu", "from": "x"}, ("pipeline[1]: ", "add", "no later step")),
    ("pipeline.2", {"op": "gelu", "as": "x"}, ("pipeline[2].as: ", "'x'", "a parameter")),
    ("pipeline.2", {"op": "gelu", "as": "a-b"}, ("pipeline[2].as: ", "'a-b'")),
    ("pipeline.2", {"op": "gelu", "as": None}, ("pipeline[2].as: ", "nothing")),
    ("pipeline.0", {"op": "scale", "by": "factor", "from": "y"}, ("pipeline[0].from: ", "'y'")),
    ("pipeline.0", {"op": "scale", "by": "factor", "from": "bias"}, ("parameters[0]: ", "x is used by no step")),
    ("pipeline.0", {"op": "scale", "by": 2}, ("parameters[8]: ", "factor is used by no step")),
    ("pipeline.1", "relu", ("parameters[1]: ", "bias is used by no step")),
    ("cases", [], ("cases: ", "a list of 0", "mapping")),
    ("cases", None, ("cases: ", "nothing")),
    ("cases.sample", [], ("cases.sample: ", "a list of 0")),
    ("cases.sample", None, ("cases.sample: ", "nothing")),
    ("cases.sample", {}, ("cases.sample: ", "n, c, d, h, w", "no default")),
    ("cases.sample.n", "-", ("cases.sample: ", "no value for n")),
    ("cases.sample.x", 1, ("cases.sample.x: ", "unknown key 'x'")),
    ("cases.sample.facter", 1, ("cases.sample.facter: ", "did you mean 'factor'")),
    ("cases.sample.n", None, ("cases.sample.n: ", "nothing")),
    ("cases.sample.n", 10**400, ("cases.sample.n: ", "bits")),
    ("cases.sample.c", 3.0, ("cases.sample.c: ", "3.0", "write 3")),
    ("cases.sample.factor", float("nan"), ("cases.sample.factor: ", "nan")),
    ("cases.a/b", {}, ("cases: ", "'a/b'", "letters")),
    ("cases.a  b", {}, ("cases: ", "'a  b'", "single spaces")),
    ("tolerance", 0, ("tolerance: ", "0.0", "above 0")),
    ("tolerance", -1, ("tolerance: ", "-1.0")),
    ("tolerance", float("inf"), ("tolerance: ", "inf")),
    ("tolerance", float("nan"), ("tolerance: ", "nan")),
    ("tolerance", "1", ("tolerance: ", "the text '1'")),
    ("tolerance", True, ("tolerance: ", "True")),
]


@pytest.mark.parametrize(("where", "value", "parts"), CHANGES, ids=lambda v: v if isinstance(v, str) else "")
def test_contents_that_are_refused(where: str, value: Any, parts: tuple[str, ...]) -> None:
    mapping: Any = valid()
    *parents, last = [int(key) if key.isdigit() else key for key in where.split(".")]
    node = mapping
    for key in parents:
        node = node[key]
    if value == "-":
        del node[last]
    else:
        node[last] = value
    message = refused(mapping)
    assert message.startswith(f"problem mapping: {parts[0]}"), message
    for part in parts[1:]:
        assert part in message


@pytest.mark.parametrize("key", ["name", "parameters", "pipeline"])
def test_required_keys(key: str) -> None:
    mapping = valid()
    del mapping[key]
    assert refused(mapping) == f"problem mapping: the key '{key}' is missing; add it"


@pytest.mark.parametrize("name", sorted({*INTERFACE_NAMES, "kernel", "output"}))
def test_argument_names_of_the_interface_are_reserved(name: str) -> None:
    mapping = valid()
    parameter(mapping, "factor")["name"] = name
    mapping["pipeline"][0]["by"] = name
    assert f"parameters[8].name: {name!r} is an argument of the Python interface" in refused(mapping)


@pytest.mark.parametrize("name", ["input", "kernel", "scale", "gelu", "channel", "op", "name", "from_", "kernel_d"])
def test_names_that_look_special_but_are_free(name: str) -> None:
    mapping = valid()
    parameter(mapping, "bias")["name"] = name
    mapping["pipeline"][1]["value"] = name
    assert load_problem(mapping).tensors[1].name == name


def test_the_output_may_be_called_output() -> None:
    mapping = valid()
    parameter(mapping, "y")["name"] = "output"
    assert load_problem(mapping).output.name == "output"


@pytest.mark.parametrize("count", [0, 2])
def test_there_is_exactly_one_output(count: int) -> None:
    mapping = valid()
    mapping["parameters"].remove(parameter(mapping, "y"))
    mapping["parameters"] += [{"name": f"y{i}", "type": "tensor", "const": False} for i in range(count)]
    got = ("none", "", "y0, y1")[count]
    assert f"parameters: the output tensors (const: false) are {got}; expected exactly one" in refused(mapping)


def test_there_is_an_input() -> None:
    mapping = valid()
    mapping["parameters"] = [p for p in mapping["parameters"] if not p.get("const")]
    assert "no input tensor" in refused(mapping)


def test_an_unused_size_is_refused() -> None:
    mapping = valid()
    mapping["parameters"].append({"name": "stride_d", "type": "size_t", "default": 1})
    assert "parameters[9]: stride_d is used by no step and no shape" in refused(mapping)


def test_results_can_be_named_and_read_again() -> None:
    mapping = valid()
    mapping["pipeline"] = [
        {"op": "scale", "by": "factor", "as": "scaled"},
        {"op": "add", "value": "bias"},
        {"op": "add", "value": "scaled", "as": "total"},
        {"op": "gelu", "from": "scaled"},
        {"op": "scale", "by": "total"},
        {"op": "subtract", "value": "x"},
    ]
    problem = load_problem(mapping)
    assert [step.source for step in problem.pipeline] == [None, None, None, "scaled", None, None]
    assert [step.result for step in problem.pipeline] == ["scaled", None, "total", None, None, None]


def test_result_names_are_unique() -> None:
    mapping = valid()
    mapping["pipeline"] = [
        {"op": "scale", "by": "factor", "as": "a"},
        {"op": "add", "value": "bias", "as": "a"},
        {"op": "add", "value": "a"},
    ]
    assert "pipeline[1].as: 'a' is already the name of an earlier result" in refused(mapping)


def test_the_first_step_may_read_any_input_tensor() -> None:
    mapping = valid()
    mapping["pipeline"] = [{"op": "scale", "by": "factor", "from": "bias"}, {"op": "add", "value": "x"}]
    assert "expected 1 or 1, to broadcast" in refused(mapping)  # bias is smaller than x
    parameter(mapping, "bias")["shape"] = ["n", "c", "d", "h", "w"]
    assert load_problem(mapping).pipeline[0].source == "bias"


def test_axes_may_be_a_list() -> None:
    mapping = valid()
    mapping["pipeline"].append({"op": "sum", "axis": ["depth", "width"]})
    mapping["pipeline"].append({"op": "max", "axis": "spatial"})
    steps = load_problem(mapping).pipeline
    assert (steps[3].fields["axis"], steps[4].fields["axis"]) == ((2, 4), (2, 3, 4))


def test_the_range_of_a_scalar_follows_from_its_uses() -> None:
    mapping = valid()
    mapping["parameters"].append({"name": "eps", "type": "double", "default": -1})
    mapping["pipeline"][2] = {"op": "layer_norm", "eps": "eps"}
    assert "parameters[9].default: got -1.0; expected 0 or more, because pipeline[2].eps uses eps" in refused(mapping)
    mapping["parameters"][9]["default"] = 0
    mapping["cases"]["sample"]["eps"] = -0.5
    assert "cases.sample.eps: got -0.5; expected 0 or more" in refused(mapping)


def test_cases_and_fields_cannot_be_changed() -> None:
    problem = load_problem(valid())
    with pytest.raises(TypeError):
        problem.cases["sample"]["n"] = 3  # type: ignore[index]
    with pytest.raises(TypeError):
        problem.pipeline[0].fields["by"] = 3  # type: ignore[index]


def test_a_mapping_that_contains_itself() -> None:
    mapping = valid()
    mapping["pipeline"].append(mapping)
    mapping["title"] = mapping
    assert "title: got a mapping" in refused(mapping)
    del mapping["title"]
    assert "pipeline[3]" in refused(mapping)


# ---- finding problems --------------------------------------------------------------------------------------
def test_names_are_found() -> None:
    names = problem_names()
    assert list(names) == sorted(names) and len(names) >= 5
    for name in names:
        assert load_problem(name).name == name
        assert load_problem(name) is load_problem(name)


def test_unknown_names_are_answered_with_the_nearest(tmp_path: Path, monkeypatch: Any) -> None:
    message = refused("conv-transpose3d-max-max-sun", InputError)
    assert "did you mean 'conv-transpose3d-max-max-sum'?" in message
    assert f"one of the {len(problem_names())} that `dispatcher problems` lists" in message
    assert refused("", InputError) and refused("x" * 10_000, InputError)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain").write_text(VALID)
    assert load_problem("plain").name == "tiny"


def test_the_package_has_precedence_over_the_folder(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    name = problem_names()[0]
    (tmp_path / name).write_text(VALID)
    (tmp_path / "problems").mkdir()
    assert load_problem(name).name == name
    assert load_problem(f"./{name}").name == "tiny"


@pytest.mark.parametrize("value", [None, 5, b"x", ["a"], object()])
def test_other_things_are_no_problems(value: Any) -> None:
    assert "expected a name" in refused(value, InputError)


# ---- garbage -----------------------------------------------------------------------------------------------
WORDS = st.one_of(
    st.sampled_from(["name", "title", "parameters", "pipeline", "cases", "tolerance", "type", "const", "shape"]),
    st.sampled_from(["default", "op", "from", "as", "by", "value", "axis", "window", "eps", "tensor", "size_t"]),
    st.sampled_from(["double", "output", "n", "c", "d", "h", "w", "gelu", "add", "scale", "softmax", "channel"]),
)
SCALARS = st.one_of(
    WORDS, st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.binary(max_size=3)
)
GARBAGE = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.one_of(WORDS, st.integers(), st.text(max_size=3)), inner, max_size=5),
    ),
    max_leaves=12,
)


def only_refuses(problem: Any) -> None:
    try:
        load_problem(problem)
    except DispatcherError as error:
        message = re.sub(r"\ud800", "", str(error))
        assert len(message.splitlines()) == 1


@given(st.dictionaries(st.one_of(WORDS, SCALARS), GARBAGE, max_size=6))
def test_garbage_mappings_only_raise_our_errors(mapping: Any) -> None:
    only_refuses(mapping)


@settings(max_examples=300)
@given(st.data())
def test_valid_mappings_with_one_part_changed_only_raise_our_errors(data: st.DataObject) -> None:
    mapping: Any = valid()
    node: Any = mapping
    for _ in range(data.draw(st.integers(1, 4))):
        key = data.draw(st.sampled_from(list(node) if isinstance(node, dict) else range(len(node))))
        if not isinstance(node[key], dict | list) or not node[key]:
            break
        parent, node = node, node[key]
    else:
        node = parent
    key = data.draw(st.sampled_from(list(node) if isinstance(node, dict) else range(len(node))))
    node[key] = data.draw(GARBAGE)
    only_refuses(mapping)


FIELD_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "each": st.one_of(st.integers(0, 3), st.sampled_from(["w", "c - 2", "floor(w / 2)", ["n", "c", 1], [1, 2, 3]])),
    "padding": st.sampled_from([0, 1, "c", "same", [1, [0, 2], 0], [["n", 1], 2, 3]]),
    "flag": st.booleans(),
    "size": st.sampled_from([0, 1, 2, 3, "c", "c - 2"]),
    "operand": st.sampled_from(["factor", "bias", "x", "first", 0, -1.5]),
    "tensor": st.sampled_from(["bias", "x", "weight", "small"]),
    "scalar": st.sampled_from(["factor", 0, 1e-5, -1, float("inf")]),
    "axes": st.sampled_from(["batch", "channel", "spatial", "width", ["batch", "depth"], "c"]),
}


@st.composite
def steps(draw: st.DrawFn) -> dict[str, Any]:
    op = draw(st.sampled_from(sorted(VOCABULARY)))
    step: dict[str, Any] = {"op": op}
    for field in VOCABULARY[op].fields:
        if field.required or draw(st.booleans()):
            step[field.name] = draw(FIELD_VALUES[field.kind])
    if draw(st.integers(0, 3)) == 0:
        step["from"] = draw(st.sampled_from(["first", "x"]))
    return step


@settings(max_examples=300)
@given(st.lists(steps(), min_size=1, max_size=4), st.integers(0, 2))
def test_pipelines_of_any_steps_are_legal_or_refused(pipeline: list[dict[str, Any]], batch: int) -> None:
    mapping = valid()
    mapping["parameters"] += [
        {"name": "weight", "type": "tensor", "const": True, "shape": ["c", "w - 3", 1, 2, "n + 1"]},
        {"name": "small", "type": "tensor", "const": True, "shape": ["w - c"]},
    ]
    mapping["cases"]["sample"]["n"] = batch
    use_all = [{"op": "add", "value": name} for name in ("bias", "weight", "small", "factor")]
    mapping["pipeline"] = [{"op": "relu", "as": "first"}, *pipeline, *use_all, {"op": "add", "value": "first"}]
    only_refuses(mapping)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(alphabet="ab: -\n[]{}&*!|>'\"#%@,?\t\\0e.<~", max_size=60))
def test_garbage_files_only_raise_our_errors(write: Any, text: str) -> None:
    only_refuses(write(text))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(0, len(VALID) - 1),
    st.text(alphabet=":-[]{}&*!|>'\"#%@,?\t\\0.\n é\u2028", max_size=3),
    st.integers(0, 3),
)
def test_damaged_files_only_raise_our_errors(write: Any, position: int, inserted: str, removed: int) -> None:
    only_refuses(write(VALID[:position] + inserted + VALID[position + removed :]))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=60))
def test_random_bytes_only_raise_our_errors(write: Any, data: bytes) -> None:
    only_refuses(write(data))


def test_what_cannot_be_printed_is_escaped() -> None:
    error = ProblemFileError("a name with \u2028 and \n in it")
    assert str(error) == "a name with \\u2028 and \\n in it"
