"""The decision: shrink, spare, drop or stop. Pure, so all of it in milliseconds."""

from fractions import Fraction

import pytest

from megatron_ntp.errors import PlanTopologyError
from megatron_ntp.launchers.nodes import Node, Shape, Slot, place
from megatron_ntp.plan.model import ModelDims
from megatron_ntp.supervisor.decide import Decision, Terms, decide, slowness, worth

DIMS = ModelDims(32, 8, 128, 4096, 14336, 128256, 32, 3)


def node(host: str, slots: str, block: str = "") -> Node:
    """`+` is a good slot and `-` a dead one."""
    found = [
        Slot(f"GPU-{host}-{i}") if s == "+" else Slot(None, "dead") for i, s in enumerate(slots)
    ]
    return Node(host, tuple(found), block)


def run(slots: str, tp: int, terms: Terms | None = None, **shape: int | None) -> Decision:
    """Nodes n0, n1, ... described by words of + and -."""
    nodes = [node(f"n{i}", word) for i, word in enumerate(slots.split())]
    size = len(nodes[0].slots)
    return decide(nodes, Shape(tp, gpus_per_node=size, **shape), terms or Terms())  # type: ignore[arg-type]


def degrees(decision: Decision) -> tuple[int, ...]:
    assert decision.placement is not None, decision.reason
    return decision.placement.degrees


def test_all_healthy_is_the_plain_placement() -> None:
    nodes = [node("n0", "++++"), node("n1", "++++")]
    shape = Shape(4, gpus_per_node=4)
    found = decide(nodes, shape, Terms())
    assert found.placement == place(nodes, shape) and found.num_dropped == 0
    assert len(found.candidates) == 1


def test_a_dead_gpu_shrinks_its_replica() -> None:
    found = run("++++ +-++", 4)
    assert degrees(found) == (4, 3)
    assert found.placement is not None and found.placement.failed == "1:1"
    assert found.placement.agents[1].devices == ("GPU-n1-0", "GPU-n1-2", "GPU-n1-3")
    assert "n1" not in found.placement.spare_hosts


def test_several_replicas_on_a_node() -> None:
    found = run("+-++", 2)
    assert degrees(found) == (1, 2)
    assert found.placement is not None
    assert [agent.devices for agent in found.placement.agents] == [
        ("GPU-n0-2", "GPU-n0-3", "GPU-n0-0")
    ]


def test_a_spare_takes_the_place_of_a_damaged_node() -> None:
    found = run("++++ +-++ ++++", 4, num_replicas=2)
    assert degrees(found) == (4, 4) and found.num_dropped == 0
    assert found.placement is not None and found.placement.spare_hosts == ("n1",)


def test_the_least_damaged_nodes_are_used_where_spares_do_not_suffice() -> None:
    found = run("---- +-++ ++++", 4, num_replicas=2)
    assert degrees(found) == (3, 4)
    assert found.placement is not None and found.placement.spare_hosts == ("n0",)


def test_a_node_that_is_gone_takes_its_replica_along() -> None:
    found = run("++++ ---- ++++", 4)
    assert degrees(found) == (4, 4) and found.num_dropped == 1
    assert found.reason == "without 1 of 3 replicas, at 4,4"
    assert "has 0 GPUs left" in found.candidates[0].why


def test_one_replica_of_a_node_may_be_dropped() -> None:
    found = run("--++ ++++", 2)
    assert degrees(found) == (2, 2, 2) and found.num_dropped == 1
    assert found.placement is not None
    assert found.placement.agents[0].devices == ("GPU-n0-2", "GPU-n0-3")
    assert {entry.slot for entry in found.placement.excluded} == {0, 1}


# The rule of worth


def test_equal_worth_keeps_the_replica() -> None:
    """2 replicas at half the pace train as much as one."""
    found = run("++ +-", 2)
    assert degrees(found) == (2, 1)
    assert [candidate.worth for candidate in found.candidates] == [1, 1]


@pytest.mark.parametrize(
    ("num_nodes", "dead", "dropped"),
    [(7, 1, 0), (8, 1, 0), (9, 1, 1), (3, 2, 0), (4, 2, 0), (5, 2, 1)],
)
def test_the_drop_rule_of_policy_keep(num_nodes: int, dead: int, dropped: int) -> None:
    """R / (8 / n) against R - 1: 7 of 8 is worth keeping up to 8 replicas, 6 of 8 up to 4."""
    words = ["++++++++"] * (num_nodes - 1) + ["-" * dead + "+" * (8 - dead)]
    found = run(" ".join(words), 8)
    assert found.num_dropped == dropped, [str(c) for c in found.candidates]


@pytest.mark.parametrize("policy", ["shrink", "redistribute"])
def test_other_policies_do_not_wait_for_the_slowest(policy: str) -> None:
    words = ["++++++++"] * 31 + ["-+++++++"]
    terms = Terms(batch_policy=policy, micro_batch=1, batches=(32 * 31 * 8,))
    found = run(" ".join(words), 8, terms)
    assert degrees(found)[-1] == 7 and found.num_dropped == 0
    assert run(" ".join(words), 8, Terms(batch_policy="keep")).num_dropped == 1
    assert run(" ".join(words), 8, Terms(batch_policy=policy)).num_dropped == 0, "batch unknown"


def test_coarse_units_make_a_replica_worth_less() -> None:
    """8 KV groups over 7 ranks leave one with two of them: nearly half the pace."""
    terms = Terms(dims=DIMS)
    shape = Shape(8, gpus_per_node=8)
    assert slowness(8, shape, terms) == 1
    assert slowness(7, shape, terms) > Fraction(8, 7)
    assert slowness(7, shape, Terms()) == Fraction(8, 7)
    dims = ModelDims(8, 8, 128, 1024, 8, 8, 32)  # all attention
    found = run("++++++++ ++++++++ +++++++-", 8, Terms(dims=dims))
    assert found.num_dropped == 1, "3 / 2 < 2"
    assert "3 / 2.000 = 1.500" in found.candidates[0].why


def test_numbers_are_printed() -> None:
    found = run("++++++++ +++++++-", 8)
    assert str(found.candidates[0]) == (
        "2 replicas at 8,7: 2 / 1.143 = 1.750 healthy replicas (policy keep)"
    )
    assert str(found.candidates[1]).startswith("1 replicas at 8: 1 / 1.000 = 1.000")


def test_pipeline_fill_counts() -> None:
    shape = Shape(4, pp=4, gpus_per_node=4)
    terms = Terms(micro_batch=1, batches=(12,))
    full, _ = worth((4, 4), shape, terms)
    less, said = worth((4,), shape, terms)
    assert full == Fraction(12, 6 + 3) and less == Fraction(12, 12 + 3)
    assert "12 microbatches" in said


def test_keep_replicas_never_drops_one_that_can_run() -> None:
    words = " ".join(["++++++++"] * 30 + ["-+++++++"])
    assert run(words, 8).num_dropped == 1
    assert run(words, 8, Terms(keep_replicas=True)).num_dropped == 0
    words = " ".join(["++++++++"] * 30 + ["--------"])
    assert run(words, 8, Terms(keep_replicas=True)).num_dropped == 1


def test_a_replica_below_the_lowest_degree_is_dropped() -> None:
    assert degrees(run("++++ +---", 4, Terms(min_degree=2))) == (4,)
    assert degrees(run("++++ ++--", 4, Terms(min_degree=2))) == (4, 2)


# The batch


def test_the_global_batch_must_divide() -> None:
    terms = Terms(micro_batch=1, batches=(8,))
    found = run("++ ++ ++ --", 2, terms)
    assert degrees(found) == (2, 2) and found.num_dropped == 2
    assert "the global batch 8 is not divisible by micro batch 1 x 3 replicas" in (
        found.candidates[1].why
    )
    found = run("++ ++ ++ --", 2, Terms(micro_batch=1, batches=(12,)))
    assert found.num_dropped == 1


def test_every_batch_of_a_ramp_up_must_divide() -> None:
    found = run("++ ++ --", 2, Terms(micro_batch=1, batches=(6, 12)))
    assert found.num_dropped == 1
    found = run("++ ++ --", 2, Terms(micro_batch=1, batches=(9, 12)))
    assert found.num_dropped == 2 and "batch 9" in found.candidates[1].why


def test_without_a_global_batch_no_replica_is_dropped() -> None:
    found = run("++ ++ --", 2, Terms(micro_batch=2))
    assert found.placement is None and found.status == 93
    assert "no --global-batch-size" in found.reason
    assert degrees(run("++ ++ +-", 2, Terms(micro_batch=2))) == (2, 2, 1)


# What cannot be


def test_nothing_left() -> None:
    found = run("---- ----", 4)
    assert found.placement is None and found.status == 93
    assert "the job cannot run" in found.reason and "0 GPUs left" in found.reason


def test_a_uniform_job_asks_for_ntp() -> None:
    plain = Terms(nonuniform=False)
    assert degrees(run("++++ ++++", 4, plain)) == (4, 4)
    assert degrees(run("++++ +-++ ++++", 4, plain, num_replicas=2)) == (4, 4)
    found = run("++++ +-++", 4, plain)
    assert found.placement is None and found.status == 93 and "add --ntp" in found.reason


def test_nodes_that_never_held_the_job_are_an_error() -> None:
    with pytest.raises(PlanTopologyError, match="do not fit"):
        run("++++ ++++", 4, num_replicas=3)
    with pytest.raises(PlanTopologyError, match="no multiple"):
        run("++++ ++++", 4, pp=3)


# Pipeline stages and domains over nodes


def test_damage_is_put_into_one_replica() -> None:
    """Two replicas of two stages; one GPU dead in each: one replica takes both."""
    found = run("+-++ ++++ ++-+ ++++", 4, pp=2)
    assert degrees(found) == (4, 3)
    found = run("+-++ ++++ ++++ ++++", 4, pp=2)
    assert degrees(found) == (4, 3)
    assert found.placement is not None and found.placement.world_size == 14


def test_a_group_over_nodes_stays_in_its_block() -> None:
    nodes = [node("a", "++", "x"), node("b", "++", "y"), node("c", "++", "x"), node("d", "+-", "y")]
    found = decide(nodes, Shape(4, gpus_per_node=2), Terms())
    assert degrees(found) == (4, 3)
    assert found.placement is not None
    assert [agent.host for agent in found.placement.agents] == ["a", "c", "b", "d"]
    alone = [node("a", "++", "x"), node("b", "++", "y")]
    found = decide(alone, Shape(4, gpus_per_node=2), Terms())
    assert found.placement is None and "one block" in found.reason


def test_a_gpu_that_came_back_grows_the_replica() -> None:
    assert degrees(run("++ +-", 2)) == (2, 1)
    assert degrees(run("++ ++", 2)) == (2, 2)
