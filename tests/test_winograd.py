"""The Winograd transforms are exact identities; tiles cover what they have to; the algorithm is chosen for a reason."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.opencl.tiles import Fold, LineLayout, Tile, Wanted, device_class, device_classes, ranked_tiles
from backends.opencl.winograd import TRANSFORMS, axis_reason, pack_winograd_weights, winograd_starts
from dispatcher.geometry import AxisGeometry, ConvGeometry


def inverse(count: int) -> tuple[list[int], list[int]]:
    """Factors of ``count`` components in the two outputs, as core_winograd.cl adds them up.

    It sums all components but the last for output 0, all but the first for output 1, negated from the third on.
    """
    even = [int(part < count - 1) for part in range(count)]
    odd = [0 if part == 0 else 1 if part == 1 else -1 for part in range(count)]
    return even, odd


@pytest.mark.parametrize("taps", sorted(TRANSFORMS))
def test_each_transform_is_an_identity_of_rational_numbers(taps: int) -> None:
    """y[j] is bilinear in x and g, so that it is enough to try every pair of unit vectors."""
    components = TRANSFORMS[taps]
    assert len(components) == taps + 1
    rows = inverse(len(components))
    for at, tap in product(range(taps + 1), range(taps)):
        x = [Fraction(int(i == at)) for i in range(taps + 2)]
        z = [(x[part.a] + part.sign * x[part.b]) * part.taps[tap] for part in components]
        for j, row in enumerate(rows):
            assert sum(f * value for f, value in zip(row, z, strict=True)) == int(at == j + tap)


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
    for winograd in (False, True):
        if winograd and (axis_reason(geometry.depth) or axis_reason(geometry.height)):
            continue
        ranked = ranked_tiles(geometry, None, 16, device_class(16), 800_000, 2, 4, winograd=winograd)
        for _, tile in ranked[:3]:
            check_layout(LineLayout(geometry, None, tile))


def check_layout(layout: LineLayout) -> None:
    """Boxes cover all positions, chunks cover each row, and no load leaves the packed lines."""
    tile, positions = layout.tile, layout.positions
    assert layout.boxes[0] * tile.box_d >= positions[0] and layout.boxes[1] * tile.box_h >= positions[1]
    written = {
        lane for chunk in layout.chunks for lane in range(chunk.line, chunk.line + chunk.width * tile.vec)
    }
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


def test_packed_weights_start_where_the_kernel_looks() -> None:
    geometry = ConvGeometry(
        1,
        4,
        5,
        1,
        AxisGeometry("depth", 4, 3, 2, 1),
        AxisGeometry("height", 4, 4, 2, 1),
        AxisGeometry("width", 9, 3, 2, 1),
    )
    layout = LineLayout(geometry, None, Tile(8, 4, 1, 2, 2, False, True))
    starts = winograd_starts(layout)
    weight = np.arange(np.prod(geometry.weight_shape), dtype=np.float32).reshape(geometry.weight_shape)
    packed = pack_winograd_weights(weight, layout)
    # Every phase starts with its first components, which are taps as they are: input channel 0, channels 0 to 3.
    for start, (phase_d, phase_h) in zip(
        starts, product(geometry.depth.phases, geometry.height.phases), strict=True
    ):
        first = weight[
            0, :4, phase_d.taps[0].index, phase_h.taps[0].index, geometry.width.phases[0].taps[0].index
        ]
        np.testing.assert_array_equal(packed[start : start + 4], first)


def test_boxes_hold_whole_windows_and_pairs_of_rows() -> None:
    axes = [AxisGeometry(name, 32, 5, 2, 2) for name in ("depth", "height", "width")]
    geometry = ConvGeometry(2, 32, 64, 1, axes[0], axes[1], axes[2])
    fold = Fold("max", (6, 6, 6))
    for winograd, unit in ((False, 3), (True, 6)):
        for _, tile in ranked_tiles(geometry, fold, 16, device_class(16), 900_000, 2, 4, winograd=winograd):
            assert tile.box_d % unit == 0 and tile.box_h % unit == 0
    with pytest.raises(ValueError, match="box is 2x2; expected multiples of 6x6"):
        wanted = Wanted(box=(2, 2))
        ranked_tiles(geometry, fold, 16, device_class(16), 900_000, 2, 4, winograd=True, wanted=wanted)


def test_device_classes_are_sound() -> None:
    for entry in device_classes():
        assert entry.vec in (4, 8, 16) and entry.register_tiles and entry.winograd_tiles
        assert all(c >= 1 and w >= 1 for c, w in (*entry.register_tiles, *entry.winograd_tiles))
    assert device_class(16).vec == 16 and device_class(8).vec == 8 and device_class(1).vec == 4
