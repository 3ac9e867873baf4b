"""A throw-away certificate authority, by the openssl program: Kubernetes knows its parts by certificates of it."""

from __future__ import annotations

import ipaddress
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.processes import ClusterError
from tests.tools.programs import find_program

_DAYS = 30


@dataclass(frozen=True, slots=True)
class KeyPair:
    certificate: Path
    key: Path


class Authority:
    """Makes its own key and certificate in `folder`, and others signed by it beside them."""

    def __init__(self, folder: Path, common_name: str) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        extensions = ["basicConstraints=critical,CA:TRUE", "keyUsage=critical,keyCertSign,cRLSign"]
        self.pair = _make(folder, "ca", f"/CN={common_name}", extensions, None)

    @property
    def certificate(self) -> Path:
        return self.pair.certificate

    def issue(
        self, name: str, common_name: str, *, organization: str = "", hosts: Sequence[str] = ()
    ) -> KeyPair:
        """A key and certificate in the files `name`.key and .crt, for clients and, with `hosts` (names and
        addresses), for servers.
        """
        usages = "clientAuth,serverAuth" if hosts else "clientAuth"
        extensions = [
            "basicConstraints=critical,CA:FALSE",
            "keyUsage=critical,digitalSignature",
            f"extendedKeyUsage={usages}",
        ]
        if hosts:
            extensions.append("subjectAltName=" + ",".join(map(_alternative_name, hosts)))
        subject = (f"/O={organization}" if organization else "") + f"/CN={common_name}"
        return _make(self._folder, name, subject, extensions, self.pair)


def _alternative_name(host: str) -> str:
    try:
        return f"IP:{ipaddress.ip_address(host)}"
    except ValueError:
        return f"DNS:{host}"


def _make(
    folder: Path, name: str, subject: str, extensions: Sequence[str], signer: KeyPair | None
) -> KeyPair:
    pair = KeyPair(folder / f"{name}.crt", folder / f"{name}.key")
    # A configuration of our own: the machine's would add its extensions to ours.
    config = folder / f"{name}.cnf"
    sections = ["[req]", "distinguished_name=name", "x509_extensions=extensions", "[name]", "[extensions]"]
    config.write_text("\n".join([*sections, *extensions, ""]))
    command: list[str | Path] = [
        find_program("openssl"), "req", "-x509", "-config", config, "-newkey", "ec", "-pkeyopt",
        "ec_paramgen_curve:prime256v1", "-nodes", "-days", str(_DAYS), "-subj", subject,
        "-keyout", pair.key, "-out", pair.certificate,
    ]  # fmt: skip
    if signer:
        command += ["-CA", signer.certificate, "-CAkey", signer.key]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if result.returncode:
        raise ClusterError(f"openssl req for {name} ended with {result.returncode}: {result.stderr}")
    config.unlink()
    return pair
