"""Lowering of convolutions to ``conv_halo.cu``, on tensor cores."""

from __future__ import annotations

import math

import numpy as np

from dispatcher.backends.cuda.conv_fma import ended, epilogue_source
from dispatcher.backends.cuda.convolution import halo_tables
from dispatcher.backends.cuda.program import Described, Draft, Program
from dispatcher.backends.cuda.prologue import NO_PROLOGUE, Prologue
from dispatcher.backends.cuda.sources import Source
from dispatcher.backends.cuda.tasks import ConvTask, Task
from dispatcher.backends.cuda.tiles import launch_cycles


class Halo:
    """The resident halo; see :class:`dispatcher.backends.cuda.implementations.Implementation`."""

    name = "halo"
    takes: type[Task] = ConvTask

    def accepts(self, task: ConvTask) -> str | None:
        """What fits around the convolution was decided while the task grew."""
        return task.refusal

    def estimate(self, task: ConvTask) -> float:
        """Cycles with the tile that was chosen."""
        assert task.tile is not None
        return float(launch_cycles(task.halo, task.tile))

    def lower(self, task: ConvTask, program: Program) -> list[Described]:
        """One launch, or the two passes of a softmax."""
        epilogue, prologue, halo, tile = task.epilogue, task.prologue, task.halo, task.tile
        assert tile is not None
        convolution, geometry = task.step, task.step.geometry
        before = program.operator.steps[task.first]  # the convolution itself where there is no prologue
        stored = program.value_dtype(before.source)
        tables = halo_tables(geometry, tile)
        draft = Draft(program, "conv_halo.cu", "HaloParams", _source(task, prologue))
        p = draft.parameters
        p["tile_weights"] = tables.tile_weights
        p["pass_count"], p["step_count"] = len(tables.passes), tile.steps
        p["source"], p["in"] = before.input_shape[2:], geometry.input_shape[2:]
        p["out"] = task.steps[-1].shape[2:]
        p["limit"] = task.positions if epilogue.fold is not None else geometry.output_shape[2:]
        p["stride"] = [axis.stride for axis in geometry.axes]
        p["tiles"] = [-(-count // extent) for count, extent in zip(task.positions, tile.tile, strict=True)]
        p["pair_stores"] = geometry.width.output % 2 == 0
        p["softmax_bound"] = epilogue.bound
        draft.pointers += [
            (("x",), program.value(before.source)),
            (("w",), program.pack(convolution, tables, not halo.split)),
            (("passes",), program.table(tables.passes)),
            (("taps",), program.table(tables.taps)),
        ]
        draft.defines.update(
            program.defines(stored, program.value_dtype(task.last + 1)),
            **tile.defines,
            USE_3XTF32=int(halo.split),
            PROMOTE=int(halo.promoted),
            USE_VECTOR_X=int(geometry.width.input % 4 == 0),
            **_x_defines(prologue, before.input_shape[4], stored, halo.split),
            KEEP_X=0,
            SOFTMAX=0,
            OUT_CHANNELS=geometry.out_channels // geometry.groups,
            GROUPS=geometry.groups,
            HAS_BIAS=int(convolution.bias is not None),
            FOLD=int(epilogue.fold is not None),
            POOL_Z=epilogue.window[0],
            POOL_Y=epilogue.window[1],
            POOL_X=epilogue.window[2],
        )
        ended(draft, task, program, math.prod(map(int, p["tiles"])))
        blocks = halo.blocks(tile)
        algorithm, detail = _described(task)

        def launch(**defines: int | str) -> None:
            program.launches.append(draft.launch("conv_halo", blocks, tile.threads, tile.shared_bytes, **defines))

        if not epilogue.softmax:
            launch()
            return [(algorithm, detail)]
        draft.pointers.append((("partial",), program.scratch(4 * blocks * tile.block_n)))
        if prologue:
            kept = program.scratch(4 * math.prod(geometry.input_shape))
            draft.pointers.append((("kept",), kept))
            launch(SOFTMAX=1, KEEP_X=1)
            # The second pass reads the inputs that the first one made; the other chains' operands keep their slots.
            draft.source, p["source"] = _source(task, NO_PROLOGUE), p["in"]
            draft.defines.update(_x_defines(NO_PROLOGUE, 1, "float32", halo.split), INPUT="float")
            own = [pointer for pointer in draft.pointers if pointer[0] not in (("x",), ("kept",))]
            draft.pointers = [*own, (("x",), kept)]
        else:
            launch(SOFTMAX=1)
        launch(SOFTMAX=2)
        first, second_pass = "; first pass: sums of exponentials", "; second pass: the result"
        return [(algorithm + first, detail), (algorithm + second_pass, detail)]


def _source(task: ConvTask, prologue: Prologue) -> Source:
    """Chains and monoids of a launch."""
    source = epilogue_source(task)
    source.monoid("box", task.epilogue.pool)
    source.monoid("pool", prologue.pool)
    source.chain("pre_first_chain", prologue.first, 0)
    source.chain("pre_second_chain", prologue.second, 0)
    return source


def _described(task: ConvTask) -> Described:
    """Algorithm and details, for people."""
    halo, tile = task.halo, task.tile
    assert tile is not None
    products = ("3xTF32" if halo.split else "TF32") + (" with promoted sums" if halo.promoted else "")
    detail: dict[str, str | int | float] = {
        "tile": "x".join(map(str, tile.tile)) + f" voxels x {tile.block_n} channels, all phases"
    }
    if tile.slices > 1:
        detail["slices"] = f"{tile.slices} of {tile.slice_channels} input channels"
    detail["phases"] = halo.phases
    detail["threads"] = tile.threads
    detail["shared_bytes"] = tile.shared_bytes
    if task.gather is not None:
        detail["gathers"] = task.gather.kind.lower()
    detail["option"] = f"tile={halo.name(tile)}"
    detail["why"] = "lowest estimate" if halo.wanted is None else task.setting.options.why
    return f"resident halo on tensor cores, {products}", detail


def neighbours(window_x: int, width: int, dtype: str) -> int:
    """Elements of a line of a window that can be read at once: 1, 2 or 4, and 16 bytes at most."""
    itemsize = np.dtype(dtype).itemsize
    return next(n for n in (4, 2, 1) if window_x % n == 0 and width % n == 0 and n * itemsize <= 16)


def _x_defines(prologue: Prologue, width: int, dtype: str, split: bool) -> dict[str, int | str]:
    """The defines of ``conv_halo.cu`` for an input made by a prologue from lines of ``width`` elements of ``dtype``.

    Args:
        split: three TF32 products are made.
    """
    z, y, x = prologue.window
    return {
        "ASYNC_X": int(not prologue and dtype == "float32"),
        "ROUND_X": int(not split and (bool(prologue) or dtype == "float32")),
        "PRE_Z": z,
        "PRE_Y": y,
        "PRE_X": x,
        "PRE_VECTOR": neighbours(x, width, dtype),
    }
