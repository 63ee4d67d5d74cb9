"""Runs that start from a Hugging Face folder: `fit(ckpt_path=FOLDER)`, each rank reading its own part."""

import json
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    LlamaConfig,
    MixtralConfig,
    PreTrainedModel,
)

from lightning_parallel import ExpertParallelStrategy, ZeroStrategy
from lightning_parallel.checkpoint import __main__ as command
from lightning_parallel.checkpoint.files import Damaged
from lightning_parallel.checkpoint.hub import INDEX, WEIGHTS, read, to_model_names
from lightning_parallel.checkpoint.lazy_tensor import LazyTensor
from tests.layouts import Layout, layouts
from tests.models import loaders
from tests.ranks import run_on_ranks
from tests.strategies.one_and_two import require_like
from tests.tiers import sampled
from tests.trainers import trainer

SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=True)
MIXTRAL = MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4)
BERT = BertConfig(**SIZES, num_labels=3)
LAYOUTS = layouts("zero 3", "tensor parallel", "pipeline", "pipeline x zero 3")
LAYOUTS["expert"] = Layout(2, 2, partial(ExpertParallelStrategy, 2))


class Wraps(LightningModule):
    """A model of transformers anywhere in a module."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.inner = config, torch.nn.ModuleDict()

    def configure_model(self) -> None:
        if not self.inner:
            self.inner["model"] = self.made()

    def made(self) -> PreTrainedModel:
        return AutoModelForCausalLM.from_config(self.config)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.inner["model"](input_ids=batch["input_ids"], labels=batch["input_ids"]).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Classifies(Wraps):
    """Has a head that the folder does not have."""

    strict_loading = False

    def made(self) -> PreTrainedModel:
        return BertForSequenceClassification(self.config)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.inner["model"](input_ids=batch["input_ids"], labels=batch["input_ids"][:, 0] % 3).loss


def started(module: Wraps, folder: Path, strategy: Any) -> tuple[dict[str, Tensor], int]:
    """The weights with which a run begins, without what is before their names; and how many elements a rank read."""
    elements, within = [0], [False]  # what is joined of several is read within a read
    read_it = LazyTensor.read

    def counted(stored: LazyTensor) -> Tensor:
        outermost, within[0] = not within[0], True
        elements[0] += stored.numel() if outermost else 0
        try:
            return read_it(stored)
        finally:
            within[0] = not outermost

    run = trainer(strategy, max_epochs=1)
    with mock.patch.object(LazyTensor, "read", counted):
        run.fit(module, loaders("gpt", 4).train, ckpt_path=folder)
    assert run.global_step > 0
    return {name.removeprefix("inner.model."): value for name, value in module.state_dict().items()}, elements[0]


def written(model: PreTrainedModel, folder: Path, **options: Any) -> Path:
    torch.manual_seed(3)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model.save_pretrained(folder, **options)
    return folder


class Evaluates(Wraps):
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx))

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.inner["model"](input_ids=batch["input_ids"]).logits


def evaluated(config: Any, folder: Path, strategy: Any) -> tuple[float, list[Tensor]]:
    data = loaders("gpt", 2).train
    (found,) = trainer(strategy()).validate(Evaluates(config), data, ckpt_path=folder)
    return found["loss"], trainer(strategy()).predict(Evaluates(config), data, ckpt_path=folder)


def require_evaluated(config: Any, folder: Path, strategy: Any, readers: int) -> None:
    model, logits = AutoModelForCausalLM.from_pretrained(folder), []
    words = torch.cat([batch["input_ids"] for batch in loaders("gpt", 2).train])
    wanted = model(input_ids=words, labels=words)
    for loss, predicted in run_on_ranks(2, evaluated, config, folder, strategy):
        assert loss == pytest.approx(wanted.loss.item(), rel=1e-5)
        logits.extend(predicted)
    times = 2 // readers  # ranks predict each its own samples, or together the same
    torch.testing.assert_close(torch.cat(logits).sum(0), times * wanted.logits.detach().sum(0), rtol=1e-4, atol=1e-4)


@sampled(
    1,
    ("config", "layout"),
    [
        (LLAMA, "tensor parallel"),
        (LLAMA, "zero 3"),
        (MIXTRAL, "expert"),
        (MIXTRAL, "pipeline"),
        (LLAMA, "pipeline x zero 3"),
    ],
    ids=["llama-tp", "llama-zero", "mixtral-ep", "mixtral-pp", "llama-pp-zero"],
)
def test_model_starts_from_what_from_pretrained_loads(config: Any, layout: str, tmp_path: Path) -> None:
    """And is evaluated with it."""
    n, readers, strategy = LAYOUTS[layout]
    folder = written(AutoModelForCausalLM.from_config(config), tmp_path / "hub", max_shard_size="10KB")
    assert (folder / INDEX).exists()
    expected = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    whole = sum(value.numel() for value in expected.values())
    for found, elements in run_on_ranks(n, started, Wraps(config), folder, strategy()):
        require_like(expected, found, rtol=0, atol=0)
        assert elements < 0.7 * whole
    if config is LLAMA and n == 2:
        require_evaluated(config, folder, strategy, readers)


def said_of(module: Wraps, folder: Path, strict: bool | None = None) -> str:
    module.strict_loading = strict
    with pytest.raises(Damaged) as raised:
        trainer(ZeroStrategy(), max_epochs=1).fit(module, loaders("gpt", 4).train, ckpt_path=folder)
    return str(raised.value)


def test_new_head_keeps_its_first_values(tmp_path: Path) -> None:
    """Unless loading is strict; what does not fit at all is named."""
    folder = written(BertModel(BERT), tmp_path / "hub")
    for said in run_on_ranks(2, said_of, Classifies(BERT), folder, strict=True):
        assert "the folder lacks inner.model.classifier.bias, inner.model.classifier.weight" in said
        assert "strict_loading=False" in said
    for said in run_on_ranks(2, said_of, Wraps(LLAMA), folder):
        assert "no name fits" in said
    (one, _), (two, _) = run_on_ranks(2, started, Classifies(BERT), folder, ZeroStrategy())
    require_like(one, two, rtol=0, atol=0)
    for name, expected in BertModel.from_pretrained(folder).state_dict().items():
        assert one[f"bert.{name}"].equal(expected), name


@pytest.mark.parametrize(
    ("change", "said"), [(Tensor.double, "have different dtypes"), (lambda each: each[1:], "do not fill")]
)
def test_experts_that_differ_in_kind_are_not_stacked(change: Any, said: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(MIXTRAL)
    state = read(written(model, tmp_path / "hub"))
    name = "model.layers.1.block_sparse_moe.experts.2.w1.weight"
    state[name] = change(state[name] + 0)
    with pytest.raises(Damaged, match=said):
        to_model_names(model, state)


def begun_again(folder: Path, path: Path, form: Any) -> list[int]:
    steps = []
    for most in (2, 4):
        saver = ModelCheckpoint(path / "run", every_n_train_steps=1)
        begun = LambdaCallback(on_train_start=lambda trainer, _: steps.append(trainer.global_step))
        strategy = ZeroStrategy(resume="auto", checkpoint=form)
        run = trainer(strategy, max_steps=most, callbacks=[saver, begun], enable_checkpointing=True)
        run.fit(Wraps(MIXTRAL), loaders("gpt", 4).train, ckpt_path=folder)
    run.save_checkpoint(path / "step.ckpt")
    return steps


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@sampled(1, "form", ["full", "sharded"])
def test_run_started_again_resumes_from_its_own_checkpoint(form: str, tmp_path: Path) -> None:
    """Which becomes a folder."""
    folder = written(AutoModelForCausalLM.from_config(MIXTRAL), tmp_path / "hub")
    assert run_on_ranks(2, begun_again, folder, tmp_path, form) == [[0, 2]] * 2
    command.main(["convert", str(tmp_path / "step.ckpt"), str(tmp_path / "out"), "--config", str(folder)])
    expected = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    require_like(expected, AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda folder, index: index["weight_map"].update({"lm_head.weight": "../out.safetensors"}), "not a plain"),
        (lambda folder, index: index["weight_map"].update({"more": WEIGHTS}), "which holds more, is missing"),
        (lambda folder, index: index.pop("weight_map"), "does not say where weights are"),
        (lambda folder, index: next(folder.glob("*-00002-of-*")).write_bytes(b"short"), "has 5 bytes"),
        (lambda folder, index: next(folder.glob("*-00001-of-*")).unlink(), "which holds .*, is missing"),
    ],
)
def test_damaged_folders_are_named(damage: Any, named: str, tmp_path: Path) -> None:
    folder = written(AutoModelForCausalLM.from_config(LLAMA), tmp_path / "hub", max_shard_size="10KB")
    index = json.loads((folder / INDEX).read_text())
    damage(folder, index)
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(Damaged, match=named):
        read(folder)
