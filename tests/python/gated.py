# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""One objective on a plain model and on ranks that shard it (ZeRO-3): losses and gradients must be the same bits."""

import contextlib

import models
import torch
from conftest import run_ranks

import deeptide

SGD = {"type": "SGD", "params": {"lr": 0.1}}


@contextlib.contextmanager
def engine_of(world, build, **settings):
    """A stage-3 engine over a fresh model, destroyed at the end. Small units, so that every block comes and goes."""
    settings = {"optimizer": SGD, "gradient_clipping": 0.0, **settings}
    zero = {"stage3_max_live_parameters": 1, **settings.pop("zero", {})}
    model = models.make_model(kind=build)
    engine, *_ = deeptide.initialize(model=model, config=models.config(3, zero=zero, **settings), world=world)
    try:
        yield engine
    finally:
        engine.destroy()


def gradients_of(engine):
    """Whole gradients by name, None where a parameter is not trained. Collective; between backward and step."""
    return {name: engine._core.full_state(name, "gradient") for name, _ in engine.module.named_parameters()}


def on_plain(build, objective):
    """(loss, gradients) of the same weights in plain torch; zeros for a parameter that the loss does not reach."""
    model = models.make_model(kind=build)
    loss = objective(model)
    loss.backward()
    gradients = {
        name: (torch.zeros_like(p) if p.grad is None else p.grad) if p.requires_grad else None
        for name, p in model.named_parameters()
    }
    return loss.detach(), gradients


def on_rank(world, build, objective, settings):
    """(loss, gradients, loss after one step) on one rank."""
    with engine_of(world, build, **settings) as engine:
        loss = objective(engine.module)
        loss.backward()
        gradients = gradients_of(engine)
        assert engine.step().applied
        assert engine._core.peak_gathered_bytes() > 0  # else nothing was sharded
        return loss.detach(), gradients, objective(engine.module).detach()


def after_step(build, objective):
    """The plain model's loss after one step of SGD."""
    model = models.make_model(kind=build)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=SGD["params"]["lr"])
    objective(model).backward()
    optimizer.step()
    return objective(model).detach()


def assert_same_gradients(found, expected):
    """Bit for bit, by name."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        if gradient is None:
            assert found[name] is None, name
        else:
            difference = (found[name] - gradient).abs().max().item() if gradient.numel() else 0.0
            assert torch.equal(found[name], gradient), f"{name}: differs by up to {difference}"


def assert_as_plain(build, objective, world=2, **settings):
    """All ranks see the same batch, so the mean of their gradients is exact for worlds that are powers of two."""
    loss, gradients = on_plain(build, objective)
    later = after_step(build, objective)
    for found, found_gradients, found_later in run_ranks(world, on_rank, build, objective, settings):
        assert torch.equal(found, loss), f"loss {found.item()!r}, expected {loss.item()!r}"
        assert_same_gradients(found_gradients, gradients)
        torch.testing.assert_close(found_later, later, rtol=1e-5, atol=1e-6)


def inputs(*shape, seed=3):
    """The same normal values on every rank and in every thread."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(models.DEVICE)
