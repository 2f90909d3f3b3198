# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The list of DeepSpeed's public names, and the modules that are made of it."""
