"""`MeshwrightTrainer`: transformers' `Trainer` with the training of this package.

MeshwrightTrainer(model, args, train_dataset=data, plan="plan.yaml").train()

class MyTrainer(MeshwrightTrainer, SFTTrainer): ...       for trainers that other libraries build on Trainer
"""

from meshwright.compat.transformers.version import check_version
from meshwright.torchvision_import import mend_torchvision

check_version()  # before anything of transformers is imported
mend_torchvision()  # transformers imports it

from meshwright.compat.transformers.trainer import MeshwrightTrainer  # noqa: E402

__all__ = ["MeshwrightTrainer"]
