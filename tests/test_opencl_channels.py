"""The direct convolution with output channels in the vector lanes, and the rows outside that all forms skip."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dispatcher.problem.operator import Operator
from tests.strategies import DEVICES, Place, call_on, checked_run, operator_of, tensors_of

pytest.importorskip("pyopencl")

from dispatcher.backends.opencl import lines
from dispatcher.backends.opencl.channels import ChannelLayout, ranked_channel_tiles, suits
from dispatcher.backends.opencl.classes import device_class
from dispatcher.backends.opencl.implementations import tasks_of
from dispatcher.backends.opencl.lines import choose
from dispatcher.backends.opencl.options import Options
from dispatcher.backends.opencl.target import Facts, Limits, Target
from dispatcher.backends.opencl.tiles import Fold, Resources, Wanted
from dispatcher.errors import InputError
from dispatcher.ops.geometry import AxisGeometry, ConvGeometry

HERE = [place for place in DEVICES if place.backend == "opencl"]


def conv(
    shape: tuple[int, ...], out: int, kernel: tuple[int, ...], *after: Any, before: Any = (), **given: Any
) -> Operator:
    """An ordinary convolution, or with ``stride`` a transposed one, between other steps."""
    groups, transposed = given.get("groups", 1), "output_padding" in given
    added = {"r": given.pop("added")} if "added" in given else {}
    after = (*({"op": "add", "value": name} for name in added), *after)
    channels = (shape[1], out // groups) if transposed else (out, shape[1] // groups)
    step = {"op": "conv_transpose3d" if transposed else "conv3d", "weight": "w", **given}
    return operator_of({"x": shape, "w": (*channels, *kernel), **added}, [*before, step, *after])


OPERATORS = {
    # Rows of one tile that both ends of the row cut; planes and rows of taps that lie outside the tensor.
    "short_rows": conv((2, 5, 3, 4, 7), 20, (3, 5, 7), padding=[2, 4, 3]),
    # Three kinds of tiles in a row, the last one of one position; a ragged last vector of channels.
    "three_tiles": conv((1, 3, 1, 5, 57), 33, (1, 3, 5), padding=[0, 1, 2]),
    # Steps above 1 with taps outside on either side; steps on whole lines behind.
    "strided": conv(
        (2, 4, 1, 23, 61), 16, (1, 5, 4), "layer_norm", stride=[1, 2, 4], padding=[0, 3, 3], dilation=[1, 2, 1]
    ),
    # Phases, holes, groups whose channels fill no vector, output padding.
    "transposed": conv(
        (1, 6, 2, 5, 19), 18, (2, 3, 4), "gelu", stride=[1, 2, 3], output_padding=[0, 1, 2], padding=1, groups=2
    ),
    # A dilation that leaves no tap inside for some rows, steps before, a pool that folds.
    "folded": conv(
        (1, 3, 2, 9, 11),
        24,
        (1, 2, 3),
        {"op": "max_pool3d", "window": 2},
        before=["relu"],
        dilation=[1, 7, 2],
        padding=[0, 4, 2],
    ),
    # Boxes of a part of a row, whose ends lie outside the tensor; every third input.
    "one_row": conv((1, 2, 1, 1, 1700), 16, (1, 1, 3), stride=[1, 1, 3], dilation=[1, 1, 4], padding=[0, 0, 5]),
    # Every other input of rows that end anywhere in a vector.
    "every_other": conv((1, 2, 1, 4, 75), 9, (1, 1, 4), stride=[1, 1, 2], padding=[0, 0, 1]),
    "every_other_even": conv((1, 2, 1, 4, 78), 9, (1, 1, 3), stride=[1, 1, 2]),
}
#: Forms of lines to run where it is not that with channels in the lanes alone.
FORMS = {
    "short_rows": ("channels", "flat", "rows"),
    "one_row": ("channels", "rows"),
    "every_other": ("rows",),
    "every_other_even": ("rows",),
}
#: Where compiling takes long, two operators.
RUNS = [(place, name) for place in HERE for name in (("short_rows", "strided") if place.slow else OPERATORS)]


@pytest.mark.parametrize(("place", "name"), RUNS, ids=str)
def test_sums_of_integers_are_exact(place: Place, name: str) -> None:
    """Bit for bit where no step rounds."""
    place.need()
    operator, numbers = OPERATORS[name], np.random.default_rng(5)
    tensors = {key: numbers.integers(-4, 5, shape).astype(np.float32) for key, shape in operator.tensor_shapes.items()}
    expected = Place("numpy").run(operator.problem, **tensors)
    for form in FORMS.get(name, ("channels",))[: 1 if place.slow else None]:
        result = call_on(operator, tensors, place.device, {"algorithm": "direct", "line": form})()
        if name in ("strided", "transposed"):
            np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)
        else:
            assert np.array_equal(result, expected), form


#: Each with a line form. Boxes outside the tensor, ragged register tiles of two groups, planes of a box, a whole tensor
#: that is added; rows that leave statistics; rows in parts.
EARLY = {
    "rows": conv((2, 4, 3, 7, 37), 10, (3, 3, 3), "relu", padding=1, groups=2, added=(2, 10, 3, 7, 37)),
    "flat": conv((1, 3, 3, 9, 21), 6, (1, 3, 4), "instance_norm", padding=[0, 1, 0], stride=[1, 2, 1]),
    "parts": conv((1, 3, 1, 1, 1700), 5, (1, 1, 3), stride=[1, 1, 3], padding=[0, 0, 5]),
}


@pytest.mark.parametrize("place", HERE, ids=str)
def test_rows_that_are_stored_as_soon_as_they_are_complete(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of results that outgrow the caches are: into an array whose rows are all looked at."""
    place.need()
    monkeypatch.setattr(Resources, "hold", lambda *_: False)
    lines.best.cache_clear()
    early: list[bool] = []
    stores_early = lines.stores_early
    monkeypatch.setattr(lines, "stores_early", lambda *given: early.append(stores_early(*given)) or early[-1])
    try:
        for form, operator in EARLY.items():
            tensors = tensors_of(operator)
            options = {"algorithm": "direct", "line": form.replace("parts", "rows"), "fusion": "eager"}
            options |= {"tile": "4x2"} if form == "parts" else {"tile": "4x2", "box": "2x3"}
            call = call_on(operator, tensors, place.device, options)
            _, comparison = checked_run(call, tensors)
            assert comparison.passed, (form, comparison)
            assert (form == "parts") == ("1x1x" in str(call.choice.executable.launches[0].detail["box"]))
        assert early == [True, True, True]
    finally:
        lines.best.cache_clear()


#: Convolutions of taps along depth alone, or of none, with what is added behind them, and the extent of the row that
#: their last axes become.
MERGED = {
    "planes": (conv((2, 9, 5, 3, 7), 18, (3, 1, 1), "relu", stride=[2, 1, 1], padding=[1, 0, 0]), 21),
    "added": (conv((2, 9, 4, 5, 7), 17, (3, 1, 1), "relu", padding=[1, 0, 0], added=(2, 17, 4, 5, 7)), 35),
    "added to planes": (conv((1, 9, 4, 5, 7), 17, (3, 1, 1), padding=[1, 0, 0], added=(17, 4, 1, 1)), 35),
    "volume": (conv((2, 9, 3, 4, 5), 17, (1, 1, 1), added=(2, 17, 3, 4, 5)), 60),
    "planes differ": (conv((2, 9, 3, 4, 5), 17, (1, 1, 1), added=(17, 3, 1, 1)), 5),
    "columns differ": (conv((2, 9, 4, 5, 7), 17, (3, 1, 1), padding=[1, 0, 0], added=(1, 7)), 7),
}


@pytest.mark.parametrize("place", HERE, ids=str)
def test_rows_are_one_where_nothing_tells_them_apart(place: Place) -> None:
    place.need()
    facts = Facts(True, 2, 16, 8, 900_000, 1 << 34, 1 << 32, True, True)
    target = Target(facts, Limits(1, 1, 1, 1), "a device that nothing was tuned on")
    options = Options("direct", tuned="ignore")
    for name, (operator, row) in MERGED.items():
        assert tasks_of(operator, target, options, [])[0].geometry.width.output == row, name
        tensors = tensors_of(operator, "integers")
        result = call_on(operator, tensors, place.device, {"algorithm": "direct", "tuned": "ignore"})()
        np.testing.assert_array_equal(result, Place("numpy").run(operator.problem, **tensors), name)


def geometry(channels: int, extent: int, kernel: int, stride: int = 1, padding: int = 0) -> ConvGeometry:
    """A square convolution of one image."""
    axes = [AxisGeometry.ordinary(name, extent, kernel, stride, (padding, padding)) for name in ("height", "width")]
    return ConvGeometry(1, channels, channels, 1, AxisGeometry.ordinary("depth", 1, 1), axes[0], axes[1])


@pytest.mark.parametrize("line", ["rows", "flat", "channels"])
@pytest.mark.parametrize("place", HERE, ids=str)
def test_rows_of_results_that_are_longer_than_packed_ones(place: Place, line: str) -> None:
    """With more padding than a window needs; some rows of taps lie outside the tensor, others inside."""
    place.need()
    for extent in (1, 6):
        operator = conv((2, 4, 1, extent, 15), 9, (1, 5, 2), padding=[0, 4, 6], stride=[1, 3, 1], dilation=[1, 2, 1])
        tensors = tensors_of(operator, "integers")
        result = call_on(operator, tensors, place.device, {"algorithm": "direct", "line": line})()
        np.testing.assert_array_equal(result, Place("numpy").run(operator.problem, **tensors))


@pytest.mark.parametrize("vec", [4, 8, 16])
@pytest.mark.parametrize("shape", [(17, 7, 3, 1, 1), (32, 57, 5, 1, 2), (40, 300, 2, 3, 0), (8, 1, 1, 1, 0)])
def test_tiles_cover_each_position_once(vec: int, shape: tuple[int, int, int, int, int]) -> None:
    resources = Resources(device_class(vec), vec, 4, 900_000, 2)
    ranked = ranked_channel_tiles(geometry(*shape), None, resources, Wanted())
    assert ranked
    for _, tile in ranked:
        layout = ChannelLayout(geometry(*shape), None, tile)
        for h in range(layout.line_rows):
            covered = [
                chunk.line - h * layout.row + i
                for chunk in layout.chunks
                if chunk.first_h == h
                for i in range(chunk.width)
            ]
            assert covered == list(range(layout.span))
        for chunk in layout.chunks:  # whole vectors are stored, over the tiles behind but over no other row
            behind = chunk.line - chunk.first_h * layout.row + -(-chunk.width // vec) * vec
            assert behind <= layout.row and layout.line % vec == 0
        vectors, rest = divmod(tile.thread_c, vec)
        assert rest == 0 and tile.thread_w <= dict(device_class(vec).channel_tiles)[vectors]


def test_the_estimate_chooses_the_form() -> None:
    facts = Facts(True, 2, 16, 8, 900_000, 1 << 34, 1 << 32, True, True)
    target = Target(facts, Limits(1, 1, 1, 1), "a device that nothing was tuned on")

    def form(shape: ConvGeometry) -> bool:
        return choose(shape, None, target, np.dtype(np.float32), Options("direct", tuned="ignore"))[0].channels

    assert form(geometry(256, 7, 3, 1, 1)), "rows shorter than a vector"
    assert form(geometry(64, 32, 5, 1, 4)), "a ninth of the products along a row lies outside it"
    assert not form(geometry(4, 256, 3)), "a quarter of the lanes"

    def transformed(channels: int, planes: int, places: int) -> bool:
        depth, width = AxisGeometry.ordinary("depth", 1, 1), AxisGeometry.ordinary("width", places, 1)
        taps = AxisGeometry.ordinary("height", planes, 3, 1, (1, 1))
        shape = ConvGeometry(1, channels, channels, 1, depth, taps, width)
        return choose(shape, None, target, np.dtype(np.float32), Options(tuned="ignore"))[0].winograd

    assert transformed(128, 8, 196), "a third of the products"
    assert not transformed(256, 4, 49), "a quarter of the lanes would be idle, and weights pass by once for few rows"


def test_what_no_tile_can_be_is_refused() -> None:
    with pytest.raises(InputError, match="only algorithm direct"):
        Options.parse({"algorithm": "winograd", "line": "channels"})
    resources = Resources(device_class(16), 16, 4, 900_000, 2)
    few = ranked_channel_tiles(geometry(1, 9, 3), None, resources, Wanted())
    assert few and not suits(geometry(1, 9, 3), 16), "one channel may be asked for and is not chosen"
    with pytest.raises(InputError, match="rows or flat"):
        ranked_channel_tiles(geometry(32, 9, 3), None, replace(resources, vec=2), Wanted())
    with pytest.raises(InputError, match="multiple of 16 channels"):
        ranked_channel_tiles(geometry(32, 9, 3), None, resources, Wanted(register_tile=(24, 2)))
    with pytest.raises(InputError, match="box is 1x1; expected multiples of 1x3"):
        ranked_channel_tiles(geometry(32, 9, 3), Fold("max", (1, 3, 1)), resources, Wanted(box=(1, 1)))
