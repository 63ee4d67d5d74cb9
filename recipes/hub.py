"""Our GPTs as models of transformers: what their weights are called there, and what ``config.json`` says.

================ ================================================= ==========================================
Theirs           ours, dense                                       ours, with experts
================ ================================================= ==========================================
Llama, Mixtral   any                                               softmax, every layer, weights that add up to one
Qwen3, Qwen3-MoE ``qk_norm=true``                                  ``qk_norm=true``, softmax
GLM-4-MoE                                                          sigmoid, shared experts
================ ================================================= ==========================================
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.checkpoint.hub.folder import LARGEST, HubState, write
from lightning_parallel.checkpoint.hub.names import Names, from_hub, parts_of, to_hub
from lightning_parallel.checkpoint.hub.weights import content_of, weights_of
from recipes import checks

PREFIX = "network."  # of our weights in the module
BLOCK, LAYER = "blocks.*", "model.layers.*"
CORRECTION = ".mlp.gate.e_score_correction_bias"
DENSE = (
    Names("embed.weight", ("model.embed_tokens.weight",)),
    Names("norm.weight", ("model.norm.weight",)),
    Names("head.weight", ("lm_head.weight",)),
    Names(f"{BLOCK}.attention_norm.weight", (f"{LAYER}.input_layernorm.weight",)),
    Names(f"{BLOCK}.feed_forward_norm.weight", (f"{LAYER}.post_attention_layernorm.weight",)),
    Names(f"{BLOCK}.attention.*.weight", (f"{LAYER}.self_attn.*.weight",)),
    Names(f"{BLOCK}.feed_forward.router.correction", (f"{LAYER}{CORRECTION}",)),
    Names(f"{BLOCK}.feed_forward.shared.*.weight", (f"{LAYER}.mlp.shared_experts.*.weight",)),
)
UNLIKE = {"architectures", "model_type", "dtype", "max_position_embeddings", "num_hidden_layers"}
"""What a configuration may say otherwise: it changes nothing of what weights compute, or loading them tells of it."""


def _experts(layer: str, router: str, gate: str, up: str, down: str) -> tuple[Names, ...]:
    return (
        Names(f"{BLOCK}.feed_forward.router.weight", (f"{layer}.{router}.weight",)),
        Names(
            f"{BLOCK}.feed_forward.experts.gate_up_proj",
            (f"{layer}.experts.#.{gate}.weight", f"{layer}.experts.#.{up}.weight"),
        ),
        Names(f"{BLOCK}.feed_forward.experts.down_proj", (f"{layer}.experts.#.{down}.weight",)),
        Names(f"{BLOCK}.feed_forward.*.weight", (f"{layer}.*.weight",)),
    )


MIXTRAL = (*DENSE, *_experts(f"{LAYER}.block_sparse_moe", "gate", "w1", "w3", "w2"))
OTHERS = (*DENSE, *_experts(f"{LAYER}.mlp", "gate", "gate_proj", "up_proj", "down_proj"))


@dataclass(frozen=True)
class Form:
    """A kind of model of transformers.

    Attributes:
        type: Its ``model_type``.
        architecture: Its class.
        names: What it calls our weights.
        more: What its configuration says besides the usual.
    """

    type: str
    architecture: str
    names: tuple[Names, ...] = OTHERS
    more: Mapping[str, Any] = field(default_factory=dict)


def form_of(config: Mapping[str, Any]) -> Form:
    """Return the kind of model that computes as ours does.

    Args:
        config: The fields of a GPTConfig or a MoEConfig.

    Raises:
        ConfigurationError: There is none.
    """
    if "n_experts" not in config:
        return Form("qwen3", "Qwen3ForCausalLM") if config["qk_norm"] else Form("llama", "LlamaForCausalLM")
    chosen = {"num_experts_per_tok": config["top_k"]}
    sizes = chosen | {"moe_intermediate_size": config["expert_dim"], "norm_topk_prob": config["normalised"]}
    if config["score"] == "sigmoid":
        return _glm(config, sizes)
    for name, plain in (("n_shared", 0), ("scaling", 1.0), ("n_groups", 1), ("balance", ("aux", "none"))):
        _require(config, name, *(plain if isinstance(plain, tuple) else (plain,)), where="with score=softmax")
    if config["qk_norm"]:
        dense = {"num_experts": config["n_experts"], "mlp_only_layers": list(range(config["dense_layers"]))}
        return Form("qwen3_moe", "Qwen3MoeForCausalLM", OTHERS, sizes | dense | {"decoder_sparse_step": 1})
    for name, plain in (("dense_layers", 0), ("normalised", True)):
        _require(config, name, plain, where="with score=softmax and qk_norm=false")
    mixed = {"num_local_experts": config["n_experts"], "intermediate_size": config["expert_dim"]}
    return Form("mixtral", "MixtralForCausalLM", MIXTRAL, chosen | mixed | {"sliding_window": None})


def _glm(config: Mapping[str, Any], sizes: Mapping[str, Any]) -> Form:
    if not config["n_shared"]:
        raise checks.ConfigurationError("n_shared=0: models of transformers with score=sigmoid have shared experts")
    if config["n_groups"] > 1:
        _require(config, "group_experts", 2, where="with groups")
    more = {
        "n_routed_experts": config["n_experts"],
        "n_shared_experts": config["n_shared"],
        "first_k_dense_replace": config["dense_layers"],
        "routed_scaling_factor": config["scaling"],
        "n_group": config["n_groups"],
        "topk_group": config["top_groups"],
        "use_qk_norm": config["qk_norm"],
        "partial_rotary_factor": 1.0,
    }
    return Form("glm4_moe", "Glm4MoeForCausalLM", OTHERS, {**sizes, **more})


def _require(config: Mapping[str, Any], name: str, *allowed: object, where: str) -> None:
    if config[name] not in allowed:
        choices = " or ".join(map(str, allowed))
        raise checks.ConfigurationError(
            f"{name}={config[name]}: {where} models of transformers have {choices} only; a checkpoint of ours keeps it"
        )


def configuration(config: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Return what ``config.json`` says of a model."""
    form = form_of(config)
    usual = {
        "architectures": [form.architecture],
        "model_type": form.type,
        "dtype": str(dtype).removeprefix("torch."),
        "vocab_size": config["vocab_size"],
        "max_position_embeddings": config["context"],
        "hidden_size": config["dim"],
        "head_dim": config["dim"] // config["n_heads"],
        "intermediate_size": config["hidden_dim"],
        "num_hidden_layers": config["n_layers"],
        "num_attention_heads": config["n_heads"],
        "num_key_value_heads": config["n_kv_heads"],
        "rms_norm_eps": config["norm_eps"],
        "rope_theta": config["rope_theta"],
        "tie_word_embeddings": config["tied_head"],
        "hidden_act": "silu",
        "attention_bias": False,
    }
    return usual | dict(form.more)


def weights_for(state: HubState, module: torch.nn.Module, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the weights of a Hugging Face folder under the names of our network, each still on the disk.

    Those of which the network makes no use keep their names, so that a strict load tells of them.

    Raises:
        ConfigurationError: The folder's model computes something else with them.
    """
    _require_same_computation(state, config)
    shapes = {name: tuple(value.shape) for name, value in module.state_dict(keep_vars=True).items()}
    known = form_of(config).names
    found = from_hub(state, shapes, known)
    if config["tied_head"] and "embed.weight" in found:
        found.setdefault("head.weight", found["embed.weight"])
    used = {part.hub for name, shape in shapes.items() for part in parts_of(name, shape, known)} | shapes.keys()
    unused = {name: value for name, value in state.items() if name not in used and not _changes_nothing(name, value)}
    return {PREFIX + name: value for name, value in found.items()} | unused


def _require_same_computation(state: HubState, config: Mapping[str, Any]) -> None:
    own = configuration(config) | {"rope_type": "default"}
    theirs = {**state.config, **(state.config.get("rope_scaling") or {}), **(state.config.get("rope_parameters") or {})}
    differing = [name for name in own.keys() - UNLIKE if theirs.get(name) is not None and theirs[name] != own[name]]
    if differing:
        said = ", ".join(f"{name}={theirs[name]} where this network has {own[name]}" for name in sorted(differing))
        raise checks.ConfigurationError(f"{state.path} says {said}; configure the network as its config.json does")


def _changes_nothing(name: str, value: Tensor) -> bool:
    """Return whether a weight is the bias of a router that is not balanced by one, as `_zero_corrections` makes it."""
    return name.endswith(CORRECTION) and not value.any()


def main(arguments: Sequence[str] | None = None) -> None:
    """Make a Hugging Face folder of a checkpoint of ours."""
    line = argparse.ArgumentParser(description="Makes a folder that from_pretrained loads of a checkpoint.")
    line.add_argument("checkpoint", type=Path, help="of a GPT of these recipes, full or sharded")
    line.add_argument("folder", type=Path, help="to write, with config.json and weights as safetensors")
    line.add_argument("--largest", type=int, default=LARGEST, help="bytes of tensors in a file")
    chosen = line.parse_args(arguments)
    try:
        content = content_of(chosen.checkpoint)
        config = _config_of(content, chosen.checkpoint)
        weights = weights_of(content, PREFIX)
        form = form_of(config)
        if config["tied_head"]:
            del weights["head.weight"]
        if form.type == "glm4_moe":
            weights |= _zero_corrections(weights)
        said = configuration(config, weights["embed.weight"].dtype)
        write(chosen.folder, to_hub(weights, form.names), said, chosen.largest)
    except (ValueError, OSError) as error:
        line.exit(1, f"error: {error}\n")
    print(f"{chosen.folder} written: a {form.architecture} that from_pretrained loads")


def _config_of(content: Mapping[str, Any], path: Path) -> dict[str, Any]:
    config = (content.get("hyper_parameters") or {}).get("config")
    if not isinstance(config, Mapping):
        raise checks.ConfigurationError(
            f"{path} holds no configuration of a GPT of these recipes, hyper_parameters['config']; for another module "
            "use python -m lightning_parallel.checkpoint convert, which is given the config.json"
        )
    return {"qk_norm": False, **config}  # checkpoints from before it was an option do not have it


def _zero_corrections(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return zeros for the bias of routers that are not balanced by one; theirs always have it."""
    routers = [name for name in weights if name.endswith(".router.weight")]
    missing = {name.replace(".weight", ".correction"): len(weights[name]) for name in routers}
    return {name: torch.zeros(size) for name, size in missing.items() if name not in weights}


if __name__ == "__main__":
    main()
