"""The Kubernetes operator. Empty until the operator issue lands.

Its job will be: a BagelDataset resource in, an index job, a ConfigMap, conditions and injected sidecars out.
It never reads data or credentials itself, and imports `bagelplane.spec` and `bagelplane.errors` alone.
"""
