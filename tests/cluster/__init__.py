"""A real Kubernetes cluster of one node on this machine, and the tests that need no more than it.

addresses.py: what the parts agree on. processes.py: one long-running program. certificates.py: a throw-away
authority. control_plane.py: etcd, API server, controller manager, scheduler. kubectl.py: asking and waiting.
fixtures.py: what tests are given. `python -m tests.cluster` (`make cluster`) keeps it all up for a person.
"""
