"""Which maps are taken for a region, across modules, in wrappers, beside adapters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_parallel.plan import ParallelPlan
from lightning_parallel.plan.regions import styles_in_blocks
from lightning_parallel.techniques.tensor_parallel.layout import find_divided


def module(**children: nn.Module) -> nn.Module:
    made = nn.Module()
    for name, child in children.items():
        made.add_module(name, child)
    return made


def adapted(base: nn.Linear, rank: int = 2) -> nn.Module:
    """As peft wraps a linear map."""
    return module(
        base_layer=base,
        lora_A=nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)}),
        lora_B=nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)}),
    )


class ByHand(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.linear = base
        self.a, self.b = nn.Parameter(torch.zeros(2, base.in_features)), nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + x @ self.a.T @ self.b.T


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs)


META = {"attention": ("wq 8 8", "wk 8 4", "wv 8 4", "wo 8 8"), "feed_forward": ("w1 8 24", "w2 24 8", "w3 8 24")}
BERT = {
    "attention.self": ("query 8 8", "key 8 8", "value 8 8"), "attention.output": ("dense 8 8",),
    "intermediate": ("dense 8 32",), "output": ("dense 32 8",),
}  # fmt: skip
LONGFORMER = {"att": (*BERT["attention.self"], "query_global 8 8", "key_global 8 8"), "out": ("dense 8 8",)}
FLAT = {"": ("q_proj 8 8", "k_proj 8 8", "v_proj 8 8", "o_proj 8 8", "up 8 16", "down 16 8")}
FUSED = {"attn": ("c_attn 8 12", "c_proj 8 8"), "mlp": ("gate_up_proj 8 32", "down_proj 16 8")}


def block(parts: dict[str, tuple[str, ...]]) -> nn.Module:
    made = nn.Module()
    for path, maps in parts.items():
        holder = made
        for name in filter(None, path.split(".")):
            if name not in holder._modules:
                holder.add_module(name, nn.Module())
            holder = holder.get_submodule(name)
        for text in maps:
            name, inputs, outputs = text.split()
            holder.add_module(name, linear(int(inputs), int(outputs)))
    return made


def found(layer: nn.Module) -> dict[str, str]:
    model = module(layers=nn.ModuleList([layer]))
    styles = styles_in_blocks(model, ParallelPlan(blocks="layers.*"))
    return {name.removeprefix("layers.*."): style for name, style in styles.items()}


@pytest.mark.parametrize(
    ("parts", "rows", "whole"),
    [
        (META, {"attention.wo", "feed_forward.w2"}, set()),
        (BERT, {"attention.output.dense", "output.dense"}, set()),
        (LONGFORMER, {"out.dense"}, set()),
        (FLAT, {"o_proj", "down"}, set()),
        (FUSED, {"attn.c_proj", "mlp.down_proj"}, set()),
        ({"": ("encode 8 3", "decode 3 5")}, set(), {"encode", "decode"}),
        ({"": ("query 8 8", "key 8 8")}, set(), {"query", "key"}),
    ],
    ids=["meta", "bert", "longformer", "flat", "fused", "no way back", "no way out"],
)
def test_regions(parts: dict[str, tuple[str, ...]], rows: set[str], whole: set[str]) -> None:
    styles = found(block(parts))
    assert {name for name, style in styles.items() if style == "rowwise"} == rows
    names = {f"{path}.{text.split()[0]}".removeprefix(".") for path, maps in parts.items() for text in maps}
    assert names - set(styles) == whole


def test_fused_weights_and_layers_of_torch() -> None:
    styles = found(block(FUSED))
    assert styles["attn.c_attn"] == "colwise 4:1:1"
    assert styles["mlp.gate_up_proj"] == "colwise 1:1"
    of_torch = {"self_attn": "colwise", "self_attn.out_proj": "rowwise", "linear1": "colwise", "linear2": "rowwise"}
    assert found(nn.TransformerEncoderLayer(8, 2, 16)) == of_torch


@pytest.mark.parametrize("wrap", [adapted, ByHand])
def test_wrapped_maps_are_divided_with_their_adapters(wrap: type[nn.Module]) -> None:
    layer = block(BERT)
    layer.get_submodule("attention.self").query = wrap(linear(8, 8))
    layer.get_submodule("output").dense = wrap(linear(32, 8))
    styles = found(layer)
    divided = {each.name: each.style.kind for each in find_divided(layer, styles)}
    assert len([name for name in divided if name.startswith("attention.self.query")]) == (2 if wrap is adapted else 1)
    assert divided[f"attention.self.query.{'base_layer' if wrap is adapted else 'linear'}"] == "colwise"
    assert divided[f"output.dense.{'base_layer' if wrap is adapted else 'linear'}"] == "rowwise"
    if wrap is adapted:
        assert divided["attention.self.query.lora_B.default"] == "colwise"
        assert divided["output.dense.lora_A.default"] == "rowwise"


def test_unlike_blocks_have_their_own_styles() -> None:
    blocks = nn.ModuleList(nn.ModuleDict({"up": linear(8, 32), "down": linear(32, 8)}) for _ in range(3))
    blocks[1]["up"] = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 3), nn.Linear(3, 32))  # type: ignore[index]
    model = module(blocks=blocks)
    styles = styles_in_blocks(model, ParallelPlan(blocks="blocks.*"))
    assert styles["blocks.0.up"] == styles["blocks.2.up"] == "colwise"
    assert "blocks.*.up" not in styles
    find_divided(model, styles)
