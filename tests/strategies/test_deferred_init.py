"""A deferred build gives the weights, and leaves the random state, of an ordinary one."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lightning_parallel.strategies.build.deferred_init import Conversions, DeferredInit
from tests.live import LiveBytes
from tests.strategies.builds import CPU, assert_same, named_tensors, seed
from tests.strategies.deferred_modules import BUILDS, Initialisers, Scaled, Seeds


def made(record: DeferredInit, module: nn.Module) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    record.replay(named_tensors(module), lambda name, tensor: tensors.__setitem__(name, tensor.clone()))
    return tensors


def check(build: Callable[[], nn.Module]) -> nn.Module:
    seed()
    ordinary = named_tensors(build())
    after = torch.get_rng_state()
    seed()
    before = torch.get_rng_state()
    with DeferredInit(CPU) as record:
        module = build()
    assert torch.equal(torch.get_rng_state(), before)
    assert all(tensor.is_meta for tensor in named_tensors(module).values())
    assert_same(ordinary, made(record, module))
    assert torch.equal(torch.get_rng_state(), after)
    return module


@pytest.mark.parametrize("name", BUILDS)
def test_same_weights_and_random_state_as_an_ordinary_build(name: str) -> None:
    check(BUILDS[name])


LLAMA = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2}
CONFIGS = {
    "llama": LLAMA,
    "qwen3": LLAMA | {"tie_word_embeddings": True},
    "mixtral": LLAMA | {"num_local_experts": 4},
    "gpt2": {"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16},
    "opt": {"vocab_size": 32, "hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    | {"max_position_embeddings": 16, "word_embed_proj_dim": 16},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_hugging_face_models(name: str, dtype: torch.dtype) -> None:
    transformers = pytest.importorskip("transformers")

    def build() -> nn.Module:
        config = transformers.AutoConfig.for_model(name, **CONFIGS[name], **TOKENS)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)

    check(build)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float64])
def test_from_pretrained_is_refused_with_the_way_that_works(dtype: torch.dtype | None, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, **TOKENS)).save_pretrained(tmp_path)
    with DeferredInit(CPU) as record:
        module = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    with Conversions(record):
        module.to(dtype)
    way = r"call from_config\(\) there and pass fit\(ckpt_path=FOLDER\)"
    with pytest.raises(RuntimeError, match=f"inv_freq' but gave it no values.*{way}"):
        made(record, module)
    with pytest.raises(RuntimeError, match=way), DeferredInit(CPU):
        transformers.LlamaForCausalLM.from_pretrained(tmp_path).resize_token_embeddings(40)


def test_a_build_under_meta_gives_what_one_without_gives() -> None:
    seed()
    ordinary = named_tensors(Initialisers())
    seed()
    with DeferredInit(CPU) as record, torch.device("meta"):
        module = nn.Sequential(Initialisers())[0]
    assert_same(ordinary, made(record, module))


def test_modules_that_are_real_already_are_written_in_their_turn() -> None:
    def first() -> nn.Module:
        module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        module.running = module[1].running_mean
        return module

    def second(module: nn.Module) -> None:
        module.append(nn.Linear(3, 3))
        module.apply(lambda part: part.reset_parameters() if isinstance(part, nn.Linear) else None)
        module.running.add_(1)
        module.register_buffer("doubled", module.running * 2)
        assert module.running.sum().item() == 3
        assert module.doubled.tolist() == [2.0, 2.0, 2.0]
        module.running[0] = 5

    seed()
    ordinary = first()
    second(ordinary)
    after = torch.get_rng_state()
    seed()
    module = first()
    with DeferredInit(CPU) as record:
        second(module)
    assert module[0].weight.device.type == "cpu"
    assert_same(named_tensors(ordinary), made(record, module))
    assert torch.equal(module[0].weight, ordinary[0].weight)
    assert torch.equal(module.running, ordinary.running)
    assert torch.equal(torch.get_rng_state(), after)


def test_a_rank_that_wants_a_part_gets_the_same_part_and_random_state() -> None:
    seed()
    ordinary = named_tensors(Scaled())
    after = torch.get_rng_state()
    seed()
    with DeferredInit(CPU) as record:
        module = Scaled()
    part = {name: tensor for name, tensor in named_tensors(module).items() if name.startswith("blocks.1")}
    tensors: dict[str, Tensor] = {}
    record.replay(part, tensors.__setitem__)
    assert_same({name: ordinary[name] for name in part}, tensors)
    assert torch.equal(torch.get_rng_state(), after)


def test_a_rank_given_another_state_makes_the_other_weights() -> None:
    with DeferredInit(CPU) as record:
        Seeds()
    theirs = copy.deepcopy(record.rng_state)
    seed()
    torch.randn(100)
    with DeferredInit(CPU) as record:
        module = Seeds()
    record.rng_state = theirs
    tensors = made(record, module)
    torch.set_rng_state(theirs[0])
    assert_same(named_tensors(Seeds()), tensors)


def test_a_build_in_two_parts_is_one_build() -> None:
    seed()
    ordinary = nn.ModuleList([Scaled(), Seeds(), Scaled()])
    after = torch.get_rng_state()
    seed()
    with DeferredInit(CPU) as record:
        parts = [Scaled(), Seeds()]
    with record:
        parts.append(Scaled())
    assert_same(named_tensors(ordinary), made(record, nn.ModuleList(parts)))
    assert torch.equal(torch.get_rng_state(), after)


def linears() -> nn.Module:
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)))


def truncated(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight)


MEMORY = {  # build and the largest parameters that may be real at once
    "defaults": (linears, 1.1),
    "initialised again": (lambda: Scaled(64, 12), 1.1),
    "cast at the end": (lambda: Scaled(64, 12).to(torch.bfloat16), 1.6),
    "copied": (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 2), 8, enable_nested_tensor=False), 2.1),
    "truncated": (lambda: linears().apply(truncated), 4.5),  # what trunc_normal_ itself takes
}


@pytest.mark.parametrize("name", MEMORY)
def test_about_one_parameter_is_real_at_a_time(name: str) -> None:
    build, most = MEMORY[name]
    with DeferredInit(CPU) as record:
        module = build()
    largest = max(tensor.numel() * 4 for tensor in module.parameters())
    with LiveBytes() as live:
        record.replay(named_tensors(module), lambda name, tensor: None)
    assert live.peak < most * largest


def test_a_random_value_that_is_read_is_refused() -> None:
    refusal = r"reads a random value \(aten.uniform_.default, read by aten._local_scalar_dense.*Python's random"
    with pytest.raises(RuntimeError, match=refusal), DeferredInit(CPU):
        nn.Linear(3, 3).weight.sum().item()
    with pytest.raises(RuntimeError, match="read by tolist"), DeferredInit(CPU):
        torch.randperm(3).tolist()
    assert torch.ones(1).item() == 1


def test_a_meta_tensor_from_elsewhere_is_refused() -> None:
    foreign = nn.Linear(3, 3, device="meta")
    with DeferredInit(CPU) as record:
        assert not record.owns(foreign.weight)
        nn.init.normal_(foreign.weight)
        assert record.owns(foreign.weight)
        with pytest.raises(RuntimeError, match="on meta but was not made while"):
            copy.deepcopy(foreign)
        nn.init.zeros_(foreign.to_empty(device="cpu").bias)
    with pytest.raises(RuntimeError, match="gave it no values"):
        made(record, foreign)
    with pytest.raises(RuntimeError, match="'weight' needs a tensor"):
        made(record, nn.Linear(3, 3, device="meta"))
