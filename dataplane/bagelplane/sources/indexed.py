"""Rows as an index knows them: planning from it opens no data object, whose pixels are read when they are decoded.

What the data turn out to be when they are read (length and size of an image, number of rows) has to be what the index
says; else that is an error, never a mixture.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, overload

from PIL import Image

from bagelplane.engine.samples import EncodedImage, UnreadableImage
from bagelplane.errors import DataError
from bagelplane.sources.facts import Encode, RowColumns, RowFacts, image_key
from bagelplane.sources.index_format import text_key, value_of
from bagelplane.storage.uris import show

Rows = Sequence[Mapping[str, Any]] | Mapping[int, Mapping[str, Any]]
"""Rows of an index by number, as ROW_SCHEMA has them."""


class KnownIds(Sequence[int]):
    """The ids of a text whose number is known. They are made when somebody looks at them, for a pack's arrays."""

    __slots__ = ("_count", "_encode", "_text")

    def __init__(self, text: str, count: int, encode: Encode) -> None:
        self._text, self._count, self._encode = text, count, encode

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        ids = list(self._encode(self._text))
        if len(ids) != self._count:
            raise DataError(
                f"the index has a wrong number of tokens for the text {self._text[:60]!a}",
                got=f"{len(ids)} tokens",
                expected=f"{self._count}, as the index has it",
                fix="delete the index and make it anew",
            )
        return ids[index]

    def __iter__(self) -> Any:
        return iter(self[:])


class IndexedImage:
    """The engine's EncodedImage, known but for its pixels. `stored` gives it as the data have it."""

    __slots__ = (
        "_entry", "_source", "_stored", "comes_with_rows", "is_verified", "key", "known_failure",
    )  # fmt: skip

    def __init__(
        self, key: str, entry: Mapping[str, Any], stored: Callable[[], EncodedImage], *, comes_with_rows: bool
    ) -> None:
        self.key, self._entry, self._stored = key, entry, stored
        self.is_verified = False
        """Whether its pixels are known to decode: nobody need look."""
        self.known_failure: str | None = None
        """Why they are known not to (Automodel: planning rests on it)."""
        self.comes_with_rows = comes_with_rows
        """Whether its bytes are read with those of a whole row group, once for all of them."""
        self._source: Any = None

    def size(self) -> tuple[int, int]:
        entry = self._entry
        if entry["problem"] is not None:
            raise UnreadableImage(entry["problem"])
        return entry["width"], entry["height"]

    def fetch(self) -> None:
        """Reads what its row group has of it, for decode threads to find. DataError: it is another image now."""
        if self._source is not None:
            return
        try:
            source: Any = self._stored()
            length = len(source.data) if hasattr(source, "data") else self._entry["length_bytes"]
            found = (length, *source.size())
        except UnreadableImage as error:
            raise self._replaced(str(error)) from None
        if found != (self._entry["length_bytes"], *self.size()):
            raise self._replaced(f"{found[0]} bytes, {found[1]}x{found[2]} pixels")
        self._source = source

    def decode(self) -> Image.Image:
        """The pixels, mode RGB. Raises ImageError; DataError when it is not the image of the index."""
        self.fetch()
        image: Image.Image = self._source.decode()
        return image

    def _replaced(self, found: str) -> DataError:
        width, height = self.size()
        return DataError(
            f"the image {show(self.key)} was replaced since it was indexed",
            got=found,
            expected=f"{self._entry['length_bytes']} bytes, {width}x{height} pixels",
            fix="run `bagelplane index` again, and start again",
        )


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What holds of all images of a part."""

    is_verified: bool
    drops_undecodable: bool
    """One whose pixels were found bad is told to planning, which in profile Strict it does not concern."""

    def image(
        self, key: str, entry: Mapping[str, Any], stored: Callable[[], EncodedImage], *, comes_with_rows: bool
    ) -> IndexedImage:
        image = IndexedImage(key, entry, stored, comes_with_rows=comes_with_rows)
        image.is_verified = self.is_verified and entry["undecodable"] is None
        image.known_failure = entry["undecodable"] if self.drops_undecodable else None
        return image


class IndexedFacts:
    """RowFacts of an index. `stored` reads the same row group of the data."""

    def __init__(
        self, rows: Rows, name: str, columns: RowColumns, knowledge: Knowledge, stored: Callable[[], RowFacts]
    ) -> None:
        self._rows, self._name, self._knowledge = rows, name, knowledge
        self._is_list = columns.has_image_list
        self._read, self._stored_facts, self._lock = stored, list[RowFacts](), threading.Lock()

    def __len__(self) -> int:
        return len(self._rows)

    def images(self, row: int) -> Sequence[EncodedImage] | None:
        entry = self._rows[row]
        if not entry["is_whole"]:
            return self._stored().images(row)
        if entry["images_problem"] is not None:
            raise ValueError(entry["images_problem"])
        images = entry["images"]
        return None if images is None else [self._image(row, place, one) for place, one in enumerate(images)]

    def text(self, row: int) -> Any:
        entry = self._rows[row]
        if not entry["is_whole"]:
            return self._stored().text(row)
        return value_of(entry["text_form"], entry["text"])

    def encoder(self, row: int, encode: Encode) -> Encode:
        return known_encoder(self._rows[row], encode)

    def _image(self, row: int, place: int, entry: Mapping[str, Any]) -> IndexedImage:
        key = image_key(self._name, row, place if self._is_list else None)

        def stored() -> EncodedImage:
            images = self._stored().images(row)
            if images is None or place >= len(images):
                raise UnreadableImage("no such image in the row")
            return images[place]

        return self._knowledge.image(key, entry, stored, comes_with_rows=True)

    def _stored(self) -> RowFacts:
        with self._lock:
            if not self._stored_facts:
                facts = self._read()
                if len(facts) != len(self):
                    raise DataError(
                        f"{show(self._name)} was replaced since it was indexed",
                        got=f"{len(facts)} rows",
                        expected=f"{len(self)} rows",
                        fix="run `bagelplane index` again, and start again",
                    )
                self._stored_facts.append(facts)
            return self._stored_facts[0]


@dataclass(frozen=True, slots=True)
class IndexedLine:
    """One line of a JSONL file."""

    row: Mapping[str, Any]
    knowledge: Knowledge

    def folder(self, stored: Any) -> IndexedFolder:
        """Its images, as planning asks for them from the first on. `stored` is the image folder itself."""
        return IndexedFolder(self.row, stored, self.knowledge)

    def encoder(self, encode: Encode) -> Encode:
        return known_encoder(self.row, encode)


class IndexedFolder:
    """The images of one line, in the order in which planning asks for them; then its image folder itself."""

    def __init__(self, row: Mapping[str, Any], folder: Any, knowledge: Knowledge) -> None:
        self._entries, self._folder, self._knowledge = iter(row["images"]), folder, knowledge

    def open_image(self, name: str) -> EncodedImage:
        entry = next(self._entries, None)
        if entry is None:
            image: EncodedImage = self._folder.open_image(name)
            return image
        if entry["uri"] is None:
            raise UnreadableImage(entry["problem"])
        return self._known(entry["uri"], entry, lambda: self._folder.open_image(name))

    def list_frames(self, name: str) -> Sequence[EncodedImage]:
        entries, video = list(self._entries), list[Sequence[EncodedImage]]()
        if not entries:  # an empty folder of frames is looked at again
            frames: Sequence[EncodedImage] = self._folder.list_frames(name)
            return frames
        if entries[0]["uri"] is None:
            raise UnreadableImage(entries[0]["problem"])
        lock = threading.Lock()

        def stored(place: int) -> EncodedImage:
            with lock:  # all frames of a video are read with the first
                if not video:
                    video.append(self._folder.list_frames(name))
            if place >= len(video[0]):
                raise UnreadableImage(f"{len(video[0])} frames")
            return video[0][place]

        return [
            self._known(_frame_key(entry), entry, partial(stored, place))
            for place, entry in enumerate(entries)
        ]

    def _known(self, key: str, entry: Mapping[str, Any], stored: Callable[[], EncodedImage]) -> IndexedImage:
        return self._knowledge.image(key, entry, stored, comes_with_rows=False)


def _frame_key(entry: Mapping[str, Any]) -> str:
    return entry["uri"] if entry["frame"] is None else f"{entry['uri']}#{entry['frame']}"


def known_encoder(row: Mapping[str, Any], encode: Encode) -> Encode:
    """`encode` that gives KnownIds for the texts whose number of tokens the row of an index has."""
    counts = dict(zip(row["token_keys"], row["token_counts"], strict=True))

    def known(text: str) -> Sequence[int]:
        count = counts.get(text_key(text))
        return encode(text) if count is None else KnownIds(text, count, encode)

    return known
