# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The engine under DeepSpeed's names: training, accumulation, checkpoints, whole values."""

import gc
import json
import math
import re
import threading

import pytest
import torch
from conftest import run_ranks

import deeptide
from deeptide import utils

CONFIG = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
ACCUMULATE = {**CONFIG, "gradient_accumulation_steps": 3}


class Model(torch.nn.Module):
    """Has what engines trip over: a tied weight, a buffer that is saved and one that is not, an attribute."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Linear(4, 6, bias=False)
        self.decode = torch.nn.Linear(4, 6, bias=False)
        self.decode.weight = self.embed.weight
        self.head = torch.nn.Linear(6, 1)
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.flavour = "vanilla"

    def forward(self, x, flip=False):
        return self.head(self.embed(x) + self.decode(x)) * (-self.scale if flip else self.scale)


_seeding = threading.Lock()  # ranks as threads share one generator


def start(config=CONFIG, **arguments):
    with _seeding:
        model = Model()
    return deeptide.initialize(model=model, config=config, **arguments)[0]


def loss_of(engine, value=1.0):
    return engine(torch.full((2, 4), value)).square().mean()


def train(engine, steps=1):
    for step in range(steps):
        engine.backward(loss_of(engine, 1.0 / (step + 1)))
        outcome = engine.step()
    return outcome


def state_of(engine):
    return {name: tensor.clone() for name, tensor in engine.module_state_dict().items()}


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_calls_and_unknown_attributes_reach_the_model():
    engine = start()
    x = torch.ones(2, 4)
    assert torch.equal(engine(x, flip=True), -engine.forward(x))
    assert engine.flavour == "vanilla"
    assert len(list(engine.parameters())) == 3
    with pytest.raises(AttributeError, match=r"neither the engine nor its model \(Model\) has an attribute 'flavor'"):
        _ = engine.flavor
    assert engine.eval() is engine and not engine.module.training
    assert engine.train() is engine and engine.module.training


def test_getters_say_what_the_configuration_says():
    engine = start({**ACCUMULATE, "gradient_clipping": 0.5, "steps_per_print": 7, "zero_optimization": {"stage": 1}})
    assert engine.get_batch_info() == (6, 2, 3)
    assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (6, 2)
    assert engine.gradient_accumulation_steps() == 3
    assert engine.zero_optimization_stage() == 1 and engine.zero_optimization()
    assert not engine.bfloat16_enabled() and not engine.fp16_enabled()
    assert engine.gradient_clipping() == 0.5
    assert engine.steps_per_print() == 7
    assert engine.device == torch.device("cpu")
    assert engine.get_mom() == [(0.9, 0.999)]


@pytest.mark.costly
def test_counters_count_and_the_outcome_tells():
    engine = start()
    assert engine.get_global_grad_norm() is None and not engine.was_step_applied()
    outcome = train(engine, 2)
    assert outcome and outcome.applied and outcome.step == 2
    assert "step=2, applied" in repr(outcome)
    assert (engine.global_steps, engine.micro_steps, engine.skipped_steps, engine.global_samples) == (2, 2, 0, 4)
    assert engine.was_step_applied()
    assert engine.get_global_grad_norm() == outcome.grad_norm > 0


def test_accumulation_applies_at_the_boundary_only():
    engine = start(ACCUMULATE)
    before = state_of(engine)
    applied = []
    for _ in range(3):
        assert engine.is_gradient_accumulation_boundary() == (len(applied) == 2)
        engine.backward(loss_of(engine))
        assert same(before, state_of(engine))
        applied.append(bool(engine.step()))
    assert applied == [False, False, True]
    assert not same(before, state_of(engine))


def test_the_boundary_can_be_set_and_given_back():
    engine = start(ACCUMULATE)
    engine.set_gradient_accumulation_boundary(True)
    assert train(engine)
    engine.set_gradient_accumulation_boundary(None)
    assert not engine.is_gradient_accumulation_boundary()


def test_no_sync_holds_the_boundary_off():
    engine = start()
    with engine.no_sync():
        assert not engine.is_gradient_accumulation_boundary()
        with pytest.raises(RuntimeError, match="inside no_sync"), engine.no_sync():
            pass
        assert not engine.is_gradient_accumulation_boundary()
    assert engine.is_gradient_accumulation_boundary()


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("world_size", [1, 2])
def test_no_sync_adds_up_until_the_step_after_it(world_size, stage):
    plain = Model()
    for value in (1.0, 0.5):
        plain(torch.full((2, 4), value)).square().mean().backward()
    expected = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in plain.parameters()]))

    def run(world):
        engine = start({**CONFIG, "zero_optimization": {"stage": stage}}, world=world)
        with engine.no_sync():
            engine.backward(loss_of(engine, 1.0))
            assert not engine.step()
        engine.backward(loss_of(engine, 0.5))
        return engine.step().grad_norm

    for norm in run_ranks(world_size, run):
        assert norm == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_with_fewer_batches_join(stage):
    config = {**CONFIG, "zero_optimization": {"stage": stage}}
    config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 10}}

    def run(world):
        engine, optimizer, _, _ = deeptide.initialize(model=Model(), config=config, world=world)
        train(engine, 2 + 3 * world.rank)
        engine.join()
        return engine.global_steps, optimizer.param_groups[0]["lr"], state_of(engine)

    few, many = run_ranks(2, run)
    assert few[0] == many[0] == 5
    assert few[1] == many[1]
    assert same(few[2], many[2])


def test_no_sync_is_refused_if_gradients_are_sharded():
    engine = start({**CONFIG, "zero_optimization": {"stage": 2}})
    with pytest.raises(deeptide.ConfigError, match="stage 2 shards the gradients"), engine.no_sync():
        pass


def test_backward_returns_the_loss_over_the_accumulation_steps():
    engine = start(ACCUMULATE)
    loss = loss_of(engine)
    assert engine.backward(loss).item() == pytest.approx(loss.item() / 3)
    loss = loss_of(engine)
    assert engine.backward(loss, scale_wrt_gas=False).item() == pytest.approx(loss.item())


@pytest.mark.parametrize(("scaled", "factor"), [(True, 1.0), (False, 3.0)])
def test_gradients_are_averaged_over_the_accumulation_steps_unless_told_otherwise(scaled, factor):
    single, engine = start(), start(ACCUMULATE)
    single.backward(loss_of(single))
    expected = single.step().grad_norm
    for _ in range(3):
        engine.backward(loss_of(engine), scale_wrt_gas=scaled)
        outcome = engine.step()
    assert outcome.grad_norm == pytest.approx(factor * expected, rel=1e-5)


@pytest.mark.parametrize(
    ("loss", "error", "text"),
    [
        (lambda e: 3.0, TypeError, "got float, expected a scalar tensor"),
        (lambda e: e(torch.ones(2, 4)), ValueError, "scalar"),
        (lambda e: torch.tensor(1.0), ValueError, "grad"),
    ],
)
def test_a_loss_is_refused_if(loss, error, text):
    engine = start()
    with pytest.raises(error, match=text):
        engine.backward(loss(engine))


def test_step_before_backward_is_refused():
    with pytest.raises(ValueError, match=r"step\(\) before backward\(\)"):
        start().step()


def test_progress_is_printed_by_rank_0_each_steps_per_print(capfd):
    engine = start({**CONFIG, "steps_per_print": 2})
    train(engine, 4)
    lines = [line.split("] ")[1] for line in capfd.readouterr().err.splitlines() if " | norm " in line]
    assert [line.split(" | ")[0] for line in lines] == ["step 2", "step 4"]
    pattern = r"step \d \| loss \d\.\d+ \| lr 0\.01 \| norm [\d.]+ \| [\d.,]+ samples/s"
    assert all(re.fullmatch(pattern, line) for line in lines), lines


def test_nothing_is_printed_without_steps_per_print(capfd):
    train(start(), 3)
    assert " | norm " not in capfd.readouterr().err


def test_state_dict_holds_every_name_but_scratch_buffers():
    assert set(start().module_state_dict()) == {"embed.weight", "decode.weight", "head.weight", "head.bias", "scale"}


def test_checkpoint_gives_back_parameters_client_state_and_generators(tmp_path):
    engine = start()
    train(engine)
    client_state = {"epoch": 3, "names": ["a", "b"], "nested": {"best": 0.5, "none": None}}
    path = engine.save_checkpoint(tmp_path, tag=7, client_state=client_state)
    saved, numbers = state_of(engine), torch.rand(4)
    train(engine)
    found, state = engine.load_checkpoint(tmp_path)
    assert found == path and state == client_state
    assert same(saved, state_of(engine))
    assert torch.equal(torch.rand(4), numbers)


def test_checkpoint_gives_back_the_schedule_and_the_data_position(tmp_path):
    def fresh():
        data = torch.utils.data.TensorDataset(torch.arange(32.0))
        return deeptide.initialize(
            model=Model(),
            config=CONFIG,
            training_data=data,
            # Its state holds a Counter with integer keys: no JSON.
            lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], gamma=0.5),
        )

    engine, _, loader, scheduler = fresh()
    iterator = iter(loader)
    for _ in range(2):
        next(iterator)
        train(engine)
    engine.save_checkpoint(tmp_path)
    rest = [batch[0].tolist() for batch in iterator]
    other, _, loader, scheduler = fresh()
    other.load_checkpoint(tmp_path)
    assert [batch[0].tolist() for batch in loader] == rest
    assert scheduler.last_epoch == 2
    assert [train(other).lr for _ in range(3)] == [0.005, 0.0025, 0.0025]


def test_module_only_leaves_schedule_data_and_generators_alone(tmp_path):
    engine = start()
    engine.save_checkpoint(tmp_path)
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    engine.load_checkpoint(tmp_path, load_module_only=True)
    assert torch.equal(torch.rand(2), expected)


def test_loading_from_a_folder_without_checkpoint_gives_none(tmp_path):
    assert start().load_checkpoint(tmp_path) == (None, None)


def test_loading_a_tag_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(deeptide.CheckpointError):
        start().load_checkpoint(tmp_path, tag="nowhere")


@pytest.mark.parametrize(
    ("client_state", "text"),
    [
        ({"model": {"weights": torch.ones(2)}}, r"client_state\['model'\]\['weights'\]"),
        ({"history": [1.0, float("inf")]}, r"client_state\['history'\]\[1\]"),
        ({"by_epoch": {3: "x"}}, "key 3 is int, expected str"),
        ({"__deeptide__": 1}, "the engine's own"),
        ([1], "got list, expected a dict"),
    ],
)
def test_client_state_is_refused_if(tmp_path, client_state, text):
    with pytest.raises(deeptide.ConfigError, match=text):
        start().save_checkpoint(tmp_path, client_state=client_state)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["save_checkpoint", "load_checkpoint", "save_16bit_model"])
@pytest.mark.parametrize("directory", [None, ""])
def test_a_checkpoint_without_directory_is_refused(name, directory):
    with pytest.raises(ValueError, match="expected a directory"):
        getattr(start(), name)(directory)


@pytest.mark.parametrize(("stage", "gather", "saved"), [(0, None, True), (3, False, False), (3, None, True)])
def test_whole_model_is_written_as_safetensors_unless_the_key_says_false(tmp_path, stage, gather, saved):
    zero = {"stage": stage} if gather is None else {"stage": stage, "stage3_gather_16bit_weights_on_model_save": gather}
    engine = start({**CONFIG, "zero_optimization": zero})
    expected = state_of(engine)
    assert engine.save_16bit_model(tmp_path / "out") == saved
    if saved:
        assert same(read_safetensors(tmp_path / "out" / "model.safetensors"), expected)
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def read_safetensors(path):
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__")
    tensors = {}
    for name, entry in header.items():
        assert entry["dtype"] == "F32"
        begin, end = entry["data_offsets"]
        content = bytearray(data[8 + length + begin : 8 + length + end])
        tensors[name] = torch.frombuffer(content, dtype=torch.float32).reshape(entry["shape"])
    return tensors


def test_safetensors_are_all_or_nothing(tmp_path):
    engine = start()
    engine.module.register_buffer("phase", torch.ones(1, dtype=torch.cdouble))
    with pytest.raises(deeptide.CheckpointError, match=r"ComplexDouble|cannot"):
        engine.save_16bit_model(tmp_path)
    engine.module.phase = torch.ones(1)
    (tmp_path / "file").touch()
    with pytest.raises(deeptide.CheckpointError, match="cannot"):
        engine.save_16bit_model(tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_whole_values_are_found_by_parameter():
    engine = start()
    weight = engine.module.head.weight
    engine.backward(loss_of(engine))
    assert utils.safe_get_full_grad(weight).shape == (1, 6)
    train(engine)
    assert torch.equal(utils.safe_get_full_fp32_param(weight), engine.module_state_dict()["head.weight"])
    with pytest.raises(deeptide.ConfigError, match="got 'exp_average'"):
        utils.safe_get_full_optimizer_state(weight, "exp_average")
    with pytest.raises(deeptide.ConfigError, match=r"shape \(2, 3\) is no parameter of a living engine"):
        utils.safe_get_full_fp32_param(torch.ones(2, 3))


@pytest.mark.costly
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_whole_gradients_are_there_between_backward_and_step(world_size, stage):
    plain = Model()
    plain(torch.full((2, 4), 1.0)).square().mean().backward()

    def run(world):
        engine = start({**CONFIG, "zero_optimization": {"stage": stage}}, world=world)
        engine.backward(loss_of(engine))
        found = {name: utils.safe_get_full_grad(p) for name, p in engine.module.named_parameters()}
        assert engine.step()
        return found

    for found in run_ranks(world_size, run):
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad)


def test_whole_optimizer_states_are_found_by_parameter():
    engine = start()
    train(engine)
    weight = engine.module.head.weight
    for key in ("exp_avg", "exp_avg_sq"):
        state = utils.safe_get_full_optimizer_state(weight, key)
        assert state.shape == weight.shape and state.abs().sum() > 0


def test_memory_is_a_table_in_bytes():
    engine = start()
    train(engine)
    lines = engine.memory()
    assert any(line.role == "parameters" and line.predicted_bytes > 0 for line in lines)
    assert all(line.role in repr(line) for line in lines)
    assert engine.summary()


def test_a_destroyed_engine_says_so():
    engine = start()
    train(engine)
    engine.destroy()
    engine.destroy()
    with pytest.raises(RuntimeError, match="this engine was destroyed"):
        engine.step()


def test_the_engine_ends_with_its_last_reference():
    engine = start()
    parameter = engine.module.head.weight
    gc.disable()
    try:
        del engine
    finally:
        gc.enable()
    with pytest.raises(deeptide.ConfigError, match="living engine"):
        utils.safe_get_full_fp32_param(parameter)


def test_errors_of_the_users_own_autograd_function_arrive_as_they_are():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise KeyError("mine")

    engine = start()
    with pytest.raises(KeyError, match="mine"):
        engine.backward(Fails.apply(loss_of(engine)))


def test_ranks_as_threads_train_alike():
    def run(world):
        engine = start({**CONFIG, "zero_optimization": {"stage": 3}}, world=world)
        for step in range(3):
            engine.backward(loss_of(engine, 0.1 * (step + 2 * world.rank)))
            assert engine.step()
        state = state_of(engine)
        norm = engine.get_global_grad_norm()
        engine.destroy()
        return state, norm

    results = run_ranks(2, run)
    assert same(results[0][0], results[1][0])
    assert results[0][1] == results[1][1] and math.isfinite(results[0][1])
