"""Gradients that look whole to hooks, in one process: what hooks do with them, and hooks that run others."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from lightning_parallel.strategies.hooks import whole_gradients
from lightning_parallel.strategies.hooks.showing import Showing
from lightning_parallel.strategies.hooks.shown_gradient import ShownGradient
from lightning_parallel.strategies.hooks.whole_gradients import WholeGradients


@pytest.fixture
def shown() -> Iterator[ShownGradient]:
    """A gradient of which the only rank has all rows."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp_shard",))
    yield ShownGradient.of(DTensor.from_local(torch.tensor([3.0]), mesh, [Shard(0)]))
    dist.destroy_process_group()


def test_its_type_is_a_question_and_a_conversion_a_read(shown: ShownGradient) -> None:
    assert shown.type() == "torch.FloatTensor"
    assert type(shown.type(torch.float64)) is type(shown.type(dtype=torch.float64)) is Tensor


def test_one_element_becomes_a_number_of_any_kind(shown: ShownGradient) -> None:
    assert (int(shown), float(shown), bool(shown), shown.item()) == (3, 3.0, True, 3.0)


def of_weight(shown: ShownGradient) -> tuple[nn.Parameter, WholeGradients]:
    """A parameter that has this gradient, and what shows it to hooks."""
    module = LightningModule()
    module.weight = nn.Parameter(torch.ones(1))
    module.weight.grad = shown.divided
    alone: Any = {"mesh": SimpleNamespace(world_size=1), "pipeline": SimpleNamespace(ranks=1), "pairs": ()}
    divided: Any = SimpleNamespace(module=module, held=lambda: dict.fromkeys(module.parameters()), **alone)
    return module.weight, WholeGradients(divided, [], dist.group.WORLD, in_parts=True)


def test_what_one_rank_may_read_is_there_where_a_hook_runs_another(shown: ShownGradient) -> None:
    weight, gradients = of_weight(shown)

    def runs_another() -> Iterator[Any]:
        with gradients.at_first_read(at_once=True):
            yield weight.grad.gathered
        yield type(weight.grad)

    assert gradients.shown_to(lambda: [*runs_another()])() == [torch.tensor([3.0]), ShownGradient]
    assert weight.grad is shown.divided
    assert "grad" not in vars(nn.Parameter)


def test_a_hook_within_one_that_is_shown_them_prepares_nothing(
    shown: ShownGradient, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, gradients = of_weight(shown)
    made: list[bool] = []
    make: Callable[..., Showing] = lambda divided, tree: made.append(tree) or Showing(divided, tree)  # noqa: E731
    monkeypatch.setattr(whole_gradients, "Showing", make)
    with gradients.at_first_read(at_once=False), gradients.at_first_read(at_once=False):
        assert made == [True]
