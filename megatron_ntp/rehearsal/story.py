"""The phases of a rehearsal, in order, and what each leaves behind.

healthy      plain Megatron, uniform degree; saves; a rank is killed in the middle of a step
reduced      --ntp, one process less, from the last checkpoint; saves
repaired     plain Megatron, uniform degree, from the checkpoint that the reduced job wrote
undisturbed  plain Megatron, uniform degree, all steps in one go, no checkpoint

Where the reduced job's batch is smaller (policy shrink), the undisturbed job has to make the same
change of batch at the same steps: it is three plain jobs in a row, the middle one with that batch.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ntp.plan import format_degrees, format_failed
from megatron_ntp.rehearsal import processes
from megatron_ntp.rehearsal.job import Options, megatron_flags, training_script
from megatron_ntp.rehearsal.parity import read_losses
from megatron_ntp.rehearsal.progress import Progress

POLL_S = 0.02
TRACKER = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True)
class Phase:
    """One job. `kill_at` is the step in which ranks are killed; None: it ends by itself."""

    name: str
    title: str
    detail: str
    world_size: int
    first_step: int
    last_step: int
    flags: tuple[str, ...]
    kill_at: int | None = None


@dataclass
class Record:
    """What came of a phase: its losses by step, and how long it took."""

    phase: Phase
    losses: dict[int, float] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """A rehearsal that went to its end. `statistics` are those of the reduced job, by rank."""

    options: Options
    healthy: Record
    reduced: Record
    repaired: Record
    undisturbed: Record
    statistics: tuple[dict[str, Any], ...]

    @property
    def records(self) -> tuple[Record, ...]:
        return (self.healthy, self.reduced, self.repaired, self.undisturbed)

    @property
    def ntp_losses(self) -> dict[int, float]:
        """By step, what counts in the end: the reduced job does the lost steps again."""
        kept = {s: v for s, v in self.healthy.losses.items() if s <= self.options.resumed_after}
        return {**kept, **self.reduced.losses, **self.repaired.losses}

    @property
    def lost_losses(self) -> dict[int, float]:
        """Steps that were done after the last checkpoint and before the kill."""
        return {s: v for s, v in self.healthy.losses.items() if s > self.options.resumed_after}

    @property
    def killed_in_step(self) -> int:
        return max(self.healthy.losses, default=0) + 1


class Story:
    """Runs the phases of one rehearsal in a folder of its own."""

    def __init__(
        self,
        options: Options,
        folder: Path,
        starter: processes.Starter,
        progress: Progress,
        timeout_s: float,
    ) -> None:
        self.options = options
        self.folder = folder
        self._starter = starter
        self._progress = progress
        self._timeout_s = timeout_s
        self._checkpoints = folder / "checkpoints"
        self._plan = folder / "plan.json"
        self._statistics = folder / "statistics"

    def run(self) -> Outcome:
        """All phases. Raises RankFailedError if a rank ends that was not meant to."""
        healthy = self._run(self._healthy())
        self.options.plan.save(self._plan)
        self._tell_failure(healthy)
        reduced = self._run(self._reduced())
        statistics = [json.loads(p.read_text()) for p in sorted(self._statistics.glob("*.json"))]
        repaired = self._run(self._repaired())
        undisturbed = self._run_in_a_row(self._undisturbed())
        return Outcome(self.options, healthy, reduced, repaired, undisturbed, tuple(statistics))

    # Phases

    def _healthy(self) -> Phase:
        options = self.options
        return Phase(
            "healthy",
            "1/4 healthy    ",
            self._uniform(),
            options.healthy.world_size,
            1,
            options.num_steps,
            tuple(self._saves()),
            kill_at=options.fail_at,
        )

    def _reduced(self) -> Phase:
        options = self.options
        degrees = " + ".join(f"TP{degree}" for degree in options.topology.dp_degrees)
        ntp_flags = ("--ntp", "--ntp-plan", str(self._plan))
        return Phase(
            "reduced",
            "2/4 reduced    ",
            f"{degrees}, {options.topology.world_size} processes, --ntp",
            options.topology.world_size,
            options.resumed_after + 1,
            options.repaired_after,
            (
                *self._loads(),
                *("--ckpt-step", str(options.resumed_after)),  # whatever a late kill let through
                *self._saves(),
                *_exit_at(options.repaired_after),
                *ntp_flags,
                *("--ntp-stats-dir", str(self._statistics)),
            ),
        )

    def _repaired(self) -> Phase:
        options = self.options
        return Phase(
            "repaired",
            "3/4 repaired   ",
            self._uniform(),
            options.healthy.world_size,
            options.repaired_after + 1,
            options.num_steps,
            tuple(self._loads()),
        )

    def _undisturbed(self) -> list[Phase]:
        options = self.options
        name, title = "undisturbed", "4/4 undisturbed"
        batch = options.reduced_batch
        if batch == options.global_batch:
            whole = Phase(
                name,
                title,
                self._uniform(),
                options.healthy.world_size,
                1,
                options.num_steps,
                (),
            )
            return [whole]
        folder = str(self.folder / "undisturbed")
        loads = ("--load", folder)
        saves = ("--save", folder, "--save-interval", str(options.save_interval))
        first, second = options.resumed_after, options.repaired_after
        same, world_size = self._uniform(), options.healthy.world_size
        return [
            Phase(name, title, same, world_size, 1, first, (*saves, *_exit_at(first))),
            Phase(
                f"{name}-reduced-batch",
                title,
                f"TP{options.nominal_tp}, one replica with the reduced job's batch of {batch}",
                options.nominal_tp,
                first + 1,
                second,
                (*loads, *saves, *_exit_at(second), "--global-batch-size", str(batch)),
            ),
            Phase(f"{name}-end", title, same, world_size, second + 1, options.num_steps, loads),
        ]

    def _uniform(self) -> str:
        options = self.options
        return (
            f"TP{options.nominal_tp} x DP{options.num_replicas}, "
            f"{options.healthy.world_size} processes, plain Megatron"
        )

    def _loads(self) -> Sequence[str]:
        return ("--load", str(self._checkpoints))

    def _saves(self) -> Sequence[str]:
        return (
            *("--save", str(self._checkpoints)),
            *("--save-interval", str(self.options.save_interval)),
        )

    # Running

    def _run_in_a_row(self, phases: list[Phase]) -> Record:
        """Jobs that go on from each other, as one."""
        records = [self._run(phase) for phase in phases]
        losses = {step: loss for record in records for step, loss in record.losses.items()}
        return Record(phases[0], losses, sum(record.seconds for record in records))

    def _run(self, phase: Phase) -> Record:
        loss_log = self.folder / "losses" / f"{phase.name}.jsonl"
        words = [
            *("run", "--cpu", "--loss-log", str(loss_log)),
            str(training_script()),
            *megatron_flags(self.options),
            *phase.flags,
        ]
        record = Record(phase)
        last = phase.last_step if phase.kill_at is None else phase.kill_at
        self._progress.begin(phase.title, phase.detail, phase.first_step, last)
        logs = self.folder / "logs" / phase.name
        with processes.Job(words, phase.world_size, logs, self._starter) as job:
            if phase.kill_at is None:
                self._follow(job, record, loss_log)
            else:
                self._follow_and_kill(job, record, loss_log, phase.kill_at)
        record.losses = read_losses(loss_log)
        killed = f"killed in step {max(record.losses, default=0) + 1}"
        record.seconds = self._progress.end("done" if phase.kill_at is None else killed)
        return record

    def _follow(self, job: processes.Job, record: Record, loss_log: Path) -> None:
        """Until every rank has ended well."""
        deadline = time.monotonic() + self._timeout_s
        while job.running:
            job.check()
            self._look(record, loss_log)
            if time.monotonic() > deadline:
                raise job.stuck(f"phase {record.phase.name} took over {self._timeout_s:g} s")
            time.sleep(POLL_S)
        job.check()
        self._look(record, loss_log)

    def _follow_and_kill(
        self, job: processes.Job, record: Record, loss_log: Path, kill_at: int
    ) -> None:
        """Until SIGKILL for the ranks on the failed slots, with which the rest of the job goes.

        It comes half a step after the step before `kill_at`, and after that step's checkpoint.
        """
        deadline = time.monotonic() + self._timeout_s
        done_s: list[float] = []
        while not (len(done_s) >= kill_at - 1 and self._is_saved()):
            job.check()
            if not job.running:
                raise processes.RankFailedError(f"the job ended before step {kill_at}")
            self._look(record, loss_log)
            done_s += [time.monotonic()] * (len(record.losses) - len(done_s))
            if time.monotonic() > deadline:
                raise job.stuck(f"phase {record.phase.name} took over {self._timeout_s:g} s")
            time.sleep(POLL_S / 4)
        # Not the mean: a step with a checkpoint may take as long as all the others.
        step_s = [after - before for before, after in itertools.pairwise(done_s)] or [0.0]
        time.sleep(statistics.median_low(step_s) / 2)
        job.kill(self.options.killed_ranks())
        if len(read_losses(loss_log)) >= self.options.num_steps:
            raise processes.RankFailedError(
                f"the job had done all of its {self.options.num_steps} steps before a rank could "
                "be killed. Give it more --steps after --fail-at"
            )

    def _is_saved(self) -> bool:
        tracker = self._checkpoints / TRACKER
        step = tracker.read_text().strip() if tracker.exists() else ""
        return step.isdecimal() and int(step) >= self.options.resumed_after

    def _look(self, record: Record, loss_log: Path) -> None:
        record.losses = read_losses(loss_log)
        if record.losses:
            self._progress.step(max(record.losses))
        self._progress.tick()

    def _tell_failure(self, healthy: Record) -> None:
        options = self.options
        ranks = ", ".join(map(str, options.killed_ranks()))
        self._progress.say(
            f"\nSIGKILL to rank {ranks} (replica:slot {format_failed(options.topology.failed)}) in "
            f"step {max(healthy.losses) + 1}; back to the checkpoint of step "
            f"{options.resumed_after}. The plan for degrees {format_degrees(options.degrees)}:\n\n"
            f"{options.plan.table()}"
        )


def _exit_at(step: int) -> tuple[str, str]:
    """For a job that starts at most `step` steps before: it ends after this one."""
    return ("--exit-interval", str(step))
