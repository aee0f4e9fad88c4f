"""Which processes a job has after slots have failed, and what each of them is.

A job is `num_replicas` data-parallel replicas. A replica is `pp * cp` TP groups of `nominal_tp`
slots (one GPU each), numbered through the replica: TP group `slot // nominal_tp`, pipeline stage
major, then context-parallel rank. Some slots have failed. A replica runs at the TP degree of its
weakest group; slots that live but exceed it stay idle and get no process.

[DP order] Replicas take DP ranks by falling degree, equal degrees by replica number. So the lowest
degree comes last, and the last global rank, which is the one that logs, is always a core rank.

[Rank order] Global ranks run as Megatron's `tp-cp-dp-pp`: TP fastest, then CP, DP, PP. Groups
differ in size here, so ranks are counted off and never computed from strides.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from megatron_ntp.errors import PlanLookupError, PlanTopologyError
from megatron_ntp.plan._checks import require_int

AXES = ("tp", "cp", "dp", "pp")
"""Parallel axes in Megatron's rank order, fastest first."""

FailedSlot = tuple[int, int]
"""(replica, slot in the replica)."""


@dataclass(frozen=True)
class RankInfo:
    """One process of the job.

    `replica` is the number the user knows, `dp_rank` its place in DP order. `domain` numbers the
    scale-up domain (one per TP group, failed or not) and `domain_slot` the GPU inside it.
    """

    global_rank: int
    replica: int
    dp_rank: int
    tp_rank: int
    cp_rank: int
    pp_rank: int
    degree: int
    slot: int
    domain: int
    domain_slot: int
    is_core: bool

    @property
    def is_extra(self) -> bool:
        return not self.is_core


@dataclass(frozen=True)
class Topology:
    """Replicas, their failed slots, and everything that follows from them.

    Make one with `from_failed` or `from_degrees`. `failed` is kept sorted, so two topologies of the
    same job are equal however they were described.
    """

    num_replicas: int
    nominal_tp: int
    pp: int = 1
    cp: int = 1
    failed: tuple[FailedSlot, ...] = ()

    def __post_init__(self) -> None:
        for name in ("num_replicas", "nominal_tp", "pp", "cp"):
            require_int(name, getattr(self, name), minimum=1, error=PlanTopologyError)
        for replica, slot in self.failed:
            self._require_slot(replica, slot)
        object.__setattr__(self, "failed", tuple(sorted({(r, s) for r, s in self.failed})))
        for replica, degree in enumerate(self.degrees):
            if degree == 0:
                raise PlanTopologyError(self._dead_replica(replica))

    @classmethod
    def from_failed(
        cls,
        num_replicas: int,
        nominal_tp: int,
        failed: Iterable[FailedSlot] = (),
        *,
        pp: int = 1,
        cp: int = 1,
    ) -> Topology:
        """A job whose failed slots are known."""
        return cls(num_replicas, nominal_tp, pp, cp, tuple(failed))

    @classmethod
    def from_degrees(
        cls,
        degrees: Sequence[int],
        nominal_tp: int | None = None,
        failed: Collection[FailedSlot] | None = None,
        *,
        pp: int = 1,
        cp: int = 1,
    ) -> Topology:
        """A job whose TP degrees are known, replica by replica.

        `nominal_tp` is the highest degree unless given. Without `failed`, the last slots of each
        reduced replica count as failed. With `failed` (an empty collection says that none has),
        the degrees that follow from it must be those given.
        """
        if not degrees:
            raise PlanTopologyError("a job needs the TP degree of at least one replica, got none")
        if nominal_tp is not None:
            require_int("nominal_tp", nominal_tp, minimum=1, error=PlanTopologyError)
        require_int("pp", pp, minimum=1, error=PlanTopologyError)
        require_int("cp", cp, minimum=1, error=PlanTopologyError)
        for replica, degree in enumerate(degrees):
            name = f"TP degree of replica {replica}"
            require_int(name, degree, minimum=1, error=PlanTopologyError)
            if nominal_tp is not None and degree > nominal_tp:
                raise PlanTopologyError(f"{name} is {degree}, above the nominal TP {nominal_tp}")
        nominal = max(degrees) if nominal_tp is None else nominal_tp
        if failed is None:
            num_slots = pp * cp * nominal
            failed = [
                (replica, slot)
                for replica, degree in enumerate(degrees)
                for slot in range(num_slots - (nominal - degree), num_slots)
            ]
        topology = cls(len(degrees), nominal, pp, cp, tuple(failed))
        if topology.degrees != tuple(degrees):
            raise PlanTopologyError(_disagreement(topology, degrees))
        return topology

    # Replicas

    @property
    def num_groups(self) -> int:
        """TP groups in a replica."""
        return self.pp * self.cp

    @property
    def num_slots(self) -> int:
        """Slots in a replica, failed ones included."""
        return self.num_groups * self.nominal_tp

    @cached_property
    def degrees(self) -> tuple[int, ...]:
        """TP degree by replica number."""
        dead: dict[int, list[int]] = {}
        for replica, slot in self.failed:
            counts = dead.setdefault(replica, [0] * self.num_groups)
            counts[slot // self.nominal_tp] += 1
        return tuple(
            self.nominal_tp - max(dead.get(replica, (0,))) for replica in range(self.num_replicas)
        )

    @cached_property
    def dp_order(self) -> tuple[int, ...]:
        """Replica number by DP rank. See [DP order]."""
        return tuple(sorted(range(self.num_replicas), key=lambda replica: -self.degrees[replica]))

    @cached_property
    def dp_degrees(self) -> tuple[int, ...]:
        """TP degree by DP rank."""
        return tuple(self.degrees[replica] for replica in self.dp_order)

    @property
    def distinct_degrees(self) -> tuple[int, ...]:
        """The different degrees of the job, highest first."""
        return tuple(sorted(set(self.degrees), reverse=True))

    @property
    def sync_degree(self) -> int:
        return min(self.degrees)

    @property
    def is_uniform(self) -> bool:
        """Whether all replicas have the same degree, so that nothing is ever resharded."""
        return len(set(self.degrees)) == 1

    @property
    def is_reduced(self) -> bool:
        """Whether any replica has fewer ranks than a healthy one."""
        return any(degree != self.nominal_tp for degree in self.degrees)

    def failed_slots(self, replica: int) -> tuple[int, ...]:
        self._require_replica(replica)
        return self._failed_by_replica.get(replica, ())

    def live_slots(self, replica: int, group: int) -> tuple[int, ...]:
        """Slots of one TP group that got a process, in order of TP rank."""
        return self._working_slots(replica, group)[: self.degrees[replica]]

    def idle_slots(self, replica: int) -> tuple[int, ...]:
        """Slots that work but have no process, as another TP group of the replica is weaker."""
        return tuple(
            slot
            for group in range(self.num_groups)
            for slot in self._working_slots(replica, group)[self.degrees[replica] :]
        )

    def domains(self, replica: int) -> tuple[int, ...]:
        """The scale-up domains of a replica, one per TP group."""
        self._require_replica(replica)
        return tuple(range(replica * self.num_groups, (replica + 1) * self.num_groups))

    # Ranks

    @property
    def world_size(self) -> int:
        """Number of processes that the job starts."""
        return sum(self.degrees) * self.num_groups

    @property
    def nominal_world_size(self) -> int:
        """Number of processes of the same job without failed slots."""
        return self.num_replicas * self.num_slots

    @cached_property
    def ranks(self) -> tuple[RankInfo, ...]:
        """Every process, by global rank. See [Rank order]."""
        ranks: list[RankInfo] = []
        for pp_rank in range(self.pp):
            for dp_rank in range(self.num_replicas):
                for cp_rank in range(self.cp):
                    ranks += self._tp_group(len(ranks), pp_rank, dp_rank, cp_rank)
        return tuple(ranks)

    def rank(self, global_rank: int) -> RankInfo:
        if not 0 <= global_rank < self.world_size:
            raise PlanLookupError(
                f"global rank {global_rank} is outside 0..{self.world_size - 1}, "
                "the ranks of this plan"
            )
        return self.ranks[global_rank]

    def groups(self, *axes: str, core_only: bool = False) -> tuple[tuple[int, ...], ...]:
        """Groups of global ranks that differ only in `axes`, as Megatron orders them.

        Groups come by their first rank, ranks inside a group ascending. Whatever runs over `dp`
        should set `core_only`: extra ranks have no counterpart in replicas of lower degree.
        """
        for axis in axes:
            if axis not in AXES:
                raise PlanLookupError(f"no parallel axis {axis!r}; axes are {', '.join(AXES)}")
        fixed = [f"{axis}_rank" for axis in AXES if axis not in axes]
        found: dict[tuple[int, ...], list[int]] = {}
        for info in self.ranks:
            if info.is_core or not core_only:
                key = tuple(getattr(info, name) for name in fixed)
                found.setdefault(key, []).append(info.global_rank)
        return tuple(tuple(group) for group in found.values())

    @cached_property
    def tp_groups(self) -> tuple[tuple[int, ...], ...]:
        """One group per (pp, dp, cp), extra ranks included."""
        return self.groups("tp")

    @cached_property
    def core_dp_groups(self) -> tuple[tuple[int, ...], ...]:
        """One group of `num_replicas` core ranks per (pp, cp, TP rank < S), in DP order."""
        return self.groups("dp", core_only=True)

    @cached_property
    def core_dp_cp_groups(self) -> tuple[tuple[int, ...], ...]:
        """The same with context parallelism inside: one per (pp, TP rank < S)."""
        return self.groups("dp", "cp", core_only=True)

    @cached_property
    def cp_groups(self) -> tuple[tuple[int, ...], ...]:
        return self.groups("cp")

    @cached_property
    def pp_groups(self) -> tuple[tuple[int, ...], ...]:
        return self.groups("pp")

    @cached_property
    def model_parallel_groups(self) -> tuple[tuple[int, ...], ...]:
        """One group per (dp, cp): every TP rank of every pipeline stage, extra ranks included."""
        return self.groups("tp", "pp")

    @cached_property
    def core_ranks(self) -> tuple[int, ...]:
        return tuple(info.global_rank for info in self.ranks if info.is_core)

    @cached_property
    def extra_ranks(self) -> tuple[int, ...]:
        return tuple(info.global_rank for info in self.ranks if info.is_extra)

    # Internals

    def _tp_group(
        self, first_rank: int, pp_rank: int, dp_rank: int, cp_rank: int
    ) -> list[RankInfo]:
        replica = self.dp_order[dp_rank]
        group = pp_rank * self.cp + cp_rank
        return [
            RankInfo(
                global_rank=first_rank + tp_rank,
                replica=replica,
                dp_rank=dp_rank,
                tp_rank=tp_rank,
                cp_rank=cp_rank,
                pp_rank=pp_rank,
                degree=self.degrees[replica],
                slot=slot,
                domain=replica * self.num_groups + group,
                domain_slot=slot % self.nominal_tp,
                is_core=tp_rank < self.sync_degree,
            )
            for tp_rank, slot in enumerate(self.live_slots(replica, group))
        ]

    @cached_property
    def _failed_by_replica(self) -> dict[int, tuple[int, ...]]:
        found: dict[int, tuple[int, ...]] = {}
        for replica, slot in self.failed:
            found[replica] = (*found.get(replica, ()), slot)
        return found

    def _working_slots(self, replica: int, group: int) -> tuple[int, ...]:
        failed = self.failed_slots(replica)
        if not 0 <= group < self.num_groups:
            raise PlanLookupError(
                f"TP group {group} is outside 0..{self.num_groups - 1}, the groups of a replica "
                f"(pp {self.pp} x cp {self.cp})"
            )
        first = group * self.nominal_tp
        return tuple(slot for slot in range(first, first + self.nominal_tp) if slot not in failed)

    def _require_replica(self, replica: int) -> None:
        if not 0 <= replica < self.num_replicas:
            raise PlanLookupError(f"replica {replica} is outside 0..{self.num_replicas - 1}")

    def _require_slot(self, replica: int, slot: int) -> None:
        """Check one entry of `failed`."""
        require_int("replica of a failed slot", replica, error=PlanTopologyError)
        require_int("failed slot", slot, error=PlanTopologyError)
        if replica >= self.num_replicas:
            raise PlanTopologyError(
                f"failed slot {replica}:{slot}: replica {replica} is outside "
                f"0..{self.num_replicas - 1} (the job has {self.num_replicas} replicas)"
            )
        if slot >= self.num_slots:
            raise PlanTopologyError(
                f"failed slot {replica}:{slot}: slot {slot} is outside 0..{self.num_slots - 1} "
                f"(a replica has pp {self.pp} x cp {self.cp} x tp {self.nominal_tp} slots)"
            )

    def _dead_replica(self, replica: int) -> str:
        groups = [g for g in range(self.num_groups) if not self._working_slots(replica, g)]
        return (
            f"replica {replica} has TP degree 0: all {self.nominal_tp} slots of its TP group "
            f"{', '.join(map(str, groups))} have failed (failed slots: "
            f"{_commas(self.failed_slots(replica))}). Drop the replica from the job and plan for "
            f"{self.num_replicas - 1} replicas"
        )


def parse_degrees(text: str) -> tuple[int, ...]:
    """`8,8,7` -> (8, 8, 7): the TP degree of each replica, by replica number."""
    degrees: list[int] = []
    for place, item in enumerate(_items(text, "TP degrees", "8,8,7")):
        degree = _natural(item)
        if not degree:
            raise PlanTopologyError(
                f"TP degrees {text!r}: item {place} is {item!r}, expected an integer of at least 1 "
                "(one per replica, such as 8,8,7)"
            )
        degrees.append(degree)
    return tuple(degrees)


def parse_failed(text: str) -> tuple[FailedSlot, ...]:
    """`1:3,2:0` -> ((1, 3), (2, 0)): replica and slot of each failed GPU. Blank text is none."""
    failed: list[FailedSlot] = []
    for place, item in enumerate(_items(text, "failed slots", "1:3,2:0") if text.strip() else ()):
        replica, _, slot = (part.strip() for part in item.partition(":"))
        pair = (_natural(replica), _natural(slot))
        if pair[0] is None or pair[1] is None:
            raise PlanTopologyError(
                f"failed slots {text!r}: item {place} is {item!r}, expected replica:slot "
                "(two integers from 0, such as 1:3)"
            )
        if pair in failed:
            raise PlanTopologyError(f"failed slots {text!r}: {item!r} is named twice")
        failed.append((pair[0], pair[1]))
    return tuple(failed)


def format_failed(failed: Iterable[FailedSlot]) -> str:
    """The inverse of `parse_failed`."""
    return ",".join(f"{replica}:{slot}" for replica, slot in failed)


def format_degrees(degrees: Iterable[int]) -> str:
    """`8x510,7,6`: degrees by replica number, with repeats counted."""
    runs = ((degree, len(list(same))) for degree, same in groupby(degrees))
    return ",".join(
        f"{degree}x{count}" if count > 3 else ",".join([str(degree)] * count)
        for degree, count in runs
    )


def _items(text: str, what: str, example: str) -> list[str]:
    items = [item.strip() for item in text.split(",")]
    if "" in items:
        raise PlanTopologyError(
            f"{what} {text!r}: item {items.index('')} is empty; write them like {example}"
        )
    return items


def _natural(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() else None


def _commas(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def _disagreement(topology: Topology, degrees: Sequence[int]) -> str:
    differing = [
        f"replica {replica}: degree {given} given, {derived} left by failed slots "
        f"[{_commas(topology.failed_slots(replica))}]"
        for replica, (given, derived) in enumerate(zip(degrees, topology.degrees, strict=True))
        if given != derived
    ]
    return (
        f"degrees {format_degrees(degrees)} disagree with failed slots "
        f"{format_failed(topology.failed) or 'none'}, which leave degrees "
        f"{format_degrees(topology.degrees)} of nominal TP {topology.nominal_tp} "
        f"({'; '.join(differing)}). Give one of the two, or make them agree"
    )
