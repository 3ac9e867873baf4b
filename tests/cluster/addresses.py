"""Addresses and names that the parts of the tests' cluster agree on.

One bridge carries the host's side (API server, S3), the node and its pods. One cluster of a number runs on
a machine at a time.
"""

from __future__ import annotations

import os

# Clusters of different numbers stand side by side: the claims about killed ones are tried on a second one.
NUMBER = int(os.environ.get("BAGELPLANE_TEST_CLUSTER_NUMBER", "0"))
_NETWORK, _SERVICES = f"10.{231 + 2 * NUMBER}", f"10.{232 + 2 * NUMBER}"

BRIDGE = f"bagelplane{NUMBER}"
CGROUP = f"bagelplane-test-{NUMBER}"
NODE_NAME = "bagelplane-node"
HOST_ADDRESS = f"{_NETWORK}.0.1"  # of the bridge: API server and S3 listen here
NODE_ADDRESS = f"{_NETWORK}.0.2"  # the node, in a network namespace of its own; the pods' gateway
DNS_ADDRESS = NODE_ADDRESS
POD_NETWORK = f"{_NETWORK}.0.0/16"
FIRST_POD_ADDRESS, LAST_POD_ADDRESS = f"{_NETWORK}.1.1", f"{_NETWORK}.1.254"
SERVICE_NETWORK = f"{_SERVICES}.0.0/16"
API_SERVICE_ADDRESS = f"{_SERVICES}.0.1"  # the service `kubernetes`: the first address of SERVICE_NETWORK
CLUSTER_DOMAIN = "cluster.local"
