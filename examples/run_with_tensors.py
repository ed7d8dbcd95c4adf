"""Run a bundled problem with tensors of PyTorch, and compare with PyTorch's own operators.

python examples/run_with_tensors.py
"""

import torch
from torch.nn import functional as F

import dispatcher

x = torch.randn(2, 32, 8, 16, 16)
w = torch.nn.Parameter(torch.randn(32, 64, 4, 4, 4) / 40)

with torch.no_grad():
    compiled = dispatcher.compile(
        "conv-transpose3d-layernorm-gelu-scaling", kernel=w, stride=2, padding=1, scaling_factor=1.0
    )
    y = compiled(input=x)
    wanted = F.conv_transpose3d(x, w, stride=2, padding=1)
    wanted = F.gelu(F.layer_norm(wanted.movedim(1, -1), (64,)).movedim(-1, 1))
    torch.testing.assert_close(y, wanted, rtol=1e-3, atol=1e-4)
    print(f"{tuple(y.shape)} {y.dtype} on {compiled.device.name}")
    compiled.update(kernel=2 * w)  # after a step of an optimizer, say
    torch.testing.assert_close(compiled(input=x), wanted, rtol=1e-2, atol=1e-3)  # a layer norm takes factors out
