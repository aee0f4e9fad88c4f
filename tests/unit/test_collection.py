"""That pytest finds all tests: by its own default it passes over folders of certain names."""

from fnmatch import fnmatch
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]


def test_no_folder_of_tests_is_passed_over(pytestconfig: pytest.Config) -> None:
    patterns = pytestconfig.getini("norecursedirs")
    parts = [path.relative_to(TESTS).parts[:-1] for path in TESTS.rglob("test_*.py")]
    folders = {name for names in parts for name in names}
    assert "dist" in folders
    assert [name for name in folders if any(fnmatch(name, p) for p in patterns)] == []
