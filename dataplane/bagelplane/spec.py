"""The resource: what a team declares, as pydantic models.

The one source of the CRD schema, the reference table and the command line's checks.

Reads no storage, imports nothing of the data plane but errors (the operator imports it too).
Whether a group type is registered, a bucket exists or a file has the rows is found out where those are at hand.
Names are camelCase in YAML and snake_case here. Models are frozen; a change is a new resource.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, JsonValue, ValidationError, model_validator
from pydantic_core import PydanticUndefined

from bagelplane.spec_errors import (
    InvalidDatasetError,
    Problem,
    SpecModel,
    problems_of,
    read_yaml,
    show,
)
from bagelplane.spec_values import (
    MAX_INT64,
    ByteQuantity,
    EndpointUrl,
    EntryName,
    GroupType,
    ObjectName,
    ResourceQuantity,
    SpecialToken,
    Text,
    Uri,
)

API_VERSION = "bagelplane.io/v1alpha1"
KIND = "BagelDataset"
BUILT_IN_TYPES = ("t2i_pretrain", "unified_edit", "vlm_sft")


def _field(
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


# --- the models, from the leaves up ---------------------------------------------------------------


class SecretRef(SpecModel):
    name: ObjectName = _field(
        "Secret with the keys access_key_id, secret_access_key and, if any, session_token.",
        example="bagel-s3",
    )


class Cache(SpecModel):
    size_limit: ByteQuantity = _field(
        "Most that the local cache of objects may take on disk.", unit="bytes", example="10Gi"
    )


class Storage(SpecModel):
    """How the object store is reached. Says nothing about what is read."""

    endpoint_url: EndpointUrl | None = _field(
        "Address of an S3-compatible server; without it that of the cloud provider.",
        None,
        alias="endpointURL",
        example="https://s3.example.com",
    )
    region: Text | None = _field(
        "Region of the bucket; without it the environment's.", None, example="eu-central-1"
    )
    secret_ref: SecretRef | None = _field(
        "Secret in the pod's namespace, mounted into the sidecar alone.", None
    )
    credentials_dir: Uri | None = _field(
        "Local folder with the files access_key_id, secret_access_key and, if any, session_token; for runs "
        "without a cluster. Without it the usual AWS environment and profile files are used.",
        None,
        example="/etc/bagel-s3",
    )
    cache: Cache | None = _field("Local cache of what was read; none without it.", None)

    def rule_problems(self) -> Iterator[Problem]:
        if self.credentials_dir and "://" in self.credentials_dir:
            what, fix = "must be a local path", "write for example `credentialsDir: /etc/bagel-s3`"
            yield Problem(("credentialsDir",), what, show(self.credentials_dir), fix)


class SpecialTokens(SpecModel):
    """Each is the token's text in the tokenizer, or its id."""

    bos: SpecialToken = _field("Begins every text.", "<|im_start|>", unit="token text or id")
    eos: SpecialToken = _field("Ends every text.", "<|im_end|>", unit="token text or id")
    start_of_image: SpecialToken = _field("Begins every image.", "<|vision_start|>", unit="token text or id")
    end_of_image: SpecialToken = _field("Ends every image.", "<|vision_end|>", unit="token text or id")


class Tokenizer(SpecModel):
    uri: Uri = _field(
        "The `tokenizer.json` of the tokenizers library.",
        unit="URI or path",
        example="s3://bucket/tokenizer.json",
    )
    special_tokens: SpecialTokens = _field("Tokens around texts and images.", factory=SpecialTokens)


class ImageTransform(SpecModel):
    """The resize rule of one kind of image. Sides are rounded to multiples of the stride."""

    stride: int = _field(
        "Sides of a resized image are multiples of it; an image counts w*h // stride**2 tokens.",
        unit="pixels",
        example=16,
        ge=1,
        le=65_536,
    )
    max_size: int = _field("Longest side after the resize.", unit="pixels", example=1024, ge=1, le=65_536)
    min_size: int = _field(
        "Shortest side that small images are enlarged to.", unit="pixels", example=512, ge=1, le=65_536
    )
    max_pixels: int = _field(
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

    max_frames: int = _field("Most frames that are aimed at.", 12, unit="frames", ge=1, le=65_536)
    min_frames: int = _field("Fewest frames that are aimed at.", 8, unit="frames", ge=1, le=65_536)

    def rule_problems(self) -> Iterator[Problem]:
        if self.min_frames > self.max_frames:
            what, fix = f"must be at most maxFrames, {self.max_frames}", "lower minFrames or raise maxFrames"
            yield Problem(("minFrames",), what, show(self.min_frames), fix)


class Dataset(SpecModel):
    """One data set of a group: a folder of Parquet files, or a JSONL file with a folder of images."""

    name: EntryName = _field("Name of the data set, unique in its group.", example="t2i")
    uri: Uri = _field(
        "Folder of the Parquet files; for vlm_sft the folder that `jsonl` and `images` are relative to.",
        unit="URI or path",
        example="s3://bucket/t2i/",
    )
    images: Uri | None = _field(
        "vlm_sft: folder that the image and video names of the rows are joined to.",
        None,
        unit="URI, or path below uri",
        example="images/",
    )
    jsonl: Uri | None = _field(
        "vlm_sft: file of one conversation a line.",
        None,
        unit="URI, or path below uri",
        example="train.jsonl",
    )
    parquet_info: Uri | None = _field(
        "unified_edit: JSON file with the number of row groups of each file, as Automodel uses it. Without it "
        "the footers of the files are read.",
        None,
        unit="URI, or path below uri",
        example="parquet_info.json",
    )
    num_used_data: int | None = _field(
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

    name: EntryName = _field(
        "Name of the group, unique in the resource; packs report it as `dataset_name`.", example="t2i"
    )
    type: GroupType = _field(
        "How rows become samples: t2i_pretrain, unified_edit, vlm_sft or a registered type.",
        example="vlm_sft",
    )
    weight: float = _field(
        "Share of the draws that this group gets, relative to the sum of all weights.",
        1.0,
        unit="ratio",
        ge=0,
        le=1e9,
    )
    mandatory: bool = _field("Every pack begins with a sample of this group.", False)
    datasets: tuple[Dataset, ...] = _field("The data.", min_length=1, strict=False)
    image_transform: ImageTransform | None = _field(
        "Resize rule: of VAE images (t2i_pretrain, unified_edit), of ViT images (vlm_sft).", None
    )
    vit_image_transform: ImageTransform | None = _field("unified_edit: resize rule of ViT images.", None)
    frame_sampler: FrameSampler = _field("vlm_sft: frames taken of a video.", factory=FrameSampler)
    shuffle_lines: bool = _field("vlm_sft: shuffle the lines before numUsedData cuts them.", False)
    shuffle_seed: int = _field("vlm_sft: seed of that shuffle.", 0, unit="seed", ge=0, le=MAX_INT64)

    def rule_problems(self) -> Iterator[Problem]:
        yield from _repeated_names(("datasets",), [dataset.name for dataset in self.datasets])
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

    expected_tokens: int = _field("A pack this long is finished.", 32_768, unit="tokens", ge=1, le=2**31 - 1)
    max_tokens: int = _field(
        "Length that no drawn sample may exceed.", 36_864, unit="tokens", ge=1, le=2**31 - 1
    )
    max_tokens_per_sample: int = _field(
        "Longer samples are dropped.", 16_384, unit="tokens", ge=1, le=2**31 - 1
    )
    prefer_buffer_before: int = _field(
        "A pack shorter than this takes from the buffer first.", 16_384, unit="tokens", ge=0, le=2**31 - 1
    )
    max_buffer_size: int = _field(
        "Samples that did not fit and wait for a later pack; 0 keeps none.",
        50,
        unit="samples",
        ge=0,
        le=65_536,
    )
    attention: Literal["DenseMasks", "Flex"] = _field(
        "What packs carry for attention: DenseMasks (one float32 [n, n] mask a sample) or Flex (split lengths "
        "and modes, padded to maxTokens; Automodel's use_flex).",
        "DenseMasks",
    )
    flex_block_size: int = _field(
        "Block of the flex attention kernel: maxTokens must be a multiple of it with Flex. 1 turns the rule off, "
        "for attention that takes any length.",
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

    text_dropout: float = _field("Chance to leave a text out.", 0.1, unit="probability", ge=0, le=1)
    vit_dropout: float = _field("Chance to leave a ViT image out.", 0.4, unit="probability", ge=0, le=1)
    vae_dropout: float = _field("Chance to leave a VAE image out.", 0.1, unit="probability", ge=0, le=1)


class Model(SpecModel):
    """What the stream must know of the model."""

    vae_image_downsample: int = _field(
        "Pixels of a VAE image per latent patch and side.", 16, unit="pixels", ge=1, le=65_536
    )
    max_latent_size: int = _field(
        "Side of the table of latent positions.", 32, unit="latent patches", ge=1, le=65_536
    )
    vit_patch_size: int = _field("Side of a ViT patch.", 14, unit="pixels", ge=1, le=65_536)
    max_patches_per_side: int = _field(
        "Side of the table of ViT positions.", 70, unit="patches", ge=1, le=65_536
    )
    interpolate_positions: bool = _field("Spread ViT positions over the whole table.", False)


class Sharding(SpecModel):
    """Who reads which part of the data."""

    mode: Literal["Elastic", "Bagel"] = _field(
        "Elastic: a fixed number of streams, any world size that divides it can continue a run. Bagel: contiguous "
        "parts per rank and worker as Automodel makes them, bound to that world size.",
        "Elastic",
    )
    streams: int = _field(
        "Elastic: number of streams; world sizes must divide it.", 64, unit="streams", ge=1, le=65_536
    )
    workers_per_rank: int = _field(
        "Bagel: logical workers of a rank. 0: as Automodel iterated in the process (num_workers 0): a rank's part "
        "in order. n: as a DataLoader with n workers: n contiguous parts taken in turn, each in reverse order, as "
        "the peer does. They are streams in one process, not processes.",
        1,
        unit="workers",
        ge=0,
        le=1024,
    )
    data_seed: int = _field("Seed of the order of the data.", 42, unit="seed", ge=0, le=MAX_INT64)
    global_seed: int = _field(
        "Seed of all other draws; 0 means: the same as dataSeed.", 4396, unit="seed", ge=0, le=MAX_INT64
    )


class Snapshots(SpecModel):
    """Where the stream's state is kept."""

    uri: Uri | None = _field(
        "Folder of the snapshots; without it none are written and only the trainer's own checkpoints hold the "
        "state.",
        None,
        unit="URI or path",
        example="s3://bucket/snapshots/",
    )
    every_steps: int = _field(
        "Acknowledged steps between two snapshots.", 100, unit="steps", ge=1, le=MAX_INT64
    )
    keep_last: int = _field(
        "Snapshots that are kept; older ones are deleted.", 5, unit="snapshots", ge=1, le=65_536
    )


class Drops(SpecModel):
    max_consecutive: int = _field(
        "Rows of a group that may be dropped one after the other before the run fails and names the reason.",
        1000,
        unit="rows",
        ge=1,
        le=MAX_INT64,
    )


class Images(SpecModel):
    max_pixels: int = _field(
        "Strict: images with more pixels are refused from their header.",
        89_000_000,
        unit="pixels",
        ge=1,
        le=MAX_INT64,
    )


class Resources(SpecModel):
    """As a container's `resources`."""

    requests: dict[str, ResourceQuantity] = _field("What the sidecar asks for.", factory=dict)
    limits: dict[str, ResourceQuantity] = _field("What the sidecar may take.", factory=dict)


class Ring(SpecModel):
    packs: int = _field("Finished packs kept ahead of the trainer.", 4, unit="packs", ge=1, le=1024)
    size: ByteQuantity | None = _field(
        "Size of the ring of one rank in shared memory; without it, room for `packs` packs of the largest size "
        "that the budgets allow.",
        None,
        unit="bytes",
        example="2Gi",
    )


class Dataplane(SpecModel):
    """How the sidecar runs. Nothing here changes the stream."""

    image: Text | None = _field(
        "Container image of the sidecar; without it the operator's.",
        None,
        example="bagelplane/dataplane:0.1.0",
    )
    resources: Resources = _field("Resources of the sidecar's container.", factory=Resources)
    decode_threads: int = _field(
        "Threads that decode images, for each rank.", 1, unit="threads", ge=1, le=1024
    )
    ring: Ring = _field("The shared-memory ring of a rank.", factory=Ring)
    pixel_format: Literal["uint8", "float32"] = _field(
        "Pixels in the ring: uint8 (the client makes floats) or float32 (finished, for other languages).",
        "uint8",
    )


class DatasetSpec(SpecModel):
    profile: Literal["Strict", "Automodel"] = _field(
        "Strict: faults of the peer mended. Automodel: bit for bit what NeMo Automodel yields.", "Strict"
    )
    storage: Storage = _field("How the object store is reached.", factory=Storage)
    tokenizer: Tokenizer = _field("What turns text into tokens.")
    groups: tuple[Group, ...] = _field("The mix of data.", min_length=1, strict=False)
    budgets: Budgets = _field("How long packs become.", factory=Budgets)
    conditioning: Conditioning = _field("How often conditions are left out.", factory=Conditioning)
    model: Model = _field("What the stream must know of the model.", factory=Model)
    sharding: Sharding = _field("Who reads which part of the data.", factory=Sharding)
    snapshots: Snapshots = _field("Where the stream's state is kept.", factory=Snapshots)
    drops: Drops = _field("When too many rows are dropped.", factory=Drops)
    images: Images = _field("Limits on images.", factory=Images)
    dataplane: Dataplane = _field("How the sidecar runs.", factory=Dataplane)

    def rule_problems(self) -> Iterator[Problem]:
        yield from _repeated_names(("groups",), [group.name for group in self.groups])
        if not sum(group.weight for group in self.groups) > 0:
            fix = "set a group's weight to 1"
            yield Problem(("groups",), "must have weights with a sum above 0", fix=fix)
        for index, group in enumerate(self.groups):
            yield from self._stride_problems(index, group)

    def _stride_problems(self, index: int, group: Group) -> Iterator[Problem]:
        """Images whose sides are no multiple of the model's patch cannot be cut into patches."""
        vae = ("vaeImageDownsample", self.model.vae_image_downsample)
        vit = ("vitPatchSize", self.model.vit_patch_size)
        rules = {
            "t2i_pretrain": [("imageTransform", group.image_transform, vae)],
            "unified_edit": [
                ("imageTransform", group.image_transform, vae),
                ("vitImageTransform", group.vit_image_transform, vit),
            ],
            "vlm_sft": [("imageTransform", group.image_transform, vit)],
        }
        for field, transform, (name, patch) in rules.get(group.type, []):
            if transform is not None and transform.stride % patch:
                loc = ("groups", index, field, "stride")
                what = f"must be a multiple of model.{name}, {patch}"
                yield Problem(loc, what, show(transform.stride), f"set it to {patch}")


class Metadata(SpecModel):
    """Of the object's metadata only what matters here; what the API server adds is accepted and left out."""

    name: ObjectName = _field("Name of the resource, also the value of the pod label.", example="bagel-sft")
    namespace: ObjectName | None = _field("Namespace of the resource.", None, example="training")
    labels: dict[str, str] = _field("Kubernetes labels.", factory=dict)
    annotations: dict[str, str] = _field("Kubernetes annotations.", factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _leave_out_server_fields(cls, data: object) -> object:
        return _without(data, _SERVER_FIELDS)


_SERVER_FIELDS = frozenset(
    {
        "creationTimestamp",
        "deletionGracePeriodSeconds",
        "deletionTimestamp",
        "finalizers",
        "generateName",
        "generation",
        "managedFields",
        "ownerReferences",
        "resourceVersion",
        "selfLink",
        "uid",
    }
)


class BagelDataset(SpecModel):
    """One resource, checked. Make it with `from_yaml`, `from_mapping` or `load_dataset`."""

    api_version: Literal["bagelplane.io/v1alpha1"] = _field("Version of the API.", example=API_VERSION)
    kind: Literal["BagelDataset"] = _field("Kind of the resource.", example=KIND)
    metadata: Metadata = _field("Name and labels.")
    spec: DatasetSpec = _field("What to train on.")

    @model_validator(mode="before")
    @classmethod
    def _leave_out_status(cls, data: object) -> object:
        return _without(data, frozenset({"status"}))

    @classmethod
    def from_yaml(cls, text: str, source: str = "resource") -> Self:
        """Parse one YAML document, called `source` in messages. Raises SpecError that lists every problem."""
        data, lines = read_yaml(text, source)
        return cls._checked(data, source, lines)

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any], source: str = "resource") -> Self:
        """The same from parsed data, as an API server gives it. Raises SpecError."""
        return cls._checked(data, source, {})

    @classmethod
    def _checked(cls, data: object, source: str, lines: Mapping[tuple[str | int, ...], int]) -> Self:
        try:
            return cls.model_validate(data, by_alias=True, by_name=False)
        except ValidationError as error:
            raise InvalidDatasetError(source, problems_of(error, cls, lines)) from None

    def to_mapping(self) -> dict[str, Any]:
        """Plain data as in YAML, defaults spelt out; `from_mapping` gives an equal resource back."""
        return self.model_dump(mode="json", exclude_none=True)


def load_dataset(path: str | Path) -> BagelDataset:
    """Read and check one resource file. Raises SpecError, also for a file that cannot be read."""
    source = str(path)
    try:
        if Path(path).is_dir():
            fix = "give the path of the resource file"
            raise InvalidDatasetError(source, [Problem((), "is a folder", fix=fix)])
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        problem = Problem((), f"is no UTF-8 text (byte {error.start})", fix="save it as UTF-8")
        raise InvalidDatasetError(source, [problem]) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        problem = Problem((), f"cannot be read: {reason}", fix="check the path and its permissions")
        raise InvalidDatasetError(source, [problem]) from None
    return BagelDataset.from_yaml(text, source)


# --- what is asked of a checked resource ----------------------------------------------------------


def refuse_unsupported(dataset: BagelDataset, source: str = "resource") -> None:
    """Raise SpecError for what the model has and this release does not run yet, one line each."""
    spec = dataset.spec
    problems = []
    if spec.profile == "Strict":
        fix = "write `profile: Automodel`"
        what = "is Strict, which this release does not run yet"
        problems.append(Problem(("spec", "profile"), what, fix=fix))
    if spec.sharding.mode == "Elastic":
        loc, fix = ("spec", "sharding", "mode"), "write `mode: Bagel`"
        problems.append(Problem(loc, "is Elastic, which this release does not run yet", fix=fix))
    if spec.storage.cache is not None:
        loc = ("spec", "storage", "cache")
        problems.append(Problem(loc, "is set, this release keeps no cache yet", fix="remove it"))
    if spec.dataplane.pixel_format != "uint8":
        loc, fix = ("spec", "dataplane", "pixelFormat"), "write `pixelFormat: uint8`"
        problems.append(Problem(loc, "is float32, which this release does not write yet", fix=fix))
    if problems:
        raise InvalidDatasetError(source, problems)


def spec_hash(dataset: BagelDataset) -> str:
    """SHA-256 (64 hex digits) of all that determines the stream; a snapshot belongs to one such hash.

    Where things are stored and how the sidecar runs are left out. So are values equal to their default, so
    that a field added in a later release leaves old hashes as they are; defaults therefore never change
    within a version of the API (a test holds them).
    """
    determining = dataset.spec.model_dump(
        mode="json",
        include={
            "profile": True,
            "tokenizer": True,
            "groups": True,
            "budgets": True,
            "conditioning": True,
            "model": True,
            "sharding": True,
            "images": True,
        },
        exclude={"budgets": {"flex_block_size"}},
        exclude_defaults=True,
    )
    text = json.dumps(determining, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _without(data: object, names: frozenset[str]) -> object:
    if not isinstance(data, Mapping):
        return data
    return {key: value for key, value in data.items() if key not in names}


def _repeated_names(loc: tuple[str, ...], names: list[str]) -> Iterator[Problem]:
    for index, name in enumerate(names):
        if name in names[:index]:
            what = f"must be unique, {loc[0]}[{names.index(name)}] has it too"
            yield Problem((*loc, index, "name"), what, show(name), "give one of the two another name")
