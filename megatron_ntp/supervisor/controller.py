"""Node 0: looks at all nodes, decides, has the attempt started, watches it, and decides again.

It talks to the other nodes, and to the worker of its own, by the board alone. `run` is the loop of
docs/restart.md.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import replace

from megatron_ntp.errors import CheckpointError, PlanError
from megatron_ntp.launchers.nodes import Node, Placement
from megatron_ntp.supervisor import guards
from megatron_ntp.supervisor.board import Seen
from megatron_ntp.supervisor.decide import Decision, decide
from megatron_ntp.supervisor.desk import Desk, rounded
from megatron_ntp.supervisor.state import AttemptRecord, JobFolder, JobState
from megatron_ntp.supervisor.watch import AttemptWatch, Cause

CHECK_DEADLINE_S = 180.0
_STOP_EXTRA_S = 60.0
_FAREWELL_S = 5.0


class Controller:
    """The loop of a job. Made and run once, on node 0."""

    def __init__(self, desk: Desk, folder: JobFolder, state: JobState) -> None:
        self._desk, self._folder, self._state = desk, folder, state
        self._round = 0
        self._attempt = 0

    def run(self) -> int:
        """To the end of the job; its exit status."""
        try:
            status, reason = self._supervise()
        except (PlanError, CheckpointError) as error:
            self._desk.say(f"error: {error}")
            status, reason = 2, str(error)
        self._desk.note("finished", status=status, reason=reason, attempts=self._attempt)
        self._desk.say(f"{reason}; status {status}")
        self._end_all(status)
        return status

    def _supervise(self) -> tuple[int, str]:
        self._desk.give("idle")
        num_nodes = self._desk.options.num_nodes
        self._desk.until(
            lambda: len(self._desk.alive()) == num_nodes or self._desk.signal(), self._join_s()
        )
        while True:
            started = time.monotonic()
            nodes = self._desk.nodes = self._check()
            checked = time.monotonic()
            if self._desk.signal():
                return self._desk.status_of_signal(), "stopped between attempts"
            decision = decide(nodes, self._desk.training.shape, self._desk.training.terms)
            number = self._folder.next_number(self._state)
            self._tell(number, decision, nodes, checked - started)
            if decision.placement is None:
                if self._lost_nodes_come_back():
                    continue
                return decision.status, decision.reason
            cause = self._run_attempt(number, decision.placement, checked - started, checked)
            if cause.kind == "finished":
                self._write(replace(self._state, finished=True))
                return 0, "the training has finished"
            if cause.kind == "signal":
                return cause.status, cause.reason
            if cause.kind == "regrow":
                continue
            verdict = guards.judge(self._state.ledger, self._desk.options.limits, cause.status)
            if not verdict.again:
                return verdict.status, verdict.reason
            if verdict.wait_s:
                self._desk.say(f"waiting {verdict.wait_s:g} s before the next attempt")
            if self._desk.until(lambda: self._desk.signal(), verdict.wait_s):
                return self._desk.status_of_signal(), "stopped between attempts"

    # ---- nodes ----

    def _check(self) -> tuple[Node, ...]:
        """The reports of all nodes; one that does not report counts as dead."""
        self._round += 1
        self._desk.give("check", round=self._round)
        self._await_network()

        def all_have_reported() -> bool:
            alive = self._desk.alive()
            return bool(alive) and all(self._has_reported(seen) for seen in alive.values())

        self._desk.until(lambda: all_have_reported() or bool(self._desk.signal()), CHECK_DEADLINE_S)
        reported = {r: s for r, s in self._desk.alive().items() if self._has_reported(s)}
        self._desk.instances = {rank: s.status["instance"] for rank, s in reported.items()}
        return self._desk.reports(reported)

    def _await_network(self) -> None:
        """Several nodes lost at once are more likely cut off than dead: they get a second chance.

        The job would else go on without them, until something fails again.
        """
        known = set(self._desk.instances)

        def is_over() -> bool:
            lost = known - set(self._desk.alive())
            return len(lost) < 2 or bool(self._desk.signal())

        if not is_over():
            wait_s = self._desk.options.node_deadline_s
            self._desk.say(f"several nodes were lost at once: waiting up to {wait_s:g} s for them")
            self._desk.until(is_over, wait_s)

    def _lost_nodes_come_back(self) -> bool:
        """Waits for nodes without which nothing can run: it may be the network that was gone."""
        lost = set(range(self._desk.options.num_nodes)) - set(self._desk.alive())
        if not lost:
            return False
        hosts = ", ".join(self._desk.nodes[rank].host for rank in sorted(lost))
        self._desk.say(f"waiting {self._join_s():g} s for lost nodes: {hosts}")

        def is_over() -> bool:
            return bool(lost & set(self._desk.alive()) or self._desk.signal())

        return self._desk.until(is_over, self._join_s())

    def _has_reported(self, seen: Seen) -> bool:
        return self._desk.is_of_session(seen) and seen.status["round"] == self._round

    def _tell(
        self, number: int, decision: Decision, nodes: Sequence[Node], health_s: float
    ) -> None:
        dead = {
            f"{node.host} slot {number}": slot.reason
            for node in nodes
            for number, slot in enumerate(node.slots)
            if slot.device is None
        }
        self._desk.note("health", attempt=number, dead=dead, seconds=rounded(health_s))
        placement = decision.placement
        self._desk.note(
            "decision",
            attempt=number,
            reason=decision.reason,
            degrees=None if placement is None else list(placement.degrees),
            dropped=decision.num_dropped,
            weighed=[str(candidate) for candidate in decision.candidates],
            digest=None if placement is None else digest(placement),
        )
        for where, why in dead.items():
            self._desk.say(f"{where}: {why}")
        if len(decision.candidates) > 1:
            for candidate in decision.candidates:
                self._desk.say(f"  {candidate}")
        self._desk.say(f"decision: {decision.reason}")

    # ---- one attempt ----

    def _run_attempt(
        self, number: int, placement: Placement, health_s: float, checked: float
    ) -> Cause:
        self._attempt = number
        folder = self._folder.make_attempt(number, placement.to_json())
        checkpoint = self._desk.newest_checkpoint()
        command = self._desk.training.command(placement, self._may_begin_anew(checkpoint))
        record = AttemptRecord(number, placement.degrees, checkpoint)
        ledger = guards.ended_on_purpose(self._state.ledger, checkpoint, max(checkpoint, 0))
        self._write(replace(self._state.with_attempt(record), ledger=ledger))
        hosts = {str(rank): node.host for rank, node in enumerate(self._desk.nodes)}
        members = [r for r, node in enumerate(self._desk.nodes) if placement.agents_of(node.host)]
        first = next(r for r in members if hosts[str(r)] == placement.agents[0].host)
        self._desk.note(
            "attempt-started",
            attempt=number,
            degrees=list(placement.degrees),
            digest=digest(placement),
            world_size=placement.world_size,
            checkpoint=checkpoint,
            health_s=rounded(health_s),
            planning_s=rounded(time.monotonic() - checked),
        )
        self._desk.say(
            f"attempt {number}, from checkpoint {guards.told(checkpoint)}; output in {folder}\n"
            f"{placement.table()}"
        )
        alive = self._desk.alive()
        self._desk.give(
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
        watch = AttemptWatch(self._desk, number, placement, members)
        cause = watch.until_it_ends()
        return self._end_attempt(cause, watch, record)

    def _may_begin_anew(self, checkpoint: int) -> bool:
        """Whether there is nothing to load since nothing was ever saved, by whomever."""
        began_anew = all(record.from_checkpoint < 0 for record in self._state.attempts)
        never = self._state.ledger.checkpoint < 0 and began_anew
        try:
            return checkpoint < 0 and never and not self._desk.training.has_saved()
        except CheckpointError:
            return False

    def _end_attempt(self, cause: Cause, watch: AttemptWatch, record: AttemptRecord) -> Cause:
        ending = time.monotonic()
        self._desk.give("stop", attempt=record.number)
        self._desk.until(watch.is_clean, self._desk.options.stop_grace_s + _STOP_EXTRA_S)
        stop_s = time.monotonic() - ending
        cause = watch.final(cause)
        checkpoint = self._desk.newest_checkpoint()
        record = replace(record, ended=cause.reason, status=cause.status)
        ledger = guards.ended_on_purpose(self._state.ledger, checkpoint, watch.step)
        if cause.kind == "failed":
            ledger = guards.failed(self._state.ledger, checkpoint, watch.step, time.time())
        self._write(replace(self._state.with_attempt(record), ledger=ledger))
        is_end = cause.kind == "finished"
        self._desk.note(
            "attempt-ended",
            attempt=record.number,
            degrees=list(record.degrees),
            cause=cause.kind,
            reason=cause.reason,
            status=cause.status,
            step=watch.step,
            checkpoint=checkpoint,
            steps_lost=0 if is_end else max(0, watch.step - max(checkpoint, 0)),
            detection_s=rounded(cause.silent_s) if cause.kind == "failed" else None,
            stop_s=rounded(stop_s),
        )
        self._desk.say(
            f"attempt {record.number} ended: {cause.reason}; step {guards.told(watch.step)}, "
            f"checkpoint {guards.told(checkpoint)}"
        )
        if cause.kind == "failed":
            for tail in watch.tails():
                self._desk.say(tail)
        for where, pids in watch.left().items():
            self._desk.say(
                f"{where}: processes {pids} cannot be killed: look at the driver and disks"
            )
        self._desk.detected_at = cause.at
        return cause

    # ---- small things ----

    def _join_s(self) -> float:
        return self._desk.options.join_deadline_s if self._desk.options.num_nodes > 1 else 1.0

    def _write(self, state: JobState) -> None:
        self._state = state
        self._folder.write(state)

    def _end_all(self, status: int) -> None:
        self._desk.give("end", status=status)

        def all_know() -> bool:
            return all(seen.status.get("ending") for seen in self._desk.alive().values())

        self._desk.until(all_know, _FAREWELL_S + self._desk.options.stop_grace_s)


def digest(placement: Placement) -> str:
    """Short name of who runs where: the same for the same."""
    found = json.loads(placement.to_json())
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]
