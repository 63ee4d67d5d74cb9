"""Architectures of which a rank holds half, and no attention is computed whole."""

from __future__ import annotations

import logging
import re
from copy import deepcopy
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from tests.compatibility.architectures import architectures
from tests.compatibility.sweep import References, first_difference
from tests.compatibility.trial import Failure, Trained, train
from tests.heard import heard
from tests.models import Optimized
from tests.ranks import run_on_ranks
from tests.strategies.one_and_two import assert_like_one_device, made
from tests.techniques.parity import TP2
from tests.techniques.tensor_parallel.test_regions import adapted
from tests.tiers import sampled
from tests.trainers import trainer

ATTENTION = {"scaled_dot_product_attention", "matmul", "baddbmm", "bmm", "linear", "multi_head_attention_forward"}


def trained_and_gathered(name: str) -> tuple[Trained | Failure, list[str]]:
    """The run, and the operations for which something was gathered."""
    with heard(logging.INFO) as said:
        found = train(architectures()[name], "tp2", padded=False)
    lines = "\n".join(said).splitlines()
    return found, [line.split()[0] for line in lines if re.search(r"\(\d.*\) +\d+ +[\d,]+$", line)]


SHARES = {"gpt_bigcode": 0.62, "bert": 0.6, "deberta-v2": 0.6, "phi3": 0.6, "bloom": 0.6, "gpt_oss": 1.0, "t5": 0.6}
"""Experts are whole on every rank, so that those of GPT-OSS count, and so are the keys and values of one head."""


@sampled(1, "name", SHARES)
def test_rank_holds_half_and_attends_with_its_heads(name: str) -> None:
    expected = References(architectures()[name]).get(padded=False)
    ranks: Any = run_on_ranks(2, trained_and_gathered, name)
    assert not first_difference(expected.curve, [trained for trained, _ in ranks])
    assert max(trained.share for trained, _ in ranks) <= SHARES[name]
    assert ATTENTION.isdisjoint(ranks[0][1])


class Encoder(Optimized):
    """Torch's own layers, of three heads."""

    def __init__(self) -> None:
        super().__init__()
        self.make_optimizer = partial(torch.optim.AdamW, lr=1e-2, eps=1e-3)
        layer = nn.TransformerEncoderLayer(24, 3, 50, dropout=0.0, batch_first=True)
        self.encoder, self.out = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(24, 5)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.out(self.encoder(batch[0]).mean(1)), batch[1])


class Adapted(nn.Module):
    """A linear map with an adapter, as peft computes it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        made = adapted(base)
        self.base_layer, self.lora_A, self.lora_B = made.base_layer, made.lora_A, made.lora_B
        self.base_layer.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + 2 * self.lora_B["default"](self.lora_A["default"](x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (Adapted(nn.Linear(24, 24)) for _ in range(4))
        self.up, self.down = Adapted(nn.Linear(24, 40)), Adapted(nn.Linear(40, 24))
        self.num_heads = 3

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            p(x).view(*x.shape[:2], self.num_heads, 8).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        x = x + self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class LowRank(Encoder):
    """A frozen model of which adapters learn."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(Block(), Block())


class Saved(nn.Module):
    """A module and a copy of it that learns in its place, as peft's `modules_to_save` wraps it."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.original_module, self.modules_to_save = original, nn.ModuleDict({"default": deepcopy(original)})

    def forward(self, x: Tensor) -> Tensor:
        return self.modules_to_save["default"](x)


class SavedHead(Optimized):
    """A Hugging Face model whose own plan names what is in wrappers now."""

    def __init__(self) -> None:
        super().__init__()
        self.make_optimizer = partial(torch.optim.AdamW, lr=1e-2, eps=1e-3)
        sizes = {"vocab_size": 32, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
        self.net = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=3))
        self.net.requires_grad_(False)
        self.net.lm_head, self.net.model.embed_tokens = Saved(self.net.lm_head), Saved(self.net.model.embed_tokens)
        for wrapper in (self.net.lm_head, self.net.model.embed_tokens):
            wrapper.modules_to_save.requires_grad_(True)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        ids = (batch[0].abs() * 10).long()[..., 0] % 32
        return self.net(input_ids=ids, labels=ids).loss


def trained(kind: type[Optimized], strategy: Any) -> list[Tensor]:
    torch.manual_seed(0)
    module = kind().double()
    data = TensorDataset(torch.randn(16, 6, 24, dtype=torch.float64), torch.arange(16) % 5)
    run = trainer(made(strategy), max_epochs=2, precision="64-true", gradient_clip_val=0.1)
    run.fit(module, DataLoader(data, 8))
    return [p.detach().clone() for p in module.parameters()]


@sampled(1, ("kind", "rtol"), [(LowRank, 1e-8), (Encoder, 1e-8), (SavedHead, 1e-5)])  # the norms of the last are single
def test_adapters_layers_of_torch_and_wrapped_modules(kind: type[Encoder], rtol: float) -> None:
    assert_like_one_device(trained, 2, (kind, None), (kind, TP2), rtol=rtol, atol=rtol / 50)
