"""What planning asks of a block of rows: values without their pixels.

The one seam between the planner and where it knows rows from. `StoredFacts` looks into the data, `indexed.IndexedFacts`
into an index of them; tests/contract/test_row_facts.py holds both to the same answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from bagelplane.engine.profile import Profile
from bagelplane.engine.samples import EncodedImage
from bagelplane.sources.parquet import Column, RowGroup, WholeRows
from bagelplane.sources.stored_image import image_of_value

Encode = Callable[[str], Sequence[int]]


class RowFacts(Protocol):
    """A block of Parquet rows. `images` and `text` raise ValueError where Python has no such value."""

    def __len__(self) -> int: ...

    def images(self, row: int) -> Sequence[EncodedImage] | None:
        """The row's images in order; None when its value is no list of them."""
        ...

    def text(self, row: int) -> Any:
        """What the row has in its column of texts."""
        ...

    def encoder(self, row: int, encode: Encode) -> Encode:
        """`encode` for the texts of this row: the same ids, whose number may be known without making them."""
        ...


@dataclass(frozen=True, slots=True)
class RowColumns:
    """The columns that a group type plans its rows from."""

    images: str
    texts: str
    has_image_list: bool
    """A row has a list of images, not one."""

    @property
    def names(self) -> list[str]:
        return [self.images, self.texts]


class StoredFacts:
    """A row group as read; `name` is its block's."""

    def __init__(self, rows: RowGroup | WholeRows, name: str, columns: RowColumns, profile: Profile) -> None:
        self._name, self._length, self._profile = name, rows.num_rows, profile
        self._is_list = columns.has_image_list
        self._images, self._texts = Column(rows, columns.images), Column(rows, columns.texts)

    def __len__(self) -> int:
        return int(self._length)

    def images(self, row: int) -> Sequence[EncodedImage] | None:
        value = self._images[row]
        if not self._is_list:
            return [image_of_value(image_key(self._name, row), value, self._profile)]
        if not isinstance(value, list):
            return None
        return [
            image_of_value(image_key(self._name, row, place), entry, self._profile)
            for place, entry in enumerate(value)
        ]

    def text(self, row: int) -> Any:
        return self._texts[row]

    def encoder(self, row: int, encode: Encode) -> Encode:
        return encode


def block_name(uri: str, row_group: int) -> str:
    return f"{uri}#{row_group}"


def image_key(block: str, row: int, place: int | None = None) -> str:
    """How an image in a Parquet file is called: for good, since snapshots keep it."""
    return f"{block}/{row}" if place is None else f"{block}/{row}/{place}"
