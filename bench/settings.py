# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The numbers that all contenders share."""

WORLD = 2  # ranks, of one thread each
BATCH = 2  # sequences per rank and step
SEED = 1234
LEARNING_RATE = 1e-4
BETAS = (0.9, 0.999)
EPSILON = 1e-8
WEIGHT_DECAY = 0.01

# glibc by default hands large blocks back to the kernel, so every step faults their pages again. Deeptide changes that
# for its process (rows marked `its own`); the others get the same from outside in the rows marked `tuned`.
TUNED_ALLOCATOR = ":".join(
    (
        "glibc.malloc.hugetlb=1",
        "glibc.malloc.mmap_threshold=4294967296",
        "glibc.malloc.trim_threshold=4294967296",
    )
)
