"""Which rank of a training job has which GPU, and which of them hold sessions of the power boost.

[Seats] Power is set per node and budgeted per scale-up domain, so there is one session for the
ranks of each domain on each host, held by the lowest of them. A node with two replicas has two, a
TP group over two nodes has two as well.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_ntp.device.errors import DeviceError, Fault
from megatron_ntp.device.naming import VISIBLE_VARIABLE, is_gpu_uuid, list_gpus, visible_gpus
from megatron_ntp.device.nvml import GpuIdentity
from megatron_ntp.device.nvml_process import NvmlProcess
from megatron_ntp.device.settings import PowerSettings
from megatron_ntp.device.site import SitePower
from megatron_ntp.plan.topology import Topology


@dataclass(frozen=True)
class RankGpu:
    """What a rank says of itself. Without `uuid`, `why` and `fault` say what is wrong."""

    host: str
    uuid: str | None
    why: str = ""
    fault: str = ""


@dataclass(frozen=True)
class Seat:
    """The ranks of one domain on one host. See [Seats]."""

    domain: int
    host: str
    ranks: tuple[int, ...]

    @property
    def holder(self) -> int:
        return self.ranks[0]


def is_behind(topology: Topology, replica: int) -> bool:
    """Whether others will wait for this replica: some replica of the job has a higher degree."""
    return topology.degrees[replica] < max(topology.degrees)


def wanted_domains(topology: Topology, settings: PowerSettings, site: SitePower) -> tuple[int, ...]:
    """Domains that need a session: those that lag, and all where a nominal limit is to be set.

    A nominal limit is stated by the flag, the site file, or the site file of a helper that this
    process cannot read; the latter counts only where something is boosted.
    """
    behind = {
        domain
        for replica in range(topology.num_replicas)
        if is_behind(topology, replica)
        for domain in topology.domains(replica)
    }
    helper = settings.ntp_power_socket is not None or settings.ntp_power_command is not None
    stated = settings.ntp_power_nominal is not None or site.gpu.nominal_w is not None
    if stated or (behind and helper):
        return tuple(range(topology.num_replicas * topology.num_groups))
    return tuple(sorted(behind))


def own_gpu(environ: Mapping[str, str], local_rank: int, deadline_s: float) -> RankGpu:
    """The GPU that Megatron gives to this rank: entry `local_rank` of what CUDA shows."""
    host = socket.gethostname()
    try:
        visible = visible_gpus(environ, _gpus_to_name(environ, deadline_s))
    except DeviceError as error:
        return RankGpu(host, None, str(error), error.fault.value)
    except ValueError as error:
        return RankGpu(host, None, str(error), Fault.NOT_FOUND.value)
    shown = f"{VISIBLE_VARIABLE}={environ.get(VISIBLE_VARIABLE, '(unset)')}"
    if local_rank >= len(visible.gpus):
        why = f"{shown} shows {len(visible.gpus)} GPUs, and none to local rank {local_rank}"
        return RankGpu(host, None, why, Fault.NOT_FOUND.value)
    gpu = visible.gpus[local_rank]
    if gpu.mig_uuid is not None:
        why = f"{gpu.mig_uuid} is a MIG slice, which shares its board's limit with others"
        return RankGpu(host, None, why, Fault.NOT_SUPPORTED.value)
    return RankGpu(host, gpu.uuid)


def _gpus_to_name(environ: Mapping[str, str], deadline_s: float) -> tuple[GpuIdentity, ...]:
    """What visible devices are looked up in: the node's GPUs, or full UUIDs as they stand."""
    spec = environ.get(VISIBLE_VARIABLE)
    named = [entry.strip() for entry in (spec or "").split(",")]
    if spec is not None and all(is_gpu_uuid(entry) for entry in named):
        return tuple(GpuIdentity(index, uuid) for index, uuid in enumerate(dict.fromkeys(named)))
    if spec is not None and not spec.strip():
        return ()
    return node_gpus(deadline_s)


def node_gpus(deadline_s: float) -> tuple[GpuIdentity, ...]:
    """All GPUs of this node, asked by a process of its own. Raises DeviceError."""
    layer = NvmlProcess(deadline_s)
    try:
        return list_gpus(layer)
    finally:
        layer.close()


def seats(topology: Topology, gpus: Sequence[RankGpu]) -> tuple[Seat, ...]:
    """Every seat of the job. `gpus` by global rank."""
    found: dict[tuple[int, str], list[int]] = {}
    for info, gpu in zip(topology.ranks, gpus, strict=True):
        found.setdefault((info.domain, gpu.host), []).append(info.global_rank)
    return tuple(Seat(domain, host, tuple(ranks)) for (domain, host), ranks in found.items())


def unused_gpus(node: Sequence[str], used: Sequence[str | None], num_dead: int) -> tuple[str, ...]:
    """The dead GPUs of a node, as far as they can be told: those that no rank has.

    Where more are unused than are dead, some belong to other jobs, and none is named.
    """
    unused = tuple(uuid for uuid in node if uuid not in used)
    return unused if len(unused) <= num_dead else ()
