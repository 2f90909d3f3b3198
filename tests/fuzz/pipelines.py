# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Random meshes: a model cut into stages, and its layers among ranks, does what the uncut one does.

The other programs compare that with torch.

program = {"seed", "form": layers | blocks, "pair": an encoder and a decoder, "blocks", "width", "tie", "lent",
           "words": torch's embedding and head, "gated": blocks', "frozen": [parts of names], "recompute",
           "batch": dict | tuple | loss_fn, "optimizer": a section, "clipping", "skips": "" | mirror | collect | hooks,
           "evaluates": [first, end] of the blocks that an evaluation calls, without a pair,
           "hosts": 1 | 2: with two, each has a folder of its own, where all phases have two data ranks,
           "accelerator": that of actions/accelerators.py, for what is cut, and "apart": ranks share no memory; or None,
           "even": lengths, and blocks without masks, as phases have them whose ranks keep a part of the positions,
           "phases": [{"stages", "chunks", "data", "tensor", "by_parts", "zero", "schedule", "bf16", "gas",
                       "folders": of shards that are cut, "beside": saves beside training, "acts": […]}]}
Acts: ["train", steps], ["loop", steps] (by forward, backward and step), ["eval", micro-batches], ["poison", stage, rank
of it], ["save", tag], ["load", tag, from cut | uncut]. Each phase begins with a new model, in another mesh; both sides
run it, and have the same losses and states.
"""

import contextlib
import datetime
import faulthandler
import itertools
import json
import os
import pickle
import random
import sys
import traceback

import torch
import torch.distributed as dist
from actions import accelerators, subject
from mesh_models import VOCABULARY, loss_of, make

import deeptide
from deeptide.pipeline import show_example
from deeptide.pipeline.passing.elsewhere import Elsewhere
from deeptide.tensor import team_of
from deeptide.tensor.cutting.slices import slices_of

ROWS = 2
SPECS = [
    {"patterns": [r".*\.(up|gate)\.weight"], "partition_type": "column"},
    {"patterns": [r".*\.down\.weight"], "partition_type": "row"},
    {"patterns": [r"head\.weight"], "partition_type": "column", "gather_output": True},
]
CALL = "import sys, json, pipelines; pipelines.main(*json.loads(sys.argv[1]))"


def program_of(seed, on_accelerator=None):
    draw, apart = random.Random(f"pipeline {seed}"), random.Random(f"zero bubble {seed}")
    # Draws that change no act have their own generators: other draws stay.
    stores, calls = random.Random(f"stores {seed}"), random.Random(f"calls {seed}")
    form, tie = draw.choice(["layers", "blocks", "blocks"]), draw.random() < 0.4
    phases, tags = [], []
    for _ in range(draw.choice([1, 1, 2, 3])):
        tensor = draw.choice([1, 1, 2]) if form == "blocks" else 1
        stages = draw.choice([1, 2, 2]) if tensor == 2 else draw.choice([2, 2, 2, 3, 4])
        data = draw.choice([1, 2]) if stages * tensor <= 2 or draw.random() < 0.1 else 1
        acts = [["load", draw.choice(tags), draw.choice(["cut", "uncut"])]] if tags and draw.random() < 0.9 else []
        for _ in range(draw.randint(1, 6)):
            kind = draw.choice(["train", "train", "train", "eval", "poison", "save", "load", "loop"])
            if kind == "save":
                tags.append(draw.choice(["a", "b"]))
                acts.append(["save", tags[-1]])
            elif kind == "load" and tags:
                acts.append(["load", draw.choice(tags), draw.choice(["cut", "uncut"])])
            elif kind == "poison":
                acts.append(["poison", draw.randrange(stages), draw.randrange(data)])
            elif kind != "load":
                acts.append(["train" if form == "layers" and kind == "loop" else kind, draw.randint(1, 3)])
        schedule = draw.choice(["1f1b", "gpipe"])
        chunks = draw.choice([1, 2]) if form == "layers" and schedule == "1f1b" and stages < 4 else 1
        loops = any(act[0] == "loop" for act in acts)
        if form == "blocks" and stages == 2 and not loops and stores.random() < 0.4:
            schedule, chunks = "interleaved", 2
        if schedule == "1f1b" and chunks == 1 and apart.random() < 0.5:
            schedule = "zero_bubble"
        phases.append({
            "stages": stages, "chunks": chunks, "data": data, "tensor": tensor, "zero": draw.randrange(4),
            "schedule": schedule, "bf16": draw.random() < 0.25,
            "gas": draw.choice([1, 2, 3, 5]), "acts": acts, "calls": form == "blocks" and calls.random() < 0.3,
            "folders": stores.choice([0, 0, 1, 2]), "beside": stores.random() < 0.4,
        })  # fmt: skip
    optimizer = draw.choice(["Adam", "AdamW", "SGD", "Lion"])
    shares = any(phase["tensor"] > 1 for phase in phases)
    pair = form == "blocks" and not shares and draw.random() < 0.4
    skips = random.Random(f"skips {seed}").choice(["", "", "mirror", "collect", "hooks"]) if form == "blocks" else ""
    if (tie or shares or pair or skips or any(each["calls"] for each in phases)) and optimizer == "Lion":  # by signs
        optimizer = "AdamW"
    if shares and random.Random(f"norms {seed}").random() < 0.3:
        optimizer = "Lamb"
    parts = random.Random(f"positions {seed}")
    for phase in phases:
        phase["by_parts"] = phase["tensor"] > 1 and not skips and parts.random() < 0.6
    frozen = draw.choice([[], [], [], ["up.weight"], ["norm"], ["embed", "0.weight"]])
    kept = random.Random(f"activations {seed}")
    for phase in phases:
        drawn = kept.choice(["recompute", "files", "64KiB", "1GiB"]) if kept.random() < 0.3 else None
        phase["activations"] = drawn if form == "blocks" else None
    return {
        "seed": seed, "evaluates": _evaluates(seed, phases), "form": form, "pair": pair, "blocks": draw.randint(4, 6),
        "width": draw.choice([4, 6]), "tie": tie, "gated": random.Random(f"gated {seed}").random() < 0.4,
        "lent": form == "blocks" and draw.random() < 0.4, "words": form == "blocks" and draw.random() < 0.5,
        "skips": skips, "even": any(phase["by_parts"] for phase in phases), "frozen": [] if tie else frozen,
        "recompute": draw.choice(["", "", "calls"]), "batch": draw.choice(["dict", "tuple", "loss_fn"]),
        "optimizer": {"type": optimizer, "params": {"lr": 0.02}}, "clipping": draw.choice([0.0, 0.0, 0.5]),
        "hosts": stores.choice([1, 2]), "phases": phases, "accelerator": _accelerator_of(seed, on_accelerator, phases),
    }  # fmt: skip


def _evaluates(seed, phases):
    """All blocks, or some, so that a stage may have none of them. Positions in parts need the first and the last."""
    draw = random.Random(f"evaluates {seed}")
    first, takes_all = draw.randrange(4), any(phase["by_parts"] for phase in phases)
    return [0, 6] if takes_all or draw.random() < 0.6 else [first, draw.randint(first + 1, 6)]


def _accelerator_of(seed, wanted, phases):
    """Stages issue collectives in orders of their own, which only queues of their own bear."""
    draw = random.Random(f"devices {seed}")
    if not (draw.random() < accelerators.SHARE if wanted is None else wanted):
        return None
    together = all(phase["stages"] == 1 for phase in phases)
    return accelerators.drawn(draw.choice, together) | {"apart": draw.choice([False, True])}


# -- one rank ---------------------------------------------------------------------------------------------------------


class Side:
    """An engine of one phase, cut or not, on one rank."""

    def __init__(self, program, number, place, stages, folder):
        """place: (rank, world, accelerator), world or accelerator None."""
        phase, (rank, world, accelerator) = program["phases"][number], place
        self.program, self.phase, self.is_cut = program, phase, bool(stages)
        self.folder, self.device = f"{folder}/host{rank % hosts_of(program)}", "cpu"
        parallel = {"schedule": phase["schedule"]}
        if phase["schedule"] == "interleaved":
            parallel["chunks"] = phase["chunks"]
        if stages and program["form"] == "blocks":
            by_parts = phase.get("by_parts", False)
            pipeline = {"stages": stages, "cut": "by_operator" if phase.get("calls") else "by_block"}
            parallel |= {"pipeline": pipeline, "tensor": phase["tensor"], "sequence_parallel_norms": by_parts}
        config = {
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_accumulation_steps": phase["gas"],
            "gradient_clipping": program["clipping"],
            "zero_optimization": {"stage": phase["zero"], "stage3_param_persistence_threshold": 0},
            "bf16": {"enabled": phase["bf16"]},
            "optimizer": program["optimizer"],
            "parallel": parallel if stages else {},
            "checkpoint": {
                "folders": [f"{folder}/drive{number}" for number in range(phase.get("folders", 0))],
                "use_node_local_storage": hosts_of(program) > 1,
            },
            "deeptide": {"comm_timeout": 30},
        }
        if stages:
            config |= subject.activations_of(phase.get("activations"), folder)
        if stages and phase["tensor"] > 1:
            specs = SPECS[:2] + SPECS[2:] * program["words"]
            config["tensor_parallel"] = {"partition_config": {"use_default_specs": False, "layer_specs": specs}}
        model = make(program, stages, phase["chunks"], world, program["seed"] + number)
        show_example(model, {"tokens": torch.ones(1, 4, dtype=torch.long)})
        if accelerator:
            model, self.device = accelerator.move(model), accelerators.DEVICE
        self.engine = deeptide.initialize(model=model, config=config, world=world)[0]
        self.draws = random.Random(f"{program['seed']} {number}")

    def batches(self, count):
        """This rank's, and those of the others drawn past."""
        for _ in range(count):
            length = self.draws.choice([2, 4, 6] if self.program.get("even") else [3, 4, 5])
            for rank in range(self.phase["data"]):
                draws = torch.Generator().manual_seed(self.draws.randrange(10**6))
                tokens = torch.randint(0, VOCABULARY, (ROWS, length), generator=draws)
                if rank == self.engine.data_parallel_rank:
                    yield self._as_batch(tokens.to(self.device), tokens.roll(1, 1).to(self.device))

    def _as_batch(self, tokens, labels):
        if self.program["form"] == "blocks" and self.program["batch"] == "dict":
            return {"tokens": tokens, "labels": labels}
        return tokens, labels

    def _loss_fn(self):
        by_hand = self.program["form"] == "blocks" and self.program["batch"] == "loss_fn"
        uncut = self.program["form"] == "layers" and not self.is_cut
        return {"loss_fn": loss_of} if by_hand or uncut else {}

    def perform(self, act):
        kind, *arguments = act
        engine, gas = self.engine, self.phase["gas"]
        if kind == "train":
            given = self.batches(arguments[0] * gas)
            found = [engine.train_batch(given, **self._loss_fn()).item() for _ in range(arguments[0])]
        elif kind == "loop":
            given = self.batches(arguments[0] * gas)
            found = [self._step_by_hand(given) for _ in range(arguments[0])]
        elif kind == "eval":
            given = self.batches(arguments[0])
            found = engine.eval_batch(given, num_micro_batches=arguments[0], **self._loss_fn()).item()
        elif kind == "poison":
            found = self._poison(*arguments)
        elif kind == "save":
            place = f"{self.folder}/{'cut' if self.is_cut else 'uncut'}"
            found = bool(engine.save_checkpoint(place, tag=arguments[0], blocking=not self.phase.get("beside")))
        else:
            found = engine.load_checkpoint(f"{self.folder}/{arguments[1]}", tag=arguments[0])[0] is not None
        return [found, engine.global_steps, engine.skipped_steps]

    def _step_by_hand(self, given):
        """One step by the program's own loop; returns its mean loss."""
        engine, losses = self.engine, []
        engine.module.train()
        for _ in range(self.phase["gas"]):
            batch = next(given)
            if self._loss_fn():
                loss = loss_of(engine(batch[0]), batch[1])
            else:
                loss = (engine(**batch) if isinstance(batch, dict) else engine(*batch))[0]
            engine.backward(loss)
            engine.step()
            losses += [] if isinstance(loss, Elsewhere) else [loss.detach()]
        return engine._mean_loss(losses).item()

    def _poison(self, stage, rank):
        """A gradient that is not finite, on one stage's rank: all skip the step."""
        here = getattr(self.engine, "stage_id", stage) == stage and self.engine.data_parallel_rank == rank
        trained = [p for p in self.engine.module.parameters() if p.requires_grad]
        hook = trained[-1].register_hook(lambda gradient: gradient * float("nan")) if here else None
        loss = self.engine.train_batch(self.batches(self.phase["gas"]), **self._loss_fn()).item()
        if hook is not None:
            hook.remove()
        return [loss, self.engine.was_step_skipped()]

    def states(self):
        found = {}
        team, cuts = team_of(self.engine.module), dict(slices_of(self.engine.module))
        for name, _ in self.engine.module.named_parameters():
            for role in ("master", *self.engine.optimizer.info.state_roles()):
                value = self.engine._core.full_state(name, role)
                if value is None:
                    continue
                is_cut = team is not None and name in cuts
                whole = cuts[name].join(team.core.all_gather(value, "checkpoint")) if is_cut else value
                found[f"{name}/{role}"] = whole.cpu()
        return found


def _meet(store, when, rank, size):
    store.set(f"{when} {rank}", "done")
    store.wait([f"{when} {other}" for other in range(size)])


def _sides(program, number, rank, prefix, accelerator):
    """Makes those of a phase's engines, cut and not, that this rank has."""
    phase, (store, folder) = program["phases"][number], prefix
    for stages, world_size in ((phase["stages"], ranks_of(phase)), (0, phase["data"])):
        if rank < world_size:
            at = dist.PrefixStore(f"{stages}", store)
            on_device = accelerator if stages else None
            world = None if on_device else deeptide.make_world(at, rank, world_size)
            yield Side(program, number, (rank, world, on_device), stages, folder)


def _phase(program, number, rank, size, prefix, accelerator):
    """(results of acts, states), of this rank's sides."""
    sides, acts = list(_sides(program, number, rank, prefix, accelerator)), []
    for index, act in enumerate(program["phases"][number]["acts"]):
        if act[0] == "load":  # the other side may have saved it
            for side in sides:
                side.engine.wait_for_save()
            _meet(prefix[0], f"before {index}", rank, size)
        acts.append([side.perform(act) for side in sides])
        if act[0] in ("save", "load"):
            _meet(prefix[0], index, rank, size)
    states = [side.states() for side in sides]
    for side in sides:
        getattr(side.engine.module, "kept", []).clear()  # what recomputation put there has the model in its graph
        side.engine.destroy()
    return acts, states


def _phase_on(accelerator, *arguments):
    """Likewise. Errors: AssertionError for accesses that nothing ordered, or memory that is not given back."""
    before = accelerator.used_bytes()
    results = _phase(*arguments, accelerator)
    unordered, left = accelerator.settle(), accelerator.used_bytes() - before
    assert not unordered, unordered
    assert not left, f"{left} bytes of the accelerator are still in use"
    return results


def run(program, rank, size, port, folder):
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(seconds=60))
    spec, results = program.get("accelerator"), []
    accelerator = accelerators.Accelerator(spec, program["seed"]) if spec else None
    if spec and spec["apart"]:
        os.environ["DEEPTIDE_TEST_APART"] = "1"
    for number, phase in enumerate(program["phases"]):
        everybody, ranks = dist.PrefixStore(f"{folder} {number}", store), ranks_of(phase)
        arguments = (program, number, rank, size, (everybody, folder))
        if not accelerator:
            results.append(_phase(*arguments, None))
            continue
        group = dist.PrefixStore("group", everybody)
        with accelerator.group(group, rank, ranks) if rank < ranks else contextlib.nullcontext():
            results.append(_phase_on(accelerator, *arguments))
    return results


def main(program, rank, port, folder, limit):
    faulthandler.dump_traceback_later(limit, exit=True)
    torch.set_num_threads(1)
    program = json.loads(program)
    size = most_ranks(program)
    with open(os.path.join(folder, f"rank-{rank}"), "wb") as file:
        try:
            pickle.dump(("ok", run(program, rank, size, port, folder)), file)
        except BaseException as error:
            pickle.dump(("raised", f"{type(error).__name__}: {error}\n{traceback.format_exc()[-2500:]}"), file)
    sys.stdout.flush()
    os._exit(0)


def hosts_of(program):
    """How many hosts have folders of their own: each must have ranks of both sides in every phase."""
    return min(program.get("hosts", 1), *(phase["data"] for phase in program["phases"]))


def ranks_of(phase):
    return phase["stages"] * phase["data"] * phase["tensor"]


def most_ranks(program):
    return max(map(ranks_of, program["phases"]))


# -- the comparison ---------------------------------------------------------------------------------------------------


def is_exact(program):
    """Tied and lent weights' gradients, norms and what shared layers compute are added in another order.

    So are sums of a device's ranks.
    """
    shares = any(phase["tensor"] > 1 for phase in program["phases"]) or program.get("accelerator")
    calls = any(phase.get("calls") for phase in program["phases"])
    uses = program["tie"] or program["pair"] or program["lent"] or program.get("skips")
    return not (uses or program["clipping"] or shares or calls)


def _close(a, b, tolerance):
    if isinstance(a, float) and isinstance(b, float):
        return a == b or abs(a - b) <= tolerance * max(abs(a), abs(b)) or (a != a and b != b)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(itertools.starmap(lambda x, y: _close(x, y, tolerance), zip(a, b, strict=True)))
    return a == b


def _worst(got, wanted, low):
    """The largest difference. low: but for one element in 50, whose gradient is noise, of which Adam takes the sign."""
    apart = (got - wanted).abs().flatten().float().sort().values
    left_out = max(1, len(apart) // 50) if low and len(apart) >= 4 else 0
    return apart[len(apart) - 1 - left_out].item() if len(apart) else 0.0


def _differs(program, results):
    """The first difference between the sides, or an empty text."""
    exact, low = is_exact(program), False
    for number, phase in enumerate(program["phases"]):
        low = low or phase["bf16"]
        tolerance = 0.0 if exact else 0.05 if low else 1e-3
        ranks = ranks_of(phase)
        for index, act in enumerate(phase["acts"]):
            wanted = results[0][number][0][index][1]
            for rank in range(ranks):
                got = results[rank][number][0][index][0]
                if not _close(got, wanted, tolerance):
                    return f"phase {number}, act {index} {act}, rank {rank}: got {got}, the uncut model {wanted}"
        found = {}
        for rank in range(ranks):
            found |= results[rank][number][1][0]
        wanted = results[0][number][1][1]
        if found.keys() != wanted.keys():
            return f"phase {number}: names differ: {sorted(found.keys() ^ wanted.keys())}"
        for name, value in wanted.items():
            size = value.abs().max().item() if value.numel() else 0.0
            worst = _worst(found[name], value, low and not exact)
            if not worst <= tolerance * size + (0 if exact else 2e-2 if low else 1e-3):
                return f"phase {number}: {name} is off by {worst:.3g} of {size:.3g}"
    return ""


def try_program(runner, program):
    """None, or what was found as (signature, text)."""
    logs, results = runner.run_ranks(CALL, json.dumps(program), most_ranks(program), limit=90)
    told = json.dumps(program)
    missing = [rank for rank, result in enumerate(results) if result is None]
    raised = [f"rank {rank}: {result[1]}" for rank, result in enumerate(results) if result and result[0] == "raised"]
    if raised:  # others may wait for these
        return ("error", "pipeline"), "\n".join(raised) + f"\n{told}"
    if missing:
        return ("hang", "pipeline"), f"ranks {missing} did not end: {[log and log[1][-1500:] for log in logs]}\n{told}"
    text = _differs(program, [result[1] for result in results])
    return (("value", "pipeline"), f"{text}\n{told}") if text else None
