# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""deepspeed.monitor.config: the sections of monitors as objects, which the classes of deepspeed.monitor take."""

from __future__ import annotations

from typing import Any, ClassVar

from deeptide.as_deepspeed.config.zero import DeepSpeedConfigModel


class TensorBoardConfig(DeepSpeedConfigModel):
    """The section "tensorboard"."""

    DEFAULTS: ClassVar[dict[str, Any]] = {"enabled": False, "output_path": "", "job_name": "DeepSpeedJobName"}


class CSVConfig(TensorBoardConfig):
    """The section "csv_monitor"."""


class WandbConfig(DeepSpeedConfigModel):
    """The section "wandb"."""

    DEFAULTS: ClassVar[dict[str, Any]] = {"enabled": False, "group": None, "team": None, "project": "deepspeed"}


class CometConfig(DeepSpeedConfigModel):
    """The section "comet"."""

    DEFAULTS: ClassVar[dict[str, Any]] = {
        "enabled": False,
        "samples_log_interval": 100,
        "project": None,
        "workspace": None,
        "api_key": None,
        "experiment_name": None,
        "experiment_key": None,
        "online": None,
        "mode": None,
    }


_KINDS = {"tensorboard": TensorBoardConfig, "comet": CometConfig, "wandb": WandbConfig, "csv_monitor": CSVConfig}


class DeepSpeedMonitorConfig(DeepSpeedConfigModel):
    """All four."""

    DEFAULTS: ClassVar[dict[str, Any]] = dict.fromkeys(_KINDS)

    def __init__(self, strict: bool = False, **given: Any) -> None:
        super().__init__(strict, **given)
        for name, kind in _KINDS.items():
            value = getattr(self, name)
            setattr(self, name, value if isinstance(value, kind) else kind(**(value or {})))

    @property
    def enabled(self) -> bool:
        """Whether one of them is on."""
        return any(getattr(self, name).enabled for name in _KINDS)


def get_monitor_config(param_dict: dict[str, Any]) -> DeepSpeedMonitorConfig:
    """Those of a whole configuration."""
    given: dict[str, Any] = {name: param_dict.get(name) for name in _KINDS}
    return DeepSpeedMonitorConfig(**given)
