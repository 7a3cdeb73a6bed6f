"""Accelerate's `Accelerator`, which trains under a plan of Meshwright. A script changes only its import:

from meshwright.compat.accelerate import Accelerator
"""

from meshwright.compat.versions import check_versions

check_versions(__name__, {"accelerate": "1.15.0"})  # before anything of Accelerate is imported

from meshwright.compat.accelerate.accelerator import Accelerator  # noqa: E402

__all__ = ["Accelerator"]
