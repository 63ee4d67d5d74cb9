"""Which architectures are tried, and what a batch of each is."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import PretrainedConfig
from transformers.models.auto import modeling_auto

from tests.compatibility.tiny import IMAGE, tiny_config

LENGTH = 17  # tokens of a sample: a power of two is left of them where a model predicts the next one
SAMPLES = 24
IGNORED = -100
FAMILIES = {
    "encoder-decoder": ("SEQ_TO_SEQ_CAUSAL_LM",),
    "speech to text": ("SPEECH_SEQ_2_SEQ",),
    "text encoder": ("MASKED_LM",),
    "text decoder": ("CAUSAL_LM",),
    "vision": ("IMAGE_CLASSIFICATION",),
    "audio": ("CTC", "AUDIO_CLASSIFICATION"),
}
# What an architecture's config checks among its own numbers.
PARTICULAR: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"n_group": 1, "num_experts": 4},
    "bamba": {"attn_layer_indices": [1, 3]},
    "cvt": {"drop_path_rate": [0.0] * 3},
    "data2vec-audio": {"vocab_size": 64},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "donut-swin": {"patch_size": 2},
    "esm": {"vocab_size": 64, "pad_token_id": 0},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "jamba": {"attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"num_heads": 8},
    "mobilebert": {"embedding_size": 32, "true_hidden_size": 32, "intra_bottleneck_size": 32},
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [8, 16], "attn_layers": ["local"] * 4},
    "siglip2": {"num_patches": 16},
    "swin": {"patch_size": 2},
    "vibevoice_asr": {"acoustic_tokenizer_chunk_size": 3200},
    "wav2vec2-bert": {"vocab_size": 64},
    "wav2vec2-conformer": {"vocab_size": 64},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"layer_types": ["mamba", "hybrid"] * 2},
}
FRAMES_FIRST = {  # sounds as (frames, bins) and not as (bins, frames)
    "audio-spectrogram-transformer",
    "canary",
    "cohere_asr",
    "granite_speech5_ctc",
    "lasr_ctc",
    "parakeet_ctc",
    "speech_to_text",
    "wav2vec2-bert",
}
OF_TEXT = ("encoder-decoder", "text encoder", "text decoder")


@dataclass(frozen=True)
class Architecture:
    """An architecture of transformers with the head that is trained."""

    name: str
    family: str
    head: str

    def config(self) -> PretrainedConfig:
        return tiny_config(getattr(transformers, self.head).config_class, PARTICULAR.get(self.name))

    @property
    def main_input(self) -> str:
        name: str = getattr(transformers, self.head).main_input_name
        return name

    def build(self, config: PretrainedConfig) -> nn.Module:
        return getattr(transformers, self.head)(config)

    def data(self, config: PretrainedConfig, padded: bool) -> Dataset:
        return Samples(self, config, padded)


def architectures() -> dict[str, Architecture]:
    """All of them, by name; one that several tasks know stands in the first family that has it."""
    found: dict[str, Architecture] = {}
    for family, tasks in FAMILIES.items():
        for task in tasks:
            for name, head in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").items():
                head = head[0] if isinstance(head, (list, tuple)) else head
                if head not in {known.head for known in found.values()}:
                    found.setdefault(name, Architecture(name, family, head))
    return found


class Samples(Dataset):
    """Samples of a model's own kind of input; each depends on its number alone."""

    def __init__(self, architecture: Architecture, config: PretrainedConfig, padded: bool) -> None:
        self.architecture, self.config, self.padded = architecture, config, padded
        self.main_input = architecture.main_input

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        generator = torch.Generator().manual_seed(index)
        if self.main_input == "input_ids":
            return self.tokens(index, generator)
        labels: Any = index % self.config.num_labels
        if self.main_input != "pixel_values" and self.architecture.family in ("audio", "speech to text"):
            labels = ids(generator)[:4] - 16 if self.of_tokens() else labels
        return {self.main_input: self.signal(generator), "labels": labels}

    def of_tokens(self) -> bool:
        return self.architecture.family == "speech to text" or self.architecture.head.endswith("CTC")

    def tokens(self, index: int, generator: torch.Generator) -> dict[str, Tensor]:
        inputs = ids(generator)
        labels = ids(generator) if self.architecture.family == "encoder-decoder" else inputs.clone()
        if self.padded:
            labels[LENGTH - 1 - index * 5 % (LENGTH - 4) :] = IGNORED
        return {"input_ids": inputs, "labels": labels}

    def signal(self, generator: torch.Generator) -> Tensor:
        if self.main_input == "pixel_values":
            size = getattr(self.config, "image_size", IMAGE)
            height, width = (size, size) if isinstance(size, int) else size
            return torch.randn(getattr(self.config, "num_channels", 3), height, width, generator=generator)
        if self.main_input == "input_features" or self.architecture.name in FRAMES_FIRST:
            return torch.randn(*self.features(), generator=generator)
        return torch.randn(2048, generator=generator)

    def features(self) -> tuple[int, int]:
        bins = getattr(self.config, "num_mel_bins", 16)
        return (256, bins) if self.architecture.name in FRAMES_FIRST else (bins, 256)


def ids(generator: torch.Generator) -> Tensor:
    return torch.randint(24, 32, (LENGTH,), generator=generator)
