"""Rows of a patch catalog, and the check of one row against an installed package.

A row says what is to be changed, by what, in which versions, and why. `check_row` imports the
target's module and compares; it changes nothing. Applying rows is the work of `registry`.
"""

import enum
import functools
import importlib
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from megatron_ntp.errors import StartError
from megatron_ntp.patching.versions import in_range

MARKER = "__ntp_patch__"


class PatchError(StartError):
    """A patch cannot be applied or undone. Nothing was changed."""


@dataclass(frozen=True)
class Expected:
    """Parameters that a target has in a range of versions.

    Attributes:
        params: names that the signature must contain; `self` and `cls` may be left out.
        versions: the range this holds for, for example ">=0.18"; empty for every version.
        exact: the signature has these names, in this order, and no other (without `self`, `cls`).
    """

    params: tuple[str, ...]
    versions: str = ""
    exact: bool = False


@dataclass(frozen=True)
class Patch:
    """One change to an attribute of an installed package.

    Attributes:
        name: short unique name, used in messages and as the marker on wrappers.
        target: "package.module:function", "package.module:Class" or "package.module:Class.attr".
        replacement: a callable, or "module:attr", imported only when the patch is applied.
        reason: why the change is needed, one sentence for the catalog.
        kind: "wrap" calls replacement(original, *args, **kwargs); "replace" binds the replacement.
        versions: range of the package's versions in which the row was tested.
        signature: what the target's parameters must be. With entries, one must cover the version.
        optional: the target is not needed outside `versions`. Without this flag a version outside
            the range fails the check, since a change that is left out would go unnoticed.
        scope: "everywhere" rebinds every alias of the object, "target" only the named attribute.
            "auto" is "everywhere" for functions and classes that the package itself defines.
    """

    name: str
    target: str
    replacement: Callable[..., Any] | str
    reason: str
    kind: Literal["wrap", "replace"] = "wrap"
    versions: str = ""
    signature: tuple[Expected, ...] = ()
    optional: bool = False
    scope: Literal["auto", "everywhere", "target"] = "auto"

    def __post_init__(self) -> None:
        module, colon, path = self.target.partition(":")
        if not (colon and module and path) or path.count(".") > 1:
            raise ValueError(
                f"patch {self.name!r}: target {self.target!r} is not 'package.module:name' "
                f"or 'package.module:Class.name'"
            )
        if self.kind not in ("wrap", "replace"):
            raise ValueError(f"patch {self.name!r}: kind {self.kind!r} is not 'wrap' or 'replace'")
        if isinstance(self.replacement, str) and self.replacement.count(":") != 1:
            raise ValueError(
                f"patch {self.name!r}: replacement {self.replacement!r} is not 'module:attr'"
            )

    @property
    def module(self) -> str:
        """The module part of the target."""
        return self.target.partition(":")[0]

    @property
    def path(self) -> tuple[str, ...]:
        """The attribute part of the target: (name,) or (class, name)."""
        return tuple(self.target.partition(":")[2].split("."))


class Status(enum.Enum):
    """What the check of a row found."""

    OK = "ok"
    MISSING = "missing"
    CHANGED = "changed"
    UNTESTED = "untested"
    NOT_NEEDED = "not needed"

    @property
    def good(self) -> bool:
        """Whether this finding lets the registry be applied."""
        return self in (Status.OK, Status.NOT_NEEDED)


@dataclass(frozen=True)
class RowStatus:
    """A row, what was found, and the detail to print beside it."""

    patch: Patch
    status: Status
    detail: str = ""


class Resolved(NamedTuple):
    """Where a target lives: its owner (module or class), its raw value, and whose it is.

    `raw` comes from the owner's dict, so static and class methods are the descriptor objects.
    `own` is False where the owner has it from a base class or a module's `__getattr__`.
    """

    owner: types.ModuleType | type
    attr: str
    raw: object
    own: bool


class _NotFoundError(Exception):
    """A part of a target's path does not exist; the text says which."""


def _lookup(owner: types.ModuleType | type, attr: str, owner_name: str) -> Resolved:
    for place in owner.__mro__ if isinstance(owner, type) else (owner,):
        if attr in vars(place):
            return Resolved(owner, attr, vars(place)[attr], own=place is owner)
    lazy = vars(owner).get("__getattr__") if isinstance(owner, types.ModuleType) else None
    if lazy is not None:
        try:
            return Resolved(owner, attr, lazy(attr), own=False)
        except AttributeError:
            pass
    raise _NotFoundError(f"{owner_name} has no {attr!r}")


def resolve(patch: Patch) -> Resolved:
    """Find the target of a row, importing its module. Raises `_NotFoundError`."""
    try:
        module = importlib.import_module(patch.module)
    except Exception as error:  # whatever a module does at import, the row cannot be applied
        raise _NotFoundError(
            f"module {patch.module} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    found = _lookup(module, patch.path[0], f"module {patch.module}")
    if len(patch.path) == 1:
        return found
    class_name = f"{patch.module}:{patch.path[0]}"
    if not isinstance(found.raw, type):
        raise _NotFoundError(f"{class_name} is not a class (found {type(found.raw).__name__})")
    return _lookup(found.raw, patch.path[1], f"class {class_name}")


def function_of(raw: object) -> object:
    """The function inside a static method, class method or property; others as they are."""
    if isinstance(raw, staticmethod | classmethod):
        return raw.__func__
    if isinstance(raw, property):
        return raw.fget
    if isinstance(raw, functools.cached_property):
        return raw.func
    return raw


def parameters_of(raw: object) -> tuple[str, ...] | None:
    """Names of a target's parameters without `self` and `cls`, or None if they cannot be read."""
    target = function_of(raw)
    if isinstance(target, type):
        target = target.__init__  # type: ignore[misc]
    try:
        names = tuple(inspect.signature(target).parameters)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return names[1:] if names and names[0] in ("self", "cls") else names


def _signature_fault(patch: Patch, raw: object, version: str) -> str:
    """What differs from the row's expectation, or an empty string."""
    return signature_fault(patch, parameters_of(raw), version) if patch.signature else ""


def signature_fault(patch: Patch, found: tuple[str, ...] | None, version: str) -> str:
    """What differs between found parameters and those expected in a version, or an empty string."""
    if not patch.signature:
        return ""
    expected = next((e for e in patch.signature if in_range(version, e.versions)), None)
    if expected is None:
        return f"the row has no expected signature for version {version}"
    if found is None:
        return f"expected parameters ({', '.join(expected.params)}), found no readable signature"
    wanted = tuple(name for name in expected.params if name not in ("self", "cls"))
    fits = found == wanted if expected.exact else set(wanted) <= set(found)
    if fits:
        return ""
    rule = "exactly" if expected.exact else "at least"
    return f"expected {rule} ({', '.join(wanted)}), found ({', '.join(found)})"


def check_row(patch: Patch, version: str) -> tuple[RowStatus, Resolved | None]:
    """Check one row against the installed package. Imports the target's module, changes nothing."""
    if not in_range(version, patch.versions):
        if patch.optional:
            return RowStatus(patch, Status.NOT_NEEDED), None
        detail = f"version {version} is outside the tested range {patch.versions}"
        return RowStatus(patch, Status.UNTESTED, detail), None
    try:
        found = resolve(patch)
    except _NotFoundError as error:
        return RowStatus(patch, Status.MISSING, str(error)), None
    fault = _signature_fault(patch, found.raw, version)
    if not fault and patch.kind == "wrap":
        if isinstance(found.raw, type):
            fault = "the target is a class: a class can be replaced, but not wrapped"
        elif not callable(function_of(found.raw)):
            fault = f"the target is a {type(found.raw).__name__}, which cannot be called"
    if fault:
        return RowStatus(patch, Status.CHANGED, fault), None
    return RowStatus(patch, Status.OK), found


def load_replacement(patch: Patch) -> Any:
    """The replacement of a row, imported now if the row names it as "module:attr"."""
    if not isinstance(patch.replacement, str):
        return patch.replacement
    module, _, path = patch.replacement.partition(":")
    try:
        value: Any = importlib.import_module(module)
        for part in path.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError) as error:
        raise PatchError(
            f"patch {patch.name!r}: replacement {patch.replacement!r} cannot be loaded: {error}. "
            f"Nothing was changed. The installation of the plugin is incomplete: reinstall it."
        ) from error
    return value


def _wrapper(patch: Patch, original: Any, replacement: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    setattr(wrapper, MARKER, patch.name)
    return wrapper


def build_new(patch: Patch, found: Resolved, raw: object, replacement: Any) -> object:
    """The object to bind in place of `raw`, of the same descriptor kind as `raw`."""
    function = function_of(raw)
    new = _wrapper(patch, function, replacement) if patch.kind == "wrap" else replacement
    if isinstance(new, staticmethod | classmethod | property | functools.cached_property):
        return new
    if isinstance(raw, staticmethod | classmethod):
        return type(raw)(new)
    if isinstance(raw, property):
        return property(new, raw.fset, raw.fdel, raw.__doc__)
    if isinstance(raw, functools.cached_property) and isinstance(found.owner, type):
        cached = functools.cached_property(new)
        cached.__set_name__(found.owner, found.attr)
        return cached
    if isinstance(found.owner, type) and callable(raw) and not hasattr(type(raw), "__get__"):
        # A callable object in a class is not bound to the instance; a plain function would be.
        return staticmethod(new)
    return new
