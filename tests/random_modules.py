"""Files in KernelBench's form, each with a random module in one of the ways in which authors write them."""

from __future__ import annotations

import random
from typing import Any

import torch

HEAD = "import math\nimport torch\nimport torch.nn as nn\nimport torch.nn.functional as F\n"

#: What a module may do next, by weight: what its constructor makes, if anything, and what it does with ``x``.
STATEMENTS: tuple[tuple[int, tuple[str, ...]], ...] = (
    (
        4,
        (  # convolutions
            "nn.Conv{r}d({c}, {out}, {k}, stride={s}, padding={p}, bias=False)",
            "nn.Conv{r}d({c}, {c}, 3, padding='same', groups={g})",
            "nn.ConvTranspose{r}d({c}, {out}, {k}, stride={s}, dilation={s})",
            "nn.Sequential(nn.Conv{r}d({c}, {out}, 1), nn.SiLU())",
            "nn.Parameter(torch.randn({out}, {c}{threes}) * 0.3); x = F.conv{r}d(x, weight=self.{name}, padding={s})",
            "nn.Linear({c}, {out}); x = self.{name}(x.permute({last})).permute({first})",
            "nn.Linear({c}, {out}, bias=False); x = self.{name}(x.transpose(1, -1)).transpose(-1, 1)",
            "nn.Parameter(torch.randn({out}, {c})); x = torch.einsum('oc,nc...->no...', self.{name}, x)",
        ),
    ),
    (
        3,
        (  # norms
            "nn.BatchNorm{r}d({c}, eps=1e-3)",
            "nn.GroupNorm({g}, {c})",
            "nn.InstanceNorm{r}d({c}, affine=True)",
            "nn.LayerNorm({c}); x = self.{name}(x.permute({last})).permute({first})",
            "x = F.layer_norm(x, x.shape[2:])",
            "mean = x.mean(dim={dims}, keepdim=True); var = x.var(dim={dims}, keepdim=True, unbiased=False); "
            "x = (x - mean) / torch.sqrt(var + 1e-5)",
            "x = F.normalize(x, p={s}, dim=1)",
        ),
    ),
    (
        4,
        (  # activations
            "nn.GELU()",
            "nn.PReLU({c})",
            "nn.LeakyReLU(0.2, inplace=True)",
            "nn.Dropout(0.0)",
            "x = F.relu(x)",
            "x = x * x.sigmoid()",
            "x = x * torch.tanh(F.softplus(x))",
            "x = F.glu(x, dim=1)",
            "x = torch.clamp(x, min=-0.5)",
            "x = x.clone().relu_()",
            "x = 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))",
            "x = x.softmax(dim=-1)",
            "x = F.log_softmax(x, 1)",
            "x = torch.where(x > 0, x, 0.1 * x)",
            "x = torch.exp(-x.abs())",
            "x = x.flatten(2).softmax(2).view_as(x)",
        ),
    ),
    (
        3,
        (  # arithmetic
            "nn.Parameter(torch.randn({c}{ones})); x = x + self.{name}",
            "torch.rand({c}{ones}) + 0.5; x = x / self.{name}",
            "{k}; x = x * self.{name} / math.pi",
            "x = 2.0 - x",
            "x = x - x.mean(1, keepdim=True)",
            "x = x if x.shape[1] > 2 else x * 2",
            "a, b = x.chunk(2, dim=1); x = a * torch.sigmoid(b)",
            "x = x + x.amax(dim={dims}, keepdim=True)",
            "x = x[:, :1] - x",
        ),
    ),
    (
        3,
        (  # skips, each of which has a convolution
            "nn.Conv{r}d({c}, {c}, 3, padding=1); skip = x; x = F.relu(self.{name}(x)); x += skip",
            "nn.Conv{r}d({c}, {c}, 1); x = torch.cat([x, self.{name}(x)], dim=1)",
            "nn.Sequential(nn.AdaptiveAvgPool{r}d(1), nn.Conv{r}d({c}, {c}, 1), nn.Sigmoid()); x = x * self.{name}(x)",
            "nn.Linear({c}, {c}); x = x * self.{name}(x.mean(dim={dims})).view(-1, {c}{ones})",
        ),
    ),
    (
        1,
        (  # pools, reductions
            "nn.MaxPool{r}d({k}, {s}, ceil_mode=True)",
            "nn.AvgPool{r}d({k}, padding={p} // {k})",
            "x = F.adaptive_avg_pool{r}d(x, {k})",
            "x = F.interpolate(x, scale_factor=2)",
            "x = torch.logsumexp(x, dim=1, keepdim=True)",
            "x = x.sum(dim=-1, keepdim=True)",
        ),
    ),
)


def written(seed: int) -> tuple[str, Any]:
    """The text of a file, and the module, made of the statements that work one after another."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    rank = rng.choice((1, 2, 2, 3))
    shape = (rng.choice((1, 2)), rng.choice((3, 4, 6)), *(rng.randint(3, 7) for _ in range(rank)))
    module = torch.nn.Module().train(rng.random() < 0.5)
    space: dict[str, Any] = {"self": module, "x": torch.randn(shape)}
    exec(HEAD, space)
    init, body = [], []
    for number in range(40):
        kind = rng.choices(STATEMENTS, [weight for weight, _ in STATEMENTS])[0][1]
        x = space["x"]
        channels = x.shape[1]
        groups = [each for each in range(1, channels + 1) if channels % each == 0]
        last, first = (0, *range(2, rank + 2), 1), (0, rank + 1, *range(1, rank + 1))
        facts = {
            "name": f"layer{number}",
            "r": rank,
            "c": channels,
            "out": rng.randint(1, 6),
            "k": rng.randint(1, 3),
            "s": rng.randint(1, 2),
            "p": rng.randint(0, 1),
            "g": rng.choice(groups),
            "ones": ", 1" * rank,
            "threes": ", 3" * rank,
            "last": str(last)[1:-1],
            "first": str(first)[1:-1],
            "dims": tuple(range(2, rank + 2)),
        }
        made, *lines = rng.choice(kind).format(**facts).split("; ")
        if made.startswith(("x = ", "mean = ", "a, b = ")):
            made, lines = "", [made, *lines]
        try:
            with torch.no_grad():
                if made:
                    exec(f"self.{facts['name']} = {made}", space)
                exec("\n".join(lines or [f"x = self.{facts['name']}(x)"]), space)
            good = (
                space["x"].ndim == rank + 2 and 0 < space["x"].numel() < 20000 and float(space["x"].abs().max()) < 1e3
            )
        except (RuntimeError, ValueError, IndexError):  # a window that is larger than its input, ...
            good = False
        if not good:
            space["x"] = x
            continue
        init += [f"self.{facts['name']} = {made}"] if made else []
        body += lines or [f"x = self.{facts['name']}(x)"]
        if len(body) > 6:
            break
    indent = "\n        "
    constructor = indent.join(["    def __init__(self):", "super().__init__()", *init])
    forward = indent.join(["    def forward(self, x):", *body, "return x"])
    text = f"{HEAD}\n\nclass Model(nn.Module):\n{constructor}\n\n{forward}\n\n\n"
    text += f"def get_inputs():\n    return [torch.randn({shape})]\n"
    exec(text, space)
    return text, space["Model"]().train(module.training)
