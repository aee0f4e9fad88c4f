"""Which faults happen, where and when: drawn from a seed, each kind once before one comes again."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from chaos_kit.job import FIRST_STEP, LAST_STEP, NUM_REPLICAS, SAVE_EVERY, TP

NUM_RANKS = TP * NUM_REPLICAS
HEALTHY, REDUCED = (2, 2), (1, 2)
LATEST_STEP = LAST_STEP - 3
"""A fault from outside that comes by the clock comes here at the latest."""


@dataclass(frozen=True)
class Outside:
    """What is done to the job from outside, once.

    Attributes:
        what: `kill-rank`, `kill-supervisor` or `lose-gpu`.
        after_s: from the start of the supervisor, or from the step.
        at_step: not before this step is complete.
    """

    what: str
    after_s: float
    rank: int = 0
    at_step: int | None = None

    def __str__(self) -> str:
        whom = "" if self.what == "kill-supervisor" else f" of rank {self.rank}"
        since = "the start" if self.at_step is None else f"step {self.at_step}"
        return f"{self.what}{whom}, {self.after_s:.2f} s after {since}"


@dataclass(frozen=True)
class Fault:
    """The fault of one round: by --ntp-inject, or from outside.

    Attributes:
        degrees: of the attempt that ends the job, lowest first.
        loses_newest: the newest checkpoint is damaged, so that the one before it counts.
    """

    name: str
    inject: str = ""
    outside: Outside | None = None
    degrees: tuple[int, ...] = HEALTHY
    loses_newest: bool = False

    @property
    def detail(self) -> str:
        return self.inject or str(self.outside)


def draw(seed: int, num_rounds: int) -> list[Fault]:
    """The faults of all rounds; the same for the same seed."""
    source = random.Random(seed)
    makers: list[Callable[[random.Random], Fault]] = []
    while len(makers) < num_rounds:
        makers += source.sample(_KINDS, len(_KINDS))
    return [make(source) for make in makers[:num_rounds]]


def _rank(source: random.Random) -> int:
    return source.randrange(NUM_RANKS)


def _step(source: random.Random) -> int:
    return source.randint(FIRST_STEP + 1, LATEST_STEP)


def _save(source: random.Random) -> int:
    """A step that is saved, and is not the last that is."""
    return SAVE_EVERY * source.randint(2, LATEST_STEP // SAVE_EVERY)


def _after(source: random.Random, most_s: float) -> float:
    return round(source.uniform(0, most_s), 3)


def _kill_in_step(source: random.Random) -> Fault:
    place = f"rank={_rank(source)},after={_after(source, 0.1)}@step={_step(source)}"
    return Fault("SIGKILL in a step", f"kill:{place}")


def _kill_any_time(source: random.Random) -> Fault:
    outside = Outside("kill-rank", 1 + _after(source, 25), _rank(source))
    return Fault("SIGKILL at any time", outside=outside)


def _kill_in_save(source: random.Random) -> Fault:
    place = f"rank={_rank(source)},after={_after(source, 0.3)}@save={_save(source)}"
    return Fault("SIGKILL in a save", f"kill:{place}")


def _kill_in_start(source: random.Random) -> Fault:
    place = f"rank={_rank(source)},after={_after(source, 8)}@start"
    return Fault("SIGKILL while starting", f"kill:{place}")


def _kill_in_load(source: random.Random) -> Fault:
    place = f"rank={_rank(source)},after={_after(source, 0.2)}@load"
    return Fault("SIGKILL while loading", f"kill:{place}")


def _hang_in_step(source: random.Random) -> Fault:
    return Fault("SIGSTOP in a step", f"hang:rank={_rank(source)}@step={_step(source)}")


def _hang_in_save(source: random.Random) -> Fault:
    place = f"rank={_rank(source)},after={_after(source, 0.1)}@save={_save(source)}"
    return Fault("SIGSTOP in a save", f"hang:{place}")


def _damaged(how: str, name: str, loses_newest: bool) -> Callable[[random.Random], Fault]:
    """Damage to the newest checkpoint, and a SIGKILL before there is a newer one."""

    def make(source: random.Random) -> Fault:
        saved = _save(source)
        step = saved + source.randint(1, SAVE_EVERY - 1)
        inject = f"corrupt-checkpoint:how={how}@save={saved};kill:rank={_rank(source)}@step={step}"
        return Fault(name, inject, loses_newest=loses_newest)

    return make


def _gpu_reported(source: random.Random) -> Fault:
    place = f"rank={_rank(source)}@step={_step(source)}"
    return Fault("GPU lost, as reported", f"nvml-lost:{place}", degrees=REDUCED)


def _gpu_lost(source: random.Random) -> Fault:
    outside = Outside("lose-gpu", _after(source, 0.2), _rank(source), _step(source))
    return Fault("GPU lost, as NVML says", outside=outside, degrees=REDUCED)


def _supervisor_in_training(source: random.Random) -> Fault:
    outside = Outside("kill-supervisor", _after(source, 0.3), at_step=_step(source))
    return Fault("supervisor killed in training", outside=outside)


def _supervisor_in_start(source: random.Random) -> Fault:
    outside = Outside("kill-supervisor", 3 + _after(source, 8))
    return Fault("supervisor killed while starting", outside=outside)


_KINDS = (
    _kill_in_step,
    _kill_any_time,
    _kill_in_save,
    _kill_in_start,
    _kill_in_load,
    _hang_in_step,
    _hang_in_save,
    _damaged("truncate", "newest checkpoint truncated", loses_newest=True),
    _damaged("flip", "newest checkpoint with a flipped bit", loses_newest=True),
    _damaged("no-tracker", "tracker file missing", loses_newest=False),
    _gpu_reported,
    _gpu_lost,
    _supervisor_in_training,
    _supervisor_in_start,
)
