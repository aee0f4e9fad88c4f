"""Compares the losses of the job that lost a rank with those of the undisturbed one."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megatron_ntp.errors import NTPError

LOSS = "lm loss"
DEFAULT_TOLERANCE = 1e-5


class StepLosses(NamedTuple):
    """One step of both jobs. A loss is None where that job has no such step."""

    step: int
    uniform: float | None
    ntp: float | None

    @property
    def rel_diff(self) -> float:
        """|ntp - uniform| / |uniform|; infinite where a loss is missing or not a number."""
        if self.uniform is None or self.ntp is None:
            return math.inf
        if self.uniform == self.ntp:
            return 0.0
        difference = abs(self.ntp - self.uniform) / max(abs(self.uniform), 1e-30)
        return difference if math.isfinite(difference) else math.inf


@dataclass(frozen=True)
class Parity:
    """The comparison. It holds if every step of both jobs is there and within the tolerance."""

    steps: tuple[StepLosses, ...]
    tolerance: float

    @property
    def max_rel_diff(self) -> float:
        return max((step.rel_diff for step in self.steps), default=math.inf)

    @property
    def holds(self) -> bool:
        return self.max_rel_diff <= self.tolerance

    @property
    def worst(self) -> StepLosses | None:
        return max(self.steps, key=lambda step: step.rel_diff, default=None)


def compare(
    uniform: Mapping[int, float],
    ntp: Mapping[int, float],
    num_steps: int,
    tolerance: float = DEFAULT_TOLERANCE,
) -> Parity:
    """Losses by step of both jobs, which should have the steps 1 to `num_steps`."""
    expected = set(range(1, num_steps + 1))
    steps = sorted(expected | set(uniform) | set(ntp))
    return Parity(
        tuple(StepLosses(step, uniform.get(step), ntp.get(step)) for step in steps), tolerance
    )


def read_losses(path: Path) -> dict[int, float]:
    """Losses by step from a file of `run --loss-log`. A line that is still being written is left.

    Raises:
        NTPError: a step was skipped: its gradients were not finite, and its loss means nothing.
    """
    if not path.exists():
        return {}
    losses: dict[int, float] = {}
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if not line.endswith("\n"):
            break
        entry = json.loads(line)
        if entry["skipped"] or LOSS not in entry["losses"]:
            raise NTPError(
                f"{path}: step {entry['step']} was skipped; its gradients are not finite"
            )
        losses[entry["step"]] = entry["losses"][LOSS]
    return losses
