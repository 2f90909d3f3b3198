# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The states of torch's random generators, of the host and the device."""

from __future__ import annotations

import torch


def states() -> list[torch.Tensor]:
    """The host's, then the device's where there is one."""
    found = [torch.get_rng_state()]
    return [*found, torch.get_device_module().get_rng_state()] if torch.accelerator.is_available() else found


def set_states(values: list[torch.Tensor]) -> None:
    """Values: as `states` returned them, on any device."""
    torch.set_rng_state(values[0].cpu())
    for value in values[1:]:
        torch.get_device_module().set_rng_state(value.cpu())
