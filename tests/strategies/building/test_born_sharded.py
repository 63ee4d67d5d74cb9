"""A build whose parameters are shards from their birth gives the weights, and the random state, of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModel, LlamaConfig, LlamaForCausalLM

from lightning_parallel import ParallelPlan
from lightning_parallel.strategies.build import shard_on_registration
from lightning_parallel.strategies.model.divided_model import DividedModel
from lightning_parallel.techniques.tools.shards import full_tensor_of
from tests.layouts import layouts
from tests.live import LiveBytes
from tests.ranks import run_on_ranks
from tests.strategies.building.built_modules import BUILDS, CPU, Scaled, assert_same, named_tensors, seed
from tests.tiers import sampled
from tests.trainers import trainer

LLAMA = {"vocab_size": 33, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "bos_token_id": 1, "eos_token_id": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "mixtral": LLAMA | {"tie_word_embeddings": True, "num_local_experts": 4},
    "gpt2": {"vocab_size": 33, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 1, "eos_token_id": 2},
    "t5": {"vocab_size": 33, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2},
    "mamba": {"vocab_size": 33, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4},
}


def born(build: Callable[[], nn.Module]) -> nn.Module:
    host = dist.group.WORLD
    assert host is not None
    with shard_on_registration(host, host, CPU):
        return build()


def check(build: Callable[[], nn.Module], registers: bool = True) -> None:
    seed()
    one = build()
    state = torch.get_rng_state()
    draws = torch.Generator().manual_seed(7).get_state()
    seed()
    if dist.get_rank() == 1 and not torch.equal(draws, state):
        torch.manual_seed(1)  # ranks draw from the random state of rank 0
    module = born(build)
    assert torch.equal(torch.get_rng_state(), state)
    found = {name: full_tensor_of(tensor.detach()).contiguous() for name, tensor in named_tensors(module).items()}
    assert_same({name: tensor.contiguous() for name, tensor in named_tensors(one).items()}, found)
    held: list[Any] = [each for each in module.parameters() if each.dim() and registers]
    assert all(isinstance(each, DTensor) for each in held)
    own, full = (sum(each.numel() for each in some) for some in ([each._local_tensor for each in held], held))
    assert dist.get_rank() == 0 or own <= full / 2


def check_all(folder: Path) -> None:
    for name, build in BUILDS.items():
        check(build, name != "skip init")  # whose to_empty() registers nothing: full on every rank
    for name, options in CONFIGS.items():
        for dtype in torch.float32, torch.bfloat16:
            config = AutoConfig.for_model(name, **options)
            check(lambda config=config, dtype=dtype: AutoModel.from_config(config, dtype=dtype))
    check(lambda: LlamaForCausalLM.from_pretrained(folder))
    check(lambda: LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16))
    check(lambda: LlamaForCausalLM.from_pretrained(folder).resize_token_embeddings(40))


def test_builds_give_weights_and_random_state_of_one_process(tmp_path: Path) -> None:
    LlamaForCausalLM(LlamaConfig(**LLAMA)).save_pretrained(tmp_path)
    run_on_ranks(2, check_all, tmp_path)


class Holding(nn.Module):
    """Has its parameters in its hands, too."""

    def __init__(self) -> None:
        super().__init__()
        weight = nn.Parameter(torch.zeros(5, 4))
        self.weight, self.all = weight, [weight]
        nn.init.normal_(weight)
        self.read = lambda: weight * 2


def hold() -> None:
    module = born(Holding)
    shard = module.weight
    assert torch.equal(full_tensor_of(module.read().detach()), 2 * full_tensor_of(shard.detach()))
    assert module.all[0].shape == (5, 4)
    module.all[0].data.fill_(3.0)
    assert float(shard.detach().sum()) == 60
    twin = copy.deepcopy(module)
    twin.all[0].data.zero_()
    assert float(twin.weight.detach().sum()) == 0
    assert float(shard.detach().sum()) == 60


def linears() -> nn.Module:
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)))


def truncated() -> nn.Module:
    return linears().apply(lambda module: isinstance(module, nn.Linear) and nn.init.trunc_normal_(module.weight))


def hold_and_measure() -> None:
    hold()
    largest = 64 * 64 * 4
    # how many of the largest parameter there are beside the shards; 2.2 is what trunc_normal_ itself takes
    for build, most in (linears, 1.1), (lambda: Scaled(64, 12), 1.1), (truncated, 2.2):
        full = sum(each.numel() * 4 for each in build().parameters())
        with LiveBytes() as live:
            module = born(build)
        assert module is not None
        assert live.peak <= full / 2 + most * largest, (live.peak, full / 2, largest)


def test_parameters_are_shards_from_their_birth() -> None:
    """What holds a parameter has the shard, and about one parameter is full at a time."""
    run_on_ranks(2, hold_and_measure)


DEPTH, WIDTH, INNER = 6, 32, 256
PLAN = ParallelPlan(blocks=("layers.*",), styles={"layers.*.0": "colwise", "layers.*.2": "rowwise"})
LARGEST = 4 * WIDTH * INNER


class Deep(LightningModule):
    def __init__(self, live: LiveBytes) -> None:
        super().__init__()
        self.live, self.layers = [live], nn.ModuleList()

    def configure_model(self) -> None:
        if not len(self.layers):
            with self.live[0]:
                for _ in range(DEPTH):
                    self.layers.append(nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = batch + layer(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def built(strategy: Any, readers: int) -> None:
    live, divide, parts = LiveBytes(), DividedModel.divide, list[int]()
    module = Deep(live)

    def measured(self: DividedModel, *args: Any) -> None:
        with live:
            divide(self, *args)
        held: list[Any] = list(module.parameters())
        parts.append(sum(4 * (p._local_tensor if isinstance(p, DTensor) else p).numel() for p in held))

    with mock.patch.object(DividedModel, "divide", measured):
        run = trainer(strategy(), max_steps=1)
        run.fit(module, DataLoader(torch.ones(4, WIDTH), 4 // readers))
    full = sum(4 * parameter.numel() for parameter in module.parameters())
    (part,) = parts
    assert part < 0.6 * full
    assert live.peak < max(part, full / run.world_size) + 1.7 * LARGEST, (live.peak, part, full, LARGEST)


LAYOUTS = layouts("zero 3", "pipeline x zero 3", "pipeline", "tensor parallel", "tensor x zero 3", plan=PLAN)


@sampled(1, "layout", LAYOUTS)
def test_memory_of_building_is_a_part_and_one_parameter(layout: str) -> None:
    ranks, readers, strategy = LAYOUTS[layout]
    run_on_ranks(ranks, built, strategy, readers)
