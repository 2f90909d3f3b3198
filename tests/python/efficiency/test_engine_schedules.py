# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Leaves parts out of a step: shorter sequences, layers, tokens; off, on, and after a resume."""

import copy
import json
import pickle

import models
import pytest
import torch
from conftest import run_ranks
from torch import nn

import deeptide
from deeptide import _C
from deeptide.efficiency import DataAnalyzer, RandomLayerTokenDrop, convert_to_random_ltd, drop_layers
from deeptide.efficiency import random_ltd as ltd

CURRICULUM = {
    "enabled": True,
    "curriculum_type": "seqlen",
    "min_difficulty": 2,
    "max_difficulty": 6,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 6, "difficulty_step": 2},
}
DEPTH = {"enabled": True, "theta": 0.5, "gamma": 0.1}
LTD = models.RANDOM_LTD
ROUTING = {"data_efficiency": {"enabled": True, "data_routing": {"enabled": True, "random_ltd": LTD}}}


class Model(models.TinyModel):
    """Uses the arguments that DeepSpeed's engine passes, and records them."""

    def forward(self, tokens, targets=None, curriculum_seqlen=None, progressive_layer_drop=False, pld_theta=None):
        self.seen = (curriculum_seqlen, progressive_layer_drop, pld_theta)
        if curriculum_seqlen is not None:
            tokens, targets = tokens[:, :curriculum_seqlen], targets[:, :curriculum_seqlen]
        x = self.embed(tokens)
        for number, block in enumerate(self.h):
            keep = 1.0
            if progressive_layer_drop:
                keep = _C.LayerDropSchedule.keep_probability(number, len(self.h), pld_theta)
            if keep == 1.0 or float(torch.rand(())) < keep:
                x = block(x)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def start(world=None, stage=0, bf16=False, **sections):
    torch.manual_seed(3)
    config = models.config(stage, bf16=bf16, **sections)
    engine = deeptide.initialize(model=models.make_model(kind=Model), config=config, world=world)[0]
    if "data_efficiency" in sections:
        convert_to_random_ltd(engine, models.Block)
    return engine


def train(engine, first, last):
    seen = []
    for number in range(first, last):
        tokens, targets = models.batches(number + 1, 4)[number]
        engine.backward(engine(tokens, targets))
        seen.append(engine.module.seen)
        engine.step()
    return seen


def test_forward_gets_nothing_more_when_all_is_off():
    engine = start()
    assert engine._less_work is None
    assert train(engine, 0, 2) == [(None, False, None)] * 2
    assert engine.get_pld_theta() is None and engine.curriculum_seqlen() is None


def test_curriculum_tells_forward_the_length_of_the_step_that_begins():
    engine = start(curriculum_learning=CURRICULUM)
    assert [seen[0] for seen in train(engine, 0, 8)] == [2, 2, 4, 4, 4, 6, 6, 6]
    engine.eval()
    tokens, targets = models.batches(1, 4)[0]
    engine(tokens, targets)
    assert engine.module.seen == (None, False, None)


def test_custom_curriculum_takes_the_programs_function():
    section = {**CURRICULUM, "schedule_type": "custom"}
    engine = start(curriculum_learning=section)
    with pytest.raises(deeptide.ConfigError, match="has no function"):
        train(engine, 0, 1)
    engine.set_custom_curriculum_learning_schedule({"seqlen": lambda step: min(6, 1 + step)})
    assert [seen[0] for seen in train(engine, 0, 6)] == [2, 3, 4, 5, 6, 6]


def test_layer_drop_lags_a_step_as_deepspeeds_does():
    engine = start(progressive_layer_drop=DEPTH)
    exact = [0.5 * float(torch.tensor(-0.1 * step, dtype=torch.float64).exp()) + 0.5 for step in range(5)]
    seen = [share for _, _, share in train(engine, 0, 5)]
    assert seen == pytest.approx([1.0, *exact[:4]], rel=1e-15)  # the first two forwards see 1
    assert engine.get_pld_theta() == pytest.approx(exact[4], rel=1e-15)


@pytest.mark.parametrize(("stage", "bf16"), [(0, False), (2, True), (3, False), (3, True)])
@pytest.mark.parametrize(
    "sections",
    [{"curriculum_learning": CURRICULUM}, {"progressive_layer_drop": DEPTH}, ROUTING],
    ids=["length", "depth", "tokens"],
)
def test_resumes_exactly(sections, stage, bf16, tmp_path):
    whole = start(stage=stage, bf16=bf16, **sections)
    train(whole, 0, 3)
    whole.save_checkpoint(tmp_path)
    train(whole, 3, 6)
    again = start(stage=stage, bf16=bf16, **sections)
    again.load_checkpoint(tmp_path)
    train(again, 3, 6)
    models.assert_same(models.everything(again), models.everything(whole))
    assert again._less_work.state_dict() == whole._less_work.state_dict()


@pytest.mark.parametrize("stage", [0, 3])
def test_layers_of_an_unchanged_model_are_dropped_and_resume(stage, tmp_path):
    def make():
        torch.manual_seed(5)
        config = models.config(stage, progressive_layer_drop={"enabled": True, "theta": 0.1, "gamma": 2.0})
        engine = deeptide.initialize(model=models.make_model(), config=config)[0]
        names = list(engine.module.state_dict())
        drop_layers(engine, engine.module.h)
        assert list(engine.module.state_dict()) == names
        return engine

    def train_plain(engine, first, last):
        for number in range(first, last):
            tokens, targets = models.batches(number + 1, 4)[number]
            engine.backward(engine(tokens, targets))
            engine.step()

    ran = []
    whole = make()
    for number, block in enumerate(whole.module.h):
        block.norm.register_forward_hook(lambda *_, number=number: ran.append(number))
    train_plain(whole, 0, 12)
    # Shares 1, 1, 0.2 and then 0.1: the first layer always runs, the last of three in 2 + 10 * (1 - 2 / 3 * 0.9) steps.
    assert ran.count(0) == 12 and 2 <= ran.count(2) < ran.count(0)
    whole.save_checkpoint(tmp_path)
    train_plain(whole, 12, 15)
    again = make()
    again.load_checkpoint(tmp_path)
    train_plain(again, 12, 15)
    models.assert_same(models.everything(again), models.everything(whole))
    whole.eval()
    with torch.no_grad():
        tokens = models.batches(1, 4)[0][0]
        assert torch.equal(whole(tokens), whole(tokens))


def _partly(block, hidden, number, theta, kept):
    """A block of three, of which one is dropped or sees some tokens, by their definitions."""
    keep = 1 - number / 3 * (1 - theta)
    if keep < 1 and torch.rand(()).item() >= keep:
        return hidden
    chosen = ltd.sample_tokens(kept, hidden.size(1), len(hidden), 1, "cpu")[0].unsqueeze(-1).expand(-1, -1, 20)
    return hidden.scatter(1, chosen, block(hidden.gather(1, chosen)))


@pytest.mark.parametrize("order", ["found", "tokens first", "layers first"])
def test_layers_are_dropped_before_tokens_are_drawn_whichever_was_asked_for_first(order):
    every = {**LTD, "random_ltd_layer_num": 3, "random_ltd_layer_id": [0, 1, 2]}
    sections = {"data_efficiency": {"enabled": True, "data_routing": {"enabled": True, "random_ltd": every}}}
    config = models.config(0, progressive_layer_drop={"enabled": True, "theta": 0.1, "gamma": 2.0}, **sections)
    engine = deeptide.initialize(model=models.make_model(), config=config)[0]
    steps = {
        "found": [lambda: convert_to_random_ltd(engine, models.Block)],
        "layers first": [lambda: drop_layers(engine, engine.module.h)],
    }
    steps["tokens first"] = [*steps["found"], *steps["layers first"]]
    steps["layers first"] = steps["tokens first"][::-1]
    for ask in steps[order]:
        ask()
    theta, dropped = engine._less_work.layers, 0
    theta.set_current(0.1)
    plain = pickle.loads(pickle.dumps(engine.module.h))
    assert all(type(block) is models.Block for block in plain)
    tokens = models.batches(1, 4)[0][0]
    for seed in range(8):
        torch.manual_seed(seed)
        hidden = engine.module.embed(tokens)
        for block in engine.module.h:
            hidden = block(hidden)
        torch.manual_seed(seed)
        expected = engine.module.embed(tokens)
        for number, block in enumerate(plain):
            before, expected = expected, _partly(block, expected, number, 0.1, engine._less_work.tokens.position[1])
            dropped += before is expected
        assert torch.equal(hidden, expected)
    assert 0 < dropped < 16
    copied = copy.deepcopy(engine.module)
    models.assert_same(dict(copied.named_parameters()), dict(engine.module.named_parameters()))
    assert all(isinstance(block, RandomLayerTokenDrop) for block in copied.h)


def test_layers_cannot_be_dropped_without_the_section():
    with pytest.raises(deeptide.ConfigError, match="progressive_layer_drop is off"):
        drop_layers(start(), [])


def test_ranks_drop_layers_and_tokens_of_their_own_at_stage_3():
    def run(world):
        engine = start(world, stage=3, progressive_layer_drop=DEPTH, **ROUTING)
        train(engine, 0, 4)
        return engine.random_ltd_layer_tokens(), engine._less_work.tokens.position[1]

    # 2 samples per rank: (2 * kept + 1 * 6) * 4 for kept 2, 2, 3, 3
    assert run_ranks(2, run) == [((2 + 2 + 3 + 3) * 2 * 4 + 4 * 6 * 4, 3)] * 2


# -- random-LTD --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kept", [1, 5, 7])
def test_tokens_come_back_where_they_were(batch_first, kept):
    whole = torch.randn(3, 7, 4, dtype=torch.float64, requires_grad=True)
    index = ltd.sample_tokens(kept, 7, 3, 1, "cpu")[0]
    laid = whole if batch_first else whole.transpose(0, 1)
    part = ltd.gather_tokens(laid, index, batch_first)
    out = ltd.scatter_tokens(laid, part * 2, index, batch_first)
    out = out if batch_first else out.transpose(0, 1)
    weight = torch.randn_like(whole)
    (gradient,) = torch.autograd.grad((out * weight).sum(), whole)
    factor = torch.ones(3, 7, 1, dtype=torch.float64)
    for row, positions in enumerate(index.tolist()):
        assert positions == sorted(set(positions))
        for position in positions:
            factor[row, position] = 2
    assert torch.equal(out, whole * factor) and torch.equal(gradient, weight * factor)


def test_masks_are_those_of_the_kept_tokens():
    mask = torch.rand(2, 1, 6, 6)
    index, parts = ltd.bert_sample_tokens(4, 6, 2, layers=3, attn_mask=mask)
    for layer in range(3):
        for row in range(2):
            kept = index[layer, row].long()
            assert torch.equal(parts[layer][row, 0], mask[row, 0][kept][:, kept])
    rows = ltd.bert_sample_tokens(4, 6, 2, attn_mask=mask[:, :, :1])[1][0]
    assert rows.shape == (2, 1, 1, 4)
    assert torch.equal(ltd.gpt_sample_tokens(4, 6, 2, attn_mask=mask)[1], mask[:, :, :4, :4])
    with pytest.raises(deeptide.ConfigError, match="need attn_mask"):
        ltd.bert_sample_tokens(4, 6, 2)


class Masked(nn.Module):
    """Records how many tokens and which mask it saw."""

    def forward(self, x, mask=None):
        self.seen = (x.size(1), None if mask is None else tuple(mask.shape))
        return x + 1, "more"


class Fixed:
    """A schedule that keeps three tokens."""

    position = (0, 3, 0)


def test_layer_keeps_its_names_and_sees_a_part_only_while_it_trains():
    layer = Masked()
    assert RandomLayerTokenDrop(layer) is layer and isinstance(layer, Masked)
    assert RandomLayerTokenDrop(layer) is layer and isinstance(layer, RandomLayerTokenDrop)
    x, mask = torch.zeros(2, 5, 4), torch.ones(2, 1, 5, 5)
    layer(x, mask=mask)
    assert layer.seen == (5, (2, 1, 5, 5))
    section = {"model_mask_name": "mask", "model_type": "decoder", "hidden_state_order": "batch_seq_dim"}
    layer.init_config(section, Fixed(), 0)
    out, rest = layer(x, mask=mask)
    assert layer.seen == (3, (2, 1, 3, 3)) and rest == "more"
    assert (out.sum(dim=(1, 2)) == 12).all()
    twin = copy.deepcopy(layer)
    twin(x, mask=mask)
    assert twin.seen[0] == 3
    with pytest.raises(deeptide.ConfigError, match="without the argument 'mask'"):
        layer(x)
    layer.eval()(x, mask=mask)
    assert layer.seen == (5, (2, 1, 5, 5))


def test_conversion_names_layers_that_are_not_there():
    section = {**LTD, "random_ltd_layer_id": [0, 7]}
    with pytest.raises(deeptide.ConfigError, match="1 layers of the converted class"):
        start(data_efficiency={"enabled": True, "data_routing": {"enabled": True, "random_ltd": section}})


# -- the loader --------------------------------------------------------------------------------------------------------


class Lengths(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, i):
        return torch.tensor([i, i % 10])


@pytest.fixture(scope="module")
def sampling(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lengths")
    DataAnalyzer(
        Lengths(),
        metric_names=["mod"],
        metric_functions=[lambda batch: batch[:, 1]],
        metric_types=["single_value_per_sample"],
        save_path=folder,
        batch_size=8,
    ).run_map_reduce()
    metric = {
        "index_to_sample_path": f"{folder}/mod/mod_index_to_sample",
        "index_to_metric_path": f"{folder}/mod/mod_index_to_metric",
        "difficulty_type": "value",
        "clustering_type": "schedule_based",
        "min_difficulty": 2,
        "max_difficulty": 9,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 12, "difficulty_step": 1},
    }
    return {
        "enabled": True,
        "num_epochs": 4,
        "curriculum_learning": {"enabled": True, "curriculum_metrics": {"mod": metric}},
    }


def start_with_data(sampling, workers=0, world=None):
    section = {"enabled": True, "data_sampling": {**sampling, "num_workers": workers}}
    config = models.config(0, gas=2, data_efficiency=section)
    engine, _, loader, _ = deeptide.initialize(
        model=nn.Linear(2, 1), config=config, training_data=Lengths(), world=world
    )
    return engine, loader


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_follows_the_curriculum_and_resumes_exactly(sampling, workers, tmp_path):
    engine, loader = start_with_data(sampling, workers)
    whole = [batch[:, 0].tolist() for batch in start_with_data(sampling)[1]]
    assert len(whole) == len(loader) + 1 == 81  # as DeepSpeed, one batch more than num_epochs hold
    assert all(sample % 10 <= 2 for batch in whole[:2] for sample in batch)
    assert any(sample % 10 == 9 for batch in whole for sample in batch)
    seen = []
    engine.set_data_post_process_func(lambda batch, state: (seen.append(state["current_difficulties"]), batch)[1])
    batches = iter(loader)
    found = [next(batches)[:, 0].tolist() for _ in range(11)]
    engine.save_checkpoint(tmp_path)
    again, rest = start_with_data(sampling, workers)
    again.load_checkpoint(tmp_path)
    found += [batch[:, 0].tolist() for batch in rest]
    assert found == whole
    assert seen[0] == {"mod": 2} and len(seen) == 11


@pytest.mark.parametrize("workers", [0, 2])
def test_a_position_that_is_restored_moves_the_loaders_iteration_under_way(sampling, workers):
    whole = [batch[:, 0].tolist() for batch in start_with_data(sampling)[1]]
    loader = start_with_data(sampling, workers)[1]
    seen, saved = [], None
    for batch in loader:
        seen.append(batch[:, 0].tolist())
        if len(seen) == 3:
            saved = loader.state_dict()
        if len(seen) == 6:
            loader.load_state_dict(saved)
            assert loader.state_dict()["consumed_samples"] == saved["consumed_samples"]
    assert seen == whole[:6] + whole[3:]
    assert list(loader) == []


def test_loader_of_another_kind_refuses_the_position(sampling, tmp_path):
    engine, _ = start_with_data(sampling)
    engine.save_checkpoint(tmp_path)
    plain = deeptide.initialize(model=nn.Linear(2, 1), config=models.config(0, gas=2), training_data=Lengths())[0]
    with pytest.raises(deeptide.ConfigError, match="is of a curriculum"):
        plain.load_checkpoint(tmp_path)
    with pytest.raises(deeptide.ConfigError, match="no loader with a curriculum"):
        plain.set_data_post_process_func(print)


# -- configurations ----------------------------------------------------------------------------------------------------

BAD = [
    ({"curriculum_learning": {**CURRICULUM, "min_difficulty": 9}}, "9 exceeds max_difficulty, 6"),
    ({"curriculum_learning": {**CURRICULUM, "schedule_type": "fixed_root"}}, r"schedule_config.root_degree: missing"),
    ({"curriculum_learning": {"enabled": True}}, "curriculum_learning.min_difficulty: missing"),
    (
        {"curriculum_learning": {**CURRICULUM, "schedule_type": "fixed_discrete", "schedule_config": {
            "difficulty": [1, 2], "max_step": [5, 6]}}},
        "got 2 difficulties for 2 values of max_step",
    ),
    ({"data_efficiency": {"data_routing": {"enabled": True, "random_ltd": LTD}}}, "inside a section that is off"),
    (
        {"data_efficiency": {"enabled": True, "data_routing": {"enabled": True, "random_ltd": {
            **LTD, "random_ltd_layer_id": [1]}}}},
        "names 1 layers, expected random_ltd_layer_num, 2",
    ),
    (
        {"data_efficiency": {"enabled": True, "data_sampling": {"enabled": True, "dynamic_batching": {
            "enabled": True}}}},
        "dynamic_batching.max_tokens: missing",
    ),
    (
        {"data_efficiency": {"enabled": True, "data_sampling": {"enabled": True, "curriculum_learning": {
            "enabled": True}}}},
        "curriculum_metrics: names no metric",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("sections", "text"), BAD, ids=[text for _, text in BAD])
def test_bad_configurations_are_named(sections, text):
    with pytest.raises(deeptide.ConfigError, match=text):
        deeptide.initialize(model=models.make_model(), config=models.config(0, **json.loads(json.dumps(sections))))
