# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""All of Transformers' models of text, small: two ranks that share layers, or two stages, train them as one rank does.

Those that cannot be cut are named here, and refused by an error that says why.
"""

import inspect
import threading

import pytest
import torch
from conftest import run_ranks

import deeptide
from deeptide.pipeline.errors import PipelineError

transformers = pytest.importorskip("transformers")
auto = pytest.importorskip("transformers.models.auto.modeling_auto")

WORDS, LENGTH, MICRO, STEPS = 64, 8, 2, 2
LARGEST = 3_000_000  # parameters: some configurations have sizes under names that are not below
SIZES = {
    **dict.fromkeys(("vocab_size", "max_position_embeddings", "n_positions", "n_ctx"), WORDS),
    **dict.fromkeys(("max_encoder_position_embeddings", "max_decoder_position_embeddings"), WORDS),
    "attention_window": 8,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim", "embedding_size"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "d_ff", "hidden_dim", "ffn_dim"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_experts_per_tok", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "num_experts"), 4),
    **dict.fromkeys(("num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 4),
    **dict.fromkeys(("head_dim", "d_kv", "kv_lora_rank", "q_lora_rank", "v_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("bos_token_id", "decoder_start_token_id", "cls_token_id"), 1),
    **dict.fromkeys(("eos_token_id", "sep_token_id"), 2),
    "pad_token_id": 0,
    "attention_types": [[["global", "local"], 1]],
}
MAPPINGS = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM")
NAMES = sorted(
    {
        name if isinstance(name, str) else name[0]
        for mapping in MAPPINGS
        for name in getattr(auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES").values()
    }
)
_seeding = threading.Lock()
REFUSED = {
    "tensor": """
        BeamForCausalLM BigBirdPegasusForConditionalGeneration BitNetForCausalLM BloomForCausalLM
        CTRLLMHeadModel CodeGenForCausalLM ConvBertForMaskedLM CpmAntForCausalLM DebertaForMaskedLM
        DebertaV2ForMaskedLM DogeForCausalLM EsmcForMaskedLM FalconForCausalLM FalconMambaForCausalLM
        GPTBigCodeForCausalLM GPTNeoXJapaneseForCausalLM GraniteMoeSWAForCausalLM GraniteSWAForCausalLM
        HYV4ForCausalLM IBertForMaskedLM InklingForCausalLM JetMoeForCausalLM LEDForConditionalGeneration
        LongformerForMaskedLM MambaForCausalLM MobileBertForMaskedLM ModernBertDecoderForCausalLM
        ModernBertForMaskedLM MoshiForCausalLM MptForCausalLM NystromformerForMaskedLM
        PegasusXForConditionalGeneration ProphetNetForCausalLM RwkvForCausalLM SqueezeBertForMaskedLM
        TrOCRForCausalLM XLNetLMHeadModel
    """,
    "pipeline": """
        AlbertForMaskedLM BigBirdPegasusForConditionalGeneration HrmTextForCausalLM IBertForMaskedLM
        Inkling2ForCausalLM JetMoeForCausalLM SqueezeBertForMaskedLM
    """,
}


def config_of(name):
    config_class = getattr(transformers, name).config_class
    known = inspect.signature(config_class.__init__).parameters
    return config_class(**{key: value for key, value in SIZES.items() if key in known})


def is_small(name):
    with torch.device("meta"):
        model = getattr(transformers, name)(config_of(name))
    return sum(parameter.numel() for parameter in model.parameters()) <= LARGEST


def make(name):
    """The same weights each time."""
    model_class, config = getattr(transformers, name), config_of(name)
    with _seeding, torch.random.fork_rng():
        torch.manual_seed(3)
        model = model_class(config)
    for module in model.modules():
        for key, value in vars(module).items():  # no dropout, by whatever name its rate goes
            if "drop" in key and isinstance(value, float):
                setattr(module, key, 0.0)
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def train(world, name, axis):
    """(losses, norms) of two steps."""
    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "gradient_clipping": 1.0,
        **({"parallel": {axis: 2}} if axis else {}),
    }
    engine = deeptide.initialize(model=make(name), config=config, world=world)[0]
    losses, norms = [], []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(3, WORDS, (MICRO, LENGTH), generator=generator)
        loss = engine(input_ids=tokens, labels=tokens).loss
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
        norms.append(engine.get_global_grad_norm())
    return losses, norms


def alone(name):
    """Returns what one rank gives, twice alike; None: the model is large, draws numbers, or wants more than tokens."""
    if not hasattr(transformers, name):
        return None
    try:
        if not is_small(name):
            return None
        results = [run_ranks(1, train, name, None)[0] for _ in range(2)]
    except Exception:
        return None
    return results[0] if results[0] == results[1] else None


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_train_a_model_as_one_does(name):
    expected = alone(name)
    if expected is None:
        pytest.skip("one rank alone does not train it from tokens and labels, or not twice alike")
    for axis, names in REFUSED.items():
        refused = names.split()
        try:
            losses, norms = run_ranks(2, train, name, axis, timeout=60)[0]
        except (deeptide.ConfigError, PipelineError) as error:
            assert name in refused, error
            continue
        assert name not in refused
        assert losses == pytest.approx(expected[0], rel=5e-5), axis
        assert norms == pytest.approx(expected[1], rel=1e-3), axis
