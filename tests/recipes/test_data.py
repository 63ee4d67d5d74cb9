"""Text and ids: nothing is lost or told twice, and what one cannot train on is named."""

import numpy as np
import pytest
import torch

from recipes.checks import ConfigurationError
from recipes.data import END_OF_TEXT, TextData, TokenData

SIZES = {"vocab_size": 300, "seq_len": 16, "batch_size": 4}


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(40):
        (folder / f"{i}.txt").write_text(f"Document {i} says {END_OF_TEXT} and “grüß dich”.\n" * (i + 5), "utf-8")
    return folder


def text_data(texts, **changes):
    return TextData(str(texts), **{**SIZES, "cache_dir": str(texts.parent / "cache"), **changes})


def ready(data):
    data.prepare_data()
    data.setup("fit")
    return data


def documents(data, ids):
    """The documents in ids, in the order of the file."""
    tokenizer, ids = data.tokenizer(), ids.tolist()
    end = tokenizer.token_to_id(END_OF_TEXT)
    ends = [i for i, token in enumerate(ids) if token == end]
    return [tokenizer.decode(ids[a:b]) for a, b in zip([0, *(i + 1 for i in ends[:-1])], ends, strict=True)]


def test_tokenising_loses_nothing_and_repeats_nothing(texts):
    (texts / "copy.txt").write_bytes((texts / "0.txt").read_bytes())
    data = ready(text_data(texts))
    ids = np.concatenate([data.train.ids, data.validation.ids])
    assert sorted(documents(data, ids)) == sorted({file.read_text("utf-8") for file in texts.iterdir()})
    assert len(data.validation.ids) == pytest.approx(0.05 * len(ids), abs=1)


def test_corpus_is_tokenised_once(texts, monkeypatch):
    first = ready(text_data(texts))
    with monkeypatch.context() as patch:
        patch.setattr(TextData, "_tokenise", None)
        assert ready(text_data(texts)).path == first.path
    changed = {ready(text_data(texts, vocab_size=310)).path, first.path}
    (texts / "0.txt").write_text("something else\n")
    assert ready(first).path in changed, "a run goes on with the files that it began with"
    changed.add(ready(text_data(texts)).path)
    assert len(changed) == 3


def test_files_folders_and_globs(tmp_path):
    for name in ("a", "sub/b", "sub/c", "skip/d", ".hidden"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)

    def names(*paths):
        return [file.name for file in TextData([str(tmp_path / path) for path in paths], **SIZES)._find_files()]

    assert names("") == ["a", "d", "b", "c"]
    assert names("a", "sub") == ["a", "b", "c"]
    assert names("a", "s*/*") == ["a", "d", "b", "c"]
    for nothing in ("nowhere.txt", "*.txt"):
        told = r"data.path=.*\.txt names no file to read .*; name an existing file"
        with pytest.raises(ConfigurationError, match=told):
            names(nothing)


def test_files_without_text_are_skipped_and_others_than_text_are_named(texts):
    (texts / "empty").write_bytes(b" \n")
    data = ready(text_data(texts))
    assert len(documents(data, np.concatenate([data.train.ids, data.validation.ids]))) == 40
    with pytest.raises(ConfigurationError, match=r"names only empty files; name files with text"):
        text_data(texts / "empty").prepare_data()
    (texts / "bad").write_bytes(b"ol\xe9")
    with pytest.raises(ConfigurationError, match=r"bad is not UTF-8 text .*; convert it, or name the other files"):
        text_data(texts).prepare_data()


def token_data(path, **changes):
    return TokenData(str(path), **{**SIZES, "vocab_size": 100, **changes})


def test_labels_are_the_ids_one_step_ahead(tmp_path):
    np.arange(50, dtype="uint16").tofile(tmp_path / "ids.bin")
    data = token_data(tmp_path / "ids.bin", seq_len=10, batch_size=1, val_fraction=0.3)
    ready(data)
    for windows, first in ((data.train, 0), (data.validation, 35)):
        length = 10 * len(windows)
        for shift, name in enumerate(("input_ids", "labels")):
            found = torch.cat([windows[i][name] for i in range(len(windows))]).tolist()
            assert found == list(range(first + shift, first + shift + length))
    assert (len(data.train), len(data.validation)) == (3, 1)


def test_batches_are_those_of_one_device(texts):
    data = ready(text_data(texts))
    batches = []
    for _ in range(2):
        torch.manual_seed(0)
        batches.append(list(data.train_dataloader()))
    assert {batch["input_ids"].shape for batch in batches[0]} == {(4, 16)}
    assert all(torch.equal(a["labels"], b["labels"]) for a, b in zip(*batches, strict=True))
    assert sum(len(batch["labels"]) for batch in data.val_dataloader()) == len(data.validation)


def test_ids_of_others_are_read(tmp_path):
    ids = np.arange(100, dtype="uint16")
    np.save(tmp_path / "ids.npy", ids)
    ids.tofile(tmp_path / "ids.bin")
    for name in ("ids.npy", "ids.bin"):
        data = ready(token_data(tmp_path / name, batch_size=1, val_fraction=0.25))
        assert (len(data.train.ids), len(data.validation.ids)) == (75, 25)


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (None, "ids.bin", r"ids.bin does not exist \(looked in .*\); name a file of token ids"),
        (b"", "ids.bin", r"ids.bin is empty; name a file of token ids"),
        (b"abc", "ids.bin", r"ids.bin cannot be read as uint16 ids .*; correct data.dtype"),
        (np.arange(200), "ids.npy", r"ids from 0 to 199, but the model knows 0 to 99; set model.config.vocab_size=200"),
        (np.arange(-1, 9), "ids.npy", r"ids from -1 to 8"),
        (np.zeros((2, 20), int), "ids.npy", r"holds int64 of shape \(2, 20\); store one row of integers"),
        (np.zeros(40), "ids.npy", r"holds float64 of shape \(40,\); store one row of integers"),
    ],
)
def test_wrong_token_files_are_named(tmp_path, content, name, message):
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    elif content is not None:
        np.save(tmp_path / name, content)
    with pytest.raises(ConfigurationError, match=message):
        token_data(tmp_path / name).prepare_data()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, "data.vocab_size=0 must be a whole number"),
        ({"seq_len": "long"}, "data.seq_len=long must be a whole number"),
        ({"vocab_size": 256}, "vocab_size=256 cannot hold the 256 bytes and the end of text; choose 257"),
        ({"seq_len": 100_000}, r"holds \d+ tokens for training: 0 .* data.seq_len=100000, .* give more text"),
        ({"seq_len": 1000, "batch_size": 1, "val_fraction": 0.01}, r"for validation: .* another data.val_fraction"),
    ],
)
def test_impossible_values_are_refused(texts, changes, message):
    with pytest.raises(ConfigurationError, match=message):
        ready(text_data(texts, **changes))
