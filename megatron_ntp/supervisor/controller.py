"""Node 0: looks at all nodes, decides, has the attempt started, watches it, and decides again.

It talks to the other nodes, and to the worker of its own, by the board alone. `run` is the loop of
docs/restart.md; every wait in it goes through `_until`, which keeps the own worker going.
"""

from __future__ import annotations

import hashlib
import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_ntp.checkpoint.folder import TRACKER
from megatron_ntp.errors import CheckpointError, PlanError
from megatron_ntp.events import EventLog
from megatron_ntp.launchers.nodes import Node, Placement, silent_node
from megatron_ntp.plan.serial import write_atomically
from megatron_ntp.supervisor import guards
from megatron_ntp.supervisor.attempt import Failure, FirstStep
from megatron_ntp.supervisor.board import Board, Seen
from megatron_ntp.supervisor.decide import DO_NOT_RESTART, Decision, decide
from megatron_ntp.supervisor.options import Options
from megatron_ntp.supervisor.stall import Sign, find_stall
from megatron_ntp.supervisor.state import AttemptRecord, JobFolder, JobState
from megatron_ntp.supervisor.training import Training
from megatron_ntp.supervisor.worker import Worker

POLL_S = 0.1
CHECK_DEADLINE_S = 180.0
_STOP_EXTRA_S = 60.0
_FAREWELL_S = 5.0
_TERMINATED = 128 + signal.SIGTERM


@dataclass(frozen=True)
class Cause:
    """Why an attempt is ended: `finished`, `failed`, `regrow` or `signal`."""

    kind: str
    reason: str
    status: int = 0
    at: float = 0.0
    silent_s: float = 0.0


class Controller:
    """The loop of a job. Made and run once, on node 0."""

    def __init__(
        self,
        options: Options,
        training: Training,
        folder: JobFolder,
        state: JobState,
        board: Board,
        worker: Worker,
        keep_alive: Callable[[], None],
    ) -> None:
        self._options, self._training = options, training
        self._folder, self._state = folder, state
        self._board, self._worker, self._keep_alive = board, worker, keep_alive
        self._log = EventLog(folder.events)
        self._session = f"{time.time():.6f}"
        self._round = 0
        self._attempt = 0
        self._host_names: dict[int, str] = {}
        self._detected_at: float | None = None
        self._last_status = 0

    def run(self) -> int:
        """To the end of the job; its exit status."""
        try:
            status, reason = self._supervise()
        except (PlanError, CheckpointError) as error:
            self._say(f"error: {error}")
            status, reason = 2, str(error)
        self._log.write("finished", status=status, reason=reason, attempts=self._attempt)
        self._say(f"{reason}; status {status}")
        self._end_all(status)
        return status

    def _supervise(self) -> tuple[int, str]:
        self._give("idle")
        num_nodes = self._options.num_nodes
        self._until(lambda: len(self._alive()) == num_nodes or self._signal(), self._join_s())
        while True:
            started = time.monotonic()
            nodes = self._check()
            checked = time.monotonic()
            if self._signal():
                return self._status_of_signal(), "stopped between attempts"
            decision = decide(nodes, self._training.shape, self._training.terms)
            self._tell(decision, nodes, checked - started)
            if decision.placement is None:
                return decision.status, decision.reason
            cause = self._run_attempt(decision.placement, checked - started, checked)
            if cause.kind == "finished":
                self._write(replace(self._state, finished=True))
                return 0, "the training has finished"
            if cause.kind == "signal":
                return cause.status, cause.reason
            if cause.kind == "regrow":
                continue
            verdict = guards.judge(self._state.ledger, self._options.limits, cause.status)
            if not verdict.again:
                return verdict.status, verdict.reason
            if verdict.wait_s:
                self._say(f"waiting {verdict.wait_s:g} s before the next attempt")
            if self._until(lambda: self._signal(), verdict.wait_s):
                return self._status_of_signal(), "stopped between attempts"

    # ---- nodes ----

    def _alive(self) -> dict[int, Seen]:
        deadline_s = self._options.node_deadline_s
        return {rank: s for rank, s in self._board.seen().items() if s.age_s <= deadline_s}

    def _check(self) -> list[Node]:
        """The reports of all nodes; one that does not report counts as dead."""
        self._round += 1
        self._give("check", round=self._round)

        def all_have_reported() -> bool:
            alive = self._alive()
            return bool(alive) and all(self._has_reported(seen) for seen in alive.values())

        self._until(lambda: all_have_reported() or bool(self._signal()), CHECK_DEADLINE_S)
        reported = {r: s for r, s in self._alive().items() if self._has_reported(s)}
        return self._nodes(reported)

    def _has_reported(self, seen: Seen) -> bool:
        return self._is_of_session(seen) and seen.status["round"] == self._round

    def _is_of_session(self, seen: Seen) -> bool:
        return bool(seen.status["session"] == self._session)

    def _nodes(self, seen: Mapping[int, Seen]) -> list[Node]:
        """In order of node rank, each under a name of its own."""
        nodes = []
        for rank in range(self._options.num_nodes):
            if rank in seen:
                node = Node.from_json(seen[rank].status["report"])
                self._host_names[rank] = node.host
            else:
                host = self._host_names.get(rank, f"node{rank}")
                node = silent_node(host, self._training.shape.gpus_per_node)
            nodes.append(node)
        hosts = [node.host for node in nodes]
        return [
            replace(node, host=f"{node.host}#{rank}") if hosts.count(node.host) > 1 else node
            for rank, node in enumerate(nodes)
        ]

    def _tell(self, decision: Decision, nodes: Sequence[Node], health_s: float) -> None:
        self._nodes_now = nodes
        dead = {
            f"{node.host} slot {number}": slot.reason
            for node in nodes
            for number, slot in enumerate(node.slots)
            if slot.device is None
        }
        self._log.write("health", dead=dead, seconds=_rounded(health_s))
        placement = decision.placement
        self._log.write(
            "decision",
            reason=decision.reason,
            degrees=None if placement is None else list(placement.degrees),
            dropped=decision.num_dropped,
            weighed=[str(candidate) for candidate in decision.candidates],
            digest=None if placement is None else digest(placement),
        )
        for where, why in dead.items():
            self._say(f"{where}: {why}")
        if len(decision.candidates) > 1:
            for candidate in decision.candidates:
                self._say(f"  {candidate}")
        self._say(f"decision: {decision.reason}")

    # ---- one attempt ----

    def _run_attempt(self, placement: Placement, health_s: float, checked: float) -> Cause:
        number, folder = self._folder.next_attempt(self._state)
        self._attempt = number
        checkpoint = self._newest_checkpoint()
        command = self._training.command(placement, self._may_begin_anew(checkpoint))
        write_atomically(folder / "placement.json", placement.to_json())
        record = AttemptRecord(number, placement.degrees, checkpoint)
        ledger = guards.ended_on_purpose(self._state.ledger, checkpoint, max(checkpoint, 0))
        self._write(replace(self._state.with_attempt(record), ledger=ledger))
        hosts = {str(rank): node.host for rank, node in enumerate(self._nodes_now)}
        members = [r for r, node in enumerate(self._nodes_now) if placement.agents_of(node.host)]
        first = next(r for r in members if hosts[str(r)] == placement.agents[0].host)
        self._log.write(
            "attempt-started",
            attempt=number,
            degrees=list(placement.degrees),
            digest=digest(placement),
            world_size=placement.world_size,
            checkpoint=checkpoint,
            health_s=_rounded(health_s),
            planning_s=_rounded(time.monotonic() - checked),
        )
        self._say(
            f"attempt {number}, from checkpoint {guards.told(checkpoint)}; output in {folder}\n"
            f"{placement.table()}"
        )
        alive = self._alive()
        self._give(
            "run",
            attempt=number,
            round=self._round,
            placement=placement.to_json(),
            address=alive[first].status["address"] if first in alive else ["", 0],
            hosts=hosts,
            folder=str(folder.absolute()),
            events=str(self._folder.events.absolute()),
            command=command,
        )
        watch = _Watch(self, placement, members, checkpoint)
        cause = watch.until_it_ends()
        return self._end_attempt(cause, watch, record)

    def _may_begin_anew(self, checkpoint: int) -> bool:
        """Whether there is nothing to load since nothing was ever saved, by whomever."""
        began_anew = all(record.from_checkpoint < 0 for record in self._state.attempts)
        never = self._state.ledger.checkpoint < 0 and began_anew
        try:
            return checkpoint < 0 and never and not self._training.has_saved()
        except CheckpointError:
            return False

    def _newest_checkpoint(self) -> int:
        """What cannot be read counts as none: the guards see to it that this does not go on."""
        try:
            return self._training.newest_checkpoint()
        except CheckpointError as error:
            self._say(f"checkpoints: {error}")
            return -1

    def _end_attempt(self, cause: Cause, watch: _Watch, record: AttemptRecord) -> Cause:
        ending = time.monotonic()
        self._give("stop", attempt=record.number)
        self._until(watch.is_clean, self._options.stop_grace_s + _STOP_EXTRA_S)
        stop_s = time.monotonic() - ending
        cause = watch.final(cause)
        checkpoint = self._newest_checkpoint()
        record = replace(record, ended=cause.reason, status=cause.status)
        ledger = guards.ended_on_purpose(self._state.ledger, checkpoint, watch.step)
        if cause.kind == "failed":
            ledger = guards.failed(self._state.ledger, checkpoint, watch.step, time.time())
        self._write(replace(self._state.with_attempt(record), ledger=ledger))
        is_end = cause.kind == "finished"
        self._log.write(
            "attempt-ended",
            attempt=record.number,
            degrees=list(record.degrees),
            cause=cause.kind,
            reason=cause.reason,
            status=cause.status,
            step=watch.step,
            checkpoint=checkpoint,
            steps_lost=0 if is_end else max(0, watch.step - max(checkpoint, 0)),
            detection_s=_rounded(cause.silent_s) if cause.kind == "failed" else None,
            stop_s=_rounded(stop_s),
        )
        self._say(
            f"attempt {record.number} ended: {cause.reason}; step {guards.told(watch.step)}, "
            f"checkpoint {guards.told(checkpoint)}"
        )
        if cause.kind == "failed":
            for tail in watch.tails():
                self._say(tail)
        for where, pids in watch.left().items():
            self._say(f"{where}: processes {pids} cannot be killed: look at the driver and disks")
        self._detected_at = cause.at
        return cause

    # ---- signals ----

    def _signal(self) -> int:
        """A signal that some supervisor of the job got, 0 for none."""
        return next((s.status["signal"] for s in self._alive().values() if s.status["signal"]), 0)

    def _status_of_signal(self) -> int:
        number = self._signal()
        return 0 if number == signal.SIGUSR1 else 128 + number

    # ---- small things ----

    def _give(self, kind: str, **fields: Any) -> None:
        self._board.give({"session": self._session, "kind": kind, **fields})

    def _until(self, done: Callable[[], Any], deadline_s: float) -> bool:
        """Keeps the own worker going until `done`; False after the deadline."""
        give_up_at = time.monotonic() + deadline_s
        while True:
            self._worker.tick(time.monotonic())
            self._keep_alive()
            if done():
                return True
            if time.monotonic() >= give_up_at:
                return False
            time.sleep(POLL_S)

    def _join_s(self) -> float:
        return self._options.join_deadline_s if self._options.num_nodes > 1 else 1.0

    def _write(self, state: JobState) -> None:
        self._state = state
        self._folder.write(state)

    def _end_all(self, status: int) -> None:
        self._give("end", status=status)

        def all_know() -> bool:
            return all(seen.status.get("ending") for seen in self._alive().values())

        self._until(all_know, _FAREWELL_S + self._options.stop_grace_s)

    @staticmethod
    def _say(text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


class _Watch:
    """Watches one attempt from node 0."""

    def __init__(
        self, controller: Controller, placement: Placement, members: Sequence[int], checkpoint: int
    ) -> None:
        self._controller, self._placement, self._members = controller, placement, members
        self._options = controller._options
        self._number = controller._attempt
        self._instances: dict[int, str] = {}
        self._failures: list[Failure] = []
        self._started_at = time.monotonic()
        self._silent_s = 0.0
        self._tracked = _tracker_mark(controller._training.save)
        self._checkpoint = checkpoint
        self._has_stepped = False
        self.step = -1

    # ---- what nodes say ----

    def _seen(self) -> dict[int, Seen]:
        """Statuses of members that speak of this attempt."""
        return {
            rank: seen
            for rank, seen in self._controller._board.seen().items()
            if rank in self._members and seen.status["attempt"] == self._number
        }

    def is_clean(self) -> bool:
        """Whether nothing of the attempt is left on any node that is alive."""
        alive = self._controller._alive()
        members = [seen for rank, seen in self._seen().items() if rank in alive]
        return all(seen.status["is_clean"] for seen in members)

    def tails(self) -> Iterator[str]:
        """Ends of outputs that speak of errors, the first of each node."""
        yield from filter(None, (seen.status["tail"] for seen in self._seen().values()))

    def left(self) -> dict[str, list[int]]:
        return {
            s.status["host"]: s.status["left"] for s in self._seen().values() if s.status["left"]
        }

    # ---- the loop ----

    def until_it_ends(self) -> Cause:
        """Watches until there is a reason to end the attempt."""
        found: list[Cause] = []

        def look() -> bool:
            found.extend(filter(None, [self._look()]))
            return bool(found)

        while not self._controller._until(look, 3600.0):
            pass
        (cause,) = found
        if cause.kind == "failed":
            self._controller._log.write(
                "fault-detected",
                attempt=self._number,
                reason=cause.reason,
                detection_s=_rounded(cause.silent_s),
                step=self.step,
            )
            self._controller._say(f"fault: {cause.reason}")
        elif cause.kind in ("signal", "regrow"):
            cause = self._save_and_end(cause)
        return cause

    def _look(self) -> Cause | None:
        number = self._controller._signal()
        if number:
            return self._cause("signal", f"told to stop by {signal.Signals(number).name}", number)
        lost = self._lost()
        if lost:
            return self._cause("failed", lost, 1)
        seen = self._seen()
        self._note_failures(seen)
        self._note_signs(seen)
        failed = self._first_failure(seen)
        if failed:
            return failed
        for one in seen.values():
            if one.status["fault"]:
                return self._cause("failed", one.status["fault"], 1)
        if len(seen) == len(self._members) and all(s.status["is_over"] for s in seen.values()):
            return self._cause("finished", "all ranks ended with 0", 0)
        return self._stalled(seen) or self._new_checkpoint()

    def _cause(self, kind: str, reason: str, status: int) -> Cause:
        return Cause(kind, reason, status, time.monotonic(), self._silent_s)

    def _lost(self) -> str:
        """Which node is gone, if one is: it is silent, or is a new supervisor."""
        seen = self._controller._board.seen()
        for rank in self._members:
            host = self._controller._nodes_now[rank].host
            one = seen.get(rank)
            if one is None or one.age_s > self._options.node_deadline_s:
                silent_s = self._options.node_deadline_s if one is None else one.age_s
                return f"node {host} is lost: no sign of its supervisor for {silent_s:.1f} s"
            instance = one.status["instance"]
            if self._instances.setdefault(rank, instance) != instance:
                return f"node {host} is lost: its supervisor was started anew"
        return ""

    def _note_failures(self, seen: Mapping[int, Seen]) -> None:
        for one in seen.values():
            for entry in one.status["failures"]:
                failure = Failure(**entry)
                if failure not in self._failures:
                    self._failures.append(failure)

    def _first_failure(self, seen: Mapping[int, Seen]) -> Cause | None:
        if self._failures:
            failure = culprit(self._failures)
            status = failure.status if failure.status > 0 else 128 - failure.status
            return self._cause("failed", str(failure), status)
        for one in seen.values():
            if one.status["statuses"]:  # an agent that failed before its ranks did
                status = one.status["statuses"][0]
                reason = f"an agent of {one.status['host']} ended with status {status}"
                return self._cause("failed", reason, status)
        return None

    def _signs(self, seen: Mapping[int, Seen]) -> dict[int, Sign]:
        signs = {}
        for one in seen.values():
            for entry in one.status.get("signs", ()):
                sign = Sign(**entry)
                signs[sign.rank] = replace(sign, age_s=sign.age_s + one.age_s)
        return signs

    def _note_signs(self, seen: Mapping[int, Seen]) -> None:
        signs = self._signs(seen)
        self.step = max([self.step, *(sign.iteration for sign in signs.values())])
        if signs:
            self._silent_s = min(sign.age_s for sign in signs.values())
        firsts = [one.status.get("first_step") for one in seen.values()]
        if self._has_stepped or len(firsts) < len(self._members) or not all(firsts):
            return
        self._has_stepped = True
        found = [
            replace(first, age_s=first.age_s + one.age_s)
            for one in seen.values()
            for first in [FirstStep(**one.status["first_step"])]
        ]
        last = min(found, key=lambda first: first.age_s)
        detected = self._controller._detected_at
        restart = None if detected is None else time.monotonic() - last.age_s - detected
        self._controller._log.write(
            "first-step",
            attempt=self._number,
            step=self.step,
            start_s=_rounded(last.start_s),
            load_s=_rounded(last.load_s),
            first_step_s=_rounded(last.first_step_s),
            restart_s=_rounded(restart),
        )

    def _stalled(self, seen: Mapping[int, Seen]) -> Cause | None:
        signs = self._signs(seen)
        if not signs and not self._controller._training.says_steps:
            return None
        longest = max((one.status.get("longest_s", 0.0) for one in seen.values()), default=0.0)
        age_s = time.monotonic() - self._started_at
        stall = find_stall(
            signs, self._placement.world_size, age_s, self._options.deadlines, longest
        )
        return None if stall is None else self._cause("failed", f"hang: {stall.reason}", 1)

    def _new_checkpoint(self) -> Cause | None:
        """Notes a checkpoint that was completed, and grows the job there if that was asked for."""
        mark = _tracker_mark(self._controller._training.save)
        if mark is None or mark == self._tracked:
            return None
        self._tracked = mark
        self._checkpoint = self._controller._newest_checkpoint()
        self._controller._log.write(
            "step-progress", attempt=self._number, step=self.step, checkpoint=self._checkpoint
        )
        if not self._options.regrow_at_checkpoint:
            return None
        alive = {
            rank: seen
            for rank, seen in self._controller._alive().items()
            if self._controller._is_of_session(seen) and seen.status["report"] is not None
        }
        nodes = self._controller._nodes(alive)
        training = self._controller._training
        better = decide(nodes, training.shape, training.terms).placement
        if better is None or better.world_size <= self._placement.world_size:
            return None
        degrees = ",".join(map(str, better.degrees))
        return self._cause("regrow", f"grows to {degrees} from checkpoint {self._checkpoint}", 0)

    # ---- a good end ----

    def _save_and_end(self, cause: Cause) -> Cause:
        """Has the ranks save and end, bounded, or until a second signal."""
        number, before = cause.status, _tracker_mark(self._controller._training.save)
        self._controller._say(f"{cause.reason}: asking ranks to save and end")
        self._controller._give("save", attempt=self._number)
        in_time = self._controller._until(self._has_ended, self._options.save_deadline_s)
        self._controller._until(self._is_over, self._options.stop_grace_s)  # after a failure
        if cause.kind == "regrow":
            return cause
        statuses = self._statuses()
        self._controller._log.write(
            "stopped", attempt=self._number, signal=number, in_time=in_time, statuses=statuses
        )
        # A rank that is on its way out already may still be ended by the SIGTERM that asked it.
        has_saved = _tracker_mark(self._controller._training.save) != before
        harmless = all(status == _TERMINATED for status in statuses) and has_saved
        if self._is_over() and (not statuses or harmless):
            return replace(cause, status=0, reason=cause.reason + "; ranks ended well")
        status = 128 + number
        if number == signal.SIGUSR1 and statuses:
            status = statuses[0]
        return replace(cause, status=status, reason=cause.reason + "; ranks did not end well")

    def _has_ended(self) -> bool:
        """Whether there is nothing to wait for: all ended, one failed, or a user is urgent."""
        self._note_signs(self._seen())
        urgent = any(seen.status["signal_count"] > 1 for seen in self._seen().values())
        return self._is_over() or bool(self._statuses()) or urgent

    def _is_over(self) -> bool:
        return all(seen.status["is_over"] for seen in self._seen().values())

    def _statuses(self) -> list[int]:
        """Of agents that failed."""
        return [status for seen in self._seen().values() for status in seen.status["statuses"]]

    def final(self, cause: Cause) -> Cause:
        """The cause as it looks when all nodes have told of their failures."""
        self._note_failures(self._seen())
        forbids = any(failure.status == DO_NOT_RESTART for failure in self._failures)
        if cause.kind == "failed" and forbids:
            return replace(cause, status=DO_NOT_RESTART)
        return cause


def culprit(failures: Sequence[Failure]) -> Failure:
    """The failure that is behind the others: ranks that lost a peer fail, too."""

    def is_victim(failure: Failure) -> tuple[bool, bool]:
        killed = failure.status < 0 and failure.status != -signal.SIGTERM
        return failure.status != DO_NOT_RESTART, not killed

    return min(failures, key=is_victim)


def digest(placement: Placement) -> str:
    """Short name of who runs where: the same for the same."""
    found = json.loads(placement.to_json())
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]


def _tracker_mark(folder: Path | None) -> int | None:
    """Changes with every checkpoint that is completed."""
    try:
        return None if folder is None else (folder / TRACKER).stat().st_mtime_ns
    except OSError:
        return None


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
