"""The GPT of the recipes; that it computes what models of transformers do is told in test_hub.py."""

import math

import pytest
import torch

from recipes.gpt import GPT, GPTConfig, warmup_cosine

SMALL = {"vocab_size": 50, "context": 16, "dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 48}


def small_gpt(**changes):
    torch.manual_seed(0)
    return GPT(GPTConfig(**{**SMALL, **changes}))


def some_ids(*shape):
    return torch.randint(0, 50, shape, generator=torch.Generator().manual_seed(1))


def test_distance_of_positions_alone_counts():
    network, ids = small_gpt(), some_ids(2, 16)
    torch.testing.assert_close(network(ids), network(ids, torch.arange(7, 23)), rtol=1e-4, atol=1e-5)
    logits = network(ids, torch.stack((torch.arange(16), torch.arange(15, -1, -1))))
    torch.testing.assert_close(logits[:1], network(ids[:1]))
    torch.testing.assert_close(logits[1:], network(ids[1:], torch.arange(15, -1, -1)))
    assert not torch.allclose(logits[1:], network(ids[1:]), rtol=1e-3)


def test_model_built_on_meta_and_reset_is_the_same():
    with torch.device("meta"):
        network = GPT(GPTConfig(**SMALL))
    network.to_empty(device="cpu")
    network.tie_weights()
    torch.manual_seed(0)
    for module in network.modules():
        if any(True for _ in module.parameters(recurse=False)) and module is not network.head:
            module.reset_parameters()
    assert network.head.weight is network.embed.weight
    assert network.embed.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert network.blocks[0].feed_forward.down_proj.weight.std().item() == pytest.approx(0.01, rel=0.1)
    assert all(torch.isfinite(p).all() for p in network.parameters())
    untied = small_gpt(tied_head=False)
    assert untied.head.weight is not untied.embed.weight
    assert sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in network.parameters()) == 50 * 32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_heads": 5}, r"n_heads=5 does not divide dim=32 .* choose one of \[1, 2, 4, 8, 16\]"),
        ({"n_kv_heads": 3}, r"n_kv_heads=3 does not divide n_heads=4; choose one of \[1, 2, 4\]"),
        ({"n_layers": 0}, r"n_layers=0 must be a whole number, 1 or more"),
        ({"dim": "wide"}, r"dim=wide must be a whole number"),
    ],
)
def test_impossible_shape_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        GPTConfig(**{**SMALL, **change})


def test_learning_rate_rises_then_falls():
    rates = [warmup_cosine(step, 10, 100, 0.1) for step in range(120)]
    assert rates[0] > 0
    assert rates[:11] == sorted(rates[:11])
    assert rates[10] == 1
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[100:] == [0.1] * 20
    assert warmup_cosine(10**6, 10, math.inf, 0.1) == 1
