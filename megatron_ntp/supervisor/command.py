"""`megatron-ntp launch`: sets up this node's supervisor, and runs it to the end of the job.

Exit status: 0 the training has finished, or saved and ended when it was asked to; 93 a restart
would not help; 128 + n stopped by signal n; 2 wrong usage; else that of the rank that failed last.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FrameType

from megatron_ntp.device import spawn
from megatron_ntp.errors import UnsupportedFlagError
from megatron_ntp.events import EventLog
from megatron_ntp.launchers.check import this_host
from megatron_ntp.launchers.parent import adopt_orphans
from megatron_ntp.supervisor import guards, options, training
from megatron_ntp.supervisor.attempt import LONGEST_END_S, steps_left_behind
from megatron_ntp.supervisor.board import PERIOD_S, Board, LocalBoard, StoreBoard
from megatron_ntp.supervisor.controller import Controller
from megatron_ntp.supervisor.desk import POLL_S, Desk
from megatron_ntp.supervisor.health import NodeWatch
from megatron_ntp.supervisor.options import Options
from megatron_ntp.supervisor.processes import OWNER_ENV, Owner, kill_all, owned
from megatron_ntp.supervisor.state import (
    Holder,
    Identity,
    JobFolder,
    JobState,
    NodeLock,
    identify,
)
from megatron_ntp.supervisor.training import Training
from megatron_ntp.supervisor.worker import Worker

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_TOUCH_S = 10.0
_REMAINS_S = 30.0
_STUCK_S = 15.0
_WARDEN_S = 10.0
_SIGNAL_PATIENCE_S = 3.0


def launch(argv: Sequence[str]) -> int:
    """The subcommand, on each node. A PlanError goes to `cli.main`, which returns 2."""
    words = list(argv)
    command: list[str] = []
    if "--" in words:
        cut = words.index("--")
        words, command = words[:cut], words[cut + 1 :]
    given = options.read(words, os.environ)
    job = training.read(command, given.shape, given.keep_replicas, given.min_degree)
    return _supervise(given, job, identify(given.job_id, command, os.environ))


def _supervise(given: Options, job: Training, identity: Identity) -> int:
    host = this_host(os.environ)
    holder = Holder.me(host)
    lock = NodeLock(
        given.run_dir / ".locks" / f"{identity.name}.node-{given.node_rank}.json", holder
    )
    before = lock.take()
    name = f"{given.run_dir.absolute()}/{identity.name}"
    owner = Owner(
        hashlib.sha256(name.encode()).hexdigest()[:16],
        given.node_rank,
        f"{holder.pid}.{holder.started}",
    )
    left_step = _end_remains(owner)
    os.environ[OWNER_ENV] = owner.helpers
    adopt_orphans()
    board: Board | None = None
    with _Warden(owner):
        try:
            board = _board(given)
            watch = NodeWatch(
                given.shape.gpus_per_node,
                dict(os.environ),
                given.faults,
                given.health,
                given.nvml_deadline_s,
            )
            worker = Worker(given, board, watch, owner, host)
            with _Signals(worker), contextlib.closing(worker):
                keep_alive = _toucher(lock)
                if given.node_rank:
                    return _follow(worker, board, given, keep_alive)
                folder = JobFolder(given.run_dir, identity)
                state = _open(folder, job, before, left_step)
                desk = Desk(given, job, board, worker, EventLog(folder.events), keep_alive)
                return Controller(desk, folder, state).run()
        finally:
            if board is not None:
                board.close()
            lock.release()


def _board(given: Options) -> Board:
    if given.endpoint is None:
        return LocalBoard()
    try:
        stuck_s = given.stop_grace_s + LONGEST_END_S + _STUCK_S
        return StoreBoard(given.endpoint, given.node_rank, given.num_nodes, stuck_s)
    except OSError as error:
        raise UnsupportedFlagError(f"{error}. Is another job there?") from error


def _open(folder: JobFolder, job: Training, before: Holder | None, left_step: int) -> JobState:
    """The job's state, with the attempt of a supervisor that died taken to its end."""
    state, aside = folder.open()
    log = EventLog(folder.events)
    log.note(
        "supervisor-started",
        pid=os.getpid(),
        attempts=len(state.attempts),
        identity=folder.identity.name,
        restart=folder.identity.restart,
        stale=None if aside is None else str(aside),
        took_over=None if before is None else before.pid,
    )
    if aside is not None:
        print(f"state of another job of this name was put aside: {aside}", flush=True)
    for record in state.attempts:
        if record.ended:
            continue
        checkpoint = job.newest_checkpoint()
        reason = "its supervisor was killed"
        ledger = guards.ended_on_purpose(state.ledger, checkpoint, left_step)
        state = replace(state.with_attempt(replace(record, ended=reason)), ledger=ledger)
        log.note(
            "attempt-ended",
            attempt=record.number,
            degrees=list(record.degrees),
            cause="failed",
            reason=reason,
            status=None,
            step=left_step,
            checkpoint=checkpoint,
            steps_lost=max(0, left_step - max(checkpoint, 0)),
            detection_s=None,
            stop_s=None,
        )
    folder.write(state)
    return state


def _end_remains(owner: Owner) -> int:
    """Ends what a former supervisor of this place has left; the furthest step of its ranks."""

    def remains() -> set[int]:
        return owned(lambda o: o.startswith(owner.place) and not o.startswith(owner.prefix))

    left = kill_all(remains, _REMAINS_S)
    if left:
        print(f"processes {sorted(left)} of a former supervisor cannot be killed", flush=True)
    return steps_left_behind(owner)


def _toucher(lock: NodeLock) -> Callable[[], None]:
    """Touches the lock now and then."""
    touched = time.monotonic()

    def touch() -> None:
        nonlocal touched
        if time.monotonic() - touched > _TOUCH_S:
            touched = time.monotonic()
            with contextlib.suppress(OSError):
                lock.touch()

    return touch


def _follow(worker: Worker, board: Board, given: Options, keep_alive: Callable[[], None]) -> int:
    """A node other than 0: does as it is told until it is told to go."""
    patience_s = max(given.join_deadline_s, given.node_deadline_s)
    _say(given, f"waiting for node 0 at {given.endpoint}")
    was_cut_off = False
    while worker.end_status is None:
        worker.tick(time.monotonic())
        keep_alive()
        is_cut_off = worker.is_cut_off()
        if is_cut_off != was_cut_off:
            _say(given, "no word of node 0: no rank runs here" if is_cut_off else "node 0 is back")
            was_cut_off = is_cut_off
        if worker.signal and board.silence_s() > _SIGNAL_PATIENCE_S:
            return 128 + worker.signal
        if board.silence_s() > patience_s:
            why = f": {board.problem()}" if board.problem() else ""
            _say(given, f"no word of node 0 for {patience_s:g} s (--join-deadline){why}")
            return 1
        time.sleep(POLL_S)
    _say(given, f"the job has ended, status {worker.end_status}")
    worker.tick(time.monotonic())
    time.sleep(5 * PERIOD_S)  # node 0 waits for the word that we have heard
    return worker.end_status


def _say(given: Options, text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} node {given.node_rank}: {text}", flush=True)


class _Signals(contextlib.AbstractContextManager[None]):
    """Signals are noted by the worker while this is open; a second one says that it is urgent."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def __enter__(self) -> None:
        for number in _SIGNALS:
            signal.signal(number, self._note)

    def __exit__(self, *error: object) -> None:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # all is over, and must not end halfway

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._worker.signal = self._worker.signal or number
        self._worker.signal_count += 1


class _Warden(contextlib.AbstractContextManager[None]):
    """The process that cleans up should this one be killed."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner

    def __enter__(self) -> None:
        self._ours, theirs = spawn.socket_pair()
        command = spawn.module_command("megatron_ntp.supervisor.warden", [self._owner.prefix])
        self._process = spawn.start(command, theirs)
        theirs.close()

    def __exit__(self, *error: object) -> None:
        self._ours.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_WARDEN_S)
