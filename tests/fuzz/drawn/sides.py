# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""A drawn program on plain torch in one process, and on one rank of an engine: the same steps, and what both saw."""

import copy
import random

import numpy as np
import torch

import deeptide
from deeptide.pipeline import show_example
from deeptide.pipeline.passing.elsewhere import Elsewhere
from deeptide.tensor import team_of
from deeptide.tensor.cutting.slices import slices_of
from drawn.layers import as_layers_take, layers_of, plain_name
from drawn.model import batch, make, set_values

RATE = 0.1


def seed_all(seed):
    """All generators that a model may draw from."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def generators():
    """The states of all that."""
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def set_generators(states):
    """states: as `generators` returned them."""
    for give_back, state in zip((torch.set_rng_state, np.random.set_state, random.setstate), states, strict=True):
        give_back(state)


class InterruptedStepError(Exception):
    """A program's answer to an interrupt in the midst of a step."""


class Side:
    """One of both. Subclasses know how a model is trained. at: the step that is taken; -1: none, but an idiom."""

    def __init__(self, program):
        self.program, self.seen = program, []

    def run(self):
        """[(what, value)] of each look, in order; then the state at the end."""
        for step, idioms in enumerate(self.program["steps"]):
            self.at = -1
            self.module.step = step
            for idiom in idioms:
                if idiom in BEFORE:
                    BEFORE[idiom](self, step)
            self.at = step
            try:
                self.take(step, idioms)
            except InterruptedStepError:
                self.resume(step)
                self.module.step = step
                self.take(step, [])
        self.seen.append(("state", self.state()))
        return self.seen

    def take(self, step, idioms):
        """A step of the program's own loop, or one call."""
        given = [batch(self.program, step, micro) for micro in range(self.program["gas"])]
        if self.program["through"] == "train_batch":
            self.seen.append(("loss", self.train_batch(given)))
            return
        for micro, each in enumerate(given):
            loss = self.forward(each)
            self.seen.append(("loss", None if isinstance(loss, Elsewhere) else loss.item()))
            self._interrupt("interrupt_forward", idioms)
            self.backward(loss)
            self._interrupt("interrupt_backward", idioms)
            is_last = micro == len(given) - 1
            step, self.at = self.at, -1
            for idiom in idioms if is_last else ():
                if idiom in AFTER:
                    AFTER[idiom](self)
            self.at = step
            self.step(is_last)
            if not is_last:
                self._interrupt("interrupt_accumulation", idioms)

    def _interrupt(self, place, idioms):
        if place not in idioms:
            return
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            self.save()
        raise InterruptedStepError


class Plain(Side):
    def __init__(self, program):
        super().__init__(program)
        self.module = make(program["model"], program["seed"])
        self.momenta = {}
        seed_all(program["seed"])
        self._note_boundary()

    def _note_boundary(self):
        self._buffers = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        self._generators = generators()

    def forward(self, given):
        return self.module(**given)[0]

    def backward(self, loss):
        (loss / self.program["gas"]).backward()

    def step(self, is_last):
        """SGD by its definition: torch's own imports a compiler, which takes longer than the program."""
        if not is_last:
            return
        with torch.no_grad():
            for parameter in self.module.parameters():
                if parameter.grad is not None:
                    before = self.momenta.get(parameter, 0.0)
                    self.momenta[parameter] = self.program["momentum"] * before + parameter.grad
                    parameter.sub_(RATE * self.momenta[parameter])
        self.module.zero_grad()
        self._note_boundary()

    def train_batch(self, given):
        total = 0.0
        for micro, each in enumerate(given):
            loss = self.forward(each)
            self.backward(loss)
            self.step(micro == len(given) - 1)
            total += loss.item() / len(given)
        return total

    def save(self):
        self.module.zero_grad()

    def resume(self, step):
        """Goes back to what the last step left, as a checkpoint holds it."""
        for name, buffer in self.module.named_buffers():
            buffer.copy_(self._buffers[name])
        set_generators(self._generators)

    def state(self):
        values = (*self.module.named_parameters(), *self.module.named_buffers())
        return {name: value.detach().clone() for name, value in values}


class OnEngine(Side):
    def __init__(self, program, world, folder):
        super().__init__(program)
        self.world, self.folder, self.engine = world, folder, None
        self._start()
        # Stages draw for themselves, as programs' ranks do: seeds differ by rank.
        differ = program["stages"] > 1 and program["model"]["traits"].get("draws", {}).get("where") == "shared"
        seed_all(program["seed"] + (world.rank // program["tensor"] if differ else 0))

    def _start(self):
        program, spec, seed = self.program, self.program["model"], self.program["seed"]
        if program["cut"] == "layers":
            model = layers_of(spec, program["stages"], self.world)
            set_values(model, spec, seed, self._plain_name)
        else:
            model = make(spec, seed)
            show_example(model, batch(program, 0, 0, collated=False))
        parallel = {"tensor": program["tensor"]} if program["tensor"] > 1 else {}
        if program["cut"] == "layers":
            parallel = {"schedule": program["schedule"]}
        elif program["stages"] > 1:
            cut = {"stages": program["stages"], "cut": program["cut"]}
            parallel |= {"pipeline": cut, "schedule": program["schedule"]}
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": program["gas"],
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": program["zero"], "stage3_param_persistence_threshold": 0},
            "optimizer": {"type": "SGD", "params": {"lr": RATE, "momentum": program["momentum"]}},
            "parallel": parallel,
            "deeptide": {"comm_timeout": 20},
        }
        if program["policy"]:
            config["activation_checkpointing"] = {"policy": program["policy"]}
        self.engine = deeptide.initialize(model=model, config=config, world=self.world)[0]

    def _plain_name(self, name):
        return plain_name(name, self.program["model"]["blocks"]) if self.program["cut"] == "layers" else name

    @property
    def module(self):
        return self.engine.module

    def forward(self, given):
        return self.engine(**given)[0]

    def backward(self, loss):
        self.engine.backward(loss)

    def step(self, is_last):
        self.engine.step()

    def train_batch(self, given):
        given = [as_layers_take(each) for each in given] if self.program["cut"] == "layers" else given
        return self.engine.train_batch(iter(given)).item()

    def save(self):
        self.engine.save_checkpoint(self.folder, tag="interrupted")

    def resume(self, step):
        self.engine.destroy()
        self._start()
        self.engine.load_checkpoint(self.folder, tag="interrupted")

    def state(self):
        """Masters of this rank's parameters, whole, and the buffers of what it runs."""
        module = self.engine.module
        team, cuts, found = team_of(module), dict(slices_of(module)), {}
        for name, parameter in module.named_parameters():
            value = self.engine._core.full_state(name, "master") if parameter.requires_grad else parameter.detach()
            if value is None or isinstance(value, Elsewhere):
                continue
            is_cut = team is not None and name in cuts
            found[name] = (cuts[name].join(team.core.all_gather(value, "checkpoint")) if is_cut else value).clone()
        for name, buffer in module.named_buffers():
            owner = module.get_submodule(name.rpartition(".")[0])
            if any(not isinstance(p, Elsewhere) and p.numel() for p in owner.parameters()):
                found[name] = buffer.clone()
        return {self._plain_name(name): value for name, value in found.items()}


# -- idioms -----------------------------------------------------------------------------------------------------------


def _other_backward(side, step):
    other = batch(side.program, step + 100, 0)
    (side.module(**other)[0] * 5).backward()
    side.module.zero_grad()


def _lost_backward(side, step):
    side.backward(side.forward(batch(side.program, step + 200, 0)))
    side.module.zero_grad()


def _state_dict(side, step):
    side.seen.append(("state_dict", {name: value.clone() for name, value in side.module.state_dict().items()}))


def _logits(module, side, step):
    given = batch(side.program, step + 300, 0)
    del given["labels"]
    module.eval()
    with torch.no_grad():
        logits = module(**given)
    module.train()
    return logits.clone()


def _deepcopy(side, step):
    side.seen.append(("deepcopy", {"logits": _logits(copy.deepcopy(side.module), side, step)}))


def _evaluate(side, step):
    side.seen.append(("evaluate", {"logits": _logits(side.module, side, step)}))


def _clip(side):
    norm = torch.nn.utils.clip_grad_norm_(side.module.parameters(), 0.05)
    side.seen.append(("clip", float(norm)))


def _halve(side):
    with torch.no_grad():
        for parameter in side.module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


BEFORE = {
    "other_backward": _other_backward,
    "lost_backward": _lost_backward,
    "state_dict": _state_dict,
    "deepcopy": _deepcopy,
    "evaluate": _evaluate,
}
AFTER = {"clip": _clip, "halve": _halve}
