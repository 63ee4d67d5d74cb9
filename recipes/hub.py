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
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.checkpoint.folder import content_of
from lightning_parallel.checkpoint.hub import LARGEST, HubState, Shape, joined, weights_of, write
from lightning_parallel.checkpoint.stored import StoredTensor, all_of, in_memory
from recipes import checks

PREFIX = "network."  # of our weights in the module
CORRECTION = ".mlp.gate.e_score_correction_bias"
RENAMES = {
    "^embed.": "model.embed_tokens.",
    "^norm.": "model.norm.",
    "^head.": "lm_head.",
    "^blocks.": "model.layers.",
    ".attention_norm.": ".input_layernorm.",
    ".feed_forward_norm.": ".post_attention_layernorm.",
    ".attention.": ".self_attn.",
    ".feed_forward.router.correction": CORRECTION,
    ".feed_forward.router.": ".mlp.gate.",
    ".feed_forward.shared.": ".mlp.shared_experts.",
    ".feed_forward.": ".mlp.",
}
"""What stands in names here and there; ^ is where one begins."""

EXPERTS = ".experts."
PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Our experts are stacked; theirs are matrices of their own, and gate and up are two."""
MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}

UNLIKE = {"architectures", "model_type", "dtype", "max_position_embeddings", "num_hidden_layers"}
"""What a configuration may say otherwise: it changes nothing of what weights compute, or loading them tells of it."""

Part = tuple[str, Shape, Shape]
"""A tensor of theirs that is a part of one of ours: its name, its first element in ours, and its shape there."""


def parts_of(name: str, shape: Shape, model_type: str) -> list[Part]:
    """Return the tensors of theirs that make one of ours, ``name``, with its ``shape``."""
    theirs = f"^{name}"
    for ours, other in RENAMES.items():
        theirs = theirs.replace(ours, other)
    theirs = theirs.removeprefix("^")
    mixtral = model_type == "mixtral"
    if mixtral:
        theirs = theirs.replace(".mlp.", ".block_sparse_moe.")
    layer, experts, weight = theirs.partition(EXPERTS)
    if not experts:
        return [(theirs, (0,) * len(shape), shape)]
    kinds = PARTS[weight]
    rows = shape[1] // len(kinds)
    made: list[Part] = []
    for expert in range(shape[0]):
        for number, kind in enumerate(kinds):
            matrix = f"{layer}{EXPERTS}{expert}.{MIXTRAL[kind] if mixtral else kind}.weight"
            made.append((matrix, (expert, number * rows, 0), (1, rows, shape[2])))
    return made


def to_hub(state: Mapping[str, Tensor], model_type: str) -> dict[str, Tensor]:
    """Return our tensors as theirs; a matrix of an expert is cut out when it is used."""
    made: dict[str, Tensor] = {}
    for name, tensor in state.items():
        for theirs, offset, shape in parts_of(name, tuple(tensor.shape), model_type):
            made[theirs] = tensor
            if EXPERTS in name:
                read = partial(_matrix, tensor, offset[0], slice(offset[1], offset[1] + shape[1]))
                made[theirs] = StoredTensor(tensor.dtype, shape[1:], all_of(shape[1:], read))
    return made


def _matrix(stacked: Tensor, expert: int, rows: slice) -> Tensor:
    found: Tensor = in_memory(stacked[expert : expert + 1, rows])
    return found[0]


def from_hub(weights: Mapping[str, Tensor], shapes: Mapping[str, Shape], model_type: str) -> dict[str, Tensor]:
    """Return our tensors, as far as theirs are there; each rank reads of them what it uses.

    Raises:
        ConfigurationError: Some parts of a tensor are missing, or a part has another shape.
    """
    made: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        parts = parts_of(name, shape, model_type)
        missing = [theirs for theirs, _, _ in parts if theirs not in weights]
        if name in weights:  # written under our own names
            made[name] = weights[name]
        if name in weights or len(missing) == len(parts):
            continue
        if missing:
            raise checks.ConfigurationError(f"{name} is made of {len(parts)} tensors, and {missing[0]} is missing")
        for theirs, _, size in parts:
            found, needed = tuple(weights[theirs].shape), size[1:] if EXPERTS in name else size
            if found != needed:
                raise checks.ConfigurationError(
                    f"{theirs} has the shape {found}, and the model needs {needed}; build it from the config.json of "
                    "the same folder"
                )
        made[name] = weights[parts[0][0]]
        if EXPERTS in name:
            made[name] = joined(name, shape, [(offset, size, weights[theirs]) for theirs, offset, size in parts])
    return made


@dataclass(frozen=True)
class Form:
    """A kind of model of transformers.

    Attributes:
        type: Its ``model_type``.
        architecture: Its class.
        more: What its configuration says besides the usual.
    """

    type: str
    architecture: str
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
        return Form("qwen3_moe", "Qwen3MoeForCausalLM", sizes | dense | {"decoder_sparse_step": 1})
    for name, plain in (("dense_layers", 0), ("normalised", True)):
        _require(config, name, plain, where="with score=softmax and qk_norm=false")
    mixed = {"num_local_experts": config["n_experts"], "intermediate_size": config["expert_dim"]}
    return Form("mixtral", "MixtralForCausalLM", chosen | mixed | {"sliding_window": None})


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
    return Form("glm4_moe", "Glm4MoeForCausalLM", {**sizes, **more})


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
    model_type = form_of(config).type
    found = from_hub(state, shapes, model_type)
    if config["tied_head"] and "embed.weight" in found:
        found.setdefault("head.weight", found["embed.weight"])
    used = {part[0] for name, shape in shapes.items() for part in parts_of(name, shape, model_type)} | shapes.keys()
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
        write(chosen.folder, to_hub(weights, form.type), said, chosen.largest)
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
