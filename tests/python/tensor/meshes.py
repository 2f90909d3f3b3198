# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Models on meshes of stages, data ranks and ranks that share layers, beside the same models whole."""

import cut
import families
import models
import torch
import transformers

import deeptide

STEPS, GAS = 3, 3
ROLES = ("master", "exp_avg", "exp_avg_sq")
_SIZES = {
    **families._TOKENS,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 20,
    "max_position_embeddings": 16,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2, "head_dim": 4}
KINDS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**_GROUPED)),
    "llama-8": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**{**_GROUPED, "num_attention_heads": 4, "num_key_value_heads": 4})
    ),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(tie_word_embeddings=True, **_GROUPED)),
    "gpt2": families.FAMILIES["gpt2"],
    "bert": lambda: transformers.BertForMaskedLM(
        transformers.BertConfig(hidden_dropout_prob=0, attention_probs_dropout_prob=0, **_SIZES)
    ),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(num_local_experts=4, num_experts_per_tok=2, **{**_GROUPED, "intermediate_size": 32})
    ),
    "vit": families.FAMILIES["vit"],
    "t5": families.ENCODERS_AND_DECODERS["t5"],
    "plain": lambda: models.TinyModel(vocab=families.VOCABULARY, layers=5),
}


def make(kind, seed=3):
    return models.make_model(seed=seed, kind=KINDS[kind])


def config(kind, stage, pipeline=1, tensor=1, gas=GAS, **more):
    parallel = more.pop("parallel", {})
    settings = models.config(stage, gas=gas, micro=families.MICRO, **{"gradient_clipping": 0.0, **more})
    sizes = {name: size for name, size in (("pipeline", pipeline), ("tensor", tensor)) if size > 1}
    settings["parallel"] = {**sizes, **parallel}
    if kind == "plain" and tensor > 1:
        settings["tensor_parallel"] = {"partition_config": {"use_default_specs": False, "layer_specs": cut.SPECS}}
    return settings


def batches(kind, engine, steps, gas=GAS, begin=0):
    """Micro-batches `begin` steps on, of this rank's data."""
    given = families.batches(kind, engine.data_parallel_rank, engine.data_parallel_size, begin + steps, gas)
    return list(given)[begin * gas :]


def start(world, kind, settings, seed=3):
    return deeptide.initialize(model=make(kind, seed), config=settings, world=world)[0]


def states(engine):
    """{name/role: state} of this stage, slices joined."""
    return {f"{name}/{role}": value for role in ROLES for name, value in cut.whole(engine, role).items()}


def steps(engine, kind, count, gas=GAS, begin=0):
    """(losses, norms)."""
    given = iter(batches(kind, engine, count, gas, begin))
    losses, norms = [], []
    for _ in range(count):
        losses.append(engine.train_batch(given).item())
        norms.append(engine.get_global_grad_norm())
    return losses, norms


def train(world, kind, settings, gas=GAS):
    engine = start(world, kind, settings)
    losses, norms = steps(engine, kind, STEPS, gas)
    return losses, norms, states(engine), engine.mesh


def union(results):
    found = {}
    for result in results:
        found |= result
    return found


def compare(mesh, whole, kind, share=1e-5):
    """`share`: of the largest, by which sums in parts may differ."""
    for losses, norms, _, _ in mesh:
        assert losses == mesh[0][0], "all ranks agree in every bit"
        assert norms == mesh[0][1]
    cut.near(mesh[0][0], whole[0][0], share, "losses")
    cut.near(mesh[0][1], whole[0][1], 10 * share, "norms")
    found, expected = union(result[2] for result in mesh), whole[0][2]
    assert found.keys() == expected.keys()
    before = dict(make(kind).named_parameters())
    largest = {role: max(v.abs().max().item() for n, v in expected.items() if n.endswith(role)) for role in ROLES}
    for name, value in expected.items():
        of, role = name.rsplit("/", 1)
        if role == "master":
            cut.near(found[name] - before[of].float(), value - before[of].float(), 2000 * share, name, 1e-4)
        else:
            cut.near(found[name], value, 100 * share, name, floor=largest[role] / 1000)
    assert all(torch.isfinite(value).all() for value in found.values())
