"""Sidecar and trainers as real processes, for tests that kill them. Each wait has a deadline."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bagelplane.client.reader import NumpyReader
from bagelplane.engine.pack import Pack
from bagelplane.errors import BagelplaneError
from bagelplane.sidecar.producer import DEFAULT_STREAM_FACTORY
from bagelplane.sidecar.supervisor import SidecarSettings, run_sidecar
from bagelplane.spec import BagelDataset
from tests.integration.fake_stream import Topology, open_rank_stream

REPOSITORY = Path(__file__).parents[2]
DEADLINE_SECONDS = 90.0
SERVING_SECONDS = 120.0
"""Until a sidecar listens: an interpreter and all its packages are loaded, on a machine that may do much else."""
FAKE_STREAM = "tests.integration.fake_stream:open_rank_stream"


def make_dataset(
    *, snapshots: Path | None, every: int = 10, keep: int = 3, lineage: bool = False, **orders: str
) -> BagelDataset:
    """A resource for the fake stream; `orders` are its annotations without `fake/`."""
    spec: dict[str, Any] = {
        "profile": "Automodel",
        "sharding": {"mode": "Bagel"},
        "tokenizer": {"uri": "tokenizer.json"},
        "groups": [
            {
                "name": "t2i",
                "type": "t2i_pretrain",
                "datasets": [{"name": "t2i", "uri": "data"}],
                "imageTransform": {"stride": 16, "maxSize": 1024, "minSize": 512},
            }
        ],
        "dataplane": {"ring": {"size": "64Ki"}},
    }
    if snapshots is not None:
        spec["snapshots"] = {"uri": str(snapshots), "everySteps": every, "keepLast": keep, "lineage": lineage}
    annotations = {f"fake/{name.replace('_', '-')}": value for name, value in orders.items()}
    return BagelDataset.from_mapping(
        {
            "apiVersion": "bagelplane.io/v1alpha1",
            "kind": "BagelDataset",
            "metadata": {"name": "fake", "annotations": annotations},
            "spec": spec,
        }
    )


def digest(pack: Pack, images: list[Any]) -> str:
    """Of everything that a trainer sees of a pack, and of its state."""
    hashed = hashlib.sha256(json.dumps([pack.step, pack.scalars, pack.state], sort_keys=True).encode())
    for name, array in sorted(pack.arrays.items()):
        hashed.update(name.encode() + array.tobytes())
    for image in images:
        hashed.update(str(image.shape).encode() + image.tobytes())
    return hashed.hexdigest()[:16]


def undisturbed(dataset: BagelDataset, rank: int, world_size: int, steps: int) -> list[str]:
    """Digests of the stream as it comes without ring, process or snapshot."""
    stream = open_rank_stream(dataset, Topology(rank, world_size, dataset.spec.sharding.workers_per_rank))
    digests = []
    for _ in range(steps):
        images: list[Any] = []

        def allocate(pack: Pack, images: list[Any] = images) -> list[Any]:
            import numpy as np

            images[:] = [np.zeros((*shape, 3), np.uint8) for shape in pack.image_shapes]
            return images

        pack = stream.next_pack(allocate)
        digests.append(digest(pack, images))
    return digests


@contextlib.contextmanager
def as_another_user() -> Iterator[None]:
    """Files and sockets are opened as `nobody` meanwhile, where this process may choose (root); else as itself."""
    if os.getuid() == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(os.getuid())


def wait_for(condition: Callable[[], Any], what: str, seconds: float = DEADLINE_SECONDS) -> Any:
    """Its first true value; a failure after the deadline that says what was waited for and the last value."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() >= deadline:
            raise AssertionError(f"waited {seconds} s for {what}; last seen: {value!r}")
        time.sleep(0.01)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def fetch(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=DEADLINE_SECONDS) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


class Process:
    """A child process with its output in a file; killed at the end of the test whatever happens."""

    def __init__(self, log: Path, *arguments: str, before: Sequence[str] = ()) -> None:
        """`before` is a command that executes the rest of its arguments, in place of itself."""
        self.log = log
        self._log_begins = log.stat().st_size if log.exists() else 0
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with log.open("ab") as output:
            self.popen = subprocess.Popen(
                [*before, sys.executable, "-Werror", "-m", *arguments],
                cwd=REPOSITORY,
                env=environment,
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
            )

    @property
    def pid(self) -> int:
        return self.popen.pid

    def kill(self) -> None:
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGKILL)
        self.popen.wait(DEADLINE_SECONDS)

    def wait(self, seconds: float = DEADLINE_SECONDS) -> int:
        try:
            return self.popen.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.popen.args} still runs after {seconds} s; {self.tail()}") from None

    def tail(self) -> str:
        return f"the end of {self.log.name}: {self.log.read_text()[-3000:]}"


class Sidecar(Process):
    """A supervisor over the fake stream."""

    def __init__(
        self, folder: Path, dataset: BagelDataset, *, before: Sequence[str] = (), **settings: Any
    ) -> None:
        self.directory = folder / "run"
        folder.mkdir(parents=True, exist_ok=True)
        resource = folder / "dataset.json"
        resource.write_text(json.dumps(dataset.to_mapping()))
        chosen = {"directory": str(self.directory), "stream_factory": FAKE_STREAM, **settings}
        super().__init__(
            folder / "sidecar.log",
            "tests.integration.sidecar_harness",
            "sidecar",
            str(resource),
            json.dumps(chosen),
            before=before,
        )

    def wait_serving(self, seconds: float = SERVING_SECONDS) -> None:
        def look() -> bool:
            assert self.popen.poll() is None, self.tail()
            return (self.directory / "sidecar.sock").is_socket() and "serving" in self._own_log()

        wait_for(look, "the sidecar's socket", seconds)

    def _own_log(self) -> str:
        """Without what those before it wrote into the same file."""
        with self.log.open() as file:
            file.seek(self._log_begins)
            return file.read()

    def children(self) -> list[int]:
        """Process ids of the producers that live."""
        try:
            return [
                int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
            ]
        except OSError:
            return []

    def terminate(self, seconds: float = DEADLINE_SECONDS) -> int:
        self.popen.send_signal(signal.SIGTERM)
        return self.wait(seconds)

    def reader(self, rank: int = 0, world_size: int = 1, **settings: Any) -> NumpyReader:
        settings = {"local_rank": rank, "timeout_seconds": DEADLINE_SECONDS, **settings}
        return NumpyReader(self.directory, rank=rank, world_size=world_size, **settings)


@contextlib.contextmanager
def served(folder: Path, dataset: BagelDataset, **settings: Any) -> Iterator[Sidecar]:
    """A sidecar with the streams of the resource itself, for as long."""
    sidecar = Sidecar(folder, dataset, stream_factory=DEFAULT_STREAM_FACTORY, **settings)
    try:
        sidecar.wait_serving()
        yield sidecar
    finally:
        sidecar.kill()


@contextlib.contextmanager
def attached(sidecar: Sidecar, world_size: int) -> Iterator[list[NumpyReader]]:
    with contextlib.ExitStack() as life:
        yield [life.enter_context(sidecar.reader(rank, world_size)) for rank in range(world_size)]


class Trainer(Process):
    """Takes packs until it has `steps`, one line each in its record; a new one continues the record."""

    def __init__(
        self,
        folder: Path,
        directory: Path,
        rank: int,
        world_size: int,
        steps: int,
        *,
        timeout_seconds: float = DEADLINE_SECONDS,
    ) -> None:
        self.record = folder / f"trainer-{rank}.txt"
        super().__init__(
            folder / f"trainer-{rank}.log",
            "tests.integration.sidecar_harness",
            "trainer",
            str(directory),
            str(self.record),
            *map(str, (rank, world_size, steps, timeout_seconds)),
        )


def recorded(record: Path) -> list[str]:
    """The digests that a trainer has written, whole lines only."""
    if not record.exists():
        return []
    text = record.read_text()
    return text[: text.rfind("\n") + 1].splitlines()


def processes_of(directory: Path) -> list[int]:
    """Living processes whose command line or open memory maps name the run directory."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            if (
                str(directory) in (entry / "cmdline").read_text()
                or str(directory) in (entry / "maps").read_text()
            ):
                found.append(int(entry.name))
        except OSError:
            continue  # it ended while we looked
    return found


def leftovers(directory: Path, snapshots: Path | None = None) -> list[str]:
    """What a sidecar that ended left of itself: files, sockets, processes, half-written snapshots."""
    found = [str(path) for path in directory.iterdir()] if directory.exists() else []
    found += [line for line in Path("/proc/net/unix").read_text().splitlines() if str(directory) in line]
    found += [f"process {pid}" for pid in processes_of(directory)]
    if snapshots is not None:
        found += [str(path) for path in snapshots.rglob(".*")]
    return found


def _run_sidecar(resource: str, settings: str) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    chosen = json.loads(settings)
    chosen["directory"] = Path(chosen["directory"])
    dataset = BagelDataset.from_mapping(json.loads(Path(resource).read_text()))
    try:
        return run_sidecar(dataset, SidecarSettings(**chosen))
    except BagelplaneError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _run_trainer(
    directory: str, record: str, rank: str, world_size: str, steps: str, timeout_seconds: str
) -> int:
    path = Path(record)
    digests = recorded(path)
    if path.exists():
        # Cut, not written anew: a kill in between would lose what was taken.
        os.truncate(path, sum(len(line) + 1 for line in digests))
    reader = NumpyReader(
        directory,
        rank=int(rank),
        local_rank=int(rank),
        world_size=int(world_size),
        timeout_seconds=float(timeout_seconds),
    )
    if digests:
        reader.resume(step=len(digests))
    with path.open("a") as file:
        for step in range(len(digests), int(steps)):
            pack, images = reader.next_pack()
            assert pack.step == step, (pack.step, step)
            file.write(digest(pack, images) + "\n")
            file.flush()
    reader.close()
    return 0


if __name__ == "__main__":
    role, *rest = sys.argv[1:]
    sys.exit(_run_sidecar(*rest) if role == "sidecar" else _run_trainer(*rest))
