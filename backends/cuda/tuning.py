"""Which options are worth measuring for an operator on a GPU, keeping the winner, and using it.

Only convolutions on tensor cores have a choice: of their tiles, and of where the steps before them run.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

from dispatcher.backends.cuda import toolkit
from dispatcher.backends.cuda.driver import Context
from dispatcher.backends.cuda.groups import halo_tasks
from dispatcher.backends.cuda.lowering import lower
from dispatcher.backends.cuda.options import Options, parse, tile_text
from dispatcher.backends.cuda.program import Program
from dispatcher.backends.cuda.tasks import Setting, Target
from dispatcher.backends.cuda.tiles import HaloTask, HaloTile, estimates
from dispatcher.errors import InputError
from dispatcher.ops.steps import Convolution, ScalarOperand, Shape, Step
from dispatcher.problem.operator import Operator
from dispatcher.timing.winners import measured_with, store, stored

_log = logging.getLogger(__name__)

#: Tiles to measure for each convolution and place of the steps before it. On an H200 the fastest of up to 18 was among
#: the 7 with the lowest estimates for each of the five problems, in both precisions.
TILES = 8
#: Changes when the meaning of an option does; older results are then left alone.
SCHEMA = 1
#: From so many blocks a multiprocessor on, the batch only multiplies the work: any tile fills the device several times.
FULL = 16


def one_of_each_kind(task: HaloTask, count: int) -> list[tuple[HaloTile, float]]:
    """The tiles with the lowest estimates among those that differ in more than their box, with estimated cycles.

    Args:
        count: most tiles to return.
    """
    kinds: dict[tuple[Any, ...], tuple[HaloTile, float]] = {}
    for tile, cycles in sorted(estimates(task), key=lambda item: item[1]):
        warps = tile.threads * tile.resident // 32
        kind = (tile.warp_m, tile.paired, tile.fold_shared, tile.resident, warps // 4)
        kinds.setdefault(kind, (tile, cycles))
    return list(kinds.values())[:count]


def candidates(operator: Operator, target: Target) -> list[dict[str, str]]:
    """Options to measure, each for the whole operator: the estimates' choice, then tiles of each kind, with the steps
    before convolutions fused and separate where there are any.

    Candidate ``n`` gives each convolution its tile number ``n``. Options that lead to the same launches are there once;
    only the first set is where no convolution runs on tensor cores.
    """
    if operator.empty:
        return []
    found = {_launches(lower(operator, target, Options())): {"tuned": "ignore"}}
    ahead = any(
        isinstance(step, Convolution) and not isinstance(before, Convolution)
        for before, step in pairwise(operator.steps)
    )
    for prologue in ("fused", "separate") if ahead else ("auto",):
        tasks = halo_tasks(Setting(operator, target, Options(prologue=prologue)))
        names = [
            [] if task is None else [task.name(tile) for tile, _ in one_of_each_kind(task, TILES)] for task in tasks
        ]
        for number in range(max(map(len, names), default=0)):
            tiles = tuple(each[number] if number < len(each) else None for each in names)
            options = {"tile": tile_text(tiles)}
            if prologue != "auto":
                options["prologue"] = prologue
            found.setdefault(_launches(lower(operator, target, parse(options).options)), options)
    return list(found.values())


def remember(
    operator: Operator, context: Context, compiler: toolkit.Toolkit, options: Mapping[str, Any], gain: float
) -> bool:
    """Keep ``options``, measured to be ``gain`` times as fast as the default, for such operators on such a device.

    Returns:
        Whether they could be kept.
    """
    default = lower(operator, Target.of(context), Options())
    return store(_key(operator, context, compiler, default), options, gain, measured_with(operator, context.name))


def program(operator: Operator, context: Context, compiler: toolkit.Toolkit) -> Program:
    """The launches for ``operator`` with the options that were tuned for it, else with those that estimates choose."""
    target = Target.of(context)
    default = lower(operator, target, Options())
    known = stored(_key(operator, context, compiler, default))
    if known is None:
        return default
    try:
        return lower(operator, target, replace(parse(known.options).options, why=known.why))
    except InputError as error:
        _log.info("what was tuned for %s is of no use any more: %s", operator.problem.name, error)
        return default


def _launches(program: Program) -> tuple[Any, ...]:
    """What tells programs for one operator apart."""
    return tuple((launch.kernel, launch.blocks, launch.shared_bytes) for launch in program.launches)


def _operand_shapes(step: Step) -> list[Shape]:
    return [operand.shape for operand in step.operands if not isinstance(operand, ScalarOperand)]


def _key(operator: Operator, context: Context, compiler: toolkit.Toolkit, default: Program) -> tuple[str, ...]:
    """What a measurement depends on: the GPU model, the kernels and their compiler, and the operator.

    Values of the problem's ``double`` parameters do not matter, and the batch size does only where a convolution's
    launch, with the tile that estimates choose, has too few blocks to fill the device several times.
    """
    gpu = (context.name, *map(str, (context.architecture, context.processors, context.shared_limit)))
    memory = f"{context.total_bytes / 2**30:.0f} GiB"
    steps = [
        (step.source, *(shape[1:] for shape in (step.input_shape, step.shape, *_operand_shapes(step))))
        for step in operator.steps
    ]
    convolutions = [replace(step.geometry, batch=1) for step in operator.convolutions]
    fused = [launch.steps for launch in default.planned]
    shapes = repr((operator.problem.pipeline, steps, convolutions, fused))
    blocks = [launch.blocks for launch in default.launches if launch.name == "conv_halo"]
    full = all(count >= FULL * context.processors for count in blocks)
    batch = "full" if full else str(operator.steps[0].input_shape[0])
    return (
        f"cuda {SCHEMA}", *gpu, memory, toolkit.sources_digest(), compiler.version,
        operator.dtype, operator.precision, shapes, batch,
    )  # fmt: skip
