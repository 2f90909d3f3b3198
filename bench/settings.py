# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The numbers that all contenders share."""

from dataclasses import dataclass

WORLD = 2  # ranks, of one thread each


@dataclass(frozen=True)
class Size:
    """A model to train: its shape, and how long a run of it should be."""

    layers: int
    width: int
    batch: int  # sequences, of the small model rows, per rank and step
    bucket_elems: int  # of DeepSpeed and Deeptide
    live_elems: int  # of `deepspeed-3-lean`: about two layers
    warmup: int
    steps: int
    slowest_step: float  # seconds that a job may take for one; DeepSpeed at 319 M was seen at 20
    learning_rate: float = 1e-4
    heads: int = 0  # 0: no transformer
    vocabulary: int = 8192
    context: int = 128


# DeepSpeed's default of 5e8 elements puts each of these models into one bucket; smaller ones cost it less time and
# memory. Each of the transformers' is about a layer and a half.
SIZES = {
    "46m": Size(layers=12, width=512, heads=8, batch=2, bucket_elems=5_000_000, live_elems=7_000_000,
                warmup=3, steps=8, slowest_step=15),
    "319m": Size(layers=24, width=1024, heads=16, batch=1, bucket_elems=20_000_000, live_elems=28_000_000,
                 warmup=2, steps=4, slowest_step=60),
    "small": Size(layers=400, width=64, batch=64, bucket_elems=500_000, live_elems=10_000, learning_rate=1e-6,
                  warmup=20, steps=200, slowest_step=1),
}  # fmt: skip

SEED = 1234
BETAS = (0.9, 0.999)
EPSILON = 1e-8
WEIGHT_DECAY = 0.01

# glibc by default hands large blocks back to the kernel, so every step faults their pages again. Deeptide brings an
# allocator (rows marked `its own`); the others get a glibc that keeps its memory in the rows marked `tuned`.
TUNED_ALLOCATOR = ":".join(
    (
        "glibc.malloc.hugetlb=1",
        "glibc.malloc.mmap_threshold=4294967296",
        "glibc.malloc.trim_threshold=4294967296",
    )
)
