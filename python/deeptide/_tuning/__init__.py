# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Searches for a configuration: `deeptide tune` and `deeptide lr-range` run a script for some steps at a time."""
