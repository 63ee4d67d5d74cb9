"""Runs that start from a Hugging Face folder: `fit(ckpt_path=FOLDER)`, each rank reading its own part."""

import json
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
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

from lightning_parallel import (
    ExpertParallelStrategy,
    HybridStrategy,
    PipelineParallel,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    Zero,
    ZeroStrategy,
)
from lightning_parallel.checkpoint import __main__ as command
from lightning_parallel.checkpoint.damage import Damaged
from lightning_parallel.checkpoint.hub.folder import INDEX, WEIGHTS, read
from lightning_parallel.checkpoint.hub.wrapped import under_own_names
from lightning_parallel.checkpoint.stored import StoredTensor
from tests.models import loaders
from tests.ranks import run_on_ranks
from tests.tiers import sampled
from tests.trainers import trainer

SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=True)
MIXTRAL = MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4)
BERT = BertConfig(**SIZES, num_labels=3)


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
    read_it = StoredTensor.read

    def counted(stored: StoredTensor) -> Tensor:
        outermost, within[0] = not within[0], True
        elements[0] += stored.numel() if outermost else 0
        try:
            return read_it(stored)
        finally:
            within[0] = not outermost

    run = trainer(strategy, max_epochs=1)
    with mock.patch.object(StoredTensor, "read", counted):
        run.fit(module, loaders("gpt", 4).train, ckpt_path=folder)
    assert run.global_step > 0
    return {name.removeprefix("inner.model."): value for name, value in module.state_dict().items()}, elements[0]


def written(model: PreTrainedModel, folder: Path, **options: Any) -> Path:
    torch.manual_seed(3)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model.save_pretrained(folder, **options)
    return folder


@sampled(
    1,
    ("config", "n", "strategy"),
    [
        (LLAMA, 2, ZeroStrategy),
        (LLAMA, 2, partial(TensorParallelStrategy, 2)),
        (MIXTRAL, 2, partial(ExpertParallelStrategy, 2)),
        (MIXTRAL, 2, partial(PipelineParallelStrategy, 2)),
        (LLAMA, 4, partial(HybridStrategy, PipelineParallel(2), Zero(2, stage=3))),
    ],
    ids=["llama-zero", "llama-tp", "mixtral-ep", "mixtral-pp", "llama-pp-zero"],
)
def test_a_model_starts_from_what_from_pretrained_loads(config: Any, n: int, strategy: Any, tmp_path: Path) -> None:
    folder = written(AutoModelForCausalLM.from_config(config), tmp_path / "hub", max_shard_size="10KB")
    assert (folder / INDEX).exists()
    expected = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    whole = sum(value.numel() for value in expected.values())
    for found, elements in run_on_ranks(n, started, Wraps(config), folder, strategy()):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert elements < 0.7 * whole


def test_new_head_keeps_its_first_values(tmp_path: Path) -> None:
    folder = written(BertModel(BERT), tmp_path / "hub")
    (one, _), (two, _) = run_on_ranks(2, started, Classifies(BERT), folder, ZeroStrategy())
    torch.testing.assert_close(one, two, rtol=0, atol=0)
    for name, expected in BertModel.from_pretrained(folder).state_dict().items():
        assert one[f"bert.{name}"].equal(expected), name


class Evaluates(Wraps):
    def loss(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss

    validation_step = test_step = loss

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.inner["model"](input_ids=batch["input_ids"]).logits


def evaluated(folder: Path, strategy: Any) -> tuple[float, float, list[Tensor]]:
    data = loaders("gpt", 2).train
    validated = trainer(strategy()).validate(Evaluates(LLAMA), data, ckpt_path=folder)
    tested = trainer(strategy()).test(Evaluates(LLAMA), data, ckpt_path=folder)
    predicted = trainer(strategy()).predict(Evaluates(LLAMA), data, ckpt_path=folder)
    return validated[0]["loss"], tested[0]["loss"], predicted


@sampled(1, "strategy", [ZeroStrategy, partial(TensorParallelStrategy, 2)], ids=["zero", "tp"])
def test_a_model_is_evaluated_from_a_folder(strategy: Any, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(LLAMA)
    folder = written(model, tmp_path / "hub")
    tokens = torch.cat([batch["input_ids"] for batch in loaders("gpt", 2).train])
    expected = float(model(input_ids=tokens, labels=tokens).loss.detach())
    logits, found = model(input_ids=tokens).logits.detach(), []
    for validated, tested, predicted in run_on_ranks(2, evaluated, folder, strategy):
        assert validated == tested == pytest.approx(expected, rel=1e-5)
        found.extend(predicted)
    times = 1 if strategy is ZeroStrategy else 2  # ranks predict each its own samples, or together the same
    torch.testing.assert_close(torch.cat(found).sum(0), times * logits.sum(0), rtol=1e-4, atol=1e-4)


class Trains(Wraps):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_start(self) -> None:
        self.begun_at = self.trainer.global_step


def begun_again(folder: Path, path: Path) -> list[int]:
    steps = []
    for most in (2, 4):
        module = Trains(LLAMA)
        saves = ModelCheckpoint(path, every_n_train_steps=1)
        run = trainer(ZeroStrategy(resume="auto"), max_steps=most, callbacks=[saves], enable_checkpointing=True)
        run.fit(module, loaders("gpt", 4).train, ckpt_path=folder)
        steps.append(module.begun_at)
    return steps


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_run_started_again_resumes_from_its_own_checkpoint(tmp_path: Path) -> None:
    folder = written(AutoModelForCausalLM.from_config(LLAMA), tmp_path / "hub")
    for steps in run_on_ranks(2, begun_again, folder, tmp_path / "run"):
        assert steps == [0, 2]


def refused(module: Wraps, folder: Path) -> str:
    with pytest.raises(Damaged) as raised:
        trainer(ZeroStrategy(), max_epochs=1).fit(module, loaders("gpt", 4).train, ckpt_path=folder)
    return str(raised.value)


def test_what_does_not_fit_is_named_with_a_remedy(tmp_path: Path) -> None:
    folder = written(BertModel(BERT), tmp_path / "hub")
    strict = Classifies(BERT)
    strict.strict_loading = True
    for said in run_on_ranks(2, refused, strict, folder):
        assert "the model has inner.model.classifier.bias, inner.model.classifier.weight, which are not there" in said
        assert "strict_loading=False" in said
    for said in run_on_ranks(2, refused, Wraps(LLAMA), folder):
        assert "no name fits" in said


@pytest.mark.parametrize(
    ("change", "said"), [(Tensor.double, "have different dtypes"), (lambda each: each[1:], "do not fill")]
)
def test_parts_that_are_not_alike_are_not_put_together(change: Any, said: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(MIXTRAL)
    state = read(written(model, tmp_path / "hub"))
    name = "model.layers.1.block_sparse_moe.experts.2.w1.weight"
    state[name] = change(state[name] + 0)
    with pytest.raises(Damaged, match=said):
        under_own_names(model, state)


@sampled(1, "form", ["full", "sharded"])
def test_checkpoints_of_wrapped_models_become_folders(form: str, tmp_path: Path) -> None:
    folder = written(AutoModelForCausalLM.from_config(MIXTRAL), tmp_path / "hub")
    run_on_ranks(2, kept, Wraps(MIXTRAL), folder, tmp_path / "step.ckpt", form)
    command.main(["convert", str(tmp_path / "step.ckpt"), str(tmp_path / "out"), "--config", str(folder)])
    expected = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def kept(module: Wraps, folder: Path, path: Path, form: Any) -> None:
    run = trainer(ZeroStrategy(checkpoint=form), max_steps=1)
    run.fit(module, loaders("gpt", 4).train, ckpt_path=folder)
    run.save_checkpoint(path)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda folder, index: index["weight_map"].update({"lm_head.weight": "../out.safetensors"}), "no plain name"),
        (lambda folder, index: index["weight_map"].update({"more": WEIGHTS}), "is missing, which holds more"),
        (lambda folder, index: index.pop("weight_map"), "does not say where weights are"),
        (lambda folder, index: next(folder.glob("*-00002-of-*")).write_bytes(b"short"), "has 5 bytes"),
        (lambda folder, index: next(folder.glob("*-00001-of-*")).unlink(), "is missing, which holds"),
    ],
)
def test_damaged_folders_are_named(damage: Any, named: str, tmp_path: Path) -> None:
    folder = written(AutoModelForCausalLM.from_config(LLAMA), tmp_path / "hub", max_shard_size="10KB")
    index = json.loads((folder / INDEX).read_text())
    damage(folder, index)
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(Damaged, match=named):
        read(folder)
