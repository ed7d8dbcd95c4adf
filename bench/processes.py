"""Contenders in processes of their own, since some libraries move the threads of others to other processors.

A process holds one object, and calls its methods when it is asked to. It ends with its parent, or when nobody there
holds its :class:`Process` any more.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from dispatcher.device.selection import describe
from dispatcher.errors import DispatcherError


class Process:
    """A process with an object of its own, which starts when it is asked for something, also after it has ended.

    Args:
        make: makes the object, in the new process; a function or class that can be pickled.
        *arguments: what ``make`` takes.
    """

    def __init__(self, make: Callable[..., object], *arguments: Any) -> None:
        self._task = make, arguments
        self._running: tuple[Connection, BaseProcess] | None = None

    def ask(self, method: str, *arguments: Any) -> Any:
        """What a method of the object returns.

        Raises:
            ImportError: it was raised in the other process.
            DispatcherError: something else was, or that process ended.
        """
        pipe, _ = self._running = self._running or self._start()
        try:
            pipe.send((method, arguments))
            answer = _receive(pipe)
        except (EOFError, ConnectionError):
            self.close()
            raise DispatcherError("its process ended") from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _start(self) -> tuple[Connection, BaseProcess]:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(target=_serve, args=(there, *self._task), daemon=True)
        process.start()
        there.close()
        return here, process

    def close(self) -> None:
        """End the process, whatever it does."""
        if self._running is not None:
            pipe, process = self._running
            process.kill()
            process.join()
            pipe.close()
            self._running = None


def _serve(pipe: Connection, make: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    """What the process does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this process
    threading.Thread(target=_follow, daemon=True).start()
    made = _result(make, *arguments)
    with suppress(EOFError, ConnectionError):  # nobody asks any more
        while True:
            method, values = pipe.recv()
            _send(pipe, made if isinstance(made, Exception) else _result(getattr(made, method), *values))


def _follow() -> None:
    """End this process when its parent ends, also in the middle of a call."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _result(call: Callable[..., Any], *arguments: Any) -> Any:
    """What a call returns, or what it raises in a form that a process without its library can read."""
    try:
        return call(*arguments)
    except ModuleNotFoundError as error:
        return ModuleNotFoundError(str(error))
    except ImportError as error:
        return ImportError(str(error))
    except Exception as error:  # whatever a library raises
        return DispatcherError(describe(error))


def _send(pipe: Connection, value: Any) -> None:
    """Send a value, and arrays in it without copies."""
    arrays: list[pickle.PickleBuffer] = []
    head = pickle.dumps(value, protocol=5, buffer_callback=arrays.append)
    parts = [array.raw() for array in arrays]
    pipe.send((head, [part.nbytes for part in parts]))
    for part in parts:
        pipe.send_bytes(part)


def _receive(pipe: Connection) -> Any:
    head, sizes = pipe.recv()
    arrays = [bytearray(size) for size in sizes]
    for array in arrays:
        pipe.recv_bytes_into(array)
    return pickle.loads(head, buffers=arrays)
