"""What came of a rehearsal, as text and as JSON."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import megatron_ntp
from megatron_ntp.plan import format_failed
from megatron_ntp.rehearsal.parity import Parity
from megatron_ntp.rehearsal.story import Outcome


@dataclass(frozen=True)
class Resharding:
    """Bytes that the reduced job moved inside TP groups, over all its ranks and steps."""

    nbytes: int
    minimum_nbytes: int
    num_steps: int

    @classmethod
    def of(cls, statistics: Iterable[dict[str, Any]]) -> Resharding:
        """From the ranks' files; each rank knows the minimum of its whole replica."""
        ranks = list(statistics)
        leaders = [rank for rank in ranks if rank["tp_rank"] == 0]
        return cls(
            nbytes=sum(rank["bytes_sent"] for rank in ranks),
            minimum_nbytes=sum(
                rank["steps"] * sum(rank["minimum_bytes_per_step"].values()) for rank in leaders
            ),
            num_steps=max((rank["steps"] for rank in ranks), default=0),
        )


def as_json(outcome: Outcome, parity: Parity, seconds: dict[str, float]) -> dict[str, Any]:
    """The contents of rehearsal.json."""
    options = outcome.options
    resharding = Resharding.of(outcome.statistics)
    return {
        "passed": parity.holds,
        "max_loss_rel_diff": parity.max_rel_diff,
        "tolerance": parity.tolerance,
        "steps": options.num_steps,
        "degrees": list(options.degrees),
        "healthy_degree": options.nominal_tp,
        "failed": format_failed(options.topology.failed),
        "heads": options.num_heads,
        "batch_policy": options.batch_policy,
        "killed_ranks": list(options.killed_ranks()),
        "killed_in_step": outcome.killed_in_step,
        "resumed_after_step": options.resumed_after,
        "repaired_after_step": options.repaired_after,
        "reshard_bytes": resharding.nbytes,
        "reshard_bytes_minimum": resharding.minimum_nbytes,
        "reshard_steps": resharding.num_steps,
        "optimizer_state_bytes": [rank["optimizer_state_bytes"] for rank in outcome.statistics],
        "ranks": list(outcome.statistics),
        "seconds": seconds,
        "losses": [step._asdict() for step in parity.steps],
        "lost_losses": {str(step): loss for step, loss in outcome.lost_losses.items()},
        "versions": {
            "megatron-ntp": megatron_ntp.__version__,
            "megatron-core": _version("megatron-core"),
            "torch": _version("torch"),
        },
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def as_text(outcome: Outcome, parity: Parity) -> str:
    """The tables that the command prints in the end, before its verdict."""
    return "\n\n".join([_loss_table(outcome, parity), _rank_table(outcome), _reshard_line(outcome)])


def verdict(parity: Parity) -> str:
    """One line: whether the job that lost a rank has the losses of the undisturbed one."""
    worst = parity.worst
    at = f" at step {worst.step}" if worst is not None and worst.rel_diff else ""
    comparison = "within" if parity.holds else "ABOVE"
    return (
        f"{'PASSED' if parity.holds else 'FAILED'}: largest relative difference of the losses "
        f"{parity.max_rel_diff:.2g}{at}, {comparison} the tolerance {parity.tolerance:g}"
    )


def _loss_table(outcome: Outcome, parity: Parity) -> str:
    rows = [("step", "uniform loss", "NTP loss", "rel. diff.", "")]
    previous = ""
    for step in parity.steps:
        ran = _ran(outcome, step.step)
        rows.append(
            (
                str(step.step),
                _number(step.uniform),
                _number(step.ntp),
                f"{step.rel_diff:.1e}" if step.rel_diff else "0",
                "" if ran == previous else ran,
            )
        )
        previous = ran
    return "\n".join(["Losses", *_columns(rows)])


def _ran(outcome: Outcome, step: int) -> str:
    options = outcome.options
    if step <= options.resumed_after:
        return "healthy"
    return "reduced" if step <= options.repaired_after else "repaired"


def _rank_table(outcome: Outcome) -> str:
    rows = [
        ("rank", "replica", "TP rank", "degree", "kind", "optimizer state", "sent in all steps")
    ]
    for rank in outcome.statistics:
        rows.append(
            (
                str(rank["global_rank"]),
                str(rank["replica"]),
                str(rank["tp_rank"]),
                str(rank["degree"]),
                "extra" if rank["is_extra"] else "core",
                f"{rank['optimizer_state_bytes']:,} B",
                f"{rank['bytes_sent']:,} B",
            )
        )
    return "\n".join(["Ranks of the reduced job", *_columns(rows)])


def _reshard_line(outcome: Outcome) -> str:
    resharding = Resharding.of(outcome.statistics)
    minimum = resharding.minimum_nbytes
    over = resharding.nbytes - minimum
    compared = (
        "exactly the minimum" if over == 0 else f"{over:+,} B against the minimum {minimum:,}"
    )
    return (
        f"Resharded between the ranks of a replica in {resharding.num_steps} steps: "
        f"{resharding.nbytes:,} B, {compared}"
    )


def _number(value: float | None) -> str:
    return "missing" if value is None else f"{value:.7f}"


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(f"{c:>{w}}" for c, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
