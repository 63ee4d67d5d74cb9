"""Experts of the recipes; that tokens go where they should is told by models of transformers, in test_hub.py."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from lightning_parallel import ActivationCheckpoint, DataParallelStrategy, PipelineParallelStrategy
from recipes.moe import BalanceLoss, Experts, MoEConfig, MoEGPT, MoEModule, Router, means
from tests.curves import check_parity
from tests.layouts import Layout, hybrid, layouts
from tests.ranks import ranks
from tests.recipes.test_train import fit, write_texts
from tests.tiers import sampled
from tests.trainers import trainer

DENSE = {"vocab_size": 50, "context": 16, "dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 48}
SMALL = DENSE | {"n_experts": 8, "top_k": 3, "expert_dim": 16}


def config(**changes):
    return MoEConfig(**{**SMALL, **changes})


def some(*shape, seed=1, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def made(kind, shape, dtype=torch.float64):
    """A router or experts whose weights are large enough to matter."""
    torch.manual_seed(0)
    part = kind(shape).to(dtype)
    for tensor in part.state_dict().values():
        tensor.copy_(torch.randn(tensor.shape) / math.sqrt(tensor.shape[-1]))
    return part


def both(experts, x, index, weights):
    """Outputs and gradients of the grouped product and of the loop."""
    for grouped in (True, False):
        experts.__dict__["_is_groupable"] = lambda _, grouped=grouped: grouped
        y = experts(x, index, weights)
        yield y, *torch.autograd.grad(y, (x, weights, *experts.parameters()), torch.ones_like(y))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_grouped_products_are_those_of_the_loop(dtype):
    experts, x, weights = made(Experts, config(), dtype), some(29, 32, dtype=dtype), some(29, 3, dtype=dtype)
    assert experts._is_groupable(x)
    for few in (list(range(8)), [6, 3], [5]):
        index = torch.tensor([[few[(n * n + k) % len(few)] for k in range(3)] for n in range(29)])
        for one, other in zip(*both(experts, x, index, weights), strict=True):
            assert one.dtype == dtype
            torch.testing.assert_close(one, other, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)


def test_odd_widths_and_double_precision_are_looped_over():
    for changes, dtype in (({}, torch.float64), ({"dim": 36, "expert_dim": 7, "n_heads": 2}, torch.float32)):
        experts = made(Experts, shape := config(**changes), dtype)
        x = some(5, shape.dim, dtype=dtype)
        assert not experts._is_groupable(x)
        assert experts(x, torch.zeros(5, 1, dtype=torch.long), torch.ones(5, 1, dtype=dtype)).shape == x.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_experts_without_tokens_learn_nothing(dtype):
    experts = made(Experts, config(), dtype)
    for index, learning in ((torch.zeros(0, 3, dtype=torch.long), ()), (torch.tensor([[2, 7]] * 4), (2, 7))):
        x = some(len(index), 32, dtype=dtype)
        y = experts(x, index, some(*index.shape, dtype=dtype))
        y.sum().backward()
        assert y.shape == x.grad.shape == (len(index), 32)
        for parameter in experts.parameters():
            found = torch.zeros(8, 1) if parameter.grad is None else parameter.grad
            assert found.flatten(1).any(1).tolist() == [e in learning for e in range(8)]


def test_autocast_reaches_experts_as_it_does_linear_maps():
    shape = config()
    experts, router = made(Experts, shape, torch.float32), made(Router, shape, torch.float32)
    x = some(29, 32, dtype=torch.float32)
    exact, _, _ = router(x[None])
    with torch.autocast("cpu", torch.bfloat16):
        index, weights, _ = router(x[None])
        (y, *gradients), (other, *others) = both(experts, x, index[0], weights[0].detach().requires_grad_())
    assert index.equal(exact)
    assert (y.dtype, weights.dtype) == (torch.bfloat16, torch.float32)
    for one, two in zip([y, *gradients], [other, *others], strict=True):
        assert one.dtype == two.dtype
        torch.testing.assert_close(one, two, rtol=0.02, atol=0.02)


def test_losses_on_routers_are_those_of_the_papers():
    torch.manual_seed(0)
    network, ids = MoEGPT(config(dense_layers=1, n_layers=3)), torch.randint(0, 50, (2, 16))
    seen = []
    routers = [module for module in network.modules() if isinstance(module, Router)]
    for router in routers:
        router.register_forward_hook(
            lambda router, inputs, outputs: seen.append((inputs[0] @ router.weight.T, outputs))
        )
    _, routing = network.hidden(ids)
    (_, _, entropy, z), unequal = means(routing), BalanceLoss()(routing)
    assert len(seen) == len(z) == 2
    for layer, (logits, (index, _, _)) in enumerate(seen):
        f = torch.bincount(index.flatten(), minlength=8) / index.numel()
        p = logits.softmax(-1).flatten(0, 1)
        torch.testing.assert_close(unequal[layer], 8 * (f * p.mean(0)).sum())
        logits = logits.flatten(0, 1)
        torch.testing.assert_close(z[layer, 0], torch.log(logits.exp().sum(-1)).square().mean())
        torch.testing.assert_close(entropy[layer, 0], -(p * p.log()).sum(-1).mean())
    (unequal.sum() + z.sum()).backward()
    assert all(router.weight.grad.any() for router in routers)


def module(seed=0, **changes):
    torch.manual_seed(seed)
    return MoEModule(config(**changes), learning_rate=1e-2, warmup_steps=2, final_lr=1)


def batches(size=2, count=8):
    ids = torch.randint(0, 50, (size * count, 17), generator=torch.Generator().manual_seed(3))
    return DataLoader([{"input_ids": row[:-1], "labels": row[1:]} for row in ids], size)


def test_bias_follows_the_load_of_all_batches_of_a_step():
    trained = module(balance="bias", bias_rate=0.25)
    loads, biases = [], []

    class Watch(Callback):
        def on_train_start(self, trainer, pl_module):
            for router in filter(lambda part: isinstance(part, Router), pl_module.modules()):
                router.register_forward_hook(lambda _, inputs, outputs: loads.append(outputs[0].flatten().bincount()))

        def on_train_batch_end(self, trainer, pl_module, *_):
            biases.append([r.correction.clone() for r in pl_module.modules() if isinstance(r, Router)])

    trainer(max_steps=1, accumulate_grad_batches=2, callbacks=[Watch()]).fit(trained, batches(), batches())
    assert len(loads) == 4, "two layers, two batches"
    for layer in range(2):
        pairs = F.pad(loads[layer], (0, 8 - len(loads[layer]))) + F.pad(
            loads[layer + 2], (0, 8 - len(loads[layer + 2]))
        )
        assert trained.load[layer].equal(pairs)
        assert not biases[0][layer].any()
        assert biases[1][layer].equal(0.25 * (pairs.sum() / 8 - pairs).sign())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 9}, r"top_k=9 is more than there are experts that a token can choose from; choose 8 or less"),
        ({"n_groups": 3}, r"n_groups=3 does not divide n_experts=8"),
        ({"n_groups": 4}, r"top_k=3 is more than there are experts .* choose 2 or less"),
        ({"dense_layers": 2}, r"dense_layers=2 is more .* choose 1 or less"),
        ({"score": "relu"}, r"score=relu must be one of softmax, sigmoid"),
        ({"balance": True}, r"balance=True must be one of aux, bias, none"),
        ({"z_weight": -1}, r"z_weight=-1 must be a number, 0 or more"),
    ],
)
def test_impossible_experts_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        config(**change)


class Save(Callback):
    """Saves as the recipe does: before the module's own hook at the end of a batch."""

    def __init__(self, file):
        self.file = file

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == trainer.max_steps:
            trainer.save_checkpoint(self.file)


@ranks(2)
def test_resumed_run_is_the_uninterrupted_one(tmp_path):
    def fit(steps, seed=0, **resume):
        trained = module(seed, balance="bias")
        run = {"max_steps": steps, "accumulate_grad_batches": 2, "callbacks": [Save(tmp_path / str(steps))]}
        trainer(DataParallelStrategy(), **run).fit(trained, batches(1), batches(1), **resume)
        return trained.state_dict()

    fit(2)
    whole, resumed = fit(4), fit(4, 1, ckpt_path=tmp_path / "2")
    assert all(value.equal(resumed[name]) for name, value in whole.items())
    assert whole["network.blocks.0.feed_forward.router.correction"].any()


def test_training_lowers_the_loss_and_keeps_no_graph():
    trained, losses = module(balance="aux", z_weight=0.001), []

    class Losses(Callback):
        def on_train_batch_end(self, trainer, *_):
            losses.append(float(trainer.callback_metrics["train_loss"]))

    trainer(max_epochs=6, callbacks=[Losses()]).fit(trained, batches(), batches())
    assert sum(losses[-8:]) < 0.9 * sum(losses[:8])
    kept = [value for value in vars(trained).values() if isinstance(value, torch.Tensor)]
    assert kept
    assert not any(value.requires_grad for value in kept)


@pytest.fixture
def texts(tmp_path):
    return write_texts(tmp_path / "texts")


@ranks(2)
def test_recipe_trains_experts(tmp_path, texts):
    weights = fit(tmp_path / "out", texts, 4, "experiment=moe", "model.config.dense_layers=1")
    assert all(weight.isfinite().all() for weight in weights.values())
    assert (tmp_path / "out" / "checkpoints" / "last.ckpt").exists()


LAYOUTS = layouts("data parallel", "zero 3", "tensor parallel", "context", "pipeline over the batch") | {
    "recomputed": Layout(1, 1, hybrid(ActivationCheckpoint())),
    "pipeline of 1 microbatch": Layout(2, 1, partial(PipelineParallelStrategy, microbatches=1)),
}


@sampled(
    1,
    ("column", "layout"),
    [
        ("moe bias", "data parallel"),
        ("moe", "zero 3"),
        ("moe bias", "pipeline over the batch"),
        ("moe bias", "context"),
        ("moe aux", "recomputed"),  # the loss that balances experts counts a whole batch
        ("moe aux", "tensor parallel"),
        ("moe aux", "pipeline of 1 microbatch"),
    ],
)
def test_experts_train_as_in_one_process(column, layout):
    ranks, readers, strategy = LAYOUTS[layout]
    check_parity(column, ranks, strategy, data_ranks=readers, rtol=1e-6, max_epochs=1, precision="64-true")


@pytest.mark.exhaustive
def test_stages_multiply_groups():
    """In single precision, where experts without tokens have gradients of rounding."""
    check_parity("moe", 2, partial(PipelineParallelStrategy, loss_over="batch"), max_epochs=1, rtol=1e-4)
