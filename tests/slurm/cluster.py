"""A real Slurm with two nodes on this machine, for tests: started in a scratch folder, then ended.

Both slurmd run on this host under the node names n1 and n2. Each has two plain files for GPUs.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "munged", "munge", "sbatch", "srun", "scontrol")
NODES = ("n1", "n2")
GPUS_PER_NODE = 2
_SEARCH = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_START_DEADLINE_S = 90.0

_CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldPort={ports[0]}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
ReturnToService=2
KillWait=5
SchedulerParameters=sched_interval=2,bf_interval=2
{nodes}
PartitionName=p Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""

_NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 Boards=1 "
    "SocketsPerBoard=1 CoresPerSocket=2 ThreadsPerCore=1 RealMemory=4000 Gres=gpu:{gpus}"
)


def why_not() -> str | None:
    """What this machine lacks for a cluster, or None."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=_SEARCH) is None]
    if missing:
        return f"needs {', '.join(missing)} (apt-get install slurm-wlm munge)"
    if os.geteuid() != 0:
        return "needs root, to run slurmd"
    return None


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def wait_for(what: str, condition: Callable[[], object], timeout_s: float) -> None:
    """Polls until the condition holds. Raises AssertionError naming what did not come."""
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_at, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.3)


class Cluster:
    """The running cluster."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": _SEARCH}
        for name in [name for name in self.environ if name.startswith("CUDA_")]:
            del self.environ[name]

    def call(self, *words: str, check: bool = True) -> str:
        """Output of a Slurm command."""
        done = subprocess.run(
            words, env=self.environ, capture_output=True, text=True, timeout=60, check=False
        )
        assert not check or done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def start(self) -> None:
        host = socket.gethostname()
        ports = _free_ports(1 + len(NODES))
        nodes = [
            _NODE.format(name=name, host=host, port=port, gpus=GPUS_PER_NODE)
            for name, port in zip(NODES, ports[1:], strict=True)
        ]
        text = _CONFIG.format(host=host, folder=self.folder, ports=ports, nodes="\n".join(nodes))
        (self.folder / "state").mkdir(parents=True)
        (self.folder / "slurm.conf").write_text(text)
        for number in range(GPUS_PER_NODE):
            (self.folder / f"gpu{number}").touch()
        (self.folder / "gres.conf").write_text(
            f"NodeName=n[1-2] Name=gpu File={self.folder}/gpu[0-{GPUS_PER_NODE - 1}]\n"
        )
        self.call("slurmctld", "-f", str(self.folder / "slurm.conf"))
        for name in NODES:
            self.call("slurmd", "-f", str(self.folder / "slurm.conf"), "-N", name)
        wait_for("two idle nodes", self._is_idle, _START_DEADLINE_S)

    def _is_idle(self) -> bool:
        states = self.call("sinfo", "-h", "-N", "-o", "%N %t", check=False).split("\n")
        return [state for state in states if state] == [f"{name} idle" for name in NODES]

    def stop(self) -> None:
        self.call("scancel", "--user=root", check=False)
        pids = []
        for name in ("slurmd-n1", "slurmd-n2", "ctld"):
            with contextlib.suppress(OSError, ValueError):
                pids.append(int((self.folder / f"{name}.pid").read_text()))
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        with contextlib.suppress(AssertionError):
            wait_for("the end of Slurm", lambda: not any(map(_is_alive, pids)), 20)

    # Jobs

    def submit(self, script: Path, *options: str) -> str:
        """Job id."""
        words = ("sbatch", "--parsable", f"--chdir={script.parent}", *options, str(script))
        return self.call(*words).strip().partition(";")[0]

    def job(self, job_id: str) -> dict[str, str]:
        """What scontrol knows of a job; of a heterogeneous one, of its first part."""
        text = self.call("scontrol", "show", "job", job_id)
        return dict(re.findall(r"(\w+)=(\S*)", text.partition("\n\n")[0]))

    def wait_for_end(self, job_id: str, timeout_s: float = 400.0) -> dict[str, str]:
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        wait_for(f"end of job {job_id}", lambda: self.job(job_id)["JobState"] in ended, timeout_s)
        return self.job(job_id)


def _is_alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


@contextlib.contextmanager
def munge() -> Iterator[None]:
    """munged, if it does not run yet; what was started is ended."""
    if subprocess.run(["munge", "-n"], capture_output=True, check=False).returncode == 0:
        yield
        return
    folder = Path("/run/munge")
    folder.mkdir(exist_ok=True)
    shutil.chown(folder, "munge", "munge")
    words: Sequence[str] = ("runuser", "-u", "munge", "--", "munged")
    done = subprocess.run(
        words, env={**os.environ, "PATH": _SEARCH}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    pid = int((folder / "munged.pid").read_text())
    try:
        yield
    finally:
        os.kill(pid, signal.SIGTERM)
