import torch
from torch import nn

from lightning_parallel import PipelineParallel
from lightning_parallel.techniques.tools.microbatches import split


def test_a_step_may_change_its_samples_in_place_before_the_last_one_went_backward():
    """As models do that replace -100 in the labels they are given."""
    batch = {"ids": torch.tensor([[1, -1], [2, -1]])}
    table = nn.Embedding(4, 3)
    losses = []
    for part in split(batch, 2):
        part["ids"].masked_fill_(part["ids"] == -1, 0)
        losses.append(table(part["ids"]).sum())
    for loss in losses:
        loss.backward()
    assert table.weight.grad[:, 0].tolist() == [2, 1, 1, 0]
    assert batch["ids"].tolist() == [[1, 0], [2, 0]]  # as the model would have left the batch of one process


def test_what_learns_is_reached_through_a_part():
    whole = torch.ones(4, requires_grad=True)
    sum(part.sum() * factor for factor, part in enumerate(split(whole, 2))).backward()
    assert whole.grad.tolist() == [0, 0, 1, 1]


def test_a_batch_that_is_too_small_for_a_pipeline_is_told(caplog):
    assert PipelineParallel(4)._count(4, 1) == 1
    assert "A batch of 1 gives 1 microbatches to 4 ranks of a pipeline, which mostly wait" in caplog.text
