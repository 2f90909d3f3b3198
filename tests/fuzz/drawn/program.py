# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Programs over drawn models: plain data, so that they print, travel to ranks as JSON and shrink.

program = {
  "seed", "length": tokens of a row, "gas", "zero": stage, "stages": 1 | 2, "tensor": 1 | 2, "schedule",
  "cut": by_block | by_operator | layers (of a PipelineModule), "policy": "" | recompute, "momentum",
  "through": loop | train_batch,
  "model": {"width", "blocks", "frozen": [parts of names], "traits": {name: how}},
  "steps": [[idiom, …] of each step]
}

Traits, of a model:
  form: how a block hands on: tensor | tuple (with None) | returned (all that it was given) | dict
  mask: {"type", "of": tokens | batch | hidden, "changes": in each block}; count: a number that blocks add to
  number: an integer that is new in each call: used | given
  counter: a buffer of each block that changes in place; hands_buffer: which the block hands on
  in_place: a block writes into what it is handed (position | relu), into its own (own); the model does so (between),
    or into what skips the blocks (skipped)
  draws: {"by": torch | numpy | python, "where": block | shared, "from": step}
  activation: with a parameter (scalar | feature); head_norm: over heads (shared | each); shared_norm: one batch norm
  auxiliary: {"of": hidden | weight, "from": step}; exit: {"after": blocks, "from": step}; skip: past the blocks
  hook: on the tensor behind that block; grad_inside: a block uses autograd.grad; slope: the model does
  tie: head and embedding
  collated: labels are drawn from torch's generator, as by a collator that masks

Idioms, of a step, as torch's programs have them:
  other_backward: a backward of another loss, then module.zero_grad(); clip: clip_grad_norm_; halve: p.grad.mul_(0.5)
  lost_backward: a backward without a step, then zero_grad(); state_dict, deepcopy, evaluate: what they give is compared
  interrupt_*: KeyboardInterrupt there, saved in its handler; a new engine loads that and goes on
"""

import random

# Right today in each mesh, so that a refusal is a finding too, and CI draws these.
RIGHT = ("form", "tie", "count", "counter", "skip")
# Traits of blocks alone: what a model does around them is no layer.
LAYERED = (
    *("mask", "count", "number", "counter", "hands_buffer", "in_place", "activation", "head_norm", "grad_inside"),
    *("draws", "collated"),
)
FORMS = ("tensor", "tuple", "returned", "dict")
INTERRUPTS = ("interrupt_forward", "interrupt_backward", "interrupt_accumulation")
IDIOMS = ("other_backward", "clip", "halve", "lost_backward", "state_dict", "deepcopy", "evaluate", *INTERRUPTS)


def traits_of(draw, steps, blocks):
    """A way of each trait."""
    begins = draw.choice([0, 1, steps - 1])
    return {
        "mask": {
            "type": draw.choice(["float32", "int64", "bool"]),
            "of": draw.choice(["tokens", "batch", "hidden"]),
            "changes": draw.random() < 0.3,
        },
        "count": True,
        "number": draw.choice(["used", "given"]),
        "counter": True,
        "hands_buffer": True,
        "in_place": draw.choice(["position", "relu", "own", "between", "skipped"]),
        "draws": {
            "by": draw.choice(["torch", "numpy", "python"]),
            "where": draw.choice(["block", "shared"]),
            "from": begins,
        },
        "activation": draw.choice(["scalar", "feature"]),
        "head_norm": draw.choice(["shared", "each"]),
        "shared_norm": True,
        "auxiliary": {"of": draw.choice(["hidden", "weight"]), "from": begins},
        "exit": {"after": draw.randint(1, blocks - 1), "from": begins},
        "skip": True,
        "hook": draw.randrange(blocks),
        "grad_inside": True,
        "slope": True,
        "tie": True,
        "collated": True,
    }


def _is_layers(name, way):
    """Whether layers of a PipelineModule can have a trait."""
    return name in LAYERED and way not in ("between", "skipped") and (name != "draws" or way["where"] == "block")


def program_of(seed, only_right=False):
    """The program of that number. only_right: of what is known to be right in each mesh."""
    draw = random.Random(f"model {seed}")
    stages, tensor = draw.choice([(1, 1), (2, 1), (2, 1), (1, 2), (1, 2), (2, 2)])
    blocks, count = 4, draw.randint(2, 4)
    traits = traits_of(draw, count, blocks)
    if traits["mask"]["of"] == "hidden":
        traits["mask"]["type"] = "float32"
    names = draw.sample(sorted(traits), draw.choice([1, 1, 2, 3]))
    if traits["in_place"] == "skipped" and "in_place" in names and "skip" not in names:
        names.append("skip")
    idioms = [[] for _ in range(count)]
    for _ in range(draw.choice([0, 0, 1, 2]) if stages * tensor > 1 else draw.choice([1, 2, 3])):
        step, idiom = draw.randrange(count), draw.choice(IDIOMS)
        # No boundary before the first step's has what a program seeds after initialize.
        idioms[max(step, 1) if idiom in INTERRUPTS and "draws" in names else step].append(idiom)
    form = draw.choice(FORMS)
    if {"hands_buffer", "count"} & set(names) and form in ("tensor", "tuple"):
        form = draw.choice(["returned", "dict"])
    if only_right:
        names = [name for name in names if name in RIGHT]
        idioms = [[] for _ in range(count)]
        form = "tensor" if stages > 1 else form
    zero = draw.randrange(4)
    if "collated" in names:  # an interrupted step draws its labels anew
        idioms = [[] for _ in range(count)]
    if zero == 3:  # p.grad is None there, with a warning
        idioms = [[idiom for idiom in step if idiom not in ("halve", "clip")] for step in idioms]
    through = draw.choice(["loop", "train_batch"]) if not any(idioms) else "loop"
    cut = draw.choice(["by_block", "by_block", "by_operator", "layers"])
    if cut == "layers" and (stages, tensor) == (2, 1) and not only_right:
        names, form = [name for name in names if _is_layers(name, traits[name])], "dict"
        idioms, through = [[] for _ in range(count)], "train_batch"
    elif cut == "layers":
        cut = "by_block"
    policy = draw.choice(["", "", "recompute"])
    if "hands_buffer" in names or cut == "layers":  # a block that is run again hands on what it has by then
        policy = ""
    return {
        "seed": seed % 10**6,
        "length": draw.choice([3, 4]),
        "gas": draw.choice([1, 2, 3]),
        "zero": zero,
        "stages": stages,
        "tensor": tensor,
        "schedule": draw.choice(["1f1b", "gpipe", "zero_bubble"]),
        "cut": cut,
        "policy": policy,
        "momentum": draw.choice([0.0, 0.9]),
        "through": through if stages > 1 else "loop",
        "model": {
            "width": 16,  # a norm over a head of two features gives signs alone
            "blocks": blocks,
            "frozen": draw.choice([[], [], ["layers.0."], ["embed"]]) if "tie" not in names else [],
            "traits": {"form": form, **{name: traits[name] for name in names}},
        },
        "steps": idioms,
    }


def names_in(program):
    """Its traits, idioms and words such as "numpy"; "stages" and "tensor" where it has several."""
    traits = program["model"]["traits"]
    ways = [way if isinstance(way, dict) else {"how": way} for way in traits.values()]
    words = {key if how is True else how for way in ways for key, how in way.items()}
    meshes = {name for name in ("stages", "tensor") if program[name] > 1}
    idioms = {idiom for step in program["steps"] for idiom in step}
    return {*traits, *map(str, words), *meshes, *idioms, program["cut"], program["policy"], program["through"]}
