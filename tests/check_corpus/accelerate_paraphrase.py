"""Do two sentences mean the same? Hugging Face Accelerate, accuracy on a validation set."""

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset

WORDS, LENGTH = 30, 8


class Pairs(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.first = torch.randint(WORDS, (n, LENGTH), generator=g)
        self.same = torch.randint(2, (n,), generator=g)
        other = torch.randint(WORDS, (n, LENGTH), generator=g)
        shuffled = self.first[:, torch.randperm(LENGTH, generator=g)]
        shuffled[:, :5] = other[:, :5]  # one may say it in other words
        self.second = torch.where(self.same[:, None] == 1, shuffled, other)

    def __len__(self):
        return len(self.same)

    def __getitem__(self, i):
        return {"first": self.first[i], "second": self.second[i], "labels": self.same[i]}


class SiameseModel(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.embed = nn.EmbeddingBag(WORDS, dim)
        self.head = nn.Sequential(nn.Linear(dim, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, first, second):
        return self.head((self.embed(first) - self.embed(second)) ** 2)


def training_function(args):
    accelerator = Accelerator(cpu=args.cpu)
    torch.manual_seed(args.seed)
    batch = args.batch_size // accelerator.num_processes
    train_loader = DataLoader(Pairs(480, 0), shuffle=True, batch_size=batch)
    eval_loader = DataLoader(Pairs(149, 1), shuffle=False, batch_size=20)
    model = SiameseModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, train_loader, eval_loader)

    for epoch in range(args.epochs):
        model.train()
        for batch in train_loader:
            logits = model(batch["first"], batch["second"])
            loss = nn.functional.cross_entropy(logits, batch["labels"])
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

        model.eval()
        correct, total = 0, 0
        for batch in eval_loader:
            with torch.no_grad():
                predictions = model(batch["first"], batch["second"]).argmax(dim=-1)
            predictions, labels = accelerator.gather((predictions, batch["labels"]))
            correct += (predictions == labels).sum().item()
            total += len(labels)
        accelerator.print(f"epoch {epoch}: accuracy {correct / total:.4f}")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu", action="store_true", default=not torch.cuda.is_available())
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=48)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    training_function(parser.parse_args())
