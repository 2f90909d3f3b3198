# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The switch for recomputation: of Transformers' models, and of a program's own."""

import pytest
import torch
from torch import nn

from deeptide._model.recomputation import recomputes, set_recomputation


class Counter:
    """Counts elements that autograd keeps."""

    def __init__(self):
        self.numel = 0

    def pack(self, tensor):
        self.numel += tensor.numel()
        return tensor

    def unpack(self, tensor):
        return tensor


def test_a_model_of_transformers_is_switched_and_computes_the_same_gradients():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=31, n_positions=8, n_embd=16, n_layer=2, n_head=2, bos_token_id=0)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    tokens = torch.arange(16).reshape(2, 8)
    assert recomputes(model) is False
    gradients, saved = [], []
    for on in (False, True, False):
        set_recomputation(model, on)
        assert recomputes(model) is on
        model.zero_grad()
        counter = Counter()
        with torch.autograd.graph.saved_tensors_hooks(counter.pack, counter.unpack):
            loss = model(tokens, labels=tokens, use_cache=False).loss
        saved.append(counter.numel)
        loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert saved[1] < saved[0] == saved[2]
    assert all(torch.equal(a, b) for a, b in zip(gradients[0], gradients[1], strict=True))


def test_a_model_without_the_switch_has_none():
    model = nn.Linear(2, 2)
    assert recomputes(model) is None
    with pytest.raises(ValueError, match="recomputation: Linear has no gradient_checkpointing_enable"):
        set_recomputation(model, True)


def test_a_switch_that_a_model_says_it_does_not_support_is_none():
    class Model(nn.Module):
        supports_gradient_checkpointing = False

        def gradient_checkpointing_enable(self):
            raise AssertionError

        gradient_checkpointing_disable = gradient_checkpointing_enable

    assert recomputes(Model()) is None
