"""buildah with its storage in the build cache, fed by the package sources that this machine is set up for."""

from __future__ import annotations

import configparser
import os
from collections.abc import Mapping
from pathlib import Path

from tests.cluster.build_cache import BuildCache, ImageError
from tests.tools.programs import find_program

# Where Debian's programs, pip among them, look for certificates.
_CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
# Settings of pip that say where packages come from, with the variables that stand for them.
_PIP_SETTINGS = {
    "index-url": ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL"),
    "extra-index-url": ("PIP_EXTRA_INDEX_URL", "UV_INDEX", "UV_EXTRA_INDEX_URL"),
    "trusted-host": ("PIP_TRUSTED_HOST",),
    "proxy": ("PIP_PROXY",),
}


class ImageStore:
    """Builds images and writes archives, for as long as we have the cache."""

    def __init__(self, cache: BuildCache) -> None:
        if os.geteuid() != 0:
            raise ImageError("debootstrap and buildah build the images, and need root here. Fix: run as root")
        self._cache = cache
        self._volumes = machine_volumes(cache.folder)
        self._buildah_path = str(find_program("buildah", cache.say))
        self._driver = "overlay"
        if self._buildah("info", check=False):
            self._driver = "vfs"  # copies whole images for each layer, but needs nothing of the kernel
        self._buildah("rm", "--all")

    def build(
        self, tag: str, dockerfile: Path, context: Path, *, arguments: Mapping[str, str], target: str = ""
    ) -> None:
        options = [f"--build-arg={name}={value}" for name, value in arguments.items()]
        options += [f"--target={target}"] if target else []
        options += [f"--volume={volume}" for volume in self._volumes]
        options += ["--isolation=chroot", "--layers", "--pull-never"]
        self._buildah("bud", *options, f"--file={dockerfile}", f"--tag={tag}", str(context))

    def load(self, tag: str, archive: Path, tag_in_archive: str) -> None:
        """Makes the archive's image known as `tag`, if none is."""
        if self._buildah("inspect", "--type=image", tag, check=False):
            self._buildah("pull", f"docker-archive:{archive}")
            self._buildah("tag", tag_in_archive, tag)

    def write_archive(self, tag: str, archive: Path) -> None:
        unfinished = self._cache.unfinished(archive.name)
        self._buildah("push", tag, f"docker-archive:{unfinished}:{tag}")
        unfinished.replace(archive)

    def prune(self) -> None:
        """Removes layers that no tag leads to any more."""
        self._buildah("rmi", "--prune")

    def _buildah(self, command: str, *arguments: str, check: bool = True) -> int:
        storage = [f"--root={self._cache.folder / self._driver}", f"--runroot={self._cache.folder / 'run'}"]
        driver = f"--storage-driver={self._driver}"
        return self._cache.run(self._buildah_path, driver, *storage, command, *arguments, check=check)


def machine_volumes(folder: Path) -> list[str]:
    """What build steps see of this machine: where pip fetches from, and whom it trusts."""
    settings = pip_settings()
    pip_conf = folder / "pip.conf"
    pip_conf.unlink(missing_ok=True)
    with os.fdopen(os.open(pip_conf, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write("[global]\ndisable-pip-version-check = true\n")
        file.writelines(f"{name} = {value}\n" for name, value in settings.items())
        certificates = _first_file("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE") or Path(_CERTIFICATES)
        if certificates.is_file():
            file.write(f"cert = {_CERTIFICATES}\n")
    volumes = [f"{pip_conf}:/etc/pip.conf:ro"]
    if certificates.is_file():
        volumes.append(f"{certificates.resolve()}:{_CERTIFICATES}:ro")
    return volumes


def pip_settings() -> dict[str, str]:
    """Where pip fetches from on this machine: its variables or uv's, else its files."""
    files = configparser.ConfigParser(interpolation=None)
    paths = [Path("/etc/pip.conf"), Path.home() / ".pip/pip.conf", Path.home() / ".config/pip/pip.conf"]
    if named := os.environ.get("PIP_CONFIG_FILE"):
        paths.append(Path(named))
    files.read(paths)
    settings = {}
    for name, variables in _PIP_SETTINGS.items():
        found = [os.environ[variable] for variable in variables if os.environ.get(variable)]
        found += [files[part][name] for part in ("install", "global") if files.has_option(part, name)]
        if found:
            settings[name] = " ".join(found[0].split())
    return settings


def _first_file(*variables: str) -> Path | None:
    named = (Path(os.environ[variable]) for variable in variables if os.environ.get(variable))
    return next((path for path in named if path.is_file()), None)
