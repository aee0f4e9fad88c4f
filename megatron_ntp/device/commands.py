"""What `megatron-ntp power ...` does. Each function is one subcommand and returns its exit status.

0 done, 1 not (or not all) done, 2 wrong usage. `--dry-run` shows what would be written and writes
nothing, neither limits nor records.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_ntp.device import keeper_process
from megatron_ntp.device.budget import BoardPower, DomainBudget, DomainShape, plan_budgets, to_mw
from megatron_ntp.device.client import KeeperClient, KeeperOptions
from megatron_ntp.device.errors import DeviceError, Fault
from megatron_ntp.device.files import Folder
from megatron_ntp.device.grants import Grant, OwnRights, remove_grant, write_grant
from megatron_ntp.device.keeper import Keeper
from megatron_ntp.device.model import ModelFile, PowerCurve, reduction_gap
from megatron_ntp.device.naming import find_gpus, list_gpus, select_gpus
from megatron_ntp.device.nvml import DeviceLayer, PowerLimits, PowerScope
from megatron_ntp.device.nvml_process import NvmlProcess
from megatron_ntp.device.protocol import OpenReply, OpenRequest
from megatron_ntp.device.serve import Helper
from megatron_ntp.device.site import SitePower, load_site
from megatron_ntp.device.state import LimitStore, default_folder, restore_all
from megatron_ntp.device.tables import show, watts


@dataclass
class DryRun:
    """A node whose limits only seem to change: notes each write and passes none on."""

    layer: DeviceLayer
    seeming_mw: dict[str, int] = field(default_factory=dict)
    writes: list[dict[str, Any]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)

    def limits(self, uuid: str, scope: PowerScope = PowerScope.GPU) -> PowerLimits:
        found = self.layer.limits(uuid, scope)
        seeming = self.seeming_mw.get(uuid, found.requested_mw)
        return replace(found, requested_mw=seeming, enforced_mw=min(seeming, found.max_mw))

    def set_limit(
        self, uuid: str, limit_mw: int, scope: PowerScope = PowerScope.GPU
    ) -> PowerLimits:
        now_mw = self.limits(uuid, scope).requested_mw
        if limit_mw != now_mw:
            self.writes.append({"uuid": uuid, "from_w": watts(now_mw), "to_w": watts(limit_mw)})
        self.seeming_mw[uuid] = limit_mw
        return self.limits(uuid, scope)


@contextlib.contextmanager
def open_layer(arguments: argparse.Namespace) -> Iterator[NvmlProcess]:
    """The node's NVML, each call with the deadline that was asked for."""
    layer = NvmlProcess(arguments.deadline)
    try:
        yield layer
    finally:
        layer.close()


def _uuids(arguments: argparse.Namespace, layer: DeviceLayer) -> tuple[str, ...]:
    return select_gpus(arguments.gpus, list_gpus(layer), os.environ)


def _site(arguments: argparse.Namespace) -> SitePower:
    return load_site(arguments.site) if arguments.site else SitePower()


# ---- status ----

STATUS_COLUMNS = (
    "index",
    "uuid",
    "limit_w",
    "enforced_w",
    "default_w",
    "min_w",
    "max_w",
    "draw_w",
    "temp_c",
    "sm_mhz",
    "slowed_by",
    "found_w",
    "job",
)


def status(arguments: argparse.Namespace) -> int:
    """Limits, draw and clocks of all GPUs, and which limits are in whose hands."""
    store, notes = _store_if_readable(arguments)
    with open_layer(arguments) as layer:
        gpus = list_gpus(layer)
        wanted = None if arguments.gpus is None else set(_uuids(arguments, layer))
        rows = [
            _status_row(layer, store, gpu.index, gpu.uuid, gpu.fault)
            for gpu in gpus
            if wanted is None or gpu.uuid in wanted
        ]
    show(rows, STATUS_COLUMNS, arguments.json, notes)
    return 1 if any(row["fault"] for row in rows) else 0


def _store_if_readable(arguments: argparse.Namespace) -> tuple[LimitStore | None, list[str]]:
    folder = arguments.state_dir or default_folder()
    if not folder.exists():
        return None, []
    try:
        return keeper_process.open_store(arguments), []
    except DeviceError as error:
        return None, [f"found limits are not shown: {error.what}"]


def _status_row(
    layer: DeviceLayer, store: LimitStore | None, index: int, uuid: str | None, fault: Fault | None
) -> dict[str, Any]:
    row: dict[str, Any] = {"index": index, "uuid": uuid or f"({fault})", "fault": fault}
    if uuid is None:
        return row
    try:
        reading = layer.reading(uuid)
        record = store.read(uuid) if store else None
    except DeviceError as error:
        return row | {"fault": error.fault, "slowed_by": error.fault}
    limits = reading.limits
    row |= {
        "name": reading.name,
        "limit_w": watts(limits.requested_mw),
        "enforced_w": watts(limits.enforced_mw),
        "default_w": watts(limits.default_mw),
        "min_w": watts(limits.min_mw),
        "max_w": watts(limits.max_mw),
        "draw_w": watts(reading.draw_mw),
        "temp_c": reading.temperature_c,
        "sm_mhz": reading.clock_mhz,
        "max_sm_mhz": reading.max_clock_mhz,
        "energy_j": watts(reading.energy_mj),
        "slowed_by": list(reading.reasons),
    }
    if record is not None and store is not None:
        is_live = store.is_claimed(uuid)
        row |= {"found_w": watts(record.found_mw), "job": record.job_id, "job_is_live": is_live}
        if not is_live:
            row["job"] += " (gone: run `megatron-ntp power restore`)"
    return row


# ---- plan ----

PLAN_COLUMNS = (
    "degree",
    "needed_w",
    "ceiling_w",
    "x_nominal",
    "bound_by",
    "gap_without_%",
    "gap_with_%",
    "domain_w",
)


def plan(arguments: argparse.Namespace) -> int:
    """What a nominal cap costs, and what it buys when GPUs die."""
    site = _site(arguments)
    board, name, nominal_mw = _plan_board(arguments, site)
    curve = PowerCurve()
    if arguments.model is not None:
        curve = ModelFile.load(arguments.model).curve(name)
    full = arguments.full_degree
    degrees = range(full - 1, max(0, full - 4), -1)
    if arguments.degree is not None:
        degrees = range(arguments.degree, arguments.degree - 1, -1)
    rows = [_plan_row(site, board, curve, full, degree, nominal_mw) for degree in degrees]
    most_mw = min(board.max_mw, to_mw(site.gpu.max_w) if site.gpu.max_w else board.max_mw)
    cost = 1 - curve.speedup(most_mw, nominal_mw)
    notes = [
        f"{name}: nominal {nominal_mw / 1000:g} W of {most_mw / 1000:g} W, throughput ~ power^"
        f"{curve.exponent:.2f} ({curve.num_samples} samples)",
        f"the cap costs healthy GPUs {100 * cost:.1f} % of their pace and saves "
        f"{100 * (1 - nominal_mw / most_mw):.1f} % of their power",
    ]
    if not any(row["ceiling_w"] > row["nominal_w"] for row in rows):
        notes.append("no headroom: the batch policy has to cover the whole gap")
    show(rows, PLAN_COLUMNS, arguments.json, notes, board=name, healthy_cost_percent=100 * cost)
    return 0


def _plan_board(arguments: argparse.Namespace, site: SitePower) -> tuple[BoardPower, str, int]:
    """The board from the command line where it says, else from NVML of this node."""
    nominal_w = arguments.nominal or site.gpu.nominal_w
    if arguments.board_max is not None:
        board = BoardPower(to_mw(site.gpu.min_w or 0), to_mw(arguments.board_max))
        return board, arguments.board_name, to_mw(nominal_w or arguments.board_max)
    with open_layer(arguments) as layer:
        uuids = _uuids(arguments, layer)
        if not uuids:
            raise DeviceError(Fault.NOT_FOUND, "no GPU on this node; state --board-max WATTS")
        limits = [layer.limits(uuid, site.scope) for uuid in uuids]
        name = layer.reading(uuids[0]).name
    board = BoardPower(max(e.min_mw for e in limits), min(e.max_mw for e in limits))
    found_mw = min(entry.requested_mw for entry in limits)
    return board, name, to_mw(nominal_w) if nominal_w else found_mw


def _plan_row(
    site: SitePower, board: BoardPower, curve: PowerCurve, full: int, degree: int, nominal_mw: int
) -> dict[str, Any]:
    shape = DomainShape("domain", full, degree)
    budget: DomainBudget = plan_budgets(site, board, [shape], nominal_mw)[shape.name]
    gap = reduction_gap(full, degree)
    return {
        "degree": f"{degree} of {full}",
        "nominal_w": watts(nominal_mw),
        "needed_w": round(curve.power_for(nominal_mw, 1 / (1 - gap)) / 1000, 1),
        "ceiling_w": watts(budget.ceiling_mw),
        "x_nominal": round(budget.ceiling_mw / nominal_mw, 3),
        "bound_by": budget.bound_by,
        "gap_without_%": round(100 * gap, 1),
        "gap_with_%": round(100 * curve.gap_at(gap, nominal_mw, budget.ceiling_mw), 1),
        "domain_w": watts(degree * budget.ceiling_mw),
        "domain_budget_w": watts(budget.budget_mw),
    }


# ---- boost ----


def boost(arguments: argparse.Namespace) -> int:
    """Boosts GPUs by hand while a command runs, or until Ctrl-C, and restores them."""
    _site(arguments)  # its errors are wrong usage, before any process starts
    with open_layer(arguments) as layer:
        uuids = _uuids(arguments, layer)
        dead = find_gpus(arguments.dead.split(","), list_gpus(layer)) if arguments.dead else ()
    alive = tuple(uuid for uuid in uuids if uuid not in dead)
    full = arguments.full_degree or len(alive) + len(dead)
    request = OpenRequest(
        job_id=f"boost-{os.getpid()}",
        gpu_uuids=alive,
        domain="domain",
        domains=(DomainShape("domain", full, len(alive)),),
        dead_uuids=dead,
        nominal_mw=to_mw(arguments.nominal) if arguments.nominal else None,
    )
    if arguments.dry_run:
        return _boost_dry(arguments, request)
    client = _client(arguments)
    try:
        reply = client.open(request)
        target_mw = _target_mw(arguments, reply)
        results = client.set_limits(dict.fromkeys(alive, target_mw))
        rows = [
            {
                "uuid": uuid,
                "found_w": watts(reply.found_mw[uuid]),
                "limit_w": watts(result.limits.requested_mw) if result.limits else None,
                "enforced_w": watts(result.limits.enforced_mw) if result.limits else None,
                "error": result.message,
            }
            for uuid, result in results.items()
        ]
        columns = ("uuid", "found_w", "limit_w", "enforced_w", "error")
        show(rows, columns, arguments.json, [f"ceiling by {reply.bound_by}"])
        sys.stdout.flush()
        failed = any(result.fault for result in results.values())
        code = 1 if failed else _hold(arguments.command)
    finally:
        settled = _close(client)
    not_over = [entry for entry in settled if not entry.is_over]
    for entry in not_over:
        print(f"{entry.uuid}: {entry.outcome.value}: {entry.detail}", file=sys.stderr)
    return code or (1 if not_over else 0)


def _close(client: KeeperClient) -> list[Any]:
    try:
        return list(client.close())
    except DeviceError:
        return []  # it never opened; a keeper that did open restores by itself


def _client(arguments: argparse.Namespace) -> KeeperClient:
    if arguments.socket is not None:
        return KeeperClient.connect(arguments.socket)
    return KeeperClient.start(
        KeeperOptions(
            site=arguments.site,
            state_dir=arguments.state_dir,
            deadline_s=arguments.deadline,
            boot_id_file=arguments.boot_id_file,
            driver_dir=arguments.driver_dir,
        )
    )


def _target_mw(arguments: argparse.Namespace, reply: OpenReply) -> int:
    return to_mw(arguments.watts) if arguments.watts is not None else reply.ceiling_mw


def _hold(command: Sequence[str]) -> int:
    """Runs a command, or waits for a signal, while the limits are up."""
    if command:
        return subprocess.run(command, check=False).returncode
    ends = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    print("boosted; Ctrl-C restores", file=sys.stderr, flush=True)
    signal.sigwait(ends)
    return 0


def _boost_dry(arguments: argparse.Namespace, request: OpenRequest) -> int:
    with open_layer(arguments) as layer, tempfile.TemporaryDirectory() as scratch:
        dry: Any = DryRun(layer)
        real = keeper_process.open_store(
            argparse.Namespace(**vars(arguments) | {"state_dir": Path(scratch)})
        )
        keeper = Keeper(dry, real, _site(arguments), OwnRights())
        reply = keeper.open(request)
        results = keeper.set_limits(dict.fromkeys(request.gpu_uuids, _target_mw(arguments, reply)))
        notes = [
            f"dry run: nothing was written; ceiling {reply.ceiling_mw / 1000:g} W by "
            f"{reply.bound_by}"
        ]
        notes += [f"would fail: {result.message}" for result in results.values() if result.fault]
        show(dry.writes, ("uuid", "from_w", "to_w"), arguments.json, notes)
        return 1 if any(result.fault for result in results.values()) else 0


# ---- restore ----

RESTORE_COLUMNS = ("uuid", "outcome", "found_w", "limit_w", "detail")


def restore(arguments: argparse.Namespace) -> int:
    """Gives back the limits of jobs that are gone."""
    folder = arguments.state_dir or default_folder()
    if not folder.exists():
        show([], RESTORE_COLUMNS, arguments.json, [f"no records in {folder}"])
        return 0
    store = keeper_process.open_store(arguments)
    with open_layer(arguments) as layer:
        uuids = None if arguments.gpus is None else list(_uuids(arguments, layer))
        acting: Any = DryRun(layer) if arguments.dry_run else layer
        settled = restore_all(acting, store, uuids, keep_records=arguments.dry_run)
    rows = [
        {
            "uuid": entry.uuid,
            "outcome": entry.outcome.value,
            "found_w": watts(entry.found_mw),
            "limit_w": watts(entry.limit_mw),
            "detail": entry.detail,
        }
        for entry in settled
    ]
    notes = ["dry run: nothing was written"] if arguments.dry_run else []
    if not rows:
        notes.append(f"no records in {store.folder.path}")
    show(rows, RESTORE_COLUMNS, arguments.json, notes)
    return 0 if all(entry.is_over for entry in settled) else 1


# ---- the helper ----


def serve(arguments: argparse.Namespace) -> int:
    """The node's helper, for jobs that may not set limits themselves."""
    site = load_site(arguments.site, must_be_roots=True)
    keeper_process.check_helper_site(site)
    grants = Folder(arguments.grants, private=True)
    if arguments.dry_run:
        show(
            [asdict(site.gpu)],
            ("nominal_w", "min_w", "max_w", "dead_w"),
            arguments.json,
            [f"would serve with grants of {grants.path}"],
        )
        return 0
    if arguments.stdio:
        if not stat.S_ISSOCK(os.fstat(0).st_mode):
            raise ValueError(
                "--stdio: standard input is not a socket; a job starts this command "
                "with --ntp-power-command"
            )
        connection = socket.socket(fileno=os.dup(0))
        keeper_process.serve_connection(connection, arguments, arguments.grants)
        return 0
    store = keeper_process.open_store(arguments)
    with open_layer(arguments) as layer:
        for entry in restore_all(layer, store):
            print(f"{entry.uuid}: {entry.outcome.value} {entry.detail}".rstrip(), file=sys.stderr)
    options = KeeperOptions(
        site=arguments.site,
        state_dir=arguments.state_dir or default_folder(),
        deadline_s=arguments.deadline,
        boot_id_file=arguments.boot_id_file,
        driver_dir=arguments.driver_dir,
    )
    keeper_arguments = [*options.arguments(), "--grants", str(arguments.grants.resolve())]
    Helper(arguments.socket, grants, keeper_arguments).run()
    return 0


def grant(arguments: argparse.Namespace) -> int:
    """Root's prolog: a job got GPUs of this node."""
    with open_layer(arguments) as layer:
        uuids = find_gpus(arguments.gpus.split(","), list_gpus(layer))
    found = Grant(arguments.job, arguments.uid, uuids, arguments.cgroup)
    write_grant(Folder(arguments.grants, private=True), found)
    show([asdict(found)], ("job_id", "uid", "gpu_uuids", "cgroup"), arguments.json)
    return 0


def revoke(arguments: argparse.Namespace) -> int:
    """Root's epilog: the job is over; its keeper restores within seconds."""
    remove_grant(Folder(arguments.grants, private=True), arguments.job)
    return 0
