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
    DataParallelStrategy,
    HybridStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeroStrategy,
)
from lightning_parallel.strategies import lightning_internals as internals
from lightning_parallel.strategies.checkpoint.reading import AtomicCheckpointIO
from lightning_parallel.strategies.data.loaders import DataSharding, divide
from lightning_parallel.strategies.data.randomness import state_of_data_rank
from lightning_parallel.strategies.ranks import launchers
from tests.heard import heard
from tests.models import build, loaders
from tests.ranks import run_on_ranks
from tests.trainers import trainer


class FailingHook(Callback):
    def __init__(self, hook: str) -> None:
        setattr(self, hook, self.fail)

    def fail(self, *_: Any, **__: Any) -> None:
        raise ValueError("a user's mistake")


HOOKS = ["", "on_fit_start", "on_train_batch_start", "on_validation_epoch_end", "on_predict_batch_start"]


def run_and_look(hook: str) -> None:
    user = [FailingHook(hook)] if hook else []
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
    assert internals.divides_data(run)
    assert not any("reset" in vars(loop) for loop in loops)


@pytest.mark.parametrize("hook", HOOKS)
def test_the_trainer_is_given_back_as_it_was(hook: str) -> None:
    run_on_ranks(2, run_and_look, hook)


def fail_when_all_is_over(stage: int) -> str:
    model = BoringModel()
    with pytest.raises(ValueError, match="a user's mistake"):
        trainer(ZeroStrategy(stage=stage), max_steps=2, callbacks=[FailingHook("teardown")]).fit(model)
    going_on = trainer(ZeroStrategy(stage=stage), max_steps=1)
    going_on.fit(model)
    return type(model.layer.weight).__name__


@pytest.mark.parametrize("stage", [2, 3])
def test_a_hook_that_fails_when_all_is_over_leaves_a_whole_model(stage: int) -> None:
    assert run_on_ranks(2, fail_when_all_is_over, stage) == ["Parameter", "Parameter"]


def fit_and_validate() -> list[str]:
    run, model = trainer(ZeroStrategy(), max_steps=2), BoringModel()
    with heard() as lines:
        run.fit(model)
        run.validate(model, verbose=False)
    return [line for line in lines if "ranks train parts" in line]


def test_a_run_that_is_over_holds_no_parameters_of_which_the_next_one_would_tell() -> None:
    assert run_on_ranks(2, fit_and_validate) == [[], []]


def zero_grad_after_a_pipeline() -> list[bool]:
    run = trainer(PipelineParallelStrategy(2), max_epochs=1)
    run.fit(build("gpt2", n_layer=2), *loaders("gpt2", 8, samples=8, val_samples=8))
    return ["zero_grad" in vars(each) for each in run.optimizers]


def test_optimizers_of_a_pipeline_have_their_own_zero_grad_again() -> None:
    assert run_on_ranks(2, zero_grad_after_a_pipeline) == [[False], [False]]


def test_a_single_device_gives_back_too() -> None:
    run_on_ranks(1, run_and_look, "on_train_batch_start")


class Built(BoringModel):
    """A part is built by the strategy, which records what `nn.init` draws."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)

    def configure_model(self) -> None:
        self.layer = nn.Linear(32, 2)
        nn.init.trunc_normal_(self.layer.weight)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(self.first(x))


class Thawing(BaseFinetuning):
    """Adds parameters to the optimizer when an epoch begins, in a place where it may fail."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.fails = fails

    def freeze_before_training(self, pl_module: LightningModule) -> None:
        self.freeze(pl_module.first)

    def finetune_function(self, pl_module: LightningModule, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.first, optimizer)
            if self.fails:
                raise ValueError("a user's mistake")


PATCHED: tuple[Any, ...] = (BaseFinetuning, LightningModule, nn.Module, nn.init, torch, torch.Tensor, torch._C._nn)


def run_and_look_at_others(fails: bool) -> None:
    before = [dict(vars(owner)) for owner in PATCHED]
    run = trainer(ZeroStrategy(), max_epochs=3, limit_train_batches=2, limit_val_batches=1, callbacks=[Thawing(fails)])
    try:
        run.fit(Built())
    except ValueError:
        assert fails
    assert run.current_epoch == (1 if fails else 3)
    for owner, was in zip(PATCHED, before, strict=True):
        now = vars(owner)
        assert {name for name in was if now.get(name) is not was[name]} == set(), owner
        new = set() if owner is torch else set(now) - set(was)  # torch loads modules when they are asked for
        assert new <= {"__slotnames__"}, owner  # which pickling notes


@pytest.mark.parametrize("fails", [False, True])
def test_classes_and_modules_of_others_are_as_they_were(fails: bool) -> None:
    run_on_ranks(2, run_and_look_at_others, fails)


class Renaming(HybridStrategy):
    def barrier(self, name: str | None = None) -> None:
        super().barrier("anew" if name == "run-stage" else name)


def fit_where_nobody_says_that_the_run_begins() -> None:
    with pytest.raises(RuntimeError, match="before a run, by which signals are taken over"):
        trainer(Renaming(), max_steps=2).fit(BoringModel())


def test_a_lightning_that_names_its_barriers_otherwise_is_refused() -> None:
    run_on_ranks(1, fit_where_nobody_says_that_the_run_begins)


@pytest.mark.parametrize("start_method", ["popen", "spawn", "fork"])
def test_a_checkpoint_that_is_not_there_starts_nothing(start_method: Any, tmp_path: Path) -> None:
    strategy = ZeroStrategy(start_method=start_method)
    run = Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False, enable_checkpointing=False)
    with pytest.raises(FileNotFoundError, match="nothing was started"):
        run.fit(BoringModel(), ckpt_path=tmp_path / "none.ckpt")
    assert strategy.launcher is not None
    assert strategy.launcher.procs == []  # type: ignore[attr-defined]


@pytest.mark.parametrize("start_method", ["popen", "spawn"])
def test_in_a_notebook_the_start_method_that_works_there_is_named(start_method: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(launchers, "_IS_INTERACTIVE", True)
    with pytest.raises(ValueError, match=f"start_method='{start_method}' .* pass start_method='fork' to the strategy"):
        Trainer(accelerator="cpu", devices=2, strategy=ZeroStrategy(start_method=start_method))
    Trainer(accelerator="cpu", devices=2, strategy=ZeroStrategy(start_method="fork"), logger=False)


class Numbers:
    def __iter__(self) -> Any:
        return (torch.tensor([float(n)]) for n in range(8))


def test_loaders_are_divided_once() -> None:
    combined = CombinedLoader([DataLoader(torch.arange(8.0)), Numbers()])
    for _ in range(2):  # Lightning puts divided loaders into a CombinedLoader of the user's, and asks again
        combined.flattened = [divide(loader, DataSharding(2, 1), lambda: 0) for loader in combined.flattened]
    assert [[float(batch) for batch in loader] for loader in combined.flattened] == [[1, 3, 5, 7], [1, 3, 5, 7]]


def test_files_have_the_mode_of_the_process_which_stays_untouched(tmp_path: Path, monkeypatch: Any) -> None:
    before = os.umask(0o027)
    try:
        monkeypatch.setattr(os, "umask", None)  # other threads make files meanwhile
        AtomicCheckpointIO().save_checkpoint({"weights": torch.ones(2)}, tmp_path / "a.ckpt")
    finally:
        monkeypatch.undo()
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.ckpt").stat().st_mode) == 0o640
    assert [file.name for file in tmp_path.iterdir()] == ["a.ckpt"]


OF_READERS = {
    "all alike, as at the start": ([(0, b"7"), (0, b"7"), (1, b"7"), (1, b"7")], [b"7", None]),
    "apart already": ([(0, b"7"), (1, b"8"), (2, b"9")], [b"7", b"8", b"9"]),
    "copies apart, as of a checkpoint of four readers": ([(0, b"1"), (0, b"2"), (1, b"3"), (1, b"4")], [b"1", b"3"]),
    "copies apart, readers alike": ([(0, b"1"), (0, b"2"), (1, b"1"), (1, b"2")], [b"1", None]),
}


@pytest.mark.parametrize("case", OF_READERS)
def test_devices_of_a_reader_draw_alike_and_those_of_others_apart(case: str) -> None:
    said, wanted = OF_READERS[case]
    assert [state_of_data_rank(reader, said) for reader in range(len(wanted))] == wanted


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Deferred(LightningModule):
    """Notes which samples it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: nn.ModuleList | None = None
        self.seen: list[float] = []

    def configure_model(self) -> None:
        if self.layers is None:
            self.layers = nn.ModuleList(Layer() for _ in range(2))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen += batch[:, 0].tolist()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert self.layers is not None
        for layer in self.layers:
            batch = layer(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


def order_of(strategy: Any, own_generator: bool) -> list[float]:
    torch.manual_seed(5)
    generator = torch.Generator().manual_seed(1) if own_generator else None
    data = DataLoader(torch.arange(16.0).repeat(8, 1).T, batch_size=4, shuffle=True, generator=generator)
    module = Deferred()
    trainer(strategy, max_epochs=1).fit(module, data)
    return module.seen


@pytest.mark.parametrize("own_generator", [False, True])
def test_a_pipeline_that_builds_its_model_late_reads_in_the_order_of_one_device(own_generator: bool) -> None:
    (alone,) = run_on_ranks(1, order_of, "auto", own_generator)
    assert run_on_ranks(2, order_of, PipelineParallelStrategy(microbatches=2), own_generator) == [alone, alone]


def test_a_strategy_reads_checkpoints_before_it_has_a_trainer(tmp_path: Path) -> None:
    AtomicCheckpointIO().save_checkpoint({"state_dict": {"weight": torch.ones(2)}}, tmp_path / "a.ckpt")
    for strategy in (ZeroStrategy(), PipelineParallelStrategy(), HybridStrategy()):
        assert strategy.load_checkpoint(tmp_path / "a.ckpt")["state_dict"]["weight"].tolist() == [1, 1]


class Validated(Deferred):
    """A start hook may draw, or seed, after the sanity check and before the loader shuffles."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.hook, self.drawn = hook, list[float]()

    def on_train_start(self) -> None:
        if self.hook == "draws":
            torch.rand(3)
        elif self.hook == "seeds":
            torch.manual_seed(11)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self.drawn.append(float(torch.rand(())))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)


def order_after_sanity_check(strategy: Any, hook: str) -> tuple[list[float], list[float]]:
    torch.manual_seed(5)
    data = DataLoader(torch.arange(16.0).repeat(8, 1).T, batch_size=4, shuffle=True)
    module = Validated(hook)
    trainer(strategy, max_epochs=2, num_sanity_val_steps=1).fit(module, data, DataLoader(torch.ones(8, 8), 4))
    return module.seen, module.drawn


@pytest.mark.parametrize("hook", ["", "draws", "seeds"])
def test_a_batch_read_for_a_sanity_check_leaves_order_and_draws_as_on_one_device(hook: str) -> None:
    (alone,) = run_on_ranks(1, order_after_sanity_check, "auto", hook)
    assert run_on_ranks(2, order_after_sanity_check, PipelineParallelStrategy(microbatches=2), hook) == [alone, alone]


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


class Normalised(Deferred):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.sizes = nn.SyncBatchNorm(8), list[int]()

    def on_train_start(self) -> None:
        self.sizes.append(self.norm.process_group.size())


def sizes_of_norms(strategy: Any) -> list[int]:
    module = Normalised()
    trainer(strategy, max_steps=1).fit(module, DataLoader(torch.randn(8, 8), batch_size=2))
    assert module.norm.process_group is None
    return module.sizes


@pytest.mark.parametrize(("strategy", "size"), [(DataParallelStrategy(), 2), (TensorParallelStrategy(), 1)])
def test_synchronised_norms_meet_the_ranks_that_read_other_samples(strategy: Any, size: int) -> None:
    assert run_on_ranks(2, sizes_of_norms, strategy) == [[size], [size]]
