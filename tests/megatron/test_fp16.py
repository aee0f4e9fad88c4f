"""fp16 with overflows: all ranks skip the step, extra ranks too, and go on as plain Megatron does.

The loss scale grows until steps overflow by themselves. In another step one gradient is made
infinite, in the nonuniform job on an extra rank, whose gradients only core ranks look at.
"""

from __future__ import annotations

import jobs
import pytest
from jobs import DISTRIBUTED, LLAMA, OVERLAP, Job, Model

FP16 = Model(
    **{
        **vars(LLAMA),
        "name": "llama-fp16",
        "flags": LLAMA.flags
        + "--fp16 --hysteresis 1 --loss-scale-window 2 --initial-loss-scale 65536",
    }
)
NUM_STEPS = 11
POISONED = 2


def plain(tp: int, flags: tuple[str, ...] = DISTRIBUTED) -> Job:
    """Two replicas: the more microbatches a replica has, the later its fp16 gradients overflow."""
    start = jobs.start(FP16, flags)
    poison = (POISONED, 0, tp - 1)
    return jobs.uniform(FP16, tp, 2, flags, load=start, stop_at=NUM_STEPS + 1, poison=poison)


def ours(flags: tuple[str, ...], start_flags: tuple[str, ...]) -> Job:
    start = jobs.start(FP16, start_flags)
    poison = (POISONED, 0, 3)
    return jobs.nonuniform(FP16, (4, 3), flags, load=start, stop_at=NUM_STEPS + 1, poison=poison)


def skipped(job: Job) -> list[bool]:
    """By step; every rank must say the same."""
    said = [[not step.answers[0] for step in rank.steps] for rank in job.ranks]
    assert all(each == said[0] for each in said), "ranks disagree on which steps were skipped"
    return said[0]


def loss_scales(job: Job) -> list[float]:
    said = [[step.loss_scale for step in rank.steps] for rank in job.ranks]
    assert all(each == said[0] for each in said), "ranks disagree on the loss scale"
    return said[0]


@pytest.mark.parametrize(
    "flags", [(*DISTRIBUTED, *OVERLAP), ()], ids=["distributed-overlap", "not-distributed"]
)
def test_overflow(flags: tuple[str, ...]) -> None:
    job = ours(flags, tuple(flag for flag in flags if flag in DISTRIBUTED))
    references = [plain(tp) for tp in (1, 2)]
    assert skipped(job) == skipped(references[0])
    assert loss_scales(job) == loss_scales(references[0])
    print(f"skipped {skipped(job)}, loss scale {loss_scales(job)}")
    assert skipped(job)[POISONED] and 1 < sum(skipped(job)) < NUM_STEPS / 2
    losses = [each.losses for each in references]
    spread = max(abs(a - b) / b for a, b in zip(*losses, strict=True))
    assert job.losses == pytest.approx(losses[0], rel=3 * spread)
    print(f"loss: plain TP 1 and 2 are {spread:.1e} apart")
