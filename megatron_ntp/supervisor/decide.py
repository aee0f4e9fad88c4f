"""What a job does with the GPUs that are left: one pure function, `decide`.

[Cells] The slots of a TP group are a cell. The least damaged cells are used, so whatever is more
than the job needs serves as spare: a whole one replaces a damaged one. Where a replica has several
TP groups, damaged cells are put into the same replica, which runs at the degree of its weakest.

[Worth] A replica that has lost GPUs is kept unless the job is faster without it. The worth of a job
is what it trains per time, in healthy replicas. With policy keep every replica runs the same
number of microbatches, and all wait for the slowest:

    with it      R / slowness of the lowest degree     (slowness: most units per rank / healthy)
    without it   R - 1                                  (at the degrees of the others)

Equal worth keeps the replica. `worth` is the rule; it minds the batch policy and pipeline fill, and
the global batch must divide by the replicas that are left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from megatron_ntp.errors import PlanBatchError
from megatron_ntp.launchers.nodes import (
    Cell,
    Node,
    Placement,
    Shape,
    arrange,
    check_nodes,
    node_sets,
    wanted_replicas,
)
from megatron_ntp.plan.batch import BatchPolicy, microbatch_shares
from megatron_ntp.plan.model import ModelDims
from megatron_ntp.plan.topology import format_degrees

DO_NOT_RESTART = 93


@dataclass(frozen=True)
class Terms:
    """What a training command says that a decision depends on.

    Attributes:
        nonuniform: whether it may run at uneven degrees (--ntp).
        dims: the model's sizes; None: unknown, then work is taken to divide evenly.
        batch_policy: see `plan.batch`.
        batches: global batch sizes that occur (several with a ramp-up); empty: unknown.
        micro_batch: samples of a microbatch; None: unknown.
        keep_replicas: never drop a replica that can run.
        min_degree: a replica below this degree cannot run, as its GPUs have no memory for it.
    """

    nonuniform: bool = True
    dims: ModelDims | None = None
    batch_policy: str = BatchPolicy.KEEP.value
    batches: tuple[int, ...] = ()
    micro_batch: int | None = None
    keep_replicas: bool = False
    min_degree: int = 1


@dataclass(frozen=True)
class Candidate:
    """One way to go on. `worth` is None where it cannot be done, `why` says how it was judged."""

    degrees: tuple[int, ...]
    cells: tuple[Cell, ...]
    worth: Fraction | None
    why: str

    def __str__(self) -> str:
        name = f"{len(self.degrees)} replicas at {format_degrees(self.degrees)}"
        return f"{name}: {self.why}"


@dataclass(frozen=True)
class Decision:
    """How the job goes on, or that it cannot.

    Attributes:
        placement: who starts what; None: the job ends with `status`.
        reason: one line for people.
        candidates: what was weighed, in the order it was looked at.
        num_dropped: replicas of the healthy job that it runs without.
    """

    placement: Placement | None
    reason: str
    candidates: tuple[Candidate, ...] = ()
    num_dropped: int = 0
    status: int = 0


def decide(nodes: Sequence[Node], shape: Shape, terms: Terms) -> Decision:
    """The best that can be done with what nodes report. See [Cells] and [Worth].

    Raises:
        PlanTopologyError: the nodes could not hold the healthy job.
    """
    check_nodes(nodes, shape)
    wanted = wanted_replicas(len(nodes), shape)
    cells = tp_cells(nodes, shape)
    candidates: list[Candidate] = []
    for num_replicas in range(wanted, 0, -1):
        candidates.append(_candidate(nodes, cells, num_replicas, wanted, shape, terms))
        if _is_final(candidates[-1], shape, terms):
            break
    possible = [candidate for candidate in candidates if candidate.worth is not None]
    if not possible:
        reasons = "; ".join(map(str, candidates))
        return Decision(
            None, f"the job cannot run: {reasons}", tuple(candidates), 0, DO_NOT_RESTART
        )
    best = max(possible, key=lambda c: (c.worth, len(c.degrees)))
    if terms.keep_replicas:
        best = max(possible, key=lambda c: len(c.degrees))
    placement = arrange(nodes, best.cells, shape)
    dropped = wanted - len(best.degrees)
    return Decision(placement, _reason(best, dropped, shape), tuple(candidates), dropped)


def _is_final(candidate: Candidate, shape: Shape, terms: Terms) -> bool:
    """Whether fewer replicas than these need no thought."""
    if not terms.nonuniform:
        return True
    return candidate.worth is not None and min(candidate.degrees) == shape.tp


def _reason(best: Candidate, dropped: int, shape: Shape) -> str:
    degrees = format_degrees(best.degrees)
    if dropped:
        return f"without {dropped} of {dropped + len(best.degrees)} replicas, at {degrees}"
    return f"at {degrees}" + ("" if min(best.degrees) == shape.tp else f" of {shape.tp}")


def tp_cells(nodes: Sequence[Node], shape: Shape) -> list[Cell]:
    """The TP groups that nodes can hold, in order. See [Cells]."""
    size = max(1, shape.tp // shape.gpus_per_node)
    cells: list[Cell] = []
    for members in node_sets(nodes, size):
        slots = [(node, slot) for node in members for slot in range(shape.gpus_per_node)]
        cells += [tuple(slots[i : i + shape.tp]) for i in range(0, len(slots), shape.tp)]
    return cells


def _candidate(
    nodes: Sequence[Node],
    cells: Sequence[Cell],
    num_replicas: int,
    wanted: int,
    shape: Shape,
    terms: Terms,
) -> Candidate:
    """This many replicas on the least damaged cells."""
    live = [sum(nodes[node].slots[slot].device is not None for node, slot in c) for c in cells]
    num_groups = shape.pp * shape.cp
    best = sorted(range(len(cells)), key=lambda i: (-live[i], i))[: num_replicas * num_groups]
    chosen = sorted(best) if num_groups == 1 else best
    degrees = tuple(
        min(live[i] for i in chosen[first : first + num_groups])
        for first in range(0, len(chosen), num_groups)
    )
    picked = tuple(cells[i] for i in chosen)
    problem = _problem(degrees, num_replicas, wanted, shape, terms)
    if problem:
        return Candidate(degrees, picked, None, problem)
    try:
        found, said = worth(degrees, shape, terms)
    except PlanBatchError as error:
        return Candidate(degrees, picked, None, str(error))
    return Candidate(degrees, picked, found, said)


def _problem(
    degrees: tuple[int, ...], num_replicas: int, wanted: int, shape: Shape, terms: Terms
) -> str:
    """Why a job of these degrees cannot be, empty if it can."""
    if len(degrees) < num_replicas:
        return (
            f"a TP group of {shape.tp} needs nodes of one block, and there are only "
            f"{len(degrees)} such replicas. Ask Slurm for --segment"
        )
    if not terms.nonuniform and min(degrees) < shape.tp:
        return (
            "GPUs have failed, so this job needs nonuniform tensor parallelism: add --ntp to the "
            "training command"
        )
    lowest = max(1, terms.min_degree)
    if min(degrees) < lowest:
        return f"a replica has {min(degrees)} GPUs left, and needs {lowest}"
    return batch_problem(num_replicas, terms) if num_replicas < wanted else ""


def batch_problem(num_replicas: int, terms: Terms) -> str:
    """Why a job cannot go on with fewer replicas on account of its global batch."""
    if terms.micro_batch is None:
        return ""
    if not terms.batches:
        return (
            "the training command gives no --global-batch-size, so that with fewer replicas it "
            "would be smaller. Give it"
        )
    for batch in terms.batches:
        if batch % (terms.micro_batch * num_replicas):
            return (
                f"the global batch {batch} is not divisible by micro batch {terms.micro_batch} x "
                f"{num_replicas} replicas"
            )
    return ""


def slowness(degree: int, shape: Shape, terms: Terms) -> Fraction:
    """Time of a microbatch at this degree over that at the healthy one, by the plan's costs."""
    if terms.dims is None:
        return Fraction(shape.tp, degree)
    return Fraction(terms.dims.cost(degree), terms.dims.cost(shape.tp))


def worth(degrees: Sequence[int], shape: Shape, terms: Terms) -> tuple[Fraction, str]:
    """What a job of these degrees trains per time, in healthy replicas, and how that was counted.

    See [Worth]. Sequence of degrees by replica. Raises PlanBatchError where the batch policy
    cannot be met.
    """
    ordered = sorted(degrees, reverse=True)
    slow = [slowness(degree, shape, terms) for degree in ordered]
    largest = max(terms.batches, default=0)
    if terms.micro_batch and largest >= terms.micro_batch * len(ordered):
        number = largest // (terms.micro_batch * len(ordered))
        fill = shape.pp - 1
        shares = microbatch_shares(terms.batch_policy, number, ordered, shape.tp, slow, shape.pp)
        time = max((share + fill) * cost for share, cost in zip(shares, slow, strict=True))
        found = Fraction(sum(shares)) / time
        counted = f"{sum(shares)} microbatches in the time of {float(time):.3f}"
    elif terms.batch_policy == BatchPolicy.KEEP:
        found = len(ordered) / max(slow)
        counted = f"{len(ordered)} / {float(max(slow)):.3f}"
    else:
        found = sum((1 / cost for cost in slow), Fraction(0))
        counted = " + ".join(f"1 / {float(cost):.3f}" for cost in slow[:8])
        counted += " ..." if len(slow) > 8 else ""
    return found, f"{counted} = {float(found):.3f} healthy replicas (policy {terms.batch_policy})"
