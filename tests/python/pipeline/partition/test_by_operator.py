# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""A model without a chain of blocks, cut by "by_operator" between calls of any modules, trains as it does uncut."""

import re

import families
import pytest
import torch
import torch.utils.checkpoint
from conftest import run_ranks
from test_any_model import GAS, STEPS, compare, recomputing
from test_values_that_skip import compare_roughly
from torch import nn
from torch.nn import functional as F

import deeptide
import operators
from deeptide._forecast.measure import measured
from deeptide._forecast.plan_mesh import bounds_of
from deeptide.config import load_config
from deeptide.pipeline import show_example
from deeptide.pipeline.cutting.along import find_cut
from deeptide.pipeline.cutting.chunks import BY_OPERATOR, starts_of
from deeptide.pipeline.cutting.cut import cut_of
from deeptide.pipeline.errors import PipelineError
from operators import MODELS, edit_of


def train(name, num_stages, data_size=1, stage=0, gas=GAS, edit=None, **more):
    family, edit = MODELS[name][0], edit or edit_of(name)
    pipeline = {"stages": num_stages, "cut": "by_operator"}
    settings = families.config(stage, gas, num_stages, **more)
    settings["parallel"]["pipeline"] = pipeline
    cut = run_ranks(num_stages * data_size, families.train, family, settings, gas, STEPS, edit)
    more.pop("parallel", None)
    return cut, run_ranks(data_size, families.train, family, families.config(stage, gas, **more), gas, STEPS, edit)


def agree(cut, uncut):
    """A stage may borrow all that it computes with."""
    assert all(each[:2] == cut[0][:2] for each in cut)
    compare([each for each in cut if each[2]], uncut, exact=False)


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("num_stages", [2, 3])
def test_a_model_without_blocks_trains_as_the_uncut_one(name, num_stages):
    agree(*train(name, num_stages))


@pytest.mark.costly
@pytest.mark.parametrize("name", ["resnet", "unet", "twice"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_data_ranks_share_a_stage_by_zero(name, stage):
    cut, uncut = train(name, 2, 2, stage)
    agree([each for each in cut if each[2]], uncut)


@pytest.mark.costly
@pytest.mark.parametrize("name", ["resnet", "unet", "tied"])
def test_it_trains_in_bf16(name):
    compare_roughly(*train(name, 2, 1, 2, bf16=True))


@pytest.mark.costly
@pytest.mark.parametrize("name", ["unet", "twice"])
@pytest.mark.parametrize("schedule", ["gpipe", "zero_bubble", "interleaved"])
def test_every_schedule_takes_it(name, schedule):
    agree(*train(name, 2, parallel={"schedule": schedule}))


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_a_chain_of_blocks_gives_the_losses_of_a_cut_along_it(name):
    """Its own example is found."""
    runs = []
    for cut in ("by_block", "by_operator"):
        settings = families.config(1, GAS, 2) | {"parallel": {"pipeline": {"stages": 2, "cut": cut}}}
        runs.append(run_ranks(2, families.train, name, settings, GAS, STEPS, None))
    whole = {key: value for each in runs[0] for key, value in each[2].items()}
    compare(runs[1], [(*runs[0][0][:2], whole)], exact=False)


class Residual(nn.Module):
    """Goes around the second stage's first call with what that is handed."""

    def __init__(self):
        super().__init__()
        self.embed, self.fc = nn.Embedding(families.VOCABULARY, 12), nn.Linear(12, families.VOCABULARY)
        self.around = nn.Linear(families.VOCABULARY, families.VOCABULARY)

    def forward(self, tokens, labels):
        x = self.fc(self.embed(tokens)).tanh()
        return F.cross_entropy((x + self.around(x)).flatten(0, 1), labels.flatten())


def travels(world):
    settings = families.config(0, GAS, 2) | {"parallel": {"pipeline": {"stages": 2, "cut": "by_operator"}}}
    engine = deeptide.initialize(model=made(Residual)(None), config=settings, world=world)[0]
    engine.train_batch(families.batches("plain", 0, 1, 1, GAS))
    assert list(engine._cut.own_blocks) == [["embed", "fc"], ["around"]][world.rank]
    return list(engine._cut.skips._wanted.values())


def test_what_is_handed_on_does_not_travel_beside_as_well():
    assert run_ranks(2, travels) == [[{}]] * 2


# -- recomputation -----------------------------------------------------------------------------------------------------


class Recomputes(operators.Tied):
    """One checkpoint around two layers, and one around each of two others."""

    def forward(self, tokens, labels):
        def apart(forward, x):
            return torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=False)

        x = self.embed(tokens)
        inner = apart(lambda x: F.gelu(self.fc2(F.gelu(self.fc1(x)))), self.norm(x))
        x = x + apart(self.fc3, inner)
        return F.cross_entropy(F.linear(apart(self.norm, x), self.embed.weight).flatten(0, 1), labels.flatten())


class RecomputesReentrant(Recomputes):
    def forward(self, tokens, labels):
        x = self.embed(tokens)
        for module in (self.norm, self.fc1, self.fc2, self.fc3):
            x = torch.utils.checkpoint.checkpoint(module, x, use_reentrant=True).tanh()
        return F.cross_entropy(F.linear(x, self.embed.weight).flatten(0, 1), labels.flatten())


def made(kind, example=operators.TOKENS):
    def edit(model):
        with families._seeding:
            torch.manual_seed(3)
            made = kind()
        show_example(made, example)
        return made

    return edit


@pytest.mark.parametrize("num_stages", [2, 3])
def test_a_program_recomputes_between_the_cuts(num_stages):
    agree(*train("tied", num_stages, edit=made(Recomputes)))


def test_no_part_begins_inside_a_recomputation():
    along = find_cut(made(Recomputes)(None), 3, 1, BY_OPERATOR)
    assert along.chain.names == ["embed", "norm", "fc1", "fc2", "fc3", "norm"]
    assert along.chain.names.index("fc2") not in along.bounds


@pytest.mark.parametrize("more", [{}, {"activation_checkpointing": {"policy": "recompute"}}], ids=["own", "policy"])
def test_recomputed_blocks_are_not_cut_inside(more):
    edit = None if more else recomputing(use_reentrant=False)
    settings = families.config(3, GAS, 3, **more) | {"parallel": {"pipeline": {"stages": 3, "cut": "by_operator"}}}
    cut = run_ranks(3, families.train, "llama", settings, GAS, STEPS, edit)
    compare(cut, run_ranks(1, families.train, "llama", families.config(3, GAS), GAS, STEPS, edit), exact=False)


# -- other forwards ----------------------------------------------------------------------------------------------------


def by_hand(world, name, num_stages):
    engine = made_engine(world, name, num_stages)
    losses = []
    for batch in families.batches(MODELS[name][0], 0, 1, STEPS, GAS):
        loss = engine(**batch) if isinstance(batch, dict) else engine(*batch)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, engine.get_global_grad_norm(), families.states_of(engine)


def made_engine(world, name, num_stages, stage=1, seed_edit=None):
    settings = families.config(stage, GAS, num_stages)
    if num_stages:
        settings["parallel"]["pipeline"] = {"stages": num_stages, "cut": "by_operator"}
    model = edit_of(name)(None)
    if seed_edit is not None:
        seed_edit(model)
    return deeptide.initialize(model=model, config=settings, world=world)[0]


@pytest.mark.parametrize("name", ["unet", "twice"])
def test_a_loop_of_the_programs_own_trains_it(name):
    agree(run_ranks(2, by_hand, name, 2), run_ranks(1, by_hand, name, 0))


def look(world, name, num_stages):
    engine = made_engine(world, name, num_stages)
    batches = list(families.batches(MODELS[name][0], 0, 1, 1, GAS))
    mean = engine.eval_batch(iter(batches)).item()
    losses, _ = engine.eval_batch(iter(batches), return_logits=True, reduce_output=None)
    with torch.no_grad():
        whole = [engine.module(**b) if isinstance(b, dict) else engine.module(*b) for b in batches]
    copied = engine.snapshot().state_dict()
    return [mean, *(loss.item() for loss in [*losses, *whole])], {key: copied[key] for key in sorted(copied)}


@pytest.mark.parametrize("name", ["unet", "tied", "towers", "clip"])
def test_it_evaluates_and_runs_whole_without_gradients(name):
    losses, state = run_ranks(1, look, name, 0)[0]
    for found, copied in run_ranks(3, look, name, 3):
        assert found == pytest.approx(losses, rel=1e-6)
        assert copied.keys() == state.keys() and all(torch.equal(copied[key], state[key]) for key in state)


def save(world, name, num_stages, folder):
    engine = made_engine(world, name, num_stages)
    given = families.batches(MODELS[name][0], 0, 1, 4, GAS)
    for _ in range(2):
        engine.train_batch(given)
    engine.save_checkpoint(folder)
    return families.states_of(engine), [engine.train_batch(given).item() for _ in range(2)]


def zero(model):
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()


def load(world, name, num_stages, folder):
    engine = made_engine(world, name, num_stages, 3, zero)
    assert engine.load_checkpoint(folder)[0] is not None and engine.global_steps == 2
    given = families.batches(MODELS[name][0], 0, 1, 4, GAS)
    for _ in range(2 * GAS):
        next(given)
    return families.states_of(engine), [engine.train_batch(given).item() for _ in range(2)]


@pytest.mark.parametrize("name", ["resnet", "twice"])
@pytest.mark.parametrize(("saved", "loaded"), [(2, 0), (0, 3), (3, 2)])
def test_a_checkpoint_has_the_names_of_the_uncut_model(name, saved, loaded, tmp_path):
    before = run_ranks(max(saved, 1), save, name, saved, str(tmp_path))
    after = run_ranks(max(loaded, 1), load, name, loaded, str(tmp_path))
    whole, again = ({k: v for states, _ in runs for k, v in states.items()} for runs in (before, after))
    uncut = {f"{key}/{role}" for key, _ in edit_of(name)(None).named_parameters() for role in families.ROLES}
    assert whole.keys() == again.keys() == uncut and all(torch.equal(again[key], whole[key]) for key in whole)
    assert all(losses == pytest.approx(before[0][1], rel=1e-5) for _, losses in after)


def test_the_plan_takes_the_same_cut():
    settings = families.config(1, GAS, 2) | {"parallel": {"pipeline": {"stages": 2, "cut": "by_operator"}}}
    model = edit_of("unet")(None)
    sizes = [stage.core.num_parameters for stage in deeptide.plan(model, settings, world_size=2).stages]
    first = sum(p.numel() for part in (model.down1, model.down2, model.middle) for p in part.parameters())
    assert sizes == [first, sum(p.numel() for p in model.parameters()) - first]


@pytest.mark.parametrize(("name", "batch"), [("unet", operators.PIXELS), ("towers", operators.TOKENS)])
def test_a_plan_of_steps_has_each_call_of_a_module(name, batch):
    settings = families.config(1, GAS, 2) | {"parallel": {"pipeline": {"stages": 2, "cut": "by_operator"}}}
    model, config = edit_of(name)(None), load_config(settings)
    assert deeptide.plan(model, settings, world_size=2, batch=batch).step is not None
    names, _ = bounds_of(model, 2, 1, starts_of(config))
    assert (len(set(names)) < len(names)) == (name == "towers")
    parts, whole = (measured(model, config, calls, batch) for calls in (names, []))
    assert parts.flops == whole.flops > 0
    kept = [sum(part.kept.bytes + part.kept.input_bytes for part in micro.parts) for micro in (parts, whole)]
    assert kept[0] >= kept[1] > 0
    again = [part.handed for part, call in zip(parts.blocks, names, strict=True) if call == "words"]
    assert len(again) == (2 if name == "towers" else 0)


# -- programs that differ, and what is refused -------------------------------------------------------------------------


class Deeper(operators.Tied):
    """Calls one module more in training, and drops out by a function between two calls."""

    def forward(self, tokens, labels):
        x = self.fc1(self.norm(self.embed(tokens)))
        x = F.dropout(F.gelu(self.fc2(x) if self.training else x), 0.5, self.training)
        return F.cross_entropy(F.linear(self.fc3(x), self.embed.weight).flatten(0, 1), labels.flatten())


def drop(world):
    settings = families.config(0, GAS, 2) | {"parallel": {"pipeline": {"stages": 2, "cut": "by_operator"}}}
    engine = deeptide.initialize(model=made(Deeper)(None), config=settings, world=world)[0]
    given = list(families.batches("plain", 0, 1, 1, GAS))
    return [engine.train_batch(iter(given)).item(), engine.eval_batch(iter(given)).item()]


def test_modes_may_call_other_modules_and_dropout_lies_between_calls():
    runs = run_ranks(2, drop)
    assert runs[0] == runs[1] and runs[0][0] != pytest.approx(runs[0][1], rel=1e-3)


class DropsSkips(operators.Tied):
    def forward(self, tokens, labels):
        first = F.dropout(self.embed(tokens))
        x = first + self.fc3(F.gelu(self.fc2(F.gelu(self.fc1(self.norm(first))))))
        return F.cross_entropy(F.linear(x, self.embed.weight).flatten(0, 1), labels.flatten())


class LoopsMore(operators.Twice):
    """Goes around as often as there are tokens, of which the example has fewer."""

    def forward(self, tokens, labels):
        x = self.embed(tokens)
        for _ in range(tokens.shape[1]):
            x = x + self.mix(self.norm(x)).tanh()
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Looks(operators.Tied):
    """Asks for a number that depends on weights."""

    def forward(self, tokens, labels):
        x = self.embed(tokens)
        return super().forward(tokens, labels) * (1 if x.mean().item() > 0 else 2)


def meet(world, kind):
    settings = families.config(0, GAS, 2, deeptide={"error_grace": 0.2})
    settings["parallel"]["pipeline"] = {"stages": 2, "cut": "by_operator"}
    engine = deeptide.initialize(model=made(kind)(None), config=settings, world=world)[0]
    with pytest.raises((PipelineError, deeptide.CommError)) as raised:
        engine.train_batch(families.batches("plain", 0, 1, 1, GAS))
    return str(raised.value)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (DropsSkips, r"draws random numbers before this stage's blocks"),
        (RecomputesReentrant, r"called without gradients though it is handed some, .*give that use_reentrant=False"),
        (LoopsMore, r"was called after \w+, expected each block once, in order"),
    ],
)
def test_a_program_that_the_stages_would_run_otherwise_is_named(kind, text):
    assert any(re.search(text, each) for each in run_ranks(2, meet, kind))


class Open(operators.Tied):
    """Its signature does not tell what it takes."""

    def forward(self, *given):
        return super().forward(*given)


def refuse(world, edit, text, num_stages):
    model = edit(None)
    before = dict(model.named_parameters(remove_duplicate=False))
    settings = families.config(1, GAS, num_stages)
    settings["parallel"]["pipeline"] = {"stages": num_stages, "cut": "by_operator"}
    with pytest.raises(deeptide.ConfigError, match=text):
        deeptide.initialize(model=model, config=settings, world=world)
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[name] is before[name] for name in before) and cut_of(model) is None
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("edit", "text", "num_stages"),
    [
        (made(Looks), r"Looks does not go without values: \S*_local_scalar_dense\S* needs the values of .*'embed", 2),
        (made(operators.Tied, (torch.zeros(2),)), r"the forward of Tied fails on the example: TypeError: .*labels", 2),
        (lambda _: Open(), r"what the forward of Open takes is not known; call deeptide\.pipeline\.show", 2),
        (made(operators.Tied), r"Tied has 5 calls of modules with parameters for 6 parts that it could be cut bet", 6),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused_and_left_whole(edit, text, num_stages):
    run_ranks(num_stages, refuse, edit, text, num_stages)
