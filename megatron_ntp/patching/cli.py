"""`megatron-ntp patches` and `megatron-ntp patch`: the catalog, and the patch to a checkout.

Exit status: 0 done or in order, 1 something does not fit (nothing was changed), 2 wrong usage.
"""

import argparse
import importlib
import json
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from megatron_ntp.patching import checkout as trees
from megatron_ntp.patching.registry import Registry
from megatron_ntp.patching.rows import Patch, PatchError, RowStatus
from megatron_ntp.patching.versions import find_cores, read_core_version

CATALOG = "megatron_ntp.integration.catalog"


def catalog_table(statuses: Iterable[RowStatus], width: int = 100) -> str:
    """The catalog as a table: status, tested versions, target, and below it why."""
    rows = [("status", "versions", "target, and why", "")]
    for row in statuses:
        why = row.patch.reason + (f" [{row.detail}]" if row.detail else "")
        rows.append((row.status.value, row.patch.versions or "all", row.patch.target, why))
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    lines: list[str] = []
    for status, versions, target, why in rows:
        lines.append(f"{status:<{first}}  {versions:<{second}}  {target}")
        indent = " " * (first + second + 6)
        lines += textwrap.wrap(why, max(width, 70), initial_indent=indent, subsequent_indent=indent)
    lines.insert(1, "-" * min(width, max(map(len, lines))))
    return "\n".join(lines)


def catalog_json(version: str, statuses: Iterable[RowStatus]) -> str:
    """The catalog as JSON, for scripts."""
    rows = [
        {
            "name": row.patch.name,
            "target": row.patch.target,
            "kind": row.patch.kind,
            "versions": row.patch.versions,
            "reason": row.patch.reason,
            "status": row.status.value,
            "detail": row.detail,
        }
        for row in statuses
    ]
    return json.dumps({"version": version, "rows": rows}, indent=2)


def patches_main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `megatron-ntp patches`. Returns 0 if every row fits, else 1."""
    parser = argparse.ArgumentParser(
        prog="megatron-ntp patches",
        description="Print what megatron-ntp changes in Megatron at run time, and whether each "
        "change fits the installed version. Changes nothing.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(argv)
    cores = find_cores()
    if not cores:
        print(
            "megatron-ntp patches: no megatron.core can be imported by this Python "
            f"({sys.executable}). Install megatron-core, or put a Megatron-LM checkout on "
            "PYTHONPATH.",
            file=sys.stderr,
        )
        return 1
    version = read_core_version(cores[0])
    rows: tuple[Patch, ...] = tuple(importlib.import_module(CATALOG).ROWS)
    statuses = Registry("megatron", version, rows).check()
    if options.json:
        print(catalog_json(version, statuses))
    else:
        print(f"megatron-core {version} in {cores[0]}")
        print(catalog_table(statuses, shutil.get_terminal_size((100, 24)).columns))
    return 0 if all(row.status.good for row in statuses) else 1


def _patch_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-ntp patch",
        description="Make plain `pretrain_gpt.py --ntp ...` work in a Megatron-LM checkout. One "
        "guarded insertion, described in patches/, which revert takes out to the byte.",
        epilog="Exit status: 0 done or in order, 1 something does not fit (nothing was changed), "
        "2 wrong usage.",
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb, text in (
        ("apply", "insert the hook; a second apply changes nothing"),
        ("revert", "take the hook out"),
        ("status", "say whether the hook is in; 1 if it is only partly in or damaged"),
        ("check", "say whether apply would work, without changing anything"),
        ("diff", "print what apply would change"),
    ):
        sub = verbs.add_parser(verb, help=text, description=text)
        sub.add_argument("path", metavar="PATH", type=Path, help="folder that holds megatron/")
        if verb != "status":
            sub.add_argument(
                "--force",
                action="store_true",
                help="go on with an untested version, or a block that was edited by hand",
            )
        if verb in ("apply", "check", "diff"):
            sub.add_argument(
                "--allow-installed-core",
                action="store_true",
                help="go on although this Python has another megatron-core installed",
            )
        if verb == "diff":
            sub.add_argument(
                "--revert", action="store_true", help="print what revert would change instead"
            )
    return parser


def patch_main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `megatron-ntp patch VERB PATH`. Returns the exit status."""
    parser = _patch_parser()
    options = parser.parse_args(argv)
    if not options.path.is_dir():
        parser.error(f"{options.path} is not a folder")  # exits with 2
    run = {
        "apply": _apply,
        "revert": _revert,
        "status": _status,
        "check": _check,
        "diff": _diff,
    }[options.verb]
    try:
        return run(options)
    except PatchError as error:
        print(f"megatron-ntp patch {options.verb}: {error}", file=sys.stderr)
        return 1


def _apply(options: argparse.Namespace) -> int:
    changed = trees.apply(options.path, options.force, options.allow_installed_core)
    for path in changed:
        print(f"patched {path}")
    print(
        "Start your script as before and add --ntp. To undo: megatron-ntp patch revert "
        f"{shlex.quote(str(options.path))}"
        if changed
        else "already applied, nothing to change"
    )
    return 0


def _revert(options: argparse.Namespace) -> int:
    changed = trees.revert(options.path, options.force)
    for path in changed:
        print(f"reverted {path}")
    if not changed:
        print("not applied, nothing to change")
    return 0


def _describe(tree: trees.Checkout) -> None:
    print(f"checkout {tree.root}, megatron-core {tree.version}: {tree.state}")
    for state in tree.hooks:
        print(f"  {state.hook.name} ({state.hook.file}): {state.block.state.value}")
        for detail in filter(None, (state.fault, state.block.detail)):
            print(f"    {detail}.")


def _status(options: argparse.Namespace) -> int:
    tree = trees.inspect_checkout(options.path)
    _describe(tree)
    return 0 if tree.state in ("applied", "not applied") else 1


def _check(options: argparse.Namespace) -> int:
    tree = trees.inspect_checkout(options.path)
    _describe(tree)
    reasons = trees.refusals(tree, options.force, options.allow_installed_core)
    for reason in reasons:
        print(f"would refuse: {reason}")
    if not reasons:
        print("apply would succeed" if tree.state != "applied" else "nothing to do")
    return 1 if reasons else 0


def _diff(options: argparse.Namespace) -> int:
    tree = trees.inspect_checkout(options.path)
    if options.revert:
        reasons: list[str] = []
        changes = trees.plan_revert(tree, options.force)
    else:
        reasons = trees.refusals(tree, options.force, options.allow_installed_core)
        changes = trees.plan_apply(tree, force=True, allow_installed_core=True)
    sys.stdout.flush()
    sys.stdout.buffer.write(trees.unified_diff(tree.root, changes))
    sys.stdout.flush()
    if not changes:
        print("nothing to change", file=sys.stderr)
    for reason in reasons:
        print(f"apply would refuse: {reason}", file=sys.stderr)
    return 1 if reasons else 0
