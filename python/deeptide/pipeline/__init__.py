# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Pipelines: a model as a list of layers that stages share out, and their schedules, run and on paper."""

from deeptide._C import PipelineSchedule, SimulatedStep, StageAction, StageCosts, StageInstruction
from deeptide.pipeline.cutting.calls import show_example
from deeptide.pipeline.layers import LayerSpec, TiedLayerSpec
from deeptide.pipeline.module import PipelineModule
from deeptide.pipeline.schedules import instructions, published_idle_time, published_peak_activations, simulate

__all__ = [
    "LayerSpec",
    "PipelineModule",
    "PipelineSchedule",
    "SimulatedStep",
    "StageAction",
    "StageCosts",
    "StageInstruction",
    "TiedLayerSpec",
    "instructions",
    "published_idle_time",
    "published_peak_activations",
    "show_example",
    "simulate",
]
