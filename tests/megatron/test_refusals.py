"""What must stop a job before it trains: each with a failure status and one message that says why.

Ranks are started as for training. Where the reason is found by every rank for itself, one rank is
started and told that there are more.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from ranks import ROOT, SCRIPT, Training, free_port, run_ranks, run_training
from versions import EVERY_CORE

from megatron_ntp.errors import UnsupportedFlagError
from megatron_ntp.integration.refusals import REFUSALS, Refusal, refuse_unsupported
from megatron_ntp.patching.versions import find_cores
from megatron_ntp.plan.model import ModelDims
from megatron_ntp.plan.plan import Plan
from megatron_ntp.plan.topology import Topology

MODEL = """
    --num-layers 1 --hidden-size 16 --ffn-hidden-size 24 --num-attention-heads 4
    --seq-length 8 --max-position-embeddings 8 --attention-dropout 0 --hidden-dropout 0
    --mock-data --tokenizer-type NullTokenizer --vocab-size 30 --make-vocab-size-divisible-by 8
    --micro-batch-size 1 --global-batch-size 4 --lr 1e-3 --lr-decay-style constant
    --train-iters 1 --log-interval 1 --eval-iters 0 --eval-interval 1000
""".split()
TP2 = ["--tensor-model-parallel-size", "2"]
NTP = [*MODEL, *TP2, "--ntp", "--ntp-degrees", "2,1"]
DIMS = ModelDims(
    num_attention_heads=4,
    num_query_groups=4,
    kv_channels=4,
    hidden_size=16,
    ffn_hidden_size=24,
    padded_vocab_size=32,
    num_layers=1,
)
ERROR = "megatron-ntp: error: "


def claim(world_size: int) -> None:
    """Before the start: this one rank is told that it is the first of several."""
    os.environ["WORLD_SIZE"] = str(world_size)
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE")


def start_first_of(num_ranks: int, argv: list[str], **options: Any) -> str:
    """The error that rank 0 of a job ends with."""
    run = run_training(argv, 1, before=_claim(num_ranks), check=False, **options)
    return single_error(run, expected=[2])


def _claim(num_ranks: int) -> Callable[..., None]:
    return {3: claim_3, 4: claim_4, 6: claim_6}[num_ranks]


def claim_3(**_: Any) -> None:
    claim(3)


def claim_4(**_: Any) -> None:
    claim(4)


def claim_6(**_: Any) -> None:
    claim(6)


def single_error(run: Training, expected: list[int | None]) -> str:
    """The one error that all ranks together have printed."""
    assert run.statuses == expected, run.describe()
    text = "".join(run.stderr)
    assert text.count(ERROR) == 1, text
    return text.partition(ERROR)[2]


def test_the_job_that_the_others_are_variations_of_trains() -> None:
    assert list(run_training(NTP, 3).losses) == [1]


# --- what a person sees -------------------------------------------------------------------------


def test_all_ranks_end_and_one_speaks() -> None:
    run = run_training(NTP, 4, check=False, grace_s=30)
    error = single_error(run, expected=[2, 2, 2, 2])
    assert "degrees 2,1 need 3 processes" in error and "but 4 were started" in error
    assert "reported by rank" in error


def test_a_person_sees_no_traceback() -> None:
    words = ["run", "--cpu", str(SCRIPT), *MODEL, *TP2, "--ntp-degrees", "2,1"]
    done = run_command("from megatron_ntp.cli import main; sys.exit(main(sys.argv[1:]))", *words)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"{ERROR}--ntp-degrees without --ntp")


def run_command(program: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A Python program in a process of its own, with this project importable."""
    paths = [environment.pop("PYTHONPATH", ""), str(ROOT), os.environ.get("PYTHONPATH", "")]
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"import sys; {program}", *words],
        env={
            **inherited,
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


# --- flags --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_ranks", "flags", "numbers"),
    [
        pytest.param(4, ["--ntp-degrees", "2,1"], ("need 3", "but 4 were"), id="too-many-ranks"),
        pytest.param(3, ["--ntp-degrees", "2,2"], ("need 4", "but 3 were"), id="too-few-ranks"),
        pytest.param(
            4,
            ["--ntp-degrees", "2,2,1"],
            ("need 5", "3 data-parallel replicas", "but 4 were"),
            id="degrees-of-another-dp",
        ),
        pytest.param(
            3, ["--ntp-degrees", "2,1", "--ntp-failed", "0:1"], ("0:1",), id="degrees-and-failed"
        ),
        pytest.param(4, ["--ntp-failed", "1:1"], ("4 processes and 1 failed",), id="failed-only"),
        pytest.param(3, ["--ntp-degrees", "3,1"], ("is 3, above the nominal TP 2",), id="above"),
        pytest.param(3, ["--ntp-degrees", "2,x"], ("item 1 is 'x'",), id="not-a-number"),
        pytest.param(3, ["--ntp-failed", "2:0"], ("2:0", "replica 2"), id="no-such-replica"),
    ],
)
def test_degrees_that_do_not_fit_the_job(
    num_ranks: int, flags: list[str], numbers: tuple[str, ...]
) -> None:
    error = start_first_of(num_ranks, [*MODEL, *TP2, "--ntp", *flags])
    for number in numbers:
        assert number in error


def test_flags_of_ntp_without_ntp() -> None:
    argv = [*MODEL, *TP2, "--ntp-degrees", "2,1", "--ntp-batch-policy=shrink"]
    error = start_first_of(3, argv)
    assert "--ntp-degrees, --ntp-batch-policy=shrink without --ntp" in error


@pytest.mark.parametrize(
    "flags",
    [
        ["--pipeline-model-parallel-size", "2"],
        ["--context-parallel-size", "2"],
        ["--sequence-parallel"],
        ["--num-experts", "2"],
        ["--optimizer", "muon"],
        ["--multi-latent-attention"],
    ],
    ids=lambda flags: flags[0].strip("-"),
)
def test_a_start_with_an_unsupported_flag(flags: list[str]) -> None:
    error = start_first_of(3, [*NTP, *flags])
    assert f"{' '.join(flags)}" in error
    assert "cannot be combined with --ntp" in error


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--save", "x", "--use-distributed-optimizer"], "--dist-ckpt-optim-fully-reshardable"),
        (
            ["--rampup-batch-size", "2", "2", "8", "--ntp-batch-policy", "shrink"],
            "--rampup-batch-size with --ntp-batch-policy",
        ),
        (
            ["--ntp-batch-policy", "redistribute", "--step-batch-size-schedule", "0:2 4:4"],
            "--step-batch-size-schedule with --ntp-batch-policy",
        ),
        (
            ["--iterations-to-skip", "2", "--ntp-batch-policy", "redistribute"],
            "--iterations-to-skip with --ntp-batch-policy",
        ),
        (["--load", "msc://bucket/ckpt"], "--load msc://bucket/ckpt"),
    ],
)
def test_flags_that_are_refused_together(flags: list[str], named: str) -> None:
    assert named in start_first_of(3, [*NTP, *flags])


def refuse_each() -> dict[str, str | None]:
    """In a rank: what Megatron's own parser and checks say to each refused argument.

    Returns per argument the message, "" if it was accepted, None if this Megatron has no such flag.
    """
    import argparse

    from megatron.training import arguments

    from megatron_ntp.errors import UnsupportedFlagError
    from megatron_ntp.integration.install import install

    install()
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    actions = {option: action for action in parser._actions for option in action.option_strings}

    def answer(words: list[str]) -> str:
        args = parser.parse_args([*NTP, *words])
        args.rank, args.world_size = 0, 3
        try:
            arguments.validate_args(args, {})
        except UnsupportedFlagError as error:
            return str(error)
        return ""

    answers: dict[str, str | None] = {"": answer([])}
    for row in REFUSALS:
        action = actions.get(row.flag)
        answers[row.argument] = None if action is None else answer(_words(row, action))
    return answers


def _words(row: Refusal, action: Any) -> list[str]:
    """A command line with a refused value of this argument."""
    if action.nargs == 0:
        return [row.flag]
    if action.choices:
        return [row.flag, next(str(value) for value in action.choices if row.hits(value))]
    if row.flag == "--tensor-parallel-num-weight-shards":
        return [row.flag, "4"]  # above the TP degree
    return [row.flag, "2" if action.type in (int, float) else "something"]


@cache
def answers_of(core: Path | None) -> dict[str, str | None]:
    return run_ranks(refuse_each, 1, core=core)[0]


@pytest.mark.parametrize("core", EVERY_CORE)
def test_nothing_is_refused_by_default(core: Path | None) -> None:
    assert answers_of(core)[""] == ""


@pytest.mark.parametrize("row", REFUSALS, ids=lambda row: row.argument)
def test_each_refused_flag_by_name(row: Refusal) -> None:
    answers = {str(param.id): answers_of(param.values[0])[row.argument] for param in EVERY_CORE}
    found = {name: answer for name, answer in answers.items() if answer is not None}
    assert found, f"no version of Megatron has {row.flag}"
    for name, answer in found.items():
        assert f"  {row.flag} " in answer and row.why in answer, f"{name}: {answer or 'accepted'}"


def test_the_script_of_multimodal_models_by_its_name() -> None:
    of_the_script = {"freeze_LM": False, "freeze_ViT": False, "ntp_batch_policy": None}
    with pytest.raises(UnsupportedFlagError, match=r"pretrain_vlm\.py .*multimodal models"):
        refuse_unsupported(argparse.Namespace(**of_the_script))
    refuse_unsupported(argparse.Namespace(ntp_batch_policy=None))


def test_cpu_run_where_a_gpu_is_visible() -> None:
    program = (
        "import torch; torch.cuda.is_available = lambda: True; torch.cuda.device_count = lambda: 2;"
        "from megatron_ntp.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    done = run_command(program, "run", "--cpu", str(SCRIPT), *NTP)
    assert done.returncode == 2
    assert "2 GPU(s) are visible" in done.stderr and "CUDA_VISIBLE_DEVICES=" in done.stderr
    assert "Traceback" not in done.stderr


# --- plan files ---------------------------------------------------------------------------------


def plan_data(degrees: tuple[int, ...] = (2, 1), **sizes: int) -> dict[str, Any]:
    dims = ModelDims(**{**dict(DIMS.sizes()), **sizes})
    return json.loads(Plan(Topology.from_degrees(degrees, 2), dims, "keep").to_json())


def start_with_plan(folder: Path, data: Any, *flags: str, num_ranks: int = 3) -> str:
    path = folder / "plan.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    argv = [*MODEL, *TP2, "--ntp", "--ntp-plan", str(path), *flags]
    return start_first_of(num_ranks, argv)


@pytest.mark.parametrize(("flags", "mlp_matrices"), [([], 2), (["--quick-geglu"], 3)])
def test_the_plan_file_that_the_others_are_variations_of_trains(
    tmp_path: Path, flags: list[str], mlp_matrices: int
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan_data(mlp_matrices=mlp_matrices)))
    run = run_training([*MODEL, *TP2, *flags, "--ntp", "--ntp-plan", str(path)], 3)
    assert list(run.losses) == [1]


def test_plan_for_another_number_of_processes(tmp_path: Path) -> None:
    error = start_with_plan(tmp_path, plan_data(), num_ranks=4)
    assert "need 3 processes" in error and "4 were started" in error


def test_plan_for_other_sizes_than_the_models(tmp_path: Path) -> None:
    error = start_with_plan(tmp_path, plan_data(ffn_hidden_size=32, padded_vocab_size=64))
    assert "model of other sizes" in error
    assert "ffn_hidden_size: plan 32, model 24" in error
    assert "padded_vocab_size: plan 64, model 32" in error


def test_plan_for_another_healthy_degree(tmp_path: Path) -> None:
    data = json.loads(Plan(Topology.from_degrees((4, 3), 4), DIMS, "keep").to_json())
    error = start_with_plan(tmp_path, data, num_ranks=6)
    assert "healthy TP degree of 4" in error and "--tensor-model-parallel-size is 2" in error


def test_plan_whose_batch_policy_a_flag_contradicts(tmp_path: Path) -> None:
    data = {**plan_data(), "batch_policy": "redistribute"}
    error = start_with_plan(tmp_path, data, "--rampup-batch-size", "2", "2", "8")
    assert "--rampup-batch-size with --ntp-batch-policy other than keep" in error


@pytest.mark.parametrize("section", [None, "topology", "model"])
def test_plan_with_an_unknown_key(tmp_path: Path, section: str | None) -> None:
    data = plan_data()
    (data if section is None else data[section])["colour"] = 1
    assert "colour' in the plan" in start_with_plan(tmp_path, data)


def test_plan_of_a_newer_version(tmp_path: Path) -> None:
    data = {**plan_data(), "version": 2}
    error = start_with_plan(tmp_path, data)
    assert "version 2" in error and "1" in error.partition("version 2")[2]


def test_plan_that_is_no_json_or_is_not_there(tmp_path: Path) -> None:
    assert "plan.json" in start_with_plan(tmp_path, "degrees: 2,1")
    argv = [*MODEL, *TP2, "--ntp", "--ntp-plan", str(tmp_path / "absent.json")]
    assert "absent.json" in start_first_of(3, argv)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--ntp-degrees", "1,2"], "whose degrees are 2,1"),
        (["--ntp-failed", "0:0"], "--ntp-failed 0:0 disagrees"),
        (["--ntp-batch-policy", "shrink"], "which says keep"),
    ],
)
def test_plan_and_flags_that_disagree(tmp_path: Path, flags: list[str], named: str) -> None:
    assert named in start_with_plan(tmp_path, plan_data(), *flags)


def enter_own_folder(folders: list[str]) -> None:
    os.chdir(folders[int(os.environ["RANK"])])


def test_plans_that_differ_between_ranks(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("usual", "odd")]
    for folder, degrees in zip(folders, ((2, 1), (1, 2)), strict=True):
        folder.mkdir()
        (folder / "plan.json").write_text(json.dumps(plan_data(degrees)))
    usual, odd = map(str, folders)
    run = run_training(
        [*MODEL, *TP2, "--ntp", "--ntp-plan", "plan.json"],
        3,
        before=enter_own_folder,
        folders=[odd, usual, usual],
        check=False,
        grace_s=30,
    )
    error = single_error(run, expected=[2, 2, 2])
    assert "the plan of rank 0 is not that of ranks 1, 2" in error
    assert "degrees" in error and "on rank 1" in error and "on rank 0" in error


def add_a_group() -> None:
    from megatron.core import parallel_state

    parallel_state._NEW_PARALLEL_GROUPS = {}  # type: ignore[attr-defined]


def test_a_megatron_with_process_groups_that_are_not_known() -> None:
    run = run_training(NTP, 3, before=add_a_group, check=False, grace_s=30)
    error = single_error(run, expected=[2, 2, 2])
    assert "process groups that megatron-ntp does not know: _NEW_PARALLEL_GROUPS" in error


# --- launchers that count otherwise -------------------------------------------------------------


def lie_on_nodes(first_ranks: list[int]) -> None:
    """Before the start: the launcher says that these ranks are the first of their nodes."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    first = max(first for first in first_ranks if first <= rank)
    end = min([first for first in first_ranks if first > rank], default=world_size)
    os.environ.update(LOCAL_RANK=str(rank - first), LOCAL_WORLD_SIZE=str(end - first))


def test_the_reduced_replicas_node_counted_first() -> None:
    run = run_training(NTP, 3, before=lie_on_nodes, first_ranks=[0, 1], check=False, grace_s=30)
    error = single_error(run, expected=[2, 2, 2])
    assert "the nodes are not in the order of the plan: ranks 1 to 2 are on one node" in error
    assert "counted in the order 2, 1" in error and "--node-rank" in error


def take_nodes_for_equal() -> None:
    """As ft_launcher starts the first of two nodes with 2 and 1 processes."""
    os.environ.update(TORCH_ELASTIC_WORKER_IDENTICAL="1", WORLD_SIZE="4", LOCAL_WORLD_SIZE="2")
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE")


@pytest.mark.parametrize("flags", [["--ntp-degrees", "2,1"], ["--ntp-failed", "1:1"]])
def test_a_launcher_that_takes_all_nodes_for_equal(flags: list[str]) -> None:
    argv = [*MODEL, *TP2, "--ntp", *flags]
    run = run_training(argv, 1, before=take_nodes_for_equal, check=False)
    error = single_error(run, expected=[2])
    assert "4 " in error and "export TORCH_ELASTIC_WORKER_IDENTICAL=0" in error


# --- ranks that do not come ---------------------------------------------------------------------


def stay_away(missing: list[int], port: int | None, folder: str) -> None:
    """Before the start: some ranks never come. With a port, rank 0 keeps the store itself.

    The others wait for each other before they start to wait for the missing ones, however unequal
    a busy machine makes them.
    """
    from megatron_ntp.integration import startup

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if port is not None:
        os.environ["MASTER_PORT"] = str(port)
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE")
    if rank in missing:
        time.sleep(300)
    original = startup._rendezvous

    def line_up(*args: Any) -> Any:
        (Path(folder) / str(rank)).touch()
        while len(os.listdir(folder)) < world_size - len(missing):
            time.sleep(0.01)
        return original(*args)

    startup._rendezvous = line_up


def run_without(folder: Path, missing: list[int], port: int | None) -> Training:
    return run_training(
        [*NTP, "--ntp-start-timeout", "3"],
        3,
        before=stay_away,
        missing=missing,
        port=port,
        folder=str(folder),
        check=False,
        grace_s=12,
        timeout_s=60,
    )


@pytest.mark.parametrize(
    ("missing", "named"), [([2], "rank 2 of 3"), ([0], "rank 0 of 3"), ([0, 1], "ranks 0, 1 of 3")]
)
def test_missing_ranks_are_named(tmp_path: Path, missing: list[int], named: str) -> None:
    run = run_without(tmp_path, missing, None)
    error = single_error(run, expected=[None if rank in missing else 2 for rank in range(3)])
    assert f"{named} did not start within 3 s" in error
    assert "--ntp-start-timeout" in error


def test_missing_rank_is_named_where_rank_0_keeps_the_store(tmp_path: Path) -> None:
    run = run_without(tmp_path, [1], free_port())
    assert run.statuses == [2, None, 2], run.describe()
    assert "rank 1 of 3 did not start within 3 s" in run.stderr[0]
    assert "rank 1 of 3" in run.stderr[2] or "lost the rendezvous store" in run.stderr[2]


def test_missing_keeper_of_the_store(tmp_path: Path) -> None:
    run = run_without(tmp_path, [0], free_port())
    assert run.statuses == [None, 2, 2], run.describe()
    for stderr in run.stderr[1:]:
        assert "did not answer within 3 s" in stderr and "Rank 0" in stderr


# --- two Megatrons ------------------------------------------------------------------------------


def make_tree(root: Path, version: str) -> Path:
    """A folder that looks like a checkout of a Megatron that nobody has imported yet."""
    core = root / "megatron" / "core"
    core.mkdir(parents=True)
    major, minor, patch = version.split(".")
    info = f"MAJOR = {major}\nMINOR = {minor}\nPATCH = {patch}\nPRE_RELEASE = ''\n"
    (core / "package_info.py").write_text(info)
    (core / "__init__.py").write_text("")
    return root


def installed_root() -> Path:
    return find_cores()[0]


def test_script_beside_a_megatron_that_is_not_used(tmp_path: Path) -> None:
    """The ranks have imported the installed one already, as a start-up file of a site may do."""
    tree = make_tree(tmp_path / "checkout", "0.18.9")
    script = tree / "pretrain_gpt.py"
    shutil.copyfile(SCRIPT, script)
    error = start_first_of(3, NTP, script=script)
    assert error.startswith("two Megatrons: ")
    assert f"beside {tree} (megatron-core 0.18.9)" in error
    assert f"imported from {installed_root()} (megatron-core " in error


def put_first(tree: str) -> None:
    claim(3)
    sys.path[:0] = ["", tree]  # the first place is the script's


def test_path_that_leads_to_another_megatron_by_now(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "checkout", "0.18.9")
    run = run_training(NTP, 1, before=put_first, tree=str(tree), check=False)
    error = single_error(run, expected=[2])
    assert f"further imports would take {tree} (megatron-core 0.18.9)" in error
    assert str(installed_root()) in error


def test_core_and_training_from_two_trees(tmp_path: Path) -> None:
    shutil.copytree(installed_root() / "megatron" / "training", tmp_path / "megatron" / "training")
    program = "from megatron_ntp.integration.install import install; install()"
    done = run_command(program, PYTHONPATH=str(tmp_path))
    assert done.returncode != 0
    assert f"two Megatrons: megatron.core is imported from {installed_root()} " in done.stderr
    assert f"megatron.training from {tmp_path} " in done.stderr


def test_other_packages_below_megatron_are_none_of_our_business(tmp_path: Path) -> None:
    other = tmp_path / "megatron" / "energon"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("")
    (tmp_path / "train.py").write_text("import megatron.energon; print('trains', flush=True)")
    run = run_training(NTP, 1, script=tmp_path / "train.py")
    assert "trains" in run.stdout[0]


# --- names that lead past the patches -----------------------------------------------------------

TAKES_ONE_BACK = """
import megatron.training.training as training
training.train_step = training.train_step.__wrapped__
import runpy
runpy.run_path({script!r}, run_name="__main__")
"""


def test_stale_name_stops_the_run_once_the_model_is_built(tmp_path: Path) -> None:
    script = tmp_path / "takes_one_back.py"
    script.write_text(TAKES_ONE_BACK.format(script=str(SCRIPT)))
    run = run_training(NTP, 3, script=script, check=False, grace_s=30)
    error = single_error(run, expected=[2, 2, 2])
    assert "do not lead through the patches" in error
    assert "megatron.training.training:train_step [train_step]: the target was overwritten" in error
    assert "building GPT model" in run.stdout[0] and not run.losses
