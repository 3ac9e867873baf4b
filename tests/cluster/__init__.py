"""A real Kubernetes cluster of one node on this machine, and the tests that need no more than it.

Parts: addresses.py (what they agree on), processes.py (one long-running program), certificates.py, control_plane.py,
network.py, namespaces.py, cgroups.py, containerd.py, node.py. What runs on it: images.py with build_cache.py,
trainer_environment.py, training_operator.py, release.py (our chart). Using it: kubectl.py, sample_data.py, training.py.
assembly.py puts all together, one at a time by machine.py: for tests by fixtures.py, for a person by `make cluster` and
localise.py.
"""
