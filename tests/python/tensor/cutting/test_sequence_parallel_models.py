# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Models as they are, of whose positions each rank has a part between the layers that ranks share."""

from collections import Counter
from types import SimpleNamespace

import cut
import families
import meshes
import models
import pytest
import torch
from conftest import run_ranks
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import deeptide
from deeptide.pipeline.passing.passage import Passage
from deeptide.tensor import make_team, split_model, team_of
from deeptide.tensor.positions import OwnDropout, as_own_dropout

transformers = pytest.importorskip("transformers")

VOCAB, LENGTH, MICRO, STEPS = 61, 8, 2, 3
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_LLAMA = {**_SIZES, "num_key_value_heads": 4, "head_dim": 8, "bos_token_id": 1, "eos_token_id": 2}
_NO_DROPOUT = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
_GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "bos_token_id": 1}
_T5 = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4, "dropout_rate": 0.0}
KINDS = {
    "gpt2": ("GPT2", "LMHeadModel", {**_GPT2, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}),
    "llama": ("Llama", "ForCausalLM", _LLAMA),
    "qwen3": ("Qwen3", "ForCausalLM", {**_LLAMA, "tie_word_embeddings": True}),
    "mistral": ("Mistral", "ForCausalLM", _LLAMA),
    "bert": ("Bert", "ForMaskedLM", {**_SIZES, **_NO_DROPOUT}),
    "mixtral": ("Mixtral", "ForCausalLM", {**_LLAMA, "num_local_experts": 4, "output_router_logits": True}),
    "qwen2-moe": (
        "Qwen2Moe",
        "ForCausalLM",
        {**_LLAMA, "num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    ),
    "deepseek_v2": (
        "DeepseekV2",
        "ForCausalLM",
        {
            **_LLAMA,
            "kv_lora_rank": 8,
            "q_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 8,
            "first_k_dense_replace": 3,
        },
    ),
    "gpt_neox": ("GPTNeoX", "ForCausalLM", {**_SIZES, "attention_dropout": 0.0, "hidden_dropout": 0.0}),
    "t5": ("T5", "ForConditionalGeneration", {**_T5, "decoder_start_token_id": 0}),
}


def make(kind):
    name, suffix, sizes = KINDS[kind]
    config = getattr(transformers, f"{name}Config")(**sizes)
    return models.make_model(kind=lambda: getattr(transformers, f"{name}{suffix}")(config))


def parallel(tensor, **more):
    return {"parallel": {"tensor": tensor, "sequence_parallel_norms": True, **more}}


def train(world, kind, settings, recompute=False):
    model = make(kind)
    engine = deeptide.initialize(model=model, config=settings, world=world)[0]
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": recompute == "reentrant"})
    rank, ranks = cut.batch_rank(engine)
    losses, norms, gradients = [], [], {}
    for tokens, _ in models.batches(STEPS, MICRO * ranks, vocab=VOCAB, length=LENGTH):
        mine = tokens[rank * MICRO : (rank + 1) * MICRO]
        loss = engine(input_ids=mine, labels=mine).loss
        losses.append(loss.item())
        engine.backward(loss)
        gradients = gradients or cut.whole(engine, "gradient")
        engine.step()
        norms.append(engine.get_global_grad_norm())
    return losses, norms, engine.module_state_dict(), gradients


def compare(shared, whole, kind, share=1e-5):
    """`share`: of the largest, by which losses may differ. Adam divides small gradients by themselves."""
    assert all(result[0] == shared[0][0] for result in shared), "all ranks agree in every bit"
    cut.near(shared[0][0], whole[0], share, "losses")
    cut.near(shared[0][1], whole[1], 10 * share, "norms")
    assert shared[0][3].keys() == whole[3].keys()
    largest = max(gradient.abs().max().item() for gradient in whole[3].values())
    for name, gradient in whole[3].items():
        cut.near(shared[0][3][name], gradient, 10 * share, name, floor=largest / 1000)
    before = make(kind).state_dict()
    assert shared[0][2].keys() == whole[2].keys()
    for name, value in whole[2].items():
        if value.is_floating_point() and not torch.equal(value, before[name]):
            cut.near(cut.moved(name, before, shared[0][2]), cut.moved(name, before, whole[2]), 2e-2, name, 1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ranks", "stage"), [(2, 0), (4, 3), (2, 2)])
def test_a_model_trains_as_the_whole_one(kind, ranks, stage):
    settings = models.config(stage, micro=MICRO)
    shared = run_ranks(ranks, train, kind, {**settings, **parallel(ranks)})
    compare(shared, run_ranks(1, train, kind, settings)[0], kind)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_data_ranks_of_such_models_train_as_those_of_whole_ones(kind, stage):
    settings = models.config(stage, micro=MICRO)
    shared = run_ranks(4, train, kind, {**settings, **parallel(2)})
    whole = run_ranks(2, train, kind, settings)
    compare(shared[:2], whole[0], kind)
    compare(shared[2:], whole[1], kind)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_bf16_follows_the_whole_model(kind, recompute):
    settings = models.config(2, micro=MICRO, bf16=True)
    shared = run_ranks(2, train, kind, {**settings, **parallel(2)}, recompute)
    whole = run_ranks(1, train, kind, settings, recompute)[0]
    cut.near(shared[0][0], whole[0], 4 * 2**-8, "losses")  # each output is rounded to 8 bits, in other sums
    cut.near(shared[0][1], whole[1], 0.1, "norms")


@pytest.mark.parametrize("way", ["non-reentrant", "reentrant", "policy"])
@pytest.mark.parametrize("stage", [0, 3])
def test_recomputation_changes_no_bit(way, stage):
    settings = {**models.config(stage, micro=MICRO), **parallel(2)}
    kept = run_ranks(2, train, "gpt2", settings)
    policy = {"activation_checkpointing": {"policy": "recompute"}} if way == "policy" else {}
    again = run_ranks(2, train, "gpt2", {**settings, **policy}, "" if way == "policy" else way)
    assert [result[:2] for result in again] == [result[:2] for result in kept]
    models.assert_same(again[0][3], kept[0][3])


def even_batches(name, data_rank, data_size, steps, gas):
    """Yields batches as families does, of lengths that divide among two ranks."""
    draws = torch.Generator().manual_seed(5)
    for number in range(steps * gas * data_size):
        length = families.LENGTH + number // data_size % 3 * 2
        tokens = torch.randint(1, families.VOCABULARY, (families.MICRO, length), generator=draws)
        if number % data_size != data_rank:
            continue
        mask = torch.ones_like(tokens)
        mask[0, -2:] = number % 2
        words = {"input_ids": tokens, "attention_mask": mask, "labels": tokens}
        yield (tokens, tokens.roll(1, 1)) if name == "plain" else words


@pytest.fixture
def even(monkeypatch):
    monkeypatch.setattr(families, "batches", even_batches)


@pytest.mark.usefixtures("even")
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert", "mixtral", "qwen3", "t5", "plain"])
@pytest.mark.parametrize(("mesh", "stage"), [((2, 1, 2), 1), ((2, 1, 2), 3), ((2, 2, 2), 2), ((1, 1, 2), 0)], ids=str)
def test_stages_hand_on_parts(kind, mesh, stage):
    pipeline, data, tensor = mesh
    settings = meshes.config(kind, stage, pipeline, tensor, parallel={"sequence_parallel_norms": True})
    found = run_ranks(pipeline * data * tensor, meshes.train, kind, settings)
    meshes.compare(found, run_ranks(data, meshes.train, kind, meshes.config(kind, stage)), kind)


@pytest.mark.usefixtures("even")
def test_a_stage_sends_its_positions_alone(monkeypatch):
    sent = []
    hand_on = Passage._hand_on

    def watched(self, block, args, kwargs):
        sent.append(tuple(block.take_apart(args, kwargs)[0].shape))
        hand_on(self, block, args, kwargs)

    monkeypatch.setattr(Passage, "_hand_on", watched)
    settings = meshes.config("llama", 0, 2, 2, parallel={"sequence_parallel_norms": True})
    run_ranks(4, meshes.train, "llama", settings)
    assert set(sent) == {(families.MICRO, length // 2, 16) for length in (6, 8, 10)}


# -- what each rank keeps ---------------------------------------------------------------------------------------------


def kept_by_blocks(world, kind, settings):
    """{shape: how many tensors of it}, of what autograd keeps of all but the last block; parameters are left out."""
    model = make(kind)
    engine = deeptide.initialize(model=model, config=settings, world=world)[0]
    kept, blocks = {}, model.model.layers
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}

    def pack(tensor):
        if tensor.untyped_storage()._cdata not in own:
            kept[tensor.untyped_storage()._cdata] = tensor.clone()
        return tensor

    hooks = [
        blocks[0].register_forward_pre_hook(lambda *_: watch.__enter__()),
        blocks[-1].register_forward_pre_hook(lambda *_: watch.__exit__(None, None, None)),
    ]
    watch = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    tokens = torch.arange(MICRO * LENGTH).view(MICRO, LENGTH) % VOCAB
    engine(input_ids=tokens, labels=tokens)
    assert len(hooks) == 2
    return Counter(tuple(tensor.shape) for tensor in kept.values()), sum(t.nbytes for t in kept.values())


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_keeps_its_part_of_norms_and_residuals(ranks):
    settings = models.config(0, micro=MICRO)
    one = run_ranks(ranks, kept_by_blocks, "llama", {**settings, "parallel": {"tensor": ranks}})
    parts = run_ranks(ranks, kept_by_blocks, "llama", {**settings, **parallel(ranks)})
    whole, part = (MICRO, LENGTH, 32), (MICRO, LENGTH // ranks, 32)
    blocks, each = 2, 4  # two norms: what they normalize and what they scale
    assert one[0][0][whole] >= blocks * each
    for shapes, size in parts:
        assert shapes[part] >= blocks * each
        assert shapes[whole] == 0
        assert size < one[0][1]


# -- lengths ----------------------------------------------------------------------------------------------------------


def words_of(world, kind, settings, length, steps):
    model = make(kind)
    engine = deeptide.initialize(model=model, config=settings, world=world)[0]
    tokens = torch.arange(2 * length).view(2, length) % VOCAB
    engine.eval()
    with torch.no_grad():
        logits = engine(input_ids=tokens).logits
    words = model.generate(tokens, max_new_tokens=steps, do_sample=False, eos_token_id=None) if steps else None
    return logits, words


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("length", [1, 3, 5, 8])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_evaluation_takes_any_length(kind, ranks, length):
    steps = 0 if kind == "bert" else 4
    shared = run_ranks(ranks, words_of, kind, {**models.config(0), **parallel(ranks)}, length, steps)
    logits, words = run_ranks(1, words_of, kind, models.config(0), length, steps)[0]
    for found, chosen in shared:
        cut.near(found, logits, 1e-5, "logits")
        assert steps == 0 or torch.equal(chosen, words)


def refuse_length(world, settings, mode):
    engine = deeptide.initialize(model=make("llama"), config={**settings, **parallel(2)}, world=world)[0]
    tokens = torch.arange(10).view(2, 5)
    engine.train(mode != "eval")
    refused = pytest.raises(ValueError, match="5 positions do not divide among the 2 ranks")
    with refused, torch.set_grad_enabled(mode != "reentrant"):
        engine(input_ids=tokens, labels=tokens)


@pytest.mark.parametrize("mode", ["train", "eval", "reentrant"])
def test_what_may_be_recomputed_refuses_lengths_that_do_not_divide(mode):
    run_ranks(2, refuse_length, models.config(0), mode)


def refuse_length_on_stages(world):
    more = {"parallel": {"sequence_parallel_norms": True}, "deeptide": {"error_grace": 1}}
    engine = meshes.start(world, "llama", meshes.config("llama", 0, 2, 2, **more))
    tokens = torch.arange(10).view(2, 5) % families.VOCABULARY
    # The second stage hears of the first one's error, or finds its own, whichever comes first.
    with pytest.raises((ValueError, deeptide.CommError), match="5 positions do not divide among the 2 ranks"):
        engine.eval_batch(iter([{"input_ids": tokens, "labels": tokens}] * meshes.GAS))


def test_stages_refuse_lengths_that_do_not_divide():
    run_ranks(4, refuse_length_on_stages)


# -- what goes between the ranks --------------------------------------------------------------------------------------


class Counted:
    """A team's core that counts its exchanges of activations."""

    def __init__(self, core):
        self.core, self.calls = core, Counter()

    def __getattr__(self, name):
        method = getattr(self.core, name)

        def call(tensor, phase):
            self.calls[name.removeprefix("start_"), phase] += phase in ("forward", "backward")
            return method(tensor, phase)

        return call if name.removeprefix("start_") in ("all_reduce", "all_gather", "reduce_scatter") else method


def exchanges(world, kind):
    engine = deeptide.initialize(model=make(kind), config={**models.config(0), **parallel(2)}, world=world)[0]
    team = team_of(engine.module)
    hidden = torch.randn(MICRO, LENGTH, 32, requires_grad=True)
    rest = {}
    if kind == "llama":
        rest["position_embeddings"] = engine.module.model.rotary_emb(hidden, torch.arange(LENGTH)[None])
    blocks = engine.module.model.layers if kind == "llama" else engine.module.transformer.h
    team.core = Counted(team.core)
    for block in blocks:
        hidden = block(hidden, **rest)
    hidden.sum().backward()
    return dict(+team.core.calls)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_block_gathers_and_scatters_once_for_attention_and_once_for_its_mlp(kind):
    blocks, edge = 3, 1  # the last block joins, the first one's gradient is joined
    expected = {
        ("all_gather", "forward"): 2 * blocks + edge,
        ("reduce_scatter", "forward"): 2 * blocks,
        ("all_gather", "backward"): 2 * 2 * blocks + edge,  # what column-parallel layers took is joined again
        ("reduce_scatter", "backward"): 2 * blocks,
    }
    assert run_ranks(2, exchanges, kind) == [expected] * 2


# -- modules of other kinds -------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Looks back, by a mask that is made of its input's length."""

    def __init__(self, width):
        super().__init__()
        self.functions = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, query, key, value):
        ahead = torch.ones(query.shape[1], query.shape[1]).triu(1).bool()
        return self.functions(query, key, value, attn_mask=ahead)


class Mixed(models.Block):
    """Beside layers that are cut directly in it, it has attention that stays whole, a linear layer, scales, dropout."""

    def __init__(self, width):
        super().__init__(width)
        self.attention, self.scale = Attention(width), nn.Parameter(torch.ones(width))
        self.mix, self.drop = nn.Linear(width, width), nn.Dropout(0.25)

    def forward(self, x):
        attended, _ = self.attention(x, x, x)
        x = x + self.drop(self.mix(attended)) * self.scale
        return (super().forward(x), None)


class MixedModel(models.TinyModel):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.h = nn.ModuleList(Mixed(20) for _ in range(3))
        for block in self.h:
            block.drop.p = dropout

    def forward(self, tokens, targets=None):
        x = self.embed(tokens)
        for block in self.h:
            x, _ = block(x)
        logits = self.head(self.norm(x))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def train_mixed(world, settings):
    engine = cut.start(world, settings, kind=MixedModel)
    losses, norms = cut.steps(engine, STEPS)
    return losses, norms, cut.whole(engine, "exp_avg")


def mixed_config(stage, tensor):
    settings = cut.config(stage, tensor)
    settings.get("parallel", {})["sequence_parallel_norms"] = True
    return settings


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("stage", [0, 3])
def test_modules_that_need_all_positions_get_them(ranks, stage):
    shared = run_ranks(ranks, train_mixed, mixed_config(stage, ranks))
    losses, norms, moments = run_ranks(1, train_mixed, cut.config(stage, 1))[0]
    cut.near(shared[0][0], losses, 1e-5, "losses")
    cut.near(shared[0][1], norms, 1e-4, "norms")
    largest = max(moment.abs().max().item() for moment in moments.values())
    for name, moment in moments.items():
        cut.near(shared[0][2][name], moment, 1e-4, name, floor=largest / 1000)


def kinds_of_dropouts(world):
    model = split_model(MixedModel(0.25), make_team(2, world, 60.0), cut.SPECS, False, sequence_parallel_norms=True)
    return [type(block.drop) for block in model.h]


@pytest.mark.parametrize("again", [False, True])
def test_each_rank_drops_other_elements(again):
    assert run_ranks(2, kinds_of_dropouts) == [[OwnDropout] * 3] * 2
    found, states = [], []
    for rank in range(2):
        dropout = nn.Dropout(0.25)
        as_own_dropout(dropout, SimpleNamespace(index=rank))
        torch.manual_seed(0)
        x = torch.ones(2, 4, 500, requires_grad=True)
        y = checkpoint(dropout, x, use_reentrant=False) if again else dropout(x)
        y.sum().backward()
        assert torch.equal(x.grad, y), "a recomputation drops what it dropped"
        assert torch.equal(dropout.eval()(x), x)
        found.append(y.detach())
        states.append(torch.get_rng_state())
    assert torch.equal(*states), "the ranks go on alike"
    assert not torch.equal(*found)
    for y in found:
        assert set(y.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
        assert 0.7 < (y > 0).float().mean() < 0.8  # of 4000: seven deviations


def save_mixed(world, folder, settings):
    engine = cut.start(world, settings, kind=MixedModel)
    cut.steps(engine, STEPS)
    engine.save_checkpoint(folder)
    return cut.whole(engine, "master"), cut.whole(engine, "exp_avg"), cut.steps(engine, STEPS, begin=STEPS)


def load_mixed(world, folder, settings):
    engine = cut.start(world, settings, kind=MixedModel, seed=9)
    assert engine.load_checkpoint(folder)[0] is not None
    return cut.whole(engine, "master"), cut.whole(engine, "exp_avg"), cut.steps(engine, STEPS, begin=STEPS)


@pytest.mark.parametrize("by_parts", [False, True])
@pytest.mark.parametrize("stage", [0, 3])
def test_checkpoints_do_not_tell_who_kept_parts(tmp_path, stage, by_parts):
    """`by_parts`: those that load keep parts of the positions, those that saved do not; else the other way round."""
    saving, loading = cut.config(stage, 2), mixed_config(stage, 2)
    if not by_parts:
        saving, loading = loading, saving
    before = run_ranks(4, save_mixed, str(tmp_path), saving)
    after = run_ranks(4, load_mixed, str(tmp_path), loading)
    for (weights, moments, (losses, norms)), expected in zip(after, before, strict=True):
        models.assert_same(weights, expected[0])
        models.assert_same(moments, expected[1])
        cut.near(losses, expected[2][0], 1e-5, "losses")
        cut.near(norms, expected[2][1], 1e-4, "norms")
