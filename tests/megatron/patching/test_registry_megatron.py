"""The registry against the installed Megatron: import orders, exact undo, every binding site.

Each order runs in a process of its own, since an import cannot be taken back. Runs with whatever
megatron-core this Python imports (another version: put it first on PYTHONPATH).
"""

import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

if importlib.util.find_spec("torch") is None or importlib.util.find_spec("megatron") is None:
    pytest.skip("needs torch and megatron-core in this Python", allow_module_level=True)

PRELUDE = """
    import dataclasses, sys, types
    from megatron_ntp.patching import *
    from megatron_ntp.patching.bindings import scan
    from megatron_ntp.patching.versions import find_cores, read_core_version

    def through(original, *args, **kwargs):
        return original(*args, **kwargs)

    DDP = "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel"
    ROWS = [
        Patch("pretrain", "megatron.training.training:pretrain", through, "a test"),
        Patch("finalize", "megatron.core.distributed:finalize_model_grads", through, "a test",
              signature=(Expected(("model", "num_tokens")),)),
        Patch("divide", "megatron.core.utils:divide", through, "a test"),
        Patch("hook", DDP + "._make_backward_post_hook", through, "a test",
              signature=(Expected(("param",), exact=True),)),
        Patch("inherited", DDP + ".train", through, "a test"),
    ]

    keep = types.SimpleNamespace()  # names in __main__ are binding sites, these are not

    def registry(prefix=""):
        rows = [dataclasses.replace(row, name=prefix + row.name) for row in ROWS]
        return Registry("megatron", read_core_version(find_cores()[0]), rows)

    def values(patches):
        names = [site.split(":") for site in patches.sites]
        found = []
        for module, path in names:
            value = sys.modules[module]
            for part in path.split("."):
                value = vars(value).get(part, "absent")
            found.append(value)
        return found
"""


def run(script: str) -> None:
    """Run a script after the prelude in a new Python; it fails by an assertion."""
    text = textwrap.dedent(PRELUDE) + textwrap.dedent(script)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", text],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def test_megatron_imported_before() -> None:
    run(
        """
        import megatron.training
        from megatron.training import pretrain as start
        from megatron.core.utils import divide
        import megatron.core.distributed.distributed_data_parallel as module
        keep.originals = [start, divide, module.DistributedDataParallel._make_backward_post_hook]
        before = identity_snapshot("megatron")
        patches = registry()
        assert [row.status.value for row in patches.check()] == ["ok"] * 5, patches.check()
        assert diff_snapshots(before, identity_snapshot("megatron")) == []
        patches.apply()
        assert start.__ntp_patch__ == "pretrain", "an alias in __main__"
        assert megatron.training.pretrain is megatron.training.training.pretrain is start
        assert divide.__ntp_patch__ == "divide"
        assert "train" in vars(module.DistributedDataParallel)
        assert len(patches.sites) >= 12, patches.sites
        assert all(hasattr(value, "__ntp_patch__") for value in values(patches))
        assert patches.verify() == []
        assert scan(keep.originals) == []
        patches.undo()
        assert diff_snapshots(before, identity_snapshot("megatron")) == []
        assert not hasattr(start, "__ntp_patch__") and not hasattr(divide, "__ntp_patch__")
        """
    )


def test_megatron_imported_after_and_between() -> None:
    run(
        """
        assert not any(name.startswith("megatron.") for name in sys.modules)
        patches = registry().apply()
        import megatron.core.tensor_parallel.layers as layers
        late = [n for n in ("megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs",
                            "megatron.core.inference.utils", "megatron.core.ssm.mamba_mixer")
                if n not in sys.modules]
        import importlib
        for name in late:
            importlib.import_module(name)
        from megatron.core.utils import divide as mine
        assert layers.divide is mine and mine.__ntp_patch__ == "divide"
        assert patches.verify() == []
        keep.ours = mine
        patches.undo()
        assert mine is keep.ours.__wrapped__ is layers.divide
        assert scan([keep.ours]) == []
        """
    )


def test_twice_installed_and_wrappers_above_and_below() -> None:
    run(
        """
        import functools
        import megatron.training
        import megatron.core.utils as utils, megatron.core.tensor_parallel.layers as layers
        before = identity_snapshot("megatron")
        keep.raw = utils.divide
        keep.below = functools.wraps(keep.raw)(lambda *args: keep.raw(*args))
        utils.divide = keep.below
        first = registry().apply()
        assert first.apply() is first
        assert {s.patch for s in first.verify()} == {"divide"}, "aliases below the foreign wrapper"
        try:
            registry().apply()
        except PatchError as error:
            assert "already applied" in str(error)
        else:
            raise AssertionError("the same catalog was applied twice")
        second = registry("second ").apply()
        try:
            first.undo()
        except PatchError as error:
            assert "Nothing was changed" in str(error)
        else:
            raise AssertionError("undone below a later registry")
        keep.mine = utils.divide
        utils.divide = keep.above = functools.wraps(keep.mine)(lambda *args: keep.mine(*args))
        try:
            second.undo()
        except PatchError as error:
            assert "megatron.core.utils:divide" in str(error)
        else:
            raise AssertionError("undone below a foreign wrapper")
        assert utils.divide is keep.above and utils.divide(6, 3) == 2
        utils.divide = keep.mine
        second.undo()
        first.undo()
        assert utils.divide is keep.below
        utils.divide = keep.raw
        assert diff_snapshots(before, identity_snapshot("megatron")) == []
        """
    )


def test_renamed_target_stops_with_name_and_versions() -> None:
    run(
        """
        rows = [*ROWS, Patch("gone", "megatron.training.training:pretrain_v2", through, "a test",
                             versions=">=0.17,<0.20")]
        import megatron.training
        version = read_core_version(find_cores()[0])
        before = identity_snapshot("megatron")
        try:
            Registry("megatron", version, rows).apply()
        except PatchError as error:
            assert "megatron.training.training:pretrain_v2" in str(error)
            assert ">=0.17,<0.20" in str(error) and version in str(error)
        else:
            raise AssertionError("applied")
        assert diff_snapshots(before, identity_snapshot("megatron")) == []
        """
    )
