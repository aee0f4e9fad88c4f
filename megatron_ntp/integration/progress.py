"""Tells listeners in this process when Megatron's own loop starts and ends a step, a load, a save.

Nothing of Megatron is changed for it: Python's own `sys.monitoring` calls back when the code of
those functions starts or returns. So it works with and without --ntp, under whatever the catalog of
patches puts around them, and costs nothing where nobody listens.

A listener is called with the moment and the number of steps that the job has completed (-1 before
that is known), in the thread that trains:

    start  setup  joined  load loaded  step stepped ... eval evaluated ... save saved ...
    trained  exit

A training loop of another library shows `start`, `joined`, `exit`, and what it calls of the rest.
"""

from __future__ import annotations

import atexit
import importlib
import inspect
import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any

from megatron_ntp import beats, events
from megatron_ntp.errors import StartError

Listener = Callable[[str, int], None]

WATCHED: Mapping[str, tuple[str, str]] = {
    "torch.distributed.distributed_c10d:init_process_group": ("", "joined"),
    "megatron.training.training:pretrain": ("setup", ""),
    "megatron.training.checkpointing:load_checkpoint": ("load", "loaded"),
    "megatron.training.training:train_step": ("step", "stepped"),
    "megatron.training.checkpointing:save_checkpoint": ("save", "saved"),
    "megatron.training.training:evaluate": ("eval", "evaluated"),
    "megatron.training.training:train": ("", "trained"),
}
"""Functions of torch and Megatron, and the moments that their start and their return are."""

_TOOL_NAME = "megatron-ntp"
_TOOL_IDS = (4, 3)  # sys.monitoring gives 0, 1, 2 and 5 a meaning

_listeners: list[Listener] = []
_iteration = -1


def is_rank() -> bool:
    """Whether this process is a rank itself.

    A process that a rank spawns runs the script's imports once more, in the rank's environment.
    """
    return multiprocessing.parent_process() is None


def listen(listener: Listener) -> None:
    """Adds a listener, which hears `start` at once. `watch` must follow for the rest."""
    if not _listeners:
        atexit.register(_at_exit, os.getpid())
    _listeners.append(listener)
    listener("start", _iteration)


def report_beats() -> None:
    """Lets this rank's record follow its moments. See `beats`."""
    folder, rank = os.environ[beats.ENV], int(os.environ.get("RANK", "0"))
    try:
        writer = beats.BeatWriter(folder, rank)
    except OSError as error:
        raise StartError(
            f"rank {rank} cannot write its record into {folder} ({beats.ENV}): {error.strerror}"
        ) from error
    listen(BeatListener(writer))


def report_events() -> None:
    """Has rank 0 note in the job's log, to the millisecond, where its steps begin and end."""
    if os.environ.get("RANK", "0") == "0":
        listen(EventListener(events.EventLog(os.environ[events.ENV])))


class EventListener:
    """Two events of an attempt: its first step is complete, and training has returned."""

    def __init__(self, log: events.EventLog) -> None:
        self._log = log
        self._has_stepped = False

    def __call__(self, moment: str, iteration: int) -> None:
        if moment == "stepped" and not self._has_stepped:
            self._has_stepped = True
            self._log.note("stepping", iteration=iteration)
        elif moment == "trained":
            self._log.note("trained", iteration=iteration)


class BeatListener:
    """Turns moments into phases. See `beats`."""

    def __init__(self, writer: beats.BeatWriter) -> None:
        self._writer = writer
        self._between = "train"

    def __call__(self, moment: str, iteration: int) -> None:
        if moment == "stepped":
            self._writer.step_done(iteration)
        elif moment in ("setup", "load"):
            if moment == "setup":
                self._between = "train"
            self._writer.say(moment)
        elif moment == "joined":
            if self._writer.phase == "start":
                self._between = "other"
                self._writer.say(self._between)
        elif moment == "loaded":
            self._writer.say(self._between, iteration)
        elif moment == "step":
            self._between = "train"
            if self._writer.phase != self._between:
                self._writer.say(self._between, iteration)
        elif moment in ("eval", "save"):
            self._writer.say(moment, iteration)
        elif moment in ("evaluated", "saved"):
            self._writer.say(self._between)
        elif moment in ("trained", "exit"):
            self._between = "done"
            self._writer.say("done")


def watch() -> None:
    """Has Python call back from here on. Imports Megatron; called once, before training.

    Raises:
        StartError: other tools hold what is needed of sys.monitoring.
    """
    tool = _claim_tool()
    kinds = sys.monitoring.events
    starts, returns = {}, {}
    for target, (begins, ends) in WATCHED.items():
        code = _code_of(target)
        starts[code], returns[code] = begins, ends
        wanted = (kinds.PY_RETURN if ends else 0) | (kinds.PY_START if begins else 0)
        sys.monitoring.set_local_events(tool, code, wanted)

    def on_start(code: CodeType, offset: int) -> None:
        _tell(starts[code])

    def on_return(code: CodeType, offset: int, value: Any) -> None:
        _tell(returns[code], value)

    sys.monitoring.register_callback(tool, kinds.PY_START, on_start)
    sys.monitoring.register_callback(tool, kinds.PY_RETURN, on_return)
    if importlib.import_module("torch.distributed").is_initialized():
        _tell("joined")


def _claim_tool() -> int:
    for tool in _TOOL_IDS:
        if sys.monitoring.get_tool(tool) is None:
            sys.monitoring.use_tool_id(tool, _TOOL_NAME)
            return tool
    names = ", ".join(str(sys.monitoring.get_tool(tool)) for tool in _TOOL_IDS)
    raise StartError(
        f"steps cannot be watched: {names} hold the places of sys.monitoring that are free for "
        "all. Start without one of them"
    )


def _code_of(target: str) -> CodeType:
    """Of the function itself, under decorators and patches."""
    module, _, name = target.partition(":")
    return inspect.unwrap(getattr(importlib.import_module(module), name)).__code__


def _tell(moment: str, result: Any = None) -> None:
    """`result`: what the function has returned."""
    global _iteration
    if moment == "step":
        _iteration = _steps_before()
    elif moment == "stepped":
        _iteration += 1
    elif moment == "loaded":
        _iteration = int(result[0])
    for listener in _listeners:
        listener(moment, _iteration)


def _steps_before() -> int:
    """What Megatron's loop says as a step begins."""
    from megatron.training import get_args

    return int(get_args().curr_iteration)


def _at_exit(pid: int) -> None:
    if os.getpid() == pid:
        for listener in _listeners:
            listener("exit", _iteration)
