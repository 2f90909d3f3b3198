# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""PEFT's LoRA on layers that ranks share trains as on whole ones."""

import cut
import models
import pytest
import torch
from conftest import run_ranks

import deeptide

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

VOCAB, LENGTH, MICRO, STEPS = 61, 8, 2, 4
_LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_BERT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
KINDS = {
    "llama, by its plan": ("LlamaForCausalLM", _LLAMA, ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]),
    "bert, by rule": ("BertForMaskedLM", _BERT, ["query", "value", "dense"]),
    "the head too": ("LlamaForCausalLM", _LLAMA, ["k_proj", "lm_head"]),
}


def make(kind, **more):
    name, sizes, targets = KINDS[kind]
    cls = getattr(transformers, name)

    def build():
        model = cls(cls.config_class(**sizes))
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False, **more)
        return peft.get_peft_model(model, config)

    return models.make_model(kind=build)


def train(world, kind, stage, axis, by_parts=False, saved=None):
    parallel = {"parallel": {axis: 2, "sequence_parallel_norms": by_parts}} if axis else {}
    settings = {**models.config(stage, micro=MICRO), **parallel}
    engine = deeptide.initialize(model=make(kind, modules_to_save=saved), config=settings, world=world)[0]
    rank, ranks = cut.batch_rank(engine) if axis != "pipeline" else (0, 1)
    losses, norms = [], []
    for tokens, _ in models.batches(STEPS, MICRO * ranks, vocab=VOCAB, length=LENGTH):
        mine = tokens[rank * MICRO : (rank + 1) * MICRO]
        loss = engine(input_ids=mine, labels=mine).loss
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
        norms.append(engine.get_global_grad_norm())
    return losses, norms, engine.module_state_dict()


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("by_parts", [False, True])
def test_lora_trains_as_on_the_whole_model(kind, stage, by_parts):
    whole = run_ranks(1, train, kind, stage, None)[0]
    shared = run_ranks(2, train, kind, stage, "tensor", by_parts)
    assert shared[0][0] == shared[1][0]
    cut.near(shared[0][0], whole[0], 1e-5, "losses")
    cut.near(shared[0][1], whole[1], 1e-4, "norms")
    before = make(kind).state_dict()
    trained = [name for name in before if "lora_" in name]
    assert trained
    for name, value in whole[2].items():
        assert shared[0][2][name].shape == value.shape
        if name not in trained:
            assert torch.equal(shared[0][2][name], before[name])
            continue
        assert not torch.equal(value, before[name])
        cut.near(cut.moved(name, before, shared[0][2]), cut.moved(name, before, whole[2]), 2e-2, name, 1e-4)


@pytest.mark.parametrize("saved", ["lm_head", "embed_tokens"])
def test_modules_to_save_are_cut_beside_their_originals_and_train_as_whole_ones(saved):
    kind = "llama, by its plan"
    whole = run_ranks(1, train, kind, 0, None, False, [saved])[0]
    shared = run_ranks(2, train, kind, 0, "tensor", False, [saved])
    cut.near(shared[0][0], whole[0], 1e-5, "losses")
    before = make(kind, modules_to_save=[saved]).state_dict()
    (name,) = (name for name in before if name.endswith(f"{saved}.modules_to_save.default.weight"))
    assert not torch.equal(whole[2][name], before[name])
    cut.near(cut.moved(name, before, shared[0][2]), cut.moved(name, before, whole[2]), 2e-2, name, 1e-4)


def test_other_adapters_are_refused_by_name():
    def rank(world):
        settings = {**models.config(0, micro=MICRO), "parallel": {"tensor": 2}}
        with pytest.raises(deeptide.ConfigError, match=r"q_proj' is cut among ranks and has an adapter"):
            deeptide.initialize(model=make("llama, by its plan", use_dora=True), config=settings, world=world)

    run_ranks(2, rank)
