# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Less work on unchanged models of Transformers, beside the same done by hand: layers, lengths, tokens."""

import copy
import os
import pickle
import warnings

import models
import pytest
import torch
from torch import nn

import deeptide
from deeptide.efficiency import convert_to_random_ltd, drop_layers
from deeptide.efficiency.layer_drop import DroppedLayer

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

LENGTH, LAYERS = 12, 4
DEPTH = {"progressive_layer_drop": {"enabled": True, "theta": 0.2, "gamma": 3.0}}
GROWTH = {
    "curriculum_learning": {
        "enabled": True,
        "curriculum_type": "seqlen",
        "min_difficulty": 4,
        "max_difficulty": LENGTH,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 4, "difficulty_step": 4},
    }
}
NO_DROPOUT = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
SIZES = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": LAYERS, "num_attention_heads": 4}


def gpt2():
    config = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=24, n_layer=LAYERS, n_head=4, **NO_DROPOUT)
    return transformers.GPT2LMHeadModel(config)


def bert():
    none = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    return transformers.BertForMaskedLM(
        transformers.BertConfig(vocab_size=64, max_position_embeddings=32, **SIZES, **none)
    )


def llama():
    config = transformers.LlamaConfig(vocab_size=64, num_key_value_heads=2, max_position_embeddings=32, **SIZES)
    return transformers.LlamaForCausalLM(config)


def blocks_of(model):
    kinds = ("GPT2Block", "BertLayer", "LlamaDecoderLayer")
    return [module for module in model.modules() if type(module).__name__ in kinds]


def batch(step=0, rows=2):
    tokens = torch.randint(3, 60, (rows, LENGTH), generator=torch.Generator().manual_seed(step))
    mask = torch.ones_like(tokens)
    mask[0, -3:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def make(kind, seed=0):
    torch.manual_seed(seed)
    return kind().train()


def start(kind, stage=0, policy=None, **sections):
    if policy is not None:
        sections["activation_checkpointing"] = {"policy": policy}
    return deeptide.initialize(model=make(kind), config=models.config(stage, **sections))[0]


def train(engine, first, last):
    losses = []
    for step in range(first, last):
        torch.manual_seed(100 + step)
        loss = engine(**batch(step)).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


# -- layers ------------------------------------------------------------------------------------------------------------


def train_by_hand(kind, share_of, steps):
    """The losses of a model whose blocks are skipped by hand, by the same draws."""
    model = make(kind)
    skipped = 0

    class Skipping(nn.Module):
        def __init__(self, block, number):
            super().__init__()
            self.block, self.number = block, number

        def forward(self, hidden_states, *args, **kwargs):
            nonlocal skipped
            keep = 1 - self.number / LAYERS * (1 - share)
            if share < 1 and keep < 1 and float(torch.rand(())) >= keep:
                skipped += 1
                return hidden_states
            return self.block(hidden_states, *args, **kwargs)

    container = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == LAYERS)
    engine = deeptide.initialize(model=model, config=models.config(0))[0]
    for number, block in enumerate(list(container)):
        container._modules[str(number)] = Skipping(block, number)
    losses = []
    for step in range(steps):
        share = share_of[step]
        losses += train(engine, step, step + 1)
    return losses, skipped


@pytest.mark.parametrize("kind", [gpt2, bert, llama])
def test_the_section_alone_drops_the_layers_that_are_dropped_by_hand(kind):
    engine = start(kind, **DEPTH)
    shares, losses = [], []
    for step in range(6):
        shares.append(engine.get_pld_theta())
        losses += train(engine, step, step + 1)
    by_hand, skipped = train_by_hand(kind, shares, 6)
    assert losses == by_hand and skipped > 0
    engine.eval()
    with torch.no_grad():
        assert torch.equal(engine(**batch()).loss, engine(**batch()).loss)


@pytest.mark.costly
@pytest.mark.parametrize("policy", [None, "recompute"])
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("kind", [gpt2, llama])
def test_dropped_layers_resume_exactly(kind, stage, policy, tmp_path):
    whole = start(kind, stage, policy, **DEPTH)
    train(whole, 0, 4)
    whole.save_checkpoint(tmp_path)
    rest = train(whole, 4, 7)
    again = start(kind, stage, policy, **DEPTH)
    again.load_checkpoint(tmp_path)
    assert train(again, 4, 7) == rest
    models.assert_same(models.everything(again), models.everything(whole))


def test_recomputation_finds_the_layers_that_forward_dropped():
    plain = train(start(llama, **DEPTH), 0, 5)
    own = start(llama, **DEPTH)
    own.module.gradient_checkpointing_enable()
    assert train(own, 0, 5) == plain == train(start(llama, policy="recompute", **DEPTH), 0, 5)


def test_layers_are_dropped_once_and_belong_to_one_engine():
    engine = start(gpt2, **DEPTH)
    blocks = blocks_of(engine.module)
    assert all(isinstance(block, DroppedLayer) for block in blocks)
    assert type(pickle.loads(pickle.dumps(blocks[1]))) is type(copy.deepcopy(blocks[1])) is type(blocks_of(gpt2())[0])
    drop_layers(engine, blocks[2:])
    assert ["_deeptide_depth" in block.__dict__ for block in blocks] == [False, False, True, True]
    engine.destroy()
    deeptide.initialize(model=engine.module, config=models.config(0))
    assert not any("_deeptide_depth" in block.__dict__ for block in blocks)


class Flat(nn.Module):
    """Without blocks and without the keywords."""

    def __init__(self):
        super().__init__()
        self.only = nn.Linear(4, 4)

    def forward(self, x, **kwargs):
        assert not kwargs
        return self.only(x).square().mean()


class Narrowing(Flat):
    def __init__(self):
        super().__init__()
        self.only = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def test_what_has_no_blocks_is_told_how_to_drop_and_to_cut():
    config = models.config(0, **DEPTH, **GROWTH)
    with pytest.warns(UserWarning, match=r"nothing is dropped: forward of Flat .*call deeptide.efficiency.drop_layers"):
        engine = deeptide.initialize(model=Flat(), config=config)[0]
    with pytest.warns(UserWarning, match="nothing is cut: forward of Flat names no curriculum_seqlen"):
        engine(torch.ones(2, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine(torch.ones(2, 4))


def test_layers_whose_input_cannot_stand_for_their_output_are_refused():
    engine = deeptide.initialize(model=Narrowing(), config=models.config(0, **DEPTH))[0]
    with pytest.raises(deeptide.ConfigError, match=r"layer only.0 returned \[\(2, 3\)\].*drop_layers\("):
        engine(torch.ones(2, 4))


# -- lengths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("kind", [gpt2, bert, llama])
def test_the_section_alone_trains_on_batches_cut_by_hand(kind, stage):
    engine, plain = start(kind, stage, **GROWTH), start(kind, stage)
    lengths = []
    for step in range(6):
        loss = engine(**batch(step), position_ids=torch.arange(LENGTH)[None]).loss
        now = engine.curriculum_seqlen()
        lengths.append(now)
        cut = {name: tensor[:, :now].contiguous() for name, tensor in batch(step).items()}
        by_hand = plain(**cut).loss
        assert torch.equal(loss, by_hand)
        for one, its in ((engine, loss), (plain, by_hand)):
            one.backward(its)
            one.step()
    assert lengths == [4, 8, 8, 12, 12, 12]
    engine.eval()
    assert engine(**batch()).logits.size(1) == LENGTH


class Recorder(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, tokens, *rest, **more):
        self.seen = [tuple(one.shape) for one in (tokens, *rest, *more.values())]
        return self.weight.sum()


def test_what_belongs_to_tokens_is_cut_and_nothing_else():
    engine = deeptide.initialize(model=Recorder(), config=models.config(0, **GROWTH))[0]
    tokens = torch.zeros(2, LENGTH, dtype=torch.long)
    engine(
        tokens,
        tokens.float(),
        attention_mask=torch.zeros(2, 1, LENGTH, LENGTH),
        position_ids=torch.zeros(3, LENGTH, LENGTH, dtype=torch.long),
        bbox=torch.zeros(2, LENGTH, 4, dtype=torch.long),
        labels=torch.zeros(2, dtype=torch.long),
        pixels=torch.zeros(2, LENGTH, 3),
    )
    assert engine.module.seen == [(2, 4), (2, 12), (2, 1, 4, 4), (3, 12, 4), (2, 4, 4), (2,), (2, 12, 3)]


# -- tokens ------------------------------------------------------------------------------------------------------------


KEPT = 5


def routing(mask_name, model_type):
    section = {
        **models.RANDOM_LTD,
        "total_layer_num": LAYERS,
        "random_ltd_layer_id": [1, 2],
        "model_type": model_type,
        "random_ltd_schedule": {
            "min_value": KEPT,
            "max_value": LENGTH,
            "schedule_type": "fixed_linear",
            "schedule_config": {"require_steps": 100, "seq_per_step": 1},
        },
    }
    if mask_name is not None:
        section["model_mask_name"] = mask_name
    return {"data_efficiency": {"enabled": True, "data_routing": {"enabled": True, "random_ltd": section}}}


def by_rows(layer, indices):
    """A layer's forward, row by row on the kept tokens alone, with masks and positions picked by hand."""
    original = layer.forward

    def forward(hidden, *args, **kwargs):
        names = ("past_key_values", "attention_mask") if "GPT2" in type(layer).__name__ else ("attention_mask",)
        named = {**dict(zip(names, args)), **kwargs}
        out = hidden.clone()
        for row, kept in enumerate(indices.pop(0)):
            own = dict(named)
            mask = own.get("attention_mask")
            if mask is not None:
                one = mask[row : row + 1].expand(1, 1, hidden.size(1), hidden.size(1)) if mask.dim() == 4 else mask
                own["attention_mask"] = one[:, :, kept][..., kept]
            if own.get("position_embeddings") is not None:
                picked = [part[min(row, len(part) - 1), kept][None] for part in own["position_embeddings"]]
                own["position_embeddings"] = tuple(picked)
            own.pop("position_ids", None)
            own["past_key_values"] = None
            out[row, kept] = original(hidden[row : row + 1, kept], **own)[0]
        return out

    layer.forward = forward


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("has_mask", [True, False])
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(("kind", "model_type"), [(gpt2, "decoder"), (bert, "encoder"), (llama, "decoder")])
def test_masks_and_positions_follow_the_kept_tokens(kind, model_type, named, has_mask, attention):
    model = make(kind)
    model.set_attn_implementation(attention)
    hand = copy.deepcopy(model)
    sections = routing("attention_mask" if named else None, model_type)
    engine = deeptide.initialize(model=model, config=models.config(0, **sections))[0]
    convert_to_random_ltd(engine, type(blocks_of(model)[0]))
    inputs = {name: tensor for name, tensor in batch().items() if has_mask or name != "attention_mask"}
    torch.manual_seed(4)
    draws = [torch.multinomial(torch.ones(2, LENGTH), KEPT).sort(dim=-1).values for _ in range(2)]
    shared = [list(draw) for draw in draws]
    for layer in blocks_of(hand)[1:3]:
        by_rows(layer, shared)
    expected = hand(**inputs).loss
    expected.backward()
    torch.manual_seed(4)
    loss = engine(**inputs).loss
    # Rows of attention are computed in another batch: sums of 24 elements in another order.
    torch.testing.assert_close(loss, expected, rtol=2e-6, atol=0)
    engine.backward(loss)
    for (name, own), other in zip(model.named_parameters(), hand.parameters(), strict=True):
        gradient = deeptide.utils.safe_get_full_grad(own)
        torch.testing.assert_close(gradient, other.grad, rtol=1e-4, atol=1e-6, msg=name)


class Odd(nn.Module):
    """A layer with arguments that random-LTD does not know."""

    def forward(self, x, bias=None, attention_mask=None, position_embeddings=None):
        return x if bias is None else x + bias


MISFITS = [
    (
        {"attention_mask": torch.ones(2, 7)},
        r"layer h.0, argument 'attention_mask': got \(2, 7\), expected a tensor with 2 rows or one, of 5 tokens; pass",
    ),
    ({"attention_mask": torch.ones(3, 5)}, r"argument 'attention_mask': got \(3, 5\), expected a tensor with 2 rows"),
    ({"attention_mask": object()}, "argument 'attention_mask': got object, expected a tensor"),
    ({"position_embeddings": (torch.ones(5, 4),)}, r"argument 'position_embeddings': got \(5, 4\), expected a tensor"),
    ({"bias": torch.ones(2, 5, 4)}, r"layer h.0 failed with a part of its tokens.*: bias \(2, 5, 4\); name a mask"),
]


@pytest.mark.parametrize(("more", "text"), MISFITS, ids=range(len(MISFITS)))
def test_what_does_not_fit_is_refused_by_name(more, text):
    layer = deeptide.efficiency.RandomLayerTokenDrop(Odd())
    section = {"model_type": "decoder", "hidden_state_order": "batch_seq_dim"}
    layer.init_config(section, type("Fixed", (), {"position": (0, 3, 0)})(), 0)
    layer.name_layer("h.0")
    with pytest.raises(deeptide.ConfigError, match=text):
        layer(torch.zeros(2, 5, 4), **more)
