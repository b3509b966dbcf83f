import torch
import torch.multiprocessing as mp
from torch import nn

def train(model, seed):
    torch.manual_seed(seed)
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(20):
        x = torch.randn(16, 4); y = (x[:, 0] > 0).long()
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        opt.step()

if __name__ == "__main__":
    model = nn.Linear(4, 2)
    model.share_memory()
    ps = [mp.Process(target=train, args=(model, n)) for n in range(2)]
    for p in ps: p.start()
    for p in ps: p.join()
    torch.save(model.state_dict(), "model.pt")
