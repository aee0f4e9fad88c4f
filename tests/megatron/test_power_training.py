"""The power boost in real training runs at degrees 2+1, on an imagined node with our own NVML.

Ranks 0 and 1 have GPUs 0 and 1, rank 2 has GPU 2, the other GPU of its domain is dead. How long a
replica works before gradient sync follows the clock of its first GPU, as the limit in the node's
state file gives it, so the loop is closed over real training steps.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fake_nvml import FakeNode, SetPrivilege
from flags import DISTRIBUTED, LLAMA, MODEL, OVERLAP, SHORT, tp
from ranks import Training, run_training

ERROR = "megatron-ntp: error: "
WARNING = "nonuniform TP WARNING (power): "
TINY = [*MODEL, *LLAMA, *"--num-layers 1 --micro-batch-size 1 --global-batch-size 2".split()]
REDUCED = [*TINY, *tp(2), "--ntp", "--ntp-degrees", "2,1"]
# 400 W found and nominal, of 700 W; a feed that carries both boards of a domain at 640 W.
SITE = "gpu: {nominal_w: 400, max_w: 700}\ndomain: {num_gpus: 2, budget_w: 1280}\n"
FOUND_W, CEILING_W = 400.0, 700.0
WORK_S = 0.25  # of a healthy replica before gradient sync, at the found limit
LAG = 1.2  # the reduced replica needs so much longer at equal limits
STEPS = 24
LONG, END = ["--train-iters", "60"], ["--exit-interval", str(STEPS)]


# --- in a rank ----------------------------------------------------------------------------------


def observed(folder: str, lag: float, end: str, **_: Any) -> None:
    """Before the start: work takes time, waits are recorded, and a rank may be ended."""
    from megatron_ntp.device.session import PowerSession
    from megatron_ntp.integration.grad_sync import GradSync
    from megatron_ntp.integration.power_waits import StepWaits

    rank = int(os.environ["RANK"])
    take, begin, finish = PowerSession.observe, StepWaits.begin_step, StepWaits.end_step
    node, sync, began_at = FakeNode(Path(os.environ["NODE"])), GradSync.finish, [0.0]
    own_s = [0.0]  # that this observer has cost
    start_pace = node.gpu(rank).pace()

    def work_on(self: GradSync) -> None:
        """Until the time that this replica needs is over."""
        needs_s = WORK_S * (lag if rank == 2 else 1) * start_pace / node.gpu(rank).pace()
        time.sleep(max(0.0, began_at[0] + needs_s - time.monotonic()))
        sync(self)

    def observe(self: PowerSession, step: int, wait_s: float, step_s: float) -> None:
        take(self, step, wait_s, step_s)
        started = time.thread_time()
        limit_w = self.status().limit_mw / 1000
        note(step=step, gap=wait_s / step_s, limit_w=limit_w)
        if end and limit_w > FOUND_W:
            os.kill(os.getpid(), getattr(signal, end))
        own_s[0] += time.thread_time() - started

    def note(**fields: Any) -> None:
        with Path(folder, f"observed-{rank}").open("a") as file:
            file.write(json.dumps(fields) + "\n")

    def timed(method: Callable[..., None]) -> Callable[..., None]:
        def call(self: StepWaits) -> None:
            began_at[0] = time.monotonic()
            started, own_before_s = time.thread_time(), own_s[0]
            method(self)
            note(cost_s=time.thread_time() - started - (own_s[0] - own_before_s))

        return call

    PowerSession.observe = observe  # type: ignore[method-assign]
    if lag:
        GradSync.finish = work_on  # type: ignore[method-assign]
    StepWaits.begin_step = timed(begin)  # type: ignore[method-assign]
    StepWaits.end_step = timed(finish)  # type: ignore[method-assign]


def facts(**_: Any) -> dict[str, Any]:
    """After the end: what this rank ran, and what it has left running."""
    from megatron_ntp.integration import context

    ntp = context.require()
    assert ntp.batch is not None
    give_up_at = time.monotonic() + 20  # a keeper that has restored takes a moment to go
    while keepers := num_keepers():
        if time.monotonic() > give_up_at:
            break
        time.sleep(0.05)
    assert ntp.plan is not None
    estimate = ntp.plan.batch(ntp.batch.num_microbatches)
    return {
        "shares": ntp.batch.shares,
        "without": estimate.shares,
        "keepers": keepers,
        "pid": os.getpid(),
    }


def num_keepers() -> int:
    """Of this process."""
    listing = subprocess.run(
        ["ps", "--ppid", str(os.getpid()), "-o", "args="],
        capture_output=True,
        text=True,
        check=True,
    )
    return listing.stdout.count("keeper_process")


# --- runs ---------------------------------------------------------------------------------------


@dataclass
class Site:
    """The node and its files, and jobs on it."""

    node: FakeNode
    folder: Path

    @property
    def power(self) -> list[str]:
        return ["--ntp-power", "boost", *self.options]

    @property
    def options(self) -> list[str]:
        site = self.folder / "site.yaml"
        site.write_text(SITE)
        state = self.folder / "state"
        # The deadline is for a machine that other work slows down.
        return (
            f"--ntp-power-site {site} --ntp-power-state-dir {state} --ntp-power-deadline 60".split()
        )

    def run(
        self,
        *flags: str,
        argv: list[str] = REDUCED,
        world_size: int = 3,
        lag: float = 0,
        end: str = "",
        **options: Any,
    ) -> Training:
        environment = {
            "CUDA_VISIBLE_DEVICES": "0,1,2",
            "NODE": str(self.node.path),
            **{name: self.node.env()[name] for name in ("FAKE_NVML_STATE", "LD_LIBRARY_PATH")},
            **options.pop("environment", {}),
        }
        return run_training(
            [*argv, *flags],
            world_size,
            environment=environment,
            before=observed,
            after=facts,
            folder=str(self.folder),
            lag=lag,
            end=end,
            **options,
        )

    def notes(self, rank: int, key: str) -> list[Any]:
        path = self.folder / f"observed-{rank}"
        lines = path.read_text().splitlines() if path.exists() else []
        return [entry[key] for line in lines if key in (entry := json.loads(line))]

    def check_writes(self) -> None:
        """Only the survivor of the reduced domain was written, never above its bounds."""
        writes = self.node.writes()
        assert {write.uuid for write in writes} == {self.node.uuids[2]}
        assert max(write.value for write in writes) <= 1000 * CEILING_W
        healthy_mw = 3 * 1000 * FOUND_W  # the dead GPU's included: it draws nothing in truth
        assert max(write.sum_requested_mw for write in writes) <= healthy_mw + 1000 * CEILING_W
        assert max(write.value for write in writes) > 1000 * FOUND_W, "never boosted"

    def wait_restored(self) -> None:
        give_up_at = time.monotonic() + 60
        while self.node.limits_w() != [FOUND_W] * 4 or list((self.folder / "state").glob("*.json")):
            assert time.monotonic() < give_up_at, self.node.limits_w()
            time.sleep(0.02)


def make_site(folder: Path) -> Site:
    node = FakeNode.create(folder, num_gpus=4, exponent=1.0)
    node.set_limits_w(FOUND_W)
    return Site(node, folder)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return make_site(tmp_path)


@pytest.fixture(scope="module")
def boosted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Site, Training]:
    """Steps in which the reduced replica is slower; Megatron ends them by sys.exit."""
    site = make_site(tmp_path_factory.mktemp("boosted"))
    site.node.state.trace = 1
    return site, site.run(*LONG, *END, *site.power, lag=LAG)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Site, Training]:
    """The same steps without power, on a node that logs every call."""
    site = make_site(tmp_path_factory.mktemp("plain"))
    site.node.state.trace = 1
    return site, site.run(*LONG, *END)


# --- the loop -----------------------------------------------------------------------------------


def test_reduced_replica_keeps_pace_after_a_while(boosted: tuple[Site, Training]) -> None:
    site, training = boosted
    gaps, limits_w = site.notes(2, "gap"), site.notes(2, "limit_w")
    print("\n".join(f"{w:g} W: {100 * gap:+.1f} %" for w, gap in zip(limits_w, gaps, strict=True)))
    assert len(gaps) >= STEPS - 3, "an observation per step, two steps late"
    assert all(gap > 0.1 for gap in gaps[1:4]), "the others wait for this replica"
    assert abs(sorted(gaps[-7:])[3]) < 0.05
    assert FOUND_W < limits_w[-1] < CEILING_W
    assert "power: replica 1 (1 of 2 GPUs): within the target at" in training.stdout[2]


def test_limits_were_raised_on_the_survivor_only_and_restored(
    boosted: tuple[Site, Training],
) -> None:
    site, training = boosted
    assert site.node.limits_w() == [FOUND_W] * 4, "closed before the process ended"
    assert [result["keepers"] for result in training.results] == [0, 0, 0]
    site.check_writes()


def test_losses_are_those_without_power(
    boosted: tuple[Site, Training], plain: tuple[Site, Training]
) -> None:
    assert len(plain[1].losses) == STEPS
    assert boosted[1].losses == plain[1].losses
    assert boosted[1].grad_norms == plain[1].grad_norms


def test_without_the_flag_nothing_is_asked_or_started(plain: tuple[Site, Training]) -> None:
    site, training = plain
    assert site.node.events() == [] and not (site.folder / "state").exists()
    assert [result["keepers"] for result in training.results] == [0, 0, 0]
    assert all(site.notes(rank, "cost_s") == [] for rank in range(3))


def test_no_rank_calls_nvml_itself(boosted: tuple[Site, Training]) -> None:
    site, training = boosted
    callers = {event["pid"] for event in site.node.events() if event["event"] == "call"}
    assert callers and not callers & {result["pid"] for result in training.results}


def test_a_step_costs_the_training_thread_less_than_1_ms(boosted: tuple[Site, Training]) -> None:
    site, _ = boosted
    for rank in (0, 2):
        costs_s = site.notes(rank, "cost_s")[10:]
        each_s = [begin + end for begin, end in zip(costs_s[::2], costs_s[1::2], strict=True)]
        print(f"rank {rank}: {1e3 * sum(each_s) / len(each_s):.2f} ms per step")
        assert sum(each_s) / len(each_s) < 0.001
    assert site.notes(1, "cost_s") == [], "not a rank that measures"


# --- ends ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", ["SIGTERM", "SIGKILL"])
def test_signal_to_the_rank_that_boosts(site: Site, number: str) -> None:
    run = site.run(*LONG, *site.power, lag=LAG, end=number, check=False, grace_s=0.5)
    assert run.statuses[2] == -getattr(signal, number), run.describe()
    site.wait_restored()
    site.check_writes()


def test_signal_that_megatron_handles(site: Site) -> None:
    """Here with gradient sync under the backward pass, of which only the rest is waited for."""
    save = ["--save", str(site.folder / "saved"), "--save-interval", "100", "--exit-signal-handler"]
    layout = [*DISTRIBUTED, *OVERLAP, "--dist-ckpt-optim-fully-reshardable"]
    flags = [*LONG, *site.power, *save, *layout]
    run = site.run(*flags, lag=LAG, end="SIGTERM")
    assert run.statuses == [0, 0, 0] and 2 < len(run.losses) < 60
    assert (site.folder / "saved" / "latest_checkpointed_iteration.txt").exists()
    assert site.node.limits_w() == [FOUND_W] * 4
    site.check_writes()


def test_exception_in_a_step(site: Site) -> None:
    """A sample too long for the model, say: the rank ends with a traceback, after restoring."""
    run = site.run(*LONG, *site.power, lag=LAG, end="SIGINT", check=False, grace_s=5)
    assert run.statuses[2] == 1 and "KeyboardInterrupt" in run.stderr[2], run.describe()
    assert site.node.limits_w() == [FOUND_W] * 4
    site.check_writes()


# --- when it cannot be done ---------------------------------------------------------------------


def test_require_without_permission_stops_before_training(site: Site) -> None:
    site.node.state.set_privilege = SetPrivilege.NOBODY
    run = site.run("--ntp-power", "require", *site.options, check=False, grace_s=30)
    assert run.statuses == [2, 2, 2], run.describe()
    text = "".join(run.stderr)
    assert text.count(ERROR) == 1, text
    assert "--ntp-power require: " in text and "no permission" in text
    assert run.losses == {} and site.node.limits_w() == [FOUND_W] * 4


@pytest.mark.parametrize("mode", ["boost", "require"])
def test_hosts_without_a_driver(site: Site, mode: str) -> None:
    driverless = {"FAKE_NVML_STATE": "/nonexistent", "LD_LIBRARY_PATH": ""}
    flags = ["--ntp-power", mode, *SHORT]
    run = site.run(*flags, environment=driverless, check=False, grace_s=30)
    text = "".join(run.stderr)
    if mode == "require":
        assert run.statuses == [2, 2, 2] and text.count(ERROR) == 1 and run.losses == {}
    else:
        assert run.statuses == [0, 0, 0], run.describe()
        text = "".join(run.stdout)
        assert len(run.losses) == 3 and text.count(WARNING) == 1
        assert "no boost for replica 1, training goes on: " in text
    assert "NVML missing" in text
    assert site.node.writes() == []


# --- the rest of the gap, and healthy jobs ------------------------------------------------------


def test_batch_policy_takes_what_power_leaves(site: Site) -> None:
    """At 700 W of 400 W and throughput ~ power^0.5 a microbatch takes 2 / 1.32 of the time."""
    flags = ["--ntp-batch-policy", "redistribute", "--global-batch-size", "16", *SHORT]
    results = site.run(*flags, *site.power).results
    assert [result["without"] for result in results] == [(11, 5)] * 3
    assert [result["shares"] for result in results] == [(10, 6)] * 3


def test_healthy_job_gets_the_nominal_limit_it_asks_for(site: Site) -> None:
    healthy = [*TINY, *tp(1), "--ntp", "--ntp-degrees", "1,1", *SHORT]
    options = site.options[2:]
    nominal = ["--ntp-power-nominal", "350"]
    site.run("--ntp-power", "require", *options, *nominal, argv=healthy, world_size=2)
    for uuid in site.node.uuids:
        values = {write.value for write in site.node.writes() if write.uuid == uuid}
        assert values == ({350_000, 400_000} if uuid in site.node.uuids[:2] else set())
    assert site.node.limits_w() == [FOUND_W] * 4
