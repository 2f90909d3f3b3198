# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Metrics of every sample, computed in parallel and sorted into the index files that a curriculum reads."""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Subset

from deeptide._C import ConfigError
from deeptide.efficiency.indexed_dataset import (
    MMapIndexedDataset,
    code,
    find_fit_int_dtype,
    write_rows,
)

_SINGLE, _SUM = "single_value_per_sample", "accumulate_value_over_samples"


def split_index(start_idx: int, end_idx: int, num_partitions: int) -> list[tuple[int, int]]:
    """Cuts a range into parts whose sizes differ by one at most."""
    bounds = [int(bound) for bound in numpy.linspace(start_idx, end_idx, dtype=int, num=num_partitions + 1)]
    return list(itertools.pairwise(bounds))


def _array(values: Any, name: str, dtype: Any) -> Any:
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().numpy()
    if not isinstance(values, numpy.ndarray):
        raise ConfigError(f"metric {name!r}: its function returned {type(values).__name__}, expected a tensor or array")
    if dtype is not None and code(dtype) != code(values.dtype):
        raise ConfigError(f"metric {name!r}: its function returned {values.dtype}, expected metric_dtype {dtype}")
    code(values.dtype)
    return values


class DataAnalyzer:
    """Maps metrics over a dataset by workers and threads, then reduces what they wrote into index files.

    metric_functions: each takes a batch and returns integers, one per sample for "single_value_per_sample", or values
    to be added up for "accumulate_value_over_samples". Worker w of num_workers runs `run_map`; one of them `run_reduce`
    once all have. Files lie in save_path/<metric>, as DeepSpeed 0.19.8 names them. Threads are processes by fork.
    """

    def __init__(
        self,
        dataset: Any,
        num_workers: int = 1,
        worker_id: int = 0,
        num_threads: int = 1,
        num_threads_reduce: int = 1,
        specific_threads: Sequence[int] = (),
        batch_size: int = 1,
        metric_names: Sequence[str] = (),
        metric_functions: Sequence[Callable[[Any], Any]] = (),
        metric_types: Sequence[str] = (),
        metric_dtypes: Sequence[Any] = (),
        save_path: str | os.PathLike[str] = "./",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        custom_map_init: Callable[..., Any] | None = None,
        custom_map_update: Callable[..., Any] | None = None,
        custom_map_finalize: Callable[..., Any] | None = None,
        custom_reduce: Callable[..., Any] | None = None,
        sample_indices: Sequence[int] | None = None,
    ) -> None:
        if not len(metric_names) == len(metric_functions) == len(metric_types):
            raise ConfigError(
                f"DataAnalyzer: {len(metric_names)} metric_names, {len(metric_functions)} metric_functions and "
                f"{len(metric_types)} metric_types, expected as many of each"
            )
        for kind in metric_types:
            if kind not in (_SINGLE, _SUM):
                raise ConfigError(f"DataAnalyzer: metric type {kind!r}, expected {_SINGLE!r} or {_SUM!r}")
        self.dataset = dataset
        self.num_workers, self.worker_id = num_workers, worker_id
        self.num_threads, self.num_threads_reduce = max(num_threads or 1, 1), num_threads_reduce
        self.specific_threads = list(specific_threads)
        self.batch_size = batch_size
        self.metric_names, self.metric_functions = list(metric_names), list(metric_functions)
        self.metric_types = list(metric_types)
        self.metric_dtypes = list(metric_dtypes) or [None] * len(self.metric_names)
        self.save_path = os.path.abspath(save_path)
        self.collate_fn = collate_fn
        self.custom_map_init, self.custom_map_update = custom_map_init, custom_map_update
        self.custom_map_finalize, self.custom_reduce = custom_map_finalize, custom_reduce
        self.sample_indices = sample_indices

    def _part(self, name: str, worker: int, thread: int) -> str:
        return os.path.join(self.save_path, name, f"worker{worker}_thread{thread}", name)

    def _sample_ids(self, data: Any, first: int, count: int) -> list[int]:
        if isinstance(data, dict) and "index" in data:
            return [int(data["index"][row][0]) for row in range(count)]
        ids = range(first, first + count)
        return list(ids) if self.sample_indices is None else [int(self.sample_indices[i]) for i in ids]

    def run_map_helper(self, thread_id: int) -> None:
        """Computes one thread's part of this worker's samples, and writes it."""
        start, end = self.thread_splits[thread_id]
        loader: Any = DataLoader(
            Subset(self.dataset, range(start, end)), batch_size=self.batch_size, collate_fn=self.collate_fn
        )
        if self.custom_map_update is not None:
            self._run_custom_map(loader, thread_id, start)
            return
        values: list[list[Any]] = [[] for _ in self.metric_names]
        ids: list[int] = []
        for data in loader:
            count = min(self.batch_size, end - start - len(ids))
            ids += self._sample_ids(data, start + len(ids), count)
            for found, name, function, kind, dtype in zip(
                values, self.metric_names, self.metric_functions, self.metric_types, self.metric_dtypes, strict=True
            ):
                array = _array(function(data), name, dtype)
                if kind == _SINGLE:
                    if array.size != count:
                        raise ConfigError(f"metric {name!r}: {array.size} values for a batch of {count} samples")
                    found.append(array.reshape(-1))
                else:
                    found[:] = [found[0] + array if found else array]
        for found, name, kind in zip(values, self.metric_names, self.metric_types, strict=True):
            self._write_part(name, kind, thread_id, found, ids)

    def _write_part(self, name: str, kind: str, thread_id: int, found: list[Any], ids: list[int]) -> None:
        part = self._part(name, self.worker_id, thread_id)
        os.makedirs(os.path.dirname(part), exist_ok=True)
        if kind == _SUM:
            if found:
                write_rows(f"{part}_metric_value", found[0].dtype, [found[0].reshape(-1)])
            return
        values = numpy.concatenate(found) if found else numpy.zeros(0, numpy.int64)
        write_rows(f"{part}_sample_to_metric", values.dtype, values.reshape(-1, 1))
        write_rows(f"{part}_sample_ids", numpy.int64, [numpy.array(ids, numpy.int64)])

    def _run_custom_map(self, loader: Any, thread_id: int, start: int) -> None:
        assert self.custom_map_update is not None
        if self.custom_map_init is None or self.custom_map_finalize is None:
            raise ConfigError("DataAnalyzer: custom_map_update needs custom_map_init and custom_map_finalize as well")
        results = self.custom_map_init(
            thread_id, self.metric_names, self.metric_types, self.metric_dtypes, self.save_path, self.worker_id
        )
        for number, data in enumerate(loader):
            first = start + number * self.batch_size
            self.custom_map_update(data, self.metric_types, self.metric_dtypes, self.metric_functions, results, first)
        self.custom_map_finalize(self.metric_types, self.metric_dtypes, results)

    def run_map(self) -> None:
        """Computes this worker's part. Errors: ConfigError if one of its threads ends with an error."""
        self.worker_splits = split_index(0, len(self.dataset), self.num_workers)
        self.thread_splits = split_index(*self.worker_splits[self.worker_id], self.num_threads)
        threads = self.specific_threads or range(self.num_threads)
        if self.num_threads == 1:
            self.run_map_helper(0)
            return
        context = multiprocessing.get_context("fork")
        processes = [context.Process(target=self.run_map_helper, args=(thread,)) for thread in threads]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        failed = [process.exitcode for process in processes if process.exitcode]
        if failed:
            raise ConfigError(
                f"DataAnalyzer: {len(failed)} of {len(processes)} threads of worker {self.worker_id} failed; their "
                "errors stand above"
            )

    def run_reduce(self) -> None:
        """Merges what all workers wrote. Errors: ConfigError where a worker's files are missing."""
        if self.custom_reduce is not None:
            self.custom_reduce(
                self.dataset,
                self.metric_names,
                self.metric_types,
                self.save_path,
                self.num_workers,
                self.num_threads,
                self.num_threads_reduce,
            )
            return
        for name, kind in zip(self.metric_names, self.metric_types, strict=True):
            if kind == _SINGLE:
                self._reduce_samples(name)
            else:
                self._reduce_sum(name)

    def _parts(self, name: str) -> list[str]:
        return [self._part(name, w, t) for w in range(self.num_workers) for t in range(self.num_threads)]

    def _reduce_sum(self, name: str) -> None:
        parts = [f"{part}_metric_value" for part in self._parts(name)]
        values = [MMapIndexedDataset(part)[0] for part in parts if MMapIndexedDataset.exists(part)]
        if not values:
            raise ConfigError(f"DataAnalyzer: no worker wrote metric {name!r} into {self.save_path}; run run_map first")
        total = values[0].copy()
        for value in values[1:]:
            total += value
        target = os.path.join(self.save_path, name, f"{name}_metric_value")
        write_rows(target, find_fit_int_dtype(total.min(), total.max()), [total])

    def _reduce_samples(self, name: str) -> None:
        found, ids = [], []
        for part in self._parts(name):
            rows = MMapIndexedDataset(f"{part}_sample_to_metric")
            found += [numpy.concatenate(rows[:]).astype(numpy.int64)] if len(rows) else []
            ids.append(MMapIndexedDataset(f"{part}_sample_ids")[0])
        values = numpy.concatenate(found) if found else numpy.zeros(0, numpy.int64)
        samples = numpy.concatenate(ids)
        if len(values) != len(self.dataset):
            raise ConfigError(
                f"DataAnalyzer: the workers' files of metric {name!r} hold {len(values)} samples, the data set has "
                f"{len(self.dataset)}; run run_map of every worker with the same data first"
            )
        if not len(values):
            raise ConfigError(f"DataAnalyzer: metric {name!r} of an empty data set")
        prefix = os.path.join(self.save_path, name, name)
        value_type = find_fit_int_dtype(values.min(), values.max())
        sample_type = find_fit_int_dtype(0, len(self.dataset) - 1)
        write_rows(f"{prefix}_sample_to_metric", value_type, values.reshape(-1, 1))
        unique, counts = numpy.unique(values, return_counts=True)
        # Stable: samples of one value stay in the order of the workers.
        groups = numpy.split(samples[numpy.argsort(values, kind="stable")], numpy.cumsum(counts)[:-1])
        write_rows(f"{prefix}_index_to_metric", value_type, unique.reshape(-1, 1))
        write_rows(f"{prefix}_index_to_sample", sample_type, groups)
        step = max(1, len(groups) // 100)
        merged = [numpy.concatenate(groups[first : first + step]) for first in range(0, len(groups), step)]
        write_rows(f"{prefix}_index_to_sample_percentile_merged", sample_type, merged)

    def run_map_reduce(self, comm_group: Any = None) -> None:
        """Maps on every rank, reduces on worker 0; all ranks return when the files are there. Collective."""
        together = dist.is_available() and dist.is_initialized() and self.num_workers > 1
        self.run_map()
        if together:
            dist.barrier(group=comm_group)
        if self.worker_id == 0:
            self.run_reduce()
        if together:
            dist.barrier(group=comm_group)


class DistributedDataAnalyzer(DataAnalyzer):
    """A DataAnalyzer whose workers are the ranks of a group; they share the folder `save_path`."""

    def __init__(
        self,
        dataset: Any,
        num_workers: int = 1,
        num_threads: int = 1,
        worker_id: int = 0,
        batch_size: int = 1,
        metric_names: Sequence[str] = (),
        metric_functions: Sequence[Callable[[Any], Any]] = (),
        metric_types: Sequence[str] = (),
        save_path: str | os.PathLike[str] = "./",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        device: Any = None,
        comm_group: Any = None,
        sample_indices: Sequence[int] | None = None,
    ) -> None:
        if comm_group is not None:
            num_workers, worker_id = dist.get_world_size(comm_group), dist.get_rank(comm_group)
        self.comm_group = comm_group
        super().__init__(
            dataset,
            num_workers=num_workers,
            worker_id=worker_id,
            num_threads=num_threads,
            batch_size=batch_size,
            metric_names=metric_names,
            metric_functions=metric_functions,
            metric_types=metric_types,
            save_path=save_path,
            collate_fn=collate_fn,
            sample_indices=sample_indices,
        )

    def run_map_reduce(self, comm_group: Any = None) -> None:
        """Maps on every rank, reduces on worker 0. Collective."""
        super().run_map_reduce(comm_group or self.comm_group)
