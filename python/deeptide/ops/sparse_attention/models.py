# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Sparse attention in models as they are: Transformers' registry of attention functions, and DeepSpeed's helpers."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deeptide.ops.sparse_attention.attention import BertSparseSelfAttention, SparseSelfAttention, sparse_attention
from deeptide.ops.sparse_attention.layouts import FixedSparsityConfig, SparsityConfig

_NAME = "deeptide_sparse"
# An attention module's layouts: no submodule, so that the model's state dict stays as it is.
_ATTRIBUTE = "_deeptide_layouts"


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Transformers' attention function: (N, H, S, D) -> (N, S, H, D); pads sequences to whole blocks."""
    layouts: SparseSelfAttention = getattr(module, _ATTRIBUTE)
    if dropout > 0.0:
        warnings.warn(
            f"sparse attention has no dropout, as in DeepSpeed: {dropout} of the model's configuration is not applied; "
            "set attention_probs_dropout_prob (attention_dropout) to 0",
            stacklevel=2,
        )
    if query.size(2) != key.size(2):
        raise NotImplementedError(
            f"sparse attention has {query.size(2)} queries and {key.size(2)} keys, expected as many: pass "
            "use_cache=False, and train or score whole sequences"
        )
    repeats = query.size(1) // key.size(1)
    if repeats > 1:  # grouped queries
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    block, length = layouts.sparsity_config.block, query.size(2)
    missing = -length % block
    if missing:
        query, key, value = (F.pad(each, (0, 0, 0, missing)) for each in (query, key, value))
        if attention_mask is None:
            attention_mask = torch.ones((query.size(0), length), dtype=torch.bool, device=query.device)
        attention_mask = F.pad(attention_mask, (0, missing), value=False)
    output = sparse_attention(
        query,
        key,
        value,
        layouts.get_layout(length + missing),
        block,
        scale=scaling,
        causal=bool(getattr(module, "is_causal", False) if is_causal is None else is_causal),
        key_padding_mask=attention_mask,
        key_padding_mask_mode="mul",
    )
    return output[:, :, :length].transpose(1, 2), None


def use_in_transformers(
    model: nn.Module, sparsity_config: SparsityConfig, max_seq_length: int | None = None
) -> nn.Module:
    """Gives the self-attention of a Transformers model a layout, through its registry; its modules stay as they are.

    Args:
        model: any whose attention goes through the registry; padding is a mask (N, S) of 0 and 1. Models that are
            causal stay so, within blocks too. Sequences of any length are padded to whole blocks.
        sparsity_config: the layout; its num_heads is the model's.
        max_seq_length: the longest sequence; by default the configuration's max_position_embeddings.

    Returns the model. Errors: ValueError for another number of heads.

    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    config: Any = model.config
    if sparsity_config.num_heads != config.num_attention_heads:
        raise ValueError(
            f"sparsity_config has {sparsity_config.num_heads} heads, expected the model's, {config.num_attention_heads}"
        )
    longest = max_seq_length or config.max_position_embeddings
    whole = -(-longest // sparsity_config.block) * sparsity_config.block
    AttentionInterface.register(_NAME, _attend)
    # The mask of padding as the tokenizer made it, (N, S): larger ones would take the memory that sparsity saves.
    AttentionMaskInterface.register(_NAME, ALL_MASK_ATTENTION_FUNCTIONS["flash_attention_2"])
    layouts = SparseSelfAttention(sparsity_config, max_seq_length=whole)
    for module in model.modules():
        object.__setattr__(module, _ATTRIBUTE, layouts)
    model.set_attn_implementation(_NAME)  # type: ignore[operator]
    return model


def _encoder_of(model: nn.Module) -> tuple[str, Any]:
    for name in ("bert", "roberta"):
        if hasattr(model, name):
            return name, getattr(model, name)
    raise ValueError(
        f"got {type(model).__name__}, expected a model with an attribute 'bert' or 'roberta'; for others of "
        "Transformers use deeptide.ops.sparse_attention.use_in_transformers"
    )


# RoBERTa's positions begin after the padding token's.
_RESERVED = {"bert": 0, "roberta": 2}


class SparseAttentionUtils:
    """DeepSpeed's helpers for pretrained BERT and RoBERTa models."""

    @staticmethod
    def extend_position_embedding(model: nn.Module, max_position: int) -> nn.Module:
        """Repeats a model's position embeddings until there are `max_position`; returns the model.

        Errors: ValueError if there are as many already.
        """
        name, encoder = _encoder_of(model)
        embeddings, reserved = encoder.embeddings, _RESERVED[name]
        old = embeddings.position_embeddings.weight
        positions, total = old.size(0) - reserved, max_position + reserved
        if max_position <= positions:
            raise ValueError(f"max_position is {max_position}, expected more than the model's {positions}")
        with torch.no_grad():
            repeated = old[reserved:].repeat(-(-max_position // positions), 1)[:max_position]
            embeddings.position_embeddings.weight.data = torch.cat([old[:reserved], repeated])
        embeddings.position_embeddings.num_embeddings = total
        for buffer, fill in (("position_ids", torch.arange(total)), ("token_type_ids", torch.zeros(total))):
            if (given := getattr(embeddings, buffer, None)) is not None:
                setattr(embeddings, buffer, fill.to(given).expand(1, -1))
        model.config.max_position_embeddings = total  # type: ignore[union-attr]
        return model

    @staticmethod
    def update_tokenizer_model_max_length(tokenizer: Any, max_position: int) -> Any:
        """Sets a tokenizer's longest sequence; returns the tokenizer."""
        tokenizer.model_max_length = max_position
        tokenizer.init_kwargs["model_max_length"] = max_position
        return tokenizer

    @staticmethod
    def replace_model_self_attention_with_sparse_self_attention(
        model: nn.Module, max_position: int, sparsity_config: SparsityConfig | None = None
    ) -> nn.Module:
        """Gives a BERT's or RoBERTa's self-attention a layout; returns the model.

        A model of Transformers keeps its modules (`use_in_transformers`). In others each layer's attention.self
        becomes a BertSparseSelfAttention with its projections.
        """
        name, encoder = _encoder_of(model)
        config: Any = model.config
        chosen = sparsity_config or FixedSparsityConfig(num_heads=config.num_attention_heads)
        if hasattr(config, "_attn_implementation"):
            return use_in_transformers(model, chosen, max_position)
        config.max_position_embeddings = max_position + _RESERVED[name]
        SparseAttentionUtils.replace_self_attention_layer_with_sparse_self_attention_layer(
            config, encoder.encoder.layer, chosen
        )
        return model

    @staticmethod
    def replace_self_attention_layer_with_sparse_self_attention_layer(
        config: Any, layers: Any, sparsity_config: SparsityConfig | None = None
    ) -> Any:
        """Makes each layer's attention.self a BertSparseSelfAttention with its projections; returns the layers."""
        for layer in layers:
            sparse, given = BertSparseSelfAttention(config, sparsity_config), layer.attention.self
            sparse.query, sparse.key, sparse.value = given.query, given.key, given.value
            layer.attention.self = sparse
        return layers

    @staticmethod
    def pad_to_block_size(
        block_size: int,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        token_type_ids: Tensor | None,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        pad_token_id: int,
        model_embeddings: Any,
    ) -> tuple[int, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Pads a batch to whole blocks, with positions that no other attends to.

        Args:
            block_size: elements of a block's side.
            input_ids: tokens (N, S), or None.
            attention_mask: (N, S) of 0 and 1, or None.
            token_type_ids: (N, S), or None.
            position_ids: (N, S), or None.
            inputs_embeds: embeddings (N, S, D) in place of tokens, or None.
            pad_token_id: pads tokens and positions.
            model_embeddings: makes the padding's embeddings where inputs_embeds are given.

        Returns the number of positions added, and the five tensors in the order of the arguments.

        """
        given = input_ids if input_ids is not None else inputs_embeds
        if given is None:
            raise ValueError("got neither input_ids nor inputs_embeds, expected one of them")
        missing = -given.size(1) % block_size
        if missing == 0:
            return 0, input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds
        if inputs_embeds is not None:
            tokens = inputs_embeds.new_full((given.size(0), missing), pad_token_id, dtype=torch.long)
            inputs_embeds = torch.cat([inputs_embeds, model_embeddings(tokens)], dim=1)

        def padded(tensor: Tensor | None, value: int) -> Tensor | None:
            return None if tensor is None else F.pad(tensor, (0, missing), value=value)

        return (
            missing,
            padded(input_ids, pad_token_id),
            padded(attention_mask, 0),
            padded(token_type_ids, 0),
            padded(position_ids, pad_token_id),
            inputs_embeds,
        )

    @staticmethod
    def unpad_sequence_output(pad_len: int, sequence_output: Tensor) -> Tensor:
        """Takes the positions that pad_to_block_size added off (N, S, …)."""
        return sequence_output[:, :-pad_len] if pad_len > 0 else sequence_output
