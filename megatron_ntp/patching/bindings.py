"""Find, by identity, every name that an object is bound to in the loaded modules.

`from x import f as g` makes a second binding that setting `x.f` leaves alone. A scan walks the
namespaces of all loaded modules and the own dicts of all live classes, without ever triggering a
lazy import or a descriptor. Objects inside containers, closures and default arguments are not
bindings and are not found.
"""

import functools
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import compress
from typing import Any, NamedTuple

MISSING = object()

Owner = types.ModuleType | type

# Python itself adds these to a namespace; they say nothing about a patch.
_VOLATILE = frozenset({"__warningregistry__", "__annotations_cache__", "__annotate__"})


@dataclass(frozen=True)
class Site:
    """One name in a module or in a class's own dict."""

    owner: Owner
    attr: str

    def __str__(self) -> str:
        if isinstance(self.owner, type):
            return f"{self.module}:{self.owner.__qualname__}.{self.attr}"
        return f"{self.module}:{self.attr}"

    @property
    def module(self) -> str:
        """The module that the site is in."""
        if isinstance(self.owner, type):
            return str(namespace(self.owner).get("__module__", "?"))
        return module_name(self.owner)

    @property
    def key(self) -> tuple[int, str]:
        """Identity of the site, for sets and dicts."""
        return id(self.owner), self.attr

    def get(self) -> Any:
        """The raw value bound here, or MISSING. Never runs a descriptor or a `__getattr__`."""
        return namespace(self.owner).get(self.attr, MISSING)

    def set(self, value: object) -> None:
        """Bind `value` here; MISSING removes the name. Metaclass hooks are bypassed."""
        if isinstance(self.owner, type):
            if value is MISSING:
                type.__delattr__(self.owner, self.attr)
            else:
                type.__setattr__(self.owner, self.attr, value)
        elif value is MISSING:
            namespace(self.owner).pop(self.attr, None)  # type: ignore[attr-defined]
        else:
            namespace(self.owner)[self.attr] = value  # type: ignore[index]


class Found(NamedTuple):
    """A site and the wanted object that its value is, or contains as a method does."""

    site: Site
    wanted: object


def namespace(owner: Owner) -> Mapping[str, Any]:
    """The own dict of a module or class, read so that a lazy module stays unloaded."""
    kind = type if isinstance(owner, type) else types.ModuleType
    own: Mapping[str, Any] = kind.__getattribute__(owner, "__dict__")
    return own


def module_name(module: types.ModuleType) -> str:
    """The name of a module, read so that a lazy module stays unloaded."""
    return str(namespace(module).get("__name__", "?"))


def inside(name: object, packages: Iterable[str]) -> bool:
    """Whether the dotted `name` is one of `packages` or below one."""
    return isinstance(name, str) and any(
        name == package or name.startswith(package + ".") for package in packages
    )


def loaded_modules() -> list[tuple[str, types.ModuleType]]:
    """Every module in sys.modules once, under its first name."""
    unique: dict[int, tuple[str, types.ModuleType]] = {}
    for name, module in list(sys.modules.items()):
        if isinstance(module, types.ModuleType):
            unique.setdefault(id(module), (name, module))
    return list(unique.values())


def live_classes() -> list[type]:
    """Every class alive in this process, those defined inside functions included."""
    seen: dict[int, type] = {}
    stack: list[type] = [object]
    while stack:
        cls = stack.pop()
        if id(cls) not in seen:
            seen[id(cls)] = cls
            stack.extend(type.__subclasses__(cls))
    return list(seen.values())


def _owners(exclude: tuple[str, ...]) -> Iterator[Owner]:
    for name, module in loaded_modules():
        if not inside(name, exclude):
            yield module
    for cls in live_classes():
        if not inside(namespace(cls).get("__module__"), exclude):
            yield cls


def content_of(value: object) -> object:
    """The callable that a bound method, descriptor or partial was made from, or None."""
    kind = type(value)
    if kind in (types.MethodType, staticmethod, classmethod):
        return value.__func__  # type: ignore[attr-defined]
    if kind is property:
        return value.fget  # type: ignore[attr-defined]
    if kind in (functools.partial, functools.cached_property):
        return value.func  # type: ignore[attr-defined]
    return None


_WITH_CONTENT = frozenset(
    {
        types.MethodType,
        staticmethod,
        classmethod,
        property,
        functools.partial,
        functools.cached_property,
    }
)


def rebuilt(value: Any, content: Any, site: Site) -> object:
    """A bound method, descriptor or partial like `value`, made from another callable."""
    kind = type(value)
    if kind is types.MethodType:
        return types.MethodType(content, value.__self__)
    if kind is property:
        return property(content, value.fset, value.fdel, value.__doc__)
    if kind is functools.partial:
        return functools.partial(content, *value.args, **value.keywords)
    made = kind(content)
    if kind is functools.cached_property:
        made.__set_name__(site.owner, site.attr)
    return made


def scan(wanted: Iterable[object], exclude: tuple[str, ...] = ()) -> list[Found]:
    """Every site whose value is one of `wanted`, or is a method, descriptor or partial of one.

    Modules and classes of the packages in `exclude` are passed over.
    """
    by_id = {id(obj): obj for obj in wanted}
    ids = frozenset(by_id)
    kinds = _WITH_CONTENT.union(map(type, by_id.values()))
    found: list[Found] = []
    for owner in _owners(exclude):
        own = namespace(owner)
        values = list(own.values())
        # Half a million values: nearly all owners are dismissed here, where loops run in C.
        near = list(compress(values, map(kinds.__contains__, map(type, values))))
        contents = [content_of(value) for value in near if type(value) in _WITH_CONTENT]
        if ids.isdisjoint(map(id, near)) and ids.isdisjoint(map(id, contents)):
            continue
        for attr, value in zip(list(own), values, strict=True):
            if id(value) in by_id:
                found.append(Found(Site(owner, attr), value))
            elif type(value) in _WITH_CONTENT:
                content = content_of(value)
                if id(content) in by_id:
                    found.append(Found(Site(owner, attr), content))
    return found


def identity_snapshot(package: str) -> dict[str, object]:
    """Name -> object for every attribute of a package's loaded modules and of their classes.

    The code objects of functions are included. The snapshot holds the objects, so identities stay
    comparable.
    """
    snapshot: dict[str, object] = {}
    owners: list[Owner] = [m for name, m in loaded_modules() if inside(name, (package,))]
    owners += [c for c in live_classes() if inside(namespace(c).get("__module__"), (package,))]
    for owner in owners:
        for attr, value in list(namespace(owner).items()):
            if attr in _VOLATILE:
                continue
            name = str(Site(owner, attr))
            while snapshot.get(name, value) is not value:  # classes may share a qualified name
                name += "'"
            snapshot[name] = value
            if isinstance(value, types.FunctionType):
                snapshot[name + ".__code__"] = value.__code__
    return snapshot


class Difference(NamedTuple):
    """A name whose object differs between two snapshots."""

    name: str
    change: str  # "added", "removed" or "changed"


def diff_snapshots(
    before: dict[str, object], after: dict[str, object], new_modules: bool = False
) -> list[Difference]:
    """What differs between two snapshots of one process.

    Importing further modules is no change: names in modules that `before` does not know, and the
    submodules that appear in their parent, are left out unless `new_modules` is set.
    """
    known = {name.partition(":")[0] for name in before}
    found = [Difference(name, "removed") for name in before if name not in after]
    for name, value in after.items():
        if name in before:
            if before[name] is not value:
                found.append(Difference(name, "changed"))
        elif new_modules or (
            name.partition(":")[0] in known and not isinstance(value, types.ModuleType)
        ):
            found.append(Difference(name, "added"))
    return sorted(found)
