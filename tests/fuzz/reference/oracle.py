# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Runs a program on plain torch: what every rank must see at every act, for one setting."""

import functools
import re
from pathlib import Path

import torch
from actions import accelerators, surroundings
from actions.acts import ACTS, RELATIVE, UNCOUNTED, is_raw, values_for
from actions.programs import STATES, acts_of, hosts_of, is_low, is_packed, pick, placement_of, quantized_in

from reference import idioms
from reference.expected import (
    AWAY,
    DIFFERENT_CALLS,
    IN_FILES,
    MOVED_ALREADY,
    NO_LOADED_STATE,
    NO_NEW_GROUP,
    NO_OWN_GROUP,
    NO_STATE,
    NO_STATE_DICT,
    NO_SUCH_MODEL,
    NO_SYNC,
    NOT_AWAY,
    NOT_MOVED,
    NOT_OPTIMIZED,
    NOT_OURS,
    NOT_REBUILT,
    OWN_REBUILT,
    RAW,
    REBUILD_OF_ANOTHER,
    OpenError,
    Raises,
    UndefinedError,
)
from reference.noise import Noise, cloned
from reference.plain import DocumentedError, FailuresError, Life

OPEN = Path(__file__).parents[1] / "open"


def expected_of(program, setting, noise=None, avoid=True):
    """[phase][act][rank]: a dict of values, None for nothing, or Raises. A phase ends early when its engines are dead.

    noise: (seed, scale), or None.

    Errors: UndefinedError; with `avoid`, OpenError for what is known to fail.
    """
    saves = {}
    noise = noise and Noise(*noise)
    return [_phase(program, phase, setting.of(phase), (saves, avoid), noise) for phase in program["phases"]]


def traits_of(program, setting):
    """The traits that expectations depend on: settings with equal traits expect the same."""
    return tuple(_traits(setting.of(phase), phase) for phase in program["phases"])


def _traits(setting, phase):
    """The traits that plain torch's expectations depend on."""
    several = phase["world"] > 1
    # In files they are as far from a rank that is alone as from one of many.
    gated = setting.stage == 3 and (phase["offload"] or (several and not setting.shared))
    whole = not several or (setting.stage < 3 and not setting.shared)
    in_files = {kind for kind, share in placement_of(phase, setting).items() if share != "100%"}
    offload = phase["offload"] or "optimizer_states" in in_files
    return gated, whole and is_low(phase), setting.stage >= 2, offload, quantized_in(phase, setting)


def _phase(program, phase, setting, common, noise):
    life = Life(program, phase, setting, noise)
    results = []
    for number, act in enumerate(acts_of(phase)):
        try:
            results.append(_perform(life, act, *common))
        except UndefinedError as reason:
            reason.args = (phase, number, *reason.args)
            raise
        except NotImplementedError as error:
            why = f"plain torch lacks an operator, such as sparse sums in fp16: {error}"
            raise UndefinedError(phase, number, why) from error
        if life.dead:
            break
    return results


def _perform(life, act, saves, avoid):
    if life.program.get("accelerator") and accelerators.lacks(act):
        raise UndefinedError("what only a CPU's memory allows")
    if act["act"] in ACTS and act["act"] not in COLLECTIVE:
        _check_defined(life, act, avoid)
        return [_local(life, rank, act) for rank in life.ranks]
    if act["act"] in surroundings.ACTS:
        if act["act"] == "squeeze":
            life.is_squeezed = act["mib"] is not None
        return [surroundings.expected(act, pick(act.get("on", True), rank.rank)) for rank in life.ranks]
    _check_recomputed(life, act)
    if life.away and act["act"] not in WHILE_AWAY:
        raise UndefinedError("what trains while states are away")
    try:
        values = COLLECTIVE[act["act"]](life, act, saves)
    except FailuresError as failures:
        return failures.by_rank
    return values if isinstance(values, list) else [values] * len(life.ranks)


# Acts that may happen while states are away from memory.
WHILE_AWAY = {
    "counters", "hyper", "save", "load", "state", "export", "snapshot", "look_all", "offload_states", "reload_states",
    "empty_cache", "rebuild",
}  # fmt: skip


# -- what one rank does alone -----------------------------------------------------------------------------------------


# Known faults that wait: how the names of their files begin -> whether an act meets the fault, from (life, act).
KNOWN = {}


@functools.cache
def _is_open(name):
    return any(OPEN.glob(f"{name}*.json"))


def _check_defined(life, act, avoid):
    for name, meets in KNOWN.items():
        if avoid and _is_open(name) and meets(life, act):
            raise OpenError(name)
    persists = life.phase["config"].get("zero", {}).get("stage3_param_persistence_threshold")
    if life.gated and persists and (is_raw(act) or act.get("way") in UNCOUNTED):
        raise UndefinedError("which parameters are small enough to be kept whole")
    untold = act.get("way") == "numpy" or act.get("way") in UNCOUNTED
    goes_unnoticed = act["act"] == "write" and untold and life.whole
    if goes_unnoticed and is_low(life.phase) and life.keeps_own_states():
        raise UndefinedError("whether a step of the program's own optimizer publishes what it did not update")
    if goes_unnoticed and life.program.get("accelerator") and "optimizer_states" in life.in_files:
        raise UndefinedError("whether masters in the host's memory learn of a write of which nothing tells")
    if is_packed(life.phase) and act["act"] in ("write", "swap"):
        raise UndefinedError("how much of a packed master a write leaves: tests/python/optim/test_packed_states.py")
    _check_shares(life, act)
    _check_recomputed(life, act)
    if untold and any(_has_own_loss(life, slot) for rank in life.ranks for slot in rank.losses):
        raise UndefinedError("the gradient of a weight that was written since its forward, and of which nothing tells")
    if life.away and act["act"] not in ("clone", "read_raw") and act.get("mode", "train") == "train":
        raise UndefinedError("what trains while states are away")
    if act.get("way") == "gathered":
        _check_gathered(life, act)
    if act["act"] == "swap" and act["way"] == "double":
        for rank in life.ranks:
            rank.rehung.add(act["name"])
    idioms.check_looks(life, act)


def _check_gathered(life, act):
    """Ranks write together, into what the engine has."""
    name = act["name"]
    if any(r.losses or name in r.rehung or r.parameter(name) is not r.bound.get(name) for r in life.ranks):
        raise UndefinedError("what a gathered write makes of the program's own parameters, and of graphs from before")
    try:
        life.enter()
    except FailuresError as failures:
        raise UndefinedError("which rank tells first why a model is refused") from failures


def _check_recomputed(life, act):
    is_pending = life.phase.get("activations") and any(rank.losses for rank in life.ranks)
    writes = act["act"] in ("write", "swap", "load") or (act["act"] == "set_full" and act["role"] == "fp32")
    if is_pending and writes and act.get("name", "h.").startswith("h."):
        raise UndefinedError("what recomputation makes of a weight that was written since its forward")


def _check_shares(life, act):
    """A step that fails may have begun the layers' next share, or not."""
    is_forward = act["act"] in ("forward", "draw", "raise", "join", "no_sync") and act.get("mode", "train") == "train"
    if is_forward and life.shares.depth and life.shares.is_uncertain:
        raise UndefinedError("which share of the layers runs after a step that failed")


def _local(life, rank, act):
    parameter = rank.parameter(act["name"]) if "name" in act and pick(act.get("on", True), rank.rank) else None
    in_its_place = act.get("name") in rank.put_aside  # the program's own memory
    if is_raw(act) and parameter is not None and life.gated and not in_its_place:
        if parameter.numel():
            return RAW
        if act.get("way") == "share":  # reads the storage
            raise UndefinedError("whether a parameter without elements lies in a unit with others, and is sharded")
    try:
        return rank.perform(act)
    except DocumentedError as difference:
        return difference.raises
    except Exception as error:
        if act["act"] == "backward" and _has_own_loss(life, act["slot"]):
            raise UndefinedError("which gradients are there when backward fails after another operator") from error
        return Raises((type(error).__name__,), re.escape(str(error)[:24]))


def _has_own_loss(life, slot):
    """Whether some loss there is of operators that the oracle has replaced."""
    own = (act for act in life.phase["acts"] if act.get("slot") == slot)
    return any(act.get("kind") == "masked" or act.get("packed") for act in own)


# -- what ranks do together -------------------------------------------------------------------------------------------


def step(life, act, saves):
    outcome = life.step()
    return [_seen(life, rank, outcome) for rank in life.ranks]


def _seen(life, rank, outcome):
    return {**outcome, "lr": [group["lr"] for group in rank.hyper], **counters(life, None, None)}


def counters(life, act, saves):
    scale = [life.loss_scale] if life.phase.get("fp16") else []
    return {"counters": [life.global_steps, life.skipped_steps, life.micro_steps, *scale]}


def zero_grad(life, act, saves):
    life.enter()
    life.drop_gradients()
    return {}


def model_zero_grad(*given):
    return zero_grad(*given) if idioms.drops(*given[:2]) else {}


def _micro_batches(life, act, counts, alone):
    """Each rank's forward, backward and step, `counts` times; ranks that are through take part as `alone` says."""
    _check_shares(life, act)
    rows = []
    for i in range(max(counts)):
        through = [rank.rank for rank in life.ranks if i >= counts[rank.rank]]
        for rank in life.ranks:
            if rank.rank not in through:
                rank.perform(
                    {"act": "forward", "slot": "own", "seeds": act["seed"] + 10 * i + rank.rank, **_route(act)}
                )
                rank.perform({"act": "backward", "slot": "own", "via": "engine"})
        rows.append(life.step(through if alone else ()))
    return rows


def _route(act):
    return {"route": act["route"], "mode": "train"}


def join(life, act, saves):
    counts = [pick(act["counts"], rank.rank) for rank in life.ranks]
    if any(not p.requires_grad for rank in life.ranks for p in rank.bound.values()):
        raise UndefinedError("a loss may not require grad")
    if any(hook["when"] == "pre" for hook in life.hooks):
        raise UndefinedError("whether the round in which all have joined is a step")
    _micro_batches(life, act, counts, alone=True)
    if life.is_boundary():
        life.shares.end_step(life.global_steps)
    life.enter(life._check_step)  # the round in which all have joined
    return counters(life, act, saves)


def no_sync(life, act, saves):
    if life.setting.stage >= 2:
        return NO_SYNC
    before, life.override = life.override, False
    _micro_batches(life, act, [act["micros"]] * len(life.ranks), alone=False)
    life.override = before
    return counters(life, act, saves)


def boundary(life, act, saves):
    life.override = act["value"]
    return {}


def hyper(life, act, saves):
    for rank in life.ranks:
        if act["group"] < len(rank.hyper):
            rank.hyper[act["group"]][act["key"]] = pick(act["value"], rank.rank)
    return {}


def _is_within(life):
    """Whether a save holds the end of the last step."""
    counts = life.override is None and life.micro_steps % life.phase["gas"]
    return bool(counts) or any(rank.has_forward or rank.sums for rank in life.ranks)


def save(life, act, saves):
    if any(rank.rehung for rank in life.ranks):
        raise UndefinedError("where the gradient of a parameter is that had another type meanwhile")
    life.enter()
    saves[act["tag"]] = {**life.save(), "phase": life.phase, "within": _is_within(life)}
    return {}


def load(life, act, saves):
    if act["tag"] in saves:
        saved = saves[act["tag"]]
        if saved.get("within"):
            raise UndefinedError("what buffers were at the end of the step before an accumulation that was saved in")
        if saved.get("in_doubt"):
            raise UndefinedError("whether a save beside training was complete when ranks went different ways")
        if life.is_squeezed and hosts_of(life.program) > 1:
            raise UndefinedError("whether a group of hosts finds room for its threads")
        if len(saved["hyper"]) != len(life.ranks[0].hyper) or saved["states"].keys() != {t.name for t in life.trained}:
            raise UndefinedError("what a load makes of groups that were added since, or are not there yet")
        life.enter()
        life.load(saved)
    return {}


def state(life, act, saves):
    life.enter()
    return [cloned(rank.model.state_dict()) for rank in life.ranks]


def export(life, act, saves):
    life.enter()
    return [cloned(rank.model.state_dict()) if rank.rank == 0 else {} for rank in life.ranks]


def snapshot(life, act, saves):
    return [cloned(rank.model.state_dict()) for rank in life.ranks]


def look_all(life, act, saves):
    life.enter()
    life.refresh()
    values = {}
    for trained in life.trained:
        values[f"{trained.name} master"] = trained.master.detach().clone()
        state = life.optimizer.state.get(trained.master, {})
        for role in STATES[life.program["optimizer"]["type"]]:
            kept = life.has_state(trained) and trained.master.numel() if life.keeps_own_states() else _keeps(life, role)
            values[f"{trained.name} {role}"] = _or_zeros(state.get(role), trained.master) if kept else None
    return values


def _keeps(life, role):
    """SGD without a momentum keeps no state."""
    return role != "momentum_buffer" or life.program["optimizer"]["params"]["momentum"]


def _or_zeros(state, like):
    return torch.zeros_like(like).detach() if state is None else state.clone()


def look_gradient(life, act, saves):
    trained = life.by_name.get(act["name"])
    if trained is None or trained.name != act["name"]:
        return None
    if life.phase["gas"] > 1 or life.override is not None:
        raise UndefinedError("which gradients there are within an accumulation")
    life.enter()
    total = life._total(trained)
    if total is None and life.phase.get("fed_back") and quantized_in(life.phase, life.setting):
        raise UndefinedError("what an earlier contribution's error adds to a gradient that nothing reached")
    if total is None and any(rank.sums for rank in life.ranks):
        return {"gradient": torch.zeros_like(trained.master).detach()}
    return {"gradient": total}


def set_full(life, act, saves):
    """safe_set_full_*: the value is that of the name's own shape."""
    name, role = act["name"], act["role"]
    if name not in life.ranks[0].bound:
        return None
    if role == "gradient" and (life.phase["gas"] > 1 or life.override is not None):
        raise UndefinedError("which gradients there are within an accumulation")
    life.enter()
    trained = life.by_name.get(name)
    if trained is None:
        return NOT_OPTIMIZED
    value = values_for(life.ranks[0].bound[name], act["seed"]).float()
    value = value.t() if trained.names[name] else value
    if role == "fp32":
        life.set_master(trained, value)
    elif role == "gradient":
        life.set_gradient(trained, value)
    elif not _keeps(life, STATES[life.program["optimizer"]["type"]][0]):
        return NO_STATE
    elif life.keeps_own_states() and not life.has_state(trained):
        raise UndefinedError("what a state is before the optimizer of the program's own has made it")
    else:
        life.set_state(trained, STATES[life.program["optimizer"]["type"]][0], value)
    return {}


def rebuild(life, act, saves, but=()):
    """Rebuilds a model as it was: others are in tests/python/programs/test_rebuild.py."""
    if any(rank.rehung or rank.losses or any(life.late(rank)) or rank.put_aside for rank in life.ranks):
        raise UndefinedError("what a rebuild makes of a model that has changed, and of graphs from before")
    if set(life.program["model"]["left_out"]) - {*but, *life.by_name} or life.has_frozen_or_thawed():
        raise UndefinedError("what a rebuild makes of parameters that no group has, or that were frozen since")
    if any(rank.hyper != life.ranks[0].hyper for rank in life.ranks):
        raise UndefinedError("which rank tells first that ranks have other rates: the rebuild, or the step")
    in_files = life.away or life.in_files & {"optimizer_states", "parameters"}
    kept = OWN_REBUILT if life.keeps_own_states() else IN_FILES if in_files else None
    if any(rank.sums for rank in life.ranks):
        life.enter(lambda rank: NOT_REBUILT if rank.sums else REBUILD_OF_ANOTHER | kept)
    life.enter(lambda rank: kept)
    life.micro_steps -= life.micro_steps % life.phase["gas"]  # gradients were dropped: the accumulation begins anew
    return NO_SUCH_MODEL if act.get("refused") else counters(life, act, saves)


def offload_states(life, act, saves):
    if any(rank.losses or rank.rehung for rank in life.ranks):
        raise UndefinedError("which gradients there are")
    unsafe = any(rank.sums for rank in life.ranks)
    moved = NOT_OURS if life.keeps_own_states() else MOVED_ALREADY if "optimizer_states" in life.in_files else None

    def answer(rank):
        if life.away:
            return AWAY
        if not unsafe:
            return moved
        return NOT_MOVED if rank.sums else NOT_MOVED | moved  # a rank without gradients may come to its own reason

    life.enter(answer)
    life.away = True
    return {}


def reload_states(life, act, saves):
    life.enter(lambda rank: None if life.away else NOT_AWAY)
    life.away = False
    return {}


def empty_cache(life, act, saves):
    life.enter()
    return {}


def add_group(life, act, saves):
    return NO_OWN_GROUP if life.keeps_own_states() else NO_NEW_GROUP


def add_left_out(life, act, saves):
    """A group of what no group had: the engine is rebuilt for it."""
    first = life.ranks[0]
    names = [n for n in life.program["model"]["left_out"] if first.bound[n].requires_grad and n not in life.by_name]
    if any(rank.bound[name].grad is not None for rank in life.ranks for name in names):
        raise UndefinedError("whether gradients from before count for what is optimized only now")
    if not names or life.rates.is_closed:
        raise UndefinedError("what a group without parameters is, and what torch's schedules make of one more")
    if life.keeps_own_states():
        return NO_OWN_GROUP
    seen = rebuild(life, act, saves, but=names)
    life.add_group(names, 0.01)
    return seen


def optimizer_state(life, act, saves):
    return NO_LOADED_STATE if act["loads"] else NO_STATE_DICT


def step_hook(life, act, saves):
    if is_packed(life.phase):
        raise UndefinedError("how much of a packed master a write leaves: tests/python/optim/test_packed_states.py")
    if act["way"] not in RELATIVE or act["way"] in UNCOUNTED:
        raise UndefinedError("writes that have acts of their own")
    life.hooks.append(act)
    return {}


def schedule(life, act, saves):
    if not life.rates.is_by_hand:
        return None
    life.rates.advance([rank.hyper for rank in life.ranks])
    return [{"lr": [group["lr"] for group in rank.hyper]} for rank in life.ranks]


def diverge(life, act, saves):
    calls = [pick(act["calls"], rank.rank) for rank in life.ranks]
    if len(set(calls)) == 1:
        return None
    life.dead = True
    for saved in saves.values():
        if life.phase.get("beside") and saved["phase"] is life.phase:
            saved["in_doubt"] = True
    return DIFFERENT_CALLS


COLLECTIVE = {
    f.__name__: f
    for f in (
        step, counters, zero_grad, model_zero_grad, join, no_sync, boundary, hyper, save, load, state, export, snapshot,
        look_all, look_gradient, set_full, rebuild, offload_states, reload_states, empty_cache, add_group, diverge,
        add_left_out, optimizer_state, step_hook, schedule,
    )
}  # fmt: skip
