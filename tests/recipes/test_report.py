import pytest
import torch

from recipes.report import draw_curves, draw_load, generate, read_curve


class Counting(torch.nn.Module):
    """Predicts the id after the last one."""

    def forward(self, ids):
        return torch.nn.functional.one_hot((ids + 1) % 10, 10) * 50.0


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_generation_appends_what_the_network_predicts(temperature):
    ids = generate(Counting(), torch.tensor([7]), 6, context=3, temperature=temperature)
    assert ids.tolist() == [7, 8, 9, 0, 1, 2, 3]


def test_generation_is_reproducible():
    def draw():
        return generate(Counting(), torch.tensor([0]), 20, context=3, temperature=30.0).tolist()

    assert draw() == draw() != list(range(20))


def test_curves_are_drawn_from_the_log(tmp_path):
    log = tmp_path / "metrics.csv"
    log.write_text("step,train_loss,val_loss\n0,3.0,\n1,2.0,\n1,,2.5\n")
    assert read_curve(log, "train_loss") == ([0, 1], [3.0, 2.0])
    assert read_curve(log, "val_loss") == ([1], [2.5])
    draw_curves(log, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_load_of_experts_is_drawn(tmp_path):
    draw_load(torch.tensor([[3, 1, 0, 4], [2, 2, 2, 2]]), 1, tmp_path / "experts.png")
    assert (tmp_path / "experts.png").read_bytes().startswith(b"\x89PNG")
