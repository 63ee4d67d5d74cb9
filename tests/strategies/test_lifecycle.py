"""What a run changes of the trainer and the process is given back; what is wrong before a run is said before it."""

import os
import stat
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader

from lightning_parallel import (
    DataParallel,
    DataParallelStrategy,
    HybridStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeroStrategy,
)
from lightning_parallel.strategies import rank_strategy
from lightning_parallel.strategies.checkpoint.reading import AtomicCheckpointIO
from lightning_parallel.strategies.data.loaders import DataSharding, divide
from lightning_parallel.strategies.data.randomness import state_of_data_rank
from tests.further.points import Handwritten
from tests.heard import heard
from tests.models import points
from tests.ranks import run_on_ranks
from tests.tiers import sampled
from tests.trainers import trainer


class FailingHook(Callback):
    def __init__(self, hook: str) -> None:
        setattr(self, hook, self.fail)

    def fail(self, *_: Any, **__: Any) -> None:
        raise ValueError("a user's mistake")


class Thawing(BaseFinetuning):
    """Fails where Lightning lets it add parameters to the optimizer."""

    def freeze_before_training(self, pl_module: LightningModule) -> None:
        pass

    def finetune_function(self, *_: Any) -> None:
        raise ValueError("a user's mistake")


HOOKS = ["", "on_fit_start", "on_train_batch_start", "on_validation_epoch_end", "on_predict_batch_start", "thawing"]
PATCHED: tuple[Any, ...] = (BaseFinetuning, LightningModule, nn.Module, nn.init, torch, torch.Tensor, torch._C._nn)


def run_and_look(hook: str) -> None:
    user = [Thawing()] if hook == "thawing" else [FailingHook(hook)] if hook else []
    # three samples: in prediction one rank reads a sample that does not count, for which callbacks are hidden
    run = trainer(ZeroStrategy(), max_steps=2, limit_val_batches=1, num_sanity_val_steps=0, callbacks=user)
    loops = (run.fit_loop.epoch_loop.val_loop, run.validate_loop, run.test_loop, run.predict_loop)
    before = ([loop.inference_mode for loop in loops], list(warnings.filters), list(run.callbacks))
    try:
        if "predict" in hook:
            run.predict(BoringModel(), DataLoader(torch.randn(3, 32)))
        else:
            run.fit(BoringModel())
    except ValueError:
        assert hook
    assert ([loop.inference_mode for loop in loops], list(warnings.filters), run.callbacks) == before
    assert run._accelerator_connector.use_distributed_sampler
    assert not any("reset" in vars(loop) for loop in loops)


class Renaming(HybridStrategy):
    """As under a Lightning that names its barriers otherwise."""

    def barrier(self, name: str | None = None) -> None:
        super().barrier("anew" if name == "run-stage" else name)


def runs_that_end() -> None:
    before = [dict(vars(owner)) for owner in PATCHED]
    for hook in HOOKS:
        run_and_look(hook)
    for stage in (2, 3):
        model = BoringModel()
        with pytest.raises(ValueError, match="a user's mistake"):
            trainer(ZeroStrategy(stage=stage), max_steps=2, callbacks=[FailingHook("teardown")]).fit(model)
        run = trainer(ZeroStrategy(stage=stage), max_steps=1, limit_val_batches=1)
        with heard() as lines:
            run.fit(model)
            run.validate(model, verbose=False)
        assert type(model.layer.weight) is nn.Parameter
        assert not [line for line in lines if "ranks train parts" in line], "a run that is over holds no parameters"
    with pytest.raises(RuntimeError, match="before a run, where signal handlers are set"):
        trainer(Renaming(DataParallel()), max_steps=2).fit(BoringModel())
    for owner, was in zip(PATCHED, before, strict=True):
        now = vars(owner)
        assert {name for name in was if now.get(name) is not was[name]} == set(), owner
        new = set() if owner is torch else set(now) - set(was)  # torch loads modules when they are asked for
        assert new <= {"__slotnames__"}, owner  # which pickling notes


@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_trainer_module_and_classes_are_given_back(ranks: int) -> None:
    run_on_ranks(ranks, runs_that_end)


@pytest.mark.parametrize("start_method", ["popen", "spawn", "fork"])
def test_missing_checkpoint_starts_nothing(start_method: Any, tmp_path: Path) -> None:
    strategy = ZeroStrategy(start_method=start_method)
    run = Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False, enable_checkpointing=False)
    with pytest.raises(FileNotFoundError, match="nothing was started"):
        run.fit(BoringModel(), ckpt_path=tmp_path / "none.ckpt")
    assert strategy.launcher is not None
    assert strategy.launcher.procs == []  # type: ignore[attr-defined]


def test_start_method_that_works_in_a_notebook_is_named(monkeypatch: Any) -> None:
    monkeypatch.setattr(rank_strategy, "_IS_INTERACTIVE", True)
    for method in ("popen", "spawn"):
        with pytest.raises(ValueError, match=f"start_method='{method}' .* pass start_method='fork' to the strategy"):
            Trainer(accelerator="cpu", devices=2, strategy=ZeroStrategy(start_method=method))  # type: ignore[arg-type]
    Trainer(accelerator="cpu", devices=2, strategy=ZeroStrategy(start_method="fork"), logger=False)


class Numbers:
    def __iter__(self) -> Any:
        return (torch.tensor([float(n)]) for n in range(8))


def test_loaders_are_divided_once() -> None:
    combined = CombinedLoader([DataLoader(torch.arange(8.0)), Numbers()])
    for _ in range(2):  # Lightning puts divided loaders into a CombinedLoader of the user's, and asks again
        combined.flattened = [divide(loader, DataSharding(2, 1), lambda: 0) for loader in combined.flattened]
    assert [[float(batch) for batch in loader] for loader in combined.flattened] == [[1, 3, 5, 7], [1, 3, 5, 7]]


def test_files_have_the_mode_of_the_process(tmp_path: Path, monkeypatch: Any) -> None:
    before = os.umask(0o027)
    try:
        monkeypatch.setattr(os, "umask", None)  # other threads make files meanwhile
        AtomicCheckpointIO().save_checkpoint({"weights": torch.ones(2)}, tmp_path / "a.ckpt")
    finally:
        monkeypatch.undo()
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.ckpt").stat().st_mode) == 0o640
    assert [file.name for file in tmp_path.iterdir()] == ["a.ckpt"]


def test_devices_of_a_reader_draw_alike_and_others_apart() -> None:
    """Also after a checkpoint of four readers, whose states are apart on the devices of one."""
    for said, wanted in [
        ([(0, b"7"), (0, b"7"), (1, b"7"), (1, b"7")], [b"7", None]),  # all alike, as at the start
        ([(0, b"7"), (1, b"8"), (2, b"9")], [b"7", b"8", b"9"]),
        ([(0, b"1"), (0, b"2"), (1, b"3"), (1, b"4")], [b"1", b"3"]),
        ([(0, b"1"), (0, b"2"), (1, b"1"), (1, b"2")], [b"1", None]),
    ]:
        assert [state_of_data_rank(reader, said) for reader in range(len(wanted))] == wanted


def test_strategies_read_checkpoints_before_they_have_a_trainer(tmp_path: Path) -> None:
    AtomicCheckpointIO().save_checkpoint({"state_dict": {"weight": torch.ones(2)}}, tmp_path / "a.ckpt")
    for strategy in (ZeroStrategy(), PipelineParallelStrategy(), HybridStrategy()):
        assert strategy.load_checkpoint(tmp_path / "a.ckpt")["state_dict"]["weight"].tolist() == [1, 1]


class Slower(Callback):
    """One rank's clock runs ahead of the other's."""

    def __init__(self) -> None:
        self.validated: list[int] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_rank == 0 and trainer.global_step == 2:
            trainer._last_val_time -= 3600  # type: ignore[attr-defined]

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.validated.append(trainer.global_step)


def fit_by_the_clock() -> list[int]:
    slower = Slower()
    run = trainer(
        ZeroStrategy(), max_steps=4, val_check_interval="00:00:30:00", num_sanity_val_steps=0, callbacks=[slower]
    )
    run.fit(BoringModel())
    assert "_should_check_val_fx" not in vars(run.fit_loop.epoch_loop)
    return slower.validated


def test_ranks_validate_by_one_clock() -> None:
    first, second = run_on_ranks(2, fit_by_the_clock)
    assert first == second
    assert first


class Normalised(Handwritten):
    def make(self) -> None:
        super().make()
        self.norm, self.sizes = nn.SyncBatchNorm(8), list[int]()

    def on_train_start(self) -> None:
        self.sizes.append(self.norm.process_group.size())


def sizes_of_norms(strategy: Any) -> list[int]:
    module = Normalised()
    trainer(strategy(), max_steps=1).fit(module, *[DataLoader(points(8, seed=1), batch_size=2)] * 2)
    assert module.norm.process_group is None
    return module.sizes


@sampled(1, ("strategy", "size"), [(DataParallelStrategy, 2), (TensorParallelStrategy, 1)])
def test_synchronised_norms_use_ranks_that_read_other_samples(strategy: Any, size: int) -> None:
    assert run_on_ranks(2, sizes_of_norms, strategy) == [[size], [size]]
