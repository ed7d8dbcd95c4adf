"""The convolution of few channels a group, which reads its input where it lies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dispatcher.check.comparison import Comparison
from dispatcher.problem.operator import Operator
from tests.strategies import DEVICES, Place, call_on, checked_run, operator_of, tensors_of

pytest.importorskip("pyopencl")

from dispatcher.backends.opencl import render
from dispatcher.backends.opencl.implementations import InPlace, choose, tasks_of
from dispatcher.backends.opencl.options import Options
from dispatcher.backends.opencl.target import Facts, Limits, Target

HERE = [place for place in DEVICES if place.backend == "opencl"]
TARGET = Target(
    Facts(True, 2, 16, 8, 900_000, 1 << 34, 1 << 32, True, True),
    Limits(1, 1, 1, 1),
    "a device that nothing was tuned on",
)


def conv(shape: tuple[int, ...], out: int, kernel: tuple[int, ...], *after: Any, **given: Any) -> Operator:
    """An ordinary convolution, or with ``output_padding`` a transposed one, before other steps that read ``t``."""
    groups, transposed = given.get("groups", 1), "output_padding" in given
    channels = (shape[1], out // groups) if transposed else (out, shape[1] // groups)
    tensors = {"x": shape, "w": (*channels, *kernel)} | {name: given.pop(name) for name in ("t",) if name in given}
    step = {"op": "conv_transpose3d" if transposed else "conv3d", "weight": "w", **given}
    return operator_of(tensors, [step, *after])


LOWER = InPlace.lower
ADD = {"op": "add", "value": "t"}
OPERATORS = {
    # Shifted vectors; both ends of a row summed up alone; a multiplier; planes and rows outside.
    "padded": conv((2, 3, 2, 9, 70), 6, (3, 3, 5), groups=3, padding=[1, 1, 2]),
    # Taps as far apart as a vector is long, and no further; more padding than the first window needs.
    "dilated": conv((1, 2, 1, 5, 90), 2, (1, 2, 4), groups=2, padding=[0, 2, 20], dilation=[1, 3, 5]),
    "far_apart": conv((1, 2, 1, 4, 120), 2, (1, 1, 3), groups=2, dilation=[1, 1, 9]),
    # So far that lines would be empty for the most part.
    "distant": conv((1, 1, 1, 1, 4300), 1, (1, 1, 3), padding=[0, 0, 5], dilation=[1, 1, 2100]),
    # Every second and every third input, to the last one of a row.
    "halved": conv((2, 4, 3, 9, 77), 4, (1, 3, 3), groups=4, padding=1, stride=[1, 2, 2]),
    "thirds": conv((2, 4, 2, 9, 97), 4, (1, 3, 2), groups=4, stride=[1, 2, 3], dilation=[1, 2, 4]),
    # Rows of several planes as one; outputs for more than one register tile, the last one ragged.
    "merged": conv((2, 3, 5, 9, 7), 10, (3, 3, 1), "relu"),
    "pointwise": conv((2, 30, 5, 9, 7), 3, (1, 1, 1), "relu"),
    # An operand that is read where results are stored keeps rows apart.
    "at_store": conv((2, 30, 2, 3, 21), 3, (1, 1, 1), ADD, t=(2, 3, 2, 1, 21)),
    # Of a transposed convolution, whose padding cuts off results.
    "transposed": conv((2, 4, 3, 4, 37), 8, (1, 3, 3), groups=4, padding=[0, 2, 4], output_padding=0),
    # Several small planes to an item.
    "pairs": conv((1, 160, 1, 3, 20), 160, (1, 2, 2), "relu", groups=160),
    # One row in several parts.
    "one_row": conv((1, 2, 1, 1, 9001), 20, (1, 1, 9), padding=[0, 0, 4]),
}


#: Faults of the kernel that stay inside its arrays, and an operator whose result each one changes.
FAULTS = {
    "the last vector of a row ends too early": ("TILE(1, high - VEC)", "TILE(1, high - VEC - 1)", "padded"),
    "weights of the first register tile of channels": ("c / THREAD_C)", "0)", "merged"),
    "taps outside at the end of a row": ("(uint)at_w >= IW", "(uint)at_w >= IW - 1", "padded"),
    "weights by input channel, then tap": ("tw * GROUP_IC + i", "i * KW + tw", "one_row"),
    "groups behind the first one of an item": ("min(first_g + BOX_G, GROUPS)", "first_g + 1", "pairs"),
    "rows apart whatever the step": ("h * STEP_H", "h", "halved"),
}


def in_place(name: str, place: Place, monkeypatch: pytest.MonkeyPatch) -> Comparison:
    """What comes of an operator where estimates are in favour of the kernel."""
    place.need()
    monkeypatch.setattr(InPlace, "estimate", lambda self, task: 0.0)
    operator = OPERATORS[name]
    tensors = tensors_of(operator, "integers")
    call = call_on(operator, tensors, place.device, {"tuned": "ignore"})
    result, comparison = checked_run(call, tensors)
    if comparison.passed:
        np.testing.assert_array_equal(result, Place("numpy").run(operator.problem, **tensors))
    return comparison


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("place", HERE, ids=str)
def test_sums_of_integers_are_exact(place: Place, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    monkeypatch.setattr(InPlace, "lower", lambda self, task: ran.append(LOWER(self, task)) or ran[-1])
    assert in_place(name, place, monkeypatch).passed
    assert ran


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_shows(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong, name = FAULTS[fault]
    source, seen = render.kernel_source, []

    def faulty(file: str) -> str:
        text = source(file)
        if not file.startswith("conv_in_place"):
            return text
        seen.append(right in text)
        return text.replace(right, wrong)

    monkeypatch.setattr(render, "kernel_source", faulty)
    assert not in_place(name, HERE[0], monkeypatch).passed
    assert any(seen)


@pytest.mark.parametrize(
    ("shape", "out", "kernel", "given", "expected"),
    [
        ((1, 64, 1, 112, 112), 64, (1, 3, 3), {"groups": 64, "padding": [0, 1, 1]}, True),
        ((1, 64, 1, 112, 112), 128, (1, 3, 3), {"groups": 64, "stride": [1, 2, 2]}, True),
        ((1, 3, 1, 128, 128), 16, (1, 3, 3), {}, True),
        ((1, 64, 1, 128, 128), 2, (1, 1, 1), {}, True),
        ((1, 1, 1, 1, 20000), 1, (1, 1, 5001), {"padding": "same"}, True),
        # What many channels read again is packed; the longer sums are, the less a line counts; ends of short rows.
        ((1, 64, 1, 128, 128), 128, (1, 1, 1), {}, False),
        ((1, 16, 1, 128, 128), 4, (1, 3, 3), {"padding": [0, 1, 1]}, False),
        ((1, 64, 1, 14, 14), 64, (1, 3, 3), {"groups": 64, "padding": [0, 1, 1]}, False),
        # Statistics and steps over channels need lines.
        ((1, 64, 1, 112, 112), 64, (1, 3, 3), {"groups": 64, "after": "layer_norm"}, False),
    ],
)
def test_the_estimate_chooses(
    shape: tuple[int, ...], out: int, kernel: tuple[int, ...], given: dict[str, Any], expected: bool
) -> None:
    after = [given.pop("after")] if "after" in given else []
    task = tasks_of(conv(shape, out, kernel, *after, **given), TARGET, Options(tuned="ignore"), [])[0]
    assert (choose(task)[0].name == "in-place") == expected


@pytest.mark.parametrize(("kernel", "expected"), [((1, 3, 3), "5x2"), ((1, 1, 1), "6x2")])
def test_shuffled_inputs_fit_the_registers_of_avx2(kernel: tuple[int, ...], expected: str) -> None:
    target = replace(TARGET, facts=replace(TARGET.facts, vec=8, vec_double=4))
    task = tasks_of(conv((1, 3, 1, 64, 240), 60, kernel), target, Options(tuned="ignore"), [])[0]
    lowered = InPlace().lower(task)
    assert lowered is not None and lowered.planned.detail["channels_x_vectors"] == expected


def test_other_options_leave_the_kernel_out() -> None:
    task = tasks_of(OPERATORS["pairs"], TARGET, Options("direct", line="rows"), [])[0]
    assert dict(choose(task)[1])["in-place"] == "options of another kernel are given"
