# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""A rank's process: its arguments, the ranks that it finds, what it tells them and its user, and its end."""
