"""Which Megatron would run, and whether the patches fit it."""

from __future__ import annotations

from pathlib import Path

from megatron_ntp.doctor.findings import Finding, fail, note, ok, warn
from megatron_ntp.integration.catalog import ROWS, TESTED
from megatron_ntp.integration.group_table import global_names, unknown_groups
from megatron_ntp.patching import checkout as trees
from megatron_ntp.patching.probe import probe
from megatron_ntp.patching.rows import PatchError
from megatron_ntp.patching.versions import find_cores, in_range, read_core_version

_MAINTAINERS = "docs/maintainers.md tells how a new version is supported"


def check_megatron(path: Path | None) -> list[Finding]:
    """Findings about the installed megatron-core and, if given, the checkout at `path`."""
    cores = find_cores()
    findings: list[Finding] = []
    if path is not None:
        findings = _checkout(path)
        if cores:
            findings.append(note("installed core", _told(cores[0])))
        return findings
    if not cores:
        return [
            fail(
                "megatron-core",
                "this Python cannot import any",
                "name your checkout: megatron-ntp doctor PATH; or install the wheel: pip install "
                f"'megatron-core{TESTED}'",
            )
        ]
    findings += _tree("megatron-core", cores[0])
    findings += [
        warn(
            "megatron-core",
            f"a second one could be imported: {_told(other)}",
            "uninstall it, or make sure that scripts lie beside the Megatron they should use",
        )
        for other in cores[1:]
    ]
    return findings


def _told(root: Path) -> str:
    try:
        return f"{read_core_version(root)} in {root}"
    except ValueError:
        return f"an unknown version in {root}"


def _checkout(path: Path) -> list[Finding]:
    try:
        tree = trees.inspect_checkout(path)
    except PatchError as error:
        return [fail("checkout", str(error), "name the folder that holds megatron/")]
    findings = _tree("checkout", tree.root)
    if not in_range(tree.version, TESTED):
        return findings  # which stops a run in either way of starting
    if tree.state == "applied":
        return [*findings, ok("checkout patch", "applied: `pretrain_gpt.py --ntp` works")]
    reasons = trees.refusals(tree)
    if reasons:
        way = "start scripts with `python -m megatron_ntp run SCRIPT.py ...`: that needs no patch"
        findings += [warn("checkout patch", reason, way) for reason in reasons]
    else:
        cure = f"megatron-ntp patch apply {tree.root}, or start with `python -m megatron_ntp run`"
        findings.append(note("checkout patch", f"{tree.state}, and can be applied", cure))
    return findings


def _tree(subject: str, root: Path) -> list[Finding]:
    """Version, training loop and patches of one tree."""
    try:
        version = read_core_version(root)
    except ValueError as error:
        return [fail(subject, str(error), "install megatron-core again")]
    findings: list[Finding] = []
    if in_range(version, TESTED):
        findings.append(ok(subject, f"{version} in {root}"))
    else:
        cure = f"use a version in {TESTED}; {_MAINTAINERS}"
        findings.append(fail(subject, f"{version} in {root} was never tested", cure))
    if not (root / "megatron" / "training" / "training.py").is_file():
        findings.append(
            fail(
                subject,
                "has no megatron.training",
                "wheels have it from 0.17 on; otherwise use a checkout",
            )
        )
        return findings
    return [*findings, *_patches(root, version), *_groups(root)]


def _groups(root: Path) -> list[Finding]:
    """Process groups of this Megatron that have no place in a nonuniform job yet."""
    path = root / "megatron" / "core" / "parallel_state.py"
    if not path.is_file():
        return []  # the functions that are patched in it are missing, which is said
    try:
        unknown = unknown_groups(global_names(path.read_text(encoding="utf-8")))
    except (OSError, SyntaxError, ValueError) as error:
        return [fail("process groups", f"cannot be read from {path}: {error}", _MAINTAINERS)]
    if not unknown:
        return []
    return [fail("process groups", f"not known: {', '.join(unknown)}", _MAINTAINERS)]


def _patches(root: Path, version: str) -> list[Finding]:
    statuses = probe(ROWS, root, version)
    # A row outside its tested versions is said once, by the version.
    bad = [row for row in statuses if row and not row.status.good and in_range(version, TESTED)]
    findings = [
        fail("patches", f"{row.patch.target}: {row.status.value}: {row.detail}", _MAINTAINERS)
        for row in bad
    ]
    unknown = sum(row is None for row in statuses)
    if unknown:
        text = f"{unknown} of {len(statuses)} cannot be told from source"
        findings.append(note("patches", text, "`megatron-ntp patches` imports Megatron to see"))
    good = sum(row is not None and row.status.good for row in statuses)
    if good:
        findings.append(ok("patches", f"{good} of {len(statuses)} fit (read from source)"))
    return findings
