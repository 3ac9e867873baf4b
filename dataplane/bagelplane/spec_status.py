"""What the operator reports of a resource, as models: the status in the CRD's schema and in the reference.

The operator writes it through the status subresource; nothing that a person writes is read from here.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import WithJsonSchema

from bagelplane.spec_errors import SpecModel
from bagelplane.spec_parts import field
from bagelplane.spec_values import MAX_INT64

MAX_ATTACHMENTS = 1000  # entries of 300 bytes: etcd takes 1.5 MB an object
MAX_MESSAGE_CHARACTERS = 32_768  # as in Kubernetes' own conditions

Timestamp = Annotated[str, WithJsonSchema({"type": "string", "format": "date-time"})]


class Condition(SpecModel):
    """One answer about the resource, in the form of Kubernetes' own conditions."""

    type: str = field("What is asked: Ready or SourcesReachable.", min_length=1, max_length=316)
    status: Literal["True", "False", "Unknown"] = field("The answer.")
    reason: str = field("The cause in one word, for programs.", min_length=1, max_length=1024)
    message: str = field("The cause for people, and what to do.", max_length=MAX_MESSAGE_CHARACTERS)
    observed_generation: int | None = field(
        "Generation of the resource that the answer is about.", None, ge=0, le=MAX_INT64
    )
    last_transition_time: Timestamp = field("When the answer last changed.")


class Attachment(SpecModel):
    """One pod that reads the data set."""

    pod: str = field("Name of the pod.", min_length=1, max_length=253)
    job: str | None = field("Name of the job that the pod belongs to.", None, max_length=253)
    ready: bool | None = field("Whether packs can be taken from the sidecar.", None)
    world_size: int | None = field("Ranks of the whole run.", None, unit="ranks", ge=1, le=MAX_INT64)
    step: int | None = field("Lowest next step of the pod's ranks.", None, unit="step", ge=0, le=MAX_INT64)
    attached_ranks: int | None = field(
        "Ranks whose trainer is connected.", None, unit="ranks", ge=0, le=65_536
    )
    packs_per_second: float | None = field(
        "Packs that the pod's ranks took, lately.", None, unit="packs/s", ge=0
    )
    fill_ratio: float | None = field(
        "Tokens of a pack against maxTokens, mean of the run.", None, unit="ratio", ge=0
    )
    last_snapshot_step: int | None = field(
        "Step of the last complete snapshot.", None, unit="step", ge=0, le=MAX_INT64
    )
    problem: str | None = field(
        "What is wrong with the sidecar; absent when nothing is.", None, max_length=MAX_MESSAGE_CHARACTERS
    )


class DatasetStatus(SpecModel):
    """What stands with a resource and the pods that read it."""

    observed_generation: int | None = field(
        "Generation of the resource that this was written for.", None, ge=0, le=MAX_INT64
    )
    spec_hash: str | None = field(
        "Names all that determines the stream; a snapshot belongs to one such hash.", None, max_length=64
    )
    config_map: str | None = field("ConfigMap that new pods read the resource from.", None, max_length=253)
    groups: int | None = field("Number of groups.", None, unit="groups", ge=0, le=65_536)
    attached: int | None = field("Ranks that are connected now.", None, unit="ranks", ge=0, le=MAX_INT64)
    step: int | None = field(
        "Lowest next step of the connected ranks; stays when they leave.",
        None,
        unit="step",
        ge=0,
        le=MAX_INT64,
    )
    packs_per_second: float | None = field("Packs taken by all ranks, lately.", None, unit="packs/s", ge=0)
    fill_ratio: float | None = field(
        "Tokens of a pack against maxTokens, mean over the ranks.", None, unit="ratio", ge=0
    )
    conditions: tuple[Condition, ...] = field(
        "What holds and what does not.", factory=tuple, max_length=16, strict=False
    )
    attachments: tuple[Attachment, ...] = field(
        "Pods that read the data set.", factory=tuple, max_length=MAX_ATTACHMENTS, strict=False
    )
