"""Our GPTs are models of transformers: the same logits from the same weights, there and back."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lightning_parallel import HybridStrategy, PipelineParallelStrategy, ZeroStrategy
from lightning_parallel.checkpoint.hub.folder import INDEX, read, write
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


def module(kind: str) -> GPTModule:
    config = SIZES | KINDS[kind]
    made = MoEModule(MoEConfig(**config)) if "n_experts" in config else GPTModule(GPTConfig(**config))
    made.configure_model()
    for value in made.state_dict().values():
        torch.nn.init.normal_(value, 0.1, 0.2)  # gains of norms and biases of routers too
    return made.eval()


def saved(made: GPTModule, path: Path) -> Path:
    torch.save({"state_dict": made.state_dict(), "hyper_parameters": dict(made.hparams)}, path)
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_what_from_pretrained_loads_gives_the_same_logits(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    made = module(kind)
    hub.main([str(saved(made, tmp_path / "one.ckpt")), str(tmp_path / "out"), "--largest", "9000"])
    assert (tmp_path / "out" / INDEX).exists()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert theirs.config.model_type == kind.partition(",")[0]
    ids = torch.randint(SIZES["vocab_size"], (2, 20))
    with torch.no_grad():
        torch.testing.assert_close(made(ids), theirs(ids).logits, rtol=1e-4, atol=1e-5)


def started(kind: str, folder: Path, strategy: Any) -> dict[str, torch.Tensor]:
    """The weights with which a run begins."""
    config = SIZES | KINDS[kind]
    made = MoEModule(MoEConfig(**config)) if "n_experts" in config else GPTModule(GPTConfig(**config))
    run = trainer(strategy, max_epochs=1, limit_val_batches=0)
    made.configure_optimizers = lambda: torch.optim.SGD(made.parameters(), lr=0.0)  # type: ignore[method-assign]
    run.fit(made, *loaders("gpt", 4), ckpt_path=folder)
    assert run.global_step > 0
    return made.state_dict()


@sampled(1, ("kind", "strategy"), [("llama, tied", ZeroStrategy), ("qwen3_moe", PipelineParallelStrategy)])
def test_a_run_starts_from_such_a_folder(kind: str, strategy: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    made = module(kind)
    hub.main([str(saved(made, tmp_path / "one.ckpt")), str(tmp_path / "out")])
    for found in run_on_ranks(2, started, kind, tmp_path / "out", strategy()):
        torch.testing.assert_close(found, made.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"n_shared": 1}, "n_shared=1: with score=softmax models of transformers have 0 only"),
        ({"dense_layers": 1}, "dense_layers=1: with score=softmax and qk_norm=false"),
        ({"score": "sigmoid"}, "n_shared=0: models of transformers with score=sigmoid have shared experts"),
    ],
)
def test_what_no_model_of_transformers_computes_is_told(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    config = MoEConfig(**(SIZES | EXPERTS | change))
    made = MoEModule(config)
    made.configure_model()
    saved(made, tmp_path / "one.ckpt")
    with pytest.raises(SystemExit):
        hub.main([str(tmp_path / "one.ckpt"), str(tmp_path / "out")])
    with pytest.raises(ValueError, match=named):
        hub.form_of(made.hparams["config"])
    assert not (tmp_path / "out").exists()


def test_checkpoint_without_our_configuration_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"state_dict": {"weight": torch.ones(2)}}, tmp_path / "other.ckpt")
    with pytest.raises(SystemExit):
        hub.main([str(tmp_path / "other.ckpt"), str(tmp_path / "out")])
    said = capsys.readouterr().err
    assert "holds no configuration of a GPT of these recipes" in said
    assert "python -m lightning_parallel.checkpoint convert" in said


def refusal(config: GPTConfig, folder: Path) -> str:
    with pytest.raises(RuntimeError) as refused:
        trainer(HybridStrategy(), max_epochs=1).fit(GPTModule(config), *loaders("gpt", 4), ckpt_path=folder)
    return str(refused.value)


def test_weights_that_the_network_does_not_have_are_told(tmp_path: Path) -> None:
    hub.main([str(saved(module("llama"), tmp_path / "one.ckpt")), str(tmp_path / "out")])
    fewer = GPTConfig(**(SIZES | KINDS["llama"] | {"n_layers": 1}))
    (said,) = run_on_ranks(1, refusal, fewer, tmp_path / "out")
    assert "Unexpected key" in said
    assert "model.layers.1.input_layernorm.weight" in said


@pytest.mark.parametrize("kind", KINDS)
def test_what_transformers_writes_is_read(kind: str, tmp_path: Path) -> None:
    made = module(kind)
    hub.main([str(saved(made, tmp_path / "one.ckpt")), str(tmp_path / "out")])
    AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).save_pretrained(tmp_path / "theirs")
    found = hub.weights_for(read(tmp_path / "theirs"), made.network, made.hparams["config"])
    assert found.keys() == made.state_dict().keys()
    assert all((found[name] + 0).equal(value) for name, value in made.state_dict().items())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"n_heads": 2, "n_kv_heads": 1}, "num_attention_heads=4 where this network has 2"),
        ({"rope_theta": 100.0}, "rope_theta=10000.0 where this network has 100.0"),
        ({"norm_eps": 1e-3}, "rms_norm_eps=1e-05 where this network has 0.001"),
    ],
)
def test_network_that_computes_something_else_is_told(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    hub.main([str(saved(module("qwen3"), tmp_path / "one.ckpt")), str(tmp_path / "out")])
    AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).save_pretrained(tmp_path / "theirs")
    other = GPTModule(GPTConfig(**(SIZES | KINDS["qwen3"] | change)))
    other.configure_model()
    for folder in ("out", "theirs"):
        with pytest.raises(ValueError, match=said):
            hub.weights_for(read(tmp_path / folder), other.network, other.hparams["config"])


def test_weights_of_another_kind_are_told(tmp_path: Path) -> None:
    write(tmp_path / "out", {"encoder.weight": torch.ones(2)}, {})
    (said,) = run_on_ranks(1, refusal, GPTConfig(**SIZES), tmp_path / "out")
    assert "Missing key" in said
    assert "network.embed.weight" in said
