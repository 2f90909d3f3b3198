# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Forecasts a training step without memory: activations, transfers and time, stage by stage and mesh by mesh."""
