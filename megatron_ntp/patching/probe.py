"""Whether a catalog fits a Megatron tree, read from its source alone: nothing is imported.

Takes a second and works on any tree, without torch. What source does not show (a name that is
imported or computed there) is reported as unknown: `Registry.check` imports, and knows.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from megatron_ntp.patching.rows import Patch, RowStatus, Status, signature_fault
from megatron_ntp.patching.versions import in_range

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def probe(rows: Sequence[Patch], root: Path, version: str) -> list[RowStatus | None]:
    """A finding for each row, or None where source alone does not say."""
    modules = {row.module: _parse(root, row.module) for row in rows}
    return [_probe_row(row, modules[row.module], version) for row in rows]


def _parse(root: Path, module: str) -> ast.Module | str:
    """The module's source as a tree, or what is wrong with it."""
    base = root.joinpath(*module.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            try:
                return ast.parse(path.read_bytes(), str(path))
            except (OSError, SyntaxError, ValueError) as error:
                return f"{path} cannot be read: {error}"
    return f"there is no module {module} in {root}"


def _probe_row(row: Patch, module: ast.Module | str, version: str) -> RowStatus | None:
    if not in_range(version, row.versions):
        if row.optional:
            return RowStatus(row, Status.NOT_NEEDED)
        detail = f"version {version} is outside the tested range {row.versions}"
        return RowStatus(row, Status.UNTESTED, detail)
    if isinstance(module, str):
        return RowStatus(row, Status.MISSING, module)
    owner: ast.Module | ast.ClassDef = module
    for depth, name in enumerate(row.path):
        found = _definition(owner.body, name)
        if found is None:
            if depth or _is_bound(owner.body, name):
                return None  # inherited, imported or computed
            return RowStatus(row, Status.MISSING, f"module {row.module} has no {name!r}")
        if depth + 1 < len(row.path):
            if not isinstance(found, ast.ClassDef):
                detail = f"{row.module}:{name} is not a class"
                return RowStatus(row, Status.MISSING, detail)
            owner = found
    assert found is not None, "a row has a path"
    fault = signature_fault(row, _parameters(found), version)
    return RowStatus(row, Status.CHANGED if fault else Status.OK, fault)


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of one scope, those under if, try and with included."""
    for statement in body:
        yield statement
        for field in ("body", "orelse", "finalbody"):
            if not isinstance(statement, _Definition):
                yield from _statements(getattr(statement, field, ()))
        for handler in getattr(statement, "handlers", ()):
            yield from _statements(handler.body)


def _definition(body: Iterable[ast.stmt], name: str) -> _Definition | None:
    """The last definition of a name in a scope: that is the one that stays."""
    found = None
    for statement in _statements(body):
        if isinstance(statement, _Definition) and statement.name == name:
            found = statement
    return found


def _is_bound(body: Iterable[ast.stmt], name: str) -> bool:
    """Whether a scope may get a name by import or assignment."""
    for statement in _statements(body):
        if isinstance(statement, ast.Import | ast.ImportFrom):
            names = {(alias.asname or alias.name).partition(".")[0] for alias in statement.names}
            if name in names or "*" in names:
                return True
        elif isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
            stored = (node.id for node in ast.walk(statement) if isinstance(node, ast.Name))
            if name in stored:
                return True
        elif isinstance(statement, _Definition) and statement.name == "__getattr__":
            return True
    return False


def _parameters(found: _Definition) -> tuple[str, ...] | None:
    """Names of the parameters as `rows.parameters_of` gives them."""
    if isinstance(found, ast.ClassDef):
        inner = _definition(found.body, "__init__")
        return None if inner is None else _parameters(inner)
    given = found.args
    names = [argument.arg for argument in (*given.posonlyargs, *given.args)]
    names += [given.vararg.arg] if given.vararg else []
    names += [argument.arg for argument in given.kwonlyargs]
    names += [given.kwarg.arg] if given.kwarg else []
    return tuple(names[1:] if names and names[0] in ("self", "cls") else names)
