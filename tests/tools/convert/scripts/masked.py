"""A loss over the words of sentences of several lengths: a sum that a mask's sum divides."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader


def make_sentences(count):
    draws = torch.Generator().manual_seed(count)
    lengths = torch.randint(3, 15, (count,), generator=draws).tolist()
    return [torch.randint(1, 20, (length,), generator=draws) for length in lengths]


def pad(sentences):
    return nn.utils.rnn.pad_sequence(sentences, batch_first=True)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 16, padding_idx=0)
        self.mix = nn.GRU(16, 32, batch_first=True)
        self.head = nn.Linear(32, 20)

    def forward(self, words):
        return self.head(self.mix(self.embed(words))[0])


def compute_loss(scores, targets):
    mask = (targets != 0).float()
    losses = functional.cross_entropy(scores.transpose(1, 2), targets, reduction="none")
    return (losses * mask).sum() / mask.sum()


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
sentences = DataLoader(make_sentences(320), 32, shuffle=True, collate_fn=pad)
held_out = DataLoader(make_sentences(100), 20, collate_fn=pad)
for epoch in range(3):
    total = 0.0
    for words in sentences:
        loss = compute_loss(model(words[:, :-1]), words[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    with torch.no_grad():
        losses = [compute_loss(model(words[:, :-1]), words[:, 1:]).item() for words in held_out]
    print(f"epoch {epoch}: {total / len(sentences):.4f}, held out {sum(losses) / len(losses):.4f}")
