"""Small language models of modules that people write by hand: one model for each class of this folder.

What an architecture of transformers has too (ALiBi, low-rank keys, gated feed-forward, state spaces), or what is one
operation that the random programs have (a sort, a shift, a transform), is not told again.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from tests.compatibility.architectures import Architecture
from tests.compatibility.handwritten import attention, features, positions
from tests.compatibility.handwritten.attention import LONGEST, WIDTH
from tests.compatibility.table import BY_HAND
from tests.compatibility.tiny import VOCABULARY

PARTS = {"Lora", "OneHead"}  # of other modules
BLOCKS = 3


class Block(nn.Module):
    def __init__(self, mixer: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mixer, self.mlp = mixer, mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Network(nn.Module):
    """Called as models of transformers are."""

    def __init__(self, written: type[nn.Module]) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LONGEST, WIDTH)
        of_features = written.__module__ == features.__name__
        self.blocks = nn.ModuleList(
            Block(attention.Separate(), written()) if of_features else Block(written(), features.Mlp())
            for _ in range(BLOCKS)
        )
        self.ln_f = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x = self.wte(input_ids) + self.wpe.weight[: input_ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.ln_f(x))
        return SimpleNamespace(loss=F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()))


@dataclass(frozen=True)
class Written(Architecture):
    """One of this folder's classes, in place of an architecture of transformers."""

    kind: type[nn.Module]
    main_input = "input_ids"

    def config(self) -> Any:
        return SimpleNamespace()

    def build(self, config: Any) -> nn.Module:
        return Network(self.kind)


def written() -> dict[str, Written]:
    """All of them, by name."""
    return {
        name: Written(name, f"{module.__name__.rpartition('.')[2]} {BY_HAND}", name, kind)
        for module in (attention, positions, features)
        for name, kind in vars(module).items()
        if isinstance(kind, type) and issubclass(kind, nn.Module) and kind.__module__ == module.__name__
        if name not in PARTS
    }
