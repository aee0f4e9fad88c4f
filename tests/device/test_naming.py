"""CUDA_VISIBLE_DEVICES in all its forms, and GPUs by UUID."""

from __future__ import annotations

import pytest
from fake_nvml import FakeNode

from megatron_ntp.device.errors import DeviceError, Fault
from megatron_ntp.device.naming import (
    find_gpus,
    is_gpu_uuid,
    list_gpus,
    resolve_visible,
    select_gpus,
    visible_gpus,
)
from megatron_ntp.device.nvml import DeviceLayer, GpuIdentity

UUIDS = (
    "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
    "GPU-8932f938-d72c-4106-c12f-20bd9faed9f7",
    "GPU-11111111-d72c-4106-c12f-20bd9faed9f8",
)
MIG = ("MIG-aaaaaaaa-0000-0000-0000-000000000001", "MIG-aaaabbbb-0000-0000-0000-000000000002")
ALIKE = tuple(GpuIdentity(index, uuid, "H100") for index, uuid in enumerate(UUIDS))
WITH_MIG = (*ALIKE[:2], GpuIdentity(2, UUIDS[2], "H100", mig_uuids=MIG))
MIXED = (*ALIKE[:2], GpuIdentity(2, UUIDS[2], "A100"))


@pytest.mark.parametrize(
    ("spec", "indices"),
    [
        (None, (0, 1, 2)),
        ("", ()),
        ("2,0", (2, 0)),
        (" 1 , 2 ", (1, 2)),
        (UUIDS[1], (1,)),
        ("GPU-8932f938,0", (1, 0)),
        ("GPU-1", (2,)),
    ],
)
def test_forms_of_cuda_visible_devices(spec: str | None, indices: tuple[int, ...]) -> None:
    found = resolve_visible(spec, ALIKE)
    assert found.uuids == tuple(UUIDS[index] for index in indices)
    assert found.ignored == ()


@pytest.mark.parametrize(
    ("spec", "indices", "ignored"),
    [
        ("0,-1,2", (0,), ("-1", "2")),
        ("0,3,1", (0,), ("3", "1")),
        ("1,GPU-8932f93,0", (1,), ("GPU-8932f93", "0")),  # two GPUs begin like this
        ("GPU-ffff", (), ("GPU-ffff",)),
        ("none", (), ("none",)),
        ("0,,1", (0,), ("", "1")),
    ],
)
def test_cuda_stops_at_the_first_entry_that_is_no_device(
    spec: str, indices: tuple[int, ...], ignored: tuple[str, ...]
) -> None:
    found = resolve_visible(spec, ALIKE)
    assert found.uuids == tuple(UUIDS[index] for index in indices)
    assert found.ignored == ignored


def test_a_gpu_named_twice_is_an_error() -> None:
    with pytest.raises(ValueError, match="second time"):
        resolve_visible(f"0,{UUIDS[0]}", ALIKE)


def test_mig_slices_lead_to_their_board() -> None:
    found = resolve_visible(f"{MIG[1]},MIG-aaaaaaaa", WITH_MIG)
    assert [(gpu.uuid, gpu.mig_uuid) for gpu in found.gpus] == [
        (UUIDS[2], MIG[1]),
        (UUIDS[2], MIG[0]),
    ]
    assert resolve_visible("MIG-aaaa", WITH_MIG).ignored == ("MIG-aaaa",)  # two begin like this


def test_indices_on_a_mixed_node_need_pci_order() -> None:
    with pytest.raises(ValueError, match="CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        visible_gpus({"CUDA_VISIBLE_DEVICES": "1"}, MIXED)
    environ = {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert visible_gpus(environ, MIXED).uuids == (UUIDS[1],)
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": UUIDS[2]}, MIXED).uuids == (UUIDS[2],)
    assert visible_gpus({}, MIXED).uuids == UUIDS


def test_lost_gpu_keeps_its_index_and_hides_what_follows() -> None:
    gpus = (ALIKE[0], GpuIdentity(1, None, fault=Fault.LOST), ALIKE[2])
    assert resolve_visible("2,0", gpus).uuids == (UUIDS[2], UUIDS[0])
    assert resolve_visible("0,1,2", gpus).ignored == ("1", "2")
    assert resolve_visible(None, gpus).uuids == (UUIDS[0], UUIDS[2])


def test_list_gpus_of_a_node(node: FakeNode, layer: DeviceLayer) -> None:
    node.gpu(3).lost = 1
    node.gpu(5).add_mig(MIG[0])
    found = list_gpus(layer)
    assert [gpu.index for gpu in found] == list(range(8))
    assert (found[3].uuid, found[3].fault) == (None, Fault.LOST)
    assert found[5].mig_uuids == (MIG[0],) and found[5].uuid == node.uuids[5]
    assert found[6].pci_bus_id == "00000000:16:00.0"


def test_operators_name_gpus_by_index_or_uuid() -> None:
    assert find_gpus(["1", UUIDS[0], "GPU-1"], ALIKE) == (UUIDS[1], UUIDS[0], UUIDS[2])
    for name in ("7", "GPU-8932f93", "MIG-aaaaaaaa", "all"):
        with pytest.raises(DeviceError, match="names no GPU") as caught:
            find_gpus([name], WITH_MIG)
        assert caught.value.fault is Fault.NOT_FOUND


def test_gpus_option() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "2,1"}
    assert select_gpus(None, ALIKE, environ) == UUIDS
    assert select_gpus("cuda", ALIKE, environ) == (UUIDS[2], UUIDS[1])
    assert select_gpus("0,GPU-1", ALIKE, environ) == (UUIDS[0], UUIDS[2])


@pytest.mark.parametrize(
    "text", ["", "GPU-1", "../../etc/passwd", UUIDS[0] + "/x", UUIDS[0].upper(), MIG[0]]
)
def test_only_uuids_of_whole_gpus_pass_for_one(text: str) -> None:
    assert not is_gpu_uuid(text)
    assert is_gpu_uuid(UUIDS[0])
