"""Train through a fused operator: forward here, gradients from the same steps in PyTorch.

python examples/train_a_block.py
"""

import torch

from dispatcher.torch import custom_op

block = custom_op("conv-transpose3d-layernorm-gelu-scaling", stride=2, padding=1, scaling_factor=1.0)


class Upsample(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.kernel = torch.nn.Parameter(torch.randn(4, 8, 4, 4, 4) / 16)

    def forward(self, x):
        return block(x, self.kernel)


torch.manual_seed(0)
x, wanted = torch.randn(4, 4, 3, 4, 4), torch.rand(4, 8, 6, 8, 8)
model = Upsample()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
losses = []
for _ in range(20):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), wanted)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
assert losses[-1] < losses[0]
