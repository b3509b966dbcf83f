"""torchrun --nproc-per-node 2 loader_lightning.py --devices 2: lightning_before.py, resumable on any number."""

import sys
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_before import Digits, flags
from plain import load_data
from stepladder import Loader, StopSignals

FOLDER = Path("loader_lightning")


class StopWhenAsked(L.Callback):
    def __init__(self, stop):
        self.stop = stop

    def on_train_start(self, trainer, module):
        self.stop.__enter__()  # again, in place of Lightning's own handler

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if self.stop.agreed():
            trainer.save_checkpoint(FOLDER / "last.ckpt")
            sys.exit(75)


class DigitsOfLoader(Digits):
    def on_train_batch_end(self, outputs, batch, index):
        if self.trainer.is_global_zero:
            loss = self.trainer.callback_metrics["loss"].item()
            print(f"step {self.trainer.train_dataloader.step}, loss {loss:.7f}")


def main(config, stop):
    L.seed_everything(config.seed)
    train_data, _ = load_data()
    loader = Loader(train_data, 64, config.seed, run_dir="runs/loader_lightning")
    saves = ModelCheckpoint(FOLDER, every_n_train_steps=10, save_last=True)
    trainer = L.Trainer(
        max_epochs=config.epochs,
        devices=config.devices,
        strategy="ddp",
        log_every_n_steps=1,
        callbacks=[saves, StopWhenAsked(stop)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(DigitsOfLoader(config), loader, ckpt_path="last")


if __name__ == "__main__":
    with StopSignals() as stop:
        main(flags(), stop)
