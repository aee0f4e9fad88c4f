"""What power buys: throughput ~ power ^ exponent, per kind of board.

The exponent starts at 0.5, which the published rack experiments found at the top of the range, and
is fitted to what the controller measures. Fits need limits that differ, so a job that never moved
its limits leaves the exponent as it was.

A gap is the share of a step that the healthy replicas wait for the reduced one:
gap = (t_reduced - t_healthy) / t_reduced. Being 1 / (1 - gap) faster closes it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_ntp.device.files import read_regular, write_atomic

DEFAULT_EXPONENT = 0.5
MIN_EXPONENT, MAX_EXPONENT = 0.1, 1.0
MIN_SAMPLES = 3
MIN_SPREAD = 1.05  # highest over lowest limit among the samples of a fit
MAX_SAMPLES = 256


@dataclass(frozen=True)
class PowerSample:
    """Pace (1 / seconds of the replica's own work in a step) under a limit."""

    limit_mw: int
    pace: float


@dataclass(frozen=True)
class PowerCurve:
    """Throughput of one kind of board as a function of its power limit."""

    exponent: float = DEFAULT_EXPONENT
    num_samples: int = 0

    def speedup(self, from_mw: float, to_mw: float) -> float:
        return float((to_mw / from_mw) ** self.exponent)

    def power_for(self, from_mw: float, speedup: float) -> float:
        """The limit that makes a board that runs under `from_mw` so much faster."""
        return float(from_mw * speedup ** (1 / self.exponent))

    def gap_at(self, gap: float, from_mw: float, to_mw: float) -> float:
        """What is left of a gap that was measured under `from_mw`. Never negative."""
        return max(0.0, 1 - (1 - gap) * self.speedup(from_mw, to_mw))


def reduction_gap(full_degree: int, degree: int) -> float:
    """The gap of a replica that does the same work on fewer GPUs, before any power."""
    return 1 - degree / full_degree


def fit_curve(samples: Sequence[PowerSample]) -> PowerCurve | None:
    """Least squares of log pace over log limit; None where the limits hardly differ."""
    usable = [sample for sample in samples if sample.limit_mw > 0 and sample.pace > 0]
    limits = [sample.limit_mw for sample in usable]
    if len(usable) < MIN_SAMPLES or max(limits) < MIN_SPREAD * min(limits):
        return None
    xs = [math.log(sample.limit_mw) for sample in usable]
    ys = [math.log(sample.pace) for sample in usable]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    covariance = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    slope = covariance / sum((x - mean_x) ** 2 for x in xs)
    return PowerCurve(min(MAX_EXPONENT, max(MIN_EXPONENT, slope)), len(usable))


@dataclass
class ModelFile:
    """The newest fit of each board with the samples behind it, on disk between runs.

    Samples of two jobs are never fitted together: their paces do not compare.
    """

    path: Path
    curves: dict[str, PowerCurve] = field(default_factory=dict)
    samples: dict[str, tuple[PowerSample, ...]] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> ModelFile:
        text = read_regular(path)
        model = cls(path)
        try:
            for board, entry in (json.loads(text)["boards"] if text else {}).items():
                samples = tuple(PowerSample(int(mw), float(p)) for mw, p in entry["samples"])
                curve = PowerCurve(float(entry["exponent"]), len(samples))
                if not MIN_EXPONENT <= curve.exponent <= MAX_EXPONENT:
                    raise ValueError(f"exponent {curve.exponent} of {board!r}")
                model.curves[board], model.samples[board] = curve, samples
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"power model {path} is damaged ({error!r}); delete it") from error
        return model

    def curve(self, board: str) -> PowerCurve:
        return self.curves.get(board, PowerCurve())

    def learn(self, board: str, samples: Sequence[PowerSample]) -> PowerCurve:
        """Takes over a fit of one job's samples, where they suffice for one."""
        recent = tuple(samples[-MAX_SAMPLES:])
        fitted = fit_curve(recent)
        if fitted is not None:
            self.curves[board], self.samples[board] = fitted, recent
        return self.curve(board)

    def save(self) -> None:
        boards = {
            board: {
                "exponent": curve.exponent,
                "samples": [[s.limit_mw, s.pace] for s in self.samples.get(board, ())],
            }
            for board, curve in self.curves.items()
        }
        write_atomic(self.path, json.dumps({"boards": boards}, indent=2) + "\n")
