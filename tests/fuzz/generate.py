# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Random programs: mostly training, with everything else in between."""

import random

from actions import accelerators, subject
from actions.acts import ABSOLUTE, RELATIVE
from actions.programs import OWN
from reference import defined

WRITES = [*ABSOLUTE, *RELATIVE, "load_state_dict"]

# Observers of a run, which may change none of its numbers: sections that on_engine.py spells out.
OBSERVERS = ("breakdown", "collectives", "profile", "csv", "record", "timeline")


class Generator:
    """Draws one program from one seed."""

    def __init__(self, seed):
        self.seed, self.draw = seed, random.Random(seed)
        self.states = random.Random(f"states {seed}")  # of what changes no act: other draws stay as they are
        self.tags = []
        self.is_by_hand = False  # the program steps its schedule
        self.wires = random.Random(f"wires {seed}")  # of how gradients travel, likewise
        self.errors = random.Random(f"errors {seed}")  # of whether what rounding takes is added later, likewise
        self.stores = random.Random(f"stores {seed}")  # of where and when checkpoints are written, likewise
        self.less = random.Random(f"less {seed}")  # of what the model leaves out, likewise
        self.more = random.Random(f"more {seed}")  # of batches, and of layers and tokens that are left out, likewise
        self.sights = random.Random(f"sights {seed}")  # of what observes a run, likewise
        self.kept = random.Random(f"activations {seed}")  # of what blocks keep for backward, likewise
        self.devices = random.Random(f"devices {seed}")  # of what engines run on, likewise
        self.gathered = random.Random(f"gathered {seed}")  # of writes within GatheredParameters, likewise
        self.alike = self.draw.random() < 0.4  # whether ranks do the same, each with its own batches

    def program(self, on_accelerator=None):
        draw = self.draw
        optimizer = self._optimizer()
        self.is_own = optimizer["type"] in OWN
        self.has_data = draw.random() < 0.3
        model = self._model()
        self.has_blocks = model["blocks"] > 1
        self.has_batch_norm = model["norm"] == "batch"
        program = {
            "seed": self.seed % 1000,
            "model": model,
            "optimizer": optimizer,
            "schedule": self._schedule(optimizer),
            "data": {"samples": draw.choice([13, 16, 29]), "drop_last": draw.random() < 0.5} if self.has_data else None,
            "clipping": draw.choice([0.0, 0.1, 1.0]),
            "end": self.states.choice(["destroy"] * 6 + ["return"]),
            "hosts": self.stores.choice([1, 1, 2]),
            "phases": [],
        }
        names = dict(subject.Subject(program["model"]).named_parameters(remove_duplicate=False))
        self.names = sorted(names)
        self.modules = ["h.0", "norm", "head", "embed", f"h.{program['model']['blocks'] - 1}.up"]
        self._freeze_some(program["model"])
        low = draw.random() < 0.4
        for _ in range(draw.choice([1, 1, 2, 3])):
            program["phases"].append(self._phase(low != (draw.random() < 0.25)))
        drawn = self.devices.random() < accelerators.SHARE
        if drawn if on_accelerator is None else on_accelerator:
            self._move(program)
        return program

    def _move(self, program):
        """Puts engines on the simulated accelerator: no sparse tensors, batch norms, or random state that is kept.

        No gradients are quantised on devices yet.
        """
        choose = self.devices.choice
        acts = {act["act"] for phase in program["phases"] for act in phase["acts"]}
        together = self.alike and not acts & {"join", "diverge", "raise"}
        program["accelerator"] = accelerators.drawn(choose, together)
        program["model"]["extras"] = [extra for extra in program["model"]["extras"] if extra != "sparse"]
        program["model"] |= {"norm": "layer", "tokens": None}
        for phase in program["phases"]:
            # Own optimizers step states in one place there, and gradients leave the device for memory alone.
            placed = {kind: "100%" if kind == "gradients" else share for kind, share in phase["placement"].items()}
            phase.update(flip=False, quantized=None, placement={} if self.is_own else placed)
            phase["packed"] = phase["packed"] and not (phase["offload"] or phase["placement"])

    def _schedule(self, optimizer):
        draw = self.draw
        if draw.random() < 0.6:
            return None
        made = draw.choice(["function", "before", "by_hand"]) if optimizer["by"] == "instance" else "function"
        self.is_by_hand = made == "by_hand"
        if made == "function" and self.more.random() < 0.3:
            sizes = [self.more.choice([2, 4, 9]) for _ in range(3)]
            return {"kind": "batches", "made": made, "sizes": sizes, "method": self.more.choice(["linear", "sqrt"])}
        return {"kind": draw.choice(["step", "lambda", "onecycle"]), "made": made, "gamma": 0.9}

    def _model(self):
        draw = self.draw
        model = {
            "width": draw.choice([3, 4, 6]),
            "blocks": draw.randint(1, 3),
            "norm": draw.choice(["layer", "layer", "batch"]),
            "tie": draw.choice(["none", "head", "transposed"]),
            "extras": [e for e in ("scalar", "unused", "empty", "sparse") if draw.random() < 0.4],
            "frozen": [],
            "left_out": [],
            "groups": draw.choice([1, 2]),
            "seed_by_rank": draw.random() < 0.3,
            "pruning": self._pruning(),
        } | self._left_out_of_steps()
        if model["norm"] == "batch":
            model["tokens"] = None  # its channels would be tokens
        return model

    def _pruning(self):
        if self.less.random() > 0.2:
            return None
        return {"offset": self.less.choice([0, 1, 3]), "share": self.less.choice([0.3, 0.7])}

    def _left_out_of_steps(self):
        more = self.more
        depth = {"theta": more.choice([0.3, 0.6]), "gamma": more.choice([0.2, 1.0])}
        tokens = {"min": more.choice([1, 2]), "steps": more.choice([2, 5])}
        self.has_mixer = more.random() < 0.25
        return {
            "depth": depth if more.random() < 0.15 else None,
            "tokens": tokens if more.random() < 0.15 else None,
            "mixer": self.has_mixer,
        }

    def _freeze_some(self, spec):
        own = [n for n in self.names if not n.startswith("pair.") and n not in ("head.weight", "head.bias")]
        for key in ("frozen", "left_out"):
            if self.draw.random() < 0.3:
                spec[key] = self.draw.sample(own, 2)
        if spec["tie"] == "head":  # one parameter has one answer
            for key in ("frozen", "left_out"):
                spec[key] = [n for n in spec[key] if n != "embed.weight"]

    def _optimizer(self):
        draw = self.draw
        kind = draw.choice(["AdamW", "AdamW", "Adam", "SGD", "Adagrad", "RMSprop", *OWN[:2]])
        kind = draw.choice(OWN) if kind in OWN else kind
        by = "instance" if kind in ("Adam", *OWN) else draw.choice(["config", "instance"])
        if kind == "SGD":
            params = {"lr": 0.05, "momentum": draw.choice([0.0, 0.9]), "weight_decay": draw.choice([0.0, 0.1])}
        elif kind in ("Adagrad", "RMSprop", "Adadelta"):
            params = {"lr": 0.02, "eps": 1e-3, "weight_decay": draw.choice([0.0, 0.1])}
        else:
            # eps: a gradient's rounding moves a parameter by lr / eps times as much.
            params = {"lr": 0.02, "betas": [0.9, 0.95], "eps": 1e-3, "weight_decay": draw.choice([0.0, 0.1])}
        return {"type": kind, "by": by, "params": params, "restored": by == "instance" and draw.random() < 0.3}

    def _phase(self, low):
        draw = self.draw
        self.world = draw.choice([1, 2, 2, 2, 3])
        self.gas = draw.choice([1, 1, 1, 2, 3])
        config = {"zero": {}, "deeptide": {}}
        if draw.random() < 0.7:
            config["deeptide"]["unit_size"] = draw.choice([1, 20, 60])
        if draw.random() < 0.5:
            config["zero"]["stage3_max_live_parameters"] = 1
        if draw.random() < 0.3:
            config["zero"]["overlap_comm"] = False
        if draw.random() < 0.2:
            config["zero"]["stage3_prefetch_bucket_size"] = 0
        if draw.random() < 0.2:
            config["zero"]["stage3_param_persistence_threshold"] = 30
        # Acts that set gradients or values by hand would have to know the loss scale.
        self.fp16 = not low and self.states.random() < 0.25
        acts = []
        if self.tags and draw.random() < 0.9:
            acts.append({"act": "load", "tag": draw.choice(self.tags)})
        for _ in range(draw.randint(2, 9)):
            acts += self._some()
        if self.gas == 1 or draw.random() < 0.5:
            acts += [{"act": "save", "tag": self._tag()}]
        if draw.random() < 0.05:
            calls = draw.choices(["step", "state", "save", "zero_grad", "empty_cache"], k=self.world)
            acts.append({"act": "diverge", "calls": calls})
        return {
            "world": self.world,
            "bf16": low,
            "fp16": self.fp16,
            "gas": self.gas,
            "shift": draw.choice([0, 0, 0, 1, 2, 3]),
            "flip": draw.random() < 0.2,
            "config": config,
            "offload": draw.random() < 0.1 and not self.is_own,  # to files, which own optimizers are refused
            "acts": acts,
            **self._states(),
            "quantized": self.wires.choice(["int8", "int4"]) if self.wires.random() < 0.2 else None,
            "fed_back": self.errors.random() < 0.5,
            "folders": self.stores.choice([1, 2, 3]) if self.stores.random() < 0.3 else 0,
            "beside": self.stores.random() < 0.3,
            "activations": self._activations(),
            "observers": [name for name in OBSERVERS if self.sights.random() < 0.1],
        }

    def _activations(self):
        """None, "recompute", "files", or the budget of a choice; one block alone has no policy."""
        drawn = self.kept.choice(["recompute", "files", "64KiB", "1GiB"]) if self.kept.random() < 0.25 else None
        return drawn if self.has_blocks else None

    def _states(self):
        """In how many bits states lie, and where."""
        draw, shares = self.states, ["0%", "40%", "100%"]
        kinds = ("optimizer_states",) if self.is_own else ("optimizer_states", "gradients")  # own ones never in files
        placed = {kind: "100%" if self.is_own else draw.choice(shares) for kind in kinds if draw.random() < 0.5}
        return {
            "packed": draw.random() < 0.3 and not self.is_own,
            "moments": draw.random() < 0.2 and not self.is_own,
            "placement": placed if draw.random() < 0.2 else {},
        }

    # -- values by rank -----------------------------------------------------------------------------------------------

    def _seed(self):
        return self.draw.randrange(1000)

    def _seeds(self, all_ranks=0.8):
        seeds = [self._seed() for _ in range(self.world)]
        if not self.alike and self.draw.random() > all_ranks:
            seeds[self.draw.randrange(self.world)] = None
        return seeds

    def _route(self):
        blocks = [0, 1, 2]
        if self.alike or self.draw.random() < 0.6:
            return [blocks]
        return [self.draw.choices(blocks, k=self.draw.randint(0, 3)) for _ in range(self.world)]

    def _on(self):
        return True if self.alike or self.draw.random() < 0.6 else [self.draw.random() < 0.5 for _ in range(self.world)]

    def _name(self):
        return self.draw.choice(self.names)

    def _tag(self):
        self.tags.append(self.draw.choice(["a", "b"]))
        return self.tags[-1]

    # -- acts ---------------------------------------------------------------------------------------------------------

    def _forward(self, slot, **more):
        kind = self.draw.choice(["cross", "square"])
        if self.draw.random() < 0.15:
            more = {"recompute": self.draw.choice(["plain", "reentrant"]), **more}
        if self.more.random() < 0.2:
            kind = "masked"
        if self.more.random() < 0.15:
            rows = self.more.choice([2, 3, 7])
            # A batch norm makes anything of two rows that round to nearly equal values.
            more = {"rows": 7 if self.has_batch_norm else rows, **more}
        elif self.has_mixer and self.more.random() < 0.4:
            more = {"packed": self.more.choice(["32", "2143", "5", "33"]), **more}
        return {"act": "forward", "slot": slot, "seeds": self._seeds(), "route": self._route(), "kind": kind, **more}

    def _backward(self, slot, **more):
        return {"act": "backward", "slot": slot, "via": self.draw.choice(["engine", "loss"]), **more}

    def _train(self):
        acts = []
        for _ in range(self.gas if self.draw.random() < 0.8 else 1):
            acts += [self._forward("a"), self._backward("a"), self._step()]
        return acts + ([{"act": "schedule"}] if self.is_by_hand else [])

    def _step(self):
        return {"act": "step", "via": self.draw.choice(["engine", "engine", "optimizer", "given"])}

    def _draws(self):
        """Some batches of the loader, in one iteration or in several, around a load or not."""
        if not self.has_data:
            return self._train()
        acts = []
        for _ in range(self.draw.randint(1, 5)):
            anew = self.draw.random() < 0.15
            acts.append({**self._forward("a"), "act": "draw", "anew": anew, "repeats": self.draw.random() < 0.3})
            acts += [self._backward("a"), self._step()]
            if self.draw.random() < 0.2:
                acts += [{"act": "save", "tag": self._tag()}] if self.draw.random() < 0.5 else self._load()
        return acts

    def _object(self):
        """An act on the optimizer object besides stepping it."""
        via = self.draw.choice(["given", "optimizer"])
        other = self.draw.randrange(4)
        if other == 0:
            return [{"act": "optimizer_state", "via": via, "loads": self.draw.random() < 0.5}]
        if other == 1:
            return [{"act": "add_group", "via": via}]
        if other == 2:
            return [{"act": "model_zero_grad", "on": True}, {"act": "add_left_out", "via": via}, *self._train()]
        way, when = self.draw.choice(["mul", "add_view", "clamp", "foreach"]), self.draw.choice(["pre", "post", "post"])
        hook = {"act": "step_hook", "via": via, "when": when, "name": self._name(), "way": way, "seed": self._seed()}
        return [hook, *self._train()]

    def _some(self):
        """A few acts that belong together."""
        kinds = WITH_A_LOSS_SCALE if self.fp16 else list(MACROS)
        return self.draw.choices([MACROS[k] for k in kinds], [WEIGHTS.get(k, 1) for k in kinds])[0](self)

    def _losses(self):
        first, second = self._forward("a"), self._forward("b")
        acts = [first, second, self._backward("a"), self._backward("b"), self._step()]
        if self.draw.random() < 0.3:
            acts[2] = self._backward("a", retain=True)
            acts.insert(3, self._backward("a"))
        return acts

    def _stale(self):
        return [self._forward("s"), *self._train(), self._backward("s"), self._zero()]

    def _evaluate(self):
        mode = self.draw.choice(["no_grad", "inference", "eval"])
        return [{**self._forward("e", mode=mode), "seeds": self._seeds(0.5)}]

    def _freeze(self):
        names = self.draw.sample(self.names, min(len(self.names), self.draw.randint(1, 4)))
        act = {"act": "freeze", "names": names, "frozen": True, "on": self._on()}
        thaw = {**act, "frozen": False, "on": True}
        return self.draw.choice(
            [[act], [thaw], [act, *self._train(), thaw], [thaw, *self._train(), {**act, "on": True}]]
        )

    def _write(self):
        act = {"act": "write", "name": self._name(), "way": self.draw.choice(WRITES), "seed": self._seed()}
        if self.gathered.random() < 0.15:
            act |= {"way": "gathered", "modifier": self.gathered.randrange(self.world)}
        if self.draw.random() < 0.3:
            return [self._forward("a"), act, self._backward("a"), self._step()]
        return [act]

    def _grad(self):
        on, name = self._on(), self._name()
        how = self.draw.choice(["values", "none", "scaled"])
        act = {"act": "set_grad", "name": name, "how": how, "seed": self._seed(), "on": on}
        around = self.draw.randrange(4)
        if around == 0:
            return [act, *self._train()]
        if around in (1, 2):
            acts = [self._forward("a"), self._backward("a"), act, self._step()]
            if self.draw.random() < 0.3:
                acts.insert(2, {"act": "look_gradient", "name": name})
            return [*acts, self.draw.choice([self._zero(), {**act, "how": "none"}]), self._step()]
        return [self._forward("a"), {"act": "gradients_by_hand", "slot": "a", "on": on}, self._step()]

    def _zero(self):
        if self.draw.random() < 0.25:
            return {"act": "model_zero_grad", "on": self._on()}
        return {"act": "zero_grad", "via": self.draw.choice(["engine", "optimizer", "given"])}

    def _second_thoughts(self):
        return [self._forward("a"), self._backward("a"), self._zero(), *self._train()]

    def _poison(self):
        times = [self.draw.choice(["inf", "nan", "1"]) for _ in range(self.world)]
        return [self._forward("a"), self._backward("a", times=times), self._step()]

    def _swap(self):
        way = self.draw.choice(["double", "double", "away", "away", "share"])
        if way == "share" and self.draw.random() < 0.7:
            way = "double"
        act = {"act": "swap", "name": self._name(), "way": way, "seed": self._seed(), "on": self._on()}
        if way == "away":
            return [act, *self.draw.choice([self._train(), self._look(), []]), {**act, "way": "back", "on": True}]
        return [act]

    def _replace(self):
        if self.draw.random() < 0.6:
            return []
        return [{"act": "replace", "way": self.draw.choice(["new", "tie", "add"]), "seed": self._seed()}]

    def _raise(self):
        act = {
            "act": "raise",
            "where": self.draw.choice(["forward", "backward"]),
            "module": self.draw.choice(self.modules),
            "seeds": self._seeds(0.4),
            "route": self._route(),
            "via": self.draw.choice(["engine", "loss"]),
        }
        return [act, *self.draw.choice([[], [{"act": "zero_grad"}], self._train()])]

    def _look(self):
        way = self.draw.choice(["clone", "deepcopy", "state_dict"])
        return self.draw.choice(
            [
                [{"act": "clone", "way": way, "on": self._on()}],
                [{"act": "state"}],
                [{"act": "export"}],
                [{"act": "snapshot"}],
                [{"act": "look_all"}],
                [{"act": "read_raw", "name": self._name()}],
                [self._forward("a"), self._backward("a"), {"act": "look_gradient", "name": self._name()}, self._step()],
            ]
        )

    def _save(self):
        act = {"act": "save", "tag": self._tag()}
        if self.draw.random() < 0.2:
            return [self._forward("a"), self._backward("a"), act, self._step()]
        return [act, *self._train(), {"act": "load", "tag": act["tag"]}]

    def _load(self):
        return [{"act": "load", "tag": self.draw.choice(self.tags)}] if self.tags else []

    def _hyper(self):
        values = [self.draw.choice([0.005, 0.01, 0.03]) for _ in range(self.world)]
        value = values if self.draw.random() < 0.3 else values[0]
        act = {"act": "hyper", "group": self.draw.randrange(2), "key": self.draw.choice(["lr", "weight_decay"])}
        return [{**act, "value": value}]

    def _join(self):
        counts = [self.draw.randrange(4) for _ in range(self.world)]
        return [{"act": "join", "counts": counts, "seed": self._seed(), "route": [[0, 1]]}]

    def _no_sync(self):
        return [{"act": "no_sync", "micros": self.draw.randint(1, 2), "seed": self._seed(), "route": [[0, 1]]}]

    def _boundary(self):
        value = self.draw.choice([True, False])
        return [{"act": "boundary", "value": value}, *self._train(), {"act": "boundary", "value": None}]

    def _rebind(self):
        return [{"act": "rebind", "seed": self._seed()}]

    def _set_full(self):
        role = self.draw.choice(["fp32", "gradient", "state"])
        act = {"act": "set_full", "name": self._name(), "role": role, "seed": self._seed()}
        if self.draw.random() < 0.5:
            return [self._forward("a"), self._backward("a"), act, self._step()]
        return [self._forward("a"), act, self._backward("a"), self._step()]

    def _hook(self):
        return [{"act": "hook", "name": self._name(), "on": self._on()}]

    def _others(self):
        return [{"act": self.draw.choice(["empty_cache", "add_group"])}]

    def _rebuild(self):
        acts = [{"act": "rebuild", **({"refused": True} if self.draw.random() < 0.4 else {})}]
        return [*acts, *self._train()] if self.draw.random() < 0.7 else acts

    def _away(self):
        """Moves states out of memory for a while."""
        between = [acts for _ in range(self.draw.randint(0, 2)) for acts in self._meanwhile()]
        return [{"act": "offload_states"}, *between, {"act": "reload_states"}]

    def _meanwhile(self):
        acts = self.draw.choice([self._evaluate, self._look, self._load])()
        return [act for act in acts if act["act"] not in ("backward", "step")]

    def _surroundings(self):
        """An event around the process, which goes on."""
        if self.draw.random() < 0.5:
            fork = {"act": "fork", "way": self.draw.choice(["at_once", "handlers", "collect"]), "on": self._on()}
            return [fork, *self.draw.choice([[], self._train()])]
        within = self.draw.choice([self._train, self._save, self._look, self._losses])()
        squeeze = {"act": "squeeze", "mib": self.draw.choice([24, 48, 96])}
        return [{"act": "idle", "mib": 128}, squeeze, *within, {**squeeze, "mib": None}]

    def _bare(self):
        """Acts out of their usual order."""
        slot = self.draw.choice("ab")
        return [self.draw.choice([self._forward(slot), self._backward(slot), self._step(), self._zero()])]


MACROS = {
    name: getattr(Generator, f"_{name}")
    for name in (
        "train", "losses", "stale", "evaluate", "freeze", "write", "grad", "second_thoughts", "poison", "swap",
        "replace", "raise", "look", "save", "load", "hyper", "join", "no_sync", "boundary", "rebind", "hook",
        "set_full", "others", "bare", "rebuild", "away", "surroundings", "draws", "object",
    )
}  # fmt: skip
WEIGHTS = {
    "train": 6, "write": 5, "freeze": 2, "grad": 3, "losses": 2, "look": 4, "bare": 2, "raise": 2, "join": 2, "save": 2,
    "swap": 2, "draws": 4, "object": 2,
}  # fmt: skip


WITH_A_LOSS_SCALE = ["train", "losses", "evaluate", "second_thoughts", "poison", "look", "save", "load", "hyper"]
WITH_A_LOSS_SCALE += ["join", "surroundings", "draws", "object"]


def program_of(seed, on_accelerator=None):
    """The program of a seed, without what is not defined. on_accelerator: None draws."""
    return defined.without_undefined(Generator(seed).program(on_accelerator))
