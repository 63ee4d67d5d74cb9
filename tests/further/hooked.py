"""Models whose hooks collect what their modules return, and a loss of all of it."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.further.libraries import library
from tests.further.points import Handwritten
from tests.models import GROUPED, HuggingFace


class Collected(Handwritten):
    """Hooks in blocks and on a part, before and after, some of which compute: their tensors are in the loss."""

    def make(self) -> None:
        super().make()
        self.stem.register_forward_hook(lambda _, args, output: self.taken.append(output.tanh()))
        for block in self.blocks:
            block.register_forward_hook(lambda _, args, output: self.taken.append(output))
            block.up.register_forward_hook(self.take, with_kwargs=True)
            block.down.register_forward_pre_hook(lambda _, args: self.taken.append(args[0].square().mean(-1)))

    def take(self, module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        self.taken.append(args[0].mean(-1) * output.mean(-1))

    def loss(self, batch: Any) -> Tensor:
        self.taken: list[Tensor] = []
        loss = super().loss(batch)
        assert len(self.taken) == 1 + 3 * len(self.blocks)
        terms = [(number + 1) * one.square().mean() for number, one in enumerate(self.taken)]
        self.taken = []
        self.log("collected", torch.stack(terms).sum().detach(), on_epoch=True, on_step=False)
        return loss + 0.01 * sum(terms)


class CollectedInTheStep(Handwritten):
    """Registers hooks in the step, and takes them back once the model was called."""

    def loss(self, batch: Any) -> Tensor:
        taken: list[Tensor] = []
        handles = [
            block.register_forward_hook(lambda _, args, output: taken.append(output.square().mean()))
            for block in self.blocks
        ]
        logits = self.head(self.body(self.stem(batch[0])))
        for handle in handles:
            handle.remove()
        assert len(taken) == len(self.blocks)
        return F.cross_entropy(logits, batch[1]) + 0.01 * sum(taken)

    def on_train_batch_end(self, *_: Any) -> None:
        assert all(len(block._forward_hooks) <= 1 for block in self.blocks)  # the pipeline's own


ROUTED = {
    "num_experts_per_tok": 2,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.5,
    "experts_implementation": "eager",  # the others compute in single precision at most
}

MODELS = {
    "routed_mixtral": partial(HuggingFace, library, name="Mixtral", **GROUPED, **ROUTED, num_local_experts=4),
    "routed_qwen3": partial(
        HuggingFace, library, name="Qwen3Moe", **GROUPED, **ROUTED, num_experts=4, moe_intermediate_size=16, head_dim=8
    ),
}
