"""`megatron_ntp.install()` with the real catalog: import orders, exact undo, and what it costs.

Each order runs in a process of its own, since an import cannot be taken back.
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
    import importlib, sys, time
    import megatron_ntp

    def snapshot():
        from megatron_ntp.patching import identity_snapshot
        return identity_snapshot("megatron")

    def changes(before):
        from megatron_ntp.patching import diff_snapshots
        return diff_snapshots(before, snapshot())

    def import_targets():
        from megatron_ntp.integration.catalog import ROWS
        for row in ROWS:
            importlib.import_module(row.module)

    def assert_led_through():
        # Every row's target is ours, every other name of it is the same object, none is stale.
        from megatron_ntp.integration import install
        from megatron_ntp.patching.rows import MARKER, function_of, resolve
        registry = install.install()
        assert registry.verify() == []
        for row in registry.rows:
            found = resolve(row).raw
            assert hasattr(function_of(found), MARKER), row.target
        marked = 0
        for site in registry.sites:
            module, path = site.split(":")
            value = sys.modules[module]
            for part in path.split("."):
                value = vars(value)[part]
            assert hasattr(function_of(value), MARKER), site
            marked += 1
        assert marked >= len(registry.rows), (marked, len(registry.rows))
"""


def run(script: str) -> None:
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


def test_megatron_imported_before_and_twice_installed() -> None:
    run(
        """
        import_targets()
        import megatron_ntp.integration.ddp  # what we add is not what we change
        before = snapshot()
        megatron_ntp.install()
        assert_led_through()
        first = snapshot()
        megatron_ntp.install()
        assert changes(first) == []
        megatron_ntp.uninstall()
        assert changes(before) == []
        megatron_ntp.uninstall()
        assert changes(before) == []
        megatron_ntp.install()
        assert_led_through()
        """
    )


def test_megatron_imported_after_and_between_install_and_undo() -> None:
    run(
        """
        assert not any(name.startswith("megatron.") for name in sys.modules)
        megatron_ntp.install()
        import_targets()
        late = [
            name
            for name in (
                "megatron.core.inference.utils",
                "megatron.core.models.bert.bert_model",
                "megatron.core.models.T5.t5_model",
                "megatron.core.ssm.mamba_mixer",
            )
            if name not in sys.modules
        ]
        for name in late:
            try:
                importlib.import_module(name)
            except ImportError:
                pass
        assert_led_through()
        megatron_ntp.uninstall()
        from megatron_ntp.integration import install
        from megatron_ntp.patching.rows import MARKER, function_of, resolve
        for row in install.registry().rows:
            assert not hasattr(function_of(resolve(row).raw), MARKER), row.target
        for name, module in list(sys.modules.items()):
            if name.startswith("megatron.") and module is not None:
                for attr, value in list(vars(module).items()):
                    assert MARKER not in getattr(value, "__dict__", ()), f"{name}:{attr}"
        """
    )


def test_wrappers_above_and_below_ours() -> None:
    run(
        """
        import functools, types
        import_targets()
        from megatron.training import training
        from megatron_ntp.patching import PatchError
        keep = types.SimpleNamespace()  # names in __main__ are binding sites, these are not
        keep.original = training.train_step
        keep.below = functools.wraps(keep.original)(lambda *a, **k: keep.original(*a, **k))
        training.train_step = keep.below
        megatron_ntp.install()
        keep.ours = training.train_step
        assert keep.ours.__wrapped__ is keep.below
        keep.above = functools.wraps(keep.ours)(lambda *a, **k: keep.ours(*a, **k))
        training.train_step = keep.above
        try:
            megatron_ntp.uninstall()
        except PatchError as error:
            assert "megatron.training.training:train_step" in str(error)
        else:
            raise AssertionError("undone below a foreign wrapper")
        assert training.train_step is keep.above
        training.train_step = keep.ours
        megatron_ntp.uninstall()
        assert training.train_step is keep.below
        """
    )


def test_costs_at_start() -> None:
    """CPU time: at most 1 s with --ntp, and 50 ms and no changed attribute without."""
    run(
        """
        started = time.process_time()
        sys.argv = ["pretrain_gpt.py", "--lr", "1"]
        megatron_ntp.install_from_argv()
        assert time.process_time() - started < 0.05
        assert not any(name.startswith(("megatron.", "torch")) for name in sys.modules)
        import_targets()
        import megatron_ntp.integration.ddp
        before = snapshot()
        started = time.process_time()
        megatron_ntp.install_from_argv()
        assert time.process_time() - started < 0.05
        assert changes(before) == []
        sys.argv.append("--ntp")
        started = time.process_time()
        megatron_ntp.install_from_argv()
        taken = time.process_time() - started
        assert taken < 1.0, taken
        assert changes(before) != []
        print(f"install took {taken:.2f} s")
        """
    )
