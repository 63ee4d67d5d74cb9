"""Text to train on: documents tokenised once per machine, served as windows in an order that only the seed decides.

The data loaders are those of a single device: ``batch_size`` samples each, no rank anywhere. The strategy divides them.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import tokenizers
import torch
from filelock import FileLock
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from recipes import checks
from recipes.corpus import CorpusError, find_files, read_documents, split_documents
from recipes.tokens import TokenFile, Windows, id_dtype, load_tokenizer, pack, train_tokenizer

CACHE = "~/.cache/lightning_parallel"
FORMAT = 1  # part of every cache key; raised when what is written changes


class ShuffledOrder(Sampler[int]):
    """A new random order every epoch: a function of (seed, epoch) and nothing else, so that any run can resume it."""

    def __init__(self, length: int, seed: int) -> None:
        self.length = length
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch; the Trainer calls this."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        # Hashed, so that epoch 1 of seed 0 is not epoch 0 of seed 1.
        digest = hashlib.sha256(f"{self.seed} {self.epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        return iter(torch.randperm(self.length, generator=generator).tolist())


class Parts(NamedTuple):
    """Ids to train on and ids to validate on."""

    train: TokenFile
    validation: TokenFile


class TokenisedData(LightningDataModule, ABC):
    """Batches of ``input_ids`` and ``labels`` over two files of ids.

    Args:
        vocab_size: Number of ids that the model knows.
        seq_len: Tokens per sample.
        batch_size: Samples per batch and rank.
        val_fraction: Share of the data held out for validation.
        seed: Decides the order.
        cache_dir: Folder for what is prepared once per machine.
        num_workers: Processes per data loader; slicing a memory map needs none.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        seq_len: int,
        batch_size: int,
        val_fraction: float = 0.05,
        seed: int = 0,
        cache_dir: str = CACHE,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        checks.whole(1, data__vocab_size=vocab_size, data__seq_len=seq_len, data__batch_size=batch_size)
        checks.whole(0, data__seed=seed, data__num_workers=num_workers)
        checks.number(0, 1, data__val_fraction=val_fraction)
        self.vocab_size = vocab_size
        self.seq_len = seq_len
        self.batch_size = batch_size
        self.val_fraction = val_fraction
        self.seed = seed
        self.cache_dir = Path(cache_dir).expanduser()
        self.num_workers = num_workers

    @abstractmethod
    def parts(self) -> Parts:
        """Return the prepared files."""

    @abstractmethod
    def tokenizer(self) -> Tokenizer | None:
        """Return what turns ids into text, if anything does."""

    def setup(self, stage: str) -> None:
        """Open the files."""
        parts = self.parts()
        self.train = Windows(parts.train, self.seq_len)
        self.validation = Windows(parts.validation, self.seq_len)
        if len(self.train) < self.batch_size:
            raise CorpusError(self._too_small("training", self.train, self.batch_size, "more text"))
        if len(self.validation) < 1:
            raise CorpusError(self._too_small("validation", self.validation, 1, "a larger data.val_fraction"))

    def _too_small(self, role: str, windows: Windows, needed: int, more: str) -> str:
        return (
            f"{windows.file.path} holds {len(windows.ids)} tokens for {role}: {len(windows)} sequences of "
            f"data.seq_len={self.seq_len}, but {needed} are needed; give {more}, or shorter sequences (data.seq_len) "
            f"or smaller batches (data.batch_size={self.batch_size})"
        )

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Return shuffled training batches, all of one size."""
        return self._loader(self.train, ShuffledOrder(len(self.train), self.seed), drop_last=True)

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Return validation batches, in the files' order."""
        return self._loader(self.validation, None, drop_last=False)

    def _loader(self, windows: Windows, order: Sampler[int] | None, drop_last: bool) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(
            windows,
            batch_size=self.batch_size,
            sampler=order,
            drop_last=drop_last,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
        )


class TextData(TokenisedData):
    """UTF-8 files, tokenised by a byte-level BPE that is learned from them.

    Args:
        path: Files, folders and globs.
        exclude: Names of folders to leave out.
        skip_unreadable: Leave out empty and undecodable files instead of refusing them.
        tokenizer_bytes: How much text the vocabulary is learned from, at most.
        **options: As of TokenisedData.
    """

    def __init__(
        self,
        path: str | Sequence[str],
        *,
        exclude: Sequence[str] = (),
        skip_unreadable: bool = False,
        tokenizer_bytes: int = 100_000_000,
        **options: object,
    ) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        checks.whole(1, data__tokenizer_bytes=tokenizer_bytes)
        checks.flag(data__skip_unreadable=skip_unreadable)
        self.path = path
        self.exclude = exclude
        self.skip_unreadable = skip_unreadable
        self.tokenizer_bytes = tokenizer_bytes

    def prepare_data(self) -> None:
        """Tokenise the corpus, unless this machine has done so before."""
        self.cache_dir.mkdir(parents=True, exist_ok=True)
        with FileLock(self.folder.with_suffix(".lock")):
            if not self.folder.exists():
                rank_zero_info(f"Tokenising {self.path} into {self.folder}: once per machine and corpus")
                with tempfile.TemporaryDirectory(dir=self.cache_dir) as temporary:
                    self._write(Path(temporary) / "new")
                    os.replace(Path(temporary) / "new", self.folder)  # all or nothing, should we be interrupted

    @cached_property
    def folder(self) -> Path:
        """Return where this corpus lies tokenised; any change to it is another folder."""
        files = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in self._files()]
        settings = [self.vocab_size, self.val_fraction, self.skip_unreadable, self.tokenizer_bytes]
        key = json.dumps([FORMAT, tokenizers.__version__, settings, files])
        return self.cache_dir / hashlib.sha256(key.encode()).hexdigest()[:16]

    def _files(self) -> list[Path]:
        return find_files(self.path, self.exclude)

    def _write(self, folder: Path) -> None:
        documents = read_documents(self._files(), skip_unreadable=self.skip_unreadable)
        split = split_documents(documents, self.val_fraction)
        # From the training part alone: the validation text must not shape the vocabulary either.
        tokenizer = train_tokenizer(split.train, self.vocab_size, self.tokenizer_bytes)
        folder.mkdir()
        tokenizer.save(str(folder / "tokenizer.json"))
        pack(tokenizer, split.validation, folder / "validation.bin", id_dtype(self.vocab_size))
        pack(tokenizer, split.train, folder / "train.bin", id_dtype(self.vocab_size))

    def parts(self) -> Parts:
        """Return the packed ids."""
        dtype = id_dtype(self.vocab_size)
        return Parts(TokenFile(self.folder / "train.bin", dtype), TokenFile(self.folder / "validation.bin", dtype))

    def tokenizer(self) -> Tokenizer:
        """Return the learned tokenizer."""
        return load_tokenizer(self.folder / "tokenizer.json")


class TokenData(TokenisedData):
    """Ids that were tokenised elsewhere.

    Args:
        path: A ``.npy`` array of ids, or bare numbers.
        validation_path: The same for validation; None holds out the end of ``path``.
        dtype: Type of bare numbers; None is the narrowest that holds ``vocab_size`` ids.
        tokenizer_path: A ``tokenizer.json``, should samples be printed as text.
        **options: As of TokenisedData.
    """

    def __init__(
        self,
        path: str,
        *,
        validation_path: str | None = None,
        dtype: str | None = None,
        tokenizer_path: str | None = None,
        **options: object,
    ) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.path = Path(path).expanduser()
        self.validation_path = Path(validation_path).expanduser() if validation_path else None
        self.dtype = dtype or id_dtype(self.vocab_size)
        self.tokenizer_path = Path(tokenizer_path).expanduser() if tokenizer_path else None

    def prepare_data(self) -> None:
        """Check every id against the vocabulary, unless this machine has done so before."""
        if self.tokenizer_path:
            self._check_tokenizer(self.tokenizer_path)
        for file in filter(None, (self.path, self.validation_path)):
            if not file.is_file() or not file.stat().st_size:
                problem = "is empty" if file.is_file() else f"does not exist (looked in {Path.cwd()})"
                raise CorpusError(f"{file} {problem}; name a file of token ids in data.path")
            self._check_once(file)

    def _check_tokenizer(self, file: Path) -> None:
        if not file.is_file():
            raise CorpusError(f"data.tokenizer_path={file} does not exist; name a tokenizer.json or null")
        size = load_tokenizer(file).get_vocab_size()
        if size > self.vocab_size:
            raise CorpusError(
                f"{file} has {size} ids, but the model knows vocab_size={self.vocab_size}; set "
                f"model.config.vocab_size={size} or name the tokenizer that made the ids"
            )

    def _check_once(self, file: Path) -> None:
        stat = file.stat()
        key = f"{file.resolve()} {stat.st_size} {stat.st_mtime_ns} {self.dtype} {self.vocab_size}"
        checked = self.cache_dir / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.checked"
        if not checked.exists():
            self._check_ids(file)
            self.cache_dir.mkdir(parents=True, exist_ok=True)
            checked.touch()

    def _check_ids(self, file: Path) -> None:
        try:
            ids = TokenFile(file, self.dtype).open()
        except (TypeError, ValueError) as error:
            raise CorpusError(f"{file} cannot be read as {self.dtype} ids ({error}); correct data.dtype") from error
        if ids.dtype.kind not in "iu" or ids.ndim != 1:
            raise CorpusError(f"{file} holds {ids.dtype} of shape {ids.shape}; store one row of integers")
        smallest, largest = int(ids.min()), int(ids.max())
        if smallest < 0 or largest >= self.vocab_size:
            raise CorpusError(
                f"{file} holds ids from {smallest} to {largest}, but the model knows 0 to {self.vocab_size - 1}; set "
                f"model.config.vocab_size to {largest + 1} or more, or data.dtype to the file's type (now {ids.dtype})"
            )

    def parts(self) -> Parts:
        """Return the ids, the end of the only file cut off for validation."""
        whole = TokenFile(self.path, self.dtype)
        if self.validation_path:
            return Parts(whole, TokenFile(self.validation_path, self.dtype))
        middle = int(len(whole.open()) * (1 - self.val_fraction))
        return Parts(TokenFile(self.path, self.dtype, stop=middle), TokenFile(self.path, self.dtype, start=middle))

    def tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer of ``tokenizer_path``."""
        return load_tokenizer(self.tokenizer_path) if self.tokenizer_path else None
