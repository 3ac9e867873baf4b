"""A reader that knows the ring's page in the documentation, and nothing of ours, gets the recorded pixels."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bagelplane.sidecar.producer import DEFAULT_STREAM_FACTORY
from tests.golden.hashing import describe
from tests.golden.recordings import load_recording, resource_of
from tests.integration.sidecar_harness import DEADLINE_SECONDS, Sidecar, wait_for

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "ring.md"
PACKS = 2

DUMP = """
import json, struct, sys
from pathlib import Path
import msgpack

def rounded(value):
    return struct.unpack("<f", struct.pack("<f", value))[0]

# In float32, step by step: what the page says of pixels that are not normalised.
FLOATS = [struct.pack("<f", rounded(rounded(rounded(x / 255) - 0.5) / 0.5)) for x in range(256)]

def planes(image):
    if image.format == "f":
        return image.tobytes()
    pixels = image.tobytes()
    return b"".join(FLOATS[value] for colour in range(3) for value in pixels[colour::3])

found = {}
for step, payload, meta in unreleased_packs(sys.argv[1]):
    meta = msgpack.unpackb(meta)
    for number, image in enumerate(images(payload, meta)):
        Path(sys.argv[2], f"{step}-{number}.f4").write_bytes(planes(image))
    sizes = [[height, width] for height, width, _ in meta["images"]]
    found[step] = {"sizes": sizes, "format": struct.unpack_from("<I", payload, 12)[0],
                   **{key: meta[key] for key in ("vae_images", "vit_images", "patch_size")}}
assert not [name for name in sys.modules if name.startswith(("bagelplane", "numpy"))]
print(json.dumps(found))
"""


def dumped_by_a_foreign_reader(ring: Path, folder: Path) -> dict[int, dict[str, Any]]:
    """What the program makes of the page's example; the floats [3, h, w] of each image go into `folder`."""
    (documented,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-I", "-c", documented + DUMP, ring, folder],
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS * 2,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {int(step): pack for step, pack in json.loads(done.stdout).items()}


@pytest.mark.slow
@pytest.mark.parametrize(("pixel_format", "number"), [("uint8", 1), ("float32", 2)])
def test_a_reader_that_uses_nothing_of_ours_gets_the_recorded_pixels(
    pixel_format: str, number: int, tmp_path: Path
) -> None:
    recording = load_recording("b_masks_interp")
    parts = {"ring": {"packs": PACKS}, "decodeThreads": 1, "pixelFormat": pixel_format}
    dataset = resource_of(recording, dataplane=parts)
    sidecar = Sidecar(tmp_path, dataset, stream_factory=DEFAULT_STREAM_FACTORY)
    try:
        sidecar.wait_serving()
        with sidecar.reader() as reader:
            assert reader.step == 0  # attached: the producer begins
            wait_for(lambda: reader.status()["ranks"][0]["packs_published"] >= PACKS, "two packs")
            packs = dumped_by_a_foreign_reader(sidecar.directory / "ring-0.bin", tmp_path)
            assert sorted(packs)[:PACKS] == list(range(PACKS))
            # The ring may hold more of them than were recorded.
            for step in sorted(packs)[: len(recording.ranks[0])]:
                pack = packs[step]
                assert pack["format"] == number
                recorded = recording.ranks[0][step]
                images = [
                    np.fromfile(tmp_path / f"{step}-{n}.f4", np.float32).reshape(3, *size)
                    for n, size in enumerate(pack["sizes"])
                ]
                vae = [images[n] for n in pack["vae_images"]]
                height, width = (max(image.shape[side] for image in vae) for side in (1, 2))
                padded = np.zeros((len(vae), 3, height, width), np.float32)
                for place, image in zip(padded, vae, strict=True):
                    place[:, : image.shape[1], : image.shape[2]] = image
                assert describe(padded) == recorded["padded_images"]
                patches = [patches_of(images[n], pack["patch_size"]) for n in pack["vit_images"]]
                assert describe(np.concatenate(patches)) == recorded["packed_vit_tokens"]
            # And so does ours, from the same ring.
            batch = json.loads(json.dumps(describe(next(reader))))
            assert batch == recording.ranks[0][0]
    finally:
        sidecar.kill()


def patches_of(image: np.ndarray, patch: int) -> np.ndarray:
    rows, columns = image.shape[1] // patch, image.shape[2] // patch
    cut = [
        image[:, row * patch : (row + 1) * patch, column * patch : (column + 1) * patch]
        for row in range(rows)
        for column in range(columns)
    ]
    return np.stack([piece.transpose(1, 2, 0).reshape(-1) for piece in cut])
