"""Whole networks through torch.compile(backend="dispatcher"), against PyTorch and OpenVINO on the CPU.

    python bench/networks.py                              all networks, all peers
    python bench/networks.py --only unet-3d --repeats 5 --devices opencl:1

Each contender takes a tensor of PyTorch (N, C, ...) and gives one back; weights are known beforehand. All have the
same number of threads and compute in float32. Each has a process of its own, since some libraries move the threads of
others to other processors. Every result is checked against PyTorch in float64 before anything is timed. See
bench/README.md.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from bench import common
from bench.common import Run, say
from bench.cpu_peers import milliseconds, ratio_text
from bench.processes import Process
from dispatcher.device.machine import cores
from dispatcher.device.selection import describe
from dispatcher.errors import DispatcherError
from dispatcher.interface import Device
from dispatcher.timing import charts
from dispatcher.timing.sampling import ratio, sample_beside, seconds_since, timed

PROGRAM = "networks"
REPEATS, SEED = 9, 0
#: A result that differs from float64's by more than this share of the largest value is wrong.
TOLERANCE = 1e-4
#: Behind a device's name: the contender whose module is not frozen.
GUARDED = "-guarded"

Call = Callable[[Any], Any]


# ---- networks ----------------------------------------------------------------------------------------------
class UNet(nn.Module):
    """A 3-D U-Net as medical segmentation uses it: strided convolutions down, transposed ones up, skips."""

    def __init__(self, widths: Sequence[int], classes: int) -> None:
        super().__init__()
        levels = list(zip((1, *widths), widths, strict=False))
        pairs = levels[1:]
        self.down = nn.ModuleList(self.blocks(ins, outs, 1 if ins == 1 else 2) for ins, outs in levels)
        self.up = nn.ModuleList(nn.ConvTranspose3d(outs, ins, 2, 2) for ins, outs in reversed(pairs))
        self.merge = nn.ModuleList(self.blocks(2 * ins, ins, 1) for ins, _ in reversed(pairs))
        self.head = nn.Conv3d(widths[0], classes, 1)

    @staticmethod
    def blocks(ins: int, outs: int, stride: int) -> nn.Sequential:
        """Two convolutions, each with its norm and activation."""
        layers: list[nn.Module] = []
        for each, step in ((ins, stride), (outs, 1)):
            layers += [
                nn.Conv3d(each, outs, 3, step, 1),
                nn.InstanceNorm3d(outs, affine=True),
                nn.LeakyReLU(0.01, True),
            ]
        return nn.Sequential(*layers)

    def forward(self, x: Any) -> Any:
        """Logits of each voxel."""
        skips = []
        for down in self.down:
            x = down(x)
            skips.append(x)
        for up, merge, skip in zip(self.up, self.merge, reversed(skips[:-1]), strict=True):
            x = merge(torch.cat([up(x), skip], 1))
        return self.head(x)


def decoder(rank: int, widths: Sequence[int], outs: int) -> nn.Sequential:
    """An autoencoder's decoder: each transposed convolution doubles the extents."""
    conv, transposed = getattr(nn, f"Conv{rank}d"), getattr(nn, f"ConvTranspose{rank}d")
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [transposed(a, b, 4, 2, 1), nn.GroupNorm(8, b), nn.SiLU()]
    return nn.Sequential(*layers, conv(widths[-1], outs, 3, padding=1), nn.Tanh())


class Factored(nn.Module):
    """A residual block of a convolution over space and one over time."""

    def __init__(self, ins: int, outs: int, stride: int) -> None:
        super().__init__()
        self.space = nn.Conv3d(ins, outs, (1, 3, 3), (1, stride, stride), (0, 1, 1), bias=False)
        self.time = nn.Conv3d(outs, outs, (3, 1, 1), (stride, 1, 1), (1, 0, 0), bias=False)
        self.first, self.second = nn.BatchNorm3d(outs), nn.BatchNorm3d(outs)
        self.skip = nn.Identity() if stride == 1 else nn.Conv3d(ins, outs, 1, stride, bias=False)

    def forward(self, x: Any) -> Any:
        """The block's result."""
        y = torch.relu(self.first(self.space(x)))
        return torch.relu(self.second(self.time(y)) + self.skip(x))


def video(widths: Sequence[int], classes: int) -> nn.Sequential:
    """A classifier of short videos, convolutions over space and time with pools between them (after Tran et al.,
    "Learning spatiotemporal features with 3D convolutional networks", 2015)."""
    layers: list[nn.Module] = []
    for level, (ins, outs) in enumerate(itertools.pairwise((3, *widths))):
        for each in (ins,) if level < 2 else (ins, outs):
            layers += [nn.Conv3d(each, outs, 3, padding=1, bias=False), nn.BatchNorm3d(outs), nn.ReLU(True)]
        if outs != widths[-1]:
            layers.append(nn.MaxPool3d((2 if level else 1, 2, 2)))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(widths[-1], classes))


def factored_video(widths: Sequence[int], classes: int) -> nn.Sequential:
    """A classifier of short videos whose convolutions are over space or over time (after Tran et al., "A closer look at
    spatiotemporal convolutions for action recognition", 2018)."""
    stem = nn.Conv3d(3, widths[0], (1, 7, 7), (1, 2, 2), (0, 3, 3), bias=False)
    layers: list[nn.Module] = [
        stem,
        nn.BatchNorm3d(widths[0]),
        nn.ReLU(True),
        nn.MaxPool3d((1, 3, 3), (1, 2, 2), (0, 1, 1)),
    ]
    for ins, outs in itertools.pairwise(widths):
        layers += [Factored(ins, outs, 2), Factored(outs, outs, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(widths[-1], classes))


#: How each is made, and the shape of its input.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "unet-3d": (partial(UNet, (16, 32, 64), 3), (1, 1, 64, 64, 64)),
    "decoder-2d": (partial(decoder, 2, (128, 64, 32, 16), 3), (4, 128, 16, 16)),
    "decoder-3d": (partial(decoder, 3, (64, 32, 16), 1), (1, 64, 16, 16, 16)),
    "video": (partial(video, (16, 32, 64, 128), 40), (1, 3, 16, 112, 112)),
    "video-factored": (partial(factored_video, (16, 32, 64, 128), 40), (1, 3, 16, 112, 112)),
}


# ---- contenders --------------------------------------------------------------------------------------------
def channels_last(module: nn.Module, x: Any) -> tuple[nn.Module, Call]:
    """A copy of a module that computes with channels last, and the conversion of its input."""
    layout = torch.channels_last_3d if x.ndim == 5 else torch.channels_last
    return copy.deepcopy(module).to(memory_format=layout), lambda y: y.to(memory_format=layout)


def torch_peer(module: nn.Module, x: Any, *, last: bool, compiled: bool = False, frozen: bool = False) -> Call:
    """PyTorch, eager or compiled by Inductor, which may take weights for constants."""
    module, convert = channels_last(module, x) if last else (module, lambda y: y)
    options = {"freezing": True} if frozen else None
    run = torch.compile(module, dynamic=False, fullgraph=True, options=options) if compiled else module
    return lambda y: run(convert(y)).contiguous()


def openvino_peer(module: nn.Module, x: Any) -> Call:
    """OpenVINO's CPU plugin in float32, from the module itself."""
    os.environ.setdefault("OPENVINO_TELEMETRY_DISABLED", "1")
    import openvino

    model = openvino.convert_model(module, example_input=x, input=[x.shape])
    settings = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": cores()}
    compiled = openvino.compile_model(model, "CPU", settings)
    return lambda y: torch.from_numpy(compiled(y.numpy(), share_inputs=True, share_outputs=True)[0])


def ours(module: nn.Module, x: Any, device: str, *, frozen: bool) -> Call:
    """What users get of ``dispatcher.torch.compile``."""
    import dispatcher.torch

    return dispatcher.torch.compile(module, (x,), device=device, frozen=frozen)


def our_labels(devices: Sequence[Device]) -> dict[str, str]:
    """What each of our contenders is called: frozen modules, as OpenVINO's are, and those that can be trained on."""
    labels = {}
    for device in devices:
        labels[device.id] = common.device_label(device)
        labels[device.id + GUARDED] = f"{common.device_label(device)}, not frozen"
    return labels


PEERS: dict[str, Callable[[nn.Module, Any], Call]] = {
    "eager": partial(torch_peer, last=False),
    "channels-last": partial(torch_peer, last=True),
    "inductor": partial(torch_peer, last=False, compiled=True),
    "inductor-channels-last": partial(torch_peer, last=True, compiled=True),
    "inductor-frozen": partial(torch_peer, last=False, compiled=True, frozen=True),
    "inductor-frozen-channels-last": partial(torch_peer, last=True, compiled=True, frozen=True),
    "openvino": openvino_peer,
}


# ---- one network -------------------------------------------------------------------------------------------
def given(make: Callable[[], nn.Module], shape: Sequence[int]) -> tuple[nn.Module, Any]:
    """The same network and input in each process."""
    torch.manual_seed(SEED)
    return make().eval(), torch.randn(shape)


class Ready:
    """A contender in its own process, ready for calls: two results were checked."""

    def __init__(self, make: Callable[[], nn.Module], shape: Sequence[int], prepare: Callable[..., Call]) -> None:
        torch.set_num_threads(cores())
        torch.set_grad_enabled(False)
        module, x = given(make, shape)
        wanted = copy.deepcopy(module).double()(x.double())
        start = time.perf_counter()
        call = partial(prepare(copy.deepcopy(module), x), x)
        found = call()
        setup_s = seconds_since(start)
        difference = max(float((y.double() - wanted).abs().max() / wanted.abs().max()) for y in (found, call()))
        if not difference <= TOLERANCE:
            raise ValueError(f"it differs from float64 by {difference:.2g} of the largest value")
        self.timed = timed(call)
        self._facts = {"setup_s": setup_s, "difference": difference}

    def facts(self) -> dict[str, float]:
        """How it got ready."""
        return self._facts


def measure(name: str, devices: Sequence[Device], run: Run) -> dict[str, Any]:
    """Prepare, check and time everybody on one network."""
    settings = run.settings
    make, shape = NETWORKS[name]
    module, x = given(make, shape)
    with FlopCounterMode(display=False) as counter:
        result = module(x)
    numbers = sum(each.numel() for each in (x, result, *module.parameters()))
    makers: dict[str, Callable[[nn.Module, Any], Call]] = {each: PEERS[each] for each in settings.peers}
    for device in devices:
        makers[device.id] = partial(ours, device=device.id, frozen=True)
        makers[device.id + GUARDED] = partial(ours, device=device.id, frozen=False)
    turns: dict[str, Callable[[], float]] = {}
    results: dict[str, dict[str, Any]] = {}
    failures: dict[str, str] = {}
    with ExitStack() as stack:
        for each, prepare in makers.items():
            say(f"{name}: preparing {each}")
            try:
                process = stack.enter_context(closing(Process(Ready, make, shape, prepare)))
                results[each] = process.ask("facts")
            except (ImportError, DispatcherError) as error:
                failures[each] = describe(error)
            else:
                turns[each] = partial(process.ask, "timed")
        sampling = sample_beside(run.probe, settings.quiet_limit, turns, settings.repeats)
    failures |= sampling.failures
    for each, reason in failures.items():
        say(f"{name}: {each} is out: {reason}")
        results.pop(each, None)
    for each, answer in results.items():
        answer["samples"] = common.sample_lists(sampling.samples[each])
    facts = {"network": name, "shape": list(shape), "flops": counter.get_total_flops(), "ideal_bytes": 4 * numbers}
    return {**facts, "results": results, "failures": failures}


def conclude(case: dict[str, Any], labels: Collection[str], threshold: float) -> None:
    """Put the statistics into a case: summaries, the best peer, ratios of ours, which ``labels`` names."""
    times = {each: common.add_statistics(result, threshold) for each, result in case["results"].items()}
    mine = [each for each in labels if each in times]
    best = min(times.keys() - {*mine}, key=lambda each: times[each].median_s, default=None)
    case["best_peer"] = best
    case["ratios"] = {} if best is None else {each: asdict(ratio(times[best], times[each])) for each in mine}


# ---- what came of it ---------------------------------------------------------------------------------------
def table(report: Mapping[str, Any]) -> str:
    """The results as Markdown."""
    labels: Mapping[str, str] = report["labels"]
    peers = [each for each in PEERS if any(each in case["results"] for case in report["cases"])]
    rows = [
        [
            f"`{case['network']}`, {'x'.join(map(str, case['shape']))}",
            f"{case['flops'] / 1e9:.1f}",
            *(milliseconds(case["results"].get(each)) for each in (*peers, *labels)),
            *(ratio_text(case["ratios"].get(each)) for each in labels),
        ]
        for case in report["cases"]
    ]
    titles = ["network, input", "GFLOP", *peers, *labels.values(), *(f"best peer / {each}" for each in labels.values())]
    machine = report["machine"]
    lines = [f"{machine['cpu']}, {machine['cores']} cores; {report['date']}. Milliseconds (medians).", ""]
    lines += common.markdown(titles, rows)
    notes = [f"{name}, {case['network']}: {why}" for case in report["cases"] for name, why in case["failures"].items()]
    lines += ["", *(f"- not measured: {note}" for note in notes)]
    results = [result for case in report["cases"] for result in case["results"].values()]
    return "\n".join([*lines, common.drop_note(report, results)])


def chart(report: Mapping[str, Any], path: Path) -> None:
    """Bars of the times, and a roofline.

    Raises:
        ImportError: matplotlib is not installed.
    """
    entries = []
    for case in report["cases"]:
        intensity = case["flops"] / case["ideal_bytes"]
        for name, result in case["results"].items():
            times_s = (result["median_s"], result["low_s"], result["high_s"])
            mine = name in report["labels"]
            reached = (
                (intensity, case["flops"] / result["median_s"] / 1e9) if mine or name == case["best_peer"] else None
            )
            entries.append(charts.Entry(case["network"], report["labels"].get(name, name), mine, times_s, reached))
    probe, machine = report["probe"], report["machine"]
    roofs = {"": (probe["peak_gflops"], probe["copy_gbytes_per_s"])}
    panel = charts.Panel(("Time of a call (median, quartiles)", "Roofline: ours and the best peer"), entries, roofs)
    charts.draw([panel], f"{machine['cpu']}, {machine['cores']} cores, float32, {report['date']}", path)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = common.new_parser(PROGRAM, __doc__, REPEATS)
    add = parser.add_argument
    add("--only", nargs="+", metavar="NAME", choices=NETWORKS, default=list(NETWORKS), help="networks (default: all)")
    add("--add", type=Path, metavar="FILE", help="a result on this machine, whose other networks are kept")
    add("--peers", nargs="*", metavar="NAME", choices=PEERS, default=list(PEERS),
        help=f"of {', '.join(PEERS)} (default: all; none: just --peers)")  # fmt: skip
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the results, print the table."""
    settings = parse(arguments)
    run = Run.start(PROGRAM, settings)
    torch.set_num_threads(cores())
    with torch.no_grad():
        cases = common.until_interrupted(partial(measure, name, run.devices, run) for name in settings.only)
    labels = our_labels(run.devices)
    for case in cases:
        conclude(case, labels, run.threshold)
    report = run.report(labels=labels, tolerance=TOLERANCE, cases=cases)
    if settings.add is not None:
        kept = json.loads(settings.add.read_text(encoding="utf-8"))
        report["cases"] = [case for case in kept["cases"] if case["network"] not in settings.only] + cases
    path = common.keep(report, settings.output)
    try:
        chart(report, path.with_suffix(".png"))
    except ImportError as error:
        say(f"no chart: {describe(error)}")
    print(table(report))
    return 1 if any(each in case["failures"] for case in cases for each in labels) else 0


if __name__ == "__main__":
    sys.exit(main())
