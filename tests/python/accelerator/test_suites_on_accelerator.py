# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Runs other files' tests on a simulated accelerator: gate, divergence, checkpoints, failures, skipped steps.

A test of theirs runs in every rank, a process here. What it gives to `run_ranks` runs once in each, with the model on
the device; results come back on the CPU, where the test compares them with plain torch's, bit for bit: a GPU has other
kernels.
"""

import gc
import importlib
import itertools
import os
import time

import conftest
import models
import pytest
import torch
import torch.distributed as dist
from accelerated import simulated_only
from conftest import run_processes
from torch.utils._pytree import tree_map_only

SCENARIOS = (
    "random_branch",
    "skipped_block",
    "several_losses",
    "backwards_in_different_number",
    "evaluation_in_between",
    "generation_in_between",
)

# By suite: the world, and (module, test, arguments). An argument "module.name" is that name's value; "<folder>" is a
# folder that the ranks share.
SUITES = {
    "divergence": (
        2,
        [
            *(
                ("test_divergence", "test_divergent_ranks_train_as_plain_torch", [stage, 2, f"test_divergence.{name}"])
                for stage, name in itertools.product((0, 3), SCENARIOS)
            ),
            ("test_divergence", "test_divergent_ranks_accumulate_as_plain_torch", [3, "test_divergence.random_branch"]),
            ("test_divergence", "test_joined_ranks_take_part_until_all_have_joined", [3, 2]),
            ("test_divergence", "test_joined_ranks_take_part_within_an_accumulation", [1]),
        ],
    ),
    "divergence of three": (
        3,
        [
            ("test_divergence", "test_a_small_budget_serves_divergent_ranks", [True]),
            ("test_divergence", "test_zero_grad_drops_gradients_in_different_number", [2, 2]),
        ],
    ),
    "gate": (
        2,
        [
            ("test_gate_modules", "test_gpt_gives_the_same_bits", [True, 2]),
            ("test_gate_modules", "test_parameter_used_outside_its_module", []),
            ("test_gate_modules", "test_unused_and_conditional_parameters", []),
            ("test_gate_autograd", "test_activation_checkpointing", [True]),
            ("test_gate_autograd", "test_activation_checkpointing", [False]),
            ("test_gate_autograd", "test_autograd_grad_of_inputs", []),
            ("test_gate_autograd", "test_double_backward_through_parameters", []),
            ("test_gate_autograd", "test_custom_function", []),
        ],
    ),
    "checkpoints": (
        2,
        [
            ("test_checkpoint", "test_another_world_and_stage_load_the_same_values", [0, 2, 3, True, "<folder>"]),
            ("test_checkpoint", "test_another_world_and_stage_load_the_same_values", [3, 2, 1, False, "<folder>"]),
            ("test_checkpoint", "test_each_rank_gets_its_own_buffers_back", [3, "<folder>"]),
        ],
    ),
    "states of 16 bits": (
        2,
        [
            *(
                ("test_packed_states", "test_packed_masters_change_no_number", [type, stage, 2])
                for type, stage in (("AdamW", 0), ("AdamW", 3), ("Adagrad", 1), ("Muon", 2), ("OneBitAdam", 0))
            ),
            ("test_packed_states", "test_a_rewind_brings_back_all_bits", []),
            *(
                ("test_packed_states", test, [*arguments, stage])
                for stage in (1, 3)
                for test, arguments in (
                    ("test_a_written_parameter_is_its_master_to_the_last_bit", ["test_packed_states.write_in_place"]),
                    ("test_states_take_two_bytes_less_as_the_plan_says", []),
                )
            ),
        ],
    ),
    "failures": (
        2,
        [
            ("test_failures", "test_an_exception_in_forward_on_one_rank_ends_the_others", [stage, 2, 1])
            for stage in (0, 1, 2, 3)
        ],
    ),
}
SUITES["gradients that leave"] = (
    2,
    [
        *(
            ("test_divergence", "test_divergent_ranks_train_as_plain_torch", [stage, 2, f"test_divergence.{name}"])
            for stage, name in ((3, "skipped_block"), (1, "several_losses"), (2, "backwards_in_different_number"))
        ),
        ("test_divergence", "test_divergent_ranks_accumulate_as_plain_torch", [3, "test_divergence.random_branch"]),
        ("test_divergence", "test_joined_ranks_take_part_until_all_have_joined", [3, 2]),
        ("test_divergence", "test_joined_ranks_take_part_within_an_accumulation", [1]),
        ("test_failures", "test_an_exception_in_forward_on_one_rank_ends_the_others", [2, 2, 1]),
    ],
)
SLOW = ("divergence", "states of 16 bits")


def offload_optimizer():
    """From now on models' configurations ask for it."""
    config = models.config

    def offloaded(*args, zero=None, **settings):
        return config(*args, zero={"offload_optimizer": {"device": "cpu"}, **(zero or {})}, **settings)

    models.config = offloaded


def run_ranks(size, function, *args, timeout=None):
    """Runs ranks like conftest's, but each process is one of the ranks, and every one gets the results of all."""
    from deeptide._process.world import find_world

    assert size == dist.get_world_size()
    world, groups = find_world(None, torch.device("sim"))
    models.DEVICE = "sim"
    try:
        result = function(world, *args)
        result = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), result)
    finally:
        models.DEVICE = "cpu"
        del world
        for group in groups:
            dist.destroy_process_group(group)
        gc.collect()
    results = [None] * size
    dist.all_gather_object(results, result)
    return results


def value_of(argument, folder):
    if argument == "<folder>":
        return folder
    if isinstance(argument, str) and "." in argument:
        module, _, name = argument.partition(".")
        return getattr(importlib.import_module(module), name)
    return argument


def run_suite(name, folder):
    os.environ["DEEPTIDE_TEST_APART"] = "1"
    import simulated

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    conftest.run_ranks = run_ranks  # before the tests' modules take it
    if name == "gradients that leave":
        offload_optimizer()
    for number, (module, test, arguments) in enumerate(SUITES[name][1]):
        begin = time.monotonic()
        schedule = ("random", "late_default", "late_others")[number % 3]
        connections = (1, 0, 2)[(number + number // 3) % 3]  # queues of the hardware for all streams
        simulated.configure(schedule, max_delay_us=500, seed=number, connections=connections)
        before, tasks = simulated.used_bytes(), simulated.tasks()
        own = f"{folder}/{number}"
        os.makedirs(own, exist_ok=True)
        getattr(importlib.import_module(module), test)(*(value_of(argument, own) for argument in arguments))
        assert simulated.settle() == "", (test, arguments)
        gc.collect()
        assert simulated.used_bytes() == before, (test, arguments)
        assert simulated.tasks() > tasks + 50  # it ran there
        print(f"{test} {arguments} {schedule}: {time.monotonic() - begin:.1f} s")
    dist.destroy_process_group()


@pytest.mark.costly
@simulated_only
@pytest.mark.parametrize(
    "suite", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in SUITES]
)
def test_what_holds_on_a_cpu_holds_on_an_accelerator(suite, tmp_path):
    preload = ("torch._dynamo",)
    done = run_processes(SUITES[suite][0], run_suite, suite, str(tmp_path), preload=preload)
    print(done[0].stdout)
