"""Token ids: a byte-level BPE, documents packed into a memory-mapped file, and windows over it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.utils.data import Dataset
from tqdm import tqdm

from recipes.corpus import Document

END_OF_TEXT = "<|endoftext|>"
SMALLEST_VOCABULARY = 257  # every byte, and the end of text
PIECE = 1 << 16  # characters that one core tokenises at a time
BATCH = 1 << 19  # characters that all cores tokenise at a time


def id_dtype(vocab_size: int) -> str:
    """Return the narrowest unsigned type that holds every id."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def train_tokenizer(documents: list[Document], vocab_size: int, max_bytes: int) -> Tokenizer:
    """Return a byte-level BPE learned from ``documents``, at most ``max_bytes`` of them."""
    if vocab_size < SMALLEST_VOCABULARY:
        raise ValueError(
            f"vocab_size={vocab_size} cannot hold the 256 bytes and the end of text; "
            f"choose {SMALLEST_VOCABULARY} or more"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    sample = _first_bytes(documents, max_bytes)
    tokenizer.train_from_iterator(_texts(sample, "Learning the vocabulary"), trainer)
    return tokenizer


def load_tokenizer(file: Path) -> Tokenizer:
    """Return the tokenizer saved in ``file``."""
    return Tokenizer.from_file(str(file))


def _first_bytes(documents: list[Document], max_bytes: int) -> list[Document]:
    """Return documents up to ``max_bytes``, in the random but reproducible order of their digests."""
    chosen, total = [], 0
    for document in sorted(documents, key=lambda document: document.digest):
        if total < max_bytes:
            chosen.append(document)
            total += document.size
    return chosen


def _texts(documents: Iterable[Document], doing: str) -> Iterator[str]:
    documents = list(documents)
    total = sum(document.size for document in documents)
    with tqdm(desc=doing, total=total, unit="B", unit_scale=True) as progress:
        for document in documents:
            yield document.read()
            progress.update(document.size)


def pack(tokenizer: Tokenizer, documents: list[Document], file: Path, dtype: str) -> None:
    """Write the ids of all documents, each closed by the end of text, to ``file``."""
    # Text that happens to spell the end of text is not one.
    tokenizer.encode_special_tokens = True
    end = [tokenizer.token_to_id(END_OF_TEXT)]
    with file.open("wb") as packed:
        for batch in _batches(_texts(documents, f"Tokenising {file.stem}")):
            encodings = tokenizer.encode_batch([piece for piece, _ in batch])
            for encoding, (_, last) in zip(encodings, batch, strict=True):
                packed.write(np.asarray(encoding.ids + end * last, dtype=dtype).tobytes())


def _batches(texts: Iterable[str]) -> Iterator[list[tuple[str, bool]]]:
    """Gather pieces until they can keep all cores busy; the flag marks the last piece of a document."""
    batch: list[tuple[str, bool]] = []
    for text in texts:
        pieces = list(_pieces(text))
        batch += [(piece, False) for piece in pieces[:-1]] + [(pieces[-1], True)]
        if sum(len(piece) for piece, _ in batch) >= BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _pieces(text: str) -> Iterator[str]:
    """Cut a long text at line ends."""
    start = 0
    while start < len(text):
        stop = text.find("\n", start + PIECE) + 1 or len(text)
        yield text[start:stop]
        start = stop


@dataclass(frozen=True)
class TokenFile:
    """A span of a file of ids.

    Attributes:
        path: A ``.npy`` array, or bare numbers.
        dtype: Type of bare numbers; an array knows its own.
        start: First id.
        stop: One past the last id; None is the file's end.
    """

    path: Path
    dtype: str
    start: int = 0
    stop: int | None = None

    def open(self) -> npt.NDArray[Any]:
        """Map the span into memory."""
        array = self.path.suffix == ".npy"
        ids: npt.NDArray[Any] = (
            np.load(self.path, mmap_mode="r") if array else np.memmap(self.path, self.dtype, mode="r")
        )
        return ids[self.start : self.stop]


class Windows(Dataset[dict[str, Tensor]]):
    """Sequences of ``seq_len`` ids and, as labels, the ids one step ahead; no token is a label twice."""

    def __init__(self, file: TokenFile, seq_len: int) -> None:
        self.file = file
        self.seq_len = seq_len
        self.ids = file.open()

    def __getstate__(self) -> dict[str, Any]:
        # A memory map would travel to a loader's worker with all its content.
        return {"file": self.file, "seq_len": self.seq_len}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def __len__(self) -> int:
        return max(0, len(self.ids) - 1) // self.seq_len

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = index * self.seq_len
        window = torch.from_numpy(self.ids[start : start + self.seq_len + 1].astype(np.int64))
        return {"input_ids": window[:-1], "labels": window[1:]}
