"""A PyTorchJob as it runs on `make cluster`, for those who follow the README there by hand.

    python -m tests.cluster.localise docs/examples/kubernetes/pytorchjob.yaml | kubectl apply -f -

It gets the tests' image and torch, from a folder of the node: for namespaces that do not forbid host paths.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import yaml

from tests.cluster.build_cache import ImageError
from tests.cluster.trainer_environment import trainer_environment
from tests.cluster.training import localise


def main(file: str) -> int:
    try:
        folder = trainer_environment(partial(print, file=sys.stderr))
    except ImageError as error:
        print(error, file=sys.stderr)
        return 1
    volume = {"hostPath": {"path": str(folder), "type": "Directory"}}
    print(json.dumps(localise(yaml.safe_load(Path(file).read_text()), volume=volume), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
