# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""deepspeed.ops.op_builder: classes that answer what is there. Nothing is compiled at run time."""

from __future__ import annotations

import importlib
import re
from types import ModuleType
from typing import Any, ClassVar

from deeptide.as_deepspeed import NotSupportedError

# The module that stands for each of DeepSpeed's extensions, or none.
_MODULES = {
    "CPUAdagradBuilder": "deeptide.ops.adagrad",
    "CPUAdamBuilder": "deeptide.ops.adam",
    "CPULionBuilder": "deeptide.ops.lion",
    "FusedAdamBuilder": "deeptide.ops.adam",
    "FusedLambBuilder": "deeptide.ops.lamb",
    "FusedLionBuilder": "deeptide.ops.lion",
    "UtilsBuilder": "deeptide.as_deepspeed.helpers.flat",
}
_NONE = 'transfers to files are the engine\'s own: offload_optimizer and offload_param with "device": "nvme"'
_WITHOUT_WORDS = (
    "EvoformerAttnBuilder FPQuantizerBuilder InferenceBuilder InferenceCoreBuilder "
    "InferenceCutlassBuilder PinMemoryBuilder QuantizerBuilder RaggedOpsBuilder RaggedUtilsBuilder "
    "RandomLTDBuilder SparseAttnBuilder SpatialInferenceBuilder StochasticTransformerBuilder "
    "TransformerBuilder"
)
_ABSENT = {
    "AsyncIOBuilder": _NONE,
    "GDSBuilder": _NONE,
    "DeepCompileBuilder": "engine.compile() compiles by torch",
    **dict.fromkeys(_WITHOUT_WORDS.split(), "there is no such operator here; use torch's"),
}
NAMES = sorted([*_MODULES, *_ABSENT])


class _Loaded:
    """A module whose missing names are errors that say why."""

    def __init__(self, builder: str, module: ModuleType) -> None:
        self._builder, self._module = builder, module

    def __getattr__(self, name: str) -> Any:
        try:
            return getattr(self._module, name)
        except AttributeError:
            if name.startswith("__"):
                raise
            raise NotSupportedError(
                f"{self._builder}().load().{name} is not here: the engine's own kernel steps; there is "
                f"{', '.join(self._module.__all__)}"
            ) from None


class OpBuilder:
    """One operator of DeepSpeed's, by name."""

    NAME: ClassVar[str] = ""
    BUILD_VAR: ClassVar[str] = ""

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.NAME
        self.error_log: str | None = None

    @property
    def _class(self) -> str:
        return type(self).__name__

    def absolute_name(self) -> str:
        """The module that load() gives."""
        return _MODULES.get(self._class, "")

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether load() gives something."""
        if self._class not in _MODULES:
            self.error_log = _ABSENT.get(self._class, "there is no such operator here")
        return self._class in _MODULES

    def load(self, verbose: bool = True) -> Any:
        """The classes and functions that stand for the extension. Errors: NotSupportedError if there are none."""
        if not self.is_compatible():
            raise NotSupportedError(f"{self._class}().load() is not supported by Deeptide: {self.error_log}")
        return _Loaded(self._class, importlib.import_module(_MODULES[self._class]))

    def jit_load(self, verbose: bool = True) -> Any:
        """Loads like `load`: nothing is compiled."""
        return self.load(verbose)

    @staticmethod
    def is_rocm_pytorch() -> bool:
        """Whether torch is a ROCm build."""
        import torch

        return torch.version.hip is not None

    @staticmethod
    def installed_rocm_version() -> tuple[int, int]:
        """ROCm's, of torch; (0, 0) for another build."""
        import torch

        version = str(torch.version.hip or "0.0").split(".")
        return int(version[0]), int(version[1])

    def builder(self) -> None:
        """Errors: NotSupportedError: there are no sources."""
        raise NotSupportedError(f"{self._class}().builder(): no operator is compiled here; kernels are built in")


_NAMED = {
    "DeepCompile": "dc",
    "Inference": "transformer_inference",
    "InferenceCore": "inference_core_ops",
    "InferenceCutlass": "cutlass_ops",
    "RaggedOps": "ragged_device_ops",
    "RaggedUtils": "ragged_ops",
}


def _made(name: str) -> type[OpBuilder]:
    short = name.removesuffix("Builder")
    snake = _NAMED.get(short) or re.sub("(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", short).lower()
    return type(name, (OpBuilder,), {"NAME": snake, "BUILD_VAR": f"DS_BUILD_{snake.upper()}", "__module__": __name__})


globals().update({name: _made(name) for name in NAMES})
ALL_OPS = {builder.NAME: builder for builder in (globals()[name] for name in NAMES)}
COMPATIBLE = {name: builder().is_compatible() for name, builder in ALL_OPS.items()}
CUDAOpBuilder = CPUOpBuilder = TorchCPUOpBuilder = OpBuilder


def get_default_compute_capabilities() -> str:
    """Nothing: no kernel is compiled for a device."""
    return ""
