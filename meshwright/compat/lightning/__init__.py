"""Strategies for Lightning's `Trainer` and `Fabric`, registered as `meshwright` when this package is imported.

import meshwright.compat.lightning

Trainer(strategy="meshwright")
Trainer(strategy=MeshwrightStrategy(plan="plan.yaml"))
Fabric(strategy=MeshwrightFabricStrategy(plan="plan.yaml"))
"""

from meshwright.compat.versions import check_versions
from meshwright.user.torchvision_import import mend_torchvision

check_versions(__name__, {"lightning": "2.6.6"})  # before anything of Lightning is imported
mend_torchvision()  # Lightning imports torchvision where it is installed

from lightning.fabric.strategies import STRATEGY_REGISTRY  # noqa: E402
from lightning.pytorch.strategies import StrategyRegistry  # noqa: E402

from meshwright.compat.lightning.fabric_strategy import MeshwrightFabricStrategy  # noqa: E402
from meshwright.compat.lightning.trainer_strategy import MeshwrightStrategy  # noqa: E402

__all__ = ["MeshwrightFabricStrategy", "MeshwrightStrategy"]

_DESCRIPTION = "Replicates or shards the model under a plan of Meshwright"
StrategyRegistry.register("meshwright", MeshwrightStrategy, description=_DESCRIPTION, override=True)
STRATEGY_REGISTRY.register("meshwright", MeshwrightFabricStrategy, description=_DESCRIPTION, override=True)
