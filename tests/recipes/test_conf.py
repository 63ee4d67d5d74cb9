from inspect import signature
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import get_class, instantiate
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.loggers import CSVLogger

from lightning_parallel import HybridStrategy
from lightning_parallel.strategies.rank_strategy import RankStrategy
from recipes import resolvers
from recipes.errors import check_sample, check_techniques, explained
from recipes.gpt import GPTModule

CONF = Path(__file__).parents[2] / "conf"
MILLIONS = {
    "gpt-nano": 1,
    "gpt-124m": 124,
    "gpt-1b": 1076,
    "gpt-7b": 7392,
    "moe-nano": 2,
    "moe-8x124m": 520,
    "moe-30b-a3b": 30079,
}


@pytest.fixture(autouse=True)
def conf():
    resolvers.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield


def choices(group):
    return sorted(file.stem for file in (CONF / group).glob("*.yaml"))


def composed(tmp_path, *overrides):
    return compose("train", [f"output_dir={tmp_path}", *overrides])


@pytest.mark.parametrize("name", choices("model"))
def test_every_model_has_the_size_of_its_name(tmp_path, name):
    module = instantiate(composed(tmp_path, f"model={name}").model)
    assert isinstance(module, GPTModule)
    with torch.device("meta"):
        module.configure_model()
    assert round(sum(p.numel() for p in module.parameters()) / 1e6) == MILLIONS[name]


@pytest.mark.parametrize("name", choices("data"))
def test_every_data_set_follows_the_model(tmp_path, name):
    config = composed(tmp_path, f"data={name}", *([] if name == "stdlib" else ["data.path=x"]), "model=gpt-124m")
    data = instantiate(config.data)
    assert isinstance(data, LightningDataModule)
    assert (data.vocab_size, data.seq_len) == (50304, 1024)


@pytest.mark.parametrize("name", choices("trainer"))
def test_every_trainer(tmp_path, name):
    config = composed(tmp_path, f"trainer={name}", "trainer.accelerator=cpu", "trainer.devices=1")
    callbacks = list(instantiate(config.callbacks).values())
    assert all(isinstance(callback, Callback) for callback in callbacks)
    logger = instantiate(config.logger)
    assert isinstance(logger, CSVLogger)
    assert isinstance(instantiate(config.trainer, callbacks=callbacks, logger=logger), Trainer)


@pytest.mark.parametrize("name", choices("strategy"))
def test_every_strategy(tmp_path, name):
    config = composed(tmp_path, f"strategy={name}")
    assert type(instantiate(config.strategy)).__name__ in config.strategy._target_
    assert config.trainer.devices == (1 if name == "single" else resolvers.default_devices())


OF_LIGHTNING = {"accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"}


@pytest.mark.parametrize("name", choices("strategy"))
def test_every_strategy_has_all_its_options_with_their_defaults(tmp_path, name):
    strategy = composed(tmp_path, f"strategy={name}").strategy
    kind = get_class(strategy._target_)
    parameters = [p for each in (kind, HybridStrategy, RankStrategy) for p in signature(each).parameters.values()]
    defaults = {p.name: p.default for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    wanted = {name: value for name, value in defaults.items() if name not in OF_LIGHTNING | {"techniques"}}
    found = {key: value for key, value in instantiate(strategy, _target_="builtins.dict").items() if key[0] != "_"}
    assert found == wanted


@pytest.mark.parametrize("name", choices("technique"))
def test_every_technique(tmp_path, name):
    config = composed(tmp_path, f"+technique@techniques.it={name}")
    assert type(instantiate(config.techniques.it)).__name__ in config.techniques.it._target_


@pytest.mark.parametrize("name", choices("experiment"))
def test_every_experiment(tmp_path, name):
    config = composed(tmp_path, f"experiment={name}", "data.path=x")
    instantiate(config.strategy)
    instantiate(config.data)
    assert instantiate(config.model).config.vocab_size == config.data.vocab_size


def test_a_hybrid_gathers_its_techniques(tmp_path):
    from lightning_parallel import ActivationCheckpoint, Zero

    config = composed(
        tmp_path,
        "strategy=hybrid",
        "+technique@techniques.zero=zero",
        "techniques.zero.stage=2",
        "+technique@techniques.ac=activation_checkpoint",
    )
    gathered = [instantiate(technique) for technique in config.strategy._args_]
    assert gathered == [Zero(stage=2), ActivationCheckpoint()]
    instantiate(config.strategy)


def test_a_pipeline_takes_its_schedule_from_the_command_line(tmp_path):
    from lightning_parallel import PipelineParallel, Zero

    overrides = ["strategy=pipeline_parallel", "strategy.schedule=zbv", "strategy.split=[1,2,2,1]", "trainer.devices=2"]
    config = composed(tmp_path, *overrides, "strategy.microbatches=8")
    (pipeline,) = instantiate(config.strategy).techniques
    assert pipeline == PipelineParallel(schedule="zbv", microbatches=8, split=(1, 2, 2, 1))
    assert config.trainer.devices == 2

    overrides = ["+technique@techniques.pp=pipeline_parallel", "techniques.pp.size=2", "+technique@techniques.z=zero"]
    config = composed(tmp_path, "strategy=hybrid", *overrides)
    assert [instantiate(technique) for technique in config.strategy._args_] == [PipelineParallel(2), Zero()]


def test_the_command_line_composes(tmp_path):
    config = composed(tmp_path, "strategy=zero", "strategy.stage=2", "trainer.devices=4", "model=gpt-124m")
    assert (config.strategy.stage, config.trainer.devices, config.model.config.n_layers) == (2, 4, 12)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("strategy.stag=2", r"'strategy' has no key 'stag'; choose one of: .*stage"),
        ("sed=1", r"the configuration has no key 'sed'; choose one of: .*seed"),
        ("model.config.width=1", r"'model.config' has no key 'width'; choose one of: .*dim"),
        ("seed.x=1", r"'seed' has no key 'x'; it holds one value"),
        ("strategy=zer", r"Could not find 'strategy/zer'(.|\n)*data_parallel(.|\n)*zero"),
        ("data=text", r"data.path has no default here; give it on the command line, data.path="),
        ("model.config.n_heads=5", r"n_heads=5 does not divide dim=128 .* choose one of(.|\n)*model.config"),
        ("seed=x", r"seed=x must be a whole number, 0 or more"),
        ("sample.temperature=-1", r"sample.temperature=-1 must be a number, 0 or more"),
        ("data.val_fraction=2", r"data.val_fraction=2 must be a number, 0 or more and less than 1"),
        ("data.skip_unreadable=no", r"data.skip_unreadable=no must be true or false"),
        ("model.learning_rate=x", r"learning_rate=x must be a number, 0 or more"),
        ("model.betas=[0.9,1.0]", r"betas.1=1.0 must be a number, 0 or more and less than 1"),
        ("model.betas=[0.9]", r"betas=\[0.9\] must be a list of 2 numbers"),
        ("techniques.tp.size=2", r"no technique 'tp' yet; add it before: '\+technique@techniques.tp=CHOICE'"),
        ("model.fused=no", r"fused=no must be true or false"),
        ("+technique@techniques.ac=activation_checkpoint", r"techniques=\['ac'\] need strategy=hybrid; ZeroStrategy"),
        ("+technique=zero", r"a technique has a name"),
        ("data.batch_size=0", r"data.batch_size=0 must be a whole number"),
        ("+data.foo=0", r"unexpected keyword argument 'foo'(.|\n)*full_key: data"),
    ],
)
def test_a_mistake_is_told_with_its_remedy(tmp_path, monkeypatch, override, message):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(SystemExit, match=message):
        compose_and_build(tmp_path, override)


@explained()
def compose_and_build(tmp_path, override):
    config = composed(tmp_path, override)
    check_techniques(config)
    check_sample(config)
    instantiate(config.data)
    instantiate(config.model)
