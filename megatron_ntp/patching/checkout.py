"""Insert the start-up hook into somebody's Megatron-LM checkout, and take it out again.

After `apply`, plain `pretrain_gpt.py --ntp ...` starts nonuniform tensor parallelism. The hook
only calls `megatron_ntp.install_from_argv()`; everything deeper is done at run time.

`inspect_checkout` reads, `plan_apply` and `plan_revert` decide, `carry_out` writes. Whatever does
not fit is refused before anything is written. Nothing of the checkout is imported.
"""

import ast
import difflib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ntp.patching.files import Change, fault_of, locked, replace_all
from megatron_ntp.patching.hooks import (
    Block,
    Hook,
    State,
    find_anchor,
    find_block,
    insert_block,
    load_hooks,
    remove_block,
)
from megatron_ntp.patching.rows import PatchError
from megatron_ntp.patching.versions import PACKAGE_INFO, find_cores, in_range, read_core_version


class NotACheckoutError(PatchError):
    """The given folder is not a Megatron-LM checkout."""


@dataclass(frozen=True)
class HookState:
    """A hook, the file it belongs to (None if it cannot be used), and what was found in it."""

    hook: Hook
    path: Path | None
    content: bytes
    block: Block
    fault: str = ""


@dataclass(frozen=True)
class Checkout:
    """A Megatron-LM tree: where it is, its version, other cores on the path, and every hook."""

    root: Path
    version: str
    other_cores: tuple[tuple[Path, str], ...]
    hooks: tuple[HookState, ...]

    @property
    def state(self) -> str:
        """One of "applied", "not applied", "partly applied", "outdated", "edited", "broken"."""
        states = {hook.block.state for hook in self.hooks}
        if State.BROKEN in states or any(hook.fault for hook in self.hooks):
            return "broken"
        if State.EDITED in states:
            return "edited"
        if State.OUTDATED in states:
            return "outdated"
        if len(states) > 1:
            return "partly applied"
        return states.pop().value


def _other_cores(root: Path) -> tuple[tuple[Path, str], ...]:
    """Cores that this Python would import besides the checkout's, except from the work folder."""
    found: list[tuple[Path, str]] = []
    for other in find_cores():
        if other not in (root, Path.cwd().resolve()):
            try:
                found.append((other, read_core_version(other)))
            except ValueError:
                found.append((other, "of unknown version"))
    return tuple(found)


def _inspect_hook(root: Path, hook: Hook) -> HookState:
    path = root / hook.file
    nothing = Block(State.ABSENT)
    try:
        real = path.resolve(strict=True)
        content = real.read_bytes()
    except OSError as error:
        fault = f"{hook.file} cannot be read: {error.strerror}"
        return HookState(hook, None, b"", nothing, fault)
    if not real.is_relative_to(root):
        fault = (
            f"{hook.file} is a link to {real}, outside this checkout, so a change would reach "
            f"other trees. Replace the link by a copy, or patch the tree that holds the file"
        )
        return HookState(hook, None, content, nothing, fault)
    return HookState(hook, real, content, find_block(content, hook))


def inspect_checkout(path: Path, hooks: Sequence[Hook] | None = None) -> Checkout:
    """Read a checkout without changing it. Raises NotACheckoutError."""
    root = path.resolve()
    if not (root / PACKAGE_INFO).is_file():
        raise NotACheckoutError(
            f"{root} is not a Megatron-LM checkout: it has no {PACKAGE_INFO}. Give the folder "
            f"that holds pretrain_gpt.py and megatron/."
        )
    if any(root.glob("megatron_core-*.dist-info")):
        raise NotACheckoutError(
            f"{root} holds an installed megatron-core, not a checkout. Installed packages are not "
            f"patched: start with `python -m megatron_ntp run SCRIPT.py ...`."
        )
    try:
        version = read_core_version(root)
    except ValueError as error:
        raise NotACheckoutError(f"{error}. Is this a whole checkout?") from error
    states = tuple(_inspect_hook(root, hook) for hook in (load_hooks() if hooks is None else hooks))
    return Checkout(root, version, _other_cores(root), states)


def refusals(
    checkout: Checkout, force: bool = False, allow_installed_core: bool = False
) -> list[str]:
    """Why apply would refuse this checkout: sentences for a reader, none if it can be applied."""
    found: list[str] = []
    for state in checkout.hooks:
        if not in_range(checkout.version, state.hook.versions) and not force:
            found.append(
                f"megatron-core {checkout.version} is not a version that {state.hook.name} was "
                f"tested with ({state.hook.versions}). Update megatron-ntp. --force puts the hook "
                "in all the same (its anchor is checked either way), but a run with --ntp then "
                "stops at its start, since it refuses that version too."
            )
        fault = state.fault or _block_fault(state, force) or _file_fault(state)
        if fault:
            found.append(f"{fault}.")
    if checkout.other_cores and not allow_installed_core:
        others = "; ".join(f"{version} in {path}" for path, version in checkout.other_cores)
        found.append(
            f"two Megatrons: {checkout.version} in {checkout.root}, and this Python "
            f"({sys.executable}) also has megatron-core {others}. A job could import either. "
            f"Uninstall the other one (pip uninstall megatron-core), or give "
            f"--allow-installed-core if your scripts are started by their path inside the "
            f"checkout, whose own copy then comes first."
        )
    return found


def _block_fault(state: HookState, force: bool) -> str:
    if state.block.state is State.BROKEN:
        return f"{state.path}: {state.block.detail}"
    if state.block.state is State.EDITED and not force:
        return (
            f"{state.path}: lines {state.block.first + 1} to {state.block.stop} were edited by "
            f"hand between the markers of {state.hook.name}. Save what you need of them, then "
            f"give --force"
        )
    return ""


def _file_fault(state: HookState) -> str:
    """Faults that only matter for inserting: anchor, syntax, permissions."""
    try:
        content = _without(state)
        find_anchor(content, state.hook)
        ast.parse(content)
        ast.parse(insert_block(content, state.hook))
    except PatchError as error:
        return str(error).removesuffix(".")
    except (SyntaxError, ValueError) as error:
        return f"{state.path} is not valid Python ({error}). Finish the merge or edit in it first"
    fault = fault_of(state.path) if state.path else ""
    return f"{fault}. Make it writable (chmod u+w)" if fault else ""


def _without(state: HookState) -> bytes:
    """The content of a hook's file without its block."""
    if state.block.state is State.ABSENT:
        return state.content
    return remove_block(state.content, state.block)


def _refuse(reasons: list[str], verb: str) -> None:
    if reasons:
        lines = "\n".join(f"  - {reason}" for reason in reasons)
        raise PatchError(f"the checkout was not {verb}, nothing was changed:\n{lines}")


def plan_apply(
    checkout: Checkout, force: bool = False, allow_installed_core: bool = False
) -> list[Change]:
    """The changes that apply the hooks; none if they are applied. Raises PatchError."""
    _refuse(refusals(checkout, force, allow_installed_core), "patched")
    return _plan(checkout, insert=True)


def plan_revert(checkout: Checkout, force: bool = False) -> list[Change]:
    """The changes that remove the hooks, from any version of Megatron. Raises PatchError."""
    reasons = [
        f"{fault}."
        for state in checkout.hooks
        if state.block.state is not State.ABSENT and (fault := _block_fault(state, force))
    ]
    _refuse(reasons, "reverted")
    return _plan(checkout, insert=False)


def _plan(checkout: Checkout, insert: bool) -> list[Change]:
    """Chain the hooks of each file, so that two hooks may share one."""
    before: dict[Path, bytes] = {}
    after: dict[Path, bytes] = {}
    for state in checkout.hooks:
        if state.path is None:
            continue
        before[state.path] = state.content
        content = after.get(state.path, state.content)
        block = find_block(content, state.hook)
        if insert and block.state is State.APPLIED:
            continue
        if block.state is not State.ABSENT:
            content = remove_block(content, block)
        after[state.path] = insert_block(content, state.hook) if insert else content
        if insert:
            new = after[state.path]
            assert remove_block(new, find_block(new, state.hook)) == content, state.hook.name
    return [Change(p, before[p], after[p]) for p in after if after[p] != before[p]]


def apply(path: Path, force: bool = False, allow_installed_core: bool = False) -> list[Path]:
    """Apply all hooks to a checkout, or none. Returns the files that changed."""
    return _locked_run(path, lambda tree: plan_apply(tree, force, allow_installed_core))


def revert(path: Path, force: bool = False) -> list[Path]:
    """Remove all hooks from a checkout, to the byte. Returns the files that changed."""
    return _locked_run(path, lambda tree: plan_revert(tree, force))


def _locked_run(path: Path, plan: Callable[[Checkout], list[Change]]) -> list[Path]:
    """Plan, and if there is something to do, plan again under the lock and do it."""
    checkout = inspect_checkout(path)
    if not plan(checkout):
        return []
    with locked(checkout.root):
        changes = plan(inspect_checkout(path))
        try:
            replace_all(changes)
        except OSError as error:
            raise PatchError(
                f"{error}. Nothing was changed. Check free space and permissions, then run this "
                f"again."
            ) from error
    return [change.path for change in changes]


def _lines(content: bytes) -> list[bytes]:
    """Lines the way diff sees them: only a line feed ends one."""
    parts = content.split(b"\n")
    return [part + b"\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


def unified_diff(root: Path, changes: Sequence[Change]) -> bytes:
    """The changes as a patch that `git apply` takes."""
    out: list[bytes] = []
    for change in changes:
        name = change.path.relative_to(root).as_posix()
        old, new = _lines(change.before), _lines(change.after)
        for line in difflib.diff_bytes(
            difflib.unified_diff, old, new, f"a/{name}".encode(), f"b/{name}".encode()
        ):
            out.append(line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n")
    return b"".join(out)
