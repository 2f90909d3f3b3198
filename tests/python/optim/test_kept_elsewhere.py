# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""An optimizer of the program's own that keeps what changes in each step outside of its state."""

import models
import pytest
import torch

import deeptide


def start(make, **extra):
    model = models.make_model()
    config = models.config(0, gradient_clipping=0.0, **extra)
    return deeptide.initialize(model=model, optimizer=make(model.parameters()), config=config)[0]


def train(engine):
    for tokens, targets in models.batches(3, 4):
        engine.backward(engine(tokens, targets))
        assert engine.step()


class KeepsElsewhere(torch.optim.SGD):
    """Keeps its momentum in an attribute, in a list of its group, or a count in an attribute."""

    def __init__(self, params, where, lr=0.1):
        super().__init__(params, lr=lr)
        self.where, self.moments, self.calls, self.table = where, {}, 0, None
        self.param_groups[0]["moments"] = []

    def step(self, closure=None):
        if self.table is None:
            self.table = torch.arange(4)  # what is made once is no state
        group = self.param_groups[0]
        if self.where == "list" and not group["moments"]:
            group["moments"] = [torch.zeros_like(p) for p in group["params"]]
        self.calls += self.where == "count"
        for i, p in enumerate(group["params"]):
            moment = p.grad
            if self.where == "attribute":
                moment = self.moments.setdefault(i, torch.zeros_like(p)).add_(p.grad)
            elif self.where == "list":
                moment = group["moments"][i].add_(p.grad)
            p.data.sub_(group["lr"] * moment)


PLACES = {"attribute": "its attribute 'moments'", "list": "its groups' 'moments'", "count": "its attribute 'calls'"}


@pytest.mark.parametrize("where", PLACES)
def test_states_that_no_checkpoint_finds_are_refused_by_their_place(where, caplog):
    text = f"KeepsElsewhere keeps what changes in each step in {PLACES[where]}"
    with pytest.raises(deeptide.ConfigError, match=text):
        start(lambda p: KeepsElsewhere(p, where))
    engine = start(lambda p: KeepsElsewhere(p, where), zero_allow_untested_optimizer=True)
    assert text in caplog.text
    train(engine)
    engine.destroy()


def test_what_an_optimizer_makes_once_is_no_state():
    engine = start(lambda p: KeepsElsewhere(p, "nowhere"))
    train(engine)
    engine.destroy()
