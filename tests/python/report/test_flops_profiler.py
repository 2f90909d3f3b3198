# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The flops profiler against closed formulae, by module, forward and backward."""

import copy
import json
import math
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import deeptide
from deeptide.flops_profiler import FlopsProfiler, get_model_profile

transformers = pytest.importorskip("transformers")
B, L, D, V, N = 2, 24, 32, 97, 3  # batch, length, width, vocabulary, layers


def transformer_macs(batch, length, width, layers, mlp=4, keys=None, cross=0):
    """MACs of one stack: projections 4 d², attention 2 l d, feed-forward 2 · mlp · d², each per position and layer."""
    keys = keys or length
    per_token = 4 * width**2 + 2 * keys * width + 2 * mlp * width**2
    return batch * length * layers * per_token


def gpt():
    config = transformers.GPT2Config(vocab_size=V, n_positions=L, n_embd=D, n_layer=N, n_head=4, bos_token_id=0)
    tokens = torch.arange(B * L).reshape(B, L) % V
    return transformers.GPT2LMHeadModel(config), {"input_ids": tokens}, transformer_macs(B, L, D, N) + B * L * D * V


def bert():
    config = transformers.BertConfig(
        vocab_size=V, hidden_size=D, num_hidden_layers=N, num_attention_heads=4, intermediate_size=4 * D
    )
    tokens = torch.arange(B * L).reshape(B, L) % V
    expected = transformer_macs(B, L, D, N) + B * L * (D**2 + D * V)  # the head transforms, then decodes
    return transformers.BertForMaskedLM(config), {"input_ids": tokens}, expected


def vit():
    config = transformers.ViTConfig(
        hidden_size=D, num_hidden_layers=N, num_attention_heads=4, intermediate_size=4 * D, image_size=16, patch_size=4
    )
    model = transformers.ViTForImageClassification(config)
    patches, labels = 16, model.classifier.out_features
    expected = B * patches * 3 * 4 * 4 * D + transformer_macs(B, patches + 1, D, N) + B * D * labels
    return model, {"pixel_values": torch.ones(B, 3, 16, 16)}, expected


def t5():
    config = transformers.T5Config(
        vocab_size=V, d_model=D, d_kv=8, num_heads=4, num_layers=N, d_ff=4 * D, decoder_start_token_id=0
    )
    tokens, half = torch.arange(B * L).reshape(B, L) % V, L // 2
    encoder = transformer_macs(B, L, D, N)
    decoder = transformer_macs(B, half, D, N)
    cross = N * B * (half * 2 * D**2 + L * 2 * D**2 + 2 * half * L * D)  # queries and output; keys and values; products
    inputs = {"input_ids": tokens, "decoder_input_ids": tokens[:, :half]}
    return transformers.T5ForConditionalGeneration(config), inputs, encoder + decoder + cross + B * half * D * V


class Experts(nn.Module):
    """Each token goes to `top` of several experts."""

    def __init__(self, experts=4, top=2):
        super().__init__()
        self.router, self.top = nn.Linear(D, experts, bias=False), top
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D)) for _ in range(experts)
        )

    def forward(self, x):
        flat = x.flatten(0, 1)
        weight, chosen = self.router(flat).softmax(-1).topk(self.top)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            token, place = (chosen == index).nonzero(as_tuple=True)
            out = out.index_add(0, token, expert(flat[token]) * weight[token, place, None])
        return out.view_as(x)


def moe():
    torch.manual_seed(0)
    return Experts(), {"x": torch.randn(B, L, D)}, B * L * (D * 4 + 2 * 2 * 4 * D**2)


@pytest.mark.parametrize("build", [gpt, bert, vit, t5, moe])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_macs_equal_the_closed_formula(build, attention):
    model, inputs, expected = build()
    if hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation(attention)
    flops, macs, params = get_model_profile(model, kwargs=inputs, print_profile=False, as_string=False)
    assert math.isclose(macs, expected, rel_tol=1e-3), (macs, expected)
    assert flops == 2 * macs
    assert params == sum(p.numel() for p in model.parameters())


def test_backward_takes_twice_the_products_of_forward():
    model, inputs, expected = gpt()
    model.set_attn_implementation("eager")
    profiler = FlopsProfiler(model.eval())
    profiler.start_profile()
    model(**inputs).logits.sum().backward()
    profiler.stop_profile()
    assert math.isclose(profiler.get_total_macs(), expected, rel_tol=1e-3)
    # All but the first layer's products by its input: embeddings have a gradient here, so none is left out.
    assert math.isclose(profiler.get_backward_macs(), 2 * expected, rel_tol=1e-3)


class LeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.feature = nn.Sequential(
            *(nn.Conv2d(1, 6, 5), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2)),
            *(nn.Conv2d(16, 120, 5), nn.Tanh()),
        )
        self.classifier = nn.Sequential(nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, 10))

    def forward(self, x):
        return F.softmax(self.classifier(self.feature(x).flatten(1)), dim=1)


def test_lenet_counts_as_deepspeed_documents():
    flops, macs, params = get_model_profile(LeNet(), (1024, 1, 32, 32), print_profile=False, as_string=False)
    assert math.isclose(macs, 426_516_480, rel_tol=0.01)
    assert math.isclose(flops, 866_076_672, rel_tol=0.05)  # DeepSpeed counts elementwise operators too
    assert params == 61_706


class Two(nn.Module):
    def __init__(self, again=False):
        super().__init__()
        self.first, self.second, self.again = nn.Linear(8, 16), nn.Linear(16, 4), again

    def forward(self, x):
        hidden = checkpoint(self.first, x, use_reentrant=False) if self.again else self.first(x)
        return self.second(hidden)


@pytest.mark.parametrize("again", [False, True])
def test_products_belong_to_their_modules_both_ways(again):
    model = Two(again)
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(torch.randn(5, 8, requires_grad=True)).sum().backward()
    profiler.stop_profile()
    first, second = profiler.profile().children
    assert (first.macs, second.macs) == (5 * 8 * 16, 5 * 16 * 4)
    assert (first.bwd_macs, second.bwd_macs) == ((3 if again else 2) * 5 * 8 * 16, 2 * 5 * 16 * 4)
    assert first.calls == second.calls == 1 and 0 < first.latency < profiler.profile().latency


def test_ignored_modules_count_with_what_holds_them():
    profiler = FlopsProfiler(nn.Sequential(nn.Linear(4, 4), nn.Conv1d(1, 1, 1)))
    profiler.start_profile([nn.Linear])
    profiler.model(torch.randn(1, 4))
    profiler.stop_profile()
    assert profiler.profile().children[0].calls == 0
    assert profiler.get_total_macs() == 16 + 4


@pytest.mark.costly
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("compiled", [False, True])
def test_engine_writes_the_profile_of_its_step(tmp_path, stage, compiled):
    path = tmp_path / "profile.json"
    config = {
        "train_micro_batch_size_per_gpu": 5,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "flops_profiler": {"enabled": True, "profile_step": 2, "output_file": str(path)},
    }
    engine = deeptide.initialize(model=Two(), config=config)[0]
    if compiled:
        engine.compile(backend="aot_eager")
    for step in range(3):
        engine.backward(engine(torch.randn(5, 8, requires_grad=True)).sum())
        engine.step()
        assert path.exists() == (step >= 1)
    profile = json.loads(path.read_text())
    assert profile["profile_step"] == 2
    assert profile["fwd_macs"] == 5 * (8 * 16 + 16 * 4)
    assert profile["bwd_flops"] == 4 * profile["fwd_macs"]
    assert 0 < profile["mfu"] < 1.5
    assert profile["params"] == sum(p.numel() for p in Two().parameters())


def test_table_has_deepspeeds_parts(capsys):
    flops, macs, params = get_model_profile(Two(), (5, 8), module_depth=1, top_modules=2)
    text = capsys.readouterr().out
    for part in (
        "DeepSpeed Flops Profiler",
        "Profile Summary at step 1:",
        "fwd MACs per GPU:",
        "Aggregated Profile per GPU",
        "Top 2 modules in terms of params, MACs or fwd latency at different model depths:",
        "depth 1:",
        "Detailed Profile per GPU",
        "(first): Linear: ",
        "66.67% MACs",
    ):
        assert part in text, part
    assert (flops, macs, params) == ("1.92 K", "960.00 MACs", "212.00")


def test_arguments_that_name_no_input_are_refused():
    with pytest.raises(ValueError, match="input_shape, args or kwargs"):
        get_model_profile(Two())
    with pytest.raises(ValueError, match='expected "forward" or "generate"'):
        get_model_profile(Two(), (5, 8), mode="train")
    with pytest.raises(ValueError, match="expected a tuple of sizes"):
        get_model_profile(Two(), [5, 8])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_model_that_is_profiled_is_not_profiled(copied):
    model = nn.Sequential(nn.Linear(3, 5))
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(torch.ones(2, 3))
    copied(model)(torch.ones(2, 3))
    profiler.stop_profile()
    (layer,) = profiler.profile().children
    assert (layer.calls, layer.macs) == (1, 2 * 3 * 5)
