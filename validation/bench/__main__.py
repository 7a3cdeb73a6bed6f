import sys

from meshwright.errors import MeshwrightError
from validation.bench.commands import bench

if __name__ == "__main__":
    try:
        bench(prog_name="python -m validation.bench")
    except MeshwrightError as error:
        sys.exit(f"meshwright: {error}")
