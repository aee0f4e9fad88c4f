"""Apply a catalog of patches to an installed package: all of it or nothing, and undo it exactly.

The order is fixed: check every row, load every replacement, scan once for all binding sites, and
only then change anything. Since one unpatched name in one rank corrupts training silently, a row
that does not fit stops the run, and `verify` looks again once the model is built.

What the words mean here:
- site: a name in a module namespace or in a class's own dict (`bindings.Site`);
- alias: a further site that holds the same object, wherever it was imported to;
- late alias: a site that came up after apply and therefore holds our object.

Single-threaded: nothing else may import or patch while apply or undo runs.
"""

import sys
import types
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from megatron_ntp.patching.bindings import (
    Site,
    content_of,
    inside,
    namespace,
    rebuilt,
    scan,
)
from megatron_ntp.patching.rows import (
    MARKER,
    Patch,
    PatchError,
    Resolved,
    RowStatus,
    build_new,
    check_row,
    function_of,
    load_replacement,
    resolve,
)


class StaleSite(NamedTuple):
    """A site that does not lead to our replacement, and why."""

    site: str
    patch: str
    why: str


@dataclass(frozen=True)
class _Change:
    """One binding that was changed: the value that was there (or MISSING), and ours."""

    site: Site
    before: object
    after: object


@dataclass(frozen=True)
class _Applied:
    """One applied row: the raw object it found and the one it made."""

    patch: Patch
    primary: Site
    original: object
    new: object
    everywhere: bool


class _Plan(NamedTuple):
    """A checked row with its target, its replacement and the aliases to change with it."""

    patch: Patch
    found: Resolved
    replacement: Any
    everywhere: bool
    aliases: list[Site]


class Registry:
    """The patches of one catalog for one package, applied and undone together.

    Two registries may stack on one target, but not with a row of the same name: applying one
    catalog through two registries is refused.

    Args:
        package: the package the rows belong to. Objects it does not define are only changed at
            the named target, never at their aliases (see `Patch.scope`).
        version: its installed version.
        rows: the catalog, in the order of application. Where two rows have the same target, the
            later one is called first.
        exclude: packages whose modules are never scanned: they keep whatever they have bound.
    """

    def __init__(
        self,
        package: str,
        version: str,
        rows: Iterable[Patch],
        exclude: tuple[str, ...] = ("megatron_ntp",),
    ) -> None:
        self.package = package
        self.version = version
        self.rows = tuple(rows)
        self.exclude = exclude
        self._changes: list[_Change] = []
        self._applied: list[_Applied] = []
        self._foreign: set[tuple[int, str]] = set()
        self._active = False
        names = [row.name for row in self.rows]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"patch names must be unique, used twice: {', '.join(twice)}")

    @property
    def applied(self) -> bool:
        """Whether the patches are in place."""
        return self._active

    @property
    def sites(self) -> tuple[str, ...]:
        """Every binding that apply changed, in the order of the changes."""
        return tuple(str(change.site) for change in self._changes)

    def check(self) -> list[RowStatus]:
        """Check every row against the package. Imports the targets' modules, changes nothing.

        While applied, the check sees the patched package: wrappers show the original signature.
        """
        return [check_row(row, self.version)[0] for row in self.rows]

    def apply(self) -> Self:
        """Apply every row that this version needs, or none.

        Calling it again is a no-op and is not counted: one undo restores everything.

        Raises:
            PatchError: a row does not fit the package or a replacement cannot be loaded.
            Whatever fails half-way is raised again after every change was taken back.
        """
        if self._active:
            return self
        plans = self._plans()
        try:
            for plan in plans:
                self._apply_row(plan)
        except BaseException:
            for change in reversed(self._changes):
                change.site.set(change.before)
            self._forget()
            raise
        self._active = True
        return self

    def undo(self) -> None:
        """Restore every binding to the very object it had, and late aliases to the original.

        Registries are undone last in, first out. If a site no longer holds our object, because
        somebody wrapped it after us or the module was reloaded, nothing is changed.

        Raises:
            PatchError: names the sites that somebody else changed since.
        """
        if not self._active:
            return
        latest = {change.site.key: change for change in self._changes}
        first = {change.site.key: change for change in reversed(self._changes)}
        foreign = [
            change.site
            for key, change in latest.items()
            if change.site.get() is not change.after and change.site.get() is not first[key].before
        ]
        if foreign:
            raise PatchError(
                f"cannot undo the patches of {self.package}: changed by somebody else since: "
                f"{', '.join(map(str, foreign))}. Nothing was changed. Undo the later wrapper "
                f"first, then call undo again."
            )
        for site, value in self._late_aliases(set(latest)):
            site.set(value)
        for change in reversed(self._changes):
            change.site.set(change.before)
        self._forget()

    def verify(self) -> list[StaleSite]:
        """Look again for sites that lead past our replacements; an empty list is good.

        Call it after the model is built, since modules may have been imported in between.
        """
        if not self._active:
            return [StaleSite(self.package, "all", "the registry is not applied")]
        stale: list[StaleSite] = []
        for row in self._applied:
            if not _leads_to(row.primary.get(), row.new):
                why = "the target was overwritten after the patches were applied"
                stale.append(StaleSite(str(row.primary), row.patch.name, why))
        suspects: dict[int, tuple[_Applied, object, str]] = {}
        for row in (row for row in self._applied if row.everywhere):
            for obj in (row.original, function_of(row.original)):
                suspects[id(obj)] = (row, obj, "still holds the original")
            for obj in _bypassing(row.original):
                suspects[id(obj)] = (row, obj, "holds what an earlier foreign wrapper has wrapped")
        for site, obj in scan((obj for _, obj, _ in suspects.values()), self.exclude):
            row, _, why = suspects[id(obj)]
            stale.append(StaleSite(str(site), row.patch.name, why))
        return stale

    def __enter__(self) -> Self:
        return self.apply()

    def __exit__(self, *exc: object) -> None:
        self.undo()

    def _plans(self) -> list[_Plan]:
        """Check all rows and find all sites. Raises PatchError before anything is changed."""
        checked = [check_row(row, self.version) for row in self.rows]
        bad = [status for status, _ in checked if not status.status.good]
        if bad:
            raise PatchError(_refusal(self.package, self.version, bad))
        needed = [(status.patch, found) for status, found in checked if found is not None]
        plans = [
            _Plan(patch, found, load_replacement(patch), self._everywhere(patch, found), [])
            for patch, found in needed
        ]
        _refuse_second_layer(plans)
        wanted: dict[int, list[_Plan]] = {}
        objects = [plan.replacement for plan in plans if callable(plan.replacement)]
        for plan in plans:
            if plan.everywhere:
                raw = plan.found.raw
                for part in {id(raw): raw, id(function_of(raw)): function_of(raw)}.values():
                    wanted.setdefault(id(part), []).append(plan)
                    objects.append(part)
        for site, obj in scan(objects, self.exclude):
            if any(obj is plan.replacement for plan in plans):
                self._foreign.add(site.key)
            for plan in wanted.get(id(obj), ()):
                if site.key != (id(plan.found.owner), plan.found.attr):
                    plan.aliases.append(site)
        return plans

    def _everywhere(self, patch: Patch, found: Resolved) -> bool:
        inherited = isinstance(found.owner, type) and not found.own
        if inherited or patch.scope == "target":
            return False  # the base class keeps its own
        obj = function_of(found.raw)
        if not callable(obj):
            return False
        return patch.scope == "everywhere" or inside(
            getattr(obj, "__module__", None), (self.package,)
        )

    def _apply_row(self, plan: _Plan) -> None:
        # Resolved again: an earlier row may have changed the same target or its base class.
        raw = resolve(plan.patch).raw
        new = build_new(plan.patch, plan.found, raw, plan.replacement)
        primary = Site(plan.found.owner, plan.found.attr)
        self._bind(primary, new)
        for site in plan.aliases:
            self._bind(site, _translated(site, raw, new))
        self._applied.append(_Applied(plan.patch, primary, plan.found.raw, new, plan.everywhere))

    def _bind(self, site: Site, value: object) -> None:
        self._changes.append(_Change(site, site.get(), value))
        site.set(value)

    def _late_aliases(self, known: set[tuple[int, str]]) -> list[tuple[Site, object]]:
        """Sites that took our objects after apply, with the value that undoes each.

        A wrapper exists only here, so every site that holds it is one. A replacement also has a
        life of its own: only names inside the package, or the target's own name, are taken.
        """
        rows: dict[int, tuple[_Applied, object]] = {}
        ours: list[object] = []
        for row in self._applied:
            for old, new in (
                (row.original, row.new),
                (function_of(row.original), function_of(row.new)),
            ):
                if callable(new) or isinstance(new, property):
                    rows[id(new)] = (row, old)
                    ours.append(new)
        late: list[tuple[Site, object]] = []
        for site, obj in scan(ours, self.exclude):
            row, old = rows[id(obj)]
            if site.key in known or site.key in self._foreign:
                continue
            if (
                row.patch.kind == "wrap"
                or site.attr == row.primary.attr
                or inside(site.module, (self.package,))
            ):
                late.append((site, _translated(site, obj, old)))
        return late

    def _forget(self) -> None:
        self._changes, self._applied, self._active = [], [], False
        self._foreign = set()


def _translated(site: Site, old: object, new: object) -> object:
    """The value for `site`, which holds `old` or a method, descriptor or partial of it."""
    value = site.get()
    inner = function_of(new)
    if value is old:
        # A descriptor belongs in a class; a module's alias is called directly.
        return new if isinstance(site.owner, type) or not callable(old) else inner
    if value is function_of(old):
        return inner
    return rebuilt(value, inner, site)


def _carries(plan: _Plan) -> bool:
    """Whether the target already leads through this very patch, applied by somebody else."""
    value: Any = function_of(plan.found.raw)
    for _ in range(100):
        if value is plan.replacement or getattr(value, MARKER, None) == plan.patch.name:
            return True
        value = getattr(value, "__wrapped__", None)
        if value is None:
            break
    return False


def _refuse_second_layer(plans: list[_Plan]) -> None:
    twice = [f"{p.patch.name} ({p.patch.target})" for p in plans if _carries(p)]
    if twice:
        raise PatchError(
            f"another registry has already applied the patches {', '.join(twice)}, and a second "
            f"layer would act twice. Nothing was changed. Undo the other registry first; if a "
            f"start-up hook runs while a registry is being applied, let it return at once."
        )


def _leads_to(value: object, new: object) -> bool:
    """Whether `value` is our object, or wraps it the way functools.wraps records."""
    for _ in range(100):
        if value is new or value is function_of(new):
            return True
        value = getattr(value, "__wrapped__", None) or content_of(value)
        if value is None:
            break
    return False


def _bypassing(original: object) -> list[object]:
    """What somebody's wrapper around our target has wrapped, where it took over its name.

    A name that still holds such an object was imported before that wrapper was set, and calls
    through it reach neither that wrapper nor ours. An inner function that is still bound to the
    name it was defined under (`f = jit(_f)`) is a function of its own and is left out.
    """
    inner: list[object] = []
    obj = getattr(function_of(original), "__wrapped__", None)
    while obj is not None and len(inner) < 100:
        holder: Any = sys.modules.get(getattr(obj, "__module__", None) or "")
        for part in str(getattr(obj, "__qualname__", "")).split("."):
            known = isinstance(holder, type | types.ModuleType)
            holder = namespace(holder).get(part) if known else None
        if function_of(holder) is not obj:
            inner.append(obj)
        obj = getattr(obj, "__wrapped__", None)
    return inner


def _refusal(package: str, version: str, bad: list[RowStatus]) -> str:
    lines = [
        f"{package} {version} does not fit the patches, so nothing was changed "
        f"({len(bad)} of the rows):"
    ]
    for row in bad:
        tested = row.patch.versions or "every version"
        lines.append(
            f"  {row.patch.target} [{row.patch.name}] is {row.status.value}: {row.detail}. "
            f"Tested with {tested}."
        )
    lines.append(
        "Install a version inside the tested range, or update megatron-ntp. "
        "`megatron-ntp patches` prints the whole catalog."
    )
    return "\n".join(lines)
