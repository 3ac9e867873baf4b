"""Look at rows once, for an index: what planning them would ask of the data, asked now and written down.

Nothing here knows how to plan. Rows are planned by the engine itself, with the outcomes of their draws up to a limit,
and the texts that it encodes on the way are those whose number of tokens the index keeps. A text that it asks for later
and that is not there is encoded then: slower, and the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from bagelplane.engine.profile import Profile
from bagelplane.engine.resizing import ResizeRule
from bagelplane.engine.rng import Draws, each_outcome
from bagelplane.engine.samples import (
    EncodedImage,
    ImageLedger,
    ImageTransform,
    PlanContext,
    RowDropped,
    Sample,
    UnreadableImage,
    is_text,
)
from bagelplane.errors import BagelplaneError
from bagelplane.images import ImageError, head_size, image_format
from bagelplane.sources.facts import Encode, RowColumns, RowFacts
from bagelplane.sources.group import Block
from bagelplane.sources.index_format import ROW_SCHEMA, form_of, is_unicode, text_key
from bagelplane.sources.indexed import IndexedFacts, IndexedImage, Knowledge
from bagelplane.sources.stored_image import StoredImage, reading_of
from bagelplane.storage import Storage
from bagelplane.strict_images import upright_head_size

_OUTCOMES_TRIED = 64
_HEAD_BYTES = 64 * 1024
_READ_WHOLE_BYTES = 256 * 1024
_TRANSFORM = ImageTransform(ResizeRule(stride=16, max_size=1024, min_size=256))
"""Any would do: sizes after resizing are not kept."""

Plan = Callable[[PlanContext, Draws], Sample]


@dataclass(slots=True)
class Looked:
    """Rows looked at, and what there is to count of them."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    images: int = 0
    image_bytes: int = 0
    undecodable: int = 0
    drops: dict[str, int] = field(default_factory=dict)

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        for image in row["images"] or ():
            self.images += 1
            self.image_bytes += image["length_bytes"] or 0
            self.undecodable += image["undecodable"] is not None
        reason = row["drop_reason"]
        if reason is not None:
            self.drops[reason] = self.drops.get(reason, 0) + 1

    def table(self) -> pa.Table:
        return pa.Table.from_pylist(self.rows, schema=ROW_SCHEMA)


@dataclass(frozen=True, slots=True)
class Looker:
    """How rows are looked at. `verify`: images are decoded too. For any thread."""

    storage: Storage
    profile: Profile
    encode: Encode
    verify: bool
    _files: dict[str, Future[dict[str, Any]]] = field(default_factory=dict)
    """Images that are objects of their own: lines may share them."""

    def parquet_row(
        self, facts: RowFacts, name: str, columns: RowColumns, row_group: int, row: int,
        block_of: Callable[[RowFacts], Block],
    ) -> dict[str, Any]:  # fmt: skip
        """One row of the row group called `name`. `block_of` makes a block of facts, of whichever source."""
        entry = _new_row(row_group, row)
        try:
            images = facts.images(row)
            entry["images"] = None if images is None else [self._image(image) for image in images]
        except ValueError as error:
            entry["images_problem"] = str(error)
        value: Any = None
        try:
            value = facts.text(row)
        except ValueError as error:
            entry |= {"text_form": "error", "text": str(error)}
        else:
            entry |= _kept(value)
        entry = _storable(entry)
        if entry["is_whole"]:
            block = block_of(IndexedFacts({row: entry}, name, columns, self._knowledge, lambda: facts))
            self._plan(entry, lambda context, draws: block.plan(row, context, draws), value, _OUTCOMES_TRIED)
        return entry

    def line(self, row: int, line: str, folder: Any, block_of: Callable[[Any], Block]) -> dict[str, Any]:
        """One line of a JSONL file. `block_of` makes its block over a folder that is asked for its images."""
        entry = _new_row(None, row)
        entry["text_form"], entry["text"] = form_of(line)
        asked = _AskedFolder(folder, self)
        block = block_of(asked)
        self._plan(entry, lambda context, draws: block.plan(0, context, draws), None, 1)
        entry["images"] = asked.entries
        return _storable(entry)

    def file_image(self, image: StoredImage) -> dict[str, Any]:
        """An image that is an object of its own: from its beginning where that is enough. Two requests as a rule,
        however many lines name it.
        """
        mine: Future[dict[str, Any]] = Future()
        found = self._files.setdefault(image.key, mine)
        if found is mine:
            try:
                mine.set_result(self._look_at_file(image))
            except BaseException as error:
                mine.set_exception(error)
                raise
        return found.result()

    def _look_at_file(self, image: StoredImage) -> dict[str, Any]:
        try:
            with self.storage.open_binary(image.key) as file:
                length = file.seek(0, 2)
                file.seek(0)
                head = file.read(length if self.verify or length <= _READ_WHOLE_BYTES else _HEAD_BYTES)
                size = self._head_size(head, length) if len(head) < length else None
                data = head if size is not None else head + file.read()
        except BagelplaneError:
            # Asked again in the way of planning: what it hears is what is kept.
            return self._image(image) | {"uri": image.key}
        if size is not None:
            return _new_image(image.key) | _sized(size, image_format(head), length)
        whole = StoredImage(image.key, lambda: data, reading_of(self.profile))
        return self._image(whole) | {"uri": image.key}

    @property
    def _knowledge(self) -> Knowledge:
        return Knowledge(self.verify, drops_undecodable=not self.profile.plan_is_pure)

    def known(self, key: str, entry: dict[str, Any], stored: EncodedImage) -> IndexedImage:
        return self._knowledge.image(key, entry, lambda: stored, comes_with_rows=False)

    def _head_size(self, head: bytes, length: int) -> tuple[int, int] | None:
        return (upright_head_size if self.profile.mends_pictures else head_size)(head, length)

    def _image(self, image: Any) -> dict[str, Any]:
        try:
            size = image.size()
        except UnreadableImage as error:
            return _new_image() | {"problem": str(error)}
        data = getattr(image, "data", None)  # frames of a video have none of their own
        entry = _new_image() | _sized(size, data and image_format(data), None if data is None else len(data))
        if self.verify:
            entry["undecodable"] = _failure(image)
        return entry

    def frame(self, image: Any) -> dict[str, Any]:
        """A frame: an image of its own in a folder, or one of a video."""
        if isinstance(image, StoredImage):
            return self.file_image(image)
        uri, _, number = image.key.rpartition("#")
        return self._image(image) | {"uri": uri, "frame": int(number)}

    def _plan(self, entry: dict[str, Any], plan: Plan, value: Any, outcomes: int) -> None:
        """Fills in the token counts, and why the row is dropped whatever is drawn."""
        counts: dict[str, int] = {}

        def encode(text: str) -> Sequence[int]:
            ids = self.encode(text)
            counts[text] = len(ids)
            return ids

        context = PlanContext(encode, ImageLedger(), _TRANSFORM, _TRANSFORM, profile=self.profile)
        dropped: RowDropped | None = None
        is_used = False
        for draws in itertools.islice(each_outcome(), outcomes):
            try:
                plan(context, draws)
                is_used = True
            except RowDropped as error:
                dropped = dropped or error
        for text in _texts_in(value):
            if text not in counts and is_text(text):
                encode(text)
        if dropped is not None and not is_used:
            entry["drop_reason"], entry["drop_message"] = str(dropped.reason), _shown(dropped.message)
        entry["token_keys"] = [text_key(text) for text in counts]
        entry["token_counts"] = list(counts.values())


class _AskedFolder:
    """An image folder that writes down what it is asked for, in order, and what there is to say of it."""

    def __init__(self, folder: Any, looker: Looker) -> None:
        self._folder, self._looker = folder, looker
        self.entries: list[dict[str, Any]] = []

    def open_image(self, name: str) -> EncodedImage:
        with self._refusals_noted():
            image = self._folder.open_image(name)
        return self._noted(image, self._looker.file_image(image))

    def list_frames(self, name: str) -> Sequence[EncodedImage]:
        with self._refusals_noted():
            frames = self._folder.list_frames(name)
        return [self._noted(frame, self._looker.frame(frame)) for frame in frames]

    def _noted(self, image: EncodedImage, entry: dict[str, Any]) -> EncodedImage:
        self.entries.append(entry)
        return self._looker.known(image.key, entry, image)

    @contextmanager
    def _refusals_noted(self) -> Iterator[None]:
        try:
            yield
        except UnreadableImage as error:
            self.entries.append(_new_image() | {"problem": str(error)})
            raise


def _new_row(row_group: int | None, row: int) -> dict[str, Any]:
    entry: dict[str, Any] = dict.fromkeys(ROW_SCHEMA.names)
    return entry | {
        "row_group": row_group, "row": row, "is_whole": True, "text_form": "null", "token_keys": [],
        "token_counts": [],
    }  # fmt: skip


def _new_image(uri: str | None = None) -> dict[str, Any]:
    names = ("frame", "width", "height", "format", "length_bytes", "problem", "undecodable")
    return {"uri": uri, **dict.fromkeys(names)}


def _kept(value: Any) -> dict[str, Any]:
    try:
        form, text = form_of(value)
    except ValueError:
        return {"is_whole": False}
    return {"text_form": form, "text": text}


def _sized(size: tuple[int, int], name: str | None, length: int | None) -> dict[str, Any]:
    return {"width": size[0], "height": size[1], "format": name, "length_bytes": length}


def _failure(image: Any) -> str | None:
    """Why an image that opens does not decode."""
    try:
        image.decode()
    except ImageError as error:
        return str(error) or type(error).__name__
    return None


def _texts_in(value: Any) -> Iterator[str]:
    """The texts in a list of texts, or of lists of them."""
    for entry in value if isinstance(value, list) else ():
        if isinstance(entry, str):
            yield entry
        yield from _texts_in(entry)


def _shown(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _storable(entry: dict[str, Any]) -> dict[str, Any]:
    """The row as Parquet can hold it: one with a text that is no Unicode is left to the data, and says so."""
    images: Iterable[dict[str, Any]] = entry["images"] or ()
    texts = [entry["images_problem"], entry["text"] if entry["text_form"] != "json" else None]
    texts += [image[name] for image in images for name in ("uri", "problem", "undecodable")]
    if all(text is None or is_unicode(text) for text in texts):
        return entry
    text = entry["text"] if entry["text_form"] == "json" else _shown(entry["text"] or "")
    return entry | {"images": None, "images_problem": None, "text": text, "is_whole": False}
