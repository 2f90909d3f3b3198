# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The contenders by name. Each module offers setup(model, precision, size, **options) -> step(x, y) -> loss."""

import importlib

CONTENDERS = {
    "floor": ("floor", {}),
    "exchange": ("exchange", {}),
    "torch": ("plain_torch", {}),
    "ddp": ("ddp", {}),
    "fsdp2": ("fsdp2", {}),
    "deepspeed-0": ("deepspeed_zero", {"stage": 0}),
    "deepspeed-2": ("deepspeed_zero", {"stage": 2}),
    "deepspeed-3": ("deepspeed_zero", {"stage": 3}),
    "deepspeed-3-lean": ("deepspeed_zero", {"stage": 3, "lean": True}),
    "deeptide-0": ("deeptide_zero", {"stage": 0}),
    "deeptide-1": ("deeptide_zero", {"stage": 1}),
    "deeptide-2": ("deeptide_zero", {"stage": 2}),
    "deeptide-1-waiting": ("deeptide_zero", {"stage": 1, "overlap_publish": False}),
    "deeptide-2-waiting": ("deeptide_zero", {"stage": 2, "overlap_publish": False}),
    "deeptide-3": ("deeptide_zero", {"stage": 3}),
    "deepspeed-3-nvme": ("deepspeed_zero", {"stage": 3, "nvme": True}),
    "deeptide-3-nvme": ("deeptide_zero", {"stage": 3, "nvme": True}),
}


def load(name):
    """Imports the contender's framework; returns its setup function of (model, precision, size)."""
    module, options = CONTENDERS[name]
    setup = importlib.import_module(f"contenders.{module}").setup
    return lambda model, precision, size: setup(model, precision, size, **options)
