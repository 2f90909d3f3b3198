# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Small functions of DeepSpeed's: collectives, norms, groups, loggers, builders."""
