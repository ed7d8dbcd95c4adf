"""From arguments to operators: inference, shorthands, dtypes, layouts, and refusals that help."""

from __future__ import annotations

import fractions
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import CONV, LAYERNORM, MAXMAX, SOFTMAX, SUM, conv_tensors, tensors_of
from hypothesis import given, settings
from hypothesis import strategies as st

import dispatcher
from dispatcher.backends.cuda import options as cuda_options
from dispatcher.backends.opencl import options as opencl_options
from dispatcher.check.inputs import random_tensors
from dispatcher.check.verifying import check_seeds
from dispatcher.errors import DeviceError, DtypeError, GeometryError, InputError
from dispatcher.problem.arguments import (
    IncompleteError,
    bind_arguments,
    check_options,
    parse_assignments,
    shorthands,
    sort_arguments,
)
from dispatcher.problem.arrays import check_output, host_tensor, snapshot, tensor_argument
from dispatcher.problem.loader import load_problem
from dispatcher.problem.operator import Operator
from dispatcher.timing.racing import Rules


def bind(problem: Any, *, case: str | None = None, dtype: str | None = None, **arguments: Any) -> Operator:
    loaded = load_problem(problem)
    return bind_arguments(loaded, sort_arguments(loaded, arguments), case=case, dtype=dtype)


def run(problem: Any = CONV, **arguments: Any) -> np.ndarray:
    result: np.ndarray = dispatcher.run(problem, device="numpy", **arguments)
    return result


# ---- sizes -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", dispatcher.problems())
def test_sizes_follow_from_the_tensors_of_every_case(name: str) -> None:
    problem = load_problem(name)
    for case, values in problem.cases.items():
        expected = bind(name, case=case)
        shown = {n for t in problem.tensors for extent in t.shape or () for n in extent.names}
        direct = {str(extent) for t in problem.tensors for extent in t.shape or ()}
        given = {p.name for p in problem.parameters if p.name not in (shown if p.default is None else direct)}
        hidden = {n: v for n, v in values.items() if n in given}
        tensors = {n: np.broadcast_to(np.float32(0), s) for n, s in expected.tensor_shapes.items()}
        assert bind(name, **tensors, **hidden).key == expected.key, case


@pytest.mark.parametrize("value", [2, (2, 2, 2), [2, 2, 2], np.array([2, 2, 2]), np.int16(2), np.array(2)])
def test_a_shorthand_stands_for_three_sizes(value: Any) -> None:
    sizes = bind(CONV, **conv_tensors(), stride=value).sizes
    assert [sizes[f"stride_{axis}"] for axis in "dhw"] == [2, 2, 2]
    assert [type(sizes[f"stride_{axis}"]) for axis in "dhw"] == [int] * 3


def test_a_triple_is_depth_height_width() -> None:
    sizes = bind(CONV, **conv_tensors(), stride=(1, 2, 3), dilation=(3, 2, 1)).sizes
    assert [sizes[f"stride_{axis}"] for axis in "dhw"] == [1, 2, 3]
    assert [sizes[f"dilation_{axis}"] for axis in "dhw"] == [3, 2, 1]


def test_shorthands_of_the_problems() -> None:
    assert list(shorthands(load_problem(CONV))) == ["kernel_size", "stride", "padding", "output_padding", "dilation"]


def test_a_case_is_a_base_that_arguments_override() -> None:
    operator = bind(CONV, case="sample", stride=1, output_padding=0, batch_size=7)
    assert operator.sizes["stride_h"] == 1
    assert operator.sizes["batch_size"] == 7
    assert operator.sizes["groups"] == 2
    tensors = tensors_of({"input": (1, 4, 9, 9, 9)})
    assert bind(CONV, case="sample", **tensors).sizes["depth"] == 9


def test_groups_are_not_guessed_from_a_wrong_kernel() -> None:
    with pytest.raises(InputError, match=r"tensor kernel .* extent 6 on axis 1, but out_channels / groups is 12"):
        bind(CONV, **conv_tensors(), out_channels=12)
    assert bind(CONV, **conv_tensors(), groups=2).sizes["out_channels"] == 12


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"stride": 0}, "stride on axis depth is 0"),
        ({"stride": -1}, "stride_d|stride is -1"),
        ({"stride": (2, 2)}, "stride has 2 values, .* expected one value, or three for stride_d"),
        ({"stride": (2, 2, 2, 2)}, "stride has 4 values"),
        ({"stride": 2.5}, "stride is 2.5"),
        ({"stride": 2.0}, "stride is 2.0; expected a whole number"),
        ({"stride": True}, "stride is True"),
        ({"stride": "2"}, "stride is '2'"),
        ({"stride_d": np.True_}, "stride_d is"),
        ({"stride": 2, "stride_d": 3}, "stride and stride_d contradict"),
        ({"dilation": 0}, "dilation on axis depth is 0"),
        ({"groups": 3}, "in_channels is 4; it must be divisible by groups"),
        ({"groups": 0}, "groups"),
        ({"groups": 10**30}, "groups is 10+; expected"),
        ({"groups": 10**5000}, "groups is a int too long to print"),
        ({"padding": 5}, "output size on axis depth is -5"),
        ({"output_padding": 1}, "output_padding on axis depth is 1"),
        ({"in_channels": 5}, "tensor input .* extent 4 on axis 1, but in_channels is 5"),
        ({"kernel_size": 4}, "tensor kernel .* extent 3 on axis 2, but kernel_d is 4"),
        ({"strid": 2}, "no parameter 'strid'; did you mean 'stride'"),
        ({"shape": 2}, "no parameter 'shape'; expected one of"),
        ({"algorithm": "direct"}, r"no parameter 'algorithm'; .* into options=\{'algorithm': 'direct'\}"),
        ({"kernel": conv_tensors()["kernel"][:3]}, "tensor kernel .* extent 3 on axis 0, but in_channels is 4"),
        ({"kernel": conv_tensors()["kernel"][0]}, r"tensor kernel has shape \(6, 3, 2, 2\), 4 axes; expected 5"),
        ({"input": np.float32(3)}, r"tensor input has shape \(\), 0 axes; expected 5"),
        ({"input": np.zeros((1, 4, 0, 2, 2), "f4")}, "axis depth"),
    ],
)
def test_wrong_sizes_are_named(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        bind(CONV, **{**conv_tensors(), **arguments})
    assert "\n" not in str(caught.value)


def test_sizes_that_no_memory_holds_are_refused() -> None:
    with pytest.raises(GeometryError, match=r"tensor output of shape .* bytes; no memory holds"):
        bind(CONV, case="sample", stride=65536, depth=10**4, height=10**4, width=10**4, batch_size=10**4)


def test_a_shorthand_and_a_long_name_may_agree() -> None:
    assert bind(CONV, **conv_tensors(), stride=2, stride_d=2).sizes["stride_d"] == 2


def test_missing_sizes_are_all_named_with_the_ways_to_give_them() -> None:
    with pytest.raises(IncompleteError) as caught:
        bind(CONV, depth=3, in_channels=4)
    message = str(caught.value)
    for part in ("batch_size", "kernel_size (kernel_d, kernel_h, kernel_w)", "tensors", "input", "sample"):
        assert part in message
    assert "depth" not in message.partition(" have no value")[0].split(", ")


def test_an_unknown_case_lists_the_cases() -> None:
    with pytest.raises(InputError, match=r"no case 'nope'; expected one of sample, kernelbench"):
        bind(CONV, case="nope")


# ---- scalars -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "value", [2, 2.0, np.float32(2), np.float64(2), np.int8(2), np.array(2.0), fractions.Fraction(4, 2)]
)
def test_real_numbers_are_scalars(value: Any) -> None:
    assert bind(LAYERNORM, case="sample", scaling_factor=value).scalars["scaling_factor"] == 2.0


@pytest.mark.parametrize("value", [True, np.True_, "2", 2j, [2.0], np.array([2.0]), float("nan"), np.float32("nan")])
def test_other_things_are_not(value: Any) -> None:
    with pytest.raises(InputError, match="scaling_factor is"):
        bind(LAYERNORM, case="sample", scaling_factor=value)


def test_a_number_that_fits_no_double_is_refused() -> None:
    with pytest.raises(InputError, match="fits a double"):
        bind(LAYERNORM, case="sample", scaling_factor=10**400)


def test_infinity_is_for_clamps_only() -> None:
    assert bind(SOFTMAX, case="sample", clamp_max=np.inf).scalars["clamp_max"] == np.inf
    with pytest.raises(InputError, match=r"sum_weight .* finite"):
        bind(SUM, case="sample", sum_weight=np.inf)


# ---- dtypes ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_floats_keep_their_dtype(dtype: str) -> None:
    tensors = {name: tensor.astype(dtype) for name, tensor in conv_tensors().items()}
    assert run(**tensors).dtype == dtype


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int64, np.uint64, np.bool_])
def test_integers_and_bool_become_float32(dtype: Any) -> None:
    tensors = {name: np.rint(tensor).astype(dtype) for name, tensor in conv_tensors().items()}
    plain = {name: tensor.astype(np.float32) for name, tensor in tensors.items()}
    result = run(**tensors)
    assert result.dtype == np.float32
    np.testing.assert_array_equal(result, run(**plain))


@pytest.mark.parametrize(
    ("dtype", "name"),
    [("complex64", "complex64"), ("O", "object"), ("U3", "<U3"), ("M8[s]", "datetime64"), ("g", "float128|longdouble")],
)
def test_other_dtypes_are_named(dtype: str, name: str) -> None:
    if np.dtype(dtype) == np.float64:
        pytest.skip("long double is float64 here")
    with pytest.raises(DtypeError, match=f"tensor input has dtype .*({name})"):
        run(input=np.zeros((1, 4, 2, 2, 2), dtype), kernel=conv_tensors()["kernel"])


def test_mixed_dtypes_name_both_tensors() -> None:
    tensors = conv_tensors()
    with pytest.raises(DtypeError, match="tensor kernel has dtype float64, but tensor input has dtype float32"):
        run(input=tensors["input"], kernel=tensors["kernel"].astype("f8"))
    with pytest.raises(DtypeError, match=r"tensor kernel has dtype int64 \(read as float32\), but tensor input"):
        run(input=tensors["input"].astype("f8"), kernel=tensors["kernel"].astype("i8"))


def test_an_asked_for_dtype_does_not_convert_floats() -> None:
    with pytest.raises(DtypeError, match="tensor input has dtype float32, but dtype float64 was asked for"):
        run(**conv_tensors(), dtype="float64")
    integers = {name: np.rint(tensor).astype(int) for name, tensor in conv_tensors().items()}
    assert run(**integers, dtype=np.float64).dtype == np.float64
    with pytest.raises(DtypeError, match="dtype is 'float8'"):
        run(**conv_tensors(), dtype="float8")


def test_a_list_takes_the_dtype_of_the_others() -> None:
    tensors = conv_tensors()
    expected = run(**tensors)
    np.testing.assert_array_equal(run(input=tensors["input"], kernel=tensors["kernel"].tolist()), expected)
    both = run(input=tensors["input"].tolist(), kernel=tensors["kernel"].tolist())
    assert both.dtype == np.float32
    np.testing.assert_array_equal(both, expected)
    doubles = {"input": tensors["input"].astype("f8"), "kernel": tensors["kernel"].tolist()}
    assert run(**doubles).dtype == np.float64


# ---- layouts -----------------------------------------------------------------------------------------------
class ArrayLike:
    """Something that NumPy can read, as other libraries' CPU tensors are."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self.array if dtype is None else self.array.astype(dtype)


def unaligned(array: np.ndarray) -> np.ndarray:
    raw = np.empty(array.nbytes + 1, np.uint8)
    result = raw[1:].view(array.dtype).reshape(array.shape)
    result[...] = array
    return result


LAYOUTS = {
    "fortran": np.asfortranarray,
    "reversed": lambda a: np.ascontiguousarray(a[:, :, ::-1])[:, :, ::-1],
    "channels_last": lambda a: np.ascontiguousarray(a.transpose(0, 2, 3, 4, 1)).transpose(0, 4, 1, 2, 3),
    "every_second": lambda a: np.repeat(a, 2, axis=4)[..., ::2],
    "big_endian": lambda a: a.astype(a.dtype.newbyteorder(">")),
    "unaligned": unaligned,
    "array_like": ArrayLike,
    "subclass": lambda a: a.view(type("Sub", (np.ndarray,), {})),
    "memmap_like": lambda a: np.frombuffer(a.tobytes(), a.dtype).reshape(a.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_any_layout_is_read_as_the_logical_array(layout: Any) -> None:
    tensors = conv_tensors()
    changed = {name: layout(tensor) for name, tensor in tensors.items()}
    result = run(**changed, stride=2)
    assert result.tobytes() == run(**tensors, stride=2).tobytes()
    assert result.flags.c_contiguous
    assert type(result) is np.ndarray
    for name, tensor in changed.items():
        np.testing.assert_array_equal(np.asarray(tensor), tensors[name])


def test_broadcast_views_and_read_only_arrays() -> None:
    tensors = conv_tensors()
    view = np.broadcast_to(tensors["input"][:1, :1], (2, 4, 3, 4, 5))
    tensors["kernel"].flags.writeable = False
    np.testing.assert_array_equal(
        run(input=view, kernel=tensors["kernel"]), run(input=view.copy(), kernel=tensors["kernel"])
    )


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_host_tensor_is_the_same_array_in_c_order(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    array = np.arange(np.prod(shape), dtype=data.draw(st.sampled_from(["<f4", ">f4", "i2", "f8"]))).reshape(shape)
    array = array.transpose(data.draw(st.permutations(range(array.ndim))))
    array = array[tuple(slice(None, None, data.draw(st.sampled_from([1, 2, -1]))) for _ in range(array.ndim))]
    before = array.copy()
    result = host_tensor(array, np.dtype(np.float32))
    np.testing.assert_array_equal(result, before)
    assert result.dtype == np.float32
    assert result.flags.c_contiguous
    assert not result.flags.writeable
    assert array.flags.writeable


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("abc", "tensor input is 'abc'; expected an array"),
        ({1: 2}, "expected an array"),
        ({1.0, 2.0}, "expected an array"),
        ([[1.0], [2.0, 3.0]], "cannot be read as an array"),
        (np.ma.masked_equal(np.zeros((1, 4, 2, 2, 2), "f4"), 1), "masked array"),
        (object(), "dtype object"),
    ],
)
def test_things_that_are_no_tensors(value: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        run(input=value, kernel=conv_tensors()["kernel"])


def test_the_error_of_a_foreign_object_is_told() -> None:
    class Broken:
        def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
            raise RuntimeError("call detach() first\nsecond line")

    with pytest.raises(InputError, match=r"tensor input cannot be read as an array: call detach\(\) first$"):
        run(input=Broken(), kernel=conv_tensors()["kernel"])


class Indexable:
    """A sequence, such as an array on a device, each element of which would be fetched by itself."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> float:
        raise AssertionError("it was read element by element")


@pytest.mark.parametrize("value", [Indexable(), [Indexable()], [[1.0, 2.0], (3.0, Indexable())]])
def test_a_foreign_sequence_is_read_whole_or_not_at_all(value: Any) -> None:
    with pytest.raises(InputError, match="tensor input is or holds a sequence of a foreign type; expected an array"):
        run(input=value, kernel=conv_tensors()["kernel"])


def test_buffers_are_read_whole() -> None:
    tensors = conv_tensors()
    result = run(input=memoryview(tensors["input"]), kernel=tensors["kernel"].tolist())
    np.testing.assert_array_equal(result, run(**tensors))


class OnlyDLPack:
    """An array of another library that offers DLPack and nothing else."""

    def __init__(self, host: np.ndarray, where: Any = (1, 0)) -> None:
        self._host, self._where = host, where

    def __dlpack__(self, **options: Any) -> Any:
        return self._host.__dlpack__()

    def __dlpack_device__(self) -> Any:
        if isinstance(self._where, Exception):
            raise self._where
        return self._where


def test_arrays_that_offer_dlpack_alone() -> None:
    tensors = conv_tensors()
    result = run(**{name: OnlyDLPack(array) for name, array in tensors.items()})
    np.testing.assert_array_equal(result, run(**tensors))
    with pytest.raises(DtypeError, match="tensor input has dtype complex64"):
        run(**{**tensors, "input": OnlyDLPack(tensors["input"].astype("c8"))})


@pytest.mark.parametrize("where", ["x", "xy", None, 5, (1,), ValueError("no device"), RuntimeError("not here")])
def test_arrays_that_cannot_say_where_they_are(where: Any) -> None:
    tensors = conv_tensors()
    with pytest.raises(InputError, match="tensor input cannot say by DLPack on which device it is"):
        run(**{**tensors, "input": OnlyDLPack(tensors["input"], where)})


def test_a_tensor_without_data() -> None:
    torch = pytest.importorskip("torch")
    tensors = conv_tensors()
    with pytest.raises(InputError, match="tensor input"):
        run(**{**tensors, "input": torch.from_numpy(tensors["input"]).to("meta")})


@pytest.mark.parametrize("interface", [5, {}, {"typestr": "<f4"}, {"typestr": "?!", "shape": (1,)}])
def test_damaged_arrays_on_a_device(interface: Any) -> None:
    class Damaged:
        __cuda_array_interface__ = interface

    with pytest.raises(InputError, match="__cuda_array_interface__ that cannot be read"):
        run(**{**conv_tensors(), "input": Damaged()})


# ---- the result array --------------------------------------------------------------------------------------
def test_output_is_filled_and_returned() -> None:
    tensors = conv_tensors()
    expected = run(**tensors)
    output = np.full_like(expected, np.nan)
    assert run(**tensors, output=output) is output
    np.testing.assert_array_equal(output, expected)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda a: a[:1], r"output has shape \(1, 6, 5, 5, 6\); expected a writeable C-contiguous float32"),
        (lambda a: a.astype("f8"), "output has dtype float64"),
        (np.asfortranarray, "output is not C-contiguous"),
        (lambda a: np.broadcast_to(a, a.shape), "output is read-only"),
        (unaligned, "output is not aligned"),
        (lambda a: a.tolist(), "output is .*; expected a writeable"),
        (np.ma.asarray, "output is a masked array"),
    ],
)
def test_a_wrong_output_is_refused(make: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        run(**conv_tensors(), output=make(np.zeros((2, 6, 5, 5, 6), np.float32)))


def test_an_output_that_overlaps_an_input_is_refused_before_anything_runs() -> None:
    store = np.arange(1200, dtype=np.float32)
    inputs = store[800:1040].reshape(1, 4, 3, 4, 5)
    output = store[:900].reshape(1, 6, 5, 5, 6)
    with pytest.raises(InputError, match="output shares memory with tensor input"):
        run(input=inputs, kernel=conv_tensors()["kernel"], output=output)
    np.testing.assert_array_equal(store, np.arange(1200))


def test_what_is_mapped_to_a_file_that_is_read_is_not_written_there(tmp_path: Path) -> None:
    path, weights = tmp_path / "x.npy", {"kernel": np.ones((4, 1, 1, 1, 1), "f4"), "groups": 4}
    np.save(path, np.arange(8, dtype=np.float32).reshape(2, 4, 1, 1, 1))
    (tmp_path / "same.npy").symlink_to(path)
    x, store = np.load(path, mmap_mode="r"), np.load(tmp_path / "same.npy", mmap_mode="r+")
    with pytest.raises(InputError, match=r"output shares a place in '.*x.npy' with tensor input"):
        run(input=x[1:], **weights, output=store[1:])
    with pytest.raises(InputError, match=r"trace '.*same.npy' would replace '.*x.npy', which is read"):
        run(input=x[1:], **weights, trace=tmp_path / "same.npy")
    np.testing.assert_array_equal(np.load(path).ravel(), np.arange(8))
    run(input=x[1:], **weights, output=store[:1])  # beside it
    np.testing.assert_array_equal(np.load(path).ravel(), [4, 5, 6, 7, 4, 5, 6, 7])


def test_a_result_never_shares_memory_with_an_input() -> None:
    x = np.arange(4, dtype=np.float32).reshape(1, 4, 1, 1, 1)
    result = run(input=x, kernel=np.ones((4, 1, 1, 1, 1), "f4"), groups=4)
    np.testing.assert_array_equal(result, x)
    assert not np.shares_memory(result, x)


class DeviceArray:
    """An array on a CUDA device, as far as anybody can see."""

    def __init__(self, shape: tuple[int, ...], address: int, typestr: str = "<f4", **more: Any) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape, "typestr": typestr, "data": (address, False), "version": 3, **more,
        }  # fmt: skip


def test_a_bound_array_on_a_device_is_copied_where_its_library_copies() -> None:
    class Copying(DeviceArray):
        def copy(self) -> DeviceArray:
            return DeviceArray((2, 2), 3000)

    kept = snapshot("x", tensor_argument("x", Copying((2, 2), 1000)))
    assert kept.array.__cuda_array_interface__["data"] == (3000, False)
    mute = DeviceArray((2, 2), 1000)
    assert snapshot("x", tensor_argument("x", mute)).array is mute


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (DeviceArray((2, 3), 1000), "has shape"),
        (DeviceArray((2, 2), 1000, "<f8"), "has dtype float64"),
        (DeviceArray((2, 2), 1000, data=(1000, True)), "read-only"),
        (DeviceArray((2, 2), 1000, strides=(4, 8)), "not C-contiguous"),
        (DeviceArray((2, 2), 1000, strides=(16, 4)), "not C-contiguous"),
        (DeviceArray((2, 2), 2004), "shares memory with tensor x"),
        (DeviceArray((2, 2), 1990), "shares memory with tensor x"),
        (DeviceArray((2, 2), 1984), None),
        (DeviceArray((2, 2), 2016, strides=None), None),
    ],
)
def test_outputs_on_a_device_are_checked_too(output: Any, words: str | None) -> None:
    inputs = {"x": DeviceArray((2, 2), 2000 + 4, strides=(8, -4))}
    if words is None:
        check_output(output, (2, 2), "float32", inputs)
    else:
        with pytest.raises(InputError, match=words):
            check_output(output, (2, 2), "float32", inputs)


# ---- texts -------------------------------------------------------------------------------------------------
def test_assignments_are_parsed_by_role() -> None:
    problem = load_problem(SOFTMAX)
    texts = ["stride=2", "padding=1,0,2", "clamp_max=inf", "clamp_min=-1e-3", " depth = 4 "]
    assert parse_assignments(problem, texts, "--set") == {
        "stride": 2, "padding": (1, 0, 2), "clamp_max": np.inf, "clamp_min": -1e-3, "depth": 4,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("stride", "--set 'stride' is not understood; expected NAME=VALUE"),
        ("=3", "not understood"),
        ("stride=", "--set stride is ''"),
        ("stride=1_0", "--set stride is '1_0'"),
        ("stride=2,2", "--set stride has 2 values"),
        ("stride=-1", "--set stride is -1"),
        ("depth=2.5", "--set depth is '2.5'; expected a whole number"),
        ("depth=2,2,2", "--set depth is '2,2,2'"),
        ("clamp_min=nan", "--set clamp_min is nan"),
        ("clamp_min=low", "--set clamp_min is 'low'; expected a number"),
        ("input=3", "input is a tensor"),
        ("strides=3", "did you mean 'stride'"),
    ],
)
def test_wrong_assignments_name_option_and_value(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        parse_assignments(load_problem(SOFTMAX), [text], "--set")


def test_an_assignment_given_twice_is_refused() -> None:
    with pytest.raises(InputError, match="--set stride is given twice"):
        parse_assignments(load_problem(SOFTMAX), ["stride=1", "stride=1"], "--set")


def test_geometry_errors_are_input_errors() -> None:
    with pytest.raises(GeometryError, match="window"):
        bind(MAXMAX, case="sample", depth=1, kernel_size=1, padding=0, stride=1)


# ---- numbers of any origin ---------------------------------------------------------------------------------
class Broken:
    """An object whose own code fails, whatever it is asked."""

    def __index__(self) -> int:
        raise RuntimeError("index")

    __repr__ = __float__ = __index__  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("eq")

    __hash__ = __index__


HOSTILE = [10**5000, -(10**5000), math.nan, True, np.True_, np.timedelta64(3), "9" * 10**5, Broken(), [Broken()], 3j]
NUMBERS: dict[str, Callable[[Any], Any]] = {
    "size": lambda value: dispatcher.explain(CONV, device="numpy", case="sample", groups=value),
    "shorthand": lambda value: run(**conv_tensors(), stride=(1, value, 1)),
    "scalar": lambda value: bind(LAYERNORM, case="sample", scaling_factor=value),
    "seed": lambda value: dispatcher.verify(CONV, device="numpy", seed=value),
    "seeds": lambda value: dispatcher.verify(CONV, device="numpy", seeds=value),
    "repeats": lambda value: dispatcher.benchmark(CONV, device="numpy", repeats=value),
    "warmup": lambda value: dispatcher.benchmark(CONV, device="numpy", warmup=value),
    "time limit": lambda value: dispatcher.benchmark(CONV, device="numpy", time_limit_s=value),
    "judging": lambda value: dispatcher.verify_kernel(CONV, "k.cl", repeats=value),
    "timeout": lambda value: dispatcher.verify_kernel(CONV, "k.cl", timeout_s=value),
    "default": lambda value: dispatcher.load_problem({**TINY, "cases": {"one": {"n": value}}}),
    "device": lambda value: dispatcher.compile(CONV, device=value),
    "devices": lambda value: dispatcher.compile(CONV, devices=[value]),
    "precision": lambda value: dispatcher.compile(CONV, precision=value),
    "dtype": lambda value: dispatcher.run(CONV, dtype=value, **conv_tensors()),
    "case": lambda value: dispatcher.compile(CONV, case=value),
    "inputs": lambda value: dispatcher.verify(CONV, inputs=[value]),
    "against": lambda value: dispatcher.benchmark(CONV, against=[value]),
    "opencl option": lambda value: opencl_options.Options.parse({"algorithm": value}),
    "cuda option": lambda value: cuda_options.parse({"tile": value}),
}
TINY: dict[str, Any] = {
    "name": "tiny",
    "parameters": [
        {"name": "x", "type": "tensor", "const": True, "shape": [1, 1, 1, 1, "n"]},
        {"name": "y", "type": "tensor", "const": False},
        {"name": "n", "type": "size_t"},
        {"name": "a", "type": "double", "default": np.float32(0.5)},
    ],
    "pipeline": [{"op": "scale", "by": "a"}],
    "cases": {"one": {"n": np.array(3)}},
}


@pytest.mark.parametrize("name", NUMBERS)
def test_hostile_values_are_refused_in_one_short_line(name: str) -> None:
    for value in HOSTILE:
        with pytest.raises((InputError, DeviceError)) as caught:
            NUMBERS[name](value)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_numpy_numbers_are_taken_like_python_s() -> None:
    same = [
        lambda n: bind(CONV, **conv_tensors(), stride=n(2), padding=(n(1), 0, n(0))).sizes,
        lambda n: check_seeds(n(7), n(2)),
        lambda n: repr(Rules(n(3), n(4), n(5), n(6))),
        lambda n: check_options({"tile": (n(2), 4, n(16))}),
        lambda n: dispatcher.load_problem({**TINY, "cases": {"one": {"n": n(4), "a": n(2)}}}),
        lambda n: run(**conv_tensors(), stride=n(2)).tolist(),
    ]
    for taken in same:
        for kind in (np.int64, np.uint8, np.array):
            assert taken(kind) == taken(int)
    rules = Rules(np.int64(1), np.int8(2), np.array(3))
    assert [type(number) for number in (rules.seed, rules.repeats, rules.warmup)] == [int] * 3
    for limit in (np.float32(0.5), np.array(0.5), np.float16(0.5)):
        assert type(Rules(time_limit_s=limit).time_limit_s) is float


def test_numbers_that_print_alike_are_told_apart() -> None:
    compiled = dispatcher.compile(LAYERNORM, device="numpy", case="sample")
    tensors = random_tensors(bind(LAYERNORM, case="sample"), 0)
    with np.printoptions(precision=1, formatter={"float": lambda _: "x"}):
        one, two = (compiled(**tensors, scaling_factor=np.array(factor)) for factor in (1.0, 2.0))
    np.testing.assert_array_equal(2.0 * one, two)
