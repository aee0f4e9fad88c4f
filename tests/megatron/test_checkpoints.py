"""Checkpoints between plain and nonuniform jobs: what is loaded is bit by bit what was saved.

A job saves after iteration 2 and goes on for one step, in which its weights and optimizer state are
recorded; the job that loads is recorded in its first step. Both are compared as full tensors.
"""

from __future__ import annotations

from typing import Any

import jobs
import pytest
from jobs import BF16_LLAMA, DISTRIBUTED, GPT2, LLAMA, MANY_GROUPS, OVERLAP, Job, Model
from logical import unequal

SAVED_AT = 2
SAVING: dict[str, Any] = {"save_at": SAVED_AT, "stop_at": SAVED_AT + 1, "state_at": (1,)}
LOADING: dict[str, Any] = {"stop_at": SAVED_AT + 1, "state_at": (0,)}
FROM_SAVED = ("--ckpt-step", str(SAVED_AT))

KINDS = {
    "distributed": (LLAMA, DISTRIBUTED),
    "not-distributed": (GPT2, ()),
    "bf16": (BF16_LLAMA, DISTRIBUTED),
    "bf16-not-distributed": (jobs.BF16_GPT2, ()),
}
OVERLAPPED = {"distributed": (*OVERLAP, *MANY_GROUPS)}


def saved_by_plain(kind: str) -> Job:
    model, flags = KINDS[kind]
    return jobs.uniform(model, 2, 1, flags, load=jobs.start(model, flags), **SAVING)


def saved_by_ours(kind: str, degrees: tuple[int, ...] = (4, 3), nominal_tp: int = 4) -> Job:
    model, flags = KINDS[kind]
    flags = (*flags, *OVERLAPPED.get(kind, ()))
    loaded = jobs.start(model, KINDS[kind][1])
    return jobs.nonuniform(model, degrees, flags, nominal_tp=nominal_tp, load=loaded, **SAVING)


def loaded_by_plain(kind: str, saved: Job, tp: int) -> Job:
    model, flags = KINDS[kind]
    return jobs.uniform(model, tp, 1, (*flags, *FROM_SAVED), load=saved.saved, **LOADING)


def loaded_by_ours(kind: str, saved: Job, degrees: tuple[int, ...], nominal_tp: int = 4) -> Job:
    model, flags = KINDS[kind]
    return jobs.nonuniform(
        model,
        degrees,
        (*flags, *FROM_SAVED),
        nominal_tp=nominal_tp,
        load=saved.saved,
        **LOADING,
    )


def check(saved: Job, loaded: Job) -> None:
    """Weights and optimizer state bit-equal, counters right, and the next step the same."""
    for dp_rank in range(loaded.dp_size):
        assert unequal(loaded.weights(0, dp_rank), saved.weights(1)) == []
    wanted, found = saved.state(1), loaded.state(0)
    kinds = ["exp_avg", "exp_avg_sq"] + (["main"] if "--bf16" in saved.model.flags else [])
    assert list(wanted) == list(found) == kinds
    for kind, tensors in wanted.items():
        assert all(tensor.any() for tensor in tensors.values()), f"{kind} is nothing but zeros"
        assert unequal(found[kind], tensors) == [], kind
    for rank in loaded.ranks:
        step = rank.steps[0]
        assert (step.iteration, step.consumed) == (SAVED_AT, SAVED_AT * jobs.GLOBAL_BATCH)
        assert set(step.adam_steps) == (set() if rank.is_extra else {SAVED_AT})
    tolerance = 1e-5 if kinds[-1] != "main" else 2e-2
    assert loaded.grad_norms[0] == pytest.approx(saved.grad_norms[1], rel=tolerance)
    no_random_state = "RNG state will be ignored"
    assert (no_random_state in "".join(loaded.training.stdout)) == nominal_differs(saved, loaded)


def nominal_differs(saved: Job, loaded: Job) -> bool:
    """Whether Megatron finds another TP degree than the checkpoint's."""
    return nominal(saved) != nominal(loaded)


def nominal(job: Job) -> int:
    rank = job.ranks[0]
    return rank.tp_size if rank.plan is None else rank.plan.topology.nominal_tp


@pytest.mark.parametrize(
    ("kind", "tp"),
    [
        ("distributed", 4),
        ("distributed", 2),
        ("distributed", 1),
        ("not-distributed", 4),
        ("not-distributed", 1),
        ("bf16", 4),
    ],
)
def test_plain_megatron_reads_4_and_3(kind: str, tp: int) -> None:
    saved = saved_by_ours(kind)
    check(saved, loaded_by_plain(kind, saved, tp))


@pytest.mark.parametrize(
    ("kind", "degrees"),
    [
        ("distributed", (4, 3)),
        ("distributed", (4, 3, 2)),
        ("bf16", (4, 3)),
        ("bf16-not-distributed", (4, 3)),
    ],
    ids=str,
)
def test_4_and_3_read_plain_megatron(kind: str, degrees: tuple[int, ...]) -> None:
    saved = saved_by_plain(kind)
    check(saved, loaded_by_ours(kind, saved, degrees))


def test_without_any_replica_of_full_degree() -> None:
    """3+3 of TP 4: nobody has the fourth rank's random state, and plain TP 4 asks for it."""
    saved = saved_by_ours("distributed", (3, 3))
    check(saved, loaded_by_plain("distributed", saved, 4))


@pytest.mark.parametrize(("degrees", "nominal_tp"), [((4, 2), 4), ((2, 1), 2)], ids=str)
def test_other_degrees(degrees: tuple[int, ...], nominal_tp: int) -> None:
    saved = saved_by_ours("distributed")
    check(saved, loaded_by_ours("distributed", saved, degrees, nominal_tp))


def test_the_vocabulary_may_be_padded_to_another_size() -> None:
    """Plain TP 1 pads 53 rows to 53; 2+1 have 56. The 53 real rows are the same."""
    model, flags = KINDS["distributed"]
    small = Model(**{**vars(model), "vocab": 53, "vocab_flag": 52})
    large = Model(**{**vars(model), "vocab": 56, "vocab_flag": 52})
    start = jobs.start(small, flags)
    ours = jobs.nonuniform(large, (2, 1), flags, load=start, **LOADING)
    plain = jobs.uniform(small, 1, 1, flags, load=start, **LOADING)
    wanted = plain.weights(0)
    for dp_rank in range(2):
        found = ours.weights(0, dp_rank)
        for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            assert found[name].shape == (56, model.hidden)
            found[name] = found[name][:53]
        assert unequal(found, wanted) == []
