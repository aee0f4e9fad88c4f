"""Which ranks share a node: orders of nodes that cut a replica in two, and those that do not."""

import pytest

from megatron_ntp.errors import PlanTopologyError
from megatron_ntp.plan.spans import Span, check_spans, count_hint, own_span
from megatron_ntp.plan.topology import Topology


def spans(*sizes: int) -> list[Span]:
    """Nodes of these numbers of processes, in rank order."""
    return [Span(sum(sizes[:node]), size) for node, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("degrees", "nominal_tp", "sizes"),
    [
        ((8, 8, 7), 8, (8, 8, 7)),
        ((2, 1), 2, (2, 1)),
        ((4, 3), 4, (7,)),
        ((4, 4, 4, 3), 4, (8, 7)),
        ((8, 7), 8, (4, 4, 4, 3)),
        ((16, 15), 16, (8, 8, 8, 7)),
        ((4, 4, 4), 4, (6, 6)),
        ((4, 3), 4, ()),
    ],
)
def test_orders_that_fit(degrees: tuple[int, ...], nominal_tp: int, sizes: tuple[int, ...]) -> None:
    check_spans(Topology.from_degrees(degrees, nominal_tp), spans(*sizes))


@pytest.mark.parametrize(
    ("degrees", "nominal_tp", "sizes", "said"),
    [
        ((2, 1), 2, (1, 2), "ranks 1 to 2 are on one node, and replica 0 is ranks 0 to 1"),
        ((8, 8, 7), 8, (8, 7, 8), "ranks 15 to 22 are on one node, and replica 1 is ranks 8 to 15"),
        ((4, 4, 4, 3), 4, (7, 8), "ranks 0 to 6 are on one node, and replica 1 is ranks 4 to 7"),
    ],
)
def test_nodes_in_another_order_than_the_plan(
    degrees: tuple[int, ...], nominal_tp: int, sizes: tuple[int, ...], said: str
) -> None:
    with pytest.raises(PlanTopologyError) as refused:
        check_spans(Topology.from_degrees(degrees, nominal_tp), spans(*sizes))
    assert said in str(refused.value)
    assert "--node-rank" in str(refused.value) and "GROUP_RANK" in str(refused.value)


def test_nodes_that_no_order_would_help_are_left_to_their_owner() -> None:
    check_spans(Topology.from_degrees((4, 4, 3), 4), spans(6, 5))


def test_own_span_comes_from_what_launchers_set() -> None:
    environ = {"RANK": "9", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "7"}
    assert own_span(environ) == Span(8, 7)
    assert own_span({"RANK": "9"}) is None
    assert own_span({**environ, "LOCAL_WORLD_SIZE": "many"}) is None


def test_hint_for_a_launcher_that_takes_all_nodes_for_equal() -> None:
    assert count_hint({}) == count_hint({"TORCH_ELASTIC_WORKER_IDENTICAL": "0"}) == ""
    hint = count_hint({"TORCH_ELASTIC_WORKER_IDENTICAL": "1"})
    assert "TORCH_ELASTIC_WORKER_IDENTICAL=0" in hint and "ft_launcher" in hint
