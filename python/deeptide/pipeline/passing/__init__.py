# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Values between stages: what one sends, and what stands for it where it is not."""
