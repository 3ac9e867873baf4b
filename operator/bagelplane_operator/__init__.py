"""The Kubernetes operator and its admission webhook: two commands of one image.

Operator: a BagelDataset in, a ConfigMap, a check of its sources, conditions and figures of its pods out. Webhook: pods
that ask for a data set in, the same pods with a sidecar out. What they decide is in pure modules (`planning` and what
it calls, `injection`, `admission`); `cluster`, `polling`, `handlers` and `reconciler` do the rest.

It never reads data or credentials, and of `bagelplane` it imports the resource's models and the errors alone.
"""
