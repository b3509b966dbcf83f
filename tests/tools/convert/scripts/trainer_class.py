import json
import time
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset, DataLoader, SubsetRandomSampler


class Waves(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randn(n, 16, generator=g)
        self.y = self.x[:, :4].sum(1, keepdim=True).sin()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class Regressor(torch.nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(16, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))

    def forward(self, x):
        return self.body(x)

    def count(self):
        return sum(p.numel() for p in self.parameters())


class Trainer:
    def __init__(self, epochs=3, batch_size=50):
        torch.manual_seed(3)
        self.epochs = epochs
        sampler = SubsetRandomSampler(range(1000))
        self.train_loader = DataLoader(Waves(1000, 0), batch_size=batch_size, sampler=sampler)
        self.val_loader = DataLoader(Waves(203, 1), batch_size=batch_size)
        self.model = Regressor()
        print("parameters:", self.model.count())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.history = []
        self.log = open("log.txt", "w")

    def train_epoch(self):
        self.model.train()
        total, n = 0.0, 0
        for x, y in self.train_loader:
            self.optimizer.zero_grad()
            loss = F.mse_loss(self.model(x), y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            total += loss.item() * len(x)
            n += len(x)
        return total / n

    def validate(self):
        self.model.eval()
        losses = []
        with torch.no_grad():
            for x, y in self.val_loader:
                losses.append(F.mse_loss(self.model(x), y, reduction="sum").item())
        return sum(losses) / len(self.val_loader.dataset)

    def fit(self):
        best = float("inf")
        patience = 0
        for epoch in range(self.epochs):
            began = time.time()
            train_loss = self.train_epoch()
            val_loss = self.validate()
            self.history.append({"epoch": epoch, "train": train_loss, "val": val_loss})
            print(f"epoch {epoch} train {train_loss:.5f} val {val_loss:.5f} {time.time() - began:.6f} s")
            self.log.write(f"{val_loss}\n")
            if val_loss < best:
                best, patience = val_loss, 0
                torch.save(self.model.state_dict(), "best.pt")
            else:
                patience += 1
                if patience > 2:
                    break
        with open("history.json", "w") as f:
            json.dump(self.history, f)
        print("parameters again:", self.model.count())


if __name__ == "__main__":
    Trainer().fit()
