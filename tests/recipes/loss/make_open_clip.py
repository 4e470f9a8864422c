"""Write open_clip.json: ClipLoss and SigLipLoss of open_clip and their gradients, on one batch of features.

Needs open_clip beside the project, at commit 89fb801 (4.2.0.dev0): of it, `open_clip/loss.py` alone is imported.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from open_clip.loss import ClipLoss, SigLipLoss

SIZE, WIDTH, DIGITS = 7, 5, 15


def rounded(values: torch.Tensor) -> list[float]:
    return [float(f"{value:.{DIGITS}g}") for value in values.detach().flatten().tolist()]


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    images, captions = (torch.randn(SIZE, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    log_scale, bias = torch.tensor([1.5], dtype=torch.float64), torch.tensor([-2.0], dtype=torch.float64)
    inputs = [value.requires_grad_() for value in (images, captions, log_scale, bias)]
    found: dict[str, Any] = {"inputs": [rounded(value) for value in inputs]}
    normalized = F.normalize(images, dim=-1), F.normalize(captions, dim=-1)
    losses = {
        "clip": ClipLoss()(*normalized, log_scale.exp()),
        "siglip": SigLipLoss()(*normalized, log_scale.exp(), bias),
    }
    for name, loss in losses.items():
        gradients = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True, retain_graph=True)
        found[name] = {"loss": loss.item(), "gradients": [rounded(gradient) for gradient in gradients]}
    Path(__file__).with_name("open_clip.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
