"""Reading from source whether a catalog fits: on small trees, and against what importing finds."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ntp.integration.catalog import ROWS
from megatron_ntp.patching.probe import probe
from megatron_ntp.patching.rows import Expected, Patch, Status
from megatron_ntp.patching.versions import find_cores, read_core_version

ROOT = Path(__file__).resolve().parents[3]

SOURCE = """
from .other import borrowed
try:
    from fast import sped
except ImportError:
    def sped(a, b): ...

def plain(a, /, b, *rest, c, **more): ...

def twice(old): ...
def twice(new): ...

if True:
    def guarded(x): ...

assigned = plain

class Base:
    def inherited(self): ...

class Thing(Base):
    def __init__(self, config): ...
    def method(self, x, y=None): ...
    @staticmethod
    def static(z): ...
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    package = tmp_path / "pkg" / "sub"
    package.mkdir(parents=True)
    (package / "mod.py").write_text(SOURCE)
    (tmp_path / "pkg" / "__init__.py").write_text("def in_init(): ...\n")
    (package / "broken.py").write_text("def (:\n")
    return tmp_path


def row(target: str, *expected: Expected, **options: object) -> Patch:
    return Patch("p", target, lambda original: original, "a test", signature=expected, **options)


@pytest.mark.parametrize(
    ("target", "params", "status"),
    [
        ("pkg.sub.mod:plain", ("a", "b", "rest", "c", "more"), Status.OK),
        ("pkg.sub.mod:twice", ("new",), Status.OK),
        ("pkg.sub.mod:guarded", ("x",), Status.OK),
        ("pkg.sub.mod:sped", ("a", "b"), Status.OK),
        ("pkg.sub.mod:Thing.method", ("x", "y"), Status.OK),
        ("pkg.sub.mod:Thing.static", ("z",), Status.OK),
        ("pkg.sub.mod:Thing", ("config",), Status.OK),
        ("pkg:in_init", (), Status.OK),
        ("pkg.sub.mod:plain", ("a",), Status.CHANGED),
        ("pkg.sub.mod:Thing.method", ("x", "z"), Status.CHANGED),
        ("pkg.sub.mod:gone", (), Status.MISSING),
        ("pkg.sub.mod:gone.method", (), Status.MISSING),
        ("pkg.sub.mod:plain.method", (), Status.MISSING),
        ("pkg.sub.gone:plain", (), Status.MISSING),
        ("pkg.sub.broken:plain", (), Status.MISSING),
        ("pkg.sub.mod:borrowed", (), None),
        ("pkg.sub.mod:assigned", (), None),
        ("pkg.sub.mod:Thing.inherited", (), None),
    ],
)
def test_what_source_says(
    tree: Path, target: str, params: tuple[str, ...], status: Status | None
) -> None:
    (found,) = probe([row(target, Expected(params, exact=bool(params)))], tree, "0.19.2")
    assert (found and found.status) == status, found


def test_versions(tree: Path) -> None:
    target = "pkg.sub.mod:plain"
    rows = [row(target, versions="<0.18"), row(target, versions="<0.18", optional=True)]
    assert [found and found.status for found in probe(rows, tree, "0.19.2")] == [
        Status.UNTESTED,
        Status.NOT_NEEDED,
    ]
    per_version = row(target, Expected(("old",), "<0.18"), Expected(("a", "b")))
    assert [found and found.status for found in probe([per_version], tree, "0.19")] == [Status.OK]


def test_the_catalog_fits_every_megatron_here_from_source_alone() -> None:
    trees = [path.parent for path in (ROOT / "build" / "cores").glob("*/megatron")]
    for tree in [*find_cores()[:1], *trees]:
        found = probe(ROWS, tree, read_core_version(tree))
        bad = [f for f in found if f is None or not f.status.good]
        assert not bad, f"{tree}: {bad}"


def test_nothing_is_imported() -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch in this Python")
    program = (
        "import sys; from megatron_ntp.doctor.command import examine; examine(None, ['--ntp']); "
        "sys.exit(any(n.partition('.')[0] in ('torch', 'numpy') for n in sys.modules) "
        "or 'megatron.core' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=60, check=False)
    assert done.returncode == 0
