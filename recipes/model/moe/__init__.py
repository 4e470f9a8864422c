"""Mixtures of experts: each token is computed by a few of many MLPs, which a router chooses (arXiv 1701.06538).

`router` chooses and scores, `mlp` orders tokens by expert and computes them, `llama` is the model, and `deepseek` one
with another attention. Dropless: no expert has a capacity, so what a token becomes does not depend on the others of its
batch.

Shapes, everywhere in here: B sequences, T tokens, N = B T, W hidden size, F width of an expert, E experts, K of them
for each token, L layers.
"""

from recipes.model.moe.deepseek import DeepSeekV3
from recipes.model.moe.llama import MoeLlama

__all__ = ["DeepSeekV3", "MoeLlama"]
