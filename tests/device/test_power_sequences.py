"""1,000 random sequences of everything that can happen to limits on a node.

Jobs open, set, end, are killed between and in the middle of calls; GPUs get lost and come back;
administrators change limits; the driver refuses, is loaded anew, the node reboots. In every
sequence: no write outside limits, none on a GPU that is not the job's, and in the end every GPU has
the limit that it would have without us.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fake_nvml import FakeNode, SetPrivilege
from power_kit import make_keeper, request

from megatron_ntp.device.errors import DeviceError
from megatron_ntp.device.files import Folder
from megatron_ntp.device.keeper import Keeper
from megatron_ntp.device.nvml import DeviceLayer, PowerLimits, PowerScope
from megatron_ntp.device.site import parse_site
from megatron_ntp.device.state import HostIdentity, LimitStore, restore_all

NUM_GPUS = 4
SITES = [
    parse_site({}, "default"),
    parse_site({"domain": {"num_gpus": 4, "budget_w": 2800}}, "roomy"),
    parse_site({"gpu": {"max_w": 560}, "domain": {"num_gpus": 4, "budget_w": 2240}}, "tight"),
]
WATTS = (100, 200, 450, 500, 530, 560, 600, 650, 666, 700, 800)
WEIGHTS = {
    "open": 14,
    "set_all": 20,
    "set": 8,
    "kill_inside_set": 8,
    "end": 4,
    "kill": 5,
    "restore": 5,
    "lose": 3,
    "find": 8,
    "administrate": 2,
    "reload": 1,
    "reboot": 1,
    "privilege": 3,
    "fault": 3,
}


def draw_event(draw: random.Random) -> tuple[Any, ...]:
    """One event with its arguments, for the method of World with that name."""
    (name,) = draw.choices(list(WEIGHTS), list(WEIGHTS.values()))
    job, gpu, watts = draw.randrange(2), draw.randrange(NUM_GPUS), draw.choice(WATTS)
    arguments: dict[str, tuple[Any, ...]] = {
        "open": (
            job,
            set(draw.sample(range(NUM_GPUS), draw.randint(1, 3))),
            draw.choice([None, 450, 500, 500]),
            draw.random() < 0.8,
        ),
        "set_all": (job, watts),
        "set": (job, {index: draw.choice(WATTS) for index in range(NUM_GPUS)}),
        "kill_inside_set": (job, watts, draw.randrange(3), draw.random() < 0.5),
        "end": (job,),
        "kill": (job,),
        "lose": (gpu,),
        "find": (gpu, draw.random() < 0.5),
        "administrate": (gpu, draw.randint(200, 699)),
        "privilege": (draw.random() < 0.8,),
        "fault": (gpu, draw.choice([3, 4, 8, 15, 999])),
    }
    return name, *arguments.get(name, ())


class KilledError(BaseException):
    """Stands for SIGKILL at a chosen moment."""


@dataclass
class CheckedLayer:
    """NVML for one job, which checks each write before the driver sees it."""

    nvml: DeviceLayer
    allowed: set[str]
    ceiling_mw: int = 0
    found_mw: dict[str, int] = field(default_factory=dict)
    kill_in: int | None = None
    kill_after_write: bool = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.nvml, name)

    def set_limit(
        self, uuid: str, limit_mw: int, scope: PowerScope = PowerScope.GPU
    ) -> PowerLimits:
        assert uuid in self.allowed, "a GPU that is not the job's"
        now = self.nvml.limits(uuid)
        assert now.min_mw <= limit_mw <= now.max_mw, "outside the board's limits"
        if limit_mw not in (now.requested_mw, self.found_mw.get(uuid)) and self.ceiling_mw:
            assert limit_mw <= self.ceiling_mw, "above the ceiling"
            self._check_sum(uuid, limit_mw, now.requested_mw)
        if self.kill_in == 0 and not self.kill_after_write:
            raise KilledError
        limits = self.nvml.set_limit(uuid, limit_mw, scope)
        if self.kill_in == 0:
            raise KilledError
        if self.kill_in is not None:
            self.kill_in -= 1
        return limits

    def _check_sum(self, uuid: str, limit_mw: int, now_mw: int) -> None:
        if limit_mw <= now_mw:
            return
        sum_mw = limit_mw
        for other in self.found_mw.keys() - {uuid}:
            try:
                sum_mw += self.nvml.limits(other).requested_mw
            except DeviceError:
                continue
        assert sum_mw <= self.ceiling_mw * len(self.found_mw), "above the budget"


class World:
    """The node, its jobs, and what each limit would be if we had never been there."""

    def __init__(self, node: FakeNode, nvml: DeviceLayer, folder: Path) -> None:
        self.node, self.nvml, self.folder = node, nvml, folder
        self.host = HostIdentity("boot-0", "driver-0")
        self.jobs: dict[int, tuple[Keeper, CheckedLayer]] = {}
        self.num_resets = 0
        self.expected_mw = [500_000] * NUM_GPUS

    def store(self) -> LimitStore:
        return LimitStore(Folder(self.folder, private=True), lambda: self.host)

    def do(self, event: tuple[Any, ...]) -> None:
        self.node.advance(1)
        with contextlib.suppress(DeviceError):  # refusals are answers
            getattr(self, "do_" + event[0])(*event[1:])

    def do_open(self, job: int, gpus: set[int], nominal_w: int | None, roomy: bool) -> None:
        if job in self.jobs:
            return
        uuids = [self.node.uuids[index] for index in sorted(gpus)]
        layer: Any = CheckedLayer(self.nvml, set(uuids))
        keeper = make_keeper(layer, self.store(), SITES[1 + job] if roomy else SITES[0])
        self.jobs[job] = (keeper, layer)
        try:
            reply = keeper.open(request(uuids, num_gpus=4, nominal_w=nominal_w, job_id=str(job)))
        except DeviceError:
            del self.jobs[job]
            raise
        layer.ceiling_mw, layer.found_mw = reply.ceiling_mw, reply.found_mw
        for index in gpus:
            assert reply.found_mw[self.node.uuids[index]] == self.expected_mw[index], (
                "a boosted value was taken for the found one"
            )

    def do_set(self, job: int, limits_w: dict[int, int]) -> None:
        if job in self.jobs:
            keeper, layer = self.jobs[job]
            names = {index: self.node.uuids[index] for index in limits_w}
            if len(layer.found_mw) > 1:  # mostly only its own GPUs: others refuse the whole call
                names = {index: uuid for index, uuid in names.items() if uuid in layer.found_mw}
            keeper.set_limits({uuid: limits_w[index] * 1000 for index, uuid in names.items()})

    def do_set_all(self, job: int, watts: int) -> None:
        if job in self.jobs:
            keeper, layer = self.jobs[job]
            keeper.set_limits(dict.fromkeys(layer.found_mw, watts * 1000))

    def do_end(self, job: int) -> None:
        if job in self.jobs:
            keeper, _ = self.jobs.pop(job)
            keeper.restore()

    def do_kill(self, job: int) -> None:
        if job in self.jobs:
            keeper, _ = self.jobs.pop(job)
            for kept in keeper._kept.values():
                os.close(kept.claim.fd)

    def do_kill_inside_set(self, job: int, watts: int, after: int, written: bool) -> None:
        if job not in self.jobs:
            return
        _, layer = self.jobs[job]
        layer.kill_in, layer.kill_after_write = after, written
        try:
            self.do_set_all(job, watts)
        except KilledError:
            self.do_kill(job)
        layer.kill_in = None

    def do_restore(self) -> None:
        recorded = set(self.store().recorded_uuids())
        layer: Any = CheckedLayer(self.nvml, recorded)
        restore_all(layer, self.store(), claim_timeout_s=0)

    def do_lose(self, index: int) -> None:
        self.node.gpu(index).lost = 1

    def do_find(self, index: int, was_reset: bool) -> None:
        """A GPU comes back, as it was or, after a reset, with its limit and counter reset."""
        gpu = self.node.gpu(index)
        if gpu.lost and was_reset:
            self.reset_gpu(index)
        gpu.lost = 0

    def reset_gpu(self, index: int) -> None:
        gpu = self.node.gpu(index)
        self.num_resets += 1
        gpu.energy_mj = 1e12 / 2**self.num_resets  # lower than ever before
        gpu.gpu_limit.requested_mw = self.expected_mw[index] = gpu.gpu_limit.default_mw

    def do_administrate(self, index: int, watts: int) -> None:
        limit_mw = watts * 1000 + 7  # no value that we would write
        self.node.gpu(index).gpu_limit.requested_mw = self.expected_mw[index] = limit_mw

    def do_reload(self) -> None:
        for job in list(self.jobs):
            self.do_kill(job)  # a driver is only unloaded when nobody uses it
        self.host = HostIdentity(self.host.boot_id, f"driver-{self.num_resets}")
        for index in range(NUM_GPUS):
            self.reset_gpu(index)
            self.node.gpu(index).lost = 0

    def do_reboot(self) -> None:
        self.do_reload()
        self.host = HostIdentity(f"boot-{self.num_resets}", self.host.driver_id)

    def do_privilege(self, allowed: bool) -> None:
        self.node.state.set_privilege = SetPrivilege.ANYONE if allowed else SetPrivilege.NOBODY

    def do_fault(self, index: int, code: int) -> None:
        self.node.clear_rules()
        self.node.add_rule("nvmlDeviceSetPowerManagementLimit", gpu=index, result=code, times=1)

    def finish(self) -> None:
        """Everything works again, and whoever is left ends or is cleaned up after."""
        self.node.clear_rules()
        self.do_privilege(allowed=True)
        for index in range(NUM_GPUS):
            self.node.gpu(index).lost = 0
        self.do_end(0)
        self.do_kill(1)
        self.do_restore()
        after_mw = [self.node.gpu(index).gpu_limit.requested_mw for index in range(NUM_GPUS)]
        assert after_mw == self.expected_mw, "a limit was left changed"
        assert self.store().recorded_uuids() == []
        for write in self.node.writes():
            assert 200_000 <= write.value <= 700_000 and write.result != 2


@pytest.fixture
def scratch() -> Iterator[Path]:
    """In memory where there is such a thing: each write of a record is synced."""
    shm = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=shm if shm.is_dir() else None))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.timeout(1200)  # seconds of computing, minutes where others compute, too
def test_nothing_is_left_changed_by_1000_sequences(
    node: FakeNode, layer: DeviceLayer, scratch: Path
) -> None:
    num_raised = 0
    for seed in range(1000):
        node.reset(NUM_GPUS, energy_mj=1e12)
        node.state.virtual_now_s = 0
        node.state.set_privilege = SetPrivilege.ANYONE
        shutil.rmtree(scratch / "state", ignore_errors=True)
        draw, world = random.Random(seed), World(node, layer, scratch / "state")
        events = [draw_event(draw) for _ in range(draw.randint(10, 50))]
        try:
            for event in events:
                world.do(event)
            world.finish()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}\n" + "\n".join(map(str, events))) from error
        num_raised += sum(write.result == 0 and write.value > 500_000 for write in node.writes())
    assert num_raised > 2000, "the sequences hardly ever boosted anything"
