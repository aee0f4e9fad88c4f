"""The layers of the package, checked by parsing every import (also those inside functions)."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "megatron_ntp"

# A part of the package imports itself and parts of a lower level. Parts not named here (the
# command line and what it starts) are on top. The package itself may be imported by all, for its
# version, and may reach for anything inside its functions.
LEVELS = {
    "atomic": 0,
    "environment": 0,
    "errors": 0,
    "beats": 1,
    "checkpoint": 1,
    "events": 1,
    "plan": 1,
    "comm": 2,
    "cpu_runtime": 2,
    "device": 2,
    "patching": 2,
    "settings": 3,
    "integration": 4,
}
TOP = 5

MAY_IMPORT_MEGATRON = {"integration", "cpu_runtime"}
NEVER_IMPORT_TORCH = {
    "__init__",
    "atomic",
    "beats",
    "checkpoint",
    "cli",
    "device",
    "doctor",
    "environment",
    "errors",
    "events",
    "flags",
    "plan",
    "settings",
}

FILES = sorted(PACKAGE.rglob("*.py"))


def part_of(module: str) -> str:
    """``plan`` for ``megatron_ntp.plan.topology``."""
    words = module.split(".")
    return words[1] if len(words) > 1 else "__init__"


def module_name(path: Path) -> str:
    words = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(words[:-1] if words[-1] == "__init__" else words)


def resolve_from(node: ast.ImportFrom, path: Path) -> Iterator[str]:
    """Modules that a ``from`` may mean: a name may be a module of the package it comes from."""
    source = node.module or ""
    if node.level:
        folder = path.parent.relative_to(PACKAGE.parent).parts
        base = folder[: len(folder) - node.level + 1]
        source = ".".join([*base, *filter(None, [node.module])])
    yield source
    if source == "megatron_ntp":
        names = [alias.name for alias in node.names]
        yield from (f"{source}.{name}" for name in names if is_module(name))


def is_module(name: str) -> bool:
    return (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").exists()


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and module of every import of a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, module) for module in resolve_from(node, path))


def broken_rule(part: str, module: str) -> str | None:
    """The rule that this import breaks, if any."""
    root = module.split(".")[0]
    if root == "megatron" and part not in MAY_IMPORT_MEGATRON:
        return f"only {sorted(MAY_IMPORT_MEGATRON)} import megatron"
    if root == "torch" and part in NEVER_IMPORT_TORCH:
        return f"{part} never imports torch"
    if root == "megatron_ntp":
        other = part_of(module)
        if other == "__init__":
            return None
        below = LEVELS.get(other, TOP) < LEVELS.get(part, TOP)
        both_on_top = part not in LEVELS and other not in LEVELS
        if other != part and not below and not both_on_top:
            return f"{part} (level {LEVELS.get(part, TOP)}) imports only what lies below it"
    return None


@pytest.mark.parametrize("path", FILES, ids=lambda path: module_name(path))
def test_imports_go_down_only(path: Path) -> None:
    part = part_of(module_name(path))
    broken = [
        f"{path.relative_to(PACKAGE.parent)}:{line} imports {module}: {rule}"
        for line, module in imports(path)
        if (rule := broken_rule(part, module))
    ]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    ("part", "module", "allowed"),
    [
        ("plan", "torch", False),
        ("device", "torch.distributed", False),
        ("comm", "torch", True),
        ("comm", "megatron.core", False),
        ("integration", "megatron.core", True),
        ("cpu_runtime", "megatron.core", True),
        ("plan", "megatron_ntp.comm.groups", False),
        ("comm", "megatron_ntp.plan", True),
        ("comm", "megatron_ntp.patching", False),
        ("integration", "megatron_ntp.cli", False),
        ("launch", "megatron_ntp.integration", True),
        ("cli", "megatron_ntp.launch", True),
        ("errors", "megatron_ntp.plan", False),
        ("plan", "megatron_ntp.errors", True),
        ("launch", "megatron", False),
    ],
)
def test_the_rules_themselves(part: str, module: str, allowed: bool) -> None:
    assert (broken_rule(part, module) is None) == allowed


def test_relative_imports_are_resolved() -> None:
    node = ast.parse("from ..comm import groups").body[0]
    assert isinstance(node, ast.ImportFrom)
    assert list(resolve_from(node, PACKAGE / "plan" / "x.py")) == ["megatron_ntp.comm"]


def test_the_command_line_starts_without_torch() -> None:
    program = (
        "import sys; from megatron_ntp import cli; cli.main(['--help']); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'megatron', 'numpy')))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=PACKAGE.parent, timeout=30)
    assert done.returncode == 0
