"""Refuses a process that could run two Megatrons at once.

Checkouts have no `megatron/__init__.py`, so `megatron` is a namespace that Python puts together
from every folder on its path. A checkout beside an installed wheel is common and harmless as long
as one tree serves all imports. It is not when

- `megatron.core` and `megatron.training` were loaded from two trees (an editable installation, a
  checkout without one of them), or
- the tree that a further import would take is not the one that was loaded: the script's own folder
  holds another (it was started with a `megatron` that was imported before), or `sys.path` changed.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from megatron_ntp.errors import StartError
from megatron_ntp.patching.versions import PACKAGE_INFO, find_cores, read_core_version

_PARTS = ("megatron.core", "megatron.training")


def require_one_megatron() -> None:
    """Raises StartError with both locations unless one tree serves this process. Imports it."""
    roots = {part: _root_of(part) for part in _PARTS}
    core = roots["megatron.core"]
    for part, root in roots.items():
        if root != core:
            raise _two(f"megatron.core is imported from {_told(core)}, {part} from {_told(root)}")
    own = Path(sys.argv[0]).resolve().parent
    if (own / PACKAGE_INFO).is_file() and own != core:
        raise _two(
            f"the script {sys.argv[0]} lies beside {_told(own)}, but megatron is imported from "
            f"{_told(core)}"
        )
    found = find_cores()
    if found and found[0] != core:
        raise _two(
            f"megatron is imported from {_told(core)}, but Python's path has changed since, and "
            f"further imports would take {_told(found[0])}"
        )


def _root_of(part: str) -> Path:
    """The checkout or site-packages folder that a loaded part of Megatron lies in."""
    file = importlib.import_module(part).__file__
    assert file is not None, f"{part} has no __init__.py"
    return Path(file).resolve().parents[2]


def _told(root: Path) -> str:
    try:
        return f"{root} (megatron-core {read_core_version(root)})"
    except ValueError:
        return f"{root} (no megatron-core there)"


def _two(what: str) -> StartError:
    return StartError(
        f"two Megatrons: {what}. One job must run one: uninstall the other (pip uninstall "
        "megatron-core), or put the right one first on PYTHONPATH"
    )
