"""Topics of headlines with Accelerate. The main process prints the validation loss."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, GLOBAL_BATCH = 3, 64
VOCABULARY, TOPICS = 50, 5


def headlines(n, seed):
    theme = torch.randn(VOCABULARY, TOPICS, generator=torch.Generator().manual_seed(9))
    words = torch.randint(VOCABULARY, (n, 6), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(words, theme[words].sum(1).argmax(1))


class TopicModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 16)
        self.out = nn.Linear(16, TOPICS)

    def forward(self, words):
        return self.out(self.words(words).sum(1))


def main():
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    set_seed(0)
    train_loader = DataLoader(headlines(512, 1), GLOBAL_BATCH // accelerator.num_processes, shuffle=True)
    valid_loader = DataLoader(headlines(200, 2), 50)
    model = TopicModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    model, optimizer, train_loader, valid_loader = accelerator.prepare(
        model, optimizer, train_loader, valid_loader
    )
    criterion = nn.CrossEntropyLoss()

    for epoch in range(EPOCHS):
        model.train()
        for words, topic in train_loader:
            optimizer.zero_grad()
            accelerator.backward(criterion(model(words), topic))
            optimizer.step()

        model.eval()
        loss_sum, count = 0.0, 0
        with torch.no_grad():
            for words, topic in valid_loader:
                loss_sum += criterion(model(words), topic).item() * len(topic)
                count += len(topic)
        if accelerator.is_main_process:
            print(f"epoch {epoch}: validation loss {loss_sum / count:.4f}")

    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
