# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's transformer layer equals Transformers' BERT layer, and keeps less memory where it is asked to."""

import copy
import json

import models
import pytest
import torch
from conftest import run_processes
from torch import nn

import deeptide
from deeptide.ops.transformer import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer

SIZES = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "heads": 4,
    "attn_dropout_ratio": 0.0,
    "hidden_dropout_ratio": 0.0,
    "num_hidden_layers": 3,
    "initializer_range": 0.02,
}
OPTIONS = ("normalize_invertible", "gelu_checkpoint", "attn_dropout_checkpoint")


def made(**changes):
    torch.manual_seed(2)
    layer = DeepSpeedTransformerLayer(DeepSpeedTransformerConfig(**{**SIZES, **changes}))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return layer


def bert_layer(gelu):
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertLayer

    config = BertConfig(
        hidden_size=48,
        intermediate_size=80,
        num_attention_heads=4,
        hidden_act="gelu_new" if gelu == "tanh" else "gelu",
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    config._attn_implementation = "eager"
    torch.manual_seed(3)
    layer = BertLayer(config)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return layer


def parts_of(layer):
    """BERT's modules in the order in which the layer takes their tensors."""
    attention = layer.attention
    mine = (attention.self.query, attention.self.key, attention.self.value, attention.output.dense)
    return [*mine, attention.output.LayerNorm, layer.intermediate.dense, layer.output.dense, layer.output.LayerNorm]


def run(layer, x, mask):
    x = x.clone().requires_grad_()
    y = layer(x, mask)
    y = y[0] if isinstance(y, tuple) else y
    (y.float() * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum().backward()
    return y.detach(), x.grad


NAMES = ("attn_qkv", "attn_o", "attn_n", "inter_", "output_", "norm_")


def berts_results(theirs, x, mask):
    """Output and gradients of Transformers' layer, under this layer's names."""
    y, x_gradient = run(theirs, x, mask)
    results = {"output": y, "input's gradient": x_gradient}
    parts = parts_of(theirs)
    for grads, suffix in (([p.weight.grad for p in parts], "w"), ([p.bias.grad for p in parts], "b")):
        for name, grad in zip(NAMES, [torch.cat(grads[:3]), *grads[3:]], strict=True):
            results[name + suffix] = grad
    return results


def results_of(mine, x, mask):
    y, x_gradient = run(mine, x, mask)
    return {
        "output": y,
        "input's gradient": x_gradient,
        **{name: parameter.grad for name, parameter in mine.named_parameters()},
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("gelu", ["tanh", "none"])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("length", [1, 7, 16])
@pytest.mark.parametrize("option", [None, *OPTIONS])
def test_equals_berts_layer(option, length, masked, gelu, dtype):
    """It is as near to the layer in fp64 as Transformers' own layer of its type is."""
    theirs = bert_layer(gelu).to(dtype)
    parts = parts_of(theirs)
    options = {} if option is None else {option: True}
    config = DeepSpeedTransformerConfig(**SIZES, pre_layer_norm=False, gelu=gelu, **options)
    mine = DeepSpeedTransformerLayer(config, [p.weight for p in parts], [p.bias for p in parts])
    assert all(parameter.dtype == dtype for parameter in mine.parameters())
    x = torch.randn(2, length, 48, dtype=dtype)
    mask = torch.zeros(2, 1, 1, length, dtype=dtype)
    mask[1, ..., length // 2 + 1 :] = -10000.0
    mask = mask if masked else None
    exact = berts_results(copy.deepcopy(theirs).double(), x.double(), None if mask is None else mask.double())
    got, expected = results_of(mine, x, mask), berts_results(theirs, x, mask)
    assert got.keys() == expected.keys()
    # Both round as often, in other orders: the sums of a key's bias cancel to nothing but rounding. A norm that starts
    # from its rounded output divides that rounding by a weight, here of at least a half.
    factor = 8 if option == "normalize_invertible" else 4
    for name, value in exact.items():
        unit = torch.finfo(dtype).eps * max(value.abs().max().item(), 1.0)
        error = (expected[name].double() - value).abs().max().item() if dtype != torch.double else 16 * unit
        allowed = factor * max(error, unit)  # fp64 is compared with itself: its sums are of up to 80 numbers
        assert (got[name].double() - value).abs().max().item() <= allowed, name


def test_stochastic_mode_changes_nothing():
    """DeepSpeed's kernels repeat no result with it, to be faster; these repeat theirs at no cost."""
    results = []
    for mode in (False, True):
        layer = made(attn_dropout_ratio=0.2, hidden_dropout_ratio=0.2, stochastic_mode=mode)
        torch.manual_seed(5)
        results.append(results_of(layer, torch.randn(2, 6, 48), None))
    models.assert_same(*results)


def test_norms_before_are_norms_before():
    layer = made().double()
    x = torch.randn(2, 5, 48, dtype=torch.double)
    w = dict(layer.named_parameters())

    def norm(value, name):
        return nn.functional.layer_norm(value, (48,), w[name + "w"], w[name + "b"], 1e-12)

    q, k, v = (
        t.view(2, 5, 4, 12).transpose(1, 2)
        for t in nn.functional.linear(norm(x, "norm_"), w["attn_qkvw"], w["attn_qkvb"]).chunk(3, -1)
    )
    context = ((q @ k.transpose(-1, -2)) / 12**0.5).softmax(-1) @ v
    summed = nn.functional.linear(context.transpose(1, 2).reshape(2, 5, 48), w["attn_ow"], w["attn_ob"]) + x
    inner = nn.functional.gelu(
        nn.functional.linear(norm(summed, "attn_n"), w["inter_w"], w["inter_b"]), approximate="tanh"
    )
    torch.testing.assert_close(layer(x), nn.functional.linear(inner, w["output_w"], w["output_b"]) + summed)


@pytest.mark.parametrize("pre", [True, False])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_computed_again_is_what_it_was(dtype, option, pre):
    """With dropout: the numbers drawn again are the same."""
    sizes = {"attn_dropout_ratio": 0.3, "hidden_dropout_ratio": 0.2, "pre_layer_norm": pre}
    results = []
    for options in ({}, {option: True}):
        layer = made(**sizes, **options).to(dtype)
        torch.manual_seed(9)
        y, x_gradient = run(layer, torch.randn(2, 6, 48).to(dtype), None)
        results.append([y, x_gradient, *(p.grad for p in layer.parameters())])
    # The norm's backward starts from its rounded output; all else is the same operators on the same numbers.
    loose = {"rtol": 5e-2, "atol": 5e-2} if dtype == torch.bfloat16 else {"rtol": 1e-3, "atol": 1e-4}
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, **(loose if option == "normalize_invertible" else {}))


def saved_bytes(layer, x):
    """Bytes that backward keeps of activations: each storage once, parameters not."""
    owned = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = layer(x)
    assert y.requires_grad
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pre", [True, False])
def test_options_keep_fewer_bytes(pre, dtype):
    batch, length, hidden, inner, heads, size = 2, 32, 48, 80, 4, dtype.itemsize
    x = torch.randn(batch, length, hidden, dtype=dtype, requires_grad=True)
    sizes = {"attn_dropout_ratio": 0.1, "hidden_dropout_ratio": 0.1, "pre_layer_norm": pre}

    def of(**options):
        return saved_bytes(nn.Sequential(*(made(**sizes, **options).to(dtype) for _ in range(2))), x)

    base = of()
    spared = {option: base - of(**{option: True}) for option in OPTIONS}
    rows, shares = batch * length, batch * heads * length * length
    # The inputs of four norms, and two numbers a row in fp32 for one in the type. Of norms at the end, the last one's
    # output is kept by no layer.
    assert spared["normalize_invertible"] == (4 if pre else 3) * rows * hidden * size + 4 * rows * (8 - size)
    assert spared["gelu_checkpoint"] == 2 * rows * inner * size
    assert spared["attn_dropout_checkpoint"] == 2 * 2 * shares * size  # what is dropped from, and the mask
    assert base - of(**dict.fromkeys(OPTIONS, True)) == sum(spared.values())


def test_weights_begin_as_configured():
    layer = DeepSpeedTransformerLayer(
        DeepSpeedTransformerConfig(**{**SIZES, "hidden_size": 128, "intermediate_size": -1})
    )
    assert layer.inter_w.shape == (512, 128)
    assert layer.attn_qkvw.std().item() == pytest.approx(0.02, rel=0.05)
    assert layer.output_w.std().item() == pytest.approx(0.02 / 6**0.5, rel=0.05)
    assert (layer.norm_w == 1).all() and (layer.attn_qkvb == 0).all()


def test_configurations_come_from_files_and_are_checked(tmp_path):
    for encoding in ("utf-8", "utf-16"):
        (tmp_path / encoding).write_text(json.dumps({**SIZES, "return_tuple": True}), encoding=encoding)
        config = DeepSpeedTransformerConfig.from_json_file(tmp_path / encoding)
        layer = DeepSpeedTransformerLayer(config)
        assert isinstance(layer(torch.zeros(1, 2, 48)), tuple)
    for changes, text in (
        ({"heads": 5}, "heads: 5 does not divide hidden_size, 48"),
        ({"hidden_size": -1}, "hidden_size: got -1"),
        ({"attn_dropout_ratio": -1}, "attn_dropout_ratio: got -1, expected 0 to below 1"),
        ({"num_hidden_layers": -1}, "num_hidden_layers -1"),
        ({"gelu": "exact"}, "gelu: got 'exact', expected 'tanh' or 'none'"),
    ):
        with pytest.raises(deeptide.ConfigError, match=text):
            made(**changes)
    with pytest.raises(deeptide.ConfigError, match="width: unknown; known: "):
        DeepSpeedTransformerConfig.from_dict({"width": 3})
    with pytest.raises(deeptide.ConfigError, match=r"attn_ow: got a tensor of shape \[2\], expected \[48, 48\]"):
        three = [torch.zeros(48, 48)] * 3
        DeepSpeedTransformerLayer(DeepSpeedTransformerConfig(**SIZES), [*three, *[torch.zeros(2)] * 5])
    with pytest.raises(ValueError, match="head_mask has no meaning for this layer"):
        made()(torch.zeros(1, 2, 48), head_mask=torch.ones(1))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 48)
        options = dict.fromkeys(OPTIONS, True)
        self.layer = nn.ModuleList(made(attn_dropout_ratio=0.1, **options) for _ in range(2))

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        for layer in self.layer:
            x = layer(x)
        return nn.functional.cross_entropy((x @ self.embed.weight.t()).flatten(0, 1).float(), targets.flatten())


def train_and_tell(stage, bf16):
    """This rank's losses, and all of its model's state in the end."""
    model = models.make_model(kind=Encoder)
    engine = deeptide.initialize(model=model, config=models.config(stage, world=2, bf16=bf16))[0]
    rank = torch.distributed.get_rank()
    torch.manual_seed(4 + rank)  # each rank drops other elements
    tokens = torch.arange(128).view(2, 64).chunk(2)[rank] % 64
    losses = []
    for _ in range(4):
        loss = engine(tokens, tokens)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    state = {name: value.float().tolist() for name, value in models.everything(engine).items()}
    print(json.dumps([losses, state, "keeps: 1/2 of the parameters" in engine._core.summary()]))


@pytest.mark.costly
@pytest.mark.apart
@pytest.mark.parametrize("bf16", [False, True])
def test_sharded_layers_train_as_whole_ones_do(bf16):
    """Two ranks that draw numbers of their own: what backward computes again finds its weights and its dropout."""
    whole, sharded = (
        [json.loads(done.stdout) for done in run_processes(2, train_and_tell, stage, bf16)] for stage in (0, 3)
    )
    assert whole[0][0] != whole[1][0], "ranks have batches of their own"
    for (losses, state, _), (others, theirs, are_sharded) in zip(whole, sharded, strict=True):
        assert are_sharded, "each rank has half of each layer"
        assert losses == others and losses[-1] < losses[0]
        assert state == theirs
