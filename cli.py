"""The command line: results on stdout, everything else on stderr, and an exit code that says how it went.

Exit codes: 0 done, and verified where asked; 1 a verification failed; 2 wrong usage or input; 3 no such
device, or it cannot run this; 4 a kernel failed to build or run; 130 interrupted; 141 nobody reads stdout;
143 terminated.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer

try:
    from dispatcher import __version__
except ImportError:  # only where an import hook finds this module all the same, as that of an editable installation
    import dispatcher

    place = dispatcher.__file__ or next(iter(dispatcher.__path__))
    print(f"error: {place} is in the way of the package dispatcher; rename it or take it off the path", file=sys.stderr)
    sys.exit(2)
from dispatcher.errors import DeviceError, InputError
from dispatcher.report import documents, streams, variants, words
from dispatcher.report.options import (
    AlgorithmOption,
    BenchDeviceOption,
    CaseOption,
    DebugOption,
    DeviceOption,
    DeviceOrAllOption,
    DtypeOption,
    GlobalSizeOption,
    JsonOption,
    KernelOption,
    PlotOption,
    PrecisionOption,
    ProblemArgument,
    ProblemsArgument,
    RetestOption,
    SeedOption,
    SelfTestOption,
    SetOption,
    TuningOption,
    VerboseOption,
    flag,
    option,
)
from dispatcher.report.streams import answer, complain, note, note_skipped, progress, say

MAX_SEED = 2**64 - 1

app = typer.Typer(
    name="dispatcher",
    help="Run fused operators of one to three dimensions, described in YAML, on CUDA, OpenCL or NumPy.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_version(value: bool) -> bool:
    if value:
        say(f"kernel-dispatcher {__version__}")
        raise typer.Exit
    return value


# ---- commands ----------------------------------------------------------------------------------------------
@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        say(context.get_help())
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
    from dispatcher.interface import device_dict

    found = devices(retest=retest)
    wanted = os.environ.get(ENVIRONMENT)
    parse_request(wanted)  # a wrong value is an error here too
    try:
        auto = first_usable(parse_request("auto"))[0].id
    except DeviceError:
        auto = None
    if as_json:
        answer("devices", {"devices": [device_dict(device) for device in found], "auto": auto})
        return
    words.say_devices(found, auto)
    if wanted:
        say(f"{ENVIRONMENT} is {wanted}, which holds where no device is named")


@app.command("doctor")
def doctor_command(
    retest: RetestOption = False,
    self_test: SelfTestOption = None,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
    debug: DebugOption = False,
) -> None:
    """Say what was looked for and found, and what would fix it.

    The exit code is 3 when only NumPy works.
    """
    from dispatcher.device.diagnosis import doctor

    with progress("examining"):
        diagnosis = doctor(retest=retest)
    if as_json:
        answer("doctor", diagnosis.as_dict())
    else:
        words.say_diagnosis(diagnosis)
    if not diagnosis.working:
        raise typer.Exit(DeviceError.exit_code)


@app.command("problems")
def problems_command(
    word: Annotated[str, typer.Argument(help="A part of what to look for: in names, titles, origins, notes.")] = "",
    rank: Annotated[str | None, option("1|2|3", "Those with so many spatial axes.")] = None,
    op: Annotated[str | None, option("STEP", "Those with that step, such as conv or max_pool2d.")] = None,
    level: Annotated[str | None, option("N", "Those of that level of KernelBench.")] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """List the problems that come with the package, or those that fit."""
    from dispatcher.problem.commandline import find_problems, kernelbench_levels, whole_number

    axes = None if rank is None else whole_number("--rank", rank, 1, 3)
    found = find_problems(word, axes, op, None if level is None else whole_number("--level", level, 1))
    if not found:
        levels = "" if level is None else f"; the levels are {' and '.join(map(str, kernelbench_levels()))}"
        note(f"no problem fits; leave out some of what to look for{levels}")
    if as_json:
        answer("problems", documents.problems_document(found))
    else:
        words.say_problems(found)


@app.command("show")
def show_command(
    problem: ProblemArgument,
    signature: Annotated[
        str | None, option("c|cu|cl", "The head of a function that computes it, in C, CUDA or OpenCL C.")
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Show a problem, or its signature alone."""
    from dispatcher.check import kernelfile
    from dispatcher.problem.loader import load_problem

    loaded = load_problem(problem)
    head = None if signature is None else kernelfile.signature(loaded, signature)
    described = documents.problem_document(loaded)
    if as_json:
        answer("show", {**described, **({} if head is None else {"signature": head})})
    elif head is not None:
        say(head)
    else:
        words.say_problem(described)


@app.command("import")
def import_command(
    file: Annotated[
        str, typer.Argument(metavar="FILE.py", help="With class Model, get_inputs() and perhaps get_init_inputs().")
    ],
    output: Annotated[
        str | None, option("FILE.yaml", "Where to write the problem; it is printed if left out.", "--output", "-o")
    ] = None,
    weights: Annotated[str | None, option("FILE.npz", "Where to write the module's weights.")] = None,
    name: Annotated[str | None, option("NAME", "Of the problem; that of the file if left out.")] = None,
    evaluate: Annotated[
        bool, flag("Import what the module does in evaluation mode; else in the mode it is made in.", "--eval")
    ] = False,
    timeout: Annotated[str, option("SECONDS", "For running the file and capturing the module.")] = "300",
    trust: Annotated[bool, flag("Run the file, in a process of its own.", "--trust")] = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Make a problem of the PyTorch module in a Python file."""
    from pathlib import Path

    from dispatcher.call import modelfile
    from dispatcher.device.childprocess import LONGEST_S
    from dispatcher.problem import commandline
    from dispatcher.problem.messages import counted

    limit = commandline.seconds_above_zero("--timeout", timeout, LONGEST_S)
    target = None if output is None else streams.output_path("--output", output, [file])
    tensors = None if weights is None else streams.output_path("--weights", weights, [file], ".npz")
    if target is not None and target == tensors:
        raise InputError(f"--output and --weights are both {output}; give each a file of its own")
    path = Path(file)
    modelfile.check_file(path)
    if not trust:
        raise modelfile.untrusted(path)
    with progress(f"importing {file}"):
        found = modelfile.import_file(path, weights=tensors, name=name, evaluate=evaluate, timeout_s=limit)
    if target is not None:
        streams.write_content(target, found.yaml)
    places = {"output": target and str(target), "weights": tensors and str(tensors)}
    if as_json:
        answer("import", {"yaml": found.yaml, "tensors": dict(found.tensors), **places})
    elif target is None:
        say(found.yaml.removesuffix("\n"))
    else:
        say(f"written   {target}")
        if tensors is not None:
            say(f"weights   {tensors}, {counted(len(found.tensors), 'tensor')}")


@app.command("run")
def run_command(
    problem: ProblemArgument,
    device: DeviceOption = None,
    case: Annotated[
        str | None, option("C", "Named case for what is not set; sample if no tensor is given either.")
    ] = None,
    settings: SetOption = None,
    tensor: Annotated[list[str] | None, option("NAME=FILE.npy", "A tensor; random if left out. Repeatable.")] = None,
    output: Annotated[str | None, option("FILE.npy", "Where to write the result.")] = None,
    trace: Annotated[
        str | None, option("FILE.json", "Where to write what the calls did, for Chrome's tracing.")
    ] = None,
    dtype: DtypeOption = None,
    precision: PrecisionOption = "fp32",
    seed: SeedOption = "0",
    repeat: Annotated[
        str | None, option("N", "Timed calls after the first one; 1 if left out, 0 beside --no-verify.")
    ] = None,
    verify: Annotated[bool, flag("Compare the result with the reference.")] = True,
    algorithm: AlgorithmOption = None,
    option: TuningOption = None,
    self_test: SelfTestOption = None,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
    debug: DebugOption = False,
) -> None:
    """Run a problem once and say how it went."""
    from dispatcher.call import tracing
    from dispatcher.check.once import input_tensors, timed_run
    from dispatcher.device.selection import parse_request
    from dispatcher.problem import commandline
    from dispatcher.problem.arguments import bind_arguments, parse_assignments, sort_arguments
    from dispatcher.problem.loader import load_problem

    # Everything that can be wrong with the input is found out before a device is opened or data is made.
    loaded = load_problem(problem)
    seed_number = commandline.whole_number("--seed", seed, 0, MAX_SEED)
    repeats = int(verify) if repeat is None else commandline.whole_number("--repeat", repeat, 0)
    commandline.check_choices(dtype, precision)
    read = [problem, *(text.partition("=")[2] for text in tensor or ())]
    target = None if output is None else streams.output_path("--output", output, read, ".npy")
    trace_file = None if trace is None else streams.output_path("--trace", trace, read)
    if target is not None and target == trace_file:
        raise InputError(f"--output and --trace are both {output}; give each a file of its own")
    parse_request(device)
    options = commandline.tuning_options(algorithm, option)
    arguments = parse_assignments(loaded, settings or [], "--set")
    files = commandline.read_tensors(loaded, tensor or [])
    if case is None and not files:
        case = commandline.default_case(loaded)
    given = sort_arguments(loaded, {**arguments, **files})
    operator = bind_arguments(loaded, given, case=case, dtype=dtype, precision=precision)

    start = time.perf_counter()
    tensors = input_tensors(operator, files, seed_number)
    inputs_s = time.perf_counter() - start
    with tracing.recording(trace_file):
        run = timed_run(operator, tensors, device, options, repeats, verify, progress)
    if target is not None:
        streams.write_array(target, run.result)
    comparison = run.compare(progress) if verify else None
    more = {"case": case, "seed": seed_number, "inputs_s": inputs_s, "output": target and str(target)}
    if as_json:
        note_skipped(run.choice.skipped)
        answer("run", {**run.as_dict(comparison), **more})
    else:
        words.say_run(run, comparison, files, more)
    if comparison is not None and not comparison.passed:
        complain(f"wrong result on {run.choice.device.id}: {comparison.reason}")
        raise typer.Exit(1)


@app.command("export")
def export_command(
    problem: ProblemArgument,
    to: Annotated[str, option("FORMAT", "tensara, kernelbench, cuda or opencl: who takes the program.", "--to")],
    output: Annotated[str, option("FILE", "Where to write it.", "--output", "-o")],
    case: Annotated[
        list[str] | None,
        option("C", "A case that gets the kernels we would run; kernelbench, else sample, if left out. Repeatable."),
    ] = None,
    dtype: DtypeOption = None,
    precision: PrecisionOption = "fp32",
    device_class: Annotated[
        str, option("CLASS", "What kernels are chosen for, such as h100 or a100; on OpenCL, cpu or gpu.")
    ] = "",
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
    debug: DebugOption = False,
) -> None:
    """Write a problem as a program that runs without this package."""
    from dispatcher.export.formats import export
    from dispatcher.problem import commandline
    from dispatcher.problem.loader import load_problem

    commandline.check_choices(dtype, precision)
    target = streams.output_path("--output", output, [problem])
    files = export(
        load_problem(problem), to, target,
        cases=case or (), dtype=dtype, precision=precision, device_class=device_class,
    )  # fmt: skip
    for path, content in files.items():
        streams.write_content(path, content)
    if as_json:
        answer("export", {"files": [str(path) for path in files]})
    else:
        say("\n".join(f"wrote {path}" for path in files))


@app.command("map")
def map_command(
    problem: ProblemArgument,
    input_path: Annotated[str, option("X.npy|X.zarr", "The tensor that the pipeline begins with.", "--input")],
    output: Annotated[str, option("Y.npy|Y.zarr", "Where to put the result.", "--output")],
    tensor: Annotated[list[str] | None, option("NAME=FILE.npy", "Another tensor. Repeatable.")] = None,
    device: DeviceOption = None,
    case: Annotated[str | None, option("C", "Named case for what nothing else says.")] = None,
    settings: SetOption = None,
    dtype: DtypeOption = None,
    precision: PrecisionOption = "fp32",
    chunk: Annotated[str | None, option("N", "Batch items at a time; about 100 MB of them if left out.")] = None,
    workers: Annotated[str | None, option("N", "Processes of this machine; this one if left out.")] = None,
    scheduler: Annotated[str | None, option("ADDRESS", "A Dask scheduler, whose workers see the files.")] = None,
    resume: Annotated[bool, flag("Do what is missing of a call that was broken off.", "--resume")] = False,
    self_test: SelfTestOption = None,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
    debug: DebugOption = False,
) -> None:
    """Apply a problem to an array in a file, chunk by chunk.

    The array may be larger than memory.
    """
    from dispatcher.device.selection import parse_request
    from dispatcher.problem import commandline
    from dispatcher.problem.arguments import parse_assignments
    from dispatcher.problem.loader import load_problem
    from dispatcher.scale.mapping import map_files
    from dispatcher.scale.storage import check_path, open_array

    loaded = load_problem(problem)
    commandline.check_choices(dtype, precision)
    parse_request(device)
    if workers is not None and scheduler is not None:
        raise InputError("--workers and --scheduler are both given; a scheduler has workers already")
    counts = {
        name: None if text is None else commandline.whole_number(f"--{name}", text, 1)
        for name, text in (("chunk", chunk), ("workers", workers))
    }
    source, target = check_path("--input", input_path), check_path("--output", output)
    arguments = parse_assignments(loaded, settings or [], "--set")
    arguments |= commandline.read_tensors(loaded, tensor or [])
    items = open_array(source).shape[0]
    with progress("mapping", items=f"{items} items") as advance:
        try:
            mapped = map_files(
                loaded, source, target, arguments, case=case, dtype=dtype, precision=precision, device=device,
                scheduler=scheduler, resume=resume, progress=advance, **counts,
            )  # fmt: skip
        except (KeyboardInterrupt, streams.Terminated):
            note("what is done is kept; go on with the same command and --resume")
            raise
    if as_json:
        answer("map", {**mapped.as_dict(), "output": str(target)})
    else:
        words.say_mapped(mapped, target)


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
    plot: PlotOption = None,
    self_test: SelfTestOption = None,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
    debug: DebugOption = False,
) -> None:
    """Show what a call would do, and where, without running it."""
    from dispatcher.call.compiled import explain
    from dispatcher.problem import commandline
    from dispatcher.problem.arguments import parse_assignments
    from dispatcher.problem.loader import load_problem

    loaded = load_problem(problem)
    commandline.check_choices(dtype, precision)
    chosen = case or commandline.default_case(loaded)
    picture = streams.picture_path(plot, [problem])
    with progress("compiling"):
        given = parse_assignments(loaded, settings or [], "--set")
        given |= {"case": chosen, "dtype": dtype, "precision": precision}
        options = commandline.tuning_options(algorithm, option)
        explanation = explain(loaded, device=device, options=options, **given)
    streams.draw([explanation], picture)
    if as_json:
        note_skipped(explanation.skipped)
        answer("explain", {**explanation.as_dict(), "case": chosen})
    else:
        words.say_explanation(explanation)


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
        option(
            "SET[,SET]...|all",
            "Sets of inputs: all that are meaningful for the problem, or some of signed, graded, large_mean, "
            "large, small, negative, positive, constant, integers, spikes, gaps, denormal, one_nan, one_inf. If left "
            "out: all, and signed and positive where the reference takes long.",
        ),
    ] = None,
    seed: SeedOption = "0",
    seeds: Annotated[str, option("N", "Seeds for each set, from --seed on.")] = "1",
    algorithm: AlgorithmOption = None,
    option: TuningOption = None,
    kernel: KernelOption = None,
    entry: Annotated[str | None, option("NAME", "Its function; solution if left out.")] = None,
    global_size: GlobalSizeOption = None,
    local_size: Annotated[str | None, option("X[,Y[,Z]]", "Those of a group or block.")] = None,
    build_option: Annotated[list[str] | None, option("O", "For its compiler. Repeatable.")] = None,
    timeout: Annotated[str | None, option("SECONDS", "For building and running it; 60 if left out.")] = None,
    repeat: Annotated[str | None, option("N", "Timed launches of it; 10 if left out.")] = None,
    plot: PlotOption = None,
    self_test: SelfTestOption = None,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
    debug: DebugOption = False,
) -> None:
    """Compare devices, or your own kernel, with the reference.

    Every element is compared; the worst result comes first.
    """
    from dispatcher.check import verifying
    from dispatcher.problem import commandline

    seed_number = commandline.whole_number("--seed", seed, 0, MAX_SEED)
    seed_count = commandline.whole_number("--seeds", seeds, 1)
    sets, numbers = verifying.check_inputs(inputs), verifying.check_seeds(seed_number, seed_count)
    picture = streams.picture_path(plot, [*(problem or ()), kernel or ""])
    of_kernel: dict[str, Any] = {"entry": entry, "global_size": global_size, "local_size": local_size}
    of_kernel |= {"build_options": build_option or None, "timeout": timeout, "repeat": repeat}
    of_kernel = {name: value for name, value in of_kernel.items() if value is not None}
    if kernel is not None:
        for name, other in (("--algorithm", algorithm), ("--option", option), ("--seeds", seed_count > 1)):
            if other:
                raise InputError(f"{name} and --kernel are both given; {name} is for our own kernels")
        if problem is None or len(problem) != 1:
            raise InputError(f"--kernel is for one problem, and {len(problem or ())} are given; name one")
        commandline.check_choices(dtype, precision)
        numeric: dict[str, Any] = {"dtype": dtype, "precision": precision, "seed": seed_number}
        numeric |= {"device": device, "inputs": inputs}
        variants.judge(problem[0], kernel, case, settings, of_kernel, as_json, picture, **numeric)
        return
    if of_kernel:
        name = next(iter(of_kernel)).replace("_", "-").removesuffix("s")
        raise InputError(f"--{name} is given without --kernel; give both")
    options = commandline.tuning_options(algorithm, option)
    bound = commandline.bind_problems("verify", problem, settings, case, dtype, precision)
    names = [operator.problem.name for operator, _ in bound]
    with progress("verifying") as advance:

        def told(name: str, _: str, done: float) -> None:
            advance((names.index(name) + done) / len(names))

        results = verifying.verify_operators(bound, device, sets, numbers, options, told)
    for result in results:
        note_skipped(result.skipped)
    results = verifying.worst_first(results)
    code = verifying.exit_code(results, everywhere=device == "all")
    streams.draw(results, picture)
    if as_json:
        report = {"passed": code == 0, "only_reference": verifying.only_reference(results)}
        answer("verify", {**report, "results": [result.as_dict() for result in results]})
    else:
        words.say_verification(results)
    words.complain_of_verification(results, everywhere=device == "all")
    raise typer.Exit(code)


@app.command("tune")
def tune_command(
    context: typer.Context,
    problem: ProblemsArgument = None,
    device: DeviceOption = None,
    case: CaseOption = None,
    settings: SetOption = None,
    dtype: DtypeOption = None,
    precision: PrecisionOption = "fp32",
    keep: Annotated[bool, flag("Use the winners on this device from now on.")] = True,
    listed: Annotated[bool, flag("Measure nothing; list what is kept, of these problems or of all.", "--list")] = False,
    forget: Annotated[bool, flag("Measure nothing; remove what is kept, likewise.", "--forget")] = False,
    plot: PlotOption = None,
    self_test: SelfTestOption = None,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
    debug: DebugOption = False,
) -> None:
    """Find the fastest algorithm and tile on a device.

    Each candidate is verified first. Times are those of whole calls, or of the kernels alone on a GPU that says them.
    The exit code is 3 when nothing could be kept, since other programs kept the machine busy.
    """
    from dispatcher.check.comparison import part
    from dispatcher.device import machine
    from dispatcher.problem import commandline
    from dispatcher.timing.tuning import device_to_tune, tune_operator

    if listed or forget:
        others = variants.given_options(context, beside={"problem", "listed", "forget", "as_json", "verbose", "debug"})
        variants.list_kept(problem or (), forget, ["--list", *others] if listed and forget else others, as_json)
        return
    picture = streams.picture_path(plot, problem)
    busy = machine.busy_reason(machine.foreign_load())
    bound = commandline.bind_problems("tune", problem, settings, case, dtype, precision)
    for operator, _ in bound:
        device_to_tune(operator, device)
    if busy is not None:
        note(f"{busy}; repeat this when it is quiet, since the times may be noise and are not kept")
    with progress("tuning") as advance:
        results = [
            tune_operator(operator, device, keep=keep, progress=part(advance, number, len(bound)))
            for number, (operator, _) in enumerate(bound)
        ]
    streams.draw(results, picture)
    if as_json:
        answer("tune", {"results": [result.as_dict() for result in results]})
    else:
        words.note_left_out(results)
        words.say_tuned(results)
    lost = [result for result in results if keep and result.busy]
    for result in lost:
        complain(f"{result.problem} on {result.device}: nothing is kept, since {result.busy}; repeat this later")
    if lost:
        raise typer.Exit(DeviceError.exit_code)


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
        option(
            "PEER,...",
            "Other libraries that take turns with the devices: torch, torch-compile, onnxruntime, openvino, on GPUs "
            "torch-cudnn and torch-max-autotune; torch's also with -channels-last behind the name.",
        ),
    ] = None,
    repeat: Annotated[str | None, option("N", "Rounds; if left out, until the medians are known well.")] = None,
    time_limit: Annotated[str | None, option("S", "Seconds for each problem after which no round begins.")] = None,
    warmup: Annotated[str, option("N", "Calls before them.")] = "2",
    verify: Annotated[bool, flag("Check every result.")] = True,
    force: Annotated[bool, flag("Measure although others use the machine.", "--force")] = False,
    plot: PlotOption = None,
    compare: Annotated[
        tuple[str, str] | None,
        option(
            "A.json B.json",
            "Measure nothing; say what differs between two results of bench --json by more than the noise.",
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
    from dispatcher.check.comparison import part
    from dispatcher.device.selection import devices, first_usable, parse_request
    from dispatcher.problem import commandline
    from dispatcher.timing import racing
    from dispatcher.timing.peers import parse_peers

    if compare is not None:
        others = variants.given_options(context, beside={"compare", "as_json", "verbose", "debug"})
        variants.compare_benchmarks(*compare, others, as_json)
        return
    seed_number = commandline.whole_number("--seed", seed, 0, MAX_SEED)
    repeats = None if repeat is None else commandline.whole_number("--repeat", repeat, 1)
    limit = None if time_limit is None else commandline.seconds_above_zero("--time-limit", time_limit)
    warmups = commandline.whole_number("--warmup", warmup, 0)
    options = commandline.tuning_options(algorithm, option)
    peers = () if against is None else parse_peers(against)
    picture = streams.picture_path(plot, problem)
    bound = commandline.bind_problems("time", problem, settings, case, dtype, precision)
    if device == "all":
        places: list[str | None] = [found.id for found in devices() if found.available]
    else:
        first_usable(parse_request(device))
        places = [device]
    if not force:
        racing.refuse_when_busy()
    names = [operator.problem.name for operator, _ in bound]
    rules = racing.Rules(seed_number, repeats, warmup=warmups, time_limit_s=limit, check=verify)
    races = []
    with progress("timing") as advance:
        for number, (operator, _) in enumerate(bound):
            told = part(advance, number, len(bound))
            race = racing.race(operator, places, rules, against=peers, options=options, progress=told)
            races.append(race)
            for result in race.results:
                note_skipped(result.skipped)
    streams.draw([race for race in races if race.results], picture)
    if as_json:
        answer("bench", documents.bench_document(bound, races))
    else:
        words.say_races(races)
    errors = [error for name, race in zip(names, races, strict=True) for error in words.complain_of_race(name, race)]
    # Among all devices, one that cannot run a problem is no failure.
    codes = [error.exit_code for error in errors if device != "all" or not isinstance(error, DeviceError)]
    if codes:
        raise typer.Exit(min(codes))


# ---- the program -------------------------------------------------------------------------------------------
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: what follows the program's name; taken from ``sys.argv`` when left out.

    Returns:
        The exit code.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    names = [command.name for command in app.registered_commands]
    name = given[0] if given and given[0] in names else None
    with streams.prepared(given):
        if sys.stdout is None:
            complain("stdout is closed; send it to /dev/null where the result is not wanted")
            return InputError.exit_code
        try:
            streams.raise_when_terminated()
            program = typer.main.get_command(app)
            code = program.main(given, prog_name="dispatcher", standalone_mode=False)
            if code == streams.INTERRUPTED:  # what Typer makes of a KeyboardInterrupt
                raise KeyboardInterrupt
        except (Exception, KeyboardInterrupt, streams.Terminated) as error:
            return streams.fail(KeyboardInterrupt() if isinstance(error, typer.Abort) else error, name)
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    sys.exit(main())
