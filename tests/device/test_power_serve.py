"""The power helper as a security boundary: other users, others' GPUs, bounds, floods, silence.

The helper is a real process of root's; clients are real processes of other users.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_nvml import FakeNode

from megatron_ntp.device.budget import DomainShape
from megatron_ntp.device.errors import DeviceError
from megatron_ntp.device.files import Folder
from megatron_ntp.device.grants import Grant, GrantedRights, Peer, read_grants, write_grant
from megatron_ntp.device.protocol import OpenRequest, parse, parse_limits
from megatron_ntp.device.serve import Admission
from megatron_ntp.device.session import PowerSession
from megatron_ntp.device.settings import PowerSettings

ROOT = Path(__file__).parents[2]
CLIENT = Path(__file__).with_name("power_client.py")
ALICE, BOB, EVE = 10_001, 10_002, 10_003
SITE = """
gpu: {nominal_w: 500, min_w: 300, max_w: 650}
domain: {num_gpus: 8, budget_w: 5200}
"""
MAIN = "import sys; from megatron_ntp.cli import main; sys.exit(main(sys.argv[1:]))"

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be other users")


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 120) -> None:
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_at, f"gave up waiting: {what}"
        time.sleep(0.02)


class HelperSite:
    """A node with a helper, and users on it."""

    def __init__(self, node: FakeNode, folder: Path) -> None:
        self.node, self.folder = node, folder
        self.socket = folder / "power.sock"
        self.grants = folder / "grants"
        self.state_dir = folder / "state"
        self.site = folder / "site.yaml"
        self.site.write_text(SITE)
        self.site.chmod(0o644)
        Folder(self.grants, private=True)
        self.processes: list[subprocess.Popen[str]] = []
        self.helper: subprocess.Popen[str] | None = None

    def arguments(self, *words: str) -> list[str]:
        return [
            *(sys.executable, "-c", MAIN, "power", "serve", "--site", str(self.site)),
            *("--state-dir", str(self.state_dir), "--grants", str(self.grants)),
            *("--deadline", "60", *words),
        ]

    def serve(self) -> None:
        self.helper = subprocess.Popen(
            self.arguments("--socket", str(self.socket)),
            env=self.node.env(PYTHONPATH=str(ROOT)),
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.processes.append(self.helper)
        wait_for(self.socket.exists, "the helper's socket")

    def refusal_to_serve(self) -> str:
        result = subprocess.run(
            self.arguments("--socket", str(self.socket)),
            env=self.node.env(PYTHONPATH=str(ROOT)),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert result.returncode != 0
        return result.stderr

    def grant(self, uid: int, *gpus: int, job: str = "", cgroup: str = "") -> None:
        uuids = tuple(self.node.uuids[gpu] for gpu in gpus)
        with Folder(self.grants, private=True) as folder:
            write_grant(folder, Grant(job or f"job-{uid}", uid, uuids, cgroup))

    def revoke(self, uid: int) -> None:
        (self.grants / f"job-{uid}.json").unlink()

    def client(self, uid: int, *actions: dict[str, Any]) -> subprocess.Popen[str]:
        found = subprocess.Popen(
            [sys.executable, str(CLIENT), str(self.socket), str(uid), json.dumps(actions)],
            stdout=subprocess.PIPE,
            text=True,
        )
        self.processes.append(found)
        return found

    def ask(self, uid: int, *actions: dict[str, Any]) -> list[dict[str, Any]]:
        """What a client of this user heard, in order."""
        output, _ = self.client(uid, *actions).communicate(timeout=300)
        return [json.loads(line) for line in output.splitlines()]

    def open(
        self, *gpus: int, num_gpus: int = 8, dead: tuple[int, ...] = (), **changes: Any
    ) -> dict[str, Any]:
        request = OpenRequest(
            job_id="anything",
            gpu_uuids=tuple(self.node.uuids[gpu] for gpu in gpus),
            domain="r0",
            domains=(DomainShape("r0", num_gpus, len(gpus)),),
            dead_uuids=tuple(self.node.uuids[gpu] for gpu in dead),
        )
        return {"send": {"id": 1, "op": "open", **request.to_json(), **changes}}

    def set(self, watts: Any, *gpus: int) -> dict[str, Any]:
        return self.set_mw({self.node.uuids[gpu]: watts * 1000 for gpu in gpus})

    def set_mw(self, limits_mw: dict[str, Any]) -> dict[str, Any]:
        return {"send": {"id": 2, "op": "set", "limits_mw": limits_mw}}

    def wait_restored(self) -> None:
        wait_for(lambda: self.node.limits_w() == [500.0] * 8, f"{self.node.limits_w()}")
        wait_for(lambda: not list(self.state_dir.glob("*.json")), "records to go")

    def untouched(self) -> bool:
        return self.node.limits_w() == [500.0] * 8


@pytest.fixture
def site(tmp_path: Path) -> Iterator[HelperSite]:
    """In a folder that other users can reach, which pytest's are not."""
    folder = Path(tempfile.mkdtemp(prefix="power-helper-"))
    folder.chmod(0o755)
    found = HelperSite(FakeNode.create(folder), folder)
    yield found
    for process in found.processes:
        process.kill()
        process.communicate()
    wait_for(lambda: not list(found.state_dir.glob("*.json")), "keepers to restore", 60)
    shutil.rmtree(folder)


SEVEN = tuple(range(7))


def faults(answer: dict[str, Any]) -> set[str | None]:
    return {entry["fault"] for entry in answer["ok"].values()}


# ---- what a user may do ----


def test_user_boosts_the_jobs_gpus_and_gets_them_restored(site: HelperSite) -> None:
    site.grant(ALICE, *range(8))
    site.serve()
    opened, answer, _ = site.ask(
        ALICE, site.open(*SEVEN, dead=(7,)), site.set(650, *SEVEN), {"send": {"op": "read"}}
    )
    assert opened["ok"]["ceiling_mw"] == 650_000 and opened["ok"]["min_mw"] == 300_000
    assert faults(answer) == {None}
    boosted = {write.uuid for write in site.node.writes() if write.value == 650_000}
    assert boosted == set(site.node.uuids[:7])
    site.wait_restored()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_limits_come_back_when_the_client_is_killed(
    site: HelperSite, number: signal.Signals
) -> None:
    site.grant(ALICE, *range(8))
    site.serve()
    client = site.client(ALICE, site.open(*SEVEN, dead=(7,)), site.set(650, *SEVEN), {"wait": 600})
    wait_for(lambda: site.node.limits_w() == [650.0] * 7 + [500.0], "the boost")
    client.send_signal(number)
    site.wait_restored()


def test_training_session_through_the_helper(
    site: HelperSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.grant(0, *range(8))
    site.serve()
    settings = PowerSettings("boost", ntp_power_socket=str(site.socket))
    with PowerSession(settings) as session:
        uuids = site.node.uuids
        status = session.start(uuids[:7], DomainShape("r0", 8, 7), dead_uuids=uuids[7:])
        assert status.ceiling_mw == 650_000, status.message
    site.wait_restored()


def test_sudo_rule_for_one_command(site: HelperSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--ntp-power-command`: the command gets the socket as standard input, as sudo leaves it."""
    site.grant(0, *range(8))
    for name, value in site.node.env(PYTHONPATH=str(ROOT)).items():
        monkeypatch.setenv(name, value)
    words = [word if word != MAIN else f"'{MAIN}'" for word in site.arguments("--stdio")]
    settings = PowerSettings("boost", ntp_power_command=" ".join(words))
    uuids = site.node.uuids
    with PowerSession(settings) as session:
        status = session.start(uuids[:7], DomainShape("r0", 8, 7), dead_uuids=uuids[7:])
        assert status.ceiling_mw == 650_000, status.message
    site.wait_restored()
    (site.grants / "job-0.json").unlink()
    with PowerSession(settings) as session:
        status = session.start(uuids[:7], DomainShape("r0", 8, 7), dead_uuids=uuids[7:])
        assert "no grant" in status.message


# ---- other users and others' GPUs ----


def test_user_without_a_grant_gets_no_keeper(site: HelperSite) -> None:
    site.grant(ALICE, *range(8))
    site.serve()
    (answer,) = site.ask(EVE, {"hear": True})
    assert answer["fault"] == "refused" and "no grant" in answer["what"]
    assert site.untouched() and site.node.writes() == []


def test_gpus_of_others_are_refused(site: HelperSite) -> None:
    site.grant(ALICE, 0, 1, 2, 3)
    site.grant(BOB, 4, 5, 6, 7)
    site.serve()
    answers = site.ask(
        BOB,
        site.open(3, 4, 5, num_gpus=4, dead=(6,)),
        site.open(4, 5, 6, num_gpus=4, dead=(0,)),
        site.open(4, 5, 6, num_gpus=4, dead=(7,)),
        site.set(650, 0),
        site.set(650, 4, 5, 6, 0),
    )
    assert [answer.get("fault") for answer in answers] == [
        "refused",
        "refused",
        None,
        "refused",
        "refused",
    ]
    assert "has no grant for all of" in answers[0]["what"]
    touched = {write.uuid for write in site.node.writes()}
    assert touched <= set(site.node.uuids[4:7]) and site.untouched()


def test_two_users_do_not_disturb_each_other(site: HelperSite) -> None:
    site.grant(ALICE, 0, 1, 2, 3)
    site.grant(BOB, 4, 5, 6, 7)
    site.serve()
    hold = {"wait": 600}
    alice = site.client(
        ALICE, site.open(0, 1, 2, num_gpus=4, dead=(3,)), site.set(600, 0, 1, 2), hold
    )
    wait_for(lambda: site.node.limits_w()[:3] == [600.0] * 3, "the first boost")
    site.ask(BOB, site.open(4, 5, 6, num_gpus=4, dead=(7,)), site.set(650, 4, 5, 6))
    wait_for(lambda: site.node.limits_w()[4:] == [500.0] * 4, "the second user's restore")
    assert site.node.limits_w()[:3] == [600.0] * 3
    alice.kill()
    site.wait_restored()


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


def test_grant_taken_back_ends_the_boost(site: HelperSite) -> None:
    site.grant(ALICE, *range(8))
    site.serve()
    client = site.client(ALICE, site.open(*SEVEN, dead=(7,)), site.set(650, *SEVEN), {"hear": True})
    wait_for(lambda: site.node.limits_w() == [650.0] * 7 + [500.0], "the boost")
    site.revoke(ALICE)
    site.wait_restored()
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


def test_values_outside_the_bounds(site: HelperSite) -> None:
    site.grant(ALICE, *range(8))
    site.serve()
    uuid = site.node.uuids[0]
    opened, *answers = site.ask(
        ALICE,
        site.open(*SEVEN, dead=(7,)),
        site.set(651, 0),  # the board would take 700 W
        site.set(299, 0),
        site.set(0, 0),
        *(site.set_mw({uuid: value}) for value in (-1, 6.5e5, "650000", True, None, 10**30)),
        site.set(600, 0),
    )
    assert "ok" in opened
    assert [faults(answer) for answer in answers[:3]] == [{"value out of range"}] * 3
    assert all("bad message" in answer["what"] for answer in answers[3:-1])
    assert faults(answers[-1]) == {None}
    assert {write.value for write in site.node.writes()} == {500_000, 600_000}


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


def test_lies_about_the_domain(site: HelperSite) -> None:
    site.grant(ALICE, *range(8))
    site.node.gpu(7).set_processes(4242)
    site.serve()

    def domains(num_gpus: int, num_alive: int) -> dict[str, Any]:
        shape = {"name": "r0", "num_gpus": num_gpus, "num_alive": num_alive, "rack": ""}
        return {"domains": [shape]}

    whats = [
        answer["what"]
        for answer in site.ask(
            ALICE,
            site.open(*SEVEN, dead=(7,)),  # GPU 7 computes
            site.open(*SEVEN, **domains(8, 1)),  # six more dead than are named
            site.open(*SEVEN, dead=(7,), **domains(9, 7)),
        )
    ]
    assert "processes (4242,) use it" in whats[0]
    assert "says 1 of 8 GPUs are alive" in whats[1]
    assert "domain of 9 GPUs, but 8 of this node are granted" in whats[2]
    site.node.gpu(7).set_processes()
    whats = [
        answer["what"]
        for answer in site.ask(
            ALICE,
            site.open(*SEVEN, dead=(7,), nominal_mw=651_000),
            site.open(*SEVEN, dead=(7,), nominal_mw=299_000),
        )
    ]
    assert all("not within 300 W to 650 W" in what for what in whats)
    assert site.untouched()


def test_dead_gpu_that_computes_after_all_ends_the_boost(site: HelperSite) -> None:
    site.grant(ALICE, *range(8))
    site.serve()
    client = site.client(ALICE, site.open(*SEVEN, dead=(7,)), site.set(650, *SEVEN), {"hear": True})
    wait_for(lambda: site.node.limits_w() == [650.0] * 7 + [500.0], "the boost")
    site.node.gpu(7).set_processes(4242)
    site.wait_restored()
    output, _ = client.communicate(timeout=120)
    assert "declared dead" in json.loads(output.splitlines()[-1])["closing"]


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


def test_half_messages_do_not_end_a_boost_but_many_do(site: HelperSite) -> None:
    site.grant(ALICE, *range(8))
    site.serve()
    answers = site.ask(
        ALICE,
        site.open(*SEVEN, dead=(7,)),
        site.set(650, *SEVEN),
        {"raw": '{"id": 3, "op": "se'},
        {"bytes": True},
        {"raw": "[" * 50_000},
        site.set(600, *SEVEN),
        *([{"raw": "?"}] * 5),
        {"hear": True},
    )
    assert [answer.get("fault") for answer in answers[2:5]] == ["refused"] * 3
    assert faults(answers[5]) == {None}
    assert answers[-1]["closing"] == "too many bad messages"
    site.wait_restored()


def test_silent_client_keeps_nobody_waiting(site: HelperSite) -> None:
    site.grant(ALICE, 0, 1, 2, 3)
    site.grant(BOB, 4, 5, 6, 7)
    site.serve()
    silent = site.client(ALICE, {"wait": 600})
    answers = site.ask(BOB, site.open(4, 5, 6, num_gpus=4, dead=(7,)), site.set(600, 4, 5, 6))
    assert faults(answers[1]) == {None}
    assert silent.poll() is None


def test_flood_of_messages_is_slowed_and_disturbs_nobody(site: HelperSite) -> None:
    site.grant(ALICE, 0, 1, 2, 3)
    site.grant(BOB, 4, 5, 6, 7)
    site.serve()
    flooder = site.client(ALICE, site.open(0, 1, 2, num_gpus=4, dead=(3,)), {"flood": 6})
    answers = site.ask(BOB, site.open(4, 5, 6, num_gpus=4, dead=(7,)), site.set(600, 4, 5, 6))
    assert faults(answers[1]) == {None}
    output, _ = flooder.communicate(timeout=120)
    counts = json.loads(output.splitlines()[-1])
    assert counts["heard"] <= 40 + 20 * 7, "40 at once, then 20 a second"


def test_client_that_never_reads_is_dropped_and_restored(site: HelperSite) -> None:
    site.grant(ALICE, *range(8))
    site.serve()
    site.client(
        ALICE,
        site.open(*SEVEN, dead=(7,)),
        site.set(650, *SEVEN),
        {"mute_flood": 5000},
        {"wait": 600},
    )
    wait_for(lambda: site.node.limits_w() == [650.0] * 7 + [500.0], "the boost")
    site.wait_restored()


def test_flood_of_connections_is_bounded_per_user(site: HelperSite) -> None:
    site.grant(ALICE, 0, 1, 2, 3)
    site.grant(BOB, 4, 5, 6, 7)
    site.serve()
    flooder = site.client(ALICE, {"connect": 12}, {"wait": 600})
    assert flooder.stdout is not None
    answers = [json.loads(flooder.stdout.readline()) for _ in range(12)]
    assert sum("ok" in answer for answer in answers) == 7, "and one that says nothing"
    refused = [answer["what"] for answer in answers if "ok" not in answer]
    assert refused == [f"uid {ALICE} has 8 connections already"] * 5
    others = site.ask(BOB, site.open(4, 5, 6, num_gpus=4, dead=(7,)), site.set(600, 4, 5, 6))
    assert faults(others[1]) == {None}


def test_starts_are_bounded_per_minute() -> None:
    admission = Admission()
    answers = [admission.refusal(ALICE, {ALICE, BOB}) for _ in range(22)]
    assert answers[:20] == [None] * 20 and "connected 20 times" in str(answers[20])
    assert admission.refusal(BOB, {ALICE, BOB}) is None
    assert "no grant" in str(admission.refusal(EVE, {ALICE, BOB}))


# ---- the helper's own life ----


def test_sigterm_of_the_helper_restores_everything(site: HelperSite) -> None:
    site.grant(ALICE, *range(8))
    site.serve()
    client = site.client(ALICE, site.open(*SEVEN, dead=(7,)), site.set(650, *SEVEN), {"hear": True})
    wait_for(lambda: site.node.limits_w() == [650.0] * 7 + [500.0], "the boost")
    assert site.helper is not None
    site.helper.terminate()
    assert site.helper.wait(120) == 0
    assert site.untouched() and not site.socket.exists()
    output, _ = client.communicate(timeout=120)
    assert json.loads(output.splitlines()[-1])["closing"] == "SIGTERM received"


def test_sigkill_of_the_helper_leaves_keepers_at_work_and_a_new_one_starts(
    site: HelperSite,
) -> None:
    site.grant(ALICE, *range(8))
    site.serve()
    client = site.client(ALICE, site.open(*SEVEN, dead=(7,)), site.set(650, *SEVEN), {"wait": 600})
    wait_for(lambda: site.node.limits_w() == [650.0] * 7 + [500.0], "the boost")
    assert site.helper is not None
    site.helper.kill()
    site.helper.wait()
    inode = site.socket.stat().st_ino
    site.serve()
    wait_for(lambda: site.socket.exists() and site.socket.stat().st_ino != inode, "a new socket")
    assert site.node.limits_w() == [650.0] * 7 + [500.0], "a live keeper's GPUs are its own"
    client.kill()
    site.wait_restored()


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
    site: HelperSite, spoil: Callable[[HelperSite], None], message: str
) -> None:
    spoil(site)
    assert message in site.refusal_to_serve()
    if site.state_dir.is_symlink():
        site.state_dir.unlink()


def test_symlinked_state_files_lead_nowhere(site: HelperSite) -> None:
    victim = site.folder / "victim"
    victim.write_text("precious")
    Folder(site.state_dir, private=True)
    (site.state_dir / f"{site.node.uuids[0]}.lock").symlink_to(victim)
    (site.state_dir / f"{site.node.uuids[1]}.json").symlink_to(victim)
    site.grant(ALICE, *range(8))
    site.serve()
    answers = site.ask(
        ALICE,
        site.open(0, num_gpus=2, dead=(7,)),
        site.open(1, num_gpus=2, dead=(7,)),
        site.open(2, num_gpus=2, dead=(7,)),
    )
    assert [answer.get("fault") for answer in answers[:2]] == ["refused", "refused"]
    assert "ok" in answers[2]
    assert victim.read_text() == "precious" and victim.stat().st_size == 8
    (site.state_dir / f"{site.node.uuids[1]}.json").unlink()


def test_second_helper_on_one_socket_is_refused(site: HelperSite) -> None:
    site.serve()
    assert "another power helper listens" in site.refusal_to_serve()


def test_grant_and_revoke_commands_are_what_a_prolog_needs(site: HelperSite) -> None:
    def power(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", MAIN, "power", *words, "--grants", str(site.grants)],
            env=site.node.env(PYTHONPATH=str(ROOT)),
            capture_output=True,
            text=True,
            check=False,
        )

    words = ("--job", "77", "--uid", str(ALICE), "--gpus", "4,5", "--cgroup", "job_77")
    assert power("grant", *words).returncode == 0
    with Folder(site.grants, private=True) as folder:
        assert read_grants(folder) == [Grant("77", ALICE, tuple(site.node.uuids[4:6]), "job_77")]
        assert power("revoke", "--job", "77").returncode == 0
        assert read_grants(folder) == []
    assert "names no GPU" in power("grant", "--job", "7", "--uid", "1", "--gpus", "9").stderr
