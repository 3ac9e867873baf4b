"""Addresses and names that the parts of the tests' cluster agree on.

One bridge carries the host's side (API server, S3), the node and its pods. Only one such cluster runs on a machine at
a time.
"""

from __future__ import annotations

BRIDGE = "bagelplane0"
NODE_NAME = "bagelplane-node"
HOST_ADDRESS = "10.231.0.1"  # of the bridge: API server and S3 listen here
NODE_ADDRESS = "10.231.0.2"  # the node, in a network namespace of its own; the pods' gateway
DNS_ADDRESS = NODE_ADDRESS
POD_NETWORK = "10.231.0.0/16"
FIRST_POD_ADDRESS, LAST_POD_ADDRESS = "10.231.1.1", "10.231.1.254"
SERVICE_NETWORK = "10.232.0.0/16"
API_SERVICE_ADDRESS = "10.232.0.1"  # the service `kubernetes`: the first address of SERVICE_NETWORK
CLUSTER_DOMAIN = "cluster.local"
