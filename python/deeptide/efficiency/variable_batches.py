# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Batches of similar numbers of tokens, and a schedule that scales its rates to their sizes."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch
import torch.utils.data

from deeptide import _C
from deeptide._C import ConfigError
from deeptide._process.log import say
from deeptide.efficiency.analyzer import DistributedDataAnalyzer
from deeptide.efficiency.indexed_dataset import MMapIndexedDataset

MicroBatches = list[tuple[int, list[int]]]


def batch_by_seqlens(
    seqlens: Sequence[int],
    max_tokens: int,
    sequence_ids_per_mb: Sequence[int] | None = None,
    min_batch_size: int = 1,
    max_batch_size: int | None = None,
    sequence_picking_order: str = "dataloader",
    effective_batch_size: int = 1,
    required_microbatches_of_same_size: bool = False,
    verbose: bool = False,
    seed: int | None = None,
) -> tuple[MicroBatches, list[int], list[int]]:
    """(batch number and samples of each micro-batch, samples of each batch, longest sample of each batch).

    A batch is `effective_batch_size` micro-batches of at most `max_tokens`. sequence_ids_per_mb: the samples to use;
    all without it. Errors: ConfigError for limits that are not positive, or samples that do not suffice for one batch.
    """
    lengths = [int(length) for length in seqlens]
    order = [int(i) for i in (range(len(lengths)) if sequence_ids_per_mb is None else sequence_ids_per_mb)]
    if sequence_picking_order == "random":
        random.Random(seed).shuffle(order)
    elif sequence_picking_order == "seqlen":
        order.sort(key=lambda sample: (lengths[sample], sample))
    elif sequence_picking_order != "dataloader":
        raise ConfigError(
            f"sequence_picking_order: got {sequence_picking_order!r}, expected 'dataloader', 'random' or 'seqlen'"
        )
    found, sizes, longest, left_out = _C.batches_by_length(
        lengths,
        order,
        max_tokens,
        min_batch_size or 1,
        max_batch_size,
        effective_batch_size,
        required_microbatches_of_same_size,
    )
    if left_out:
        say(f"batches by length leave {len(left_out)} samples out that exceed {max_tokens} tokens", "warning")
    if verbose:
        for number, (size, most) in enumerate(zip(sizes, longest, strict=True)):
            say(f"batch {number}: {size} samples, the longest of {most} tokens")
    return [(i // effective_batch_size, samples) for i, samples in enumerate(found)], sizes, longest


def scale_lr(base_batch_size: int, batch_size: int, base_lr: float = 1, method: str | None = "linear") -> float:
    """The rate for `batch_size` where `base_lr` is meant for `base_batch_size`; method: linear, sqrt or none."""
    return _C.scaled_rate(base_lr, base_batch_size, batch_size, str(method).lower())


class _Collate:
    """Joins the samples of micro-batches; of all workers, so no function inside another."""

    def __init__(
        self,
        dataset: Any,
        longest: list[int] | None,
        collate: Callable[[list[Any]], Any] | None,
        pad: Callable[[Any, int], Any] | None,
    ) -> None:
        self.dataset, self.longest, self.collate, self.pad = dataset, longest, collate, pad

    def __call__(self, micro_batches: MicroBatches) -> Any:
        batch = []
        for number, samples in micro_batches:
            data = [self.dataset[sample] for sample in samples]
            if self.longest is not None and self.pad is not None:
                data = [self.pad(sample, self.longest[number]) for sample in data]
            batch += data
        return batch if self.collate is None else self.collate(batch)


def dataloader_for_variable_batch_size(
    dataset: Any,
    microbatch_ids: MicroBatches,
    batch_max_seqlens: list[int],
    dataloader_rank: int = 0,
    dataloader_batch_size: int = 1,
    dataloader_num_replicas: int = 1,
    dataloader_collate_fn: Callable[[list[Any]], Any] | None = None,
    dataloader_num_workers: int = 2,
    dataloader_pin_memory: bool = False,
    required_microbatches_of_same_seqlen: bool = False,
    sample_padding_fn: Callable[[Any, int], Any] | None = None,
) -> tuple[Any, dict[str, Any]]:
    """A loader of this rank's micro-batches, every dataloader_num_replicas-th, and its arguments for deepspeed_io."""
    if required_microbatches_of_same_seqlen and sample_padding_fn is None:
        raise ConfigError("micro-batches of one sequence length need sample_padding_fn, which pads a sample to it")
    sampler: Any = torch.utils.data.DistributedSampler(
        microbatch_ids,  # type: ignore[arg-type]
        num_replicas=dataloader_num_replicas,
        rank=dataloader_rank,
        shuffle=False,
    )
    longest = batch_max_seqlens if required_microbatches_of_same_seqlen else None
    collate = _Collate(dataset, longest, dataloader_collate_fn, sample_padding_fn)
    loader: Any = torch.utils.data.DataLoader(
        microbatch_ids,  # type: ignore[arg-type]
        batch_size=dataloader_batch_size,
        sampler=sampler,
        num_workers=dataloader_num_workers,
        collate_fn=collate,
        pin_memory=dataloader_pin_memory and torch.cuda.is_available(),
    )
    return loader, {
        "dataset": microbatch_ids,
        "batch_size": dataloader_batch_size,
        "pin_memory": dataloader_pin_memory,
        "data_sampler": sampler,
        "collate_fn": collate,
        "num_local_io_workers": dataloader_num_workers,
    }


class _Constant:
    """A schedule that leaves the groups' rates as they are."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self, epoch: int | None = None) -> None:
        """Does nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Does nothing."""


class VariableBatchSizeLR:
    """Another schedule's rates, scaled to each step's batch. `batch_sizes`: of step 0, 1, …; they begin again."""

    def __init__(
        self,
        lr_scheduler: Any,
        base_batch_size: int,
        batch_sizes: Sequence[int],
        dataloader: Any = None,
        lr_scaling_method: str | None = "linear",
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        self.base_lr_scheduler = lr_scheduler
        self.base_batch_size = base_batch_size
        self.batch_sizes = [int(size) for size in batch_sizes]
        self.dataloader = dataloader
        self.lr_scaling_method = lr_scaling_method
        self.last_epoch = max(last_epoch, 0)
        self.verbose = verbose
        self.base_lrs = [float(group["lr"]) for group in self.optimizer.param_groups]
        self._scale()

    @property
    def optimizer(self) -> Any:
        """The schedule's optimizer."""
        return self.base_lr_scheduler.optimizer

    def _scale(self) -> None:
        """Sets the groups' rates to the unscaled ones, times the factor of the batch that comes next."""
        size = self.batch_sizes[self.last_epoch % len(self.batch_sizes)]
        for group, rate in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = scale_lr(self.base_batch_size, size, rate, self.lr_scaling_method)
        if self.verbose:
            say(f"step {self.last_epoch}: {size} samples, rates {self.get_lr()} from {self.base_lrs}")

    def step(self, epoch: int | None = None) -> None:
        """Goes on to the next step, or to `epoch`: the schedule first, from its own rates, then the batch's factor."""
        for group, rate in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = rate
        if epoch is None:
            self.base_lr_scheduler.step()
        else:
            self.base_lr_scheduler.step(epoch)
        self.base_lrs = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        self._scale()

    def get_lr(self) -> list[float]:
        """The scaled rates."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_last_lr(self) -> list[float]:
        """The rates before they are scaled."""
        return self.base_lrs

    def state_dict(self) -> dict[str, Any]:
        """The schedule's own state, and how far it went."""
        return {
            "base_lr_scheduler": self.base_lr_scheduler.state_dict(),
            "base_batch_size": self.base_batch_size,
            "lr_scaling_method": self.lr_scaling_method,
            "batch_sizes": self.batch_sizes,
            "base_lrs": self.base_lrs,
            "last_epoch": self.last_epoch,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on where the state was, and scales the rates of the step that comes next."""
        self.base_lr_scheduler.load_state_dict(state_dict["base_lr_scheduler"])
        for name in ("base_batch_size", "lr_scaling_method", "batch_sizes", "base_lrs", "last_epoch"):
            setattr(self, name, state_dict[name])
        self._scale()


def lr_scheduler_for_variable_batch_size(
    base_batch_size: int,
    batch_sizes: Sequence[int],
    dataloader: Any,
    lr_scheduler_or_optimizer: Any,
    lr_scaling_method: str | None = "linear",
    verbose: bool = False,
) -> VariableBatchSizeLR:
    """A schedule over another, or over an optimizer's constant rates."""
    base = lr_scheduler_or_optimizer
    if not hasattr(base, "optimizer"):
        if not hasattr(base, "param_groups"):
            raise ConfigError(f"got {type(base).__name__}, expected an optimizer or a schedule of one")
        base = _Constant(base)
    return VariableBatchSizeLR(base, base_batch_size, batch_sizes, dataloader, lr_scaling_method, verbose=verbose)


def get_dataloader_and_lr_scheduler_for_variable_batch_size(
    dataset: Any,
    dataset_seqlens: Sequence[int],
    max_tokens: int,
    effective_batch_size: int,
    dataset_filter_ids: Sequence[int] | None = None,
    lr_scaling_method: str | None = "linear",
    min_batch_size: int = 1,
    max_batch_size: int | None = None,
    sequence_picking_order: str = "dataloader",
    dataloader_batch_size: int = 1,
    dataloader_rank: int = 0,
    dataloader_num_replicas: int = 1,
    dataloader_num_workers: int = 0,
    dataloader_collate_fn: Callable[[list[Any]], Any] | None = None,
    dataloader_pin_memory: bool = False,
    lr_scheduler_or_optimizer: Any = None,
    required_microbatches_of_same_size: bool = False,
    required_microbatches_of_same_seqlen: bool = False,
    sample_padding_fn: Callable[[Any, int], Any] | None = None,
    verbose: bool = False,
    seed: int | None = None,
) -> tuple[Any, VariableBatchSizeLR, dict[str, Any]]:
    """(loader, schedule, the loader's arguments for deepspeed_io); see batch_by_seqlens."""
    micro_batches, sizes, longest = batch_by_seqlens(
        dataset_seqlens,
        max_tokens,
        dataset_filter_ids,
        min_batch_size,
        max_batch_size,
        sequence_picking_order,
        effective_batch_size,
        required_microbatches_of_same_size,
        verbose,
        seed,
    )
    loader, arguments = dataloader_for_variable_batch_size(
        dataset,
        micro_batches,
        longest,
        dataloader_rank,
        dataloader_batch_size,
        dataloader_num_replicas,
        dataloader_collate_fn,
        dataloader_num_workers,
        dataloader_pin_memory,
        required_microbatches_of_same_seqlen,
        sample_padding_fn,
    )
    schedule = lr_scheduler_for_variable_batch_size(
        effective_batch_size, sizes, loader, lr_scheduler_or_optimizer, lr_scaling_method, verbose
    )
    return loader, schedule, arguments


def _analyzed_lengths(dataset: Any, engine: Any, folder: str, collate_fn: Any, length_fn: Any) -> list[int]:
    """The metric "seqlen" of the DataAnalyzer, run first where its files are missing. Collective."""
    name = os.path.join(folder, "seqlen", "seqlen_sample_to_metric")
    if not MMapIndexedDataset.exists(name):
        if length_fn is None:
            raise ConfigError(
                f"dynamic_batching: there is no {name}.bin; give dataset_seqlens, or batch_seqlens_fn, from which the "
                "DataAnalyzer writes it"
            )
        DistributedDataAnalyzer(
            dataset,
            num_workers=engine.world.size,
            worker_id=engine.world.rank,
            batch_size=1024,
            metric_names=["seqlen"],
            metric_functions=[length_fn],
            metric_types=["single_value_per_sample"],
            save_path=folder,
            collate_fn=collate_fn,
        ).run_map_reduce()
    rows = MMapIndexedDataset(name)
    if len(rows) != len(dataset):
        raise ConfigError(f"{name} holds {len(rows)} samples, the data set {len(dataset)}; delete it to analyze again")
    return [int(length) for length in numpy.concatenate(rows[:])]


def get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed(
    dataset: Any,
    engine: Any,
    dataset_seqlens: Sequence[int] | None = None,
    dataset_filter_ids: Sequence[int] | None = None,
    dataloader_collate_fn: Callable[[list[Any]], Any] | None = None,
    sample_padding_fn: Callable[[Any, int], Any] | None = None,
    batch_seqlens_fn: Callable[[Any], Any] | None = None,
) -> tuple[Any, VariableBatchSizeLR, dict[str, Any]]:
    """The same by the engine's section "dynamic_batching". Set engine.lr_scheduler to the schedule. Collective.

    Lengths: dataset_seqlens, else the DataAnalyzer's in metrics_path, else by batch_seqlens_fn, written there.
    """
    whole = json.loads(_C.config_section(engine._config, "data_efficiency"))
    sampling = whole["data_sampling"]
    batching = sampling["dynamic_batching"]
    if not batching["enabled"]:
        raise ConfigError("data_efficiency.data_sampling.dynamic_batching is off; set its enabled to true")
    if dataset_seqlens is None:
        if batching["metrics_path"] is None:
            raise ConfigError("dynamic_batching.metrics_path: missing; give it, or dataset_seqlens")
        dataset_seqlens = _analyzed_lengths(
            dataset, engine, batching["metrics_path"], dataloader_collate_fn, batch_seqlens_fn
        )
    return get_dataloader_and_lr_scheduler_for_variable_batch_size(
        dataset,
        dataset_seqlens,
        batching["max_tokens"],
        engine.train_batch_size(),
        dataset_filter_ids=dataset_filter_ids,
        lr_scaling_method=batching["lr_scaling_method"],
        min_batch_size=batching["min_batch_size"],
        max_batch_size=batching["max_batch_size"],
        sequence_picking_order=batching["sequence_picking_order"],
        dataloader_batch_size=engine.train_micro_batch_size_per_gpu(),
        dataloader_rank=engine.world.rank,
        dataloader_num_replicas=engine.world.size,
        dataloader_num_workers=sampling["num_workers"],
        dataloader_collate_fn=dataloader_collate_fn,
        dataloader_pin_memory=sampling["pin_memory"],
        lr_scheduler_or_optimizer=engine.lr_scheduler or engine.optimizer,
        sample_padding_fn=sample_padding_fn,
        verbose=batching["verbose"],
        seed=whole["seed"],
    )
