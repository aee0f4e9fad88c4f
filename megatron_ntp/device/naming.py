"""Which GPUs a process means: UUIDs, and what CUDA_VISIBLE_DEVICES says of them.

CUDA_VISIBLE_DEVICES holds indices, UUIDs, unique beginnings of UUIDs ("GPU-8932f937") or names of
MIG slices. CUDA reads it from the left and stops at the first entry that is not a device; so does
`resolve_visible`, and it names what was dropped. An index is CUDA's, which is NVML's only if CUDA
orders by PCI bus or all boards are alike.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_ntp.device.errors import DeviceError, Fault
from megatron_ntp.device.nvml import DeviceLayer, GpuIdentity

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
ORDER_VARIABLE = "CUDA_DEVICE_ORDER"
PCI_ORDER = "PCI_BUS_ID"

# A UUID names state files, so nothing else may pass for one.
_GPU_UUID = re.compile(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True)
class VisibleGpu:
    """One CUDA device. `uuid` is the whole board's; `mig_uuid` the slice, where it is one."""

    uuid: str
    mig_uuid: str | None = None


@dataclass(frozen=True)
class VisibleGpus:
    """What CUDA shows to a process, in its order."""

    gpus: tuple[VisibleGpu, ...]
    ignored: tuple[str, ...] = ()  # from the first entry on that is no device

    @property
    def uuids(self) -> tuple[str, ...]:
        return tuple(gpu.uuid for gpu in self.gpus)


def is_gpu_uuid(text: str) -> bool:
    """Whether a text is the UUID of a whole GPU, and nothing that could lead out of a folder."""
    return _GPU_UUID.fullmatch(text) is not None


def list_gpus(layer: DeviceLayer) -> tuple[GpuIdentity, ...]:
    """All GPUs of the node. One that cannot be asked keeps its index and says why."""
    found = []
    for index in range(layer.count()):
        try:
            found.append(layer.identity(index))
        except DeviceError as error:
            found.append(GpuIdentity(index, uuid=None, fault=error.fault))
    return tuple(found)


def resolve_visible(
    spec: str | None, gpus: Sequence[GpuIdentity], pci_order: bool = False
) -> VisibleGpus:
    """What CUDA makes of CUDA_VISIBLE_DEVICES=spec. None (unset) is every GPU."""
    if spec is None:
        entries = [str(gpu.index) for gpu in gpus if gpu.uuid is not None]
    else:
        entries = [entry.strip() for entry in spec.split(",")] if spec.strip() else []
    by_index = pci_order or spec is None or _alike(gpus)
    visible: list[VisibleGpu] = []
    for position, entry in enumerate(entries):
        gpu = _resolve_entry(entry, gpus, by_index)
        if gpu is None:
            return VisibleGpus(tuple(visible), tuple(entries[position:]))
        if gpu in visible:
            raise ValueError(
                f"{VISIBLE_VARIABLE}={spec}: entry {entry!r} names {gpu.mig_uuid or gpu.uuid} a "
                "second time, so CUDA shows no device at all; name each GPU once"
            )
        visible.append(gpu)
    return VisibleGpus(tuple(visible))


def visible_gpus(environ: Mapping[str, str], gpus: Sequence[GpuIdentity]) -> VisibleGpus:
    """The GPUs of a process with this environment."""
    pci_order = environ.get(ORDER_VARIABLE) == PCI_ORDER
    return resolve_visible(environ.get(VISIBLE_VARIABLE), gpus, pci_order)


def select_gpus(
    spec: str | None, gpus: Sequence[GpuIdentity], environ: Mapping[str, str]
) -> tuple[str, ...]:
    """What an operator's --gpus means: nothing is all, `cuda` what CUDA shows, else names."""
    if spec is None:
        return tuple(gpu.uuid for gpu in gpus if gpu.uuid is not None)
    if spec == "cuda":
        return visible_gpus(environ, gpus).uuids
    return find_gpus(spec.split(","), gpus)


def find_gpus(names: Sequence[str], gpus: Sequence[GpuIdentity]) -> tuple[str, ...]:
    """UUIDs of GPUs that an operator named by index, UUID or beginning of one."""
    found = []
    for name in names:
        gpu = _resolve_entry(name.strip(), gpus, by_index=True)
        if gpu is None or gpu.mig_uuid is not None:
            known = ", ".join(f"{gpu.index}: {gpu.uuid}" for gpu in gpus)
            raise DeviceError(
                Fault.NOT_FOUND, f"{name!r} names no GPU of this node, which has {known or 'none'}"
            )
        found.append(gpu.uuid)
    return tuple(found)


def _alike(gpus: Sequence[GpuIdentity]) -> bool:
    return len({gpu.name for gpu in gpus if gpu.uuid is not None}) <= 1


def _resolve_entry(entry: str, gpus: Sequence[GpuIdentity], by_index: bool) -> VisibleGpu | None:
    if entry.isdecimal():
        if not by_index:
            raise ValueError(
                f"{VISIBLE_VARIABLE} has the index {entry} on a node with different boards, which "
                f"CUDA sorts by speed; set {ORDER_VARIABLE}={PCI_ORDER}, or name GPUs by UUID"
            )
        matches = [VisibleGpu(gpu.uuid) for gpu in gpus if gpu.index == int(entry) and gpu.uuid]
    elif entry.startswith("MIG-"):
        matches = [
            VisibleGpu(gpu.uuid, mig)
            for gpu in gpus
            for mig in gpu.mig_uuids
            if gpu.uuid and mig.startswith(entry)
        ]
    elif entry.startswith("GPU-"):
        matches = [VisibleGpu(gpu.uuid) for gpu in gpus if gpu.uuid and gpu.uuid.startswith(entry)]
    else:
        matches = []
    return matches[0] if len(matches) == 1 else None
