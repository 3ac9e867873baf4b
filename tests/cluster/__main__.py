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
from tests.cluster.training import SECRET
from tests.tools.go_build import ToolError
from tests.tools.programs import find_program

_POLL_SECONDS = 1.0


def show(cluster: Cluster) -> None:
    """What a person wants to know of it, in lines to copy."""
    s3 = cluster.s3
    keys = f"--from-literal=access_key_id={s3.access_key_id} --from-literal=secret_access_key={s3.secret_access_key}"
    print(
        f"""
  export KUBECONFIG={cluster.kubeconfig}
  export PATH={find_program("kubectl").parent}:{find_program("helm").parent}:$PATH

The README's part on Kubernetes, by hand: the chart is installed (its values: {cluster.work_dir / "values.yaml"}).
Its example trains on the bucket `training`, where some rows are faulty on purpose. The keys, and the job with an image
and torch that are here:
  kubectl create secret generic {SECRET} {keys}
  .venv/bin/python -m tests.cluster.localise docs/examples/kubernetes/pytorchjob.yaml | kubectl apply -f -

  S3 from here: {s3.url}, buckets in {s3.root_dir}
  tests on it: BAGELPLANE_TEST_KUBECONFIG={cluster.kubeconfig} .venv/bin/python -m pytest tests/e2e
  logs: {cluster.logs_dir}
Ctrl-C ends it.""",
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
