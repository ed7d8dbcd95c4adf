"""A backend that is wrong in some way must be caught, on the command line as in Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import Install
from fakes import CONV, MAXMAX, SOFTMAX, FakeBackend, correct

import dispatcher
from dispatcher import cli
from dispatcher.device.selection import FallbackWarning
from dispatcher.errors import KernelError


def zeros(operator: Any, tensors: Any) -> Any:
    return np.zeros(operator.output_shape, operator.dtype)


def constant(operator: Any, tensors: Any) -> Any:
    return np.full(operator.output_shape, correct(operator, tensors).mean(), operator.dtype)


def one_percent_off(operator: Any, tensors: Any) -> Any:
    return correct(operator, tensors) * operator_type(operator)(1.01)


def one_element_off(operator: Any, tensors: Any) -> Any:
    result = correct(operator, tensors)
    result.flat[-1] *= 1.001
    return result


def one_element_unwritten(operator: Any, tensors: Any) -> Any:
    result = correct(operator, tensors)
    result.flat[result.size // 2] = np.nan
    return result


def shifted(operator: Any, tensors: Any) -> Any:
    return np.roll(correct(operator, tensors), 1, axis=-1)


def changes_its_input(operator: Any, tensors: Any) -> Any:
    result = correct(operator, tensors)
    hidden = tensors["input"].base
    hidden.flags.writeable = True
    hidden[...] = 0
    return result


def writes_to_its_input(operator: Any, tensors: Any) -> Any:
    tensors["input"][...] = 0
    return zeros(operator, tensors)


def wrong_shape(operator: Any, tensors: Any) -> Any:
    return correct(operator, tensors)[:, :, :, :, ::-1][:1, :1, :1, :1, :2]


def raises(operator: Any, tensors: Any) -> Any:
    raise RuntimeError("clEnqueueNDRangeKernel failed: INVALID_WORK_GROUP_SIZE")


def kernel_error(operator: Any, tensors: Any) -> Any:
    raise KernelError("kernel conv_transpose3d_direct failed: out of resources")


def operator_type(operator: Any) -> Any:
    return np.dtype(operator.dtype).type


WRONG = [zeros, constant, one_percent_off, one_element_off, one_element_unwritten, shifted, changes_its_input]
BROKEN = [writes_to_its_input, wrong_shape, raises, kernel_error]


@pytest.mark.parametrize("problem", [CONV, SOFTMAX, MAXMAX])
@pytest.mark.parametrize("behaviour", WRONG)
def test_a_wrong_result_fails_verification(
    install_backends: Install, capsys: pytest.CaptureFixture[str], behaviour: Any, problem: str
) -> None:
    install_backends(FakeBackend("bad", behaviour))
    for device in ("bad", "auto"):
        assert cli.main(["run", problem, "--device", device]) == 1
        captured = capsys.readouterr()
        assert captured.err.startswith("error: wrong result on bad:0: ")
        assert captured.err.count("\n") == 1
    assert cli.main(["verify", problem, "--device", "bad"]) == 1
    assert cli.main(["bench", problem, "--device", "bad", "--repeat", "1"]) == 1
    capsys.readouterr()


@pytest.mark.parametrize("behaviour", BROKEN)
def test_a_failed_run_is_a_kernel_error_where_the_device_was_named(
    install_backends: Install, capsys: pytest.CaptureFixture[str], behaviour: Any
) -> None:
    install_backends(FakeBackend("bad", behaviour))
    for command in (["run", CONV], ["verify", CONV], ["bench", CONV]):
        assert cli.main([*command, "--device", "bad"]) == 4
        captured = capsys.readouterr()
        assert captured.err.startswith("error: ")
        assert captured.err.count("\n") == 1
        assert "bad:0" in captured.err or "out of resources" in captured.err


@pytest.mark.parametrize("behaviour", BROKEN)
def test_auto_falls_back_warns_once_and_says_where_it_ran(
    install_backends: Install, capsys: pytest.CaptureFixture[str], behaviour: Any
) -> None:
    install_backends(FakeBackend("bad", behaviour))
    assert cli.main(["run", CONV, "--repeat", "3"]) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith("warning: bad:0 (Fake One) is passed over")
    assert captured.err.count("\n") == 1
    assert "device    numpy" in captured.out
    assert "skipped   bad:0" in captured.out


def test_inputs_survive_a_backend_that_writes_to_them(install_backends: Install) -> None:
    install_backends(FakeBackend("bad", writes_to_its_input))
    x = np.ones((1, 1, 2, 2, 2), np.float32)
    with pytest.warns(FallbackWarning, match="read-only"):
        dispatcher.run(CONV, input=x, kernel=x)
    np.testing.assert_array_equal(x, np.ones_like(x))


def test_a_backend_that_ignores_output_is_found_out(install_backends: Install) -> None:
    backend = FakeBackend("bad")

    class IgnoresOutput:
        launches = ()

        def __call__(self, tensors: Any, output: Any = None, timings: Any = None) -> Any:
            return np.zeros((2, 6, 10, 12, 14), np.float32)

    backend.compile = lambda operator, device, options: IgnoresOutput()  # type: ignore[method-assign,assignment,return-value]
    install_backends(backend)
    assert cli.main(["run", CONV, "--device", "bad"]) == 4


def test_a_right_backend_passes(install_backends: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install_backends(FakeBackend("good"))
    problems = [CONV, MAXMAX, SOFTMAX]
    for problem in problems:
        assert cli.main(["run", problem]) == 0
    assert cli.main(["verify", *problems]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
