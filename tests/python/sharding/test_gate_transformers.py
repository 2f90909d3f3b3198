# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Unchanged transformers models from small random configurations: losses, gradients, generation, recomputation."""

import os

import models
import pytest
import torch
from conftest import run_ranks
from gated import assert_same_gradients, engine_of, gradients_of

pytestmark = pytest.mark.apart

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

TOKENS = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(7))


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=32, n_embd=24, n_layer=3, n_head=3, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    return transformers.GPT2LMHeadModel(config)


def llama():
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    return transformers.LlamaForCausalLM(config)


def mixtral():
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=32,
        output_router_logits=True,  # the router's balance loss too
        # On a CPU with torch up to 2.10 Transformers' choice asks for a weight's address, which a sharded one has not.
        experts_implementation="grouped_mm" if torch.__version__ >= (2, 11) else "eager",
    )
    return transformers.MixtralForCausalLM(config)


def t5():
    config = transformers.T5Config(
        vocab_size=64,
        d_model=24,
        d_kv=8,
        d_ff=40,
        num_layers=2,
        num_heads=3,
        dropout_rate=0,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


BUILDS = {"gpt2": gpt2, "llama": llama, "mixtral": mixtral, "t5": t5}


def build(kind, recompute=None):
    def make():
        model = BUILDS[kind]()
        model.train()
        if recompute is not None:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": recompute})
        return model

    return make


def loss_of(model):
    return model(input_ids=TOKENS, labels=TOKENS).loss


def generate(model, **options):
    model.eval()
    with torch.no_grad():
        return model.generate(TOKENS[:, :4], max_new_tokens=6, pad_token_id=0, **options)


def plain_results(make):
    model = models.make_model(kind=make)
    texts = [generate(model), generate(model, num_beams=2), generate(model, use_cache=False)]
    model.train()
    loss = loss_of(model)
    loss.backward()
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    return texts, loss.detach(), gradients


def sharded_results(world, make):
    with engine_of(world, make) as engine:
        model = engine.module
        texts = [generate(model), generate(model, num_beams=2), generate(model, use_cache=False)]
        model.train()
        loss = loss_of(model)
        loss.backward()
        gradients = gradients_of(engine)
        assert engine.step().applied
        whole = sum(p.numel() * p.element_size() for p in model.parameters())
        assert 0 < engine._core.peak_gathered_bytes() < whole
        return texts, loss.detach(), gradients, loss_of(model).item()


@pytest.mark.parametrize("recompute", [None, False, True], ids=["stored", "recomputed", "recomputed reentrant"])
@pytest.mark.parametrize("kind", BUILDS)
def test_model_trains_and_generates_as_in_plain_torch(kind, recompute):
    make = build(kind, recompute)
    texts, loss, gradients = plain_results(make)
    for found_texts, found_loss, found_gradients, later in run_ranks(2, sharded_results, make):
        for found, expected in zip(found_texts, texts, strict=True):
            assert torch.equal(found, expected)
        assert torch.equal(found_loss, loss)
        assert_same_gradients(found_gradients, gradients)
        assert later < loss.item()


def test_ranks_generate_texts_of_different_lengths():
    """One rank stops early, the other goes on: it is served while the first waits in step()."""
    plain = models.make_model(kind=gpt2).eval()
    expected = [plain.generate(TOKENS[:1, :3], max_new_tokens=n, pad_token_id=0) for n in (2, 12)]

    def rank(world):
        with engine_of(world, gpt2) as engine:
            length = (2, 12)[world.rank]
            engine.module.eval()
            text = engine.module.generate(TOKENS[:1, :3], max_new_tokens=length, pad_token_id=0)
            engine.module.train()
            loss_of(engine.module).backward()
            assert engine.step().applied
            return text

    found = run_ranks(2, rank)
    # eos ends a text early on any rank
    assert [f.tolist() for f in found] == [e.tolist() for e in expected]


def test_saved_state_loads_into_a_plain_model(tmp_path):
    """module_state_dict feeds save_pretrained, whose own look at live parameters is raw access."""

    def rank(world):
        with engine_of(world, llama) as engine:
            state = engine.module_state_dict()
            if world.rank == 0:
                engine.module.save_pretrained(tmp_path, state_dict=dict(state))  # which it empties
            return state

    state = run_ranks(2, rank)[0]
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    for name, value in again.state_dict().items():
        assert torch.equal(value, state[name]), name
