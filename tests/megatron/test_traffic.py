"""What nonuniform TP moves and keeps in each step, counted where it happens.

The number of all-to-alls and the bytes that each rank put into them come from torch.distributed
itself; the minimum is worked out here from the sizes of the model. The statistics that a run writes
must say the same.
"""

from __future__ import annotations

import json
from pathlib import Path

import jobs
import pytest
from jobs import Case, Job, Model

FP32 = 4
POSITIONS = 16


def balanced(units: int, parts: int) -> list[int]:
    return [units // parts + (part < units % parts) for part in range(parts)]


def extra_units(units: int, degree: int, sync_degree: int) -> int:
    """Units that a replica's extra ranks compute."""
    return sum(balanced(units, degree)[sync_degree:])


def minimum_numel(model: Model, degree: int, sync_degree: int) -> tuple[int, int]:
    """Fewest elements that one replica moves per step: (gradients, parameters).

    A KV group is the rows of its query heads, key and value, and as many columns of the projection
    as it has query elements; an FFN unit a row of fc1 (two if gated) and a column of fc2; a
    vocabulary row is in the embedding and, if untied, in the output layer.
    """
    biases = "--disable-bias-linear" not in model.flags
    qkv_biases = biases or "--add-qkv-bias" in model.flags
    heads = model.heads // model.groups
    qkv_rows, fc1_rows = (heads + 2) * model.kv_channels, 2 if model.gated else 1
    group = qkv_rows * (model.hidden + qkv_biases) + heads * model.kv_channels * model.hidden
    ffn = fc1_rows * (model.hidden + biases) + model.hidden
    row = model.hidden * (2 if "--untie" in model.flags else 1)
    tp_numel = (
        model.layers * group * extra_units(model.groups, degree, sync_degree)
        + model.layers * ffn * extra_units(model.ffn, degree, sync_degree)
        + row * extra_units(model.vocab, degree, sync_degree)
    )
    norm = model.hidden * (1 if "RMSNorm" in model.flags else 2)
    norms = norm * (2 * model.layers + 1)
    if "--qk-layernorm" in model.flags:
        norms += model.layers * 2 * 2 * model.kv_channels
    output_biases = 2 * model.hidden * model.layers if biases else 0
    positions = POSITIONS * model.hidden if "learned_absolute" in model.flags else 0
    replicated = norms + output_biases + positions
    return tp_numel, tp_numel + replicated * (degree - sync_degree)


def expected_exchanges(case: Case) -> int:
    """Per step: two for each reshard group, or one where a group has no tensor-parallel parameters.

    Groups are runs of whole layers, the embedding and the output among them, each closed once it
    holds as many elements as a bucket. Here any layer does, if buckets are small at all.
    """
    model = case.model
    if set(jobs.MANY_GROUPS) <= set(case.flags):
        bucket = int(jobs.MANY_GROUPS[1])
    elif set(jobs.OVERLAP_GRADS) <= set(case.flags):
        bucket = int(jobs.OVERLAP_GRADS[2])
    else:
        return 2
    embedding = model.hidden * model.vocab
    if "learned_absolute" in model.flags:
        embedding += POSITIONS * model.hidden
    groups = model.layers + 1 + (embedding >= bucket)
    tied = "--untie" not in model.flags
    return 2 * groups - tied  # of a tied output, only the final norm is left


@pytest.mark.parametrize("case", jobs.CASES, ids=str)
def test_two_exchanges_per_group_and_the_fewest_bytes(case: Case) -> None:
    ours = case.ours()
    sync_degree = min(case.degrees)
    for dp_rank, degree in enumerate(case.degrees):
        replica = [rank for rank in ours.ranks if rank.dp_rank == dp_rank]
        # The exchanges between two optimizer calls: parameters of one step, gradients of the next.
        for step in range(1, ours.num_steps):
            counts = {len(rank.steps[step].exchanges) for rank in replica}
            expected = 0 if degree == sync_degree else expected_exchanges(case)
            assert counts == {expected}, f"degree {degree}, step {step}"
            sent = {rank.tp_rank: sum(rank.steps[step].exchanges) for rank in replica}
            grads, params = minimum_numel(case.model, degree, sync_degree)
            from_extra = sum(nbytes for rank, nbytes in sent.items() if rank >= sync_degree)
            from_core = sum(nbytes for rank, nbytes in sent.items() if rank < sync_degree)
            if degree > sync_degree:
                assert (from_extra, from_core) == (grads * FP32, params * FP32)
            else:
                assert from_extra == from_core == 0


@pytest.mark.parametrize("case", jobs.CASES, ids=str)
def test_extra_ranks_hold_no_optimizer_state(case: Case) -> None:
    for rank in case.ours().ranks:
        assert rank.is_extra == (rank.tp_rank >= min(case.degrees))
        assert (rank.optimizer_nbytes == 0) == rank.is_extra


@pytest.mark.parametrize("case", jobs.CASES, ids=str)
def test_gradient_memory_for_extra_ranks(case: Case) -> None:
    """Core ranks hold at most n/S - 1 of their own gradients more, summed over a replica."""
    ours = case.ours()
    sync_degree = min(case.degrees)
    for dp_rank, degree in enumerate(case.degrees):
        own = held = 0
        for rank in ours.ranks:
            if rank.dp_rank != dp_rank or rank.is_extra:
                continue
            sizes = [(numel(p.shape), numel(p.sync_shape or ())) for p in rank.params.values()]
            rank_own, rank_sync = (sum(each) for each in zip(*sizes, strict=True))
            own, held = own + rank_own, held + rank_sync - rank_own
        assert held <= (degree / sync_degree - 1) * own
        assert (held == 0) == (degree == sync_degree)


def numel(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


@pytest.fixture(scope="module")
def stats_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stats")


@pytest.fixture(scope="module")
def even_job(stats_dir: Path) -> Job:
    """12 groups, 48 FFN columns, 60 rows: 4 ranks and 3 cut them evenly, so n/S - 1 is exact."""
    flags = (*jobs.DISTRIBUTED, "--ntp-stats-dir", str(stats_dir))
    return jobs.nonuniform(jobs.EVEN, (4, 3), flags, stop_at=2)


def test_even_units_cost_each_core_rank_the_same(even_job: Job) -> None:
    for rank in even_job.ranks:
        if rank.is_extra or rank.tp_size == 3:
            continue
        for name, param in rank.params.items():
            own, sync = numel(param.shape), numel(param.sync_shape or ())
            assert sync - own in (0, own / 3), name


def test_statistics_say_what_was_counted(even_job: Job, stats_dir: Path) -> None:
    files = sorted(stats_dir.glob("*.json"))
    assert len(files) == 7
    for file, rank in zip(files, even_job.ranks, strict=True):
        said = json.loads(file.read_text())
        # Two steps: gradients of both, parameters of both; the recording saw all but the last.
        seen = rank.steps[1].exchanges
        assert said["steps"] == even_job.num_steps == 2
        assert said["is_extra"] == rank.is_extra
        assert said["exchanges"] == 2 * len(seen)
        assert said["bytes_sent"] == 2 * sum(seen)
        grads, params = minimum_numel(jobs.EVEN, rank.tp_size, 3)
        minimum = {"gradients": grads * FP32, "parameters": params * FP32}
        assert said["minimum_bytes_per_step"] == minimum
        assert said["optimizer_state_bytes"] == rank.optimizer_nbytes
        held = said["gradient_bytes"]["held_for_extra_ranks"]
        assert (held > 0) == (rank.tp_size == 4 and not rank.is_extra)
