"""Documents name files that exist, and quote messages of the library."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOREIGN = {"comparison.md", "compatibility.md"}  # these name files of other projects
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]+)")
ANCHOR = re.compile(r"\]\((?!\w+:)([^)#\s]*)#([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
FILE = re.compile(r"`([\w./]+\.(?:py|md|yaml|yml))`")
QUOTE = re.compile(r"^\| `([^`]+)`", re.MULTILINE)
EXAMPLE = re.compile(r"(\b|_)foo\b|FOLDER")


def prose(document: Path) -> str:
    return re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)


def missing(document: Path, files: list[str]) -> Iterator[str]:
    """Files and sections that a document links or names, each by the end of its path, and that are not there."""
    text = prose(document)
    yield from (link for link in LINK.findall(text) if not (document.parent / link).exists())
    if document.name not in FOREIGN:
        named = {name for name in FILE.findall(text) if not EXAMPLE.search(name)}
        yield from sorted(name for name in named if not any(file.endswith(f"/{name}") for file in files))
    for link, anchor in ANCHOR.findall(text):
        headings = HEADING.findall(prose(document.parent / link if link else document))
        if anchor not in {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}:
            yield f"{link}#{anchor}"


def files() -> list[str]:
    folders = ("lightning_parallel", "tests", "docs", "conf", "recipes", ".github")
    found = [*ROOT.glob("*.md"), *(file for folder in folders for file in (ROOT / folder).rglob("*.*"))]
    return [f"/{file.relative_to(ROOT)}" for file in found]


def test_documents_name_files_that_exist() -> None:
    documents, known = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")], files()
    assert not [f"{each.relative_to(ROOT)}: {name}" for each in documents for name in missing(each, known)]


def test_moved_files_and_renamed_sections_are_found(tmp_path: Path) -> None:
    document = tmp_path / "document.md"
    document.write_text(
        "# What is `new`?\n\n`gradient_buckets.py`, `gradients/buckets.py`, [x](gone.md), `techniques/foo.py`\n"
        "[here](#what-is-new), [there](#what-was)"
    )
    assert list(missing(document, files())) == ["gone.md", "gradient_buckets.py", "#what-was"]


def texts(source: str) -> Iterator[str]:
    """The strings of a module; of f-strings the parts between their values."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_rows_of_errors_quote_messages() -> None:
    known = "\n".join(text for file in (ROOT / "lightning_parallel").rglob("*.py") for text in texts(file.read_text()))
    rows = (ROOT / "docs/errors.md").read_text()
    quotes = QUOTE.findall(rows)
    assert len(quotes) == len(re.findall(r"^\| (?!The message has)", rows, re.MULTILINE)) > 40
    parts = [part.strip(" ,;") for quote in quotes for part in re.split(r"…|\d+", quote)]
    assert [part for part in parts if part not in known] == []
