"""Let a network run here as far as it can, and say what went where.

python examples/compile_a_network.py
"""

import torch
from torch import nn

import dispatcher.torch


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.ConvTranspose3d(8, 16, 4, stride=2, padding=1)
        self.norm = nn.GroupNorm(4, 16)
        self.head = nn.Conv3d(16, 3, 1)

    def forward(self, x):
        return self.head(nn.functional.silu(self.norm(self.up(x)))).sort(1).values


torch.manual_seed(0)
model, x = Decoder().eval(), torch.randn(2, 8, 4, 8, 8)
fast = dispatcher.torch.compile(model, (x,))
with torch.no_grad():
    for batch in (2, 5):
        y = torch.randn(batch, *x.shape[1:])
        torch.testing.assert_close(fast(y), model(y), rtol=1e-3, atol=1e-4)
print(dispatcher.torch.report())
