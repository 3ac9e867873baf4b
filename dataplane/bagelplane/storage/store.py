"""The class that everything else uses: URIs to backends, errors translated, passing failures tried again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import BinaryIO, TypeVar, cast

from bagelplane.costs import Costs
from bagelplane.errors import ObjectExistsError
from bagelplane.storage.ahead import Part, ReadAhead
from bagelplane.storage.backends import Backend, Children, FileInfo
from bagelplane.storage.faults import Attempted, Fault, ObjectMissingError, classify
from bagelplane.storage.local import LocalFiles
from bagelplane.storage.objects import FsspecObjects, S3Objects
from bagelplane.storage.ranged import WINDOW_BYTES, RangedFile
from bagelplane.storage.retries import RetryPolicy
from bagelplane.storage.settings import StorageSettings
from bagelplane.storage.uris import Location, parse_uri, show

_Result = TypeVar("_Result")


class Storage:
    """Access to objects by URI. Made by `open_storage`; used by any thread; pickled as its settings.

    All methods raise StorageError for what lasts (ObjectMissingError: it is not there; ObjectExistsError) and
    TransientStorageError for what still failed after all tries.
    """

    def __init__(self, settings: StorageSettings) -> None:
        self.settings = settings
        self._policy = RetryPolicy(attempts=settings.attempts, seconds=settings.retry_seconds)
        self._backends: dict[str, Backend] = {}
        self._pinned: dict[str, FileInfo] = {}
        self._waiting: dict[object, str] = {}
        self.on_wait: Callable[[str], None] | None = None
        """Set where a store that is away is to be waited for: called, by any thread, with what is waited for, and with
        "" when that is over. None: an error after the usual tries."""
        self.costs = Costs()
        self.ahead = ReadAhead(self._read_part, settings.read_ahead_bytes, settings.read_ahead_requests)

    def __reduce__(self) -> tuple[object, ...]:
        return open_storage, (self.settings,)

    @property
    def retry_count(self) -> int:
        """How many requests were tried again so far."""
        return sum(self.costs.as_json()["retries"].values())

    def list_files(self, uri: str, suffix: str = "", *, missing_ok: bool = False) -> list[FileInfo]:
        """The files directly in the folder `uri` whose names end with `suffix`, sorted by URI. Never stale.

        Zero-byte folder markers are left out. With `missing_ok` a folder that is absent or has no such file
        gives an empty list; else that is an ObjectMissingError. A missing bucket is an error in any case.
        """
        children = self._children(uri, missing_ok=missing_ok)
        found = [info for info in children.files if info.uri.endswith(suffix)]
        if not found and not missing_ok:
            others = len(children.files) + len(children.folders)
            raise ObjectMissingError(
                f"no files{f' ending in {suffix}' if suffix else ''} in {self._where(uri)}",
                got=f"{others} other entries" if others else "nothing below that prefix",
                fix="correct the prefix, or put the files there",
            )
        return sorted(found, key=lambda info: info.uri)

    def list_folders(self, uri: str, *, missing_ok: bool = False) -> list[str]:
        """The URIs of the folders directly in `uri`, each with a slash at its end, sorted. `missing_ok` as
        above.
        """
        children = self._children(uri, missing_ok=missing_ok)
        if not children.files and not children.folders and not missing_ok:
            raise ObjectMissingError(f"nothing below {self._where(uri)}", fix="correct the prefix")
        return sorted(children.folders)

    def list_all(self, uri: str) -> Children:
        """Files and folders directly in `uri`, in no order, by one listing. A local folder may be empty; in a
        store there is no such thing: ObjectMissingError, as for a missing one.
        """
        children = self._children(uri, missing_ok=False)
        if not children.files and not children.folders and not parse_uri(uri).is_local:
            raise ObjectMissingError(f"nothing below {self._where(uri)}", fix="correct the prefix")
        return children

    def pin(self, infos: Iterable[FileInfo]) -> None:
        """From now on `open_binary` takes these versions as current: of another one nothing is read."""
        self._pinned.update((info.uri, info) for info in infos)

    def info(self, uri: str) -> FileInfo:
        """Size and version of one object."""
        location = parse_uri(uri)
        return self._run("look up", location, lambda backend, _: backend.info(location))

    def exists(self, uri: str) -> bool:
        """Whether the object is there. A missing bucket and denied access are errors, not False."""
        try:
            self.info(uri)
        except ObjectMissingError:
            return False
        return True

    def read_bytes(self, uri: str, *, limit_bytes: int | None = None) -> bytes:
        """The whole object. ObjectTooLargeError, and nothing of it is kept, if it has more than `limit_bytes`."""
        ahead = self.ahead.take(uri, 0, None) if limit_bytes is None else None
        return self._read_part(Part(uri), limit_bytes) if ahead is None else ahead

    def _read_part(self, part: Part, limit_bytes: int | None = None) -> bytes:
        location = parse_uri(part.uri)
        data = self._run(
            "read",
            location,
            lambda backend, _: backend.read(location, part.start, part.end, part.version, limit_bytes),
        )
        self.costs.read(len(data))
        return data

    def is_remote(self, uri: str) -> bool:
        """Whether reading it is a request over the network."""
        return not parse_uri(uri).is_local

    def pinned_version(self, uri: str) -> str | None:
        """The version that was pinned; None where none was."""
        pinned = self._pinned.get(uri)
        return pinned.version if pinned is not None else None

    def open_binary(
        self, uri: str, info: FileInfo | None = None, *, whole: bool = False, window_bytes: int = WINDOW_BYTES
    ) -> BinaryIO:
        """The object as a seekable file, for pyarrow among others. Local: a plain buffered file. `info` is what
        a listing told of it: it is not looked up again then.

        Remote: each read is a ranged request, bound to the version that was pinned, or else found at opening: an
        object that was replaced since gives an error, never a mixture. With `whole` it will be read from its
        beginning to its end, and is fetched ahead. Small reads fetch `window_bytes`; 0: no more than is asked for.
        """
        location = parse_uri(uri)
        info = info or self._pinned.get(uri)
        if location.is_local:
            self.info(uri)  # refuses a folder in the same words as elsewhere
            version = info.version if info is not None else None
            return self._run(
                "read",
                location,
                lambda backend, _: cast(LocalFiles, backend).open(location, self.costs, version),
            )
        info = info or self.info(uri)

        def fetch(start: int, end: int) -> bytes:
            return self._read_part(Part(uri, start, end, info.version))

        def take(start: int, end: int) -> bytes | None:
            return self.ahead.take(uri, start, end, info.version)

        file = RangedFile(show(uri), info.size_bytes, fetch, take, window_bytes=window_bytes)
        if whole:
            self._follow(file, info)
        return cast(BinaryIO, file)

    def _follow(self, file: RangedFile, info: FileInfo) -> None:
        """Fetch a file ahead, until it is closed."""
        size, step = info.size_bytes, self.ahead.part_bytes

        lane = self.ahead.lane(lambda _unit, _block: (), 1, 1)
        if lane is not None:
            lane.expect(
                [Part(info.uri, at, min(at + step, size), info.version) for at in range(0, size, step)]
            )
            weakref.finalize(file, lane.close)

    def close(self) -> None:
        """Ends reading ahead. What is asked for later is still read."""
        self.ahead.close()

    def write_bytes(
        self, uri: str, data: bytes | bytearray | memoryview, *, only_if_absent: bool = False
    ) -> None:
        """Writes the object; a reader sees the old one or the new one, never a part. Local folders are made.

        With `only_if_absent` an object that is there already is kept, and ObjectExistsError raised. Of
        several
        writers at once just one wins, except on stores that do not know conditional puts: those are found
        out by a probe, and then the object is looked for before and read back after, which leaves a short
        gap.
        """
        location, view = parse_uri(uri), memoryview(data).cast("B")
        if not only_if_absent:
            self._run("write", location, lambda backend, _: backend.write(location, view))
        elif self._run("write", location, lambda backend, _: backend.is_conditional(location)):
            self._run(
                "write", location, lambda backend, attempt: self._create(backend, location, view, attempt)
            )
        else:
            self._create_unconditionally(location, view)
        self.costs.wrote(len(view))

    def delete(self, uri: str) -> None:
        """Removes the object; no error if it is not there."""
        location = parse_uri(uri)
        self._run("delete", location, lambda backend, _: backend.delete(location))

    def _create(self, backend: Backend, location: Location, data: memoryview, attempt: int) -> None:
        try:
            backend.create(location, data)
        except Exception as error:
            # An earlier try may have been carried out although its answer was lost.
            fault = self._classify(error, "write", location)
            is_ours = attempt > 0 and isinstance(fault.error, ObjectExistsError)
            if not is_ours or backend.read(location, 0, None, None) != bytes(data):
                raise

    def _create_unconditionally(self, location: Location, data: memoryview) -> None:
        taken = ObjectExistsError(
            f"cannot write {self._where(location.uri)}: it is there already", fix="use another key"
        )
        if self.exists(location.uri):
            raise taken
        self._run("write", location, lambda backend, _: backend.write(location, data))
        if self.read_bytes(location.uri) != bytes(data):
            raise taken

    def _children(self, uri: str, *, missing_ok: bool) -> Children:
        location = parse_uri(uri)
        try:
            return self._run("list", location, lambda backend, _: backend.children(location))
        except ObjectMissingError:
            if missing_ok:
                return Children([], [])
            raise

    def _backend(self, location: Location) -> Backend:
        backend = self._backends.get(location.scheme)
        if backend is None:
            made: Backend
            if location.is_local:
                made = LocalFiles()
            elif location.scheme == "s3":
                made = S3Objects(self.settings)
            else:
                made = FsspecObjects(location.scheme, self.settings)
            backend = self._backends.setdefault(location.scheme, made)
        return backend

    def _run(self, verb: str, location: Location, action: Callable[[Backend, int], _Result]) -> _Result:
        backend = self._backend(location)
        generation = 0

        def attempt(number: int) -> _Result:
            nonlocal generation
            generation = backend.generation()
            begun = perf_counter()
            try:
                return action(backend, number)
            finally:
                self.costs.requested(verb.replace(" ", "_"), perf_counter() - begun)

        request = object()
        try:
            return self._policy.run(
                attempt,
                lambda error: self._classify(error, verb, location),
                lambda: backend.reconnect(generation),
                lambda fault: self.costs.retried(fault.cause),
                lambda fault: self._outlasts(request, fault),
            )
        finally:
            if request in self._waiting:
                del self._waiting[request]
                if self.on_wait is not None and not self._waiting:
                    self.on_wait("")

    def _outlasts(self, request: object, fault: Fault) -> bool:
        if self.on_wait is None:
            return False
        is_first = not self._waiting
        self._waiting[request] = fault.error.what
        if is_first:
            self.on_wait(f"{fault.error.what} ({fault.error.got})")
        return True

    def _classify(self, error: Exception, verb: str, location: Location) -> Fault:
        backend = self._backend(location)
        return classify(error, Attempted(verb, location, backend.endpoint()), region=backend.region())

    def _where(self, uri: str) -> str:
        location = parse_uri(uri)
        endpoint = self._backend(location).endpoint()
        return f"{show(uri)} at {endpoint}" if endpoint else show(uri)


def open_storage(settings: StorageSettings | None = None) -> Storage:
    """Access with these settings. Opens nothing yet: the first use does."""
    return Storage(settings or StorageSettings())
