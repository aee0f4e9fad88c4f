"""The whole plan: costs, digest, checks against model and world, and its printed table."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_ntp.errors import (
    PlanBatchError,
    PlanDimsError,
    PlanError,
    PlanLookupError,
    PlanModelError,
    PlanTopologyError,
    PlanUnitsError,
    PlanVersionError,
    PlanWorldError,
)
from megatron_ntp.plan import (
    FAMILIES,
    ModelDims,
    Plan,
    Topology,
    UnitLayout,
    build_plan,
    first_difference,
)

ROOT = Path(__file__).resolve().parents[3]
DIMS = ModelDims(
    num_attention_heads=32,
    num_query_groups=32,
    kv_channels=128,
    hidden_size=4096,
    ffn_hidden_size=16384,
    padded_vocab_size=51200,
    num_layers=32,
)


def plan_8_8_7() -> Plan:
    return build_plan(DIMS, degrees=(8, 8, 7))


def variants() -> list[Plan]:
    """Plans that differ from `plan_8_8_7`, each in one thing that matters."""
    base = plan_8_8_7()
    models = [
        replace(DIMS, **{name: size * 2})
        for name, size in DIMS.sizes()
        if name not in ("num_query_groups", "mlp_matrices")
    ]
    models += [replace(DIMS, num_query_groups=16), replace(DIMS, mlp_matrices=3)]
    return [
        *(replace(base, model=model) for model in models),
        replace(base, batch_policy="shrink"),
        build_plan(DIMS, degrees=(8, 7, 8)),
        build_plan(DIMS, degrees=(8, 8, 8)),
        build_plan(DIMS, degrees=(8, 8, 7, 8)),
        build_plan(DIMS, degrees=(8, 8, 7), nominal_tp=9),
        build_plan(DIMS, degrees=(8, 8, 7), failed={(2, 0)}),
        build_plan(DIMS, degrees=(8, 8, 7), pp=2),
        build_plan(DIMS, degrees=(8, 8, 7), cp=2),
    ]


# Building


def test_layouts_follow_from_dims_and_degrees() -> None:
    plan = plan_8_8_7()
    assert plan.layout("kv_group") == UnitLayout(32, (8, 7))
    assert plan.layout("ffn") == UnitLayout(16384, (8, 7))
    assert plan.layout("vocab") == UnitLayout(51200, (8, 7))
    assert plan.layout("ffn") is plan.layout("ffn")
    assert [plan.layout(name).family for name in FAMILIES] == list(FAMILIES)
    with pytest.raises(PlanLookupError, match="no family 'mlp'; families are kv_group, ffn, vocab"):
        plan.layout("mlp")


def test_build_from_degrees_failed_or_both() -> None:
    by_degrees = build_plan(DIMS, degrees=(8, 8, 7))
    by_failed = build_plan(DIMS, num_replicas=3, nominal_tp=8, failed=[(2, 7)])
    by_both = build_plan(DIMS, num_replicas=3, degrees=(8, 8, 7), failed=[(2, 7)])
    assert by_degrees == by_failed == by_both
    assert build_plan(DIMS, num_replicas=2, nominal_tp=8).topology.is_uniform


def test_build_refuses_what_does_not_fit() -> None:
    with pytest.raises(
        PlanTopologyError, match=r"3 degrees \(8,8,7\) disagree with num_replicas 4"
    ):
        build_plan(DIMS, degrees=(8, 8, 7), num_replicas=4)
    with pytest.raises(PlanTopologyError, match="num_replicas 3, nominal_tp None"):
        build_plan(DIMS, num_replicas=3, failed=[(2, 7)])
    with pytest.raises(PlanBatchError, match="unknown batch policy 'kept'"):
        build_plan(DIMS, degrees=(8, 7), batch_policy="kept")
    with pytest.raises(PlanVersionError, match="plan version 2 is newer"):
        replace(plan_8_8_7(), version=2)


def test_too_few_kv_groups() -> None:
    with pytest.raises(PlanUnitsError) as caught:
        build_plan(replace(DIMS, num_query_groups=4), degrees=(8, 7))
    assert "kv_group: 4 units cannot be cut for TP degrees 8, 7" in str(caught.value)
    assert "TP degrees that work" in str(caught.value)


@pytest.mark.parametrize("heads", [8, 16, 24, 32, 64])
def test_heads_plan_from_8_to_7(heads: int) -> None:
    dims = replace(DIMS, num_attention_heads=heads, num_query_groups=heads)
    layout = build_plan(dims, degrees=(8, 8, 7)).layout("kv_group")
    assert sum(layout.sizes(7)) == heads
    assert layout.sizes(7)[0] == -(-heads // 7)


def test_dims_that_contradict_each_other() -> None:
    with pytest.raises(PlanDimsError, match="multiple of num_query_groups, got 32 and 5"):
        replace(DIMS, num_query_groups=5)
    with pytest.raises(PlanDimsError, match="hidden_size must be at least 1, got 0"):
        replace(DIMS, hidden_size=0)
    with pytest.raises(PlanDimsError, match=r"kv_channels must be an integer, got 1\.5 \(float\)"):
        replace(DIMS, kv_channels=1.5)  # type: ignore[arg-type]
    with pytest.raises(PlanDimsError, match="mlp_matrices must be 2, or 3 for a gated MLP, got 4"):
        replace(DIMS, mlp_matrices=4)


# Costs


def test_slowness_by_hand() -> None:
    dims = ModelDims(8, 4, 2, 10, 20, 100, 3)
    plan = build_plan(dims, degrees=(4, 3))
    # Unit costs: kv_group 3 * (2 * 2 + 2) * 2 * 10 = 360, ffn 3 * 2 * 10 = 60, vocab 10.
    assert [dims.unit_cost(name) for name in FAMILIES] == [360, 60, 10]
    healthy = 1 * 360 + 5 * 60 + 25 * 10
    reduced = 2 * 360 + 7 * 60 + 34 * 10
    assert plan.slowness(4) == 1
    assert plan.slowness(3) == reduced / healthy
    assert plan.dp_slowness == (1, reduced / healthy)


def test_batch_uses_the_estimate_or_a_measurement() -> None:
    plan = build_plan(DIMS, degrees=(8, 7, 8), batch_policy="shrink")
    assert 8 / 7 < plan.slowness(7) < 5 / 4
    assert plan.batch(8).shares == (8, 8, 6)  # by DP rank: replica 1 is last
    assert plan.batch(8, slowness=(1, 1, 1)).shares == (8, 8, 8)
    piped = build_plan(DIMS, degrees=(8, 7), pp=8, batch_policy="shrink")
    assert piped.batch(8).shares == (8, 5)  # filling the pipeline counts


# Agreement


def test_digest_differs_if_anything_differs() -> None:
    digests = [plan.digest() for plan in (plan_8_8_7(), *variants())]
    assert len(set(digests)) == len(digests) > 15


@pytest.mark.parametrize("index", range(len(variants())))
def test_digest_entries_name_a_difference_wherever_digests_differ(index: int) -> None:
    ours, theirs = plan_8_8_7().digest_entries(), variants()[index].digest_entries()
    assert [name for name, _ in ours] == [name for name, _ in theirs]
    difference = first_difference(ours, theirs)
    assert difference is not None
    assert difference.ours != difference.theirs
    assert (difference.name, difference.ours) in ours


def test_first_difference() -> None:
    ours = plan_8_8_7().digest_entries()
    assert first_difference(ours, plan_8_8_7().digest_entries()) is None
    theirs = build_plan(DIMS, degrees=(8, 7, 8)).digest_entries()
    assert first_difference(ours, theirs) == ("topology.degrees", "8,8,7", "8,7,8")
    assert first_difference(ours, [*ours, ("new", "1")]) == ("new", None, "1")
    assert first_difference(ours, ours[1:]) == ("version", "1", None)


def test_digest_is_equal_across_processes() -> None:
    code = (
        "from megatron_ntp.plan import ModelDims, build_plan;"
        f"print(build_plan({DIMS!r}, degrees=(8, 8, 7)).digest())"
    )
    digests = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", code]
        output = subprocess.run(command, env=environment, capture_output=True, check=True)
        digests.add(output.stdout.decode().strip())
    assert digests == {plan_8_8_7().digest()}


def test_plans_can_be_pickled_and_hashed() -> None:
    plan = plan_8_8_7()
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert hash(plan) == hash(plan_8_8_7())


def test_check_model_lists_each_size_that_differs() -> None:
    plan = plan_8_8_7()
    plan.check_model(DIMS)
    with pytest.raises(PlanModelError) as caught:
        plan.check_model(replace(DIMS, hidden_size=5120, padded_vocab_size=50304))
    message = str(caught.value)
    assert (
        "hidden_size: plan 4096, model 5120; padded_vocab_size: plan 51200, model 50304" in message
    )
    assert "kv_channels" not in message
    assert "Make the plan again" in message


def test_check_world_gives_both_numbers() -> None:
    plan = build_plan(DIMS, degrees=(8, 8, 7), pp=2)
    plan.check_world(46)
    with pytest.raises(PlanWorldError) as caught:
        plan.check_world(48)
    message = str(caught.value)
    assert "the plan needs 46 processes and 48 were started" in message
    assert "Degrees 8,8,7 x pp 2 x cp 1 = 46" in message
    assert "without failed slots would have 48" in message


def test_every_plan_error_is_a_value_error() -> None:
    for error in (PlanUnitsError, PlanModelError, PlanWorldError, PlanTopologyError):
        assert issubclass(error, PlanError)
        assert issubclass(error, ValueError)


# Table


def test_table() -> None:
    topology = Topology.from_failed(5, 8, [(2, 3), (3, 0), (3, 9)], pp=2)
    text = Plan(topology, replace(DIMS, num_query_groups=8)).table()
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == "NTP plan, version 1"
    for line in (
        "degrees 8,8,7,7,8",
        "nominal TP 8 (pp 2, cp 1)",
        "world size 76 of 80",
        "sync degree 7",
        "batch policy keep",
        f"digest {Plan(topology, replace(DIMS, num_query_groups=8)).digest()}",
        "replica dp rank degree failed slots idle slots domains ranks",
        "0-1 0-1 8 - - 0-3 0-15, 38-53",
        "4 2 8 - - 8-9 16-23, 54-61",
        "2 3 7 3 15 4-5 24-30, 62-68",
        "3 4 7 0,9 - 6-7 31-37, 69-75",
        "8 3 7 1 1.000",
        "kv_group 8 8 8 x 1 1.000 1",
        "7 1 x 2 + 6 x 1 1.750 0",
        "ffn 16384 8 8 x 2048 1.000 2048",
    ):
        assert line in lines, text
    assert all(line == line.rstrip() and len(line) <= 100 for line in text.splitlines())


def test_table_of_a_large_job_stays_short() -> None:
    failed = [(17, 3), (230, 31), (230, 0)]
    plan = build_plan(DIMS, num_replicas=512, nominal_tp=32, failed=failed)
    assert len(plan.table().splitlines()) < 40
    assert "32x17,31,32x212,30,32x281" in plan.table()
