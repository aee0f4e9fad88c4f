"""Records and claims: what is known of a changed limit, and who may change it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_nvml import FakeNode

from megatron_ntp.device.errors import DeviceError, Fault
from megatron_ntp.device.files import Folder, read_regular, write_atomic
from megatron_ntp.device.nvml import DeviceLayer, PowerScope
from megatron_ntp.device.state import (
    HostIdentity,
    LimitRecord,
    LimitStore,
    Outcome,
    default_folder,
    restore_all,
    settle,
)

MakeStore = Callable[[], LimitStore]


def boosted(node: FakeNode, store: LimitStore, layer: DeviceLayer, index: int = 0) -> LimitRecord:
    """GPU found at 500 W, on record, and now at 700 W."""
    host = store.read_host()
    record = LimitRecord(
        uuid=node.uuids[index],
        job_id="job-1",
        scope=PowerScope.GPU,
        found_mw=500_000,
        ours_mw=(600_000, 700_000),
        boot_id=host.boot_id,
        driver_id=host.driver_id,
        energy_mj=layer.reading(node.uuids[index]).energy_mj,
    )
    store.write(record)
    node.gpu(index).set_limit_w(700)
    return record


def test_record_survives_the_disk(
    node: FakeNode, layer: DeviceLayer, make_store: MakeStore
) -> None:
    record = boosted(node, make_store(), layer)
    assert make_store().read(record.uuid) == record
    assert make_store().read(node.uuids[1]) is None
    assert make_store().recorded_uuids() == [record.uuid]
    assert record.about_to_write(650_000, None).ours_mw == (600_000, 700_000, 650_000)
    assert record.landed(650_000).ours_mw == (650_000,)


@pytest.mark.parametrize(
    ("limit_w", "outcome", "after_w"),
    [
        (700, Outcome.RESTORED, 500),
        (600, Outcome.RESTORED, 500),  # the write before the last: the last never landed
        (500, Outcome.UNCHANGED, 500),
        (650, Outcome.CHANGED, 650),
    ],
)
def test_our_values_are_told_from_others(
    node: FakeNode,
    layer: DeviceLayer,
    make_store: MakeStore,
    limit_w: int,
    outcome: Outcome,
    after_w: int,
) -> None:
    store = make_store()
    record = boosted(node, store, layer)
    node.gpu(0).set_limit_w(limit_w)
    assert settle(layer, store, record).outcome is outcome
    assert node.gpu(0).requested_w == after_w
    assert store.read(record.uuid) is None


def test_reboot_leaves_the_limit_alone(
    node: FakeNode, layer: DeviceLayer, make_store: MakeStore, host: dict[str, HostIdentity]
) -> None:
    store = make_store()
    record = boosted(node, store, layer)
    host["now"] = HostIdentity("boot-2", "driver-1")
    assert settle(layer, store, record).outcome is Outcome.REBOOTED
    assert node.writes() == [] and store.recorded_uuids() == []


def test_driver_reload_is_seen_by_its_id(
    node: FakeNode, layer: DeviceLayer, make_store: MakeStore, host: dict[str, HostIdentity]
) -> None:
    store = make_store()
    record = boosted(node, store, layer)
    host["now"] = HostIdentity("boot-1", "driver-2")
    assert settle(layer, store, record).outcome is Outcome.RELOADED
    assert node.writes() == [] and store.recorded_uuids() == []


def test_driver_reload_is_seen_by_the_energy_counter(
    node: FakeNode, layer: DeviceLayer, make_store: MakeStore
) -> None:
    """A GPU reset, or a driver that went idle without persistence, keeps the module's id."""
    store = make_store()
    record = boosted(node, store, layer)
    node.reload_driver()  # limit 700 W again, which is also what we had written
    assert settle(layer, store, record).outcome is Outcome.RELOADED
    assert node.writes() == [] and node.gpu(0).requested_w == 700


def test_lost_gpu_keeps_its_record_for_later(
    node: FakeNode, layer: DeviceLayer, make_store: MakeStore
) -> None:
    store = make_store()
    record = boosted(node, store, layer)
    node.gpu(0).lost = 1
    settled = settle(layer, store, record)
    assert settled.outcome is Outcome.PENDING and settled.fault is Fault.LOST
    assert not settled.is_over and store.read(record.uuid) == record
    node.gpu(0).lost = 0
    assert [entry.outcome for entry in restore_all(layer, store)] == [Outcome.RESTORED]
    assert node.limits_w() == [500.0] * 8


def test_write_that_reads_back_differently_is_not_over(
    node: FakeNode, layer: DeviceLayer, make_store: MakeStore
) -> None:
    store = make_store()
    record = boosted(node, store, layer)
    node.gpu(0).ignores_sets = 1
    settled = settle(layer, store, record)
    assert settled.outcome is Outcome.PENDING and "700 W was read back" in settled.detail
    assert store.read(record.uuid) == record


def test_restore_that_is_refused_is_not_over(
    node: FakeNode, layer: DeviceLayer, make_store: MakeStore
) -> None:
    store = make_store()
    record = boosted(node, store, layer)
    node.add_rule("nvmlDeviceSetPowerManagementLimit", result=4)
    settled = settle(layer, store, record)
    assert (settled.outcome, settled.fault) == (Outcome.PENDING, Fault.NO_PERMISSION)
    assert store.read(record.uuid) == record


def test_claim_excludes_everybody_else(
    node: FakeNode, layer: DeviceLayer, make_store: MakeStore
) -> None:
    claim = make_store().claim(layer, node.uuids[0], "job-1", timeout_s=0)
    with pytest.raises(DeviceError, match=f"job job-1 .pid {os.getpid()}") as caught:
        make_store().claim(layer, node.uuids[0], "job-2", timeout_s=0)
    assert caught.value.fault is Fault.BUSY
    make_store().claim(layer, node.uuids[1], "job-2", timeout_s=0).release()
    claim.release()
    make_store().claim(layer, node.uuids[0], "job-2", timeout_s=0).release()


def test_restore_leaves_gpus_of_live_jobs_alone(
    node: FakeNode, layer: DeviceLayer, make_store: MakeStore
) -> None:
    store = make_store()
    boosted(node, store, layer, 0)
    boosted(node, store, layer, 1)
    claim = store.claim(layer, node.uuids[0], "job-1", timeout_s=0)
    outcomes = {entry.uuid: entry.outcome for entry in restore_all(layer, make_store())}
    assert outcomes == {node.uuids[0]: Outcome.BUSY, node.uuids[1]: Outcome.RESTORED}
    assert node.limits_w()[:2] == [700, 500]
    claim.release()


def test_host_identity_is_read_from_the_given_files(tmp_path: Path) -> None:
    boot_id = tmp_path / "boot_id"
    boot_id.write_text("b-1\n")
    assert HostIdentity.read(boot_id, tmp_path / "none") == HostIdentity("b-1", None)
    driver = tmp_path / "nvidia"
    driver.mkdir()
    first = HostIdentity.read(boot_id, driver)
    assert first.driver_id == str(driver.stat().st_ino)
    assert HostIdentity.read().boot_id.count("-") == 4


def test_default_folder_is_roots_own() -> None:
    assert os.geteuid() != 0 or default_folder() == Path("/run/megatron-ntp/power")


# ---- files that are not ours ----


def test_damaged_record_is_named_and_kept(
    node: FakeNode, layer: DeviceLayer, make_store: MakeStore, tmp_path: Path
) -> None:
    store = make_store()
    record = boosted(node, store, layer)
    path = tmp_path / "state" / f"{record.uuid}.json"
    for text in ("", "{}", '{"uuid": 3}', path.read_text()[:-20]):
        path.write_text(text)
        (settled,) = restore_all(layer, store)
        assert settled.outcome is Outcome.PENDING and "damaged" in settled.detail
    assert path.exists() and node.writes() == []


def test_record_of_another_gpu_is_refused(
    node: FakeNode, layer: DeviceLayer, make_store: MakeStore, tmp_path: Path
) -> None:
    store = make_store()
    record = boosted(node, store, layer)
    source = tmp_path / "state" / f"{record.uuid}.json"
    source.rename(tmp_path / "state" / f"{node.uuids[1]}.json")
    (settled,) = restore_all(layer, store)
    assert "about another GPU" in settled.detail and node.writes() == []


@pytest.mark.parametrize("suffix", [".json", ".lock"])
def test_symlinks_are_not_followed(
    node: FakeNode, layer: DeviceLayer, make_store: MakeStore, tmp_path: Path, suffix: str
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    store = make_store()
    (tmp_path / "state" / f"{node.uuids[0]}{suffix}").symlink_to(victim)
    with pytest.raises(DeviceError, match="cannot be opened"):
        claim = store.claim(layer, node.uuids[0], "job-1", timeout_s=0)
        try:
            store.read(node.uuids[0])
        finally:
            claim.release()
    assert victim.read_text() == "precious"


def test_writing_replaces_a_symlink_instead_of_following_it(
    node: FakeNode, layer: DeviceLayer, make_store: MakeStore, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    link = tmp_path / "state" / f"{node.uuids[0]}.json"
    store = make_store()
    link.symlink_to(victim)
    boosted(node, store, layer)
    assert victim.read_text() == "precious" and not link.is_symlink()


def test_hard_links_and_fifos_are_refused(
    node: FakeNode, make_store: MakeStore, tmp_path: Path
) -> None:
    store = make_store()
    victim = tmp_path / "victim"
    victim.write_text("{}")
    os.link(victim, tmp_path / "state" / f"{node.uuids[0]}.json")
    os.mkfifo(tmp_path / "state" / f"{node.uuids[1]}.json")
    for uuid in node.uuids[:2]:
        with pytest.raises(DeviceError, match="not a plain file of ours"):
            store.read(uuid)


def test_folder_must_be_private(tmp_path: Path) -> None:
    loose = tmp_path / "loose"
    loose.mkdir()
    loose.chmod(0o777)
    with pytest.raises(DeviceError, match="writable by nobody else"):
        Folder(loose, private=True)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(DeviceError, match="without following links"):
        Folder(tmp_path / "link", private=True)
    if os.geteuid() == 0:
        foreign = tmp_path / "foreign"
        foreign.mkdir(mode=0o700)
        os.chown(foreign, 12345, 12345)
        with pytest.raises(DeviceError, match="belongs to uid 12345"):
            Folder(foreign, private=True)


def test_a_folder_nobody_uses_any_more_is_closed(tmp_path: Path) -> None:
    num_open = len(os.listdir("/proc/self/fd"))
    folder = Folder(tmp_path, private=True)
    with folder:
        assert len(os.listdir("/proc/self/fd")) == num_open + 1
    folder.close()  # again, which must not close what has the number now
    Folder(tmp_path / "dropped", private=True)
    loose = tmp_path / "loose"
    loose.mkdir()
    loose.chmod(0o777)
    with pytest.raises(DeviceError, match="writable by nobody else"):
        Folder(loose, private=True)
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_atomic_write_leaves_no_scratch_files(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for text in ("one", "two"):
        write_atomic(path, text)
        assert read_regular(path) == text
    assert os.listdir(tmp_path) == ["file"]
    assert read_regular(tmp_path / "other") is None
    assert read_regular(tmp_path / "no" / "such") is None


@pytest.mark.parametrize("name", ["../../etc/x", "GPU-1", "MIG-aaaaaaaa-0000-0000-0000-0"])
def test_only_uuids_become_file_names(layer: DeviceLayer, make_store: MakeStore, name: str) -> None:
    with pytest.raises(DeviceError, match="not the UUID of a whole GPU"):
        make_store().claim(layer, name, "job-1", timeout_s=0)
