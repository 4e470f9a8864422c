"""Mixture of experts: a router sends each token to a few of many MLPs (arXiv 1701.06538).

`router` chooses and scores experts, `mlp` sorts tokens by expert and computes them, `llama` is the model, and
`deepseek` a variant with latent attention. Dropless: experts have no capacity limit, so the output for a token does
not depend on the rest of the batch.

Shapes in this package: B sequences, T tokens, N = B T, W hidden size, F width of an expert, E experts, K experts per
token, L layers.
"""

from recipes.model.moe.deepseek import DeepSeekV3
from recipes.model.moe.llama import MoeLlama

__all__ = ["DeepSeekV3", "MoeLlama"]
