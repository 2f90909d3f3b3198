# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""deepspeed.sequence.layer's rotary embeddings (arXiv:2104.09864), by halves of the last dimension."""

from __future__ import annotations

import torch

_torchembed_available = False  # DeepSpeed takes that package's kernel on a GPU; here torch's operators do it everywhere


def _rotate_half(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def apply_rotary_pos_emb(t: torch.Tensor, freqs_cos: torch.Tensor, freqs_sin: torch.Tensor) -> torch.Tensor:
    """Rotates the first elements of the last dimension, as many as the tables have; the others stay.

    Shapes: t (sequence, …, d), tables broadcast to (sequence, …, r), r even, r <= d -> (sequence, …, d).
    """
    turned, rest = t[..., : freqs_cos.shape[-1]], t[..., freqs_cos.shape[-1] :]
    turned = turned * freqs_cos + _rotate_half(turned) * freqs_sin
    return turned if rest.shape[-1] == 0 else torch.cat((turned, rest), dim=-1)
