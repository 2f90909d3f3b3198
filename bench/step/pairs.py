# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Compares pairs of measurements, each of which was taken right beside the other."""

from statistics import median


def interval(values):
    """The 95 % interval of the median: what lies below and above half of as many coin tosses."""
    ordered, chance, at = sorted(values), 0.5 ** len(values), 0
    below = chance
    while below <= 0.025 and at < len(values) // 2:
        at += 1
        chance = chance * (len(values) - at + 1) / at
        below += chance
    at = max(at - 1, 0)
    return ordered[at], ordered[-1 - at]


def difference(before, after):
    """The median of each pair's difference, with its interval."""
    shares = [100 * (b / a - 1) for a, b in zip(before, after, strict=True)]
    low, high = interval(shares)
    return f"{median(shares):+.2f} % ({low:+.2f} to {high:+.2f})"
