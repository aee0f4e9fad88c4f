"""The training hook of the power boost, without ranks: who holds what, the verdict, and lags."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_ntp.device.controller import BoostState
from megatron_ntp.device.errors import Fault
from megatron_ntp.device.session import PowerSession
from megatron_ntp.device.settings import PowerSettings
from megatron_ntp.device.site import SitePower, parse_site
from megatron_ntp.errors import PowerSettingsError
from megatron_ntp.integration import power, power_seats
from megatron_ntp.integration.context import NTPContext
from megatron_ntp.integration.power import Outcome, Verdict, judge
from megatron_ntp.integration.power_seats import (
    RankGpu,
    Seat,
    own_gpu,
    seats,
    unused_gpus,
    wanted_domains,
)
from megatron_ntp.integration.power_waits import Report, lag
from megatron_ntp.plan.model import ModelDims
from megatron_ntp.plan.plan import Plan
from megatron_ntp.plan.topology import Topology
from megatron_ntp.settings import NTPSettings

UUIDS = [f"GPU-{index:08x}-aaaa-bbbb-cccc-{index:012x}" for index in range(8)]
DIMS = ModelDims(
    num_attention_heads=56,
    num_query_groups=56,
    kv_channels=4,
    hidden_size=224,
    ffn_hidden_size=560,
    padded_vocab_size=560,
    num_layers=2,
)
BOOST = PowerSettings("boost")
RAISING, OFF = BoostState.RAISING.value, BoostState.OFF.value
RACKS = {
    "gpu": {"nominal_w": 500},
    "domain": {"num_gpus": 8},
    "rack": {"num_domains": 2, "budget_w": 9000, "host_pattern": "(r[0-9]).*"},
}


def topology(*degrees: int) -> Topology:
    return Topology.from_degrees(degrees, nominal_tp=8)


def on_hosts(*counts: tuple[str, int]) -> list[RankGpu]:
    return [RankGpu(host, f"{host}-{place}") for host, count in counts for place in range(count)]


def job(degrees: Sequence[int], site: SitePower, hosts: Sequence[tuple[str, int]]) -> power._Job:
    found = topology(*degrees)
    context = NTPContext(NTPSettings(ntp=True), found, 0, Plan(found, DIMS), power=BOOST)
    session = PowerSession(BOOST)
    session._site = site
    return power._Job(context, session, tuple(on_hosts(*hosts)))


# --- who holds a session ------------------------------------------------------------------------


def test_a_node_with_two_replicas_has_two_sessions() -> None:
    found = seats(topology(4, 4, 3), on_hosts(("a", 8), ("b", 3)))
    assert found == (
        Seat(0, "a", (0, 1, 2, 3)),
        Seat(1, "a", (4, 5, 6, 7)),
        Seat(2, "b", (8, 9, 10)),
    )


def test_a_domain_over_two_nodes_has_two_sessions_held_by_their_lowest_ranks() -> None:
    found = seats(topology(8, 7), on_hosts(("a", 4), ("b", 4), ("c", 4), ("d", 3)))
    assert [(seat.domain, seat.host, seat.holder) for seat in found] == [
        (0, "a", 0),
        (0, "b", 4),
        (1, "c", 8),
        (1, "d", 12),
    ]


@pytest.mark.parametrize(
    ("degrees", "changes", "site", "wanted"),
    [
        ((8, 8, 7), {}, {}, (2,)),
        ((8, 7, 6), {}, {}, (1, 2)),
        ((7, 8, 8), {}, {}, (0,)),
        ((8, 8), {}, {}, ()),
        ((7, 7), {}, {}, ()),
        ((8, 8), {"ntp_power_nominal": 500.0}, {}, (0, 1)),
        ((8, 8), {}, {"gpu": {"nominal_w": 500}}, (0, 1)),
        ((8, 7), {"ntp_power_nominal": 500.0}, {}, (0, 1)),
        ((8, 7), {"ntp_power_socket": "/s"}, {}, (0, 1)),
        ((8, 8), {"ntp_power_socket": "/s"}, {}, ()),
    ],
)
def test_domains_that_need_a_session(
    degrees: tuple[int, ...], changes: dict[str, Any], site: dict[str, Any], wanted: tuple[int, ...]
) -> None:
    settings = replace(BOOST, **changes)
    assert wanted_domains(topology(*degrees), settings, parse_site(site, "site")) == wanted


# --- which GPU a rank has -----------------------------------------------------------------------


def test_gpus_named_by_uuid_need_no_driver() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": ",".join(UUIDS[2:4])}
    assert own_gpu(environ, 1, 5.0).uuid == UUIDS[3]
    assert "shows 2 GPUs, and none to local rank 2" in own_gpu(environ, 2, 5.0).why


def test_no_gpu_to_see() -> None:
    found = own_gpu({"CUDA_VISIBLE_DEVICES": ""}, 0, 5.0)
    assert found.uuid is None and found.fault == Fault.NOT_FOUND
    assert "CUDA_VISIBLE_DEVICES= shows 0 GPUs" in found.why


def test_a_gpu_named_twice_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    found = own_gpu({"CUDA_VISIBLE_DEVICES": f"{UUIDS[0]},{UUIDS[0]}"}, 0, 5.0)
    assert found.uuid is None and "a second time" in found.why


def test_dead_gpus_are_those_that_nobody_uses() -> None:
    assert unused_gpus(UUIDS, UUIDS[:7], 1) == (UUIDS[7],)
    assert unused_gpus(UUIDS[:7], UUIDS[:7], 1) == (), "it is off the bus"
    assert unused_gpus(UUIDS, UUIDS[:3], 1) == (), "others may be another job's"


# --- the verdict --------------------------------------------------------------------------------


def boosted(domain: int, gap: float, rack: str = "") -> Outcome:
    return Outcome(domain, rack, RAISING, 500_000, 700_000, "board maximum", gap)


def failed(domain: int, rack: str = "") -> Outcome:
    return Outcome(domain, rack, message="no permission", fault="no permission")


def test_slowness_is_what_power_leaves() -> None:
    two = job((8, 7), SitePower(), (("a", 8), ("b", 7)))
    without = two.ntp.plan.dp_slowness
    assert two.expected_gap(0) == 0 and two.expected_gap(1) == pytest.approx(1 - 1 / without[1])
    assert judge([boosted(1, 0.0)], two).slowness == (1.0, 1.0)
    assert judge([boosted(1, 0.05)], two).slowness == (1.0, pytest.approx(1 / 0.95))
    assert judge([boosted(1, 0.9)], two).slowness == without, "power makes nothing slower"
    assert judge([failed(1)], two).slowness == without, "to the bit"
    verdict = judge([boosted(1, 0.05)], two)
    assert (verdict.boosted, verdict.closed) == ((1,), ())


def test_slowness_goes_by_dp_rank() -> None:
    three = job((7, 8, 6), SitePower(), (("a", 8), ("b", 7), ("c", 6)))
    slowness = judge([boosted(0, 0.0), boosted(2, 0.0)], three).slowness
    assert slowness == (1.0, 1.0, 1.0)
    partly = judge([boosted(0, 0.0), failed(2)], three).slowness
    assert partly == (1.0, 1.0, three.ntp.plan.slowness(6))


def test_no_headroom_leaves_the_estimate() -> None:
    two = job((8, 7), SitePower(), (("a", 8), ("b", 7)))
    outcome = replace(boosted(1, 0.125), state=BoostState.NO_HEADROOM.value)
    verdict = judge([outcome], two)
    assert verdict.slowness == two.ntp.plan.dp_slowness
    assert (verdict.boosted, verdict.closed) == ((), ())


def test_a_domain_is_boosted_on_all_its_nodes_or_on_none() -> None:
    two = job((8, 7), SitePower(), (("a", 4), ("b", 4), ("c", 4), ("d", 3)))
    verdict = judge([boosted(1, 0.0), failed(1)], two)
    assert (verdict.boosted, verdict.closed) == ((), (1,))
    assert verdict.slowness == two.ntp.plan.dp_slowness


def test_in_a_budgeted_rack_all_domains_must_be_at_nominal() -> None:
    hosts = (("r1a", 8), ("r1b", 7), ("r2a", 6))
    three = job((8, 7, 6), parse_site(RACKS, "racks"), hosts)
    verdict = judge([failed(0, "r1"), boosted(1, 0.0, "r1"), boosted(2, 0.0, "r2")], three)
    assert (verdict.boosted, verdict.closed) == ((2,), (0, 1))


def test_one_refusal_is_everyones() -> None:
    two = job((8, 7), SitePower(), (("a", 8), ("b", 7)))
    verdict = judge([boosted(1, 0.0), Outcome(0, refusal="--ntp-power require: no")], two)
    assert verdict == Verdict(refusal="--ntp-power require: no")


def test_only_reduced_domains_of_the_rack_share_its_power() -> None:
    hosts = (("r1a", 8), ("r1b", 7), ("r2a", 6))
    three = job((8, 7, 6), parse_site(RACKS, "racks"), hosts)
    assert three.rivals(three.shapes[1]) == (three.shapes[1],)
    unnamed = job((8, 7, 6), SitePower(), hosts)
    assert unnamed.rivals(unnamed.shapes[1]) == (unnamed.shapes[1], unnamed.shapes[2])
    assert [shape.num_alive for shape in three.shapes.values()] == [8, 7, 6]


# --- lags ---------------------------------------------------------------------------------------


def test_lag_is_what_the_median_of_the_others_waited() -> None:
    reports = [Report(4, 0.5, 2.0), Report(4, 0.4, 2.0), Report(4, 0.9, 2.0), Report(4, 0.1, 2.1)]
    behind = lag(reports, 3, [0, 1, 2])
    assert behind is not None and behind.step == 4 and behind.step_s == 2.1
    assert math.isclose(behind.wait_s, 0.4)
    ahead = lag(reports, 2, [0, 1])
    assert ahead is not None and math.isclose(ahead.wait_s, -0.45)


@pytest.mark.parametrize("other", [Report(3, 0.5, 2.0), Report(-1, 0.0, 0.0)])
def test_reports_of_other_steps_say_nothing(other: Report) -> None:
    assert lag([other, Report(4, 0.1, 2.0)], 1, [0]) is None
    assert lag([Report(-1, 0.0, 0.0), Report(-1, 0.0, 0.0)], 1, [0]) is None


# --- flags --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"ntp_power_nominal": -1.0}, "--ntp-power-nominal -1.0: must be a number of watts"),
        ({"ntp_power_nominal": math.nan}, "--ntp-power-nominal nan"),
        ({"ntp_power_deadline": math.inf}, "--ntp-power-deadline inf"),
        ({"ntp_power_target_gap": math.nan}, "--ntp-power-target-gap nan"),
        ({"ntp_power": "boost", "ntp_power_site": "/no/such/file"}, "--ntp-power-site: .*/no/such"),
    ],
)
def test_wrong_flags_are_one_error_before_the_start(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(PowerSettingsError, match=message):
        power.checked_settings(argparse.Namespace(**flags))


def test_a_wrong_site_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text("gpu: {nominal: 500}\n")
    flags = argparse.Namespace(ntp_power="boost", ntp_power_site=str(path))
    with pytest.raises(PowerSettingsError, match=r"site\.yaml: gpu: unknown nominal"):
        power.checked_settings(flags)


def test_nvml_is_asked_by_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    class Layer:
        def __init__(self, deadline_s: float) -> None:
            asked.append(deadline_s)

        def count(self) -> int:
            return 0

        def close(self) -> None:
            asked.append(-1)

    monkeypatch.setattr(power_seats, "NvmlProcess", Layer)
    assert "shows 0 GPUs" in own_gpu({}, 0, 2.5).why
    assert asked == [2.5, -1]
