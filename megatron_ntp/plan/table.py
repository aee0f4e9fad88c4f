"""A plan as a plain text table for people. Healthy replicas in a row share one line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from megatron_ntp.plan.model import FAMILIES
from megatron_ntp.plan.partition import imbalance
from megatron_ntp.plan.topology import Topology, format_degrees

if TYPE_CHECKING:
    from megatron_ntp.plan.plan import Plan


def render(plan: Plan) -> str:
    """The whole plan as text."""
    sections = (
        _header(plan),
        _section(
            "Replicas (in DP order; ranks per pipeline stage)",
            ("replica", "dp rank", "degree", "failed slots", "idle slots", "domains", "ranks"),
            _replica_rows(plan.topology),
        ),
        _section(
            "Degrees (slowness: estimated time of a microbatch, nominal TP = 1)",
            ("degree", "replicas", "core ranks", "extra ranks", "slowness"),
            _degree_rows(plan),
        ),
        _section(
            "Families (cost: slowest rank against an ideal cut; moved: units resharded each way)",
            ("family", "units", "degree", "units per rank", "cost", "moved"),
            _family_rows(plan),
        ),
    )
    return "\n\n".join(sections) + "\n"


def _header(plan: Plan) -> str:
    topology = plan.topology
    rows = (
        ("degrees", format_degrees(topology.degrees)),
        ("nominal TP", f"{topology.nominal_tp} (pp {topology.pp}, cp {topology.cp})"),
        ("world size", f"{topology.world_size} of {topology.nominal_world_size}"),
        ("sync degree", str(topology.sync_degree)),
        ("batch policy", plan.batch_policy),
        ("digest", plan.digest()),
    )
    return "\n".join([f"NTP plan, version {plan.version}", *_align(rows)])


def _replica_rows(topology: Topology) -> list[tuple[str, ...]]:
    """One row per replica that lost slots; healthy neighbours in DP order are folded into one."""
    ranks: dict[tuple[int, int], list[int]] = {}
    for info in topology.ranks:
        ranks.setdefault((info.dp_rank, info.pp_rank), []).append(info.global_rank)
    rows: list[tuple[str, ...]] = []
    for dp_ranks in _folded(topology):
        replicas = [topology.dp_order[dp_rank] for dp_rank in dp_ranks]
        stages = (
            _span([rank for dp_rank in dp_ranks for rank in ranks[dp_rank, pp_rank]])
            for pp_rank in range(topology.pp)
        )
        rows.append(
            (
                _span(replicas),
                _span(dp_ranks),
                str(topology.dp_degrees[dp_ranks[0]]),
                _listed(topology.failed_slots(replicas[0])),
                _listed(topology.idle_slots(replicas[0])),
                _span([domain for replica in replicas for domain in topology.domains(replica)]),
                ", ".join(stages),
            )
        )
    return rows


def _folded(topology: Topology) -> list[list[int]]:
    """DP ranks, cut into runs that share a row. All healthy replicas come first in DP order."""

    def run_of(dp_rank: int) -> tuple[bool, int]:
        replica = topology.dp_order[dp_rank]
        damaged = bool(topology.failed_slots(replica))
        # Consecutive replica numbers in consecutive DP ranks keep their difference.
        return (damaged, dp_rank if damaged else replica - dp_rank)

    return [list(run) for _, run in groupby(range(topology.num_replicas), key=run_of)]


def _degree_rows(plan: Plan) -> list[tuple[str, ...]]:
    topology = plan.topology
    return [
        (
            str(degree),
            str(topology.degrees.count(degree)),
            str(topology.sync_degree),
            str(degree - topology.sync_degree),
            f"{plan.slowness(degree):.3f}",
        )
        for degree in topology.distinct_degrees
    ]


def _family_rows(plan: Plan) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for family in FAMILIES:
        layout = plan.layout(family)
        for index, degree in enumerate(layout.degrees):
            parts = [f"{len(list(same))} x {size}" for size, same in groupby(layout.sizes(degree))]
            rows.append(
                (
                    "" if index else family,
                    "" if index else str(layout.num_units),
                    str(degree),
                    " + ".join(parts),
                    f"{imbalance(layout.num_units, degree):.3f}",
                    str(sum(route.piece.size for route in layout.routes(degree))),
                )
            )
    return rows


def _section(title: str, names: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    return "\n".join([title, *_align([names, *rows])])


def _align(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        (
            "  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _span(numbers: Sequence[int]) -> str:
    """`3-7` for consecutive numbers."""
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


def _listed(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers)) or "-"
