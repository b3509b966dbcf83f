"""Accelerate with gradient accumulation, a schedule, clipping, a checkpoint of everything and an exact metric."""

import os

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, GLOBAL_BATCH, ACCUMULATE = 3, 64, 2


def documents(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 10, 6, generator=g)
    best = x[:, :, 0].argmax(1)  # the sentence that says most
    return TensorDataset(x, best)


class Picker(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.project = nn.Linear(6, dim)
        self.layer = nn.TransformerEncoderLayer(dim, 2, 48, dropout=0.0, batch_first=True)
        self.score = nn.Linear(dim, 1)

    def forward(self, x):
        return self.score(self.layer(self.project(x))).squeeze(-1)


def evaluate(accelerator, model, loader):
    model.eval()
    right, total = 0, 0
    for x, best in loader:
        with torch.no_grad():
            guess = model(x).argmax(-1)
        guess, best = accelerator.gather_for_metrics((guess, best))
        right += (guess == best).sum().item()
        total += len(best)
    return right / total


class Progress:
    """Goes into the checkpoint with everything else."""

    def __init__(self):
        self.epochs_done = 0

    def state_dict(self):
        return {"epochs_done": self.epochs_done}

    def load_state_dict(self, state):
        self.epochs_done = state["epochs_done"]


def save(accelerator, epoch):
    """A folder per epoch, which gets its name when it is whole."""
    folder = os.path.join("summaries", f"epoch-{epoch}")
    accelerator.save_state(folder + ".new")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        os.replace(folder + ".new", folder)
    accelerator.wait_for_everyone()


def main():
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=ACCUMULATE)
    torch.manual_seed(0)
    micro_batch = GLOBAL_BATCH // accelerator.num_processes // ACCUMULATE
    train_loader = DataLoader(documents(512, 0), micro_batch, shuffle=True)
    valid_loader = DataLoader(documents(101, 1), 16)
    steps = EPOCHS * len(train_loader) // ACCUMULATE
    model = Picker()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scheduler = LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))
    model, optimizer, train_loader, valid_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, valid_loader, scheduler
    )
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    for epoch in range(EPOCHS):
        model.train()
        for x, best in train_loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(x), best))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        accuracy = evaluate(accelerator, model, valid_loader)
        accelerator.print(f"epoch {epoch}: accuracy {accuracy:.4f}, lr {scheduler.get_last_lr()[0]:.2e}")
        progress.epochs_done = epoch + 1
        save(accelerator, epoch)
    accelerator.end_training()


if __name__ == "__main__":
    main()
