"""Further models of Hugging Face's, each with a trait that those of the parity table lack."""

from functools import partial
from typing import Any

from torch import nn

from tests.models import GROUPED, HuggingFace, library, llama

LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
OPT = {"ffn_dim": 48, "dropout": 0.0, "word_embed_proj_dim": 16, "pad_token_id": 1}


four_blocks = partial(library, num_hidden_layers=4)


def checkpointed(**overrides: Any) -> nn.Module:
    model = llama(**overrides)
    model.activation_checkpointing_enable()
    return model


MODELS = {
    "opt": partial(HuggingFace, four_blocks, name="OPT", **OPT),
    "mixtral": partial(HuggingFace, four_blocks, name="Mixtral", **GROUPED, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": partial(HuggingFace, four_blocks, name="Qwen3Moe", **GROUPED, **ROUTED),
    "olmoe": partial(HuggingFace, four_blocks, name="Olmoe", **GROUPED, num_experts=4, num_experts_per_tok=2),
    "gpt_oss": partial(HuggingFace, four_blocks, name="GptOss", **GROUPED, num_local_experts=4, head_dim=8),
    "deepseek": partial(HuggingFace, four_blocks, name="DeepseekV3", **LATENT),
    "mamba": partial(HuggingFace, four_blocks, name="Mamba", state_size=4),
    "checkpointed": partial(HuggingFace, checkpointed),
    "cached": partial(HuggingFace, llama, use_cache=True),
}

AUXILIARY = {
    "num_experts_per_tok": 2,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.5,
    "experts_implementation": "eager",  # the others compute in single precision at most
}
HOOKED = {
    "routed_mixtral": partial(HuggingFace, four_blocks, name="Mixtral", **GROUPED, **AUXILIARY, num_local_experts=4)
}
"""Whose hooks collect what its routers return, for a loss of all of it."""
