"""Fixtures of the device tests: an imagined node, and NVML on it in this process.

No GPU and no driver is needed. Where a machine has a driver, nvidia-ml-py of this process must not
be sent to the imagined library, so there the calls go through a process of their own.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_nvml import FakeNode
from power_helper_site import helper_site

from megatron_ntp.device.files import Folder
from megatron_ntp.device.nvml import DeviceLayer, Nvml
from megatron_ntp.device.nvml_process import NvmlProcess
from megatron_ntp.device.state import HostIdentity, LimitStore

if shutil.which("gcc") is None:
    collect_ignore_glob = ["test_*.py"]
    warnings.warn("device tests need gcc, to build their libnvidia-ml.so.1", stacklevel=1)

__all__ = ["helper_site"]  # a fixture

DRIVER_DEVICE = Path("/dev/nvidiactl")


@pytest.fixture
def node(tmp_path: Path) -> FakeNode:
    return FakeNode.create(tmp_path, num_gpus=8)


@pytest.fixture
def layer(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceLayer]:
    """NVML on the node. The same code as in production, without the process around it."""
    for name in ("FAKE_NVML_STATE", "LD_LIBRARY_PATH"):
        monkeypatch.setenv(name, node.env()[name])
    found: DeviceLayer
    if DRIVER_DEVICE.exists():
        found = NvmlProcess(5.0)
    else:
        node.load_here()
        found = Nvml()
    yield found
    found.close()


@pytest.fixture
def process_layer(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> Iterator[NvmlProcess]:
    for name in ("FAKE_NVML_STATE", "LD_LIBRARY_PATH"):
        monkeypatch.setenv(name, node.env()[name])
    found = NvmlProcess(1.0)
    yield found
    found.close()


@pytest.fixture
def host() -> dict[str, HostIdentity]:
    """The node's identity; a test replaces host["now"] to reboot or to load the driver anew."""
    return {"now": HostIdentity("boot-1", "driver-1")}


@pytest.fixture
def make_store(tmp_path: Path, host: dict[str, HostIdentity]) -> Callable[[], LimitStore]:
    return lambda: LimitStore(Folder(tmp_path / "state", private=True), lambda: host["now"])
