# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The front's dealings with a model: describes it to the core, loads and saves it, notices its changes."""
