"""Groups, check-in and exchanges of unequal replicas, on gloo."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RanksFailed, run_ranks

from megatron_ntp.comm.exchange import NUM_SLOTS, Exchange, Staging, TrafficCounters
from megatron_ntp.comm.groups import check_in, create_groups

# --- groups -------------------------------------------------------------------------------------

KINDS = {"tp": [[0, 1], [2]], "dp": [[0, 2], [1]], "world": [[2, 0, 1]], "alone": [[0], [1], [2]]}


def groups() -> dict[str, Any]:
    dist.init_process_group("gloo")
    created = []
    original = dist.new_group

    def record(ranks: list[int], **options: Any) -> Any:
        created.append((ranks, options["backend"]))
        return original(ranks, **options)

    dist.new_group = record
    mine = create_groups(KINDS, timedelta(seconds=20), frozenset({"dp"}))
    sums = {}
    for kind, membership in mine.items():
        total = torch.tensor([10 ** dist.get_rank()])
        dist.all_reduce(total, group=membership.group)
        sums[kind] = int(total)
    return {
        "created": created,
        "ranks": {kind: list(membership.global_ranks) for kind, membership in mine.items()},
        "sums": sums,
    }


def test_groups_are_created_in_one_order_and_hold_their_ranks() -> None:
    answers = run_ranks(groups, 3)
    expected = [
        (ranks, "gloo" if kind == "dp" else None) for kind, each in KINDS.items() for ranks in each
    ]
    for rank, answer in enumerate(answers):
        assert answer["created"] == expected, "every rank creates every group, in one order"
        for kind, each in KINDS.items():
            members = next(ranks for ranks in each if rank in ranks)
            assert answer["ranks"][kind] == members
            assert answer["sums"][kind] == sum(10**member for member in members)


def wrong_groups(kinds: dict[str, list[list[int]]]) -> None:
    dist.init_process_group("gloo")
    create_groups(kinds, timedelta(seconds=20))


@pytest.mark.parametrize("each", [[[0, 1]], [[0, 1], [1, 2]]], ids=["one left out", "one twice"])
def test_groups_must_hold_each_rank_once(each: list[list[int]]) -> None:
    with pytest.raises(RanksFailed, match="kind 'tp' must hold each rank of the job once"):
        run_ranks(wrong_groups, 3, kinds={"tp": each})


# --- check-in -----------------------------------------------------------------------------------


def check_ins(plans: list[Any], wait_s: float) -> tuple[str, float]:
    """What check_in says on this rank, and how long it took; a rank without a plan never comes."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if plans[rank] is None:
        return "never came", 0.0
    store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=20)))
    began_s = time.monotonic()
    try:
        check_in(store, rank, world_size, plans[rank], wait_s)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began_s
    return "", time.monotonic() - began_s


PLAN = [("degrees", "2,1"), ("hidden_size", "16")]


def test_check_in_of_equal_plans() -> None:
    answers = run_ranks(check_ins, 4, plans=[PLAN] * 4, wait_s=60.0)
    assert [said for said, _ in answers] == [""] * 4


def notes_of_all() -> list[str]:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=20)))
    return check_in(store, rank, world_size, PLAN, 60.0, note=f"from {rank}")


def test_check_in_passes_notes_on() -> None:
    assert run_ranks(notes_of_all, 3) == [["from 0", "from 1", "from 2"]] * 3


@pytest.mark.parametrize(
    ("missing", "named"), [({2}, "rank 2 of 4"), ({0, 3}, "ranks 0, 3 of 4"), ({0}, "rank 0 of 4")]
)
def test_check_in_names_missing_ranks_when_time_is_up(missing: set[int], named: str) -> None:
    plans = [None if rank in missing else PLAN for rank in range(4)]
    answers = run_ranks(check_ins, 4, plans=plans, wait_s=5.0)
    for rank in set(range(4)) - missing:
        said, took_s = answers[rank]
        assert said.startswith(f"StartError: {named} did not start within 5 s"), said
        assert 5.0 <= took_s < 15.0


@pytest.mark.parametrize(
    ("odd", "named"),
    [
        ([("degrees", "1,2"), ("hidden_size", "8")], "degrees is 2,1 on rank 0, 1,2 on rank 1"),
        ([("degrees", "2,1"), ("hidden_size", "8")], "hidden_size is 16 on rank 0, 8 on rank 1"),
        ([("degrees", "2,1"), ("vocab", "8")], "entry 'hidden_size' on rank 0, 'vocab' on rank 1"),
        ([("degrees", "2,1")], "2 entries on rank 0, 1 on rank 1"),
    ],
)
def test_check_in_names_ranks_with_another_plan(odd: Any, named: str) -> None:
    answers = run_ranks(check_ins, 3, plans=[PLAN, odd, PLAN], wait_s=60.0)
    for said, _ in answers:
        assert "the plan of rank 1 is not that of ranks 0, 2" in said
        assert f"first difference: {named}" in said


# --- exchanges ----------------------------------------------------------------------------------

# Elements that each extra rank (of 2, 3, 4) trades with each core rank (of 0, 1); rank 4: nothing.
SHARES = {(2, 0): 3, (2, 1): 5, (3, 1): 4}
NUM_RANKS = 5


def value(name: str, sender: int, receiver: int, numel: int) -> torch.Tensor:
    return torch.arange(numel) + 10 * sender + 100 * receiver + 1000 * len(name)


def views_of(rank: int, name: str, sends: bool) -> dict[int, list[torch.Tensor]]:
    """Strided views, two a pair where that is possible; filled if this rank sends."""
    found: dict[int, list[torch.Tensor]] = {}
    for (extra, core), numel in SHARES.items():
        if rank not in (extra, core):
            continue
        peer = core if rank == extra else extra
        strided = torch.zeros(numel, 2, dtype=torch.int64)[:, 0]
        if sends:
            strided.copy_(value(name, rank, peer, numel))
        found[peer] = [strided[:2], strided[2:]]
    return found


class Calls:
    """Counts collectives and remembers their splits."""

    def __init__(self) -> None:
        self.splits: list[tuple[list[int], list[int]]] = []
        original = dist.all_to_all_single

        def record(out: Any, into: Any, receive: Any, send: Any, **options: Any) -> Any:
            self.splits.append((receive, send))
            return original(out, into, receive, send, **options)

        dist.all_to_all_single = record


def exchange_both_ways(dtypes: list[str], rounds: int) -> dict[str, Any]:
    """In a rank: gradients to core, then parameters to extra, in several dtypes and rounds."""
    dist.init_process_group("gloo")
    calls, rank = Calls(), dist.get_rank()
    counters, bad, exchanges, nbytes = TrafficCounters(), [], [], 0
    for name, sends in (("grad", rank >= 2), ("param!", rank < 2)):
        staging = Staging(torch.device("cpu"))
        for dtype in (getattr(torch, each) for each in dtypes):
            filled = views_of(rank, name, sends)
            views = {peer: [view.to(dtype) for view in each] for peer, each in filled.items()}
            exchanges.append(
                (Exchange(name, dist.group.WORLD, views, sends, dtype, staging, counters), views)
            )
        nbytes += staging.nbytes
    for turn in range(rounds):
        for exchange, views in exchanges:
            exchange.start(turn % NUM_SLOTS)
            exchange.finish()
            if exchange.sent_nbytes:
                continue
            for peer, each in views.items():
                found = torch.cat(each)
                expected = value(exchange.name, peer, rank, found.numel()).to(found.dtype)
                if not found.equal(expected):
                    bad.append((turn, str(found.dtype), exchange.name, peer))
                for view in each:
                    view.zero_()
    return {"bad": bad, "counters": vars(counters), "splits": calls.splits, "nbytes": nbytes}


def late_reserve() -> str:
    staging = Staging(torch.device("cpu"))
    staging.reserve("send", torch.float32, 2)
    staging.buffer("send", torch.float32, 0, 2)
    try:
        staging.reserve("send", torch.float32, 3)
    except AssertionError as error:
        return str(error)
    return ""


def test_staging_does_not_grow_once_it_is_in_use() -> None:
    assert "in use" in late_reserve()


def test_exchanges_move_the_right_pieces_in_one_collective_each() -> None:
    dtypes = ["float32", "bfloat16", "float64"]
    answers = run_ranks(exchange_both_ways, NUM_RANKS, dtypes=dtypes, rounds=3)
    itemsizes = 4 + 2 + 8
    for rank, answer in enumerate(answers):
        assert answer["bad"] == []
        own = sum(numel for pair, numel in SHARES.items() if rank in pair)
        assert answer["counters"]["exchanges"] == len(answer["splits"]) == 3 * 2 * len(dtypes)
        # A rank sends in one direction, exactly its share: no padding, no parameter twice.
        assert answer["counters"]["bytes_sent"] == 3 * own * itemsizes
        # Two slots for sending and two for receiving, however many rounds.
        assert answer["nbytes"] == NUM_SLOTS * 2 * own * itemsizes
        expected = [SHARES.get((max(rank, p), min(rank, p)), 0) for p in range(NUM_RANKS)]
        for receive, send in answer["splits"]:
            assert sorted((sum(receive), sum(send))) == [0, own]
            assert [a + b for a, b in zip(receive, send, strict=True)] == expected


def two_in_flight() -> list[list[int]]:
    """Exchange k + 1 starts before k is finished, in the other slot; then both slots again."""
    dist.init_process_group("gloo")
    rank, counters, staging = dist.get_rank(), TrafficCounters(), Staging(torch.device("cpu"))
    sends = rank == 1
    tensors = [torch.full((3 + k,), k + 1 if sends else 0) for k in range(4)]
    exchanges = [
        Exchange(f"k{k}", dist.group.WORLD, {1 - rank: [t]}, sends, torch.int64, staging, counters)
        for k, t in enumerate(tensors)
    ]
    exchanges[0].start(0)
    for k in range(1, 4):
        exchanges[k].start(k % NUM_SLOTS)
        exchanges[k - 1].finish()
    exchanges[3].finish()
    exchanges[2].start(0)  # an exchange is used again every step
    exchanges[2].finish()
    return [tensor.tolist() for tensor in tensors]


def test_two_exchanges_may_be_under_way() -> None:
    for tensors in run_ranks(two_in_flight, 2):
        assert tensors == [[k + 1] * (3 + k) for k in range(4)]


def peer_dies() -> str:
    dist.init_process_group("gloo", timeout=timedelta(seconds=10))
    rank = dist.get_rank()
    exchange = Exchange(
        "gradients of layers 0-3",
        dist.group.WORLD,
        {1 - rank: [torch.zeros(1000)]},
        rank == 0,
        torch.float32,
        Staging(torch.device("cpu")),
        TrafficCounters(),
    )
    if rank == 1:
        return "gone"
    try:
        exchange.start(0)
        exchange.finish()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing said"


def test_an_exchange_whose_peer_died_says_what_and_with_whom() -> None:
    said = run_ranks(peer_dies, 2)[0]
    assert said.startswith("NTPError: global rank 0: exchange 'gradients of layers 0-3'"), said
    assert "global ranks [0, 1]" in said


def misuse(how: str) -> None:
    dist.init_process_group("gloo")
    tensor = torch.zeros(1, dtype=torch.float64 if how == "dtype" else torch.float32)
    exchange = Exchange(
        "x",
        dist.group.WORLD,
        {0: [tensor]},
        True,
        torch.float32,
        Staging(torch.device("cpu")),
        TrafficCounters(),
    )
    if how == "start":
        exchange._work = object()  # type: ignore[assignment]
        exchange.start(0)
    exchange.finish()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("dtype", "is for torch.float32 but got views of {torch.float64}"),
        ("start", "exchange 'x' is already under way"),
        ("finish", "exchange 'x' was not started"),
    ],
)
def test_misuse_is_our_own_bug(how: str, said: str) -> None:
    with pytest.raises(RanksFailed) as failure:
        run_ranks(misuse, 1, how=how)
    assert said in str(failure.value)
