"""The parts of the resource: storage, tokenizer, groups, budgets and the rest, from the leaves up.

Each model carries the rules between its own fields; those between parts are in `spec`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, JsonValue
from pydantic_core import PydanticUndefined

from bagelplane.spec_errors import Problem, SpecModel, show
from bagelplane.spec_values import (
    MAX_INT64,
    ByteQuantity,
    EndpointUrl,
    EntryName,
    GroupType,
    LocalPath,
    ObjectName,
    ResourceQuantity,
    SpecialToken,
    Text,
    Uri,
)

BUILT_IN_TYPES = ("t2i_pretrain", "unified_edit", "vlm_sft")


def field(
    description: str,
    default: Any = PydanticUndefined,
    *,
    unit: str = "",
    example: object = None,
    factory: Any = None,
    **limits: Any,
) -> Any:
    """A field with what the reference and the CRD need: description, unit, example; limits as pydantic's."""
    extra: dict[str, JsonValue] | None = {"x-unit": unit} if unit else None
    examples = None if example is None else [example]
    if factory is not None:
        return Field(default_factory=factory, description=description, json_schema_extra=extra, **limits)
    return Field(default, description=description, json_schema_extra=extra, examples=examples, **limits)


class SecretRef(SpecModel):
    name: ObjectName = field(
        "Secret with the keys access_key_id, secret_access_key and, if any, session_token.",
        example="bagel-s3",
    )


class Cache(SpecModel):
    size_limit: ByteQuantity = field(
        "Most that the local cache of objects may take on disk.", unit="bytes", example="10Gi"
    )


class ReadAhead(SpecModel):
    """What is fetched before it is needed, in planned order. All ranks of a pod share it in equal parts."""

    size: ByteQuantity = field(
        "Most bytes that were fetched, or are on their way, and not used yet.", 512 * 2**20, unit="bytes"
    )
    requests: int = field(
        "Most requests at a time for that; a rank makes 64 at most. 0 turns reading ahead off.",
        128,
        unit="requests",
        ge=0,
        le=65_536,
    )


class Storage(SpecModel):
    """How the object store is reached. Says nothing about what is read."""

    endpoint_url: EndpointUrl | None = field(
        "Address of an S3-compatible server; without it that of the cloud provider.",
        None,
        alias="endpointURL",
        example="https://s3.example.com",
    )
    region: Text | None = field(
        "Region of the bucket; without it the environment's.", None, example="eu-central-1"
    )
    secret_ref: SecretRef | None = field(
        "Secret in the pod's namespace, mounted into the sidecar alone.", None
    )
    credentials_dir: LocalPath | None = field(
        "Local folder with the files access_key_id, secret_access_key and, if any, session_token; for runs "
        "without a cluster. Without it the usual AWS environment and profile files are used. The environment "
        "variable BAGELPLANE_CREDENTIALS_DIR goes before it: in a cluster it names the mounted Secret.",
        None,
        example="/etc/bagel-s3",
    )
    cache: Cache | None = field("Local cache of what was read; none without it.", None)
    read_ahead: ReadAhead = field("Fetching ahead from object stores.", factory=ReadAhead)


class SpecialTokens(SpecModel):
    """Each is the token's text in the tokenizer, or its id."""

    bos: SpecialToken = field("Begins every text.", "<|im_start|>", unit="token text or id")
    eos: SpecialToken = field("Ends every text.", "<|im_end|>", unit="token text or id")
    start_of_image: SpecialToken = field("Begins every image.", "<|vision_start|>", unit="token text or id")
    end_of_image: SpecialToken = field("Ends every image.", "<|vision_end|>", unit="token text or id")


class Tokenizer(SpecModel):
    uri: Uri = field(
        "The `tokenizer.json` of the tokenizers library.",
        unit="URI or path",
        example="s3://bucket/tokenizer.json",
    )
    special_tokens: SpecialTokens = field("Tokens around texts and images.", factory=SpecialTokens)


class ImageTransform(SpecModel):
    """The resize rule of one kind of image. Sides are rounded to multiples of the stride."""

    stride: int = field(
        "Sides of a resized image are multiples of it; an image counts w*h // stride**2 tokens.",
        unit="pixels",
        example=16,
        ge=1,
        le=65_536,
    )
    max_size: int = field("Longest side after the resize.", unit="pixels", example=1024, ge=1, le=65_536)
    min_size: int = field(
        "Shortest side that small images are enlarged to.", unit="pixels", example=512, ge=1, le=65_536
    )
    max_pixels: int = field(
        "Most pixels of an image; the images of a conversation share it.",
        14 * 14 * 9 * 1024,
        unit="pixels",
        ge=1,
        le=MAX_INT64,
    )

    def rule_problems(self) -> Iterator[Problem]:
        if self.min_size > self.max_size:
            what, fix = f"must be at most maxSize, {self.max_size}", "lower minSize or raise maxSize"
            yield Problem(("minSize",), what, show(self.min_size), fix)


class FrameSampler(SpecModel):
    """How many frames of a video are taken: a number drawn from minFrames to maxFrames, both included."""

    max_frames: int = field("Most frames that are aimed at.", 12, unit="frames", ge=1, le=65_536)
    min_frames: int = field("Fewest frames that are aimed at.", 8, unit="frames", ge=1, le=65_536)

    def rule_problems(self) -> Iterator[Problem]:
        if self.min_frames > self.max_frames:
            what, fix = f"must be at most maxFrames, {self.max_frames}", "lower minFrames or raise maxFrames"
            yield Problem(("minFrames",), what, show(self.min_frames), fix)


class Dataset(SpecModel):
    """One data set of a group: a folder of Parquet files, or a JSONL file with a folder of images."""

    name: EntryName = field("Name of the data set, unique in its group.", example="t2i")
    uri: Uri = field(
        "Folder of the Parquet files; for vlm_sft the folder that `jsonl` and `images` are relative to.",
        unit="URI or path",
        example="s3://bucket/t2i/",
    )
    images: Uri | None = field(
        "vlm_sft: folder that the image and video names of the rows are joined to.",
        None,
        unit="URI, or path below uri",
        example="images/",
    )
    jsonl: Uri | None = field(
        "vlm_sft: file of one conversation a line.",
        None,
        unit="URI, or path below uri",
        example="train.jsonl",
    )
    parquet_info: Uri | None = field(
        "unified_edit: JSON file with the number of row groups of each file, as Automodel uses it. Without "
        "it, and in profile Strict, the footers of the files are read.",
        None,
        unit="URI, or path below uri",
        example="parquet_info.json",
    )
    num_used_data: int | None = field(
        "How much is used: files of Parquet data (repeated when there are fewer), lines of JSONL (never "
        "repeated). Everything once without it.",
        None,
        unit="files or lines",
        example=8,
        ge=1,
        le=MAX_INT64,
    )

    def resolve(self, address: str) -> str:
        """`address` as it is when it stands alone (a URI, an absolute path), else joined to `uri`."""
        if "://" in address or address.startswith("/"):
            return address
        return f"{self.uri.rstrip('/')}/{address}"

    @property
    def jsonl_uri(self) -> str | None:
        """Where the JSONL file is."""
        return None if self.jsonl is None else self.resolve(self.jsonl)

    @property
    def images_uri(self) -> str | None:
        """Where the folder of images is."""
        return None if self.images is None else self.resolve(self.images)

    @property
    def parquet_info_uri(self) -> str | None:
        """Where the list of row groups is."""
        return None if self.parquet_info is None else self.resolve(self.parquet_info)


class Group(SpecModel):
    """Data sets of one type that share a weight and the image rules."""

    name: EntryName = field(
        "Name of the group, unique in the resource: in logs, counts and plans; packs report its type.",
        example="t2i",
    )
    type: GroupType = field(
        "How rows become samples: t2i_pretrain, unified_edit, vlm_sft or a registered type.",
        example="vlm_sft",
    )
    weight: float = field(
        "Share of the draws that this group gets, relative to the sum of all weights.",
        1.0,
        unit="ratio",
        ge=0,
        le=1e9,
    )
    mandatory: bool = field("Every pack begins with a sample of this group.", False)
    datasets: tuple[Dataset, ...] = field("The data.", min_length=1, max_length=256, strict=False)
    image_transform: ImageTransform | None = field(
        "Resize rule: of VAE images (t2i_pretrain, unified_edit), of ViT images (vlm_sft).", None
    )
    vit_image_transform: ImageTransform | None = field("unified_edit: resize rule of ViT images.", None)
    frame_sampler: FrameSampler = field("vlm_sft: frames taken of a video.", factory=FrameSampler)
    shuffle_lines: bool = field("vlm_sft: shuffle the lines before numUsedData cuts them.", False)
    shuffle_seed: int = field("vlm_sft: seed of that shuffle.", 0, unit="seed", ge=0, le=MAX_INT64)

    def rule_problems(self) -> Iterator[Problem]:
        yield from repeated_names(("datasets",), [dataset.name for dataset in self.datasets])
        if self.type not in BUILT_IN_TYPES:
            return  # what a registered type needs is its own business
        needed = ["imageTransform"] + ["vitImageTransform"] * (self.type == "unified_edit")
        present = {"imageTransform": self.image_transform, "vitImageTransform": self.vit_image_transform}
        for name in needed:
            if present[name] is None:
                fix = f"add for example `{name}: {{stride: 16, maxSize: 1024, minSize: 512}}`"
                yield Problem((name,), f"is missing, a group of type {self.type} needs it", fix=fix)
        for index, dataset in enumerate(self.datasets):
            yield from self._dataset_problems(("datasets", index), dataset)

    def _dataset_problems(self, loc: tuple[str | int, ...], dataset: Dataset) -> Iterator[Problem]:
        values = {"jsonl": dataset.jsonl, "images": dataset.images, "parquetInfo": dataset.parquet_info}
        needed = {"jsonl", "images"} if self.type == "vlm_sft" else set()
        allowed = needed | ({"parquetInfo"} if self.type != "vlm_sft" else set())
        for name, value in values.items():
            if value is None and name in needed:
                example = Dataset.model_fields[name].examples or [""]
                fix = f"add for example `{name}: {example[0]}`"
                yield Problem((*loc, name), "is missing, a data set of type vlm_sft needs it", fix=fix)
            if value is not None and name not in allowed:
                fix = f"remove it, or correct the group's type ({', '.join(BUILT_IN_TYPES)})"
                yield Problem((*loc, name), f"is not read by type {self.type}", show(value), fix)


class Budgets(SpecModel):
    """How long packs become. A pack is finished at expectedTokens and never planned past maxTokens."""

    expected_tokens: int = field("A pack this long is finished.", 32_768, unit="tokens", ge=1, le=2**31 - 1)
    max_tokens: int = field(
        "Length that no drawn sample may exceed.", 36_864, unit="tokens", ge=1, le=2**31 - 1
    )
    max_tokens_per_sample: int = field(
        "Longer samples are dropped.", 16_384, unit="tokens", ge=1, le=2**31 - 1
    )
    prefer_buffer_before: int = field(
        "A pack shorter than this takes from the buffer first.", 16_384, unit="tokens", ge=0, le=2**31 - 1
    )
    max_buffer_size: int = field(
        "Samples that did not fit and wait for a later pack; 0 keeps none.",
        50,
        unit="samples",
        ge=0,
        le=65_536,
    )
    attention: Literal["DenseMasks", "Flex"] = field(
        "What packs carry for attention: DenseMasks (one float32 [n, n] mask a sample) or Flex (split "
        "lengths and modes, padded to maxTokens; Automodel's use_flex).",
        "DenseMasks",
    )
    flex_block_size: int = field(
        "Block of the flex attention kernel: maxTokens must be a multiple of it with Flex. 1 turns the rule "
        "off, for attention that takes any length.",
        128,
        unit="tokens",
        ge=1,
        le=65_536,
    )

    @property
    def use_flex(self) -> bool:
        """Automodel's name for `attention: Flex`."""
        return self.attention == "Flex"

    def rule_problems(self) -> Iterator[Problem]:
        for name, value in (
            ("expectedTokens", self.expected_tokens),
            ("maxTokensPerSample", self.max_tokens_per_sample),
        ):
            if value > self.max_tokens:
                fix = f"lower {name} or raise maxTokens"
                yield Problem((name,), f"must be at most maxTokens, {self.max_tokens}", show(value), fix)
        block = self.flex_block_size
        if self.use_flex and self.max_tokens % block:
            below, above = self.max_tokens // block * block, (self.max_tokens // block + 1) * block
            near = f"{below} or {above}" if below else str(above)
            fix = f"set it to {near} (else the kernel reads out of bounds on the GPU)"
            what = f"must be a multiple of {block} with Flex attention"
            yield Problem(("maxTokens",), what, show(self.max_tokens), fix)


class Conditioning(SpecModel):
    """How often conditions are left out, so that the model learns to do without (guidance needs that)."""

    text_dropout: float = field("Chance to leave a text out.", 0.1, unit="probability", ge=0, le=1)
    vit_dropout: float = field("Chance to leave a ViT image out.", 0.4, unit="probability", ge=0, le=1)
    vae_dropout: float = field("Chance to leave a VAE image out.", 0.1, unit="probability", ge=0, le=1)


class Model(SpecModel):
    """What the stream must know of the model."""

    vae_image_downsample: int = field(
        "Pixels of a VAE image per latent patch and side.", 16, unit="pixels", ge=1, le=65_536
    )
    max_latent_size: int = field(
        "Side of the table of latent positions.", 32, unit="latent patches", ge=1, le=65_536
    )
    vit_patch_size: int = field("Side of a ViT patch.", 14, unit="pixels", ge=1, le=65_536)
    max_patches_per_side: int = field(
        "Side of the table of ViT positions.", 70, unit="patches", ge=1, le=65_536
    )
    interpolate_positions: bool = field("Spread ViT positions over the whole table.", False)


class Sharding(SpecModel):
    """Who reads which part of the data."""

    mode: Literal["Elastic", "Bagel"] = field(
        "Elastic: a fixed number of streams, any world size that divides it can continue a run. Bagel: "
        "contiguous parts per rank and worker as Automodel makes them, bound to that world size.",
        "Elastic",
    )
    streams: int = field(
        "Elastic: number of streams; world sizes must divide it, and each group needs as many files, row groups "
        "or lines.",
        64,
        unit="streams",
        ge=1,
        le=65_536,
    )
    workers_per_rank: int = field(
        "Bagel: logical workers of a rank. 0: as Automodel iterated in the process (num_workers 0), a rank's "
        "part in order. n: as a DataLoader with n workers, n contiguous parts taken in turn, each in reverse "
        "order, as the peer does. They are streams in one process, not processes. Elastic does not use it.",
        1,
        unit="workers",
        ge=0,
        le=1024,
    )
    data_seed: int = field("Seed of the order of the data.", 42, unit="seed", ge=0, le=MAX_INT64)
    global_seed: int = field(
        "Seed of all other draws; 0 means: the same as dataSeed.", 4396, unit="seed", ge=0, le=MAX_INT64
    )


class Snapshots(SpecModel):
    """Where the stream's state is kept."""

    uri: Uri | None = field(
        "Folder of the snapshots; without it none are written and only the trainer's own checkpoints hold "
        "the state.",
        None,
        unit="URI or path",
        example="s3://bucket/snapshots/",
    )
    every_steps: int = field(
        "Acknowledged steps between two snapshots.", 100, unit="steps", ge=1, le=MAX_INT64
    )
    keep_last: int = field(
        "Newest snapshots that are kept; older ones are deleted.", 5, unit="snapshots", ge=1, le=65_536
    )
    keep_every: int | None = field(
        "Of each stretch of so many steps, from its second on, the first snapshot is kept for ever; none without it.",
        None,
        unit="steps",
        example=10_000,
        ge=1,
        le=MAX_INT64,
    )
    lineage: bool = field(
        "Keep a log beside the snapshots of which rows went into each pack, as Parquet; it is never pruned.",
        False,
    )

    def rule_problems(self) -> Iterator[Problem]:
        if self.lineage and self.uri is None:
            fix = "set uri to a folder for snapshots and log, or take lineage out"
            yield Problem(("lineage",), "needs a place for the log: snapshots.uri", show(True), fix)


CHANGEABLE = ("tokenizer", "groups", "budgets", "conditioning", "model", "images", "data")
"""What `resume.allowSpecChange` may name. Without the same profile and sharding a state means nothing."""


class Resume(SpecModel):
    """What a run may change that goes on from a snapshot. Does not change the stream by itself."""

    allow_spec_change: tuple[
        Literal["tokenizer", "groups", "budgets", "conditioning", "model", "images", "data"], ...
    ] = field(
        "Parts of the spec that may differ from those of the snapshot that is resumed from; data: its objects.",
        factory=tuple,
        max_length=len(CHANGEABLE),
        strict=False,
    )


class Drops(SpecModel):
    max_consecutive: int = field(
        "Rows of a group that may be dropped one after the other before the run fails and names the reason.",
        1000,
        unit="rows",
        ge=1,
        le=MAX_INT64,
    )


class Images(SpecModel):
    max_pixels: int = field(
        "Strict: images with more pixels are refused from their header.",
        89_000_000,
        unit="pixels",
        ge=1,
        le=MAX_INT64,
    )


class Resources(SpecModel):
    """As a container's `resources`."""

    requests: dict[str, ResourceQuantity] = field("What the sidecar asks for.", factory=dict, max_length=16)
    limits: dict[str, ResourceQuantity] = field("What the sidecar may take.", factory=dict, max_length=16)


class Ring(SpecModel):
    packs: int = field(
        "The ring has room for so many finished packs of the largest size that the budgets allow; more where they "
        "are smaller.",
        4,
        unit="packs",
        ge=1,
        le=1024,
    )
    size: ByteQuantity | None = field(
        "Size of the ring of one rank in shared memory; without it, room for `packs` packs of the largest "
        "size that the budgets allow.",
        None,
        unit="bytes",
        example="2Gi",
    )


class Dataplane(SpecModel):
    """How the sidecar runs. Nothing here changes the stream."""

    image: Text | None = field(
        "Container image of the sidecar; without it the operator's.",
        None,
        example="bagelplane/dataplane:0.1.0",
    )
    resources: Resources = field("Resources of the sidecar's container.", factory=Resources)
    decode_threads: int | None = field(
        "Threads that decode images, for each rank; without it the CPUs of the container are shared out "
        "among its ranks.",
        None,
        unit="threads",
        ge=1,
        le=1024,
    )
    ring: Ring = field("The shared-memory ring of a rank.", factory=Ring)
    pixel_format: Literal["uint8", "float32"] = field(
        "Pixels in the ring: uint8 (the client makes floats) or float32 (finished floats, for readers in other "
        "languages; four times the memory).",
        "uint8",
    )


def repeated_names(loc: tuple[str, ...], names: list[str]) -> Iterator[Problem]:
    for index, name in enumerate(names):
        if name in names[:index]:
            what = f"must be unique, {loc[0]}[{names.index(name)}] has it too"
            yield Problem((*loc, index, "name"), what, show(name), "give one of the two another name")
