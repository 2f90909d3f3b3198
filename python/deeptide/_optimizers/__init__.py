# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Optimizers beside the core's own: the program's objects, their groups, and what each parameter gets."""
