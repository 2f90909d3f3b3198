# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Parameters and states under DeepSpeed's names: marked, read and set, saved, made whole."""
