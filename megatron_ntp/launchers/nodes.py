"""Which GPU of which node is which rank: the one place where that is decided.

[Slots] Nodes are taken in order, each with the same number of slots. Slot `i` of a node is the i-th
device that a process there sees (so a container or Slurm may renumber), or a dead one. All slots in
a row are the slots of the job: replica 0 first, as `plan.topology` numbers them.

[Agents] torchrun gives one node consecutive ranks. The plan wants the lowest degree last. Where a
node holds one TP group, or part of one, both are met by giving the nodes their torchrun ranks in
plan order. A node with several TP groups of different degree gets one torchrun for each run of
consecutive ranks. Each is an *agent*; a node whose slots are all dead or idle has none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatron_ntp.errors import PlanFormatError, PlanTopologyError
from megatron_ntp.plan.topology import RankInfo, Topology, format_degrees, format_failed

PLACEMENT_VERSION = 1


@dataclass(frozen=True)
class Slot:
    """One GPU slot. `device` is an entry of CUDA_VISIBLE_DEVICES, None where it is unusable."""

    device: str | None
    reason: str = ""


@dataclass(frozen=True)
class Node:
    """A node as its own check describes it. Nodes of one `block` share a scale-up domain."""

    host: str
    slots: tuple[Slot, ...]
    block: str = ""

    @property
    def num_dead(self) -> int:
        return sum(slot.device is None for slot in self.slots)

    def to_json(self) -> str:
        """For the file through which a node reports."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Node:
        """The inverse of `to_json`."""
        found = json.loads(text)
        slots = tuple(Slot(**slot) for slot in found.pop("slots"))
        return cls(slots=slots, **found)


def silent_node(host: str, num_slots: int) -> Node:
    """A node that did not report."""
    return Node(host, (Slot(None, "the node did not report"),) * num_slots)


def distrust_numbers(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Takes the slots of nodes that know GPUs by number alone where others know them by UUID.

    Such a node has no driver, like one that came back from a reboot without it: ranks would fail
    there, and all others with them.
    """
    if not any(_is_uuid(slot.device) for node in nodes for slot in node.slots):
        return tuple(nodes)
    reason = "its GPUs are known by number only, those of other nodes by UUID: no driver?"
    return tuple(
        replace(
            node,
            slots=tuple(
                slot if slot.device is None or _is_uuid(slot.device) else Slot(None, reason)
                for slot in node.slots
            ),
        )
        for node in nodes
    )


def _is_uuid(device: str | None) -> bool:
    return device is not None and device.startswith(("GPU-", "MIG-"))


@dataclass(frozen=True)
class Shape:
    """The healthy job. `num_replicas` None: as many as the nodes hold."""

    tp: int
    pp: int = 1
    cp: int = 1
    gpus_per_node: int = 8
    num_replicas: int | None = None

    @property
    def slots_per_replica(self) -> int:
        return self.tp * self.pp * self.cp


@dataclass(frozen=True)
class Agent:
    """One torchrun: consecutive ranks on the devices of one node."""

    host: str
    first_rank: int
    devices: tuple[str, ...]
    slots: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        return len(self.devices)


@dataclass(frozen=True)
class Excluded:
    """A slot that gets no rank, and why."""

    host: str
    slot: int
    reason: str


@dataclass(frozen=True)
class Placement:
    """Who starts what. Agents in the order of their torchrun rank."""

    tp: int
    degrees: tuple[int, ...]
    failed: str
    world_size: int
    agents: tuple[Agent, ...]
    excluded: tuple[Excluded, ...]
    spare_hosts: tuple[str, ...] = ()
    version: int = PLACEMENT_VERSION

    def agents_of(self, host: str) -> tuple[tuple[int, Agent], ...]:
        """(torchrun rank, agent) of one node."""
        return tuple((rank, agent) for rank, agent in enumerate(self.agents) if agent.host == host)

    def to_json(self) -> str:
        """For the file that every node reads."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Placement:
        """The inverse of `to_json`. Raises PlanFormatError."""
        try:
            found: dict[str, Any] = json.loads(text)
            if found["version"] != PLACEMENT_VERSION:
                raise PlanFormatError(
                    f"the placement has version {found['version']}, this megatron-ntp reads "
                    f"{PLACEMENT_VERSION}. Use one version on all nodes"
                )
            found["agents"] = tuple(_agent(entry) for entry in found["agents"])
            found["excluded"] = tuple(Excluded(**entry) for entry in found["excluded"])
            found["degrees"] = tuple(found["degrees"])
            found["spare_hosts"] = tuple(found["spare_hosts"])
            return cls(**found)
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, PlanFormatError):
                raise
            raise PlanFormatError(f"not a placement: {error!r}. Make it again") from error

    def table(self) -> str:
        """For people: nodes with their ranks and devices, then what is left out."""
        lines = [
            f"TP degrees {format_degrees(self.degrees)} of {self.tp}, {self.world_size} processes"
        ]
        width = max(len(agent.host) for agent in self.agents)
        for rank, agent in enumerate(self.agents):
            last = agent.first_rank + agent.num_ranks - 1
            ranks = f"ranks {agent.first_rank}-{last}"
            devices = ",".join(agent.devices)
            lines.append(f"  torchrun {rank}: {agent.host:<{width}}  {ranks}  devices {devices}")
        lines += [f"  without {e.host} slot {e.slot}: {e.reason}" for e in self.excluded]
        lines += [f"  spare: {host}" for host in self.spare_hosts]
        return "\n".join(lines)


def _agent(entry: Mapping[str, Any]) -> Agent:
    lists = {key: tuple(entry[key]) for key in ("devices", "slots")}
    return Agent(**{**entry, **lists})


Cell = tuple[tuple[int, int], ...]
"""The slots of one TP group, dead ones included, as (node, slot)."""


def place(nodes: Sequence[Node], shape: Shape) -> Placement:
    """Ranks and devices of a job on these nodes.

    Raises:
        PlanTopologyError: the nodes cannot hold the job, or a replica has nothing left.
    """
    check_nodes(nodes, shape)
    used = _choose(nodes, shape)
    slots = [(node, slot) for node in used for slot in range(shape.gpus_per_node)]
    cells = [tuple(slots[i : i + shape.tp]) for i in range(0, len(slots), shape.tp)]
    return arrange(nodes, cells, shape)


def arrange(nodes: Sequence[Node], cells: Sequence[Cell], shape: Shape) -> Placement:
    """Ranks and devices of these TP groups, `pp * cp` of them per replica, replica by replica.

    Raises:
        PlanTopologyError: a replica has nothing left.
    """
    num_replicas = len(cells) * shape.tp // shape.slots_per_replica
    failed = [
        divmod(domain * shape.tp + place_in_cell, shape.slots_per_replica)
        for domain, cell in enumerate(cells)
        for place_in_cell, (node, slot) in enumerate(cell)
        if nodes[node].slots[slot].device is None
    ]
    topology = Topology.from_failed(num_replicas, shape.tp, failed, pp=shape.pp, cp=shape.cp)
    agents = _agents(nodes, cells, topology)
    used = {node for cell in cells for node, _ in cell}
    return Placement(
        tp=shape.tp,
        degrees=topology.degrees,
        failed=format_failed(topology.failed),
        world_size=topology.world_size,
        agents=agents,
        excluded=_excluded(nodes, cells, agents),
        spare_hosts=tuple(node.host for i, node in enumerate(nodes) if i not in used),
    )


def check_nodes(nodes: Sequence[Node], shape: Shape) -> None:
    """Raises PlanTopologyError unless TP groups fill the nodes' slots, and hosts differ."""
    big, small = max(shape.tp, shape.gpus_per_node), min(shape.tp, shape.gpus_per_node)
    if small < 1 or big % small:
        raise PlanTopologyError(
            f"TP {shape.tp} on nodes of {shape.gpus_per_node} GPUs: one must divide the other, so "
            "that no TP group shares a node with part of another one"
        )
    for node in nodes:
        if len(node.slots) != shape.gpus_per_node:
            raise PlanTopologyError(
                f"node {node.host} reported {len(node.slots)} slots, the job has "
                f"{shape.gpus_per_node} per node. Give both commands the same number"
            )
    hosts = [node.host for node in nodes]
    twice = sorted({host for host in hosts if hosts.count(host) > 1})
    if twice:
        raise PlanTopologyError(f"nodes are named twice: {', '.join(twice)}")


def wanted_replicas(num_nodes: int, shape: Shape) -> int:
    """Replicas of the healthy job. Raises PlanTopologyError where the nodes do not hold them."""
    available = num_nodes * shape.gpus_per_node
    wanted = shape.num_replicas
    if wanted is None:
        wanted, rest = divmod(available, shape.slots_per_replica)
        if rest or not wanted:
            raise PlanTopologyError(
                f"{num_nodes} nodes of {shape.gpus_per_node} GPUs are {available} slots, no "
                f"multiple of tp {shape.tp} x pp {shape.pp} x cp {shape.cp} = "
                f"{shape.slots_per_replica}. Change the number of nodes, or say how many replicas "
                "the job has: the nodes left over are spares"
            )
    if wanted * shape.slots_per_replica > available:
        raise PlanTopologyError(
            f"{wanted} replicas of {shape.slots_per_replica} GPUs do not fit {num_nodes} nodes of "
            f"{shape.gpus_per_node}. Ask for more nodes or fewer replicas"
        )
    return wanted


def _choose(nodes: Sequence[Node], shape: Shape) -> list[int]:
    """Whole TP groups of nodes for the job; the most damaged are left to spare."""
    size = max(1, shape.tp // shape.gpus_per_node)
    wanted = wanted_replicas(len(nodes), shape)
    needed, rest = divmod(wanted * shape.slots_per_replica, shape.gpus_per_node)
    if rest:
        raise PlanTopologyError(
            f"{wanted} replicas of {shape.slots_per_replica} GPUs do not fill whole nodes of "
            f"{shape.gpus_per_node}. Choose a number that does"
        )
    units = node_sets(nodes, size)
    if len(units) * size < needed:
        raise PlanTopologyError(
            f"a TP group of {shape.tp} needs {size} nodes of one block, and the allocation has "
            f"only {len(units)} such sets, not {needed // size}. Ask Slurm for --segment={size}"
        )
    damage = sorted(range(len(units)), key=lambda i: (sum(nodes[n].num_dead for n in units[i]), i))
    kept = sorted(damage[: needed // size])
    return [node for i in kept for node in units[i]]


def node_sets(nodes: Sequence[Node], size: int) -> list[list[int]]:
    """Nodes in sets of `size` that hold whole TP groups, none of them across blocks."""
    blocks: dict[str, list[int]] = {}
    for number, node in enumerate(nodes):
        blocks.setdefault(node.block if size > 1 else "", []).append(number)
    return [
        members[i : i + size]
        for members in blocks.values()
        for i in range(0, len(members) - size + 1, size)
    ]


def _agents(nodes: Sequence[Node], cells: Sequence[Cell], topology: Topology) -> tuple[Agent, ...]:
    """Runs of consecutive ranks on one node. See [Agents]."""
    runs: list[tuple[int, list[RankInfo]]] = []
    for info in topology.ranks:
        node, _ = cells[info.domain][info.domain_slot]
        if not runs or runs[-1][0] != node:
            runs.append((node, []))
        runs[-1][1].append(info)
    agents = []
    for node, ranks in runs:
        slots = tuple(cells[info.domain][info.domain_slot][1] for info in ranks)
        devices = tuple(nodes[node].slots[slot].device for slot in slots)
        assert None not in devices, f"a dead slot of {nodes[node].host} got a rank"
        named = tuple(str(device) for device in devices)
        agents.append(Agent(nodes[node].host, ranks[0].global_rank, named, slots))
    return tuple(agents)


def _excluded(
    nodes: Sequence[Node], cells: Sequence[Cell], agents: Sequence[Agent]
) -> tuple[Excluded, ...]:
    """Slots without a rank, of nodes that have some."""
    taken = {(agent.host, slot) for agent in agents for slot in agent.slots}
    in_cells = {where for cell in cells for where in cell}
    used = {node for node, _ in in_cells}

    def why(node: int, slot: int) -> str:
        if nodes[node].slots[slot].device is None:
            return nodes[node].slots[slot].reason
        if (node, slot) in in_cells:
            return "idle: another TP group of its replica is weaker"
        return "idle: of no replica"

    return tuple(
        Excluded(nodes[node].host, slot, why(node, slot))
        for node in sorted(used)
        for slot in range(len(nodes[node].slots))
        if (nodes[node].host, slot) not in taken
    )
