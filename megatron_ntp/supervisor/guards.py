"""When to start again, and when to stop trying. Pure: what happened in, what to do out.

[Progress] An attempt made progress if a newer checkpoint is complete, or a step was reached that no
attempt had reached. Attempts that were ended on purpose (to grow, to save) count neither way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_ntp.supervisor.decide import DO_NOT_RESTART

HOUR_S = 3600.0


@dataclass(frozen=True)
class Limits:
    """What a user allows.

    Attributes:
        max_fruitless: attempts in a row without progress, after which the job ends with 93.
        max_restarts_per_hour: restarts in any hour, planned ones left out.
        backoff_s: wait before the restart that follows a fruitless attempt; doubles with each.
        max_backoff_s: the longest wait.
    """

    max_fruitless: int = 2
    max_restarts_per_hour: int = 20
    backoff_s: float = 10.0
    max_backoff_s: float = 300.0


@dataclass(frozen=True)
class Ledger:
    """What is remembered of earlier attempts; kept in the job's state.

    Attributes:
        checkpoint: newest complete checkpoint's iteration, -1 for none.
        step: furthest step that any attempt completed, -1 for none.
        fruitless: attempts in a row without [Progress].
        failures: when attempts failed, seconds since the epoch, of the last hour.
    """

    checkpoint: int = -1
    step: int = -1
    fruitless: int = 0
    failures: tuple[float, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """Start again after `wait_s`, or end with `status` because of `reason`."""

    again: bool
    wait_s: float = 0.0
    status: int = 0
    reason: str = ""


def failed(ledger: Ledger, checkpoint: int, step: int, now_s: float) -> Ledger:
    """The ledger after an attempt that failed, with the newest checkpoint and furthest step."""
    progress = checkpoint > ledger.checkpoint or step > ledger.step
    recent = tuple(at for at in ledger.failures if 0 <= now_s - at < HOUR_S)
    return Ledger(
        checkpoint=max(ledger.checkpoint, checkpoint),
        step=max(ledger.step, step),
        fruitless=0 if progress else ledger.fruitless + 1,
        failures=(*recent, now_s),
    )


def ended_on_purpose(ledger: Ledger, checkpoint: int, step: int) -> Ledger:
    """The ledger after an attempt that was stopped to start it differently."""
    return replace(
        ledger, checkpoint=max(ledger.checkpoint, checkpoint), step=max(ledger.step, step)
    )


def judge(ledger: Ledger, limits: Limits, status: int) -> Verdict:
    """Whether to start again after an attempt that ended with this status."""
    if status == DO_NOT_RESTART:
        reason = f"a rank ended with {DO_NOT_RESTART}: a restart would not help"
        return Verdict(False, status=DO_NOT_RESTART, reason=reason)
    if ledger.fruitless >= limits.max_fruitless:
        reason = (
            f"{ledger.fruitless} attempts in a row made no progress (newest checkpoint "
            f"{told(ledger.checkpoint)}, furthest step {told(ledger.step)}): look at the output "
            "before the next start"
        )
        return Verdict(False, status=DO_NOT_RESTART, reason=reason)
    if len(ledger.failures) > limits.max_restarts_per_hour:
        reason = (
            f"{len(ledger.failures)} failures within an hour, more than "
            f"--max-restarts-per-hour {limits.max_restarts_per_hour}"
        )
        return Verdict(False, status=status or 1, reason=reason)
    if not ledger.fruitless:
        return Verdict(True)
    wait_s = limits.backoff_s * 2 ** (ledger.fruitless - 1)
    return Verdict(True, wait_s=min(wait_s, limits.max_backoff_s))


def told(iteration: int) -> str:
    """An iteration for people."""
    return "none" if iteration < 0 else str(iteration)
