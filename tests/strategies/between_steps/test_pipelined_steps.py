"""Steps of a pipeline that change the model around their forward, and put it back, or write into what stages make."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_parallel import PipelineParallelStrategy
from tests.layouts import layouts
from tests.models import PlainBlock, TiedWords, points
from tests.ranks import RanksFailed, begun_on_one, run_on_ranks
from tests.strategies.one_and_two import assert_like_one_device, made, require_like
from tests.tiers import sampled
from tests.trainers import trainer

# name: what is done before the forward, and after it; `net` is the network, `i` the number of the batch
KEPT = {
    "mode": ("net.blocks.train(i % 2 == 0)", "net.blocks.train(net.training)"),
    "flag": ("net.scale *= 1 + 0.1 * i", "net.scale = 1.0"),
    "flag that stays": ("net.scale = 1 + 0.1 * i", ""),
    "frozen": ("net.requires_grad_(i != 1); net.head.requires_grad_(True)", "net.requires_grad_(True)"),
    "frozen early": ("net.blocks[:2].requires_grad_(False)", "net.blocks[:2].requires_grad_(True)"),
    "clamped": ("for p in net.parameters(): p.data.clamp_(-0.2, 0.2)", ""),
    "between blocks": ("net.between = 'own'", ""),
}
ON_WHOLE_BATCH = {"head after the loss": ("", "net.head.weight.data.clamp_(-0.1, 0.1)")}
KEEP = "kept = [p.detach().clone() for p in net.blocks.parameters()];"
BACK = "for p, value in zip(net.blocks.parameters(), kept): p.data"
EARLY = "torch._foreach_mul_([p.data for p in net.blocks[:2].parameters()], 1.05)"
LOAD = "net.training or net.load_state_dict({name: value %s for name, value in net.state_dict().items()})"
REFUSED = {
    "mode that stays": ("net.blocks[0].train(i != 1)", ""),
    "noise": (f"{KEEP} [p.data.mul_(1.05) for p in net.blocks.parameters()]", f"{BACK}.copy_(value)"),
    "noise in early blocks": (f"{KEEP} {EARLY}", f"{BACK} = value"),
    "swapped in evaluation": (LOAD % "* 0.9", LOAD % "/ 0.9"),
    "clamped after": ("", "for p in net.parameters(): p.data.clamp_(-0.2, 0.2)"),
    "first block before each": ("net.between = 'first'", ""),
    "first block before each, later": ("net.between = 'first' if i == 2 else ''", ""),
    "frozen to stay": ("net.blocks[0].requires_grad_(False)", ""),
}
ACTS = KEPT | ON_WHOLE_BATCH | REFUSED
IN_EVALUATION = "mode", "flag that stays", "noise", "noise in early blocks", "swapped in evaluation", "clamped after"


class Block(PlainBlock):
    """Computes otherwise while it does not train."""

    def forward(self, x: Tensor, scale: float) -> Tensor:
        return super().forward(x) * (scale if self.training else 0.5 * scale)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(13, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList(Block(8, 12) for _ in range(4))
        self.scale, self.between = 1.0, ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            if self.between:
                (block if self.between == "own" else self.blocks[0]).up.weight.data.clamp_(-0.1, 0.1)
            x = block(x, self.scale)
        return self.head(x)


class Model(LightningModule):
    def __init__(self, act: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.act, self.losses = Net(), act, list[float]()

    def loss(self, batch: Any, i: int) -> Tensor:
        before, after = ACTS[self.act] if self.training or self.act in IN_EVALUATION else ("", "")
        names = {"net": self.net, "i": i, "torch": torch}
        exec(before, names)
        loss = F.mse_loss(self.net(batch[0]).squeeze(-1), batch[2])
        exec(after, names)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch, batch_idx)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch, batch_idx))

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["train_loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.3)


PIPELINES = layouts("pipeline x zero 3", "zbv", "pipeline", "pipeline x tensor", "pipeline over the batch")


def trained(strategy: Any, act: str, batch_size: int) -> Any:
    module = Model(act)
    run = trainer(made(strategy), max_epochs=2, num_sanity_val_steps=0)
    run.fit(module, DataLoader(points(24, seed=1), batch_size), DataLoader(points(16, seed=2), batch_size))
    found = module.losses, float(run.callback_metrics["val_loss"]), [m.training for m in module.modules()]
    return *found, {name: value.clone() for name, value in module.state_dict().items()}


def each_trained(strategy: Any, acts: list[str], batch_size: int) -> list[Any]:
    return [trained(strategy, act, batch_size) for act in acts]


@sampled(2, "layout", PIPELINES)
def test_changes_that_a_step_puts_back_or_leaves(layout: str) -> None:
    ranks, readers, strategy = PIPELINES[layout]
    acts = [*KEPT, *(ON_WHOLE_BATCH if layout == "pipeline over the batch" else ())]
    begun = [begun_on_one(trained, None, act, 8) for act in acts]
    for found in run_on_ranks(ranks, each_trained, strategy, acts, 8 // readers):
        for act, expected, got in zip(acts, begun, found, strict=True):
            require_like(expected.result(), got, where=act)


SAYS = (
    r"is written into a tensor of this stage|"
    r"the step changes the parameter net\.blocks.* in place.*\(averages, noise, clamping\)|"
    r"the step changes (the values of net\.blocks|modes or requires_grad).* in hooks, such as on_train_batch_start"
)


@sampled(3, "act", REFUSED)
def test_changes_that_earlier_stages_would_miss_are_refused(act: str) -> None:
    with pytest.raises(RanksFailed, match=SAYS):
        run_on_ranks(2, trained, PIPELINES["pipeline"].strategy, act, 8, timeout=15.0)


@pytest.mark.parametrize("act", ["clamped after", "first block before each", "first block before each, later"])
def test_changes_of_one_microbatch_that_earlier_stages_would_miss_are_refused(act: str) -> None:
    with pytest.raises(RanksFailed, match=r"the step changes .*net\.blocks\.0\..* in hooks"):
        run_on_ranks(2, trained, partial(PipelineParallelStrategy, microbatches=1), act, 8, timeout=15.0)


class Positions(TiedWords):
    """The first and the last stage have the word embedding, and only the first has that of positions."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.positions = form, nn.Embedding(6, 8)

    def embedded(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        if self.form == "in place":
            x += self.positions.weight
            return x
        padded = torch.zeros(len(words), 7, 8)
        padded[:, :-1] = x + self.positions.weight
        padded[:, -1] = self.positions.weight[0]
        return padded[:, 1:]

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedded(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def positioned(strategy: Any) -> Any:
    words, models = torch.randint(19, (16, 6), generator=torch.Generator().manual_seed(1)), []
    loader = DataLoader(TensorDataset(words, words.roll(-1, 1)), 8)
    for form in "in place", "by index":
        models.append(Positions(form))
        trainer(made(strategy), max_epochs=1, limit_val_batches=0).fit(models[-1], loader, loader)
    return [({**model.state_dict()}, model.losses) for model in models]


def test_writes_into_tensors_that_all_stages_make() -> None:
    assert_like_one_device(positioned, 2, (None,), (PIPELINES["pipeline"].strategy,))
