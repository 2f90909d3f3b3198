# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Decides which layers of a model are cut, cuts them, and checks the result."""
