"""keep, shrink and redistribute at 4+3: gradients are the mean over the samples really used.

Plain Megatron runs a global batch of just these samples. Which sample a replica reads is recorded
at the dataset.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import jobs
import pytest
from jobs import DISTRIBUTED, GPT2, Job
from logical import distances

BATCH = 8
DEGREES = (4, 3)
# The learning rate must not depend on the number of samples in a batch.
FLAGS = (*DISTRIBUTED, "--lr-decay-style", "constant", "--override-opt-param-scheduler")
# Microbatches per replica. 8 heads on 3 ranks are 3 on the slowest instead of 2, so a microbatch
# takes between 4/3 and 3/2 of the time, and 2 of them fit into the time of 4.
SHARES = {"keep": (4, 4), "shrink": (4, 2), "redistribute": (5, 3)}

policies = pytest.mark.parametrize("policy", SHARES)


def start() -> Path:
    return jobs.start(GPT2, FLAGS, global_batch=BATCH)


def ours(policy: str) -> Job:
    return jobs.nonuniform(
        GPT2,
        DEGREES,
        (*FLAGS, "--ntp-batch-policy", policy),
        load=start(),
        global_batch=BATCH,
        save_at=3,
        stop_at=4,
    )


def plain(policy: str) -> Job:
    used = sum(SHARES[policy])
    return jobs.uniform(GPT2, 1, 1, FLAGS, load=start(), global_batch=used, stop_at=4)


def samples(job: Job, step: int) -> list[list[int]]:
    """What each replica read, by DP rank."""
    found: list[list[int]] = [[] for _ in range(job.dp_size)]
    for rank in job.ranks:
        found[rank.dp_rank] += rank.steps[step].samples
    return found


@policies
def test_every_sample_is_used_once(policy: str) -> None:
    job, used = ours(policy), sum(SHARES[policy])
    for step in range(job.num_steps):
        read = samples(job, step)
        assert tuple(len(each) for each in read) == SHARES[policy]
        first = BATCH + step * used
        assert sorted(chain.from_iterable(read)) == list(range(first, first + used))


@policies
def test_first_step(policy: str) -> None:
    job, reference = ours(policy), plain(policy)
    used = sum(SHARES[policy])
    assert samples(reference, 0) == [list(range(BATCH, BATCH + used))]
    found = distances(job.grads(), reference.grads())
    print(f"gradients: {max(found.values()):.1e}")
    assert max(found.values()) <= 2e-6
    for step in range(3):
        assert job.losses[step] == pytest.approx(reference.losses[step], rel=1e-5)
        assert job.grad_norms[step] == pytest.approx(reference.grad_norms[step], rel=1e-5)


@policies
def test_consumed_samples(policy: str) -> None:
    job, used = ours(policy), sum(SHARES[policy])
    for rank in job.ranks:
        assert [step.consumed for step in rank.steps] == [BATCH + n * used for n in range(3)]


@pytest.mark.parametrize("policy", ["shrink", "redistribute"])
def test_resumes_with_the_next_sample(policy: str) -> None:
    job = ours(policy)
    resumed = jobs.nonuniform(
        GPT2,
        DEGREES,
        (*FLAGS, "--ntp-batch-policy", policy, "--ckpt-step", "3"),
        load=job.saved,
        global_batch=BATCH,
        stop_at=4,
    )
    assert [rank.steps[0].consumed for rank in resumed.ranks] == [
        rank.steps[2].consumed for rank in job.ranks
    ]
    assert samples(resumed, 0) == samples(job, 2)
    assert resumed.grad_norms[0] == pytest.approx(job.grad_norms[2], rel=1e-6)
