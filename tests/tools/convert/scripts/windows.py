"""Steps without epochs: windows of a text, gradients of two of them, and the best model by an item."""

import torch
from torch import nn

torch.manual_seed(2)
text = torch.tensor([(i * i // 5 + i) % 11 for i in range(4000)])
size, length = 8, 12


def draw(begin, end):
    starts = torch.randint(begin, end - length, (size,)).tolist()
    windows = torch.stack([text[i : i + length + 1] for i in starts])
    return windows[:, :-1], windows[:, 1:]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.mix = nn.GRU(16, 16, batch_first=True)
        self.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(16, 11))

    def forward(self, x, targets):
        scores = self.head(self.mix(self.embed(x))[0])
        return scores, nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


@torch.no_grad()
def evaluate():
    model.eval()
    losses = {name: sum(model(*draw(*ends))[1] for _ in range(4)) / 4 for name, ends in parts.items()}
    model.train()
    return losses


parts = {"train": (0, 3000), "held out": (3000, 4000)}
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
best = 1e9
step = 0
x, y = draw(*parts["train"])
while True:
    if step % 10 == 0:
        losses = evaluate()
        print(f"step {step}: {losses['train']:.3f} {losses['held out']:.3f}")
        if losses["held out"] < best:
            best = losses["held out"]
            torch.save({"model": model.state_dict()}, "best.pt")
    for _ in range(2):
        scores, loss = model(x, y)
        x, y = draw(*parts["train"])
        (loss / 2).backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if step > 40:
        break
