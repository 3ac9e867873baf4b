"""vlm_sft: a JSONL file of conversations, and a folder with their images, frame folders and videos."""

from __future__ import annotations

import io
import random
import re
from collections.abc import Sequence
from typing import Any

from bagelplane.engine.rng import Draws
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
from bagelplane.sources.config import GroupConfig
from bagelplane.sources.stored_image import StoredImage
from bagelplane.sources.video_frames import video_frames
from bagelplane.storage import ObjectMissingError, Storage, UnusableNameError, join_uri

# A row's name leads to no file: such a row is dropped. Whatever else a store says ends the stream.
_NO_FILE = (ObjectMissingError, UnusableNameError)
_FRAME_NUMBER = re.compile(r"_(\d+)\.jpg$")


def list_units(config: GroupConfig, storage: Storage, rng: random.Random) -> list[Any]:
    """(line, image folder) pairs, blank lines included; lines are shuffled when asked, then cut to `num_used`."""
    units: list[Any] = []
    for dataset in config.datasets:
        # Text mode folds line ends, as the peer's file object does. Bytes that are no UTF-8 survive as
        # surrogates, so that such a line is dropped alone.
        text = io.TextIOWrapper(
            io.BytesIO(storage.read_bytes(dataset.jsonl_uri)), encoding="utf-8", errors="surrogateescape"
        )
        lines = text.readlines()
        if config.shuffle_lines:
            rng.seed(config.shuffle_seed)
            rng.shuffle(lines)
        units += [(line, dataset.images_uri) for line in lines[: dataset.num_used]]
    return units


class ConversationReader:
    """One block of one row a unit; `data_indexes` is the row's number."""

    def __init__(self, config: GroupConfig, storage: Storage) -> None:
        self._storage = storage

    def read_block(self, unit: tuple[str, str], block: int) -> ConversationBlock | None:
        return None if block > 0 else ConversationBlock(unit[0], ImageFolder(self._storage, unit[1]))

    def data_indexes(self, unit: int, block: int, row: int) -> int:
        return unit

    def describe(self, unit: tuple[str, str], block: int, row: int) -> str:
        # Lines are shuffled and have no number any more; their beginning can be searched for.
        return f"the line {unit[0][:80]!a}"


class ConversationBlock:
    def __init__(self, line: str, folder: ImageFolder) -> None:
        self._line, self._folder = line, folder

    def __len__(self) -> int:
        return 1

    def plan(self, row: int, context: PlanContext, draws: Draws) -> Sample:
        folder = self._folder
        return plan_conversation(
            ConversationRow(self._line, folder.open_image, folder.list_frames), context, draws
        )


class ImageFolder:
    """Names of a row, joined to the image folder as they are: `../` is followed, as the peer does."""

    def __init__(self, storage: Storage, uri: str) -> None:
        self._storage, self._uri = storage, uri

    def open_image(self, name: str) -> StoredImage:
        return self._stored(self._join(name))

    def list_frames(self, name: str) -> Sequence[EncodedImage]:
        """The frames of a folder (its name ends in a slash), by number; or of a video file.

        The empty name is the image folder itself, as joining it to that gives one that ends in a slash.
        """
        uri = self._join(name) if name else f"{self._uri.rstrip('/')}/"
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

    def _join(self, name: str) -> str:
        try:
            return join_uri(self._uri, name)
        except DataError as error:
            raise UnreadableImage(str(error)) from None

    def _stored(self, uri: str) -> StoredImage:
        return StoredImage(uri, lambda: self._read(uri))

    def _read(self, uri: str) -> bytes:
        try:
            return self._storage.read_bytes(uri)
        except _NO_FILE as error:
            raise UnreadableImage(str(error)) from None


def _frame_number(uri: str) -> int:
    match = _FRAME_NUMBER.search(uri)
    return int(match.group(1)) if match else -1
