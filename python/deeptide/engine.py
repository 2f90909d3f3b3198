# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The engine a Python user holds: DeepSpeed's names over the C++ core."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from deeptide import _C, schedule, utils
from deeptide._C import Config, ConfigError, StepOutcome
from deeptide._engine import checkpoint as _checkpoint
from deeptide._engine import cut_models, idioms
from deeptide._engine.answers import Answers
from deeptide._engine.batches import WholeSteps
from deeptide._engine.less_work import LessWork, Schedules
from deeptide._engine.observed import Observed
from deeptide._engine.offload_states import Offloading
from deeptide._model import changes
from deeptide._model.compiled import compile_model
from deeptide._model.extra_state import read_extra_states
from deeptide._model.mixed_types import explain_mixed_types
from deeptide._process.ends import end_with_interpreter
from deeptide._process.interrupts import BEFORE_UPDATES, held_signals, wait_for_signal
from deeptide._process.log import say
from deeptide._process.preemption import leave_evaluation_if_preempted, leave_if_preempted
from deeptide._process.reports import told
from deeptide._process.world import abort_groups
from deeptide.zero import number_parameters

if TYPE_CHECKING:
    from deeptide.activations import Choice
    from deeptide.activations.policy import Activations
    from deeptide.data import DataLoader
    from deeptide.efficiency.loader import CurriculumLoader
    from deeptide.optimizer import DeeptideOptimizer

_Outcome = TypeVar("_Outcome", bound=StepOutcome | None)


def _as_fp16(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.half() if tensor.is_floating_point() else tensor


class Engine(Answers, WholeSteps, LessWork, Observed, Offloading):
    """Shards, trains and saves one model. Made by `deeptide.initialize`; unknown attributes are the model's."""

    client_state_on_preempt: Callable[[], dict[str, Any]] | None = None
    """Returns the client_state of the checkpoint that "on_preempt" saves."""
    _has_told = False  # the other ranks of an error, since which no method was called
    _has_lost_peers = False  # a method has ended in a CommError
    _activations: Activations | None = None  # None: what blocks keep for backward stays as it is

    def __init__(
        self,
        core: _C.Engine,
        model: torch.nn.Module,
        config: Config,
        optimizer: DeeptideOptimizer | None = None,
        lr_scheduler: Any = None,
        training_dataloader: DataLoader | CurriculumLoader | None = None,
        process_groups: Sequence[dist.ProcessGroup] = (),
    ) -> None:
        self.module = model
        self._config = config
        self.world = core.world()
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.training_dataloader = training_dataloader
        self._core = core
        if "deeptide.tensor" in sys.modules:  # else no layer is shared
            from deeptide.tensor.team import team_of

            self.tensor_team = team_of(model)
        self._process_groups = process_groups  # our own, to be destroyed with the engine
        self._outcome: StepOutcome | None = None
        self._norm: float | None = None
        self._boundary: bool | None = None  # what set_gradient_accumulation_boundary was told
        self._in_no_sync = False
        self._own_batches: Iterator[Any] | None = None  # of the training data, for train_batch()
        self._last_boundary = _checkpoint.LastBoundary()
        self._said: set[str] = set()
        self.is_compiled = False  # compile() was called
        self.is_destroyed = False
        self._may_be_preempted = bool(config.checkpoint.preempt_folder)
        self._less_work = Schedules(config, core.batch_sizes().train, model) or None
        if self._less_work is not None and self._less_work.compression is not None:
            self._less_work.compression.share_masks(core.broadcast)
        self._registrations = changes.count()  # when the core last looked at the model
        owned: Any
        for owned in (optimizer, lr_scheduler):
            if hasattr(owned, "attach"):
                owned.attach(self)
        self._know_parameters()
        self._last_boundary.note(self)
        if cut_models.is_cut(self):
            cut_models.guard_state_dicts(model)
        idioms.follow(self)
        self._begin_to_observe()
        end_with_interpreter(self)
        explain_mixed_types(self.module)

    def _know_parameters(self) -> None:
        """Makes functions that take a parameter know the model's as they are now."""
        utils.register(self)
        number_parameters(self.module.parameters())

    def __getattr__(self, name: str) -> Any:
        module = self.__dict__.get("module")
        if module is None or name.startswith("__"):
            raise AttributeError(f"'Engine' has no attribute '{name}'")
        try:
            return getattr(module, name)
        except AttributeError:
            raise AttributeError(
                f"neither the engine nor its model ({type(module).__name__}) has an attribute '{name}'"
            ) from None

    # -- training -----------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output, as from `forward`."""
        return self.forward(*args, **kwargs)

    @told
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output, under "torch_autocast" if that is on.

        With "fp16": {"auto_cast": true}, its floating inputs are cast to fp16.
        """
        if self._may_be_preempted and not self.module.training:
            leave_evaluation_if_preempted(self)
        if self.fp16_auto_cast():
            args, kwargs = tree_map_only(torch.Tensor, _as_fp16, (args, kwargs))
        if self._less_work is not None and self.module.training:
            args, kwargs = self._less_work.before_forward(self.global_steps, args, kwargs)
        lower = self.torch_autocast_dtype()
        keeps = contextlib.nullcontext() if self._activations is None else self._activations.forward()
        gathers = self.zero_optimization_stage() == 3  # an interrupted gather would lack this rank's part
        held = held_signals(BEFORE_UPDATES) if gathers else contextlib.nullcontext()
        with held, self._observed_forward(args, kwargs), keeps:
            if lower is None:
                return self._compute(args, kwargs)
            with torch.autocast(self.device.type, lower):
                return self._compute(args, kwargs)

    def _compute(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.module(*args, **kwargs)

    @told
    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Runs autograd from a scalar loss; calls add up until step(). Returns the loss over the accumulation steps.

        With scale_wrt_gas=False the gradients are summed over the accumulation steps, not averaged.
        """
        if not isinstance(loss, torch.Tensor):
            raise TypeError(f"loss: got {type(loss).__name__}, expected a scalar tensor")
        accumulation = self.gradient_accumulation_steps()
        if self.tensor_team is not None and self.global_steps < 2:
            self.tensor_team.check_alike(loss)
        if self._less_work is not None:
            at_boundary = self._core.is_gradient_accumulation_boundary()
            self._less_work.before_backward(loss, at_boundary, self._core.mean)
        if scale_wrt_gas:
            with held_signals(BEFORE_UPDATES), self._observed_backward():
                self._core.backward(loss, retain_graph)
            return loss.detach() / accumulation
        with held_signals(BEFORE_UPDATES), self._observed_backward():
            self._core.backward(loss * accumulation, retain_graph)  # which divides by them
        return loss.detach()

    @told
    def step(self, lr_kwargs: dict[str, Any] | None = None) -> StepOutcome:
        """Ends the micro-batch; at an accumulation boundary reduces, clips and steps. Collective.

        Returns a StepOutcome, true when the step was applied.
        """
        outcome = self._step(self._core.step, lr_kwargs)
        leave_if_preempted(self, outcome)
        return outcome

    def _step(self, take: Callable[[], _Outcome], lr_kwargs: dict[str, Any] | None) -> _Outcome:
        """Ends a micro-batch by `take()` and returns its outcome; None when all ranks have joined."""
        with held_signals(BEFORE_UPDATES):
            return self._step_whole(take, lr_kwargs)

    def _step_whole(self, take: Callable[[], _Outcome], lr_kwargs: dict[str, Any] | None) -> _Outcome:
        schedule.check_arguments(self.lr_scheduler, lr_kwargs)
        changes.tell(self)
        at_boundary = self._core.is_gradient_accumulation_boundary()
        if at_boundary and self._less_work is not None:
            self._less_work.before_step(self.global_steps)
        run_hooks = getattr(self.optimizer, "run_hooks", None) if at_boundary else None
        if run_hooks is not None:
            run_hooks("pre")
        with self._synced():
            try:
                outcome = take()
            except _C.DriftError:  # of a step that was applied
                self._advance_schedules(lr_kwargs)
                raise
            except _C.SaveMeetsStepError:
                wait_for_signal()  # which raises in this one's place
                raise
        if self._activations is not None:
            self._activations.after_step(outcome)
        if outcome is None:
            return outcome
        self._outcome = outcome
        if at_boundary:
            self._norm = outcome.grad_norm
            if self._less_work is not None:
                self._less_work.follow(outcome)
            self._observe_step()
        if run_hooks is not None and outcome.applied:
            run_hooks("post")
        if outcome.applied:
            self._advance_schedules(lr_kwargs)
        if at_boundary and outcome.result != _C.StepResult.accumulating:
            self._last_boundary.note(self)
        return outcome

    def _advance_schedules(self, lr_kwargs: dict[str, Any] | None) -> None:
        """After a step that was applied."""
        if self._less_work is not None:
            self._less_work.after_step()
        if wants := schedule.advance(self.lr_scheduler, lr_kwargs):
            self._say_once(wants, "warning")

    @told
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients accumulated so far. Collective. Afterwards each parameter's .grad is None."""
        if not set_to_none:
            raise ConfigError(
                "zero_grad(set_to_none=False): the engine holds gradients in buckets and leaves .grad None; "
                "leave the argument out"
            )
        self._core.zero_grad()

    @told
    def join(self) -> None:
        """Takes part in the others' steps until every rank has joined: batches may differ in number. Collective."""
        while (outcome := self._step(self._core.join_step, None)) is not None:
            leave_if_preempted(self, outcome)

    @told
    def rebuild(self) -> None:
        """Takes the model as it is now: parameters added, replaced, taken out, frozen or unfrozen. Collective.

        Between steps, on all ranks alike, before the next forward. What was trained before goes on bit for bit, with
        its moments; what is new begins as at initialize; what is frozen keeps no states. New parameters join the
        optimizer's group where initialize made it, else optimizer.add_param_group, which rebuilds, must have them.
        """
        from deeptide._engine.rebuild import rebuild

        with self._synced():
            rebuild(self)
        self._core.set_gradient_accumulation_boundary(False if self._in_no_sync else self._boundary)
        self._know_parameters()

    compile = compile_model

    def activation_checkpointing(self) -> Choice | None:
        """Which blocks "activation_checkpointing" has recomputed, and the bytes that follow; None without a policy."""
        return None if self._activations is None else self._activations.current()

    def _live_micro_batches(self) -> int:
        """Those whose activations are alive at once, at most."""
        return 1

    def _modules_to_compile(self) -> Iterable[torch.nn.Module]:
        return (self.module,)

    @told
    def snapshot(self) -> torch.nn.Module:
        """A deep copy of the model as it is now, whole, in memory of its own: in eval mode, without gradients.

        For a thread or a forked child that evaluates or saves it while training goes on. A fork alone keeps no such
        copy: ranks of one host share the parameters, so a child sees later steps. Collective at stage 3.
        """
        from deeptide._engine.snapshot import copy_of

        return copy_of(self.module)

    def train(self, mode: bool = True) -> Engine:
        """Sets the model's training mode; returns the engine."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """Ends the model's training mode; returns the engine."""
        return self.train(False)

    def _say_once(self, text: str, level: str = "info") -> None:
        """Writes a line on rank 0, each text once in the engine's life."""
        if self.world.rank == 0 and text not in self._said:
            say(text, level)
        self._said.add(text)

    # -- accumulation -------------------------------------------------------------------------------------------

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """True or False overrides the counter until None gives it back."""
        self._boundary = None if is_boundary is None else bool(is_boundary)
        self._core.set_gradient_accumulation_boundary(self._boundary)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, nothing is reduced over the ranks: every step() only ends a micro-batch. Stages 0 and 1."""
        if self.zero_optimization_stage() >= 2:
            raise ConfigError(
                f"no_sync needs ZeRO stage 0 or 1: stage {self.zero_optimization_stage()} shards the gradients "
                "and must reduce each of them"
            )
        if self._in_no_sync:
            raise RuntimeError("no_sync was entered inside no_sync")
        self._in_no_sync = True
        self._core.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            self._in_no_sync = False
            if not self._core.closed:
                self._core.set_gradient_accumulation_boundary(self._boundary)

    # -- state --------------------------------------------------------------------------------------------------

    @told
    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: object = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        blocking: bool | None = None,
        contents: str | None = None,
    ) -> str:
        """Saves all that an exact resume needs into save_dir/tag; returns that folder. Collective.

        At any moment, also where an exception or an interrupt is handled: within an accumulation it saves the state
        that the last step left, data position included; gradients since then stay for the next step.

        With exclude_frozen_parameters, parameters that are not trained, such as the base of an adapter, are left out:
        a load leaves them as they are. With blocking=False it returns at once: a thread writes the state of now while
        training goes on, the folder appears once all ranks have written, and the outcome of a later step() tells
        (`saved`, or `save_error`). By default as "checkpoint": {"async": …} says. contents: "all", "trainable" (without
        frozen parameters) or "weights" (without optimizer states); by default as "checkpoint": {"contents": …} says.
        """
        if not save_dir:
            raise ConfigError(f"save_checkpoint: save_dir is {save_dir!r}, expected a directory")
        kinds = _C.SaveContents.__members__
        if contents is not None and contents not in kinds:
            raise ConfigError(f"save_checkpoint: contents is {contents!r}, expected one of {', '.join(kinds)}")
        in_handler = _checkpoint.handles_exception()
        folder, name = os.fspath(save_dir), "" if tag is None else str(tag)
        kind = None if contents is None else kinds[contents]
        with held_signals(), self._synced():
            within = in_handler or self._core.is_within_accumulation()
            text = _checkpoint.pack_client_state(client_state, self, within)
            try:
                return self._core.save_checkpoint(
                    folder, name, text, save_latest, exclude_frozen_parameters, blocking, kind, in_handler
                )
            except _C.CommError as error:
                raise _C.CommError(f"{error} {_checkpoint.NOT_SAVED}") from error

    @told
    def wait_for_save(self) -> str | None:
        """Waits for a save beside training. Collective. Returns its folder, unless a step's outcome has told already.

        Errors: CheckpointError naming the rank and the file, if it was not saved.
        """
        return self._core.wait_for_save() or None

    @told
    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: object = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: object = None,
    ) -> tuple[str, dict[str, Any]] | tuple[None, None]:
        """Returns (path, client_state), or (None, None) when load_dir holds no checkpoint. Collective.

        Reads DeepSpeed's checkpoints too; with load_module_only also weights alone, from a folder of `save_pretrained`.
        With load_module_strict=False, what the checkpoint or the model lacks is listed, and what the checkpoint lacks
        stays as it is; shapes that differ are an error all the same.
        """
        if not load_dir:
            raise ConfigError(f"load_checkpoint: load_dir is {load_dir!r}, expected a directory")
        if custom_load_fn is not None:
            raise ConfigError("load_checkpoint: custom_load_fn is not supported yet; leave it out")
        with self._synced():
            loaded = self._core.load_checkpoint(
                os.fspath(load_dir),
                "" if tag is None else str(tag),
                strict=load_module_strict,
                optimizer_states=load_optimizer_states,
                lr_scheduler_states=load_lr_scheduler_states,
                module_only=load_module_only,
            )
        if loaded is None:
            return None, None
        path, text = loaded
        all_states = not load_module_only
        return path, _checkpoint.unpack_client_state(
            text, self, load_module_strict, load_lr_scheduler_states, all_states, all_states and load_optimizer_states
        )

    @told
    def module_state_dict(self, only_rank: int | None = None) -> OrderedDict[str, Any]:
        """Whole parameters and buffers by name, on the CPU: of every rank, or of one, the others get none. Collective.

        The buffers are those that the modules hold now. Also what this rank's modules return from get_extra_state,
        under torch's names.
        """
        state: OrderedDict[str, Any] = OrderedDict(self._core.module_state_dict(only_rank))
        extra = read_extra_states(self.module)  # on every rank: it may use parameters
        if only_rank in (None, self.world.rank):
            for key, value in extra.items():
                state[key] = value.detach().clone().cpu() if isinstance(value, torch.Tensor) else value
        return state

    @told
    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "model.safetensors",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Writes whole parameters, in the type they train in, to one safetensors file on rank 0. Collective.

        They are those of the unsplit model: of all stages, slices joined. exclude_frozen_parameters leaves out what is
        not trained. Buffers, and extra states that are tensors, go with them. With
        "stage3_gather_16bit_weights_on_model_save": false, stage 3 saves nothing. Returns whether it was saved.
        """
        if not save_dir:
            raise ConfigError(f"save_16bit_model: save_dir is {save_dir!r}, expected a directory")
        zero = self._config.zero
        if zero.stage == 3 and not zero.gather_16bit_weights_on_model_save:
            if self.world.rank == 0:
                say(
                    f"{save_filename} was not saved: stage 3 gathers the whole model for it, and "
                    '"stage3_gather_16bit_weights_on_model_save" is false in "zero_optimization": leave it out',
                    "warning",
                )
            return False
        extra = read_extra_states(self.module)  # on every rank: it may use parameters
        tensors = [(name, value.detach()) for name, value in extra.items() if isinstance(value, torch.Tensor)]
        tensors = [(name, value) for name, value in tensors if type(value) is torch.Tensor]  # of this stage
        for name, value in extra.items():
            if self.world.rank == 0 and not isinstance(value, torch.Tensor):
                self._say_once(
                    f"save_16bit_model leaves '{name}' out: get_extra_state returned {type(value).__name__}, "
                    "and safetensors files hold tensors only; save_checkpoint keeps it",
                    "warning",
                )
        self._core.export_safetensors(os.path.join(save_dir, save_filename), tensors, exclude_frozen_parameters)
        return True

    @told
    def whole_state_dict(self, exclude_frozen_parameters: bool = False) -> OrderedDict[str, torch.Tensor]:
        """The unsplit model's parameters and buffers, on the CPU of rank 0; empty on the others. Collective.

        Joins shards, slices and the stages of a pipeline, whose `module_state_dict` are their own parts.
        """
        return OrderedDict(self._core.whole_model(exclude_frozen_parameters))

    @told
    def empty_partition_cache(self) -> None:
        """Releases what stage 3 has gathered. Collective."""
        self._core.empty_partition_cache()

    def destroy_core(self) -> None:
        """Returns every byte, and leaves process groups alone: they outlive some threads of torch's."""
        self.is_destroyed = True
        if self._activations is not None:
            self._activations.end()
        self._core.close()

    def destroy(self) -> None:
        """Returns every byte now, whoever else still holds this object; it is of no use afterwards."""
        if self._has_lost_peers:
            abort_groups(self._process_groups)  # first: the device's work then ends, and with it what waits for that
        self.destroy_core()
        for group in self._process_groups if dist.is_initialized() else ():
            dist.destroy_process_group(group)
        self._process_groups = ()
