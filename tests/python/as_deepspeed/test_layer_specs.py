# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Asks DeepSpeed's classes of layer_specs, and what it reads of a Transformers model, of the interface."""

import importlib
import re
import types

import pytest


@pytest.fixture
def specs():
    importlib.import_module("deeptide.as_deepspeed")
    return importlib.import_module("deepspeed.module_inject.autotp_config")


def test_a_plan_becomes_specs_that_find_its_weights(specs):
    from deepspeed.module_inject.tp_plan_converter import TPPlanConverter

    plan = {"layers.*.q_proj": "colwise", "layers.*.o_proj.weight": "rowwise", "lm_head": "colwise_rep"}
    q, o, head = TPPlanConverter.convert(plan)
    assert q.partition_type is head.partition_type is specs.PartitionType.COLUMN and head.gather_output
    assert o.partition_type is specs.PartitionType.ROW and (q.get_partition_dim(), o.get_partition_dim()) == (0, 1)
    assert q.matches("model.layers.10.q_proj.weight") and not q.matches("model.layers.10.k_proj.weight")
    assert re.match(o.patterns[0], "layers.0.o_proj.weight")
    assert TPPlanConverter.convert({}) is None
    with pytest.raises(ValueError, match="unsupported partition style: local_colwise"):
        TPPlanConverter.convert({"a": "local_colwise", "b": "rowwise"})


def test_a_section_becomes_an_object(specs):
    section = {"layer_specs": [{"patterns": [".*qkv"], "partition_type": "Column", "shape": [[4, 2, 2], -1]}]}
    config = specs.AutoTPConfig.from_dict({**section, "tp_size": 2, "other": 1})
    assert config.tp_size == 2 and config.layer_specs[0].shape == ((4, 2, 2), -1)
    assert config.find_matching_spec("h.qkv") is config.layer_specs[0] and config.find_matching_spec("h.out") is None
    one = specs.TPLayerSpec([".*"], model_types=["Llama"])
    assert one.matches("x", "llama") and not one.matches("x", "gpt") and not one.matches("x")


def test_a_models_plans_are_merged(specs):
    from deepspeed.runtime.tensor_parallel.config import _get_hf_tp_plan

    class Model:
        _tp_plan = {"lm_head": "colwise_rep"}  # noqa: RUF012

    model = Model()
    model.config = types.SimpleNamespace(base_model_tp_plan={"layers.*.q": "colwise"})
    model._tp_plan = {"model.layers.*.q": "colwise", "model.norm": "rowwise"}
    assert _get_hf_tp_plan(model) == {"layers.*.q": "colwise", "lm_head": "colwise_rep", "model.norm": "rowwise"}
    assert _get_hf_tp_plan(object()) is None


def test_a_process_group_of_one_under_a_launcher_of_more_is_an_error(specs):
    from deepspeed.runtime.zero.partition_parameters import _contradicting_single_rank_pg_error as check

    assert "WORLD_SIZE=8" in check(1, None, {"WORLD_SIZE": "8"}) and "init_distributed" in check(
        1, None, {"WORLD_SIZE": "2"}
    )
    for ranks, group, world in ((1, None, "1"), (1, None, None), (1, None, "x"), (8, None, "8"), (1, object(), "8")):
        assert check(ranks, group, {"WORLD_SIZE": world}) is None


def test_a_section_that_is_no_object_is_a_value_error(specs):
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    with pytest.raises(ValueError, match="offload_optimizer: got 'cpu', expected an object"):
        DeepSpeedZeroConfig(offload_optimizer="cpu")


def test_elastic_checkpoints_of_stage_3_are_called_deprecated(specs, monkeypatch):
    import deepspeed.utils
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    said = []
    monkeypatch.setattr(deepspeed.utils.logger, "warning", said.append)
    DeepSpeedZeroConfig(stage=2, elastic_checkpoint=True)
    assert not said
    DeepSpeedZeroConfig(stage=3, elastic_checkpoint=True)
    assert "elastic checkpointing is deprecated" in said[0]
