"""accelerate launch --num-processes 2 accelerate_before.py: a loop with Hugging Face's Accelerate."""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from plain import load_data, make_model
from torch.utils.data import DataLoader


def flags():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="per process")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main(config):
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    set_seed(config.seed)
    model = make_model(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=0.9)
    train_data, test_data = load_data()
    train_loader = DataLoader(train_data, batch_size=config.batch_size, shuffle=True)
    test_loader = DataLoader(test_data, batch_size=256)
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model, optimizer, train_loader, test_loader
    )
    for _ in range(config.epochs):
        for x, y in train_loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            accelerator.print(f"loss {accelerator.gather(loss.detach()).mean().item():.7f}")
    correct = 0
    for x, y in test_loader:
        with torch.no_grad():
            guesses, labels = accelerator.gather_for_metrics((model(x).argmax(dim=1), y))
        correct += (guesses == labels).sum().item()
    accelerator.print(f"accuracy {correct / len(test_data):.4f}")
    accelerator.save_model(model, "model")
    accelerator.end_training()


if __name__ == "__main__":
    main(flags())
