"""Whether the launcher numbered processes as the plan does.

torchrun and its kin give each node consecutive ranks, in an order of nodes that the plan does not
see: by `--node-rank`, or by who came first. A job whose nodes run different numbers of processes
then trains, slowly, with replicas that reach over two nodes. So ranks tell each other which of them
share a node, before anything else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megatron_ntp.errors import PlanTopologyError
from megatron_ntp.plan.topology import Topology


class Span(NamedTuple):
    """Consecutive ranks that one launcher started on one node."""

    first: int
    size: int

    @property
    def end(self) -> int:
        """One past the last rank."""
        return self.first + self.size

    def cuts(self, group: tuple[int, ...]) -> bool:
        """Whether a group that fits onto this node lies partly here and partly elsewhere."""
        here = sum(self.first <= rank < self.end for rank in group)
        return 0 < here < len(group) <= self.size


def own_span(environ: Mapping[str, str]) -> Span | None:
    """This process's span as torchrun describes it, None where nothing does."""
    try:
        first = int(environ["RANK"]) - int(environ["LOCAL_RANK"])
        return Span(first, int(environ["LOCAL_WORLD_SIZE"]))
    except (KeyError, ValueError):
        return None


def check_spans(topology: Topology, spans: Sequence[Span]) -> None:
    """Raises where another order of the nodes would keep each TP group on one node.

    Args:
        topology: what the ranks are.
        spans: of all nodes, in rank order.

    Raises:
        PlanTopologyError: naming the first node and replica that do not fit, and the cure.
    """
    found = _first_cut(topology, spans)
    if found is None:
        return
    reordered = sorted(spans, key=lambda span: -span.size)
    first = 0
    for position, span in enumerate(reordered):
        reordered[position] = Span(first, span.size)
        first += span.size
    if _first_cut(topology, reordered) is not None:
        return
    span, group = found
    replica = topology.rank(group[0]).replica
    sizes = ", ".join(str(span.size) for span in reordered)
    raise PlanTopologyError(
        f"the nodes are not in the order of the plan: {_ranks(span.first, span.end - 1)} are on "
        f"one node, and replica {replica} is {_ranks(group[0], group[-1])}. Start the nodes so "
        f"that their processes are counted in the order {sizes}, the reduced replica last: "
        "--node-rank of torchrun, GROUP_RANK or SLURM_PROCID for ft_launcher. `megatron-ntp plan` "
        "prints which GPU is which rank"
    )


def count_hint(environ: Mapping[str, str]) -> str:
    """What to add to an error about the number of processes, or nothing."""
    if environ.get("TORCH_ELASTIC_WORKER_IDENTICAL") != "1":
        return ""
    return (
        ". TORCH_ELASTIC_WORKER_IDENTICAL=1, which ft_launcher sets, has every node believe that "
        "the others run as many processes as itself: export TORCH_ELASTIC_WORKER_IDENTICAL=0 "
        "before the launcher, on every node"
    )


def _first_cut(topology: Topology, spans: Sequence[Span]) -> tuple[Span, tuple[int, ...]] | None:
    for span in spans:
        for group in topology.tp_groups:
            if span.cuts(group):
                return span, group
    return None


def _ranks(first: int, last: int) -> str:
    return f"ranks {first} to {last}"
