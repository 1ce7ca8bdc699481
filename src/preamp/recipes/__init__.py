"""Recipes: what FP8, MXFP8 and NVFP4 training quantizes, and how.

`with autocast("cpu", recipe=recipes.MXFP8, model=model)` rehearses one in PyTorch, and
`autocast(loss_fn, recipe=recipes.MXFP8, weights=(0,))` in JAX.
"""

from __future__ import annotations

from preamp.recipes.values import (
    FLOAT8_BLOCK,
    FLOAT8_CURRENT,
    FLOAT8_DEEPSEEK,
    FLOAT8_DELAYED,
    FLOAT8_ROWWISE,
    FLOAT8_ROWWISE_GW_HP,
    FLOAT8_TENSORWISE,
    MXFP8,
    MXFP8_E5M2_GRADIENTS,
    MXFP8_QWIX,
    NVFP4,
    NVFP4_PLAIN,
    NVFP4_TORCHAO,
    Quant,
    Recipe,
)

__all__ = [
    "FLOAT8_BLOCK",
    "FLOAT8_CURRENT",
    "FLOAT8_DEEPSEEK",
    "FLOAT8_DELAYED",
    "FLOAT8_ROWWISE",
    "FLOAT8_ROWWISE_GW_HP",
    "FLOAT8_TENSORWISE",
    "MXFP8",
    "MXFP8_E5M2_GRADIENTS",
    "MXFP8_QWIX",
    "NVFP4",
    "NVFP4_PLAIN",
    "NVFP4_TORCHAO",
    "Quant",
    "Recipe",
]
