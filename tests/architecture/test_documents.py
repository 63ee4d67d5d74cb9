"""Documents name files that exist: what a document says of a file that was moved or renamed is wrong."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOREIGN = {"comparison.md", "compatibility.md"}  # these name files of other projects
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]+)")
ANCHOR = re.compile(r"\]\((?!\w+:)([^)#\s]*)#([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
FILE = re.compile(r"`([\w./]+\.(?:py|md|yaml))`")
EXAMPLE = re.compile(r"(\b|_)foo\b|FOLDER")


def prose(document: Path) -> str:
    return re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)


def missing(document: Path) -> Iterator[str]:
    """Files that a document links or names, each by the end of its path, and that are not there."""
    text = prose(document)
    yield from (link for link in LINK.findall(text) if not (document.parent / link).exists())
    if document.name not in FOREIGN:
        named = {name for name in FILE.findall(text) if not EXAMPLE.search(name)}
        yield from sorted(name for name in named if not any(file.endswith(f"/{name}") for file in files()))


def missing_sections(document: Path) -> Iterator[str]:
    """Sections of documents that a document links, and that are not there."""
    for link, anchor in ANCHOR.findall(prose(document)):
        target = document.parent / link if link else document
        found = {
            re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in HEADING.findall(prose(target))
        }
        if anchor not in found:
            yield f"{link}#{anchor}"


def files() -> list[str]:
    folders = ("lightning_parallel", "tests", "docs", "conf", "recipes")
    found = [*ROOT.glob("*.md"), *(file for folder in folders for file in (ROOT / folder).rglob("*.*"))]
    return [f"/{file.relative_to(ROOT)}" for file in found]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_document_names_files_that_exist(document: Path) -> None:
    assert not [*missing(document), *missing_sections(document)]


def test_file_that_was_moved_is_found(tmp_path: Path) -> None:
    document = tmp_path / "document.md"
    document.write_text("`gradient_buckets.py`, `gradients/buckets.py`, [x](gone.md), `techniques/foo.py`")
    assert list(missing(document)) == ["gone.md", "gradient_buckets.py"]


def test_section_that_was_renamed_is_found(tmp_path: Path) -> None:
    document = tmp_path / "document.md"
    document.write_text("# What is `new`?\n\n[here](#what-is-new), [there](#what-was)")
    assert list(missing_sections(document)) == ["#what-was"]
