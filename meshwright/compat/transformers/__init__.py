"""`MeshwrightTrainer`: transformers' `Trainer` with the training of this package.

MeshwrightTrainer(model, args, train_dataset=data, plan="plan.yaml").train()

class MyTrainer(MeshwrightTrainer, SFTTrainer): ...       for trainers that other libraries build on Trainer
"""

from meshwright.compat.versions import check_versions
from meshwright.user.torchvision_import import mend_torchvision

check_versions(
    __name__, {"transformers": "5.22.2", "accelerate": "1.15.0"}
)  # before anything of transformers is imported
mend_torchvision()  # transformers imports it

from meshwright.compat.transformers.trainer import MeshwrightTrainer  # noqa: E402

__all__ = ["MeshwrightTrainer"]
