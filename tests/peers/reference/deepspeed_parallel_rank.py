# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""One of two ranks of DeepSpeed's pipelines and tensor-parallel runs: writes checkpoints, their states, further losses.

Argument: the folder of all that is written, as tests/python/checkpoint/golden_deepspeed_parallel.tar.xz holds it.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "python" / "checkpoint" / "imports"))
from deepspeed_checkpoint_rank import states_of, to_universal
from parallel_runs import (
    ACCUMULATION,
    FURTHER,
    PIPELINES,
    STEPS,
    TENSORS,
    VOCABULARY,
    batches,
    layers_of,
    loss_of,
    make_llama,
)


def run_pipeline(name, case, out):
    import deepspeed
    from deepspeed import pipe

    torch.manual_seed(7)
    model = pipe.PipelineModule(
        layers_of(case["tied"], pipe), num_stages=2, loss_fn=loss_of, seed_layers=True, partition_method="uniform"
    )
    engine, *_ = deepspeed.initialize(model=model, config=case["config"])
    data = batches(0)
    for _ in range(STEPS):
        engine.train_batch(data)
    engine.save_checkpoint(str(out / name), tag="middle", client_state={"epoch": 3})
    every = [None, None]
    dist.all_gather_object(every, states_of(engine, model))
    losses = [engine.train_batch(data).item() for _ in range(FURTHER)]
    if dist.get_rank() == 0:
        torch.save({"middle": {**every[1], **every[0]}, "losses": losses}, out / name / "expected.pt")


def run_tensor(name, case, out):
    """Its own conversion says what whole tensors are."""
    import deepspeed

    engine, *_ = deepspeed.initialize(model=make_llama(), config=case["config"])
    for number in range(STEPS * ACCUMULATION):
        tokens = torch.randint(VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(number))
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    engine.save_checkpoint(str(out / name), tag="middle", client_state={"epoch": 3})
    dist.barrier()
    if dist.get_rank() == 0:
        to_universal(out / name, "middle")
        found = {}
        for path in (out / name / "middle_universal" / "zero").glob("*/*.pt"):
            role = {"fp32": "master"}.get(path.stem, path.stem)
            value = torch.load(path, weights_only=False)
            if role != "step":
                found[f"{path.parent.name}/{role}"] = value["param"] if isinstance(value, dict) else value
        torch.save({"middle": found}, out / name / "expected.pt")


def main():
    torch.set_num_threads(1)
    import deepspeed

    deepspeed.init_distributed("gloo")
    for cases, run in ((PIPELINES, run_pipeline), (TENSORS, run_tensor)):
        for name, case in cases.items():
            run(name, case, Path(sys.argv[1]))
            dist.barrier()
    os._exit(0)  # DeepSpeed's destructors wait for groups that are gone


if __name__ == "__main__":
    main()
