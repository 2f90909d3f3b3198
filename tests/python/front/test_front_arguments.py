# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Gives initialize what a caller may give, and looks at the errors for what he may not."""

import argparse
import base64
import json
import os
import subprocess
import sys

import pytest
import torch
from conftest import run_processes, run_ranks

import deeptide

CONFIG = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def initialize(**arguments):
    return deeptide.initialize(**{"model": model(), "config": CONFIG, **arguments})


def test_config_shows_its_schedule_under_the_names_of_the_text():
    params = {"cycle_min_lr": 0.25, "cycle_max_lr": 1, "cycle_first_step_size": 7, "cycle_momentum": False}
    text = json.dumps({"scheduler": {"type": "OneCycle", "params": params}})
    schedule = deeptide.Config.from_text(text).scheduler
    assert schedule.type == "OneCycle"
    assert schedule.params["cycle_min_lr"] == 0.25
    assert schedule.params["cycle_second_step_size"] == 7.0
    assert schedule.params["cycle_momentum"] == 0.0
    assert len(schedule.params) == 12
    assert schedule.names == {}
    warmup = deeptide.Config.from_text('{"scheduler": {"type": "WarmupLR"}}').scheduler
    assert warmup.params == {"warmup_min_lr": 0.0, "warmup_num_steps": 1000.0}
    assert warmup.names == {"warmup_type": "log"}
    assert deeptide.Config.from_text("{}").scheduler.type == ""
    without = deeptide.Config.from_text(text).without_scheduler()
    assert without.scheduler.type == ""
    assert without.text == text


def test_config_sections_keep_their_values_and_refuse_writing():
    config = deeptide.Config.from_text(
        json.dumps({"bf16": {"enabled": True}, "gradient_clipping": 0.5, "steps_per_print": 3, "zero": {"stage": 2}})
    )
    assert (config.bf16, config.fp16, config.gradient_clipping, config.steps_per_print) == (True, False, 0.5, 3)
    assert (config.zero.stage, config.dataloader_drop_last, config.runtime.seed) == (2, False, 0)
    with pytest.raises(AttributeError):
        config.zero.stage = 3
    with pytest.raises(AttributeError):
        config.gradient_clipping = 1.0


@pytest.mark.costly
def test_import_loads_no_torch_and_starts_no_thread():
    code = (
        "import sys, threading, deeptide; assert 'torch' not in sys.modules; assert deeptide.__version__;"
        "assert threading.active_count() == 1; import deeptide.engine, torch; assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_every_exported_name_is_there():
    for name in deeptide.__all__:
        assert getattr(deeptide, name) is not None, name
    with pytest.raises(AttributeError, match="no attribute 'initialise'"):
        _ = deeptide.initialise


def test_errors_are_valueerror_and_runtimeerror():
    assert issubclass(deeptide.ConfigError, ValueError)
    assert issubclass(deeptide.CommError, RuntimeError)
    assert issubclass(deeptide.CheckpointError, RuntimeError)


@pytest.mark.parametrize(("wrong", "text"), [(None, "requires a model"), (3, "got int, expected a torch.nn.Module")])
def test_model_is_refused_if_it_is_none_or_no_module(wrong, text):
    with pytest.raises(deeptide.ConfigError, match=text):
        deeptide.initialize(model=wrong, config=CONFIG)


@pytest.mark.parametrize(
    ("name", "text"),
    [("mpu", r"expected an object as Megatron's mpu"), ("mesh_param", "mesh_param is not supported yet")],
)
def test_parallelism_that_is_not_understood_is_refused_by_name(name, text):
    with pytest.raises(deeptide.ConfigError, match=text):
        initialize(**{name: object()})


def test_config_is_read_from_path_dict_base64_and_config(tmp_path):
    text = json.dumps(CONFIG)
    path = tmp_path / "ds_config.json"
    path.write_text(text)
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    for config in (path, str(path), CONFIG, encoded, deeptide.Config.from_text(text)):
        engine, _, _, _ = initialize(config=config)
        assert engine.get_lr() == [0.01]
    assert initialize(config=CONFIG)[0].config.origin == "<dict>"
    assert initialize(config=None, config_params=CONFIG)[0].get_lr() == [0.01]


HOLDS_ITSELF = {}
HOLDS_ITSELF["params"] = HOLDS_ITSELF


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"config": None}, "no configuration"),
        ({"config": "no/such/file.json"}, "no such file"),
        ({"config": 7}, "got int, expected a path"),
        ({"config_params": CONFIG}, "both config and config_params"),
        ({"args": argparse.Namespace(deepspeed_config="x.json")}, "Not sure how to proceed"),
        ({"config": {"optimizer": {"type": object}}}, "config key 'optimizer.type': Object of type type is not JSON"),
        ({"config": {"optimizer": {"params": {"betas": [0.9, float("inf")]}}}}, "'optimizer.params.betas.1': got inf"),
        ({"config": {"optimizer": HOLDS_ITSELF}}, "Circular reference"),
        ({"config": {"gradient_clipping": float("nan")}}, "config key 'gradient_clipping'"),
        ({"config": {**CONFIG, "train_batch_sizes": 4}}, "train_batch_sizes"),
    ],
)
def test_config_is_refused_if(arguments, text):
    with pytest.raises(deeptide.ConfigError, match=text):
        initialize(**arguments)


def test_a_malformed_file_is_named(tmp_path):
    path = tmp_path / "broken.json"
    path.write_text('{"train_batch_size": ')
    with pytest.raises(deeptide.ConfigError, match=r"broken.json"):
        initialize(config=path)


def test_config_comes_from_args_under_both_spellings(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(CONFIG))
    parser = deeptide.add_config_arguments(argparse.ArgumentParser())
    for option in ("--deepspeed_config", "--deepscale_config"):
        args = parser.parse_args(["--deepspeed", option, str(path)])
        assert args.deepspeed
        assert initialize(args=args, config=None)[0].config.origin == str(path)
    both = parser.parse_args(["--deepspeed_config", "a", "--deepscale_config", "b"])
    with pytest.raises(deeptide.ConfigError, match="old spelling"):
        initialize(args=both, config=None)


def test_world_is_refused_if_it_is_something_else():
    with pytest.raises(deeptide.ConfigError, match="world: got int"):
        initialize(world=2)


def test_uninitialised_distributed_is_refused_if_the_caller_said_it_is_initialised():
    with pytest.raises(deeptide.ConfigError, match="dist_init_required is false"):
        initialize(dist_init_required=False)


def test_without_a_launcher_the_world_is_one():
    engine, _, _, _ = initialize()
    assert (engine.world_size, engine.global_rank, engine.local_rank) == (1, 0, 0)


def test_threads_are_ranks_of_the_world_given():
    assert run_ranks(3, lambda world: (world.rank, world.size)) == [(0, 3), (1, 3), (2, 3)]


def test_a_failing_rank_is_named():
    def fail_on_one(world):
        if world.rank == 1:
            raise KeyError("lost")

    with pytest.raises(KeyError) as caught:
        run_ranks(2, fail_on_one)
    assert any("rank 1 of 2" in note for note in caught.value.__notes__)


def train_in_a_process(steps):
    engine, _optimizer, _loader, _scheduler = initialize()
    for step in range(steps):
        engine.backward(engine(torch.full((2, 4), 0.1 * (step + engine.global_rank))).square().mean())
        assert engine.step()
    total = sum(p.double().sum().item() for p in engine.module_state_dict().values())
    print(json.dumps([engine.global_rank, engine.world_size, engine.world.source, total]))
    engine.destroy()


@pytest.mark.costly
def test_processes_with_torchruns_variables_train_as_one_world():
    outputs = [json.loads(done.stdout.splitlines()[-1]) for done in run_processes(2, train_in_a_process, 3, fresh=True)]
    assert [output[:3] for output in outputs] == [[0, 2, "torch.distributed"], [1, 2, "torch.distributed"]]
    assert outputs[0][3] == outputs[1][3]


TRAIN_SCRIPT = """
import deeptide, json, sys, torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
data = torch.utils.data.TensorDataset(torch.arange(64.0).reshape(16, 4))
engine, optimizer, loader, scheduler = deeptide.initialize(model=model, config=sys.argv[1], training_data=data)
for (batch,) in loader:
    engine.backward(engine(batch).square().mean())
    engine.step()
with open(f"{sys.argv[2]}/{engine.global_rank}", "w") as file:
    json.dump([engine.world_size, engine.local_rank, engine.global_steps, engine.get_global_grad_norm()], file)
"""


@pytest.mark.costly
def test_torchrun_starts_a_script_that_knows_nothing_of_it(tmp_path):
    script, config, out = tmp_path / "train.py", tmp_path / "ds_config.json", tmp_path / "out"
    script.write_text(TRAIN_SCRIPT)
    config.write_text(json.dumps(CONFIG))
    out.mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}  # torchrun leaves a folder there
    subprocess.run([*torchrun, script, config, out], check=True, timeout=240, env=environment)
    first, second = (json.loads((out / str(rank)).read_text()) for rank in range(2))
    assert first[:3] == [2, 0, 4] and second[:3] == [2, 1, 4]
    assert first[3] == second[3] > 0


def train_beside_a_group_of_the_users_own():
    torch.distributed.init_process_group("gloo")
    train_in_a_process(1)
    torch.distributed.barrier()


def test_a_group_that_the_user_made_is_used_and_left_alive():
    run_processes(2, train_beside_a_group_of_the_users_own)


def test_two_engines_of_one_process_do_not_meet():
    run_processes(2, train_two_engines)


def train_two_engines():
    engines = [initialize()[0] for _ in range(2)]
    for engine in reversed(engines):
        engine.backward(engine(torch.ones(2, 4)).square().mean())
        engine.step()
    for engine in engines:
        engine.destroy()


def use_a_group_by_name():
    torch.distributed.init_process_group("gloo")
    world = deeptide.make_world(torch.distributed.HashStore(), 0, 1)
    world.use_group(torch.distributed.new_group().group_name, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="nobody"):
        world.use_group("nobody", torch.device("cpu"))


def test_a_worlds_backend_is_found_by_its_groups_name():
    run_processes(1, use_a_group_by_name)
