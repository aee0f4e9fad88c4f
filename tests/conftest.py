"""Which tests may run beside each other (`pytest -n`): those of different files."""

from __future__ import annotations

from pathlib import Path

import pytest

SLURM = Path(__file__).parent / "slurm"


@pytest.hookimpl(tryfirst=True)  # xdist reads the marks in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of a file share the jobs they look at; those of Slurm the one munged here."""
    for item in items:
        group = SLURM if SLURM in item.path.parents else item.path
        item.add_marker(pytest.mark.xdist_group(str(group.relative_to(SLURM.parent))))
