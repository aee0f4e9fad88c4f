"""The keeper's rules, at every write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fake_nvml import FakeNode, SetPrivilege
from power_kit import ROOMY, all_to, make_keeper, request, roomy_site

from megatron_ntp.device.errors import DeviceError, Fault
from megatron_ntp.device.nvml import DeviceLayer, Nvml
from megatron_ntp.device.nvml_process import NvmlProcess
from megatron_ntp.device.site import parse_site
from megatron_ntp.device.state import LimitStore, Outcome, restore_all

MakeStore = Callable[[], LimitStore]


@pytest.fixture
def store(make_store: MakeStore) -> LimitStore:
    return make_store()


def test_boost_and_back(node: FakeNode, layer: DeviceLayer, store: LimitStore) -> None:
    keeper = make_keeper(layer, store, roomy_site())
    reply = keeper.open(request(node.uuids[:7]))
    assert (reply.nominal_mw, reply.ceiling_mw) == (500_000, 700_000)
    assert reply.found_mw == all_to(node.uuids[:7], 500) and reply.board == "Imagined H100"
    results = keeper.set_limits(all_to(node.uuids[:7], 700))
    assert {r.limits.enforced_mw for r in results.values() if r.limits} == {700_000}
    assert node.limits_w() == [700.0] * 7 + [500.0]
    assert {entry.outcome for entry in keeper.restore()} == {Outcome.RESTORED}
    assert node.limits_w() == [500.0] * 8 and store.recorded_uuids() == []


def test_found_limit_is_on_disk_before_the_first_write(
    node: FakeNode, layer: DeviceLayer, store: LimitStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, tuple[int, ...]]] = []  # found and ours, as on disk at each write
    original = type(layer).set_limit

    def spy(self: DeviceLayer, uuid: str, limit_mw: int, *scope: object) -> object:
        record = store.read(uuid)
        assert record is not None and limit_mw in (record.found_mw, *record.ours_mw)
        seen.append((record.found_mw, record.ours_mw))
        return original(self, uuid, limit_mw, *scope)  # type: ignore[arg-type]

    monkeypatch.setattr(type(layer), "set_limit", spy)
    keeper = make_keeper(layer, store, roomy_site())
    keeper.open(request(node.uuids[:1], num_gpus=2))
    for watts in (600, 650):
        keeper.set_limits(all_to(node.uuids[:1], watts))
    keeper.restore()
    assert seen == [
        (500_000, (500_000,)),
        (500_000, (500_000, 600_000)),
        (500_000, (600_000, 650_000)),
        (500_000, (600_000, 650_000)),
    ]


def test_nothing_is_touched_where_nothing_can_change(
    node: FakeNode, layer: DeviceLayer, store: LimitStore
) -> None:
    node.set_limits_w(700)
    keeper = make_keeper(layer, store)
    reply = keeper.open(request(node.uuids[:7]))
    assert not reply.has_headroom and reply.bound_by == "board maximum"
    assert keeper.restore() == [] and node.writes() == []


def test_default_budget_allows_the_freed_share(
    node: FakeNode, layer: DeviceLayer, store: LimitStore
) -> None:
    keeper = make_keeper(layer, store)
    assert keeper.open(request(node.uuids[:7])).ceiling_mw == 571_000
    results = keeper.set_limits(all_to(node.uuids[:7], 572))
    assert {result.fault for result in results.values()} == {Fault.OUT_OF_RANGE}
    assert set(node.limits_w()) == {500.0}
    keeper.restore()


def test_gpus_come_down_before_others_go_up(
    node: FakeNode, layer: DeviceLayer, store: LimitStore
) -> None:
    """Found at 700 W, nominal 500 W, ceiling 571 W: 7 x 571 W are the budget, not 7 x 700 W."""
    for index in range(4):
        node.gpu(index).set_limit_w(700)
    keeper = make_keeper(layer, store)
    keeper.open(request(node.uuids[:7], nominal_w=500))
    first = keeper.set_limits(all_to(node.uuids[4:7], 571))
    assert {result.fault for result in first.values()} == {Fault.OUT_OF_RANGE}
    assert "lower the others first" in next(iter(first.values())).message
    keeper.set_limits(all_to(node.uuids[:7], 571))
    assert node.limits_w() == [571.0] * 7 + [500.0]
    raised = [w.sum_requested_mw for w in node.writes() if w.value == 571_000]
    assert raised[:4] == sorted(raised[:4], reverse=True), "the four high ones came first"
    keeper.restore()
    assert node.limits_w() == [700.0] * 4 + [500.0] * 4


def test_gpu_that_does_not_come_down_keeps_its_power_in_the_sum(
    node: FakeNode, layer: DeviceLayer, store: LimitStore
) -> None:
    node.gpu(0).set_limit_w(700)
    keeper = make_keeper(layer, store)
    keeper.open(request(node.uuids[:7], nominal_w=500))
    node.add_rule("nvmlDeviceSetPowerManagementLimit", gpu=0, result=999)
    results = keeper.set_limits(all_to(node.uuids[:7], 571))
    assert results[node.uuids[0]].fault is Fault.FAILED
    assert Fault.OUT_OF_RANGE in {result.fault for result in results.values()}
    assert sum(node.limits_w()[:7]) <= 7 * 571
    node.clear_rules()
    keeper.restore()
    assert node.limits_w() == [700.0] + [500.0] * 7


def test_gpu_that_the_driver_reset_counts_with_what_it_has_now(
    node: FakeNode, layer: DeviceLayer, store: LimitStore
) -> None:
    keeper = make_keeper(layer, store)
    keeper.open(request(node.uuids[:7]))
    keeper.set_limits(all_to(node.uuids[:7], 510))
    node.gpu(6).set_limit_w(700)  # its default, as after a reset
    results = keeper.set_limits(all_to(node.uuids[:6], 571))
    assert [result.fault for result in results.values()].count(None) == 3
    assert sum(node.limits_w()[:7]) <= 7 * 571
    keeper.restore()
    assert node.limits_w() == [500.0] * 6 + [700.0, 500.0]


def test_gpus_that_are_not_the_clients_are_refused(
    node: FakeNode, layer: DeviceLayer, store: LimitStore
) -> None:
    keeper = make_keeper(layer, store, roomy_site())
    keeper.open(request(node.uuids[:3]))
    with pytest.raises(DeviceError, match="not among the GPUs") as caught:
        keeper.set_limits(all_to(node.uuids[:4], 600))
    assert caught.value.fault is Fault.REFUSED and set(node.limits_w()) == {500.0}
    keeper.restore()


def test_administrators_change_is_not_overwritten(
    node: FakeNode, layer: DeviceLayer, store: LimitStore
) -> None:
    keeper = make_keeper(layer, store, roomy_site())
    keeper.open(request(node.uuids[:7]))
    keeper.set_limits(all_to(node.uuids[:7], 600))
    node.gpu(3).set_limit_w(420)
    results = keeper.set_limits(all_to(node.uuids[:7], 650))
    assert results[node.uuids[3]].fault is Fault.REFUSED
    assert "somebody else set 420 W" in results[node.uuids[3]].message
    outcomes = {entry.uuid: entry.outcome for entry in keeper.restore()}
    assert outcomes.pop(node.uuids[3]) is Outcome.CHANGED
    assert set(outcomes.values()) == {Outcome.RESTORED}
    assert node.limits_w() == [500, 500, 500, 420, 500, 500, 500, 500]


def test_second_job_never_records_a_boosted_value_as_found(
    node: FakeNode, layer: DeviceLayer, make_store: MakeStore
) -> None:
    first = make_keeper(layer, make_store(), roomy_site())
    first.open(request(node.uuids[:7]))
    first.set_limits(all_to(node.uuids[:7], 700))
    with pytest.raises(DeviceError) as caught:
        make_keeper(layer, make_store(), roomy_site()).open(request(node.uuids[6:8], job_id="2"))
    assert caught.value.fault is Fault.BUSY
    for kept in first._kept.values():  # as a SIGKILL does
        kept.claim.release()
    second = make_keeper(layer, make_store(), roomy_site())
    reply = second.open(request(node.uuids[:7], job_id="2"))
    assert set(reply.found_mw.values()) == {500_000}
    assert len(reply.settled) == 7 and reply.settled[0].endswith("restored")
    second.set_limits(all_to(node.uuids[:7], 600))
    second.restore()
    assert node.limits_w() == [500.0] * 8


def test_two_jobs_on_one_node_do_not_see_each_other(
    node: FakeNode, layer: DeviceLayer, make_store: MakeStore
) -> None:
    site = parse_site({**ROOMY, "domain": {"num_gpus": 8, "budget_w": 4800}}, "test")
    jobs = [make_keeper(layer, make_store(), site) for _ in range(2)]
    halves = (node.uuids[:3], node.uuids[4:7])
    for keeper, half in zip(jobs, halves, strict=True):
        assert keeper.open(request(half, num_gpus=4)).ceiling_mw == 700_000
        keeper.set_limits(all_to(half, 700))
    assert max(write.sum_requested_mw for write in node.writes()) <= 5_200_000
    jobs[0].restore()
    assert node.limits_w() == [500, 500, 500, 500, 700, 700, 700, 500]
    jobs[1].restore()
    assert node.limits_w() == [500.0] * 8


@pytest.mark.parametrize(
    ("site", "nominal_w", "message"),
    [
        (None, 501, "no site file states a domain budget"),
        ({"gpu": {"nominal_w": 450}}, 451, "no site file states a domain budget"),
        (ROOMY, 701, "200 W to 700 W"),
        (ROOMY, 199, "200 W to 700 W"),
        ({**ROOMY, "domain": {"num_gpus": 8, "budget_w": 4000}}, 510, "exceed its budget"),
    ],
)
def test_nominal_outside_its_range(
    node: FakeNode,
    layer: DeviceLayer,
    store: LimitStore,
    site: dict[str, object] | None,
    nominal_w: int,
    message: str,
) -> None:
    keeper = make_keeper(layer, store, parse_site(site or {}, "test"))
    with pytest.raises(DeviceError, match=message) as caught:
        keeper.open(request(node.uuids[:7], nominal_w=nominal_w))
    assert caught.value.fault is Fault.OUT_OF_RANGE
    assert node.writes() == [] and store.recorded_uuids() == []
    make_keeper(layer, store, roomy_site()).open(request(node.uuids[:7]))  # claims are free again


def test_found_limits_that_differ_need_a_stated_nominal(
    node: FakeNode, layer: DeviceLayer, store: LimitStore
) -> None:
    node.gpu(2).set_limit_w(520)
    with pytest.raises(DeviceError, match="500 W to 520 W"):
        make_keeper(layer, store).open(request(node.uuids[:7]))
    keeper = make_keeper(layer, store)
    assert keeper.open(request(node.uuids[:7], nominal_w=500)).nominal_mw == 500_000
    keeper.restore()
    assert node.limits_w()[2] == 520


def test_permission_is_tried_before_training(
    node: FakeNode, layer: DeviceLayer, store: LimitStore
) -> None:
    node.state.set_privilege = SetPrivilege.NOBODY
    with pytest.raises(DeviceError) as caught:
        make_keeper(layer, store, roomy_site()).open(request(node.uuids[:7]))
    assert caught.value.fault is Fault.NO_PERMISSION
    assert set(node.limits_w()) == {500.0} and store.recorded_uuids() == []


def test_gpu_lost_during_the_boost(node: FakeNode, layer: DeviceLayer, store: LimitStore) -> None:
    keeper = make_keeper(layer, store, roomy_site())
    keeper.open(request(node.uuids[:7]))
    keeper.set_limits(all_to(node.uuids[:7], 600))
    node.gpu(2).lost = 1
    results = keeper.set_limits(all_to(node.uuids[:7], 650))
    assert results[node.uuids[2]].fault is Fault.LOST
    assert keeper.readings()[node.uuids[2]] is None
    outcomes = {entry.uuid: entry.outcome for entry in keeper.restore()}
    assert outcomes[node.uuids[2]] is Outcome.PENDING
    assert [w for i, w in enumerate(node.limits_w()) if i != 2] == [500.0] * 7
    assert store.recorded_uuids() == [node.uuids[2]]
    node.gpu(2).lost = 0
    later = make_keeper(layer, store, roomy_site())
    assert later.open(request(node.uuids[:7])).found_mw[node.uuids[2]] == 500_000
    later.restore()
    assert node.limits_w() == [500.0] * 8


def test_a_record_that_cannot_be_settled_blocks_the_next_job(
    node: FakeNode, layer: DeviceLayer, store: LimitStore
) -> None:
    keeper = make_keeper(layer, store, roomy_site())
    keeper.open(request(node.uuids[:7]))
    keeper.set_limits(all_to(node.uuids[:7], 600))
    node.add_rule("nvmlDeviceSetPowerManagementLimit", gpu=1, result=999)
    keeper.restore()
    with pytest.raises(DeviceError, match="left a changed limit") as caught:
        make_keeper(layer, store, roomy_site()).open(request(node.uuids[:7]))
    assert caught.value.fault is Fault.BUSY
    node.clear_rules()
    make_keeper(layer, store, roomy_site()).open(request(node.uuids[:7]))
    assert node.limits_w() == [500.0] * 8


def test_module_scope_only_where_the_site_asks(
    node: FakeNode, layer: DeviceLayer, store: LimitStore
) -> None:
    for index in range(8):
        gpu = node.gpu(index)
        gpu.supports_module, gpu.module_limit.requested_mw = 1, 800_000
    keeper = make_keeper(layer, store, roomy_site())
    keeper.open(request(node.uuids[:7]))
    keeper.set_limits(all_to(node.uuids[:7], 600))
    keeper.restore()
    assert {node.gpu(i).module_limit.requested_mw for i in range(8)} == {800_000}
    asked = parse_site({"scope": "module", "domain": {"num_gpus": 8, "budget_w": 8000}}, "test")
    keeper = make_keeper(layer, store, asked)
    assert keeper.open(request(node.uuids[:7])).nominal_mw == 800_000
    keeper.set_limits(all_to(node.uuids[:7], 900))
    assert node.gpu(0).module_limit.requested_mw == 900_000 and set(node.limits_w()) == {500.0}
    keeper.restore()
    assert {node.gpu(i).module_limit.requested_mw for i in range(8)} == {800_000}


def test_no_record_no_write(
    node: FakeNode, layer: DeviceLayer, store: LimitStore, tmp_path: Path
) -> None:
    """A full or broken disk costs the boost and nothing else."""
    keeper = make_keeper(layer, store, roomy_site())
    keeper.open(request(node.uuids[:2], num_gpus=3))
    path = tmp_path / "state" / f"{node.uuids[1]}.json"
    path.unlink()
    path.mkdir()  # no file can take this name now
    results = keeper.set_limits(all_to(node.uuids[:2], 600))
    assert results[node.uuids[1]].fault is Fault.FAILED
    assert "cannot be written" in results[node.uuids[1]].message
    assert node.limits_w()[:2] == [600, 500]
    path.rmdir()
    keeper.restore()
    assert node.limits_w() == [500.0] * 8


# ---- calls that hang ----


def test_hanging_write_stops_the_others_and_may_land_later(
    node: FakeNode, process_layer: NvmlProcess, store: LimitStore
) -> None:
    keeper = make_keeper(process_layer, store, roomy_site())
    keeper.open(request(node.uuids[:3], num_gpus=4))
    node.add_rule("nvmlDeviceSetPowerManagementLimit", gpu=1, hang_ms=600_000)
    results = keeper.set_limits(all_to(node.uuids[:3], 600))
    assert {results[uuid].fault for uuid in node.uuids[1:3]} == {Fault.TIMEOUT}
    assert "not tried" in results[node.uuids[2]].message
    record = store.read(node.uuids[1])
    assert record is not None and 600_000 in record.ours_mw
    node.clear_rules()
    assert {entry.outcome for entry in keeper.restore()} <= {Outcome.RESTORED, Outcome.UNCHANGED}
    assert node.limits_w() == [500.0] * 8


class Unsettled(Nvml):
    """A layer whose killed process hangs on in the kernel and will write for a while yet."""

    is_settled = False

    def writes_settled(self) -> bool:
        return self.is_settled


def test_record_stays_while_a_late_write_may_still_land(
    node: FakeNode, layer: DeviceLayer, store: LimitStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_ntp.device.keeper.SETTLE_TIMEOUT_S", 0.05)
    late = Unsettled()
    late.is_settled = True
    keeper = make_keeper(late, store, roomy_site())
    keeper.open(request(node.uuids[:2], num_gpus=3))
    keeper.set_limits(all_to(node.uuids[:2], 600))
    late.is_settled = False
    assert {entry.outcome for entry in keeper.restore()} == {Outcome.PENDING}
    assert store.recorded_uuids() == node.uuids[:2]
    node.gpu(0).set_limit_w(600)  # it lands
    assert [entry.outcome for entry in restore_all(layer, store)] == [Outcome.RESTORED] * 2
    assert node.limits_w() == [500.0] * 8


def test_unfinished_write_counts_at_its_most(
    node: FakeNode, layer: DeviceLayer, store: LimitStore
) -> None:
    """Found at 700 W, ceiling 571 W: a write that hangs leaves the 700 W in the sum."""
    node.gpu(0).set_limit_w(700)
    late = Unsettled()
    late.is_settled = True
    keeper = make_keeper(late, store)
    keeper.open(request(node.uuids[:7], nominal_w=500))
    keeper.set_limits(all_to(node.uuids[:1], 571))
    keeper._kept[node.uuids[0]].most_mw = 700_000  # as a write of 700 W that hangs leaves it
    late.is_settled = False
    results = keeper.set_limits(all_to(node.uuids[1:7], 571))
    assert Fault.OUT_OF_RANGE in {result.fault for result in results.values()}
    late.is_settled = True
    results = keeper.set_limits(all_to(node.uuids[1:7], 571))
    assert {result.fault for result in results.values()} == {None}
    keeper.restore()
