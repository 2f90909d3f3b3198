# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""get_accelerator(): DeepSpeed's name for the device's part of torch. Asks for a device only when it is called."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class Accelerator:
    """The device that torch would train on: CUDA's where there is one, else the CPU."""

    def __init__(self, kind: str) -> None:
        self._name = kind
        self._communication_backend_name = "nccl" if kind == "cuda" else "gloo"
        self._compile_backend = "inductor"

    @property
    def _cuda(self) -> bool:
        return self._name == "cuda"

    def __getattr__(self, name: str) -> Any:
        if name.endswith("Tensor") and hasattr(torch, name):  # FloatTensor, LongTensor, …
            dtype = getattr(torch, name).dtype
            return functools.partial(torch.tensor, dtype=dtype, device=self.current_device_name())
        if not name.startswith("_") and self._cuda and hasattr(torch.cuda, name):
            return getattr(torch.cuda, name)
        raise AttributeError(f"the {self._name} accelerator has no '{name}' here; use torch's own function")

    # -- devices ------------------------------------------------------------------------------------------------

    def is_available(self) -> bool:
        """Whether it can be used."""
        return torch.cuda.is_available() if self._cuda else True

    def device_name(self, device_index: int | None = None) -> str:
        """Its name: "cpu", "cuda" or "cuda:0"."""
        return self._name if device_index is None or not self._cuda else f"cuda:{device_index}"

    def device(self, device_index: int | None = None) -> torch.device:
        """The same as a torch.device."""
        return torch.device(self.device_name(device_index))

    def current_device(self) -> int:
        """The index of the device in use; on a CPU this rank's number on its machine."""
        return torch.cuda.current_device() if self._cuda else int(os.environ.get("LOCAL_RANK", "0"))

    def current_device_name(self) -> str:
        """The name with the index in use: "cpu" or "cuda:0"."""
        return self.device_name(torch.cuda.current_device()) if self._cuda else "cpu"

    def set_device(self, device_index: int) -> None:
        """Makes a device the one in use; nothing on a CPU."""
        if self._cuda:
            torch.cuda.set_device(device_index)

    def device_count(self) -> int:
        """Devices that ranks of this machine may use; on a CPU LOCAL_SIZE, or its ranks."""
        if self._cuda:
            return torch.cuda.device_count()
        return int(os.environ.get("LOCAL_SIZE", "0")) or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies there."""
        return tensor.device.type == self._name

    def synchronize(self, device_index: int | None = None) -> None:
        """Waits for what was started; nothing on a CPU."""
        if self._cuda:
            torch.cuda.synchronize(device_index)

    def communication_backend_name(self) -> str:
        """The name of its collectives: "nccl" or "gloo"."""
        return self._communication_backend_name

    def is_synchronized_device(self) -> bool:
        """Whether operators end before they return."""
        return not self._cuda

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    def visible_devices_envs(self) -> list[str]:
        """The environment's variables by which a process sees some devices only."""
        return ["CUDA_VISIBLE_DEVICES"]

    def set_visible_devices_envs(self, current_env: dict[str, str], local_accelerator_ids: list[int]) -> None:
        """Sets them in an environment."""
        for name in self.visible_devices_envs():
            current_env[name] = ",".join(map(str, local_accelerator_ids))

    # -- random numbers -----------------------------------------------------------------------------------------

    def random(self) -> Any:
        """torch.random, as of every device."""
        return torch.random

    def manual_seed(self, seed: int) -> None:
        """Seeds this device."""
        (torch.cuda.manual_seed if self._cuda else torch.manual_seed)(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seeds all devices."""
        (torch.cuda.manual_seed_all if self._cuda else torch.manual_seed)(seed)

    def initial_seed(self) -> int:
        """The seed it began with."""
        return torch.cuda.initial_seed() if self._cuda else torch.initial_seed()

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """The generator's state."""
        if not self._cuda:
            return torch.get_rng_state()
        return torch.cuda.get_rng_state(self.current_device() if device_index is None else device_index)

    def set_rng_state(self, state: torch.Tensor, device_index: int | None = None) -> None:
        """Sets it."""
        if not self._cuda:
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, self.current_device() if device_index is None else device_index)

    def default_generator(self, device_index: int) -> torch.Generator:
        """The generator."""
        return torch.cuda.default_generators[device_index] if self._cuda else torch.default_generator

    # -- memory: of the device; on a CPU of the process -----------------------------------------------------------

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes in use."""
        return torch.cuda.memory_allocated(device_index) if self._cuda else _process_bytes("VmRSS")

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Most bytes in use so far."""
        return torch.cuda.max_memory_allocated(device_index) if self._cuda else _process_bytes("VmHWM")

    def memory_reserved(self, device_index: int | None = None) -> int:
        """Bytes that the allocator holds."""
        return torch.cuda.memory_reserved(device_index) if self._cuda else _process_bytes("VmRSS")

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        """Most bytes that it held so far."""
        return torch.cuda.max_memory_reserved(device_index) if self._cuda else _process_bytes("VmHWM")

    memory_cached, max_memory_cached = memory_reserved, max_memory_reserved

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes that there are."""
        if self._cuda:
            return torch.cuda.get_device_properties(device_index or self.current_device()).total_memory
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def available_memory(self, device_index: int | None = None) -> int:
        """Bytes that are free."""
        if self._cuda:
            return self.total_memory(device_index) - self.memory_allocated(device_index)
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        """Torch's statistics of its allocator; on a CPU the bytes in use, now and at most."""
        if self._cuda:
            return torch.cuda.memory_stats(device_index)
        used = {"current": self.memory_allocated(), "peak": self.max_memory_allocated()}
        return {f"allocated_bytes.all.{name}": value for name, value in used.items()}

    def get_rss(self) -> int:
        """Bytes of the process in memory."""
        return _process_bytes("VmRSS")

    reset_rss = get_rss

    @property
    def max_mem(self) -> int:
        """The most so far."""
        return _process_bytes("VmHWM")

    def empty_cache(self) -> None:
        """Gives unused memory back; nothing on a CPU."""
        if self._cuda:
            torch.cuda.empty_cache()

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Forgets the peaks; nothing on a CPU."""
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(device_index)

    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    def pin_empty(self, *size: Any, **options: Any) -> torch.Tensor:
        """torch.empty, page-locked where there is a device to copy to."""
        return torch.empty(*size, **options, pin_memory=self._cuda)

    def pin_empty_like(self, tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        """torch.empty_like, likewise."""
        return torch.empty_like(tensor, device="cpu", pin_memory=self._cuda, **options)

    def pin_memory_alignment(self) -> int:
        """Bytes by which page-locked memory is aligned; 1: by torch's own."""
        return 1

    def unpin_memory(self, tensor: torch.Tensor) -> None:
        """Has no effect: torch gives page-locked memory back with its tensor."""

    def pin_memory(
        self, tensor: torch.Tensor, align_bytes: int = 1, make_copy: bool = True, match_shape: bool = True
    ) -> torch.Tensor:
        """Page-locked, where there is a device to copy to. The arguments but the first have no effect."""
        return tensor.pin_memory() if self._cuda else tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether it is page-locked."""
        return tensor.is_pinned() if self._cuda else False

    # -- types, streams, marks ----------------------------------------------------------------------------------

    def is_bf16_supported(self) -> bool:
        """Whether bfloat16 is worth while."""
        return torch.cuda.is_bf16_supported() if self._cuda else True

    def is_fp16_supported(self) -> bool:
        """Whether float16 is."""
        return True

    def is_fp64_supported(self) -> bool:
        """Whether float64 is."""
        return True

    def prefer_triton_grouped_mm(self) -> bool:
        """False: nothing here uses Triton."""
        return False

    def supports_nvtx_domain(self) -> bool:
        """Whether marks have domains."""
        return False

    def supported_dtypes(self) -> list[torch.dtype]:
        """The types that models may be in."""
        return [torch.float32, torch.float16, torch.bfloat16]

    def is_triton_supported(self) -> bool:
        """False: nothing here uses Triton."""
        return False

    @property
    def Stream(self) -> Any:  # noqa: N802 - DeepSpeed's name
        """The class of streams; None on a CPU."""
        return torch.cuda.Stream if self._cuda else None

    @property
    def Event(self) -> Any:  # noqa: N802 - likewise
        """The class of events; None on a CPU."""
        return torch.cuda.Event if self._cuda else None

    def current_stream(self, device_index: int | None = None) -> Any:
        """The stream in use; None on a CPU."""
        return torch.cuda.current_stream(device_index) if self._cuda else None

    def default_stream(self, device_index: int | None = None) -> Any:
        """The stream at first; None on a CPU."""
        return torch.cuda.default_stream(device_index) if self._cuda else None

    def is_current_stream_capturing(self) -> bool:
        """Whether a graph records the stream."""
        return self._cuda and torch.cuda.is_current_stream_capturing()

    def create_graph(self) -> Any:
        """A graph of operators; None on a CPU."""
        return torch.cuda.CUDAGraph() if self._cuda else None

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> AbstractContextManager[Any]:
        """Inside, operators are recorded into the graph; on a CPU they run."""
        return torch.cuda.graph(graph, pool, stream) if self._cuda else nullcontext()

    def replay_graph(self, graph: Any) -> None:
        """Runs a graph; nothing on a CPU."""
        if self._cuda:
            graph.replay()

    def stream(self, stream: object) -> AbstractContextManager[Any]:
        """Inside, that stream is in use."""
        return torch.cuda.stream(stream) if self._cuda else nullcontext()  # type: ignore[arg-type, unused-ignore]

    def range_push(self, message: str) -> None:
        """A mark for a profiler; nothing on a CPU."""
        if self._cuda:
            torch.cuda.nvtx.range_push(message)

    def range_pop(self) -> None:
        """Ends it."""
        if self._cuda:
            torch.cuda.nvtx.range_pop()

    def get_compile_backend(self) -> str:
        """The backend that engine.compile() takes: torch's default, or what set_compile_backend named."""
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        """Names another. Errors: ValueError if torch has none of that name."""
        known = torch._dynamo.list_backends(exclude_tags=())
        if backend not in known:
            raise ValueError(f"{backend} not supported by {self._name}; torch has {', '.join(known)}")
        self._compile_backend = backend

    def export_envs(self) -> list[str]:
        """The beginnings of variables that the launcher hands to other hosts for this device."""
        return ["NCCL", "LD_LIBRARY", "PATH"] if self._cuda else []

    # -- operators ------------------------------------------------------------------------------------------------

    def op_builder_dir(self) -> str:
        """The module of builders."""
        return "deepspeed.ops.op_builder"

    def get_op_builder(self, class_name: str) -> Any:
        """The class of deepspeed.ops.op_builder of that name; None where DeepSpeed has none."""
        from deeptide.as_deepspeed.helpers import op_builders

        return getattr(op_builders, class_name) if class_name in op_builders.NAMES else None

    def create_op_builder(self, class_name: str) -> Any:
        """An object of that class, or None."""
        builder = self.get_op_builder(class_name)
        return None if builder is None else builder()

    def lazy_call(self, callback: Callable[[], object]) -> None:
        """Calls it, when the device is there."""
        if self._cuda:
            torch.cuda._lazy_call(callback)
        else:
            callback()


class CPUAccelerator(Accelerator):
    """That of the CPU, wherever DS_ACCELERATOR points."""

    def __init__(self) -> None:
        super().__init__("cpu")


class CUDAAccelerator(Accelerator):
    """That of CUDA."""

    def __init__(self) -> None:
        super().__init__("cuda")


def _process_bytes(field: str) -> int:
    with open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    return 0


@functools.cache
def get_accelerator() -> Accelerator:
    """The accelerator: "cuda" where torch finds a device, else "cpu"; DS_ACCELERATOR chooses."""
    kind = os.environ.get("DS_ACCELERATOR") or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind not in ("cuda", "cpu"):
        raise ValueError(f"DS_ACCELERATOR: got {kind!r}, expected cuda or cpu; leave it out to have torch's choice")
    return Accelerator(kind)


def is_current_accelerator_supported() -> bool:
    """Whether the accelerator is one of those known here."""
    return get_accelerator()._name in ("cuda", "cpu")
