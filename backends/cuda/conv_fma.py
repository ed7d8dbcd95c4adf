"""Lowering of convolutions to ``conv_fma.cu``, which runs any of them."""

from __future__ import annotations

import math

import numpy as np

from dispatcher.backends.cuda.convolution import fma_tables
from dispatcher.backends.cuda.gathering import NO_GATHER
from dispatcher.backends.cuda.program import MAX_GRID, Described, Draft, Program, Reference
from dispatcher.backends.cuda.sources import Source
from dispatcher.backends.cuda.tasks import ConvTask, Task
from dispatcher.backends.cuda.tiles import fma_tile

#: Multiply-adds of a multiprocessor in a cycle: half of what it has units for.
_PRODUCTS = 64


class Fma:
    """Ordinary multiply-adds; see :class:`dispatcher.backends.cuda.implementations.Implementation`."""

    name = "fma"
    takes: type[Task] = ConvTask

    def accepts(self, task: ConvTask) -> str | None:
        """It runs every convolution; what fits around one was decided while the task grew."""
        return None

    def estimate(self, task: ConvTask) -> float:
        """Cycles of its products."""
        return task.step.geometry.flops / 2 / (_PRODUCTS * task.setting.target.processors)

    def lower(self, task: ConvTask, program: Program) -> list[Described]:
        """One launch."""
        convolution, epilogue = task.step, task.epilogue
        geometry = convolution.geometry
        channels = geometry.out_channels // geometry.groups
        folded = epilogue.fold is not None
        tile = fma_tile(channels, np.dtype(program.compute).itemsize, folded)
        channel_tiles = -(-channels // tile.block_n)
        tables = fma_tables(geometry, channel_tiles * tile.block_n)
        draft = Draft(program, "conv_fma.cu", "ConvParams", epilogue_source(task))
        p = draft.parameters
        p["voxels"] = geometry.batch * math.prod(task.positions)
        p["phase_count"] = math.prod(tables.residues)
        items = 1
        if task.gather is not None:  # a tile's voxels are of one batch item
            p["voxels"], items = math.prod(task.positions), geometry.batch
        p["voxel_tiles"] = -(-int(p["voxels"]) // tile.block_m)
        boxes = int(p["voxel_tiles"]) * (1 if folded else int(p["phase_count"]))
        p["tiles"] = items * boxes * geometry.groups * channel_tiles
        p["groups"], p["in_channels"] = geometry.groups, geometry.in_channels // geometry.groups
        p["out_channels"], p["padded_channels"] = channels, channel_tiles * tile.block_n
        p["channel_tiles"], p["term_count"] = channel_tiles, len(tables.terms)
        p["in"], p["positions"] = geometry.input_shape[2:], task.positions
        p["out"] = task.positions if folded else geometry.output_shape[2:]
        p["stride"], p["step"] = [axis.stride for axis in geometry.axes], [axis.step for axis in geometry.axes]
        p["residues"], p["axis_slots"] = tables.residues, tables.axis_slots
        stored = program.value_dtype(convolution.source)
        draft.defines.update(program.defines(stored, program.value_dtype(task.last + 1)), **tile.defines)
        ended(draft, task, program, boxes)
        if task.gather is not None:
            draft.defines["GATHER_STATE"] = "double"  # in registers, of which there are enough
        draft.pointers += [
            (("x",), program.value(convolution.source)),
            (("w",), program.pack(convolution, tables, False)),
            (("phases",), program.table(tables.phases)),
            (("slots",), program.table(tables.slots)),
            (("terms",), program.table(tables.terms)),
        ]
        blocks = min(int(p["tiles"]), MAX_GRID)
        program.launches.append(draft.launch("conv_fma", blocks, tile.threads, tile.shared_bytes))
        assert task.refusal is not None
        detail: dict[str, str | int | float] = {
            "tile": f"{tile.block_m} voxels x {tile.block_n} channels",
            "phases": int(p["phase_count"]),
            "threads": tile.threads,
            "shared_bytes": tile.shared_bytes,
            "why": task.refusal,
            **({} if task.gather is None else {"gathers": task.gather.kind.lower()}),
        }
        return [(f"phase-decomposed implicit GEMM, {program.compute} FMA", detail)]


def epilogue_source(task: ConvTask) -> Source:
    """Chains and monoids that both convolution kernels have."""
    epilogue = task.epilogue
    first, second, last = epilogue.starts
    source = Source()
    source.team("first_chain", epilogue.first, first)
    source.team("second_chain", epilogue.second, second)
    source.chain("last_chain", epilogue.last, last)
    source.monoid("fold", epilogue.fold)
    source.monoid("channel", epilogue.channels)
    source.monoid("gather", None if task.gather is None else task.gather.reduce)
    return source


def ended(draft: Draft, task: ConvTask, program: Program, boxes: int) -> None:
    """Fill in what both convolution kernels store: values, and statistics of ``boxes`` boxes of each batch item."""
    gather, bias = task.gather, task.step.bias
    stored = gather is None or gather.stored
    draft.defines.update(NO_GATHER if gather is None else gather.defines)
    draft.defines.update(CHANNEL_REDUCE=int(task.epilogue.channels is not None), STORE=int(stored))
    if gather is not None:
        statistics = program.gather(task.last + 1, boxes, gather, task.steps[-1].shape)
        draft.pointers.append((("gathered",), statistics))
    if stored:
        draft.pointers.append((("y",), Reference("value", task.last + 1)))
    if bias is not None:
        draft.pointers.append((("bias",), Reference("tensor", bias.name)))
