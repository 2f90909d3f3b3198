# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Strategies for Lightning and Fabric, on CPU and GPU: importing this module registers them by name.

import deeptide.lightning
Trainer(accelerator="cpu", devices=2, strategy="deeptide")             # ZeRO stage 2; also "deeptide_stage_3" ...
Trainer(strategy=deeptide.lightning.DeeptideStrategy("ds_config.json"))
Fabric(strategy=deeptide.lightning.DeeptideFabricStrategy(stage=3))
"""

from deeptide.lightning._fabric import DeeptideFabricStrategy
from deeptide.lightning._trainer import DeeptideStrategy

__all__ = ["DeeptideFabricStrategy", "DeeptideStrategy"]


def _register() -> None:
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.pytorch.strategies import StrategyRegistry

    for registry, strategy in ((StrategyRegistry, DeeptideStrategy), (STRATEGY_REGISTRY, DeeptideFabricStrategy)):
        registry.register("deeptide", strategy, description="Deeptide, ZeRO stage 2", override=True)
        for stage in range(4):
            description = f"Deeptide, ZeRO stage {stage}"
            registry.register(f"deeptide_stage_{stage}", strategy, description=description, override=True, stage=stage)


_register()
