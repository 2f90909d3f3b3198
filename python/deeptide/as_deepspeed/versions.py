# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The version whose interface is mirrored here, with Deeptide's own as local label."""

from __future__ import annotations

import torch

from deeptide.as_deepspeed import INTERFACE_VERSION, VERSION

version = VERSION
major, minor, patch = (int(part) for part in INTERFACE_VERSION.split("."))
git_hash = git_branch = "deeptide"
has_triton = False
installed_ops: dict[str, bool] = {}
torch_info = {
    "version": ".".join(torch.__version__.split(".")[:2]),
    "cuda_version": ".".join((torch.version.cuda or "0.0").split(".")[:2]),
    "hip_version": ".".join((torch.version.hip or "0.0").split(".")[:2]),
    "bf16_support": True,
    "nccl_version": "0.0",
}


def required_torch_version(min_version: float | None = None, max_version: float | None = None) -> bool:
    """Whether torch is within these bounds."""
    have = tuple(int(part) for part in torch.__version__.split(".")[:2])

    def parts(bound: float) -> tuple[int, ...]:
        return tuple(int(part) for part in str(bound).split("."))

    return (min_version is None or have >= parts(min_version)) and (max_version is None or have <= parts(max_version))
