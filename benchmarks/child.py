"""Calling a function in a process of its own: one that breaks the CUDA context takes nothing else with it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable


def in_child(function: Callable, *arguments):
    """What a module-level function returns in a new process.

    Raises:
        RuntimeError: if it raises there, or the process dies.
    """
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_answer, args=(sender, function, arguments), daemon=True)
    process.start()
    sender.close()
    try:
        result, error = receiver.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"its process ended with exit code {process.exitcode}") from None
    process.join()
    if error is not None:
        raise RuntimeError(error)
    return result


def _answer(sender, function: Callable, arguments: tuple) -> None:
    try:
        answer = function(*arguments), None
    except Exception as error:  # noqa: BLE001 - told to the caller, whatever it is
        answer = None, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    sender.send(answer)
