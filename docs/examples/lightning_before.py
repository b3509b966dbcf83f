"""python lightning_before.py --devices 2: a LightningModule and Lightning's Trainer."""

import argparse

import lightning as L
import torch
import torch.nn.functional as F
from plain import load_data, make_model, num_correct
from torch.utils.data import DataLoader


class Digits(L.LightningModule):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.net = make_model(config)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, index):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, outputs, batch, index):
        if self.trainer.is_global_zero:
            print(f"loss {self.trainer.callback_metrics['loss'].item():.7f}")

    def validation_step(self, batch, index):
        correct = num_correct(self, batch)
        self.log("accuracy", correct / len(batch[1]), sync_dist=True, batch_size=len(batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.config.lr, momentum=0.9)


def flags():
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="per process")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main(config):
    L.seed_everything(config.seed)
    train_data, test_data = load_data()
    train_loader = DataLoader(train_data, batch_size=config.batch_size, shuffle=True)
    test_loader = DataLoader(test_data, batch_size=256)
    trainer = L.Trainer(
        max_epochs=config.epochs,
        devices=config.devices,
        strategy="ddp",
        log_every_n_steps=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Digits(config), train_loader, test_loader)
    if trainer.is_global_zero:
        print(f"accuracy {trainer.callback_metrics['accuracy'].item():.4f}")


if __name__ == "__main__":
    main(flags())
