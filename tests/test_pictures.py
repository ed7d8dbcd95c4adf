"""Pictures, and how results look in a console and in a notebook."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import CONV, MAXMAX, SOFTMAX, FakeBackend, correct

import dispatcher
from dispatcher import cli
from dispatcher.check.comparison import compare
from dispatcher.device.diagnosis import Diagnosis
from dispatcher.errors import InputError
from dispatcher.interface import PlannedLaunch
from dispatcher.report.flow import handed_over, stages
from dispatcher.timing.tuning import Candidate, TuneResult

RESIDUAL = "conv-transpose3d-sum-residualadd-multiply-residualadd"


# ---- where the errors are ----------------------------------------------------------------------------------
def test_a_comparison_knows_the_largest_errors_along_each_axis() -> None:
    reference = np.zeros((2, 3, 4))
    result = reference.astype(np.float32)
    result[1, 2, 0], result[0, 1, 3] = 5.0, np.nan
    profiles = compare(result, reference, 2.0).profiles
    for profile, expected in zip(profiles, ([np.nan, 2.5], [0, np.nan, 2.5], [2.5, 0, 0, np.nan]), strict=True):
        np.testing.assert_array_equal(profile, expected)


def test_of_parts_of_the_batch_the_errors_stand_where_they_are(install_backends: Any) -> None:
    def wrong_once(operator: Any, tensors: Any) -> np.ndarray:
        result = correct(operator, tensors)
        result[-1, 0, 0, 0, 2] += 100.0
        return result

    install_backends(FakeBackend("wrong", wrong_once))
    (found,) = dispatcher.verify(CONV, device="wrong", inputs="signed", batch_size=3)
    assert found.comparison is not None
    wrong = [np.flatnonzero(profile > 1).tolist() for profile in found.comparison.profiles]
    assert [len(profile) for profile in found.comparison.profiles] == list(found.operator.output_shape)
    # The batch in reverse order has it at the other end; the worst of the runs counts.
    assert wrong[0] in ([0], [2]) and wrong[1:] == [[0], [0], [0], [2]]
    assert "profiles" not in str(found.as_dict())


# ---- what runs together ------------------------------------------------------------------------------------
def launch(*steps: str) -> PlannedLaunch:
    return PlannedLaunch("kernel", steps, "algorithm")


@pytest.mark.parametrize(
    "launches, expected",
    [
        ([4], [(0, 3, 1)]),
        ([1, 2, 1], [(0, 0, 1), (1, 2, 1), (3, 3, 1)]),
        ([2, 2], [(0, 1, 1), (2, 3, 1)]),
        ([(0, 4), (0, 4)], [(0, 3, 2)]),  # two passes
        ([1, 3, (0, 1), (1, 4)], [(0, 0, 1), (1, 3, 1), (0, 0, 1), (1, 3, 1)]),  # two parts of the batch
        ([(0, 1), (3, 4)], [(0, 0, 1), (None, 0, 1)]),  # whose steps cannot be told
        ([(0, 0), (0, 4)], [(None, -1, 1), (0, 3, 1)]),  # the first prepares something
    ],
)
def test_launches_are_put_beside_their_steps(launches: Sequence[Any], expected: Sequence[Any]) -> None:
    operator = dispatcher.explain(MAXMAX, device="numpy", case="sample").operator
    names = [step.op for step in operator.steps]
    at, found = 0, []
    for each in launches:
        first, last = each if isinstance(each, tuple) else (at, at + each)
        found.append(launch(*names[first:last]))
        at = last
    assert [(stage.first, stage.last, len(stage.launches)) for stage in stages(operator, found)] == expected


def test_bytes_between_launches_are_of_all_values_that_are_read_later() -> None:
    operator = dispatcher.explain(RESIDUAL, device="numpy", case="sample").operator
    size = 4 * int(np.prod(operator.steps[0].shape))
    assert [each[0] for each in handed_over(operator, 1)] == ["conv_transpose3d", "add"]
    assert [each[2] for each in handed_over(operator, 1)] == [size, size]
    assert handed_over(operator, len(operator.steps) - 1) == []
    half = dispatcher.explain(RESIDUAL, device="numpy", case="sample", dtype="float16").operator
    assert handed_over(half, 1) == handed_over(operator, 1)  # computed, and passed on, in float32
    flat = dispatcher.explain("conv2d-mish-mish", device="numpy", case="sample").operator
    assert handed_over(flat, 0) == [("conv2d", (1, 3, 3, 3), 4 * 27)]


# ---- pictures ----------------------------------------------------------------------------------------------
def searched() -> TuneResult:
    slow = Candidate({"tuned": "ignore"}, 2e-3, "", (1.9e-3, 2.1e-3))
    fast = Candidate({"box": "2x8"}, 1e-3, "", (1e-3, 1.1e-3))
    wrong = Candidate({"box": "1x1"}, None, "wrong")
    return TuneResult("opencl:0", CONV, (slow, fast, wrong), fast.options, 2.0, "host")


def test_every_kind_of_result_has_a_picture_in_every_format(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (verified,) = dispatcher.verify(CONV, device="numpy", inputs="signed")
    measured = dispatcher.benchmark(CONV, device="numpy", repeats=1, check=False, force=True)
    explanation = dispatcher.explain(SOFTMAX, device="numpy", case="sample")
    pictures = {
        "explain.svg": (explanation, [SOFTMAX, "avg_pool3d", "1  reference"]),
        "verify.png": (verified, []),
        "tune.svg": (searched(), [CONV, "box=2x8", "2.00 times"]),
        "tune.pdf": (searched(), []),
        "bench.svg": (measured, ["asym-input-sq-kernel", "numpy"]),
    }
    heads = {".svg": b"<?xml", ".png": b"\x89PNG", ".pdf": b"%PDF"}
    for name, (result, texts) in pictures.items():
        path = tmp_path / name
        result.plot(path)
        content = path.read_bytes()
        assert content.startswith(heads[path.suffix])
        for text in texts:
            assert text in content.decode(), (name, text)
        if name.startswith("tune"):
            result.plot(str(path))
            assert path.read_bytes() == content, f"{name} differs from one time to the next"


def test_the_command_line_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["explain", MAXMAX, "--device", "numpy", "--plot", "explain.svg", "--json"]) == 0
    assert cli.main(["verify", CONV, "--device", "numpy", "--inputs", "signed", "--plot", "verify.SVG"]) == 0
    assert "max_pool3d" in Path("explain.svg").read_text()
    assert "passed (the worst inputs: signed" in Path("verify.SVG").read_text()


def test_a_device_that_failed_is_in_the_picture(install_backends: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    install_backends(FakeBackend("bad", unsupported="too <large> for $it$"))
    (found,) = dispatcher.verify(CONV, device="bad", inputs="signed")
    for path in (None, 3, "bad.gif", tmp_path / "bad"):
        with pytest.raises(InputError, match=r"^the picture's file is .*; expected a name that ends in \.svg"):
            found.plot(path)  # type: ignore[arg-type]
    found.plot(tmp_path / "bad.svg")
    assert "too &lt;large&gt; for $it$" in (tmp_path / "bad.svg").read_text()


@pytest.mark.parametrize("command", [["explain", MAXMAX], ["verify", MAXMAX], ["tune", MAXMAX], ["bench", MAXMAX]])
def test_what_cannot_be_drawn_is_said_first(
    install_backends: Any, command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeBackend()
    install_backends(fake)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for file, reason in (("x.gif", ".svg, .png, .pdf"), ("x.svg", "pip install 'kernel-dispatcher[plot]'")):
        assert cli.main([*command, "--plot", file]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1) and reason in err
    assert fake.probes == 0


# ---- consoles and notebooks --------------------------------------------------------------------------------
class Cells(HTMLParser):
    """The texts of a page, and its tags."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.tags: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def shown() -> dict[str, Any]:
    problem = dispatcher.load_problem(
        {
            "name": "evil",
            "title": "<script>alert(1)</script> & 'more'",
            "parameters": {"x": ["n", "c", "w"], "output": "output"},
            "pipeline": ["relu"],
            "cases": {"sample": {"n": 1, "c": 2, "w": 3}},
        }
    )
    explanation = dispatcher.explain(problem, case="sample", device="numpy")
    return {
        "problem": problem,
        "device": explanation.device,
        "operator": explanation.operator,
        "explanation": explanation,
        "compiled": dispatcher.compile(problem, case="sample", device="numpy"),
        "verification": dispatcher.verify(problem, device="numpy", inputs="signed")[0],
        "benchmark": dispatcher.benchmark(problem, device="numpy", repeats=1, check=False, force=True),
        "tuned": searched(),
        "device that is not there": dispatcher.Device("bad", 0, "<b>", "gpu", False, "<img src=x>"),
    }  # fmt: skip


def test_results_are_short_in_a_console_and_tables_in_a_notebook() -> None:
    for name, each in shown().items():
        assert len(repr(each)) < 150 and "\n" not in repr(each), name
        assert re.fullmatch(rf"<{type(each).__name__} .+>", repr(each)), name
        cells = Cells(each._repr_html_())
        assert cells.tags <= {"table", "caption", "tr", "th", "td", "br"}, name
        assert repr(each)[1:-1] in cells.texts, name


def test_one_of_a_kind_is_not_many() -> None:
    parameters = {"x": ["n", "c", "w"], "y": "output"}
    problem = dispatcher.load_problem({"name": "p", "parameters": parameters, "pipeline": ["relu"]})
    assert repr(problem) == "<Problem p: 5 parameters, 1 step>"
    assert repr(dispatcher.explain(problem, device="numpy", n=1, c=1, w=1)) == "<Explanation p on numpy: 1 launch>"
    devices = tuple(dispatcher.Device("bad", index, "", "gpu") for index in range(2))
    assert repr(Diagnosis((), devices, devices)) == "<Diagnosis bad:0, bad:1 work, of 2 devices>"
    assert repr(Diagnosis((), devices[:1], devices[:1])) == "<Diagnosis bad:0 works, of 1 device>"


def test_what_files_and_drivers_say_is_text_in_a_notebook() -> None:
    found = shown()
    assert "<script>alert(1)</script> & 'more'" in Cells(found["problem"]._repr_html_()).texts
    assert repr(found["device that is not there"]) == "<Device bad:0, not usable: <img src=x>>"
