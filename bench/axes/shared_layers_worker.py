# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""One rank of one contender of shared_layers.py: a Llama whose layers two ranks share, here or in another library."""

import argparse
import importlib.util
import json

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

import task
from axes.by_turns import TUNED, add_worker_arguments, step_by_turns
from contenders.zero_config import zero_config
from settings import SEED, SIZES

HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None


def contenders():
    """Names. The other libraries have glibc's allocator as it is, and one that keeps its memory."""
    others = ["torch", *(["deepspeed"] if HAS_DEEPSPEED else [])]
    return ["deeptide", *others, *(f"{name}{TUNED}" for name in (*others, "halves", "whole"))]


def make_model(size, ranks=1):
    """A Llama; for ranks > 1 one of as many heads, features and words as a rank has of it."""
    torch.manual_seed(SEED)
    shape = {
        "num_attention_heads": size.heads // ranks,
        "num_key_value_heads": size.heads // ranks,
        "intermediate_size": 4 * size.width // ranks,
        "vocab_size": size.vocabulary // ranks,
    }
    config = LlamaConfig(
        **shape,
        hidden_size=size.width,
        head_dim=size.width // size.heads,
        num_hidden_layers=size.layers,
        max_position_embeddings=size.context,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


class Here:
    def __init__(self, size):
        import deeptide

        deeptide.init_distributed()
        config = zero_config(0, "fp32", size) | {"parallel": {"tensor": dist.get_world_size()}}
        self.engine = deeptide.initialize(model=make_model(size), config=config)[0]

    def step(self, tokens):
        loss = self.engine(input_ids=tokens, labels=tokens).loss
        self.engine.backward(loss)
        self.engine.step()
        return loss.item()


class Plain:
    """Plain torch, each rank by itself."""

    def __init__(self, size, ranks):
        self.model, self.vocabulary = make_model(size, ranks), size.vocabulary // ranks
        self.optimizer = task.fused_adamw(self.model.parameters(), size)

    def loss_of(self, tokens):
        return self.model(input_ids=tokens, labels=tokens).loss

    def step(self, tokens):
        loss = self.loss_of(tokens % self.vocabulary)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


class Torch(Plain):
    """Its tutorial's plan: the vocabulary too, and a loss of the head's own logits."""

    def __init__(self, size):
        super().__init__(size, 1)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        blocks = {
            **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
            "self_attn.o_proj": RowwiseParallel(),
            "mlp.gate_proj": ColwiseParallel(),
            "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(),
        }
        plan = {f"model.layers.*.{name}": style for name, style in blocks.items()} | {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
            "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        }
        parallelize_module(self.model, mesh, plan)
        groups = {True: [], False: []}  # its optimizers take no tensors of both kinds together
        for parameter in self.model.parameters():
            groups[isinstance(parameter, DTensor)].append(parameter)
        self.optimizer = task.fused_adamw([{"params": group} for group in groups.values()], size)

    def step(self, tokens):
        with loss_parallel():
            return super().step(tokens)


class DeepSpeed:
    """AutoTP."""

    def __init__(self, size, overlaps):
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo")  # adopts the group that is there
        config = zero_config(0, "fp32", size) | {
            "tensor_parallel": {
                "autotp_size": dist.get_world_size(),
                "preset_model": "llama",
                "tp_overlap_comm": overlaps,
            },
        }
        model = deepspeed.tp_model_init(make_model(size), dist.get_world_size(), torch.float32)
        self.engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]

    step = Here.step


def make(options):
    """The contender that the options name."""
    size, maker = SIZES[options.model], options.name.removesuffix(TUNED)
    if maker == "deeptide":
        return Here(size)
    dist.init_process_group("gloo")
    if maker == "torch":
        return Torch(size)
    if maker == "deepspeed":
        return DeepSpeed(size, options.overlap)
    return Plain(size, dist.get_world_size() if maker == "halves" else 1)


def measure(options):
    size = SIZES[options.model]
    torch.set_num_threads(1)
    contender = make(options)
    torch.set_num_threads(1)  # again: a framework may have set its own number
    draws = torch.Generator().manual_seed(1)
    shape = (options.batch, size.context)
    return step_by_turns(contender, lambda: [torch.randint(0, size.vocabulary, shape, generator=draws)], options)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=SIZES, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--overlap", action="store_true")
    add_worker_arguments(parser)
    options = parser.parse_args()
    options.result.write_text(json.dumps(measure(options)))


if __name__ == "__main__":
    main()
