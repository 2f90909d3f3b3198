# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Scalars to TensorBoard, Weights & Biases, Comet and CSV files, from rank 0, under DeepSpeed's names."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from deeptide._C import CometConfig, Config, CsvMonitorConfig, TensorboardConfig, WandbConfig

Event = tuple[str, float, int]  # ("Train/Samples/lr", value, samples so far)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


class Monitor:
    """One place where scalars go. Those of ranks other than 0 write nothing."""

    def __init__(self, monitor_config: Any) -> None:
        self.enabled: bool = monitor_config.enabled

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Writes (name, value, x) each."""
        raise NotImplementedError


class TensorBoardMonitor(Monitor):
    """Event files in output_path/job_name, by torch.utils.tensorboard."""

    def __init__(self, tensorboard_config: TensorboardConfig, rank: int | None = None) -> None:
        super().__init__(tensorboard_config)
        self.output_path, self.job_name = tensorboard_config.output_path, tensorboard_config.job_name
        self.summary_writer: Any = None
        if not self.enabled or (_rank() if rank is None else rank) != 0:
            return
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                f"tensorboard.enabled: {error}; install it ('pip install tensorboard'), or use csv_monitor"
            ) from error
        self.summary_writer = SummaryWriter(os.path.join(self.output_path, self.job_name))

    def write_events(self, event_list: Sequence[Event], flush: bool = True) -> None:
        """Writes (name, value, x) each."""
        if self.summary_writer is None:
            return
        for name, value, x in event_list:
            self.summary_writer.add_scalar(name, value, x)
        if flush:
            self.summary_writer.flush()

    def flush(self) -> None:
        """Writes what is held back."""
        if self.summary_writer is not None:
            self.summary_writer.flush()


class WandbMonitor(Monitor):
    """A run of Weights & Biases; the environment variable WANDB_MODE=offline keeps it on this machine."""

    def __init__(self, wandb_config: WandbConfig, rank: int | None = None) -> None:
        super().__init__(wandb_config)
        self.project, self.group, self.team = wandb_config.project, wandb_config.group, wandb_config.team
        self.run: Any = None
        if not self.enabled or (_rank() if rank is None else rank) != 0:
            return
        try:
            import wandb
        except ImportError as error:
            raise ImportError(f"wandb.enabled: {error}; install it ('pip install wandb')") from error
        self.run = wandb.init(project=self.project, group=self.group, entity=self.team)

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Logs the events of one x together."""
        if self.run is None:
            return
        by_x: dict[int, dict[str, float]] = {}
        for name, value, x in event_list:
            by_x.setdefault(x, {})[name] = value
        for x, values in by_x.items():
            self.run.log(values, step=x)


class CometMonitor(Monitor):
    """An experiment of Comet; of each name a point every `samples_log_interval` samples."""

    def __init__(self, comet_config: CometConfig, rank: int | None = None) -> None:
        super().__init__(comet_config)
        self._interval = comet_config.samples_log_interval
        self._last: dict[str, int] = {}
        self._experiment: Any = None
        if not self.enabled or (_rank() if rank is None else rank) != 0:
            return
        try:
            import comet_ml
        except ImportError as error:
            raise ImportError(f"comet.enabled: {error}; install it ('pip install comet_ml')") from error
        self._experiment = comet_ml.start(
            api_key=comet_config.api_key,
            project=comet_config.project,
            workspace=comet_config.workspace,
            experiment_key=comet_config.experiment_key,
            mode=comet_config.mode,
            online=comet_config.online,
        )
        if comet_config.experiment_name is not None:
            self._experiment.set_name(comet_config.experiment_name)

    @property
    def experiment(self) -> Any:
        """Comet's own object; None on other ranks."""
        return self._experiment

    @property
    def samples_log_interval(self) -> int:
        """Samples between two points of a name."""
        return self._interval

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Logs those events that are due."""
        if self._experiment is None:
            return
        for name, value, x in event_list:
            last = self._last.get(name)
            if last is not None and x - last < self._interval:
                continue
            self._last[name] = x
            self._experiment.log_metric(name=name, value=value, step=x)


class csvMonitor(Monitor):  # noqa: N801 (DeepSpeed's name)
    """One file per name in output_path/job_name, with the columns "step" and the name's last part."""

    def __init__(self, csv_config: CsvMonitorConfig, rank: int | None = None) -> None:
        super().__init__(csv_config)
        self.output_path, self.job_name = csv_config.output_path, csv_config.job_name
        self.log_dir: str | None = None
        if self.enabled and (_rank() if rank is None else rank) == 0:
            self.log_dir = os.path.join(self.output_path, self.job_name)
            os.makedirs(self.log_dir, exist_ok=True)

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Appends a row for each."""
        if self.log_dir is None:
            return
        for name, value, x in event_list:
            path = Path(self.log_dir) / (name.replace("/", "_").replace(" ", "_") + ".csv")
            is_new = not path.exists()
            with path.open("a", newline="") as file:
                writer = csv.writer(file, lineterminator="\n")
                if is_new:
                    writer.writerow(["step", name.rsplit("/", 1)[-1]])
                writer.writerow([x, float(value)])


class MonitorMaster(Monitor):
    """All that the configuration enables; engine.monitor is the engine's, which writes its own scalars there."""

    def __init__(self, monitor_config: Config, rank: int | None = None) -> None:
        self.monitor_config = monitor_config
        self.tb_monitor = TensorBoardMonitor(monitor_config.tensorboard, rank)
        self.wandb_monitor = WandbMonitor(monitor_config.wandb, rank)
        self.comet_monitor = CometMonitor(monitor_config.comet, rank)
        self.csv_monitor = csvMonitor(monitor_config.csv_monitor, rank)
        self.enabled = any(one.enabled for one in (*self.in_python(), self.csv_monitor))

    def in_python(self) -> Iterable[Monitor]:
        """Those that the C++ core cannot write."""
        return (self.tb_monitor, self.wandb_monitor, self.comet_monitor)

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Writes (name, value, x) each, to all of them, on rank 0."""
        for monitor in (*self.in_python(), self.csv_monitor):
            if monitor.enabled:
                monitor.write_events(event_list)

    def take_from(self, core: Any) -> None:
        """Writes the engine's own scalars to those that the core does not write itself."""
        events = [(event.name, event.value, event.x) for event in core.take_events()]
        for monitor in self.in_python():
            if monitor.enabled and events:
                monitor.write_events(events)

    def observes(self) -> bool:
        """Whether any of them wants the engine's scalars from Python."""
        return any(monitor.enabled for monitor in self.in_python())
