"""Lets the faults of `--ntp-inject` happen in the rank that they are meant for, by real means.

- kill: SIGKILL to this process. hang: SIGSTOP to this process.
- nvml-lost: the GPU is reported in the fault file of the site, as an operator would, and its
  process dies with it. (A driver that loses a GPU can only be had in tests.)
- corrupt-checkpoint: the files of the newest whole checkpoint of --save are changed.

A fault of a rank that an attempt no longer has does not happen; what never happened is said at the
end of the job by rank 0, and by `megatron-ntp report`.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_ntp import events, settings
from megatron_ntp.inject.damage import damage
from megatron_ntp.inject.grammar import Fault, InjectError, Kind, When, parse
from megatron_ntp.inject.log import FaultLog
from megatron_ntp.launchers.check import this_host

FAULTS_ENV = "MEGATRON_NTP_FAULTS"
"""Names the fault file of the site to ranks. Set by the supervisor."""

STATE_FOLDER = "injected"
FLAG = "--ntp-inject"

_SAVED = "saved"


class Injector:
    """The faults of one rank. Called with every moment of it, see `integration.progress`."""

    def __init__(self, log: FaultLog, environ: Mapping[str, str], save: str | None) -> None:
        """Checks what each fault needs.

        Args:
            log: the faults of the job.
            environ: RANK, and the variables that the launcher has set.
            save: the folder of --save.

        Raises:
            InjectError: a fault cannot happen in a job that was started like this.
        """
        self._log, self._environ = log, environ
        self._save = None if save is None else Path(save)
        self._rank = int(environ.get("RANK", "0"))
        for fault in log.faults:
            self._check(fault)
        self._own = [index for index, fault in enumerate(log.faults) if self._is_own(fault)]

    def __call__(self, moment: str, iteration: int) -> None:
        """Lets happen what belongs to this moment. `iteration`: steps the job has completed."""
        if moment == "exit":
            self.say_pending()
        due = [i for i in self._own if _is_due(self._log.faults[i], moment, iteration)]
        for index in due:
            self._own.remove(index)
            self._fire_later(index, moment, iteration)

    def say_pending(self) -> None:
        """At the end, by rank 0: what was asked for and has not happened."""
        if self._rank == 0:
            for fault in self._log.pending:
                print(f"{FLAG} WARNING: this fault has not happened: {fault}", flush=True)

    def _check(self, fault: Fault) -> None:
        if fault.kind is Kind.NVML_LOST and FAULTS_ENV not in self._environ:
            raise InjectError(
                f"{FLAG} {fault} reports the GPU in the fault file of the site ({FAULTS_ENV}), "
                "and there is none: start with `megatron-ntp launch --faults FILE`"
            )
        if fault.kind is Kind.CORRUPT and self._save is None:
            raise InjectError(f"{FLAG} {fault} needs a job that saves: add --save")

    def _is_own(self, fault: Fault) -> bool:
        if fault.gpu is None:
            return fault.rank == self._rank
        is_here = fault.host in (None, this_host(self._environ))
        return is_here and fault.gpu == own_device(self._environ)

    def _fire_later(self, index: int, moment: str, iteration: int) -> None:
        fault = self._log.faults[index]
        arguments = (index, moment, iteration)
        if fault.after_s:
            timer = threading.Timer(fault.after_s, self._fire, arguments)
            timer.daemon = True
            timer.start()
        else:
            self._fire(*arguments)

    def _fire(self, index: int, moment: str, iteration: int) -> None:
        fault = self._log.faults[index]
        if not self._log.claim(index, rank=self._rank, moment=moment, iteration=iteration):
            return
        print(f"{FLAG}: rank {self._rank}, after step {iteration}: {fault}", flush=True)
        if fault.kind is Kind.CORRUPT:
            assert self._save is not None and fault.how is not None
            print(f"{FLAG}: {damage(self._save, fault.how)}", flush=True)
        elif fault.kind is Kind.HANG:
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            if fault.kind is Kind.NVML_LOST:
                self._report_gpu()
            os.kill(os.getpid(), signal.SIGKILL)

    def _report_gpu(self) -> None:
        """One line HOST DEVICE REASON, in one write: others append there, too."""
        line = f"{this_host(self._environ)} {own_device(self._environ)} injected: GPU lost\n"
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        file = os.open(self._environ[FAULTS_ENV], flags, 0o644)
        os.write(file, line.encode())
        os.close(file)


def _is_due(fault: Fault, moment: str, iteration: int) -> bool:
    """A checkpoint is damaged when its save has returned; all else happens as a moment begins."""
    when, at = fault.moment.when, fault.moment.at
    if when is When.STEP:
        return moment == When.STEP and at == iteration + 1
    if when is When.SAVE:
        begins = _SAVED if fault.kind is Kind.CORRUPT else When.SAVE
        return moment == begins and at in (None, iteration)
    return moment == when


def own_device(environ: Mapping[str, str]) -> str:
    """This rank's device as its node names it: its place among those that it may use."""
    local_rank = int(environ.get("LOCAL_RANK", "0"))
    devices = [name for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return devices[local_rank].strip() if local_rank < len(devices) else str(local_rank)


def from_command_line(words: Sequence[str], environ: Mapping[str, str]) -> Injector | None:
    """The injector of this rank; None without --ntp-inject.

    Args:
        words: the flags of the training script; Megatron's own parser comes later.
        environ: this process's variables.

    Raises:
        InjectError: the flag cannot be understood, or has no place to remember what happened.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    settings.add_arguments(parser, words).add_argument("--save")
    options, _ = parser.parse_known_args(words)
    if options.ntp_inject is None:
        return None
    faults = parse(options.ntp_inject)
    event_log = environ.get(events.ENV)
    folder = options.ntp_inject_state
    if folder is None and event_log is not None:
        folder = os.path.join(os.path.dirname(event_log), STATE_FOLDER)
    if folder is None:
        raise InjectError(
            f"{FLAG} needs a folder to remember over restarts which faults have happened: start "
            "with `megatron-ntp launch`, or add --ntp-inject-state DIR"
        )
    return Injector(FaultLog(Path(folder), faults, event_log), environ, options.save)
