"""The power helper under abuse: half messages, floods, silence, links, and its own death."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from power_helper_site import ALICE, BOB, EVE, MAIN, ROOT, SEVEN, HelperSite, faults, wait_for

from megatron_ntp.device.errors import DeviceError
from megatron_ntp.device.files import Folder
from megatron_ntp.device.grants import Grant, read_grants
from megatron_ntp.device.protocol import parse, parse_limits
from megatron_ntp.device.serve import Admission

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be other users")


# ---- floods, half messages, silence ----


@pytest.mark.parametrize(
    "raw",
    [
        "",
        "{",
        '{"id": 1, "op": "set", "limits_mw": {"GPU-0000',
        "[]",
        "null",
        "[" * 60_000,
        '{"op": "restore_all"}',
        '{"op": 3}',
        "\x00\xff",
        '{"id": 1, "op": "set", "limits_mw": ' + '{"a":' * 5000,
    ],
)
def test_half_and_odd_messages_are_refused(raw: str) -> None:
    with pytest.raises(DeviceError, match="bad message"):
        found = parse(raw.encode())
        parse_limits(found)


def test_half_messages_do_not_end_a_boost_but_many_do(helper_site: HelperSite) -> None:
    helper_site.grant(ALICE, *range(8))
    helper_site.serve()
    answers = helper_site.ask(
        ALICE,
        helper_site.open(*SEVEN, dead=(7,)),
        helper_site.set(650, *SEVEN),
        {"raw": '{"id": 3, "op": "se'},
        {"bytes": True},
        {"raw": "[" * 50_000},
        helper_site.set(600, *SEVEN),
        *([{"raw": "?"}] * 5),
        {"hear": True},
    )
    assert [answer.get("fault") for answer in answers[2:5]] == ["refused"] * 3
    assert faults(answers[5]) == {None}
    assert answers[-1]["closing"] == "too many bad messages"
    helper_site.wait_restored()


def test_silent_client_keeps_nobody_waiting(helper_site: HelperSite) -> None:
    helper_site.grant(ALICE, 0, 1, 2, 3)
    helper_site.grant(BOB, 4, 5, 6, 7)
    helper_site.serve()
    silent = helper_site.client(ALICE, {"wait": 600})
    answers = helper_site.ask(
        BOB, helper_site.open(4, 5, 6, num_gpus=4, dead=(7,)), helper_site.set(600, 4, 5, 6)
    )
    assert faults(answers[1]) == {None}
    assert silent.poll() is None


def test_flood_of_messages_is_slowed_and_disturbs_nobody(helper_site: HelperSite) -> None:
    helper_site.grant(ALICE, 0, 1, 2, 3)
    helper_site.grant(BOB, 4, 5, 6, 7)
    helper_site.serve()
    flooder = helper_site.client(
        ALICE, helper_site.open(0, 1, 2, num_gpus=4, dead=(3,)), {"flood": 2}
    )
    answers = helper_site.ask(
        BOB, helper_site.open(4, 5, 6, num_gpus=4, dead=(7,)), helper_site.set(600, 4, 5, 6)
    )
    assert faults(answers[1]) == {None}
    output, _ = flooder.communicate(timeout=120)
    counts = json.loads(output.splitlines()[-1])
    assert counts["heard"] <= 40 + 20 * 3, "40 at once, then 20 a second"


def test_client_that_never_reads_is_dropped_and_restored(helper_site: HelperSite) -> None:
    helper_site.grant(ALICE, *range(8))
    helper_site.serve()
    helper_site.client(
        ALICE,
        helper_site.open(*SEVEN, dead=(7,)),
        helper_site.set(650, *SEVEN),
        {"mute_flood": 5000},
        {"wait": 600},
    )
    wait_for(lambda: helper_site.node.limits_w() == [650.0] * 7 + [500.0], "the boost")
    helper_site.wait_restored()


def test_flood_of_connections_is_bounded_per_user(helper_site: HelperSite) -> None:
    helper_site.grant(ALICE, 0, 1, 2, 3)
    helper_site.grant(BOB, 4, 5, 6, 7)
    helper_site.serve()
    flooder = helper_site.client(ALICE, {"connect": 12}, {"wait": 600})
    assert flooder.stdout is not None
    answers = [json.loads(flooder.stdout.readline()) for _ in range(12)]
    assert sum("ok" in answer for answer in answers) == 7, "and one that says nothing"
    refused = [answer["what"] for answer in answers if "ok" not in answer]
    assert refused == [f"uid {ALICE} has 8 connections already"] * 5
    others = helper_site.ask(
        BOB, helper_site.open(4, 5, 6, num_gpus=4, dead=(7,)), helper_site.set(600, 4, 5, 6)
    )
    assert faults(others[1]) == {None}


def test_starts_are_bounded_per_minute() -> None:
    admission = Admission()
    answers = [admission.refusal(ALICE, {ALICE, BOB}) for _ in range(22)]
    assert answers[:20] == [None] * 20 and "connected 20 times" in str(answers[20])
    assert admission.refusal(BOB, {ALICE, BOB}) is None
    assert "no grant" in str(admission.refusal(EVE, {ALICE, BOB}))


# ---- the helper's own life ----


def test_sigterm_of_the_helper_restores_everything(helper_site: HelperSite) -> None:
    helper_site.grant(ALICE, *range(8))
    helper_site.serve()
    client = helper_site.client(
        ALICE, helper_site.open(*SEVEN, dead=(7,)), helper_site.set(650, *SEVEN), {"hear": True}
    )
    wait_for(lambda: helper_site.node.limits_w() == [650.0] * 7 + [500.0], "the boost")
    assert helper_site.helper is not None
    helper_site.helper.terminate()
    assert helper_site.helper.wait(120) == 0
    assert helper_site.untouched() and not helper_site.socket.exists()
    output, _ = client.communicate(timeout=120)
    assert json.loads(output.splitlines()[-1])["closing"] == "SIGTERM received"


def test_sigkill_of_the_helper_leaves_keepers_at_work_and_a_new_one_starts(
    helper_site: HelperSite,
) -> None:
    helper_site.grant(ALICE, *range(8))
    helper_site.serve()
    client = helper_site.client(
        ALICE, helper_site.open(*SEVEN, dead=(7,)), helper_site.set(650, *SEVEN), {"wait": 600}
    )
    wait_for(lambda: helper_site.node.limits_w() == [650.0] * 7 + [500.0], "the boost")
    assert helper_site.helper is not None
    helper_site.helper.kill()
    helper_site.helper.wait()
    inode = helper_site.socket.stat().st_ino
    helper_site.serve()
    wait_for(
        lambda: helper_site.socket.exists() and helper_site.socket.stat().st_ino != inode,
        "a new socket",
    )
    assert helper_site.node.limits_w() == [650.0] * 7 + [500.0], "a live keeper's GPUs are its own"
    client.kill()
    helper_site.wait_restored()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda site: site.site.chmod(0o666), "only root can write"),
        (lambda site: os.chown(site.site, EVE, EVE), "only root can write"),
        (lambda site: site.grants.chmod(0o777), "writable by nobody else"),
        (lambda site: site.folder.chmod(0o777), "writable by nobody else"),
        (lambda site: site.socket.write_text("mine"), "is no socket"),
        (lambda site: site.socket.symlink_to("/etc/passwd"), "is no socket"),
        (lambda site: site.site.write_text("gpu: {nominal_w: 500}"), "needs bounds"),
        (lambda site: site.state_dir.symlink_to("/tmp"), "without following links"),
    ],
)
def test_helper_does_not_start_on_ground_that_others_can_change(
    helper_site: HelperSite, spoil: Callable[[HelperSite], None], message: str
) -> None:
    spoil(helper_site)
    assert message in helper_site.refusal_to_serve()
    if helper_site.state_dir.is_symlink():
        helper_site.state_dir.unlink()


def test_symlinked_state_files_lead_nowhere(helper_site: HelperSite) -> None:
    victim = helper_site.folder / "victim"
    victim.write_text("precious")
    Folder(helper_site.state_dir, private=True)
    (helper_site.state_dir / f"{helper_site.node.uuids[0]}.lock").symlink_to(victim)
    (helper_site.state_dir / f"{helper_site.node.uuids[1]}.json").symlink_to(victim)
    helper_site.grant(ALICE, *range(8))
    helper_site.serve()
    answers = helper_site.ask(
        ALICE,
        helper_site.open(0, num_gpus=2, dead=(7,)),
        helper_site.open(1, num_gpus=2, dead=(7,)),
        helper_site.open(2, num_gpus=2, dead=(7,)),
    )
    assert [answer.get("fault") for answer in answers[:2]] == ["refused", "refused"]
    assert "ok" in answers[2]
    assert victim.read_text() == "precious" and victim.stat().st_size == 8
    (helper_site.state_dir / f"{helper_site.node.uuids[1]}.json").unlink()


def test_second_helper_on_one_socket_is_refused(helper_site: HelperSite) -> None:
    helper_site.serve()
    assert "another power helper listens" in helper_site.refusal_to_serve()


def test_grant_and_revoke_commands_are_what_a_prolog_needs(helper_site: HelperSite) -> None:
    def power(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", MAIN, "power", *words, "--grants", str(helper_site.grants)],
            env=helper_site.node.env(PYTHONPATH=str(ROOT)),
            capture_output=True,
            text=True,
            check=False,
        )

    words = ("--job", "77", "--uid", str(ALICE), "--gpus", "4,5", "--cgroup", "job_77")
    assert power("grant", *words).returncode == 0
    with Folder(helper_site.grants, private=True) as folder:
        assert read_grants(folder) == [
            Grant("77", ALICE, tuple(helper_site.node.uuids[4:6]), "job_77")
        ]
        assert power("revoke", "--job", "77").returncode == 0
        assert read_grants(folder) == []
    assert "names no GPU" in power("grant", "--job", "7", "--uid", "1", "--gpus", "9").stderr
