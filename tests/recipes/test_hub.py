"""Our GPTs are models of transformers: the same logits from the same weights, there and back."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lightning_parallel import HybridStrategy, PipelineParallelStrategy, ZeroStrategy
from lightning_parallel.checkpoint.hub import INDEX, read, write
from recipes import hub
from recipes.gpt import GPTConfig, GPTModule
from recipes.moe import MoEConfig, MoEModule
from tests.models import loaders
from tests.ranks import run_on_ranks
from tests.tiers import sampled
from tests.trainers import trainer

SIZES = {"vocab_size": 64, "context": 32, "dim": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 24}
EXPERTS = {"n_experts": 4, "top_k": 2, "expert_dim": 12, "n_heads": 2, "n_kv_heads": 1}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"rope_theta": 5000.0, "tied_head": False},
    "llama, tied": {"norm_eps": 1e-3},
    "qwen3": {"qk_norm": True},
    "mixtral": EXPERTS,
    "qwen3_moe": EXPERTS | {"qk_norm": True, "dense_layers": 1, "normalised": False, "tied_head": False},
    "glm4_moe": EXPERTS | {"score": "sigmoid", "n_shared": 2, "dense_layers": 1, "scaling": 1.5, "balance": "bias"},
    "glm4_moe, groups": EXPERTS
    | {"score": "sigmoid", "n_shared": 1, "n_groups": 2, "top_groups": 1, "group_experts": 2, "balance": "aux"},
}


def built(config: dict[str, Any]) -> GPTModule:
    return MoEModule(MoEConfig(**config)) if "n_experts" in config else GPTModule(GPTConfig(**config))


def module(kind: str) -> GPTModule:
    torch.manual_seed(0)
    made = built(SIZES | KINDS[kind])
    made.configure_model()
    for value in made.state_dict().values():
        torch.nn.init.normal_(value, 0.1, 0.2)  # gains of norms and biases of routers too
    return made.eval()


def written(made: GPTModule, folder: Path, *options: str) -> Path:
    """The folder that the command makes of a checkpoint."""
    torch.save({"state_dict": made.state_dict(), "hyper_parameters": dict(made.hparams)}, folder / "one.ckpt")
    hub.main([str(folder / "one.ckpt"), str(folder / "out"), *options])
    return folder / "out"


@pytest.mark.parametrize("kind", KINDS)
def test_models_of_transformers_compute_the_same(kind: str, tmp_path: Path) -> None:
    """There and back: what `from_pretrained` loads, and what `save_pretrained` writes."""
    made = module(kind)
    out = written(made, tmp_path, "--largest", "9000")
    assert (out / INDEX).exists()
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    assert theirs.config.model_type == kind.partition(",")[0]
    ids = torch.randint(SIZES["vocab_size"], (2, 20))
    with torch.no_grad():
        torch.testing.assert_close(made(ids), theirs(ids).logits, rtol=1e-4, atol=1e-5)
    theirs.save_pretrained(tmp_path / "theirs")
    found = hub.weights_for(read(tmp_path / "theirs"), made.network, made.hparams["config"])
    assert found.keys() == made.state_dict().keys()
    assert all((found[name] + 0).equal(value) for name, value in made.state_dict().items())


def started(kind: str, folder: Path, strategy: Any) -> dict[str, torch.Tensor]:
    """The weights with which a run begins."""
    made = built(SIZES | KINDS[kind])
    run = trainer(strategy, max_epochs=1, limit_val_batches=0)
    made.configure_optimizers = lambda: torch.optim.SGD(made.parameters(), lr=0.0)  # type: ignore[method-assign]
    run.fit(made, *loaders("gpt", 4), ckpt_path=folder)
    assert run.global_step > 0
    return made.state_dict()


# the balance of experts is a loss over the batch
FOLDERS = [("llama, tied", ZeroStrategy), ("qwen3_moe", partial(PipelineParallelStrategy, loss_over="batch"))]


@sampled(1, ("kind", "strategy"), FOLDERS)
def test_run_starts_from_such_a_folder(kind: str, strategy: Any, tmp_path: Path) -> None:
    made = module(kind)
    for found in run_on_ranks(2, started, kind, written(made, tmp_path), strategy()):
        torch.testing.assert_close(found, made.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"n_shared": 1}, "n_shared=1: with score=softmax models of transformers have 0 only"),
        ({"dense_layers": 1}, "dense_layers=1: with score=softmax and qk_norm=false"),
        ({"score": "sigmoid"}, "n_shared=0: models of transformers with score=sigmoid have shared experts"),
    ],
)
def test_model_that_transformers_does_not_have_is_told(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    made = built(SIZES | EXPERTS | change)
    made.configure_model()
    with pytest.raises(SystemExit):
        written(made, tmp_path)
    with pytest.raises(ValueError, match=named):
        hub.configuration(made.hparams["config"])
    assert not (tmp_path / "out").exists()


def test_checkpoint_without_our_configuration_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"state_dict": {"weight": torch.ones(2)}}, tmp_path / "other.ckpt")
    with pytest.raises(SystemExit):
        hub.main([str(tmp_path / "other.ckpt"), str(tmp_path / "out")])
    said = capsys.readouterr().err
    assert "holds no configuration of a GPT of these recipes" in said
    assert "python -m lightning_parallel.checkpoint convert" in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"n_heads": 2, "n_kv_heads": 1}, "num_attention_heads=4 where this network has 2"),
        ({"rope_theta": 100.0}, "rope_theta=10000.0 where this network has 100.0"),
        ({"norm_eps": 1e-3}, "rms_norm_eps=1e-05 where this network has 0.001"),
    ],
)
def test_network_that_computes_something_else_is_told(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    out = written(module("qwen3"), tmp_path)
    AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).save_pretrained(tmp_path / "theirs")
    other = built(SIZES | KINDS["qwen3"] | change)
    other.configure_model()
    for folder in (out, tmp_path / "theirs"):
        with pytest.raises(ValueError, match=said):
            hub.weights_for(read(folder), other.network, other.hparams["config"])


def refusals(cases: list[tuple[dict[str, Any], Path]]) -> list[str]:
    said = []
    for config, folder in cases:
        with pytest.raises(RuntimeError) as refused:
            trainer(HybridStrategy(), max_epochs=1).fit(built(config), *loaders("gpt", 4), ckpt_path=folder)
        said.append(str(refused.value))
    return said


def test_weights_of_another_network_are_told(tmp_path: Path) -> None:
    out = written(module("llama"), tmp_path)
    write(tmp_path / "others", {"encoder.weight": torch.ones(2)}, {})
    cases = [(SIZES | KINDS["llama"] | {"n_layers": 1}, out), (SIZES, tmp_path / "others")]
    ((unexpected, missing),) = run_on_ranks(1, refusals, cases)
    assert "Unexpected key" in unexpected
    assert "model.layers.1.input_layernorm.weight" in unexpected
    assert "Missing key" in missing
    assert "network.embed.weight" in missing
