# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
from deeptide import accelerator as accelerator
from deeptide import checkpoint as checkpoint
from deeptide import comm as comm
from deeptide import config as config
from deeptide import data as data
from deeptide import elasticity as elasticity
from deeptide import engine as engine
from deeptide import ops as ops
from deeptide import optimizer as optimizer
from deeptide import pipeline as pipeline
from deeptide import schedule as schedule
from deeptide import utils as utils
from deeptide import zero as zero
from deeptide._C import CheckpointError as CheckpointError
from deeptide._C import CommError as CommError
from deeptide._C import Config as Config
from deeptide._C import ConfigError as ConfigError
from deeptide._C import DistributedSampler as DistributedSampler
from deeptide._C import DriftError as DriftError
from deeptide._C import NonFiniteError as NonFiniteError
from deeptide._C import StepOutcome as StepOutcome
from deeptide._C import StepResult as StepResult
from deeptide._C import World as World
from deeptide._engine.initialize import initialize as initialize
from deeptide._forecast.plan import plan as plan
from deeptide._model.weights import import_checkpoint as import_checkpoint
from deeptide._model.weights import load_weights as load_weights
from deeptide._process.arguments import add_config_arguments as add_config_arguments
from deeptide._process.arguments import add_tuning_arguments as add_tuning_arguments
from deeptide._process.log import DeeptideWarning as DeeptideWarning
from deeptide._process.preemption import Preempted as Preempted
from deeptide._process.world import init_distributed as init_distributed
from deeptide._process.world import make_world as make_world
from deeptide.data import DataLoader as DataLoader
from deeptide.data import RepeatingLoader as RepeatingLoader
from deeptide.engine import Engine as Engine
from deeptide.optimizer import DeeptideOptimizer as DeeptideOptimizer

__all__ = [
    "CheckpointError",
    "CommError",
    "Config",
    "ConfigError",
    "DataLoader",
    "DeeptideOptimizer",
    "DeeptideWarning",
    "DistributedSampler",
    "DriftError",
    "Engine",
    "NonFiniteError",
    "Preempted",
    "RepeatingLoader",
    "StepOutcome",
    "StepResult",
    "World",
    "__version__",
    "add_config_arguments",
    "add_tuning_arguments",
    "import_checkpoint",
    "init_distributed",
    "initialize",
    "load_weights",
    "make_world",
    "plan",
]

__version__: str
