# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Recomputes a model's blocks in backward, or keeps their activations on the host, as the configuration asks."""

from deeptide.activations.choice import Choice

__all__ = ["Choice"]
