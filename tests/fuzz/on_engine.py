# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Runs a program on one rank of real engines, and writes what each act gave."""

import faulthandler
import json
import os
import pickle
import sys
import time

import torch
import torch.distributed as dist
from actions import acts, schedules, subject, surroundings
from actions.accelerators import Accelerator
from actions.programs import LOSS_SCALE, STATES, Setting, acts_of, hosts_of, is_packed, most_ranks, pick, placement_of
from torch.utils._pytree import tree_map_only

import deeptide
from deeptide.efficiency import convert_to_random_ltd, drop_layers

_limit, _comm_timeout = 0.0, 0.0  # seconds: for an act, for a peer
kept = []  # what a script that simply ends still holds


class EngineRank(acts.Rank):
    def __init__(self, rank, model, started, given, program, phase, folder):
        super().__init__(rank, model)
        self.homes = [f"{folder}/host{host}" for host in range(hosts_of(program))]  # of checkpoints
        self.begun = set()  # tags that may still be on their way
        self.home, self.beside = self.homes[rank % len(self.homes)], phase.get("beside", False)
        self.engine, optimizer, self.loader, self.schedule = started
        self.returned, self.given = optimizer, given or optimizer
        self.optimizer, self.folder = program["optimizer"]["type"], folder
        self.left_out = program["model"]["left_out"]
        self.iteration = None

    def call(self, *arguments):
        return self.engine(*arguments)

    def backward(self, loss, act):
        if act["via"] == "engine":
            self.engine.backward(loss, retain_graph=bool(act.get("retain")), scale_wrt_gas=not act.get("sum"))
        else:
            loss.backward(retain_graph=bool(act.get("retain")))

    def draw(self, act):
        if self.loader is None:
            return None
        if self.iteration is None or act["anew"]:
            self.iteration = iter(deeptide.utils.RepeatingLoader(self.loader) if act["repeats"] else self.loader)
        batch = next(self.iteration, None)
        if batch is None:
            self.iteration = None
        return [] if batch is None else batch.tolist()

    def object(self, act):
        """Whose methods an act calls: the engine's, the returned optimizer's, or those of the one that was given."""
        return {"engine": self.engine, "optimizer": self.returned, "given": self.given}[act.get("via", "engine")]

    def write_gathered(self, parameter, seed, modifier):
        with deeptide.zero.GatheredParameters([parameter], modifier_rank=modifier):
            parameter.data.copy_(acts.values_for(parameter, seed + self.rank))

    def perform(self, act):
        if act["act"] in acts.ACTS:
            return super().perform(act)
        return (surroundings.ACTS.get(act["act"]) or TOGETHER[act["act"]])(self, act)

    def counters(self):
        engine = self.engine
        scale = [engine.optimizer.loss_scale] if engine.fp16_enabled() else []
        return {"counters": [engine.global_steps, engine.skipped_steps, engine.micro_steps, *scale]}


def observers_of(phase, folder):
    """Sections by their names, and those of "deeptide"."""
    place = {"enabled": True, "output_path": folder, "job_name": "observed"}
    top = {
        "breakdown": {"wall_clock_breakdown": True, "memory_breakdown": True, "steps_per_print": 2},
        "collectives": {"comms_logger": {"enabled": True}},
        "profile": {"flops_profiler": {"enabled": True, "profile_step": 2, "output_file": f"{folder}/profile.json"}},
        "csv": {"csv_monitor": place},
    }
    own = {
        "record": {"jsonl_monitor": place},
        "timeline": {"timeline": {"enabled": True, "output_path": folder, "start_step": 1, "num_steps": 2}},
    }
    names = phase.get("observers", [])
    return [{k: v for name in names for k, v in table.get(name, {}).items()} for table in (top, own)]


def config_of(program, phase, setting, folder):
    extra = phase["config"]
    seen, seen_by_own = observers_of(phase, folder)
    files = {"device": "nvme", "nvme_path": folder}
    zero = {"offload_optimizer": files} if phase["offload"] else {}
    states = {"packed_states": is_packed(phase)}
    if phase.get("moments"):
        states["moment_dtype"] = "bf16"
    if phase.get("quantized"):
        states |= {"quantized_gradients": phase["quantized"], "quantized_error_feedback": phase.get("fed_back", False)}
    if placed := placement_of(phase, setting):
        states["placement"] = {"nvme_path": folder, **{k: {"cpu": s, "nvme": "rest"} for k, s in placed.items()}}
    if phase["offload"] and setting.stage == 3:
        zero["offload_param"] = files
    return {
        "train_micro_batch_size_per_gpu": subject.ROWS,
        "gradient_accumulation_steps": phase["gas"],
        "gradient_clipping": program["clipping"],
        "zero_optimization": {
            "stage": setting.stage,
            "stage3_param_persistence_threshold": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
            **zero,
            **extra.get("zero", {}),
        },
        "bf16": {"enabled": phase["bf16"]},
        "fp16": {"enabled": phase.get("fp16", False), **LOSS_SCALE},
        "checkpoint": {
            "folders": [f"{folder}/drive{number}" for number in range(phase.get("folders", 0))],
            "use_node_local_storage": hosts_of(program) > 1,
        },
        **subject.activations_of(phase.get("activations"), folder),
        **subject.compression_of(program["model"]),
        **subject.less_work_of(program["model"]),
        **seen,
        "deeptide": {
            "comm_timeout": _comm_timeout,
            "shared_memory": setting.shared,
            **states,
            **seen_by_own,
            **extra.get("deeptide", {}),
        },
    }


def start(program, phase, setting, place, folder):
    spec, seed = program["model"], program["seed"]
    number, world, accelerator = place
    model = subject.make(spec, seed + (number if spec["seed_by_rank"] else 0))
    model = accelerator.move(model) if accelerator else model
    parameters = dict(model.named_parameters())
    groups = [{"params": [parameters[n] for n in names]} for names in subject.optimized_names(model, spec)]
    for group in groups[1:]:
        group["weight_decay"] = 0.0
    config, given = config_of(program, phase, setting, folder), None
    section, schedule, how = program["optimizer"], schedules.spec_of(program), {}
    if section["by"] == "config":
        config["optimizer"] = {"type": section["type"], "params": section["params"]}
        how["model_parameters"] = groups
    else:
        given = how["optimizer"] = _optimizer(section, groups)
    made = schedules.make(schedule, given) if schedule and schedule["made"] != "function" else None
    if schedule and schedule["made"] != "by_hand":
        how["lr_scheduler"] = made or (lambda optimizer: schedules.make(schedule, optimizer))
    if program.get("data"):
        how["training_data"] = subject.Samples(program["data"]["samples"])
        config["dataloader_drop_last"] = program["data"]["drop_last"]
    started = list(deeptide.initialize(model=model, config=config, world=world, **how))
    started[3] = made or started[3]
    if spec.get("tokens"):
        convert_to_random_ltd(started[0], subject.Block)
    if spec.get("depth"):
        drop_layers(started[0], model.h)
    return EngineRank(number, model, started, given, program, phase, folder)


def _optimizer(section, groups):
    kind = getattr(torch.optim, section["type"])
    if not section.get("restored"):
        return kind(groups, **section["params"])
    saved = kind([dict(group) for group in groups], **section["params"]).state_dict()
    restored = kind([{"params": group["params"]} for group in groups], lr=0.5)
    restored.load_state_dict(saved)
    return restored


# -- acts that ranks do together --------------------------------------------------------------------------------------


def step(rank, act):
    outcome = rank.object(act).step()
    seen = {"result": outcome.result.name, "lr": rank.engine.get_lr(), **rank.counters()}
    return {**seen, "norm": outcome.grad_norm} if outcome.applied else seen


def zero_grad(rank, act):
    rank.object(act).zero_grad()
    return {}


def optimizer_state(rank, act):
    state = {"state": {}, "param_groups": []}
    rank.object(act).load_state_dict(state) if act["loads"] else rank.object(act).state_dict()
    return {}


def step_hook(rank, act):
    """A hook of the program's own around each step that is taken, which writes a parameter."""
    optimizer = rank.object(act)
    register = optimizer.register_step_pre_hook if act["when"] == "pre" else optimizer.register_step_post_hook
    register(lambda *_: acts.write(rank, act) and None)
    return {}


def schedule(rank, act):
    if rank.engine.lr_scheduler is rank.schedule:
        return None
    rank.schedule.step()
    return {"lr": [float(group["lr"]) for group in rank.returned.param_groups]}


def add_left_out(rank, act):
    """Gives the optimizer what it was not given at first."""
    params = [rank.bound[name] for name in rank.left_out if rank.bound[name].requires_grad]
    rank.object(act).add_param_group({"params": params, "lr": 0.01})
    return rank.counters()


def _micro_batches(rank, act, count):
    for i in range(count):
        seed = act["seed"] + 10 * i + rank.rank
        rank.perform({"act": "forward", "slot": "own", "seeds": seed, "route": act["route"], "mode": "train"})
        rank.perform({"act": "backward", "slot": "own", "via": "engine"})
        rank.engine.step()


def join(rank, act):
    _micro_batches(rank, act, rank.own(act["counts"]))
    rank.engine.join()
    return rank.counters()


def no_sync(rank, act):
    with rank.engine.no_sync():
        _micro_batches(rank, act, act["micros"])
    return rank.counters()


def boundary(rank, act):
    rank.engine.set_gradient_accumulation_boundary(act["value"])
    return {}


def hyper(rank, act):
    groups = rank.engine.optimizer.param_groups
    if act["group"] < len(groups):
        groups[act["group"]][act["key"]] = rank.own(act["value"])
    return {}


def save(rank, act):
    rank.engine.save_checkpoint(rank.home, tag=act["tag"], blocking=not rank.beside)
    rank.begun.add(act["tag"])
    return {}


def load(rank, act):
    if act["tag"] in rank.begun or any(os.path.isdir(os.path.join(home, act["tag"])) for home in rank.homes):
        rank.engine.load_checkpoint(rank.home, tag=act["tag"])
    return {}


def state(rank, act):
    return dict(rank.engine.module_state_dict())


def export(rank, act):
    from safetensors.torch import load_file

    rank.engine.save_16bit_model(rank.folder, "exported.safetensors")
    return load_file(os.path.join(rank.folder, "exported.safetensors")) if rank.rank == 0 else {}


def snapshot(rank, act):
    return dict(rank.engine.snapshot().state_dict())


def look_all(rank, act):
    groups = rank.engine.optimizer.param_groups
    ids = {id(p) for group in groups for p in group["params"]}
    values = {}
    for name, parameter in rank.bound.items():
        if id(parameter) not in ids or name == "pair.decode.weight":
            continue
        ids.discard(id(parameter))
        values[f"{name} master"] = deeptide.utils.safe_get_full_fp32_param(parameter)
        for role in STATES[rank.optimizer]:
            values[f"{name} {role}"] = deeptide.utils.safe_get_full_optimizer_state(parameter, role)
    return values


def look_gradient(rank, act):
    groups = rank.engine.optimizer.param_groups
    parameter = rank.bound.get(act["name"])
    first = next((name for name, p in rank.bound.items() if p is parameter), None)
    optimized = any(p is parameter for group in groups for p in group["params"])
    if not optimized or first != act["name"] or first == "pair.decode.weight":
        return None
    return {"gradient": deeptide.utils.safe_get_full_grad(parameter)}


def set_full(rank, act):
    parameter = rank.bound.get(act["name"])
    if parameter is None:
        return None
    value = acts.values_for(parameter, act["seed"]).float()
    if act["role"] == "fp32":
        deeptide.utils.safe_set_full_fp32_param(parameter, value)
    elif act["role"] == "gradient":
        deeptide.utils.safe_set_full_grad(parameter, value)
    else:
        deeptide.utils.safe_set_full_optimizer_state(parameter, value, STATES[rank.optimizer][0])
    return {}


def counters(rank, act):
    return rank.counters()


def rebuild(rank, act):
    model = rank.engine.module
    if act.get("refused"):
        model.refused = torch.nn.Parameter(torch.zeros(3).to_sparse(), requires_grad=False)
    try:
        rank.engine.rebuild()
    finally:
        if act.get("refused"):
            del model.refused
    return rank.counters()


def offload_states(rank, act):
    rank.engine.offload_states(device="nvme", nvme_path=rank.folder)
    return {}


def reload_states(rank, act):
    rank.engine.reload_states()
    return {}


def empty_cache(rank, act):
    rank.engine.empty_partition_cache()
    return {}


def add_group(rank, act):
    rank.object({"via": act.get("via", "optimizer")}).add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    return {}


def diverge(rank, act):
    call = rank.own(act["calls"])
    if isinstance(act["calls"], list) and len({pick(act["calls"], r) for r in range(rank.engine.world_size)}) > 1:
        return TOGETHER[call](rank, {"tag": "diverged"})
    return None


TOGETHER = {
    f.__name__: f
    for f in (
        step, zero_grad, join, no_sync, boundary, hyper, save, load, state, export, snapshot, look_all, look_gradient,
        set_full, counters, rebuild, offload_states, reload_states, empty_cache, add_group, diverge, optimizer_state,
        step_hook, schedule, add_left_out,
    )
}  # fmt: skip


# -- a rank's process -------------------------------------------------------------------------------------------------


def watch():
    """Ends this process, saying where it is, unless it comes by again in time."""
    faulthandler.dump_traceback_later(_limit, exit=True)


def _result(rank, act):
    """("ok", values), or ("raised", type, text, whether the engine is of no use any more)."""
    watch()
    try:
        return ("ok", tree_map_only(torch.Tensor, torch.Tensor.cpu, rank.perform(act)))
    except Exception as error:
        return ("raised", type(error).__name__, str(error), isinstance(error, deeptide.CommError))


def _phase(program, phase, setting, place, folder):
    """place: (number, world, accelerator), world or accelerator None."""
    rank = start(program, phase, setting, place, folder)
    ends_alone = program.get("end") == "return" and phase is program["phases"][-1]
    results = []
    try:
        for act in acts_of(phase):
            results.append(_result(rank, act))
            if results[-1][-1] is True:
                break
    finally:
        surroundings.squeeze(rank, {"mib": None})
        if ends_alone:
            kept.append(rank)
        else:
            rank.engine.destroy()
    return results


def _phase_on(accelerator, *arguments):
    """Likewise. In the place of the last result stands what was not ordered, or not given back."""
    before = accelerator.used_bytes()
    results = _phase(*arguments)
    left = accelerator.used_bytes() - before if not kept else 0
    if found := accelerator.settle() or (left and f"{left} bytes of the accelerator are still in use"):
        results[-1] = ("raised", "Accelerator", found, False)
    return results


def _sit_out(store, ended):
    """Waits until other ranks have run a phase. Theirs are the limits."""
    faulthandler.cancel_dump_traceback_later()
    while not store.check([ended]):
        time.sleep(0.05)
    watch()


def run(program, settings, number, size, port, folder):
    """All settings, one after the other; each result is written as soon as it is there."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    accelerator = Accelerator(program["accelerator"], program["seed"]) if program.get("accelerator") else None
    for setting in map(Setting.parse, settings):
        checkpoints = os.path.join(folder, f"{setting}-checkpoints")
        results = []
        for index, phase in enumerate(program["phases"]):
            ended = f"{os.path.basename(folder)}/{setting}/{index} ended"
            if number >= phase["world"]:
                results.append(None)
                _sit_out(store, ended)
                continue
            prefix = dist.PrefixStore(f"{os.path.basename(folder)}/{setting}/{index}", store)
            at = (program, phase, setting.of(phase))
            try:
                if accelerator:
                    with accelerator.group(prefix, number, phase["world"]):
                        results.append(_phase_on(accelerator, *at, (number, None, accelerator), checkpoints))
                else:
                    place = (number, deeptide.make_world(prefix, number, phase["world"]), None)
                    results.append(_phase(*at, place, checkpoints))
            except Exception as error:
                results.append([("raised", type(error).__name__, f"initialize: {error}", True)])
            store.set(ended, "")
        with open(os.path.join(folder, f"{setting}-{number}.tmp"), "wb") as file:
            pickle.dump(results, file)
        os.rename(file.name, os.path.join(folder, f"{setting}-{number}"))


def main(program, settings, number, port, folder, limit, comm_timeout):
    global _limit, _comm_timeout
    _limit, _comm_timeout = limit, comm_timeout
    watch()
    run(json.loads(program), settings, number, most_ranks(json.loads(program)), port, folder)
    sys.stdout.flush()
    if json.loads(program).get("end") == "return":
        return
    os._exit(0)  # to end as scripts do takes a forked interpreter longer than the program
