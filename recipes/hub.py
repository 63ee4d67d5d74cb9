"""Our GPTs as models of transformers: the names of the weights there, and the content of ``config.json``.

================ ================================================= ==========================================
Model            ours, dense                                       ours, with experts
================ ================================================= ==========================================
Llama, Mixtral   any                                               softmax, every layer, weights that add up to one
Qwen3, Qwen3-MoE ``qk_norm=true``                                  ``qk_norm=true``, softmax
GLM-4-MoE                                                          sigmoid, shared experts
================ ================================================= ==========================================
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.checkpoint.folder import content_of
from lightning_parallel.checkpoint.hub import LARGEST, HubState, Shape, joined, weights_of, write
from lightning_parallel.checkpoint.lazy_tensor import LazyTensor, all_of, in_memory
from recipes.checks import ConfigurationError

PREFIX = "network."  # of our weights in the module
RENAMES = {
    "^embed.": "model.embed_tokens.",
    "^norm.": "model.norm.",
    "^head.": "lm_head.",
    "^blocks.": "model.layers.",
    ".attention_norm.": ".input_layernorm.",
    ".feed_forward_norm.": ".post_attention_layernorm.",
    ".attention.": ".self_attn.",
    ".feed_forward.router.correction": ".mlp.gate.e_score_correction_bias",
    ".feed_forward.router.": ".mlp.gate.",
    ".feed_forward.shared.": ".mlp.shared_experts.",
    ".feed_forward.": ".mlp.",
}
"""Parts of our names and of theirs; ^ is the start of a name."""

EXPERTS = ".experts."
MATRICES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Our experts are stacked, with gate and up in one weight; on the hub each expert has matrices of its own."""
MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}

UNCHECKED = {"architectures", "model_type", "dtype", "max_position_embeddings", "num_hidden_layers"}
"""Settings that may differ when weights are loaded: they do not change the computation, or the names show it."""


def parts_of(name: str, shape: Shape, model_type: str) -> dict[str, tuple[Shape, Shape]]:
    """Return the tensors of the hub that make up our tensor ``name``: the offset and the shape of each in ours."""
    theirs = f"^{name}"
    for ours, other in RENAMES.items():
        theirs = theirs.replace(ours, other)
    theirs = theirs.removeprefix("^")
    mixtral = model_type == "mixtral"
    if mixtral:
        theirs = theirs.replace(".mlp.", ".block_sparse_moe.")
    layer, experts, weight = theirs.partition(EXPERTS)
    if not experts:
        return {theirs: ((0,) * len(shape), shape)}
    count, rows, width = shape[0], shape[1] // len(MATRICES[weight]), shape[2]  # [experts, rows of all matrices, width]
    return {
        f"{layer}{EXPERTS}{expert}.{MIXTRAL[matrix] if mixtral else matrix}.weight": (
            (expert, number * rows, 0),
            (1, rows, width),
        )
        for expert in range(count)
        for number, matrix in enumerate(MATRICES[weight])
    }


def to_hub(state: Mapping[str, Tensor], model_type: str) -> dict[str, Tensor]:
    """Return our tensors under their names; the matrix of an expert is read when it is used."""
    made: dict[str, Tensor] = {}
    for name, tensor in state.items():
        for theirs, (offset, shape) in parts_of(name, tuple(tensor.shape), model_type).items():
            made[theirs] = tensor
            if EXPERTS in name:
                box = tensor[offset[0] : offset[0] + 1, offset[1] : offset[1] + shape[1]]  # [1, rows, width]
                made[theirs] = LazyTensor(tensor.dtype, shape[1:], all_of(shape[1:], partial(_only, box)))
    return made


def _only(box: Tensor) -> Tensor:
    read: Tensor = in_memory(box)[0]
    return read


def weights_for(state: HubState, module: torch.nn.Module, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the weights of a Hugging Face folder under the names of our network; each rank reads what it uses.

    Weights that the network does not have keep their names, and missing ones are left out: a strict load names both.

    Raises:
        ConfigurationError: The folder's model computes something else than the network, or parts of a tensor are
            missing or have another shape.
    """
    wanted = configuration(config) | {"rope_type": "default"}
    theirs = {**state.config, **(state.config.get("rope_scaling") or {}), **(state.config.get("rope_parameters") or {})}
    compared = [name for name in sorted(wanted.keys() - UNCHECKED) if theirs.get(name) is not None]
    if differing := [name for name in compared if theirs[name] != wanted[name]]:
        other = ", ".join(f"{name}={theirs[name]} where this network has {wanted[name]}" for name in differing)
        raise ConfigurationError(f"{state.path} says {other}; configure the network as its config.json does")
    own, unused = module.state_dict(keep_vars=True), dict(state)
    # of a folder under our own names, as `checkpoint convert` writes it
    made: dict[str, Tensor] = {PREFIX + name: unused.pop(name) for name in own if name in unused}
    for name, value in own.items():
        parts = parts_of(name, tuple(value.shape), wanted["model_type"])
        found = {part: unused.pop(part) for part in parts if part in unused}
        if not found:
            continue
        for part, (_, shape) in parts.items():
            needed = shape[1:] if EXPERTS in name else shape
            if part not in found:
                raise ConfigurationError(f"{name} is made of {len(parts)} tensors, and {part} is missing")
            if tuple(found[part].shape) != needed:
                raise ConfigurationError(
                    f"{part} has the shape {tuple(found[part].shape)}, and the model needs {needed}; build it from the "
                    "config.json of the same folder"
                )
        made[PREFIX + name] = next(iter(found.values()))
        if EXPERTS in name:
            pieces = [(offset, shape, found[part]) for part, (offset, shape) in parts.items()]
            made[PREFIX + name] = joined(name, tuple(value.shape), pieces)
    embed, head = f"{PREFIX}embed.weight", f"{PREFIX}head.weight"
    if config["tied_head"] and embed in made:
        made.setdefault(head, made[embed])
    return made | unused


def configuration(config: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Return the content of ``config.json``.

    Args:
        config: Fields of a GPTConfig or a MoEConfig.
        dtype: Type of the weights.

    Raises:
        ConfigurationError: No model of transformers computes the same.
    """
    usual = {
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
    if "n_experts" in config:
        return usual | _experts(config)
    kind = ("qwen3", "Qwen3ForCausalLM") if config["qk_norm"] else ("llama", "LlamaForCausalLM")
    return usual | {"model_type": kind[0], "architectures": [kind[1]]}


def _experts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ``config.json`` says of experts, with the type of the model."""

    def require(name: str, *allowed: object, where: str) -> None:
        if config[name] not in allowed:
            raise ConfigurationError(
                f"{name}={config[name]}: {where} models of transformers have {' or '.join(map(str, allowed))} only; "
                "a checkpoint of ours keeps it"
            )

    sizes = {
        "num_experts_per_tok": config["top_k"],
        "moe_intermediate_size": config["expert_dim"],
        "norm_topk_prob": config["normalised"],
    }
    if config["score"] == "sigmoid":
        if not config["n_shared"]:
            raise ConfigurationError("n_shared=0: models of transformers with score=sigmoid have shared experts")
        if config["n_groups"] > 1:
            require("group_experts", 2, where="with groups")
        return sizes | {
            "model_type": "glm4_moe",
            "architectures": ["Glm4MoeForCausalLM"],
            "n_routed_experts": config["n_experts"],
            "n_shared_experts": config["n_shared"],
            "first_k_dense_replace": config["dense_layers"],
            "routed_scaling_factor": config["scaling"],
            "n_group": config["n_groups"],
            "topk_group": config["top_groups"],
            "use_qk_norm": config["qk_norm"],
            "partial_rotary_factor": 1.0,
        }
    for name, allowed in {"n_shared": 0, "scaling": 1.0, "n_groups": 1}.items():
        require(name, allowed, where="with score=softmax")
    require("balance", "aux", "none", where="with score=softmax")
    if config["qk_norm"]:
        return sizes | {
            "model_type": "qwen3_moe",
            "architectures": ["Qwen3MoeForCausalLM"],
            "num_experts": config["n_experts"],
            "mlp_only_layers": list(range(config["dense_layers"])),
            "decoder_sparse_step": 1,
        }
    require("dense_layers", 0, where="with score=softmax and qk_norm=false")
    require("normalised", True, where="with score=softmax and qk_norm=false")
    return {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "num_experts_per_tok": config["top_k"],
        "num_local_experts": config["n_experts"],
        "intermediate_size": config["expert_dim"],
        "sliding_window": None,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Write a Hugging Face folder from a checkpoint of a GPT of these recipes."""
    line = argparse.ArgumentParser(
        prog="lightning-parallel export", description="Writes a folder that from_pretrained loads, from a checkpoint."
    )
    line.add_argument("checkpoint", type=Path, help="of a GPT of these recipes, full or sharded")
    line.add_argument("folder", type=Path, help="to write, with config.json and weights as safetensors")
    line.add_argument("--largest", type=int, default=LARGEST, help="bytes of tensors in a file")
    chosen = line.parse_args(arguments)
    try:
        content = content_of(chosen.checkpoint)
        config = (content.get("hyper_parameters") or {}).get("config")
        if not isinstance(config, Mapping):
            raise ConfigurationError(
                f"{chosen.checkpoint} holds no configuration of a GPT of these recipes, hyper_parameters['config']; "
                "for another module use python -m lightning_parallel.checkpoint convert, and give it the config.json"
            )
        weights = weights_of(content, PREFIX)
        if config["tied_head"]:
            del weights["head.weight"]
        said = configuration(config, weights["embed.weight"].dtype)
        write(chosen.folder, to_hub(weights, said["model_type"]), said, chosen.largest)
    except (ValueError, OSError) as error:
        line.exit(1, f"error: {error}\n")
    print(f"{chosen.folder} written: a {said['architectures'][0]} that from_pretrained loads")


if __name__ == "__main__":
    main()
