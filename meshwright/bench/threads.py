"""The strategy `threads` of the strategies benchmark: the bare loop, with threads of its process sharing each batch.

`python -m meshwright.bench.threads JOB.yaml STEPS cpu|cuda THREADS` prints its samples per second.
"""

import sys

from meshwright.bench.bare import samples_per_s
from meshwright.bench.data_parallel import by_threads

if __name__ == "__main__":
    job_file, steps, device, threads = sys.argv[1:]
    print(samples_per_s(job_file, int(steps), device, lambda model: by_threads(model, int(threads), device)))
