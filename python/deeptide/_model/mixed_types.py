# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Names the buffers that an operator may have met that refuses two types: they keep fp32 beside 16-bit parameters."""

from __future__ import annotations

import re
import sys
from typing import Any

import torch

# How torch's operators complain of operands that differ in type.
_MIXED = re.compile(r"same dtype|should be the same|expected scalar type|to have the same|unsupported dtype")


def explain_mixed_types(model: torch.nn.Module) -> None:
    """From now on an error of such an operator, within the model's forward, names the buffers and the key."""
    if _fp32_buffers(model) and _explain not in model._forward_hooks.values():
        model.register_forward_hook(_explain, always_call=True)


def _fp32_buffers(model: torch.nn.Module) -> list[str]:
    """Names of fp32 buffers, if there are parameters of 16 bits; none of modules that compute in fp32 themselves."""
    if not any(p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters()):
        return []
    names = []
    for prefix, module in model.named_modules():
        if not any(p.dtype == torch.float32 for p in module.parameters(recurse=False)):
            own = module.named_buffers(prefix, recurse=False)
            names += [name for name, buffer in own if buffer.dtype == torch.float32]
    return names


def _explain(model: torch.nn.Module, args: Any, output: Any) -> None:
    if torch.compiler.is_compiling():
        return
    error = sys.exc_info()[1]
    if not isinstance(error, RuntimeError) or not _MIXED.search(str(error)) or "data_types" in str(error):
        return
    names = _fp32_buffers(model)
    if names:
        low = "fp16" if any(p.dtype == torch.float16 for p in model.parameters()) else "bf16"
        listed = "', '".join(names[:3]) + ("', …" if len(names) > 3 else "'")
        hint = f'buffers keep fp32, as in DeepSpeed: \'{listed}; "data_types": {{"buffer_dtype": "{low}"}} casts them'
        error.args = (f"{error}\n{hint}",)
