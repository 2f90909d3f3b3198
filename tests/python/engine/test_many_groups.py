# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Thousands of parameter groups: what a step asks of the core, and tells it."""

import models
import torch

import deeptide


class CountingCore:
    """An engine's core, as groups see it; counts what is asked and told."""

    def __init__(self, core):
        self.core, self.calls = core, []

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append(name)
            return getattr(self.core, name)(*arguments)

        return call


def test_thousands_of_groups_cost_the_core_only_what_has_changed():
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2000)]
    model = torch.nn.ParameterList(parameters)
    groups = [{"params": [p]} for p in parameters]
    engine, optimizer, *_ = deeptide.initialize(model=model, config=models.config(0), model_parameters=groups)
    groups, live = optimizer.param_groups, optimizer._live
    core = CountingCore(engine._core)
    live.push(groups, core)
    live.pull(groups, core)
    assert core.calls == ["hyperparameters_version"]
    groups[7]["lr"] = groups[1999]["lr"] = 0.125
    core.calls.clear()
    live.push(groups, core)
    assert core.calls == ["set_hyperparameters"] * 2
    assert [lr for lr in engine.get_lr() if lr == 0.125] == [0.125] * 2
    engine.destroy()
