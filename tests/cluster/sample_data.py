"""The sample data of docs/examples/kubernetes/dataset.yaml, on the tests' S3 server, under a name in the cluster."""

from __future__ import annotations

import json
from pathlib import Path

from bagelplane.storage import join_uri, open_storage
from tests.cluster.kubectl import Kubectl
from tests.services.s3 import S3Server

BUCKET = "training"
NAMESPACE = "storage"
PORT = 9000
ENDPOINT = f"http://s3.{NAMESPACE}.svc:{PORT}"
DATA = Path(__file__).parent.parent / "golden" / "data"


def fill_bucket(server: S3Server) -> None:
    """Puts the data of the recorded streams into the bucket `training`."""
    (server.root_dir / BUCKET).mkdir(exist_ok=True)
    storage = open_storage(server.settings)
    for file in sorted(path for path in DATA.rglob("*") if path.is_file()):
        storage.write_bytes(join_uri(f"s3://{BUCKET}", str(file.relative_to(DATA))), file.read_bytes())


def publish(kubectl: Kubectl, server_address: str, server_port: int) -> None:
    """Makes the server, which runs beside the cluster, the service `s3` in the namespace `storage`."""
    port = {"name": "s3", "port": PORT, "protocol": "TCP"}
    kubectl.apply(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "List",
                "items": [
                    {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}},
                    {
                        "apiVersion": "v1",
                        "kind": "Service",
                        "metadata": {"name": "s3", "namespace": NAMESPACE},
                        "spec": {"ports": [port | {"targetPort": server_port}]},
                    },
                    {
                        "apiVersion": "discovery.k8s.io/v1",
                        "kind": "EndpointSlice",
                        "metadata": {
                            "name": "s3",
                            "namespace": NAMESPACE,
                            "labels": {"kubernetes.io/service-name": "s3"},
                        },
                        "addressType": "IPv4",
                        "endpoints": [{"addresses": [server_address]}],
                        "ports": [port | {"port": server_port}],
                    },
                ],
            }
        )
    )


def service_address(kubectl: Kubectl) -> str:
    """The address that the cluster gave the service."""
    return str(kubectl.get_json("service", "s3", namespace=NAMESPACE)["spec"]["clusterIP"])
