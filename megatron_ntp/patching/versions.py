"""Versions: is one inside a range, and which one does a Megatron tree on disk have.

Nothing here imports Megatron. Its version is parsed from the text of package_info.py, because
importing that file may start git, and importing its package needs torch.
"""

import ast
import functools
import importlib.util
import sys
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

PACKAGE_INFO = Path("megatron", "core", "package_info.py")


@functools.cache
def _specifiers(text: str) -> SpecifierSet:
    return SpecifierSet(text)


def in_range(version: str, specifiers: str) -> bool:
    """Whether `version` satisfies `specifiers` (such as ">=0.17,<0.20"); empty allows all.

    Pre-releases and local versions are compared by their numbers, so that 0.20.0rc1 is not
    taken for a 0.19.
    """
    return _specifiers(specifiers).contains(Version(version).base_version)


def parse_package_info(text: str) -> str:
    """The version that the text of a package_info.py declares. Raises ValueError."""
    values: dict[str, object] = {}
    for node in ast.parse(text).body:
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)):
            continue
        for target in node.targets:
            if isinstance(target, ast.Name):
                values[target.id] = node.value.value
    absent = [name for name in ("MAJOR", "MINOR", "PATCH") if not isinstance(values.get(name), int)]
    if absent:
        raise ValueError(f"no integer constant {', '.join(absent)} in it")
    number = ".".join(str(values[name]) for name in ("MAJOR", "MINOR", "PATCH"))
    return str(Version(number + str(values.get("PRE_RELEASE") or "")))


def read_core_version(root: Path) -> str:
    """The version of the megatron-core below `root`, a checkout or a site-packages folder."""
    path = root / PACKAGE_INFO
    try:
        return parse_package_info(path.read_text(encoding="utf-8-sig"))
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"cannot read a megatron-core version from {path}: {error}") from error


def find_cores() -> list[Path]:
    """Folders from which this Python can import megatron.core; the first is the one it takes.

    Only finders are asked, nothing is imported. An editable installation is found as well.
    """
    spec = importlib.util.find_spec("megatron")
    portions = list(spec.submodule_search_locations or ()) if spec else []
    candidates = [Path(portion) / "core" for portion in portions]
    for finder in reversed(sys.meta_path):
        found = finder.find_spec("megatron.core", portions)
        if found is not None and found.origin:
            candidates.insert(0, Path(found.origin).parent)
    roots: dict[Path, None] = {}
    for core in candidates:
        root = core.resolve().parents[1]
        if (root / PACKAGE_INFO).is_file():
            roots.setdefault(root)
    return list(roots)
