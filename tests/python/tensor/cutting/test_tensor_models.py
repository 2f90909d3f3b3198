# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Models of Transformers as they are: cut by their own plans, or by rule, they train as the whole ones."""

import cut
import models
import pytest
import torch
from conftest import run_ranks

import deeptide
from deeptide.tensor import entry, losses, make_team, split_model, team_of
from deeptide.tensor.cutting.plans import own_plan, plan_of_specs
from deeptide.tensor.cutting.split import plan_for

transformers = pytest.importorskip("transformers")

VOCAB, LENGTH, MICRO, STEPS = 61, 8, 2, 3
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_NO_DROPOUT = {"bos_token_id": 1, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
_T5 = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
_MBART = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "max_position_embeddings": 64,
    "dropout": 0.0,
    "scale_embedding": True,
}
_BERT = {key: value for key, value in _SIZES.items() if key != "num_key_value_heads"}
_LATENT = {
    **_SIZES,
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "first_k_dense_replace": 2,
}
_WRITES_SUMS = {
    **_SIZES,
    "head_dim": 8,
    "intermediate_size_mlp": 48,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
}
_XGLM = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "ffn_dim": 48,
    "num_layers": 2,
    "attention_heads": 4,
    "max_position_embeddings": 64,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}
_NO_BERT_DROPOUT = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
KINDS = {
    "llama": ("Llama", "ForCausalLM", _SIZES),
    "llama-tied": ("Llama", "ForCausalLM", {**_SIZES, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", "ForCausalLM", {**_SIZES, "head_dim": 8}),
    "mistral": ("Mistral", "ForCausalLM", {**_SIZES, "head_dim": 8}),
    "gemma3": ("Gemma3Text", "ForCausalLM", {**_SIZES, "head_dim": 8}),  # a tied embedding of a class of its own
    "mbart": ("MBart", "ForConditionalGeneration", _MBART),  # so are these
    "phi3": ("Phi3", "ForCausalLM", _SIZES),
    "gpt_neox": ("GPTNeoX", "ForCausalLM", {**_BERT, "attention_dropout": 0.0, "hidden_dropout": 0.0}),
    "gpt2": ("GPT2", "LMHeadModel", {**_GPT2, **_NO_DROPOUT}),
    "mixtral": ("Mixtral", "ForCausalLM", {**_SIZES, "num_local_experts": 4}),
    "qwen3-moe": (
        "Qwen3Moe",
        "ForCausalLM",
        {**_SIZES, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "deepseek_v2": ("DeepseekV2", "ForCausalLM", _LATENT),
    "xglm": ("XGLM", "ForCausalLM", _XGLM),
    "llama4": ("Llama4Text", "ForCausalLM", _WRITES_SUMS),
    "t5": ("T5", "ForConditionalGeneration", _T5),
    "classes": ("Roberta", "ForSequenceClassification", {**_BERT, "num_labels": 4, **_NO_BERT_DROPOUT}),
    "bert": ("Bert", "ForMaskedLM", {**_BERT, **_NO_BERT_DROPOUT}),
}


def make(kind):
    name, suffix, sizes = KINDS[kind]
    config = getattr(transformers, f"{name}Config")(**sizes)
    return models.make_model(kind=lambda: getattr(transformers, f"{name.removesuffix('Text')}{suffix}")(config))


def train(world, kind, settings):
    engine = deeptide.initialize(model=make(kind), config=settings, world=world)[0]
    rank, ranks = cut.batch_rank(engine)
    losses, norms, gradients = [], [], {}
    for tokens, _ in models.batches(STEPS, MICRO * ranks, vocab=VOCAB, length=LENGTH):
        mine = tokens[rank * MICRO : (rank + 1) * MICRO]
        loss = engine(input_ids=mine, labels=mine[:, 0] % 4 if kind == "classes" else mine).loss
        losses.append(loss.item())
        engine.backward(loss)
        gradients = gradients or cut.whole(engine, "gradient")
        engine.step()
        norms.append(engine.get_global_grad_norm())
    return losses, norms, engine.module_state_dict(), gradients


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_as_it_is_trains_as_the_whole_one(kind, stage):
    settings = models.config(stage, micro=MICRO)
    shared = run_ranks(2, train, kind, {**settings, "parallel": {"tensor": 2}})
    whole = run_ranks(1, train, kind, settings)[0]
    assert shared[0][0] == shared[1][0]
    cut.near(shared[0][0], whole[0], 1e-5, "losses")
    cut.near(shared[0][1], whole[1], 1e-4, "norms")
    assert shared[0][3].keys() == whole[3].keys()
    largest = max(gradient.abs().max().item() for gradient in whole[3].values())
    for name, gradient in whole[3].items():
        cut.near(shared[0][3][name], gradient, 1e-4, name, floor=largest / 1000)
    before = make(kind).state_dict()
    assert shared[0][2].keys() == whole[2].keys()
    for name, value in whole[2].items():
        if value.is_floating_point() and not torch.equal(value, before[name]):
            cut.near(cut.moved(name, before, shared[0][2]), cut.moved(name, before, whole[2]), 2e-2, name, 1e-4)


def refuse(world):
    """Attention with biases for all heads."""
    config = transformers.MptConfig(vocab_size=VOCAB, n_layers=2, n_heads=4, d_model=32)
    model = transformers.MptForCausalLM(config)
    with pytest.raises(deeptide.ConfigError, match="cannot run, and the whole one can"):
        deeptide.initialize(model=model, config={**models.config(0), "parallel": {"tensor": 2}}, world=world)


def test_a_model_that_cannot_run_as_it_is_cut_is_refused():
    run_ranks(2, refuse)


def cut_layers(world, kind, settings):
    model = make(kind)
    deeptide.initialize(model=model, config=settings, world=world)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("kind", "inner"), [("mixtral", 48), ("qwen3-moe", 16)])
def test_each_rank_has_a_slice_of_each_expert(kind, inner):
    shapes = run_ranks(2, cut_layers, kind, {**models.config(0), "parallel": {"tensor": 2}})
    assert shapes[0] == shapes[1]
    assert shapes[0]["model.layers.0.mlp.experts.gate_up_proj"] == (4, inner, 32)
    assert shapes[0]["model.layers.0.mlp.experts.down_proj"] == (4, 32, inner // 2)


def tell_of_whole_experts(world):
    model = make("qwen3-moe")
    experts = model.model.layers[0].mlp.experts
    experts.gate_up_proj = torch.nn.Parameter(torch.randn(4, 30, 32))
    experts.down_proj = torch.nn.Parameter(torch.randn(4, 32, 15))
    settings = {**models.config(0), "parallel": {"tensor": 2, "tensor_check": False}}
    deeptide.initialize(model=model, config=settings, world=world)
    return [tuple(layer.mlp.experts.down_proj.shape) for layer in model.model.layers]


def test_experts_that_do_not_divide_stay_whole_and_are_told_of(caplog):
    with caplog.at_level("INFO"):
        shapes = run_ranks(2, tell_of_whole_experts)
    assert shapes[0] == shapes[1] == [(4, 32, 15), (4, 32, 8)]
    assert "'model.layers.0.mlp.experts' and others stay whole" in caplog.text


def test_deepspeeds_section_cuts_as_ours():
    theirs = {"tensor_parallel": {"autotp_size": 2}}
    shapes = run_ranks(2, cut_layers, "llama", {**models.config(0), **theirs})
    assert shapes[0] == run_ranks(2, cut_layers, "llama", {**models.config(0), "parallel": {"tensor": 2}})[0]
    assert shapes[0]["model.layers.0.mlp.down_proj.weight"] == (32, 24)
    assert shapes[0]["model.layers.1.self_attn.k_proj.weight"] == (8, 32)
    specs = [{"patterns": [r".*\.mlp\..*\.weight"], "partition_type": "skip"}]
    theirs["tensor_parallel"]["partition_config"] = {"layer_specs": specs}
    shapes = run_ranks(2, cut_layers, "llama", {**models.config(0), **theirs})
    assert shapes[0]["model.layers.0.mlp.down_proj.weight"] == (32, 48)
    assert shapes[0]["model.layers.1.self_attn.k_proj.weight"] == (8, 32)


def refusal(kind, ranks, changes=None, specs=(), use_rule=True):
    model = make(kind)
    for name, value in (changes or {}).items():
        setattr(model, name, value)

    def rank(world):
        with pytest.raises(deeptide.ConfigError) as caught:
            split_model(make(kind) if not changes else model, make_team(ranks, world, 60.0), specs, use_rule)
        return str(caught.value)

    return run_ranks(ranks, rank)[0]


def test_what_cannot_be_cut_is_refused_by_name():
    assert "num_attention_heads is 4, which does not divide among 3 ranks" in refusal("llama", 3)
    assert (
        "num_key_value_heads is 2, which does not divide among 4 ranks; take parallel.tensor that divides it: 1, 2"
        in (refusal("llama", 4))
    )
    plan = {"model.layers.*.mlp.up_proj": "packed_colwise"}
    assert "'model.layers.0.mlp.up_proj' in the style \"packed_colwise\"" in refusal("llama", 1, {"_tp_plan": plan})
    spec = {"patterns": [r"nothing\.weight"], "partition_type": "row"}
    assert "no layer of the model matches" in refusal("llama", 1, specs=[spec])
    spec = {"patterns": [r".*q_proj\.weight"], "partition_type": "diagonal"}
    assert 'got "diagonal"' in refusal("llama", 1, specs=[spec]).replace("'", '"')
    spec = {"patterns": [r".*norm\.weight"], "partition_type": "row"}
    assert "matches 'model.layers.0.input_layernorm', a LlamaRMSNorm; expected linear" in refusal(
        "llama", 1, specs=[spec]
    )
    assert "names no layer to cut" in refusal("llama", 1, use_rule=False)


def test_a_pattern_of_all_weights_means_those_of_linear_layers():
    """DeepSpeed looks at no other modules."""
    model = make("llama")
    plan = plan_of_specs(model, [{"patterns": [r".*\.weight$"], "partition_type": "column"}], {})
    assert plan.keys() == {path for path, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert {cut.kind for cut in plan.values()} == {"column"}


class Odd(torch.nn.Module):
    """Its attention takes a view of as many features as it was built with."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.o_proj = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.o_proj(self.q_proj(x).roll(1, -1))


def test_a_layer_that_is_used_in_another_way_is_found_at_the_start():
    def rank(world):
        example = {"x": torch.arange(16.0).view(2, 8)}
        with pytest.raises(deeptide.ConfigError, match="differs by up to"):
            split_model(models.make_model(kind=Odd), make_team(2, world, 60.0), example=example)
        model = models.make_model(kind=Odd)
        assert split_model(model, make_team(2, world, 60.0), check=False) is model
        assert team_of(model).size == 2

    run_ranks(2, rank)


def test_rules_know_attention_and_mlp_by_names():
    plan, is_own = plan_for(make("gpt2"))
    assert not is_own
    assert plan["transformer.h.0.attn.c_attn"].blocks == (32, 32, 32)
    assert {plan[f"transformer.h.1.{name}"].kind for name in ("attn.c_proj", "mlp.c_proj")} == {"row"}
    assert plan["transformer.wte"].kind == "vocabulary"
    assert plan["lm_head"].meets_whole
    plan, is_own = plan_for(make("llama"))
    assert is_own
    assert plan == own_plan(make("llama"))
    with pytest.raises(deeptide.ConfigError, match="no layer of Sequential is cut by rule"):
        plan_for(torch.nn.Sequential(torch.nn.Linear(2, 2)))


def recomputing(world, settings):
    model = make("llama")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    engine = deeptide.initialize(model=model, config=settings, world=world)[0]
    tokens = models.batches(1, MICRO, vocab=VOCAB, length=LENGTH)[0][0]
    for _ in range(2):
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
    text = engine.module.eval().generate(tokens[:1, :4], max_new_tokens=6, do_sample=False, eos_token_id=-1)
    return loss.item(), engine.get_global_grad_norm(), text.tolist()


@pytest.mark.parametrize("stage", [0, 3])
def test_activations_that_are_computed_again_and_generation_are_those_of_the_whole_model(stage):
    settings = models.config(stage, micro=MICRO)
    shared = run_ranks(2, recomputing, {**settings, "parallel": {"tensor": 2}})
    whole = run_ranks(1, recomputing, settings)[0]
    assert shared[0] == shared[1]
    cut.near(shared[0][0], whole[0], 1e-5, "loss")
    cut.near(shared[0][1], whole[1], 1e-4, "norm")
    assert shared[0][2] == whole[2]


class Counted:
    """A team's core that counts sums which go back."""

    def __init__(self, core):
        self.core, self.sums = core, 0

    def __getattr__(self, name):
        return getattr(self.core, name)

    def start_all_reduce(self, tensor, phase):
        self.sums += 1
        return self.core.start_all_reduce(tensor, phase)


def sums_of_a_backward(world, kind, stage):
    settings = models.config(stage, micro=MICRO) | {"parallel": {"tensor": 2}}
    engine = deeptide.initialize(model=make(kind), config=settings, world=world)[0]
    team = team_of(engine.module)
    team.core = Counted(team.core)
    tokens = torch.arange(MICRO * LENGTH).view(MICRO, LENGTH) % VOCAB
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    return team.core.sums


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_block_sends_one_sum_back_for_attention_and_one_for_its_mlp(kind, stage, monkeypatch):
    apart = []
    ask = entry._is_apart
    monkeypatch.setattr(entry, "_is_apart", lambda x, weight: apart.append(ask(x, weight)) or apart[-1])
    blocks, head = 2, 1
    assert run_ranks(2, sums_of_a_backward, kind, stage) == [2 * blocks + head] * 2
    assert all(apart)


def losses_of(model, **more):
    """(loss, gradients) of words whose labels are left out in part."""
    tokens = torch.arange(MICRO * LENGTH).view(MICRO, LENGTH) % VOCAB
    labels = tokens.masked_fill(tokens % 3 == 0, -100)
    loss = model(input_ids=tokens, labels=labels, **more).loss
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in model.parameters() if parameter.dim() == 1]


def losses_in_parts(world, kind, more):
    model = split_model(make(kind), make_team(world.size, world, 60.0))
    return losses_of(model, **more)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize("more", [{}, {"num_items_in_batch": 7}, {"num_items_in_batch": torch.tensor(5.0)}], ids=str)
def test_a_causal_loss_is_computed_from_each_ranks_own_logits(kind, more, monkeypatch):
    sizes, compute = [], losses.vocab_parallel_cross_entropy

    def watched(logits, *args, **options):
        sizes.append(logits.shape[-1])
        return compute(logits, *args, **options)

    monkeypatch.setattr(losses, "vocab_parallel_cross_entropy", watched)
    expected, gradients = losses_of(make(kind), **more)
    shared = run_ranks(2, losses_in_parts, kind, more)
    assert sizes == [-(-VOCAB // 2)] * 2
    for loss, found in shared:
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
        if kind == "llama":  # its norms are whole on each rank
            torch.testing.assert_close(found, gradients, rtol=1e-4, atol=1e-6)
    assert torch.equal(shared[0][0], shared[1][0])


def loss_of_other_logits(world):
    model = split_model(make("llama"), make_team(world.size, world, 60.0))
    tokens = torch.arange(LENGTH).view(1, LENGTH)
    logits = model(input_ids=tokens).logits
    return [model.loss_function(logits=x, labels=tokens, vocab_size=VOCAB) for x in (logits, 2 * logits, logits / 1)]


def test_logits_that_the_program_changed_have_transformers_own_loss():
    own, doubled, copied = run_ranks(2, loss_of_other_logits)[0]
    assert doubled != own
    torch.testing.assert_close(copied, own)
