"""Starts a Ray cluster of two nodes with one CPU each on the loopback address, prints its address, and stops it when
stdin is closed. Ray's environment runs this file (`make ray`)."""

import sys

from ray.cluster_utils import Cluster

NODE = {"num_cpus": 1, "num_gpus": 0, "node_ip_address": "127.0.0.1", "object_store_memory": 80_000_000}

if __name__ == "__main__":
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    try:
        cluster.add_node(**NODE)
        print(cluster.address, flush=True)
        sys.stdin.read()
    finally:
        cluster.shutdown()
