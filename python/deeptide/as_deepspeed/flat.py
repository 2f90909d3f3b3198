# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""What UtilsBuilder().load() gives: several tensors as one, and back."""

from __future__ import annotations

from torch._utils import _flatten_dense_tensors as flatten
from torch._utils import _unflatten_dense_tensors as unflatten

__all__ = ["flatten", "unflatten"]
