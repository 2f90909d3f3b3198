# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Configurations as DeepSpeed takes them, and as objects."""
