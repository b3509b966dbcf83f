import copy, torch
from torch import nn
torch.manual_seed(0)
class Moco(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        self.k = copy.deepcopy(self.q)
        self.position = nn.Parameter(torch.randn(8), requires_grad=False)
        for p in self.k.parameters(): p.requires_grad = False
    def forward(self, x):
        x = x + self.position
        with torch.no_grad():
            for a, b in zip(self.q.parameters(), self.k.parameters()): b.data = b.data * 0.9 + a.data * 0.1
            k = self.k(x)
        return self.q(x), k
m = Moco()
opt = torch.optim.SGD(m.parameters(), 0.1)
for _ in range(10):
    q, k = m(torch.randn(16, 8))
    loss = (q - k.roll(1, 0)).square().mean()
    opt.zero_grad(); loss.backward(); opt.step()
