"""The Winograd transforms are exact identities; tiles cover what they have to; the algorithm is chosen for a reason."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatcher.backends.opencl import lines, render, tiles, winograd, winograd_core
from dispatcher.backends.opencl.classes import device_class, device_classes
from dispatcher.backends.opencl.options import OUTPUTS as OUTPUT_OPTIONS
from dispatcher.backends.opencl.options import Options
from dispatcher.backends.opencl.render import kernel_source
from dispatcher.backends.opencl.tiles import Fold, LineLayout, Resources, Tile, Wanted
from dispatcher.backends.opencl.transforms import MOST_OUTPUTS, MOST_TAPS, Row, most_outputs, transform
from dispatcher.backends.opencl.winograd import WinogradLayout, choices, no_transform, ranked_tiles, reads
from dispatcher.backends.opencl.winograd_core import (
    even_weights,
    pack_winograd_weights,
    width_inputs,
    width_outputs,
    winograd_starts,
)
from dispatcher.check.verifying import compile_for
from dispatcher.errors import InputError
from dispatcher.interface import Device, Timings
from dispatcher.ops.geometry import AxisGeometry, ConvGeometry, unstrided_weight
from dispatcher.problem.operator import Operator
from tests.strategies import call_on, checked_run, conv_operator, tensors_of

RESOURCES = Resources(device_class(16), 16, 4, 800_000, 2)
OUTPUTS = range(1, MOST_OUTPUTS + 1)
TRANSFORMS_OF = [(m, n) for n in range(1, MOST_TAPS + 1) for m in range(1, most_outputs(n) + 1)]


@pytest.mark.parametrize(("outputs", "taps"), TRANSFORMS_OF)
def test_each_transform_is_an_identity_of_rational_numbers(outputs: int, taps: int) -> None:
    """y[j] is bilinear in x and g, so that it is enough to try every pair of unit vectors."""
    matrices = transform(outputs, taps)
    products = outputs + taps - 1
    assert len(matrices.inputs) == len(matrices.taps) == products and len(matrices.outputs) == outputs
    for at, tap in product(range(products), range(taps)):
        z = [inputs[at] * factors[tap] for inputs, factors in zip(matrices.inputs, matrices.taps, strict=True)]
        for j, row in enumerate(matrices.outputs):
            assert sum(f * value for f, value in zip(row, z, strict=True)) == int(at == j + tap)


@pytest.mark.parametrize(("outputs", "taps"), TRANSFORMS_OF)
def test_factors_are_moderate(outputs: int, taps: int) -> None:
    """Rounding grows with the factors; those of the inputs are not in the sums of tap factors."""
    matrices = transform(outputs, taps)
    assert max(abs(f) for row in matrices.inputs for f in row) <= 2.75
    assert max(abs(f) for row in matrices.taps for f in row) <= 2
    assert max(abs(f) for row in matrices.outputs for f in row) <= 4


AXES = st.builds(
    lambda extent, kernel, stride, padding, dilation: (extent, kernel, stride, padding, dilation),
    st.integers(1, 40),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 2),
)


def axis(name: str, values: tuple[int, int, int, int, int]) -> AxisGeometry | None:
    extent, kernel, stride, padding, dilation = values
    output = (extent - 1) * stride - 2 * padding + dilation * (kernel - 1) + 1
    return AxisGeometry(name, extent, kernel, stride, padding, 0, dilation) if output > 0 else None


@settings(max_examples=60, deadline=None, derandomize=True)
@given(AXES, AXES, AXES, st.integers(1, 3), st.integers(1, 20))
def test_the_best_tiles_of_random_geometries_cover_them(
    d: tuple[int, int, int, int, int],
    h: tuple[int, int, int, int, int],
    w: tuple[int, int, int, int, int],
    groups: int,
    channels: int,
) -> None:
    axes = [axis(name, values) for name, values in zip(("depth", "height", "width"), (d, h, w), strict=True)]
    if any(each is None for each in axes):
        return
    geometry = ConvGeometry(2, 4 * groups, channels * groups, groups, *axes)  # type: ignore[arg-type]
    for _, tile in tiles.ranked_tiles(geometry, None, RESOURCES)[:3]:
        check_direct_layout(LineLayout(geometry, None, tile))
    if no_transform(geometry) is None:
        ranked = ranked_tiles(geometry, None, RESOURCES, Wanted())
        best = {(tile.outputs, tile.flat): tile for _, tile in reversed(ranked)}
        assert sorted({outputs for outputs, _ in best}) == sorted(choices(geometry, None))
        for tile in best.values():
            check_winograd_layout(WinogradLayout(geometry, None, tile))


def check_direct_layout(layout: LineLayout) -> None:
    """Boxes cover all positions, chunks cover each row, and no load leaves the packed lines."""
    tile, positions = layout.tile, layout.positions
    assert layout.boxes[0] * tile.box_d >= positions[0] and layout.boxes[1] * tile.box_h >= positions[1]
    written = {lane for chunk in layout.chunks for lane in range(chunk.line, chunk.line + chunk.width * tile.vec)}
    for row in range(layout.line_rows):
        assert set(range(row * layout.row, row * layout.row + positions[2])) <= written
    low, high = layout.geometry.width.offset_range
    furthest = max(chunk.x + chunk.width * tile.vec for chunk in layout.chunks) + max(0, high)
    # The last line of the last plane is the one whose loads reach furthest.
    last_line = layout.lead + len(layout.depth.rows) * layout.plane - layout.channel
    rows_below = (len(layout.height.rows) - tile.box_h) * layout.pitch
    assert layout.lead + min(0, low) >= 0
    assert last_line + rows_below + furthest <= layout.packed_size
    # The gap behind a row holds the halo of both neighbours.
    assert layout.pitch - layout.geometry.width.input >= max(layout.halo)


def check_winograd_layout(layout: WinogradLayout) -> None:
    """Boxes cover all positions, lanes all tiles, and every lane that is read was packed for it."""
    g, tile, (planes, rows, columns) = layout.geometry, layout.tile, layout.tile.outputs
    assert layout.boxes[0] * tile.box_d >= layout.positions[0] and layout.boxes[1] * tile.box_h >= layout.positions[1]
    assert tile.box_d % planes == 0 and tile.box_h % rows == 0
    assert layout.line_positions * columns >= layout.positions[2]
    lanes = layout.vectors * tile.vec
    assert (layout.line_rows - 1) * layout.pitch + layout.line_positions <= lanes <= layout.line
    # Boxes along height hold all tile rows, in whole chunks of widths that there is a product for.
    assert sum(count for count, _ in layout.box_vectors) == layout.boxes[1]
    for _, vectors in layout.box_vectors:
        widths = layout.chunk_widths(vectors)
        assert sum(widths) == vectors <= layout.vectors and set(widths) <= set(layout.widths)
    assert max(layout.widths) <= tile.thread_w
    # Each sub-line of a tile row holds what its last tile reads, and the last lane's loads end within it.
    behind = (layout.reach_w - 1) // layout.sub_lines
    assert layout.sub_lines % columns == 0 and layout.line_positions - 1 + behind < layout.pitch
    last_row = max(offset - layout.low_h for phase in g.height.phases for offset in reads(phase, rows))
    assert last_row + rows * (layout.line_rows - 1) < layout.rows
    assert lanes + last_row // rows * layout.pitch + behind <= layout.edge
    assert (layout.rows - 1) // rows * layout.pitch + -(-layout.pitch // tile.vec) * tile.vec <= layout.edge
    assert rows * layout.sub_lines * layout.edge <= layout.channel
    dealt = g.width.offset_range[0] + layout.sub_lines - columns + columns * (-(-layout.pitch // tile.vec) * tile.vec)
    assert layout.row_lead + max(g.width.input, dealt) <= layout.row_size


def product_of(matrix: list[Row], values: list[int]) -> list[Fraction]:
    return [sum((f * v for f, v in zip(row, values, strict=True)), Fraction(0)) for row in matrix]


@pytest.mark.parametrize("outputs", OUTPUTS)
@pytest.mark.parametrize(
    ("kernel", "stride", "padding"), [(3, 1, 0), (5, 2, 2), (3, 2, 1), (4, 2, 1), (1, 1, 0), (5, 1, 2)]
)
def test_the_matrices_of_an_axis_make_every_phase(kernel: int, stride: int, padding: int, outputs: int) -> None:
    """Along width one matrix serves all phases; along depth the terms of all components stand one after another."""
    a = AxisGeometry("width", 9, kernel, stride, padding)
    outputs = min(outputs, most_outputs(a.most_taps))
    geometry = ConvGeometry(1, 16, 16, 1, *(AxisGeometry(name, 9, kernel, stride, padding) for name in "dh"), a)
    m = (outputs, outputs, outputs)
    layout = WinogradLayout(geometry, None, Tile(8, 4, 1, m[0], m[1], True, m[1], planes=m[0], columns=m[2]))
    x = [3, 1, -4, 1, 5, -9, 2, 6]
    taps = [2, -7, 1, 8, -2][:kernel]
    low = a.offset_range[0]
    wanted = [
        sum(x[j + tap.offset - low] * taps[tap.index] for tap in phase.taps)
        for j in range(outputs)
        for phase in a.phases
    ]
    factors = [
        product_of(list(transform(outputs, len(phase.taps)).taps), [taps[tap.index] for tap in phase.taps])
        for phase in a.phases
    ]
    z = product_of(width_inputs(layout), x[: layout.reach_w])
    scaled = [value * factor for value, factor in zip(z, [f for each in factors for f in each], strict=True)]
    assert product_of(width_outputs(layout), scaled) == wanted  # type: ignore[arg-type]
    for number, phase in enumerate(a.phases):  # along depth each phase has a macro of its own
        rows, places = transform(outputs, len(phase.taps)).inputs, [offset - low for offset in reads(phase, outputs)]
        sums = [sum(factor * x[place] for factor, place in zip(row, places, strict=True)) for row in rows]
        assert sums == z[sum(layout.parts_w[:number]) : sum(layout.parts_w[: number + 1])]


def test_wide_rows_of_many_channels_are_worth_fewer_products() -> None:
    """128 channels of 1024 results fill the cache more than once, which costs less than half as many products more."""
    axes = [AxisGeometry(name, size, kernel) for name, size, kernel in (("d", 1, 1), ("h", 1024, 3), ("w", 1024, 3))]
    geometry = ConvGeometry(1, 16, 128, 1, axes[0], axes[1], axes[2])
    for vec in (8, 16):
        resources = Resources(device_class(vec), vec, 4, 900_000, 2)
        _, tile = ranked_tiles(geometry, None, resources, Wanted())[0]
        assert math.prod(tile.outputs) == 6


def test_packed_weights_start_where_the_kernel_looks() -> None:
    axes = [AxisGeometry("depth", 4, 3, 2, 1), AxisGeometry("height", 4, 4, 2, 1), AxisGeometry("width", 9, 3, 2, 1)]
    geometry = ConvGeometry(1, 4, 5, 1, axes[0], axes[1], axes[2])
    layout = WinogradLayout(geometry, None, Tile(8, 4, 1, 2, 3, False, 3, planes=2, columns=2))
    starts = winograd_starts(layout)
    weight = np.arange(np.prod(geometry.weight_shape), dtype=np.float32).reshape(geometry.weight_shape)
    packed = pack_winograd_weights(weight, layout)
    # Every phase starts with its first components, which are its first taps: input channel 0, channels 0 to 3.
    for start, (phase_d, phase_h) in zip(starts, product(geometry.depth.phases, geometry.height.phases), strict=True):
        first = weight[0, :4, phase_d.taps[0].index, phase_h.taps[0].index, geometry.width.phases[0].taps[0].index]
        factor = transform(3, len(phase_h.taps)).taps[0][0]
        np.testing.assert_array_equal(packed[start : start + 4], first * np.float32(factor))
    last = (
        starts[-1]
        + len(reads(geometry.depth.phases[1], 2))
        * len(reads(geometry.height.phases[1], 3))
        * sum(layout.parts_w)
        * layout.weights_per_tap
    )
    assert packed.size == last


def test_boxes_hold_whole_windows_and_whole_tiles() -> None:
    axes = [AxisGeometry(name, 32, 5, 2, 2) for name in ("depth", "height", "width")]
    geometry = ConvGeometry(2, 32, 64, 1, axes[0], axes[1], axes[2])
    fold = Fold("max", (6, 6, 6))
    assert all(tile.box_d % 3 == 0 and tile.box_h % 3 == 0 for _, tile in tiles.ranked_tiles(geometry, fold, RESOURCES))
    for _, tile in ranked_tiles(geometry, fold, RESOURCES, Wanted()):
        assert tile.box_d % math.lcm(3, tile.planes) == 0 and tile.box_h % math.lcm(3, tile.rows) == 0
    # A window is 3 positions wide: two columns at once would leave half of one in another lane.
    assert {outputs[2] for outputs in choices(geometry, fold)} == {1, 3}
    with pytest.raises(ValueError, match="box is 2x2; expected multiples of 6x6"):
        ranked_tiles(geometry, fold, RESOURCES, Wanted(box=(2, 2), outputs=(2, 2, None)))
    with pytest.raises(InputError, match=r"no transform yields the planes, rows and columns .* there are 1x2x1, "):
        ranked_tiles(geometry, fold, RESOURCES, Wanted(outputs=(None, None, 2)))


@pytest.mark.parametrize(("channels", "groups", "most"), [(16, 1, 3), (15, 1, 2), (32, 4, 2)])
def test_more_outputs_at_once_only_where_they_round_little(channels: int, groups: int, most: int) -> None:
    axes = [AxisGeometry(name, 8, 3) for name in ("depth", "height", "width")]
    found = choices(ConvGeometry(1, channels, 8, groups, *axes), None)
    assert max(map(max, found)) == most and (3, 3, 3) not in found


def test_one_plane_has_no_depth_components() -> None:
    """An image makes its products along height and width alone; an axis of many taps is not transformed."""
    one, many = AxisGeometry("depth", 1, 1), AxisGeometry("depth", 8, 5, dilation=2)
    h, w = AxisGeometry("height", 56, 3, 1, 1), AxisGeometry("width", 56, 3, 1, 1)
    for depth, last in ((one, (1, 3, 2)), (many, (1, 3, 3))):
        found = choices(ConvGeometry(1, 64, 64, 1, depth, h, w), None)
        assert {outputs[0] for outputs in found} == {1} and found[-1] == last
    plain = [AxisGeometry(name, 8, 6) for name in ("depth", "height", "width")]
    assert no_transform(ConvGeometry(1, 64, 64, 1, *plain)) == "depth: a phase has 6 taps; transforms exist for 1 to 5"


@pytest.mark.parametrize(
    ("kernel", "allowed", "refused"),
    [
        ((3, 3, 3), (2, 3, 3), (3, 3, 3)),
        ((1, 4, 4), (1, 3, 2), (1, 3, 3)),
        ((4, 4, 4), (2, 2, 2), (2, 3, 2)),
        ((1, 5, 5), (1, 2, 2), (1, 3, 2)),
        ((5, 5, 5), (1, 2, 2), (2, 2, 2)),
    ],
)
def test_transforms_that_round_much_are_left_out(
    kernel: tuple[int, int, int], allowed: tuple[int, int, int], refused: tuple[int, int, int]
) -> None:
    axes = [AxisGeometry(name, 16, taps) for name, taps in zip(("depth", "height", "width"), kernel, strict=True)]
    found = choices(ConvGeometry(1, 16, 8, 1, *axes), None)
    assert allowed in found and refused not in found


def test_device_classes_are_sound() -> None:
    for entry in device_classes():
        assert entry.vec in (4, 8, 16) and entry.register_tiles and entry.winograd_tiles
        for c, w in (*entry.register_tiles, *entry.winograd_tiles):
            assert c >= 1 and w >= 1 and c * w + w <= entry.registers  # sums and inputs
        assert all(vectors * positions + vectors <= entry.registers for vectors, positions in entry.channel_tiles)
    assert device_class(16).vec == 16 and device_class(8).vec == 8 and device_class(1).vec == 4


@pytest.mark.parametrize(("channels", "lanes"), [(12, 4), (6, 2), (5, 1)])
def test_tiles_at_edges_cost_what_their_vectors_take(
    monkeypatch: pytest.MonkeyPatch, channels: int, lanes: int
) -> None:
    axes = [AxisGeometry(name, 12, 3) for name in ("depth", "height", "width")]
    geometry = ConvGeometry(1, 16, 120, 1, *axes)

    def edges(thread_c: int) -> float:
        layout = WinogradLayout(geometry, None, Tile(16, thread_c, 2, 2, 2, False, 2, planes=2, columns=2))
        costs = []
        for cost in (1.0, 0.0):
            monkeypatch.setattr(winograd, "EDGE_COST", cost)
            costs.append(winograd.work(layout, device_class(16)))
        return costs[0] - costs[1]

    assert edges(channels) == pytest.approx(edges(8) * 8 / lanes) and edges(8) > 0


#: Pipelines with one, two and three taps a phase, heights that end within a tile, groups, and channels that end within
#: a register tile.
OPERATORS = {
    "three_taps": conv_operator((1, 16, 4, 9, 19), 7, (3, 3, 3), bias=True),
    "two_and_three_taps": conv_operator(
        (1, 16, 3, 7, 10), 5, (5, 5, 5), stride=2, padding=2, after=[{"op": "max_pool3d", "window": 2}]
    ),
    "two_taps": conv_operator((2, 32, 3, 6, 33), 20, (4, 4, 4), stride=2, padding=1, groups=2, after=[{"op": "gelu"}]),
    "one_and_two_taps": conv_operator((1, 16, 3, 5, 7), 6, (3, 3, 3), stride=2, padding=1, output_padding=1),
    "one_tap": conv_operator((1, 17, 3, 10, 9), 6, (1, 1, 3)),
    "four_and_five_taps": conv_operator((1, 16, 3, 9, 19), 7, (3, 5, 4), padding=1),
    "eight_channels": conv_operator((1, 8, 4, 9, 19), 24, (3, 3, 3)),
}
#: Strided convolutions, whose channels are phases of the input: of several axes and of one, taps that not all phases
#: have, windows that end before the input, padding of more and of fewer inputs than a step, rows dealt out one by one.
STRIDED = {
    "groups": ((2, 32, 1, 20, 21), 14, (1, 4, 4), {"stride": (1, 2, 2), "padding": (0, 1, 3), "groups": 2}, "132"),
    "volume": ((1, 16, 9, 7, 18), 7, (4, 3, 5), {"stride": (2, 1, 2), "padding": 1}, "322"),
    "four_apart": ((1, 3, 1, 30, 49), 7, (1, 11, 11), {"stride": (1, 4, 4), "padding": (0, 2, 5)}, "123"),
}


#: Outputs along depth, height and width: each number along each axis, none along one or two of them.
TRANSFORMS = ("222", "333", "131", "213", "311", "112")


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("outputs", TRANSFORMS)
def test_every_transform_on_every_cpu(backend_device: Device, outputs: str, name: str) -> None:
    """Results meet the bounds of ``verify``, also with several boxes; NaN and infinity stay where they are."""
    if backend_device.backend != "opencl" or backend_device.kind != "cpu":
        pytest.skip(f"{backend_device.id} is not an OpenCL CPU device")
    operator = OPERATORS[name]
    geometry = operator.convolutions[0].geometry
    legal = choices(geometry, None)
    m = tuple(min(int(n), max(axis)) for n, axis in zip(outputs, zip(*legal, strict=True), strict=True))
    if m not in legal:
        m = legal[-1]
    if max(m) == 1 or (name == "two_and_three_taps" and m[2] == 3):
        m = (1, 1, 2)
    fixed = {"algorithm": "winograd", "planes": str(m[0]), "rows": str(m[1]), "columns": str(m[2])}
    wide = "6x2" if outputs == "222" else "3x2"
    layouts = ({"line": "rows", "tile": "5x1"}, {"line": "flat", "box": f"{2 * m[0]}x{2 * m[1]}", "tile": wide})
    for number, options in enumerate(layouts):
        for kind in ("signed", "one_nan", "one_inf")[: 1 + 2 * number]:
            tensors = tensors_of(operator, kind)
            _, comparison = checked_run(call_on(operator, tensors, backend_device.id, fixed | options), tensors)
            assert comparison.passed, (m, options, kind, comparison.reason)


@pytest.mark.parametrize("name", STRIDED)
def test_strided_convolutions(backend_device: Device, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if backend_device.backend != "opencl" or backend_device.kind != "cpu":
        pytest.skip(f"{backend_device.id} is not an OpenCL CPU device")
    shape, channels, kernel, fields, outputs = STRIDED[name]
    before = [{"op": "add", "value": "s"}] if name != "groups" else []
    operator = conv_operator(
        shape,
        channels,
        kernel,
        op="conv3d",
        bias=True,
        before=before,
        extra={"s": (shape[1], 1, 1, 1)} if before else None,
        **fields,
    )
    fixed = {"algorithm": "winograd", "tile": "5x1", **dict(zip(OUTPUT_OPTIONS, outputs, strict=True))}
    monkeypatch.setattr(winograd_core, "even_weights", lambda weight, layout: True)  # lest the direct core runs them
    options = fixed | ({"line": "flat", "box": "1x3"} if name == "groups" else {"line": "rows"})
    tensors, timings = tensors_of(operator, "signed"), Timings()
    prepared = call_on(operator, tensors, backend_device.id, options)
    _, comparison = checked_run(prepared, tensors)
    assert comparison.passed, comparison.reason
    prepared(timings=timings)
    assert [launch for launch, _ in timings.launches] == ["conv_winograd"]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(1, 30), st.integers(1, 12), st.integers(1, 5), st.integers(0, 7), st.integers(0, 7))
def test_phases_of_the_input_give_the_same_outputs(
    extent: int, kernel: int, step: int, before: int, after: int
) -> None:
    if extent + before + after < kernel:
        return
    axis = AxisGeometry.ordinary("width", extent, kernel, step, (before, after))
    geometry = ConvGeometry(1, 2, 3, 1, AxisGeometry("depth", 1, 1), AxisGeometry("height", 1, 1), axis)
    view, phases = geometry.unstrided, axis.input_phases
    assert view.output_shape == geometry.output_shape
    generator = np.random.default_rng(0)
    x, w = generator.integers(-9, 9, (2, extent)), generator.integers(-9, 9, geometry.weight_shape)

    def outputs(of: ConvGeometry, x: np.ndarray, w: np.ndarray) -> np.ndarray:
        low, high = (max(0, reach) for reach in of.width.ordinary_padding)
        wide = np.pad(x, ((0, 0), (low, high + of.width.step)))
        windows = [wide[:, o * of.width.step : o * of.width.step + of.width.kernel] for o in range(of.width.output)]
        return np.array([np.einsum("ik,iok->o", window, w[:, :, 0, 0, ::-1]) for window in windows])

    dealt = x if view.width.strided is None else np.zeros((2 * phases, view.width.input), int)
    for channel, i in product(range(len(dealt)), range(view.width.input)):
        place = i * step + channel % phases - axis.phase_lead
        if view.width.strided is not None and 0 <= place < extent:
            dealt[channel, i] = x[channel // phases, place]
    weight = unstrided_weight(w, geometry)
    assert weight.shape == view.weight_shape
    np.testing.assert_array_equal(outputs(view, dealt, weight), outputs(geometry, x, w))


def strided(kernel: int, step: int, channels: int, size: int = 64) -> ConvGeometry:
    """Of an image, with as many output channels."""
    axes = [AxisGeometry.ordinary(name, size, kernel, step, (1, 1)) for name in ("height", "width")]
    return ConvGeometry(4, channels, 64, 1, AxisGeometry("depth", 1, 1), *axes)


def test_strided_convolutions_that_winograd_runs() -> None:
    """As many products as accuracy asks for, and fewer than the direct core makes."""
    for (kernel, step), least in {(4, 2): 16, (5, 2): 9, (7, 2): 14, (11, 4): 2}.items():
        assert no_transform(strided(kernel, step, 64).unstrided) is None
        assert winograd.least_channels(strided(kernel, step, 1)) == least
    assert no_transform(strided(3, 2, 64).unstrided) == "height: most phases of the input have one tap"
    axis = AxisGeometry.ordinary("width", 64, 3, 2, (1, 1), 2)
    assert lines.no_transform(replace(strided(4, 2, 64), width=axis)) == "its windows lie more than one input apart"
    # Twelve phases of three channels leave one result's products too few beside its neighbours' rounding.
    assert winograd.least_channels(strided(7, 2, 3)) > 3


def test_estimates_tell_tiles_of_two_taps_apart() -> None:
    """Packed input far beyond the cache costs more than packing some rows twice; rows in thirds take more steps."""
    resources = Resources(device_class(16), 16, 4, 922_746, 2)
    assert ranked_tiles(strided(4, 2, 64).unstrided, None, resources, Wanted())[0][1].box_h < 12
    axes = [AxisGeometry(name, 64, 4, 2, 1) for name in ("height", "width")]
    geometry = ConvGeometry(4, 32, 16, 1, AxisGeometry("depth", 1, 1), *axes)
    assert ranked_tiles(geometry, None, resources, Wanted())[0][1].outputs == (1, 3, 2)


def uneven_data(kind: str, operator: Operator) -> dict[str, np.ndarray]:
    """Finite data of which some outputs read little beside what their tiles hold."""
    tensors = tensors_of(operator, "signed")
    x, w, generator = tensors["x"], tensors["w"], np.random.default_rng(5)
    depth, height = x.shape[2:4]
    match kind:
        case "fill":  # of missing values
            x[:, :, depth // 2, height // 2, 3] = 1e20
            x[:, 1, :1, :2, :2] = -1e20
        case "fill_and_zero_taps":
            x.reshape(-1)[generator.integers(0, x.size, 3)] = 1e20
            w[:, :, :, 0] = 0
        case "largest":  # sums overflow in the transform alone
            x.reshape(-1)[generator.integers(0, x.size, 6)] = 3e38
            w *= np.float32(0.1)
        case "plane":  # one channel of a plane that both rows along depth read
            x[:, 3, depth // 2] = 1e20
        case "channel":
            x[:, 3] = 1e20
        case "columns":
            x[..., 18:] *= np.float32(1e-9)
        case "rows":
            x *= 10 ** generator.uniform(-12, 0, (depth, height, 1)).astype(np.float32)
        case "channels":
            x *= 10 ** generator.uniform(-6, 6, (x.shape[1], 1, 1, 1)).astype(np.float32)
        case "elements":
            x *= 10 ** generator.uniform(-9, 9, x.shape).astype(np.float32)
        case "zeros":
            x *= generator.random((depth, height, 1)) < 0.5
        case "lattice":  # outputs that read one place, through the smallest taps that are even
            lattice = np.zeros(x.shape[2:], bool)
            lattice[1::3, 1::3, 1::3] = True
            x *= lattice
            taps = w.reshape(*w.shape[:2], -1)
            for channel, largest in enumerate(np.abs(taps).max(axis=(0, 2))):
                tap = taps[:, channel, channel % taps.shape[2]]
                tap *= 1.02 * min(1.0, len(tap) / 16) * largest / np.abs(tap).sum()
        case "zero_taps":  # of one channel, so that results of the others hide them
            w[:, 3, :, 0] = 0
        case "weights":
            w.reshape(-1)[generator.integers(0, w.size, 6)] = 1e6
        case "denormal":
            x *= np.float32(1e-40)
            x.reshape(-1)[generator.integers(0, x.size, 3)] = 1
    return tensors


UNEVEN = (
    "fill", "fill_and_zero_taps", "largest", "plane", "channel", "columns", "rows", "channels", "elements", "zeros",
    "lattice", "zero_taps", "weights", "denormal",
)  # fmt: skip


@pytest.mark.parametrize(
    ("outputs", "name"),
    [
        ("222", "two_taps"),
        ("232", "one_and_two_taps"),
        ("332", "many_outputs"),
        ("133", "many_outputs"),
        ("222", "four_and_five_taps"),
        ("122", "five_taps"),
        ("222", "eight_channels"),
        ("122", "eight_channels"),
        ("132", "strided"),
    ],
)
def test_every_output_is_within_the_bound_of_its_own_sum(backend_device: Device, outputs: str, name: str) -> None:
    if backend_device.backend != "opencl" or backend_device.kind != "cpu":
        pytest.skip(f"{backend_device.id} is not an OpenCL CPU device")
    kernel = (1, 5, 5) if name == "five_taps" else (3, 3, 3)
    operator = OPERATORS.get(name) or conv_operator((1, 16, 4, 9, 19), 24, kernel)
    if name == "strided":
        operator = conv_operator((1, 17, 2, 21, 37), 24, (1, 5, 5), op="conv3d", stride=(1, 2, 2), padding=(0, 2, 2))
    planes, rows, columns = outputs
    fixed = {"algorithm": "winograd", "planes": planes, "rows": rows, "columns": columns, "tile": "4x1"}
    compiled = compile_for(operator, backend_device.id, fixed)
    wrong = {}
    for kind in UNEVEN:
        tensors = uneven_data(kind, operator)
        _, comparison = checked_run(compiled.prepare_bound(operator, tensors), tensors)
        if not comparison.passed:
            wrong[kind] = comparison.reason
    assert not wrong


def test_few_large_elements_are_within_the_bound(backend_device: Device) -> None:
    """Rows of a tile that one channel each rules are uneven even if the tile's columns are not; so are edges."""
    if backend_device.backend != "opencl" or backend_device.kind != "cpu":
        pytest.skip(f"{backend_device.id} is not an OpenCL CPU device")
    operator = conv_operator((1, 16, 4, 12, 19), 24, (1, 3, 3))
    compiled = compile_for(operator, backend_device.id, {"algorithm": "winograd", "rows": "3", "columns": "2"})
    for seed in range(3):
        tensors, generator = tensors_of(operator, "signed"), np.random.default_rng(seed)
        for name, decades in (("x", 6), ("w", 0)):
            tensors[name] = generator.standard_normal(tensors[name].shape).astype(np.float32)
            tensors[name] *= 10 ** generator.uniform(-decades, decades, tensors[name].shape).astype(np.float32)
        _, comparison = checked_run(compiled.prepare_bound(operator, tensors), tensors)
        assert comparison.passed, comparison.reason


NO_COLUMNS = ("INFINITY || alone)", "INFINITY)")
#: What keeps the bound, left out: what is replaced in winograd_range.cl, and by what; data that show it; the outputs of
#: a transform; the kernel.
CARELESS = {
    "small_outputs": ([("if (MOST_APART * least < largest ||", "if (")], "rows", (1, 3, 1), (1, 3, 3)),
    "columns": ([("jw < w + share_w; jw++", "jw < w + 1; jw++"), NO_COLUMNS], "columns", (1, 1, 3), (1, 3, 3)),
    "channels": ([("(sums[i] < least[i] ||", "(")], "elements", (1, 3, 2), (1, 3, 3)),
    "single_columns": ([NO_COLUMNS], "lattice", (1, 2, 2), (1, 5, 5)),
}


@pytest.mark.parametrize("name", CARELESS)
def test_a_core_that_is_careless_is_caught(backend_device: Device, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if backend_device.backend != "opencl" or backend_device.kind != "cpu":
        pytest.skip(f"{backend_device.id} is not an OpenCL CPU device")
    replaced, kind, outputs, kernel = CARELESS[name]
    # Along width alone nothing else gives the lane away.
    shape, channels = ((1, 16, 1, 8, 36), 16) if outputs[1] == 1 else ((1, 16, 4, 12, 19), 24)
    operator = conv_operator(shape, channels, kernel)
    tensors = uneven_data(kind, operator)
    fixed = {"algorithm": "winograd", "tile": "4x1", **dict(zip(OUTPUT_OPTIONS, map(str, outputs), strict=True))}
    _, comparison = checked_run(call_on(operator, tensors, backend_device.id, fixed), tensors)
    assert comparison.passed, comparison.reason

    def careless(of: str) -> str:
        text = kernel_source(of)
        for old, new in replaced if of == "winograd_range.cl" else ():
            assert old in text
            text = text.replace(old, new)
        return text

    monkeypatch.setattr(render, "kernel_source", careless)
    _, comparison = checked_run(call_on(operator, tensors, backend_device.id, fixed), tensors)
    assert not comparison.passed


def test_even_weights() -> None:
    """No tap may be small beside the others of its channel, and few weights in a tap; channels may be."""
    geometry = OPERATORS["three_taps"].convolutions[0].geometry
    layout = WinogradLayout(geometry, None, Tile(8, 4, 1, 2, 2, True, 2, planes=2, columns=2))
    weight = np.random.default_rng(0).standard_normal(geometry.weight_shape)
    scales = 10.0 ** np.arange(-3, 4).reshape(1, 7, 1, 1, 1)
    assert even_weights(weight * scales, layout)
    for place, factor in (
        ((slice(None), 3, 0), 0.01),
        ((slice(None), 3, 1, 2), 0),
        ((slice(None), 3, slice(None), slice(None), 1), 0.01),
        ((slice(0, 4), 3), 0),
        ((5, 3, 1, 1, 1), 1e3),
    ):
        uneven = weight.copy()
        uneven[place] *= factor
        assert not even_weights(uneven, layout), (place, factor)


def test_even_weights_of_phases() -> None:
    """Taps that a phase does not have vanish rightly; any others must not."""
    geometry = strided(5, 2, 32)
    layout = WinogradLayout(geometry.unstrided, None, Tile(8, 4, 1, 1, 2, True, 2, columns=2))
    weight = np.random.default_rng(0).standard_normal(geometry.weight_shape)
    assert even_weights(unstrided_weight(weight, geometry), layout)
    for tap in (0, 1, 4):
        uneven = weight.copy()
        uneven[:, 3, :, tap] = 0
        assert not even_weights(unstrided_weight(uneven, geometry), layout), tap


def test_outputs_belong_to_winograd() -> None:
    with pytest.raises(InputError, match="rows is '3' with algorithm 'direct'; only algorithm winograd has it"):
        Options.parse({"algorithm": "direct", "rows": "3"})
    for name in OUTPUT_OPTIONS:
        with pytest.raises(InputError, match=f"{name} is '4'; expected one of 1, 2, 3"):
            Options.parse({"algorithm": "winograd", name: "4"})
