"""The Winograd transforms are exact identities; tiles cover what they have to; the algorithm is chosen for a reason."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatcher.backends.opencl.classes import device_class, device_classes
from dispatcher.backends.opencl.options import Options
from dispatcher.backends.opencl.tiles import (
    WINOGRAD_ROWS,
    Fold,
    LineLayout,
    Resources,
    Tile,
    Wanted,
    ranked_tiles,
    winograd_rows,
)
from dispatcher.backends.opencl.winograd import (
    MOST_TAPS,
    axis_reason,
    even_weights,
    pack_winograd_weights,
    pair_sums,
    transform,
    winograd_starts,
)
from dispatcher.check.verifying import compile_for
from dispatcher.errors import InputError
from dispatcher.interface import Device
from dispatcher.ops.geometry import AxisGeometry, ConvGeometry
from dispatcher.problem.operator import Operator
from tests.strategies import call_on, checked_run, conv_operator, tensors_of


@pytest.mark.parametrize("taps", range(1, MOST_TAPS + 1))
@pytest.mark.parametrize("outputs", WINOGRAD_ROWS)
def test_each_transform_is_an_identity_of_rational_numbers(outputs: int, taps: int) -> None:
    """y[j] is bilinear in x and g, so that it is enough to try every pair of unit vectors."""
    matrices = transform(outputs, taps)
    products = outputs + taps - 1
    assert len(matrices.inputs) == len(matrices.taps) == products and len(matrices.outputs) == outputs
    for at, tap in product(range(products), range(taps)):
        z = [inputs[at] * factors[tap] for inputs, factors in zip(matrices.inputs, matrices.taps, strict=True)]
        for j, row in enumerate(matrices.outputs):
            assert sum(f * value for f, value in zip(row, z, strict=True)) == int(at == j + tap)


@pytest.mark.parametrize("taps", range(1, MOST_TAPS + 1))
def test_along_depth_the_core_makes_the_same_sums_of_two(taps: int) -> None:
    """What the kernel does with PARTS_D and NEGATE_D, and with a, b and s, is what the matrices say."""
    matrices = transform(2, taps)
    for part, row in zip(pair_sums(taps), matrices.inputs, strict=True):
        made = [Fraction(0)] * (taps + 1)
        made[part.a] += 1
        made[part.b] += part.sign
        assert tuple(made) == row
    first, second = matrices.outputs
    assert first == (*[1] * taps, 0)
    assert second[0] == 0 and all(abs(factor) == 1 for factor in second[1:])


@pytest.mark.parametrize("taps", range(1, MOST_TAPS + 1))
@pytest.mark.parametrize("outputs", WINOGRAD_ROWS)
def test_factors_are_moderate(outputs: int, taps: int) -> None:
    """Rounding grows with the factors; those of the inputs are not in the sums of tap factors."""
    matrices = transform(outputs, taps)
    assert max(abs(f) for row in matrices.inputs for f in row) <= 2.5
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


@settings(max_examples=150, deadline=None, derandomize=True)
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
    for rows in (1, *WINOGRAD_ROWS):
        if rows > 1 and (axis_reason(geometry.depth) or axis_reason(geometry.height)):
            continue
        wanted = Wanted(rows=rows if rows > 1 else None)
        ranked = ranked_tiles(
            geometry, None, Resources(device_class(16), 16, 4, 800_000, 2), winograd=rows > 1, wanted=wanted
        )
        assert all(tile.rows == rows for _, tile in ranked)
        for _, tile in ranked[:3]:
            check_layout(LineLayout(geometry, None, tile))


def check_layout(layout: LineLayout) -> None:
    """Boxes cover all positions, chunks cover each row, and no load leaves the packed lines."""
    tile, positions = layout.tile, layout.positions
    assert layout.boxes[0] * tile.box_d >= positions[0] and layout.boxes[1] * tile.box_h >= positions[1]
    written = {lane for chunk in layout.chunks for lane in range(chunk.line, chunk.line + chunk.width * tile.vec)}
    for row in range(layout.line_rows):
        assert set(range(row * layout.row, row * layout.row + positions[2])) <= written
    low, high = layout.geometry.width.offset_range
    furthest = max(chunk.x + chunk.width * tile.vec for chunk in layout.chunks) + max(0, high)
    # The last line of the last plane is the one whose loads reach furthest.
    lines = 1 if tile.winograd else len(layout.depth.rows)
    last_line = layout.lead + lines * layout.plane - layout.channel
    rows_below = 0 if tile.winograd else (len(layout.height.rows) - tile.box_h) * layout.pitch
    assert layout.lead + min(0, low) >= 0
    assert last_line + rows_below + furthest <= layout.packed_size
    # The gap behind a row holds the halo of both neighbours.
    assert layout.pitch - layout.geometry.width.input >= max(layout.halo)


@pytest.mark.parametrize("rows", WINOGRAD_ROWS)
def test_packed_weights_start_where_the_kernel_looks(rows: int) -> None:
    geometry = ConvGeometry(
        1,
        4,
        5,
        1,
        AxisGeometry("depth", 4, 3, 2, 1),
        AxisGeometry("height", 4, 4, 2, 1),
        AxisGeometry("width", 9, 3, 2, 1),
    )
    layout = LineLayout(geometry, None, Tile(8, 4, 1, 2, rows, False, rows))
    starts = winograd_starts(layout)
    weight = np.arange(np.prod(geometry.weight_shape), dtype=np.float32).reshape(geometry.weight_shape)
    packed = pack_winograd_weights(weight, layout)
    # Every phase starts with its first components, which are its first taps: input channel 0, channels 0 to 3.
    for start, (phase_d, phase_h) in zip(starts, product(geometry.depth.phases, geometry.height.phases), strict=True):
        first = weight[0, :4, phase_d.taps[0].index, phase_h.taps[0].index, geometry.width.phases[0].taps[0].index]
        factors = transform(rows, len(phase_h.taps)).taps[0]
        assert not any(factors[1:])
        np.testing.assert_array_equal(packed[start : start + 4], first * np.float32(factors[0]))


def test_boxes_hold_whole_windows_and_whole_tiles() -> None:
    axes = [AxisGeometry(name, 32, 5, 2, 2) for name in ("depth", "height", "width")]
    geometry = ConvGeometry(2, 32, 64, 1, axes[0], axes[1], axes[2])
    fold = Fold("max", (6, 6, 6))
    for rows, unit_d, unit_h in ((None, 3, 3), (2, 6, 6), (3, 6, 3)):
        wanted = Wanted(rows=rows)
        for _, tile in ranked_tiles(
            geometry, fold, Resources(device_class(16), 16, 4, 900_000, 2), winograd=rows is not None, wanted=wanted
        ):
            assert tile.box_d % unit_d == 0 and tile.box_h % unit_h == 0
    with pytest.raises(ValueError, match="box is 2x2; expected multiples of 6x6"):
        wanted = Wanted(box=(2, 2))
        ranked_tiles(geometry, fold, Resources(device_class(16), 16, 4, 900_000, 2), winograd=True, wanted=wanted)


def rows_of(channels: int, kernel: int, stride: int, groups: int = 1) -> tuple[int, ...]:
    axes = [AxisGeometry(name, 8, kernel, stride, 0) for name in ("depth", "height", "width")]
    return winograd_rows(ConvGeometry(1, channels, 8, groups, axes[0], axes[1], axes[2]))


def test_more_rows_at_once_only_where_they_round_little() -> None:
    assert rows_of(16, 3, 1) == (2, 3)
    assert rows_of(15, 3, 1) == rows_of(32, 3, 1, groups=4) == (2,)


def test_device_classes_are_sound() -> None:
    for entry in device_classes():
        assert entry.vec in (4, 8, 16) and entry.register_tiles and entry.winograd_tiles
        assert all(c >= 1 and w >= 1 for c, w in (*entry.register_tiles, *entry.winograd_tiles))
        for rows, taps in product((1, *WINOGRAD_ROWS), range(1, MOST_TAPS + 1)):
            assert entry.tiles(rows, taps)
    assert device_class(16).vec == 16 and device_class(8).vec == 8 and device_class(1).vec == 4


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
}


@pytest.mark.parametrize("kind", ["signed", "one_nan", "one_inf"])
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("rows", WINOGRAD_ROWS)
def test_every_transform_on_every_cpu(backend_device: Device, rows: int, name: str, kind: str) -> None:
    """Results meet the bounds of ``verify``, also with several boxes; NaN and infinity stay where they are."""
    if backend_device.backend != "opencl" or backend_device.kind != "cpu":
        pytest.skip(f"{backend_device.id} is not an OpenCL CPU device")
    operator = OPERATORS[name]
    tensors = tensors_of(operator, kind)
    high = math.lcm(rows, 2)
    for options in ({"box": f"2x{high}", "line": "rows"}, {"box": f"4x{2 * high}", "line": "flat", "tile": "3x2"}):
        fixed = {"algorithm": "winograd", "rows": str(rows), **options}
        call = call_on(operator, tensors, backend_device.id, fixed)
        _, comparison = checked_run(call, tensors)
        assert comparison.passed, (options, comparison.reason)


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
        case "rows":
            x *= 10 ** generator.uniform(-12, 0, (depth, height, 1)).astype(np.float32)
        case "channels":
            x *= 10 ** generator.uniform(-6, 6, (x.shape[1], 1, 1, 1)).astype(np.float32)
        case "elements":
            x *= 10 ** generator.uniform(-6, 6, x.shape).astype(np.float32)
        case "zeros":
            x *= generator.random((depth, height, 1)) < 0.5
        case "zero_taps":  # of one channel, so that results of the others hide them
            w[:, 3, :, 0] = 0
        case "weights":
            w.reshape(-1)[generator.integers(0, w.size, 6)] = 1e6
        case "denormal":
            x *= np.float32(1e-40)
            x.reshape(-1)[generator.integers(0, x.size, 3)] = 1
    return tensors


UNEVEN = (
    "fill", "fill_and_zero_taps", "largest", "plane", "channel", "rows", "channels", "elements", "zeros", "zero_taps",
    "weights", "denormal",
)  # fmt: skip


@pytest.mark.parametrize(("rows", "name"), [(2, "two_taps"), (3, "one_and_two_taps"), (3, "many_outputs")])
def test_every_output_is_within_the_bound_of_its_own_sum(backend_device: Device, rows: int, name: str) -> None:
    if backend_device.backend != "opencl" or backend_device.kind != "cpu":
        pytest.skip(f"{backend_device.id} is not an OpenCL CPU device")
    operator = OPERATORS.get(name) or conv_operator((1, 16, 4, 9, 19), 24, (3, 3, 3))
    fixed = {"algorithm": "winograd", "rows": str(rows), "box": f"2x{math.lcm(rows, 2)}", "line": "rows"}
    compiled = compile_for(operator, backend_device.id, fixed)
    wrong = {}
    for kind in UNEVEN:
        tensors = uneven_data(kind, operator)
        _, comparison = checked_run(compiled.prepare_bound(operator, tensors), tensors)
        if not comparison.passed:
            wrong[kind] = comparison.reason
    assert not wrong


def test_even_weights() -> None:
    """No tap may be small beside the others of its channel, and few weights in a tap; channels may be."""
    geometry = OPERATORS["three_taps"].convolutions[0].geometry
    weight = np.random.default_rng(0).standard_normal(geometry.weight_shape)
    scales = 10.0 ** np.arange(-3, 4).reshape(1, 7, 1, 1, 1)
    assert even_weights(weight * scales, geometry)
    for place, factor in (
        ((slice(None), 3, 0), 0.01),
        ((slice(None), 3, 1, 2), 0),
        ((slice(0, 4), 3), 0),
        ((5, 3, 1, 1, 1), 1e3),
    ):
        uneven = weight.copy()
        uneven[place] *= factor
        assert not even_weights(uneven, geometry), (place, factor)


def test_rows_belong_to_winograd() -> None:
    with pytest.raises(InputError, match="rows is '3' with algorithm 'direct'; only algorithm winograd has it"):
        Options.parse({"algorithm": "direct", "rows": "3"})
    with pytest.raises(InputError, match="rows is '4'; expected one of 2, 3"):
        Options.parse({"algorithm": "winograd", "rows": "4"})
