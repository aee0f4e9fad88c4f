"""The power helper as a security boundary: what users may do, others' GPUs, bounds and lies.

The helper is a real process of root's; clients are real processes of other users.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from power_helper_site import ALICE, BOB, EVE, MAIN, ROOT, SEVEN, HelperSite, faults, wait_for

from megatron_ntp.device.budget import DomainShape
from megatron_ntp.device.errors import DeviceError
from megatron_ntp.device.files import Folder
from megatron_ntp.device.grants import Grant, GrantedRights, Peer, read_grants, write_grant
from megatron_ntp.device.protocol import OpenRequest, parse_limits
from megatron_ntp.device.session import PowerSession
from megatron_ntp.device.settings import PowerSettings

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be other users")


# ---- what a user may do ----


def test_user_boosts_the_jobs_gpus_and_gets_them_restored(helper_site: HelperSite) -> None:
    helper_site.grant(ALICE, *range(8))
    helper_site.serve()
    opened, answer, _ = helper_site.ask(
        ALICE,
        helper_site.open(*SEVEN, dead=(7,)),
        helper_site.set(650, *SEVEN),
        {"send": {"op": "read"}},
    )
    assert opened["ok"]["ceiling_mw"] == 650_000 and opened["ok"]["min_mw"] == 300_000
    assert faults(answer) == {None}
    boosted = {write.uuid for write in helper_site.node.writes() if write.value == 650_000}
    assert boosted == set(helper_site.node.uuids[:7])
    helper_site.wait_restored()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_limits_come_back_when_the_client_is_killed(
    helper_site: HelperSite, number: signal.Signals
) -> None:
    helper_site.grant(ALICE, *range(8))
    helper_site.serve()
    client = helper_site.client(
        ALICE, helper_site.open(*SEVEN, dead=(7,)), helper_site.set(650, *SEVEN), {"wait": 600}
    )
    wait_for(lambda: helper_site.node.limits_w() == [650.0] * 7 + [500.0], "the boost")
    client.send_signal(number)
    helper_site.wait_restored()


def test_training_session_through_the_helper(
    helper_site: HelperSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper_site.grant(0, *range(8))
    helper_site.serve()
    settings = PowerSettings("boost", ntp_power_socket=str(helper_site.socket))
    with PowerSession(settings) as session:
        uuids = helper_site.node.uuids
        status = session.start(uuids[:7], DomainShape("r0", 8, 7), dead_uuids=uuids[7:])
        assert status.ceiling_mw == 650_000, status.message
    helper_site.wait_restored()


def test_sudo_rule_for_one_command(
    helper_site: HelperSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--ntp-power-command`: the command gets the socket as standard input, as sudo leaves it."""
    helper_site.grant(0, *range(8))
    for name, value in helper_site.node.env(PYTHONPATH=str(ROOT)).items():
        monkeypatch.setenv(name, value)
    words = [word if word != MAIN else f"'{MAIN}'" for word in helper_site.arguments("--stdio")]
    settings = PowerSettings("boost", ntp_power_command=" ".join(words))
    uuids = helper_site.node.uuids
    with PowerSession(settings) as session:
        status = session.start(uuids[:7], DomainShape("r0", 8, 7), dead_uuids=uuids[7:])
        assert status.ceiling_mw == 650_000, status.message
    helper_site.wait_restored()
    (helper_site.grants / "job-0.json").unlink()
    with PowerSession(settings) as session:
        status = session.start(uuids[:7], DomainShape("r0", 8, 7), dead_uuids=uuids[7:])
        assert "no grant" in status.message


# ---- other users and others' GPUs ----


def test_user_without_a_grant_gets_no_keeper(helper_site: HelperSite) -> None:
    helper_site.grant(ALICE, *range(8))
    helper_site.serve()
    (answer,) = helper_site.ask(EVE, {"hear": True})
    assert answer["fault"] == "refused" and "no grant" in answer["what"]
    assert helper_site.untouched() and helper_site.node.writes() == []


def test_gpus_of_others_are_refused(helper_site: HelperSite) -> None:
    helper_site.grant(ALICE, 0, 1, 2, 3)
    helper_site.grant(BOB, 4, 5, 6, 7)
    helper_site.serve()
    answers = helper_site.ask(
        BOB,
        helper_site.open(3, 4, 5, num_gpus=4, dead=(6,)),
        helper_site.open(4, 5, 6, num_gpus=4, dead=(0,)),
        helper_site.open(4, 5, 6, num_gpus=4, dead=(7,)),
        helper_site.set(650, 0),
        helper_site.set(650, 4, 5, 6, 0),
    )
    assert [answer.get("fault") for answer in answers] == [
        "refused",
        "refused",
        None,
        "refused",
        "refused",
    ]
    assert "has no grant for all of" in answers[0]["what"]
    touched = {write.uuid for write in helper_site.node.writes()}
    assert touched <= set(helper_site.node.uuids[4:7]) and helper_site.untouched()


def test_two_users_do_not_disturb_each_other(helper_site: HelperSite) -> None:
    helper_site.grant(ALICE, 0, 1, 2, 3)
    helper_site.grant(BOB, 4, 5, 6, 7)
    helper_site.serve()
    hold = {"wait": 600}
    alice = helper_site.client(
        ALICE, helper_site.open(0, 1, 2, num_gpus=4, dead=(3,)), helper_site.set(600, 0, 1, 2), hold
    )
    wait_for(lambda: helper_site.node.limits_w()[:3] == [600.0] * 3, "the first boost")
    helper_site.ask(
        BOB, helper_site.open(4, 5, 6, num_gpus=4, dead=(7,)), helper_site.set(650, 4, 5, 6)
    )
    wait_for(lambda: helper_site.node.limits_w()[4:] == [500.0] * 4, "the second user's restore")
    assert helper_site.node.limits_w()[:3] == [600.0] * 3
    alice.kill()
    helper_site.wait_restored()


def test_two_jobs_of_one_user_are_told_apart_by_control_group(tmp_path: Path) -> None:
    peer = Peer(os.getpid(), 1000, 1000)
    mine = peer.cgroup().strip().splitlines()[-1].rpartition(":")[2]
    uuid = "GPU-00000000-aaaa-bbbb-cccc-000000000000"
    with Folder(tmp_path / "grants", private=True) as folder:
        write_grant(folder, Grant("1", 1000, (uuid,), "job_of_somebody"))
        assert GrantedRights(folder, peer).num_gpus() == 0
        write_grant(folder, Grant("2", 1000, (uuid,), mine))
        assert GrantedRights(folder, peer).job_of("x", (uuid,)) == "2"
        assert GrantedRights(folder, Peer(os.getpid(), 1001, 1001)).num_gpus() == 0


def test_grant_taken_back_ends_the_boost(helper_site: HelperSite) -> None:
    helper_site.grant(ALICE, *range(8))
    helper_site.serve()
    client = helper_site.client(
        ALICE, helper_site.open(*SEVEN, dead=(7,)), helper_site.set(650, *SEVEN), {"hear": True}
    )
    wait_for(lambda: helper_site.node.limits_w() == [650.0] * 7 + [500.0], "the boost")
    helper_site.revoke(ALICE)
    helper_site.wait_restored()
    output, _ = client.communicate(timeout=120)
    assert "has no grant" in json.loads(output.splitlines()[-1])["closing"]


def test_grants_that_are_not_roots_are_nothing(tmp_path: Path) -> None:
    with Folder(tmp_path / "grants", private=True) as folder:
        good = Grant("1", 1000, ("GPU-00000000-aaaa-bbbb-cccc-000000000000",))
        write_grant(folder, good)
        text = (tmp_path / "grants" / "1.json").read_text()
        (tmp_path / "grants" / "2.json").write_text("{")
        (tmp_path / "grants" / "3.json").write_text(text.replace("GPU-", "MIG-"))
        (tmp_path / "grants" / "4.json").symlink_to(tmp_path / "grants" / "1.json")
        foreign = tmp_path / "grants" / "5.json"
        foreign.write_text(text)
        os.chown(foreign, EVE, EVE)
        assert read_grants(folder) == [good]
    with pytest.raises(ValueError, match="job id"):
        Grant("../../x", 1000, good.gpu_uuids)


# ---- bounds ----


def test_values_outside_the_bounds(helper_site: HelperSite) -> None:
    helper_site.grant(ALICE, *range(8))
    helper_site.serve()
    uuid = helper_site.node.uuids[0]
    opened, *answers = helper_site.ask(
        ALICE,
        helper_site.open(*SEVEN, dead=(7,)),
        helper_site.set(651, 0),  # the board would take 700 W
        helper_site.set(299, 0),
        helper_site.set(0, 0),
        *(helper_site.set_mw({uuid: value}) for value in (-1, 6.5e5, "650000", True, None, 10**30)),
        helper_site.set(600, 0),
    )
    assert "ok" in opened
    assert [faults(answer) for answer in answers[:3]] == [{"value out of range"}] * 3
    assert all("bad message" in answer["what"] for answer in answers[3:-1])
    assert faults(answers[-1]) == {None}
    assert {write.value for write in helper_site.node.writes()} == {500_000, 600_000}


@pytest.mark.parametrize(
    "limits_mw",
    [
        {},
        [],
        None,
        {"../../../etc/passwd": 600_000},
        {"MIG-aaaaaaaa-0000-0000-0000-000000000001": 600_000},
        {f"GPU-{index:08x}-aaaa-bbbb-cccc-{index:012x}": 1 for index in range(65)},
    ],
)
def test_sets_of_something_else(limits_mw: object) -> None:
    with pytest.raises(DeviceError, match="bad message"):
        parse_limits({"limits_mw": limits_mw})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "protocol version"),
        ({"gpu_uuids": []}, "needs GPUs"),
        ({"gpu_uuids": ["GPU-1"]}, "UUIDs of whole GPUs"),
        ({"gpu_uuids": "GPU"}, "must be a list"),
        ({"domain": "other"}, "not among the domains"),
        ({"job_id": "x" * 200}, "at most 128"),
        ({"job_id": "a\nb"}, "a line of"),
        ({"domains": [{"name": "r0", "num_gpus": 0, "num_alive": 0, "rack": ""}]}, "num_alive"),
        ({"domains": [3]}, "must be an object"),
    ],
)
def test_requests_that_do_not_hold(changes: dict[str, Any], message: str) -> None:
    """Without processes: the same code answers in the keeper."""
    uuids = [f"GPU-{index:08x}-aaaa-bbbb-cccc-{index:012x}" for index in range(8)]
    request = {
        "version": 1,
        "job_id": "1",
        "gpu_uuids": uuids[:7],
        "dead_uuids": uuids[7:],
        "domain": "r0",
        "domains": [{"name": "r0", "num_gpus": 8, "num_alive": 7, "rack": ""}],
        "nominal_mw": None,
    }
    assert OpenRequest.from_json(dict(request)).shape.num_dead == 1
    with pytest.raises(DeviceError, match=message):
        OpenRequest.from_json({**request, **changes})


def test_lies_about_the_domain(helper_site: HelperSite) -> None:
    helper_site.grant(ALICE, *range(8))
    helper_site.node.gpu(7).set_processes(4242)
    helper_site.serve()

    def domains(num_gpus: int, num_alive: int) -> dict[str, Any]:
        shape = {"name": "r0", "num_gpus": num_gpus, "num_alive": num_alive, "rack": ""}
        return {"domains": [shape]}

    whats = [
        answer["what"]
        for answer in helper_site.ask(
            ALICE,
            helper_site.open(*SEVEN, dead=(7,)),  # GPU 7 computes
            helper_site.open(*SEVEN, **domains(8, 1)),  # six more dead than are named
            helper_site.open(*SEVEN, dead=(7,), **domains(9, 7)),
        )
    ]
    assert "processes (4242,) use it" in whats[0]
    assert "says 1 of 8 GPUs are alive" in whats[1]
    assert "domain of 9 GPUs, but 8 of this node are granted" in whats[2]
    helper_site.node.gpu(7).set_processes()
    whats = [
        answer["what"]
        for answer in helper_site.ask(
            ALICE,
            helper_site.open(*SEVEN, dead=(7,), nominal_mw=651_000),
            helper_site.open(*SEVEN, dead=(7,), nominal_mw=299_000),
        )
    ]
    assert all("not within 300 W to 650 W" in what for what in whats)
    assert helper_site.untouched()


def test_dead_gpu_that_computes_after_all_ends_the_boost(helper_site: HelperSite) -> None:
    helper_site.grant(ALICE, *range(8))
    helper_site.serve()
    client = helper_site.client(
        ALICE, helper_site.open(*SEVEN, dead=(7,)), helper_site.set(650, *SEVEN), {"hear": True}
    )
    wait_for(lambda: helper_site.node.limits_w() == [650.0] * 7 + [500.0], "the boost")
    helper_site.node.gpu(7).set_processes(4242)
    helper_site.wait_restored()
    output, _ = client.communicate(timeout=120)
    assert "declared dead" in json.loads(output.splitlines()[-1])["closing"]
