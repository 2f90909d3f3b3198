# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Every optimizer steps slices as it steps the whole model: those that look beyond elements, and the caller's own."""

import cut
import meshes
import models
import pytest
import torch
from conftest import run_ranks

import deeptide
from deeptide.tensor import team_of
from deeptide.tensor.cutting.slices import slices_of

OWN = {
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=1e-2, eps=1e-5),
    "Adadelta": lambda parameters: torch.optim.Adadelta(parameters, lr=1.0, eps=1e-4),
    "amsgrad": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, eps=1e-5, amsgrad=True),
}
TORCHS = {
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2, eps=1e-5),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-1, momentum=0.9),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3, eps=1e-5),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2, eps=1e-5),
}
NAMED = {
    "Lamb": {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-5},
    "Muon": {"muon_lr": 1e-2, "adam_lr": 1e-3, "eps": 1e-5, "weight_decay": 0.1},
}
ROLES = {
    "Lamb": ("exp_avg", "exp_avg_sq"),
    "Muon": ("momentum_buffer", "exp_avg", "exp_avg_sq"),
    "NAdam": ("exp_avg", "exp_avg_sq"),
    "Adadelta": ("square_avg", "acc_delta"),
    "amsgrad": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "Adam": ("exp_avg", "exp_avg_sq"),
    "SGD": ("momentum_buffer",),
    "RMSprop": ("square_avg",),
    "Adagrad": ("sum",),
}


def start(world, kind, stage, tensor, seed=0, **more):
    if kind in NAMED:
        more["optimizer"] = {"type": kind, "params": NAMED[kind]}
    settings = cut.config(stage, tensor, **{"gradient_clipping": 0.0, **more})
    return cut.start(world, settings, seed=seed, make={**OWN, **TORCHS}.get(kind))


def states(engine, kind):
    """{name/role: whole} of masters and of what the optimizer keeps. Collective."""
    found = {}
    for role in ("master", *ROLES[kind]):
        held = cut.whole(engine, role)
        found |= {f"{name}/{role}": value for name, value in held.items()}
    return found


def give_gradients(engine, step):
    """Trains a step by gradients that are parts of the same whole ones on every mesh."""
    cuts, team = dict(slices_of(engine.module)), team_of(engine.module)
    shapes = {name: value.shape for name, value in models.make_model().named_parameters()}
    hooks = []
    for number, (name, parameter) in enumerate(engine.module.named_parameters()):
        generator = torch.Generator().manual_seed(100 * step + number)
        whole = torch.randn(shapes[name], generator=generator)
        mine = cuts[name].cut(whole, team) if name in cuts else whole
        hooks.append(parameter.register_hook(lambda gradient, mine=mine: mine.to(gradient.dtype)))
    tokens, targets = models.batches(1, cut.MICRO)[0]
    engine.backward(engine(tokens, targets))
    engine.step()
    assert engine.was_step_applied()
    for hook in hooks:
        hook.remove()


def step_by(world, kind, stage, tensor, bf16):
    engine = start(world, kind, stage, tensor, bf16=bf16)
    for step in range(3):
        give_gradients(engine, step)
    return states(engine, kind)


@pytest.mark.parametrize("kind", ROLES)
@pytest.mark.parametrize("mesh", [(2, 1), (4, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("bf16", [False, True])
def test_equal_gradients_make_equal_steps(kind, mesh, stage, bf16):
    tensor, data = mesh
    whole = run_ranks(1, step_by, kind, 0, 1, bf16)[0]
    for found in run_ranks(tensor * data, step_by, kind, stage, tensor, bf16):
        assert found.keys() == whole.keys()
        for name, value in whole.items():
            if kind == "Lamb" and name.endswith("master"):  # squares are added in another order, in fp64
                torch.testing.assert_close(found[name], value, rtol=2e-7, atol=1e-9)
            elif kind in OWN:  # torch's kernels round a tensor's last elements in another way
                torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
            else:
                assert torch.equal(found[name], value), name


def train(world, kind, stage, tensor, bf16):
    engine = start(world, kind, stage, tensor, bf16=bf16)
    losses, norms = cut.steps(engine, cut.STEPS)
    return losses, norms, states(engine, kind)


def assert_moved_alike(one, other, before, bf16, name):
    """Sums in parts turn some bits of all gradients in bf16, and of Muon's directions, which are bf16 always.

    These matrices have a lower rank than size, and Muon makes their rounding errors as large as all else.
    """
    assert (one - other).norm() <= (0.3 if bf16 else 0.05) * (other - before).norm(), name


@pytest.mark.parametrize("kind", ["Lamb", "Muon", "NAdam"])
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("bf16", [False, True])
def test_a_shared_model_trains_as_the_whole_one(kind, stage, bf16):
    whole = run_ranks(2, train, kind, stage, 1, bf16)
    before = cut.whole_states()
    share = 2e-2 if bf16 else 1e-4
    for rank, (losses, norms, found) in enumerate(run_ranks(4, train, kind, stage, 2, bf16)):
        cut.near(losses, whole[rank // 2][0], share, "losses")
        cut.near(norms, whole[0][1], 10 * share, "norms")
        for name, value in whole[0][2].items():
            if not name.endswith("/master"):
                continue
            assert_moved_alike(found[name], value, before[name.removesuffix("/master")], bf16, name)


def save(world, kind, folder, stage, tensor, bf16):
    engine = start(world, kind, stage, tensor, bf16=bf16)
    for step in range(2):
        give_gradients(engine, step)
    engine.save_checkpoint(folder)
    before = states(engine, kind)
    give_gradients(engine, 2)
    return before, states(engine, kind)


def load(world, kind, folder, stage, tensor, bf16):
    engine = start(world, kind, stage, tensor, seed=9, bf16=bf16)
    engine.load_checkpoint(folder)
    before = states(engine, kind)
    give_gradients(engine, 2)
    return before, states(engine, kind)


# (ranks, tensor) of who saves and who loads.
@pytest.mark.parametrize("kind", ["Lamb", "Muon", "NAdam", "amsgrad"])
@pytest.mark.parametrize("stages", [(0, 3), (3, 0), (2, 1)], ids=str)
@pytest.mark.parametrize(("saved", "taken"), [((2, 2), (2, 1)), ((2, 1), (4, 2)), ((4, 2), (3, 3))], ids=str)
@pytest.mark.parametrize("bf16", [False, True])
def test_a_checkpoint_goes_on_wherever_layers_are_cut(tmp_path, kind, saved, taken, stages, bf16):
    expected = run_ranks(saved[0], save, kind, str(tmp_path), stages[0], saved[1], bf16)[0]
    for before, after in run_ranks(taken[0], load, kind, str(tmp_path), stages[1], taken[1], bf16):
        models.assert_same(before, expected[0])
        for name, value in expected[1].items():  # as far as steps of slices are equal
            torch.testing.assert_close(after[name], value, rtol=1e-5, atol=1e-6, msg=name)


def stepped_before(parameters):
    """An optimizer that a program has used before."""
    parameters = list(parameters)
    optimizer = OWN["amsgrad"](parameters)
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def goes_on(world, stage, tensor):
    engine = cut.start(world, cut.config(stage, tensor, gradient_clipping=0.0), make=stepped_before)
    give_gradients(engine, 1)
    return states(engine, "amsgrad")


@pytest.mark.parametrize("stage", [0, 2])
def test_the_state_that_an_optimizer_had_is_cut_with_its_parameters(stage):
    whole = run_ranks(1, goes_on, 0, 1)[0]
    for found in run_ranks(4, goes_on, stage, 2):
        for name, value in whole.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)


def step_on_stages(world, kind, stage, bf16, pipeline, tensor):
    settings = meshes.config(
        "plain", stage, pipeline, tensor, bf16=bf16, optimizer={"type": kind, "params": NAMED[kind]}
    )
    engine = meshes.start(world, "plain", settings)
    losses, norms = meshes.steps(engine, "plain", meshes.STEPS)
    return losses, norms, states(engine, kind)


@pytest.mark.parametrize("kind", NAMED)
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("mesh", [(2, 1, 2), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("bf16", [False, True])
def test_stages_of_shared_layers_train_as_shared_layers_do(kind, stage, mesh, bf16):
    pipeline, data, tensor = mesh
    shared = run_ranks(data * tensor, step_on_stages, kind, stage, bf16, 1, tensor)
    found = {}
    for losses, norms, own in run_ranks(pipeline * data * tensor, step_on_stages, kind, stage, bf16, *mesh[::2]):
        cut.near(losses, shared[0][0], 2e-2 if bf16 else 1e-4, "losses")
        cut.near(norms, shared[0][1], 5e-2 if bf16 else 1e-3, "norms")
        found |= own
    assert found.keys() == shared[0][2].keys()
    before = dict(meshes.make("plain").named_parameters())
    for name, value in shared[0][2].items():
        of, role = name.rsplit("/", 1)
        if role == "master":
            assert_moved_alike(found[name], value, before[of].detach(), bf16, name)


def whole_steps(parameters):
    return torch.optim.Adafactor(parameters, lr=1e-2)


def test_what_cannot_step_slices_is_refused_by_name():
    def refused(world):
        with pytest.raises(deeptide.ConfigError, match="Adafactor, your own, which steps whole parameters"):
            cut.start(world, cut.config(0, 2), make=whole_steps)

    run_ranks(2, refused)
