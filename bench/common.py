"""What the benchmark programs share: options, the refusal of a busy machine, result files.

Sampling, statistics and checks are those of ``dispatcher bench``: ``dispatcher/timing``.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import dispatcher
from bench import isa
from dispatcher.device.machine import busy_reason, cores, foreign_load
from dispatcher.device.splitting import batch_parameter, with_batch
from dispatcher.interface import Device
from dispatcher.problem.arguments import bind_numbers
from dispatcher.problem.operator import Operator
from dispatcher.timing.contenders import Contender, Lineup, Witness
from dispatcher.timing.racing import environment
from dispatcher.timing.sampling import Order, Probe, Sample, Times, quiet_times, sample_beside, threshold_gflops

RESULTS = ROOT / "bench" / "results"

#: The problems whose kernels are tuned by hand, which programs measure where none is named.
FIVE = (
    "conv-transpose-3d-asym-input-sq-kernel",
    "conv-transpose3d-avgpool-clamp-softmax-multiply",
    "conv-transpose3d-layernorm-gelu-scaling",
    "conv-transpose3d-max-max-sum",
    "conv-transpose3d-sum-layernorm-avgpool-gelu",
)
#: Share of the fastest probe that a probe has to reach for its sample to count.
QUIET_LIMIT = 0.7
#: Bytes that are copied to measure the memory; well above the caches.
COPY_BYTES = 256 << 20
SMALL_BATCH = 2
SMALL_BATCHES = {"conv-transpose-3d-asym-input-sq-kernel": 1}
SHORT_PLATFORMS = {"Portable Computing Language": "PoCL", "Intel(R) OpenCL": "Intel"}


def say(text: str) -> None:
    """A line on stderr, where all that is no result goes."""
    print(text, file=sys.stderr, flush=True)


# ---- options -----------------------------------------------------------------------------------------------
def at_least(least: int) -> Callable[[str], int]:
    """An argument type: a whole number of ``least`` or more."""

    def parse(text: str) -> int:
        if not text.strip().isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r}; expected a whole number of {least} or more")
        return int(text)

    return parse


def positive(text: str) -> float:
    """An argument type: a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a number above 0")
    return value


def plain_parser(description: str | None, name: str | None = None) -> argparse.ArgumentParser:
    """A parser that shows a program's docstring as it is."""
    return argparse.ArgumentParser(
        prog=name, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def new_parser(name: str, description: str | None, repeats: int) -> argparse.ArgumentParser:
    """A parser with the options that all programs on the CPU have."""
    parser = plain_parser(description, name)
    add = parser.add_argument
    add("--repeats", type=at_least(1), default=repeats, help="quiet samples of each contender")
    add("--devices", nargs="+", metavar="ID",
        help="OpenCL CPU devices to measure, such as opencl:1 (default: all)")  # fmt: skip
    add("--quiet-limit", type=positive, default=QUIET_LIMIT,
        help="share of the fastest probe that those of a sample must reach; above 1: GFLOP/s "
             "(default: %(default)s)")  # fmt: skip
    add("--force", action="store_true", help="measure although the machine is busy")
    add("--output", type=Path, help="the JSON file to write (default: a dated one in bench/results)")
    return parser


def add_isa(parser: argparse.ArgumentParser) -> None:
    """The option of programs that can have ours and the peers keep to older instructions."""
    parser.add_argument("--isa", choices=sorted(isa.SETTINGS),
                        help="have ours and the peers keep to these vector instructions")  # fmt: skip


def assignment(text: str) -> tuple[str, int]:
    """An argument type: ``NAME=VALUE`` with a whole number."""
    name, _, value = text.partition("=")
    if not name.isidentifier() or not value.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r}; expected NAME=VALUE with a whole number")
    return name, int(value)


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """The options of programs that measure named problems."""
    parser.add_argument("--batch", type=at_least(1), help="batch size, instead of 2 (asym-input: 1)")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", type=assignment,
                        help="another size, for all problems that have it")  # fmt: skip


def bind_case(
    name: str,
    batch: int | None = None,
    sizes: Mapping[str, int] | None = None,
    case: str | None = "kernelbench",
    precision: str = "fp32",
) -> Operator:
    """A problem at the sizes of a case, with another batch size, and other sizes where it has them.

    Raises:
        InputError: there is no such problem, or a size is wrong.
    """
    problem = dispatcher.load_problem(name)
    given = dict(sizes or {}) | ({} if batch is None else {"batch_size": batch})
    known = {key: value for key, value in given.items() if problem.parameter(key) is not None}
    return bind_numbers(problem, known, "time", case=case, precision=precision)


def small_operator(name: str, settings: argparse.Namespace, case: str | None = "kernelbench") -> Operator:
    """:func:`bind_case` with a small batch, and with what :func:`add_sizes` says instead."""
    operator = bind_case(name, sizes=dict(settings.set), case=case)
    parameter, _ = batch_parameter(operator)
    batch = settings.batch or SMALL_BATCHES.get(operator.problem.name, SMALL_BATCH)
    return with_batch(operator, parameter, batch) if parameter else operator


# ---- a run -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Run:
    """A run of a program.

    Attributes:
        settings: its options; see :func:`new_parser`.
        head: the first fields of its result file.
        devices: the OpenCL CPU devices to measure.
        left_out: the reason why each other device, or peer, is not measured.
        probe: of the machine's speed.
    """

    settings: argparse.Namespace
    head: Mapping[str, Any]
    devices: Sequence[Device]
    left_out: Mapping[str, str]
    probe: Probe

    @classmethod
    def start(cls, program: str, settings: argparse.Namespace, peers: Sequence[str] = ()) -> Run:
        """Refuse a busy machine, find the devices, and calibrate the probe on the first of them.

        Args:
            program: its name.
            settings: its options.
            peers: those that are compared with, for programs with :func:`add_isa`.

        Raises:
            SystemExit: with exit code 3 when the machine is busy, or there is no device, or no peer, that keeps to the
                instructions that were asked for.
        """
        limit = vars(settings).get("isa")
        isa.limit(limit)
        load = foreign_load()
        busy = busy_reason(load)
        if busy is not None and not settings.force:
            say(f"{busy}; wait until it is quiet, or pass --force to measure all the same")
            raise SystemExit(3)
        head = {"schema": 1, "program": program, "date": datetime.date.today().isoformat(), **environment()}
        head |= {"clock": "time.perf_counter", "foreign_cores_at_start": load, "busy": busy}
        devices, left_out = cpu_devices(settings.devices)
        if limit:
            head["isa"] = {"name": limit, "settings": isa.SETTINGS[limit]}
            left_out |= isa.devices_left_out(devices) | isa.peers_left_out(peers)
            devices = [device for device in devices if device.id not in left_out]
        for name, why in left_out.items():
            say(f"{name} is left out: {why}")
        if not devices:
            say("there is no OpenCL CPU device to measure; pip install '.[cpu]'")
            raise SystemExit(3)
        if peers and set(peers) <= left_out.keys():
            say("there is no peer to measure")
            raise SystemExit(3)
        return cls(settings, head, devices, left_out, probe_on(devices[0].index))

    @property
    def threshold(self) -> float:
        """What the probes beside a sample have to reach, GFLOP/s; known when the run is over."""
        return threshold_gflops(self.settings.quiet_limit, self.probe.best)

    def report(self, **facts: Any) -> dict[str, Any]:
        """A result file with these facts in it."""
        probe = {
            "device": self.probe.name,
            "peak_gflops": self.probe.best,
            "copy_gbytes_per_s": self.probe.copy_gbytes_per_s,
            "quiet_limit": self.settings.quiet_limit,
            "threshold_gflops": self.threshold,
        }
        how = {"threads": cores(), "precision": "float32", "repeats": self.settings.repeats}
        return {**self.head, **how, "probe": probe, "left_out": dict(self.left_out), **facts}


def cpu_devices(wanted: Sequence[str] | None) -> tuple[list[Device], dict[str, str]]:
    """The OpenCL CPU devices to measure, and the reason why each other one is left out.

    This also brings the OpenCL drivers in before OpenVINO is imported, which comes with an older copy of a
    library that one of them needs.
    """
    chosen, left_out = [], {}
    found = {device.id: device for device in dispatcher.devices() if device.backend == "opencl"}
    for name in wanted or []:
        if name not in found:
            left_out[name] = f"there is no such device; there is {', '.join(found) or 'none'}"
    for name, device in found.items():
        units = device.facts.get("compute_units")
        if wanted and name not in wanted:
            continue
        if not device.available:
            left_out[name] = device.reason or "not available"
        elif device.kind != "cpu":
            left_out[name] = f"{device.name} is not a CPU"
        elif units != cores():
            left_out[name] = f"it uses {units} threads, and this process may use {cores()} cores"
        else:
            chosen.append(device)
    return chosen, left_out


@cache
def opencl_runtime(index: int) -> Any:
    """Context and facts of the OpenCL device of that index, the same each time."""
    from dispatcher.backends.opencl.runtime import OpenClRuntime, find_devices

    found = find_devices()[index]
    return OpenClRuntime(found.platform, found.device)


def probe_on(index: int) -> Probe:
    """A calibrated probe on the OpenCL CPU device of that index."""
    from dispatcher.backends.opencl.roofline import probe
    from dispatcher.backends.opencl.runtime import find_devices

    run, copy_rate = probe(opencl_runtime(index), COPY_BYTES)
    return Probe(find_devices()[index].name, copy_gbytes_per_s=copy_rate, _run=run).calibrated()


def device_label(device: Device) -> str:
    """What tables call our backend on a device."""
    platform = str(device.facts.get("platform", device.name))
    return f"ours on {SHORT_PLATFORMS.get(platform, platform)}"


def until_interrupted(cases: Iterable[Callable[[], dict[str, Any]]]) -> list[dict[str, Any]]:
    """What the cases give, one after another; Ctrl-C ends it with those that there are, if any."""
    found: list[dict[str, Any]] = []
    try:
        for case in cases:
            found.append(case())
    except KeyboardInterrupt:
        if not found:
            raise
        say("interrupted: reporting what was measured before")
    return found


# ---- one case ----------------------------------------------------------------------------------------------
def race(
    title: str,
    operator: Operator,
    tensors: Mapping[str, np.ndarray],
    makers: Mapping[str, Callable[[], Contender]],
    probe: Probe,
    settings: argparse.Namespace,
    order: Order = "random",
) -> dict[str, Any]:
    """Prepare, check and time contenders on one operator.

    Args:
        title: what progress lines say of it.
        operator: what to compute.
        tensors: every input tensor by name.
        makers: name to a function that prepares the contender.
        probe: of the machine's speed.
        settings: the program's options.
        order: see :class:`dispatcher.timing.sampling.Schedule`.

    Returns:
        Why contenders failed, and of the others the samples and what is known of them. Statistics come later, since
        they depend on the whole run's fastest probe.
    """
    batch = operator.output_shape[0]
    witness = Witness(operator, tensors, sorted({0, batch // 2, batch - 1}))
    lineup = Lineup(tensors, witness)
    for name, make in makers.items():
        say(f"{title}: preparing {name}")
        lineup.enter(name, make)
    say(f"{title}: reference")
    lineup.judge()
    for each in list(lineup.contenders):
        lineup.attempt(each, each.call)
    lineup.judge()
    gc.collect()
    sampling = sample_beside(
        probe,
        settings.quiet_limit,
        {each.name: each.timed for each in lineup.contenders},
        settings.repeats,
        order=order,
        progress=lambda count, share: say(f"{title}: round {count}"),
    )
    failures = {failure.name: failure.reason for failure in lineup.failures} | sampling.failures
    for name, reason in failures.items():
        say(f"{title}: {name} is out: {reason}")
    results = {
        each.name: {
            "setup_s": each.compile_s + each.first_s,
            "error_over_bound": each.comparison.max_error_over_bound,
            **each.facts(),
            "samples": sample_lists(sampling.samples[each.name]),
        }
        for each in lineup.contenders
        if each.name not in failures and each.comparison is not None
    }
    return {"verified_images": witness.items, "failures": failures, "results": results}


# ---- results -----------------------------------------------------------------------------------------------
def sample_lists(samples: Iterable[Sample]) -> list[list[float]]:
    """Samples for a result file, with as many digits as mean something."""
    return [[float(f"{value:.6g}") for value in (s.seconds, s.before, s.after)] for s in samples]


def add_statistics(result: dict[str, Any], threshold: float) -> Times:
    """Put what its samples come to into a contender's result; gives those that count."""
    times = quiet_times([Sample(*sample) for sample in result["samples"]], threshold)
    low, high = times.quartiles_s
    result.update(median_s=times.median_s, low_s=low, high_s=high, min_s=times.min_s)
    kept = 0 if times.noisy else len(times.seconds)
    result.update(kept=kept, dropped=times.dropped, noisy=times.noisy)
    return times


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as JSON, a line for each field and for each list of numbers; numbers must be finite."""
    text = json.dumps(value, indent=1, allow_nan=False)
    text = re.sub(r"\[\s+([-+.\de,\s]+?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")


def keep(report: Mapping[str, Any], output: Path | None) -> Path:
    """Write a report to ``output``, or to a dated file in bench/results."""
    name = "-".join([report["program"], *([report["isa"]["name"]] if "isa" in report else []), report["date"]])
    path = (output or RESULTS / f"{name}.json").resolve()
    write_json(path, report)
    say(f"results: {path}")
    return path


def write_table(guide: Path, program: str, results: str, table: str) -> None:
    """Write a table between its markers in a guide, the first of which names the file in bench/results behind it."""
    text = guide.read_text(encoding="utf-8")
    start, end = text.index(f"<!-- {program}:"), text.index(f"<!-- {program}: end -->")
    text = f"{text[:start]}<!-- {program}: bench/results/{results} -->\n\n{table}\n\n{text[end:]}"
    guide.write_text(text, encoding="utf-8")


def publish(report: Mapping[str, Any], settings: argparse.Namespace, text: str, guide: Path) -> None:
    """Keep a report, print its text, and with ``--table`` write that into a guide."""
    name = keep(report, settings.output).name
    print(text)
    if settings.table:
        write_table(guide, report["program"], name, text)


def machine_text(report: Mapping[str, Any]) -> str:
    """The machine of a report, and what all were limited to."""
    machine = report["machine"]
    vectors = ", ".join(machine.get("vector_instructions", [])) or "no known vector instructions"
    limit = f"; **all limited to {report['isa']['name']}**" if "isa" in report else ""
    return f"{machine['cpu']}, {machine['cores']} cores ({vectors}{limit})"


def markdown(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    head, *body = (f"| {' | '.join(row)} |" for row in (titles, *rows))
    return [head, "|---" * len(titles) + "|", *body]


def drop_note(report: Mapping[str, Any], results: Iterable[Mapping[str, Any]]) -> str:
    """How many samples were dropped, and what else says that the figures mean little."""
    found = list(results)
    kept, dropped = (sum(result[key] for result in found) for key in ("kept", "dropped"))
    text = f"{dropped} of {kept + dropped} samples were dropped, since the machine was slow beside them."
    if any(result["noisy"] for result in found):
        text += " Where `~` stands no sample was quiet: take no figure from there."
    if report["busy"]:
        text += f" **Take no figure from here**: {report['busy']}."
    return text
