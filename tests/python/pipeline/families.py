# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Models of anybody's in small, their batches, and their training cut and uncut."""

import threading

import models
import torch
import transformers
from torch import nn
from torch.nn import functional as F

import deeptide

VOCABULARY, MICRO, LENGTH = 23, 2, 6
_seeding = threading.Lock()

_SIZES = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 20}
_TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_GROUPED = {**_SIZES, **_TOKENS, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 16}

FAMILIES = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_embd=16, n_layer=4, n_head=2, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **_TOKENS
        )
    ),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**_GROUPED)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(tie_word_embeddings=True, **_GROUPED)),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(sliding_window=4, **_GROUPED)),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(num_local_experts=4, num_experts_per_tok=2, **_GROUPED)
    ),
    "bert": lambda: transformers.BertForMaskedLM(
        transformers.BertConfig(hidden_dropout_prob=0, attention_probs_dropout_prob=0, **_SIZES, **_TOKENS)
    ),
    "xlm-roberta": lambda: transformers.XLMRobertaForMaskedLM(
        transformers.XLMRobertaConfig(
            hidden_dropout_prob=0, attention_probs_dropout_prob=0, **_SIZES, **_TOKENS | {"pad_token_id": 0}
        )
    ),
    "classes": lambda: transformers.XLMRobertaForSequenceClassification(
        transformers.XLMRobertaConfig(
            hidden_dropout_prob=0,
            attention_probs_dropout_prob=0,
            num_labels=3,
            **_SIZES,
            **_TOKENS | {"pad_token_id": 0},
        )
    ),
    "opt": lambda: transformers.OPTForCausalLM(
        transformers.OPTConfig(
            hidden_size=16,
            word_embed_proj_dim=12,
            num_hidden_layers=4,
            num_attention_heads=2,
            ffn_dim=20,
            max_position_embeddings=16,
            dropout=0,
            **_TOKENS,
        )
    ),
    "vit": lambda: transformers.ViTForImageClassification(
        transformers.ViTConfig(image_size=8, patch_size=4, num_labels=3, **_SIZES)
    ),
    "rwkv": lambda: transformers.RwkvForCausalLM(  # blocks write into tensors that they make
        transformers.RwkvConfig(
            hidden_size=16, num_hidden_layers=4, intermediate_size=20, vocab_size=VOCABULARY, use_cache=True
        )
    ),
    "mpnet": lambda: transformers.MPNetForMaskedLM(  # a table that is registered late gives all blocks a bias
        transformers.MPNetConfig(
            hidden_dropout_prob=0, attention_probs_dropout_prob=0, **_SIZES, **_TOKENS | {"pad_token_id": 0}
        )
    ),
    "roformer": lambda: transformers.RoFormerForMaskedLM(  # a frozen one
        transformers.RoFormerConfig(
            hidden_dropout_prob=0, attention_probs_dropout_prob=0, **_SIZES, **_TOKENS | {"pad_token_id": 0}
        )
    ),
    "picks": lambda: Picks(),
    "plain": lambda: Plain(),
    "sequential": lambda: Chain(*[part for i in range(5) for part in (nn.Linear(6 + i, 7 + i), nn.Tanh())]),
}
_T5 = {
    "d_model": 16, "d_kv": 8, "d_ff": 20, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 2, "dropout_rate": 0,
    "vocab_size": VOCABULARY, "pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": None,
}  # fmt: skip
_BART = {
    "d_model": 16, "encoder_ffn_dim": 20, "decoder_ffn_dim": 20, "encoder_layers": 3, "decoder_layers": 2,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 16, "dropout": 0,
    "vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1, "decoder_start_token_id": 2,
}  # fmt: skip
ENCODERS_AND_DECODERS = {
    "t5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(tie_word_embeddings=True, **_T5)),
    "t5-head": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(tie_word_embeddings=False, feed_forward_proj="gated-gelu", **_T5)
    ),
    "bart": lambda: transformers.BartForConditionalGeneration(transformers.BartConfig(**_BART)),
    "transformer": lambda: Translator(),
}
ROLES = ("master", "exp_avg", "exp_avg_sq")
SPREAD = ("plain", "picks")  # values before the blocks go to all of them
TIED = ("gpt2", "qwen3", "bert", "opt", "xlm-roberta", "mpnet", "roformer")


class Translator(nn.Module):
    """An encoder and a decoder of torch's, under a program of nobody's."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 12)
        self.body = nn.Transformer(12, 2, 3, 3, 20, dropout=0.0, batch_first=True)
        self.head = nn.Linear(12, VOCABULARY)

    def forward(self, input_ids, attention_mask, labels):
        source, target = self.embed(input_ids), self.embed(labels)
        mask = nn.Transformer.generate_square_subsequent_mask(labels.shape[1], dtype=source.dtype)
        hidden = self.body(source, target, tgt_mask=mask, src_key_padding_mask=attention_mask == 0)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.roll(1, 1).flatten())


class Chain(nn.Sequential):
    """Blocks of several classes, which change the shape of what they hand on."""

    def forward(self, pixels):
        return super().forward(pixels.flatten(1)[:, :6]).square().mean()


class Plain(nn.Module):
    """Nobody's: a parameter of its own before and one after the blocks, a buffer that counts, a mask for each block."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 12)
        self.places = nn.Parameter(torch.randn(16, 12) / 5)
        self.scale = nn.Parameter(torch.ones(VOCABULARY))
        self.blocks = nn.ModuleList(PlainBlock() for _ in range(5))
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, VOCABULARY)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, input_ids, labels):
        self.count += 1
        hidden = self.embed(input_ids) + self.places[: input_ids.shape[1]]
        mask = (input_ids > 2).unsqueeze(-1)
        for number, block in enumerate(self.blocks):
            hidden, _ = block(hidden, mask, scale=1.0 + number)
        logits = self.head(self.norm(hidden)) * self.scale
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Picks(nn.Module):
    """Each block is given what went into the first, and the choice of the one before; a norm is registered late."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 12)
        self.blocks = nn.ModuleList(PickingBlock() for _ in range(4))
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, VOCABULARY)

    def forward(self, input_ids, labels):
        first = hidden = self.norm(self.embed(input_ids))
        choice = None
        for block in self.blocks:
            hidden, choice = block(hidden, first, choice)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


class PickingBlock(nn.Module):
    """Takes some of its inputs' elements, chosen by the first block."""

    def __init__(self):
        super().__init__()
        self.mix, self.down = nn.Bilinear(12, 12, 12), nn.Linear(6, 12)

    def forward(self, hidden, first, choice):
        mixed = self.mix(hidden, first)
        choice = mixed.topk(6).indices if choice is None else choice
        return hidden + self.down(mixed.gather(-1, choice)), choice


class PlainBlock(nn.Module):
    """Returns a pair, and keeps statistics of its stage alone."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(12, 20), nn.Linear(20, 12)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, hidden, mask, scale):
        self.seen += hidden.detach().abs().mean()
        return hidden + self.down(F.gelu(self.up(hidden))) * mask / scale, "nothing"


def make(name, seed=3):
    """The same weights every time, also when ranks as threads build at once."""
    with _seeding:
        torch.manual_seed(seed)
        return (FAMILIES | ENCODERS_AND_DECODERS)[name]()


def batches(name, data_rank, data_size, steps, gas):
    """Micro-batches of one rank of `data_size`; tokens change their length, and some are padded."""
    draws = torch.Generator().manual_seed(5)
    for number in range(steps * gas * data_size):
        length = LENGTH + (number // data_size) % 3
        tokens = torch.randint(1, VOCABULARY, (MICRO, length), generator=draws)
        pixels = torch.randn(MICRO, 3, 8, 8, generator=draws)
        if number % data_size != data_rank:
            continue
        if name == "vit":
            yield {"pixel_values": pixels, "labels": tokens[:, 0] % 3}
        elif name == "sequential":
            yield pixels
        elif name in ("plain", "picks"):
            yield tokens, tokens.roll(1, 1)
        else:
            mask = torch.ones_like(tokens)
            mask[0, -2:] = number % 2
            labels = tokens[:, : -1 - number % 2].contiguous() if name in ENCODERS_AND_DECODERS else tokens
            labels = tokens[:, 0] % 3 if name == "classes" else labels
            yield {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def config(stage, gas, num_stages=0, **more):
    parallel = {"parallel": {"pipeline": num_stages, **more.pop("parallel", {})}} if num_stages else {}
    return models.config(stage, gas=gas, micro=MICRO, gradient_clipping=0.0, **parallel, **more)


def states_of(engine):
    """Masters and moments of this rank's parameters, whole."""
    found = {}
    for name, _ in engine.module.named_parameters():
        for role in ROLES:
            value = engine._core.full_state(name, role)
            if value is not None:
                found[f"{name}/{role}"] = value
    return found


def train(world, name, settings, gas, steps, edit=None):
    """(losses, norms, states): of one rank, whether the model is cut or not."""
    model = make(name)
    if edit is not None:
        model = edit(model)
    engine = deeptide.initialize(model=model, config=settings, world=world)[0]
    given = batches(name, engine.data_parallel_rank, engine.data_parallel_size, steps, gas)
    losses, norms = [], []
    for _ in range(steps):
        losses.append(engine.train_batch(given).item())
        norms.append(engine.get_global_grad_norm())
    return losses, norms, states_of(engine)
