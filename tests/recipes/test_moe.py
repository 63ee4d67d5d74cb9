import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from lightning_parallel import (
    ActivationCheckpoint,
    ContextParallelStrategy,
    DataParallelStrategy,
    HybridStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeroStrategy,
)
from recipes.callbacks import ExpertLoad
from recipes.gpt import GPT, GPTConfig
from recipes.moe import BalanceLoss, Experts, MoEConfig, MoEGPT, MoEModule, Router, Routing, load_balancing
from tests.curves import check_parity
from tests.ranks import ranks
from tests.recipes.test_train import fit, write_texts
from tests.tiers import covering, sampled
from tests.trainers import trainer

DENSE = {"vocab_size": 50, "context": 16, "dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 48}
SMALL = DENSE | {"n_experts": 8, "top_k": 3, "expert_dim": 16}
ROUTINGS = {
    "softmax": {},
    "softmax over all": {"normalised": False, "scaling": 1.5},
    "sigmoid": {"score": "sigmoid", "scaling": 2.5},
    "with a bias": {"score": "sigmoid", "balance": "bias"},
    "in groups, by their best": {"normalised": False, "n_groups": 4, "top_groups": 2},
    "in groups, by their best two": {
        "score": "sigmoid",
        "balance": "bias",
        "n_groups": 4,
        "top_groups": 2,
        "group_experts": 2,
    },
}


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


# ---------------------------------------------------------------- one token after the other


def chosen_slowly(shape, router, token):
    """The experts of one token with their weights, as the papers have it."""
    logits = [row @ token for row in router.weight]
    if shape.score == "sigmoid":
        scores = [1 / (1 + torch.exp(-logit)) for logit in logits]
    else:
        scores = [torch.exp(logit) / sum(torch.exp(other) for other in logits) for logit in logits]
    wanted = [s.item() for s in scores]
    if router.correction is not None:
        wanted = [w + c.item() for w, c in zip(wanted, router.correction, strict=True)]
    size = shape.n_experts // shape.n_groups
    worth = [sum(sorted(wanted[g * size :][:size])[-shape.group_experts :]) for g in range(shape.n_groups)]
    groups = sorted(range(shape.n_groups), key=lambda g: -worth[g])[: shape.top_groups]
    allowed = [e for e in range(shape.n_experts) if e // size in groups]
    experts = sorted(allowed, key=lambda e: -wanted[e])[: shape.top_k]
    total = sum(scores[e] for e in experts) if shape.normalised else 1
    return {e: shape.scaling * scores[e] / total for e in experts}


def mapped_slowly(experts, token, chosen):
    out = 0
    for e, weight in chosen.items():
        gate, up = (experts.gate_up_proj[e] @ token).chunk(2)
        out = out + weight * (experts.down_proj[e] @ (gate * torch.sigmoid(gate) * up))
    return out


@pytest.mark.parametrize("routing", ROUTINGS)
def test_tokens_go_where_they_should(routing):
    shape = config(**ROUTINGS[routing])
    router, experts, x = made(Router, shape), made(Experts, shape), some(23, 32)
    inputs = [x, *router.parameters(), *experts.parameters()]
    index, weights, _ = (of[0] for of in router(x[None]))
    slow = [chosen_slowly(shape, router, token) for token in x]
    assert [set(row) for row in index.tolist()] == [set(chosen) for chosen in slow]
    assert shape.balance != "bias" or any(
        set(row.topk(3).indices.tolist()) != set(chosen)
        for row, chosen in zip(torch.sigmoid(x @ router.weight.T), slow, strict=True)
    )
    got = experts(x, index, weights)
    wanted = torch.stack([mapped_slowly(experts, *each) for each in zip(x, slow, strict=True)])
    torch.testing.assert_close(got, wanted)
    far = some(23, 32, seed=2).detach()
    for mine, theirs in zip(
        torch.autograd.grad(got, inputs, far), torch.autograd.grad(wanted, inputs, far), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


def test_gradients_of_experts_are_those_of_differences():
    experts, index = made(Experts, config(dim=8, expert_dim=4)), torch.tensor([[1, 0], [5, 1], [1, 7]])
    inputs = some(3, 8), some(3, 2, seed=2)
    assert torch.autograd.gradcheck(lambda x, weights: experts(x, index, weights), inputs)


# ---------------------------------------------------------------- the two ways to multiply


def both(experts, x, index, weights):
    """Outputs and gradients of the grouped product and of the loop."""
    for grouped in (True, False):
        experts.__dict__["_is_groupable"] = lambda _, grouped=grouped: grouped
        y = experts(x, index, weights)
        yield y, *torch.autograd.grad(y, (x, weights, *experts.parameters()), torch.ones_like(y))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spread", ["over all", "over two", "on one"])
def test_grouped_products_are_those_of_the_loop(dtype, spread):
    experts, x, weights = made(Experts, config(), dtype), some(29, 32, dtype=dtype), some(29, 3, dtype=dtype)
    assert experts._is_groupable(x)
    some_experts = {"over all": list(range(8)), "over two": [6, 3], "on one": [5]}[spread]
    index = torch.tensor([[some_experts[(n * n + k) % len(some_experts)] for k in range(3)] for n in range(29)])
    for one, other in zip(*both(experts, x, index, weights), strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one, other, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize(
    ("changes", "dtype"), [({}, torch.float64), ({"dim": 36, "expert_dim": 7, "n_heads": 2}, torch.float32)]
)
def test_what_cannot_be_grouped_is_looped_over(changes, dtype):
    shape = config(**changes)
    experts = made(Experts, shape, dtype)
    x = some(5, shape.dim, dtype=dtype)
    assert not experts._is_groupable(x)
    assert experts(x, torch.zeros(5, 1, dtype=torch.long), torch.ones(5, 1, dtype=dtype)).shape == x.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_tokens_are_no_tokens(dtype):
    experts, x = made(Experts, config(), dtype), some(0, 32, dtype=dtype)
    y = experts(x, torch.zeros(0, 3, dtype=torch.long), some(0, 3, dtype=dtype))
    assert y.shape == (0, 32)
    y.sum().backward()
    assert x.grad.shape == (0, 32)
    assert all(p.grad is None or not p.grad.any() for p in experts.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_experts_without_tokens_learn_nothing(dtype):
    experts = made(Experts, config(), dtype)
    y = experts(some(4, 32, dtype=dtype), torch.tensor([[2, 7]] * 4), some(4, 2, dtype=dtype))
    y.sum().backward()
    for parameter in experts.parameters():
        assert parameter.grad.flatten(1).any(1).tolist() == [e in (2, 7) for e in range(8)]


def test_under_autocast_experts_compute_as_linear_maps_do():
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


# ---------------------------------------------------------------- balance


def test_load_balancing_counts_pairs_and_averages_probabilities():
    probabilities = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3]])
    fraction, probability = load_balancing(probabilities, torch.tensor([[0, 1], [1, 2]]))
    torch.testing.assert_close(fraction, torch.tensor([0.25, 0.5, 0.25]))
    torch.testing.assert_close(probability, torch.tensor([0.3, 0.45, 0.25]))


def test_losses_on_routers_are_those_of_the_papers():
    torch.manual_seed(0)
    network, ids = MoEGPT(config(dense_layers=1, n_layers=3)), torch.randint(0, 50, (2, 16))
    seen = []
    routers = [module for module in network.modules() if isinstance(module, Router)]
    for router in routers:
        router.register_forward_hook(
            lambda router, inputs, outputs: seen.append((inputs[0] @ router.weight.T, outputs))
        )
    noted = network.routed(ids, None, None)[1]
    routing, unequal = Routing(noted), BalanceLoss()(noted)
    assert len(seen) == len(routing.z) == 2
    for layer, (logits, (index, _, _)) in enumerate(seen):
        f = torch.bincount(index.flatten(), minlength=8) / index.numel()
        p = logits.softmax(-1).flatten(0, 1)
        torch.testing.assert_close(unequal[layer], 8 * (f * p.mean(0)).sum())
        logits = logits.flatten(0, 1)
        torch.testing.assert_close(routing.z[layer], torch.log(logits.exp().sum(-1)).square().mean())
        torch.testing.assert_close(routing.entropy[layer], -(p * p.log()).sum(-1).mean())
    (unequal.sum() + routing.z.sum()).backward()
    assert all(router.weight.grad.any() for router in routers)


def test_bias_rises_where_load_is_missing():
    router = Router(config(n_experts=4, balance="bias", bias_rate=0.5))
    router.correct(torch.tensor([10, 0, 6, 4]))
    assert router.correction.tolist() == [-0.5, 0.5, -0.5, 0.5]
    router.correct(torch.tensor([5, 5, 5, 5]))
    assert router.correction.tolist() == [-0.5, 0.5, -0.5, 0.5]


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


def test_module_keeps_no_graph():
    trained = module()
    trainer(max_steps=2).fit(trained, batches(), batches())
    kept = [value for value in vars(trained).values() if isinstance(value, torch.Tensor)]
    assert kept
    assert not any(value.requires_grad for value in kept)


def test_dense_layers_are_those_of_the_gpt():
    dense = set(GPT(GPTConfig(**DENSE)).state_dict())
    mixed = set(MoEGPT(config(dense_layers=1, n_shared=2)).state_dict())
    assert {name for name in dense if ".1.feed_forward." not in name} <= mixed
    assert mixed - dense == {
        f"blocks.1.feed_forward.{name}"
        for name in (
            *("router.weight", "experts.gate_up_proj", "experts.down_proj"),
            *(f"shared.{part}_proj.weight" for part in ("gate", "up", "down")),
        )
    }


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


# ---------------------------------------------------------------- runs


class Save(Callback):
    """Saves as the recipe does: before the module's own hook at the end of a batch."""

    def __init__(self, file):
        self.file = file

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == trainer.max_steps:
            trainer.save_checkpoint(self.file)


@sampled(1, "balance", ["aux", "bias"])
@ranks(2)
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, balance):
    def fit(steps, seed=0, **resume):
        trained = module(seed, balance=balance)
        saving = trainer(
            DataParallelStrategy(), max_steps=steps, accumulate_grad_batches=2, callbacks=[Save(tmp_path / str(steps))]
        )
        saving.fit(trained, batches(1), batches(1), **resume)
        return trained.state_dict()

    fit(2)
    whole, resumed = fit(4), fit(4, 1, ckpt_path=tmp_path / "2")
    assert all(value.equal(resumed[name]) for name, value in whole.items())
    assert balance == "aux" or whole["network.blocks.0.feed_forward.router.correction"].any()


@sampled(1, "balance", ["aux", "bias", "none"])
def test_training_lowers_the_loss(balance):
    trained, losses = module(balance=balance, z_weight=0.001), []

    class Losses(Callback):
        def on_train_batch_end(self, trainer, *_):
            losses.append(float(trainer.callback_metrics["train_loss"]))

    trainer(max_epochs=6, callbacks=[Losses()]).fit(trained, batches(), batches())
    assert sum(losses[-8:]) < 0.9 * sum(losses[:8])


@pytest.fixture
def texts(tmp_path):
    return write_texts(tmp_path / "texts")


@ranks(2)
def test_recipe_draws_the_load(tmp_path, texts):
    fit(tmp_path / "out", texts, 4, "experiment=moe", "model.config.dense_layers=1")
    torch.distributed.barrier()  # rank 0 draws
    assert (tmp_path / "out" / "experts.png").read_bytes().startswith(b"\x89PNG")


@ranks(1)
def test_resumed_run_draws_the_load_of_all_of_it(tmp_path):
    def load(steps, **resume):
        drawn, save = ExpertLoad(tmp_path), Save(tmp_path / str(steps))
        run = trainer(HybridStrategy(), max_steps=steps, accumulate_grad_batches=2, callbacks=[drawn, save])
        run.fit(module(), batches(), batches(), **resume)
        return drawn.load.sum(1).tolist()

    pairs = 2 * 2 * 16 * 3  # batches of a step, samples of a batch, tokens of a sample, experts of a token
    assert load(2) == [2 * pairs] * 2
    assert load(4, ckpt_path=tmp_path / "2") == [4 * pairs] * 2


LAYOUTS = {
    "pp2": (2, 1, PipelineParallelStrategy),
    "dp2": (2, 2, DataParallelStrategy),
    "zero3": (2, 2, ZeroStrategy),
    "tp2": (2, 1, TensorParallelStrategy),
    "cp2": (2, 1, ContextParallelStrategy),
    "zero1": (2, 2, partial(ZeroStrategy, stage=1)),
    "recomputed": (1, 1, partial(HybridStrategy, ActivationCheckpoint())),
}
WHOLE = {  # in which a batch is not divided, nor the loss that balances experts
    **{name: LAYOUTS[name] for name in ("recomputed", "tp2", "cp2")},
    "pp2": (2, 1, partial(PipelineParallelStrategy, microbatches=1)),
}


@covering(keep=1, layout=LAYOUTS, column=("moe bias", "moe"))
def test_experts_train_as_in_one_process(column, layout):
    ranks, readers, strategy = LAYOUTS[layout]
    check_parity(column, ranks, strategy, data_ranks=readers, rtol=1e-6, max_epochs=1, precision="64-true")


@sampled(1, "layout", WHOLE)
def test_losses_on_routers_are_those_of_one_process(layout):
    ranks, _, strategy = WHOLE[layout]
    check_parity("moe aux", ranks, strategy, rtol=1e-6, max_epochs=1, precision="64-true")


@pytest.mark.exhaustive
def test_stages_multiply_groups():
    """In single precision, where experts without tokens have gradients of rounding."""
    check_parity("moe", 2, PipelineParallelStrategy, max_epochs=1, rtol=1e-4)
