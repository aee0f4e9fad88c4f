"""Which GPU of which node is which rank: exact cases, and laws for any nodes."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ntp.errors import PlanFormatError, PlanTopologyError
from megatron_ntp.launchers.nodes import (
    Node,
    Placement,
    Shape,
    Slot,
    distrust_numbers,
    place,
    silent_node,
)
from megatron_ntp.plan.topology import Topology, parse_failed


def node(host: str, num_slots: int, dead: str = "", block: str = "") -> Node:
    """A node whose slots in `dead` ("02") are gone."""
    slots = [Slot(None, f"bad {i}") if str(i) in dead else Slot(str(i)) for i in range(num_slots)]
    return Node(host, tuple(slots), block)


def agents(placement: Placement) -> list[tuple[str, int, str]]:
    return [(a.host, a.first_rank, ",".join(a.devices)) for a in placement.agents]


def test_the_node_of_the_reduced_replica_comes_last() -> None:
    nodes = [node("a", 4, "1"), node("b", 4), node("c", 4)]
    found = place(nodes, Shape(tp=4, gpus_per_node=4))
    assert found.degrees == (3, 4, 4) and found.failed == "0:1"
    assert agents(found) == [("b", 0, "0,1,2,3"), ("c", 4, "0,1,2,3"), ("a", 8, "0,2,3")]
    assert found.world_size == 11
    assert [(e.host, e.slot, e.reason) for e in found.excluded] == [("a", 1, "bad 1")]
    assert found.agents_of("a") == ((2, found.agents[2]),)


def test_a_node_that_lost_its_driver_offers_nothing() -> None:
    """Others tell that this is a job of GPUs."""
    bare, dead = node("a", 2), silent_node("c", 2)
    assert distrust_numbers([bare, dead]) == (bare, dead)
    by_uuid = Node("b", (Slot(None, "lost"), Slot("GPU-1")))
    found = distrust_numbers([bare, by_uuid, dead])
    assert found[1:] == (by_uuid, dead) and found[0].num_dead == 2
    assert "no driver" in found[0].slots[0].reason


def test_a_healthy_job_is_plain() -> None:
    found = place([node("a", 2), node("b", 2)], Shape(tp=2, gpus_per_node=2))
    assert found.failed == "" and found.excluded == ()
    assert agents(found) == [("a", 0, "0,1"), ("b", 2, "0,1")]


def test_several_tp_groups_in_a_node_need_several_torchruns() -> None:
    nodes = [node("a", 4, "0"), node("b", 4, "3")]
    found = place(nodes, Shape(tp=2, gpus_per_node=4))
    assert found.degrees == (1, 2, 2, 1) and found.failed == "0:0,3:1"
    assert agents(found) == [("a", 0, "2,3"), ("b", 2, "0,1"), ("a", 4, "1"), ("b", 5, "2")]
    assert [rank for rank, _ in found.agents_of("b")] == [1, 3]


def test_a_tp_group_of_several_nodes() -> None:
    nodes = [node("a", 2, "0"), node("b", 2), node("c", 2), node("d", 2)]
    found = place(nodes, Shape(tp=4, gpus_per_node=2))
    assert found.degrees == (3, 4) and found.failed == "0:0"
    assert agents(found) == [("c", 0, "0,1"), ("d", 2, "0,1"), ("a", 4, "1"), ("b", 5, "0,1")]


def test_a_dead_node_inside_a_tp_group_has_no_torchrun() -> None:
    nodes = [node("a", 2, "01"), node("b", 2), node("c", 2), node("d", 2)]
    found = place(nodes, Shape(tp=4, gpus_per_node=2))
    assert found.degrees == (2, 4)
    assert [a.host for a in found.agents] == ["c", "d", "b"]
    assert found.agents_of("a") == ()


def test_pipeline_stages_and_idle_slots() -> None:
    nodes = [node("a", 2), node("b", 2, "1"), node("c", 2), node("d", 2)]
    found = place(nodes, Shape(tp=2, pp=2, gpus_per_node=2))
    assert found.degrees == (1, 2) and found.failed == "0:3"
    assert agents(found) == [("c", 0, "0,1"), ("a", 2, "0"), ("d", 3, "0,1"), ("b", 5, "0")]
    idle = next(e for e in found.excluded if e.host == "a")
    assert idle.slot == 1 and "weaker" in idle.reason


def test_spares_take_the_place_of_the_most_damaged() -> None:
    nodes = [node("a", 2, "0"), node("b", 2), silent_node("c", 2), node("d", 2)]
    found = place(nodes, Shape(tp=2, gpus_per_node=2, num_replicas=2))
    assert found.spare_hosts == ("a", "c") and found.failed == ""
    assert [a.host for a in found.agents] == ["b", "d"]
    found = place(nodes, Shape(tp=2, gpus_per_node=2, num_replicas=3))
    assert found.spare_hosts == ("c",) and found.degrees == (1, 2, 2)


def test_blocks_hold_whole_tp_groups() -> None:
    names = [("a", "x"), ("b", "y"), ("c", "x"), ("d", "y"), ("e", "y")]
    nodes = [node(host, 2, block=block) for host, block in names]
    found = place(nodes, Shape(tp=4, gpus_per_node=2, num_replicas=2))
    assert [a.host for a in found.agents] == ["a", "c", "b", "d"]
    assert found.spare_hosts == ("e",)
    with pytest.raises(PlanTopologyError, match=r"2 nodes of one block.*--segment=2"):
        place([node("a", 2, block="x"), node("b", 2, block="y")], Shape(4, gpus_per_node=2))


def test_devices_keep_the_names_they_were_reported_with() -> None:
    slots = (Slot("GPU-aa"), Slot(None, "gone"), Slot("7"))
    found = place(
        [Node("a", slots), Node("b", (Slot("0"), Slot("1"), Slot("2")))],
        Shape(tp=3, gpus_per_node=3),
    )
    assert found.agents[-1].devices == ("GPU-aa", "7")
    assert found.agents[-1].slots == (0, 2)


@pytest.mark.parametrize(
    ("nodes", "shape", "message"),
    [
        ([node("a", 4), node("b", 4)], Shape(3, gpus_per_node=4), "one must divide the other"),
        ([node("a", 4)], Shape(4, gpus_per_node=8), "reported 4 slots, the job has 8"),
        ([node("a", 2), node("a", 2)], Shape(2, gpus_per_node=2), "named twice: a"),
        ([node("a", 2)] * 0, Shape(2, gpus_per_node=2), "no multiple"),
        ([node(h, 2) for h in "abc"], Shape(4, gpus_per_node=2), "the nodes left over are spares"),
        ([node("a", 2)], Shape(2, gpus_per_node=2, num_replicas=2), "do not fit"),
        ([node(h, 4) for h in "ab"], Shape(2, gpus_per_node=4, num_replicas=3), "do not fill"),
        ([node("a", 2, "01"), node("b", 2)], Shape(2, gpus_per_node=2), "Drop the replica"),
    ],
)
def test_what_cannot_be_placed(nodes: list[Node], shape: Shape, message: str) -> None:
    with pytest.raises(PlanTopologyError, match=message):
        place(nodes, shape)


def test_files() -> None:
    one = node("a", 4, "13", "block0")
    assert Node.from_json(one.to_json()) == one
    found = place([one, node("b", 4)], Shape(tp=4, gpus_per_node=4, num_replicas=1))
    assert Placement.from_json(found.to_json()) == found
    for text in ("", "[]", "{}", found.to_json().replace('"version": 1', '"version": 2')):
        with pytest.raises(PlanFormatError):
            Placement.from_json(text)


def test_table_names_everything() -> None:
    nodes = [node("a", 4, "1"), node("b", 4), node("c", 4)]
    table = place(nodes, Shape(tp=4, gpus_per_node=4, num_replicas=2)).table()
    assert table.splitlines() == [
        "TP degrees 4,4 of 4, 8 processes",
        "  torchrun 0: b  ranks 0-3  devices 0,1,2,3",
        "  torchrun 1: c  ranks 4-7  devices 0,1,2,3",
        "  spare: a",
    ]
    table = place(nodes, Shape(tp=4, gpus_per_node=4)).table()
    assert "  without a slot 1: bad 1" in table


SHAPES = st.sampled_from(
    [
        Shape(tp, pp, cp, gpus)
        for tp, pp, cp, gpus in itertools.product((1, 2, 4, 8), (1, 2), (1, 2), (2, 4, 8))
    ]
)


@given(SHAPES, st.integers(1, 3), st.data())
def test_laws(shape: Shape, num_replicas: int, data: st.DataObject) -> None:
    num_slots = shape.slots_per_replica * num_replicas
    if num_slots % shape.gpus_per_node:
        num_slots *= shape.gpus_per_node
    dead = data.draw(st.sets(st.integers(0, num_slots - 1), max_size=4))
    nodes = [
        Node(
            f"n{first}",
            tuple(
                Slot(None, "dead") if first + i in dead else Slot(f"d{i}")
                for i in range(shape.gpus_per_node)
            ),
        )
        for first in range(0, num_slots, shape.gpus_per_node)
    ]
    try:
        found = place(nodes, shape)
    except PlanTopologyError as error:
        assert "TP degree 0" in str(error)
        return
    by_host = {one.host: one for one in nodes}
    taken = [(a.host, slot) for a in found.agents for slot in a.slots]
    assert len(set(taken)) == len(taken) == found.world_size
    excluded = {(e.host, e.slot) for e in found.excluded}
    assert excluded.isdisjoint(taken)
    assert len(excluded) + len(taken) == num_slots
    next_rank = 0
    for agent in found.agents:
        assert agent.first_rank == next_rank and agent.num_ranks > 0
        next_rank += agent.num_ranks
        for device, slot in zip(agent.devices, agent.slots, strict=True):
            assert by_host[agent.host].slots[slot].device == device
    # The training job derives the same shape from the flag it is given.
    topology = Topology.from_failed(
        len(found.degrees), shape.tp, parse_failed(found.failed), pp=shape.pp, cp=shape.cp
    )
    assert topology.degrees == found.degrees and topology.world_size == found.world_size
    assert Placement.from_json(found.to_json()) == found
