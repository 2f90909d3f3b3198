# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Block-sparse attention: DeepSpeed's layouts bit for bit, dense attention with masked scores, Transformers' models."""

import hashlib
import json
import math
import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

import deeptide
from deeptide.ops import sparse_attention as sparse

# Rows of [class, arguments, sequence length, seed of `random`, digest of the layout or the error's type], made by the
# code of DeepSpeed 0.16.9, the last that this was compared with; newer releases have no sparse attention.
LAYOUTS = json.loads(Path(__file__).with_name("sparse_layouts.json").read_text())


@pytest.mark.parametrize("first", range(0, len(LAYOUTS), 40))
def test_layouts_are_deepspeeds_bit_for_bit(first):
    for kind, arguments, length, seed, expected in LAYOUTS[first : first + 40]:
        random.seed(seed)
        try:
            layout = getattr(sparse, kind)(**arguments).make_layout(length)
            found = hashlib.sha256(layout.numpy().tobytes()).hexdigest()[:24]
        except ValueError:
            found = "ValueError"
        assert found == expected, (kind, arguments, length)


def test_unknown_attention_is_not_implemented_as_in_deepspeed():
    with pytest.raises(NotImplementedError, match="attention is 'sideways'"):
        sparse.FixedSparsityConfig(num_heads=2, attention="sideways")


def attends(layout, block):
    return layout.repeat_interleave(block, 1).repeat_interleave(block, 2).bool()


def dense(query, key, value, allowed, terms=0.0):
    scores = query @ key.transpose(2, 3) / math.sqrt(query.size(-1)) + terms
    soft = torch.softmax(scores.masked_fill(~allowed, -math.inf), -1)
    return torch.nan_to_num(soft, 0.0) @ value


# Relative to the largest value: sums of 64 products in fp32; 8 and 11 bits in bf16 and fp16, rounded four times.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 4e-2, torch.float16: 5e-3}


def close(got, expected, dtype):
    limit = TOLERANCE[dtype] * max(0.1, float(expected.detach().abs().max()))
    assert float((got.detach().double() - expected.detach()).abs().max()) <= limit


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("masks", ["none", "padding", "attention", "both", "rpe", "causal"])
@pytest.mark.parametrize("per_head", [False, True])
def test_values_and_gradients_are_those_of_dense_attention(dtype, masks, per_head):
    torch.manual_seed(3)
    batch, heads, length, width, block = 2, 4, 80, 8, 16
    config = sparse.FixedSparsityConfig(
        heads, block, per_head, num_local_blocks=2, num_different_global_patterns=2 if per_head else 1
    )
    layout = config.make_layout(length)
    mine = [torch.randn(batch, heads, length, width).to(dtype).requires_grad_() for _ in range(3)]
    rpe = torch.randn(heads, length, length).to(dtype).requires_grad_()
    exact = [x.detach().double().requires_grad_() for x in (*mine, rpe)]
    allowed, terms, options = attends(layout, block).expand(batch, -1, -1, -1), 0.0, {}
    if masks in ("padding", "both"):
        padding = torch.randn(batch, length)
        terms, options["key_padding_mask"] = terms + padding.double()[:, None, None], padding
    if masks in ("attention", "both"):
        mask = (torch.rand(length, length) > 0.3).long()
        mask[5] = 0  # a row that attends to nothing
        allowed, options["attn_mask"] = allowed & mask.bool(), mask
    if masks == "rpe":
        terms, options["rpe"] = exact[3], rpe
    if masks == "causal":
        allowed, options["causal"] = allowed & torch.ones(length, length).tril().bool(), True
    got = sparse.sparse_attention(*mine, layout, block, **options)
    expected = dense(*exact[:3], allowed, terms)
    assert got.dtype == dtype
    close(got, expected, dtype)
    weight = torch.randn_like(expected)
    (got * weight.to(dtype)).sum().backward()
    (expected * weight.to(dtype).double()).sum().backward()
    used = 4 if masks == "rpe" else 3
    for x, y in list(zip([*mine, rpe], exact, strict=True))[:used]:
        close(x.grad, y.grad, dtype)


@pytest.mark.costly
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.costly)])
def test_torchs_flex_attention_takes_the_layout(causal, compiled):
    layout = sparse.VariableSparsityConfig(num_heads=2, block=16, different_layout_per_head=True).make_layout(96)
    inputs = [torch.randn(2, 2, 96, 8) for _ in range(3)]  # torch has no gradient of it on CPUs
    attend = torch.compile(flex_attention, dynamic=False) if compiled else flex_attention
    got = attend(*inputs, block_mask=sparse.block_mask(layout, 16, causal))
    close(got, sparse.sparse_attention(*inputs, layout, 16, causal=causal), torch.float32)


def test_second_derivatives_are_right():
    layout = sparse.BSLongformerSparsityConfig(2, 4).make_layout(12)
    inputs = [torch.randn(1, 2, 12, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    rpe = torch.randn(2, 12, 12, dtype=torch.float64, requires_grad=True)

    def attend(query, key, value, rpe):
        return sparse.sparse_attention(query, key, value, layout, 4, rpe=rpe)

    assert torch.autograd.gradcheck(attend, (*inputs, rpe))
    assert torch.autograd.gradgradcheck(attend, (*inputs, rpe))


def test_threads_change_no_bit():
    layout = sparse.FixedSparsityConfig(4, 16).make_layout(128)
    torch.manual_seed(0)
    inputs = [torch.randn(2, 4, 128, 16) for _ in range(3)]

    def run():
        mine = [x.clone().requires_grad_() for x in inputs]
        result = sparse.sparse_attention(*mine, layout, 16)
        result.sum().backward()
        return [result.detach(), *(x.grad for x in mine)]

    torch.set_num_threads(1)
    alone = run()
    torch.set_num_threads(2)
    for one, two in zip(alone, run(), strict=True):
        torch.testing.assert_close(one, two, rtol=2e-6, atol=1e-6)


def test_memory_does_not_grow_with_the_square_of_the_sequence(monkeypatch):
    """Peak of what lives beside inputs and results, from the allocations that torch's profiler sees."""

    def peak(length):
        layout = sparse.LocalSlidingWindowSparsityConfig(2, 16).make_layout(length)
        inputs = [torch.randn(1, 2, length, 16, requires_grad=True) for _ in range(3)]
        with torch.profiler.profile(profile_memory=True) as profile:
            sparse.sparse_attention(*inputs, layout, 16).sum().backward()
        live = most = 0
        for event in profile.profiler.kineto_results.events():
            if event.name() == "[memory]":
                live += event.nbytes()
                most = max(most, live)
        return most

    assert peak(4096) < 5 * peak(1024)


class TestSelfAttention:
    def test_shorter_sequences_have_the_first_blocks_of_the_longest_ones_layout(self):
        config = sparse.FixedSparsityConfig(2, 16, num_local_blocks=4)
        module = sparse.SparseSelfAttention(config, max_seq_length=256)
        whole = config.make_layout(256)
        assert torch.equal(module.get_layout(96), whole[:, :6, :6])
        with pytest.raises(ValueError, match="at most max_seq_length, 256"):
            module.get_layout(272)
        with pytest.raises(ValueError, match="multiple of the block, 16"):
            module.get_layout(100)

    def test_takes_masks_and_transposed_keys_as_deepspeeds_does(self):
        module = sparse.SparseSelfAttention(sparse.DenseSparsityConfig(2), key_padding_mask_mode="mul")
        query, key, value = (torch.randn(2, 2, 32, 8) for _ in range(3))
        padding = torch.ones(2, 1, 1, 32)
        padding[1, ..., 20:] = 0
        got = module(query, key.transpose(2, 3), value, key_padding_mask=padding)
        expected = F.scaled_dot_product_attention(query, key, value, padding.bool())
        torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-6)
        with pytest.raises(NotImplementedError, match="self-attention"):
            module(query, key[:1], value)

    def test_refuses_unknown_modes(self):
        with pytest.raises(ValueError, match="attn_mask_mode is 'xor'"):
            sparse.SparseSelfAttention(attn_mask_mode="xor")


def bert(name="Bert", **changes):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=66 if name == "Roberta" else 64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=1,
        **changes,
    )
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForMaskedLM")(config).eval()


@pytest.mark.parametrize("name", ["Bert", "Roberta"])
@pytest.mark.parametrize("length", [64, 50])
def test_transformers_models_with_dense_layouts_equal_themselves(name, length):
    model = bert(name)
    tokens = torch.randint(2, 64, (3, length))
    padding = torch.ones(3, length, dtype=torch.long)
    padding[2, length - 9 :] = 0
    before = model(tokens, attention_mask=padding).logits
    names = list(model.state_dict())
    config = sparse.DenseSparsityConfig(num_heads=4)
    utils = sparse.SparseAttentionUtils
    assert utils.replace_model_self_attention_with_sparse_self_attention(model, 64, config) is model
    after = model(tokens, attention_mask=padding).logits
    seen = padding.bool()
    torch.testing.assert_close(after[seen], before[seen], rtol=2e-5, atol=2e-5)
    assert list(model.state_dict()) == names


def test_causal_models_stay_causal_within_blocks_and_share_keys():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    tokens = torch.randint(2, 64, (2, 40))
    before = model(tokens, use_cache=False).logits
    sparse.use_in_transformers(model, sparse.DenseSparsityConfig(num_heads=4))
    torch.testing.assert_close(model(tokens, use_cache=False).logits, before, rtol=2e-5, atol=2e-5)
    with pytest.raises(ValueError, match="expected the model's, 4"):
        sparse.use_in_transformers(model, sparse.DenseSparsityConfig(num_heads=2))


@pytest.mark.parametrize("name", ["Bert", "Roberta"])
def test_positions_are_extended_and_the_model_reads_longer_sequences(name):
    model = bert(name)
    reserved = 2 if name == "Roberta" else 0
    utils = sparse.SparseAttentionUtils
    encoder = getattr(model, name.lower())
    before = encoder.embeddings.position_embeddings.weight.detach().clone()
    utils.extend_position_embedding(model, 160)
    after = encoder.embeddings.position_embeddings.weight
    assert after.shape == (160 + reserved, 32)
    for start in range(reserved, 160, 64):
        part = after[start : start + 64]
        assert torch.equal(part, before[reserved : reserved + len(part)])
    utils.replace_model_self_attention_with_sparse_self_attention(
        model, 160, sparse.BigBirdSparsityConfig(num_heads=4, block=16)
    )
    assert torch.isfinite(model(torch.randint(2, 64, (1, 160))).logits).all()
    with pytest.raises(ValueError, match="expected more than the model's 160"):
        utils.extend_position_embedding(model, 100)


def test_batches_are_padded_to_blocks_and_back():
    utils = sparse.SparseAttentionUtils
    embeddings = nn.Embedding(9, 4)
    tokens, mask, types = torch.full((2, 13), 3), torch.ones(2, 13), torch.ones(2, 13, dtype=torch.long)
    added, *padded = utils.pad_to_block_size(8, tokens, mask, types, types, embeddings(tokens), 7, embeddings)
    assert added == 3
    assert [x[:, 13:].unique().tolist() for x in padded[:4]] == [[7], [0], [0], [7]]
    assert torch.equal(padded[4][:, 13:], embeddings(torch.full((2, 3), 7)))
    assert utils.unpad_sequence_output(added, padded[4]).shape == (2, 13, 4)
    assert utils.pad_to_block_size(13, tokens, mask, types, None, None, 7, None)[0] == 0


def test_models_that_are_not_transformers_get_modules_with_their_projections():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.Module()
            self.attention.self = nn.Module()
            for part in ("query", "key", "value"):
                setattr(self.attention.self, part, nn.Linear(32, 32))

    layer, config = Layer(), type("Config", (), {"hidden_size": 32, "num_attention_heads": 4})
    given = layer.attention.self.query
    sparse.SparseAttentionUtils.replace_self_attention_layer_with_sparse_self_attention_layer(
        config, [layer], sparse.DenseSparsityConfig(num_heads=4)
    )
    assert layer.attention.self.query is given
    x = torch.randn(2, 32, 32)
    part = layer.attention.self
    query, key, value = (f(x).unflatten(-1, (4, 8)).transpose(1, 2) for f in (part.query, part.key, part.value))
    expected = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
    torch.testing.assert_close(part(x, torch.zeros(2, 1, 1, 32)), expected, rtol=2e-5, atol=2e-6)


def test_the_configurations_section_makes_a_layout():
    section = {"mode": "bslongformer", "block": 32, "global_block_indices": [0, 5], "attention": "unidirectional"}
    layout = sparse.from_config({"train_batch_size": 8, "sparse_attention": section}, num_heads=2)
    assert isinstance(layout, sparse.BSLongformerSparsityConfig)
    by_hand = sparse.BSLongformerSparsityConfig(2, 32, global_block_indices=[0, 5], attention="unidirectional")
    assert torch.equal(layout.make_layout(256), by_hand.make_layout(256))
    assert isinstance(sparse.from_config({"train_batch_size": 8}, 2), sparse.FixedSparsityConfig)
    with pytest.raises(deeptide.ConfigError, match=r"sparse_attention\.mode"):
        sparse.from_config({"train_batch_size": 8, "sparse_attention": {"mode": "moon"}}, 2)
    with pytest.raises(ValueError, match="multiple of num_global_blocks"):
        sparse.from_config({"train_batch_size": 8, "sparse_attention": {"num_global_blocks": 3}}, 2)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("bf16", [False, True])
def test_a_sparse_bert_trains_and_resumes_exactly(stage, bf16, tmp_path):
    def start():
        model = bert().train()
        random.seed(5)
        sparse.use_in_transformers(model, sparse.BigBirdSparsityConfig(num_heads=4, block=16))
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {"stage": stage},
            "bf16": {"enabled": bf16},
        }
        return deeptide.initialize(model=model, config=config)[0]

    def steps(engine, first, last):
        losses = []
        for step in range(first, last):
            generator = torch.Generator().manual_seed(step)
            tokens = torch.randint(2, 8, (4, 64), generator=generator)
            loss = engine(tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses

    engine = start()
    first = steps(engine, 0, 4)
    engine.save_checkpoint(str(tmp_path))
    rest = steps(engine, 4, 8)
    assert rest[-1] < first[0]
    again = start()
    again.load_checkpoint(str(tmp_path))
    assert steps(again, 4, 8) == rest
