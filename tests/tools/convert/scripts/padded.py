"""Texts of other lengths, of which the padding is no target."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

torch.manual_seed(0)
texts = [torch.randint(1, 9, (length,)) for length in range(4, 36) for _ in range(4)]


def collate(batch):
    return nn.utils.rnn.pad_sequence(batch, batch_first=True)


loader = DataLoader(texts, batch_size=16, shuffle=True, collate_fn=collate)
model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 9))
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
for epoch in range(3):
    total = tokens = 0
    for batch in loader:
        outputs, targets = model(batch[:, :-1]), batch[:, 1:]
        loss = cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        count = (targets != 0).sum().item()
        total += loss.item() * count
        tokens += count
    print(f"epoch {epoch}: loss {total / tokens:.4f}")
torch.save(model.state_dict(), "model.pt")
