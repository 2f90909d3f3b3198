# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Compression under the engine: stages, types, ranks, checkpoints, models built without memory."""

import models
import pytest
import torch
from conftest import run_ranks

import deeptide
from deeptide.compression import CompressionSchedule, init_compression, redundancy_clean
from deeptide.compression.layers import compressed_layers


def part(params, modules, **shared):
    return {
        "shared_parameters": {"enabled": True, **shared},
        "different_groups": {"a": {"params": params, "modules": modules}},
    }


FALLING = part({"start_bits": 8, "target_bits": 3, "quantization_period": 1}, ["up"], rounding="stochastic")
IN_FORWARD = part(
    {"start_bits": 8, "target_bits": 4}, ["up", "embed"], quantize_weight_in_forward=True, schedule_offset=1
)
ACTIVATION = part({"bits": 8}, ["down"], schedule_offset=2)
STATIC = part({"bits": 8}, ["down"], schedule_offset=1, range_calibration="static")
SPARSE = part({"dense_ratio": 0.5}, ["up"], schedule_offset=1)
SCORED = part({"dense_ratio": 0.5}, ["up"], schedule_offset=2, method="topk")
ROWS = part({"dense_ratio": 0.5}, ["up"], schedule_offset=0, method="topk")
HEADS = part({"dense_ratio": 0.5}, ["down"], schedule_offset=0, method="topk", num_heads=4)
SECTIONS = {
    "falling bits": {"weight_quantization": FALLING},
    "all": {
        "weight_quantization": IN_FORWARD,
        "activation_quantization": ACTIVATION,
        "sparse_pruning": SCORED,
        "row_pruning": ROWS,
        "head_pruning": HEADS,
    },
    "static": {"activation_quantization": STATIC, "sparse_pruning": SPARSE},
}


def start(sections, stage=0, bf16=False, world=None, ranks=1, deferred=False):
    config = models.config(stage, bf16=bf16, world=ranks, compression_training=sections)
    if deferred:
        with deeptide.zero.Init():
            model = models.make_model()
    else:
        model = models.make_model()
    with models._seeding:
        torch.manual_seed(7)
        init_compression(model, config)
    return deeptide.initialize(model=model, config=config, world=world)[0], config


def train(engine, first, last, rank=0, ranks=1):
    losses = []
    for number in range(first, last):
        tokens, targets = (part.chunk(ranks)[rank] for part in models.batches(number + 1, 4)[number])
        loss = engine(tokens, targets)
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return losses


@pytest.mark.parametrize(("stage", "bf16"), [(0, False), (2, True), (3, False), (3, True)])
@pytest.mark.parametrize("name", SECTIONS)
def test_resumes_exactly(name, stage, bf16, tmp_path):
    whole, _ = start(SECTIONS[name], stage, bf16)
    train(whole, 0, 3)
    whole.save_checkpoint(tmp_path)
    train(whole, 3, 6)
    again, _ = start(SECTIONS[name], stage, bf16)
    again.load_checkpoint(tmp_path)
    train(again, 3, 6)
    models.assert_same(models.everything(again), models.everything(whole))
    assert again._less_work.state_dict() == whole._less_work.state_dict()


@pytest.mark.parametrize("name", SECTIONS)
def test_stages_agree_bit_for_bit(name):
    def run(world, stage):
        engine, _ = start(SECTIONS[name], stage, world=world, ranks=2)
        losses = train(engine, 0, 4, world.rank, 2)
        return losses, models.everything(engine)

    one, other = [run_ranks(2, lambda world, s=stage: run(world, s)) for stage in (0, 3)]
    for (losses, state), (others, theirs) in zip(one, other, strict=True):
        assert losses == others
        names = [name for name in state if "x_min_max" not in name]  # each rank's own
        models.assert_same({n: state[n] for n in names}, {n: theirs[n] for n in names})


def test_training_equals_plain_torch():
    sections = SECTIONS["all"]
    engine, config = start(sections)
    losses = train(engine, 0, 4)
    model = models.make_model()
    torch.manual_seed(7)
    init_compression(model, config)
    schedule = CompressionSchedule(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.1)
    for number, expected in enumerate(losses):
        tokens, targets = models.batches(number + 1, 4)[number]
        loss = model(tokens, targets)
        # Another AdamW: a number beside a border between two levels may round to the other one.
        assert float(loss) == pytest.approx(expected, rel=1e-5 if number == 0 else 2e-3)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        # A score that forward did not use yet has no gradient; the engine takes zeros, which decay it alike.
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


@pytest.mark.parametrize("stage", [0, 3])
def test_a_trained_model_is_cleaned_from_a_snapshot_while_training_goes_on(stage):
    # The embedding is left out: its weight is the head's as well, and would be rounded for both.
    weights = part({"start_bits": 8, "target_bits": 4}, ["up"], quantize_weight_in_forward=True, schedule_offset=1)
    engine, config = start({**SECTIONS["all"], "weight_quantization": weights}, stage)
    train(engine, 0, 3)
    engine.eval()
    tokens, _ = models.batches(1, 4)[0]
    with torch.no_grad():
        expected = engine(tokens)
    engine.train()
    with pytest.raises(deeptide.ConfigError, match="redundancy_clean was given an engine"):
        redundancy_clean(engine, config)
    clean = redundancy_clean(engine.snapshot(), config)
    assert not any("scores" in name or "mask" in name for name in clean.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(clean(tokens), expected)
    train(engine, 3, 4)


def test_models_without_memory_get_the_same_masks():
    plain, _ = start(SECTIONS["static"], 3)
    deferred, _ = start(SECTIONS["static"], 3, deferred=True)
    assert train(plain, 0, 3) == train(deferred, 0, 3)
    models.assert_same(models.everything(plain), models.everything(deferred))


def test_engine_without_compression_has_none_of_it():
    engine = deeptide.initialize(model=models.make_model(), config=models.config(0))[0]
    assert engine._less_work is None and not compressed_layers(engine.module)


def test_a_configuration_and_a_model_that_do_not_fit_are_named():
    config = models.config(0, compression_training=SECTIONS["static"])
    with pytest.raises(deeptide.ConfigError, match="the model was not prepared; call"):
        deeptide.initialize(model=models.make_model(), config=config)
    model = init_compression(models.make_model(), config)
    with pytest.raises(deeptide.ConfigError, match="every technique is off, and init_compression prepared the model"):
        deeptide.initialize(model=model, config=models.config(0))
    with pytest.raises(deeptide.ConfigError, match="init_compression was given an engine; call it on the model"):
        init_compression(deeptide.initialize(model=models.make_model(), config=models.config(0))[0], config)
