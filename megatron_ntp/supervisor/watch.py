"""Watches one attempt from node 0: why it has to end, and how it ended."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_ntp.checkpoint.folder import TRACKER
from megatron_ntp.launchers.nodes import Placement
from megatron_ntp.plan.topology import format_degrees
from megatron_ntp.supervisor.attempt import Failure, FirstStep
from megatron_ntp.supervisor.board import Seen
from megatron_ntp.supervisor.decide import DO_NOT_RESTART, decide
from megatron_ntp.supervisor.desk import Desk, rounded
from megatron_ntp.supervisor.stall import Sign, find_stall

_TERMINATED = 128 + signal.SIGTERM


@dataclass(frozen=True)
class Cause:
    """Why an attempt is ended: `finished`, `failed`, `regrow` or `signal`."""

    kind: str
    reason: str
    status: int = 0
    at: float = 0.0
    silent_s: float = 0.0


class AttemptWatch:
    """Watches one attempt from node 0.

    Args:
        desk: of node 0.
        number: of the attempt.
        placement: who runs where.
        members: node ranks that have ranks of it.
    """

    def __init__(
        self, desk: Desk, number: int, placement: Placement, members: Sequence[int]
    ) -> None:
        self._desk, self._number = desk, number
        self._placement, self._members = placement, members
        self._failures: list[Failure] = []
        self._started_at = time.monotonic()
        self._silent_s = 0.0
        self._tracked = _tracker_mark(desk.training.save)
        self._has_stepped = False
        self.step = -1

    # ---- what nodes say ----

    def _seen(self) -> dict[int, Seen]:
        """Statuses of members that speak of this attempt."""
        return {
            rank: seen
            for rank, seen in self._desk.seen().items()
            if rank in self._members and seen.status["attempt"] == self._number
        }

    def is_clean(self) -> bool:
        """Whether nothing of the attempt is left on any node that is alive."""
        alive = self._desk.alive()
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

        while not self._desk.until(look, 3600.0):
            pass
        (cause,) = found
        if cause.kind == "failed":
            self._desk.note(
                "fault-detected",
                attempt=self._number,
                reason=cause.reason,
                detection_s=rounded(cause.silent_s),
                step=self.step,
            )
            self._desk.say(f"fault: {cause.reason}")
        elif cause.kind in ("signal", "regrow"):
            cause = self._save_and_end(cause)
        return cause

    def _look(self) -> Cause | None:
        number = self._desk.signal()
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
        seen = self._desk.seen()
        for rank in self._members:
            host = self._desk.nodes[rank].host
            one = seen.get(rank)
            if one is None or one.age_s > self._desk.options.node_deadline_s:
                silent_s = self._desk.options.node_deadline_s if one is None else one.age_s
                return f"node {host} is lost: no sign of its supervisor for {silent_s:.1f} s"
            if one.status["instance"] != self._desk.instances[rank]:
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
        detected = self._desk.detected_at
        restart = None if detected is None else time.monotonic() - last.age_s - detected
        self._desk.note(
            "first-step",
            attempt=self._number,
            step=self.step,
            start_s=rounded(last.start_s),
            load_s=rounded(last.load_s),
            first_step_s=rounded(last.first_step_s),
            restart_s=rounded(restart),
        )

    def _stalled(self, seen: Mapping[int, Seen]) -> Cause | None:
        signs = self._signs(seen)
        if not signs and not self._desk.training.says_steps:
            return None
        longest = max((one.status.get("longest_s", 0.0) for one in seen.values()), default=0.0)
        age_s = time.monotonic() - self._started_at
        stall = find_stall(
            signs, self._placement.world_size, age_s, self._desk.options.deadlines, longest
        )
        return None if stall is None else self._cause("failed", f"hang: {stall.reason}", 1)

    def _new_checkpoint(self) -> Cause | None:
        """Notes a checkpoint that was completed, and grows the job there if that was asked for."""
        mark = _tracker_mark(self._desk.training.save)
        if mark is None or mark == self._tracked:
            return None
        self._tracked = mark
        checkpoint = self._desk.newest_checkpoint()
        self._desk.note(
            "step-progress", attempt=self._number, step=self.step, checkpoint=checkpoint
        )
        if not self._desk.options.regrow_at_checkpoint:
            return None
        alive = {
            rank: seen
            for rank, seen in self._desk.alive().items()
            if self._desk.is_of_session(seen) and seen.status["report"] is not None
        }
        nodes = self._desk.reports(alive)
        training = self._desk.training
        better = decide(nodes, training.shape, training.terms).placement
        if better is None or better.world_size <= self._placement.world_size:
            return None
        degrees = format_degrees(better.degrees)
        return self._cause("regrow", f"grows to {degrees} from checkpoint {checkpoint}", 0)

    # ---- a good end ----

    def _save_and_end(self, cause: Cause) -> Cause:
        """Has the ranks save and end, bounded, or until a second signal."""
        number, before = cause.status, self._tracked
        self._desk.say(f"{cause.reason}: asking ranks to save and end")
        self._desk.give("save", attempt=self._number)
        in_time = self._desk.until(self._has_ended, self._desk.options.save_deadline_s)
        self._desk.until(self._is_over, self._desk.options.stop_grace_s)  # after a failure
        if cause.kind == "regrow":
            return cause
        statuses = self._statuses()
        self._desk.note(
            "stopped", attempt=self._number, signal=number, in_time=in_time, statuses=statuses
        )
        # A rank that is on its way out already may still be ended by the SIGTERM that asked it.
        has_saved = _tracker_mark(self._desk.training.save) != before
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


def _tracker_mark(folder: Path | None) -> int | None:
    """Changes with every checkpoint that is completed."""
    try:
        return None if folder is None else (folder / TRACKER).stat().st_mtime_ns
    except OSError:
        return None
