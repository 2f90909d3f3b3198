# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Flat tensors in large pages, as Deeptide's own are: page walks would hide what is compared."""

import mmap

import torch

LARGE_PAGE = 2 << 20


def on_large_pages(numel, dtype, value):
    size = numel * dtype.itemsize
    mapping = mmap.mmap(-1, size + LARGE_PAGE)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    pages = torch.frombuffer(mapping, dtype=torch.uint8)
    begin = -pages.data_ptr() % LARGE_PAGE
    return pages[begin : begin + size].view(dtype).fill_(value)
