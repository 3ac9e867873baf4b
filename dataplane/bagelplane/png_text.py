"""PNG texts and profiles that unpack to far more than they weigh, taken out before Pillow unpacks them.

None of them changes a pixel, yet Pillow unpacks each in one piece, up to a GiB of a MiB. What becomes of the
image stays as it would be with Pillow: a text of more than `MAX_TEXT_BYTES` refuses it, one of more than
`MAX_CHUNK_BYTES` is passed over, and so is any profile.
"""

from __future__ import annotations

import zlib

MAX_TEXT_BYTES = 64 << 20
MAX_CHUNK_BYTES = 1 << 30

# Deflate packs at most about a thousand to one: what is shorter unpacks to less than `MAX_TEXT_BYTES`.
_HARMLESS_BYTES = 1 << 15
_STEP_BYTES = 1 << 12  # unpacks to 4 MiB at most
_PACKED_KINDS = frozenset({b"zTXt", b"iTXt", b"iCCP"})


def without_bulky_text(png: bytes) -> bytes:
    """`png`, or a copy without its bulky chunks. ValueError for a text that Pillow refuses for its length."""
    kept: list[bytes] = []
    begin, position = 0, 8
    while position + 12 <= len(png):
        end = position + 12 + int.from_bytes(png[position : position + 4], "big")
        kind = png[position + 4 : position + 8]
        if kind in _PACKED_KINDS and end - position > _HARMLESS_BYTES:
            body = png[position + 8 : end - 4]
            unpacked_bytes = _unpacked_bytes(kind, body)
            if kind != b"iCCP" and MAX_TEXT_BYTES < unpacked_bytes <= MAX_CHUNK_BYTES:
                raise ValueError(f"a text of {unpacked_bytes:,} bytes, more than {MAX_TEXT_BYTES:,}")
            if unpacked_bytes > MAX_TEXT_BYTES:
                kept.append(png[begin:position])
                begin = end
        position = end
    return b"".join([*kept, png[begin:]]) if kept else png


def _unpacked_bytes(kind: bytes, body: bytes) -> int:
    """Length after unpacking, counted up to just past `MAX_CHUNK_BYTES`; 0 for what is not packed."""
    _keyword, _, rest = body.partition(b"\x00")
    if kind != b"iTXt":
        return _count(rest[1:])  # after the method
    if rest[:1] == b"\x00":  # the flag: not packed
        return 0
    # After flag and method: language and translated keyword, each ended by a zero byte.
    return _count(rest[2:].split(b"\x00", 2)[-1])


def _count(packed: bytes) -> int:
    unpacker, count = zlib.decompressobj(), 0
    for begin in range(0, len(packed), _STEP_BYTES):
        try:
            count += len(unpacker.decompress(packed[begin : begin + _STEP_BYTES]))
        except zlib.error:
            # Pillow passes over what is damaged, but only after unpacking up to there.
            return MAX_CHUNK_BYTES + 1
        if unpacker.eof or count > MAX_CHUNK_BYTES:
            break
    return count
