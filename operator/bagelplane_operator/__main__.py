"""`python -m bagelplane_operator operator` and `... webhook`: what the images of the chart start."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

from bagelplane.errors import BagelplaneError, SpecError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

LogLevel = Annotated[
    str, typer.Option(help="Least important log messages shown: debug, info, warning, error.")
]


@app.command()
def operator(
    health_port: Annotated[int, typer.Option(help="Port of /healthz.", min=1, max=65535)] = 8080,
    log_level: LogLevel = "info",
) -> None:
    """Watch BagelDatasets and make what they ask for.

    The cluster is that of KUBECONFIG, else that of the pod's service account. BAGELPLANE_DATAPLANE_IMAGE names the
    image of the data plane, BAGELPLANE_NAMESPACES the served namespaces (comma separated; all without it).
    """
    _set_up_logging(log_level)
    from bagelplane_operator import service  # noqa: PLC0415  (each command loads what it needs)

    service.run(health_port)


@app.command()
def webhook(
    cert_dir: Annotated[Path, typer.Option(help="Folder with tls.crt and tls.key; read again on change.")],
    port: Annotated[int, typer.Option(help="Port of the server.", min=1, max=65535)] = 8443,
    log_level: LogLevel = "info",
) -> None:
    """Serve the admission webhooks: sidecars into pods, checks of BagelDatasets."""
    _set_up_logging(log_level)
    from bagelplane_operator import webhook as server  # noqa: PLC0415

    server.run(cert_dir, port)


def _set_up_logging(log_level: str) -> None:
    level = logging.getLevelNamesMapping().get(log_level.upper())
    if level is None:
        raise SpecError("--log-level is not known", got=log_level, expected="debug, info, warning or error")
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    if level > logging.DEBUG:
        # It tells of each attempt of each watch; that the cluster is away, the reconciler says once.
        logging.getLogger("kopf").setLevel(logging.CRITICAL)
        logging.getLogger("kopf.objects").setLevel(logging.ERROR)
    logging.getLogger("kubernetes").setLevel(logging.ERROR)  # what it warns of, our error says


def main() -> None:
    try:
        app(prog_name="python -m bagelplane_operator")
    except BagelplaneError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
