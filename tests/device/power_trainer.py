"""A training process as the power boost sees one: boosts, says so, and ends in a chosen way.

    python power_trainer.py OPTIONS-AS-JSON

Options: settings (fields of PowerSettings), gpu_uuids, num_gpus, num_alive, boot_id_file,
driver_dir, claim_timeout_s, until_w (boost up to here first; 0: do not wait), end (return, leave,
exception, wait, fork_and_wait), job_id. Prints one JSON object per line: what happened.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from megatron_ntp.device.budget import DomainShape
from megatron_ntp.device.client import KeeperOptions
from megatron_ntp.device.session import PowerSession
from megatron_ntp.device.settings import PowerSettings


def say(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


def boost(session: PowerSession, until_w: float) -> None:
    """Steps in which the others wait a lot, until the limit is there or cannot go on."""
    give_up_at = time.monotonic() + 200
    step = 0
    while session.status().limit_mw < until_w * 1000 and time.monotonic() < give_up_at:
        session.observe(step, wait_s=0.4, step_s=1.0)
        step += 1
        time.sleep(0.02)


def train(session: PowerSession, options: dict[str, Any]) -> None:
    """The life of the process after the boost."""
    end = options["end"]
    if end == "exception":
        raise RuntimeError("a training step failed")
    if end == "fork_and_wait":
        if os.fork() == 0:  # a data loader that outlives us
            time.sleep(600)
            os._exit(0)
        say("forked")
    step = 1000
    while end in ("wait", "fork_and_wait"):
        session.observe(step, wait_s=0.4, step_s=1.0)
        step += 1
        time.sleep(0.02)


def main() -> None:
    # A shell that starts tests in the background has them, and so us, ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    options = json.loads(sys.argv[1])
    keeper = KeeperOptions(
        boot_id_file=Path(options["boot_id_file"]),
        driver_dir=Path(options["driver_dir"]),
        claim_timeout_s=options["claim_timeout_s"],
    )
    session = PowerSession(PowerSettings(**options["settings"]), options["job_id"], keeper)
    shape = DomainShape("r0", options["num_gpus"], options["num_alive"])
    status = session.start(options["gpu_uuids"], shape, dead_uuids=options.get("dead_uuids", ()))
    say("started", state=status.state, message=status.message, gap=session.remaining_gap())
    boost(session, options["until_w"])
    say("boosted", limit_w=session.status().limit_mw / 1000, pid=os.getpid())
    if options["end"] == "leave":
        return
    with session:
        train(session, options)
    say("closed")


if __name__ == "__main__":
    main()
