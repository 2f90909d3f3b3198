# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""A list of layers is cut into stages, and each stage builds its own."""

import pytest
import stages
import torch
from conftest import run_ranks
from torch.nn import Linear, ReLU

import deeptide
from deeptide import _C, ConfigError
from deeptide.pipeline import LayerSpec, PipelineModule, TiedLayerSpec
from deeptide.pipeline.partition import balanced, bounds_of


def test_a_uniform_cut_gives_the_first_parts_one_more():
    assert _C.uniform_bounds(10, 4) == [0, 3, 6, 8, 10]
    assert _C.uniform_bounds(2, 4) == [0, 1, 2, 2, 2]
    assert _C.uniform_bounds(8, 1) == [0, 8]


def test_a_balanced_cut_brings_the_largest_and_the_smallest_part_together():
    assert balanced([1, 1, 1, 1], 2) == [0, 2, 4]
    assert balanced([5, 1, 1, 1, 1, 1], 2) == [0, 1, 6]
    assert balanced([1, 1, 1, 1, 8], 2) == [0, 4, 5]
    assert balanced([9, 9], 4) == [0, 1, 2, 2, 2]  # fewer layers than parts: uniform


def test_methods_count_trained_parameters_or_names_of_classes():
    layers = [LayerSpec(Linear, 4, 4), ReLU(), LayerSpec(Linear, 4, 4), torch.tanh, Linear(4, 64)]
    assert bounds_of(layers, 2, "Uniform") == [0, 3, 5]
    assert bounds_of(layers, 2, "parameters") == [0, 4, 5]
    assert bounds_of(layers, 3, "type:lin") == [0, 2, 4, 5]
    layers[4].requires_grad_(False)
    assert bounds_of(layers, 2, "parameters") == [0, 2, 5]


@pytest.mark.parametrize(
    ("method", "num_stages", "kind", "text"),
    [
        ("profiles", 2, NotImplementedError, r"got 'profiles', expected 'uniform', .* 'profile', 'memory'"),
        ("profile", 2, ConfigError, "'profile': give profile_input"),
        ("memory", 2, ConfigError, "'memory': give profile_input"),
        ("type:", 2, NotImplementedError, "got 'type:', expected"),
        ("type:(", 2, ConfigError, "no regular expression"),
        ("type:Conv", 2, ConfigError, "finds none of the layers' classes, which are Linear"),
        ("uniform", 3, ConfigError, "stage 2 of 3 has none of the 2 layers; take fewer stages"),
    ],
)
def test_a_method_that_cannot_be_is_refused(method, num_stages, kind, text):
    with pytest.raises(kind, match=text):
        bounds_of([Linear(2, 2), Linear(2, 2)], num_stages, method)


def test_counting_draws_no_random_numbers():
    torch.manual_seed(3)
    bounds_of([LayerSpec(Linear, 4, 4), LayerSpec(Linear, 4, 4)], 2, "parameters")
    drawn = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(1))


def names(world):
    model = PipelineModule(stages.layers(tied=True), num_stages=4, partition_method="uniform", world=world)
    assert model.parts == [0, 2, 4, 6, 8] and model.num_pipeline_stages() == 4
    assert [model.stage_of_layer(i) for i in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert model.stages_of_ties() == {"embedding": [0, 3]}
    return model.stage_id, sorted({name.rsplit(".", 2)[0] for name, _ in model.named_parameters()})


def test_each_stage_has_its_own_layers_under_the_names_of_the_uncut_model():
    found = run_ranks(4, names)
    assert [stage for stage, _ in found] == [0, 1, 2, 3]
    assert [own for _, own in found] == [["1", "tied_modules"], ["2", "3"], ["4", "5"], ["6"]]


def test_a_specification_builds_later_and_checks_its_class():
    assert repr(LayerSpec(Linear, 2, 3, bias=False)) == "Linear(2, 3, bias=False)"
    assert LayerSpec(Linear, 2, 3, bias=False).build().weight.shape == (3, 2)
    with pytest.raises(RuntimeError, match=r"expected a class derived from torch\.nn\.Module"):
        LayerSpec(torch.tanh)
    with pytest.raises(AttributeError, match=r"'key': ReLU has no parameter 'weight', expected one of none"):
        TiedLayerSpec("key", ReLU).build()
    assert TiedLayerSpec("key", Linear, 2, 2, tied_weight_attr="bias").tied_weight_attr == ["bias"]


class Named(Linear):
    """A layer with another name for its weight, as Megatron's embedding has."""

    @property
    def words(self):
        return self.weight


def test_a_tied_weight_may_be_a_property():
    assert isinstance(TiedLayerSpec("key", Named, 2, 2, tied_weight_attr="words").build(), Named)
    with pytest.raises(AttributeError, match=r"Named has no parameter 'words.more'"):
        TiedLayerSpec("key", Named, 2, 2, tied_weight_attr="words.more").build()


def impossible(world):
    with pytest.raises(ConfigError, match=r"a pipeline of 4 stages over 6 ranks.*with 6 ranks take 3 or 6 stages"):
        PipelineModule(stages.layers(), num_stages=4, world=world)
    with pytest.raises(ConfigError, match="with 6 ranks take 6 stages"):
        PipelineModule(stages.layers(), num_stages=7, world=world)
    with pytest.raises(RuntimeError, match="got neither num_stages nor topology"):
        PipelineModule(stages.layers(), world=world)


def test_a_mesh_that_cannot_be_names_the_nearest_ones():
    run_ranks(6, impossible)


def test_one_process_runs_all_layers():
    model = PipelineModule([Linear(3, 3), torch.tanh, Linear(3, 1)], num_stages=1)
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert model(torch.ones(2, 3)).shape == (2, 1)


def test_seeds_make_weights_independent_of_the_cut():
    layers = [LayerSpec(Linear, 3, 3), LayerSpec(Linear, 3, 3)]
    first = PipelineModule(layers, num_stages=1, seed_layers=True, base_seed=9)
    torch.manual_seed(10)
    assert torch.equal(getattr(first, "1").weight, Linear(3, 3).weight)


@pytest.mark.parametrize("pair", [False, True])
def test_layers_are_recomputed_in_groups(pair):
    runs = []

    def counted(function, *inputs):
        runs.append(len(inputs))
        return torch.utils.checkpoint.checkpoint(function, *inputs, use_reentrant=False)

    split = (lambda x: (x, x.sum())) if pair else torch.tanh
    join = (lambda xs: xs[0] * xs[1]) if pair else torch.tanh
    layers = [Linear(3, 3), split, join, Linear(3, 1), torch.sigmoid]
    plain = PipelineModule(layers, num_stages=1)
    grouped = PipelineModule(layers, num_stages=1, activation_checkpoint_interval=2, activation_checkpoint_func=counted)
    x = torch.ones(2, 3)
    plain(x).sum().backward()
    expected = [parameter.grad.clone() for parameter in plain.parameters()]
    plain.zero_grad()
    grouped(x).sum().backward()
    assert runs == [1, 2 if pair else 1]  # the last group has no parameters
    assert all(torch.equal(p.grad, e) for p, e in zip(grouped.parameters(), expected, strict=True))
    with torch.no_grad():
        grouped(x)
    assert len(runs) == 2


def by_topology(world):
    from deeptide.as_deepspeed.pipe.topology import PipeDataParallelTopology, ProcessTopology

    model = PipelineModule(
        stages.layers(), topology=PipeDataParallelTopology(2, 2), loss_fn=stages.loss_of, world=world
    )
    assert model.num_stages == 2 and model.topology().get_dim("data") == 2
    with pytest.raises(ConfigError, match=r"topology: got the axes \{'data': 2, 'pipe': 2\}"):
        PipelineModule(stages.layers(), topology=ProcessTopology(["data", "pipe"], [2, 2]), world=world)
    with pytest.raises(ConfigError, match="has 2 ranks, the job 4"):
        PipelineModule(stages.layers(), topology=PipeDataParallelTopology(2, 1), world=world)
    with pytest.raises(ConfigError, match="num_stages is 4, and the topology has 2 stages"):
        PipelineModule(stages.layers(), num_stages=4, topology=PipeDataParallelTopology(2, 2), world=world)
    engine = deeptide.initialize(model=model, config=stages.config(1, 2), world=world)[0]
    given = stages.batches(engine.data_parallel_rank, 2, 2, 2)
    return [engine.train_batch(given).item() for _ in range(2)]


def test_a_topology_says_the_stages():
    found = run_ranks(4, by_topology)
    uncut = run_ranks(2, stages.train_uncut, stages.config(1, 2), 2, 2, {})
    assert all(losses == uncut[0][0] for losses in found)
