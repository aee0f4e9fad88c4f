"""Plans as JSON and files: round trips, atomic writes, and one named error per defect."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ntp.errors import (
    PlanBatchError,
    PlanDimsError,
    PlanError,
    PlanFileError,
    PlanFormatError,
    PlanKeyError,
    PlanTopologyError,
    PlanTypeError,
    PlanUnitsError,
    PlanVersionError,
)
from megatron_ntp.plan import BATCH_POLICIES, ModelDims, Plan, build_plan

CONFIGS = sorted((Path(__file__).resolve().parents[3] / "configs" / "plans").glob("*.json"))
DIMS = ModelDims(32, 32, 128, 4096, 16384, 51200, 32)
PLAN = build_plan(DIMS, degrees=(8, 8, 7), failed=[(2, 3)])


def edited(edit: Callable[[dict[str, Any]], object]) -> str:
    document = json.loads(PLAN.to_json())
    edit(document)
    return json.dumps(document)


# Round trips


@given(
    st.lists(st.integers(1, 8), min_size=1, max_size=6),
    st.integers(1, 3),
    st.integers(1, 2),
    st.sampled_from(BATCH_POLICIES),
)
def test_round_trip(degrees: list[int], pp: int, cp: int, policy: str) -> None:
    plan = build_plan(DIMS, degrees=degrees, nominal_tp=8, pp=pp, cp=cp, batch_policy=policy)
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.digest() == plan.digest()
    assert again.to_json() == plan.to_json()


def test_layout_of_the_file() -> None:
    assert PLAN.to_json().splitlines()[:9] == [
        "{",
        '  "version": 1,',
        '  "topology": {',
        '    "num_replicas": 3,',
        '    "nominal_tp": 8,',
        '    "pp": 1,',
        '    "cp": 1,',
        '    "degrees": [8, 8, 7],',
        '    "failed": [[2, 3]]',
    ]


def test_save_replaces_and_leaves_no_temporary(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")
    PLAN.save(path)
    assert Plan.load(path) == PLAN
    assert Plan.load(str(path)) == PLAN
    assert [item.name for item in tmp_path.iterdir()] == ["plan.json"]


def test_a_failed_save_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "plan.json"
    path.write_text("old")
    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(PlanFileError, match="cannot write the plan: No space left on device"):
        PLAN.save(path)
    assert path.read_text() == "old"
    assert [item.name for item in tmp_path.iterdir()] == ["plan.json"]


def test_shipped_plans_exist() -> None:
    assert CONFIGS


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_plans_load_and_are_as_saved(path: Path) -> None:
    plan = Plan.load(path)
    assert plan.to_json() == path.read_text()
    assert plan.batch(64).total <= 64 * plan.topology.num_replicas
    assert plan.digest() in plan.table()


# Defects


def refused(error: type[PlanError], message: str, text: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.from_json(text)
    assert type(caught.value) is error
    assert message in str(caught.value)


def test_not_json() -> None:
    text = PLAN.to_json().replace('"pp": 1,', '"pp": 1')
    message = "the plan is not JSON: Expecting ',' delimiter at line 7, column 5"
    refused(PlanFormatError, message, text)
    refused(PlanFormatError, "the plan is not JSON: Expecting value at line 1, column 1", "")


def test_not_an_object() -> None:
    refused(PlanFormatError, "a plan is one JSON object, got list: [8, 7]", "[8, 7]")


def test_duplicate_key() -> None:
    text = PLAN.to_json().replace('"pp": 1', '"pp": 1, "pp": 2')
    refused(PlanFormatError, "key 'pp' appears twice in one object, with 1 and 2", text)


def test_missing_keys() -> None:
    text = edited(lambda d: (d["topology"].pop("failed"), d["topology"].pop("cp")))
    refused(PlanKeyError, "the plan lacks 'topology.cp', 'topology.failed'", text)
    refused(PlanKeyError, "the plan lacks 'batch_policy'", edited(lambda d: d.pop("batch_policy")))
    refused(PlanKeyError, "the plan has no key 'version'", "{}")


def test_unknown_key_suggests_the_nearest() -> None:
    text = edited(lambda d: d["model"].update(hiden_size=d["model"].pop("hidden_size")))
    message = "unknown key 'model.hiden_size' in the plan; did you mean 'model.hidden_size'?"
    refused(PlanKeyError, message, text)
    message = "unknown key 'zzz' in the plan; Known keys: version, topology, model, batch_policy"
    refused(PlanKeyError, message, edited(lambda d: d.update(zzz=1)))


def test_newer_version_says_which_this_reads() -> None:
    text = edited(lambda d: d.update(version=7, something_new=1))
    refused(PlanVersionError, "plan version 7 is newer than this megatron-ntp, which reads", text)
    refused(PlanVersionError, "reads version 1. Upgrade megatron-ntp on every node", text)
    text = edited(lambda d: d.update(version=0, something_old=1))
    refused(PlanVersionError, "plan version 0 is not one", text)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("version",), "1", "version must be an integer, got '1' (str)"),
        (("batch_policy",), 3, "batch_policy must be a string, got 3"),
        (("topology",), [], "topology must be an object, got []"),
        (("model",), "gpt", 'model must be an object, got "gpt"'),
        (("model", "hidden_size"), 4096.0, "model.hidden_size must be an integer, got 4096.0"),
        (("topology", "pp"), True, "topology.pp must be an integer, got True (bool)"),
        (("topology", "degrees"), "8,8,7", 'topology.degrees must be a list, got "8,8,7"'),
        (("topology", "degrees"), [8, None, 7], "topology.degrees[1] must be an integer, got None"),
        (("topology", "degrees"), [8, 7], "topology.degrees has 2 entries, topology.num_replicas"),
        (("topology", "failed"), {}, "topology.failed must be a list, got {}"),
        (("topology", "failed"), [[2]], "topology.failed[0] must be [replica, slot], got [2]"),
        (("topology", "failed"), [[2, -1]], "topology.failed[0][1] must be at least 0, got -1"),
    ],
)
def test_wrong_types(path: tuple[str, ...], value: object, message: str) -> None:
    def put(document: dict[str, Any]) -> None:
        for key in path[:-1]:
            document = document[key]
        document[path[-1]] = value

    refused(PlanTypeError, message, edited(put))


def test_long_values_are_shortened() -> None:
    text = edited(lambda d: d.update(model=list(range(1000))))
    with pytest.raises(PlanTypeError) as caught:
        Plan.from_json(text)
    assert len(str(caught.value)) < 120


def test_values_that_contradict_each_other() -> None:
    text = edited(lambda d: d["topology"].update(degrees=[8, 7, 8]))
    refused(PlanTopologyError, "degrees 8,7,8 disagree with failed slots 2:3", text)
    text = edited(lambda d: d["topology"].update(failed=[[3, 0]]))
    refused(PlanTopologyError, "failed slot 3:0: replica 3 is outside 0..2", text)
    text = edited(lambda d: d["model"].update(num_query_groups=5))
    refused(PlanDimsError, "multiple of num_query_groups, got 32 and 5", text)
    text = edited(lambda d: d["model"].update(num_query_groups=4))
    refused(PlanUnitsError, "kv_group: 4 units cannot be cut", text)
    text = edited(lambda d: d.update(batch_policy="halve"))
    refused(PlanBatchError, "unknown batch policy 'halve'", text)


def test_file_errors_begin_with_the_path(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with pytest.raises(PlanFileError) as missing:
        Plan.load(path)
    assert str(missing.value).startswith(f"{path}: cannot read the plan: No such file")
    path.write_text(edited(lambda d: d.update(version=2)))
    with pytest.raises(PlanVersionError) as newer:
        Plan.load(path)
    assert str(newer.value).startswith(f"{path}: plan version 2 is newer")
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(PlanFormatError, match="the plan is not UTF-8 text"):
        Plan.load(path)
    with pytest.raises(PlanFileError, match="cannot write the plan: No such file or directory"):
        PLAN.save(tmp_path / "absent" / "plan.json")
