"""A build whose parameters are shards from their birth gives the weights, and the random state, of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_parallel.strategies.build import born_sharded
from lightning_parallel.techniques.tools.shards import whole_tensor
from tests.live import LiveBytes
from tests.ranks import run_on_ranks
from tests.strategies.builds import CPU, assert_same, named_tensors, seed
from tests.strategies.built_modules import BUILDS, Scaled

LLAMA = {"vocab_size": 33, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2}
SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA | TOKENS,
    "qwen3": LLAMA | TOKENS | {"tie_word_embeddings": True},
    "mixtral": LLAMA | TOKENS | {"num_local_experts": 4},
    "gpt2": TOKENS | {"vocab_size": 33, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16},
    "bert": SMALL | {"vocab_size": 33, "max_position_embeddings": 16},
    "t5": {"vocab_size": 33, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2},
    "vit": SMALL | {"image_size": 16, "patch_size": 4},
    "mamba": {"vocab_size": 33, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4},
}


def check(build: Callable[[], nn.Module], registers: bool = True) -> None:
    seed()
    one = build()
    state = torch.get_rng_state()
    draws = torch.Generator().manual_seed(7).get_state()
    seed()
    if dist.get_rank() == 1 and not torch.equal(draws, state):
        torch.manual_seed(1)  # ranks draw from the random state of rank 0
    host = dist.group.WORLD
    assert host is not None
    with born_sharded(host, host, CPU):
        born = build()
    assert torch.equal(torch.get_rng_state(), state)
    found = {name: whole_tensor(tensor.detach()).contiguous() for name, tensor in named_tensors(born).items()}
    assert_same({name: tensor.contiguous() for name, tensor in named_tensors(one).items()}, found)
    held: list[Any] = list(born.parameters())
    held = [each for each in held if each.dim() and registers]
    assert all(isinstance(each, DTensor) for each in held)
    own, full = (sum(each.numel() for each in some) for some in ([each._local_tensor for each in held], held))
    assert dist.get_rank() == 0 or own <= full / 2


def check_all(builds: list[str]) -> None:
    for name in builds:
        check(BUILDS[name], name != "skip init")  # whose to_empty() registers nothing: full on every rank


def test_weights_and_random_state_are_those_of_one_process() -> None:
    run_on_ranks(2, check_all, list(BUILDS))


def check_hub(names: list[str], folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for name in names:
        config = transformers.AutoConfig.for_model(name, **CONFIGS[name])
        for dtype in torch.float32, torch.bfloat16:
            check(lambda config=config, dtype=dtype: transformers.AutoModel.from_config(config, dtype=dtype))
    llama = transformers.LlamaForCausalLM
    check(lambda: llama.from_pretrained(folder))
    check(lambda: llama.from_pretrained(folder, dtype=torch.bfloat16))
    check(lambda: llama.from_pretrained(folder).resize_token_embeddings(40))


def test_models_of_the_hub(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, **TOKENS)).save_pretrained(tmp_path)
    run_on_ranks(2, check_hub, list(CONFIGS), tmp_path)


class Holding(nn.Module):
    """Has its parameters in its hands, too."""

    def __init__(self) -> None:
        super().__init__()
        weight = nn.Parameter(torch.zeros(5, 4))
        self.weight, self.all = weight, [weight]
        nn.init.normal_(weight)
        self.read = lambda: weight * 2


def hold() -> None:
    host = dist.group.WORLD
    assert host is not None
    with born_sharded(host, host, CPU):
        module = Holding()
    shard = module.weight
    assert torch.equal(whole_tensor(module.read().detach()), 2 * whole_tensor(shard.detach()))
    assert module.all[0].shape == (5, 4)
    module.all[0].data.fill_(3.0)
    assert float(shard.detach().sum()) == 60
    twin = copy.deepcopy(module)
    twin.all[0].data.zero_()
    assert float(twin.weight.detach().sum()) == 0
    assert float(shard.detach().sum()) == 60


def test_what_holds_a_parameter_has_the_shard() -> None:
    run_on_ranks(2, hold)


def linears() -> nn.Module:
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)))


def truncated(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight)


MEMORY: dict[str, tuple[Callable[[], nn.Module], float]] = {  # how many of the largest parameter beside the shards
    "defaults": (linears, 1.1),
    "initialised again": (lambda: Scaled(64, 12), 1.1),
    "truncated": (lambda: linears().apply(truncated), 2.2),  # what trunc_normal_ itself takes
}


def measured(name: str) -> None:
    build, most = MEMORY[name]
    host = dist.group.WORLD
    assert host is not None
    largest, full = 64 * 64 * 4, sum(each.numel() * 4 for each in build().parameters())
    with LiveBytes() as live, born_sharded(host, host, CPU):
        module = build()
    assert module is not None
    assert live.peak <= full / 2 + most * largest, (live.peak, full / 2, largest)


@pytest.mark.parametrize("name", MEMORY)
def test_about_one_parameter_is_whole_at_a_time(name: str) -> None:
    run_on_ranks(2, measured, name)
