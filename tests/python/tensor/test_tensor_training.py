# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""A model that ranks share trains as the whole one: losses, norms, weights, at every stage of ZeRO."""

import collections
import os
import signal
import time

import cut
import models
import pytest
import torch
from conftest import run_processes, run_ranks

import deeptide
from deeptide.tensor import team_of


def few_turn_back(one, other, name):
    """Adam moves an element by its gradient's sign, nearly: rounded in bf16, about one in a hundred has the other one.

    Such an element ends at the other side of where it began, by as much; of small parameters one may.
    """
    turned = max(1, other.numel() // 100)
    assert (one - other).norm() <= 2 * (turned / other.numel()) ** 0.5 * other.norm(), name


def compare(shared, whole, tensor, share, bf16=False):
    """`share`: of the largest, by which sums in parts, and in bf16, may differ."""
    before = cut.whole_states()
    for rank, (losses, norms, weights) in enumerate(shared):
        expected = whole[rank // tensor]
        cut.near(losses, expected[0], share, "losses")
        cut.near(norms, expected[1], 4 * share, "norms")
        assert losses == shared[rank // tensor * tensor][0], "ranks that share layers agree in every bit"
        assert weights.keys() == expected[2].keys()
        for name in weights:
            assert torch.equal(weights[name], shared[0][2][name]), name
            moves = cut.moved(name, before, weights), cut.moved(name, before, expected[2])
            few_turn_back(*moves, name) if bf16 else cut.near(*moves, 40 * share, name)


def both(tensor, data, stage, gas=1, **more):
    shared = run_ranks(tensor * data, cut.train, cut.config(stage, tensor, gas, **more), gas)
    return shared, run_ranks(data, cut.train, cut.config(stage, 1, gas, **more), gas)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("gas", [1, 2])
@pytest.mark.parametrize("mesh", [(2, 1), (4, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("bf16", [False, True])
def test_a_shared_model_trains_as_the_whole_one(mesh, stage, gas, bf16):
    compare(*both(*mesh, stage, gas, bf16=bf16), mesh[0], 5e-3 if bf16 else 1e-5, bf16)


def gradients(world, settings):
    model = models.make_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    engine = deeptide.initialize(model=model, config=settings, world=world)[0]
    engine.backward(engine(*models.batches(1, cut.MICRO)[0]))
    return cut.whole(engine, "gradient")


@pytest.mark.parametrize("tensor", [2, 4])
def test_sums_in_parts_lose_nothing_in_bf16(tensor):
    """The gradient of a model that is cut is as near to that in fp32 as the whole model's is."""
    exact = run_ranks(1, gradients, cut.config(0, 1))[0]

    def error(ranks):
        found = run_ranks(ranks, gradients, cut.config(0, ranks, bf16=True))[0]
        return sum((found[name] - value).square().sum().item() for name, value in exact.items()) ** 0.5

    assert 0 < error(tensor) <= 1.15 * error(1)  # one bit less in each sum: 1.23 and 1.26


@pytest.mark.parametrize("stage", [0, 3])
def test_clipping_takes_the_norm_of_all_slices_once(stage):
    shared, whole = both(2, 2, stage, gradient_clipping=0.01)
    assert min(whole[0][1]) > 0.1
    compare(shared, whole, 2, 1e-5)


@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_that_are_summed_count_each_batch_once(stage):
    compare(*both(2, 2, stage, gradient_clipping=0.0, gradient_allreduce_op="sum"), 2, 1e-5)


def with_a_bad_gradient(world, settings, in_slice):
    engine = cut.start(world, settings)
    cut.steps(engine, 1)
    before = models.everything(engine)
    layer = engine.module.h[1].up if in_slice else engine.module.h[1].norm
    hook = layer.weight.register_hook(lambda gradient: gradient * float("nan")) if world.rank == 3 else None
    cut.steps(engine, 1, begin=1)
    if hook is not None:
        hook.remove()
    assert engine.skipped_steps == 1
    models.assert_same(models.everything(engine), before)
    outcome = engine._outcome
    cut.steps(engine, 1, begin=2)
    assert engine.global_steps == 3
    assert engine.was_step_applied()
    return outcome.parameter, outcome.rank, outcome.phase


@pytest.mark.parametrize("in_slice", [True, False])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_all_ranks_skip_what_one_found_in_a_slice_or_beside_it(stage, in_slice):
    results = run_ranks(4, with_a_bad_gradient, cut.config(stage, 2), in_slice)
    assert set(results) == {("h.1.up.weight" if in_slice else "h.1.norm.weight", 3, "backward")}


def parts(world, settings):
    engine = cut.start(world, settings)
    sizes = {name: tuple(parameter.shape) for name, parameter in engine.module.named_parameters()}
    return sizes, engine.summary(), engine.train_batch_size()


def test_ranks_hold_slices_and_the_summary_names_the_axes():
    for sizes, summary, batch in run_ranks(4, parts, cut.config(0, 2)):
        assert sizes["h.0.up.weight"] == (30, 20)
        assert sizes["h.0.down.weight"] == (20, 30)
        assert sizes["h.0.down.bias"] == (20,)
        assert sizes["embed.weight"] == (19, 20)
        assert "data=2 tensor=2" in summary
        assert "x 2 ranks" in summary
        assert batch == 2 * cut.MICRO


class Sent:
    """A team's core, and the bytes of each tensor that it is given."""

    def __init__(self, core):
        self._core, self.bytes = core, []

    def __getattr__(self, name):
        method = getattr(self._core, name)

        def called(tensor, phase):
            self.bytes.append(tensor.nbytes)
            return method(tensor, phase)

        return called if callable(method) else method


def observed(world, settings):
    engine = cut.start(world, settings)
    cut.steps(engine, 1)
    if world.rank == 1:
        engine.module.h[1].register_forward_pre_hook(lambda *_: time.sleep(0.3))

    def gathered():
        return {line.bytes: line.count for line in engine._core.collectives() if line.operation == "all_gather"}

    before, team = gathered(), team_of(engine.module)
    sent = team.core = Sent(team.core)
    cut.steps(engine, 1, begin=1)
    after = gathered()
    counts = {size: after[size] - before.get(size, 0) for size in after if after[size] != before.get(size, 0)}
    return counts, collections.Counter(2 * size for size in sent.bytes), engine._core.step_times()


def test_sums_inside_layers_are_in_the_table_and_waits_for_them_in_the_breakdown():
    seen = {"comms_logger": {"enabled": True}, "wall_clock_breakdown": True}
    first, second = run_ranks(2, observed, cut.config(0, 2) | seen)
    for counts, sent, _ in (first, second):
        assert len(sent) > 1
        assert counts.items() >= sent.items()  # two ranks gather each other's rows, and sum them
    assert first[2].waiting > max(0.25, second[2].waiting)


def loaded(world, settings):
    rows = torch.arange(64).view(16, 4)
    data = torch.utils.data.TensorDataset(rows)
    _, _, loader, _ = deeptide.initialize(model=models.make_model(), config=settings, world=world, training_data=data)
    return [batch[0].tolist() for batch in loader]


def test_ranks_that_share_layers_load_equal_batches():
    results = run_ranks(4, loaded, cut.config(0, 2))
    assert results[0] == results[1]
    assert results[2] == results[3]
    assert results[0] != results[2]
    assert results[0] == run_ranks(2, loaded, cut.config(0, 1))[0]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"parallel": {"tensor": 3}}, "do not divide into teams of 3; take parallel.tensor 2 or 4"),
        ({"parallel": {"tensor": 2, "data": 3}}, "take parallel.data 2"),
        ({"tensor_parallel": {"autotp_size": 4}}, "give one of them"),
        ({"deeptide": {"drift_interval": 5}}, "units on axes of their own do not go with deeptide.drift_interval"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_with_its_cure(changes, text):
    def rank(world):
        with pytest.raises(deeptide.ConfigError, match=text):
            cut.start(world, cut.config(0, 2) | changes)

    run_ranks(4, rank)


def with_other_batches(world, settings):
    engine = cut.start(world, settings)
    tokens, targets = models.batches(1, cut.MICRO * world.size)[0]
    mine = slice(world.rank * cut.MICRO, (world.rank + 1) * cut.MICRO)
    with pytest.raises(ValueError, match=r"losses .*, .*: they train on equal batches"):
        engine.backward(engine(tokens[mine], targets[mine]))


def test_batches_that_are_not_equal_are_found_in_the_first_steps():
    run_ranks(2, with_other_batches, cut.config(0, 2))


def killed(stage):
    engine = deeptide.initialize(model=models.make_model(), config=cut.config(int(stage), 2))[0]
    cut.steps(engine, 1)
    if engine.global_rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        cut.steps(engine, 1, begin=1)
    except deeptide.CommError as error:
        print(error)


@pytest.mark.costly
@pytest.mark.parametrize("stage", [0, 3])
def test_a_rank_that_is_killed_is_named_by_those_that_share_its_layers(stage):
    survivor, victim = run_processes(2, killed, stage, check=False, preload=("deeptide.tensor.axis",))
    assert victim.returncode != 0
    assert survivor.returncode == 0, survivor.stderr
    assert "rank 1 (data 0, tensor 1)'s process" in survivor.stdout
    assert "adding up over the ranks that share a layer" in survivor.stdout


class Skipping(models.TinyModel):
    """Leaves out a block, as a program may."""

    def forward(self, tokens, targets, skipped):
        x = self.embed(tokens)
        for number, block in enumerate(self.h):
            x = x if number == skipped else block(x)
        return torch.nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, -2), targets.flatten())


def skipping(world, settings):
    engine = cut.start(world, settings, kind=Skipping)
    rank, ranks = cut.batch_rank(engine)
    losses, norms = [], []
    for step, (tokens, targets) in enumerate(models.batches(4, cut.MICRO * ranks)):
        mine = slice(rank * cut.MICRO, (rank + 1) * cut.MICRO)
        loss = engine(tokens[mine], targets[mine], (step + rank) % 3)
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
        norms.append(engine.get_global_grad_norm())
    return losses, norms


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("shared_memory", [True, False])
def test_data_ranks_may_take_different_branches(stage, shared_memory):
    more = {"deeptide": {"shared_memory": shared_memory}}
    shared = run_ranks(4, skipping, cut.config(stage, 2, **more))
    whole = run_ranks(2, skipping, cut.config(stage, 1, **more))
    for rank, (losses, norms) in enumerate(shared):
        cut.near(losses, whole[rank // 2][0], 1e-5, "losses")
        cut.near(norms, whole[rank // 2][1], 1e-4, "norms")


@pytest.mark.parametrize("stage", [1, 3])
def test_fp16_has_one_scale_on_all_ranks(stage):
    fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
    shared, whole = both(2, 2, stage, fp16=fp16)
    for rank, (losses, norms, _) in enumerate(shared):
        cut.near(losses, whole[rank // 2][0], 5e-3, "losses")
        cut.near(norms, whole[rank // 2][1], 5e-3, "norms")
