# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""What autograd keeps of a model's blocks between forward and backward, as "activation_checkpointing" asks."""

from deeptide.activations.choice import Choice

__all__ = ["Choice"]
