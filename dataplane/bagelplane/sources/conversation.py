"""vlm_sft: a JSONL file of conversations, and a folder with their images, frame folders and videos."""

from __future__ import annotations

import io
import json
import random
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, BinaryIO, Protocol, cast

from bagelplane.engine.profile import Profile
from bagelplane.engine.rng import Draws
from bagelplane.engine.rows import RowPlace
from bagelplane.engine.samples import (
    ConversationRow,
    EncodedImage,
    PlanContext,
    Sample,
    UnreadableImage,
    plan_conversation,
)
from bagelplane.errors import DataError
from bagelplane.images import ImageError
from bagelplane.sources.config import DatasetConfig, GroupConfig
from bagelplane.sources.facts import Encode
from bagelplane.sources.index import DatasetIndex, NotIndexedError
from bagelplane.sources.parquet import ahead_of
from bagelplane.sources.stored_image import StoredImage, reading_of
from bagelplane.sources.video_frames import video_frames
from bagelplane.storage import ObjectMissingError, Storage, UnusableNameError, join_uri
from bagelplane.storage.ahead import Part

# A row's name leads to no file: such a row is dropped. Whatever else a store says ends the stream.
_NO_FILE = (ObjectMissingError, UnusableNameError)
_ROWS_LOOKED_AT, _ROWS_SOUGHT, _NAMES_SOUGHT = 100, 3, 8
_CHUNK_BYTES, _LONGEST_LINE_BYTES = 1024 * 1024, 8 * 1024 * 1024
Unit = tuple[str, str] | tuple[str, str, str, int]
"""A line and its image folder, as the documented classes have it; and where the line stands."""

_FRAME_NUMBER = re.compile(r"_(\d+)\.jpg$")


def list_units(
    config: GroupConfig, storage: Storage, rng: random.Random, index: DatasetIndex | None = None
) -> list[Any]:
    """(line, image folder, file, number of the line), blank lines included; shuffled when asked, then cut to
    `num_used`."""
    units: list[Any] = []
    for dataset in config.datasets:
        lines = list(enumerate(_lines_of(dataset, storage, config.type, index)))
        if config.shuffle_lines:
            rng.seed(config.shuffle_seed)
            rng.shuffle(lines)
        folder, file = dataset.images_uri, dataset.jsonl_uri
        units += [(line, folder, file, number) for number, line in lines[: dataset.num_used]]
    return units


def _lines_of(dataset: DatasetConfig, storage: Storage, kind: str, index: DatasetIndex | None) -> list[str]:
    uri, folder = dataset.jsonl_uri, dataset.images_uri
    if index is not None and index.see(kind, storage.info(uri), folder):
        with suppress(NotIndexedError):
            return index.lines(kind, uri, folder)
    return read_lines(storage, uri)


def count_lines(storage: Storage, uri: str) -> int:
    """How many lines a JSONL file has, blank ones too."""
    return len(read_lines(storage, uri))


def read_lines(storage: Storage, uri: str) -> list[str]:
    """All lines with their ends, blank ones too."""
    return split_lines(storage.open_binary(uri, whole=True))


def split_lines(file: BinaryIO) -> list[str]:
    """The lines of a file, which is closed then, as `read_lines` gives them."""
    # Text mode folds line ends, as the peer's file object does. Bytes that are no UTF-8 survive as surrogates,
    # so that such a line is dropped alone.
    data = io.BufferedReader(cast(Any, file), _CHUNK_BYTES)
    with io.TextIOWrapper(data, encoding="utf-8", errors="surrogateescape") as text:
        return text.readlines()


def look(dataset: DatasetConfig, storage: Storage, enough: int) -> int:
    """Looks at the first rows and for their images; how many lines there are, counted to `enough`.

    Raises DataError when none of the rows is a conversation, or the folder has none of their images.
    """
    limit = min(enough, sys.maxsize if dataset.num_used is None else dataset.num_used)
    count, lines = 0, list[str]()
    with (
        storage.open_binary(dataset.jsonl_uri) as file,
        io.BufferedReader(cast(Any, file), _CHUNK_BYTES) as text,
    ):
        while count < max(limit, _ROWS_LOOKED_AT) and (line := text.readline(_LONGEST_LINE_BYTES)):
            count += 1
            if len(lines) < _ROWS_LOOKED_AT:
                lines.append(line.decode("utf-8", "surrogateescape"))
    rows = [row for row in map(_conversation_of, lines) if row is not None]
    if lines and not rows:
        raise DataError(
            f"{dataset.jsonl_uri} begins with no conversation",
            got=f"{len(lines)} lines without one, the first: {lines[0][:60].strip()!a}",
            expected='a JSON object a line, as {"image": ..., "conversations": [...]}',
            fix="correct `jsonl`, or write the file anew",
        )
    _look_for_images(rows, dataset, storage)
    return min(count, limit)


def _conversation_of(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("conversations"), list) else None


def _look_for_images(rows: list[dict[str, Any]], dataset: DatasetConfig, storage: Storage) -> None:
    """DataError when no image or video of the first rows that have some is where it should be."""
    folder = ImageFolder(storage, dataset.images_uri, dataset.profile)
    sought: list[str] = []
    for names in [names for row in rows if (names := _names_in(row))][:_ROWS_SOUGHT]:
        for name in names:
            if folder.has(name):
                return
            sought.append(name)
    if sought:
        raise DataError(
            f"the folder {dataset.images_uri} has no image of the first rows of {dataset.jsonl_uri}",
            got=f"nothing called {sought[0][:200]!a}" + (f" or {sought[-1][:200]!a}" if sought[1:] else ""),
            expected="the images that the rows name, below that folder",
            fix="correct `images`: names are joined to it as they are",
        )


def _names_in(row: dict[str, Any]) -> list[str]:
    names = row.get("image", row.get("video", []))
    names = names if isinstance(names, list) else [names]
    return [name for name in names if isinstance(name, str)][:_NAMES_SOUGHT]


class ConversationReader:
    """One block of one row a unit; `data_indexes` is the row's number."""

    def __init__(self, config: GroupConfig, storage: Storage, index: DatasetIndex | None = None) -> None:
        self._storage, self._profile = storage, config.profile
        self._type, self._index = config.type, index
        self.ahead = ahead_of(storage, [dataset.images_uri for dataset in config.datasets])

    units_ahead = 64

    def parts_of(self, unit: Unit, block: int) -> list[Part]:
        """The images that a line names. (Of a video nothing is known before its folder is listed.)"""
        row = json.loads(unit[0])
        names = row.get("image", []) if isinstance(row, dict) else []
        folder = ImageFolder(self._storage, unit[1], self._profile)
        return [
            Part(folder.uri_of(name))
            for name in (names if isinstance(names, list) else [names])
            if isinstance(name, str) and not name.endswith("/")
        ]

    def read_block(self, unit: Unit, block: int) -> ConversationBlock | None:
        if block > 0:
            return None
        folder = ImageFolder(self._storage, unit[1], self._profile)
        if self._index is not None and len(unit) == 4:
            _, _, file, number = unit
            with suppress(NotIndexedError):
                row = self._index.line(self._type, file, unit[1], number)
                return ConversationBlock(unit[0], partial(row.folder, folder), row.encoder)
        return ConversationBlock(unit[0], lambda: folder)

    def expect(self, units: Sequence[Unit]) -> None:
        """Lines lie in a few parts, each of which is asked for all the time."""

    def data_indexes(self, unit: int, block: int, row: int) -> int:
        return unit

    def locate(self, unit: Unit, block: int, row: int) -> RowPlace | None:
        return RowPlace(unit[2], None, unit[3]) if len(unit) == 4 else None

    def describe(self, unit: Unit, block: int, row: int) -> str:
        # Lines are shuffled and have no number any more; their beginning can be searched for.
        return f"the line {unit[0][:80]!a}"


class Folder(Protocol):
    """Where the names of a row lead."""

    def open_image(self, name: str) -> EncodedImage: ...
    def list_frames(self, name: str) -> Sequence[EncodedImage]: ...


class ConversationBlock:
    """`open_folder` gives the folder as it is before any name was asked for; `encoder`, see RowFacts."""

    def __init__(
        self,
        line: str,
        open_folder: Callable[[], Folder],
        encoder: Callable[[Encode], Encode] = lambda encode: encode,
    ) -> None:
        self._line, self._open_folder, self._encoder = line, open_folder, encoder

    def __len__(self) -> int:
        return 1

    def plan(self, row: int, context: PlanContext, draws: Draws) -> Sample:
        folder = self._open_folder()
        context = replace(context, encode=self._encoder(context.encode))
        return plan_conversation(
            ConversationRow(self._line, folder.open_image, folder.list_frames), context, draws
        )


class ImageFolder:
    """Names of a row, joined to the image folder as they are: `../` is followed, as the peer does.

    In profile Strict a name that leads out of the folder opens nothing.
    """

    def __init__(self, storage: Storage, uri: str, profile: Profile) -> None:
        self._storage, self._uri, self._profile = storage, uri, profile

    def open_image(self, name: str) -> StoredImage:
        return self._stored(self.uri_of(name))

    def list_frames(self, name: str) -> Sequence[EncodedImage]:
        """The frames of a folder (its name ends in a slash), by number; or of a video file.

        The empty name is the image folder itself, as joining it to that gives one that ends in a slash.
        """
        uri = self.uri_of(name) if name else f"{self._uri.rstrip('/')}/"
        if not uri.endswith("/"):
            try:
                return video_frames(uri, self._read(uri))
            except ImageError as error:
                raise UnreadableImage(f"{uri}: {error}") from None
        try:
            children = self._storage.list_all(uri)
        except _NO_FILE as error:
            raise UnreadableImage(str(error)) from None
        if children.folders:
            raise UnreadableImage(f"{uri}: a folder lies among the frames, {children.folders[0]}")
        files = sorted(info.uri for info in children.files)
        return [self._stored(file) for file in sorted(files, key=_frame_number)]

    def has(self, name: str) -> bool:
        """Whether there is such a file or (with a slash at its end) a folder of frames with something in it."""
        try:
            uri = self.uri_of(name)
            if uri.endswith("/"):
                return bool(self._storage.list_all(uri).files)
            return self._storage.exists(uri)
        except (UnreadableImage, *_NO_FILE):
            return False

    def uri_of(self, name: str) -> str:
        """Raises UnreadableImage for a name that may not be followed."""
        try:
            return join_uri(self._uri, name, inside=self._profile.images_match_text)
        except DataError as error:
            raise UnreadableImage(str(error)) from None

    def _stored(self, uri: str) -> StoredImage:
        return StoredImage(uri, lambda: self._read(uri), reading_of(self._profile))

    def _read(self, uri: str) -> bytes:
        try:
            return self._storage.read_bytes(uri)
        except _NO_FILE as error:
            raise UnreadableImage(str(error)) from None


def _frame_number(uri: str) -> int:
    match = _FRAME_NUMBER.search(uri)
    return int(match.group(1)) if match else -1
