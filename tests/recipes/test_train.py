import re
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

import recipes.train  # noqa: F401  # registers what configurations ask the machine
from recipes.report import read_curve
from tests.ranks import ranks
from tests.trainers import trainer

SCRIPT = Path(__file__).parents[2] / "recipes" / "train.py"
TINY = [
    "trainer.accelerator=cpu",
    "trainer.max_steps=6",
    "trainer.val_check_interval=4",
    "trainer.log_every_n_steps=1",
    "model.config={vocab_size: 300, context: 16, dim: 32, n_layers: 2, n_heads: 2, n_kv_heads: 1, hidden_dim: 32}",
    "data.batch_size=2",
    "sample.count=5",
    "hydra.run.dir=out",
]


def write_texts(folder):
    folder.mkdir()
    for i in range(40):
        (folder / f"{i}.txt").write_text(f"Document {i}: {'word ' * i}\n" * 5)
    return folder


@pytest.fixture
def texts(tmp_path):
    return write_texts(tmp_path / "texts")


def run(folder):
    """The command in a folder that has the texts, on two processes."""
    chosen = ["data=text", "data.path=texts", "data.cache_dir=cache", "trainer.devices=2", "strategy=zero"]
    command = [sys.executable, str(SCRIPT), *TINY, *chosen]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """A run on good texts and one on bad ones, side by side: both mostly import, one process after the other."""
    good, bad = tmp_path_factory.mktemp("good"), tmp_path_factory.mktemp("bad")
    write_texts(good / "texts")
    (write_texts(bad / "texts") / "7.txt").write_bytes(b"\xff\xfe")
    with ThreadPoolExecutor() as executor:
        ended = list(executor.map(run, (good, bad)))
    return {"good": (good, ended[0]), "bad": (bad, ended[1])}


@pytest.mark.launched
def test_run_shows_what_it_learned(launched):
    folder, ended = launched["good"]
    assert ended.returncode == 0, ended.stderr
    said = r"validation loss  \d\.\d+", r"perplexity       \d+", "sample           def", "checkpoint", "loss curves"
    for line in said:
        assert len(re.findall(f"^{line}", ended.stdout, re.MULTILINE)) == 1
    assert "tokens/s" in ended.stdout + ended.stderr
    out = folder / "out"
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "checkpoints" / "last.ckpt").exists()
    assert read_curve(out / "log" / "metrics.csv", "train_loss")[0] == [0, 1, 2, 3, 4, 5]
    assert sorted(entry.name for entry in folder.iterdir()) == ["cache", "out", "texts"]
    assert sorted(entry.name for entry in out.iterdir()) == [".hydra", "checkpoints", "curves.png", "log"]


@pytest.mark.launched
def test_unreadable_data_is_told_once(launched):
    folder, ended = launched["bad"]
    assert ended.returncode != 0
    assert ended.stderr.count("7.txt is not UTF-8 text") == 1
    assert "Traceback" not in ended.stderr
    assert not (folder / "cache").exists()


def fit(out, texts, steps, *overrides, **resume):
    """Train to ``steps`` with the recipe's own parts; return the weights."""
    with initialize_config_dir(str(SCRIPT.parents[1] / "conf"), version_base="1.3"):
        data = "data=text", f"data.path={texts}", f"data.cache_dir={texts}/../cache", f"output_dir={out}"
        rates = "~callbacks.progress", "model.warmup_steps=2", "model.final_lr=1"
        config = compose("train", [*TINY[:-1], *data, *rates, *overrides])  # without Hydra's folder
    torch.manual_seed(0)
    module, callbacks = instantiate(config.model), list(instantiate(config.callbacks).values())
    every = {"val_check_interval": config.trainer.val_check_interval, "check_val_every_n_epoch": None}
    run = {"max_steps": steps, "callbacks": callbacks, "enable_checkpointing": True}
    fitting = trainer(instantiate(config.strategy), **run, **every)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The dirpath has changed")  # a resumed run has a folder of its own
        fitting.fit(module, datamodule=instantiate(config.data), **resume)
    return {name: weight.clone() for name, weight in module.state_dict().items()}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("strategy", "validate_every"),  # resumed at the step after a validation, or at the one at which it happens
    [("zero", 2), ("pipeline_parallel", 3)],
)
@ranks(2)
def test_resumed_run_is_the_uninterrupted_one(tmp_path, texts, strategy, validate_every):
    every = f"strategy={strategy}", f"trainer.val_check_interval={validate_every}"
    whole = fit(tmp_path / "whole", texts, 5, *every)
    fit(tmp_path / "first", texts, 3, *every)
    resumed = fit(tmp_path / "rest", texts, 5, *every, ckpt_path=str(tmp_path / "first" / "checkpoints" / "last.ckpt"))
    assert whole.keys() == resumed.keys()
    assert all(whole[name].equal(resumed[name]) for name in whole)
