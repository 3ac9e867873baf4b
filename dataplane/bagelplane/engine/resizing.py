"""The size that an image gets: whole strides, between a shortest and a longest side, below a pixel budget."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_MAX_PIXELS = 14 * 14 * 9 * 1024


@dataclass(frozen=True, slots=True)
class ResizeRule:
    """The resize rule of one transform. All in pixels.

    `max_size` and `min_size` bound the long and the short side; where both cannot hold, the last step brings
    the long side back to `max_size`. `max_pixels` is shared by the images of one sample.
    """

    stride: int
    max_size: int
    min_size: int
    max_pixels: int = DEFAULT_MAX_PIXELS

    def __post_init__(self) -> None:
        for name in ("stride", "max_size", "min_size", "max_pixels"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)} pixels, expected 1 or more")

    def target_size(self, width: int, height: int, num_images: int = 1) -> tuple[int, int]:
        """(width, height) that an image of `width` x `height` gets in a sample that resizes `num_images`.

        Both are multiples of the stride and at least one stride. ValueError for an image without pixels.
        """
        if width < 1 or height < 1:
            raise ValueError(f"an image of {width}x{height} pixels has no size to resize to")
        scale = min(self.max_size / max(width, height), 1.0)
        scale = max(scale, self.min_size / min(width, height))
        width, height = self._scaled(width, scale), self._scaled(height, scale)
        max_pixels = self.max_pixels / num_images
        if width * height > max_pixels:
            # The ratio of areas, not its root: the recorded streams shrink sides by it.
            scale = max_pixels / (width * height)
            width, height = self._scaled(width, scale), self._scaled(height, scale)
        if max(width, height) > self.max_size:
            scale = self.max_size / max(width, height)
            width, height = self._scaled(width, scale), self._scaled(height, scale)
        return width, height

    def _scaled(self, side: int, scale: float) -> int:
        # Rounds twice, half to even both times: first to whole pixels, then to whole strides.
        return max(self.stride, round(round(side * scale) / self.stride) * self.stride)
