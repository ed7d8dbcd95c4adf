"""Faults that users of similar software have reported, each as a small input with the right answer.

The numbers come from PyTorch on a CPU. Every device meets them within float32 accuracy.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dispatcher
from dispatcher.errors import DeviceMemoryError, DtypeError, GeometryError, InputError, KernelError
from tests.strategies import Place, every_brisk_place, every_device, problem_of

REPOSITORY = Path(__file__).resolve().parent.parent
CONV = "conv-transpose-3d-asym-input-sq-kernel"
LAYERNORM = "conv-transpose3d-layernorm-gelu-scaling"
SUM = "conv-transpose3d-sum-layernorm-avgpool-gelu"
SOFTMAX = "conv-transpose3d-avgpool-clamp-softmax-multiply"
MAXMAX = "conv-transpose3d-max-max-sum"


# ---- building blocks ---------------------------------------------------------------------------------------
def array(values: Any, shape: Sequence[int] | None = None, dtype: str = "float32") -> np.ndarray:
    result = np.array(values, dtype)
    return result if shape is None else result.reshape(shape)


def along(axis: str, values: Sequence[float]) -> np.ndarray:
    """Values along one spatial axis of a tensor of five axes."""
    return array(values, (1, 1, *(len(values) if name == axis else 1 for name in "dhw")))


def channels(values: Sequence[float]) -> np.ndarray:
    """One voxel with a value in each channel."""
    return array(values, (1, -1, 1, 1, 1))


def conv(
    place: Place,
    x: np.ndarray,
    w: np.ndarray,
    bias: Sequence[float] | None = None,
    *,
    before: Sequence[Any] = (),
    after: Sequence[Any] = (),
    tensors: Mapping[str, np.ndarray] | None = None,
    **options: Any,
) -> np.ndarray:
    """A convolution of ``x`` with ``w``, between other steps that read ``tensors``.

    Args:
        bias: one number for each output channel, or None.
        **options: fields of the convolution: stride, padding, output_padding, dilation, groups.
    """
    step = {"op": "conv_transpose3d", "weight": "w", **options}
    given = {"x": x, "w": w, **(tensors or {})}
    if bias is not None:
        step["bias"], given["b"] = "b", array(bias)
    shapes = {name: tensor.shape for name, tensor in given.items()}
    return place.run(problem_of(shapes, [*before, step, *after]), **given)


def identity(place: Place, x: np.ndarray, **arguments: Any) -> np.ndarray:
    """A convolution that copies ``x``, between other steps."""
    return conv(place, x, np.ones((x.shape[1], 1, 1, 1, 1), np.float32), groups=x.shape[1], **arguments)


def norm(eps: float = 1e-5, **affine: str) -> dict[str, Any]:
    return {"op": "layer_norm", "axis": "channel", "eps": eps, **affine}


def gelu(x: np.ndarray | float) -> np.ndarray:
    return np.vectorize(lambda v: 0.5 * v * (1.0 + math.erf(v / math.sqrt(2.0))))(np.asarray(x, np.float64))


def close(result: np.ndarray, expected: Any, tolerance: float = 2e-6) -> None:
    """``result``, flattened, is ``expected`` to ``tolerance``, relative to one or to the number."""
    np.testing.assert_allclose(result.ravel(), np.ravel(expected), rtol=tolerance, atol=tolerance)


def pool_first(place: Place, logits: Sequence[float], low: float, high: float, scale: float) -> np.ndarray:
    """The softmax problem on logits along the width, each held by a block that the pool averages."""
    x = along("w", logits).repeat(2, 2).repeat(2, 3).repeat(2, 4)
    return place.run(
        SOFTMAX,
        input=x,
        kernel=array([1], (1, 1, 1, 1, 1)),
        scale=array([scale], (1, 1, 1, 1, 1)),
        clamp_min=low,
        clamp_max=high,
    )


def max_pools(place: Place, x: np.ndarray, bias: float = 0.0) -> np.ndarray:
    """Max pools of 2 and 3 and the sum over channels, behind an identity convolution with a bias."""
    after = [{"op": "max_pool3d", "window": 2}, {"op": "max_pool3d", "window": 3}, {"op": "sum", "axis": "channel"}]
    return identity(place, x, bias=[bias] * x.shape[1], after=after)


# ---- the convolution ---------------------------------------------------------------------------------------
@every_brisk_place
def test_1_output_padding_may_reach_the_dilation(place: Place) -> None:
    x, w = along("d", [1, 2]), along("d", [1, 10])
    result = conv(place, x, w, [0.5], dilation=[3, 1, 1], output_padding=[2, 0, 0])
    close(result, [1.5, 2.5, 0.5, 10.5, 20.5, 0.5, 0.5])


@every_device
def test_1_output_padding_beyond_that_is_an_error(place: Place) -> None:
    x, w = along("d", [1, 2]), along("d", [1, 10])
    with pytest.raises(GeometryError, match=r"output_padding on axis depth is 3"):
        conv(place, x, w, [0.5], dilation=[3, 1, 1], output_padding=[3, 0, 0])
    cube = np.ones((1, 1, 2, 2, 2), np.float32)
    with pytest.raises(GeometryError, match=r"output_padding on axis width is 1"):
        conv(place, cube, cube, stride=[2, 2, 1], output_padding=[1, 1, 1])
    with pytest.raises(InputError, match=r"output_padding.* -1"):
        place.run(CONV, input=cube, kernel=cube, output_padding=-1)


@pytest.mark.parametrize("axis", ["d", "h", "w"])
@every_brisk_place
def test_2_rows_of_output_padding_are_real_outputs(place: Place, axis: str) -> None:
    one = [int(name == axis) for name in "dhw"]
    stride = [1 + each for each in one]
    x, w = along(axis, [1, 1]), along(axis, [1, 2, 3])
    result = conv(place, x, w, [0.5], stride=stride, padding=one, output_padding=one)
    close(result, [2.5, 4.5, 2.5, 3.5])


@every_brisk_place
def test_3_dilation_together_with_stride(place: Place) -> None:
    x, w = along("h", [1, 2, 3]), along("h", [1, 10, 100])
    result = conv(place, x, w, stride=[1, 2, 1], dilation=[1, 3, 1])
    close(result, [1, 0, 2, 10, 3, 20, 100, 30, 200, 0, 300])
    result = conv(place, x, w, stride=[1, 2, 1], dilation=[1, 3, 1], padding=[0, 4, 0])
    close(result, [3, 20, 100])
    result = conv(
        place,
        np.ones((1, 1, 1, 50, 50), np.float32),
        np.ones((1, 3, 1, 3, 5), np.float32),
        stride=[1, 2, 1],
        padding=[0, 4, 2],
        dilation=[1, 3, 1],
    )
    assert result.shape == (1, 3, 1, 97, 50)
    assert result.sum() == 105408


@every_brisk_place
def test_5_weight_layout_and_groups(place: Place) -> None:
    w = array(np.arange(1, 13), (4, 3, 1, 1, 1))
    close(conv(place, channels([1, 10, 100, 1000]), w, groups=2), [41, 52, 63, 10700, 11800, 12900], tolerance=0)
    close(conv(place, channels([1, 10]), array([1, 2, 3, 4], (2, 2, 1, 1, 1))), [31, 42], tolerance=0)


@every_device
def test_5_wrong_weights_and_groups_are_errors(place: Place) -> None:
    x = channels([1, 10, 100, 1000])
    with pytest.raises(GeometryError, match=r"\(6, 2, 1, 1, 1\).*4 channels"):
        conv(place, x, np.ones((6, 2, 1, 1, 1), np.float32), groups=2)
    with pytest.raises(GeometryError, match=r"in_channels is 4.*groups \(3\)"):
        conv(place, x, array(np.arange(1, 13), (4, 3, 1, 1, 1)), groups=3)


@every_brisk_place
def test_6_three_different_axes(place: Place) -> None:
    result = conv(
        place,
        array(np.arange(1, 25), (1, 1, 2, 3, 4)),
        array(np.arange(1, 7), (1, 1, 3, 2, 1)),
        [0.25],
        stride=[1, 2, 3],
        padding=[1, 0, 0],
        output_padding=[0, 1, 2],
    )
    assert result.shape == (1, 1, 2, 7, 12)
    assert result.sum() == 3666.0
    expected = [v for lead in (16.25, 20.25, 24.25, 28.25) for v in (lead, 0.25, 0.25)]
    close(result[0, 0, 0, 0], expected, tolerance=0)
    close(result[0, 0, 1, 5, ::3], [138.25, 148.25, 158.25, 168.25], tolerance=0)
    close(result[0, 0, 1, 6], [0.25] * 12, tolerance=0)


@every_brisk_place
def test_6_the_kernel_is_not_flipped(place: Place) -> None:
    x = np.zeros((1, 1, 2, 2, 2), np.float32)
    x[0, 0, 0, 0, 0] = 1
    w = array(np.arange(1, 9), (1, 1, 2, 2, 2))
    result = conv(place, x, w)
    np.testing.assert_array_equal(result[:, :, :2, :2, :2], w)
    assert result.sum() == 36


@every_brisk_place
def test_7_holes_hold_the_bias(place: Place) -> None:
    x, w = along("d", [1, 2]), along("d", [1])
    result = conv(place, x, w, [0.25], stride=[3, 1, 1], output_padding=[2, 0, 0])
    close(result, [1.25, 0.25, 0.25, 2.25, 0.25, 0.25], tolerance=0)


@every_brisk_place
def test_7_holes_are_normalised_like_the_rest(place: Place) -> None:
    result = conv(
        place,
        along("d", [1, 2]),
        array([1, 3], (1, 2, 1, 1, 1)),
        [0.25, 0.75],
        stride=[3, 1, 1],
        output_padding=[2, 0, 0],
        after=[norm(), "gelu", {"op": "scale", "by": 1.0}],
    )
    for hole in (1, 2, 4, 5):
        close(result[0, :, hole], [-0.15866193, 0.84125811], tolerance=3e-7)
    close(result[0, :, 0], [-0.15865554, 0.84134120], tolerance=3e-7)


@every_device
def test_9_outputs_of_size_zero_or_less_are_errors(place: Place) -> None:
    cube = np.ones((1, 1, 2, 2, 2), np.float32)
    for padding, size in ((2, 0), (3, -2)):
        with pytest.raises(GeometryError, match=rf"output size on axis depth is {size}"):
            place.run(CONV, input=cube, kernel=cube, stride=2, padding=padding)
    with pytest.raises(GeometryError, match=r"output size on axis width is 0"):
        place.run(
            CONV,
            input=np.ones((1, 1, 4, 4, 14), np.float32),
            kernel=np.ones((1, 1, 3, 3, 3), np.float32),
            padding=(0, 0, 8),
        )
    with pytest.raises(InputError, match=r"depth"):
        place.run(CONV, input=np.ones((1, 1, 0, 2, 2), np.float32), kernel=cube)


@every_brisk_place
def test_9_an_empty_batch(place: Place) -> None:
    x, w = np.ones((0, 2, 2, 2, 2), np.float32), np.ones((2, 3, 2, 2, 2), np.float32)
    result = place.run(CONV, input=x, kernel=w)
    assert result.shape == (0, 3, 3, 3, 3) and result.dtype == np.float32


@every_brisk_place
def test_12_dtypes_are_kept(place: Place) -> None:
    one = along("w", [1])
    result = conv(place, array([1.0, 2.0], (1, 1, 1, 1, 2), "float64"), one.astype(np.float64))
    assert result.dtype == np.float64 and result.ravel().tolist() == [1.0, 2.0]
    result = conv(place, along("w", [16777217.0]).astype(np.float32), one)
    assert result.item() == 16777216.0
    result = conv(place, array([16777217.0], (1, 1, 1, 1, 1), "float64"), one.astype(np.float64))
    assert result.item() == 16777217.0


@every_brisk_place
def test_12_half_precision_is_summed_in_single(place: Place) -> None:
    x, w = array([60000, 60000], (1, 2, 1, 1, 1), "float16"), np.ones((2, 1, 1, 1, 1), np.float16)
    result = conv(place, x, w)
    assert result.dtype == np.float16 and np.isinf(result.item())
    result = conv(place, x, w, after=[{"op": "scale", "by": 0.5}])
    assert result.item() == 60000.0


@every_brisk_place
@pytest.mark.parametrize("dtype", ["int64", "bool", "uint8"])
def test_12_integers_become_single(place: Place, dtype: str) -> None:
    x = along("w", [1, 0, 1]).astype(dtype)
    result = conv(place, x, along("w", [1]))
    assert result.dtype == np.float32
    np.testing.assert_array_equal(result, x.astype(np.float32))


@every_device
@pytest.mark.parametrize("dtype", ["complex64", "object", "datetime64[s]", "longdouble"])
def test_12_other_dtypes_are_errors(place: Place, dtype: str) -> None:
    x = along("w", [1, 2]).astype("int64").astype(dtype)
    with pytest.raises(DtypeError, match=str(x.dtype).split("[", maxsplit=1)[0]):
        place.run(CONV, input=x, kernel=along("w", [1]))


@every_device
def test_12_mixed_dtypes_are_an_error(place: Place) -> None:
    with pytest.raises(InputError, match="float64"):
        place.run(CONV, input=along("w", [1, 2]).astype(np.float64), kernel=along("w", [1]))


# ---- numbers -----------------------------------------------------------------------------------------------
@every_brisk_place
def test_14_layer_norm_with_a_large_mean(place: Place) -> None:
    x = channels([40000, 40001, 40002, 40003])
    normed = [-1.3416354, -0.4472118, 0.4472118, 1.3416354]
    close(identity(place, x, after=[norm()]), normed, tolerance=1e-6)
    result = identity(place, x, after=[norm(), "gelu", {"op": "scale", "by": 1.0}])
    close(result, [-0.1205555, -0.1463997, 0.3008121, 1.2210799], tolerance=1e-6)
    block = channels([1, 2, 3, 4]) * np.ones((1, 1, 2, 2, 2), np.float32)
    steps = [{"op": "add", "value": 39999.0}, norm(), {"op": "avg_pool3d", "window": 2}, "gelu"]
    close(identity(place, block, after=steps), [-0.1205555, -0.1463997, 0.3008121, 1.2210799], tolerance=1e-6)


@every_brisk_place
def test_15_one_channel_and_constant_rows(place: Place) -> None:
    affine = {"weight": "gamma", "bias": "beta"}
    result = identity(
        place,
        channels([7]),
        after=[norm(**affine), "gelu", {"op": "scale", "by": 2.0}],
        tensors={"gamma": array([3]), "beta": array([0.5])},
    )
    close(result, [0.6914625], tolerance=2e-7)
    row = channels([1234.0] * 256)
    np.testing.assert_array_equal(identity(place, row, after=[norm(), "gelu"]), np.zeros_like(row))
    steps = [norm(0.1, **affine)]
    given = {"gamma": array([1e10]), "beta": array([-1])}
    assert identity(place, channels([-3]), after=steps, tensors=given).item() == -1.0
    result = identity(place, channels([-3]), after=[*steps, "gelu"], tensors=given)
    close(result, [-0.1586553], tolerance=2e-7)


@every_brisk_place
def test_15_eps_of_zero_on_a_constant_row_is_nan(place: Place) -> None:
    assert np.isnan(identity(place, channels([1234.0] * 256), after=[norm(0.0)])).all()


@every_device
def test_15_eps_below_zero_is_an_error(place: Place) -> None:
    with pytest.raises(InputError, match="eps"):
        identity(place, channels([1234.0] * 4), after=[norm(-1.0)])


@every_brisk_place
def test_16_layer_norm_works_over_channels(place: Place) -> None:
    x = array([[1, 3], [5, 11]], (1, 2, 1, 1, 2))
    close(identity(place, x, after=[norm()]), [-1, -1, 1, 1], tolerance=1e-5)
    x = array([[1, 3, 0], [5, 11, 8]], (1, 2, 1, 1, 3))
    close(identity(place, x, after=[norm()]), [-1, -1, -1, 1, 1, 1], tolerance=1e-5)


@every_brisk_place
def test_17_gelu_is_the_erf_form(place: Place) -> None:
    given = {"gamma": array([0, 0]), "beta": array([-2.7, 2.7])}
    steps = [norm(weight="gamma", bias="beta"), "gelu", {"op": "scale", "by": 1.0}]
    result = identity(place, channels([1, 2]), after=steps, tensors=given)
    close(result, [-0.00936083, 2.69063917], tolerance=3e-7)


@every_brisk_place
def test_17_pooling_comes_before_gelu(place: Place) -> None:
    x, w = array(np.arange(8), (1, 1, 2, 2, 2)), array([1, -1], (1, 2, 1, 1, 1))
    close(place.run(SUM, input=x, kernel=w, sum_weight=1.0), [0.7080605, -0.1669386], tolerance=5e-7)


@every_brisk_place
def test_17_gelu_at_its_ends(place: Place) -> None:
    given = {"gamma": np.full(4, 3e38, np.float32)}
    steps = [norm(weight="gamma"), {"op": "scale", "by": 4.0}, "gelu"]
    result = identity(place, channels([-9, -8, 8, 9]), after=steps, tensors=given).ravel()
    np.testing.assert_array_equal(result, array([0, 0, np.inf, np.inf]))


@every_brisk_place
def test_18_softmax_subtracts_the_maximum(place: Place) -> None:
    close(pool_first(place, [8000, 7999, 2, 1], -1e4, 1e4, 1.0), [0.7310586, 0.2689414, 0, 0], tolerance=1e-7)
    close(pool_first(place, [-8000] * 4, -1e4, 1e4, 1.0), [0.25] * 4, tolerance=1e-7)


@every_brisk_place
def test_20_max_pools_of_negative_numbers(place: Place) -> None:
    x = np.full((1, 3, 6, 6, 6), -5, np.float32)
    assert max_pools(place, x).item() == -15.0
    assert max_pools(place, x, bias=-2.0).item() == -21.0
    assert max_pools(place, np.full_like(x, -np.inf)).item() == -np.inf


@every_brisk_place
def test_20_max_pools_keep_nan(place: Place) -> None:
    for at in ((3, 2, 2), (0, 0, 0), (2, 3, 3), (5, 5, 5), (1, 1, 1)):
        x = np.full((1, 2, 12, 6, 6), -1, np.float32)
        x[(0, 1, *at)] = np.nan
        np.testing.assert_array_equal(max_pools(place, x).ravel(), [np.nan, -2.0])


@every_brisk_place
def test_20_opposite_infinities_sum_to_nan(place: Place) -> None:
    x = np.full((1, 2, 6, 6, 6), np.inf, np.float32)
    x[:, 1] = -np.inf
    assert np.isnan(max_pools(place, x).item())


@every_brisk_place
def test_23_tiny_numbers(place: Place) -> None:
    # Kept, flushed, or cut to the ten bits that a tensor core keeps of a subnormal number.
    assert 0.0 <= conv(place, along("w", [1e-40]), along("w", [1])).item() <= 1.1e-40
    result = pool_first(place, [0, -100], -200.0, 0.0, 1e30).ravel()
    close(result[:1], [1e30], tolerance=1e-6)
    assert 0.0 <= result[1] <= 3.79e-14


# ---- devices -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("count", "normed", "activated"), [(4099, -1.7316283, -0.0721567), (400000, -1.7320465, -0.0721097)]
)
@every_brisk_place
def test_27_more_channels_than_local_memory_holds(place: Place, count: int, normed: float, activated: float) -> None:
    x, w = along("w", [1]), array(np.arange(count), (1, count, 1, 1, 1))
    close(conv(place, x, w, after=[norm()]).ravel()[:1], [normed], tolerance=1e-6)
    close(place.run(LAYERNORM, input=x, kernel=w).ravel()[:1], [activated], tolerance=1e-6)


@pytest.mark.parametrize("limit", [1, 64])
def test_27_work_groups_may_be_small(limit: int) -> None:
    """In a process of its own, since the runtime reads the limit once. Only PoCL knows the variable."""
    found = [device.id for device in dispatcher.devices() if "Portable" in str(device.facts.get("platform"))]
    if not found:
        pytest.skip("PoCL is not installed, and only it knows the variable")
    names = [*(name for name in dispatcher.problems() if "3d-" in name)][:6]
    program = (
        "import dispatcher\n"
        f"for name in {names}:\n"
        f"    for check in dispatcher.verify(name, device={found[0]!r}):\n"
        "        print(check.outcome, check.problem, check.reason)\n"
    )
    child = subprocess.run(
        [sys.executable, "-c", program],
        check=False,
        cwd=REPOSITORY,
        env={**os.environ, "POCL_MAX_WORK_GROUP_SIZE": str(limit)},
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stderr
    lines = child.stdout.splitlines()
    wrong = [line for line in lines if not line.startswith("passed ")]
    assert len(lines) >= len(names) and not wrong, "\n".join(wrong)


def largest_buffer(place: Place) -> float:
    """The largest buffer that the device allows, in bytes, as far as its backend says."""
    device = next(device for device in dispatcher.devices() if device.id == place.device)
    return float(device.facts.get("largest_buffer_bytes", math.inf))


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads the memory in use from /proc")
@every_brisk_place
def test_34_too_large_an_output_and_life_after_it(place: Place) -> None:
    place.need()
    limit = largest_buffer(place)
    if math.isinf(limit):
        pytest.skip("the backend does not say how large a buffer may be")
    x, w = np.ones((1, 1, 2, 2, 2), np.float32), np.full((1, 1, 1, 1, 1), 2, np.float32)
    extent = math.ceil((limit / 4) ** (1 / 3)) + 1
    in_use = []
    for _ in range(5):
        with pytest.raises(DeviceMemoryError, match=rf"{4 * extent**3} bytes.*{limit:.0f} bytes"):
            place.run(CONV, input=x, kernel=w, stride=extent - 1)
        np.testing.assert_array_equal(place.run(CONV, input=x, kernel=w), 2 * x)
        in_use.append(resident_bytes())
    assert in_use[-1] - in_use[1] < 64 << 20


@every_brisk_place
def test_35_large_batches(place: Place) -> None:
    x = array(np.arange(70000), (70000, 1, 1, 1, 1))
    np.testing.assert_array_equal(conv(place, x, along("w", [2]), [1.0]), 2 * x + 1)
    x = x[:35000]
    result = conv(place, x, array([2, 3], (1, 2, 1, 1, 1)), [1.0, -1.0])
    np.testing.assert_array_equal(result, np.concatenate([2 * x + 1, 3 * x - 1], axis=1))


@every_brisk_place
def test_35_many_output_channels(place: Place) -> None:
    w = array(np.arange(70000), (1, 70000, 1, 1, 1))
    np.testing.assert_array_equal(conv(place, along("w", [3]), w).ravel(), 3 * w.ravel())


@every_brisk_place
def test_35_many_batches_times_channels(place: Place) -> None:
    """700 batch items times 100 channels is more than a grid's second and third axis may have."""
    rng = np.random.default_rng(0)
    x = rng.integers(-3, 4, (700, 1, 6, 6, 6)).astype(np.float32)
    w = rng.integers(-3, 4, (1, 100, 1, 1, 1)).astype(np.float32)
    result = place.run(MAXMAX, input=x, kernel=w, conv_bias=np.ones(100, np.float32))
    largest, smallest = x.max((2, 3, 4)), x.min((2, 3, 4))
    factor = w[:, :, 0, 0, 0]
    expected = np.where(factor > 0, factor * largest, factor * smallest) + 1
    np.testing.assert_array_equal(result.ravel(), expected.sum(axis=1))
    x = x[:, :, :1, :1, :1]
    w = rng.integers(-3, 4, (1, 100, 2, 2, 2)).astype(np.float32)
    result = place.run(
        SOFTMAX,
        input=x.repeat(2, 2).repeat(2, 3).repeat(2, 4),
        kernel=w,
        scale=np.ones((1, 100, 1, 1, 1), np.float32),
        clamp_min=-100.0,
        clamp_max=100.0,
    )
    power = np.exp((x * w).astype(np.float64))
    np.testing.assert_allclose(result, power / power.sum(axis=(2, 3, 4), keepdims=True), rtol=2e-5)


@every_brisk_place
def test_35_a_failing_run_says_so_itself(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.need()
    if place.backend != "opencl":
        pytest.skip("the fault is planted in PyOpenCL")
    cl = pytest.importorskip("pyopencl")
    x, w = np.ones((1, 1, 2, 2, 2), np.float32), np.full((1, 1, 1, 1, 1), 2, np.float32)
    call = place.compile(CONV, stride=1)
    np.testing.assert_array_equal(call(input=x, kernel=w), 2 * x)

    def refuse(*_: Any, **__: Any) -> None:
        raise cl.RuntimeError("enqueue_nd_range_kernel failed: OUT_OF_RESOURCES")

    with monkeypatch.context() as planted:
        planted.setattr(cl, "enqueue_nd_range_kernel", refuse)
        with pytest.raises(KernelError, match=r"conv_\w+ failed.*OUT_OF_RESOURCES"):
            call(input=x, kernel=w)
    np.testing.assert_array_equal(call(input=x, kernel=w), 2 * x)


@pytest.mark.parametrize("op", ["sum", "mean", "softmax", "log_sum_exp"])
@every_brisk_place
def test_long_rows_keep_their_accuracy(place: Place, op: str) -> None:
    """Half a million equal terms: every rounding of a plain running sum goes the same way."""
    place.need()
    problem = {
        "name": "long",
        "parameters": [
            {"name": "input", "type": "tensor", "const": True, "shape": [1, 1, "depth", 64, 64]},
            {"name": "output", "type": "tensor", "const": False},
            {"name": "depth", "type": "size_t"},
        ],
        "pipeline": [{"op": op, "axis": "spatial"}],
    }
    x = np.full((1, 1, 128, 64, 64), 0.1, np.float32)
    x[0, 0, 0, 0, 0] = 3.0
    exact = x.astype(np.float64)
    wanted = {
        "sum": exact.sum(),
        "mean": exact.mean(),
        "softmax": np.exp(exact) / np.exp(exact).sum(),
        "log_sum_exp": np.log(np.exp(exact).sum()),
    }[op]
    np.testing.assert_allclose(place.run(problem, input=x), np.broadcast_to(wanted, np.shape(wanted) or (1,) * 5), 5e-6)
