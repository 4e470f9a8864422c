"""Causal attention, with a cache or without: one fused kernel, T x T scores are never stored.

Shapes: B sequences, H query heads, G key-value heads (G divides H), T new tokens, Q head size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from recipes.model.kv_cache import LayerCache, causal_mask


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, *, dropout: float, cache: LayerCache | None
) -> Tensor:
    """Causal scaled dot-product attention.

    Args:
        queries: [B, H, T, Q], any strides.
        keys: [B, G, T, Q].
        values: [B, G, T, Q].
        dropout: Probability that an attention weight is dropped; 0.0 outside training.
        cache: Keys and values of earlier tokens, extended by this call; None: there are none.

    Returns:
        [B, H, T, Q]
    """
    causal, mask = True, None
    if cache is not None:
        keys, values = cache.append(keys, values)  # [B, G, length, Q]
        num_new, num_held = queries.shape[2], keys.shape[2]
        causal = num_new == num_held  # nothing was held before: the plain case
        if not causal and num_new > 1:
            mask = causal_mask(num_new, num_held=num_held, device=queries.device)
    grouped = keys.shape[1] != queries.shape[1]
    if grouped and queries.dtype == torch.float32:
        # CUDA has no flash kernel for float32 and the memory-efficient one takes no groups (torch
        # 2.13): what is left would store all T x T scores. So the heads are copied.
        repeats = queries.shape[1] // keys.shape[1]
        keys = keys.repeat_interleave(repeats, dim=1)  # [B, H, T, Q]
        values = values.repeat_interleave(repeats, dim=1)
        grouped = False
    return F.scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=causal,
        enable_gqa=grouped,
    )
