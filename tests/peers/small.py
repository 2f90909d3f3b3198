# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Small models of all of Transformers' architectures, with inputs, labels and a loss for each."""

import contextlib
import functools
import inspect
import re

import torch
import transformers
from torch.utils._pytree import tree_leaves
from transformers.models.auto import modeling_auto as auto

WORDS, ROWS, LABELS, LENGTH, EOS = 64, 2, 4, 6, 2
LARGEST = 8_000_000  # parameters: some configurations have sizes under names that are not below
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
    "DEPTH_ESTIMATION": "none",
    "PRETRAINING": "none",
    "QUESTION_ANSWERING": "span",
}
_NAMES = [
    (
        WORDS,
        "vocab_size max_position_embeddings n_positions n_ctx max_encoder_position_embeddings text_vocab_size "
        "max_decoder_position_embeddings entity_vocab_size src_vocab_size tgt_vocab_size n_words "
        "encoder_hash_byte_group_vocab position_embedding_size shape_vocab_size pronunciation_vocab_size "
        "mamba_d_ssm max_2d_position_embeddings max_source_positions "
        "max_target_positions",
    ),
    (
        32,
        "hidden_size n_embd d_model dim word_embed_proj_dim embedding_size embed_dim text_embed_dim projection_dim "
        "entity_emb_size decoder_hidden_size emb_dim max_length xvector_output_dim image_size out_hidden_size "
        "fusion_hidden_size head_hidden_size d_latents pred_hidden_size cross_hidden_size projector_hidden_size "
        "mm_hidden_size feature_size output_dim hidden_dim_encoder video_size bottleneck_features hidden_channels "
        "neck_hidden_size neck_hidden_channels lru_width encoder_hidden_dim decoder_hidden_dim kv_dim input_dim "
        "hidden_size_per_layer_input d_text d_audio audio_hidden_size output_hidden_size cross_attention_hidden_size",
    ),
    (
        48,
        "intermediate_size n_inner d_ff hidden_dim ffn_dim encoder_ffn_dim decoder_ffn_dim ff_intermediate_size "
        "decoder_intermediate_size dense_intermediate_size mlp_dim ffn_hidden_size projector_ffn_dim mlp_hidden_size",
    ),
    (
        2,
        "num_hidden_layers n_layer n_layers num_layers num_decoder_layers encoder_layers decoder_layers "
        "num_experts_per_tok moe_k moe_topk decoder_num_hidden_layers num_encoder_layers num_blocks num_frames "
        "num_feat_extract_layers num_conv_pos_embedding_groups pred_num_hidden_layers num_self_attends_per_block "
        "encoder_n_layers decoder_n_layers depth num_fusion_layers vision_layers text_layers fusion_num_hidden_layers "
        "num_hidden_layers_encoder connector_layers mamba_n_groups n_groups top_k_experts frames_per_clip",
    ),
    (
        4,
        "num_attention_heads num_key_value_heads n_head n_heads num_heads encoder_attention_heads "
        "decoder_attention_heads num_experts decoder_num_attention_heads num_decoder_attention_heads "
        "attention_heads "
        "num_local_experts n_routed_experts moe_num_experts qk_rope_head_dim qk_nope_head_dim patch_size "
        "num_conv_pos_embeddings mamba_n_heads pred_num_attention_heads num_self_attention_heads mamba_num_heads "
        "linear_num_key_heads linear_num_value_heads num_cross_attention_heads window_size num_experts_total "
        "sliding_window attention_chunk_size conv_num_heads fusion_num_attention_heads encoder_num_attention_heads "
        "cross_num_attention_heads cross_num_key_value_heads index_n_heads num_mamba_heads d_conv vision_heads "
        "num_latents",
    ),
    (
        8,
        "head_dim d_kv kv_lora_rank q_lora_rank v_head_dim rotary_dim attention_window num_mel_bins cross_head_dim "
        "input_feat_per_channel feature_projection_input_dim linear_key_head_dim linear_value_head_dim state_size "
        "mamba_d_state ssm_state_size time_step_rank mamba_dt_rank index_head_dim "
        "global_head_dim pool_dim index_topk d_state num_groups chunk_size mamba_chunk_size",
    ),
    (
        16,
        "mamba_d_head mamba_head_dim moe_intermediate_size shared_expert_intermediate_size classifier_proj_size "
        "codevector_dim conv_channels "
        "moe_shared_expert_intermediate_size expert_dim crop_size shape_embed_dim "
        "pronunciation_embed_dim expert_ffn_hidden_size shared_intermediate_size "
        "embedding_size_per_head",
    ),
    (
        1,
        "n_group topk_group n_shared_experts first_k_dense_replace bos_token_id decoder_start_token_id cls_token_id "
        "forced_bos_token_id tubelet_size input_channels temporal_patch_size spatial_merge_size num_shared_experts "
        "attn_layer_offset expert_layer_offset num_k_shared_layers num_kv_shared_layers num_register_tokens "
        "n_mels_group",
    ),
    (EOS, "eos_token_id sep_token_id"),
    (0, "pad_token_id"),
    (
        0.0,
        "layerdrop mask_time_prob mask_feature_prob router_jitter_noise encoder_layerdrop decoder_layerdrop "
        "attention_probs_dropout_prob stochastic_depth_prob drop_path_rate jitter_noise",
    ),
    (5, "question_token_id image_token_id image_token_index mask_token_id"),
    (6, "video_token_id audio_token_id video_token_index audio_token_index"),
    (7, "vision_start_token_id vision_end_token_id"),
]
SIZES = {name: size for size, names in _NAMES for name in names.split()} | {
    "attention_types": [[["global", "local"], 1]],
    "conv_dim": [16, 16],
    "tdnn_dim": [16, 16],
    "conv_kernel": [10, 3],
    "conv_stride": [5, 2],
    "tdnn_kernel": [3, 1],
    "tdnn_dilation": [1, 1],
    "default_language": "en_XX",
    "attn_layer_period": 2,
    "expert_layer_period": 2,
    "apply_spec_augment": False,
    "use_cache": False,
}
OWN = {  # by the model's type
    "zaya": {"num_experts_per_tok": 1},
    "swin": {"image_size": 64, "window_size": 2},
    "donut-swin": {"image_size": 64, "window_size": 2},
    "zamba": {"layers_block_type": ["mamba", "hybrid"], "layer_types": ["mamba", "hybrid"]},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"], "layer_types": ["mamba", "hybrid"]},
    **{key: {"attention_type": "original_full"} for key in ("big_bird", "bigbird_pegasus")},
    "layoutlmv3": {"coordinate_size": 4, "shape_size": 8},
    "mimo_v2_flash": {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4},
}
_OF_PICTURES = ("vl", "glm4v", "glm46v", "glm_ocr", "omni")  # their rotary embeddings have sections by default
_DEPTHS = ("depths", "layers_per_block", "num_layers_per_stage", "depth", "encoder_depths", "num_blocks_per_stage")
_WIDTHS = ("hidden_sizes", "embed_dims", "dims", "neck_hidden_sizes", "encoder_hidden_size", "embed_dim")
_LISTED_HEADS = ("num_heads", "num_attention_heads", "encoder_num_heads")


def names():
    """{class: the kind of its labels}, of each class once."""
    found = {}
    for mapping, kind in MAPPINGS.items():
        for entry in getattr(auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES").values():
            found.setdefault(entry if isinstance(entry, str) else entry[0], kind)
    return dict(sorted(found.items()))


def in_order():
    """All classes, the first of each architecture before the others."""
    firsts = {}
    for name in sorted(names(), key=lambda name: list(MAPPINGS.values()).index(names()[name])):
        firsts.setdefault(re.sub(r"For[A-Z].*|LMHead.*|With.*", "", name), name)
    return list(dict.fromkeys([*firsts.values(), *names()]))


# -- Configurations ---------------------------------------------------------------------------------------------------


def _listed(key, value):
    """Small numbers in the place of a list; None: it stays."""
    if key in _DEPTHS:
        return [1] * len(value)
    if key in _WIDTHS:
        return [16, 32, 32, 32, 32, 32][: len(value)]
    if key in _LISTED_HEADS:
        return [2] * len(value)
    is_like = key in SIZES and all(type(each) is type(SIZES[key]) for each in value)
    return [SIZES[key]] * len(value) if is_like else None


def _kinds_of_layers(value):
    """Two layers of different kinds, of which one is attention, since some models want it."""
    kinds = list(dict.fromkeys(value))
    attention = [kind for kind in kinds if "attention" in str(kind) and "linear" not in str(kind)]
    last = (attention or kinds)[-1]
    return [next((kind for kind in kinds if kind != last), last), last]


def _rope(value):
    if not isinstance(value, dict):
        return value
    sections = {"mrope_section": [2, 1, 1]} if "mrope_section" in value else {}
    return {key: _rope(each) for key, each in value.items()} | sections


def _sizes_of(config_class, with_lists):
    """Small values of the configuration's keywords."""
    known = inspect.signature(config_class.__init__).parameters
    default = None
    with contextlib.suppress(Exception):
        default = config_class()
    sizes = {}
    for key in known:
        value = getattr(default, key, None)
        if isinstance(value, transformers.PreTrainedConfig):
            sizes[key] = _small(type(value), with_lists).to_dict()
        elif key == "layer_types" and isinstance(value, (list, tuple)) and value:
            sizes[key] = _kinds_of_layers(value)
        elif key == "mlp_layer_types" and isinstance(value, (list, tuple)) and value:
            sizes[key] = [value[0], value[-1]]
        elif isinstance(value, (list, tuple)) and value and not isinstance(SIZES.get(key), list):
            small = _listed(key, value) if with_lists else None
            sizes |= {} if small is None else {key: small}
        elif key in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
            sections = any(word in config_class.model_type for word in _OF_PICTURES)
            sizes[key] = _rope(value | ({"mrope_section": []} if sections else {}))
        elif isinstance(SIZES.get(key), list) and value is not None and not isinstance(value, (list, tuple)):
            continue
        elif key in SIZES and (value is not None or default is None or with_lists):
            is_whole = isinstance(value, int) and isinstance(SIZES[key], float)
            sizes[key] = int(SIZES[key]) if is_whole else SIZES[key]
    return sizes | OWN.get(config_class.model_type, {})


def _small(config_class, with_lists, **others):
    known = inspect.signature(config_class.__init__).parameters
    sizes = _sizes_of(config_class, with_lists) | others
    config = config_class(**{key: value for key, value in sizes.items() if key in known})
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0
    for key in ("use_cache", "eos_token_id", "pad_token_id"):  # which some keep in their base class's keywords
        if hasattr(config, key) and key in sizes:
            with contextlib.suppress(Exception):
                setattr(config, key, sizes[key])
    return config


def config_of(name):
    """The first configuration of which a model is small. Errors: the last attempt's."""
    kind = getattr(transformers, name)
    labels = 2 if names()[name] == "span" else LABELS
    error = None
    for with_lists in (True, False):
        try:
            config = _small(kind.config_class, with_lists)
            if config.num_labels != labels:
                config.num_labels = labels
            with torch.device("meta"):
                model = kind(config)
            size = sum(parameter.numel() for parameter in model.parameters())
            if size <= LARGEST:
                return config
            largest = max(model.named_parameters(), key=lambda each: each[1].numel())
            raise ValueError(f"{size:,} parameters, '{largest[0]}' is {tuple(largest[1].shape)}")
        except Exception as caught:
            error = error or caught
    raise error


# -- Models -----------------------------------------------------------------------------------------------------------


def make(name, config, adds_loss):
    """The same weights each time, no two heads or columns alike, and no dropout, by whatever name its rate goes.

    adds_loss: the model's loss is a sum of its outputs.
    """
    with torch.random.fork_rng():
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
    if adds_loss:
        model.__class__ = with_loss(type(model))
    return model.train()


def with_loss(kind):
    """The same class, whose output has a weighted sum of all floats in it as its loss."""

    @functools.wraps(kind.forward)
    def forward(self, *args, **kwargs):
        output = super(made, self).forward(*args, **kwargs)
        output["loss"] = sum(map(weighted, floats_in(output)))
        return output

    made = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
    return made


def floats_in(output):
    """The floating tensors of an output, without its loss."""
    values = [value for key, value in output.items() if key != "loss"]
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor) and each.is_floating_point()]


def weighted(output):
    """A sum in which no two elements weigh alike. What masks scores, such as -inf, counts little."""
    weights = torch.sin(torch.arange(1, output.numel() + 1, dtype=torch.float32).square() * 0.7).view(output.shape)
    return (output.float().clamp(-1e3, 1e3) * weights).sum() / max(1, output.numel()) ** 0.5


# -- Inputs -----------------------------------------------------------------------------------------------------------


def words(generator=None, rows=ROWS):
    """Numbers of words, none of which means anything, and the end of a sentence in each row."""
    found = torch.randint(8, WORDS, (rows, LENGTH), generator=generator)
    found[:, 1], found[:, -1] = 5, EOS  # 5: some models want a question's or a picture's
    return found


def _inputs_of(model, examples):
    """Yields keyword arguments: words, or Deeptide's guesses with as many rows as BatchNorm wants."""
    needed = inspect.signature(model.forward).parameters
    boxes = torch.tensor([1, 2, 3, 4]).expand(ROWS, LENGTH, 4)
    beside = {"bbox": boxes} if "bbox" in needed else {}
    if "decoder_input_ids" in needed and getattr(model.config, "is_encoder_decoder", False):
        beside["decoder_input_ids"] = words()
    if model.main_input_name == "input_ids" or "input_ids" in needed:
        plain = words()
        plain[:, 1] = 9
        yield {"input_ids": plain, **beside}
        yield {"input_ids": words(), **beside}
        yield {"input_ids": plain, "attention_mask": torch.ones_like(plain), **beside}
    for example in examples:
        if "decoder_input_ids" in example:
            example["decoder_input_ids"] = words()
        if "input_ids" in example and example["input_ids"].dim() == 2:
            example["input_ids"] = words()
        first = next(iter(example.values()))
        if len(first) < ROWS:
            wide = {key: torch.cat([value, value.flip(-1)][:ROWS]) for key, value in example.items() if len(value) == 1}
            yield {**example, **wide, **beside}
        yield {**example, **beside}
        if "input_ids" not in example and "input_ids" in needed:
            yield {**example, "input_ids": words(rows=len(first)), **beside}


def labels_of(kind, inputs):
    """Yields labels that a class may want, and none."""
    first = next(iter(inputs.values()))
    rows = len(first)
    numbers = inputs.get("decoder_input_ids", inputs.get("input_ids"))
    if kind == "classes":
        yield {"labels": torch.arange(rows) % LABELS}
    elif kind == "span":
        yield {"start_positions": torch.arange(rows), "end_positions": torch.arange(rows) + 2}
    elif kind == "map" and first.dim() >= 4:
        yield {"labels": torch.arange(rows * first.shape[-2] * first.shape[-1]).view(rows, *first.shape[-2:]) % 2}
    elif kind == "sounds":
        yield {"labels": torch.arange(3, 6).expand(rows, -1)}
    elif kind == "text" and numbers is not None:
        yield {"labels": numbers}
        yield {"labels": numbers % LABELS}
    yield {}


class UnknownInputsError(Exception):
    """No inputs are known that a model takes."""


def example_of(name, config, examples_of):
    """(inputs, labels, whether the loss is a sum of outputs) that the model takes. examples_of: Deeptide's guesses.

    Errors: UnknownInputsError with what the first guess met.
    """
    kind, tried = names()[name], []
    for adds_loss in (False, True):
        model = make(name, config, adds_loss)
        inputs = iter(_inputs_of(model, _guesses(model, examples_of)))
        for each in inputs:
            for labels in labels_of(kind, each) if not adds_loss else ({},):
                try:
                    with torch.no_grad():
                        loss = model(**each, **labels).loss
                    if loss is None or loss.numel() != 1:
                        continue
                    if bool(loss.isfinite()):
                        return each, labels, adds_loss
                    tried.append("the loss is no number")
                except Exception as error:
                    tried.append(f"{type(error).__name__}: {error}")
    raise UnknownInputsError(tried[0] if tried else "no inputs are known")


def _guesses(model, examples_of):
    with contextlib.suppress(Exception):
        yield from examples_of(model, 2)


def batch_of(example, number):
    """The example with other values."""
    inputs, labels = example
    generator = torch.Generator().manual_seed(number)
    batch = {}
    for key, value in {**inputs, **labels}.items():
        if value.is_floating_point():
            batch[key] = value + 0.3 * torch.randn(value.shape, generator=generator)
        elif key in ("input_ids", "decoder_input_ids") and value.dim() == 2 and value.shape[1] == LENGTH:
            batch[key] = words(generator, len(value))
            batch[key][:, 1] = value[:, 1]
        else:
            batch[key] = value
    for source in ("decoder_input_ids", "input_ids"):
        if labels.get("labels") is inputs.get(source, 0):
            batch["labels"] = batch[source]
            break
    return batch
