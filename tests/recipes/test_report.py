import torch

from recipes.report import draw_curves, generate, read_curve


class Counting(torch.nn.Module):
    """Predicts the id after the last one."""

    def forward(self, ids):
        return torch.nn.functional.one_hot((ids + 1) % 10, 10) * 50.0


def test_generation_appends_what_the_network_predicts():
    for temperature in (0, 1.0):
        ids = generate(Counting(), torch.tensor([7]), 6, context=3, temperature=temperature)
        assert ids.tolist() == [7, 8, 9, 0, 1, 2, 3]
    hot = [generate(Counting(), torch.tensor([0]), 20, context=3, temperature=30.0).tolist() for _ in range(2)]
    assert hot[0] == hot[1] != list(range(20))


def test_curves_are_drawn(tmp_path):
    log = tmp_path / "metrics.csv"
    log.write_text("step,train_loss,val_loss\n0,3.0,\n1,2.0,\n1,,2.5\n")
    assert read_curve(log, "train_loss") == ([0, 1], [3.0, 2.0])
    assert read_curve(log, "val_loss") == ([1], [2.5])
    draw_curves(log, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
