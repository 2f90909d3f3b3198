# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""deepspeed.tp_model_init: cuts a model among ranks before initialize."""

from __future__ import annotations

import json
from typing import Any

import torch

from deeptide import _C
from deeptide._model.describe import check_model, device_of
from deeptide.as_deepspeed import NotSupportedError
from deeptide.as_deepspeed.config.configuration import read_config
from deeptide.as_deepspeed.initialize import init_distributed
from deeptide.tensor import make_team, split_model


def tp_model_init(
    model: torch.nn.Module, tp_size: int, dtype: torch.dtype | None = None, config: Any = None, **kwargs: Any
) -> torch.nn.Module:
    """The model, of whose layers each of `tp_size` neighbours keeps a slice, as initialize would cut it. Collective.

    dtype: what its parameters become first. config: a configuration whose tensor_parallel.partition_config is read.
    Errors: ConfigError for what cannot be cut; NotSupportedError for a group of its own (tp_group).
    """
    given = [name for name, value in kwargs.items() if value is not None]
    if given:
        raise NotSupportedError(f"tp_model_init({given[0]}=…) is not supported yet; ranks share layers by neighbours")
    check_model(model)
    init_distributed()
    if dtype is not None:
        model.to(dtype)
    specs: dict[str, Any] = {"layer_specs": (), "use_default_specs": True}
    if config is not None:
        section = json.loads(_C.config_section(read_config(config, None)[1], "tensor_parallel"))
        specs = section["partition_config"]
    return split_model(
        model, make_team(tp_size, device=device_of(model)), specs["layer_specs"], specs["use_default_specs"]
    )


def set_autotp_mode(training: bool = False) -> None:
    """Has no effect: layers are cut by initialize or tp_model_init, for training."""
