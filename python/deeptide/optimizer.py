# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The optimizer that `initialize` returns: torch's interface over the engine's own kernels."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

import torch

from deeptide import _C
from deeptide._optimizers import given as given_optimizer
from deeptide._optimizers.groups import OptimizerPlan, ParamGroup
from deeptide._optimizers.live_groups import LiveGroups

if TYPE_CHECKING:
    from deeptide.engine import Engine


class DeeptideOptimizer(torch.optim.Optimizer):
    """Live param groups of an engine: what is written here before `engine.step()` is what that step uses.

    torch's learning-rate schedulers work on it. The moments live in the engine, sharded; `save_checkpoint` keeps them.
    """

    def __init__(self, plan: OptimizerPlan, core: _C.Engine) -> None:
        super().__init__([{"params": group["params"]} for group in plan.param_groups], {})
        # The caller's own groups where there are some: a scheduler made on them stays in force.
        self.param_groups = plan.param_groups
        # OneCycleLR and CyclicLR look here for a momentum that they may move.
        first: ParamGroup = next(iter(self.param_groups), {})
        self.defaults = {name: value for name, value in first.items() if name != "params"}
        self.state = given_optimizer.AwayState()
        self.info = plan.info
        self._engine: weakref.ref[Engine] | None = None
        self._hooked: list[torch.optim.Optimizer] = [self]
        self.follow(plan, core)

    def follow(self, plan: OptimizerPlan, core: _C.Engine) -> None:
        """From now on the core has the plan's groups: when it is made, and when it was rebuilt."""
        self.plan = plan
        self._live = LiveGroups(plan.info, [index for index, _ in plan.names], self.param_groups, core)

    def attach(self, engine: Engine) -> None:
        """The engine whose step() this steps. Weakly: deleting the engine must free it."""
        self._engine = weakref.ref(engine)
        given = self.plan.given
        if given is not None and given is not self:
            given_optimizer.follow(given, self, steps=self.plan.custom is not None)
            self._hooked = [self, given]

    def has_ended(self) -> bool:
        """Whether its engine is gone or destroyed."""
        engine = self._engine() if self._engine is not None else None
        return engine is None or engine.is_destroyed

    def run_hooks(self, when: str) -> None:
        """Runs the hooks before ("pre") or after ("post") a step, of this and of the optimizer that was given."""
        given_optimizer.run_hooks(when, self._hooked)

    @contextlib.contextmanager
    def synced(self, core: _C.Engine) -> Iterator[None]:
        """Inside, the core has what the groups say; afterwards they have what its schedule or a checkpoint set."""
        self._live.push(self.param_groups, core)
        yield
        self._live.pull(self.param_groups, core)

    def _live_engine(self) -> Engine:
        engine = self._engine() if self._engine is not None else None
        if engine is None:
            raise RuntimeError("this optimizer's engine is gone; keep the engine that deeptide.initialize returned")
        return engine

    @property
    def loss_scale(self) -> float:
        """The factor of the next backward's loss; 1 without fp16."""
        return self._live_engine().cur_scale

    cur_scale = loss_scale  # DeepSpeed has both names

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped because a gradient was not finite."""
        return self._live_engine().was_step_skipped()

    # torch's returns the closure's loss; unused-ignore: without torch installed there is nothing to override.
    def step(self, closure: object = None) -> _C.StepOutcome:  # type: ignore[override, unused-ignore]
        """engine.step()."""
        if closure is not None:
            raise ValueError("closures are not supported; call engine.backward(loss), then engine.step()")
        return self._live_engine().step()

    step.hooked = True  # type: ignore[attr-defined]  # engine.step() runs the hooks, so torch need not

    def zero_grad(self, set_to_none: bool = True) -> None:
        """engine.zero_grad()."""
        self._live_engine().zero_grad(set_to_none)

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Adds a group and rebuilds the engine, as `engine.rebuild()`: between steps. Collective."""
        from deeptide._engine.rebuild import group_to_add

        if not hasattr(self, "_live"):
            # torch's own would import its compiler (seconds) to check what the plan has checked.
            self.param_groups.append(param_group)
            return
        engine = self._live_engine()
        self.param_groups.append(group_to_add(self.plan, param_group, engine.module, engine._config))
        try:
            engine.rebuild()
        except BaseException:
            self.param_groups.pop()
            raise

    def state_dict(self) -> NoReturn:
        """Not here: the moments are sharded over the ranks."""
        raise RuntimeError("the optimizer's state is sharded over the ranks; use engine.save_checkpoint(directory)")

    def load_state_dict(self, state_dict: object) -> NoReturn:
        """Not here: see state_dict."""
        raise RuntimeError("the optimizer's state is sharded over the ranks; use engine.load_checkpoint(directory)")
