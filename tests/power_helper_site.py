"""A node with a power helper of root's, and users on it: real processes, also of other users."""

from __future__ import annotations

import json
import shutil
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
from megatron_ntp.device.files import Folder
from megatron_ntp.device.grants import Grant, write_grant
from megatron_ntp.device.protocol import OpenRequest

ROOT = Path(__file__).parents[1]
CLIENT = Path(__file__).with_name("device") / "power_client.py"
ALICE, BOB, EVE = 10_001, 10_002, 10_003
SEVEN = tuple(range(7))
SITE = """
gpu: {nominal_w: 500, min_w: 300, max_w: 650}
domain: {num_gpus: 8, budget_w: 5200}
"""
MAIN = "import sys; from megatron_ntp.cli import main; sys.exit(main(sys.argv[1:]))"


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
        wait_for(self._answers_or_died, "the helper's socket")
        assert self.helper.poll() is None, "the helper ended while it started"

    def _answers_or_died(self) -> bool:
        assert self.helper is not None
        return self.socket.exists() or self.helper.poll() is not None

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
def helper_site() -> Iterator[HelperSite]:
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


def faults(answer: dict[str, Any]) -> set[str | None]:
    return {entry["fault"] for entry in answer["ok"].values()}
