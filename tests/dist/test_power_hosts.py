"""The power boost of a TP group over two hosts: sessions, agreement and shared waits, on 7 ranks.

Degrees 4+3 with two GPUs per host: replica 0 on hosts a and b, replica 1 on c and d, where d's
second GPU is dead. Each host is an imagined node of its own; ranks have no model, and steps that
only sleep.
"""

from __future__ import annotations

import argparse
import os
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from fake_nvml import FakeNode, SetPrivilege
from ranks import run_ranks

from megatron_ntp.comm.board import Board
from megatron_ntp.device.errors import PowerRequiredError
from megatron_ntp.device.settings import PowerSettings
from megatron_ntp.integration import power
from megatron_ntp.integration.context import NTPContext
from megatron_ntp.plan.model import ModelDims
from megatron_ntp.plan.plan import Plan
from megatron_ntp.plan.topology import Topology
from megatron_ntp.settings import NTPSettings

WORLD = 7
HOSTS = "aabbccd"
STEPS = 14
CEILING_MW = 666_000  # 4 x 500 W for three
DIMS = ModelDims(
    num_attention_heads=12,
    num_query_groups=12,
    kv_channels=4,
    hidden_size=48,
    ffn_hidden_size=120,
    padded_vocab_size=120,
    num_layers=1,
)


def context(rank: int, mode: str, folder: Path) -> NTPContext:
    topology = Topology.from_degrees((4, 3), 4)
    state_dir = str(folder / HOSTS[rank] / "state")
    settings = PowerSettings(mode, ntp_power_state_dir=state_dir, ntp_power_deadline=60.0)
    return NTPContext(NTPSettings(ntp=True), topology, rank, Plan(topology, DIMS), power=settings)


def on_a_host(folder: str, mode: str) -> Any:
    """One rank: starts the boost, takes a few steps if it may, and says what it saw."""
    rank = int(os.environ["RANK"])
    host = HOSTS[rank]
    node = FakeNode(Path(folder, host, "fake-nvml-state"))
    os.environ.update(node.env(), CUDA_VISIBLE_DEVICES="0,1")
    socket.gethostname = lambda: host
    dist.init_process_group("gloo")
    board = Board(dist.distributed_c10d._get_default_store(), "power", rank, WORLD, 120.0)
    ntp = context(rank, mode, Path(folder))
    args = argparse.Namespace(local_rank=HOSTS[:rank].count(host))
    try:
        boost = power.start(ntp, args, board)
    except PowerRequiredError as error:
        return str(error)
    assert boost is not None
    boost.connect(timedelta(seconds=60))
    reporters, everyone = dist.new_group([0, 4]), dist.new_group([0, 4, 6])
    if boost.waits is not None:
        take_steps(boost.waits, rank, reporters, everyone)
    status = boost._session.status()
    boost.close(regular=True)
    return {"slowness": boost.slowness, "limit_mw": status.limit_mw, "members": boost.members}


def take_steps(
    waits: Any, rank: int, reporters: dist.ProcessGroup, everyone: dist.ProcessGroup
) -> None:
    """Replica 1 takes twice as long. The ranks of a replica go through steps together."""
    for _ in range(STEPS):
        waits.begin_step()
        if rank in (0, 4):
            time.sleep(0.1 if rank == 4 else 0.05)
            with waits.waiting():
                dist.barrier(reporters)
        dist.barrier(everyone)
        waits.end_step()


@pytest.fixture
def nodes(tmp_path: Path) -> dict[str, FakeNode]:
    found = {}
    for host in "abcd":
        (tmp_path / host).mkdir()
        found[host] = FakeNode.create(tmp_path / host, num_gpus=2)
    return found


def test_both_hosts_of_the_reduced_domain_are_boosted(
    nodes: dict[str, FakeNode], tmp_path: Path
) -> None:
    results = run_ranks(on_a_host, WORLD, folder=str(tmp_path), mode="boost")
    assert {tuple(result["members"]) for result in results} == {(0, 4, 6)}
    assert len({result["slowness"] for result in results}) == 1
    assert results[0]["slowness"][1] < 1.33, "the estimate less what power wins back"
    raised = {rank for rank, result in enumerate(results) if result["limit_mw"] > 500_000}
    assert raised == {4, 6}, "the holders of both hosts heard of the lag"
    writes = {host: nodes[host].writes() for host in "abcd"}
    assert writes["a"] == writes["b"] == []
    assert {write.uuid for write in writes["c"]} == set(nodes["c"].uuids)
    assert {write.uuid for write in writes["d"]} == {nodes["d"].uuids[0]}
    for host in "cd":
        assert 500_000 < max(write.value for write in writes[host]) <= CEILING_MW
        assert nodes[host].limits_w() == [500.0, 500.0]


def test_one_host_that_may_not_closes_the_other(nodes: dict[str, FakeNode], tmp_path: Path) -> None:
    nodes["d"].state.set_privilege = SetPrivilege.NOBODY
    results = run_ranks(on_a_host, WORLD, folder=str(tmp_path), mode="boost")
    assert {tuple(result["members"]) for result in results} == {()}
    estimate = Plan(Topology.from_degrees((4, 3), 4), DIMS).dp_slowness
    assert {tuple(result["slowness"]) for result in results} == {estimate}
    assert {write.value for write in nodes["c"].writes()} == {500_000}
    assert nodes["c"].limits_w() == nodes["d"].limits_w() == [500.0, 500.0]


def test_require_stops_all_ranks_with_the_same_words(
    nodes: dict[str, FakeNode], tmp_path: Path
) -> None:
    nodes["d"].state.set_privilege = SetPrivilege.NOBODY
    results = run_ranks(on_a_host, WORLD, folder=str(tmp_path), mode="require")
    (words,) = set(results)
    assert words.startswith("--ntp-power require: ") and "no permission" in words
    assert {write.value for write in nodes["c"].writes()} == {500_000}
    assert nodes["c"].limits_w() == [500.0, 500.0]
