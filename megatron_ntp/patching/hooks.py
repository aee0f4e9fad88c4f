"""Insertions into files of a checkout, as data, and what they do to the bytes of one file.

An inserted block stands between two marker lines that name its hook. The first marker also holds a
digest of the lines between, so that a block can be told from one that somebody edited, and can be
removed by any later version. That is all the state there is: it moves with the file, through
commits, copies and worktrees, and revert needs nothing else.

Everything here maps bytes to bytes. Line ends, a byte order mark and everything outside the block
are left as they are.
"""

import enum
import hashlib
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from packaging.specifiers import SpecifierSet

from megatron_ntp.patching.rows import PatchError

HOOKS_DIR = Path(__file__).resolve().parents[1] / "patches"

_BEGIN = re.compile(rb"# >>> megatron-ntp ([a-z0-9-]+) ([0-9a-f]{12}) >>>\s*")
_END = re.compile(rb"# <<< megatron-ntp ([a-z0-9-]+) <<<\s*")


@dataclass(frozen=True)
class Hook:
    """One insertion, as described by a file in patches/.

    Attributes:
        name: lower case letters, digits and dashes.
        file: the file to change, relative to the checkout.
        versions: megatron-core versions in which the anchor was tested.
        why: what the hook is for.
        drop_when: when it is no longer needed.
        anchor: pattern of a line that must occur exactly once.
        place: "after" or "before" the anchor's line, or at the "end" of the file.
        lines: what to insert, ASCII, without line ends.
    """

    name: str
    file: str
    versions: str
    why: str
    drop_when: str
    anchor: str
    place: str
    lines: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Twelve hex digits that tell these lines from any others."""
        return _digest([line.encode("ascii") for line in self.lines])

    def block(self) -> list[bytes]:
        """The lines to insert, markers included, without line ends."""
        begin = f"# >>> megatron-ntp {self.name} {self.digest} >>>"
        end = f"# <<< megatron-ntp {self.name} <<<"
        return [line.encode("ascii") for line in (begin, *self.lines, end)]


class State(enum.Enum):
    """What was found of one hook in one file."""

    ABSENT = "not applied"
    APPLIED = "applied"
    OUTDATED = "applied by another version of megatron-ntp"
    EDITED = "edited by hand between the markers"
    BROKEN = "broken"


class Block(NamedTuple):
    """A hook's block in a file: its state, its lines (first, one past the last), and a detail."""

    state: State
    first: int = -1
    stop: int = -1
    detail: str = ""


def _digest(lines: list[bytes]) -> str:
    return hashlib.sha256(b"\n".join(lines)).hexdigest()[:12]


def _section(data: dict[str, Any], keys: tuple[str, ...], path: Path) -> dict[str, Any]:
    if sorted(data) != sorted(keys):
        raise PatchError(
            f"{path}: expected the keys {', '.join(sorted(keys))}, found {', '.join(sorted(data))}"
        )
    return data


def load_hook(path: Path) -> Hook:
    """Read one file of patches/. Unknown and absent keys are errors."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PatchError(f"cannot read the hook {path}: {error}") from error
    keys = ("name", "file", "versions", "why", "drop_when", "anchor", "insert")
    top = _section(data, keys, path)
    anchor = _section(top["anchor"], ("pattern", "place"), path)
    insert = _section(top["insert"], ("lines",), path)
    if anchor["place"] not in ("after", "before", "end"):
        raise PatchError(f"{path}: place {anchor['place']!r} is not 'after', 'before' or 'end'")
    SpecifierSet(top["versions"])
    return Hook(
        name=top["name"],
        file=top["file"],
        versions=top["versions"],
        why=" ".join(top["why"].split()),
        drop_when=" ".join(top["drop_when"].split()),
        anchor=anchor["pattern"],
        place=anchor["place"],
        lines=tuple(insert["lines"].strip("\n").split("\n")),
    )


def load_hooks(folder: Path = HOOKS_DIR) -> tuple[Hook, ...]:
    """All hooks of a folder, by file name."""
    hooks = tuple(load_hook(path) for path in sorted(folder.glob("*.toml")))
    if not hooks:
        raise PatchError(f"no hooks in {folder}: the installation is incomplete, reinstall it")
    return hooks


def find_block(content: bytes, hook: Hook) -> Block:
    """Find the block of a hook in the content of its file."""
    lines = content.splitlines()
    begins = [i for i, line in enumerate(lines) if _marks(_BEGIN, line, hook.name)]
    ends = [i for i, line in enumerate(lines) if _marks(_END, line, hook.name)]
    if not begins and not ends:
        return Block(State.ABSENT)
    if len(begins) != 1 or len(ends) != 1 or ends[0] < begins[0]:
        where = ", ".join(str(i + 1) for i in sorted(begins + ends))
        detail = (
            f"{len(begins)} opening and {len(ends)} closing markers of {hook.name} (line {where}), "
            f"expected one pair: a merge or an edit left half of the block. Delete the lines that "
            f"begin with '# >>> megatron-ntp' up to '# <<< megatron-ntp', then run this again"
        )
        return Block(State.BROKEN, detail=detail)
    first, stop = begins[0], ends[0] + 1
    inner = [line.rstrip() for line in lines[first + 1 : stop - 1]]
    marked = _BEGIN.fullmatch(lines[first])
    assert marked is not None
    recorded = marked.group(2).decode()
    if _digest(inner) != recorded:
        return Block(State.EDITED, first, stop)
    return Block(State.APPLIED if recorded == hook.digest else State.OUTDATED, first, stop)


def _marks(pattern: re.Pattern[bytes], line: bytes, name: str) -> bool:
    match = pattern.fullmatch(line)
    return match is not None and match.group(1) == name.encode()


def find_anchor(content: bytes, hook: Hook) -> int:
    """Index of the line that the hook anchors to. Raises PatchError unless there is exactly one."""
    pattern = re.compile(hook.anchor.encode())
    hits = [i for i, line in enumerate(content.splitlines()) if pattern.search(line)]
    if len(hits) != 1:
        where = f" (lines {', '.join(str(i + 1) for i in hits)})" if hits else ""
        raise PatchError(
            f"{hook.file}: the anchor of {hook.name} was found {len(hits)} times{where}, expected "
            f"once: {hook.anchor}. This file is not the one the hook was written for. Start with "
            f"`python -m megatron_ntp run SCRIPT.py ...` instead, which needs no patch."
        )
    return hits[0]


def _eol(line: bytes) -> bytes:
    """The line end that a line of `splitlines(keepends=True)` has, empty if none."""
    return next((eol for eol in (b"\r\n", b"\n", b"\r") if line.endswith(eol)), b"")


def insert_block(content: bytes, hook: Hook) -> bytes:
    """The content with the hook's block inserted; a block that is there must be removed first."""
    anchor = find_anchor(content, hook)
    lines = content.splitlines(keepends=True)
    at = {"before": anchor, "after": anchor + 1, "end": len(lines)}[hook.place]
    eol = _eol(lines[anchor]) or (b"\r\n" if b"\r\n" in content else b"\n")
    block = [line + eol for line in hook.block()]
    if at == len(lines) and not _eol(lines[-1]):
        # The file stays without a newline at its end, which is how remove_block knows.
        lines[-1] += eol
        block[-1] = block[-1].removesuffix(eol)
    return b"".join([*lines[:at], *block, *lines[at:]])


def remove_block(content: bytes, block: Block) -> bytes:
    """The content without a block that `find_block` found in it."""
    lines = content.splitlines(keepends=True)
    before, after = lines[: block.first], lines[block.stop :]
    if before and not _eol(lines[block.stop - 1]):
        before[-1] = before[-1].removesuffix(_eol(before[-1]))
    return b"".join([*before, *after])
