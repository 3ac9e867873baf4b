"""What is allowed in a resource and yet seldom meant: advice, never an error."""

from __future__ import annotations

from collections.abc import Iterator

from bagelplane.spec import BagelDataset, DatasetSpec
from bagelplane.spec_errors import Problem, show
from bagelplane.spec_parts import Group

_COMMON_WORLD_SIZES = (2, 4, 8, 16, 32, 64)


def give_advice(dataset: BagelDataset) -> Iterator[Problem]:
    """Yield one Problem for each setting that works but probably does not do what its writer hopes."""
    spec = dataset.spec
    yield from _about_streams(spec)
    yield from _about_mandatory_groups(spec)
    for index, group in enumerate(spec.groups):
        loc = ("spec", "groups", index)
        if group.weight == 0 and not group.mandatory:
            fix = "give it a weight, or remove it"
            yield Problem((*loc, "weight"), "is 0 and the group is not mandatory: it is never drawn", fix=fix)
        yield from _about_positions(loc, group, spec)
    if spec.snapshots.uri is None:
        fix = "set it, so that a run can resume at any step"
        yield Problem(("spec", "snapshots", "uri"), "is not set: no snapshots are written", fix=fix)


def _about_streams(spec: DatasetSpec) -> Iterator[Problem]:
    if spec.sharding.mode != "Elastic":
        return
    streams, workers = spec.sharding.streams, spec.sharding.workers_per_rank
    if workers != 1:
        what = "is not used by sharding.mode Elastic, whose streams are set by sharding.streams"
        yield Problem(("spec", "sharding", "workersPerRank"), what, show(workers), "remove it")
    missed = [size for size in _COMMON_WORLD_SIZES if size <= streams and streams % size]
    if missed:
        what = f"is not divisible by {', '.join(map(str, missed))}: such world sizes cannot continue the run"
        yield Problem(("spec", "sharding", "streams"), what, show(streams), "use 64, or a multiple of it")


def _about_mandatory_groups(spec: DatasetSpec) -> Iterator[Problem]:
    mandatory = sum(group.mandatory for group in spec.groups)
    most = mandatory * spec.budgets.max_tokens_per_sample
    if mandatory > 1 and most > spec.budgets.max_tokens:
        what = f"lets the {mandatory} mandatory samples of a pack take up to {most} tokens, over maxTokens"
        fix = f"lower it to {spec.budgets.max_tokens // mandatory}"
        yield Problem(("spec", "budgets", "maxTokensPerSample"), what, fix=fix)


def _about_positions(loc: tuple[str | int, ...], group: Group, spec: DatasetSpec) -> Iterator[Problem]:
    """Images with more patches a side than the model's table has positions get positions of other patches."""
    model = spec.model
    vae = ("maxLatentSize", model.vae_image_downsample, model.max_latent_size)
    vit = ("maxPatchesPerSide", model.vit_patch_size, model.max_patches_per_side)
    vae_transform = None if group.type == "vlm_sft" else group.image_transform
    vit_transform = group.image_transform if group.type == "vlm_sft" else group.vit_image_transform
    vit_name = "imageTransform" if group.type == "vlm_sft" else "vitImageTransform"
    rules = [("imageTransform", vae_transform, vae)]
    if not model.interpolate_positions:
        rules.append((vit_name, vit_transform, vit))
    for field, transform, (limit_name, patch, limit) in rules:
        if transform is not None and transform.max_size // patch > limit:
            most = transform.max_size // patch
            what = f"allows {most} patches a side, model.{limit_name} has positions for {limit}"
            fix = f"raise model.{limit_name}, or lower maxSize to {limit * patch}"
            yield Problem((*loc, field, "maxSize"), what, show(transform.max_size), fix)
