# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Models of which this rank has a part: their state_dict() refuses to pass for the whole."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING

import torch

from deeptide._C import ConfigError
from deeptide._process.log import say

if TYPE_CHECKING:
    from deeptide.engine import Engine


def is_cut(engine: Engine) -> bool:
    """Whether this rank has a part of the model: a stage of a pipeline, or slices of layers."""
    team, cut = engine.tensor_team, vars(engine.module).get("_deeptide_cut")
    has_slices = team is not None and team.size > 1
    return has_slices or (cut is not None and cut.num_stages > 1) or bool(_part_of(engine.module))


def guard_state_dicts(model: torch.nn.Module) -> None:
    """Has state_dict() refuse to give a part of a model as if it were all of it."""
    for module in model.modules():
        if _part_of(module):
            module.register_state_dict_pre_hook(_refuse_part)


def _part_of(module: torch.nn.Module) -> str:
    """Says who has the rest of a module that is cut; empty: it is whole here."""
    values = vars(module)
    elsewhere = sys.modules.get("deeptide.pipeline.passing.elsewhere")
    if elsewhere is not None and any(isinstance(value, elsewhere.Elsewhere) for value in values.values()):
        return "other stages of the pipeline have"
    team = values.get("tensor_team")
    if team is not None and team.size > 1 and values.get("tensor_slices"):
        return f"{team.size} ranks share"
    pipelines = sys.modules.get("deeptide.pipeline.module")
    if pipelines is not None and isinstance(module, pipelines.PipelineModule) and module.num_stages > 1:
        return "stages"
    return ""


def _refuse_part(module: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
    part = _part_of(module)
    cure = (
        "engine.whole_state_dict() gives the whole model on rank 0, engine.save_16bit_model(folder) writes it, and "
        "engine.snapshot() copies a cut pipeline's whole model on every rank, for save_pretrained(): call them on all "
        "ranks"
    )
    if part == "stages":
        _say_once(f"state_dict() of a PipelineModule has this stage's layers alone; {cure}")
    elif part:
        raise ConfigError(
            f"state_dict(): {part} tensors of '{prefix.removesuffix('.')}' ({type(module).__name__}), and this would "
            f"be a part of the model; {cure}"
        )


@functools.cache
def _say_once(text: str) -> None:
    say(text, "warning")
