# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Acts of a program on one rank, without the others: the same code runs on plain torch and on an engine's model.

An act returns what it has seen, by name, for comparison; None where it had nothing to do.
"""

import copy

import torch
from torch import nn

from actions import subject
from actions.programs import pick


class UserError(Exception):
    """A program's own error in the middle of a pass."""


class Rank:
    """One rank's model and what the program keeps beside it. Subclasses know how a backward is run."""

    def __init__(self, rank, model):
        self.rank = rank
        self.model = model
        self.bound = dict(model.named_parameters(remove_duplicate=False))  # as given to the optimizer
        self.device = model.head.weight.device
        self.losses = {}
        self.has_forward = False  # since the last step
        self.put_aside = {}  # name -> the memory that a swap took away

    def call(self, *arguments):
        return self.model(*arguments)

    def backward(self, loss, act):
        raise NotImplementedError

    def write_gathered(self, parameter, seed, modifier):
        """Writes what the rank `modifier` has; each rank has other values."""
        parameter.copy_(values_for(parameter, seed + modifier))

    def draw(self, act):
        """The numbers of the samples that the loader gives next, or None without a loader."""
        raise NotImplementedError

    def parameter(self, name):
        """The parameter that the model has now under this name, or None."""
        return dict(self.model.named_parameters(remove_duplicate=False)).get(name)

    def own(self, value):
        return pick(value, self.rank)

    def perform(self, act):
        return ACTS[act["act"]](self, act)


def values_for(parameter, seed):
    """Numbers that bf16 holds exactly, of the parameter's shape."""
    generator = torch.Generator().manual_seed(seed)
    values = 0.3 * torch.randn(parameter.shape, generator=generator)
    return values.bfloat16().to(parameter.device, parameter.dtype)


# -- passes -----------------------------------------------------------------------------------------------------------


def compute(rank, act, batch):
    mode = act.get("mode", "train")
    rank.model.train(mode == "train")
    tokens, targets, *ids = batch
    guards = {"no_grad": torch.no_grad, "inference": torch.inference_mode}
    route, kind = rank.own(act["route"]), act.get("kind", "cross")
    torch.manual_seed(int(tokens.sum()))  # layers and tokens that are left out
    tokens, targets, *ids = (part.to(rank.device) for part in batch)
    with guards.get(mode, torch.enable_grad)():
        if ids or kind == "masked":
            targets = targets if ids else subject.some_ignored(tokens, targets)
            return rank.call(tokens, route, act.get("recompute"), targets, *ids)
        return subject.loss_of(rank.call(tokens, route, act.get("recompute")), targets, kind)


def _batch_of(act, seed):
    if act.get("packed"):
        return subject.packed(seed, act["packed"])
    return subject.batch(seed, act.get("rows", subject.ROWS))


def forward(rank, act):
    seed = rank.own(act["seeds"])
    if seed is None:
        return None
    loss = compute(rank, act, _batch_of(act, seed))
    rank.has_forward |= act.get("mode", "train") == "train"
    if act.get("mode", "train") in ("train", "eval"):
        rank.losses[act["slot"]] = loss
    return {"loss": loss.item()}


def draw(rank, act):
    """A forward over what the loader gives next."""
    numbers = rank.draw(act)
    if numbers is None:
        return None
    if not numbers:
        return {"drawn": torch.tensor([])}
    loss = compute(rank, act, subject.rows(numbers))
    rank.losses[act["slot"]] = loss
    rank.has_forward = True
    return {"drawn": torch.tensor(numbers), "loss": loss.item()}


def backward(rank, act):
    loss = rank.losses.get(act["slot"])
    if loss is None or not rank.own(act.get("on", True)):
        return None
    if not act.get("retain"):
        del rank.losses[act["slot"]]
    rank.backward(loss * float(rank.own(act["times"])) if "times" in act else loss, act)
    return {}


def _raising_hook(where):
    def raise_now(*_):
        raise UserError("the program's own")

    def hook(module, arguments, output):
        if where == "forward":
            raise_now()
        if output.requires_grad:
            output.register_hook(raise_now)

    return hook


def raise_within(rank, act):
    """A forward and a backward, one of which a hook on a module ends with the program's own error, caught."""
    seed, modules = rank.own(act["seeds"]), dict(rank.model.named_modules())
    if seed is None or act["module"] not in modules:
        return None
    handle = modules[act["module"]].register_forward_hook(_raising_hook(act["where"]))
    try:
        loss = compute(rank, {**act, "mode": "train"}, subject.batch(seed))
        handle.remove()
        rank.backward(loss, act)
    except UserError:
        return {"raised": True}
    finally:
        handle.remove()
    return {"raised": False}


# -- gradients --------------------------------------------------------------------------------------------------------


def freeze(rank, act):
    for name in act["names"]:
        parameter = rank.parameter(name)
        is_late = getattr(parameter, "is_late", False)
        if parameter is not None and not is_late and rank.own(act.get("on", True)):
            parameter.requires_grad_(not act["frozen"])
    return {}


def set_grad(rank, act):
    parameter = rank.parameter(act["name"])
    if parameter is None or not parameter.requires_grad or not rank.own(act.get("on", True)):
        return None
    if act["how"] == "none":
        parameter.grad = None
    elif act["how"] == "values":
        parameter.grad = values_for(parameter, act["seed"])
    elif parameter.grad is not None:
        parameter.grad.mul_(0.5)
    return {}


def gradients_by_hand(rank, act):
    """autograd.grad of a loss, its results put into .grad."""
    loss = rank.losses.get(act["slot"])
    parameters = [p for p in rank.model.parameters() if p.requires_grad]
    if loss is None or not loss.requires_grad or not parameters or not rank.own(act.get("on", True)):
        return None
    del rank.losses[act["slot"]]
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True):
        if gradient is not None:
            parameter.grad = gradient
    return {}


def hook(rank, act):
    """A hook of the program's own, for as long as the model lives."""
    parameter = rank.parameter(act["name"])
    if parameter is not None and parameter.requires_grad and rank.own(act.get("on", True)):
        parameter.register_hook(lambda gradient: 0.5 * gradient)
    return {}


def model_zero_grad(rank, act):
    if rank.own(act.get("on", True)):
        rank.model.zero_grad()
    return {}


# -- writes -----------------------------------------------------------------------------------------------------------


def _write_element(parameter, seed):
    if parameter.numel():
        parameter.view(-1)[seed % parameter.numel()] = 0.25


def _numpy_of(tensor):
    """The value in numpy, which has no bf16: its bits."""
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _write_numpy(parameter, seed):
    _numpy_of(parameter.detach())[...] = _numpy_of(values_for(parameter, seed))


ABSOLUTE = {
    "copy": lambda p, seed: p.copy_(values_for(p, seed)),
    "element": _write_element,
    "fill_row": lambda p, seed: p[0].fill_(0.125) if p.dim() > 1 else p.fill_(0.125),
    "init": lambda p, seed: nn.init.normal_(p, std=0.3, generator=torch.Generator().manual_seed(seed)),
    "masked": lambda p, seed: p.masked_fill_(values_for(p, seed) > 0, 0.5),
    "set_": lambda p, seed: p.data.copy_(values_for(p, seed)),
    "data_row": lambda p, seed: p.data[:1].fill_(0.25) if p.dim() else p.data.fill_(0.25),
    "numpy": _write_numpy,
}
RELATIVE = {
    "mul": lambda p, seed: p.mul_(0.5),
    "add_view": lambda p, seed: p.detach().add_(0.125),
    "out": lambda p, seed: torch.mul(p.detach(), 0.5, out=p.detach()),
    "foreach": lambda p, seed: torch._foreach_mul_([p], 0.5),
    "clamp": lambda p, seed: p.clamp_(-0.25, 0.25),
    "data_mul": lambda p, seed: p.data.mul_(0.5),
}
UNCOUNTED = {"set_", "data_row", "data_mul"}  # writes that move no version counter


def is_raw(act):
    """Whether it goes past the dispatcher, which a gate refuses."""
    return act["act"] == "read_raw" or act.get("way") in ("numpy", "share")


def write(rank, act):
    parameter, way = rank.parameter(act["name"]), act["way"]
    if parameter is None:
        return None
    if way == "load_state_dict":
        rank.model.load_state_dict({act["name"]: values_for(parameter, act["seed"])}, strict=False)
        return {}
    with torch.no_grad():
        if way == "gathered":
            rank.write_gathered(parameter, act["seed"], act["modifier"])
            return {}
        (ABSOLUTE.get(way) or RELATIVE[way])(parameter, act["seed"])
    return {}


def rebind(rank, act):
    """Gives the model another tensor for its buffer, one that differs by rank."""
    old = rank.model.mean
    rank.model.mean = values_for(old, act["seed"] + rank.rank)
    return {}


def swap(rank, act):
    """Replaces a parameter's memory: by another type and back at once, or by other memory until `back`."""
    parameter, way = rank.parameter(act["name"]), act["way"]
    if parameter is None or not rank.own(act.get("on", True)):
        return None
    if way == "double":
        kept = parameter.data
        parameter.data = kept.double()
        parameter.data = kept
    elif way == "away" and act["name"] not in rank.put_aside:
        rank.put_aside[act["name"]] = parameter.data
        parameter.data = values_for(parameter, act["seed"])
    elif way == "back" and act["name"] in rank.put_aside:
        parameter.data = rank.put_aside.pop(act["name"])
    elif way == "share":
        parameter.data.share_memory_()
    return {}


def replace(rank, act):
    """Puts another parameter object into the model: a new one, an existing one, or one more."""
    model, width = rank.model, rank.model.embed.weight.shape[1]
    torch.manual_seed(act["seed"])
    if act["way"] == "new":
        values = torch.randn(subject.VOCAB, width).to(rank.device, model.embed.weight.dtype)
        model.head.weight = nn.Parameter(values, requires_grad=False)
        model.head.weight.is_late = True  # and stays frozen: that it gets a gradient is an error
    elif act["way"] == "tie":
        model.head.weight = model.embed.weight
    else:
        model.added = nn.Linear(2, 2).to(rank.device)
    return {}


# -- looks ------------------------------------------------------------------------------------------------------------


def clone(rank, act):
    if not rank.own(act.get("on", True)):
        return None
    model = copy.deepcopy(rank.model) if act["way"] == "deepcopy" else rank.model
    if act["way"] == "state_dict":
        return {name: value.clone() for name, value in model.state_dict().items()}
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters(remove_duplicate=False)}


def read_raw(rank, act):
    """Past the dispatcher."""
    parameter = rank.parameter(act["name"])
    if parameter is None or not parameter.numel():
        return None
    flat = parameter.detach().view(torch.int16 if parameter.itemsize == 2 else torch.int32)
    flat.numpy()
    return {}


ACTS = {
    "forward": forward,
    "draw": draw,
    "backward": backward,
    "raise": raise_within,
    "freeze": freeze,
    "set_grad": set_grad,
    "gradients_by_hand": gradients_by_hand,
    "hook": hook,
    "model_zero_grad": model_zero_grad,
    "write": write,
    "rebind": rebind,
    "swap": swap,
    "replace": replace,
    "clone": clone,
    "read_raw": read_raw,
}
