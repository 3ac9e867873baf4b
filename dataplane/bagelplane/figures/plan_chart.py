"""A forecast of packs as one picture: fill, mix, drops, images. Needs matplotlib (extra `plot`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bagelplane.errors import SpecError
from bagelplane.figures.tally import PlanTally

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, FAINT, GRID = "#26323d", "#6b7885", "#e3e8ec"
BLUE, ORANGE, GREEN, GREY = "#2f6fb0", "#e0762f", "#3a9a6b", "#b4bec7"
# None of the colours above: there they mean something else.
GROUP_COLOURS = ("#8a5bb5", "#3aa5b5", "#c99a2e", "#c2475a", "#7a8f3c", "#5b6bc0", "#9c6b4f", "#6b7885")
_SIZE_INCHES, _DPI = (13.0, 8.6), 120


def write_plan_chart(path: Path, tally: PlanTally, *, title: str, subtitle: str) -> None:
    """Draw `tally` into the PNG `path`. Raises SpecError when matplotlib is missing or the file cannot be written."""
    try:
        from matplotlib import rc_context  # noqa: PLC0415  (an extra, slow to load)
        from matplotlib.figure import Figure  # noqa: PLC0415
        from matplotlib.layout_engine import ConstrainedLayoutEngine  # noqa: PLC0415
    except ImportError:
        raise SpecError(
            "a chart needs matplotlib, which is not installed", fix="pip install 'bagelplane[plot]'"
        ) from None
    style: dict[Any, Any] = {
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": GREY,
        "axes.titlesize": 12,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "xtick.color": FAINT,
        "ytick.color": FAINT,
        "font.size": 10,
    }
    with rc_context(style):
        layout = ConstrainedLayoutEngine(rect=(0.01, 0.01, 0.98, 0.89), wspace=0.06, hspace=0.08)
        figure = Figure(figsize=_SIZE_INCHES, layout=layout, facecolor="white")
        (fill, mix), (images, drops) = figure.subplots(2, 2)
        figure.text(0.015, 0.975, title, fontsize=16, fontweight="bold", va="top")
        figure.text(0.015, 0.935, subtitle, fontsize=10.5, color=FAINT, va="top")
        for axes in (fill, mix, images, drops):
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_axisbelow(True)
        _draw_fill(fill, tally)
        _draw_mix(mix, tally)
        _draw_images(images, tally)
        _draw_drops(drops, tally)
        try:
            figure.savefig(path, dpi=_DPI, format="png")
        except OSError as error:
            raise SpecError(
                f"the picture {path} cannot be written: {error.strerror}",
                fix="name a path in a folder of yours",
            ) from None


def _draw_fill(axes: Axes, tally: PlanTally) -> None:
    config = tally.config
    lengths = np.asarray(tally.lengths)
    low = min(int(lengths.min()), int(config.expected_tokens * 0.9))
    axes.hist(lengths, bins=np.linspace(low, config.max_tokens, 41).tolist(), color=BLUE, alpha=0.85)
    mean = lengths.mean()
    axes.axvline(
        config.expected_tokens, color=GREEN, linewidth=1.6, label=f"expected {config.expected_tokens:,}"
    )
    axes.axvline(config.max_tokens, color="#c2475a", linewidth=1.6, label=f"maximum {config.max_tokens:,}")
    axes.axvline(mean, color=INK, linewidth=1.4, linestyle="--", label=f"mean {mean:,.0f}")
    axes.set_title(f"Fill: packs are {mean / config.max_tokens:.0%} full on average")
    axes.set_xlabel("tokens in a pack")
    axes.set_ylabel("packs")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.locator_params(axis="y", integer=True)
    axes.grid(axis="y", color=GRID)
    axes.legend(frameon=False, loc="upper left")


def _draw_mix(axes: Axes, tally: PlanTally) -> None:
    groups = tally.as_json()["groups"]
    names = [group["name"] for group in groups]
    series = (
        ("weight", "weight_share", GREY),
        ("samples", "sample_share", BLUE),
        ("tokens", "token_share", ORANGE),
    )
    places = np.arange(len(groups))
    for offset, (label, key, colour) in zip((-0.27, 0.0, 0.27), series, strict=True):
        shares = [100 * group[key] for group in groups]
        bars = axes.barh(places + offset, shares, height=0.25, color=colour, label=label)
        axes.bar_label(bars, fmt="%.0f %%", padding=3, color=FAINT, fontsize=9)
    axes.set_yticks(
        places, [_with_mark(name, group) for name, group in zip(names, groups, strict=True)], color=INK
    )
    axes.invert_yaxis()
    axes.set_xlim(0, max(5.0, 1.22 * max(100 * group[key] for group in groups for _, key, _ in series)))
    axes.set_xlabel("share in %")
    axes.set_title("Mix: what was asked for, and what packs hold")
    axes.grid(axis="x", color=GRID)
    axes.legend(frameon=False, loc="best")


def _with_mark(name: str, group: dict[str, Any]) -> str:
    return f"{name}\n(in every pack)" if group["mandatory"] else name


def _draw_images(axes: Axes, tally: PlanTally) -> None:
    most = max([*tally.vae_images, *tally.vit_images, 1])
    step = max(1, -(-most // 30))
    edges = (np.arange(0, most + 2 * step, step) - 0.5).tolist()
    series = [tally.vae_images, tally.vit_images]
    means = [sum(counts) / tally.packs for counts in series]
    axes.hist(
        series,
        bins=edges,
        color=[ORANGE, GREEN],
        label=[f"VAE images, mean {means[0]:.1f}", f"ViT images, mean {means[1]:.1f}"],
    )
    axes.set_title(f"Images: {sum(means):.1f} a pack")
    axes.set_xlabel("images in a pack, those left out by conditioning not counted")
    axes.set_ylabel("packs")
    axes.locator_params(integer=True)
    axes.grid(axis="y", color=GRID)
    axes.legend(frameon=False)


def _draw_drops(axes: Axes, tally: PlanTally) -> None:
    drops = tally.drops()
    total = sum(count for row in drops.values() for count in row.values())
    if not total:
        axes.text(0.5, 0.5, "no sample is dropped", transform=axes.transAxes, ha="center", color=FAINT)
        axes.set_title("Drops: none")
        axes.set_xticks([])
        axes.set_yticks([])
        return
    reasons: dict[str, int] = {}
    for row in drops.values():
        for reason, count in row.items():
            reasons[reason] = reasons.get(reason, 0) + count
    names = sorted(reasons, key=lambda reason: -reasons[reason])
    left = np.zeros(len(names))
    for number, share in enumerate(tally.group_shares):
        counts = np.asarray([drops.get(share.name, {}).get(reason, 0) for reason in names])
        if counts.any():
            colour = GROUP_COLOURS[number % len(GROUP_COLOURS)]
            axes.barh(range(len(names)), counts, left=left, height=0.55, color=colour, label=share.name)
            left = left + counts
    for place, name in enumerate(names):
        axes.annotate(
            f"{reasons[name]:,}",
            (left[place], place),
            (4, 0),
            textcoords="offset points",
            va="center",
            color=FAINT,
        )
    axes.set_yticks(range(len(names)), [name.replace("_", " ") for name in names], color=INK)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max(reasons.values()))
    axes.set_xlabel("samples dropped, all packs together")
    axes.set_title(f"Drops: {total / tally.packs:.2f} a pack")
    axes.grid(axis="x", color=GRID)
    axes.legend(frameon=False, loc="lower right")
