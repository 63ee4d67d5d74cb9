"""A user's script of pytorch_lightning, run by `test_lightning_packages.py` as if lightning were not installed."""

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

import lightning_parallel


class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = (self.layers(batch) - 1).square().mean()
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def weights(strategy: object, devices: int) -> torch.Tensor:
    module, data = Regression(), torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data, 8 // devices))
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def main() -> None:
    torch.set_num_threads(1)
    expected = weights("auto", 1)
    for stage in (2, 3):
        found = weights(lightning_parallel.ZeroStrategy(stage=stage, start_method="fork"), 2)
        torch.testing.assert_close(found, expected)
    print("trained as on one device")


if __name__ == "__main__":
    main()
