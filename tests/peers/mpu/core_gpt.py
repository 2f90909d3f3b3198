# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Megatron-core's GPT on ranks of a CPU: its groups and slices of it, and the whole one's training on plain torch."""

import torch
import torch.distributed as dist
from torch.nn import functional as F

VOCAB, LENGTH, MICRO, STEPS = 32, 8, 2, 4
CLIP = 0.5
# eps: keys' biases have no gradient but rounding, of which Adam takes the sign otherwise.
ADAM = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-3}
KINDS = {
    "gpt": {"position_embedding_type": "learned_absolute", "share_embeddings_and_output_weights": True},
    "llama": {"position_embedding_type": "rope", "config": {"gated_linear_unit": True, "normalization": "RMSNorm"}},
    "qk-norms": {"position_embedding_type": "rope", "config": {"qk_layernorm": True}},
}


def on_cpu():
    """Megatron asks CUDA for its device, whatever tensors it is given, and for random states of its own."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import torch_norm

    from deeptide.as_deepspeed.training import checkpointing

    torch_norm.WrappedTorchNorm.__new__ = _marked_norm
    torch.cuda.current_device = lambda: torch.device("cpu")
    checkpointing.model_parallel_cuda_manual_seed(11)
    random._CUDA_RNG_STATE_TRACKER = checkpointing.get_cuda_rng_tracker()
    random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True


def _marked_norm(cls, config, hidden_size, eps=1e-5, **_):
    """Torch's norm with Megatron's mark, which is Apex's alone otherwise: without it torch's is refused."""
    norm = (torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm)(hidden_size, eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm


def groups(tensor, pipeline=1):
    """Megatron's groups of these sizes. Collective."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor, pipeline)
    on_cpu()
    return parallel_state


def config_of(kind, tensor, pipeline=1, **more):
    """Megatron's configuration of a small Transformer."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    given = dict(KINDS[kind].get("config", {}))
    if given.get("gated_linear_unit"):
        given["activation_func"] = F.silu
    return TransformerConfig(
        num_layers=4,
        hidden_size=16,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=24,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        **{"hidden_dropout": 0.0, "attention_dropout": 0.0} | given | more,
    )


def make(kind, tensor=1, **more):
    """A model of Megatron's, with this rank's slices of what Megatron draws."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    config = config_of(kind, tensor, **more)
    given = {name: value for name, value in KINDS[kind].items() if name != "config"}
    torch.manual_seed(3)
    spec = get_gpt_layer_local_spec(normalization=config.normalization, qk_layernorm=config.qk_layernorm)
    return GPTModel(config, spec, VOCAB, LENGTH, **given)


def whole_values(kind):
    """{name: value} of the whole model; biases and norms are drawn too. Leaves each rank a group of its own."""
    groups(1)
    draws = torch.Generator().manual_seed(5)
    state = make(kind).state_dict(keep_vars=True)
    values = {name: value.detach() for name, value in state.items() if isinstance(value, torch.nn.Parameter)}
    return {name: value + torch.randn(value.shape, generator=draws) / 10 for name, value in values.items()}


def cut(value, parameter, rank, size):
    """A rank's slice of the whole, by Megatron's marks."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return value
    dim, stride = parameter.partition_dim, parameter.partition_stride
    return torch.cat([block.chunk(size, dim)[rank] for block in value.chunk(stride, dim)], dim)


def fill(model, values, rank=0, size=1):
    """Gives a model its slices of whole values."""
    with torch.no_grad():
        for name, parameter in model.state_dict(keep_vars=True).items():
            if name in values:
                parameter.copy_(cut(values[name], parameter, rank, size))


def batch(step, data_rank=None, data_size=1):
    """(tokens, positions, labels) of one data rank, or of all."""
    draws = torch.Generator().manual_seed(100 + step)
    rows = torch.randint(VOCAB, (MICRO * data_size, LENGTH + 1), generator=draws)
    if data_rank is not None:
        rows = rows[MICRO * data_rank : MICRO * (data_rank + 1)]
    return rows[:, :-1], torch.arange(LENGTH).expand(len(rows), LENGTH), rows[:, 1:]


MASK = torch.ones(LENGTH, LENGTH).triu(1).bool()[None, None]


def loss_of(model, tokens, positions, labels):
    return model(tokens, positions, MASK, labels=labels).mean()


def train_whole(kind, data_size, steps=STEPS):
    """(losses, norms, weights) of the whole model on plain torch, of all data ranks' batches."""
    values = whole_values(kind)
    model = make(kind)
    fill(model, values)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    losses, norms = [], []
    for step in range(steps):
        loss = loss_of(model, *batch(step, None, data_size))
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, {name: value.detach().clone() for name, value in model.named_parameters()}


def settings(stage, **more):
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": ADAM},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **more,
    }


def steps_of(engine, data_rank, data_size, first=0, last=STEPS):
    """(losses, norms): each loss is the mean of all data ranks'."""
    losses, norms = [], []
    for step in range(first, last):
        loss = loss_of(engine, *batch(step, data_rank, data_size))
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
        norms.append(engine.get_global_grad_norm())
    return losses, norms
