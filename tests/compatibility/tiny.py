"""Small configs of any architecture of transformers, made from what its config class says it has.

A number becomes small by the name under which configs keep it; a default that no rule names stays as it is.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PretrainedConfig

WIDTH, LAYERS, VOCABULARY, IMAGE, PATCH, POSITIONS, CLASSES = 32, 4, 64, 32, 8, 128, 4

# The first pattern that a whole name matches decides.
NUMBERS: list[tuple[str, int]] = [
    (
        r"(text_|src_|tgt_|.*unpadded_)?vocab_size(_per_layer_input)?|n_vocab|(decoder_)?vocab_size|max_vocab_size",
        VOCABULARY,
    ),
    (r"entity_vocab_size|.*codebook_vocab_size", VOCABULARY),
    (r"mamba_n_heads|mamba_num_heads", 8),
    (r"n_mamba_heads", 2),
    (r"mamba_d_ssm", 64),
    (r"rotary_dim|global_head_dim|block_multiple_of", 8),
    (r"full_attention_interval|layer_group_size|attn_layer_period|full_attn_every_n_layers|n_groups", 2),
    (
        r"kv_channels|.*head_dim|d_kv|mamba_(d_head|head_?dim)|qk_rope_head_dim|qk_nope_head_dim|(attn_)?v_head_dim|attention_key_size",
        8,
    ),
    (r"qk_head_dim", 16),
    (r".*lora_rank|.*hc_lowrank|.*_rank", 16),
    (r"(.*_)?(num_key_value_heads|n_head_kv|num_kv_heads|multi_query_group_num|num_key_value_groups)", 2),
    (r".*linear_num_key_heads|.*linear_num_value_heads|index_n_heads", 4),
    (r"(.*_)?(num_attention_heads|attention_heads|num_heads|n_heads?|encoder_heads|decoder_heads)", 4),
    (r"(.*_)?(experts_per_tok(en)?|top_?k_experts|experts_top_k|moe_k|moe_topk|router_top_k|num_selected_experts)", 2),
    (r"(.*_)?n_group|topk_group|num_expert_groups", 1),
    (r"(.*_)?(num_experts|n_routed_experts|num_local_experts|moe_num_experts|zero_expert_num|num_routed_experts)", 4),
    (r"first_k_dense_replace|num_dense_layers|n_dense_layers|moe_layer_start_index", 1),
    (r"index_topk", 8),
    (r"(.*_)?(d_state|state_size|ssm_state_size|mamba_d_state)", 8),
    (r"(.*_)?(chunk_size|mamba_chunk_size)", 8),
    (r"num_hidden_groups|num_sparse_(en|de)coder_layers", 2),
    (r"num_(feat_extract|adapter|conv|nextn_predict|kv_shared|codebook)_?layers|num_nextn_predict_layers|mtp_.*", -1),
    (r"(.*_)?(num_hidden_layers|num_(en|de)coder_layers|encoder_layers|decoder_layers|num_layers|n_layers?)", LAYERS),
    (r"num_blocks", LAYERS),
    (
        r"(.*_)?(intermediate_size|ffn_dim|ffn_hidden_size|intermediate_dim|d_ff|n_inner|d_inner|intermediate_size_mlp)",
        64,
    ),
    (
        r"(.*_)?(hidden_size|d_model|n_embd|embedding_size|embed_dim|d_embed|embed_size|dim|emb_dim|model_dim|lru_width)",
        WIDTH,
    ),
    (r"(.*_)?(hidden_dim|word_embed_proj_dim|output_dim|projection_dim|emb_size|input_embedding_dim)", WIDTH),
    (r"(.*_)?(hidden_size_per_layer_input|router_hidden_size|output_hidden_size|prediction_head_size)", WIDTH),
    (
        r"(.*_)?(max_position_embeddings|n_positions|max_seq_len(gth)?|max_(source|target)_positions|context_length)",
        POSITIONS,
    ),
    (r"attention_window(_size)?|sliding_window|local_attention", 8),
    (r"window_size", 4),
    (r"num_mel_bins|input_feat_per_channel|feature_size", 16),
    (r"max_2d_position_embeddings", POSITIONS),
    (r"classifier_proj_size|xvector_output_dim|codevector_dim|proj_codevector_dim|conv_channels", WIDTH),
    (r"num_conv_pos_embeddings", 8),
    (r"num_conv_pos_embedding_groups", 4),
    (r"num_codevectors_per_group", 8),
    (r"num_negatives", 4),
    (r"num_filters", 4),
    (r"image_size|input_size|img_size", IMAGE),
    (r"patch_size|encoder_stride", PATCH),
    (r"max_(length|target_positions)", POSITIONS),
    (r"ngram_vocab_size_base", VOCABULARY),
]
KEPT = re.compile(
    r"(type|per_layer|position_buckets|relative|num_channels).*|.*multiplier.*|.*(scal|ratio|factor|bias).*"
)
OFF = re.compile(
    r".*(dropout|drop_?path|droprate|drop_rate|layerdrop|pdrop|connect_rate|jitter|router_noise).*|.*(_drop|dropout|dropout_p)$"
    r"|mask_(time|feature)_prob|mask_ratio|head_drop.*|token_dropout|speech_decoder_prenet_dropout"
)
SWITCHES = {
    "apply_spec_augment": False,
    "output_router_logits": False,
    "ctc_loss_reduction": "mean",
    "rescale_every": 0,
}
LISTS = {
    "depths": lambda n: [1] * (n - 1) + [2],
    "depth": lambda n: [1] * (n - 1) + [2],
    "hidden_sizes": lambda n: [16 * 2**k for k in range(n)],
    "embed_dims": lambda n: [16 * 2**k for k in range(n)],
    "embed_dim": lambda n: [16 * 2**k for k in range(n)],
    "num_heads": lambda n: [2] * n,
    "num_attention_heads": lambda n: [2] * n,
    "key_dim": lambda n: [8] * n,
    "conv_dim": lambda n: [16] * 3,
    "conv_stride": lambda n: [4, 2, 2],
    "conv_kernel": lambda n: [8, 3, 3],
    "tdnn_dim": lambda n: [16] * n,
    "block_sizes": lambda n: [2] * n,
    "attention_types": lambda n: [[["global", "local"], LAYERS // 2]],
}
UNSAID = {"head_dim": 8, "num_key_value_heads": 4}  # None by default in some classes
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "sep_token_id": 2}


def tiny_config(config_class: type[PretrainedConfig], particular: Mapping[str, Any] | None = None) -> PretrainedConfig:
    """A config of this class with a width of 32, four layers and 64 tokens, without random operations."""
    config = config_class(**(changes(config_class) | dict(particular or {})))
    config._experts_implementation = "eager"  # the grouped products of torch know no double precision
    for name, value in SPECIAL.items():
        if getattr(config, name, None) is None:
            setattr(config, name, value)
    return config


def changes(config_class: type[PretrainedConfig]) -> dict[str, Any]:
    default, found = config_class(), {}
    free = iter(range(3, VOCABULARY))  # for the tokens of images and sounds
    values = default.to_dict() | {name: getattr(default, name) for name in config_class.sub_configs}
    for name, value in values.items():
        if isinstance(value, PretrainedConfig):
            found[name] = type(value)(**changes(type(value)))
        elif (small := small_value(name, value, values, free)) is not None:
            found[name] = small
    return found


def small_value(name: str, value: Any, values: Mapping[str, Any], free: Iterator[int]) -> Any:
    """The value that a config of a tiny model has under this name; None keeps the default."""
    if name in SWITCHES:
        return SWITCHES[name]
    if value is None:
        return UNSAID.get(name)
    if name.endswith(("token_id", "token_index")) and isinstance(value, int):
        return SPECIAL[name] if name in SPECIAL else (next(free) if value >= VOCABULARY else None)
    if OFF.fullmatch(name) and isinstance(value, float):
        return 0.0
    if isinstance(value, (list, tuple)) and name in LISTS:
        return LISTS[name](len(value))
    if isinstance(value, int) and not isinstance(value, bool) and value > 0 and not KEPT.fullmatch(name):
        return small_number(name, value, values)
    return None


def small_number(name: str, value: int, values: Mapping[str, Any]) -> int | None:
    for pattern, small in NUMBERS:
        if re.fullmatch(pattern, name):
            alike = small == 2 and value == values.get("num_attention_heads")  # as many keys as queries
            return min(value, 4 if alike else small) if small > 0 else None
    return None
