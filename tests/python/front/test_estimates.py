# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's estimates of model states: the tables of its documentation, and models counted as it counts them."""

import pytest
import torch
from torch import nn

import deeptide
from deeptide import zero

# https://deepspeed.readthedocs.io/en/latest/memory.html: 2851e6 parameters, 32e6 in the largest layer, 8 GPUs.
STAGE_2 = """\
Estimated memory needed for params, optim states and gradients for a:
HW: Setup with 1 node, 8 GPUs per node.
SW: Model with 2851M total params.
  per CPU  |  per GPU |   Options
  127.45GB |   5.31GB | offload_optimizer=cpu 
  127.45GB |  11.28GB | offload_optimizer=none
"""
STAGE_3 = """\
Estimated memory needed for params, optim states and gradients for a:
HW: Setup with 1 node, 8 GPUs per node.
SW: Model with 2851M total params, 32M largest layer params.
  per CPU  |  per GPU |   Options
   71.69GB |   0.12GB | offload_param=cpu , offload_optimizer=cpu , zero_init=1
  127.45GB |   0.12GB | offload_param=cpu , offload_optimizer=cpu , zero_init=0
   63.72GB |   0.78GB | offload_param=none, offload_optimizer=cpu , zero_init=1
  127.45GB |   0.78GB | offload_param=none, offload_optimizer=cpu , zero_init=0
    1.43GB |   6.09GB | offload_param=none, offload_optimizer=none, zero_init=1
  127.45GB |   6.09GB | offload_param=none, offload_optimizer=none, zero_init=0
"""


def test_the_tables_are_those_of_the_documentation(capsys):
    zero.estimate_zero2_model_states_mem_needs_all_cold(2851e6, num_gpus_per_node=8, num_nodes=1)
    assert capsys.readouterr().out == STAGE_2
    zero.estimate_zero3_model_states_mem_needs_all_cold(2851e6, 32e6, num_gpus_per_node=8, num_nodes=1)
    assert capsys.readouterr().out == STAGE_3


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((1000, 2, 3, True, 1.5), (36000, 2000)),  # 6 ranks: 24 bytes, above 16
        ((1000, 2, 3, False, 2.0), (16000, 5000)),
    ],
)
def test_stage_2_by_its_formula(arguments, expected):
    assert zero.estimate_zero2_model_states_mem_needs(*arguments) == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((1000, 100, 2, 3, True, True, True), (9000, 400, 400)),
        ((1000, 100, 2, 3, True, True, False), (12000, 400, 400)),  # two copies per node: 8 bytes, above 6
        ((1000, 100, 2, 3, True, False, True), (8000, 733, 400)),
        ((1000, 100, 2, 3, False, False, True), (1200, 3400, 400)),
        ((1000, 100, 2, 3, False, False, False), (12000, 3400, 400)),
    ],
)
def test_stage_3_by_its_formula(arguments, expected):
    assert zero.estimate_zero3_model_states_mem_needs(*arguments) == expected


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(3000, 1000)
        self.middle = nn.Linear(1000, 1000)
        self.head = nn.Linear(1000, 3000, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("deferred", [False, True])
def test_a_model_is_counted_with_shared_parameters_once(deferred, capsys):
    with deeptide.zero.Init(enabled=deferred), torch.no_grad():
        model = Tied()
    zero.estimate_zero3_model_states_mem_needs_all_live(model, num_gpus_per_node=1, num_nodes=2)
    out = capsys.readouterr().out
    assert "HW: Setup with 2 nodes, 1 GPU per node." in out
    assert "SW: Model with 4M total params, 3M largest layer params." in out
    zero.estimate_zero2_model_states_mem_needs_all_live(model)
    assert "SW: Model with 4M total params." in capsys.readouterr().out
