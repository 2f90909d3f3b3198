# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The parts of `deeptide.Engine`, each its own subject."""
