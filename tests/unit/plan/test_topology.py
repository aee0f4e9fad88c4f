"""Rank numbering, replicas, groups, and the errors of a job shape that cannot run."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ntp.errors import PlanLookupError, PlanTopologyError
from megatron_ntp.plan.topology import (
    Topology,
    format_degrees,
    format_failed,
    parse_degrees,
    parse_failed,
)


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    replicas, nominal = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    pp, cp = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    groups = product(range(replicas), range(pp * cp))
    failed = []
    for replica, group in groups:  # at least one slot of each TP group lives
        dead = draw(st.sets(st.integers(0, nominal - 1), max_size=nominal - 1))
        failed += [(replica, group * nominal + slot) for slot in dead]
    return Topology.from_failed(replicas, nominal, failed, pp=pp, cp=cp)


def test_8_8_7_by_degrees_and_by_slot() -> None:
    topology = Topology.from_degrees((8, 8, 7))
    assert topology == Topology.from_failed(3, 8, {(2, 7)})
    assert topology.degrees == topology.dp_degrees == (8, 8, 7)
    assert topology.sync_degree == 7
    assert (topology.world_size, topology.nominal_world_size) == (23, 24)
    assert topology.extra_ranks == (7, 15)
    assert topology.tp_groups == (tuple(range(8)), tuple(range(8, 16)), tuple(range(16, 23)))
    assert topology.core_dp_groups == tuple((j, 8 + j, 16 + j) for j in range(7))
    assert not topology.is_uniform
    assert Topology.from_degrees((8, 8)).is_uniform


def test_lowest_degree_goes_last_and_equal_degrees_keep_their_order() -> None:
    topology = Topology.from_degrees((7, 8, 6, 8, 7))
    assert topology.dp_order == (1, 3, 0, 4, 2)
    assert topology.dp_degrees == (8, 8, 7, 7, 6)
    assert topology.distinct_degrees == (8, 7, 6)
    last = topology.rank(topology.world_size - 1)
    assert (last.replica, last.dp_rank, last.tp_rank, last.is_core) == (2, 4, 5, True)


@pytest.mark.parametrize(("replica", "slot"), list(product(range(3), range(4))))
def test_every_single_dead_slot_of_3_replicas_of_tp4(replica: int, slot: int) -> None:
    topology = Topology.from_failed(3, 4, {(replica, slot)})
    assert topology.degrees == tuple(3 if r == replica else 4 for r in range(3))
    assert topology.dp_order == (*(r for r in range(3) if r != replica), replica)
    assert topology.world_size == 11
    used = {(info.replica, info.slot) for info in topology.ranks}
    assert used == set(product(range(3), range(4))) - {(replica, slot)}
    reduced = [info for info in topology.ranks if info.replica == replica]
    assert [info.slot for info in reduced] == [s for s in range(4) if s != slot]
    assert [info.tp_rank for info in reduced] == [0, 1, 2]
    assert {info.domain for info in reduced} == {replica}
    assert all(info.is_core for info in reduced)
    assert topology.extra_ranks == (3, 7)
    assert topology.idle_slots(replica) == ()


def test_several_failed_in_one_replica_and_in_others() -> None:
    topology = Topology.from_failed(3, 8, [(1, 3), (1, 0), (0, 7), (1, 6)])
    assert topology.failed == ((0, 7), (1, 0), (1, 3), (1, 6))
    assert topology.degrees == (7, 5, 8)
    assert topology.dp_order == (2, 0, 1)
    assert topology.failed_slots(1) == (0, 3, 6)
    assert topology.live_slots(1, 0) == (1, 2, 4, 5, 7)


def test_pipeline_and_context_parallel_ranks_are_stage_major() -> None:
    topology = Topology.from_failed(2, 2, {(0, 5)}, pp=2, cp=2)
    # Slot 5 is in TP group 2: stage 1, cp 0. The other three groups of replica 0 idle a slot.
    assert topology.degrees == (1, 2)
    assert topology.dp_order == (1, 0)
    assert topology.idle_slots(0) == (1, 3, 7)
    assert topology.world_size == 12
    stage_0 = [(r.dp_rank, r.cp_rank, r.tp_rank, r.slot, r.domain) for r in topology.ranks[:6]]
    assert stage_0 == [
        (0, 0, 0, 0, 4),
        (0, 0, 1, 1, 4),
        (0, 1, 0, 2, 5),
        (0, 1, 1, 3, 5),
        (1, 0, 0, 0, 0),
        (1, 1, 0, 2, 1),
    ]
    assert [r.pp_rank for r in topology.ranks] == [0] * 6 + [1] * 6
    moved = topology.rank(10)
    assert (moved.replica, moved.slot, moved.domain, moved.domain_slot) == (0, 4, 2, 0)
    assert topology.core_dp_groups == ((0, 4), (2, 5), (6, 10), (8, 11))
    assert topology.core_dp_cp_groups == ((0, 2, 4, 5), (6, 8, 10, 11))
    assert topology.cp_groups == ((0, 2), (1, 3), (4, 5), (6, 8), (7, 9), (10, 11))
    assert topology.pp_groups == ((0, 6), (1, 7), (2, 8), (3, 9), (4, 10), (5, 11))
    assert topology.model_parallel_groups == ((0, 1, 6, 7), (2, 3, 8, 9), (4, 10), (5, 11))
    assert topology.domains(1) == (4, 5, 6, 7)


def test_degrees_alone_fail_the_last_slots_of_the_replica() -> None:
    topology = Topology.from_degrees((4, 2), pp=2)
    assert topology.failed == ((1, 6), (1, 7))
    assert topology.idle_slots(1) == (2, 3)
    assert Topology.from_degrees((3, 3), nominal_tp=4).failed == ((0, 3), (1, 3))


def test_degrees_and_failed_slots_that_agree() -> None:
    assert Topology.from_degrees((8, 7), 8, {(1, 2)}).live_slots(1, 0) == (0, 1, 3, 4, 5, 6, 7)


@given(topologies())
def test_ranks_of_any_topology(topology: Topology) -> None:
    assert [info.global_rank for info in topology.ranks] == list(range(topology.world_size))
    order = [(r.pp_rank, r.dp_rank, r.cp_rank, r.tp_rank) for r in topology.ranks]
    assert order == sorted(order)
    assert list(topology.dp_degrees) == sorted(topology.degrees, reverse=True)
    assert topology.ranks[-1].is_core
    for info in topology.ranks:
        assert topology.dp_order[info.dp_rank] == info.replica
        assert info.is_core == (info.tp_rank < topology.sync_degree) != info.is_extra
        assert info.slot // topology.nominal_tp == info.pp_rank * topology.cp + info.cp_rank
        assert info.domain in topology.domains(info.replica)
    assert sorted(topology.core_ranks + topology.extra_ranks) == list(range(topology.world_size))


@given(topologies())
def test_every_slot_is_used_failed_or_idle(topology: Topology) -> None:
    for replica in range(topology.num_replicas):
        used = [info.slot for info in topology.ranks if info.replica == replica]
        rest = topology.failed_slots(replica) + topology.idle_slots(replica)
        assert sorted((*used, *rest)) == list(range(topology.num_slots))


@given(topologies())
def test_groups_partition_the_ranks(topology: Topology) -> None:
    for groups in (
        topology.tp_groups,
        topology.cp_groups,
        topology.pp_groups,
        topology.model_parallel_groups,
    ):
        assert sorted(rank for group in groups for rank in group) == list(
            range(topology.world_size)
        )
    for groups in (topology.core_dp_groups, topology.core_dp_cp_groups):
        assert sorted(rank for group in groups for rank in group) == list(topology.core_ranks)
    for group in topology.core_dp_groups:
        assert [topology.rank(rank).dp_rank for rank in group] == list(range(topology.num_replicas))


@given(topologies())
def test_failed_slots_give_back_the_degrees(topology: Topology) -> None:
    pp, cp, nominal = topology.pp, topology.cp, topology.nominal_tp
    failed = parse_failed(format_failed(topology.failed))
    assert Topology.from_degrees(topology.degrees, nominal, failed, pp=pp, cp=cp) == topology
    by_degree = Topology.from_degrees(topology.degrees, nominal, pp=pp, cp=cp)
    assert by_degree.degrees == topology.degrees


# Errors


def refused(message: str, *arguments: object, **options: int) -> None:
    with pytest.raises(PlanTopologyError) as caught:
        Topology.from_failed(*arguments, **options)  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_dead_replica_says_to_drop_it() -> None:
    refused(
        "replica 1 has TP degree 0: all 2 slots of its TP group 1 have failed (failed slots: 2, 3)."
        " Drop the replica from the job and plan for 2 replicas",
        *(3, 2, [(1, 2), (1, 3)]),
        pp=2,
    )


def test_slots_and_replicas_out_of_range() -> None:
    refused("failed slot 3:0: replica 3 is outside 0..2 (the job has 3 replicas)", 3, 8, [(3, 0)])
    refused(
        "failed slot 0:32: slot 32 is outside 0..31 (a replica has pp 2 x cp 2 x tp 8 slots)",
        *(1, 8, [(0, 32)]),
        pp=2,
        cp=2,
    )
    refused("failed slot must be at least 0, got -1", 3, 8, [(0, -1)])
    refused("num_replicas must be at least 1, got 0", 0, 8)
    refused("cp must be at least 1, got 0", 1, 8, cp=0)
    refused("nominal_tp must be an integer, got 8.0 (float)", 1, 8.0)


def test_degrees_that_disagree_with_failed_slots_name_both() -> None:
    with pytest.raises(PlanTopologyError) as caught:
        Topology.from_degrees((8, 8, 7), failed={(1, 3)})
    message = str(caught.value)
    assert "degrees 8,8,7 disagree with failed slots 1:3, which leave degrees 8,7,8" in message
    assert "replica 1: degree 8 given, 7 left by failed slots [3]" in message
    assert "replica 2: degree 7 given, 8 left by failed slots []" in message
    with pytest.raises(PlanTopologyError, match="disagree with failed slots none"):
        Topology.from_degrees((8, 7), failed=())


@pytest.mark.parametrize(
    ("degrees", "nominal", "message"),
    [
        ((), None, "TP degree of at least one replica"),
        ((8, 0), None, "TP degree of replica 1 must be at least 1, got 0"),
        ((8, 9), 8, "TP degree of replica 1 is 9, above the nominal TP 8"),
        ((8, 7), 0, "nominal_tp must be at least 1, got 0"),
    ],
)
def test_impossible_degrees(degrees: tuple[int, ...], nominal: int | None, message: str) -> None:
    with pytest.raises(PlanTopologyError, match=message):
        Topology.from_degrees(degrees, nominal)


def test_lookups_out_of_range() -> None:
    topology = Topology.from_degrees((8, 8, 7))
    with pytest.raises(PlanLookupError, match=r"global rank 23 is outside 0\.\.22"):
        topology.rank(23)
    with pytest.raises(PlanLookupError, match=r"global rank -1 is outside 0\.\.22"):
        topology.rank(-1)
    with pytest.raises(PlanLookupError, match=r"replica 3 is outside 0\.\.2"):
        topology.failed_slots(3)
    with pytest.raises(PlanLookupError, match=r"TP group 1 is outside 0\.\.0"):
        topology.live_slots(0, 1)
    with pytest.raises(PlanLookupError, match="no parallel axis 'ep'; axes are tp, cp, dp, pp"):
        topology.groups("ep")


# Text


def test_parse() -> None:
    assert parse_degrees("8,8,7") == (8, 8, 7)
    assert parse_degrees(" 4 , 3 ") == (4, 3)
    assert parse_failed("1:3,2:0") == ((1, 3), (2, 0))
    assert parse_failed(" 1 : 3 ") == ((1, 3),)
    assert parse_failed("") == ()
    assert format_failed(((1, 3), (2, 0))) == "1:3,2:0"
    assert format_degrees((8,) * 510 + (7, 7, 6)) == "8x510,7,7,6"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8,x,7", r"TP degrees '8,x,7': item 1 is 'x', expected an integer of at least 1"),
        ("8,0", r"TP degrees '8,0': item 1 is '0'"),
        ("8,-7", r"TP degrees '8,-7': item 1 is '-7'"),
        ("8,,7", r"TP degrees '8,,7': item 1 is empty; write them like 8,8,7"),
        ("", r"TP degrees '': item 0 is empty"),
        ("8,²", r"item 1 is '²'"),
    ],
)
def test_degrees_that_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(PlanTopologyError, match=message):
        parse_degrees(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1", r"failed slots '1': item 0 is '1', expected replica:slot"),
        ("1:3,2:", r"failed slots '1:3,2:': item 1 is '2:', expected replica:slot"),
        ("1:-3", r"item 0 is '1:-3'"),
        ("1:2:3", r"item 0 is '1:2:3'"),
        ("1:3,", r"item 1 is empty; write them like 1:3,2:0"),
        ("1:3,1:3", r"'1:3' is named twice"),
    ],
)
def test_failed_slots_that_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(PlanTopologyError, match=message):
        parse_failed(text)
