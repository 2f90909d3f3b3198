# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""No training: the bytes that ZeRO-2 moves between hosts in a step, from memory to memory, by torch's send and receive.

What it takes of a processor is what no contender can save that moves them so.
"""

import os

import torch
import torch.distributed as dist


def setup(model, precision, size):
    """Twice a step, for gradients and for parameters, a rank exchanges its part with that of its index on each host."""
    per_host, rank = int(os.environ["LOCAL_WORLD_SIZE"]), dist.get_rank()
    hosts = dist.get_world_size() // per_host
    peers = [peer for peer in range(rank % per_host, dist.get_world_size(), per_host) if peer != rank]
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    numel = sum(parameter.numel() for parameter in model.parameters()) // (hosts * per_host)
    out = {peer: torch.ones(numel, dtype=dtype) for peer in peers}
    into = {peer: torch.empty(numel, dtype=dtype) for peer in peers}

    def step(x, y):
        for _ in range(2):
            works = [dist.irecv(into[peer], peer) for peer in peers] + [dist.isend(out[peer], peer) for peer in peers]
            for work in works:
                work.wait()
        return torch.zeros(())

    return step
