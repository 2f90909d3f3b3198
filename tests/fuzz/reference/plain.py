# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Plain torch as the oracle: a replica of the model per rank, fp32 masters beside them, one of torch's optimizers.

It holds what docs/architecture.md states of an engine's life, act by act, in the simplest form that could be right.
"""

import torch
from actions import acts, schedules, subject
from actions.acts import Rank
from actions.loaders import Loader
from actions.programs import LOSS_SCALE, OWN, STATES, is_low, placement_of, quantized_in
from torch import nn

from reference import expected
from reference.expected import BY_HAND, MISFIT, MOVED, NEEDS_GRAD, NO_GRADIENT, OF_ANOTHER, TWO_VALUES, UNFROZEN
from reference.noise import EPSILON, OF_MASTERS, OF_MOMENTS, OF_QUANTIZED
from reference.partly import Shares, cast, make_plain

TRANSPOSE = "pair.decode.weight"  # the second name of pair.encode.weight, which is the first in the flat memory


class PlainRank(Rank):
    """Takes each gradient out of .grad as backward finishes it; a parameter's tensors share one sum."""

    def __init__(self, rank, model, gas, life):
        super().__init__(rank, model)
        self.gas, self.life = gas, life
        data = life.program.get("data")
        self.loader = Loader(data, rank, life.phase["world"]) if data else None
        self.sums = {}  # name -> fp32, since the last step
        self.sizes = {}  # name -> the sum of what was added, without signs
        self.counts = {}  # name -> how many gradients were added
        self.added = set()  # in this micro-batch
        self.rehung = set()  # names that an engine hooks again at the next step, and whose .grad it leaves until then
        self.hyper = []
        self.scale = 1.0  # the loss scale in gradients that arrive

    def follow(self, name, tensor, transposed):
        if tensor.requires_grad:
            tensor.register_post_accumulate_grad_hook(lambda p: self.take(name, p, transposed))

    def take(self, name, parameter, transposed):
        if parameter.grad is None:  # frozen since its forward
            return
        gradient, parameter.grad = parameter.grad.to_dense().float() / self.scale, None
        gradient = gradient.t() if transposed else gradient
        self.sums[name] = self.sums.get(name, 0) + gradient
        self.sizes[name] = self.sizes.get(name, 0) + gradient.abs()
        self.counts[name] = self.counts.get(name, 0) + 1
        self.added.add(name)

    def draw(self, act):
        return self.loader and self.loader.draw(act)

    def call(self, *arguments):
        if self.model.training:
            self.life.shares.begin_forward(self.life.global_steps)
        return self.model(*arguments)

    def give(self, name, total):
        """Sets the sum over what this rank was given."""
        self.sums[name], self.sizes[name], self.counts[name] = total, total.abs(), 1

    def forget(self, name):
        for held in (self.sums, self.sizes, self.counts):
            held.pop(name, None)

    def drop(self):
        self.sums, self.sizes, self.counts = {}, {}, {}

    def backward(self, loss, act):
        if act["via"] == "engine" and not loss.requires_grad:
            raise DocumentedError(NEEDS_GRAD)
        whole = act["via"] == "engine" and act.get("sum")
        self.scale = self.life.loss_scale if act["via"] == "engine" else 1.0  # only the engine's own backward scales
        (loss * (self.scale * (self.gas if whole else 1))).backward(retain_graph=bool(act.get("retain")))


class DocumentedError(Exception):
    """An error that the documentation promises where plain torch goes on, or fails otherwise."""

    def __init__(self, raises):
        super().__init__(raises)
        self.raises = raises


class Trained:
    """One distinct parameter that the optimizer has: its fp32 value, and its tensors per rank."""

    def __init__(self, name, group, ranks):
        self.name, self.group = name, group
        first = ranks[0].bound[name]
        self.master = nn.Parameter(first.detach().float().clone())
        self.names = {name: False}  # every name, and whether it is the transpose
        if name == "pair.encode.weight":
            self.names[TRANSPOSE] = True
        self.names.update({other: False for other, p in ranks[0].bound.items() if p is first})
        distinct = {id(ranks[0].bound[n]): (n, t) for n, t in self.names.items()}.values()
        self.tensors = [[(rank.bound[n], t) for n, t in distinct] for rank in ranks]
        self.written = False
        self.version = self.version_now()
        for rank, tensors in zip(ranks, self.tensors, strict=True):
            for tensor, transposed in tensors:
                rank.follow(name, tensor, transposed)

    @property
    def low(self):
        return self.tensors[0][0][0].dtype != torch.float32

    def version_now(self):
        return sum(tensor._version for tensor, _ in self.tensors[0])

    def note(self, counted_only):
        version = self.version_now()
        self.written = self.written or version != self.version or not counted_only
        self.version = version

    def refresh(self):
        """The master follows what was written: where the parameter still is what it rounds to, it keeps its rest."""
        value = self.tensors[0][0][0].detach()
        if not self.low:
            self.master.data.copy_(value)
        elif self.written:
            stays = self.master.detach().to(value.dtype) == value
            self.master.data.copy_(torch.where(stays, self.master.detach(), value.float()))
        self.written = False

    def publish(self):
        with torch.no_grad():
            for tensors in self.tensors:
                for tensor, transposed in tensors:
                    tensor.copy_(self.master.t() if transposed else self.master)
        self.version = self.version_now()
        self.written = False


class Life:
    """All ranks' engines together, from initialize to destroy. noise: Noise, or None.

    With noise, gradients and masters are moved by what rounding may move them: two lives tell how far an engine may be.
    """

    def __init__(self, program, phase, setting, noise=None):
        self.program, self.phase, self.noise = program, phase, noise
        world, self.setting = phase["world"], setting
        self.gated = setting.stage == 3 and (phase["offload"] or (world > 1 and not setting.shared))
        self.whole = world == 1 or (setting.stage < 3 and not setting.shared)
        spec, seed = program["model"], program["seed"]
        models = [subject.make(spec, seed) for _ in range(world)]
        names = subject.optimized_names(models[0], spec)
        self.shares = Shares(spec)
        # Then values are rounded to 16 bits after sums of another order, in the middle of a pass.
        masked = any(act.get("kind") == "masked" for act in phase["acts"])
        self.has_own_operators = masked or bool(spec.get("mixer"))
        for model in models:
            make_plain(model, self.shares)
            if model.mixer is not None and noise is not None:
                model.mixer.register_forward_hook(self._round_mixed)
            if masked and noise is not None:
                model.norm.register_forward_hook(self._round_mixed)
        self.dtype = {(True, False): torch.bfloat16, (False, True): torch.float16}.get(
            (phase["bf16"], phase.get("fp16", False)), torch.float32
        )
        self.loss_scale = 2.0 ** LOSS_SCALE["initial_scale_power"] if phase.get("fp16") else 1.0
        if is_low(phase):
            for model in models:
                cast(model, self.dtype)
        self.prunings = [schedule for model in models if (schedule := subject.schedule_of(spec, model))]
        self.ranks = [PlainRank(rank, model, phase["gas"], self) for rank, model in enumerate(models)]
        self.trained = [
            Trained(name, g, self.ranks) for g, group in enumerate(names) for name in group if name != TRANSPOSE
        ]
        self.by_name = {name: trained for trained in self.trained for name in trained.names}
        self.optimizer = self._optimizer(len(names))
        for rank in self.ranks:
            rank.hyper = [{k: g[k] for k in ("lr", "weight_decay")} for g in self.optimizer.param_groups]
        self.rates = schedules.Rates(schedules.spec_of(program), self.ranks[0].hyper)
        for rank in self.ranks:
            rank.hyper = [dict(group) for group in self.ranks[0].hyper]
        self.hooks = []  # of steps: acts, in the order of their registration
        trainable = set(self.by_name)
        self.frozen = [n for n, p in self.ranks[0].bound.items() if not p.requires_grad and n not in trainable]
        self.global_steps = self.skipped_steps = self.micro_steps = 0
        self.is_squeezed = False  # its process may map little more
        self.largest_sent = {}  # by step, of gradients that are quantised
        self.override = None
        self.dead = False
        self.away = False  # states are out of memory
        self.in_files = {kind for kind, share in placement_of(phase, setting).items() if share != "100%"}
        if phase["offload"]:
            self.in_files |= {"optimizer_states", "parameters"} if setting.stage == 3 else {"optimizer_states"}
        self.required_grad = {name: p.requires_grad for name, p in self.ranks[0].bound.items()}

    def _optimizer(self, num_groups):
        given = self.program["optimizer"]
        groups = [{"params": [t.master for t in self.trained if t.group == g]} for g in range(num_groups)]
        for group in groups[1:]:
            group["weight_decay"] = 0.0
        return getattr(torch.optim, given["type"])(groups, **given["params"])

    def has_frozen_or_thawed(self):
        return any(rank.bound[n].requires_grad != then for rank in self.ranks for n, then in self.required_grad.items())

    # -- boundaries ---------------------------------------------------------------------------------------------------

    def _moved(self, rank):
        away = [rank.bound.get(name) is rank.parameter(name) for name in rank.put_aside]
        return MOVED if any(away) or any(p.is_shared() for p in rank.bound.values()) else None

    def enter(self, prepare=lambda rank: None):
        """Raises what ranks are to raise, else notes what programs wrote."""
        failures = [self._moved(rank) or prepare(rank) for rank in self.ranks]
        if any(failures):
            raise FailuresError([failure or OF_ANOTHER for failure in failures])
        for trained in self.trained:
            trained.note(counted_only=self.whole)

    def _check_step(self, rank):
        if any(rank.bound[name].requires_grad for name in self.frozen):
            return UNFROZEN
        for name, trained in self.by_name.items():
            if rank.bound[name].grad is not None and trained.name in rank.added:
                return BY_HAND
        return None

    def _take_by_hand(self, rank):
        index = rank.rank
        for trained in self.trained:
            for tensor, transposed in trained.tensors[index]:
                if tensor.grad is not None:
                    rank.take(trained.name, tensor, transposed)

    def drop_gradients(self):
        for rank in self.ranks:
            for name in self.by_name:
                rank.bound[name].grad = None
            rank.drop()
            rank.added.clear()

    def refresh(self):
        for trained in self.trained:
            trained.refresh()

    # -- steps --------------------------------------------------------------------------------------------------------

    def is_boundary(self):
        return self.override if self.override is not None else (self.micro_steps + 1) % self.phase["gas"] == 0

    def step(self, joined=()):
        """Returns the outcome as every rank sees it; `joined` are the ranks that only take part."""
        at_boundary = self.is_boundary()
        self.shares.is_uncertain = True
        if at_boundary:
            self.shares.end_step(self.global_steps)
        self._run_hooks("pre", at_boundary)
        alone = self.override is False and self.setting.stage < 2 and len(self.ranks) > 1
        if alone and any(self._moved(rank) or self._check_step(rank) for rank in self.ranks):
            raise expected.UndefinedError("how ranks go on when one of them alone fails in a step that is no boundary")
        self.enter(self._check_step)
        for rank in self.ranks:
            self._take_by_hand(rank)
        if not alone and not any(rank.sums for rank in self.ranks):
            raise FailuresError([NO_GRADIENT] * len(self.ranks))
        outcome = {"result": "accumulating"}
        if at_boundary:
            leader = next(rank for rank in self.ranks if rank.rank not in joined)
            for rank in self.ranks:
                rank.hyper = [dict(group) for group in leader.hyper]
            outcome = self._apply()
            self._run_hooks("post", outcome["result"] == "applied")
        for rank in self.ranks:
            rank.has_forward &= not at_boundary
            rank.added, rank.rehung = set(), set()
        self.shares.is_uncertain = False
        self.micro_steps += 1
        return outcome

    def _total(self, trained):
        """The mean over ranks and micro-batches; None where no rank was reached."""
        sums = [rank.sums[trained.name] for rank in self.ranks if trained.name in rank.sums]
        if not sums:
            return None
        count = len(self.ranks) * self.phase["gas"]
        total = sum(sums) / count
        if self.noise is not None and total.numel():
            often = any(rank.counts.get(trained.name, 0) > 1 for rank in self.ranks)
            # In bf16 the gradients of parameters that stay fp32 travel in bf16, too.
            rounded = often or self.has_own_operators if trained.low else is_low(self.phase)
            epsilon = EPSILON[self.dtype if rounded else torch.float32]
            size = sum(rank.sizes.get(trained.name, 0) for rank in self.ranks) / count
            total = total + (epsilon * size + self._quantized()) * self.noise.like(total)
        return total

    def _round_mixed(self, _module, _inputs, mixed):
        """The oracle's attention and loss sum in another order than the engine's, beside layers that enlarge it."""
        return mixed * (1 + EPSILON[torch.float32] * self.noise.like(mixed)).to(mixed.dtype)

    def _quantized(self):
        """How far the mean of what ranks quantised may be off; 0 where gradients travel whole."""
        width = quantized_in(self.phase, self.setting)
        if width is None:
            return 0.0
        sizes = [size for rank in self.ranks for size in rank.sizes.values() if size.numel()]
        largest = max((size.abs().nan_to_num(0.0, 0.0).max().item() for size in sizes), default=0.0)
        if self.phase.get("fed_back"):  # an earlier contribution's error, and this one's
            self.largest_sent[self.global_steps] = max(largest, self.largest_sent.get(self.global_steps, 0.0))
            largest += max((sent for step, sent in self.largest_sent.items() if step != self.global_steps), default=0.0)
        return OF_QUANTIZED[width] * largest / self.phase["gas"]

    def totals(self):
        return {trained.name: self._total(trained) for trained in self.trained}

    def _apply(self):
        totals = self.totals()
        norm = sum(t.double().square().sum().item() for t in totals.values() if t is not None) ** 0.5
        self.global_steps += 1
        for rank in self.ranks:
            rank.drop()
        if not norm < float("inf"):
            self.skipped_steps += 1
            if self.phase.get("fp16"):
                self.loss_scale = max(self.loss_scale / 2, 1.0)
            return {"result": "non_finite"}
        clip = self.program["clipping"]
        scale = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
        self.refresh()
        for group, values in zip(self.optimizer.param_groups, self.ranks[0].hyper, strict=True):
            group.update(values)
        for trained in self.trained:
            total = totals[trained.name]
            trained.master.grad = None if total is None else total * scale
        self.optimizer.step()
        for trained in self.trained:
            if trained.master.grad is None:
                continue
            if self.noise is not None:
                moved = OF_MASTERS[self.dtype if trained.low else torch.float32]
                trained.master.data.mul_(1 + moved * self.noise.like(trained.master))
            self._round_moments(trained)
            trained.master.grad = None
            trained.publish()
        for pruning in self.prunings:
            pruning.step()
        if self.rates.spec is not None and not self.rates.is_by_hand:
            self.rates.advance([rank.hyper for rank in self.ranks])
        return {"result": "applied", "norm": norm}

    def _run_hooks(self, when, wanted):
        for act in self.hooks if wanted else ():
            for rank in self.ranks if act["when"] == when else ():
                acts.write(rank, act)

    def _round_moments(self, trained):
        """With noise, as far as rounding to bf16 may move them."""
        if self.noise is None:
            return
        for key, value in self.optimizer.state[trained.master].items():
            if self.phase.get("moments") and key != "step" and value is not None:
                value.mul_(1 + OF_MOMENTS * self.noise.like(value))

    # -- what is set from outside -----------------------------------------------------------------------------------

    def set_master(self, trained, value):
        self.refresh()
        trained.master.data.copy_(value)
        trained.publish()

    def set_gradient(self, trained, value):
        for rank in self.ranks:
            rank.forget(trained.name)
        self.ranks[0].give(trained.name, value * len(self.ranks) * self.phase["gas"])

    def keeps_own_states(self):
        return self.program["optimizer"]["type"] in OWN

    def has_state(self, trained):
        return bool(self.optimizer.state.get(trained.master))

    def add_group(self, names, lr):
        """The tensors of these names, trained from now on."""
        number = len(self.optimizer.param_groups)
        added = [Trained(name, number, self.ranks) for name in names]
        self.trained += added
        self.by_name.update({name: trained for trained in added for name in trained.names})
        masters = [trained.master for trained in added]
        given = self.program["optimizer"]
        # torch fills a new group from what the optimizer was made with, not from what it loaded since.
        made_with = getattr(torch.optim, given["type"])(masters).defaults if given.get("restored") else {}
        self.optimizer.add_param_group({**made_with, "params": masters, "lr": lr})
        group = self.optimizer.param_groups[-1]
        for rank in self.ranks:
            rank.hyper.append({key: group[key] for key in ("lr", "weight_decay")})

    def set_state(self, trained, role, value):
        state = self.optimizer.state[trained.master]
        for missing in STATES[self.program["optimizer"]["type"]] if not state else ():
            state["step"] = torch.tensor(0.0)
            state[missing] = torch.zeros_like(trained.master).detach()
        state[role].copy_(value)
        self._round_moments(trained)

    # -- state --------------------------------------------------------------------------------------------------------

    def late(self, rank):
        """Tensors of a rank's model since initialize: ({name: tensor} that is no bound one, {name: bound name})."""
        names = {id(p): name for name, p in reversed(rank.bound.items())}
        loose, tied = {}, {}
        for name, now in rank.model.named_parameters(remove_duplicate=False):
            if now is rank.bound.get(name):
                continue
            if id(now) in names:
                tied[name] = names[id(now)]
            else:
                loose[name] = now
        return loose, tied

    def _firsts(self, rank):
        """The bound parameters by their first names."""
        return {name: p for name, p in rank.bound.items() if next(n for n, q in rank.bound.items() if q is p) == name}

    def save(self):
        self.refresh()
        first = self.ranks[0]
        loose, tied = self.late(first)
        instead = {**loose, **{name: first.bound[target] for name, target in tied.items()}}
        weights = {t.name: t.master.detach().clone() for t in self.trained}
        weights.update({n: p.detach().clone() for n, p in self._firsts(first).items() if n not in self.by_name})
        weights.update({n: p.detach().clone().to(weights[n].dtype) for n, p in instead.items() if n in weights})
        buffers = [
            {**dict(rank.model.named_buffers()), **{n: p for n, p in self.late(rank)[0].items() if n not in weights}}
            for rank in self.ranks
        ]
        return {
            "weights": weights,
            "states": {t.name: _copied(self.optimizer.state.get(t.master, {})) for t in self.trained},
            "buffers": [{n: b.detach().clone() for n, b in own.items()} for own in buffers],
            "hyper": [dict(group) for group in self.ranks[0].hyper],
            "counters": (self.global_steps, self.skipped_steps, self.micro_steps),
            "loss_scale": self.loss_scale if self.phase.get("fp16") else None,
            "rates": self.rates.steps,
            "pruning": [pruning.state_dict() for pruning in self.prunings[:1]],
            "shares": (self.shares.theta, self.shares.kept),
            "data": first.loader and first.loader.position(),
        }

    def _check_load(self, saved):
        first = self.ranks[0]
        loose, tied = self.late(first)
        wanted = {**dict(first.model.named_buffers()), **loose}
        buffers, weights = saved["buffers"][0], saved["weights"]
        if buffers.keys() - wanted.keys() - tied.keys() or wanted.keys() - buffers.keys() - weights.keys():
            raise FailuresError([MISFIT] * len(self.ranks))
        for name, target in tied.items():
            value, dtype = weights.get(name, buffers.get(name)), first.bound[target].dtype
            if value is not None and not torch.equal(value.to(dtype), weights[target].to(dtype)):
                raise FailuresError([TWO_VALUES] * len(self.ranks))

    def load(self, saved):
        self._check_load(saved)
        self.drop_gradients()
        weights = saved["weights"]
        for trained in self.trained:
            trained.master.data.copy_(weights[trained.name])
            self.optimizer.state[trained.master] = _copied(saved["states"][trained.name])
            self._round_moments(trained)  # fp32 ones may have been saved
            trained.publish()
        for rank in self.ranks:
            buffers = saved["buffers"][rank.rank if rank.rank < len(saved["buffers"]) else 0]
            with torch.no_grad():
                for name, p in self._firsts(rank).items():
                    if name not in self.by_name:
                        p.copy_(weights[name])
                for name, value in (*rank.model.named_buffers(), *self.late(rank)[0].items()):
                    value.copy_(buffers[name] if name in buffers else weights[name])
            rank.hyper, rank.has_forward = [dict(group) for group in saved["hyper"]], False
            if rank.loader:
                rank.loader.go_to(*saved["data"])
        for pruning in self.prunings:
            pruning.load_state_dict(saved["pruning"][0])
        if not self.rates.is_by_hand:
            self.rates.steps = saved["rates"]
        self.shares.theta, self.shares.kept = saved["shares"]
        self.shares.is_uncertain = False
        self.global_steps, self.skipped_steps, micro_steps = saved["counters"]
        self.micro_steps = micro_steps - micro_steps % self.phase["gas"]
        if self.phase.get("fp16") and saved["loss_scale"]:
            self.loss_scale = saved["loss_scale"]


class FailuresError(Exception):
    """The error that each rank is to raise; nothing has changed."""

    def __init__(self, by_rank):
        super().__init__(by_rank)
        self.by_rank = by_rank


def _copied(state):
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}
