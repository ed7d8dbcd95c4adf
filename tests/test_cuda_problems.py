"""The five problems on three architectures, in both precisions, and what is launched for them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.cuda_support import check, compiled, device, machine, operator, simulator_only
from tests.family import FIVE
from tests.strategies import tensors_of

ARCHITECTURES = ("7.5", "8.0", "9.0")
ACSM = "conv-transpose3d-avgpool-clamp-softmax-multiply"
LGS = "conv-transpose3d-layernorm-gelu-scaling"
SLAG = "conv-transpose3d-sum-layernorm-avgpool-gelu"
BMMS = "conv-transpose3d-max-max-sum"

#: Launches of the `sample` case where tensor cores are used, and on an architecture without them.
LAUNCHES = {
    ACSM: (["conv_halo", "conv_halo"], ["pool", "conv_fma", "gathered"]),
    LGS: (["conv_halo"], ["conv_fma"]),
    SLAG: (["conv_halo"], ["conv_fma"]),
    BMMS: (["conv_halo"], ["conv_fma", "pool", "rows_by_block"]),
}


@pytest.fixture
def three_architectures() -> Iterator[None]:
    """Devices 0, 1 and 2 of a simulated machine, one of each architecture."""
    with machine(devices=3, arch=",".join(ARCHITECTURES)):
        yield


@simulator_only
@pytest.mark.usefixtures("three_architectures")
@pytest.mark.parametrize("precision", ["fp32", "tf32"])
@pytest.mark.parametrize("name", FIVE)
@pytest.mark.parametrize("index", range(3), ids=[f"sm_{arch.replace('.', '')}" for arch in ARCHITECTURES])
def test_problem(index: int, name: str, precision: str) -> None:
    op = operator(name, precision=precision)
    check(op, tensors_of(op), index)
    if name in LAUNCHES:
        wanted = LAUNCHES[name][index == 0]
        assert [launch.name for launch in compiled(op, index).launches] == wanted


@pytest.mark.parametrize("name", FIVE)
def test_problem_on_the_device_at_hand(name: str) -> None:
    device()
    for precision in ("fp32", "tf32"):
        op = operator(name, precision=precision)
        check(op, tensors_of(op))


@simulator_only
@pytest.mark.usefixtures("three_architectures")
@pytest.mark.parametrize("name", [LGS, BMMS, ACSM])
def test_truncating_sums_cost_no_accuracy(name: str) -> None:
    """Real tensor cores cut their sums. The results are then others, and still within the bound of
    float32."""
    op = operator(name)
    tensors = tensors_of(op)
    rounded = check(op, tensors, 1)
    with machine(devices=2, arch="8.0", mma="rz"):
        truncated = check(op, tensors)
    assert (rounded != truncated).any()


@simulator_only
@pytest.mark.parametrize("copies", ["late", "eager"])
@pytest.mark.parametrize("schedule", ["forward", "reverse"])
def test_order_of_threads_and_copies_makes_no_difference(schedule: str, copies: str) -> None:
    for name in (LGS, SLAG, BMMS, ACSM):
        op = operator(name)
        with machine(devices=1, arch="8.0", schedule=schedule, async_copy=copies):
            check(op, tensors_of(op))
        with machine(devices=1, arch="7.5", schedule=schedule):
            check(op, tensors_of(op))


@simulator_only
@pytest.mark.parametrize("algorithm", ["halo", "fma"])
def test_nothing_is_read_behind_an_allocation(algorithm: str) -> None:
    for name in (LGS, BMMS):
        op = operator(name)
        with machine(devices=1, arch="9.0", alignment=16):
            check(op, tensors_of(op), algorithm=algorithm)


def test_results_repeat_to_the_bit() -> None:
    op = operator(ACSM)
    run, tensors = compiled(op), tensors_of(op)
    first = run(tensors)
    assert all(np.array_equal(first, run(tensors)) for _ in range(3))


@simulator_only
@pytest.mark.parametrize(
    ("arch", "steps"),
    [
        ("7.5", [("avg_pool3d",), ("conv_transpose3d", "clamp"), ("softmax", "scale")]),
        ("8.9", [("avg_pool3d", "conv_transpose3d", "clamp", "softmax", "scale")] * 2),
    ],
)
def test_every_launch_says_what_it_does(arch: str, steps: list[tuple[str, ...]]) -> None:
    with machine(devices=1, arch=arch):
        launches = compiled(operator(ACSM)).launches
        assert [launch.steps for launch in launches] == steps
        assert all(launch.algorithm and launch.detail for launch in launches)
