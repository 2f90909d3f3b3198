# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Ends a run that a scheduler asks to go: all ranks save at one step, and the program ends with a code."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NoReturn

from deeptide._process.log import say

if TYPE_CHECKING:
    from deeptide._C import StepOutcome
    from deeptide.engine import Engine


class Preempted(SystemExit):
    """Ends the program with the exit code of "on_preempt", after the checkpoint is complete."""


def _leave(engine: Engine) -> NoReturn:
    """Saves, all ranks together, and ends the program."""
    settings = engine._config.checkpoint
    start = time.monotonic()
    state = engine.client_state_on_preempt() if engine.client_state_on_preempt is not None else None
    path = engine.save_checkpoint(settings.preempt_folder, client_state=state, blocking=True)
    if engine.world.rank == 0:
        say(
            f"this run was asked to go: {path} was saved in {time.monotonic() - start:.1f} s; exit code "
            f"{settings.preempt_exit_code} asks for another run, which load_checkpoint continues"
        )
    raise Preempted(settings.preempt_exit_code)


def leave_if_preempted(engine: Engine, outcome: StepOutcome | None) -> None:
    """After a step that all ranks have agreed to be the last."""
    if outcome is not None and outcome.preempted and engine._config.checkpoint.preempt_folder:
        _leave(engine)


def leave_evaluation_if_preempted(engine: Engine) -> None:
    """Before a forward in eval mode: steps may be far away. Ranks that share layers go together."""
    goes = engine._core.should_preempt()
    if engine.tensor_team is not None:
        goes = engine.tensor_team.any(goes)
    if goes:
        engine._core.preempt()
        _leave(engine)
