# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""One call for a step: train_batch and eval_batch give what the loop of forward, backward and step gives."""

import models
import pytest
import torch
from conftest import run_ranks

import deeptide

GAS, MICRO, STEPS = 3, 2, 4


class Answers(torch.nn.Module):
    """Gives its loss in the form that `form` names."""

    def __init__(self, form):
        super().__init__()
        self.form = form
        self.layers = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 6))
        draws = torch.Generator().manual_seed(1)  # ranks are threads, which share torch's own
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=draws) / 4)

    def forward(self, x, y=None):
        output = self.layers(x)
        if self.form == "output":
            return output
        loss = torch.nn.functional.mse_loss(output, y)
        return {"loss": loss, "dict": {"loss": loss, "more": output}, "tuple": (loss, output)}[self.form]


FORMS = {
    "loss": (lambda x, y: (x, y), None),
    "dict": (lambda x, y: {"x": x, "y": y}, None),
    "tuple": (lambda x, y: [x, y], None),
    "output": (lambda x, y: (x, y), torch.nn.functional.mse_loss),
}


def batches(rank, world_size, pack):
    draws = torch.Generator().manual_seed(3)
    for number in range(STEPS * GAS * world_size):
        x = torch.randn(MICRO, 6, generator=draws)
        if number % world_size == rank:
            yield pack(x, x.flip(1))


def make(world, stage, form, **more):
    config = models.config(stage, gas=GAS, micro=MICRO, **more)
    return deeptide.initialize(model=Answers(form), config=config, world=world)[0]


def loop(world, stage):
    engine, losses, total = make(world, stage, "loss"), [], 0.0
    for number, batch in enumerate(batches(world.rank, world.size, FORMS["loss"][0])):
        loss = engine(*batch)
        total += loss.item()
        engine.backward(loss)
        engine.step()
        if number % GAS == GAS - 1:
            losses.append(total / GAS)
            total = 0.0
    return losses, engine.module_state_dict()


def one_call(world, stage, form):
    pack, loss_fn = FORMS[form]
    engine, given = make(world, stage, form), batches(world.rank, world.size, pack)
    engine.eval()
    losses = [engine.train_batch(given, loss_fn=loss_fn).item() for _ in range(STEPS)]
    assert engine.module.training and engine.global_steps == STEPS
    with pytest.raises(StopIteration):
        engine.train_batch(given, loss_fn=loss_fn)
    return losses, engine.module_state_dict()


@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize("stage", [0, 3])
def test_a_batch_in_one_call_is_the_loop(stage, form):
    loops, calls = run_ranks(2, loop, stage), run_ranks(2, one_call, stage, form)
    means = torch.tensor([losses for losses, _ in loops], dtype=torch.float64).mean(0)
    for losses, state in calls:
        torch.testing.assert_close(torch.tensor(losses, dtype=torch.float64), means, rtol=1e-6, atol=0)
        for name, value in loops[0][1].items():
            assert torch.equal(state[name], value), name


def evaluate(world):
    engine, (pack, loss_fn) = make(world, 2, "output"), FORMS["output"]
    before = engine.module_state_dict()
    mean = engine.eval_batch(batches(world.rank, world.size, pack), loss_fn=loss_fn)
    each, logits = engine.eval_batch(
        batches(world.rank, world.size, pack),
        return_logits=True,
        reduce_output=None,
        num_micro_batches=2,
        loss_fn=loss_fn,
    )
    outputs = engine.eval_batch(batches(world.rank, world.size, lambda x, y: x), compute_loss=False)
    assert engine.module.training and len(each) == len(logits) == 2 and len(outputs) == GAS
    assert not any(tensor.requires_grad for tensor in [*each, *logits, *outputs])
    assert all(torch.equal(first, second) for first, second in zip(logits, outputs, strict=False))
    assert all(torch.equal(value, before[name]) for name, value in engine.module_state_dict().items())
    own = [loss_fn(engine.eval().module(x), y).item() for x, y in list(batches(world.rank, world.size, pack))[:GAS]]
    return mean.item(), sum(own) / GAS


def test_an_evaluation_is_the_mean_over_micro_batches_and_ranks():
    results = run_ranks(2, evaluate)
    assert results[0][0] == results[1][0] == pytest.approx((results[0][1] + results[1][1]) / 2, rel=1e-6)


def train_on_own_data(world, folder, resume):
    data = [(torch.full((6,), i / 20), torch.ones(6)) for i in range(20)]
    engine = deeptide.initialize(
        model=Answers("loss"), config=models.config(1, gas=GAS, micro=MICRO), world=world, training_data=data
    )[0]
    if resume:
        engine.train_batch()  # another position, which the load takes back
        engine.load_checkpoint(folder)
    losses = [] if resume else [engine.train_batch().item() for _ in range(2)]
    if not resume:
        engine.save_checkpoint(folder)
    return [*losses, *(engine.train_batch().item() for _ in range(3))]  # goes beyond the epoch's end


def test_batches_of_the_training_data_go_on_after_a_load(tmp_path):
    straight = run_ranks(2, train_on_own_data, str(tmp_path), False)
    assert run_ranks(2, train_on_own_data, str(tmp_path), True) == [losses[2:] for losses in straight]


def misuse(world):
    engine = make(world, 0, "output")
    x = torch.ones(MICRO, 6)
    with pytest.raises(ValueError, match="got no iterator; give one, or training_data to initialize"):
        engine.train_batch()
    with pytest.raises(ValueError, match=r"loss of a micro-batch: got shape \(2, 6\), expected a scalar"):
        engine.train_batch(iter([x] * GAS))
    with pytest.raises(ValueError, match=r"a batch for loss_fn: got 3 values, expected \(inputs, labels\)"):
        engine.train_batch(iter([(x, x, x)]), loss_fn=torch.nn.functional.mse_loss)
    with pytest.raises(ValueError, match="ended after 1 of 3 micro-batches"):
        engine.train_batch(iter([(x, x)]), loss_fn=torch.nn.functional.mse_loss)
    with pytest.raises(ValueError, match=r"there are gradients already; call step\(\)"):
        engine.train_batch(iter([(x, x)] * GAS), loss_fn=torch.nn.functional.mse_loss)
    engine.zero_grad()
    with pytest.raises(ValueError, match="reduce_output: got 'sum', expected \"avg\" or None"):
        engine.eval_batch(iter([x]), reduce_output="sum")


def test_what_cannot_be_a_batch_is_said():
    run_ranks(1, misuse)


def step_after_a_dropped_accumulation(world, stage):
    engine, twin = make(world, stage, "loss"), make(world, stage, "loss")
    pack = FORMS["loss"][0]
    given, same = batches(world.rank, world.size, pack), batches(world.rank, world.size, pack)
    engine.backward(engine(*next(given)))
    engine.step()
    engine.zero_grad()  # as after an error in the middle of a step
    next(same)
    for _ in range(2):
        assert engine.train_batch(given).item() == twin.train_batch(same).item()
    assert engine.global_steps == twin.global_steps == 2 and not engine._core.has_gradients()
    states = [each.module_state_dict() for each in (engine, twin)]
    assert all(torch.equal(states[0][name], value) for name, value in states[1].items())


@pytest.mark.parametrize("stage", [0, 2])
def test_a_step_has_all_its_micro_batches_after_an_accumulation_was_dropped(stage):
    run_ranks(2, step_after_a_dropped_accumulation, stage)
