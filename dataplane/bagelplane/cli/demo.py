"""`bagelplane demo`: the whole path on one machine, with a kill in the middle, and the bits compared."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from bagelplane.cli.demo_comparison import Comparison, Ranks
from bagelplane.cli.demo_processes import Child, DemoError, wait_until
from bagelplane.cli.demo_server import S3Endpoint, serve_folder
from bagelplane.cli.demo_trainer import read_taken
from bagelplane.cli.plan import make_forecast
from bagelplane.demo_data import Made, make_data_set
from bagelplane.errors import SpecError
from bagelplane.sidecar.snapshots import SnapshotStore
from bagelplane.sidecar.store import open_snapshot_store
from bagelplane.spec import load_dataset
from bagelplane.topology import Topology

WORLD_SIZE = 2
SNAPSHOT_EVERY = 10
_BUCKET = "bagel"
_MARK = ".made-by-bagelplane-demo"
_PLANNED, _SHOWN = 200, 3
STREAMS = 4
_ELASTIC_PACKS = 20
"""Of the run whose world size changes: by two ranks together, and by the one that goes on."""
_RUN_DIRECTORY_BYTES = 64 * 1024 * 1024

_BAGEL, _ELASTIC = "{mode: Bagel, workersPerRank: 0}", f"{{streams: {STREAMS}}}"

RESOURCE = """\
# Made by `bagelplane demo`: three groups of pictures, edits and conversations, small enough for a laptop.
apiVersion: bagelplane.io/v1alpha1
kind: BagelDataset
metadata: {{name: bagel-demo}}
spec:
  profile: Automodel
{storage}\
  tokenizer: {{uri: {data}/tokenizer.json}}
  groups:
  - name: pictures
    type: t2i_pretrain
    weight: 2
    mandatory: true
    datasets: [{{name: t2i, uri: {data}/t2i, numUsedData: 8}}]
    imageTransform: {{stride: 16, maxSize: 384, minSize: 192}}
  - name: edits
    type: unified_edit
    weight: 1
    datasets: [{{name: edit, uri: {data}/edit, numUsedData: 8, parquetInfo: parquet_info.json}}]
    imageTransform: {{stride: 16, maxSize: 384, minSize: 192}}
    vitImageTransform: {{stride: 14, maxSize: 224, minSize: 112}}
  - name: talks
    type: vlm_sft
    weight: 1
    datasets: [{{name: vlm, uri: {data}/vlm, jsonl: train.jsonl, images: images, numUsedData: 64}}]
    imageTransform: {{stride: 14, maxSize: 224, minSize: 112}}
  budgets:
    expectedTokens: 3072
    maxTokens: 3584
    maxTokensPerSample: 2048
    preferBufferBefore: 1536
    maxBufferSize: 6
  sharding: {{mode: Bagel, workersPerRank: 0}}
{snapshots}\
"""


def demo(
    directory: Annotated[Path, typer.Option("--dir", help="Folder for all that it makes.")] = Path(
        "demo-out"
    ),
    packs: Annotated[
        int,
        typer.Option(help="Packs that each rank takes in all; the kill comes half-way.", min=30, max=10_000),
    ] = 80,
) -> None:
    """See it all work, on this machine alone: data over S3 into two trainers, a kill, a resume, another
    world size, the same bits.

    Makes a small data set with the faults of real ones, serves it over S3 (rclone, on 127.0.0.1), runs the
    sidecar and two trainer ranks, kills all three with SIGKILL, starts them again, and compares every array of
    every pack with a run that nothing disturbed. Has one rank continue another run that two began. Then draws the
    packs and a forecast of them.

    Ends with 1 when a single bit differs. Leaves nothing but its folder.

    Example: bagelplane demo --dir demo-out
    """
    with _ended_by_signals(), ExitStack() as cleanup:
        # A chatty library is no part of the story; what goes wrong is an error.
        cleanup.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.WARNING)
        Demo(directory.absolute(), packs, cleanup).run()


class Demo:
    """The story, step by step. `cleanup` ends all that is started."""

    def __init__(self, folder: Path, packs: int, cleanup: ExitStack) -> None:
        self._folder, self._packs, self._cleanup = folder, packs, cleanup
        self._data = folder / "s3" / _BUCKET / "data"
        self._resource, self._local = folder / "dataset.yaml", folder / "dataset-local.yaml"
        self._logs, self._taken = folder / "logs", folder / "taken"
        self._undisturbed = self._taken / "undisturbed"
        self._elastic, self._in_order = folder / "dataset-elastic.yaml", self._taken / "in-order"
        self._console = Console(highlight=False)
        self._started = time.monotonic()

    def run(self) -> None:
        self._prepare_folder()
        self._say(
            "Bagelplane demo: two trainers fed from S3, killed half-way, resumed; are the bits the same?"
        )
        made = make_data_set(self._data)
        self._say(
            f"made {made.t2i_rows} captioned pictures, {made.edit_rows} edits and {made.conversations} conversations "
            f"({made.size_bytes / 1e6:.0f} MB), with the faults of real data: cut JPEGs, missing images, null captions"
        )
        endpoint = self._cleanup.enter_context(
            serve_folder(self._folder / "s3", _BUCKET, log=self._log("rclone"))
        )
        self._say(f"serving them over S3 at {endpoint.url} (rclone serve s3)")
        self._write_resources(endpoint, made)
        references = self._start_undisturbed()
        store = open_snapshot_store(load_dataset(self._resource))
        assert store is not None
        before = self._run_and_kill(store)
        after = self._resume(store)
        drops = self._drops(store)
        self._say_drops(drops)
        two, one = self._change_world_size()
        with self._console.status("waiting for the undisturbed runs"):
            for reference in references:
                reference.wait(120)
        comparison = self._compare(before, after)
        self._compare_in_order(comparison, two, one)
        self._draw()
        self._finish(comparison)

    def _prepare_folder(self) -> None:
        mark = self._folder / _MARK
        if (
            self._folder.exists()
            and not mark.exists()
            and (not self._folder.is_dir() or any(self._folder.iterdir()))
        ):
            raise SpecError(
                f"{self._folder} is there and was not made by the demo", fix="name another folder with --dir"
            )
        try:
            if self._folder.exists():
                shutil.rmtree(self._folder)
            for path in (self._data, self._logs, self._undisturbed, self._in_order):
                path.mkdir(parents=True)
            mark.touch()
        except OSError as error:
            raise SpecError(
                f"the folder {self._folder} cannot be made: {error.strerror}",
                fix="name another one with --dir",
            ) from None

    def _write_resources(self, endpoint: S3Endpoint, made: Made) -> None:
        credentials = endpoint.write_credentials(self._folder / "credentials")
        served = RESOURCE.format(
            data=f"s3://{_BUCKET}/data",
            storage=f"  storage: {{endpointURL: '{endpoint.url}', region: us-east-1, credentialsDir: {credentials}}}\n",
            snapshots=f"  snapshots: {{uri: 's3://{_BUCKET}/snapshots', everySteps: {SNAPSHOT_EVERY}, keepLast: 3}}\n",
        )
        self._resource.write_text(served, encoding="utf-8")
        # The same data as files: for the undisturbed run, and to play with when the server is gone.
        local = RESOURCE.format(
            data=f"file://{made.folder}",
            storage="",
            snapshots=f"  snapshots: {{uri: 'file://{self._folder}/snapshots', everySteps: {SNAPSHOT_EVERY}}}\n",
        )
        self._local.write_text(local, encoding="utf-8")
        elastic = served.replace("/snapshots'", "/snapshots-elastic'").replace(_BAGEL, _ELASTIC)
        self._elastic.write_text(elastic, encoding="utf-8")
        (self._in_order / "dataset.yaml").write_text(local.replace(_BAGEL, _ELASTIC), encoding="utf-8")

    def _start_undisturbed(self) -> list[Child]:
        """Of both runs. The second one's packs come in one order, whatever the world size: one rank makes them all."""
        runs = (
            (self._local, self._undisturbed, WORLD_SIZE, self._packs),
            (self._in_order / "dataset.yaml", self._in_order, 1, 2 * _ELASTIC_PACKS),
        )
        children = [
            Child(
                "the undisturbed run",
                "bagelplane.cli.demo_reference",
                [str(resource), str(folder), str(world_size), str(packs)],
                log=self._log(folder.name),
            )
            for resource, folder, world_size, packs in runs
        ]
        return [self._cleanup.enter_context(child) for child in children]

    def _run_and_kill(self, store: SnapshotStore) -> Ranks:
        """The first attempt: until half of the packs are taken, and one snapshot lies well behind."""
        run_directory = self._new_run_directory()
        sidecar = self._start_sidecar(run_directory, self._resource)
        # However fast they are, they leave something to be done after the kill.
        ranks = self._start_ranks(run_directory, "before", str(self._packs - SNAPSHOT_EVERY), "hold")
        self._say(
            f"started the sidecar (pid {sidecar.pid}) and ranks 0 and 1 (pids {_pids(ranks)}), {_client()}"
        )
        # The first look loads the S3 client, which takes as long as many packs: now, while the ranks start.
        _complete(store)
        half = self._packs // 2 + SNAPSHOT_EVERY // 2
        snapshot = half - half % SNAPSHOT_EVERY

        def state() -> str:
            counts = [len(taken) for taken in ranks.taken()]
            return f"packs taken by rank: {counts}; snapshots: {[entry.step for entry in _complete(store)]}"

        with self._console.status(f"training: {half} packs a rank"):
            wait_until(
                lambda: (
                    all(len(taken) >= half for taken in ranks.taken())
                    and any(entry.step >= snapshot for entry in _complete(store))
                ),
                state,
                sidecar,
                *ranks.children,
            )
        for child in (sidecar, *ranks.children):
            child.kill()
        counts = [len(taken) for taken in ranks.taken()]
        steps = [entry.step for entry in _complete(store)]
        self._say(
            f"killed all three with SIGKILL after {counts[0]} and {counts[1]} packs; "
            f"in the store: snapshots of steps {', '.join(map(str, steps))}"
        )
        return ranks

    def _resume(self, store: SnapshotStore) -> Ranks:
        """The second attempt: nothing but the stored snapshot is left of the first."""
        latest = max(entry.step for entry in _complete(store))
        run_directory = self._new_run_directory()
        sidecar = self._start_sidecar(run_directory, self._resource)
        ranks = self._start_ranks(run_directory, "after", str(self._packs))
        self._say(f"started all again (sidecar {sidecar.pid}, ranks {_pids(ranks)})")
        with self._console.status(f"training on to pack {self._packs}"):
            for child in ranks.children:
                child.wait(120)
        first = [taken[0].step for taken in ranks.taken()]
        if first != [latest] * WORLD_SIZE:
            raise DemoError(
                "the ranks resumed elsewhere", got=f"steps {first}", expected=f"step {latest}, the snapshot"
            )
        wait = 1000 * sum(taken.wait_seconds for rank in ranks.taken() for taken in rank[1:])
        count = sum(len(rank) - 1 for rank in ranks.taken())
        self._say(
            f"both resumed at step {latest} and went on to {self._packs}; "
            f"a pack kept its trainer waiting {wait / count:.0f} ms on average"
        )
        sidecar.stop()
        return ranks

    def _change_world_size(self) -> tuple[Ranks, Ranks]:
        """Another run, whose packs are shared out by streams: one rank continues what two began."""
        attempts = []
        for world_size, until in ((2, _ELASTIC_PACKS // 2), (1, 2 * _ELASTIC_PACKS)):
            run_directory = self._new_run_directory()
            sidecar = self._start_sidecar(run_directory, self._elastic, world_size)
            ranks = self._start_ranks(
                run_directory, f"of-{world_size}", str(until), "numpy", world_size=world_size
            )
            with self._console.status(f"another run, on {world_size} of its ranks"):
                for child in ranks.children:
                    child.wait(120)
                sidecar.stop()  # with a snapshot
            attempts.append(ranks)
        two, one = attempts
        began = one.taken()[0][0].step
        if began != _ELASTIC_PACKS:
            raise DemoError(
                "one rank resumed elsewhere",
                got=f"pack {began}",
                expected=f"pack {_ELASTIC_PACKS}, the snapshot",
            )
        self._say(
            f"another run, over {STREAMS} streams: ranks 0 and 1 took packs 0 to {_ELASTIC_PACKS - 1} in turn and "
            f"ended; one rank alone went on with packs {_ELASTIC_PACKS} to {2 * _ELASTIC_PACKS - 1}"
        )
        return two, one

    def _start_sidecar(self, run_directory: Path, resource: Path, world_size: int = WORLD_SIZE) -> Child:
        arguments = ["run", str(resource), "--dir", str(run_directory), "--ranks", str(world_size)]
        child = Child("the sidecar", "bagelplane.cli.app", arguments, log=self._log("sidecar"))
        return self._cleanup.enter_context(child)

    def _start_ranks(
        self, run_directory: Path, attempt: str, *arguments: str, world_size: int = WORLD_SIZE
    ) -> Ranks:
        ranks = Ranks([], [])
        for rank in range(world_size):
            output = self._taken / f"rank-{rank}-{attempt}.jsonl"
            environment = {
                "BAGELPLANE_DIR": str(run_directory),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "OMP_NUM_THREADS": "1",
            }
            child = Child(
                f"rank {rank}",
                "bagelplane.cli.demo_trainer",
                [str(output), *arguments],
                log=self._log(f"rank-{rank}"),
                env=environment,
            )
            ranks.children.append(self._cleanup.enter_context(child))
            ranks.outputs.append(output)
        return ranks

    def _new_run_directory(self) -> Path:
        """In shared memory where there is room, and with a short path: a socket's may have 107 bytes."""
        memory = Path("/dev/shm")
        roomy = memory.is_dir() and shutil.disk_usage(memory).free > _RUN_DIRECTORY_BYTES
        parent = memory if roomy and os.access(memory, os.W_OK) else None
        path = Path(tempfile.mkdtemp(prefix="bagelplane-demo-", dir=parent))
        self._cleanup.callback(shutil.rmtree, path, ignore_errors=True)
        return path

    def _drops(self, store: SnapshotStore) -> tuple[Counter[tuple[str, str]], int]:
        """Dropped rows by group and reason, and images that do not decode, as the last snapshot has them."""
        manifest = store.load("latest")
        assert manifest is not None
        drops: Counter[tuple[str, str]] = Counter()
        bad: set[str] = set()
        for rank in range(WORLD_SIZE):
            state = store.load_state(manifest, rank)
            bad.update(state.get("known_bad", {}))
            for group, row in state.get("drops", {}).items():
                drops.update({(group, reason): count for reason, count in row.items()})
        return drops, len(bad)

    def _compare(self, before: Ranks, after: Ranks) -> Comparison:
        comparison = Comparison()
        for rank, (first, second) in enumerate(zip(before.taken(), after.taken(), strict=True)):
            expected = read_taken(self._undisturbed / f"rank-{rank}.jsonl")
            steps = [taken.step for taken in second]
            if steps != list(range(steps[0], self._packs)):
                comparison.differences.append(
                    f"rank {rank}: took steps {steps}, expected each once, in order"
                )
            comparison.twice += sum(taken.step >= steps[0] for taken in first)
            for attempt, packs in (("before the kill", first), ("after it", second)):
                for taken in packs:
                    if taken.step < len(expected):
                        comparison.add(f"rank {rank} {attempt}", taken, expected[taken.step])
        return comparison

    def _compare_in_order(self, comparison: Comparison, two: Ranks, one: Ranks) -> None:
        """Both attempts of the second run, pack by pack in the order of the run."""
        expected = read_taken(self._in_order / "rank-0.jsonl")
        taken = sorted(
            (pack.step * len(ranks.outputs) + rank, pack)
            for ranks in (two, one)
            for rank, packs in enumerate(ranks.taken())
            for pack in packs
        )
        numbers = [number for number, _ in taken]
        if numbers != list(range(2 * _ELASTIC_PACKS)):
            comparison.differences.append(f"on changing ranks: took packs {numbers}, expected each once")
        for number, pack in taken:
            if number < len(expected):
                comparison.add(f"on changing ranks, pack {number} of the run", pack, expected[number])

    def _say_drops(self, found: tuple[Counter[tuple[str, str]], int]) -> None:
        drops, bad = found
        listed = ", ".join(f"{count} {group} {reason}" for (group, reason), count in sorted(drops.items()))
        self._say(
            f"rows not trained on, by group and reason: {listed or 'none'}; images that open and do not decode: {bad}"
        )

    def _draw(self) -> None:
        place = ["--rank", "0", "--world-size", str(WORLD_SIZE)]
        arguments = ["preview", str(self._local), *place, "--packs", str(_SHOWN)]
        arguments += ["-o", str(self._folder / "preview.png")]
        preview = Child("bagelplane preview", "bagelplane.cli.app", arguments, log=self._log("preview"))
        self._cleanup.enter_context(preview)
        topology = Topology(0, WORLD_SIZE, num_workers=0)
        forecast = make_forecast(load_dataset(self._local), topology, packs=_PLANNED)
        drawn = "drew preview.png and plan.png"
        if importlib.util.find_spec("matplotlib") is not None:
            forecast.write_png(self._folder / "plan.png")
        else:
            drawn = "drew preview.png (plan.png needs matplotlib: pip install 'bagelplane[plot]')"
        preview.wait(60)
        fill = forecast.tally.as_json()["fill"]
        self._say(
            f"{drawn}; planned {_PLANNED} packs at {forecast.packs_per_second:,.0f} a second, {fill:.0%} full"
        )

    def _finish(self, comparison: Comparison) -> None:
        seconds = time.monotonic() - self._started
        if comparison.differences:
            shown = "; ".join(comparison.differences[:5])
            raise DemoError(
                f"the bits differ in {len(comparison.differences)} places",
                got=shown,
                fix=f"keep {self._folder} and report it",
            )
        self._console.print(
            f"\n[bold green]Every bit agrees.[/] Compared with {_reference()}: {comparison.packs} packs "
            f"({comparison.twice} of them once more after the kill, {2 * _ELASTIC_PACKS} on changing ranks), "
            f"{comparison.arrays:,} arrays and lists, "
            f"{comparison.bits / 1e9:,.1f} billion bits. All of it took {seconds:.0f} s.\n",
            soft_wrap=True,
        )
        self._console.print(escape(f"Look at {self._folder}:"), soft_wrap=True)
        for name, what in (
            ("preview.png", "what the model sees: samples, pictures, texts, what carries loss"),
            ("plan.png", "fill, mix, images and drops of the next packs"),
            ("dataset.yaml", "the resource that was run; dataset-local.yaml reads the same data from files:"),
            ("", f"{own_name()} plan {_relative(self._local)}"),
            (
                "",
                f"{own_name()} explain {_relative(self._local)} --step 1 --rank 1 --world-size {WORLD_SIZE}",
            ),
            ("logs/", "what sidecar, ranks and server said"),
        ):
            if (self._folder / name).exists():
                self._console.print(f"  {name:<14}{escape(what)}", soft_wrap=True)

    def _say(self, text: str) -> None:
        elapsed = time.monotonic() - self._started
        self._console.print(f"[dim]{elapsed:5.1f} s[/]  {escape(text)}", soft_wrap=True)

    def _log(self, name: str) -> Path:
        return self._logs / f"{name}.log"


def _complete(store: SnapshotStore) -> Sequence[Any]:
    return [entry for entry in store.entries() if entry.condition == "complete"]


def _pids(ranks: Ranks) -> str:
    return ", ".join(str(child.pid) for child in ranks.children)


def _client() -> str:
    has_torch = importlib.util.find_spec("torch") is not None
    return "each with a PackedLoader" if has_torch else "each with a NumpyReader (torch is not installed)"


def _reference() -> str:
    has_torch = importlib.util.find_spec("torch") is not None
    what = "of the drop-in class PackedDataset" if has_torch else "in one process"
    return f"undisturbed runs on local files, the first {what}"


def own_name() -> str:
    """How a shell calls this program: `make demo` runs that of an environment which is not on the path."""
    beside = Path(sys.executable).with_name("bagelplane")
    return "bagelplane" if shutil.which("bagelplane") else _relative(beside)


def _relative(path: Path) -> str:
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM ends the demo as Ctrl-C does: all processes are ended on the way out."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; all processes of the demo are ended\n")
        raise
    finally:
        signal.signal(signal.SIGTERM, previous)
