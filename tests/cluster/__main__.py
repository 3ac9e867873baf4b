"""`make cluster`: a cluster with all that the tests put into it, until Ctrl-C. Nothing of it stays."""

from __future__ import annotations

import signal
import sys
import time
from functools import partial
from types import FrameType

from tests.cluster.assembly import Cluster, running_cluster
from tests.cluster.build_cache import ImageError
from tests.cluster.kubectl import KubectlError
from tests.cluster.processes import ClusterError
from tests.cluster.release import HelmError
from tests.tools.go_build import ToolError
from tests.tools.programs import find_program

_POLL_SECONDS = 1.0


def show(cluster: Cluster) -> None:
    print(
        f"\n  export KUBECONFIG={cluster.kubeconfig}"
        f"\n  kubectl of its version: {find_program('kubectl')}"
        f"\n  S3 from here: {cluster.s3.url}, buckets in {cluster.s3.root_dir}"
        f"\n    AWS_ACCESS_KEY_ID={cluster.s3.access_key_id} AWS_SECRET_ACCESS_KEY={cluster.s3.secret_access_key}"
        f"\n  tests on it: BAGELPLANE_TEST_KUBECONFIG={cluster.kubeconfig} .venv/bin/python -m pytest tests/e2e"
        f"\n  logs: {cluster.logs_dir}"
        "\nCtrl-C ends it.",
        flush=True,
    )


def end(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> int:
    signal.signal(signal.SIGTERM, end)  # whoever ends us, we clear up
    try:
        with running_cluster(partial(print, flush=True)) as cluster:
            try:
                cluster.install()
            except (HelmError, KubectlError, AssertionError):
                print(f"what all parts said: {cluster.save_failure('install')}", file=sys.stderr)
                raise
            show(cluster)
            while True:
                cluster.check()
                time.sleep(_POLL_SECONDS)
    except KeyboardInterrupt:
        return 0
    except (ClusterError, HelmError, ImageError, KubectlError, ToolError, AssertionError) as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
