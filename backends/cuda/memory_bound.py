"""Lowering of everything but convolutions: pools, rows (normalisations, softmax, reductions) and chains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from dispatcher.backends.cuda.conv_halo import neighbours
from dispatcher.backends.cuda.program import BLOCK, MAX_GRID, Described, Draft, Launch, Path, Program, Reference
from dispatcher.backends.cuda.prologue import MAX_WINDOW
from dispatcher.backends.cuda.sources import Source
from dispatcher.backends.cuda.tasks import ChainTask, GatheredTask, PoolTask, RowsTask, Task
from dispatcher.ops.steps import Normalize, Pool, Reduce, Shape, Softmax

#: Elements that a multiprocessor reads or writes in a cycle, about.
_ELEMENTS = 4


class _MemoryBound:
    """What its kernels share: they move memory, and run a chain on what they store."""

    passes = 1  # over the input

    def accepts(self, task: Task) -> str | None:
        """What fits was decided while the task grew."""
        return None

    def estimate(self, task: Task) -> float:
        """Cycles of the memory traffic."""
        moved = self.passes * math.prod(task.steps[0].input_shape) + math.prod(task.steps[-1].shape)
        return moved / (_ELEMENTS * task.setting.target.processors)


def _finished(draft: Draft, task: Task, program: Program, shape: Shape) -> None:
    """Fill in what the kernels have in common; ``shape`` is that of the result."""
    source, result = task.steps[0].source, task.last + 1
    draft.parameters["extent"] = shape
    draft.defines.update(program.defines(program.value_dtype(source), program.value_dtype(result)))
    draft.pointers += [(("x",), program.value(source)), (("y",), Reference("value", result))]


def _grid(threads: int, task: Task) -> int:
    """Blocks of a kernel whose threads take several items in turn."""
    return max(1, min(-(-threads // BLOCK), 32 * task.setting.target.processors))


def _appended(program: Program, launch: Launch) -> list[Described]:
    program.launches.append(launch)
    return [("one kernel for the step", {"blocks": launch.blocks, "threads": launch.threads})]


class Elementwise(_MemoryBound):
    """Chains of pointwise steps; see :class:`dispatcher.backends.cuda.implementations.Implementation`."""

    name = "elementwise"
    takes: type[Task] = ChainTask

    def lower(self, task: ChainTask, program: Program) -> list[Described]:
        """One launch."""
        shape = task.steps[-1].shape
        source = Source()
        source.chain("last_chain", task.steps, task.first, shape, task.steps[0].source)
        draft = Draft(program, "elementwise.cu", "ElementwiseParams", source)
        _finished(draft, task, program, shape)
        draft.parameters["count"] = math.prod(shape)
        draft.defines["STRIDED"] = 0
        return _appended(program, draft.launch("elementwise", _grid(math.prod(shape), task)))


class PoolKernel(_MemoryBound):
    """Poolings; see :class:`dispatcher.backends.cuda.implementations.Implementation`."""

    name = "pool"
    takes: type[Task] = PoolTask

    def lower(self, task: PoolTask, program: Program) -> list[Described]:
        """One launch."""
        step = program.operator.steps[task.pool]
        assert isinstance(step, Pool)
        source = Source()
        source.chain("pre_first_chain", task.steps[: task.pool - task.first], task.first, None, task.steps[0].source)
        source.chain("last_chain", task.riders, task.pool + 1, step.shape)
        source.monoid("pool", step)
        draft = Draft(program, "pool.cu", "PoolParams", source)
        _finished(draft, task, program, step.shape)
        p = draft.parameters
        p["count"], p["in"], p["window"] = math.prod(step.shape), step.input_shape[2:], step.window
        p["stride"], p["dilation"] = step.stride, step.dilation
        p["before"], p["after"] = zip(*step.padding, strict=True)
        p["counted"], p["divisor"] = int(step.count_padding), step.divisor or 0
        p["adaptive"] = int(step.adaptive)
        draft.defines["PLAIN"] = int(step.plain)
        unrolled = step.plain and math.prod(step.window) <= MAX_WINDOW
        window = step.window if unrolled else (0, 0, 0)
        draft.defines.update(zip(("WINDOW_Z", "WINDOW_Y", "WINDOW_X"), window, strict=True))
        dtype = program.value_dtype(task.steps[0].source)
        draft.defines["VECTOR"] = neighbours(step.window[2], step.input_shape[4], dtype) if unrolled else 1
        return _appended(program, draft.launch("pool", _grid(math.prod(step.shape), task)))


class Rows(_MemoryBound):
    """Steps over many values; see :class:`dispatcher.backends.cuda.implementations.Implementation`."""

    name = "rows"
    takes: type[Task] = RowsTask
    passes = 3

    def lower(self, task: RowsTask, program: Program) -> list[Described]:
        """One launch."""
        step = program.operator.steps[task.core]
        assert isinstance(step, Normalize | Softmax | Reduce)
        source = Source()
        source.chain("last_chain", task.riders, task.core + 1, step.shape)
        source.monoid("row", step if isinstance(step, Reduce) else None)
        draft = Draft(program, "rows.cu", "RowsParams", source)
        _finished(draft, task, program, step.shape)
        p = draft.parameters
        groups = step.groups if isinstance(step, Normalize) else 1
        kept, items = split_axes(step.input_shape, step.axes, groups)
        p["rows"], p["items"] = math.prod(e for e, _ in kept), math.prod(e for e, _ in items)
        p["count"] = p["items"]
        for name, axes in (("row", kept), ("item", items)):
            p[name]["rank"] = len(axes)
            for axis, (extent, stride) in enumerate(axes):
                p[name]["extent"][axis], p[name]["stride"][axis] = extent, stride
        draft.defines["ROW_SHIFTED"] = int(isinstance(step, Reduce) and step.form.shifted)
        draft.defines["FUNCTION"] = ("NORMALIZE", "SOFTMAX", "REDUCE")[(Normalize, Softmax, Reduce).index(type(step))]
        if isinstance(step, Normalize):
            draft.pointers += _affine(p, step)
        rows, length = int(p["rows"]), int(p["items"])
        by_block = length > 1 and (items[-1][1] == 1 or rows < 32 * task.setting.target.processors)
        if not by_block:
            return _appended(program, draft.launch("rows_by_thread", _grid(rows, task)))
        threads = min(BLOCK, max(32, 1 << (length - 1).bit_length()))
        return _appended(program, draft.launch("rows_by_block", min(rows, MAX_GRID), threads))


#: Blocks of a multiprocessor, and elements of a block for each statistic that it joins first.
_BLOCKS, _WORTH = 16, 8


class FromGathered(_MemoryBound):
    """Steps over space whose statistics are there; see
    :class:`dispatcher.backends.cuda.implementations.Implementation`."""

    name = "gathered"
    takes: type[Task] = GatheredTask

    def lower(self, task: GatheredTask, program: Program) -> list[Described]:
        """One launch."""
        step, gather = task.steps[0], task.gather
        assert isinstance(step, Normalize | Softmax | Reduce)
        end = program.operator.steps[task.end]
        source = Source()
        source.chain("last_chain", task.riders, task.end + 1, end.shape)
        source.monoid("gather", gather.reduce)
        draft = Draft(program, "gathered.cu", "GatheredParams", source)
        _finished(draft, task, program, end.shape)
        values = end is step and not isinstance(step, Reduce)
        if not values:
            draft.pointers = [pointer for pointer in draft.pointers if pointer[0] != ("x",)]
        p = draft.parameters
        batch, channels, *space = step.input_shape
        plane = math.prod(space)
        groups = step.groups if isinstance(step, Normalize) else 1
        together = batch if 0 in step.axes else 1, channels // groups if 1 in step.axes else 1
        reference, boxes = program.gathered[step.source]
        sets = batch // together[0] * (channels // together[1])
        count, statistics = math.prod(together) * plane, math.prod(together) * boxes
        wanted = -(-_BLOCKS * task.setting.target.processors // sets)
        parts = max(1, min(wanted, count // max(8 * BLOCK, _WORTH * statistics))) if values else 1
        p["sets"], p["parts"], p["plane"], p["boxes"] = sets, parts, plane, boxes
        p["set_batch"], p["set_channels"], p["channels"], p["count"] = *together, channels, count
        draft.pointers.append((("gathered",), reference))
        function = "REDUCE" if isinstance(step, Reduce) else "SOFTMAX"
        if isinstance(step, Normalize):
            function = "NORMALIZE" if values else "MEAN"
            draft.pointers += _affine(p, step)
        draft.defines.update(gather.defines, FUNCTION=function)
        return _appended(program, draft.launch("gathered", min(sets * parts, MAX_GRID)))


def _affine(parameters: Any, step: Normalize) -> list[tuple[Path, Reference]]:
    """Fill in eps; returns the pointers to weight and bias."""
    parameters["eps"] = step.eps
    given = (("weight", step.weight), ("bias", step.bias))
    return [((name,), Reference("tensor", operand.name)) for name, operand in given if operand is not None]


Axes = list[tuple[int, int]]


def split_axes(shape: Shape, reduced: Sequence[int], groups: int) -> tuple[Axes, Axes]:
    """Extent and stride of the kept and the reduced axes of a contiguous tensor, neighbours merged, none
    empty.

    With ``groups > 1`` the channel axis counts as two: groups, which are kept, and the channels of one.
    """
    kept: Axes = []
    items: Axes = []
    step = math.prod(shape)
    parts: list[tuple[int, bool]] = []
    for axis, extent in enumerate(shape):
        if axis == 1 and groups > 1:
            parts += [(groups, False), (extent // groups, True)]
        else:
            parts.append((extent, axis in reduced))
    for extent, is_item in parts:
        step //= extent
        if extent == 1:
            continue
        axes = items if is_item else kept
        if axes and axes[-1][1] == extent * step:
            axes[-1] = (axes[-1][0] * extent, step)
        else:
            axes.append((extent, step))
    return kept or [(1, 0)], items or [(1, 0)]
