"""torchrun --nproc-per-node 2 loader_trainer.py: trainer_before.py, resumable on any number of processes."""

import json
import sys
from pathlib import Path

import torch
from plain import load_data
from stepladder import Loader, StopSignals
from trainer_before import Digits, collate, flags
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

FOLDER = Path("loader_trainer")


class SaveLoader(TrainerCallback):
    def __init__(self, loader):
        self.loader = loader

    def on_save(self, args, state, control, **_):
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        if state.is_world_process_zero:
            (folder / "loader.json").write_text(json.dumps(self.loader.state_dict()))


class StopWhenAsked(TrainerCallback):
    def __init__(self, stop):
        self.stop = stop

    def on_step_end(self, args, state, control, **_):
        if self.stop.agreed():
            control.should_save = control.should_training_stop = True


class LoaderTrainer(Trainer):
    def __init__(self, *args, loader, **options):
        super().__init__(*args, **options)
        self.loader = loader
        self.add_callback(SaveLoader(loader))

    def get_train_dataloader(self):
        return self.loader


def main(config, stop):
    train_data, _ = load_data()
    arguments = TrainingArguments(
        output_dir=str(FOLDER),
        num_train_epochs=config.epochs,
        ignore_data_skip=True,  # the loader knows where it is
        optim="sgd",
        optim_args="momentum=0.9",
        learning_rate=config.lr,
        lr_scheduler_type="constant",
        max_grad_norm=0,
        seed=config.seed,
        save_steps=10,
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
    )
    loader = Loader(train_data, 64, config.seed, collate=collate, run_dir="runs/loader_trainer")
    trainer = LoaderTrainer(Digits(config), arguments, train_dataset=train_data, loader=loader)
    trainer.add_callback(StopWhenAsked(stop))
    checkpoint = get_last_checkpoint(FOLDER) if FOLDER.is_dir() else None
    if checkpoint:
        loader.load_state_dict(json.loads(Path(checkpoint, "loader.json").read_text()))
    trainer.train(resume_from_checkpoint=checkpoint)
    if stop.agreed():
        sys.exit(75)


if __name__ == "__main__":
    with StopSignals() as stop:
        main(flags(), stop)
