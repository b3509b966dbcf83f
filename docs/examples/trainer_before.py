"""torchrun --nproc-per-node 2 trainer_before.py: Hugging Face's Trainer."""

import argparse

import torch
import torch.nn.functional as F
from plain import load_data, make_model
from torch import nn
from transformers import Trainer, TrainingArguments


class Digits(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.net = make_model(config)

    def forward(self, x, labels):
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def collate(items):
    x, labels = zip(*items, strict=True)
    return {"x": torch.stack(x), "labels": torch.stack(labels)}


def compute_metrics(predicted):
    return {"accuracy": (predicted.predictions.argmax(axis=1) == predicted.label_ids).mean()}


def flags():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="per process")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main(config):
    train_data, test_data = load_data()
    arguments = TrainingArguments(
        output_dir="hf",
        num_train_epochs=config.epochs,
        per_device_train_batch_size=config.batch_size,
        optim="sgd",
        optim_args="momentum=0.9",
        learning_rate=config.lr,
        lr_scheduler_type="constant",
        max_grad_norm=0,
        seed=config.seed,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
    )
    trainer = Trainer(
        Digits(config),
        arguments,
        data_collator=collate,
        train_dataset=train_data,
        eval_dataset=test_data,
        compute_metrics=compute_metrics,
    )
    trainer.train()
    accuracy = trainer.evaluate()["eval_accuracy"]
    if trainer.is_world_process_zero():
        for line in trainer.state.log_history:
            if "loss" in line:
                print(f"loss {line['loss']:.7f}")
        print(f"accuracy {accuracy:.4f}")
    trainer.save_model("hf")


if __name__ == "__main__":
    main(flags())
