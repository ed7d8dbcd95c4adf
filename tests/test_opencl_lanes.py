"""The CPU kernels with vectors of 8 and of 4 floats, which processors without AVX-512 have, whatever there is here."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from dispatcher.problem.operator import Operator
from tests.strategies import DEVICES, Place, call_on, checked_run, conv_operator, in_dtype, tensors_of

pytest.importorskip("pyopencl")

from dispatcher.backends.opencl import BACKEND
from dispatcher.backends.opencl.runtime import float_lanes

#: The last runtime; `make check-isa` compiles for an older processor, and runs more.
HERE = [place for place in DEVICES if place.backend == "opencl"][-1:]
POOL = [{"op": "max_pool3d", "window": 2}, "softmax"]
WINOGRAD = {"algorithm": "winograd", "planes": "2", "rows": "3", "columns": "2"}
#: Each core: an operator, and the options that make it run there.
CASES: dict[str, tuple[Operator, dict[str, str]]] = {
    "winograd": (conv_operator((1, 17, 3, 7, 10), 21, (5, 5, 5), stride=2, padding=2, after=POOL), WINOGRAD),
    "direct": (
        conv_operator((2, 6, 3, 6, 35), 22, (3, 4, 5), stride=2, padding=1, groups=2, after=["gelu"]),
        {"algorithm": "direct", "line": "flat"},
    ),
    "channels": (
        conv_operator((1, 5, 2, 5, 19), 27, (2, 3, 4), stride=3, padding=1, after=["layer_norm"]),
        {"algorithm": "direct", "line": "channels"},
    ),
    "in place": (conv_operator((2, 3, 4, 9, 37), 5, (1, 3, 5), op="conv3d", after=["mish"]), {}),
}


@pytest.mark.parametrize(
    ("name", "lanes", "dtype"),
    [
        ("winograd", 8, "float32"),
        ("winograd", 2, "float64"),
        ("direct", 8, "float32"),
        ("channels", 4, "float32"),
        ("in place", 4, "float32"),
    ],
)
@pytest.mark.parametrize("place", HERE, ids=str)
def test_every_core_with_fewer_lanes(
    place: Place, name: str, lanes: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.need()
    device = next(device for device in BACKEND.probe() if device.id == place.device)
    runtime = BACKEND._runtime(device)
    facts = replace(runtime.facts, vec=lanes if dtype == "float32" else 2 * lanes, vec_double=lanes)
    monkeypatch.setitem(runtime.__dict__, "facts", facts)
    operator, options = CASES[name]
    operator = in_dtype(operator, dtype)
    tensors = tensors_of(operator)
    _, comparison = checked_run(call_on(operator, tensors, place.device, options), tensors)
    assert comparison.passed, comparison.reason
    assert BACKEND.compile(operator, device, options).launches[0].detail["vector"] == lanes


def test_lanes_are_those_that_the_compiler_compiles_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Intel's runtime tells those of the processor, also where it was told to compile for an older one."""
    intel, pocl = SimpleNamespace(name="Intel(R) OpenCL"), SimpleNamespace(name="Portable Computing Language")
    wide, narrow = SimpleNamespace(native_vector_width_float=16), SimpleNamespace(native_vector_width_float=4)
    for value, lanes in (("core-avx2", 8), ("corei7", 4), ("skylake-avx512", 16), ("", 16)):
        monkeypatch.setenv("CL_CONFIG_CPU_TARGET_ARCH", value)
        assert (float_lanes(intel, wide), float_lanes(pocl, wide), float_lanes(intel, narrow)) == (lanes, 16, 4)
