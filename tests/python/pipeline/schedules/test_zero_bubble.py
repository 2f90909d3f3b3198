# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The schedule with gradients of weights apart trains as the uncut model, in the order that the simulator runs."""

import families
import pytest
import stages
import test_any_model
import torch
from conftest import run_ranks
from test_pipeline import STEPS, compare, with_a_bad_gradient

import deeptide
from deeptide import pipeline
from deeptide.pipeline import LayerSpec, PipelineModule, TiedLayerSpec
from deeptide.pipeline.errors import PipelineError

GAS = 5
ZERO_BUBBLE = {"schedule": "zero_bubble"}
KIND = pipeline.PipelineSchedule.zero_bubble


def start(world, num_stages, settings, layers=None, **more):
    layers = stages.layers() if layers is None else layers
    model = PipelineModule(layers, num_stages, loss_fn=stages.loss_of, world=world, **more)
    return deeptide.initialize(model=model, config=settings, world=world)[0]


def config(stage, gas, schedule="zero_bubble", **more):
    return stages.config(stage, gas, parallel={"schedule": schedule}, gradient_clipping=0.0, **more)


def both(num_stages, data_size, settings, gas=GAS, **module):
    arguments = (settings, gas, STEPS, module)
    cut = run_ranks(num_stages * data_size, stages.train_cut, num_stages, *arguments)
    return cut, run_ranks(data_size, stages.train_uncut, *arguments)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("mesh", [(1, 1), (2, 1), (4, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("gas", [1, GAS])
@pytest.mark.costly
def test_stages_train_as_the_uncut_model_bit_for_bit(mesh, stage, bf16, gas):
    compare(*both(*mesh, config(stage, gas, bf16=bf16), gas))


@pytest.mark.parametrize("name", list(families.FAMILIES))
def test_a_model_as_it_is_trains_as_the_uncut_one_bit_for_bit(name):
    """But for weights that two stages use, whose gradients are added over the micro-batches first."""
    results = test_any_model.both(name, 3, 1, parallel=ZERO_BUBBLE)
    test_any_model.compare(*results, exact=name not in families.TIED and name != "plain")


@pytest.mark.parametrize("name", list(families.ENCODERS_AND_DECODERS))
def test_an_encoder_and_a_decoder_train_as_uncut(name):
    test_any_model.compare(*test_any_model.both(name, 2, 1, parallel=ZERO_BUBBLE), exact=False)


@pytest.mark.costly
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("bf16", [False, True])
def test_a_stage_of_several_ranks_shards_by_zero(stage, bf16):
    results = test_any_model.both("llama", 2, 2, stage, bf16=bf16, parallel=ZERO_BUBBLE)
    test_any_model.compare(*results, exact=True)


@pytest.mark.costly
@pytest.mark.parametrize("more", [{"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, {"fp16": True}], ids=str)
def test_other_types_are_those_of_1f1b(more):
    if "fp16" in more:
        more = {"fp16": {"enabled": True, "initial_scale_power": 8}}
    results = [
        run_ranks(4, families.train, "llama", families.config(1, GAS, 2, parallel={"schedule": name}, **more), GAS, 2)
        for name in ("zero_bubble", "1f1b")
    ]
    for (losses, norms, states), (wanted, expected, theirs) in zip(*results, strict=True):
        assert losses == wanted and norms == expected and all(torch.equal(states[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize("bad_stage", [0, 1])
@pytest.mark.parametrize("fp16", [False, True])
def test_all_stages_skip_a_step_and_name_what_one_found(bad_stage, fp16):
    fp16 = {"enabled": fp16, "initial_scale_power": 8, "hysteresis": 1}
    results = run_ranks(4, with_a_bad_gradient, stages.config(2, 4, fp16=fp16, parallel=ZERO_BUBBLE), bad_stage)
    name = results[2 * bad_stage][3]
    assert {result[:3] for result in results} == {(name, 2 * bad_stage + 1, "backward")}


# -- the order --------------------------------------------------------------------------------------------------------

STEPS_OF_A_LIST = (
    "receive_activation", "forward", "send_activation", "receive_gradient", "backward_input", "backward_weight",
    "send_gradient",
)  # fmt: skip


def trace(world, num_stages, micro_batches):
    """A stage's actions in a step, when gradients of parameters come, and the most micro-batches that it holds."""
    engine = start(world, num_stages, config(0, micro_batches))
    done, alive, peak, held, arrived = [], 0, 0, 0, {}
    run = engine._run
    for name, parameter in engine.module.named_parameters():
        note = lambda _, name=name: arrived.setdefault(name, []).append(len(done))  # noqa: E731
        parameter.register_post_accumulate_grad_hook(note)
    for name in STEPS_OF_A_LIST:
        method = getattr(run, f"_{name}")

        def traced(piece, name=name, method=method):
            nonlocal alive, peak, held
            alive += name == "forward"
            peak = max(peak, alive)
            method(piece)
            done.append((name, *piece))
            alive -= name == "backward_weight"
            held = max(held, len(run._aside._later) if run._aside else 0)

        setattr(run, f"_{name}", traced)
    engine.train_batch(stages.batches(0, 1, 1, micro_batches))
    assert run._aside is None or not run._aside._later
    return done, peak, held, {name: [done[place][0] for place in places] for name, places in arrived.items()}


@pytest.mark.parametrize(("num_stages", "micro_batches"), [(2, 5), (3, 6), (4, 8), (4, 2)])
def test_a_stage_does_what_the_simulator_runs(num_stages, micro_batches):
    lists = pipeline.instructions(KIND, num_stages, micro_batches)
    on_paper = pipeline.simulate(lists, num_stages, micro_batches)
    for rank, (done, peak, held, arrived) in enumerate(run_ranks(num_stages, trace, num_stages, micro_batches)):
        assert done == [(each.action.name, each.chunk, each.micro_batch) for each in lists[rank]]
        assert peak == on_paper.peak_activations[rank]
        assert held == min(rank + 1, micro_batches) if rank else held == 0  # those before, and the one that came
        for name, actions in arrived.items():  # weights of products later, but where nobody waits
            is_product = any(part in name for part in (".up.", ".down.", "7.weight"))
            kind = "backward_weight" if rank and is_product else "backward_input"
            assert actions == [kind] * micro_batches, name


def bubble(world, schedule):
    engine = start(world, 4, config(0, 8, schedule))
    engine.train_batch(stages.batches(0, 1, 1, 8))
    return engine.bubble()


def test_the_formulas_bubble_is_smaller_than_that_of_1f1b():
    whole, apart = run_ranks(4, bubble, "1f1b")[0], run_ranks(4, bubble, "zero_bubble")[0]
    assert whole.formula == pytest.approx(9 / 33) and apart.formula == pytest.approx(3 / 27)
    assert 0 < apart.measured < 1


# -- weights of every kind --------------------------------------------------------------------------------------------


class Uses(torch.nn.Module):
    """A weight used twice by products, one used by a product and otherwise, frozen ones, and adapters."""

    def __init__(self, number):
        super().__init__()
        width = stages.WIDTH
        self.twice = torch.nn.Linear(width, width)
        self.mixed = torch.nn.Parameter(torch.empty(width, width))
        self.frozen, self.partly = torch.nn.Linear(width, width), torch.nn.Linear(width, width)
        self.down, self.up = torch.nn.Linear(width, 2, bias=False), torch.nn.Linear(2, width, bias=False)
        stages.drawn(self, 300 + number)
        self.frozen.requires_grad_(False)
        self.partly.bias.requires_grad_(False)

    def forward(self, given):
        hidden = given["hidden"]
        hidden = self.twice(self.twice(hidden)).tanh() + self.frozen(hidden) + self.up(self.down(hidden))
        hidden = self.partly(hidden) + hidden @ self.mixed + self.mixed.square().sum()
        return {**given, "hidden": hidden.tanh()}


def of_uses():
    layers = stages.layers()
    return [*layers[:-1], *(LayerSpec(Uses, number) for number in range(6)), layers[-1]]


def train_uses(world, num_stages, settings, hooked):
    engine = start(world, num_stages, settings, of_uses())
    for name, parameter in engine.module.named_parameters():
        if hooked and name.endswith(hooked):
            parameter.register_hook(lambda gradient: gradient * 2)
    return stages.train(engine, stages.batches(engine.data_parallel_rank, 2, STEPS, GAS), STEPS)


@pytest.mark.costly
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("hooked", [(), ("twice.weight", "partly.weight", "norm.weight")], ids=["", "hooks"])
def test_weights_of_every_kind_are_those_of_1f1b(stage, hooked):
    """But for a weight that is used by a product and otherwise: its two parts are added to the sums one by one."""
    results = [run_ranks(4, train_uses, 2, config(stage, GAS, name), hooked) for name in ("zero_bubble", "1f1b")]
    for (losses, norms, states), (wanted, expected, theirs) in zip(*results, strict=True):
        assert losses[0] == wanted[0] and losses == pytest.approx(wanted, rel=1e-6)
        assert norms == pytest.approx(expected, rel=1e-6) and states.keys() == theirs.keys()
        for name, value in theirs.items():
            torch.testing.assert_close(states[name], value, rtol=1e-5, atol=1e-7, msg=name)
    changed = run_ranks(4, train_uses, 2, config(stage, GAS), ())[0][1] if hooked else []
    assert changed != results[0][0][1]


class NotesProducts:
    """A stage, and whether each product that it was offered was taken, by weight."""

    def __init__(self, stage):
        self._stage, self.taken = stage, {}

    def __getattr__(self, name):
        return getattr(self._stage, name)

    def add_product(self, weight, left, right):
        answer = self._stage.add_product(weight, left, right)
        self.taken.setdefault(id(weight), []).append(answer)
        return answer


def products_taken(world, settings, hooked):
    """By name of the last stage's weights, the answers to its offers in a step."""
    engine = start(world, 2, settings, of_uses())
    for name, parameter in engine.module.named_parameters():
        if name.endswith(hooked):
            parameter.register_post_accumulate_grad_hook(lambda _: None)
    noted = engine._run._stage = NotesProducts(engine._run._stage)
    engine.train_batch(stages.batches(engine.data_parallel_rank, 2, 1, GAS))
    return {name: noted.taken[id(p)] for name, p in engine.module.named_parameters() if id(p) in noted.taken}


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_weights_only_product_is_computed_where_it_is_summed(stage):
    """But not where a hook of the program's asks for it; and a weight's several products are one gradient."""
    for rank, taken in enumerate(run_ranks(4, products_taken, config(stage, GAS), ".up.weight")):
        assert all(answers == [not name.endswith(".up.weight")] * GAS for name, answers in taken.items())
        offered = {name.rsplit(".", 2)[-2] for name in taken}
        assert {"up", "down", "partly"} <= offered if rank >= 2 else not offered
        assert "twice" not in offered


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("stage", [1, 3])
def test_tied_weights_are_those_of_1f1b(stage, bf16):
    results = [
        run_ranks(4, stages.train_cut, 2, config(stage, GAS, name, bf16=bf16), GAS, STEPS, {"tied": True})
        for name in ("zero_bubble", "1f1b")
    ]
    for (losses, norms, states), (wanted, expected, theirs) in zip(*results, strict=True):
        assert losses == wanted and norms == expected
        assert all(torch.equal(states[name], value) for name, value in theirs.items())


class Scale(torch.nn.Linear):
    def __init__(self):
        super().__init__(stages.WIDTH, stages.WIDTH)
        stages.drawn(self, 11)

    def forward(self, given):
        return {**given, "hidden": super().forward(given["hidden"]).tanh()}


def train_late_tie(world, settings):
    """The second of three stages owns what it shares with the third."""
    layers = stages.layers()
    layers = [*layers[:4], TiedLayerSpec("scale", Scale), *layers[4:7], TiedLayerSpec("scale", Scale), layers[7]]
    engine = start(world, 3, settings, layers, partition_method="uniform")
    return engine.module.stages_of_ties(), stages.train(engine, stages.batches(0, 1, STEPS, GAS), STEPS)


def test_a_later_stage_may_own_a_tied_weight():
    apart, whole = (run_ranks(3, train_late_tie, config(0, GAS, name)) for name in ("zero_bubble", "1f1b"))
    assert apart[0][0] == {"scale": [1, 2]}
    for (_, (losses, norms, states)), (_, (wanted, expected, theirs)) in zip(apart, whole, strict=True):
        assert losses == wanted and norms == expected
        assert all(torch.equal(states[name], value) for name, value in theirs.items())


def recomputed(world, interval):
    engine = start(world, 2, config(3, GAS), activation_checkpoint_interval=interval)
    return stages.train(engine, stages.batches(engine.data_parallel_rank, 2, STEPS, GAS), STEPS)


@pytest.mark.costly
def test_recomputed_layers_change_no_number():
    for (losses, norms, states), again in zip(run_ranks(4, recomputed, 0), run_ranks(4, recomputed, 2), strict=True):
        assert (losses, norms) == again[:2] and all(torch.equal(value, again[2][key]) for key, value in states.items())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_blocks_of_a_model_are_recomputed(use_reentrant):
    edit = test_any_model.recomputing(use_reentrant)
    test_any_model.compare(*test_any_model.both("llama", 2, 1, edit=edit, parallel=ZERO_BUBBLE), exact=True)


@pytest.mark.costly
@pytest.mark.parametrize("policy", [{"policy": "recompute"}, {"policy": "auto", "memory": "44KiB"}], ids=str)
def test_a_policy_recomputes_blocks_of_stages(policy):
    import test_activations_on_stages as activations

    settings = families.config(3, activations.GAS, 2, parallel=ZERO_BUBBLE)
    choices = activations.compare("llama", 4, settings, policy)
    assert all(choice.recomputed for choice in choices) and {choice.live for choice in choices} == {2}


@pytest.mark.costly
def test_ranks_may_share_layers_beside():
    results = [
        run_ranks(4, families.train, "gpt2", families.config(1, GAS, 2, parallel={"schedule": n, "tensor": 2}), GAS, 2)
        for n in ("zero_bubble", "1f1b")
    ]
    for (losses, norms, states), (wanted, expected, theirs) in zip(*results, strict=True):
        assert losses == wanted and norms == expected and all(torch.equal(states[key], theirs[key]) for key in theirs)


# -- what it is not for -----------------------------------------------------------------------------------------------


class Differentiates(torch.nn.Module):
    """Hands on what the product's gradient is."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(stages.WIDTH, stages.WIDTH)

    def forward(self, given):
        (gradient,) = torch.autograd.grad(self.inner(given["hidden"]).sum(), given["hidden"])
        return {**given, "hidden": given["hidden"] + gradient}


def differentiate(world):
    settings = config(0, 2) | {"deeptide": {"error_grace": 0.2}}
    layers = stages.layers()
    engine = start(world, 2, settings, [*layers[:-1], LayerSpec(Differentiates), layers[-1]])
    with pytest.raises(PipelineError if world.rank else deeptide.CommError) as raised:
        engine.train_batch(stages.batches(0, 1, 1, 2))
    return str(raised.value)


def test_a_model_that_differentiates_its_own_products_is_refused():
    assert "the model differentiates what a weight gives by itself" in run_ranks(2, differentiate)[1]


def refuse(world):
    with pytest.raises(deeptide.ConfigError, match='schedule is "zero_bubble", and the PipelineModule has 2 chunks'):
        start(world, 2, config(0, 1), chunks=2)
    settings = families.config(0, 1, 2, parallel={**ZERO_BUBBLE, "chunks": 2})
    with pytest.raises(deeptide.ConfigError, match=r'chunks is 2, and parallel\.schedule is "zero_bubble"'):
        deeptide.initialize(model=families.make("llama"), config=settings, world=world)


def test_several_chunks_have_the_interleaved_schedule():
    run_ranks(2, refuse)


def loop_and_evaluate(world, schedule):
    settings = families.config(1, GAS, 2, parallel={"schedule": schedule})
    engine = deeptide.initialize(model=families.make("llama"), config=settings, world=world)[0]
    given = list(families.batches("llama", 0, 1, 2, GAS))
    found = [engine.eval_batch(iter(given)).item(), engine.train_batch(iter(given)).item()]
    for batch in given:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return [*found, engine.eval_batch(iter(given)).item(), engine.global_steps]


@pytest.mark.costly
def test_a_loop_of_the_programs_own_and_evaluations_are_as_ever():
    assert run_ranks(2, loop_and_evaluate, "zero_bubble") == run_ranks(2, loop_and_evaluate, "1f1b")
