# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Layers whose work or parameters ranks share, and tiles of large ones, under DeepSpeed's names."""
