"""Train a model: ``python recipes/train.py [group=choice] [group.key=value] …``, or ``lightning-parallel train …``."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import sysconfig
import warnings
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.types import RunMode
from hydra.utils import instantiate
from lightning.pytorch import Trainer, seed_everything
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue

# As a script, this file finds the recipes as an import from the repository's root does.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import lightning_parallel as lp
from lightning_parallel.techniques.technique import Technique
from recipes import checks
from recipes.data import TokenData
from recipes.gpt import GPTModule
from recipes.report import report

# Values of conf/ that depend on the machine: all visible GPUs, else two processes; the folder of the standard library.
OmegaConf.register_new_resolver("default_devices", lambda: torch.cuda.device_count() or 2, replace=True)
OmegaConf.register_new_resolver("stdlib", lambda: sysconfig.get_path("stdlib"), replace=True)
# The group technique of the configuration: every technique of the library, as tensor_parallel, with its defaults.
classes: list[Any] = [each for each in vars(lp).values() if isinstance(each, type) and issubclass(each, Technique)]
for technique in classes:
    options = {field.name: field.default for field in dataclasses.fields(technique) if field.init}
    ConfigStore.instance().store(
        group="technique",
        name=re.sub(r"(?<!^)(?=[A-Z])", "_", technique.__name__).lower(),
        node={"_target_": f"lightning_parallel.{technique.__name__}", **options},
    )
# Lightning calls a function of torch that torch has deprecated; users cannot change that.
warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*")


def train(config: DictConfig) -> None:
    """Fit, validate and report."""
    checks.whole(1, sample__count=config.sample.count)  # would fail at the end
    checks.number(0, sample__temperature=config.sample.temperature)
    checks.whole(0, seed=config.seed)
    seed_everything(config.seed, verbose=False)
    data: TokenData = instantiate(config.data)
    model: GPTModule = instantiate(config.model)
    checks.whole(data.vocab_size, model__config__vocab_size=model.config.vocab_size)
    trainer: Trainer = instantiate(
        config.trainer,
        strategy=instantiate(config.strategy),
        callbacks=[callback for callback in instantiate(config.callbacks).values() if callback is not None],
        logger=instantiate(config.logger) or False,
    )
    if trainer.local_rank == 0:  # before other ranks start: a mistake in the data is told once and stops nobody midway
        data.prepare_data()
        data.setup("fit")
    trainer.fit(model, datamodule=data, ckpt_path=config.ckpt_path)
    metrics = trainer.validate(model, datamodule=data, verbose=False)
    if trainer.is_global_zero:
        report(Path(config.output_dir), model, data.tokenizer(), dict(metrics[0]), **config.sample)


@hydra.main(version_base="1.3", config_path="../conf", config_name="train")
def main(config: DictConfig) -> None:
    """Train once; each job of a sweep is a program of its own, for a process can start its ranks only once."""
    job = HydraConfig.get()
    if job.mode is RunMode.MULTIRUN:
        overrides = [*job.overrides.task, f'hydra.run.dir="{job.runtime.output_dir}"']
        ended = subprocess.run([sys.executable, __file__, *overrides], check=False)
        if ended.returncode:
            raise SystemExit(ended.returncode)
        return
    try:
        train(config)
    except (checks.ConfigurationError, InstantiationException, MissingMandatoryValue) as error:
        raise SystemExit(str(error)) from error  # one paragraph instead of a traceback


if __name__ == "__main__":
    main()
