# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The optimizer that `initialize` returns: torch's interface over the engine's own kernels."""

import weakref

import torch

from deeptide import _C
from deeptide._groups import read_group, write_group


class DeeptideOptimizer(torch.optim.Optimizer):
    """Live param groups of an engine: what is written here before `engine.step()` is what that step uses.

    torch's learning-rate schedulers work on it. The moments live in the engine, sharded; `save_checkpoint` keeps them.
    """

    def __init__(self, plan, core, defaults):
        super().__init__([{"params": group["params"]} for group in plan.param_groups], {})
        # The caller's own groups where there are some: a scheduler made on them stays in force.
        self.param_groups = plan.param_groups
        self.kind = plan.kind
        self._defaults = _C.Hyperparameters(defaults)
        self._core_groups = [index for index, _ in plan.names]
        self._pushed = [None] * len(self._core_groups)
        self._engine = None
        self.pull(core)

    def attach(self, engine):
        """The engine whose step() this steps. Weakly: deleting the engine must free it."""
        self._engine = weakref.ref(engine)

    def _values(self, index):
        values = read_group(self.param_groups[index], self.kind, self._defaults)
        names = ("lr", "beta1", "beta2", "eps", "weight_decay", "decoupled_decay", "bias_correction")
        return values, tuple(getattr(values, name) for name in (*names, "momentum", "dampening", "nesterov"))

    def push(self, core):
        """Hands changed hyper-parameters to the core."""
        for number, index in enumerate(self._core_groups):
            values, key = self._values(index)
            if key != self._pushed[number]:
                core.set_hyperparameters(number, values)
                self._pushed[number] = key

    def pull(self, core):
        """Takes the core's hyper-parameters, e.g. after its schedule has moved or a checkpoint was loaded."""
        for number, index in enumerate(self._core_groups):
            write_group(self.param_groups[index], self.kind, core.hyperparameters(number))
            self._pushed[number] = self._values(index)[1]

    def _live_engine(self):
        engine = self._engine() if self._engine is not None else None
        if engine is None:
            raise RuntimeError("this optimizer's engine is gone; keep the engine that deeptide.initialize returned")
        return engine

    def step(self, closure=None):
        """engine.step()."""
        if closure is not None:
            raise ValueError("closures are not supported; call engine.backward(loss), then engine.step()")
        return self._live_engine().step()

    def zero_grad(self, set_to_none=True):
        """engine.zero_grad()."""
        self._live_engine().zero_grad()

    def add_param_group(self, param_group):
        """Only while the optimizer is made."""
        if hasattr(self, "_core_groups"):
            raise RuntimeError("groups cannot be added to a running engine; give them all to deeptide.initialize")
        # torch's own would import its compiler (seconds) to check what the plan has checked.
        self.param_groups.append(param_group)

    def state_dict(self):
        """Not here: the moments are sharded over the ranks."""
        raise RuntimeError("the optimizer's state is sharded over the ranks; use engine.save_checkpoint(directory)")

    def load_state_dict(self, state_dict):
        """Not here: see state_dict."""
        raise RuntimeError("the optimizer's state is sharded over the ranks; use engine.load_checkpoint(directory)")
