# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""An engine's schedules of what a step leaves out: sequence lengths, layers, tokens, parts and bits of weights."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from deeptide import _C
from deeptide._C import Config, ConfigError
from deeptide._process.log import say

if TYPE_CHECKING:
    from deeptide.compression.schedule import CompressionSchedule
    from deeptide.efficiency.own_keywords import BatchCutter
    from deeptide.engine import Engine

_CURRICULUM = "curriculum_learning"
_LAYERS = "progressive_layer_drop"
_TOKENS = "data_efficiency.data_routing.random_ltd"
_IN_PIPELINE = (
    "progressive_layer_drop and curriculum_learning have no effect in a pipeline; turn the sections off, or train "
    "without parallel.pipeline"
)
_COMPRESSION = "compression_training"
_OLDER_COMPRESSION = "quantize_training"  # which initialize prepares


def _compression_of(
    model: torch.nn.Module, config: Config, section: Callable[[str], dict[str, Any]]
) -> CompressionSchedule | None:
    """The schedule of a model that init_compression prepared. Errors: ConfigError where only one of the two is."""
    techniques = section(_COMPRESSION).values()
    is_on = any(part.get("shared_parameters", {}).get("enabled", False) for part in techniques)
    if section(_OLDER_COMPRESSION)["enabled"]:
        if not is_on:
            from deeptide.compression.preparation import init_compression

            init_compression(model, config)
        is_on = True
    is_prepared = any("_compression" in module.__dict__ for module in model.modules())
    if is_on and not is_prepared:
        raise ConfigError(
            f"{_COMPRESSION}: a technique is on, and the model was not prepared; call "
            "deeptide.compression.init_compression(model, config) before initialize"
        )
    if is_prepared and not is_on:
        raise ConfigError(
            f"{_COMPRESSION}: every technique is off, and init_compression prepared the model; give initialize the "
            "configuration that init_compression got"
        )
    if not is_on:
        return None
    from deeptide.compression.schedule import CompressionSchedule

    return CompressionSchedule(model, config)


class Schedules:
    """Those that a configuration turns on; None where it does not."""

    tells_layers = True  # forward is told of layers to leave out; False: the layers know themselves
    has_found_layers = False  # those were found, and not named by the program
    _cutter: BatchCutter | None = None  # None: forward is told of the curriculum's length
    _kept: dict[str, Any] | None = None  # its place in the state that a rewind brings back

    def __init__(self, config: Config, global_batch: int, model: torch.nn.Module) -> None:
        def section(path: str) -> dict[str, Any]:
            found: dict[str, Any] = json.loads(_C.config_section(config, path))
            return found

        self.curriculum = _C.CurriculumSchedule.from_config(config) if section(_CURRICULUM)["enabled"] else None
        self.layers = _C.LayerDropSchedule.from_config(config) if section(_LAYERS)["enabled"] else None
        self.token_section = section(_TOKENS)
        self.tokens = _C.RandomLtdSchedule.from_config(config, global_batch) if self.token_section["enabled"] else None
        self.compression = _compression_of(model, config, section)

    def __bool__(self) -> bool:
        return any(one is not None for one in (self.curriculum, self.layers, self.tokens, self.compression))

    def begin(self, engine: Engine) -> None:
        """Does itself what the model's forward, of an engine that is made, would not read of its keywords."""
        if self.layers is None and self.curriculum is None:
            return
        from deeptide.efficiency.own_keywords import BatchCutter, drop_found_layers, reads

        model = engine.module
        if hasattr(type(engine), "set_dataiterator"):
            say(_IN_PIPELINE, "warning")
            return
        if self.curriculum is not None and not reads(model, "curriculum_seqlen"):
            self._cutter = BatchCutter(model)
        if self.layers is not None:
            self.tells_layers = reads(model, "pld_theta")
            if not self.tells_layers:
                self.has_found_layers = True
                drop_found_layers(engine)

    def before_forward(
        self, step: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a training forward of the step that follows `step` steps."""
        kwargs = dict(kwargs)
        if self.layers is not None and self.tells_layers:
            kwargs.update(progressive_layer_drop=True, pld_theta=self.layers.current)
        if self.curriculum is not None:
            length = self.curriculum.update(step + 1)
            if self._cutter is None:
                kwargs["curriculum_seqlen"] = length
            else:
                args, kwargs = self._cutter.cut(args, kwargs, length)
        if self.tokens is not None:
            self.tokens.update(step)
        return args, kwargs

    def before_backward(self, loss: torch.Tensor, at_boundary: bool, mean: Callable[[float], float]) -> None:
        """Before autograd runs from a loss. `mean`: over ranks."""
        if at_boundary and self.compression is not None:
            self.compression.before_backward(loss, mean)

    def before_step(self, step: int) -> None:
        """At an accumulation boundary, after `step` steps."""
        if self.layers is not None:
            self.layers.update(step)

    def after_step(self) -> None:
        """After an optimizer step that was applied."""
        if self.compression is not None:
            self.compression.step()

    def follow(self, outcome: _C.StepOutcome) -> None:
        """Goes back where the engine does, before after_step(); other schedules follow the steps taken, which go on."""
        if self.compression is None:
            return
        if outcome.kept:
            self._kept = self.compression.state_dict()
        if outcome.rewound_to >= 0 and self._kept is not None:
            self.compression.load_state_dict(self._kept)

    def position(self) -> dict[str, Any]:
        """The state that forward passes change."""
        state: dict[str, Any] = {}
        if self.curriculum is not None:
            state["curriculum"] = self.curriculum.current
        if self.layers is not None:
            state["layers"] = self.layers.current
        if self.tokens is not None:
            state["tokens"] = list(self.tokens.position)
        return state

    def state_dict(self, position: dict[str, Any] | None = None) -> dict[str, Any]:
        """The state that does not follow from the step alone, at an earlier `position` or now."""
        state = self.position() if position is None else dict(position)
        if self.compression is not None:
            state["compression"] = self.compression.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A schedule that the checkpoint lacks stays as it is."""
        if self.curriculum is not None and "curriculum" in state:
            self.curriculum.set_current(state["curriculum"])
        if self.layers is not None and "layers" in state:
            self.layers.set_current(state["layers"])
        if self.tokens is not None and "tokens" in state:
            self.tokens.set_position(*state["tokens"])
        if self.compression is not None and "compression" in state:
            self.compression.load_state_dict(state["compression"])


def begin(engine: Engine) -> None:
    """Fits the schedules of an engine to its model, and ends those of an earlier engine there."""
    if "deeptide.efficiency.layer_drop" in sys.modules:
        from deeptide.efficiency.layer_drop import keep_layers

        keep_layers(engine.module)
    if engine._less_work is not None:
        engine._less_work.begin(engine)


class LessWork:
    """The engine's methods about them, under DeepSpeed's names."""

    module: torch.nn.Module
    training_dataloader: Any
    _less_work: Schedules | None  # None: nothing is left out

    def get_pld_theta(self) -> float | None:
        """The share of layers that forward is told to keep; None without progressive layer drop."""
        if self._less_work is None or self._less_work.layers is None:
            return None
        return self._less_work.layers.current

    def curriculum_seqlen(self) -> int | None:
        """The sequence length of the last forward's curriculum; None without one."""
        if self._less_work is None or self._less_work.curriculum is None:
            return None
        return self._less_work.curriculum.current

    def random_ltd_layer_tokens(self) -> int | None:
        """Tokens times layers that were computed so far; None without random-LTD."""
        if self._less_work is None or self._less_work.tokens is None:
            return None
        return self._less_work.tokens.position[2]

    def random_ltd_initialize(self) -> None:
        """Makes the layers of "random_ltd_layer_id", found by the numbers in their names, drop tokens."""
        from deeptide.efficiency.random_ltd import RandomLayerTokenDrop

        if self._less_work is None or self._less_work.tokens is None:
            raise ConfigError(f"{_TOKENS} is off; set its enabled to true, and that of the sections around it")
        section = self._less_work.token_section
        wanted = {str(layer) for layer in section["random_ltd_layer_id"]}
        found = 0
        for name, module in self.module.named_modules():
            if isinstance(module, RandomLayerTokenDrop) and wanted.intersection(name.split(".")):
                module.init_config(section, self._less_work.tokens, found)
                module.name_layer(name)
                found += 1
        if found != section["random_ltd_layer_num"]:
            raise ConfigError(
                f"{_TOKENS}: {found} layers of the converted class have a number of random_ltd_layer_id in their "
                f"names, expected random_ltd_layer_num, {section['random_ltd_layer_num']}"
            )

    def set_custom_curriculum_learning_schedule(self, schedule_func_dict: dict[str, Callable[[int], int]]) -> None:
        """Functions from a step to a difficulty: by metric, or "seqlen" of the section "curriculum_learning"."""
        if self._less_work is not None and self._less_work.curriculum is not None:
            if set(schedule_func_dict) != {"seqlen"}:
                raise ConfigError(
                    f"set_custom_curriculum_learning_schedule: got {sorted(schedule_func_dict)}, expected 'seqlen'"
                )
            self._less_work.curriculum.set_function(schedule_func_dict["seqlen"])
            return
        self._curriculum_loader().set_custom_curriculum_learning_schedule(schedule_func_dict)

    def set_data_post_process_func(self, post_process_func: Callable[[Any, dict[str, Any]], Any]) -> None:
        """Changes each batch of the curriculum's loader, with the sampler's state, before it is given out."""
        self._curriculum_loader().post_process = post_process_func

    def _curriculum_loader(self) -> Any:
        if not hasattr(self.training_dataloader, "post_process"):
            raise ConfigError(
                "the engine has no loader with a curriculum; give training_data to initialize, and turn "
                "data_efficiency.data_sampling.curriculum_learning on"
            )
        return self.training_dataloader
