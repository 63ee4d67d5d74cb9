from inspect import signature
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from omegaconf.errors import MissingMandatoryValue

from lightning_parallel import ActivationCheckpoint, HybridStrategy, PipelineParallel, TensorParallel, Zero
from lightning_parallel.strategies.rank_strategy import RankStrategy
from recipes.checks import ConfigurationError
from recipes.gpt import GPTModule
from recipes.train import train

CONF = Path(__file__).parents[2] / "conf"
MILLIONS = {"gpt-nano": 1, "gpt-124m": 124, "gpt-1b": 1076, "gpt-7b": 7392, "moe-nano": 2, "moe-8x124m": 520}


@pytest.fixture(autouse=True)
def conf():
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield


def choices(group):
    return sorted(file.stem for file in (CONF / group).glob("[!_]*.yaml"))


def composed(tmp_path, *overrides):
    return compose("train", [f"output_dir={tmp_path}", *overrides])


@pytest.mark.parametrize("name", choices("model"))
def test_every_model_has_the_size_of_its_name(tmp_path, name):
    module = instantiate(composed(tmp_path, f"model={name}").model)
    assert isinstance(module, GPTModule)
    with torch.device("meta"):
        module.configure_model()
    assert round(sum(p.numel() for p in module.parameters()) / 1e6) == MILLIONS[name]


def test_every_data_set_follows_the_model(tmp_path):
    for name in choices("data"):
        config = composed(tmp_path, f"data={name}", *([] if name == "stdlib" else ["data.path=x"]), "model=gpt-124m")
        data = instantiate(config.data)
        assert isinstance(data, LightningDataModule)
        assert (data.vocab_size, data.seq_len) == (50304, 1024), name


def test_every_trainer(tmp_path):
    for name in choices("trainer"):
        config = composed(tmp_path, f"trainer={name}", "trainer.accelerator=cpu", "trainer.devices=1")
        callbacks = list(instantiate(config.callbacks).values())
        assert all(isinstance(callback, Callback) for callback in callbacks)
        logger = instantiate(config.logger)
        assert isinstance(logger, CSVLogger)
        assert isinstance(instantiate(config.trainer, callbacks=callbacks, logger=logger), Trainer)


def test_every_strategy(tmp_path):
    for name in choices("strategy"):
        config = composed(tmp_path, f"strategy={name}")
        strategy = instantiate(config.strategy)
        assert isinstance(strategy, HybridStrategy)
        assert len(strategy.techniques) == len(config.techniques), name
        assert config.trainer.devices == (1 if name == "single" else torch.cuda.device_count() or 2), name


OF_LIGHTNING = {"accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"}


def test_strategy_has_all_its_options_with_their_defaults(tmp_path):
    parameters = [p for each in (HybridStrategy, RankStrategy) for p in signature(each).parameters.values()]
    defaults = {p.name: p.default for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    wanted = {name: value for name, value in defaults.items() if name not in OF_LIGHTNING | {"techniques"}}
    strategy = composed(tmp_path).strategy
    found = {key: instantiate(value) if key == "timeout" else value for key, value in strategy.items() if key[0] != "_"}
    assert found == wanted


def test_every_technique_has_all_its_options_with_their_defaults(tmp_path):
    names = GlobalHydra.instance().config_loader().get_group_options("technique")
    assert len(names) == 8
    for name in names:
        technique = instantiate(composed(tmp_path, "strategy=hybrid", f"+technique@techniques.it={name}").techniques.it)
        assert technique == type(technique)()


def test_every_experiment(tmp_path):
    for name in choices("experiment"):
        config = composed(tmp_path, f"experiment={name}", "data.path=x")
        instantiate(config.strategy)
        instantiate(config.data)
        assert instantiate(config.model).config.vocab_size == config.data.vocab_size, name


ZBV = "techniques.pipeline_parallel={schedule: zbv, microbatches: 8, split: [2, 1]}"
COMPOSED = [
    (["strategy=zero", "techniques.zero.stage=2"], [Zero(stage=2)]),
    (["strategy=zero", "+technique@techniques.ac=activation_checkpoint"], [Zero(), ActivationCheckpoint()]),
    (["strategy=hybrid"], []),
    (["strategy=tensor_zero", "trainer.devices=4"], [TensorParallel(2), Zero()]),
    (["strategy=layer_parallel"], [PipelineParallel(schedule="gpipe", microbatches=1)]),
    (["strategy=pipeline_parallel", ZBV], [PipelineParallel(schedule="zbv", microbatches=8, split=(2, 1))]),
]


def test_command_line_composes_techniques(tmp_path):
    for overrides, wanted in COMPOSED:
        config = composed(tmp_path, *overrides, "model=gpt-124m")
        assert sorted(map(repr, instantiate(config.strategy).techniques)) == sorted(map(repr, wanted))
        assert config.model.config.n_layers == 12


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data=text", r"Missing mandatory value: data.path"),
        ("model.config.n_heads=5", r"n_heads=5 does not divide dim=128 .* choose one of(.|\n)*model.config"),
        ("seed=x", r"seed=x must be a whole number, 0 or more"),
        ("sample.temperature=-1", r"sample.temperature=-1 must be a number, 0 or more"),
        ("data.val_fraction=2", r"data.val_fraction=2 must be a number, 0 or more and less than 1"),
        ("model.learning_rate=x", r"learning_rate=x must be a number, 0 or more"),
        ("model.betas=[0.9,1.0]", r"betas.1=1.0 must be a number, 0 or more and less than 1"),
        ("model.fused=no", r"fused=no must be true or false"),
        ("data.batch_size=0", r"data.batch_size=0 must be a whole number"),
        ("data.vocab_size=3000", r"model.config.vocab_size=2048 must be a whole number, 3000 or more"),
        ("+data.foo=0", r"unexpected keyword argument 'foo'(.|\n)*full_key: data"),
    ],
)
def test_mistake_is_told_with_its_remedy(tmp_path, override, message):
    with pytest.raises((ConfigurationError, InstantiationException, MissingMandatoryValue), match=message):
        train(composed(tmp_path, override))
