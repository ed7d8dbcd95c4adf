"""Options and arguments that commands share: their texts, and what some of them do before a command begins."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Annotated, Any

import typer

from dispatcher.report import streams


def _log_at(level: int) -> Callable[[bool], bool]:
    def enable(value: bool) -> bool:
        if value:
            streams.log_to_stderr(level)
        return value

    return enable


def _switch_self_tests(value: bool | None) -> bool | None:
    if value is not None:
        from dispatcher.device.selftest import VARIABLE

        streams.change_environment(VARIABLE, "on" if value else "off")
    return value


def option(metavar: str, text: str, *names: str) -> Any:
    """An option that takes a text; named after its parameter where ``names`` do not say otherwise."""
    return typer.Option(*names, metavar=metavar, help=text)


def flag(text: str, *names: str, callback: Callable[[Any], Any] | None = None) -> Any:
    """An option that takes none; one with a callback takes effect before the others are looked at."""
    return typer.Option(*names, callback=callback, is_eager=callback is not None, help=text)


ProblemArgument = Annotated[str, typer.Argument(metavar="PROBLEM", help="Name of a problem, or path of its file.")]
ProblemsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[PROBLEM]...", help="Names or paths; all bundled ones if left out.")
]
_ELSE = "If left out: the environment variable"
DeviceOption = Annotated[
    str | None,
    option(
        "D",
        "auto, a backend, backend:index, backend:part-of-name, all-of:backend to share the batch among its "
        f"devices, or several with commas in order of preference. {_ELSE} DISPATCHER_DEVICE, then auto.",
    ),
]
DeviceOrAllOption = Annotated[str | None, option("D|all", "A device, or all usable ones.")]
BenchDeviceOption = Annotated[
    str | None, option("D|all", f"A device, or all usable ones. {_ELSE} DISPATCHER_DEVICE, then auto.")
]
CaseOption = Annotated[
    str | None, option("C", "Named case that gives the sizes; sample if left out, where the problem has it.")
]
SetOption = Annotated[
    list[str] | None,
    option("NAME=VALUE", "A size, a scalar, or a shorthand: stride=2, stride=2,2,1. Repeatable.", "--set"),
]
DtypeOption = Annotated[
    str | None, option("DTYPE", "float16, bfloat16, float32 or float64, for every tensor; float32 if left out.")
]
PrecisionOption = Annotated[str, option("P", "fp32, or tf32 to allow 10-bit mantissas in matrix products.")]
SeedOption = Annotated[str, option("N", "Seed of the random tensors, from 0 to 2**64 - 1.")]
AlgorithmOption = Annotated[
    str | None,
    option(
        "A", "Algorithm of the convolution, as the backend names it: OpenCL has auto, direct, winograd, tiled, gather."
    ),
]
TuningOption = Annotated[
    list[str] | None, option("NAME=VALUE", "A tuning option of the backend, such as box=2x8. Repeatable.", "--option")
]
JsonOption = Annotated[bool, flag("Print JSON.", "--json")]
DebugOption = Annotated[bool, flag("Log everything; show tracebacks.", "--debug", callback=_log_at(logging.DEBUG))]
VerboseOption = Annotated[bool, flag("Log what happens.", "--verbose", "-v", callback=_log_at(logging.INFO))]
SelfTestOption = Annotated[
    bool | None,
    flag(
        f"Try each device out in another process before its first use, or do not. {_ELSE} "
        "DISPATCHER_SELF_TEST, then yes.",
        "--self-test/--no-self-test",
        callback=_switch_self_tests,
    ),
]
KernelOption = Annotated[
    str | None,
    option(
        "FILE",
        "Judge this kernel of your own instead: a .cl or .cu file. The options from here to --repeat belong to "
        "it; see docs/your-kernel.md.",
    ),
]
GlobalSizeOption = Annotated[
    str | None,
    option(
        "X[,Y[,Z]]",
        "Work items or threads to launch it over: expressions such as output_elements. Without it, a .cu file's "
        "function is called on the host.",
    ),
]
PlotOption = Annotated[str | None, option("FILE", "Draw it: a .svg, .png or .pdf file; needs the extra plot.")]
RetestOption = Annotated[bool, flag("Try the devices out again, whatever is known from earlier.", "--retest")]
