"""The lines of logs that docs/operate.md explains are lines that the code prints."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [*(ROOT / "megatron_ntp").rglob("*.py"), *(ROOT / "megatron_ntp").rglob("*.sbatch")]
# What stands for a value in the document: capital words, numbers, and whatever is left out.
VALUE = re.compile(r"\b[A-Z]{4,}\b|\bN\b|\b\d[\d, of]*|\.\.\.")


def explained() -> list[str]:
    """The first column of the table, without its marks."""
    text = (ROOT / "docs" / "operate.md").read_text()
    table = text.partition("## What the logs say")[2].partition("\n## ")[0]
    return re.findall(r"^\| `(.+?)` \|", table, re.MULTILINE)


def printed() -> str:
    """All sources, with strings that go on in the next line joined, and values taken out."""
    text = "\n".join(path.read_text() for path in SOURCES)
    joined = re.sub(r'"\s*\n\s*f?"', "", text)
    return re.sub(r"\{[^{}]*\}|\$\{?\w+\}?|\$\([^()]*\)", "", joined)


@pytest.fixture(scope="module")
def sources() -> str:
    return printed()


def test_there_are_lines() -> None:
    assert len(explained()) > 10


@pytest.mark.parametrize("line", explained())
def test_the_code_prints_it(line: str, sources: str) -> None:
    parts = [part.strip(" :,") for part in VALUE.split(line)]
    longest = max(parts, key=len)
    assert len(longest) > 5, f"nothing of {line!r} can be looked for"
    assert longest in sources, f"nothing prints {longest!r}"
