"""Reads pickles without running anything that they name.

A checkpoint's `.metadata`, and the small archives that `torch.save` writes, are pickles: to load
one in the usual way is to call whatever functions it names. Here every global that a pickle names
becomes an inert stand-in, which keeps what it was given. So a hostile or torn file can do no more
than be refused, and neither torch nor Megatron is imported.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Iterator
from typing import IO, Any, ClassVar, cast

from megatron_ntp.errors import DamagedFileError

Stream = IO[bytes] | io.RawIOBase

_DATA = "/data.pkl"


class Inert:
    """Stands for an instance of a class that a pickle names.

    Attributes:
        kind: the name, as `module.name`.
        args: what it was made of.
        fields: its attributes.
        items: its members, for what is filled like a list or a dict.
    """

    __slots__ = ("args", "fields", "items")  # there may be a million of them

    kind: ClassVar[str] = ""

    args: tuple[Any, ...]
    fields: dict[str, Any]
    items: list[Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Inert:
        self = super().__new__(cls)
        self.args, self.fields, self.items = args, dict(kwargs), []
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes anything; `__new__` has kept it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Inert:
        return Inert(*args, **kwargs)

    def __setstate__(self, state: Any) -> None:
        parts = state if isinstance(state, tuple) else (state,)
        for part in parts:
            if isinstance(part, dict):
                self.fields.update(part)
        if not isinstance(state, dict):
            self.fields["__state__"] = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def append(self, item: Any) -> None:
        self.items.append(item)

    def extend(self, items: Any) -> None:
        self.items.extend(items)

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute that the pickle gave it."""
        return self.fields.get(name, default)


class Storage(Inert):
    """What stands for the numbers of a tensor: `args` is what torch wrote about them."""

    __slots__ = ()


def kind_of(value: Any) -> str:
    """`module.name` of a stand-in, or of the class that it stands for; else an empty string."""
    return str(getattr(value, "kind", ""))


def _empty_dict(*unused: Any) -> dict[Any, Any]:
    return {}


# What is harmless and wanted as itself. None of them allocates more than it is given.
_PLAIN: dict[tuple[str, str], Any] = {
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("collections", "OrderedDict"): _empty_dict,
    ("collections", "defaultdict"): _empty_dict,
    ("torch", "Size"): tuple,
}


class _InertUnpickler(pickle.Unpickler):
    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__(stream)
        self._classes: dict[tuple[str, str], type[Inert]] = {}

    def find_class(self, module: str, name: str) -> Any:
        plain = _PLAIN.get((module, name))
        if plain is not None:
            return plain
        known = self._classes.get((module, name))
        if known is None:
            known = type("Inert", (Inert,), {"kind": f"{module}.{name}", "__slots__": ()})
            self._classes[module, name] = known
        return known

    def persistent_load(self, pid: Any) -> Storage:
        return Storage(*pid) if isinstance(pid, tuple) else Storage(pid)


def load_pickle(stream: IO[bytes], name: str) -> Any:
    """The object in a pickle, with stand-ins for all that is not built in.

    Raises:
        DamagedFileError: it is not a whole pickle. `name` says in the message what was read.
    """
    try:
        return _InertUnpickler(stream).load()
    except OSError:
        raise
    except Exception as error:
        raise DamagedFileError(f"{name} is not a whole pickle ({_told(error)})") from error


def load_archive(stream: Stream, name: str) -> Any:
    """The object in an archive of `torch.save`, with stand-ins; `load_pickle` otherwise."""
    with open_archive(stream, name) as archive:
        member = pickle_name(archive, name)
        try:
            with archive.open(member) as data:
                return load_pickle(data, name)
        except (zipfile.BadZipFile, EOFError) as error:
            raise DamagedFileError(f"{name} is damaged ({_told(error)})") from error


def open_archive(stream: Stream, name: str) -> zipfile.ZipFile:
    """The zip archive that `torch.save` writes.

    Raises:
        DamagedFileError: it is not a whole archive.
    """
    try:
        return zipfile.ZipFile(cast(IO[bytes], stream))
    except OSError:
        raise
    except Exception as error:
        raise DamagedFileError(f"{name} is not a whole torch archive ({_told(error)})") from error


def pickle_name(archive: zipfile.ZipFile, name: str) -> str:
    """Name of the member that describes what was saved."""
    for member in archive.namelist():
        if member.endswith(_DATA):
            return member
    raise DamagedFileError(f"{name} is no archive of torch.save: it has no {_DATA[1:]}")


def bad_members(stream: Stream, name: str) -> Iterator[str]:
    """Reads an archive to its last byte; yields what is wrong with it."""
    try:
        with open_archive(stream, name) as archive:
            member = archive.testzip()
        if member is not None:
            yield f"{name}: {member} does not match its CRC-32"
    except (DamagedFileError, zipfile.BadZipFile, EOFError, NotImplementedError) as error:
        yield f"{name} is damaged ({_told(error)})"


def _told(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
