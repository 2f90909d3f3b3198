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


def start(sections, stage=0, dtype="fp32", world=None, ranks=1, deferred=False, **extra):
    if dtype == "fp16":
        # The first steps overflow, and are left out.
        extra["fp16"] = {"enabled": True, "initial_scale_power": 18, "hysteresis": 1, "loss_scale_window": 100}
    config = models.config(stage, bf16=dtype == "bf16", world=ranks, compression_training=sections, **extra)
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


def techniques_of(engine):
    """Tells what each layer does now: which techniques have begun, with how many bits."""
    return [list(layer._compression.all()) for layer in compressed_layers(engine.module)]


@pytest.mark.apart
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", SECTIONS)
def test_resumes_exactly(name, dtype, stage, tmp_path):
    """Two ranks, with a state of theirs at stages 1 to 3."""
    same_batches = name == "static"  # each rank's range is its own, and a checkpoint keeps the first one's

    def run(world):
        def go_on(engine, first, last):
            return train(engine, first, last, 0 if same_batches else world.rank, 1 if same_batches else 2)

        whole, _ = start(SECTIONS[name], stage, dtype, world, ranks=2)
        go_on(whole, 0, 4)
        whole.save_checkpoint(tmp_path)
        losses = go_on(whole, 4, 7)
        again, _ = start(SECTIONS[name], stage, dtype, world, ranks=2)
        again.load_checkpoint(tmp_path)
        assert go_on(again, 4, 7) == losses
        models.assert_same(models.everything(again), models.everything(whole))
        assert again._less_work.state_dict() == whole._less_work.state_dict()
        assert techniques_of(again) == techniques_of(whole)
        schedule = whole._less_work.compression
        assert schedule.training_steps == whole.global_steps - whole.skipped_steps, "steps that were applied count"
        assert (whole.skipped_steps > 0) == (dtype == "fp16")
        assert any(one.on for layer in techniques_of(whole) for one in layer)

    run_ranks(2, run)


@pytest.mark.parametrize("name", ["falling bits", "all"])
def test_a_rewind_takes_the_schedule_back(name):
    """Training goes on as if the steps since had not been."""

    def run(world, policy):
        engine, _ = start(SECTIONS[name], 2, world=world, ranks=2, deeptide=policy)
        losses = train(engine, 0, 3, world.rank, 2)
        if policy:
            assert engine._less_work.compression.training_steps == 3
            tokens, targets = (part.chunk(2)[world.rank] for part in models.batches(1, 4)[0])
            engine.backward(engine(tokens, targets) * float("nan"))
            assert engine.step().rewound_to == 2
            assert engine._less_work.compression.training_steps == 2
            losses[2:] = train(engine, 2, 3, world.rank, 2)
        losses += train(engine, 3, 6, world.rank, 2)
        return losses, models.everything(engine), engine._less_work.state_dict(), techniques_of(engine)

    returning = {"on_skipped": "rewind", "skipped_limit": 1, "rewind_interval": 2}
    returned = run_ranks(2, lambda world: run(world, returning))
    straight = run_ranks(2, lambda world: run(world, {}))
    for found, expected in zip(returned, straight, strict=True):
        assert found[0] == expected[0]
        models.assert_same(found[1], expected[1])
        assert found[2:] == expected[2:]


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


class OwnAdamW(torch.optim.AdamW):
    """Not torch's class, so that the engine does not step in its place."""


def adamw(parameters):
    return OwnAdamW(parameters, lr=1e-2, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.1)


@pytest.mark.parametrize("name", SECTIONS)
def test_training_equals_plain_torch(name):
    """Bit for bit, with torch's own optimizer in both."""
    config = models.config(0, compression_training=SECTIONS[name], gradient_clipping=0.0)
    del config["optimizer"]

    def prepared():
        model = models.make_model()
        with models._seeding:
            torch.manual_seed(7)
            return init_compression(model, config)

    compressed = prepared()
    engine = deeptide.initialize(model=compressed, config=config, optimizer=adamw(compressed.parameters()))[0]
    losses = train(engine, 0, 6)
    model = prepared()
    schedule = CompressionSchedule(model, config)
    optimizer = adamw(model.parameters())
    for number, expected in enumerate(losses):
        loss = model(*models.batches(number + 1, 4)[number])
        assert loss.item() == expected, number
        loss.backward()
        optimizer.step()  # leaves out scores that forward did not use yet: they have no gradient
        optimizer.zero_grad()
        schedule.step()
    models.assert_same(engine.module_state_dict(), model.state_dict())


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


@pytest.mark.both_ways
@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_that_began_with_other_weights_prune_what_the_first_one_does(stage):
    def masks(world):
        config = models.config(stage, world=2, compression_training={"sparse_pruning": SPARSE})
        model = init_compression(models.make_model(seed=world.rank), config)
        own = {name: value.clone() for name, value in model.named_buffers()}
        deeptide.initialize(model=model, config=config, world=world)
        return own, dict(model.named_buffers())

    (own, first), (theirs, second) = run_ranks(2, masks)
    assert any(not torch.equal(own[name], theirs[name]) for name in own)
    models.assert_same(first, own)
    models.assert_same(second, own)


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
