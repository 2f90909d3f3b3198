# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The engine under DeepSpeed's names: an nn.Module around the model, with what libraries read of it."""

from __future__ import annotations

import contextlib
import functools
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from deeptide import _C
from deeptide._C import Config, ConfigError, StepOutcome
from deeptide._model.describe import whole_afterwards
from deeptide._model.names import namer
from deeptide.accelerator import get_accelerator
from deeptide.as_deepspeed import NotSupportedError
from deeptide.as_deepspeed._answers import CONSTANTS, KEYS, ZERO, EngineAnswers, answer
from deeptide.as_deepspeed._attributes import VALUES, EngineAttributes
from deeptide.as_deepspeed.checkpoint import client_state as _client_state
from deeptide.as_deepspeed.checkpoint import consolidate
from deeptide.as_deepspeed.checkpoint.parameters import OffloadStandIn, is_zero_param, mark_model
from deeptide.as_deepspeed.config.batch_size import BatchSizeMethods
from deeptide.as_deepspeed.helpers import groups
from deeptide.as_deepspeed.helpers.loader import OrderedLoader
from deeptide.as_deepspeed.names import surface
from deeptide.as_deepspeed.names.table import ENGINE
from deeptide.engine import Engine

if TYPE_CHECKING:
    from deeptide.as_deepspeed.pipe.topology import PipelineParallelGrid


class NoSyncError(ConfigError, AssertionError):
    """A misuse of no_sync, for which DeepSpeed raises AssertionError."""


def lay_grid(engine: DeepSpeedEngine) -> PipelineParallelGrid:
    """Makes the process groups of an engine's mesh, which deepspeed.utils.groups knows until its end. Collective."""
    from deeptide.as_deepspeed.pipe.topology import (
        PipeDataParallelTopology,
        PipelineParallelGrid,
        PipeModelDataParallelTopology,
    )

    mesh = engine.mesh
    tensor = mesh.get("tensor", 1)
    topology = (
        PipeModelDataParallelTopology(mesh["pipe"], tensor, mesh["data"])
        if tensor > 1
        else PipeDataParallelTopology(mesh["pipe"], mesh["data"])
    )
    grid = engine._grid = groups.mpu = PipelineParallelGrid(topology)
    groups.team = engine.tensor_team
    engine._process_groups = (*engine._process_groups, *grid.process_groups())
    return grid


class DeepSpeedEngine(EngineAttributes, EngineAnswers, BatchSizeMethods, Engine, torch.nn.Module):  # type: ignore[misc, unused-ignore]
    """The engine of deepspeed.initialize: `module` is the model, `config` the dictionary that was given."""

    given_config: dict[str, Any]
    _grid: PipelineParallelGrid | None = None  # of stages and shared layers
    _surface = "deepspeed.runtime.engine:DeepSpeedEngine"

    def __init__(self, core: Any, model: torch.nn.Module, config: Config, *rest: Any) -> None:
        torch.nn.Module.__init__(self)
        Engine.__init__(self, core, model, config, *rest)
        self.given_config = {}
        self.training = model.training
        self._clean = True  # no gradient since the last step, as far as this engine saw
        self._coalesces = False  # coalesce_grad_reduction() is entered
        self.parameter_offload: OffloadStandIn | None = None
        self._make_timer()
        if self.tensor_team is not None and dist.is_initialized():
            lay_grid(self)

    # nn.Module's, so that hooks on the engine run; Engine's own calls forward.
    __call__ = torch.nn.Module.__call__

    def __getattr__(self, name: str) -> Any:
        modules = self.__dict__.get("_modules")
        if modules and name in modules:
            return modules[name]
        if modules is None or name.startswith("__"):
            raise AttributeError(f"'DeepSpeedEngine' has no attribute '{name}'")
        if name in KEYS or name in ZERO or name in CONSTANTS:
            return functools.partial(answer, name, self.given_config)
        if name in VALUES:
            return VALUES[name]
        refused = surface.refused(self._surface, name, ENGINE.get(name, ""))
        if refused is not None:
            raise refused
        try:
            return getattr(modules["module"], name)
        except AttributeError:
            raise AttributeError(
                f"neither Deeptide's engine, under DeepSpeed's names, nor its {type(modules['module']).__name__} "
                f"has an attribute '{name}'; docs/from-deepspeed.md lists the engine's"
            ) from None

    @property
    def config(self) -> Any:
        """The configuration as it was given to initialize: a dictionary."""
        return self.given_config

    # -- training -----------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output."""
        self._clean = self._clean and not torch.is_grad_enabled()
        if self.training and not self.tput_timer.started:
            self.tput_timer.start()
        return super().forward(*args, **kwargs)

    def train(self, mode: bool = True) -> DeepSpeedEngine:
        """Sets the training mode; returns the engine."""
        self.training = mode
        super().train(mode)
        return self

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, **others: Any
    ) -> torch.Tensor:
        """Runs autograd from a scalar loss; calls add up until step()."""
        for name in others:
            if name not in ("allreduce_gradients", "release_loss"):
                raise TypeError(f"backward() got an unexpected keyword argument '{name}'")
        self._clean = False
        if self._accumulation is None or not isinstance(loss, torch.Tensor):
            return super().backward(loss, retain_graph, scale_wrt_gas)
        super().backward(self._scaled_loss(loss), retain_graph, scale_wrt_gas)
        return loss.detach() / self._accumulation if scale_wrt_gas else loss.detach()

    def _backward_epilogue(self) -> None:
        """Has no effect after loss.backward(): gradients are taken as autograd makes them, and reduced by step()."""

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> StepOutcome:
        """Ends the micro-batch; at an accumulation boundary steps. Errors: NoSyncError inside no_sync."""
        cure = "leave it first, then call step()"
        if self._in_no_sync:
            raise NoSyncError(f"It is illegal to call Engine.step() inside no_sync context manager: {cure}")
        if self._coalesces:
            raise NoSyncError(f"Engine.step() inside coalesce_grad_reduction, which is a no_sync context: {cure}")
        self._check_scaled()
        at_boundary = self.is_gradient_accumulation_boundary()
        outcome = super().step(lr_kwargs)
        self._end_micro_batch(at_boundary)
        self._clean = at_boundary
        self.tput_timer.stop(global_step=at_boundary)
        return outcome

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward() reduces nothing over the ranks. Stages 0 and 1. Errors: NoSyncError."""
        if self.zero_optimization_stage() >= 2:
            raise NoSyncError(
                f"the no_sync context manager is incompatible with ZeRO stage {self.zero_optimization_stage()}, which "
                "shards the gradients; use stage 0 or 1"
            )
        if self._in_no_sync or self._coalesces:
            raise NoSyncError("no_sync context manager reentry is unsupported; leave the outer one first")
        with super().no_sync():
            yield
        if not self._core.closed:
            self._tell_boundary()

    @contextlib.contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Around all backward() of one step, at stages 1 to 3. Gradients are the same as without it.

        They travel as the stage has them travel: at stage 1 in step(), at 2 and 3 in each backward(), since no rank
        has memory for all of them. Errors: NotSupportedError elsewhere, NoSyncError inside another such context.
        """
        if self.pipeline_parallelism or self.zero_optimization_stage() == 0:
            where = "under pipeline parallelism" if self.pipeline_parallelism else "at ZeRO stage 0; use 1, 2 or 3"
            raise NotSupportedError(f"coalesce_grad_reduction is not supported {where}")
        if self._in_no_sync or self._coalesces:
            raise NoSyncError("coalesce_grad_reduction cannot be nested inside another no_sync context")
        self._coalesces = True
        try:
            yield
        finally:
            self._coalesces = False

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """True or False overrides the counter until None gives it back."""
        super().set_gradient_accumulation_boundary(is_boundary)
        self._tell_boundary()

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> Any:
        """This rank's batches of a dataset, as initialize makes them of training_data; in order but for "train".

        A dataset without a length, and one with a sampler, go to torch's DataLoader: each rank takes what they give.
        """
        size = self.train_micro_batch_size_per_gpu() if batch_size is None else batch_size
        more: dict[str, Any] = {
            "pin_memory": pin_memory and torch.cuda.is_available(),
            "num_workers": num_local_io_workers or 0,
        }
        drop_last = self.dataloader_drop_last()
        if data_sampler is not None or isinstance(dataset, torch.utils.data.IterableDataset):
            return torch.utils.data.DataLoader(
                dataset, size, sampler=data_sampler, collate_fn=collate_fn, drop_last=drop_last, **more
            )
        world = _C.make_world(self.world.store, self.data_parallel_rank, self.data_parallel_size)
        return OrderedLoader(dataset, size, collate_fn, drop_last, world=world, shuffle=route == "train", **more)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops accumulated gradients. Right after a step there are none, and no rank has to hear of it."""
        if not self._clean or self._core.has_gradients():  # a program may call the model and autograd itself
            super().zero_grad()
            self._clean = True

    def rebuild(self) -> None:
        """Takes the model as it is now, as deeptide's engine does; new parameters get stage 3's marks. Collective."""
        super().rebuild()
        if self.zero_optimization_stage() == 3:
            mark_model(self.module, self.world_size)

    def compile(
        self, backend: Any = None, compile_kwargs: dict[str, Any] | None = None, schedule: object = None, **others: Any
    ) -> None:
        """Torch's compiler on the model, in place."""
        if schedule is not None:
            raise NotSupportedError("engine.compile(schedule=…): there is no DeepCompile here; leave it out")
        Engine.compile(self, backend or get_accelerator().get_compile_backend(), compile_kwargs)

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped because a gradient was not finite."""
        return self.was_step_skipped()

    # -- state --------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: Any,
        tag: object = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        blocking: bool | None = None,
        contents: str | None = None,
        *,
        client_sd: dict[str, Any] | None = None,
    ) -> str:
        """Saves all that a resume needs; returns its folder. Collective.

        client_state may hold whatever pickle can: such a checkpoint runs code when it is loaded, as DeepSpeed's do.
        client_sd: its name in DeepSpeed's first documents. exclude_frozen_parameters: leaves out what is not trained.
        """
        if client_sd is not None:
            if client_state:
                raise TypeError("save_checkpoint() got client_state and client_sd, which is its older name; give one")
            client_state = client_sd
        if self.global_rank == 0 and save_dir:
            consolidate.write_script(save_dir)  # before the collectives: afterwards it is there for every rank
        if tag is not None and self.checkpoint_tag_validation_fail():
            _client_state.check_tag(str(tag))
        state = _client_state.packed(client_state)
        return super().save_checkpoint(save_dir, tag, state, save_latest, exclude_frozen_parameters, blocking, contents)

    def load_checkpoint(
        self,
        load_dir: Any,
        tag: object = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: object = None,
    ) -> Any:
        """Returns (path, client_state), or (None, None) without a checkpoint. Collective."""
        path, state = super().load_checkpoint(
            load_dir,
            tag,
            load_module_strict,
            load_optimizer_states,
            load_lr_scheduler_states,
            load_module_only,
            custom_load_fn,
        )
        self._clean = True
        return path, _client_state.unpacked(state)

    _change_recovery_script_permissions = staticmethod(consolidate.make_executable)

    def _get_optimizer_ckpt_name(self, checkpoints_path: Any, tag: object, expp_rank: int) -> str:
        """The file of experts' optimizer states in a checkpoint that DeepSpeed wrote; ours has no such file."""
        name = f"expp_rank_{expp_rank}_mp_rank_{self.get_model_parallel_rank():02d}_optim_states.pt"
        return os.path.join(checkpoints_path, str(tag), name)

    @property
    def loaded_checkpoint_dp_world_size(self) -> None:
        """None: a checkpoint has no ranks, any world loads it."""
        return None

    def autotp_size(self) -> int:
        """How many ranks share each layer; 0: the whole model is on each."""
        return 0 if self.tensor_team is None else self.tensor_team.size

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether saves at stage 3 gather the weights."""
        return bool(self._config.zero.gather_16bit_weights_on_model_save)

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """Whole weights on rank 0, None elsewhere; tied ones share their memory. Collective."""
        if self.zero_optimization_stage() != 3:
            raise ValueError("this function requires ZeRO-3 mode; at other stages use module.state_dict()")
        return consolidate.whole_weights(self, exclude_frozen_parameters)

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, torch.Tensor] | None:
        """Likewise at stage 3, and where ranks share layers."""
        if self.zero_optimization_stage() != 3 and self.tensor_team is None:
            raise ValueError(
                "this function requires ZeRO-3 mode, or layers that ranks share; elsewhere use module.state_dict()"
            )
        return consolidate.whole_weights(self, exclude_frozen_parameters)

    def whole_state(self, only_rank: int | None = None) -> OrderedDict[str, Any]:
        """Whole parameters and buffers on the CPU: of every rank, or of one. Collective."""
        return super().module_state_dict(only_rank)

    def module_state_dict(  # type: ignore[override, unused-ignore]
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> Any:
        """The model's state_dict(); where parameters are sharded or cut, whole ones on the CPU. Collective there."""
        if self.tensor_team is not None or any(map(_C.is_sharded, self.module.parameters())):
            state = OrderedDict((prefix + name, tensor) for name, tensor in self.whole_state().items())
        else:
            state = self.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        if exclude_frozen_parameters:
            plain = namer(self.module)
            for name, parameter in self.module.named_parameters(remove_duplicate=False):
                if not parameter.requires_grad:
                    state.pop(prefix + name, None)
                    state.pop(prefix + plain(name), None)
        return state

    def load_module_state_dict(
        self,
        checkpoint: dict[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., None] | None = None,
        fetch_z3_params: bool = False,
    ) -> None:
        """Loads checkpoint["module"] into the model; the masters follow at the next step. The same on all ranks."""
        state = checkpoint["module"]
        if custom_load_fn is not None:
            custom_load_fn(src=state, dst=self.module)
        else:
            self.module.load_state_dict(state, strict=strict)

    def save_16bit_model(
        self, save_dir: Any, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Whole weights into one file by torch.save, or of safetensors where the name says so. Collective."""
        if self.zero_optimization_stage() == 3 and not self.zero_gather_16bit_weights_on_model_save():
            return super().save_16bit_model(save_dir, save_filename)
        consolidate.save_weights(self, save_dir, save_filename, exclude_frozen_parameters)
        return True

    def destroy(self) -> None:
        """Returns every byte; the model is whole afterwards, for another initialize. Collective at stage 3."""
        if groups.mpu is self._grid:
            groups.mpu = groups.team = None
        if self._core.closed:
            return
        with whole_afterwards(self.module):
            super().destroy()
        if self.optimizer is not None:
            self.optimizer = None
        for parameter in self.module.parameters():
            if is_zero_param(parameter):
                for name in ("ds_id", "ds_numel", "ds_shape", "ds_status", "ds_active_sub_modules", "partition_numel"):
                    parameter.__dict__.pop(name, None)
