"""What a step returns for a batch, a pipeline puts together from what it returns for the parts of it."""

from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_parallel import ZeroStrategy
from tests.heard import heard
from tests.models import Plain, loaders, points
from tests.ranks import begun_on_one, run_on_ranks
from tests.strategies.one_and_two import PIPELINE, MakeStrategy, made, require_like
from tests.trainers import trainer


class Returning(Plain):
    """Returns rows of samples, means, constants, texts and nothing."""

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        output = super().training_step(batch, batch_idx)
        return {**output, **self.about(batch, output["logits"])}

    def predict_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        return self.about(batch, self(batch[0])[0])

    def about(self, batch: tuple[Tensor, Tensor, Tensor], logits: Tensor) -> dict[str, Any]:
        hit = logits.argmax(-1) == batch[1]
        return {
            "correct": hit.tolist(),
            "mean": logits.mean(),
            "twice": logits.mean() * 2,
            "accuracy": hit.float().mean().item(),
            "classes": logits.shape[1],
            "text": "of the step",
            "nothing": None,
            "pair": (logits, [hit, logits.square().mean()]),
            "items": [{"logits": row, "class": int(row.argmax())} for row in logits],
        }


def returned(strategy: MakeStrategy | None) -> Any:
    torch.manual_seed(0)
    seen: list[Any] = []

    class Outputs(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: dict[str, Any], *_: Any) -> None:
            seen.append({name: value for name, value in outputs.items() if value is not None})

    run = trainer(made(strategy), max_epochs=1, callbacks=[Outputs()])
    module = Returning()
    run.fit(module, *loaders("plain", 24, samples=48, val_samples=24))
    predicted: Any = run.predict(module, DataLoader(points(48, seed=2), 24))
    assert all(output.pop("nothing") is None and output.pop("text") == "of the step" for output in predicted)
    assert all(output.pop("text") == "of the step" for output in seen)
    return seen, predicted


class Table:
    """Compares entry by entry, as tables of other libraries do."""

    def __eq__(self, other: object) -> Any:
        return np.array([True, False])

    __hash__ = None


class Unclear(Plain):
    """Returns what is neither rows of samples nor a mean."""

    def predict_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        logits = self(batch[0])[0]
        first = float(logits[0, 0])
        hits = (batch[1] == 0).sum()
        found: dict[str, Any] = {"rows": logits, "hits": int(hits), "counted": {"hits": hits}}
        return {**found, "means": logits.mean(0), "text": f"begins with {first}", "table": Table()}


def unclear() -> tuple[list[str], Any]:
    torch.manual_seed(0)
    with heard() as lines:
        run = trainer(PIPELINE(), max_epochs=1)
        (output,) = run.predict(Unclear(), DataLoader(points(16, seed=5), 16))
    return [line for line in lines if "differs between microbatches" in line], output


def both(strategy: MakeStrategy) -> Any:
    return returned(strategy), unclear()


def test_values_that_a_pipelined_step_returns() -> None:
    """What cannot be combined is named once."""
    begun = begun_on_one(returned, None)
    found, ((line,), output) = (first := run_on_ranks(2, both, PIPELINE))[0]
    require_like(begun.result(), found)
    require_like(begun.result(), first[1][0])
    assert "output hits, counted.hits, means, text, table differs between microbatches" in line
    assert not first[1][1][0]
    assert output["hits"] == float(output["counted"]["hits"]) == (0 + 3 + 1 + 1) / 4
    torch.testing.assert_close(output["means"], output["rows"].mean(0))
    assert output["text"].startswith("begins with")


class Views(Plain):
    """Returns views of parameters: of one element, and of all but their history."""

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        return {**super().training_step(batch, batch_idx), **self.views()}

    def predict_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        self(batch[0])
        return self.views()

    def views(self) -> dict[str, Tensor]:
        name, parameter = next(iter(self.named_parameters()))
        return {name: parameter.detach(), "first": parameter.detach().view(-1)[0]}


def predicted() -> tuple[list[Any], list[Any]]:
    torch.manual_seed(0)
    model, data = Views(), DataLoader(points(16, seed=1), 4)
    run = trainer(ZeroStrategy(), max_epochs=1)
    found = run.predict(model, data)
    with pytest.raises(ValueError, match=r"returned a view of a parameter \(of shape .*\), .*return a copy"):
        trainer(ZeroStrategy(), max_epochs=1).fit(model, data, data)
    return found, [model.views()] * len(found)


def test_views_of_parameters_that_zero_3_returns() -> None:
    for found, expected in run_on_ranks(2, predicted):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
