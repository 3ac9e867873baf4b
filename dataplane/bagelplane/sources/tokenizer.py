"""The tokenizer of a resource: a `tokenizer.json`, and the four tokens around texts and images."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from bagelplane.engine.packer import SpecialTokens
from bagelplane.errors import SpecError
from bagelplane.spec import Tokenizer as ResourceTokenizer
from bagelplane.storage import Storage


@dataclass(frozen=True, slots=True)
class TextEncoder:
    """`encode` of anything that gives a list of ids, or an object with `.ids` as the tokenizers library does."""

    tokenizer: Any
    digest: str = ""
    """Of the file that it was read from; empty where there is none."""

    def __call__(self, text: str) -> Sequence[int]:
        encoded = self.tokenizer.encode(text)
        ids: Sequence[int] = getattr(encoded, "ids", encoded)
        return ids


def load_tokenizer(storage: Storage, settings: ResourceTokenizer) -> tuple[TextEncoder, SpecialTokens]:
    """How to encode a text, and the special ids. Raises SpecError for a file that is no tokenizer."""
    data = storage.read_bytes(settings.uri)
    try:
        tokenizer = Tokenizer.from_str(data.decode("utf-8"))
    except Exception as error:  # noqa: BLE001 (the binding raises plain Exception for whatever it dislikes)
        raise SpecError(
            f"spec.tokenizer.uri: {settings.uri} is no tokenizer file",
            got=f"{len(data)} bytes, {str(error).splitlines()[0] if str(error) else type(error).__name__}",
            expected="a tokenizer.json as the tokenizers library writes it",
            fix="name the tokenizer.json of the model",
        ) from None
    names = settings.special_tokens
    wanted = {"bos": names.bos, "eos": names.eos}
    wanted |= {"startOfImage": names.start_of_image, "endOfImage": names.end_of_image}
    ids, missing = dict[str, int](), dict[str, str | int]()
    for field, token in wanted.items():
        token_id = token if isinstance(token, int) else tokenizer.token_to_id(token)
        if token_id is None:
            missing[field] = token
        else:
            ids[field] = token_id
    if missing:
        raise SpecError(
            f"spec.tokenizer.specialTokens.{', '.join(missing)}: {', '.join(map(repr, missing.values()))} "
            f"{'is' if len(missing) == 1 else 'are'} not in the tokenizer",
            got=f"a vocabulary of {tokenizer.get_vocab_size()} tokens without",
            fix="write tokens that the tokenizer has, or the ids themselves",
        )
    return TextEncoder(tokenizer, hashlib.sha256(data).hexdigest()), SpecialTokens(
        ids["bos"], ids["eos"], start_of_image=ids["startOfImage"], end_of_image=ids["endOfImage"]
    )
