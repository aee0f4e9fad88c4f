"""How much each GPU of a job may draw, so that no domain and no rack ever exceeds its budget.

The rule (called the ceiling rule below): every survivor of a domain gets the same ceiling,

    min(board maximum, site maximum, (domain budget - dead GPUs x what they still draw) / survivors)

rounded down to whole watts. No GPU is ever set above its ceiling, so the sum cannot exceed the
budget whatever the others are set to meanwhile, and the nodes of one domain need not talk.
Where several reduced domains share a rack, what the rack has left above nominal is shared in
proportion to what each could use. Healthy domains stay at nominal.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ntp.device.errors import DeviceError, Fault
from megatron_ntp.device.site import SitePower

MW_PER_W = 1000


def to_mw(watts: float) -> int:
    """Watts as sites write them, in NVML's milliwatts."""
    return round(watts * MW_PER_W)


def whole_watts(limit_mw: float) -> int:
    """A limit rounded down: boards keep whole watts, and up would be over budget."""
    return int(limit_mw) // MW_PER_W * MW_PER_W


@dataclass(frozen=True)
class DomainShape:
    """The GPUs of one replica's scale-up domain, and how many of them are left."""

    name: str
    num_gpus: int
    num_alive: int
    rack: str = ""

    def __post_init__(self) -> None:
        if not 1 <= self.num_alive <= self.num_gpus:
            raise ValueError(
                f"domain {self.name!r}: num_alive {self.num_alive} must be within 1 and num_gpus "
                f"{self.num_gpus}"
            )

    @property
    def num_dead(self) -> int:
        return self.num_gpus - self.num_alive


@dataclass(frozen=True)
class BoardPower:
    """What the boards of a domain have in common: the narrowest range of them."""

    min_mw: int
    max_mw: int


@dataclass(frozen=True)
class DomainBudget:
    """The answer for one domain. `bound_by` names the term of the ceiling rule that decided."""

    domain: DomainShape
    nominal_mw: int
    ceiling_mw: int
    budget_mw: int
    bound_by: str

    @property
    def has_headroom(self) -> bool:
        return self.ceiling_mw > self.nominal_mw


def plan_budgets(
    site: SitePower, board: BoardPower, domains: Sequence[DomainShape], nominal_mw: int
) -> dict[str, DomainBudget]:
    """Budgets of all domains of a job, by name. Every node of the job must be given the same."""
    names = [domain.name for domain in domains]
    if len(set(names)) < len(names):
        raise ValueError(f"domains must have different names, not {names}")
    _check_nominal(site, board, nominal_mw)
    alone = {domain.name: _alone(site, board, domain, nominal_mw) for domain in domains}
    if site.rack.budget_w is None:
        return alone
    racks: dict[str, list[DomainBudget]] = defaultdict(list)
    for budget in alone.values():
        racks[budget.domain.rack].append(budget)
    shared = [entry for rack, found in racks.items() for entry in _within_rack(site, rack, found)]
    return {budget.domain.name: budget for budget in shared}


def _check_nominal(site: SitePower, board: BoardPower, nominal_mw: int) -> None:
    low_mw = max(board.min_mw, to_mw(site.gpu.min_w or 0))
    high_mw = min(board.max_mw, to_mw(site.gpu.max_w or board.max_mw / MW_PER_W))
    if not low_mw <= nominal_mw <= high_mw:
        raise DeviceError(
            Fault.OUT_OF_RANGE,
            f"nominal limit {nominal_mw / MW_PER_W:g} W is not within {low_mw / MW_PER_W:g} W to "
            f"{high_mw / MW_PER_W:g} W, which board and site allow",
        )


def _alone(
    site: SitePower, board: BoardPower, domain: DomainShape, nominal_mw: int
) -> DomainBudget:
    """The ceiling rule without the rack."""
    budget_mw = _budget_mw(site, domain, nominal_mw)
    if budget_mw < domain.num_gpus * nominal_mw:
        raise DeviceError(
            Fault.OUT_OF_RANGE,
            f"{domain.num_gpus} GPUs of domain {domain.name!r} x nominal "
            f"{nominal_mw / MW_PER_W:g} W exceed its budget of {budget_mw / MW_PER_W:g} W",
        )
    dead_mw = domain.num_dead * to_mw(site.gpu.dead_w)
    terms = {"board maximum": board.max_mw}
    if site.gpu.max_w is not None:
        terms["site maximum"] = to_mw(site.gpu.max_w)
    terms["domain budget"] = (budget_mw - dead_mw) // domain.num_alive
    if domain.num_dead == 0:
        terms = {"no dead GPU": nominal_mw}
    bound_by = min(terms, key=lambda term: terms[term])
    ceiling_mw = max(nominal_mw, whole_watts(terms[bound_by]))
    return DomainBudget(domain, nominal_mw, ceiling_mw, budget_mw, bound_by)


def _budget_mw(site: SitePower, domain: DomainShape, nominal_mw: int) -> int:
    if site.domain.num_gpus is not None and domain.num_gpus > site.domain.num_gpus:
        raise DeviceError(
            Fault.OUT_OF_RANGE,
            f"domain {domain.name!r} has {domain.num_gpus} GPUs, the site's domains have "
            f"{site.domain.num_gpus}",
        )
    if site.domain.budget_w is None or site.domain.num_gpus is None:
        return domain.num_gpus * nominal_mw
    return to_mw(site.domain.budget_w) * domain.num_gpus // site.domain.num_gpus


def _within_rack(site: SitePower, rack: str, budgets: Sequence[DomainBudget]) -> list[DomainBudget]:
    """Scales boosts of one rack's domains down until its budget holds."""
    assert site.rack.budget_w is not None and site.rack.num_domains is not None
    assert site.domain.num_gpus is not None
    nominal_mw = budgets[0].nominal_mw
    dead_mw = to_mw(site.gpu.dead_w)
    used_mw = sum(b.domain.num_alive * nominal_mw + b.domain.num_dead * dead_mw for b in budgets)
    # GPUs of the rack that are not this job's run at nominal as far as this job can know.
    mine = sum(b.domain.num_gpus for b in budgets)
    others = max(0, site.rack.num_domains * site.domain.num_gpus - mine)
    left_mw = to_mw(site.rack.budget_w) - used_mw - others * nominal_mw
    if left_mw < 0:
        raise DeviceError(
            Fault.OUT_OF_RANGE,
            f"rack {rack!r} is {-left_mw / MW_PER_W:g} W over its budget of "
            f"{site.rack.budget_w:g} W with every GPU at nominal {nominal_mw / MW_PER_W:g} W",
        )
    wanted_mw = sum(b.domain.num_alive * (b.ceiling_mw - nominal_mw) for b in budgets)
    if wanted_mw <= left_mw:
        return list(budgets)
    return [
        DomainBudget(
            b.domain,
            nominal_mw,
            nominal_mw + whole_watts((b.ceiling_mw - nominal_mw) * left_mw // wanted_mw),
            b.budget_mw,
            "rack budget" if b.has_headroom else b.bound_by,
        )
        for b in budgets
    ]
