"""The command line: results on stdout, everything else on stderr, and an exit code that says how it went.

Exit codes: 0 done, and verified where asked; 1 a verification failed; 2 wrong usage or input; 3 no such
device, or it cannot run this; 4 a kernel failed to build or run; 130 interrupted; 141 nobody reads stdout;
143 terminated.
"""

from __future__ import annotations

import io
import json
import logging
import math
import os
import shutil
import signal
import statistics
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from dispatcher import __version__
from dispatcher.errors import DeviceError, DispatcherError, InputError, KernelError

if TYPE_CHECKING:
    import numpy as np

    from dispatcher.check.judging import Judgement
    from dispatcher.interface import Device
    from dispatcher.problem.model import Problem
    from dispatcher.problem.operator import Operator
    from dispatcher.timing.results import Race

SCHEMA = 1  # of every --json output; raised when a key changes its meaning or goes away
MAX_SEED = 2**64 - 1
LOGGERS = ("dispatcher",)
INTERRUPTED = 130
CLOSED_PIPE = 141
TERMINATED = 143

app = typer.Typer(
    name="dispatcher",
    help="Run fused 3-D operators, described once in YAML, on CUDA, OpenCL or NumPy.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


class _ClosedPipeError(Exception):
    """Nobody reads stdout any more."""


class _Terminated(BaseException):
    """SIGTERM has come; nothing catches it before main() but what cleans up."""


class _Debug:
    """Whether --debug was given; main() needs to know after the command is gone."""

    on = False


class _Told:
    """What stderr has been told of devices that were passed over, so that it is told once."""

    texts: ClassVar[set[str]] = set()


class _Changed:
    """Environment variables that an option has changed, and what they were before."""

    variables: ClassVar[dict[str, str | None]] = {}


def _enable_debug(value: bool) -> bool:
    if value:
        _Debug.on = True
        _log_to_stderr(logging.DEBUG)
    return value


def _enable_log(value: bool) -> bool:
    if value:
        _log_to_stderr(logging.INFO)
    return value


def _switch_self_tests(value: bool | None) -> bool | None:
    if value is not None:
        from dispatcher.device.selftest import VARIABLE

        _Changed.variables[VARIABLE] = os.environ.get(VARIABLE)
        os.environ[VARIABLE] = "on" if value else "off"
    return value


def _log_to_stderr(level: int) -> None:
    """Show our own log on stderr until main() ends."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(level)


def _print_version(value: bool) -> bool:
    if value:
        _print(f"kernel-dispatcher {__version__}")
        raise typer.Exit
    return value


ProblemArgument = Annotated[
    str, typer.Argument(metavar="PROBLEM", help="Name of a problem, or path of its file.")
]
ProblemsArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="[PROBLEM]...", help="Names or paths; all bundled ones if left out."),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        metavar="D",
        help="auto, a backend, backend:index, backend:part-of-name, all-of:backend to share the batch among its "
        "devices, or several with commas in order of preference. If left out: the environment variable "
        "DISPATCHER_DEVICE, then auto.",
    ),
]
DeviceOrAllOption = Annotated[str | None, typer.Option(metavar="D|all", help="A device, or all usable ones.")]
BenchDeviceOption = Annotated[
    str | None,
    typer.Option(
        metavar="D|all",
        help="A device, or all usable ones. If left out: the environment variable DISPATCHER_DEVICE, then auto.",
    ),
]
CaseOption = Annotated[
    str | None,
    typer.Option(
        metavar="C", help="Named case that gives the sizes; sample if left out, where the problem has it."
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="A size, a scalar, or a shorthand: stride=2, stride=2,2,1. Repeatable.",
    ),
]
DtypeOption = Annotated[
    str | None,
    typer.Option(metavar="DTYPE", help="float16, float32 or float64, for every tensor; float32 if left out."),
]
PrecisionOption = Annotated[
    str, typer.Option(metavar="P", help="fp32, or tf32 to allow 10-bit mantissas in matrix products.")
]
SeedOption = Annotated[
    str, typer.Option(metavar="N", help="Seed of the random tensors, from 0 to 2**64 - 1.")
]
AlgorithmOption = Annotated[
    str | None,
    typer.Option(
        metavar="A",
        help="Algorithm of the convolution, as the backend names it: OpenCL has auto, direct, winograd, tiled, gather.",
    ),
]
TuningOption = Annotated[
    list[str] | None,
    typer.Option(
        "--option", metavar="NAME=VALUE", help="A tuning option of the backend, such as box=2x8. Repeatable."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DebugOption = Annotated[
    bool,
    typer.Option("--debug", callback=_enable_debug, is_eager=True, help="Log everything; show tracebacks."),
]
VerboseOption = Annotated[
    bool,
    typer.Option("--verbose", "-v", callback=_enable_log, is_eager=True, help="Log what happens."),
]
SelfTestOption = Annotated[
    bool | None,
    typer.Option(
        "--self-test/--no-self-test",
        callback=_switch_self_tests,
        is_eager=True,
        help="Try each device out in another process before its first use, or do not. If left out: the "
        "environment variable DISPATCHER_SELF_TEST, then yes.",
    ),
]
KernelOption = Annotated[
    str | None,
    typer.Option(
        "--kernel",
        metavar="FILE",
        help="Judge this kernel of your own instead: a .cl or .cu file. The options from here to --repeat belong to "
        "it; see docs/your-kernel.md.",
    ),
]
EntryOption = Annotated[
    str | None, typer.Option("--entry", metavar="NAME", help="Its function; solution if left out.")
]
GlobalSizeOption = Annotated[
    str | None,
    typer.Option(
        "--global-size",
        metavar="X[,Y[,Z]]",
        help="Work items or threads to launch it over: expressions such as output_elements. Without it, a .cu file's "
        "function is called on the host.",
    ),
]
LocalSizeOption = Annotated[
    str | None, typer.Option("--local-size", metavar="X[,Y[,Z]]", help="Those of a group or block.")
]
BuildOption = Annotated[
    list[str] | None, typer.Option("--build-option", metavar="O", help="For its compiler. Repeatable.")
]
TimeoutOption = Annotated[
    str | None,
    typer.Option("--timeout", metavar="SECONDS", help="For building and running it; 60 if left out."),
]
JudgeRepeatOption = Annotated[
    str | None, typer.Option("--repeat", metavar="N", help="Timed launches of it; 10 if left out.")
]
RetestOption = Annotated[
    bool, typer.Option("--retest", help="Try the devices out again, whatever is known from earlier.")
]


# ---- commands ----------------------------------------------------------------------------------------------
@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        _print(context.get_help())
        raise typer.Exit


@app.command("devices")
def devices_command(
    retest: RetestOption = False,
    self_test: SelfTestOption = None,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
    debug: DebugOption = False,
) -> None:
    """List the devices of this machine, and why some cannot be used."""
    from dispatcher.device.selection import ENVIRONMENT, devices, first_usable, parse_request
    from dispatcher.device.selftest import failed
    from dispatcher.interface import device_dict

    found = devices(retest=retest)
    wanted = os.environ.get(ENVIRONMENT)
    parse_request(wanted)  # a wrong value is an error here too
    try:
        auto = first_usable(parse_request("auto"))[0].id
    except DeviceError:
        auto = None
    if as_json:
        _print_json("devices", {"devices": [device_dict(device) for device in found], "auto": auto})
        return
    rows = [
        (device.id, device.kind, "fails" if failed(device) else "yes", _tested_as(device), device.name)
        if device.available
        else (
            device.backend if device.name == device.backend else device.id,
            "",
            "no",
            "",
            device.reason or "",
        )
        for device in found
    ]
    _print(_table(("DEVICE", "KIND", "USABLE", "SELF-TEST", "NAME, OR WHY NOT"), rows))
    _print(f"auto picks {auto}" if auto else "auto finds no usable device")
    if wanted:
        _print(f"{ENVIRONMENT} is {wanted}, which holds where no device is named")


@app.command("doctor")
def doctor_command(
    retest: RetestOption = False,
    self_test: SelfTestOption = None,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
    debug: DebugOption = False,
) -> None:
    """Say what was looked for and found, and what would mend it.

    The exit code is 3 when only NumPy works.
    """
    from dispatcher.device.diagnosis import doctor

    with _progress("examining"):
        diagnosis = doctor(retest=retest)
    if as_json:
        _print_json("doctor", diagnosis.as_dict())
    else:
        _print(
            _table(
                ("VERDICT", "ABOUT", "WHAT", "FOUND"),
                [(each.verdict, each.topic, each.subject, each.detail) for each in diagnosis.findings],
            )
        )
        remedies = [each for each in diagnosis.findings if each.verdict != "ok" and each.remedy]
        if remedies:
            _print("\nwhat would mend or undo that:")
            _print("\n".join(f"  {each.subject}: {each.remedy}" for each in remedies))
        names = ", ".join(device.id for device in diagnosis.working)
        _print(f"\naccelerated devices that work: {names or 'none'}")
    if not diagnosis.working:
        raise typer.Exit(DeviceError.exit_code)


@app.command("problems")
def problems_command(as_json: JsonOption = False, debug: DebugOption = False) -> None:
    """List the problems that come with the package."""
    from dispatcher.problem.loader import load_problem, problem_names

    found = [load_problem(name) for name in problem_names()]
    if as_json:
        _print_json(
            "problems",
            {
                "problems": [
                    {"name": p.name, "title": p.title, "origin": p.origin, "cases": list(p.cases)}
                    for p in found
                ]
            },
        )
        return
    _print(_table(("PROBLEM", "TITLE", "CASES"), [(p.name, p.title, ", ".join(p.cases)) for p in found]))


@app.command("show")
def show_command(problem: ProblemArgument, as_json: JsonOption = False, debug: DebugOption = False) -> None:
    """Show a problem: its parameters, its pipeline and its cases."""
    from dispatcher.problem.arguments import shorthands
    from dispatcher.problem.loader import load_problem

    loaded = load_problem(problem)
    described = _problem_dict(loaded)
    described["shorthands"] = {name: list(names) for name, names in shorthands(loaded).items()}
    if as_json:
        _print_json("show", described)
        return
    _print(f"{loaded.name}\n{loaded.title}")
    if loaded.origin:
        _print(f"origin: {loaded.origin}")
    _print("")
    _print(
        _table(
            ("PARAMETER", "TYPE", "SHAPE", "DEFAULT"),
            [
                (
                    parameter["name"],
                    parameter["type"]
                    + ("" if parameter["input"] or parameter["type"] != "tensor" else " (result)"),
                    "" if parameter["shape"] is None else f"({', '.join(map(str, parameter['shape']))})",
                    "" if parameter["default"] is None else str(parameter["default"]),
                )
                for parameter in described["parameters"]
            ],
        )
    )
    short = ", ".join(f"{name} ({', '.join(names)})" for name, names in shorthands(loaded).items())
    if short:
        _print(f"\nshorthands: {short}")
    _print("\npipeline:")
    for position, step in enumerate(described["pipeline"], start=1):
        fields = ", ".join(f"{name}={_plain(value)}" for name, value in step["fields"].items())
        source = f" of {step['source']}" if step["source"] else ""
        result = f" -> {step['result']}" if step["result"] else ""
        _print(f"  {position}. {step['op']}({fields}){source}{result}")
    _print("\ncases:")
    for name, values in loaded.cases.items():
        _print(f"  {name}: {', '.join(f'{key}={value}' for key, value in values.items())}")


@app.command("run")
def run_command(
    problem: ProblemArgument,
    device: DeviceOption = None,
    case: Annotated[
        str | None,
        typer.Option(
            metavar="C", help="Named case for what is not set; sample if no tensor is given either."
        ),
    ] = None,
    settings: SetOption = None,
    tensor: Annotated[
        list[str] | None,
        typer.Option("--tensor", metavar="NAME=FILE.npy", help="A tensor; random if left out. Repeatable."),
    ] = None,
    output: Annotated[
        str | None, typer.Option("--output", metavar="FILE.npy", help="Where to write the result.")
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(
            "--trace", metavar="FILE.json", help="Where to write what the calls did, for Chrome's tracing."
        ),
    ] = None,
    dtype: DtypeOption = None,
    precision: PrecisionOption = "fp32",
    seed: SeedOption = "0",
    repeat: Annotated[str, typer.Option(metavar="N", help="Timed calls after the first one.")] = "1",
    verify: Annotated[bool, typer.Option(help="Compare the result with the reference.")] = True,
    algorithm: AlgorithmOption = None,
    option: TuningOption = None,
    self_test: SelfTestOption = None,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
    debug: DebugOption = False,
) -> None:
    """Run a problem once and say how it went."""
    from dispatcher.call import tracing
    from dispatcher.check.comparison import Comparison, poisoned
    from dispatcher.check.inputs import random_tensors
    from dispatcher.check.verifying import call_on, checksums, compare_run, comparison_dict
    from dispatcher.device.selection import parse_request, skipped_list
    from dispatcher.interface import device_dict
    from dispatcher.problem.arguments import bind_arguments, parse_assignments, sort_arguments
    from dispatcher.problem.loader import load_problem
    from dispatcher.problem.operator import operator_dict

    # Everything that can be wrong with the input is found out before a device is opened or data is made.
    loaded = load_problem(problem)
    seed_number, repeats = _whole("--seed", seed, 0, MAX_SEED), _whole("--repeat", repeat, 1)
    _check_choices(dtype, precision)
    target = None if output is None else _output_path("--output", output)
    trace_file = None if trace is None else _output_path("--trace", trace)
    if target is not None and target == trace_file:
        raise InputError(f"--output and --trace are both {output}; give each a file of its own")
    parse_request(device)
    options = _options(algorithm, option)
    arguments = parse_assignments(loaded, settings or [], "--set")
    files = _read_tensors(loaded, tensor or [])
    if case is None and not files:
        case = _default_case(loaded)
    operator = bind_arguments(
        loaded,
        sort_arguments(loaded, {**arguments, **files}),
        case=case,
        dtype=dtype,
        precision=precision,
    )

    start = time.perf_counter()
    if set(files) >= set(operator.tensor_shapes):
        tensors: dict[str, Any] = files
    else:
        tensors = {**random_tensors(operator, seed_number), **files}
    tensors = {name: _in_memory(array, operator) for name, array in tensors.items()}
    inputs_s = time.perf_counter() - start

    with tracing.recording(trace_file):
        start = time.perf_counter()
        with _progress("compiling"):
            call = call_on(operator, tensors, device, options)
        compile_s = time.perf_counter() - start

        before = checksums(tensors) if verify else {}
        times: list[float] = []
        with _progress(f"running on {call.choice.device.id}", repeats + 1) as advance:
            for number in range(repeats + 1):
                result = poisoned(operator.output_shape, operator.dtype)
                start = time.perf_counter()
                call(output=result)
                times.append(time.perf_counter() - start)
                advance((number + 1) / (repeats + 1))
    _tell_skipped(call.choice.skipped)
    first_s, warm_s = times[0], times[1:]
    if target is not None:
        _write_array(target, result)

    comparison: Comparison | None = None
    if verify:
        with _progress("verifying") as advance:
            comparison = compare_run(operator, tensors, before, result, advance)
    median_s = max(statistics.median(warm_s), 1e-9)
    report: dict[str, Any] = {
        **operator_dict(operator),
        "case": case,
        "seed": seed_number,
        "device": device_dict(call.choice.device),
        "skipped": skipped_list(call.choice.skipped),
        "inputs_s": inputs_s,
        "compile_s": compile_s,
        "first_s": first_s,
        "warm_s": warm_s,
        "warm_median_s": median_s,
        "gflops": operator.flops / median_s / 1e9,
        "verified": None if comparison is None else comparison.passed,
        "comparison": comparison_dict(comparison),
        "output": None if target is None else str(target),
    }
    if as_json:
        _print_json("run", report)
    else:
        _print_run(report, operator, call.choice.device, comparison)
    if comparison is not None and not comparison.passed:
        _complain(f"wrong result on {call.choice.device.id}: {comparison.reason}")
        raise typer.Exit(1)


@app.command("explain")
def explain_command(
    problem: ProblemArgument,
    device: DeviceOption = None,
    case: CaseOption = None,
    settings: SetOption = None,
    dtype: DtypeOption = None,
    precision: PrecisionOption = "fp32",
    algorithm: AlgorithmOption = None,
    option: TuningOption = None,
    self_test: SelfTestOption = None,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
    debug: DebugOption = False,
) -> None:
    """Show what a call would do, and where, without running it."""
    from dispatcher.call.compiled import explain
    from dispatcher.problem.arguments import parse_assignments
    from dispatcher.problem.loader import load_problem

    loaded = load_problem(problem)
    _check_choices(dtype, precision)
    with _progress("compiling"):
        explanation = explain(
            loaded,
            device=device,
            case=case or _default_case(loaded),
            dtype=dtype,
            precision=precision,
            options=_options(algorithm, option),
            **parse_assignments(loaded, settings or [], "--set"),
        )
    report = explanation.as_dict()
    _tell_skipped(explanation.skipped)
    if as_json:
        _print_json("explain", {**report, "case": case or _default_case(loaded)})
        return
    operator = explanation.operator
    _print_head(operator, explanation.device, explanation.skipped)
    _print(f"work      {_count(operator.flops)}FLOP, {_count(operator.ideal_bytes)}B at least to move")
    for plan in explanation.convolutions:
        _print(f"\nconvolution {plan.input_shape} * {plan.weight_shape} -> {plan.output_shape}")
        _print(
            _table(
                ("AXIS", "INPUT", "KERNEL", "STRIDE", "PADDING", "OUTPUT PADDING", "DILATION", "OUTPUT"),
                [
                    (
                        axis.name,
                        *map(str, (axis.input, axis.kernel, axis.stride, axis.padding)),
                        *map(str, (axis.output_padding, axis.dilation, axis.output)),
                    )
                    for axis in plan.axes
                ],
            )
        )
        _print(f"\nas matrix products, one for each phase{' and group' if plan.groups > 1 else ''}:")
        _print(
            _table(
                ("PHASES", "TAPS D H W", "GEMM M", "GEMM N", "GEMM K"),
                [
                    (
                        str(group.phases),
                        " ".join(map(str, group.taps)),
                        *map(str, (group.gemm_m, group.gemm_n, group.gemm_k)),
                    )
                    for group in plan.phase_groups
                ],
            )
        )
    _print("\nlaunches:")
    _print(
        _table(
            ("LAUNCH", "STEPS", "ALGORITHM", "DETAIL", "NOTE"),
            [
                (
                    launch.name,
                    ", ".join(launch.steps),
                    launch.algorithm,
                    ", ".join(f"{key}={value}" for key, value in launch.detail.items()),
                    launch.note,
                )
                for launch in explanation.launches
            ],
        )
        if explanation.launches
        else "  none: the batch is empty"
    )


@app.command("verify")
def verify_command(
    problem: ProblemsArgument = None,
    device: DeviceOrAllOption = "all",
    case: CaseOption = None,
    settings: SetOption = None,
    dtype: DtypeOption = None,
    precision: PrecisionOption = "fp32",
    inputs: Annotated[
        str | None,
        typer.Option(
            metavar="SET[,SET]...|all",
            help="Sets of inputs: all that are meaningful for the problem, or some of signed, graded, large_mean, "
            "large, small, negative, constant, integers, denormal, one_nan, one_inf. If left out: all, and signed "
            "where the reference takes long.",
        ),
    ] = None,
    seed: SeedOption = "0",
    seeds: Annotated[str, typer.Option(metavar="N", help="Seeds for each set, from --seed on.")] = "1",
    algorithm: AlgorithmOption = None,
    option: TuningOption = None,
    kernel: KernelOption = None,
    entry: EntryOption = None,
    global_size: GlobalSizeOption = None,
    local_size: LocalSizeOption = None,
    build_option: BuildOption = None,
    timeout: TimeoutOption = None,
    repeat: JudgeRepeatOption = None,
    self_test: SelfTestOption = None,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
    debug: DebugOption = False,
) -> None:
    """Compare devices, or your own kernel, with the reference.

    Every element is compared; the worst result comes first.
    """
    from dispatcher.check.verifying import (
        Verification,
        check_inputs,
        check_seeds,
        only_reference,
        verify,
        worst_first,
    )

    seed_number, seed_count = _whole("--seed", seed, 0, MAX_SEED), _whole("--seeds", seeds, 1)
    check_inputs(inputs)
    check_seeds(seed_number, seed_count)
    its_options = {
        "--entry": entry,
        "--global-size": global_size,
        "--local-size": local_size,
        "--build-option": build_option,
        "--timeout": timeout,
        "--repeat": repeat,
    }
    if kernel is not None:
        for name, value in (("--algorithm", algorithm), ("--option", option), ("--seeds", seed_count > 1)):
            if value:
                raise InputError(f"{name} and --kernel are both given; {name} is for our own kernels")
        if problem is None or len(problem) != 1:
            raise InputError(f"--kernel is for one problem, and {len(problem or ())} are given; name one")
        ((loaded, its_case, arguments),) = _load_all(problem, settings, case, dtype, precision, "verify")
        _judge(
            loaded,
            kernel,
            device,
            its_options,
            as_json,
            case=its_case,
            dtype=dtype,
            precision=precision,
            seed=seed_number,
            inputs=inputs,
            **arguments,
        )
        return
    for name, value in its_options.items():
        if value is not None and value != []:
            raise InputError(f"{name} is given without --kernel; give both")
    results: list[Verification] = []
    options = _options(algorithm, option)
    chosen = _load_all(problem, settings, case, dtype, precision, "verify")
    with _progress("verifying") as advance:
        for number, (loaded, its_case, arguments) in enumerate(chosen):
            results += verify(
                loaded,
                device=device,
                case=its_case,
                dtype=dtype,
                precision=precision,
                inputs=inputs,
                seed=seed_number,
                seeds=seed_count,
                options=options,
                progress=partial(_report_part, advance, number, len(chosen)),
                **arguments,
            )
    for result in results:
        _tell_skipped(result.skipped)
    results = worst_first(results)
    failed = [result for result in results if result.outcome == "failed"]
    broken = [result for result in results if result.outcome == "error"]
    refused = [result for result in results if result.outcome == "unsupported"]
    alone = device == "all" and only_reference(results)
    lacking = alone or (refused and device != "all")
    code = 1 if failed else KernelError.exit_code if broken else DeviceError.exit_code if lacking else 0
    if as_json:
        report = {"passed": code == 0, "only_reference": only_reference(results)}
        _print_json("verify", {**report, "results": [result.as_dict() for result in results]})
    else:
        _print_verification(results)
    for result in (*failed, *broken, *refused):
        _complain(f"{result.problem} on {result.device.id}: {result.reason}")
    if alone:
        _complain(
            "nothing was compared with the reference: no device but NumPy can run, and NumPy is the reference; "
            "see dispatcher doctor, or check NumPy alone with --device numpy"
        )
    raise typer.Exit(code)


def _judge(
    problem: Problem,
    kernel: str,
    device: str | None,
    given: Mapping[str, Any],
    as_json: bool,
    **arguments: Any,
) -> None:
    """Verify a user's own kernel, on a device or on all that can run it, and say how it went."""
    from dispatcher.check.judging import ENTRY, TIMEOUT_S, verify_kernel
    from dispatcher.device.childprocess import LONGEST_S

    options = {
        "entry": ENTRY if given["--entry"] is None else given["--entry"],
        "global_size": given["--global-size"],
        "local_size": given["--local-size"],
        "build_options": given["--build-option"] or (),
        "timeout_s": TIMEOUT_S
        if given["--timeout"] is None
        else _seconds_above_zero("--timeout", given["--timeout"], LONGEST_S),
        "repeats": _whole("--repeat", "10" if given["--repeat"] is None else given["--repeat"], 1),
    }
    with _progress(f"judging {kernel}") as advance:
        judgements = verify_kernel(problem, kernel, device=device, progress=advance, **options, **arguments)
    for judgement in judgements:
        _tell_skipped(judgement.skipped)
    if as_json:
        passed = all(judgement.exit_code == 0 for judgement in judgements)
        _print_json("verify", {"passed": passed, "results": [each.as_dict() for each in judgements]})
    for number, judgement in enumerate(judgements):
        if not as_json:
            _print_judgement(judgement, number > 0)
        if not judgement.passed:
            _complain(f"{kernel} on {judgement.device.id}: {judgement.outcome}: {judgement.reason}")
    failed = [judgement.exit_code for judgement in judgements if judgement.exit_code]
    raise typer.Exit(min(failed, default=0))


@app.command("tune")
def tune_command(
    problem: ProblemsArgument = None,
    device: DeviceOption = None,
    case: CaseOption = None,
    settings: SetOption = None,
    dtype: DtypeOption = None,
    precision: PrecisionOption = "fp32",
    keep: Annotated[bool, typer.Option(help="Use the winners on this device from now on.")] = True,
    self_test: SelfTestOption = None,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
    debug: DebugOption = False,
) -> None:
    """Find the fastest algorithm and tile on a device.

    Each candidate is verified first. Times are those of whole calls, or of the kernels alone on a GPU that says them.
    """
    from dispatcher.device import machine
    from dispatcher.timing.tuning import TuneResult, tune_problem

    busy = machine.busy_reason(machine.foreign_load())
    if busy is not None:
        print(f"note: {busy}; repeat this when it is quiet, since the times may be noise", file=sys.stderr)
    chosen = _load_all(problem, settings, case, dtype, precision, "tune")
    results: list[TuneResult] = []
    with _progress("tuning") as advance:
        for number, (loaded, its_case, arguments) in enumerate(chosen):
            results.append(
                tune_problem(
                    loaded,
                    device=device,
                    case=its_case,
                    dtype=dtype,
                    precision=precision,
                    keep=keep,
                    progress=partial(_report_share, advance, number, len(chosen)),
                    **arguments,
                )
            )
    if as_json:
        _print_json("tune", {"results": [result.as_dict() for result in results]})
        return
    for result in results:
        for candidate in result.candidates:
            if candidate.time_s is None:
                options = " ".join(f"{name}={value}" for name, value in candidate.options.items())
                print(
                    f"note: {result.problem} with {options} was left out: {candidate.reason}", file=sys.stderr
                )
    _print(
        _table(
            ("PROBLEM", "DEVICE", "BEST OPTIONS", "CLOCK", "MEDIAN", "DEFAULT", "GAIN"),
            [
                (
                    result.problem,
                    result.device,
                    " ".join(f"{name}={value}" for name, value in result.best.items()) or "the default",
                    result.clock,
                    _seconds(result.best_s),
                    _seconds(result.default_s),
                    f"{result.gain:.2f}",
                )
                for result in results
            ],
        )
    )


@app.command("bench")
def bench_command(
    context: typer.Context,
    problem: ProblemsArgument = None,
    device: BenchDeviceOption = None,
    case: CaseOption = None,
    settings: SetOption = None,
    dtype: DtypeOption = None,
    precision: PrecisionOption = "fp32",
    seed: SeedOption = "0",
    against: Annotated[
        str | None,
        typer.Option(
            metavar="PEER,...",
            help="Other libraries that take turns with the devices: torch, torch-channels-last, torch-compile, "
            "torch-compile-channels-last, onnxruntime, openvino.",
        ),
    ] = None,
    repeat: Annotated[
        str | None, typer.Option(metavar="N", help="Rounds; if left out, until the medians are known well.")
    ] = None,
    time_limit: Annotated[
        str | None, typer.Option(metavar="S", help="Seconds for each problem after which no round begins.")
    ] = None,
    warmup: Annotated[str, typer.Option(metavar="N", help="Calls before them.")] = "2",
    verify: Annotated[bool, typer.Option(help="Check every result.")] = True,
    force: Annotated[bool, typer.Option("--force", help="Measure although others use the machine.")] = False,
    plot: Annotated[
        str | None, typer.Option(metavar="FILE.png", help="Where to write a chart; needs the extra plot.")
    ] = None,
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(
            metavar="A.json B.json",
            help="Measure nothing; say what differs between two results of bench --json by more than the noise.",
        ),
    ] = None,
    algorithm: AlgorithmOption = None,
    option: TuningOption = None,
    self_test: SelfTestOption = None,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
    debug: DebugOption = False,
) -> None:
    """Time problems on devices, after checking the results.

    The exit code is 3 when other programs keep the machine busy.
    """
    if compare is not None:
        _compare_benchmarks(
            *compare, _given(context, beside={"compare", "as_json", "verbose", "debug"}), as_json
        )
        return
    from dispatcher.device.machine import busy_reason
    from dispatcher.device.selection import devices, first_usable, parse_request
    from dispatcher.problem.arguments import bind_numbers
    from dispatcher.timing import racing
    from dispatcher.timing.charts import draw_races, require_matplotlib
    from dispatcher.timing.peers import parse_peers

    seed_number = _whole("--seed", seed, 0, MAX_SEED)
    repeats = None if repeat is None else _whole("--repeat", repeat, 1)
    limit = None if time_limit is None else _seconds_above_zero("--time-limit", time_limit)
    warmups = _whole("--warmup", warmup, 0)
    options = _options(algorithm, option)
    peers = () if against is None else parse_peers(against)
    target = None
    if plot is not None:
        require_matplotlib(plot)
        target = _output_path("--plot", plot)
    chosen = _load_all(problem, settings, case, dtype, precision, "time")
    if device == "all":
        places: list[str | None] = [found.id for found in devices() if found.available]
    else:
        first_usable(parse_request(device))
        places = [device]
    if not force:
        racing.refuse_when_busy()
    races: list[tuple[Problem, str | None, Race]] = []
    with _progress("timing") as advance:
        for number, (loaded, its_case, arguments) in enumerate(chosen):
            outcome = racing.race(
                bind_numbers(loaded, arguments, "time", case=its_case, dtype=dtype, precision=precision),
                places,
                racing.Rules(seed_number, repeats, warmups, limit, verify),
                against=peers,
                options=options,
                progress=partial(_report_share, advance, number, len(chosen)),
            )
            races.append((loaded, its_case, outcome))
            for result in outcome.results:
                _tell_skipped(result.skipped)
    if as_json:
        _print_json("bench", _bench_report(races))
    else:
        _print_bench([outcome for _, _, outcome in races])
    if target is not None and any(outcome.results for _, _, outcome in races):
        draw_races([outcome for _, _, outcome in races], "kernel-dispatcher, times on this machine", target)
    codes = []
    for loaded, _, outcome in races:
        load = outcome.foreign_cores
        if busy_reason(load) is not None:
            text = f"other programs kept {load:.2g} cores busy while {loaded.name} was timed; trust no figure of it"
            print(f"note: {text}", file=sys.stderr)
        for failure in outcome.failures:
            text = f"{loaded.name} on {failure.name}: {failure.reason}"
            if failure.error is None:  # what a peer cannot do is no failure of ours
                print(f"note: {text}", file=sys.stderr)
                continue
            _complain(text)
            # Among all devices, one that cannot run a problem is no failure.
            if device != "all" or not isinstance(failure.error, DeviceError):
                codes.append(failure.error.exit_code)
    if codes:
        raise typer.Exit(min(codes))


def _bench_report(races: Sequence[tuple[Problem, str | None, Race]]) -> dict[str, Any]:
    """What `bench --json` prints."""
    from dispatcher.timing.racing import environment, protocol

    return {
        **environment(),
        "protocol": protocol(),
        "results": [{**each.as_dict(), "case": case} for _, case, race in races for each in race.results],
        "peers": [{**each.as_dict(), "case": case} for _, case, race in races for each in race.peers],
        "failures": [
            {"problem": problem.name, "device": failure.name, "reason": failure.reason}
            for problem, _, race in races
            for failure in race.failures
        ],
        "races": [
            {
                "problem": problem.name,
                "case": case,
                "rounds": race.rounds,
                "settled": race.settled,
                "foreign_cores": race.foreign_cores,
            }
            for problem, case, race in races
        ],
    }


def _compare_benchmarks(old: str, new: str, others: Sequence[str], as_json: bool) -> None:
    """Compare two files.

    Raises:
        InputError: another option makes no sense beside that, a file is wrong, or nothing can be compared.
    """
    from dispatcher.timing.differences import TEST, compare_results

    if others:
        raise InputError(f"--compare measures nothing, so {others[0]} says nothing; give one of them")
    found = compare_results(old, new)
    if as_json:
        _print_json("bench", {"comparison": found.as_dict()})
    else:
        if found.differences:
            _print(
                _table(
                    ("PROBLEM", "WHERE", "TIME", "FIRST", "SECOND", "RATIO", "INTERVAL", "SECOND IS"),
                    [
                        (
                            *(
                                each.problem,
                                each.where,
                                each.what,
                                _seconds(each.old_s),
                                _seconds(each.new_s),
                            ),
                            *(f"{each.ratio:.3f}", f"{each.low:.3f} to {each.high:.3f}", each.verdict),
                        )
                        for each in found.differences
                    ],
                )
            )
            _print(f"\n{TEST}")
        for title, lines in (
            ("not compared", [f"{what}: {reason}" for what, reason in found.left_out]),
            ("changed in between", found.changes),
        ):
            if lines:
                _print(f"\n{title}:")
                _print("\n".join(f"  {line}" for line in lines))
    if not found.differences:
        raise InputError(f"--compare: {old!r} and {new!r} have nothing in common that can be compared")


def _print_bench(races: Sequence[Race]) -> None:
    """The tables of `bench`: times, where they go, and ratios."""
    rows = [(each.operator.problem.name, each) for race in races for each in (*race.results, *race.peers)]
    if not rows:
        return
    _print(
        _table(
            (
                *("PROBLEM", "DEVICE", "VERIFIED", "MEDIAN", "QUARTILES", "MIN", "COLD", "KERNEL", "GFLOP/S"),
                *("GB/S", "ROOFLINE"),
            ),
            [
                (
                    name,
                    each.name,
                    "no" if each.comparison is None else "yes",
                    _seconds(each.median_s),
                    " to ".join(map(_seconds, each.quartiles_s)),
                    _seconds(each.warm.wall.min_s),
                    _seconds(each.cold.wall.median_s),
                    "" if each.warm.kernel is None else _seconds(each.warm.kernel.median_s),
                    "" if each.gflops is None else f"{each.gflops:.3g}",
                    "" if each.ideal_gbytes_per_s is None else f"{each.ideal_gbytes_per_s:.3g}",
                    _share(getattr(each, "roofline_share", None)),
                )
                for name, each in rows
            ],
        )
    )
    _print("\nwhere the time goes:")
    _print(
        _table(
            ("PROBLEM", "DEVICE", "COMPILE", "FIRST CALL", "UPLOAD", "KERNEL", "DOWNLOAD", "CLOCK"),
            [
                (
                    name,
                    each.name,
                    _seconds(each.compile_s),
                    _seconds(each.first_s),
                    *(
                        ""
                        if part is None
                        else "shared"
                        if each.shared_memory and part is not each.warm.kernel
                        else _seconds(part.median_s)
                        for part in (each.warm.upload, each.warm.kernel, each.warm.download)
                    ),
                    each.clock or each.clock_note,
                )
                for name, each in rows
            ],
        )
    )
    ratios = [
        (result.operator.problem.name, result.name, peer, found)
        for race in races
        for result in race.results
        for peer, found in result.ratios.items()
    ]
    if ratios:
        _print("\nhow many times as long others take (warm medians, with what the quartiles make of them):")
        _print(
            _table(
                ("PROBLEM", "DEVICE", "PEER", "RATIO", "SPREAD"),
                [
                    (name, where, peer, f"{found.value:.2f}", f"{found.low:.2f} to {found.high:.2f}")
                    for name, where, peer, found in ratios
                ],
            )
        )
    roofs = {each.name: each.roofline for race in races for each in race.results if each.roofline}
    if roofs:
        _print("")
    for name, roof in roofs.items():
        _print(
            f"roofline of {name}: {roof.gflops:.4g} GFLOP/s ({roof.dtype}), {roof.gbytes_per_s:.4g} GB/s, measured"
        )


# ---- input -------------------------------------------------------------------------------------------------
def _given(context: typer.Context, beside: Container[str]) -> list[str]:
    """The options and arguments that the command line gives, as it calls them, beside some by parameter name."""
    found = []
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is not None and source.name == "COMMANDLINE" and parameter.name not in beside:
            names = [*parameter.opts[:1], *parameter.secondary_opts[:1]]
            is_option = parameter.param_type_name == "option"
            found.append("/".join(names) if is_option else str(parameter.name).upper())
    return found


def _whole(option: str, text: str, least: int, most: int | None = None) -> int:
    """The whole number that an option gives.

    Raises:
        InputError: it is not one, or out of range.
    """
    bounds = f"of {least} or more" if most is None else f"from {least} to {most}"
    try:
        number = int(text) if text.isascii() and "_" not in text else None
    except ValueError:
        number = None
    if number is None or number < least or (most is not None and number > most):
        raise InputError(f"{option} is {text!r}; expected a whole number {bounds}")
    return number


def _seconds_above_zero(option: str, text: str, most: float = sys.float_info.max) -> float:
    """The seconds that an option gives.

    Raises:
        InputError: it is not a number above 0, or above ``most``.
    """
    try:
        seconds = float(text) if text.isascii() and "_" not in text else 0.0
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds <= most:
        bound = "" if most == sys.float_info.max else f" and up to {most:.0f}"
        raise InputError(f"{option} is {text!r}; expected a number of seconds above 0{bound}")
    return seconds


def _check_choices(dtype: str | None, precision: str) -> None:
    """See to it that --dtype and --precision have values that exist.

    Raises:
        InputError: one has not.
    """
    from dispatcher.problem.operator import DTYPES, PRECISIONS

    for option, value, allowed in (("--dtype", dtype, DTYPES), ("--precision", precision, PRECISIONS)):
        if value is not None and value not in allowed:
            raise InputError(f"{option} is {value!r}; expected one of {', '.join(allowed)}")


def _options(algorithm: str | None, given: Sequence[str] | None) -> dict[str, str]:
    """Tuning options from ``--algorithm`` and ``--option``.

    Raises:
        InputError: an assignment is not one, or names what another one names.
    """
    options = {} if algorithm is None else {"algorithm": algorithm}
    for text in given or ():
        name, sign, value = text.partition("=")
        if not sign or not name or not value:
            raise InputError(f"--option is {text!r}; expected NAME=VALUE, such as box=2x8")
        if name in options:
            raise InputError(f"--option {text} and {name}={options[name]} are both given; keep one")
        options[name] = value
    return options


def _default_case(problem: Problem) -> str | None:
    """``sample``, where the problem has it."""
    return "sample" if "sample" in problem.cases else None


def _load_all(
    names: Sequence[str] | None,
    settings: Sequence[str] | None,
    case: str | None,
    dtype: str | None,
    precision: str,
    task: str,
) -> list[tuple[Problem, str | None, dict[str, Any]]]:
    """The problems named, each once, or all, each with its case and --set arguments, checked as far as possible.

    Raises:
        InputError: something is wrong, there is nothing to do for ``task``, or two problems have the same name.
    """
    from dispatcher.problem.arguments import bind_numbers, parse_assignments
    from dispatcher.problem.loader import load_problem, problem_names

    _check_choices(dtype, precision)
    result: dict[str, tuple[Problem, str | None, dict[str, Any]]] = {}
    for problem in [load_problem(name) for name in names or problem_names()]:
        if problem.name in result:
            other = result[problem.name][0]
            if replace(other, path=None) != replace(problem, path=None):
                raise InputError(
                    f"{other.path} and {problem.path} are different problems of one name, {problem.name}; name one"
                )
            continue
        arguments = parse_assignments(problem, settings or [], "--set")
        chosen = case or _default_case(problem)
        bind_numbers(problem, arguments, task, case=chosen, dtype=dtype, precision=precision)
        result[problem.name] = (problem, chosen, arguments)
    return list(result.values())


def _read_tensors(problem: Problem, assignments: Sequence[str]) -> dict[str, np.ndarray]:
    """The arrays of ``NAME=FILE.npy`` texts, mapped into memory rather than read.

    Raises:
        InputError: a text is not understood, a name is not a tensor, or a file is not a .npy file.
    """
    import numpy as np

    names = [tensor.name for tensor in problem.tensors]
    result: dict[str, np.ndarray] = {}
    for assignment in assignments:
        name, equals, path = assignment.partition("=")
        if not equals or not path:
            raise InputError(f"--tensor {assignment!r} is not understood; expected NAME=FILE.npy")
        if name not in names:
            raise InputError(
                f"--tensor {name}: {problem.name} has no such tensor; expected one of {', '.join(names)}"
            )
        if name in result:
            raise InputError(f"--tensor {name} is given twice; give it once")
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except OSError as error:
            raise InputError(f"--tensor {name}: {path!r} cannot be read: {_one_line(error)}") from error
        except (ValueError, EOFError) as error:  # NumPy's words advise to load it unsafely
            objects = Path(path).read_bytes()[:6] == np.lib.format.MAGIC_PREFIX and "objects" in str(error)
            what = "holds Python objects" if objects else "is not a .npy file, or a damaged one"
            raise InputError(
                f"--tensor {name}: {path!r} {what}; expected what numpy.save makes of an array of numbers"
            ) from error
        if not isinstance(array, np.ndarray):
            raise InputError(
                f"--tensor {name}: {path!r} holds several arrays (.npz); expected a .npy file with one"
            )
        result[name] = array
    return result


def _in_memory(array: np.ndarray, operator: Operator) -> np.ndarray:
    """``array`` in the operator's dtype and in C order, so that a timed call converts nothing."""
    import numpy as np

    return np.ascontiguousarray(array, dtype=operator.dtype)


# ---- output ------------------------------------------------------------------------------------------------
def _output_path(option: str, text: str) -> Path:
    """The file that an option names, which will be written to.

    Raises:
        InputError: it cannot be written there.
    """
    path = Path(os.path.realpath(text))
    if not path.parent.is_dir():
        raise InputError(f"{option} {text!r}: the folder {str(path.parent)!r} does not exist; make it first")
    if path.exists() and not path.is_file():
        raise InputError(f"{option} {text!r} is not a regular file; name a new one or one to replace")
    if not text or not os.access(path.parent, os.W_OK):
        raise InputError(f"{option} {text!r}: the folder {str(path.parent)!r} cannot be written to")
    return path


def _write_array(path: Path, array: np.ndarray) -> None:
    """Write a .npy file that is there complete or not at all.

    Raises:
        InputError: it cannot be written; a file that was there before is left as it was.
    """
    import numpy as np

    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "xb") as file:
            np.save(file, array, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        raise InputError(f"--output {str(path)!r} cannot be written: {_one_line(error)}") from error
    finally:
        partial.unlink(missing_ok=True)


def _print(text: str) -> None:
    """Write a line to stdout.

    Raises:
        InputError: it cannot be written, for instance because a disk is full.
    """
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise _ClosedPipeError from None
    except OSError as error:
        raise InputError(f"stdout cannot be written: {_one_line(error)}") from error


def _print_json(command: str, report: Mapping[str, Any]) -> None:
    _print(
        json.dumps(_json_ready({"schema": SCHEMA, "command": command, **report}), indent=2, allow_nan=False)
    )


def _json_ready(value: Any) -> Any:
    """``value`` with numbers that JSON does not have as texts: ``"nan"``, ``"inf"``, ``"-inf"``."""
    match value:
        case Mapping():
            return {str(key): _json_ready(part) for key, part in value.items()}
        case list() | tuple():
            return [_json_ready(part) for part in value]
        case float() if not math.isfinite(value):
            return str(float(value))
        case str() | bool() | int() | float() | None:
            return value
        case _:  # a NumPy number among a backend's facts, for instance
            return _json_ready(value.item()) if hasattr(value, "item") else str(value)


_FREE_TEXT = 40  # characters; a column with longer cells may be folded
_FREE_TEXT_AT_LEAST = 20


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as text, as wide as it is where stdout is not a terminal.

    In a terminal only columns of long texts are folded; where that is not enough, each row becomes a block.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    terminal = sys.stdout.isatty()
    available = shutil.get_terminal_size().columns if terminal else 10_000
    widths = [max(len(header), *(len(row[at]) for row in rows), 0) for at, header in enumerate(headers)]
    free = [width > _FREE_TEXT for width in widths]
    needed = sum(_FREE_TEXT_AT_LEAST if may else width for may, width in zip(free, widths, strict=True))
    if sum(widths) + len(widths) > available < needed + len(widths):
        return "\n\n".join(_block(headers, row, available) for row in rows)
    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    for header, may in zip(headers, free, strict=True):
        table.add_column(header, overflow="fold", no_wrap=not may)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    rendered = io.StringIO()
    Console(file=rendered, force_terminal=terminal, width=available).print(table)
    return "\n".join(line.rstrip() for line in rendered.getvalue().splitlines())


def _block(headers: Sequence[str], row: Sequence[str], width: int) -> str:
    """A row of a table as lines of ``header value``, the first one alone; empty cells are left out."""
    lines, line = [row[0]], ""
    for header, cell in zip(headers[1:], row[1:], strict=True):
        if not cell:
            continue
        pair = f"{header.lower()} {cell}"
        if line and len(line) + len(pair) + 5 > width:
            lines.append(line)
            line = ""
        line = f"{line}   {pair}" if line else f"  {pair}"
    return "\n".join([*lines, line] if line else lines)


def _print_head(operator: Operator, device: Device, skipped: Sequence[tuple[str, str]]) -> None:
    _print(f"problem   {operator.problem.name} ({operator.dtype}, {operator.precision})")
    _print(f"device    {device.id} ({device.name})")
    for label, reason in skipped:
        _print(f"skipped   {label}: {reason}")
    shapes = ", ".join(f"{name} {shape}" for name, shape in operator.tensor_shapes.items())
    _print(f"shapes    {shapes} -> {operator.problem.output.name} {operator.output_shape}")


def _print_run(report: Mapping[str, Any], operator: Operator, device: Device, comparison: Any) -> None:
    _print_head(operator, device, [(entry["device"], entry["reason"]) for entry in report["skipped"]])
    _print(f"inputs    seed {report['seed']}, made or read in {_seconds(report['inputs_s'])}")
    calls = len(report["warm_s"])
    _print(
        f"time      compile {_seconds(report['compile_s'])}, first call {_seconds(report['first_s'])}, "
        f"then {_seconds(report['warm_median_s'])} (median of {calls})"
    )
    _print(f"speed     {report['gflops']:.4g} GFLOP/s")
    if comparison is None:
        _print("verified  no: left out")
    else:
        over, largest, normwise = _figures(comparison)
        _print(
            f"verified  {'yes' if comparison.passed else 'NO'}: error at most {over} of its bound, "
            f"{largest} absolute, {normwise} normwise"
        )
    if report["output"] is not None:
        _print(f"output    {report['output']}")


def _print_judgement(judgement: Judgement, apart: bool) -> None:
    """Say how a user's own kernel did; ``apart`` from what was printed before."""
    kernel = judgement.kernel
    if apart:
        _print("")
    _print_head(judgement.operator, judgement.device, judgement.skipped)
    launched = [
        f"{what} {' x '.join(map(str, sizes))}"
        for what, sizes in (("global size", kernel.global_size), ("local size", kernel.local_size))
        if sizes is not None
    ]
    _print(f"kernel    {', '.join([f'{kernel.entry} in {kernel.file}', *launched])}")
    for check in judgement.checks:
        over, largest, normwise = _figures(check.comparison)
        _print(
            f"inputs    {check.inputs}, {check.launch} launch: {'right' if check.passed else 'WRONG'}, "
            f"error at most {over} of its bound, {largest} absolute, {normwise} normwise"
        )
    for clock, times in (("device's", judgement.kernel_s), ("host's", judgement.times_s)):
        if times:
            median, least = statistics.median(times), min(times)
            _print(
                f"time      {_seconds(median)} on the {clock} clock "
                f"(median of {len(times)}, at least {_seconds(least)})"
            )
    if judgement.gflops is not None:
        _print(f"speed     {judgement.gflops:.4g} GFLOP/s")
    if judgement.log:
        _print(judgement.log)
    _print(f"verdict   {judgement.outcome}")


def _print_verification(results: Sequence[Any]) -> None:
    """The figures of each worst check, then the largest error over its bound for every set of inputs."""
    from dispatcher.check.inputs import INPUT_SETS

    rows = []
    for result in results:
        found = result.comparison
        at = found is not None and found.worst_index is not None
        rows.append(
            (
                *(
                    result.problem,
                    result.case or "",
                    result.device.id,
                    result.outcome,
                    str(len(result.checks)),
                ),
                *_figures(found),
                "" if found is None else f"{found.normwise_over_bound:.3g}",
                *(result.inputs, str(result.seed)),
                ",".join(map(str, found.worst_index)) if at else "",
                *((f"{found.worst_value:.9g}", f"{found.worst_reference:.9g}") if at else ("", "")),
            )
        )
    headers = ("PROBLEM", "CASE", "DEVICE", "OUTCOME", "CHECKS", "ERROR/BOUND", "MAX ERROR", "NORMWISE")
    _print(_table((*headers, "NORM/BOUND", "INPUTS", "SEED", "WORST AT", "RESULT", "REFERENCE"), rows))
    sets = [name for name in INPUT_SETS if any(name == c.inputs for r in results for c in r.checks)]
    if len(sets) > 1:
        cells = [[result.problem, result.device.id, *result.worst_of(sets)] for result in results]
        _print("")
        _print(_table(("LARGER OF BOTH RATIOS", "DEVICE", *sets), cells))
    right = sum(check.outcome == "passed" for result in results for check in result.checks)
    _print("")
    _print(f"{right} of {sum(len(result.checks) for result in results)} checks passed")


def _figures(comparison: Any) -> tuple[str, str, str]:
    """Error over bound, largest error, normwise error."""
    if comparison is None:
        return ("", "", "")
    return (
        f"{comparison.max_error_over_bound:.3g}",
        f"{comparison.max_abs_error:.3g}",
        f"{comparison.normwise:.3g}",
    )


def _problem_dict(problem: Problem) -> dict[str, Any]:
    return {
        "name": problem.name,
        "title": problem.title,
        "origin": problem.origin,
        "path": None if problem.path is None else str(problem.path),
        "tolerance": problem.tolerance,
        "parameters": [
            {
                "name": parameter.name,
                "type": parameter.type,
                "input": parameter.type != "tensor" or parameter.const,
                "shape": None if parameter.shape is None else [_extent(extent) for extent in parameter.shape],
                "default": parameter.default,
            }
            for parameter in problem.parameters
        ],
        "pipeline": [
            {
                "op": step.op,
                "source": step.source,
                "result": step.result,
                "fields": {name: _field(name, value) for name, value in step.fields.items()},
            }
            for step in problem.pipeline
        ],
        "cases": {name: dict(values) for name, values in problem.cases.items()},
    }


def _extent(value: Any) -> int | str:
    """An integer expression: a number where it is one, else its text."""
    text = str(value)
    return int(text) if text.isdecimal() else text


def _field(name: str, value: Any) -> Any:
    """A step's field for people and JSON: expressions as texts, axes by name."""
    from dispatcher.ops.steps import AXES

    if name == "axis" and isinstance(value, tuple):
        whole = next((axis for axis, numbers in AXES.items() if numbers == value), None)
        return whole or [axis for axis, numbers in AXES.items() if len(numbers) == 1 and numbers[0] in value]
    if isinstance(value, tuple):
        return [_field(name, part) for part in value]
    return value if isinstance(value, int | float | str) else _extent(value)


def _plain(value: Any) -> str:
    if not isinstance(value, list):
        return str(value)
    return str(value[0]) if len(set(value)) == 1 else f"({', '.join(map(str, value))})"


def _tested_as(device: Device) -> str:
    """What a usable device's self-test found, in few words."""
    speed = device.facts.get("self_test_gflops")
    return f"{speed:.3g} GFLOP/s" if isinstance(speed, float) else str(device.facts.get("self_test", ""))


def _share(value: float | None) -> str:
    """A share as per cent; empty where it is not known."""
    return "" if value is None else f"{100 * value:.3g} %"


def _seconds(value: float) -> str:
    for limit, unit, factor in ((1e-3, "us", 1e6), (1.0, "ms", 1e3)):
        if value < limit:
            return f"{value * factor:.3g} {unit}"
    return f"{value:.3g} s" if value < 1000 else f"{value:.0f} s"


def _count(value: float) -> str:
    """A number with a decimal prefix, to be followed by its unit: ``58.1 G``."""
    for limit, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g} {prefix}"
    return f"{value:g} "


# ---- stderr ------------------------------------------------------------------------------------------------
@contextmanager
def _progress(what: str, steps: int = 2) -> Iterator[Callable[[float], None]]:
    """A progress bar on stderr for what takes a while; gives a function that takes the fraction done.

    Nothing is drawn where stderr is not a terminal or there is only one step.
    """
    if steps < 2 or sys.stderr is None or not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import Progress

    # No thread that redraws: it would disturb what is being timed.
    with Progress(console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
        task = bar.add_task(what, total=1.0)
        bar.refresh()
        yield lambda done: bar.update(task, completed=done, refresh=True)


def _report_part(
    advance: Callable[[float], None], number: int, count: int, problem: str, device: str, done: float
) -> None:
    """Turn the progress of one check out of ``count`` into the progress of all."""
    advance((number + done) / count)


def _report_share(advance: Callable[[float], None], number: int, count: int, done: float) -> None:
    """Turn the progress of one problem out of ``count`` into the progress of all."""
    advance((number + done) / count)


def _tell_skipped(skipped: Sequence[tuple[str, str]]) -> None:
    """Say once on stderr what was passed over, where a warning has not said so."""
    for label, reason in skipped:
        if not any(text.startswith((f"{label} (", f"{label} is passed over")) for text in _Told.texts):
            text = f"{label} is passed over: {reason}"
            _Told.texts.add(text)
            print(f"note: {text}", file=sys.stderr)


def _complain(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)


def _one_line(error: BaseException) -> str:
    return "; ".join(line.strip() for line in str(error).splitlines() if line.strip()) or type(error).__name__


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    text = next(iter(str(message).strip().splitlines()), type(message).__name__)
    _Told.texts.add(text)
    print(f"warning: {text}", file=sys.stderr)


@contextmanager
def _stderr_somewhere() -> Iterator[None]:
    """Where stderr is closed, what goes there goes nowhere; without that, print() would take stdout."""
    if sys.stderr is not None:
        yield
        return
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stderr(nowhere):
        yield


def _raise_when_terminated() -> None:
    """Turn SIGTERM into an exception, so that temporary files and child processes do not outlive this one."""

    def terminate(number: int, frame: Any) -> None:
        raise _Terminated

    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, terminate)


@contextmanager
def _undone_at_the_end() -> Iterator[None]:
    """Take back what is changed for this process: log handlers, the switch of self-tests, what SIGTERM does."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    states = [(logger, logger.level, logger.handlers[:]) for logger in loggers]
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is not handler:
            signal.signal(signal.SIGTERM, handler)
        for logger, level, handlers in states:
            logger.handlers[:] = handlers
            logger.setLevel(level)
        for name, before in _Changed.variables.items():
            if before is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = before
        _Changed.variables.clear()


# ---- the program -------------------------------------------------------------------------------------------
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: what follows the program's name; taken from ``sys.argv`` when left out.

    Returns:
        The exit code.
    """
    _Debug.on = False
    _Told.texts.clear()
    command = typer.main.get_command(app)
    with _stderr_somewhere(), warnings.catch_warnings(), _undone_at_the_end():
        warnings.showwarning = _show_warning
        if sys.stdout is None:
            _complain("stdout is closed; send it to /dev/null where the result is not wanted")
            return InputError.exit_code
        try:
            _raise_when_terminated()
            code = command.main(
                None if arguments is None else list(arguments), prog_name="dispatcher", standalone_mode=False
            )
        except DispatcherError as error:
            return _report(error, _one_line(error), error.exit_code)
        except _ClosedPipeError:
            # The interpreter flushes stdout once more when it ends; let it do that into nowhere.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return CLOSED_PIPE
        except (KeyboardInterrupt, typer.Abort):
            code = INTERRUPTED
        except _Terminated:
            _complain("terminated")
            return TERMINATED
        except MemoryError as error:
            return _report(
                error,
                f"the host has not enough memory: {_one_line(error)}; take smaller sizes, with --set",
                KernelError.exit_code,
            )
        except Exception as error:
            format_message = getattr(error, "format_message", None)  # typer's own errors about usage have it
            if format_message is not None:
                hint = _help_hint(error, arguments if arguments is not None else sys.argv[1:])
                return _report(error, " ".join(format_message().split()) + hint, InputError.exit_code)
            text = f"unexpected {type(error).__name__}: {_one_line(error)}"
            hint = "" if _Debug.on else " (run again with --debug for the traceback)"
            return _report(error, text + hint, KernelError.exit_code)
        if code == INTERRUPTED:  # what Typer makes of a KeyboardInterrupt, too
            _complain("interrupted")
    return code if isinstance(code, int) else 0


def _help_hint(error: Exception, arguments: Sequence[str]) -> str:
    """Where to read on; an error in an option without its value does not know its command."""
    named = [
        command.name for command in app.registered_commands if arguments and command.name == arguments[0]
    ]
    path = getattr(getattr(error, "ctx", None), "command_path", " ".join(["dispatcher", *map(str, named)]))
    return f" (see {path} --help)"


def _report(error: Exception, message: str, code: int) -> int:
    if _Debug.on:
        traceback.print_exception(error)
        log = getattr(error, "log", "")
        if log:
            print(log, file=sys.stderr)
    _complain(message)
    return code


if __name__ == "__main__":
    sys.exit(main())
