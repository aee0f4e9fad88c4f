"""What a supervisor leaves in the process table."""

from __future__ import annotations

import subprocess
import sys

# Adopts a grandchild that has ended before anybody looked, while a child of its own has ended, too.
PROGRAM = """
import os, subprocess, sys, time
from megatron_ntp.launchers.parent import adopt_orphans
from megatron_ntp.supervisor import processes
adopt_orphans()
agent = subprocess.Popen([sys.executable, "-c", "import os; os.fork() or os._exit(0)"])
own = subprocess.Popen(["sh", "-c", "exit 7"])
give_up_at = time.monotonic() + 20
while len(processes._ended_children()) < 3 and time.monotonic() < give_up_at:
    time.sleep(0.01)
before = len(processes._ended_children())
processes.reap_adopted([agent.pid, own.pid])
print(before, len(processes._ended_children()), agent.wait(), own.wait())
"""


def test_adopted_ranks_are_reaped_and_own_children_are_not() -> None:
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False
    )
    assert found.stdout.split() == ["3", "2", "0", "7"], found.stderr
