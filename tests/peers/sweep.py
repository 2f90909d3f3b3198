# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Small models of all of Transformers' architectures, and whether ranks that share or divide them train them alike.

`python tests/peers/sweep.py [class …]` runs these classes, or all, and writes what it finds to docs/models.md.
"""

import contextlib
import inspect
import logging
import re
import sys
import threading
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from transformers.models.auto import modeling_auto as auto

import deeptide
from deeptide.pipeline.errors import PipelineError
from deeptide.tensor.cutting.examples import examples_of

WORDS, MICRO, GAS, STEPS, LABELS = 64, 2, 2, 2, 4
LARGEST = 4_000_000  # parameters: some configurations have sizes under names that are not below
AXES = {"tensor": {"tensor": 2}, "pipeline": {"pipeline": 2}, "both": {"pipeline": 2, "tensor": 2}}
MAPPINGS = {
    "CAUSAL_LM": "text",
    "MASKED_LM": "text",
    "SEQ_TO_SEQ_CAUSAL_LM": "text",
    "IMAGE_TEXT_TO_TEXT": "text",
    "SPEECH_SEQ_2_SEQ": "text",
    "SEQUENCE_CLASSIFICATION": "classes",
    "TOKEN_CLASSIFICATION": "text",
    "IMAGE_CLASSIFICATION": "classes",
    "VIDEO_CLASSIFICATION": "classes",
    "AUDIO_CLASSIFICATION": "classes",
    "CTC": "sounds",
    "MASKED_IMAGE_MODELING": "none",
    "SEMANTIC_SEGMENTATION": "map",
    "DEPTH_ESTIMATION": "depth",
    "PRETRAINING": "none",
    "QUESTION_ANSWERING": "span",
}
SIZES = {
    **dict.fromkeys(("vocab_size", "max_position_embeddings", "n_positions", "n_ctx"), WORDS),
    **dict.fromkeys(("max_encoder_position_embeddings", "max_decoder_position_embeddings"), WORDS),
    **dict.fromkeys(("max_source_positions", "max_target_positions"), 16),
    **dict.fromkeys(("text_vocab_size", "entity_vocab_size"), WORDS),
    "attention_window": 8,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim", "embedding_size"), 32),
    **dict.fromkeys(("embed_dim", "text_embed_dim", "projection_dim", "entity_emb_size", "decoder_hidden_size"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "d_ff", "hidden_dim", "ffn_dim"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "decoder_intermediate_size", "ff_intermediate_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_experts_per_tok", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("decoder_num_hidden_layers", "num_encoder_layers", "num_blocks"), 2),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "num_experts"), 4),
    **dict.fromkeys(("decoder_num_attention_heads", "num_decoder_attention_heads", "attention_heads"), 4),
    **dict.fromkeys(("num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 4),
    **dict.fromkeys(("head_dim", "d_kv", "kv_lora_rank", "q_lora_rank", "v_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("bos_token_id", "decoder_start_token_id", "cls_token_id", "forced_bos_token_id"), 1),
    **dict.fromkeys(("eos_token_id", "sep_token_id"), 2),
    "pad_token_id": 0,
    "attention_types": [[["global", "local"], 1]],
    "num_labels": LABELS,
    "conv_dim": [16, 16],
    "tdnn_dim": [16, 16],
    **dict.fromkeys(("max_length", "xvector_output_dim"), 32),
    **dict.fromkeys(("image_size", "classifier_proj_size", "codevector_dim", "conv_channels"), 16),
    **dict.fromkeys(("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim"), 8),
    **dict.fromkeys(("patch_size", "num_conv_pos_embeddings"), 4),
    **dict.fromkeys(("num_frames", "num_feat_extract_layers", "num_conv_pos_embedding_groups"), 2),
    **dict.fromkeys(("tubelet_size", "input_channels"), 1),
    **dict.fromkeys(("layerdrop", "mask_time_prob", "mask_feature_prob", "router_jitter_noise"), 0.0),
    "conv_kernel": [10, 3],
    "conv_stride": [5, 2],
    "tdnn_kernel": [3, 1],
    "tdnn_dilation": [1, 1],
    "apply_spec_augment": False,
}
_DEPTHS = ("depths", "layers_per_block", "num_layers_per_stage", "depth", "encoder_depths", "num_blocks_per_stage")
_WIDTHS = ("hidden_sizes", "embed_dims", "dims", "neck_hidden_sizes", "encoder_hidden_size", "embed_dim")
_LISTED_HEADS = ("num_heads", "num_attention_heads", "encoder_num_heads")
_seeding = threading.Lock()


def names():
    """{class: the kind of its labels}, of each class once."""
    found = {}
    for mapping, kind in MAPPINGS.items():
        for entry in getattr(auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES").values():
            found.setdefault(entry if isinstance(entry, str) else entry[0], kind)
    return dict(sorted(found.items()))


def _small(config_class, with_lists):
    """A configuration with small sizes wherever its names are known, also within."""
    known = inspect.signature(config_class.__init__).parameters
    sizes = {key: value for key, value in SIZES.items() if key in known}
    if with_lists:
        with contextlib.suppress(Exception):
            for key, value in vars(config_class()).items():
                if isinstance(value, (list, tuple)) and key in known and all(isinstance(each, int) for each in value):
                    if key in _DEPTHS:
                        sizes[key] = [1] * len(value)
                    elif key in _WIDTHS:
                        sizes[key] = [16, 32, 32, 32, 32, 32][: len(value)]
                    elif key in _LISTED_HEADS:
                        sizes[key] = [2] * len(value)
    for key, part in getattr(config_class, "sub_configs", {}).items():
        if key in known and hasattr(part, "model_type") and part.model_type:
            sizes[key] = _small(part, with_lists).to_dict()
    return config_class(**sizes, **({} if "num_labels" in known else {"num_labels": LABELS}))


def config_of(name):
    """The first configuration of which a model is small; None: there is none."""
    kind = getattr(transformers, name)
    for with_lists in (True, False):
        with contextlib.suppress(Exception):
            config = _small(kind.config_class, with_lists)
            with torch.device("meta"):
                model = kind(config)
            if sum(parameter.numel() for parameter in model.parameters()) <= LARGEST:
                return config
    return None


def make(name, config):
    """The same weights each time, no two heads or columns alike, and no dropout, by whatever name its rate goes."""
    with _seeding, torch.random.fork_rng():
        torch.manual_seed(3)
        model = getattr(transformers, name)(config)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * 0.05)
    for module in model.modules():
        for key, value in vars(module).items():
            if "drop" in key and isinstance(value, float):
                setattr(module, key, 0.0)
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def example_of(name, config):
    """(inputs, labels) with which the model computes a loss, from Deeptide's guesses; None: none of them."""
    model, kind = make(name, config), names()[name]
    for inputs in examples_of(model, 2):
        for labels in _labels_of(kind, inputs):
            with contextlib.suppress(Exception), torch.no_grad():
                loss = model(**inputs, **labels).loss
                if loss is not None and loss.numel() == 1 and bool(loss.isfinite()):
                    return inputs, labels
    return None


def _labels_of(kind, inputs):
    first = next(iter(inputs.values()))
    rows = len(first)
    classes = torch.arange(rows) % LABELS
    words = inputs.get("decoder_input_ids", inputs.get("input_ids"))
    if kind == "classes":
        yield {"labels": classes}
    elif kind == "span":
        yield {"start_positions": torch.arange(rows), "end_positions": torch.arange(rows) + 2}
    elif kind == "map" and first.dim() >= 4:
        yield {"labels": torch.arange(rows * first.shape[-2] * first.shape[-1]).view(rows, *first.shape[-2:]) % 2}
    elif kind == "sounds":
        yield {"labels": torch.arange(3, 6).expand(rows, -1)}
    elif words is not None:
        yield {"labels": words}
        yield {"labels": words % LABELS}
    yield {}


def _batch(example, number):
    """The example with other values, and as many rows as a micro-batch has."""
    inputs, labels = example
    generator = torch.Generator().manual_seed(number)
    batch = {}
    for key, value in {**inputs, **labels}.items():
        if value.is_floating_point():
            batch[key] = value + 0.3 * torch.randn(value.shape, generator=generator)
        elif key in inputs:
            words = torch.randint(3, int(value.max()) + 1, value.shape, generator=generator)
            batch[key] = words
        else:
            batch[key] = value
    if "labels" in labels and labels["labels"] is inputs.get("input_ids"):
        batch["labels"] = batch["input_ids"]
    return batch


def train(world, name, config, example, axes):
    """(losses, {parameter: update}) of some steps of SGD, which shows gradients as they are."""
    settings = {
        "train_micro_batch_size_per_gpu": len(next(iter(example[0].values()))),
        "gradient_accumulation_steps": GAS,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-2}},
        **({"parallel": axes} if axes else {}),
    }
    model = make(name, config)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    parameters = {key for key, _ in model.named_parameters(remove_duplicate=False)}
    engine = deeptide.initialize(model=model, config=settings, world=world)[0]
    losses = []
    for number in range(STEPS * GAS):
        loss = engine(**_batch(example, number)).loss
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    after = engine.module_state_dict()
    return losses, {
        key: after[key].float() - before[key].float() for key in before if key in parameters and key in after
    }


def run(ranks, function, *args, timeout=120):
    """Calls function(world, *args) in a thread for each rank. Returns their results, or raises an error."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=timeout))
    results, errors = [None] * ranks, {}

    def call(rank):
        torch.set_num_threads(1)
        try:
            results[rank] = function(deeptide.make_world(store, rank, ranks), *args)
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=call, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
    if errors:
        raise sorted(errors.values(), key=lambda error: isinstance(error, deeptide.CommError))[0]
    if any(thread.is_alive() for thread in threads):
        raise TimeoutError(f"no end after {timeout} s")
    return results


def worst(results, expected):
    """(by how much of its size a loss or an update differs, which). results: of all ranks, which have stages."""
    updates = {key: value for _, own in results for key, value in own.items()}
    losses, (true_losses, true_updates) = results[0][0], expected
    found = [(abs(one - other) / max(abs(other), 1e-3), "the loss") for one, other in zip(losses, true_losses)]
    sizes = {key: float(value.square().mean().sqrt()) for key, value in true_updates.items() if value.numel()}
    least = 1e-3 * max(sizes.values())
    for key, size in sizes.items():
        if key not in updates:
            found.append((float("inf"), f"'{key}' is missing"))
            continue
        off = float((updates[key] - true_updates[key]).square().mean().sqrt()) / max(size, least, 1e-12)
        found.append((off if off == off else float("inf"), f"'{key}'"))
    return max(found, key=lambda each: each[0])


MOST = 3e-3


def outcomes(name, axes=AXES):
    """{axis: "trains", "refused: …", "differs: …" or "error: …"}; a text instead where one rank alone shows nothing."""
    config = config_of(name) if hasattr(transformers, name) else None
    if config is None:
        return "not built small"
    try:
        example = example_of(name, config)
        if example is None:
            return "no loss from words, a picture or a sound alone"
        expected = run(1, train, name, config, example, None)[0]
    except Exception as error:
        return f"does not train alone: {_first(error)}"
    if all(float(value.abs().max()) == 0.0 for value in expected[1].values() if value.numel()):
        return "does not train alone: no weight moves"
    found = {}
    for axis, sizes in axes.items():
        ranks = sizes.get("tensor", 1) * sizes.get("pipeline", 1)
        try:
            off, what = worst(run(ranks, train, name, config, example, sizes), expected)
        except (deeptide.ConfigError, PipelineError) as error:
            found[axis] = f"refused: {_first(error)}"
        except Exception as error:
            found[axis] = f"error: {type(error).__name__}: {_first(error)}"
        else:
            found[axis] = "trains" if off <= MOST else f"differs: {what} by {off:.2g}"
    if any(value.startswith(("differs", "error")) for value in found.values()):
        again = run(1, train, name, config, example, None)
        if worst(again, expected)[0] > MOST / 10:
            return "does not train alone: twice with other numbers"
    return found


def _first(error):
    return (str(error).splitlines() or [type(error).__name__])[0]


# -- The page --------------------------------------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
_TRAIN, _NOT_SHOWN = "## Trained on every axis", "## Not shown by the sweep"
_ONE_AXIS = "## Trained at tensor 2, not run on the other axes"


def read_page():
    """{class: what `outcomes` gave}, with reasons cut short."""
    found, section = {}, ""
    for line in PAGE.read_text().splitlines():
        section = line if line.startswith("## ") else section
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `"):
            found[cells[0].strip("`")] = dict(zip(AXES, cells[1:]))
        for name in re.findall(r"`(\w+)`", line) if line.startswith("`") else ():
            others = "trains" if section == _TRAIN else "not run"
            found[name] = "not shown" if section == _NOT_SHOWN else {**dict.fromkeys(AXES, others), "tensor": "trains"}
    return found


def _reason(text):
    """A cell of the table: an error's first sentence, without what differs from class to class."""
    return re.split(r": a layer is used|; known are|\. Name |; take parallel|\. Give ", text.replace("|", "/"))[0][:230]


def _others(result):
    return {result.get(axis, "not run") for axis in AXES if axis != "tensor"}


def write_page(found):
    """Writes the lists of the page; its text stays."""
    head = PAGE.read_text().split("## ")[0]
    shown = {name: result for name, result in sorted(found.items()) if isinstance(result, dict)}
    whole = [name for name, result in shown.items() if [result.get(axis) for axis in AXES] == ["trains"] * len(AXES)]
    one = [name for name, result in shown.items() if _others(result) == {"not run"} and result["tensor"] == "trains"]
    hidden = [name for name, result in sorted(found.items()) if not isinstance(result, dict)]
    rows = [
        f"| `{name}` | " + " | ".join(_reason(result.get(axis, "not run")) for axis in AXES) + " |"
        for name, result in shown.items()
        if name not in (*whole, *one)
    ]
    lists = [", ".join(f"`{name}`" for name in each) or "None." for each in (whole, one, hidden)]
    table = ["| class | tensor 2 | pipeline 2 | both |", "|---|---|---|---|", *rows]
    refused = ["## Refused on an axis", "\n".join(table)]
    parts = [head + _TRAIN, lists[0], *refused, _ONE_AXIS, lists[1], _NOT_SHOWN, lists[2]]
    PAGE.write_text("\n\n".join(parts) + "\n")


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    results = read_page()
    for each in sys.argv[1:] or names():
        results[each] = outcomes(each)
        print(each, results[each], flush=True)
        write_page(results)
