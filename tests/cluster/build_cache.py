"""What tests build once and keep outside the clone, in `$XDG_CACHE_HOME/bagelplane/images/`, by hashes of its parts.

One process at a time builds there. A run that was killed leaves at most unfinished files and mounts; the next one,
which holds the lock by then, removes them.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[2]
UNFINISHED = ".unfinished"
_KEY_DIGITS = 16
_SPARED_SECONDS = 600
_LOCK_SECONDS = 1800  # the longest build


class ImageError(Exception):
    """An image is not to be had; the message says what to do."""


class BuildCache:
    """The cache while we hold its lock. Made by `opened_cache`."""

    def __init__(self, folder: Path, lock: IO[str], say: Callable[[str], None]) -> None:
        self.folder = folder
        self.say = say
        self._lock = lock
        for name in ("logs", "tmp"):
            (folder / name).mkdir(exist_ok=True)

    def unfinished(self, name: str) -> Path:
        """Where something is made that is put in its place when it is whole."""
        return self.folder / f"{name}{UNFINISHED}"

    def run(self, *command: str, seconds: float = 900, check: bool = True) -> int:
        """Runs a program of the build, with its output in a log. It ends with us. What it
        started in its turn may end later, and keeps the lock until then.
        """
        log_path = self.folder / "logs" / f"{Path(command[0]).name}.log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig=KILL", *command],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "TMPDIR": str(self.folder / "tmp")},
                start_new_session=True,
                pass_fds=[self._lock.fileno()],
            )
            try:
                code = process.wait(seconds)
                ended = f"ended with {code}"
            except subprocess.TimeoutExpired:
                code, ended = 1, f"was not done after {seconds:g} s"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if code and check:
            lines = "\n".join(log_path.read_text(errors="replace").splitlines()[-20:])
            raise ImageError(f"{' '.join(command)} {ended}. Its last words, from {log_path}:\n{lines}")
        return code

    def forget_old(self, name: str, keep: int = 3) -> None:
        """Keeps of that name what was used last, and what another run may just be about to use."""
        found = [path for path in self.folder.glob(f"{name}-*") if _name_of(path) == name]
        for path in sorted(found, key=lambda path: path.stat().st_mtime)[:-keep]:
            if time.time() - path.stat().st_mtime > _SPARED_SECONDS:
                remove(path)


@contextlib.contextmanager
def opened_cache(say: Callable[[str], None]) -> Iterator[BuildCache]:
    """The cache, cleared of what a killed run left."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        _wait_for_lock(lock, say)
        remove_unfinished(folder)
        yield BuildCache(folder, lock, say)


def _wait_for_lock(lock: IO[str], say: Callable[[str], None]) -> None:
    deadline = time.monotonic() + _LOCK_SECONDS
    waiting = False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise ImageError(
                    f"another process held {lock.name} for {_LOCK_SECONDS} s. "
                    f"Fix: see by `fuser {lock.name}` which, and end it"
                ) from None
            if not waiting:
                say(f"waiting for another build, which holds {lock.name}")
            waiting = True
            time.sleep(0.2)
        else:
            return


def cache_folder() -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "bagelplane" / "images"


def key_of(files: Mapping[str, Path], *recipe: object) -> str:
    """A hash of the files' names, modes and contents, and of the recipe's text."""
    digest = hashlib.sha256(repr(recipe).encode())
    for name, path in sorted(files.items()):
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        digest.update(f"\n{name} {_mode(path):o} {content}".encode())
    return digest.hexdigest()[:_KEY_DIGITS]


def copy_files(files: Mapping[str, Path], folder: Path) -> dict[str, Path]:
    """Copies what is to be built: that is what gets hashed then, whoever edits meanwhile. All copies have one date, so
    that layers built from one clone serve another.
    """
    folder.mkdir(parents=True)
    copies = {name: folder / name for name in files}
    for name, path in files.items():
        copies[name].parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copies[name])
        copies[name].chmod(_mode(path))
    for path in folder.rglob("*"):
        os.utime(path, (0, 0))
    return copies


def remove_unfinished(folder: Path) -> None:
    """Removes what a killed run left behind. Only for who holds the lock."""
    _unmount_below(folder)
    # run/ holds what buildah believes to be mounted.
    for path in (*folder.glob(f"*{UNFINISHED}"), *folder.glob("tmp/*"), folder / "run"):
        remove(path)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _unmount_below(folder: Path) -> None:
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for mount in sorted(mounts, reverse=True):
        if mount.startswith(f"{folder}/"):
            # Lazily: whatever still uses it, the tree below is to be removed.
            subprocess.run(["umount", "--lazy", mount], timeout=60, check=False)


def _mode(path: Path) -> int:
    return 0o755 if path.stat().st_mode & 0o100 else 0o644


def _name_of(path: Path) -> str:
    """`name` of name-<key> and of name-<key>.tar; names have hyphens themselves."""
    return path.name.removesuffix(".tar")[: -_KEY_DIGITS - 1]
