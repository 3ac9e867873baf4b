"""Plan one row as a sample: its texts, images, sequence plan and token count, from headers and text alone.

One function a group type. The order of image openings and draws in them is part of the stream: a row that is
dropped half-way has consumed the draws made up to that point (STREAM, Samples).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeGuard

import numpy as np

from bagelplane.engine.drops import DropReason
from bagelplane.engine.profile import AUTOMODEL, Profile
from bagelplane.engine.resizing import ResizeRule
from bagelplane.engine.rng import Draws
from bagelplane.engine.rows import RowPlace

ItemKind = Literal["text", "vit_image", "vae_image"]

_JSON_BEGINS = frozenset('{["\ufeff')
IMAGE_TAG = "<image>"
VIDEO_TAG = "<video>"
_NO_IMAGE: tuple[object, ...] = ("", "None", None, [])


class UnreadableImage(Exception):
    """An image is missing, or does not open, or is known not to decode.

    `reason` is the one to count it under, where that is not the reason that the group type has for its images.
    """

    def __init__(self, message: str, reason: DropReason | None = None) -> None:
        super().__init__(message)
        self.reason = reason


class RowDropped(Exception):
    """A row that is not trained on. `reason` is a DropReason or a text of the user's own group type."""

    def __init__(self, reason: str, message: str, place: RowPlace | None = None) -> None:
        super().__init__(reason, message)
        self.reason, self.message, self.place = reason, message, place


class EncodedImage(Protocol):
    """An image as stored: a stable key, and what its header says."""

    @property
    def key(self) -> str:
        """Names the image for good: object, row group, row and place in the row."""
        ...

    def size(self) -> tuple[int, int]:
        """(width, height) in pixels after decoding, from the header. Raises UnreadableImage."""
        ...


class ImageLedger:
    """What is known of images while packs are planned: which do not decode, and which were opened.

    `opened` grows with each opening until `take_opened`; what is in it has to be decoded before the pack that is
    being planned may be handed over, for the peer meets an undecodable image while drawing.

    With `check` (the cause why an image does not decode, or None) images are decoded as they are opened: for
    streams that cannot go back and plan again, because a group of the user's own has drawn meanwhile.

    Images of more than `max_pixels` do not open (profile Strict); None: there is no limit.
    """

    def __init__(
        self,
        known_bad: dict[str, str] | None = None,
        check: Callable[[EncodedImage], str | None] | None = None,
        max_pixels: int | None = None,
    ) -> None:
        self.known_bad: dict[str, str] = known_bad if known_bad is not None else {}
        self._check, self._max_pixels = check, max_pixels
        self._opened: dict[str, EncodedImage] = {}
        self._told: dict[str, str] = {}

    def open(self, image: EncodedImage) -> tuple[int, int]:
        """(width, height) of an image that opens and, as far as known, decodes. Raises UnreadableImage."""
        cause = self.known_bad.get(image.key)
        if cause is None:
            cause = getattr(image, "known_failure", None)
            if cause is not None:
                # An index has told it: from now on it is known like those that were met.
                self.known_bad[image.key] = self._told[image.key] = cause
        if cause is not None:
            raise UnreadableImage(f"{image.key}: {cause}")
        size = image.size()
        if self._max_pixels is not None and size[0] * size[1] > self._max_pixels:
            limit = f"more than images.maxPixels, {self._max_pixels:,}"
            raise UnreadableImage(
                f"{image.key}: {size[0]}x{size[1]} pixels, {limit}", DropReason.IMAGE_TOO_LARGE
            )
        if getattr(image, "is_verified", False):  # an index has seen its pixels
            return size
        if self._check is None:
            self._opened[image.key] = image
        elif (cause := self._check(image)) is not None:
            self.known_bad[image.key] = cause
            raise UnreadableImage(f"{image.key}: {cause}")
        return size

    def take_opened(self) -> dict[str, EncodedImage]:
        opened, self._opened = self._opened, {}
        return opened

    def take_told(self) -> dict[str, str]:
        """Bad images that an index told of since the last call, with their causes."""
        told, self._told = self._told, {}
        return told


MAX_KNOWN_BAD_BYTES = 24 * 1024
"""A state stays small: the newest bad images travel with it. One that is left out is found again by decoding."""


def newest_bad_images(known_bad: dict[str, str], limit_bytes: int = MAX_KNOWN_BAD_BYTES) -> dict[str, str]:
    """The newest of `known_bad`, oldest first, as many as take at most `limit_bytes` as ASCII JSON."""
    kept: list[tuple[str, str]] = []
    # A copy: the set grows while the next pack is planned.
    for key, cause in reversed(list(known_bad.items())):
        limit_bytes -= len(json.dumps({key: cause}))
        if limit_bytes < 0:
            break
        kept.append((key, cause))
    return dict(reversed(kept))


def known_bad_part(known_bad: dict[str, str] | None) -> dict[str, dict[str, str]]:
    """What a state says of them; nothing, where plans rest on no image."""
    return {} if known_bad is None else {"known_bad": newest_bad_images(known_bad)}


@dataclass(frozen=True, slots=True)
class FrameSampler:
    """How many frames of a video are taken: from `min_frames` to `max_frames`, both included."""

    min_frames: int = 8
    max_frames: int = 8


@dataclass(frozen=True, slots=True)
class ImageTransform:
    """Resize rule and normalisation (per channel, on pixels scaled to 0..1) of one kind of image."""

    rule: ResizeRule
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)


@dataclass(frozen=True, slots=True)
class PlanContext:
    """What planning the rows of one group needs beside the row. `vit` is the transform of ViT images."""

    encode: Callable[[str], Sequence[int]]
    images: ImageLedger
    vae: ImageTransform | None
    vit: ImageTransform | None
    frames: FrameSampler = field(default_factory=FrameSampler)
    profile: Profile = AUTOMODEL


@dataclass(frozen=True, slots=True)
class PlanItem:
    """One step of a sequence plan, as the documented `sequence_plan` has it."""

    kind: ItemKind
    enable_cfg: int = 0
    loss: int = 0
    special_token_loss: int = 0
    special_token_label: int | None = None
    split_start: bool = True
    split_end: bool = True
    frame_delta: int | None = None


CONDITION_TEXT = PlanItem("text", enable_cfg=1)
CONDITION_VAE = PlanItem("vae_image", enable_cfg=1)
CONDITION_VIT = PlanItem("vit_image", enable_cfg=1)
TARGET_VAE = PlanItem("vae_image", loss=1)
PLAIN_TEXT = PlanItem("text")
LEARNT_TEXT = PlanItem("text", loss=1)
PLAIN_VIT = PlanItem("vit_image")


@dataclass(frozen=True, slots=True)
class PlannedImage:
    """An image and the size that it will have, in pixels. `source` is an EncodedImage, or pixels at hand."""

    source: Any
    height: int
    width: int
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)


@dataclass(slots=True)
class Sample:
    """A row as planned. `num_tokens` counts ids and image tokens, without start and end tokens.

    `reference` replays the row (group position and outcomes of its draws); None for samples that bring pixels.
    `entry` is the yielded entry of `batch_data_indexes` where the sample brought one. `place` is where the row is
    stored; None where that is not known.
    """

    items: list[PlanItem] = field(default_factory=list)
    texts: list[Sequence[int]] = field(default_factory=list)
    images: list[PlannedImage] = field(default_factory=list)
    num_tokens: int = 0
    data_indexes: Any = None
    group_index: int = 0
    group: str = ""
    worker_id: int = 0
    reference: dict[str, Any] | None = None
    entry: Any = None
    place: RowPlace | None = None

    @property
    def size(self) -> int:
        """Tokens that packing reckons with: two more for each item's start and end token."""
        return self.num_tokens + 2 * len(self.items)

    def add_text(self, item: PlanItem, ids: Sequence[int]) -> None:
        self.items.append(item)
        self.texts.append(ids)
        self.num_tokens += len(ids)

    def add_image(self, item: PlanItem, image: PlannedImage, stride: int) -> None:
        self.items.append(item)
        self.images.append(image)
        self.num_tokens += image.width * image.height // stride**2


@dataclass(frozen=True, slots=True)
class TextToImageRow:
    image: EncodedImage
    captions: Any
    """JSON text; in profile Strict also a plain text or a list of texts."""


@dataclass(frozen=True, slots=True)
class EditRow:
    """`images[i + 1]` follows from `images[i]` by any of the phrasings `instructions[i]`."""

    images: Sequence[EncodedImage] | None
    instructions: Sequence[Sequence[str]] | None


@dataclass(frozen=True, slots=True)
class ConversationRow:
    """One line of a JSONL file. `open_image` and `list_frames` look names up below the image directory."""

    line: str
    open_image: Callable[[str], EncodedImage]
    list_frames: Callable[[str], Sequence[EncodedImage]]


def plan_text_to_image(row: TextToImageRow, context: PlanContext, draws: Draws) -> Sample:
    """One caption of the row, then its image with loss."""
    assert context.vae is not None
    sample = Sample()
    try:
        image = _resized(row.image, context, context.vae)
    except UnreadableImage as error:
        raise RowDropped(error.reason or DropReason.T2I_IMAGE_PARSE, str(error)) from None
    captions = _captions_of(row.captions, context.profile)
    caption = captions[draws.choice(len(captions))] if captions else " "
    sample.add_text(CONDITION_TEXT, context.encode(caption))
    sample.add_image(TARGET_VAE, image, context.vae.rule.stride)
    return sample


def _captions_of(value: Any, profile: Profile) -> list[str]:
    if value is None:
        raise RowDropped(DropReason.T2I_CAPTION_PARSE, "captions are null")
    is_list = profile.reads_other_shapes and isinstance(value, list)
    captions = value if is_list else _parse_captions(value, profile)
    if profile.reads_other_shapes and isinstance(captions, str):
        captions = [captions]
    if profile.reads_other_shapes and isinstance(captions, list):
        captions = dict(enumerate(captions))
    if not isinstance(captions, dict):
        raise RowDropped(
            DropReason.CAPTION_NOT_OBJECT, f"captions are a {type(captions).__name__}, not an object"
        )
    for name, caption in captions.items():
        if not is_text(caption):
            raise RowDropped(
                DropReason.CAPTION_NOT_TEXT, f"caption {name!r} is {kind_of(caption)}, not a text"
            )
    return list(captions.values())


def _parse_captions(text: Any, profile: Profile) -> Any:
    """What the JSON text holds. In profile Strict a text that is none, and does not begin like some, is a caption."""
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        is_plain = isinstance(text, str) and text.strip() and text.strip()[0] not in _JSON_BEGINS
        if profile.reads_other_shapes and is_plain:
            return text
        raise RowDropped(DropReason.T2I_CAPTION_PARSE, f"captions are no JSON: {error}") from None


def is_text(value: object) -> TypeGuard[str]:
    """Whether a value is a text that a tokenizer takes: JSON may hold halves of surrogate pairs, which none does."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def kind_of(value: object) -> str:
    return "no Unicode" if isinstance(value, str) else f"a {type(value).__name__}"


def plan_edit(row: EditRow, context: PlanContext, draws: Draws) -> Sample:
    """A stretch of an editing chain: a first image as condition, then instructions and images with loss."""
    try:
        return _plan_edit_steps(row, context, draws)
    # Whatever is wrong with a row's lists shows as one of these when they are indexed, chosen from or encoded;
    # the peer drops the row on any exception, with the draws made so far consumed.
    except (UnreadableImage, IndexError, TypeError, ValueError, AttributeError, KeyError) as error:
        reason = error.reason if isinstance(error, UnreadableImage) else None
        raise RowDropped(reason or DropReason.PARQUET_ROW_PARSE, f"{type(error).__name__}: {error}") from None


def _plan_edit_steps(row: EditRow, context: PlanContext, draws: Draws) -> Sample:
    assert context.vae is not None
    assert context.vit is not None
    images, instructions = row.images, row.instructions
    if images is None:
        raise TypeError("image_list is null")
    count = len(images)
    start = draws.choice(count - 1)
    end = start + 1 + draws.choice(min(start + 3, count) - (start + 1))
    sample = Sample()

    def condition_on(index: int) -> None:
        _add_edit_image(sample, images[index], CONDITION_VAE, context, context.vae)
        _add_edit_image(sample, images[index], CONDITION_VIT, context, context.vit)

    def choose_phrasing(step: int) -> str:
        if instructions is None:
            raise TypeError("instruction_list is null")
        phrasings = instructions[step - 1]
        if context.profile.reads_other_shapes and isinstance(phrasings, str):
            phrasings = [phrasings]
        phrasing = phrasings[draws.choice(len(phrasings))]
        if not is_text(phrasing):
            raise TypeError(f"an instruction is {kind_of(phrasing)}")
        return phrasing

    condition_on(start)
    if end - start > 1 and draws.chance(0.5):
        if end == count - 1:
            end -= 1
        text = "".join(choose_phrasing(step) + ". " for step in range(start + 1, end + 1)).rstrip()
        sample.add_text(CONDITION_TEXT, context.encode(text))
        _add_edit_image(sample, images[end], TARGET_VAE, context, context.vae)
        return sample
    for step in range(start + 1, end + 1):
        sample.add_text(CONDITION_TEXT, context.encode(choose_phrasing(step)))
        _add_edit_image(sample, images[step], TARGET_VAE, context, context.vae)
        if step != end:
            condition_on(step)
    return sample


def _add_edit_image(
    sample: Sample,
    image: EncodedImage,
    item: PlanItem,
    context: PlanContext,
    transform: ImageTransform | None,
) -> None:
    assert transform is not None
    sample.add_image(item, _resized(image, context, transform), transform.rule.stride)


def plan_conversation(row: ConversationRow, context: PlanContext, draws: Draws) -> Sample:
    """The turns of a conversation with its images or video frames; the answers carry loss."""
    assert context.vit is not None
    transform = context.vit
    try:
        data = json.loads(row.line)
    except (ValueError, RecursionError) as error:
        raise RowDropped(DropReason.JSONL_PARSE, f"no JSON: {error}") from None
    if not isinstance(data, dict):
        # The peer looks for images in whatever the line is, which numbers do not survive.
        reason = DropReason.CONVERSATIONS_MISSING if isinstance(data, (list, str)) else DropReason.JSONL_PARSE
        raise RowDropped(reason, f"the line is a {type(data).__name__}, not an object")
    try:
        sources, frame_tags = _conversation_images(data, row, context, draws)
        sizes = [context.images.open(source) for source in sources]
    except UnreadableImage as error:
        raise RowDropped(error.reason or DropReason.JSONL_PARSE, str(error)) from None
    images = [
        _planned(source, transform.rule.target_size(*size, num_images=len(sources)), transform)
        for source, size in zip(sources, sizes, strict=True)
    ]
    sample = Sample()
    _add_turns(sample, _parse_turns(data), images, frame_tags, context)
    unplaced = len(images) - len(sample.images)
    if unplaced and context.profile.images_match_text:
        raise RowDropped(
            DropReason.IMAGE_UNREFERENCED, f"the turns place {len(sample.images)} of {len(images)} images"
        )
    # Images that no turn places count as well: the peer adds them up as it opens them.
    stride = transform.rule.stride
    sample.num_tokens = sum(len(ids) for ids in sample.texts)
    sample.num_tokens += sum(image.width * image.height // stride**2 for image in images)
    if not any(item.loss for item in sample.items):
        raise RowDropped(DropReason.NO_LOSS_LABELS, "no answer to learn from")
    return sample


def _conversation_images(
    data: dict[str, Any], row: ConversationRow, context: PlanContext, draws: Draws
) -> tuple[list[EncodedImage], int | None]:
    """The row's images in order; for a video its sampled frames and their number."""
    has_none = context.profile.reads_other_shapes and data.get("image", "") in _NO_IMAGE
    if "image" in data and not has_none:
        names = data["image"] if isinstance(data["image"], list) else [data["image"]]
        for name in names:
            if not isinstance(name, str):
                raise UnreadableImage(f"an image name is {json.dumps(name)[:80]}, not a text")
        return [row.open_image(name) for name in names], None
    if "video" not in data or (context.profile.reads_other_shapes and data["video"] in _NO_IMAGE):
        return [], None
    name = data["video"]
    if not isinstance(name, str):
        raise UnreadableImage(f"the video's name is {json.dumps(name)[:80]}, not a text")
    frames = list(row.list_frames(name))
    for frame in frames:
        context.images.open(frame)
    chosen = sample_frames(len(frames), context.frames, draws)
    if not _first_turn_has_video(data):
        raise UnreadableImage("the first turn of a row with a video has no <video>")
    return [frames[index] for index in chosen], len(chosen)


def _first_turn_has_video(data: dict[str, Any]) -> bool:
    turns = data.get("conversations")
    if turns == []:
        return True  # the row is dropped all the same: nothing in it carries loss
    first = turns[0] if isinstance(turns, list) else None
    return isinstance(first, dict) and VIDEO_TAG in str(first.get("value"))


def sample_frames(count: int, sampler: FrameSampler, draws: Draws) -> list[int]:
    """Indexes of the frames taken from a video of `count` frames, in order.

    One frame from each of equal intervals, whose last frame is never taken; where an interval has one frame
    only, a random subset instead, the draws made until then consumed.
    """
    wanted = draws.integer(sampler.min_frames, sampler.max_frames + 1)
    if count <= wanted:
        return list(range(count))
    bounds = np.linspace(0, count, wanted + 1).astype(int).tolist()
    try:
        return [low + draws.choice(high - 1 - low) for low, high in itertools.pairwise(bounds)]
    except IndexError:
        return draws.subset(count, wanted)


def _parse_turns(data: dict[str, Any]) -> list[tuple[str, str]]:
    turns = data.get("conversations")
    if not isinstance(turns, list):
        raise RowDropped(DropReason.CONVERSATIONS_MISSING, "`conversations` is missing or no list")
    parsed = []
    for turn in turns:
        if not isinstance(turn, dict) or "from" not in turn:
            raise RowDropped(DropReason.CONVERSATIONS_MISSING, "a turn lacks `from`")
        if turn["from"] not in ("human", "gpt"):
            parsed.append(("", ""))  # not listened to, whatever is said
            continue
        text = turn.get("value")
        if not is_text(text):
            message = f"the value of a turn of {turn['from']} is {kind_of(text)}, not a text"
            raise RowDropped(DropReason.CONVERSATIONS_MISSING, message)
        parsed.append((turn["from"], text))
    return parsed


def _add_turns(
    sample: Sample,
    turns: list[tuple[str, str]],
    images: list[PlannedImage],
    frame_tags: int | None,
    context: PlanContext,
) -> None:
    unplaced = iter(images)

    def add_text(item: PlanItem, text: str) -> None:
        ids = context.encode(text)
        if ids:
            sample.add_text(item, ids)

    if turns and frame_tags is not None:
        speaker, text = turns[0]
        turns = [(speaker, text.replace(VIDEO_TAG, IMAGE_TAG * frame_tags)), *turns[1:]]
    for speaker, text in turns:
        if speaker == "gpt":
            add_text(LEARNT_TEXT, text)
        elif speaker == "human" and IMAGE_TAG not in text:
            add_text(PLAIN_TEXT, text)
        elif speaker == "human":
            pieces = text.split(IMAGE_TAG)
            for index, piece in enumerate(pieces):
                if piece.strip():
                    add_text(PLAIN_TEXT, piece.strip())
                is_tag = index < len(pieces) - 1
                if is_tag and (index < len(images) or context.profile.images_match_text):
                    image = next(unplaced, None)
                    if image is None:
                        raise RowDropped(
                            DropReason.IMAGE_SURPLUS, f"the turns place more than {len(images)} images"
                        )
                    sample.items.append(PLAIN_VIT)
                    sample.images.append(image)


def _resized(image: EncodedImage, context: PlanContext, transform: ImageTransform) -> PlannedImage:
    width, height = context.images.open(image)
    return _planned(image, transform.rule.target_size(width, height), transform)


def _planned(source: EncodedImage, size: tuple[int, int], transform: ImageTransform) -> PlannedImage:
    width, height = size
    return PlannedImage(source, height=height, width=width, mean=transform.mean, std=transform.std)
