"""The source text of a run of stages: steps that combine the channels of a convolution's results where they lie."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dispatcher.backends.opencl.groups import Part
from dispatcher.backends.opencl.render import NORM_RUN, KernelOperands, defines, reduction_defines, section, tail_macro
from dispatcher.ops.steps import Normalize, Reduce, ScalarOperand, Softmax, Step


@dataclass(frozen=True)
class StageForm:
    """How one kernel runs stages.

    Attributes:
        files: the kernel file of each kind of step.
        arguments: what the kernel passes to a stage's function.
    """

    files: Mapping[type[Step], str]
    arguments: str


#: On the lines of the CPU kernel, and on the results that a work-group of the tiled kernel holds.
LINE_STAGES = StageForm(
    {Normalize: "stage_layer_norm.cl", Softmax: "stage_channel_softmax.cl", Reduce: "stage_channel_reduce.cl"},
    "line, operands",
)
TILE_STAGES = StageForm(
    {Normalize: "tile_layer_norm.cl", Softmax: "tile_channel_softmax.cl", Reduce: "tile_channel_reduce.cl"},
    "results, partial, operands, lane, slice",
)


def render_stages(
    form: StageForm,
    operands: KernelOperands,
    stages: Sequence[Part],
    first: int,
    channels: int,
    tail_of: Callable[[Part], str],
    **extra: int,
) -> tuple[str, str, int]:
    """Source text of some stages.

    Args:
        form: of the kernel that runs them.
        operands: layout of the launch's ``operands`` buffer, which grows by what the stages read.
        stages: in order of execution.
        first: number of the first one; the numbers of a kernel's stages differ.
        channels: that the first stage finds.
        tail_of: statements of a stage's pointwise steps.
        **extra: more names for the kernel files, the same for all of these stages.

    Returns:
        The functions, the statements that call them, and the channels that are left.
    """
    text, calls = "", ""
    for number, stage in enumerate(stages, start=first):
        # Sums are taken in runs and then over runs, so that errors grow with the root of the channels, if at all.
        run = NORM_RUN if isinstance(stage.step, Normalize) else max(8, math.isqrt(channels))
        values: dict[str, object] = {"STAGE": number, "STAGE_CHANNELS": channels, "STAGE_TERMS": run, **extra}
        affine = ""
        match stage.step:
            case Normalize() as step:
                values["STAGE_EPS"] = operands.place(ScalarOperand(step.eps))
                affine = operands.affine(step)
            case Reduce() as step:
                values |= reduction_defines(step.form, f"{channels}", "STAGE")
        body = defines(values) + tail_macro("STAGE_AFFINE", affine) + tail_macro("STAGE_TAIL", tail_of(stage))
        names = [name.split("(")[0] for name in values] + ["STAGE_AFFINE", "STAGE_TAIL"]
        text += section(form.files[type(stage.step)], body)
        text += "".join(f"#undef {name}\n" for name in names)
        calls += f"stage_{number}({form.arguments}); "
        if isinstance(stage.step, Reduce):
            channels = 1
    return text, calls, channels
