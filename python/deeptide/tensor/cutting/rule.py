# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The rule for models that bring no plan: attention and MLP are known by the names of their layers."""

from __future__ import annotations

from contextlib import suppress

from torch import nn

from deeptide._C import ConfigError
from deeptide.tensor.cutting.adapters import is_adapters, layer_named
from deeptide.tensor.cutting.plans import COLUMN, HEADS, ROW, VOCABULARY, Cut, Plan
from deeptide.tensor.layers import features_of, heads_table, is_linear

# The last one or two words of a layer's path. Transformers' models and those of many tutorials use these.
_COLUMNS = {
    *("q_proj", "k_proj", "v_proj", "q_lin", "k_lin", "v_lin", "query", "key", "value", "q", "k", "v"),
    *("wq", "wk", "wv", "to_q", "to_k", "to_v", "up_proj", "gate_proj", "fc1", "fc_in", "c_fc", "w1", "w3"),
    *("wi", "wi_0", "wi_1", "lin1", "linear1", "dense_h_to_4h", "intermediate.dense"),
}
_FUSED = {"c_attn", "qkv", "qkv_proj", "in_proj", "Wqkv"}  # queries, keys and values one after the other
_ROWS = {
    *("o_proj", "out_proj", "out_lin", "wo", "to_out", "o", "down_proj", "fc2", "fc_out", "c_proj", "w2", "lin2"),
    *("linear2", "dense_4h_to_h", "output.dense", "attention.dense", "self_attention.dense"),
}
# Attributes by which an attention module tells its sizes, in whole heads or features of all heads.
_SIZES = (
    *("num_heads", "n_head", "n_heads", "nhead", "num_attention_heads", "num_key_value_heads", "n_kv_heads"),
    *("num_kv_heads", "split_size", "all_head_size", "inner_dim", "embed_dim"),
)


def _kind(path: str, module: nn.Module) -> tuple[str, bool] | None:
    """(kind, whether it is fused)."""
    words = layer_named(path).split(".")
    for name in (".".join(words[-2:]), words[-1]):
        if name in _ROWS:
            return ROW, False
        if name in _FUSED:
            return COLUMN, True
        if name in _COLUMNS:
            return COLUMN, False
    return None


def _block_of(path: str) -> str:
    """The innermost numbered part of a model: "h.3" of "h.3.attn.c_attn"."""
    words = path.split(".")
    numbers = [i for i, word in enumerate(words) if word.isdigit()]
    return ".".join(words[: numbers[-1] + 1]) if numbers else ""


def _blocks(path: str, module: nn.Module) -> tuple[int, ...] | None:
    ways, features = 3, features_of(module)[1]
    if features % ways:
        raise ConfigError(
            f"'{path}' has {features} outputs, which are no three equal parts: say how its queries, keys and values "
            "lie by a shape in tensor_parallel.partition_config.layer_specs"
        )
    return (features // ways,) * ways


def rule_plan(model: nn.Module) -> Plan:
    """Cuts attention and MLP of each block, the embedding of words and the head. Errors: ConfigError if none is."""
    plan: Plan = {}
    functions = [path for path, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)]
    for path, module in model.named_modules():
        if path.rpartition(".")[0] in functions:  # which calls no layer, but reads the weights
            continue
        kind = _kind(path, module) if is_linear(module) else None
        if kind is not None:
            plan[path] = Cut(kind[0], blocks=_blocks(path, module) if kind[1] else None)
    _leave_heads(plan)
    _check_pairs(plan, dict(model.named_modules()))
    if not plan:
        raise ConfigError(
            f"no layer of {type(model).__name__} is cut by rule: it has no tensor-parallel plan of its own, and none "
            "of its layers has a known name such as q_proj or fc1. Give split_model an example, so that its layers are "
            "found by what flows between them, or name them in tensor_parallel.partition_config.layer_specs"
        )
    plan.update(words_and_heads(model))
    return plan


def words_and_heads(model: nn.Module) -> Plan:
    """The cuts of what is beside the blocks' linear layers."""
    heads = {path: Cut(HEADS) for path, module in model.named_modules() if heads_table(path, module)}
    return {**heads, **_words(model)}


def _leave_heads(plan: Plan) -> None:
    """Beside the blocks, layers with names of such as join features are a head's, as in "classifier.out_proj"."""
    beside = [path for path in plan if not _block_of(path)]
    if all(plan[path].kind == ROW for path in beside):
        for path in beside:
            del plan[path]


def _check_pairs(plan: Plan, modules: dict[str, nn.Module]) -> None:
    """In each block some layers divide the features, and some join them again."""
    kinds: dict[str, set[str]] = {}
    for path, cut in plan.items():
        kinds.setdefault(_block_of(path), set()).add(cut.kind)
    for block, found in kinds.items():
        if found != {COLUMN, ROW}:
            named = [path for path in plan if _block_of(path) == block]
            kind = "columns" if COLUMN in found else "rows"
            raise ConfigError(
                f"the rule cuts {', '.join(map(repr, named))} of '{block}' by {kind} and finds no layer that goes with "
                "them. Give split_model an example, so that layers are found by what flows between them, or name the "
                "block's layers in tensor_parallel.partition_config.layer_specs"
            )


def _words(model: nn.Module) -> Plan:
    """The embedding of words and the head, where the model names them as Transformers does."""
    plan: Plan = {}
    paths = {id(module): path for path, module in model.named_modules()}
    for method, cut, kind in (
        ("get_input_embeddings", Cut(VOCABULARY), nn.Embedding),
        ("get_output_embeddings", Cut(COLUMN, True), nn.Linear),
    ):
        found = None
        if hasattr(model, method):
            with suppress(NotImplementedError):  # Canine has several
                found = getattr(model, method)()
        if type(found) is kind and id(found) in paths:
            plan[paths[id(found)]] = cut
    return plan


def adapt_sizes(model: nn.Module, plan: Plan, size: int) -> None:
    """Divides what attention modules say of their heads: forward finds this rank's. Errors: ConfigError by name."""
    columns = [layer_named(path) for path, cut in plan.items() if cut.kind == COLUMN and not cut.meets_whole]
    owners = {path.rpartition(".")[0] for path in columns if not is_adapters(path)}
    modules = dict(model.named_modules())
    for path in sorted(owners):
        sizes = modules[path].__dict__
        for name in _SIZES:
            value = sizes.get(name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                continue
            if value % size:
                raise ConfigError(
                    f"'{path}'.{name} is {value}, which does not divide among {size} ranks; take parallel.tensor that "
                    f'divides it, or leave the layer whole ("skip" in tensor_parallel.partition_config)'
                )
            sizes[name] = value // size
