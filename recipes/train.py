"""Train a model: ``python recipes/train.py [group=choice] [group.key=value] …``, or ``lightning-parallel train …``."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import instantiate
from lightning.pytorch import Trainer, seed_everything
from omegaconf import DictConfig

# As a script, this file finds its neighbours like an import from the repository's root does.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from recipes import errors, resolvers
from recipes.data import TokenisedData
from recipes.gpt import GPTModule
from recipes.report import draw_curves, print_report, write_sample

resolvers.register()
# Lightning asks torch in a way that torch has deprecated since; nothing that whoever trains could change.
warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*")


def train(config: DictConfig) -> None:
    """Fit, validate and report."""
    errors.check_techniques(config)
    errors.check_sample(config)
    seed_everything(config.seed, verbose=False)
    data: TokenisedData = instantiate(config.data)
    model: GPTModule = instantiate(config.model)
    errors.check_vocabulary(data.vocab_size, model.config.vocab_size)
    trainer: Trainer = instantiate(
        config.trainer,
        strategy=instantiate(config.strategy),
        callbacks=[callback for callback in instantiate(config.callbacks).values() if callback is not None],
        logger=instantiate(config.logger) or False,
    )
    data.prepare_data()  # before other ranks start, so that a mistake in the data is told once and stops nobody midway
    data.setup("fit")
    trainer.fit(model, datamodule=data, ckpt_path=config.ckpt_path)
    metrics = trainer.validate(model, datamodule=data, verbose=False)
    if trainer.is_global_zero:
        report(config, trainer, model, data, dict(metrics[0]))


def report(
    config: DictConfig, trainer: Trainer, model: GPTModule, data: TokenisedData, metrics: dict[str, float]
) -> None:
    """Print what came out, and draw it."""
    folder = Path(config.output_dir)
    log = folder / "log" / "metrics.csv"
    if log.exists():
        draw_curves(log, folder / "curves.png")
    tokenizer = data.tokenizer()
    sample = write_sample(model, tokenizer, context=model.config.context, **config.sample) if tokenizer else None
    files = {"checkpoint": "checkpoints/last.ckpt", "loss curves": "curves.png", "load of experts": "experts.png"}
    print_report(metrics, sample, {name: folder / file for name, file in files.items()})


def run_apart() -> None:
    """Run one job of a sweep as a program of its own, for it starts ranks, and a process can start them only once."""
    job = HydraConfig.get()
    overrides = [*job.overrides.task, f'hydra.run.dir="{job.runtime.output_dir}"']
    ended = subprocess.run([sys.executable, __file__, *overrides], check=False)
    if ended.returncode:
        raise SystemExit(ended.returncode)


@hydra.main(version_base="1.3", config_path="../conf", config_name="train")
def main(config: DictConfig) -> None:
    """Train once, or once per job of a sweep."""
    if HydraConfig.get().mode is RunMode.MULTIRUN:
        run_apart()
    else:
        train(config)


if __name__ == "__main__":
    with errors.explained():
        main()
