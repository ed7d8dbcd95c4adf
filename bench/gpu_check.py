"""Everything there is to check on a machine with an NVIDIA GPU, in one go and under a time limit.

    python bench/gpu_check.py --output bench/results/h100-2026-01-31.json [--wheels DIR] [--minutes 13]
    DISPATCHER_CUDA_SIM=1 python bench/gpu_check.py --rehearse --output /tmp/rehearsal.json

Steps, each in a process of its own with its own limit; the JSON file is written again after each of them:
  device     the GPU, driver, compiler and library versions, and what the backend's probe says
  tests      the CUDA tests on the real device
  PROBLEM    each problem at its `kernelbench` size: checked against PyTorch in float64, then timed in float32
             accuracy and in TF32 beside PyTorch, TF32 on and off, interleaved: eager as it is without any setting, with
             cudnn.benchmark, torch.compile and its max-autotune, each of them also in channels_last_3d; where steps
             stand before the convolution, with these in its launch and in launches of their own
  memcheck, racecheck    compute-sanitizer on the `sample` cases
  opencl     the OpenCL backend on the same GPU, where NVIDIA's OpenCL library is there

``--wheels`` names a folder with wheels of PyCUDA and PyOpenCL and what they need, for a machine without
network; they are installed to a temporary folder. ``--rehearse`` runs the same steps at the `sample` size,
for the simulator. Times are medians in milliseconds. ``kernel_ms`` is taken between CUDA events around the
launches, for PyTorch around the module's call, from a contiguous tensor to another; ``call_ms`` is one whole
call of ours with arrays on the device, on the host's clock. Ratios in ``summary`` are against the fastest of
PyTorch's ways, which they name, and against ``torch``, which is eager without any setting.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.common import FIVE, bind_case, plain_parser
from dispatcher.check.comparison import verify_result
from dispatcher.check.inputs import random_tensors
from dispatcher.device.machine import versions
from dispatcher.device.selection import describe
from dispatcher.interface import Timings, device_dict
from dispatcher.problem.messages import picked
from dispatcher.problem.operator import Operator
from dispatcher.timing.peers import TORCH_WAYS, set_torch, torch_function, torch_pipeline
from dispatcher.timing.sampling import Schedule, Times, take_turns

Result = dict[str, Any]
#: Milliseconds of a call's kernels, and of the whole call.
Call = Callable[[], tuple[float, float]]
PACKAGES = ("numpy", "torch", "triton", "pycuda", "pyopencl")
WARM_UP, REPEATS = 3, 20
CHECKED_ITEMS = 2  # of the batch, in float64
PROBLEM_S, PREPARE_S = 100, 45  # for a problem, of which PyTorch may compile and search
SIMULATED = os.environ.get("DISPATCHER_CUDA_SIM") == "1"


def cuda_backend() -> Any:
    """The CUDA backend, on the simulator where the environment asks for it."""
    if SIMULATED:
        importlib.import_module("tests.cudasim").activate()
    return importlib.import_module("dispatcher.backends.cuda").BACKEND


# ---- the steps ---------------------------------------------------------------------------------------------
def step_device(case: str) -> Result:
    """What the machine is."""
    backend = cuda_backend()
    from dispatcher.backends.cuda import toolkit

    found = toolkit.find()
    result: Result = {
        "host": platform.platform(),
        "packages": versions(PACKAGES),
        "nvcc": found if isinstance(found, str) else found.version.splitlines()[-1],
        "devices": [device_dict(device) for device in backend.probe()],
    }
    if shutil.which("nvidia-smi"):
        query = "name,driver_version,memory.total,clocks.max.sm,clocks.max.mem,power.limit,ecc.mode.current"
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        result["nvidia_smi"] = done.stdout.strip()
    return result


def step_tests(case: str) -> Result:
    """The CUDA tests."""
    files = sorted(str(path) for path in (ROOT / "tests").glob("test_cuda_*.py"))
    if case == "sample":
        files = [path for path in files if "numerics" in path]
    environment = {**os.environ, "DISPATCHER_TEST_REQUIRE": "cuda"}
    parallel = ["-n", "auto"] if importlib.util.find_spec("xdist") else []
    options = ["-q", "-p", "no:cacheprovider", "-o", "addopts=", "-rf", *parallel]
    command = [sys.executable, "-m", "pytest", *options, *files]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.strip().splitlines() if line]
    failed = [line for line in lines if line.startswith("FAILED")]
    # Without pytest-timeout, pytest ends with a warning about an unknown option and nothing worse.
    tail = lines[-40:] if failed else []
    return {"passed": done.returncode == 0, "summary": lines[-1:], "failed": failed, "tail": tail}


def step_sample(case: str) -> Result:
    """Every problem's `sample` case, both precisions and algorithms, against the reference."""
    backend = cuda_backend()
    device = backend.probe()[0]
    result: Result = {}
    for name in FIVE:
        for precision in ("fp32", "tf32"):
            for algorithm in ("auto", "fma"):
                op = bind_case(name, case="sample", precision=precision)
                tensors = random_tensors(op, 0)
                output = backend.compile(op, device, {"algorithm": algorithm})(tensors)
                result[f"{name}/{precision}/{algorithm}"] = verify_result(op, tensors, output).passed
    return {"passed": all(result.values()), "cases": result}


def step_problem(case: str, name: str) -> Result:
    """Check and time one problem."""
    backend = cuda_backend()
    device = backend.probe()[0]
    operators = {precision: bind_case(name, case=case, precision=precision) for precision in ("fp32", "tf32")}
    op = operators["fp32"]
    tensors = random_tensors(op, 0)
    started = time.perf_counter()
    ours = {label: backend.compile(each, device, {"tuned": "ignore"}) for label, each in operators.items()}
    if op.convolutions[0] is not op.steps[0]:  # both ways, since the choice between them is an estimate
        for precision, each in operators.items():
            ours[f"{precision} prologue separate"] = backend.compile(each, device, {"prologue": "separate"})
    result: Result = {"case": case, "gflop": op.flops / 1e9, "ideal_mb": op.ideal_bytes / 1e6,
                      "compile_s": time.perf_counter() - started}  # fmt: skip
    torch = _torch()
    there: dict[str, Any] = dict(tensors)
    if torch is not None:
        there = {key: torch.from_numpy(value).cuda() for key, value in tensors.items()}
    contenders: dict[str, Call] = {
        f"ours {label}": partial(_our_call, executable, there) for label, executable in ours.items()
    }
    if torch is not None:
        result["check"] = _check(torch, op, ours, there)
        contenders.update(_torch_calls(torch, op, there, result))
    else:
        result["torch"] = "not installed, or it sees no CUDA device"
        if case == "sample":  # at the large size the reference takes minutes
            named = {label: operators[label.split()[0]] for label in ours}
            right = [verify_result(named[label], tensors, run(tensors)).passed for label, run in ours.items()]
            result["check"] = {"passed": all(right)}
    result["passed"] = result.get("check", {}).get("passed", False)
    samples: dict[str, list[tuple[float, float]]] = {label: [] for label in contenders}
    schedule = Schedule(WARM_UP + (REPEATS if case == "kernelbench" else 2), pause_s=0.0)
    take_turns(list(contenders), schedule, lambda label: samples[label].append(contenders[label]()))
    result["times"] = {label: _summary(values[WARM_UP:]) for label, values in samples.items()}
    for label, executable in ours.items():
        timings = Timings()
        executable(there, None, timings)
        result[f"launches {label}"] = [(launch, 1e3 * seconds) for launch, seconds in timings.launches]
        plans = executable.launches
        result[f"plan {label}"] = [{**picked(plan, "name", "steps", "algorithm"), **plan.detail} for plan in plans]
    return result


def _our_call(executable: Any, there: dict[str, Any]) -> tuple[float, float]:
    begin = time.perf_counter()
    executable(there)
    call = time.perf_counter() - begin
    timings = Timings()
    executable(there, None, timings)
    return 1e3 * timings.kernel_s, 1e3 * call


def _summary(values: list[tuple[float, float]]) -> Result:
    kernels = Times(tuple(kernel for kernel, _ in values))
    call_ms = statistics.median(call for _, call in values)
    found = {"kernel_ms": kernels.median_s, "quartiles_ms": list(kernels.quartiles_s)}
    return {**found, "call_ms": call_ms, "samples": len(values)}


def _torch() -> Any:
    """PyTorch, where it is installed and sees a GPU."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return None
    return torch if not SIMULATED and torch.cuda.is_available() else None


def _check(torch: Any, op: Operator, ours: dict[str, Any], there: dict[str, Any]) -> Result:
    """Errors of ours and of PyTorch's float32 on a few batch items, relative to the largest value in
    float64."""
    set_torch(torch, tf32=False, search=False)
    # Each batch item depends on its own input alone in all five problems.
    few = there[op.source][:CHECKED_ITEMS]
    exact = torch_pipeline(op, lambda operand: there[operand.name].double())(few.double())
    size = float(exact.abs().max())

    def error(got: Any) -> float:
        return float((got.double() - exact).abs().max()) / size

    results = {"torch fp32": error(torch_pipeline(op, lambda operand: there[operand.name])(few))}
    allowed = {"fp32": max(4 * results["torch fp32"], 1e-5), "tf32": 2e-2}
    passed = True
    for label, executable in ours.items():
        got = torch.from_numpy(executable(there).get()[:CHECKED_ITEMS]).cuda()
        results[f"ours {label}"] = error(got)
        passed = passed and results[f"ours {label}"] <= allowed[label.split()[0]]
    return {"max_error_over_max": results, "passed": passed}


def _torch_calls(torch: Any, op: Operator, there: dict[str, Any], result: Result) -> dict[str, Call]:
    found: dict[str, Call] = {}
    until = time.perf_counter() + PREPARE_S
    for way in TORCH_WAYS.values():  # those that take long to prepare come last
        function = torch_function(op, way, lambda operand: there[operand.name])
        for precision in ("tf32", "fp32"):
            label = f"{way.label} {precision}"
            once = partial(_torch_call, torch, function, there[op.source], precision == "tf32", way.search)
            try:
                if time.perf_counter() > until:
                    raise TimeoutError(f"the others took {PREPARE_S} s to prepare")
                once()
            except Exception as error:  # a missing compiler for Triton must not cost the rest
                result[label] = describe(error)
            else:
                found[label] = once
    return found


def _torch_call(torch: Any, function: Callable[[Any], Any], x: Any, tf32: bool, search: bool) -> tuple[float, float]:
    set_torch(torch, tf32=tf32, search=search)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin = time.perf_counter()
    with torch.no_grad():
        start.record()
        function(x)
        end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end), 1e3 * (time.perf_counter() - begin)


def step_sanitizer(case: str, tool: str) -> Result:
    """compute-sanitizer on the `sample` cases."""
    program = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if program is None or SIMULATED:
        return {"skipped": "compute-sanitizer is not there, or the device is simulated"}
    command = [program, "--tool", tool, "--error-exitcode", "9", sys.executable, __file__, "--step", "sample"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = (done.stdout + done.stderr).strip().splitlines()
    return {"passed": done.returncode == 0, "tail": lines[-30:]}


def step_opencl(case: str) -> Result:
    """The OpenCL backend on GPUs."""
    from dispatcher.registry import backend

    opencl = backend("opencl")
    found = opencl.probe()
    gpus = [device for device in found if device.available and device.kind == "gpu"]
    if not gpus:
        return {"skipped": f"no OpenCL GPU: {[device.reason or device.name for device in found]}"}
    result: Result = {"device": gpus[0].name}
    for name in FIVE:
        small, op = bind_case(name, case="sample"), bind_case(name, case=case)
        tensors = random_tensors(small, 0)
        agrees = verify_result(small, tensors, opencl.compile(small, gpus[0], {})(tensors)).passed
        tensors = random_tensors(op, 0, kind="uniform")
        run = opencl.compile(op, gpus[0], {})
        run(tensors)
        timings = Timings()
        run(tensors, None, timings)
        result[name] = {"sample passed": agrees, "kernel_ms": 1e3 * timings.kernel_s}
    result["passed"] = all(result[key]["sample passed"] for key in result if key != "device")
    return result


# ---- the frame ---------------------------------------------------------------------------------------------
def steps() -> dict[str, tuple[float, Callable[[str], Result]]]:
    """All steps, in order: name to its time limit in seconds, and how it is run."""
    return {
        "device": (30, step_device),
        "tests": (240, step_tests),
        **{name: (PROBLEM_S, partial(step_problem, name=name)) for name in FIVE},
        **{tool: (60, partial(step_sanitizer, tool=tool)) for tool in ("memcheck", "racecheck")},
        "opencl": (60, step_opencl),
        "sample": (60, step_sample),
    }


def run_child(name: str, arguments: list[str], environment: dict[str, str], limit_s: float) -> Result:
    """Run a step in a process of its own; a failure or a missed limit is a result too."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        command = [sys.executable, __file__, "--step", name, "--output", str(path), *arguments]
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=limit_s, check=False
            )
            result: Result = json.loads(path.read_text()) if path.exists() else {
                "error": done.stderr.strip().splitlines()[-15:]
            }  # fmt: skip
        except subprocess.TimeoutExpired:
            result = {"error": f"not done after {limit_s:.0f} s"}
    return {"seconds": round(time.perf_counter() - started, 1), **result}


def install(wheels: Path, folder: str) -> None:
    """Install wheels to ``folder`` without a network."""
    names = [str(path) for path in sorted(wheels.glob("*.whl"))]
    options = ["--quiet", "--no-index", "--no-deps", "--target", folder]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, *names], check=True)


def main() -> int:
    """Run all steps, or one of them."""
    parser = plain_parser(__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--wheels", type=Path)
    parser.add_argument("--minutes", type=float, default=13)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--step", help="run this step alone, in this process")
    parser.add_argument("--only", nargs="+", help="run these steps only")
    given = parser.parse_args()
    case = "sample" if given.rehearse else "kernelbench"
    if given.step:
        result = steps()[given.step][1](case)
        text = json.dumps(result, indent=1)
        if given.output:
            given.output.write_text(text)
        else:
            print(text)
        return 0 if result.get("passed", True) else 1
    if given.output is None:
        parser.error("--output is needed")
    deadline = time.monotonic() + 60 * given.minutes
    outcomes: Result = {}
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    report: Result = {"started": started, "case": case, "steps": outcomes}
    with tempfile.TemporaryDirectory() as folder:
        environment = dict(os.environ)
        if given.wheels:
            install(given.wheels, folder)
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        for name, (limit_s, _) in steps().items():
            if name == "sample" or (given.only and name not in given.only):
                continue
            left = deadline - time.monotonic()
            arguments = ["--rehearse"] if given.rehearse else []
            outcome = {"skipped": "no time left"}
            if left >= 5:
                outcome = run_child(name, arguments, environment, min(limit_s, left))
            outcomes[name] = outcome
            given.output.write_text(json.dumps(report, indent=1) + "\n")
            told = (outcome[key] for key in ("error", "skipped", "times") if outcome.get(key))
            print(f"{name}: {next(told, outcome.get('passed', 'done'))}", file=sys.stderr)
    report["summary"] = summary(outcomes)
    report["passed"] = all(sound(outcome) for outcome in outcomes.values())
    given.output.write_text(json.dumps(report, indent=1) + "\n")
    print("\n".join([*report["summary"], "passed" if report["passed"] else "NOT passed"]))
    return 0 if report["passed"] else 1


def sound(outcome: Result) -> bool:
    """Did a step do what it is there for, or could it not be done here? An error is neither."""
    return "error" not in outcome and bool(outcome.get("passed", True))


def summary(outcomes: Result) -> list[str]:
    """A line for each problem and precision, the worst first: ours, PyTorch's fastest way, and PyTorch as it comes."""
    lines = []
    for name, outcome in outcomes.items():
        times = {label: values["kernel_ms"] for label, values in outcome.get("times", {}).items()}
        for precision in ("fp32", "tf32"):
            ours = times.get(f"ours {precision}")
            peers = [label for label in times if label.startswith("torch") and label.endswith(precision)]
            if ours and peers:
                best = min(peers, key=times.__getitem__)
                told = [f"{times[best] / ours:6.2f}x  {name} {precision}: {ours:.3f} ms, {best} {times[best]:.3f} ms"]
                if plain := times.get(f"torch {precision}"):
                    told.append(f"{plain / ours:.2f}x against eager without settings ({plain:.3f} ms)")
                lines.append((times[best] / ours, "; ".join(told)))
    return [line for _, line in sorted(lines)]


if __name__ == "__main__":
    sys.exit(main())
