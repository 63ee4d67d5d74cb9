"""Text for training: tokenised once per machine, and served as windows of ids.

The data loaders are those of one device and know no ranks: the strategy divides them.
"""

from __future__ import annotations

import glob
import hashlib
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from recipes import checks
from recipes.checks import ConfigurationError

END_OF_TEXT = "<|endoftext|>"
SMALLEST_VOCABULARY = 257  # every byte, and the end of text


class Windows(Dataset[dict[str, Tensor]]):
    """Sequences of ``seq_len`` ids and, as labels, the ids one step ahead; no token is a label twice."""

    def __init__(self, ids: npt.NDArray[Any], seq_len: int) -> None:
        self.ids = ids
        self.seq_len = seq_len

    def __len__(self) -> int:
        return max(0, len(self.ids) - 1) // self.seq_len

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = index * self.seq_len
        window = torch.from_numpy(self.ids[start : start + self.seq_len + 1].astype(np.int64))
        return {"input_ids": window[:-1], "labels": window[1:]}


class TokenData(LightningDataModule):
    """Batches of ``input_ids`` and ``labels`` over a file of ids.

    Args:
        path: A ``.npy`` array of ids, or bare numbers.
        vocab_size: Number of ids that the model knows.
        seq_len: Tokens per sample.
        batch_size: Samples per batch and rank.
        dtype: Type of bare numbers; None is the narrowest that holds ``vocab_size`` ids.
        tokenizer_path: A ``tokenizer.json``, should samples be printed as text.
        val_fraction: Share of the ids held out for validation.
        num_workers: Processes per data loader; slicing a memory map needs none.
    """

    def __init__(
        self,
        path: str,
        *,
        vocab_size: int,
        seq_len: int,
        batch_size: int,
        dtype: str | None = None,
        tokenizer_path: str | None = None,
        val_fraction: float = 0.05,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        checks.whole(1, data__vocab_size=vocab_size, data__seq_len=seq_len, data__batch_size=batch_size)
        checks.whole(0, data__num_workers=num_workers)
        checks.number(0, 1, data__val_fraction=val_fraction)
        self.path = Path(path).expanduser()
        self.vocab_size, self.seq_len, self.batch_size = vocab_size, seq_len, batch_size
        self.dtype = dtype or ("uint16" if vocab_size <= 1 << 16 else "uint32")
        self.tokenizer_path = Path(tokenizer_path).expanduser() if tokenizer_path else None
        self.val_fraction, self.num_workers = val_fraction, num_workers

    def prepare_data(self) -> None:
        """Check every id against the vocabulary."""
        if not self.path.is_file() or not self.path.stat().st_size:
            problem = "is empty" if self.path.is_file() else f"does not exist (looked in {Path.cwd()})"
            raise ConfigurationError(f"{self.path} {problem}; name a file of token ids in data.path")
        try:
            ids = self.ids()
        except (TypeError, ValueError) as error:
            said = f"{self.path} cannot be read as {self.dtype} ids ({error}); correct data.dtype"
            raise ConfigurationError(said) from error
        if ids.dtype.kind not in "iu" or ids.ndim != 1:
            raise ConfigurationError(f"{self.path} holds {ids.dtype} of shape {ids.shape}; store one row of integers")
        smallest, largest = int(ids.min()), int(ids.max())
        if smallest < 0 or largest >= self.vocab_size:
            raise ConfigurationError(
                f"{self.path} holds ids from {smallest} to {largest}, but the model knows 0 to {self.vocab_size - 1}; "
                f"set model.config.vocab_size={largest + 1}, or data.dtype to the file's type (now {ids.dtype})"
            )

    def ids(self) -> npt.NDArray[Any]:
        """Map all ids into memory."""
        array = self.path.suffix == ".npy"
        return np.load(self.path, mmap_mode="r") if array else np.memmap(self.path, self.dtype, mode="r")

    def setup(self, stage: str) -> None:
        """Divide the ids; the end of them validates."""
        ids = self.ids()
        middle = int(len(ids) * (1 - self.val_fraction))
        self.train, self.validation = Windows(ids[:middle], self.seq_len), Windows(ids[middle:], self.seq_len)
        for role, windows, needed in (("training", self.train, self.batch_size), ("validation", self.validation, 1)):
            if len(windows) < needed:
                raise ConfigurationError(
                    f"{self.path} holds {len(windows.ids)} tokens for {role}: {len(windows)} sequences of "
                    f"data.seq_len={self.seq_len}, but {needed} are needed; give more text, another data.val_fraction, "
                    f"shorter sequences (data.seq_len) or smaller batches (data.batch_size={self.batch_size})"
                )

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Return shuffled training batches, all of one size."""
        return self._loader(self.train, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Return validation batches in the order of the file."""
        return self._loader(self.validation)

    def _loader(self, windows: Windows, **options: bool) -> DataLoader[dict[str, Tensor]]:
        options["pin_memory"] = torch.cuda.is_available()
        return DataLoader(windows, self.batch_size, num_workers=self.num_workers, **options)  # type: ignore[arg-type]

    def tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer of the ids, if there is one."""
        return Tokenizer.from_file(str(self.tokenizer_path)) if self.tokenizer_path else None


class TextData(TokenData):
    """UTF-8 files, tokenised by a byte-level BPE that is trained on them.

    Args:
        path: Files, folders and globs; folders and globs leave out hidden files, and files without text are skipped.
        cache_dir: Folder of the tokenised files.
        **options: As of TokenData.
    """

    def __init__(
        self, path: str | Sequence[str], *, cache_dir: str = "~/.cache/lightning_parallel", **options: Any
    ) -> None:
        super().__init__("", **options)
        if self.vocab_size < SMALLEST_VOCABULARY:
            raise ConfigurationError(
                f"vocab_size={self.vocab_size} cannot hold the 256 bytes and the end of text; "
                f"choose {SMALLEST_VOCABULARY} or more"
            )
        self.paths = [path] if isinstance(path, str) else list(path)
        self.cache_dir = Path(cache_dir).expanduser()
        self._files: list[Path] = []

    def prepare_data(self) -> None:
        """Tokenise the text, unless this machine has done so before."""
        files = self._find_files()
        if not self.path.exists():
            rank_zero_info(f"Tokenising {len(files)} files into {self.path}: once per machine and corpus")
            self._tokenise(files)

    def setup(self, stage: str) -> None:
        """Open the tokenised file, which another process of this machine may have written."""
        self._find_files()
        super().setup(stage)

    def _find_files(self) -> list[Path]:
        """Return the files of the text, sorted, and set the path of the tokenised file; both once in a run."""
        if self._files:  # a run may write text below them, and its last validation reads what its first one did
            return self._files
        found: set[Path] = set()
        for entry in self.paths:
            pattern = Path(entry).expanduser()
            names = glob.glob(str(pattern / "**" / "*" if pattern.is_dir() else pattern), recursive=True)
            files = {Path(name).resolve() for name in names if Path(name).is_file()}
            if not files:
                raise ConfigurationError(
                    f"data.path={entry} names no file to read (looked in {Path.cwd()}); name an existing file, a "
                    "folder with text or a glob (** crosses folders)"
                )
            found |= files
        state = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(found)]
        # Another corpus or another vocabulary has another file.
        key = hashlib.sha256(repr((state, self.vocab_size, self.val_fraction)).encode()).hexdigest()
        self.path = self.cache_dir / f"{key[:16]}.bin"
        self.tokenizer_path = self.path.with_suffix(".json")
        self._files = sorted(found)
        return self._files

    def _tokenise(self, files: list[Path]) -> None:
        """Write the ids of all documents, each content once, in a random order that is always the same."""
        texts: dict[str, None] = {}  # as a set that keeps its order
        for file in files:
            try:
                text = file.read_bytes().decode()
            except UnicodeDecodeError as error:
                raise ConfigurationError(
                    f"{file} is not UTF-8 text ({error}); convert it, or name the other files in data.path"
                ) from error
            if text.strip():
                texts[text] = None
        if not texts:
            raise ConfigurationError(f"data.path={self.paths} names only empty files; name files with text")
        documents = list(texts)
        random.Random(0).shuffle(documents)
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=self.vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet
        )
        # Trained on the training part only, so that the validation text does not shape the vocabulary.
        training = documents[: max(1, int(len(documents) * (1 - self.val_fraction)))]
        tokenizer.train_from_iterator(training, trainer)
        tokenizer.encode_special_tokens = True  # text that happens to spell the end of text is not one
        end = tokenizer.token_to_id(END_OF_TEXT)
        self.cache_dir.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_suffix(f".{os.getpid()}")
        with unfinished.open("wb") as file_of_ids:
            for first in range(0, len(documents), 256):  # documents at a time, on all cores
                for encoding in tokenizer.encode_batch(documents[first : first + 256]):
                    file_of_ids.write(np.asarray([*encoding.ids, end], dtype=self.dtype).tobytes())
        tokenizer.save(str(self.tokenizer_path))
        os.replace(unfinished, self.path)  # last and atomic, so that an interrupted run leaves no part of a file
