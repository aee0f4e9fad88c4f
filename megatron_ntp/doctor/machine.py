"""The machine: driver, GPUs and shared memory."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections import Counter
from pathlib import Path

from megatron_ntp.doctor.findings import Finding, fail, note, ok, warn
from megatron_ntp.doctor.software import torch_cuda

NVML_DEADLINE_S = 5.0
MIN_SHM_BYTES = 1 << 30

# Oldest driver branch for each CUDA major version, as NVIDIA documents it.
_MIN_DRIVER = {11: 450, 12: 525, 13: 580}
_DRIVER_VERSION = Path("/sys/module/nvidia/version")


def check_machine() -> list[Finding]:
    """Findings about the machine this runs on."""
    findings = [_platform()]
    driver = driver_version()
    if driver is None:
        findings.append(
            warn(
                "driver",
                "no NVIDIA driver is loaded",
                "nothing to do for rehearsals (`megatron-ntp rehearse`, `run --cpu`); for training "
                "run the doctor on a GPU node",
            )
        )
    else:
        findings.append(_driver(driver, torch_cuda()))
        findings += _gpus()
    return [*findings, *_shared_memory()]


def driver_version() -> str | None:
    """Version of the loaded kernel driver."""
    try:
        return _DRIVER_VERSION.read_text().strip()
    except OSError:
        return None


def _platform() -> Finding:
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    found = f"{sys.platform}, {os.cpu_count()} CPUs, {memory_gib:.0f} GiB"
    if sys.platform == "linux":
        return ok("machine", found)
    return fail("machine", found, "megatron-ntp runs on Linux only")


def _driver(version: str, cuda: str | None) -> Finding:
    if cuda is None:
        return fail(
            "driver",
            f"{version}, but torch was built for CPU only",
            "install a CUDA build of torch",
        )
    needed = _MIN_DRIVER.get(int(cuda.partition(".")[0]))
    branch = re.match(r"\d+", version)
    if needed is not None and branch is not None and int(branch.group()) < needed:
        return fail(
            "driver",
            f"{version} is too old for torch's CUDA {cuda}",
            f"update the driver to branch {needed} or newer, or install torch for an older CUDA",
        )
    return ok("driver", f"{version}, fits torch's CUDA {cuda}")


def _gpus() -> list[Finding]:
    if importlib.util.find_spec("pynvml") is None:
        return [note("GPUs", "not looked at: nvidia-ml-py is not installed")]
    from megatron_ntp.device.errors import DeviceError
    from megatron_ntp.device.naming import list_gpus, visible_gpus
    from megatron_ntp.device.nvml_process import NvmlProcess

    layer = NvmlProcess(NVML_DEADLINE_S)
    try:
        gpus = list_gpus(layer)
        visible = visible_gpus(os.environ, gpus)
    except DeviceError as error:
        return [fail("GPUs", str(error), "see `nvidia-smi` and the kernel log on this node")]
    except ValueError as error:
        return [fail("GPUs", str(error), "correct CUDA_VISIBLE_DEVICES")]
    finally:
        layer.close()
    findings = [
        fail(
            "GPUs",
            f"GPU {gpu.index} cannot be asked: {gpu.fault}",
            "leave it out: name it with --ntp-failed and hide it with CUDA_VISIBLE_DEVICES",
        )
        for gpu in gpus
        if gpu.uuid is None
    ]
    if visible.ignored:
        entries = ",".join(visible.ignored)
        findings.append(
            fail("GPUs", f"CUDA_VISIBLE_DEVICES: CUDA ignores {entries}", "name existing GPUs")
        )
    boards = Counter(gpu.name for gpu in gpus if gpu.uuid is not None)
    if boards:
        found = ", ".join(f"{count} x {name}" for name, count in boards.items())
        found += f"; {len(visible.gpus)} visible here"
        mixed = "a TP group is as slow as its slowest board: plan each group on equal ones"
        findings.append(ok("GPUs", found) if len(boards) == 1 else warn("GPUs", found, mixed))
    elif not gpus:
        findings.append(warn("GPUs", "the driver shows none", "see `nvidia-smi -L`"))
    return findings


def _shared_memory() -> list[Finding]:
    """NCCL and data loaders exchange through /dev/shm, which containers make small."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return []
    nbytes = found.f_frsize * found.f_blocks
    if nbytes >= MIN_SHM_BYTES:
        return []
    return [
        warn(
            "/dev/shm",
            f"holds {nbytes / 2**20:.0f} MiB only",
            "start the container with a larger one (docker run --shm-size=16g or --ipc=host)",
        )
    ]
