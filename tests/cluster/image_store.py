"""buildah with its storage in the user's cache, fed by the package sources that this machine is set up for.

Everything lies in `$XDG_CACHE_HOME/bagelplane/images/`. A run that was killed leaves there at most unfinished files,
mounts and working containers; the next one, which holds the lock by then, removes them.
"""

from __future__ import annotations

import configparser
import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO

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
UNFINISHED = ".unfinished"


class ImageError(Exception):
    """An image is not to be had; the message says what to do."""


class ImageStore:
    """Builds images and writes archives. Made by `opened_store`, which holds the lock."""

    def __init__(self, folder: Path, lock: IO[str], say: Callable[[str], None]) -> None:
        self.folder = folder
        self.say = say
        self._lock = lock
        self._volumes = machine_volumes(folder)
        for name in ("logs", "pip-cache", "tmp"):
            (folder / name).mkdir(exist_ok=True)
        self._driver = "overlay"
        if self._buildah("info", check=False).returncode:
            self._driver = "vfs"  # copies whole images for each layer, but needs nothing of the kernel
        self._buildah("rm", "--all")

    def build(
        self, tag: str, dockerfile: Path, context: Path, *, arguments: Mapping[str, str], target: str = ""
    ) -> None:
        options = [f"--build-arg={name}={value}" for name, value in arguments.items()]
        options += [f"--target={target}"] if target else []
        options += [f"--volume={volume}" for volume in self._volumes]
        self._buildah(
            "bud", "--isolation=chroot", "--layers", "--pull-never", *options,
            f"--file={dockerfile}", f"--tag={tag}", str(context),
        )  # fmt: skip

    def load(self, tag: str, archive: Path, tag_in_archive: str) -> None:
        """Makes the archive's image known as `tag`, if none is."""
        if self._buildah("inspect", "--type=image", tag, check=False).returncode:
            self._buildah("pull", f"docker-archive:{archive}")
            self._buildah("tag", tag_in_archive, tag)

    def write_archive(self, tag: str, archive: Path) -> None:
        unfinished = archive.with_name(archive.name + UNFINISHED)
        self._buildah("push", tag, f"docker-archive:{unfinished}:{tag}")
        unfinished.replace(archive)

    def prune(self) -> None:
        """Removes layers that no tag leads to any more."""
        self._buildah("rmi", "--prune")

    def run(
        self, *command: str, seconds: float = 900, check: bool = True
    ) -> subprocess.CompletedProcess[bytes]:
        """Runs a program of the build, with its output in a log. Its children end with it, or keep the lock."""
        log_path = self.folder / "logs" / f"{Path(command[0]).name}.log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "TMPDIR": str(self.folder / "tmp")},
                start_new_session=True,
                pass_fds=[self._lock.fileno()],
            )
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if code != 0 and check:
            ended = f"ended with {code}" if code is not None else f"was not done after {seconds:g} s"
            lines = "\n".join(log_path.read_text(errors="replace").splitlines()[-20:])
            raise ImageError(f"{' '.join(command)} {ended}. Its last words, from {log_path}:\n{lines}")
        return subprocess.CompletedProcess(command, 1 if code is None else code)

    def _buildah(
        self, command: str, *arguments: str, check: bool = True
    ) -> subprocess.CompletedProcess[bytes]:
        return self.run(
            str(find_program("buildah", self.say)),
            f"--storage-driver={self._driver}",
            f"--root={self.folder / self._driver}",
            f"--runroot={self.folder / 'run'}",
            command,
            *arguments,
            check=check,
        )


@contextlib.contextmanager
def opened_store(say: Callable[[str], None]) -> Iterator[ImageStore]:
    """The store, cleared of what a killed run left. One process at a time has it. Raises ImageError."""
    if os.geteuid() != 0:
        raise ImageError(
            "images are built by debootstrap and buildah, which need root here. Fix: run as root"
        )
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        remove_unfinished(folder)
        yield ImageStore(folder, lock, say)


def cache_folder() -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "bagelplane" / "images"


def remove_unfinished(folder: Path) -> None:
    """Removes what a killed run left behind. Only for who holds the lock."""
    unmount_below(folder)
    # run/ holds what buildah believes to be mounted.
    for path in (*folder.glob(f"*{UNFINISHED}"), *folder.glob("tmp/*"), folder / "run"):
        remove(path)


def unmount_below(folder: Path) -> None:
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for mount in sorted(mounts, reverse=True):
        if mount.startswith(f"{folder}/"):
            # Lazily: whatever still uses it, the tree below is to be removed.
            subprocess.run(["umount", "--lazy", mount], timeout=60, check=False)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def machine_volumes(folder: Path) -> list[str]:
    """What build steps see of this machine: where pip fetches from, its cache, and whom it trusts."""
    settings = pip_settings()
    pip_conf = folder / "pip.conf"
    pip_conf.unlink(missing_ok=True)
    with os.fdopen(os.open(pip_conf, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write("[global]\ndisable-pip-version-check = true\ncache-dir = /var/cache/pip\n")
        file.writelines(f"{name} = {value}\n" for name, value in settings.items())
        certificates = _first_file("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE") or Path(_CERTIFICATES)
        if certificates.is_file():
            file.write(f"cert = {_CERTIFICATES}\n")
    volumes = [f"{pip_conf}:/etc/pip.conf:ro", f"{folder / 'pip-cache'}:/var/cache/pip"]
    if certificates.is_file():
        volumes.append(f"{certificates.resolve()}:{_CERTIFICATES}:ro")
    return volumes


def pip_settings() -> dict[str, str]:
    """Where pip fetches from on this machine: its variables or uv's, else its files."""
    files = configparser.ConfigParser(interpolation=None)
    home = Path.home()
    named = os.environ.get("PIP_CONFIG_FILE")
    files.read(
        ["/etc/pip.conf", home / ".pip" / "pip.conf", home / ".config" / "pip" / "pip.conf"]
        + ([named] if named else [])
    )
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
