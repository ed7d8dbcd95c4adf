"""Where Python lets a signal in, for tests that break calls off by a trace function, which could raise anywhere."""

from __future__ import annotations

import dis
from types import FrameType


def no_signal_here(frame: FrameType) -> bool:
    """Whether Python lets no signal in at this line: where a ``try`` begins, and between the body of a ``with`` and
    what it calls to end as usual."""
    code, at = frame.f_code.co_code, frame.f_lasti
    load, nothing = bytes([dis.opmap["LOAD_CONST"]]), dis.opmap["NOP"]
    ahead = [code[start : start + 6] for start in (at, at + 2)]  # a value that is returned is moved first
    return code[at] == nothing or any(each[:1] == load and each == each[:2] * 3 for each in ahead)
