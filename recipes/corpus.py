"""Documents: which files make up a corpus, whether they can be read, and which of them validate."""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path


class CorpusError(ValueError):
    """Data that cannot be trained on; the message names the file and the remedy."""


@dataclass(frozen=True)
class Document:
    """A span of bytes of a UTF-8 file.

    Attributes:
        path: The file.
        start: First byte.
        stop: One past the last byte.
        digest: Hash of the content; equal content has an equal digest.
    """

    path: Path
    start: int
    stop: int
    digest: str

    @property
    def size(self) -> int:
        """Number of bytes."""
        return self.stop - self.start

    def read(self) -> str:
        """Return the text."""
        return self.path.read_bytes()[self.start : self.stop].decode()


@dataclass(frozen=True)
class Split:
    """The documents to train on and those to validate on."""

    train: list[Document]
    validation: list[Document]


def find_files(paths: str | Sequence[str], exclude: Iterable[str] = ()) -> list[Path]:
    """Return the files that ``paths`` (files, folders, globs) name, sorted.

    Inside a folder or glob, hidden files and whatever lies in a folder named in ``exclude`` are left out.
    """
    entries = [paths] if isinstance(paths, str) else paths
    found = {file for entry in entries for file in _expand(Path(entry).expanduser(), frozenset(exclude))}
    return sorted(found)


def _expand(entry: Path, exclude: frozenset[str]) -> list[Path]:
    if entry.is_file():
        return [entry.resolve()]
    base, pattern = (entry, entry / "**" / "*") if entry.is_dir() else (_fixed_part(entry), entry)
    candidates = map(Path, glob.iglob(str(pattern), recursive=True))
    files = [file.resolve() for file in candidates if file.is_file() and _wanted(file.relative_to(base), exclude)]
    if not files:
        raise CorpusError(_nothing_found(entry))
    return files


def _fixed_part(pattern: Path) -> Path:
    """Return the folders of a glob before its first wildcard."""
    plain = [parent for parent in pattern.parents if not glob.has_magic(str(parent))]
    return plain[0]


def _wanted(relative: Path, exclude: frozenset[str]) -> bool:
    hidden = any(part.startswith(".") for part in relative.parts)
    return not hidden and exclude.isdisjoint(relative.parts)


def _nothing_found(entry: Path) -> str:
    if glob.has_magic(str(entry)):
        return f"data.path={entry} matches no file in {Path.cwd()}; check the pattern (** crosses folders)"
    if entry.is_dir():
        return f"data.path={entry} is a folder without any file to read; name one that holds text"
    return f"data.path={entry} does not exist (looked in {Path.cwd()}); name an existing file, folder or glob"


def read_documents(files: Iterable[Path], *, skip_unreadable: bool = False) -> list[Document]:
    """Return one document per file, without repeating equal content.

    An empty or undecodable file is an error, or is left out where ``skip_unreadable`` says so.
    """
    documents: dict[str, Document] = {}
    for file in files:
        content = file.read_bytes()
        problem = _problem(content)
        if problem and not skip_unreadable:
            raise CorpusError(f"{file} {problem} or leave such files out with data.skip_unreadable=true")
        if not problem:
            document = Document(file, 0, len(content), _digest(content))
            documents.setdefault(document.digest, document)
    if not documents:
        raise CorpusError("none of the files that data.path names holds any text; name files that do")
    return list(documents.values())


def _problem(content: bytes) -> str | None:
    if not content.strip():
        return "is empty; remove it from data.path"
    try:
        content.decode()
    except UnicodeDecodeError as error:
        return f"is not UTF-8 text (byte {content[error.start]:#04x} at offset {error.start}); convert it"
    return None


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def split_documents(documents: list[Document], fraction: float) -> Split:
    """Give about ``fraction`` of the bytes to validation, whole documents at a time.

    Which documents depends on their content alone, so every machine agrees. At least one document validates; a corpus
    of a single one is cut in two at a line's end.
    """
    if not 0 < fraction < 1:
        raise ValueError(f"data.val_fraction={fraction} must lie between 0 and 1; 0.05 is usual")
    if len(documents) == 1:
        return _cut(documents[0], fraction)
    quota = fraction * sum(document.size for document in documents)
    chosen: set[str] = set()
    for document in sorted(documents, key=lambda document: document.digest):
        if document.size <= quota:
            chosen.add(document.digest)
            quota -= document.size
    chosen = chosen or {min(documents, key=lambda document: (document.size, document.digest)).digest}
    return Split(
        train=[document for document in documents if document.digest not in chosen],
        validation=[document for document in documents if document.digest in chosen],
    )


def _cut(document: Document, fraction: float) -> Split:
    content = document.path.read_bytes()
    middle = content.find(b"\n", int(len(content) * (1 - fraction))) + 1
    if middle in (0, len(content)):
        raise CorpusError(
            f"{document.path} is the only document and has no line's end at which to cut off its last "
            f"{fraction:.0%} for validation; add a second file to data.path"
        )
    head, tail = content[:middle], content[middle:]
    return Split(
        train=[replace(document, stop=middle, digest=_digest(head))],
        validation=[replace(document, start=middle, digest=_digest(tail))],
    )
