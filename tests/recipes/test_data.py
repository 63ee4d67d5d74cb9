import pickle
from itertools import chain

import numpy as np
import pytest
import torch
import torch.distributed as dist

from recipes.corpus import CorpusError
from recipes.data import ShuffledOrder, TextData, TokenData
from recipes.errors import check_vocabulary
from recipes.tokens import END_OF_TEXT, TokenFile, Windows, id_dtype
from tests.ranks import ranks


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(40):
        (folder / f"{i}.txt").write_text(f"Document {i} says {END_OF_TEXT} and “grüß dich”.\n" * (i + 5), "utf-8")
    return folder


def text_data(texts, **changes):
    options = {"vocab_size": 300, "seq_len": 16, "batch_size": 4, "cache_dir": str(texts.parent / "cache")}
    return TextData(str(texts), **{**options, **changes})


def ready(data):
    data.prepare_data()
    data.setup("fit")
    return data


def decoded(data, file):
    """The documents in a file of ids."""
    tokenizer, ids = data.tokenizer(), file.open().tolist()
    end = tokenizer.token_to_id(END_OF_TEXT)
    ends = [i for i, token in enumerate(ids) if token == end]
    starts = [0, *(i + 1 for i in ends[:-1])]
    assert ids[-1] == end
    return [tokenizer.decode(ids[start:stop]) for start, stop in zip(starts, ends, strict=True)]


def test_packing_loses_nothing(texts):
    data = ready(text_data(texts))
    found = [decoded(data, part) for part in data.parts()]
    assert sorted(chain(*found)) == sorted(file.read_text("utf-8") for file in texts.iterdir())


def test_validation_text_is_not_trained_on(texts):
    (texts / "copy.txt").write_bytes((texts / "0.txt").read_bytes())
    data = ready(text_data(texts, val_fraction=0.3))
    train, validation = (decoded(data, part) for part in data.parts())
    assert len(train) + len(validation) == 40
    assert set(train).isdisjoint(validation)
    assert validation


def test_a_second_run_tokenises_nothing(texts, monkeypatch):
    first = ready(text_data(texts))
    monkeypatch.setattr("recipes.data.train_tokenizer", None)
    second = ready(text_data(texts))
    assert second.folder == first.folder


def test_a_changed_corpus_or_vocabulary_is_tokenised_anew(texts):
    folders = {text_data(texts).folder, text_data(texts, vocab_size=310).folder}
    (texts / "0.txt").write_text("something else")
    folders.add(text_data(texts).folder)
    (texts / "1.txt").unlink()
    folders.add(text_data(texts).folder)
    assert len(folders) == 4


def test_an_interrupted_preparation_leaves_nothing(texts, monkeypatch):
    data = text_data(texts)
    with monkeypatch.context() as patch:
        patch.setattr("recipes.data.pack", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            data.prepare_data()
    assert [file.suffix for file in data.cache_dir.iterdir()] in ([".lock"], [])
    ready(data)


@ranks(2)
def test_two_programs_may_prepare_at_once(texts):
    data = text_data(texts)
    dist.barrier()
    ready(data)
    dist.barrier()
    assert [entry for entry in data.cache_dir.iterdir() if entry.is_dir()] == [data.folder]


def test_labels_are_the_ids_one_step_ahead(tmp_path):
    np.arange(50, dtype="uint16").tofile(tmp_path / "ids.bin")
    windows = Windows(TokenFile(tmp_path / "ids.bin", "uint16", start=5), 10)
    assert len(windows) == 4
    assert torch.cat([w["input_ids"] for w in windows_of(windows)]).tolist() == list(range(5, 45))
    assert torch.cat([w["labels"] for w in windows_of(windows)]).tolist() == list(range(6, 46))


def windows_of(windows):
    return [windows[i] for i in range(len(windows))]


def test_windows_travel_without_their_content(tmp_path):
    np.arange(100_000, dtype="uint16").tofile(tmp_path / "ids.bin")
    windows = Windows(TokenFile(tmp_path / "ids.bin", "uint16"), 10)
    parcel = pickle.dumps(windows)
    assert len(parcel) < 1000
    assert torch.equal(pickle.loads(parcel)[7]["labels"], windows[7]["labels"])


def test_the_order_is_a_function_of_seed_and_epoch():
    def order(seed, epoch):
        sampler = ShuffledOrder(100, seed)
        sampler.set_epoch(epoch)
        return tuple(sampler)

    assert order(0, 0) == order(0, 0)
    assert sorted(order(0, 0)) == list(range(100))
    assert len({order(seed, epoch) for seed in range(3) for epoch in range(3)}) == 9


def test_batches_are_those_of_one_device(texts):
    data = ready(text_data(texts))
    first, again = list(data.train_dataloader()), list(data.train_dataloader())
    assert {batch["input_ids"].shape for batch in first} == {(4, 16)}
    assert all(torch.equal(a["labels"], b["labels"]) for a, b in zip(first, again, strict=True))
    assert sum(len(batch["labels"]) for batch in data.val_dataloader()) == len(data.validation)


def test_a_corpus_smaller_than_a_sequence_is_refused(texts):
    with pytest.raises(CorpusError, match=r"train.bin holds \d+ tokens .* data.seq_len=100000, .* give more text"):
        ready(text_data(texts, seq_len=100_000))


def test_too_little_validation_is_refused(texts):
    with pytest.raises(CorpusError, match=r"validation.bin holds \d+ tokens .* a larger data.val_fraction"):
        ready(text_data(texts, seq_len=1000, batch_size=1, val_fraction=0.01))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, "data.vocab_size=0 must be a whole number"),
        ({"batch_size": -1}, "data.batch_size=-1 must be a whole number"),
        ({"seq_len": "long"}, "data.seq_len=long must be a whole number"),
    ],
)
def test_impossible_values_are_refused(texts, changes, message):
    with pytest.raises(ValueError, match=message):
        text_data(texts, **changes)


def test_a_vocabulary_without_room_for_bytes_is_refused(texts):
    with pytest.raises(ValueError, match="vocab_size=256 cannot hold the 256 bytes and the end of text; choose 257"):
        text_data(texts, vocab_size=256).prepare_data()


def test_a_vocabulary_beyond_the_model_is_refused():
    check_vocabulary(300, 300)
    with pytest.raises(CorpusError, match=r"data.vocab_size=301 is more than .*model.config.vocab_size=300"):
        check_vocabulary(301, 300)


def test_the_narrowest_type_is_chosen():
    assert [id_dtype(size) for size in (257, 65_536, 65_537)] == ["uint16", "uint16", "uint32"]


def token_data(path, **changes):
    options = {"vocab_size": 100, "seq_len": 10, "batch_size": 2, "cache_dir": str(path.parent / "cache")}
    return TokenData(str(path), **{**options, **changes})


@pytest.mark.parametrize("name", ["ids.npy", "ids.bin"])
def test_token_files_hold_out_their_end(tmp_path, name):
    ids = np.arange(1000, dtype="uint16") % 100
    np.save(tmp_path / name, ids) if name == "ids.npy" else ids.tofile(tmp_path / name)
    data = ready(token_data(tmp_path / name, val_fraction=0.1))
    assert [len(part.open()) for part in data.parts()] == [900, 100]
    assert data.train[0]["labels"].tolist() == list(range(1, 11))
    assert data.tokenizer() is None


def test_token_files_may_bring_their_validation(tmp_path):
    for name, count in (("train.bin", 500), ("val.bin", 50)):
        np.zeros(count, dtype="uint16").tofile(tmp_path / name)
    data = ready(token_data(tmp_path / "train.bin", validation_path=str(tmp_path / "val.bin")))
    assert [len(part.open()) for part in data.parts()] == [500, 50]


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (None, "ids.bin", r"ids.bin does not exist .*; name a file of token ids in data.path"),
        (b"", "ids.bin", r"ids.bin is empty; name a file of token ids"),
        (b"abc", "ids.bin", r"ids.bin cannot be read as uint16 ids .*; correct data.dtype"),
        (np.full(40, 100), "ids.npy", r"ids.npy holds ids from 100 to 100, but the model knows 0 to 99; set .* 101"),
        (np.full(40, -1), "ids.npy", r"ids.npy holds ids from -1 to -1"),
        (np.zeros(40), "ids.npy", r"ids.npy holds float64 of shape \(40,\); store one row of integers"),
    ],
)
def test_wrong_token_files_are_named(tmp_path, content, name, message):
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    elif content is not None:
        np.save(tmp_path / name, content)
    with pytest.raises(CorpusError, match=message):
        token_data(tmp_path / name).prepare_data()


def test_a_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(CorpusError, match=r"tokenizer_path=nowhere.json does not exist; name a tokenizer.json"):
        token_data(tmp_path / "ids.bin", tokenizer_path="nowhere.json").prepare_data()


def test_a_tokenizer_of_another_vocabulary_is_named(tmp_path, texts):
    tokenizer_path = ready(text_data(texts)).folder / "tokenizer.json"
    with pytest.raises(CorpusError, match=r"tokenizer.json has 300 ids, but the model knows vocab_size=100; .*=300"):
        token_data(tmp_path / "ids.bin", tokenizer_path=str(tokenizer_path)).prepare_data()
