"""Accelerate's `Accelerator`, which trains under a plan of Meshwright. A script changes only its import:

from meshwright.compat.accelerate import Accelerator
"""

from meshwright.compat.accelerate.version import check_version

check_version()  # before anything of Accelerate is imported

from meshwright.compat.accelerate.accelerator import Accelerator  # noqa: E402

__all__ = ["Accelerator"]
