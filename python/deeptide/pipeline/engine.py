# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The engine of one stage: runs the schedule's list of instructions, micro-batch by micro-batch."""

from __future__ import annotations

import contextlib
import json
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch

from deeptide import _C
from deeptide._C import Config, ConfigError, PipelineSchedule, StepOutcome
from deeptide._engine import batches as _batches
from deeptide._engine.checkpoint import handles_exception
from deeptide._process import generators
from deeptide._process.interrupts import held_signals, wait_for_signal
from deeptide._process.log import say
from deeptide._process.reports import told
from deeptide.data import RepeatingLoader
from deeptide.engine import Engine
from deeptide.pipeline.cutting.chunks import starts_of
from deeptide.pipeline.cutting.cut import BlockCut, cut_of
from deeptide.pipeline.errors import PipelineError
from deeptide.pipeline.module import PipelineModule
from deeptide.pipeline.schedules import SCHEDULES, simulate
from deeptide.pipeline.step import batches as micro_batches
from deeptide.pipeline.step.bubble import Bubble, measured_bubble
from deeptide.pipeline.step.plain_loop import ADVICE, PlainLoop
from deeptide.pipeline.step.stage_run import StageRun, trained_chunks


def check_mesh(config: Config, model: torch.nn.Module) -> int:
    """The number of stages. Errors: ConfigError if the configuration has another one than the model."""
    asked = json.loads(_C.config_section(config, "parallel"))["pipeline"]["stages"]
    cut = cut_of(model)
    stages = model.num_stages if isinstance(model, PipelineModule) else 1 if cut is None else cut.num_stages
    if isinstance(model, PipelineModule) and starts_of(config) is not None:
        raise ConfigError("parallel.pipeline.cut is given, and a PipelineModule has partition_method; leave it out")
    if asked is None or asked == stages:
        return stages
    name = type(model).__name__
    raise ConfigError(f"parallel.pipeline is {asked}, and the {name} has {stages} stages; leave the key out")


class PipelineEngine(Engine):
    """Trains one stage of a PipelineModule, or of a model that "parallel": {"pipeline": N} cuts along its blocks.

    Made by `deeptide.initialize`; unknown attributes are the model's.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._cut: PipelineModule | BlockCut = cut_of(self.module) or self.module  # type: ignore[assignment]
        self._stage = self._core.stage() if self._cut.num_stages > 1 else None
        self._check_teams()
        self._schedule = self._chosen_schedule()
        self._times: list[tuple[float, float]] = []  # of each stage in the last step: seconds, and of them waited
        self._batch_fn: Callable[[Any], Any] | None = None
        self._iterator: Iterator[Any] | None = None
        self._run = StageRun(self, self._stage, self._cut)
        self._loop = PlainLoop(self, self._stage, self._cut)
        self._is_in_step = False  # of the schedule
        self._has_left_step = False  # by an interrupt in its middle
        outputs = json.loads(_C.config_section(self._config, "parallel"))["pipeline"]["outputs"]
        self._broadcasts = self._stage is not None and outputs == "broadcast"  # what the program gets, to all stages
        self._recompute_as_asked()
        self._check_keeping(by_schedule=isinstance(self._cut, PipelineModule) or self._cut.num_chunks > 1)
        self._connect()
        self._say_if_few()

    def _recompute_as_asked(self) -> None:
        interval = json.loads(_C.config_section(self._config, "pipeline"))["activation_checkpoint_interval"]
        if interval > 0 and isinstance(self._cut, PipelineModule):
            self._cut.set_checkpoint_interval(interval)

    def _connect(self) -> None:
        """Lets the model run whole without gradients; it outlives the engine."""
        if self._stage is None or not isinstance(self._cut, BlockCut):
            return
        engine = weakref.ref(self)

        def whole(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            held = engine()
            if held is None:
                raise PipelineError("the engine of a model that is cut into stages is gone; make another one")
            return held._run_whole(forward, args, kwargs)

        self._cut.relay.connect(self._stage, self._core.device(), whole)
        self._cut.kinds.say = lambda text: None if (held := engine()) is None else held._say_once(text, "warning")

    @told
    def _run_whole(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a function of the model that gives whole outputs on every stage. Errors: PipelineError in a step."""
        assert isinstance(self._cut, BlockCut)
        if self._is_in_step:
            raise PipelineError(
                "the model was called within a step of the schedule, as by the loss function, where other stages do "
                "not come; call it between steps, or compute with what the loss function is given"
            )
        with self._together("forward", self._run), self._cut.relay.open((args, kwargs)):
            return forward(*args, **kwargs)

    def _check_teams(self) -> None:
        """Collective. Errors: ConfigError, on all ranks, if stages have teams of different sizes."""
        own = self.tensor_team.size if self.tensor_team else 1
        sizes = [own] if self._stage is None else [int(size) for size in self._stage.exchange([float(own)])]
        if len(set(sizes)) > 1:
            raise ConfigError(
                f"the stages' layers are shared by {', '.join(map(str, sizes))} ranks, expected one number: give a "
                "stage without shared layers the team too, by model.tensor_team = team"
            )
        wanted = self._cut.topology().get_dim("model") if isinstance(self._cut, PipelineModule) else 0
        if wanted > 1 and wanted != own:
            raise ConfigError(
                f"PipelineModule: topology: its axis model has {wanted} ranks, and {own} share the layers: build them "
                f"of deeptide.tensor's layers with make_team({wanted}, stages={self.num_stages})"
            )

    def _chosen_schedule(self) -> PipelineSchedule:
        """The configuration's, or of chunks the interleaved one. Errors: ConfigError if chunks have no such order."""
        section = json.loads(_C.config_section(self._config, "parallel"))
        name, chunks = section["schedule"], self._cut.num_chunks
        if isinstance(self._cut, PipelineModule):
            if section["chunks"] not in (None, chunks):
                raise ConfigError(
                    f"parallel.chunks is {section['chunks']}, and the PipelineModule was built with chunks={chunks}; "
                    "leave the key out"
                )
            has_one = name in ("gpipe", "zero_bubble")
            if (chunks > 1 and has_one) or (chunks == 1 and name == "interleaved" and self.num_stages > 1):
                raise ConfigError(
                    f'parallel.schedule is "{name}", and the PipelineModule has {chunks} chunks on each stage: those '
                    "of one chunk run by 1f1b, gpipe or zero_bubble, others interleaved; build it with another number, "
                    "or leave the key out"
                )
        if chunks > 1:
            return PipelineSchedule.interleaved
        if name == "interleaved" or (self.num_stages == 1 and name == "zero_bubble"):
            return PipelineSchedule.one_f_one_b  # of one chunk it is the same; one stage has no bubble
        return SCHEDULES[name]

    def _check_keeping(self, by_schedule: bool) -> None:
        """Errors: ConfigError if gradients are to be shown, where backward and step are one call."""
        keeps = json.loads(_C.config_section(self._config, "deeptide"))["keep_grad"]
        if keeps and by_schedule and self.num_stages > 1:
            raise ConfigError(
                "train_batch leaves no moment between backward and step, in which deeptide.keep_grad shows gradients; "
                "call engine(batch), engine.backward(loss) and engine.step() on a plain model that is cut into stages, "
                "or leave the key out"
            )

    def _live_micro_batches(self) -> int:
        """Those whose activations are alive at once, at most; of chunks, which each keep a part, rounded up."""
        count, stages, chunks = self.micro_batches, self.num_stages, self._cut.num_chunks
        return -(-simulate(self._schedule, stages, count, chunks).peak_activations[self.stage_id] // chunks)

    def _say_if_few(self) -> None:
        """A step of fewer micro-batches than stages cannot fill them."""
        count, stages = self.micro_batches, self.num_stages
        if count < stages:
            idle = simulate(self._schedule, stages, count, self._cut.num_chunks).bubble
            self._say_once(
                f"gradient_accumulation_steps is {count}, and the pipeline has {stages} stages, which are idle for "
                f"{100 * idle:.0f} % of such a step: give {stages} or more",
                "warning",
            )

    # -- where this rank is ---------------------------------------------------------------------------------------

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return self._cut.num_stages

    @property
    def stage_id(self) -> int:
        """This rank's stage, from 0."""
        return self._cut.stage_id

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one optimizer step."""
        return self._core.batch_sizes().accumulation

    def is_first_stage(self) -> bool:
        """Whether this stage takes the inputs."""
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        """Whether this stage computes the loss."""
        return self.stage_id == self.num_stages - 1

    def is_pipe_parallel(self) -> bool:
        """Whether there is more than one stage."""
        return self.num_stages > 1

    # -- data -----------------------------------------------------------------------------------------------------

    def set_dataloader(self, loader: Iterable[Any] | None) -> None:
        """The batches of train_batch() without an iterator, begun anew at their end."""
        self._iterator = None if loader is None else RepeatingLoader(loader)

    def set_dataiterator(self, iterator: Iterator[Any] | None) -> None:
        """The batches of train_batch() without an iterator."""
        self._iterator = iterator

    def set_batch_fn(self, fn: Callable[[Any], Any] | None) -> None:
        """Applies to each micro-batch before it is taken apart into (inputs, labels).

        On a rank without an iterator `fn` is given None, to take what a rank that shares its layers has read.
        """
        self._batch_fn = fn

    def reset_activation_shape(self) -> None:
        """Has no effect: activations may change their shapes at any time."""

    def get_additional_losses(self) -> dict[str, torch.Tensor] | None:
        """The PipelineModule's."""
        return self.module.get_additional_losses() if isinstance(self.module, PipelineModule) else None

    def _take(self, data_iter: Iterator[Any] | None, count: int, name: str) -> list[tuple[Any, Any]]:
        """This step's micro-batches; none on stages that need none. All stages raise if one has none."""
        problem = ""
        taken: list[tuple[Any, Any]] = []
        if self._cut.reads_batches():
            batches = data_iter if data_iter is not None else self._iterator
            if batches is None and self.training_dataloader is not None:
                batches = _batches.batches_of(self, None, name)
            with self._drawing_alike():
                taken, problem = micro_batches.take(
                    batches, count, self._batch_fn, self._cut.split, self._core.device()
                )
        micro_batches.agree(self._stage, problem, micro_batches.marks(taken))
        return taken

    @contextlib.contextmanager
    def _drawing_alike(self) -> Iterator[None]:
        """Inside, stages that read batches draw the first stage's random numbers: collators draw masks."""
        # Ranks as threads have one generator, from which others may be drawing.
        # After a step that has ended in its middle, the stages meet before they send anything.
        if self._stage is None or self.world.source == "threads" or not (self._run.is_over and self._loop.is_over):
            yield
            return
        own = generators.states()
        others = range(1, self.num_stages) if isinstance(self._cut, BlockCut) else [self.num_stages - 1]
        first = self._loop.of_first(own, others)
        if self.stage_id > 0:
            generators.set_states(first)
        try:
            yield
        finally:
            if self.stage_id > 0:
                generators.set_states(own)

    def _set_loss_fn(self, loss_fn: _batches.LossFunction | None) -> None:
        if isinstance(self._cut, BlockCut):
            self._cut.loss_fn = loss_fn
        elif loss_fn is not None:
            raise ValueError("loss_fn: a PipelineModule has its own; leave the argument out")

    def _compute(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._cut.compute(self.module, args, kwargs)

    def _give_outputs(self, gives: bool) -> None:
        """Whether the program gets the model's outputs, and not their losses alone."""
        if isinstance(self._cut, BlockCut):
            self._cut.gives_outputs = gives

    @contextlib.contextmanager
    def _in_step(self, name: str) -> Iterator[None]:
        self._is_in_step = True
        try:
            with self._together(name, self._run):
                yield
        except (KeyboardInterrupt, _C.SaveMeetsStepError):
            self._has_left_step = True
            raise
        finally:
            self._is_in_step = False

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        """Around a call that all stages make: signals wait until its end, for messages would stay under way."""
        if self._has_left_step:
            raise PipelineError(
                "this stage was interrupted in the middle of a step, whose messages are still under way: "
                "save_checkpoint() works, but training goes on in a new run, which loads what was saved"
            )
        with held_signals():
            try:
                yield
            except _C.SaveMeetsStepError:
                wait_for_signal()  # which raises in this one's place
                raise

    @told
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> str:
        """Saves as any engine does. Collective over all stages."""
        if self._stage is not None:
            with held_signals():
                micro_batches.agree_to_save(self._stage, handles_exception())
                return super().save_checkpoint(*args, **kwargs)
        return super().save_checkpoint(*args, **kwargs)

    @contextlib.contextmanager
    def _together(self, name: str, run: StageRun) -> Iterator[None]:
        """Around what stages do together: others hear of an error that ends it, though the program may catch it."""
        run.is_over = False
        try:
            yield
        except (KeyboardInterrupt, _C.SaveMeetsStepError):
            raise  # the others leave the step, too, and all may save
        except BaseException as error:
            if self._stage is not None and not run.is_over:
                with contextlib.suppress(Exception):
                    self._stage.lose_step(f"raised {type(error).__name__} in {name}: {error}")
            raise
        run.is_over = True

    # -- steps ----------------------------------------------------------------------------------------------------

    def _train_on(
        self, data_iter: Iterator[Any] | None, count: int, loss_fn: _batches.LossFunction | None
    ) -> list[torch.Tensor]:
        self._set_loss_fn(loss_fn)
        self._give_outputs(False)
        taken = self._take(data_iter, count, "train_batch")
        self.module.train()
        self._loop.forget()
        with self._in_step("train_batch"):
            return self._run.train(self._schedule, taken, count)

    def _evaluate_on(
        self,
        data_iter: Iterator[Any] | None,
        count: int,
        loss_fn: _batches.LossFunction | None,
        compute_loss: bool,
        wants_outputs: bool,
    ) -> tuple[list[torch.Tensor], list[Any] | None]:
        self._set_loss_fn(loss_fn)
        self._give_outputs(wants_outputs)
        taken = self._take(data_iter, count, "eval_batch")
        with _batches.evaluating(self):
            with self._in_step("eval_batch"):
                losses, outputs = self._run.evaluate(taken, count, compute_loss)
            if self._stage is not None:
                self._stage.meet()  # ranks that are behind still gather
            if wants_outputs:
                self._cut.check_output(outputs)
                outputs = self._loop.share(outputs) if self._broadcasts else outputs
        return losses, outputs

    def _each_loss(self, losses: list[torch.Tensor], count: int) -> list[torch.Tensor]:
        """The last stage's losses, on every stage."""
        if self._stage is None:
            return losses
        values = self._stage.exchange([loss.item() for loss in losses] or [0.0] * count, "telling losses")
        return [torch.tensor(value, device=self._core.device()) for value in values[-count:]]

    def _mean_loss(self, losses: list[torch.Tensor]) -> torch.Tensor:
        mean = self._core.mean(_batches.mean_of(losses)) if losses else 0.0
        if self._stage is not None:
            values = self._stage.exchange([mean, *self._run.times], "telling the loss")
            mean = values[-3]
            self._times = list(zip(values[1::3], values[2::3], strict=True))
        return torch.tensor(mean, device=self._core.device())

    def bubble(self) -> Bubble | None:
        """The last train_batch()'s: the share of the stages' time that passed idle. None before the first."""
        if all(whole == 0.0 for whole, _ in self._times):
            return None
        on_paper = simulate(self._schedule, self.num_stages, self.micro_batches, self._cut.num_chunks)
        return Bubble(measured_bubble(self._times), on_paper.bubble)

    @told
    def train_batch(
        self, data_iter: Iterator[Any] | None = None, loss_fn: _batches.LossFunction | None = None
    ) -> torch.Tensor:
        """Trains as any engine does, over all stages. Under "wall_clock_breakdown", rank 0 tells the step's bubble."""
        self._check_keeping(by_schedule=True)
        with self._held():
            loss = super().train_batch(data_iter, loss_fn)
        is_due = self.global_steps % (self.steps_per_print() or 1) == 0
        if self.wall_clock_breakdown() and is_due and self._times and self.world.rank == 0:
            say(f"pipeline | {self.bubble()}")
        return loss

    # -- what a step by the schedule calls ------------------------------------------------------------------------

    @contextlib.contextmanager
    def closing_pieces(self) -> Iterator[None]:
        """Inside, each backward of a chunk counts as the core's micro-batch, which gives gradients their usual sums."""
        if not self._closes_itself():
            yield
            return
        self._core.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            if not self._core.closed:
                self._core.set_gradient_accumulation_boundary(self._boundary)

    def await_the_end(self) -> None:
        """Before a step's last backward."""
        if self._closes_itself():
            self._core.set_gradient_accumulation_boundary(True)

    def _closes_itself(self) -> bool:
        """Whether the core's count of micro-batches does not say where a step ends."""
        return self._cut.num_chunks > 1 or self.micro_batches != self._core.batch_sizes().accumulation

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """A micro-batch's loss for the core, which divides by the configuration's accumulation."""
        configured = self._core.batch_sizes().accumulation
        return loss if self.micro_batches == configured else loss * (configured / self.micro_batches)

    def close_piece(self) -> StepOutcome:
        """After each backward: reduces, and after the last one steps. Collective over the stage."""
        return Engine.step(self)

    @property
    def micro_steps(self) -> int:
        """Micro-batches so far."""
        return self._core.micro_steps() // len(trained_chunks(self._cut))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The same as `forward`."""
        return self.forward(*args, **kwargs)

    @told
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """One micro-batch through all stages, without overlap. Collective over the stages, as backward and step are.

        Returns the model's output on the last stage, and what has its loss on the others: every rank has the loss. By
        "outputs": "broadcast" the others have copies of all tensors. All stages call it with the same batch.

        Errors: PipelineError for a PipelineModule, which has train_batch alone.
        """
        loop = self._loop_of("forward")
        self._say_once(ADVICE, "warning")
        self._set_loss_fn(None)
        self._give_outputs(True)
        with self._held(), self._together("forward", loop):
            return loop.forward(args, kwargs, self._broadcasts)

    @told
    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Runs backward on all stages, of all forwards since the last one. Errors: PipelineError, as forward's."""
        loop = self._loop_of("backward")
        if retain_graph:
            raise PipelineError("backward: retain_graph does not go with a pipeline yet; leave it out")
        with self._held(), self._together("backward", loop):
            return loop.backward(loss, scale_wrt_gas)

    @told
    def step(self, lr_kwargs: dict[str, Any] | None = None) -> StepOutcome:
        """Ends the micro-batch, as of any engine. Errors: PipelineError, as forward's."""
        with self._held():
            self._loop_of("step").close()
            return super().step(lr_kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients accumulated so far. Collective."""
        super().zero_grad(set_to_none)
        self._loop.forget()

    def _loop_of(self, method: str) -> PlainLoop:
        if self._stage is None or isinstance(self._cut, PipelineModule):
            raise PipelineError(f"{method}: a PipelineModule runs on all stages by train_batch() and eval_batch()")
        if self._cut.num_chunks > 1:
            raise PipelineError(
                f"{method}: the interleaved schedule overlaps micro-batches, and the program's own loop has one at a "
                'time; call train_batch() and eval_batch(), or take "schedule": "1f1b"'
            )
        return self._loop

    def join(self) -> NoReturn:
        """Not here."""
        raise PipelineError("join: a pipeline's stages end together with their batches; leave it out")

    def rebuild(self) -> NoReturn:
        """Not here."""
        raise PipelineError("rebuild: not supported yet with a pipeline; make the model and the engine anew")

    @told
    def snapshot(self) -> torch.nn.Module:
        """Copies the uncut model, on every rank; of a PipelineModule its stage. Collective over all stages."""
        if isinstance(self._cut, BlockCut) and self._stage is not None:
            return self._cut.copy_whole(self._loop.exchange_tensors)
        return super().snapshot()

    def _modules_to_compile(self) -> Iterable[torch.nn.Module]:
        """Those blocks that this stage has, if the model is cut: the program around them uses other stages' tensors."""
        return self._cut.own_blocks.values() if isinstance(self._cut, BlockCut) else super()._modules_to_compile()
