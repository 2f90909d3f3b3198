# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Compressed layers, schedules and cleaned models give what DeepSpeed 0.19.6, the last with compression, gave."""

import copy
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import deeptide
from deeptide.compression import (
    CompressionSchedule,
    init_compression,
    quantizers,
    redundancy_clean,
    student_initialization,
)
from deeptide.compression.layers import CompressedLayer, compressed_layers

THEIRS = json.loads((Path(__file__).parent / "deepspeed_0_19_6.json").read_text())


def grid(*shape, seed):
    """Multiples of 1 / 64, whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-97, 98, shape, generator=generator) / 64


WEIGHT = grid(4, 6, seed=1)
BIAS = grid(4, seed=2)
KERNEL = grid(4, 3, 2, 2, seed=3)


def section(technique, params, modules=("0",), related=None, **shared):
    """A configuration with one technique and one group."""
    group = {"params": params, "modules": list(modules)}
    if related is not None:
        group["related_modules"] = related
    parts = {"shared_parameters": {"enabled": True, **shared}, "different_groups": {"a": group}}
    return {"compression_training": {technique: parts}}


def bits(start, target, period=1, **rest):
    return section(
        "weight_quantization", {"start_bits": start, "target_bits": target, "quantization_period": period}, **rest
    )


def with_values(module, weight, bias=None):
    with torch.no_grad():
        module.weight.copy_(weight)
        if bias is not None:
            module.bias.copy_(bias)
    return module


def begun(model, config):
    """The model, prepared, at its first step."""
    init_compression(model, config)
    return CompressionSchedule(model, config)


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", THEIRS["quantized"], ids=lambda c: "{dtype}-{bits}-{kind}-{groups}".format(**c))
def test_weights_are_rounded_bit_for_bit(case):
    weight = WEIGHT.to(getattr(torch, case["dtype"]))
    got = quantizers.quantize(weight, case["bits"], case["groups"], case["kind"] == "symmetric")
    assert got.dtype == weight.dtype
    assert got.float().flatten().tolist() == case["values"]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("count", [8, 4, 3, 2, 1])
@pytest.mark.parametrize("value", [0.0, 0.75, -3.0])
def test_groups_of_one_value_stay_finite(count, symmetric, value):
    got = quantizers.quantize(torch.full((2, 3), value), count, 2, symmetric)
    assert torch.isfinite(got).all() and (got == got[0, 0]).all()
    if value == 0 or not symmetric:
        assert (got == value).all() or count <= 2


def test_stochastic_rounding_is_right_on_average_and_repeats_within_a_step():
    config = bits(4, 4, rounding="stochastic", quantize_weight_in_forward=True)
    layer = nn.Sequential(with_values(nn.Linear(6, 4), WEIGHT))
    schedule = begun(layer, config)
    seen = []
    for _ in range(400):
        value = layer[0].compressed()[0]
        assert torch.equal(value, layer[0].compressed()[0])
        seen.append(value.detach())
        schedule.step()
    scale = 2 * float(WEIGHT.abs().max()) / 16
    inner = 7 * scale > WEIGHT  # the largest level is below the largest value
    assert len({tuple(value.flatten().tolist()) for value in seen}) > 100
    assert ((torch.stack(seen).mean(0) - WEIGHT).abs()[inner] < 0.15 * scale).all()


def made(kind):
    if kind == "linear":
        return with_values(nn.Linear(6, 4), WEIGHT, BIAS)
    if kind == "conv":
        return with_values(nn.Conv2d(3, 4, 2), KERNEL, BIAS)
    return with_values(nn.Embedding(4, 6), WEIGHT)


def configured(name):
    """The configuration of a recorded layer, from its name."""
    words = name.split()
    if words[0] == "weight":
        groups = {"quantize_groups": int(words[3])} if len(words) > 3 else {}
        return bits(8, int(words[1]), quantization_type=words[2], quantize_weight_in_forward=True, **groups)
    if words[0] == "activation":
        shared = {"quantization_type": words[2], "range_calibration": words[3], "schedule_offset": 0}
        return section("activation_quantization", {"bits": int(words[1])}, **shared)
    heads = {"num_heads": 3} if words[0] == "head" else {}
    ratio = {"sparse": 0.4, "row topk": 0.6}.get(words[0], {"row topk": 0.6}.get(name, 0.5))
    return section(f"{words[0]}_pruning", {"dense_ratio": ratio}, method=words[1], schedule_offset=0, **heads)


@pytest.mark.parametrize(
    "case", [c for c in THEIRS["layers"] if "fails" not in c], ids=lambda c: f"{c['kind']} {c['name']}"
)
def test_layers_give_their_outputs_and_gradients(case):
    model = nn.Sequential(made(case["kind"]))
    names = list(model.state_dict())
    begun(model, configured(case["name"]))
    layer = model[0]
    assert isinstance(layer, CompressedLayer) and names == [n for n in model.state_dict() if n in names]
    with torch.no_grad():
        for name, values in case["scores"].items():
            getattr(layer, name).copy_(torch.tensor(values).view_as(getattr(layer, name)))
    x = torch.tensor(case["x"]).view(case["x_shape"])
    x = x.long() if case["kind"] == "embedding" else x
    for number in range(case["passes"]):
        model.zero_grad()
        given = x if number == case["passes"] - 1 else x * (number + 2)
        given = given.clone().requires_grad_(given.is_floating_point())
        y = model(given)
        (y * y).sum().backward()
    near = {"rtol": 1e-5, "abs": 1e-5}  # sums of products, in the order of torch's matmul

    def same(got, expected):
        return torch.allclose(got.float().flatten(), torch.tensor(expected), rtol=near["rtol"], atol=near["abs"])

    assert same(y, case["y"])
    assert {n for n, _ in layer.named_parameters()} == set(case["gradients"])
    assert all(same(p.grad, case["gradients"][n]) for n, p in layer.named_parameters())
    assert {n: b.float().flatten().tolist() for n, b in layer.named_buffers()} == case["state"]
    if "x_gradient" in case:
        assert same(given.grad, case["x_gradient"])


def test_channels_are_pruned_by_their_l1_norm_which_fails_in_deepspeed():
    model = nn.Sequential(made("conv"))
    begun(model, section("channel_pruning", {"dense_ratio": 0.5}, schedule_offset=0))
    norms = KERNEL.abs().sum(dim=(1, 2, 3))
    kept = norms >= norms.sort().values[2]
    weight, bias = model[0].compressed()
    assert torch.equal(weight, KERNEL * kept.view(-1, 1, 1, 1)) and torch.equal(bias, BIAS * kept)


# -- schedules ---------------------------------------------------------------------------------------------------------


def test_techniques_begin_at_their_steps():
    techniques = {
        **bits(8, 4, quantize_weight_in_forward=True, schedule_offset=2)["compression_training"],
        **section("activation_quantization", {"bits": 8}, schedule_offset=3)["compression_training"],
        **section("row_pruning", {"dense_ratio": 0.5}, schedule_offset=0)["compression_training"],
        **section("head_pruning", {"dense_ratio": 0.5}, schedule_offset=4, method="topk", num_heads=2)[
            "compression_training"
        ],
    }
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    schedule = begun(model, {"compression_training": techniques})
    rows = []
    for _ in range(6):
        all_of = model[0]._compression
        row, head = all_of.pruning
        rows.append([all_of.weight.on, all_of.activation.on, False, row.on, head.on])
        schedule.step()
    assert rows == THEIRS["flags"]
    assert compressed_layers(model) == [model[0]] and type(model[1]) is nn.Linear


@pytest.mark.parametrize("case", THEIRS["moq"], ids=lambda c: "{start}-{target}-{period}-{kind}".format(**c))
def test_bits_fall_over_the_steps(case):
    mixture = {"enabled": case["mixed"], "quantize_change_ratio": 0.25}
    config = bits(
        case["start"],
        case["target"],
        case["period"],
        quantization_type=case["kind"],
        quantize_groups=case["groups"],
        fp16_mixed_quantize=mixture,
    )
    model = nn.Sequential(with_values(nn.Linear(6, 4), WEIGHT))
    schedule = begun(model, config)
    for row, (count, period, share, values) in enumerate(case["rows"]):
        weight = model[0]._compression.weight
        assert (weight.bits, weight.period, schedule._falling.share_kept) == (count, period, share), row
        if values is not None:
            assert model[0].compressed()[0].flatten().tolist() == values
        schedule.step()


def test_falling_bits_begin_one_step_after_their_offset():
    model = nn.Sequential(nn.Linear(6, 4))
    schedule = begun(model, bits(8, 4, schedule_offset=2))
    seen = []
    for _ in range(5):
        seen.append(model[0]._compression.weight.on)
        schedule.step()
    assert seen == [False, False, False, True, True]


def test_schedule_goes_on_where_its_state_was():
    config = bits(8, 3, 2, rounding="stochastic")
    one, other = (nn.Sequential(with_values(nn.Linear(6, 4), WEIGHT)) for _ in range(2))
    first, second = begun(one, config), begun(other, config)
    for _ in range(5):
        first.step()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for _ in range(4):
        assert torch.equal(one[0].compressed()[0], other[0].compressed()[0])
        first.step()
        second.step()
    assert first.state_dict() == second.state_dict()


# -- cleaning ----------------------------------------------------------------------------------------------------------


def two_linears():
    return nn.Sequential(
        with_values(nn.Linear(6, 4), WEIGHT, BIAS),
        with_values(nn.Linear(4, 6), grid(6, 4, seed=14), grid(6, seed=15)),
    )


def convolutions():
    return nn.Sequential(
        with_values(nn.Conv2d(3, 4, 2), KERNEL, BIAS),
        with_values(nn.BatchNorm2d(4), grid(4, seed=12), grid(4, seed=13)),
        with_values(nn.Conv2d(4, 2, 2), grid(2, 4, 2, 2, seed=11), torch.zeros(2)),
    )


HEADS = {"method": "topk", "num_heads": 3}
CLEANED = {
    "weights": (two_linears, bits(8, 4, quantize_weight_in_forward=True, quantize_groups=2)),
    "sparse": (two_linears, section("sparse_pruning", {"dense_ratio": 0.4})),
    "rows": (two_linears, section("row_pruning", {"dense_ratio": 0.5})),
    "rows and inputs": (two_linears, section("row_pruning", {"dense_ratio": 0.5}, related=[["1"]])),
    "heads": (two_linears, section("head_pruning", {"dense_ratio": 0.5}, **HEADS)),
    "heads and outputs": (two_linears, section("head_pruning", {"dense_ratio": 0.5}, related=[["1"]], **HEADS)),
    "channels and features": (
        convolutions,
        section("channel_pruning", {"dense_ratio": 0.5}, related=[["1", "2"]], method="topk"),
    ),
}


@pytest.mark.parametrize("name", CLEANED)
def test_cleaned_models_are_theirs(name):
    make, config = CLEANED[name]
    model = init_compression(make(), config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "scores" in key:
                parameter.copy_(grid(*parameter.shape, seed=16))
    assert redundancy_clean(model, config) is model
    state = {key: [list(value.shape), value.float().flatten().tolist()] for key, value in model.state_dict().items()}
    assert state == THEIRS["cleaned"][name]
    assert not compressed_layers(model) and type(model[0]) in (nn.Linear, nn.Conv2d)


@pytest.mark.parametrize("name", ["weights", "sparse", "rows", "rows and inputs", "heads"])
def test_cleaning_changes_no_output(name):
    make, config = CLEANED[name]
    config = copy.deepcopy(config)
    for part in config["compression_training"].values():
        part["shared_parameters"]["schedule_offset"] = 0
    model = make()
    begun(model, config)
    x = grid(5, 6, seed=18)
    expected = model(x)
    torch.testing.assert_close(redundancy_clean(model, config)(x), expected)


def test_removed_channels_are_those_that_were_masked_after_the_normalisation():
    make, config = CLEANED["channels and features"]
    model = init_compression(make(), config).eval()
    x = grid(2, 3, 4, 4, seed=18)
    with torch.no_grad():
        kept = model[0]._compression.pruning[0].mask(model[0]).view(1, -1, 1, 1)
        expected = model[2](model[1](model[0](x)) * kept)
    assert kept.sum() == 2
    torch.testing.assert_close(redundancy_clean(model, config)(x), expected)
    assert (model[0].out_channels, model[1].num_features, model[2].in_channels) == (2, 2, 2)


def test_inputs_stay_quantised_after_cleaning():
    config = section("activation_quantization", {"bits": 8}, schedule_offset=0, range_calibration="static")
    model = two_linears()
    begun(model, config)
    model(grid(3, 6, seed=5))
    redundancy_clean(model, config)
    assert isinstance(model[0], CompressedLayer) and "0.activation_quantizer.x_min_max" in model.state_dict()


def test_a_loaded_state_dict_brings_the_masks():
    config = section("row_pruning", {"dense_ratio": 0.5}, related=[["1"]])
    trained = init_compression(two_linears(), config)
    fresh = init_compression(nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 6)), config)
    fresh.load_state_dict({name: value.float() for name, value in trained.state_dict().items()})
    redundancy_clean(trained, config)
    redundancy_clean(fresh, config)
    assert all(torch.equal(value, fresh.state_dict()[name]) for name, value in trained.state_dict().items())


# -- fewer layers ------------------------------------------------------------------------------------------------------


class Stack(nn.Module):
    def __init__(self, layers, width=3):
        super().__init__()
        self.h = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, 2)


def reduction(**changes):
    part = {"enabled": True, "keep_number_layer": 2, "module_name_prefix": "h", "teacher_layer": [1, 3]}
    return {"compression_training": {"layer_reduction": {**part, "other_module_name": ["head"], **changes}}}


@pytest.mark.parametrize("by", ["init_compression", "student_initialization"])
def test_students_begin_as_their_teachers_layers(by):
    teacher, student = Stack(5), Stack(2)
    if by == "init_compression":
        assert init_compression(student, reduction(), teacher) is student
    else:
        student_initialization(student, teacher, reduction())
    expected = {"h.0": teacher.h[1], "h.1": teacher.h[3], "head": teacher.head}
    for name, module in expected.items():
        assert torch.equal(student.get_submodule(name).weight, module.weight)
        assert torch.equal(student.get_submodule(name).bias, module.bias)


# -- errors ------------------------------------------------------------------------------------------------------------

PATH = "compression_training"
BAD = [
    (bits(4, 8), r"weight_quantization.different_groups.a.params.target_bits: 8 exceeds start_bits, 4"),
    (bits(8, 2, quantization_type="asymmetric"), r'quantization_type: "asymmetric" has no 2 bits'),
    (bits(8, 1, rounding="stochastic"), r'rounding: "stochastic" has no 1 bits'),
    (bits(8, 4, quantize_groups=5), r"quantize_groups: 5 does not divide the 24 elements of 0"),
    (
        bits(8, 4, quantize_weight_in_forward=True, fp16_mixed_quantize={"enabled": True}),
        r"fp16_mixed_quantize.enabled: true has no effect with quantize_weight_in_forward",
    ),
    (section("weight_quantization", {"start_bits": 8}), r"different_groups.a.params.target_bits: is missing"),
    (section("activation_quantization", {}), r"activation_quantization.different_groups.a.params.bits: is missing"),
    (section("activation_quantization", {"bits": 6}), r"params.bits: got 6, expected 4 or 8"),
    (section("row_pruning", {}), r"row_pruning.different_groups.a.params.dense_ratio: is missing"),
    (section("head_pruning", {"dense_ratio": 0.5}, num_heads=2), r'head_pruning.shared_parameters.method: got "l1"'),
    (section("head_pruning", {"dense_ratio": 0.5}, method="topk"), r"num_heads: is missing"),
    (
        section("head_pruning", {"dense_ratio": 0.5}, method="topk", num_heads=4),
        r"0 has 6 inputs, which num_heads, 4, does not divide",
    ),
    (section("sparse_pruning", {"dense_ratio": 0.5}, method="snip_momentum"), r"snip_momentum.* not supported yet \("),
    (section("sparse_pruning", {"dense_ratio": 0.5}, related=[["1"]]), r"sparse_pruning changes no shapes"),
    (section("row_pruning", {"dense_ratio": 0.5}, related=[]), None),
    (section("row_pruning", {"dense_ratio": 0.5}, related=[["1"], ["1"]]), r"got 2 entries, expected one for each .*1"),
    (section("row_pruning", {"dense_ratio": 0.5}, related=["1"]), r"got the entry \"1\", expected a list"),
    (section("row_pruning", {"dense_ratio": 0.5}, modules=["("]), r"modules: '\(' is no regular expression"),
    (section("row_pruning", {"dense_ratio": 0.5}, modules=["x"]), r"no module that row_pruning can change has 'x'"),
    (section("channel_pruning", {"dense_ratio": 0.5}), r"no module that channel_pruning can change has '0'"),
    (section("row_pruning", {"dense_ratio": 0.5}, modules=["0", "0$"]), r"'0\$' names 0, which a: '0' names already"),
    (
        {PATH: {"row_pruning": {"shared_parameters": {"enabled": True}}}},
        r"row_pruning.different_groups: names no group",
    ),
    (reduction(), r"layer_reduction.enabled: true needs a teacher"),
]


@pytest.mark.parametrize(("config", "text"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_bad_configurations_are_named(config, text):
    if text is None:
        init_compression(two_linears(), config)
        return
    with pytest.raises(deeptide.ConfigError, match=text):
        init_compression(two_linears(), config)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"teacher_layer": [1]}, r"keep_number_layer: got 2, and teacher_layer names 1"),
        ({"module_name_prefix": "layers"}, r"the student has no module layers.0"),
        ({"teacher_layer": [1, 9]}, r"the teacher has no module h.9"),
        ({"other_module_name": ["tail"]}, r"the student has no module tail"),
    ],
)
def test_bad_reductions_are_named(changes, text):
    with pytest.raises(deeptide.ConfigError, match=text):
        init_compression(Stack(2), reduction(**changes), Stack(5))


def test_reductions_need_layers_of_the_same_shape():
    with pytest.raises(deeptide.ConfigError, match=r"h.0.weight has the shape \[3, 3\], the teacher's \[4, 4\]"):
        init_compression(Stack(2), reduction(), Stack(5, width=4))


class Doubled(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


def test_layers_with_a_forward_of_their_own_are_refused():
    with pytest.raises(deeptide.ConfigError, match="0 is a Doubled, whose forward is not Linear's"):
        init_compression(nn.Sequential(Doubled(6, 4)), bits(8, 4))


def test_misuse_is_named():
    config = section("row_pruning", {"dense_ratio": 0.5})
    with pytest.raises(deeptide.ConfigError, match="mpu is given"):
        init_compression(two_linears(), config, mpu=object())
    with pytest.raises(deeptide.ConfigError, match="0 was not prepared; call init_compression"):
        redundancy_clean(two_linears(), config)
    with pytest.raises(deeptide.ConfigError, match="0 has row_pruning already"):
        init_compression(init_compression(two_linears(), config), config)
    wide = section("row_pruning", {"dense_ratio": 0.5}, related=[["[01]"]])
    with pytest.raises(deeptide.ConfigError, match=r"'\[01\]' names 2 modules, expected one for each of the 1"):
        redundancy_clean(init_compression(two_linears(), wide), wide)
