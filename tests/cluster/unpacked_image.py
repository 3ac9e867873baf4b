"""Images out of their archives, and programs run in them as in a pod: the root read-only, the user anyone."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Nothing stays mounted or running, however a command ends.
_NAMESPACES = ("--mount", "--uts", "--pid", "--fork", "--kill-child")
_ENTER = """
set -e
hostname localhost
root=$1 user=$2 volume=$3
shift 3
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount -t tmpfs -o mode=1777 tmp "$root/tmp"
mount -t tmpfs dev "$root/dev"
mkdir --mode=1777 "$root/dev/shm"
for name in null random urandom zero; do : > "$root/dev/$name"; mount --bind "/dev/$name" "$root/dev/$name"; done
if [ "$volume" ]; then mount --bind "$volume" "$root/mnt"; mount -o remount,bind,ro "$root/mnt"; fi
mount -o remount,bind,ro "$root"
exec chroot --userspec="$user" --groups= "$root" /usr/bin/env --ignore-environment "$@"
"""


@dataclass(frozen=True, slots=True)
class UnpackedImage:
    root: Path
    config: Mapping[str, Any]  # User, Env, Entrypoint, Labels
    archive_bytes: int

    def run(
        self, *command: str, user: str | None = None, volume: Path | None = None, seconds: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """What the command says in the image, standard error included; `volume` is what it finds in /mnt."""
        enter = ["unshare", *_NAMESPACES, "bash", "-c", _ENTER, "enter", str(self.root)]
        return subprocess.run(
            [*enter, user or self.config["User"], str(volume or ""), *self.config["Env"], *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
            check=False,
        )

    def paths(self) -> list[Path]:
        """All files and folders, as paths from the root."""
        return [path.relative_to(self.root) for path in self.root.rglob("*")]


@contextlib.contextmanager
def unpacked(archive: Path, folder: Path) -> Iterator[UnpackedImage]:
    """The image of a `docker-archive`. The folder is gone afterwards."""
    try:
        _extract(archive, folder / "archive")
        (manifest,) = json.loads((folder / "archive" / "manifest.json").read_text())
        for layer in manifest["Layers"]:
            _extract(folder / "archive" / layer, folder / "root")
        (folder / "root" / "etc").mkdir(exist_ok=True)
        (folder / "root" / "etc" / "hosts").write_text("127.0.0.1 localhost\n10.1.2.3 another-pod\n")
        config = json.loads((folder / "archive" / manifest["Config"]).read_text())["config"]
        yield UnpackedImage(folder / "root", config, archive.stat().st_size)
    finally:
        shutil.rmtree(folder)


def _extract(archive: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # The program: tarfile keeps owners and modes only where it deems them safe.
    command = ["tar", "-C", str(folder), "--numeric-owner", "-xpf", str(archive)]
    subprocess.run(command, check=True, timeout=300)
