# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The commands of `deeptide` that need Python: the launcher becomes one of these modules."""
