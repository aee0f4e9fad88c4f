"""What nonuniform TP changes in an installed Megatron: nothing without --ntp, and nothing for good.

Compared by identity: every attribute of every loaded module and class of the package, and the code
of every function.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
from ranks import ROOT, run_ranks, run_training
from versions import CORES, EVERY_CORE

from megatron_ntp.patching.bindings import diff_snapshots, identity_snapshot

MODEL = """
    --num-layers 1 --hidden-size 16 --ffn-hidden-size 24 --num-attention-heads 4
    --seq-length 8 --max-position-embeddings 8 --mock-data --tokenizer-type NullTokenizer
    --vocab-size 30 --make-vocab-size-divisible-by 8 --micro-batch-size 1 --global-batch-size 2
    --lr 1e-3 --lr-decay-style constant --train-iters 1 --log-interval 1 --eval-iters 0
    --eval-interval 1000 --tensor-model-parallel-size 2
""".split()
NTP = [*MODEL, "--ntp", "--ntp-degrees", "2,1"]

# scripts/pretrain_gpt.py replaces it itself, to keep the helpers that a wheel brings.
OF_THE_SCRIPT = {"megatron.core.datasets.utils:compile_helpers"}


# --- without --ntp ------------------------------------------------------------------------------

_before: dict[str, object] = {}


def remember() -> None:
    _before.update(identity_snapshot("megatron"))


def changed_code() -> tuple[list[str], int]:
    """In a rank, after training: functions and classes that differ; Megatron keeps state, too."""
    now = identity_snapshot("megatron")
    code = (types.FunctionType, types.CodeType, type, staticmethod, classmethod, property)
    differing = [
        str(difference)
        for difference in diff_snapshots(_before, now)
        if difference.name not in OF_THE_SCRIPT
        and not difference.name.startswith(tuple(f"{name}." for name in OF_THE_SCRIPT))
        and isinstance(_before.get(difference.name, now.get(difference.name)), code)
    ]
    return differing, len(_before)


@pytest.mark.parametrize("core", EVERY_CORE)
def test_a_run_without_ntp_leaves_megatron_alone(core: Path | None) -> None:
    run = run_training(MODEL, 2, core=core, before=remember, after=changed_code)
    assert list(run.losses) == [1]
    for differing, num_compared in run.results:
        assert differing == []
        assert num_compared > 10_000


def test_the_comparison_sees_what_a_run_with_ntp_changes() -> None:
    run = run_training(NTP, 3, before=remember, after=changed_code)
    for differing, _ in run.results:
        assert any("megatron.training.training:train_step'" in each for each in differing)


UNTOUCHED = """
import sys
import megatron.core, megatron.training, megatron.core.models.gpt
from megatron_ntp.patching.bindings import diff_snapshots, identity_snapshot
before, loaded, hook = identity_snapshot("megatron"), set(sys.modules), sys.excepthook
import megatron_ntp
megatron_ntp.install_from_argv()
from megatron_ntp.launch import run
assert run([sys.argv[1], "--no-ntp-here", "--ntpx"]) == 0
assert diff_snapshots(before, identity_snapshot("megatron"), new_modules=True) == []
assert sys.excepthook is hook
new = sorted(name for name in set(sys.modules) - loaded if name.startswith("megatron"))
small = ["megatron_ntp.environment", "megatron_ntp.launch", "megatron_ntp.watching"]
assert new == small, new  # they import nothing
"""


def python(*words: str) -> list[str]:
    return [sys.executable, "-W", "ignore", *words]


def environment() -> dict[str, str]:
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}


def test_importing_and_running_without_ntp_loads_nothing_more(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys; assert sys.argv[1:] == ['--no-ntp-here', '--ntpx']")
    # the patching package, which takes the snapshots, is the only part that is loaded before
    argv = python("-c", UNTOUCHED, str(script))
    done = subprocess.run(
        argv, env=environment(), capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


def cpu_s(argv: list[str]) -> float:
    """CPU time of a process: on a busy machine, the wall clock says little."""
    process = subprocess.Popen(argv, env=environment(), cwd=ROOT)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_utime + usage.ru_stime


def test_a_start_without_ntp_costs_at_most_50_ms(tmp_path: Path) -> None:
    script = tmp_path / "nothing.py"
    script.write_text("")
    plain = min(cpu_s(python(str(script))) for _ in range(7))
    ours = min(cpu_s(python("-m", "megatron_ntp", "run", str(script))) for _ in range(7))
    assert ours - plain <= 0.05


def started() -> None:
    """Before the start of a rank, which has imported Megatron already."""
    _before["cpu_s"] = time.process_time()


def spent_s() -> float:
    """After one step: CPU time of this rank since `started`."""
    return time.process_time() - float(_before["cpu_s"])  # type: ignore[arg-type]


def test_a_rank_with_ntp_starts_at_most_a_second_later() -> None:
    """Everything up to the end of the first step: imports, patches, check-in, plan, groups, model.

    Degrees 2 and 2, so that the model and the step are the same in both jobs. The first rank of a
    TP group builds data sets, which takes seconds that vary; the second does not.
    """
    healthy = [*MODEL, "--ntp", "--ntp-degrees", "2,2"]
    plain = run_training(MODEL, 4, before=started, after=spent_s).results
    ours = run_training(healthy, 4, before=started, after=spent_s).results
    print("CPU seconds of each rank:", plain, "with --ntp:", ours)
    assert min(ours[1::2]) - min(plain[1::2]) <= 1.0


# --- install, verify, undo ----------------------------------------------------------------------


def install_and_undo() -> dict[str, Any]:
    """In a rank: what each step of an installation changed, by name."""
    from megatron_ntp.integration.catalog import ROWS
    from megatron_ntp.integration.install import install, uninstall
    from megatron_ntp.patching.rows import resolve

    remember()
    targets = [resolve(row).raw for row in ROWS]
    registry = install()
    installed = identity_snapshot("megatron")
    untouched = [
        row.target for row, raw in zip(ROWS, targets, strict=True) if resolve(row).raw is raw
    ]
    sites = registry.sites
    again = install()
    result = {
        "untouched": untouched,
        "stale": registry.verify(),
        "same registry": again is registry and again.sites == sites,
        "by installing again": diff_snapshots(installed, identity_snapshot("megatron")),
    }
    uninstall()
    uninstall()
    after = identity_snapshot("megatron")
    result["left behind"] = diff_snapshots(_before, after)
    install()
    result["stale after the second round"] = registry.verify() if registry.applied else []
    uninstall()
    after = identity_snapshot("megatron")
    result["left behind by the second round"] = diff_snapshots(_before, after)
    return {
        name: str(value) if name != "same registry" else value for name, value in result.items()
    }


@pytest.mark.parametrize("core", EVERY_CORE)
def test_install_verify_undo(core: Path | None) -> None:
    result = run_ranks(install_and_undo, 1, core=core)[0]
    assert result.pop("same registry")
    assert result == dict.fromkeys(result, "[]")


# --- a Megatron that does not fit ---------------------------------------------------------------


# Their base classes have one with the same parameters, which is then what runs, and is patched.
INHERITED = {
    "megatron.core.models.gpt.gpt_model:GPTModel.sharded_state_dict",
    "megatron.core.models.common.language_module.language_module:LanguageModule.__init__",
    *(
        f"megatron.core.dist_checkpointing.strategies.async_utils:PersistentAsyncCaller.{method}"
        for method in ("schedule_async_call", "is_current_async_call_done", "close")
    ),
}


def rename_each() -> dict[str, Any]:
    """In a rank, per row: the error of installing while its target is gone. And what that left."""
    import megatron.core.package_info as package_info

    from megatron_ntp.integration.catalog import ROWS
    from megatron_ntp.integration.install import install, uninstall
    from megatron_ntp.patching.rows import PatchError, resolve

    remember()
    errors = {}
    for row in ROWS:
        owner, attr = resolve(row).owner, row.target.rpartition(":")[2].rpartition(".")[2]
        original = vars(owner)[attr]  # raw: a static method is put back as one
        delattr(owner, attr)
        try:
            install()
            errors[row.target] = ""
            uninstall()
        except PatchError as error:
            errors[row.target] = str(error)
        setattr(owner, attr, original)
    return {
        "version": package_info.__version__.partition("+")[0],
        "errors": errors,
        "left behind": [str(d) for d in diff_snapshots(_before, identity_snapshot("megatron"))],
    }


@pytest.mark.parametrize("core", CORES)
def test_renamed_target_stops_with_its_name_and_the_tested_versions(core: Path | None) -> None:
    result = run_ranks(rename_each, 1, core=core)[0]
    assert result["left behind"] == []
    assert len(result["errors"]) > 25
    for target, said in result["errors"].items():
        if target in INHERITED:
            assert said == ""
            continue
        # A method that a base class has, too, is not missing, but another one.
        is_method = "." in target.partition(":")[2]
        assert f"{target} " in said, (target, said)
        assert "is missing" in said or (is_method and "is changed" in said), (target, said)
        assert f"megatron {result['version']} does not fit" in said
        assert "Tested with >=0.17,<0.20" in said and "nothing was changed" in said


def rename_train_step() -> None:
    from megatron.training import training

    training.train_step_v2 = training.train_step  # type: ignore[attr-defined]
    del training.train_step


def change_a_signature() -> None:
    from megatron.core.tensor_parallel import mappings

    mappings._split_along_last_dim = lambda tensor, group, axis: tensor


@pytest.mark.parametrize(
    ("before", "named"),
    [
        (rename_train_step, "megatron.training.training:train_step [train_step] is missing"),
        (change_a_signature, "mappings:_split_along_last_dim [_split_along_last_dim] is changed"),
    ],
)
def test_a_run_on_such_a_megatron_stops_before_training(before: Any, named: str) -> None:
    run = run_training(NTP, 3, before=before, check=False, grace_s=30)
    assert run.statuses == [2, 2, 2], run.describe()
    text = "".join(run.stderr)
    assert text.count("megatron-ntp: error: ") == 1
    assert named in text and "Tested with >=0.17,<0.20" in text


def install_into_version(version: str) -> str:
    import megatron.core.package_info as package_info

    from megatron_ntp.integration.install import install
    from megatron_ntp.patching.rows import PatchError

    before = identity_snapshot("megatron")
    package_info.__version__ = version
    try:
        install()
    except PatchError as error:
        changed = diff_snapshots(before, identity_snapshot("megatron"))
        assert [change.name for change in changed] == ["megatron.core.package_info:__version__"]
        return str(error)
    return ""


@pytest.mark.parametrize("version", ["0.16.1", "0.20.0rc1", "1.0.0"])
def test_untested_version_is_refused(version: str) -> None:
    said = run_ranks(install_into_version, 1, version=version)[0]
    assert f"megatron {version} " in said and ">=0.17,<0.20" in said
