"""What `megatron-ntp health` does: check, print, and an exit status that says how it is."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence

from megatron_ntp.device.health import (
    VERDICTS,
    GpuHealth,
    HealthOptions,
    NodeHealth,
    Verdict,
    check_node,
)
from megatron_ntp.device.naming import list_gpus, select_gpus
from megatron_ntp.device.nvml import DeviceLayer
from megatron_ntp.device.nvml_process import NvmlProcess
from megatron_ntp.device.tables import show

COLUMNS = ("index", "uuid", "name", "pci", "verdict", "reasons", "pids")
UNKNOWN_STATUS = 1
STATUSES = {Verdict.OK: 0, Verdict.SUSPECT: 3, Verdict.DEAD: 4}


def health(arguments: argparse.Namespace) -> int:
    """Prints one row per GPU; the exit status is that of the worst."""
    options = HealthOptions(
        expected_uuids=tuple(filter(None, arguments.expect.split(","))),
        expect_idle=arguments.expect_idle,
        allowed_pids=frozenset({os.getpid()}),
        hook=tuple(shlex.split(arguments.hook)),
        hook_timeout_s=arguments.hook_timeout,
        kernel_log=arguments.kernel_log,
        xids_since_s=arguments.xids_since,
        treat=_treat(arguments.treat),
    )
    layer = NvmlProcess(arguments.deadline)
    try:
        wanted = _wanted(arguments, layer)
        found = check_node(layer, options)
    finally:
        layer.close()
    rows = [_row(gpu) for gpu in found.gpus if wanted is None or gpu.uuid in wanted or not gpu.uuid]
    if arguments.lines:
        return _print_lines(found, rows)
    notes = [f"node: {finding.verdict}: {finding}" for finding in found.findings]
    show(rows, COLUMNS, arguments.json, notes, verdict=found.verdict)
    return _status(found, rows)


def _wanted(arguments: argparse.Namespace, layer: DeviceLayer) -> set[str] | None:
    if arguments.gpus is None:
        return None
    return set(select_gpus(arguments.gpus, list_gpus(layer), os.environ))


def _row(gpu: GpuHealth) -> dict[str, object]:
    return {
        "index": gpu.index,
        "uuid": gpu.uuid,
        "name": gpu.name,
        "pci": gpu.pci_bus_id,
        "verdict": gpu.verdict,
        "reasons": "; ".join(map(str, gpu.findings)),
        "findings": [vars(finding) for finding in gpu.findings],
        "pids": list(gpu.pids),
    }


def _print_lines(found: NodeHealth, rows: Sequence[dict[str, object]]) -> int:
    """For a scheduler's health command: its status says whether the check itself worked."""
    for row in rows:
        if row["verdict"] is Verdict.DEAD:
            print(row["uuid"] or row["index"], row["reasons"])
    driver = any(finding.reason == "driver" for finding in found.findings)
    return UNKNOWN_STATUS if driver else 0


def _status(found: NodeHealth, rows: Sequence[dict[str, object]]) -> int:
    if any(finding.reason == "driver" for finding in found.findings):
        return UNKNOWN_STATUS
    verdicts = [Verdict(str(row["verdict"])) for row in rows]
    verdicts += [finding.verdict for finding in found.findings]
    return STATUSES[max(verdicts, key=lambda verdict: verdict.rank, default=Verdict.OK)]


def _treat(words: Sequence[str]) -> dict[str, Verdict]:
    found = {}
    for word in words:
        reason, _, verdict = word.partition("=")
        known = reason in VERDICTS or reason == "site" or reason.removeprefix("xid-").isdecimal()
        if not known or verdict not in list(Verdict):
            raise ValueError(
                f"--treat {word}: must be REASON=ok|suspect|dead with a reason out of "
                f"{', '.join(VERDICTS)}, site, xid-N"
            )
        found[reason] = Verdict(verdict)
    return found
