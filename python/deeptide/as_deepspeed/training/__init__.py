# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Classes of DeepSpeed's that scripts make by hand: schedules, optimizers, scales, trackers."""
