# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Models as they are, of whose positions each rank has a part between the layers that ranks share."""

import cut
import models
import pytest
import torch
from conftest import run_ranks

import deeptide

transformers = pytest.importorskip("transformers")

VOCAB, LENGTH, MICRO, STEPS = 61, 8, 2, 3
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_LLAMA = {**_SIZES, "num_key_value_heads": 4, "head_dim": 8, "bos_token_id": 1, "eos_token_id": 2}
_NO_DROPOUT = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
_GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "bos_token_id": 1}
_T5 = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4, "dropout_rate": 0.0}
KINDS = {
    "gpt2": ("GPT2", "LMHeadModel", {**_GPT2, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}),
    "llama": ("Llama", "ForCausalLM", _LLAMA),
    "qwen3": ("Qwen3", "ForCausalLM", {**_LLAMA, "tie_word_embeddings": True}),
    "mistral": ("Mistral", "ForCausalLM", _LLAMA),
    "bert": ("Bert", "ForMaskedLM", {**_SIZES, **_NO_DROPOUT}),
    "mixtral": ("Mixtral", "ForCausalLM", {**_LLAMA, "num_local_experts": 4, "output_router_logits": True}),
    "qwen2-moe": (
        "Qwen2Moe",
        "ForCausalLM",
        {**_LLAMA, "num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    ),
    "deepseek_v2": (
        "DeepseekV2",
        "ForCausalLM",
        {
            **_LLAMA,
            "kv_lora_rank": 8,
            "q_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 8,
            "first_k_dense_replace": 3,
        },
    ),
    "gpt_neox": ("GPTNeoX", "ForCausalLM", {**_SIZES, "attention_dropout": 0.0, "hidden_dropout": 0.0}),
    "t5": ("T5", "ForConditionalGeneration", {**_T5, "decoder_start_token_id": 0}),
}


def make(kind):
    name, suffix, sizes = KINDS[kind]
    config = getattr(transformers, f"{name}Config")(**sizes)
    return models.make_model(kind=lambda: getattr(transformers, f"{name}{suffix}")(config))


def parallel(tensor, **more):
    return {"parallel": {"tensor": tensor, "sequence_parallel_norms": True, **more}}


def train(world, kind, settings, recompute=False):
    model = make(kind)
    engine = deeptide.initialize(model=model, config=settings, world=world)[0]
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    rank, ranks = cut.batch_rank(engine)
    losses, norms, gradients = [], [], {}
    for tokens, _ in models.batches(STEPS, MICRO * ranks, vocab=VOCAB, length=LENGTH):
        mine = tokens[rank * MICRO : (rank + 1) * MICRO]
        loss = engine(input_ids=mine, labels=mine).loss
        losses.append(loss.item())
        engine.backward(loss)
        gradients = gradients or cut.whole(engine, "gradient")
        engine.step()
        norms.append(engine.get_global_grad_norm())
    return losses, norms, engine.module_state_dict(), gradients


def compare(shared, whole, kind, share=1e-5):
    """`share`: of the largest, by which losses may differ. Adam divides small gradients by themselves."""
    assert all(result[0] == shared[0][0] for result in shared), "all ranks agree in every bit"
    cut.near(shared[0][0], whole[0], share, "losses")
    cut.near(shared[0][1], whole[1], 10 * share, "norms")
    assert shared[0][3].keys() == whole[3].keys()
    largest = max(gradient.abs().max().item() for gradient in whole[3].values())
    for name, gradient in whole[3].items():
        cut.near(shared[0][3][name], gradient, 10 * share, name, floor=largest / 1000)
    before = make(kind).state_dict()
    assert shared[0][2].keys() == whole[2].keys()
    for name, value in whole[2].items():
        if value.is_floating_point() and not torch.equal(value, before[name]):
            cut.near(cut.moved(name, before, shared[0][2]), cut.moved(name, before, whole[2]), 2e-2, name, 1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ranks", "stage"), [(2, 0), (4, 3)])
def test_a_model_trains_as_the_whole_one(kind, ranks, stage):
    settings = models.config(stage, micro=MICRO)
    shared = run_ranks(ranks, train, kind, {**settings, **parallel(ranks)})
    compare(shared, run_ranks(1, train, kind, settings)[0], kind)
