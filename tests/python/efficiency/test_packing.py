# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Packed rows: nothing is lost, little is padding, and a model computes what it computes of each sequence alone."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import deeptide
from deeptide.efficiency import PackedDataset, PackingCollator, block_diagonal_mask, pack_lengths


@pytest.mark.parametrize("count", [0, 1, 7, 400])
def test_rows_hold_each_sequence_once_and_are_full(count):
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 65, (count,), generator=generator).tolist()
    rows = pack_lengths(lengths, 64)
    assert sorted(index for row in rows for index in row) == list(range(count))
    assert all(sum(lengths[index] for index in row) <= 64 for row in rows)
    assert rows == pack_lengths(lengths, 64) and rows == sorted(rows)
    if count == 400:
        assert sum(lengths) / (64 * len(rows)) > 0.97  # one sequence a row: 0.5
    if count > 1:
        plain = []  # the fullest row with room, the longest sequence first, looking at every row
        for index in sorted(range(count), key=lambda i: (-lengths[i], i)):
            fits = [(64 - sum(lengths[i] for i in row), number) for number, row in enumerate(plain)]
            _, number = min((fit for fit in fits if fit[0] >= lengths[index]), default=(64, len(plain)))
            plain.extend([] if number < len(plain) else [[]])
            plain[number].append(index)
        assert rows == sorted(sorted(row) for row in plain)


def test_masks_are_blocks():
    ids = torch.tensor([[0, 0, 1, -1], [0, 1, 1, 1]])
    both = block_diagonal_mask(ids)
    assert both.shape == (2, 1, 4, 4)
    assert both[0, 0].int().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    assert block_diagonal_mask(ids, causal=True)[1, 0].int().tolist() == [
        [1, 0, 0, 0],
        [0, 1, 0, 0],
        [0, 1, 1, 0],
        [0, 1, 1, 1],
    ]
    added = block_diagonal_mask(ids, dtype=torch.bfloat16)
    assert torch.equal(added == 0, both) and (added[~both] == torch.finfo(torch.bfloat16).min).all()


class Attending(nn.Module):
    """One layer of attention with positions, and its loss summed over labels."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.token, self.position = nn.Embedding(19, 16), nn.Embedding(32, 16)
        self.qkv, self.head = nn.Linear(16, 48), nn.Linear(16, 19)

    def forward(self, input_ids, labels, position_ids, attention_mask, sequence_ids=None):
        x = self.token(input_ids) + self.position(position_ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v, attention_mask.squeeze(1))
        logits = self.head(x)[:, :-1].flatten(0, 1)
        return F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.float32])
def test_a_packed_batch_is_its_sequences_one_by_one(mask_dtype, causal):
    generator = torch.Generator().manual_seed(1)
    samples = [torch.randint(0, 19, (n,), generator=generator) for n in (5, 9, 1, 12, 3, 7, 2)]
    data = [{"input_ids": s, "labels": s} for s in samples]
    packed = PackedDataset(data, [len(s) for s in samples], 16)
    loader = torch.utils.data.DataLoader(
        packed, batch_size=len(packed), collate_fn=PackingCollator(16, causal=True, mask_dtype=mask_dtype)
    )
    (batch,) = loader
    if not causal:
        batch["attention_mask"] = block_diagonal_mask(batch["sequence_ids"], dtype=mask_dtype)
    model = Attending()
    loss = model(**batch)
    loss.backward()
    got = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    total = 0.0
    for sample in samples:
        n = len(sample)
        mask = block_diagonal_mask(torch.zeros(1, n), causal)
        alone = model(sample[None], sample[None], torch.arange(n)[None], mask)
        alone.backward()
        total += alone.item()
    assert loss.item() == pytest.approx(total, rel=1e-5)
    for name, p in model.named_parameters():
        torch.testing.assert_close(got[name], p.grad, rtol=1e-4, atol=1e-5)
    assert len(packed) < len(samples)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_sequences_of_a_row_do_not_see_each_other_in_transformers(attention):
    """The default collator. "flex_attention" compiles a kernel, which is no quick test."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(2)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=19, attn_implementation=attention, **sizes)).eval()
    samples = [torch.randint(0, 19, (n,)) for n in (5, 7, 3)]
    batch = PackingCollator(16, causal=True)([[{"input_ids": s} for s in samples]])
    del batch["sequence_ids"]
    with torch.no_grad():
        packed = model(**batch).logits[0]
        at = 0
        for sample in samples:
            torch.testing.assert_close(
                packed[at : at + len(sample)], model(sample[None]).logits[0], rtol=1e-4, atol=1e-5
            )
            at += len(sample)


def test_misfits_are_named():
    with pytest.raises(deeptide.ConfigError, match="sequence 1 has 9 tokens, expected 1 to row_length, 8; cut it"):
        pack_lengths([3, 9], 8)
    with pytest.raises(deeptide.ConfigError, match="got 1 lengths for 2 samples"):
        PackedDataset([1, 2], [3], 8)
    ids = torch.arange(5)
    with pytest.raises(deeptide.ConfigError, match="a row has 5 tokens, more than row_length, 4"):
        PackingCollator(4)([[{"input_ids": ids}]])
    with pytest.raises(deeptide.ConfigError, match="a sample has no 'labels' for each of its input_ids"):
        PackingCollator(10)([[{"input_ids": ids, "labels": ids}, {"input_ids": ids}]])
