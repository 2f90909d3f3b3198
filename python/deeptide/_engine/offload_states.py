# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""engine.offload_states in DeepSpeed's words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from deeptide import _C
from deeptide._process.reports import told

_MOVABLE = {"optim_states", "hp_params", "lp_grads", "contiguous_grad_buffer"}


def _wanted(include: Iterable[str] | None) -> set[str]:
    if include is None:
        return _MOVABLE
    wanted = {str(name) for name in ([include] if isinstance(include, str) else include)}
    if "lp_params" in wanted:
        raise ValueError(
            'offload_states: include has "lp_params", but parameters stay where they are: '
            '"offload_param" in the configuration places them in files'
        )
    for name in sorted(wanted - _MOVABLE):
        raise ValueError(f"offload_states: include has {name!r}, expected some of {', '.join(sorted(_MOVABLE))}")
    return wanted


def offload_states(
    core: _C.Engine, include: Iterable[str] | None, device: str, nvme_path: str | Sequence[str] | None
) -> None:
    """Checks the words and asks the core."""
    wanted = _wanted(include)
    if str(device) not in ("cpu", "nvme"):
        raise ValueError(f'offload_states: device is {str(device)!r}, expected "cpu" or "nvme"')
    core.offload_states(
        masters="hp_params" in wanted,
        moments="optim_states" in wanted,
        gradients=bool(wanted & {"lp_grads", "contiguous_grad_buffer"}),
        to_files=str(device) == "nvme",
        folders=[nvme_path] if isinstance(nvme_path, str) else list(nvme_path or ()),
    )


class Offloading:
    """The part of an engine that moves states away."""

    _core: _C.Engine

    @told
    def offload_states(
        self,
        include: Iterable[str] | None = None,
        device: str = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
        nvme_path: str | Sequence[str] | None = None,
    ) -> None:
        """Between two steps: frees memory of states until `reload_states`; see docs/from-deepspeed.md. Collective.

        `include`: "optim_states", "hp_params" (masters), "lp_grads" and "contiguous_grad_buffer"; None: all of them.
        Parameters stay. `device`: "nvme", in `nvme_path` or the configuration's; "cpu" leaves a CPU engine's there.
        """
        offload_states(self._core, include, device, nvme_path)

    @told
    def reload_states(self, non_blocking: bool = False) -> None:
        """Brings back what `offload_states` moved; `step()` needs it. Collective."""
        self._core.reload_states()
