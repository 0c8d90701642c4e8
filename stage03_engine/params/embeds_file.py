"""The form in which embeddings travel: a safetensors file with one tensor, which is a header in JSON and numbers. No torch, and no pickle.

8 bytes: length of the header | {"x": {"dtype": "F32", "shape": [num_tokens, hidden_size], "data_offsets": [0, n]}} | n bytes
"""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any, NamedTuple

import numpy as np

from stage03_engine.errors import InvalidRequestError

FIELD = "prompt_embeds"
DTYPES = {"F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2)}
MOST_HEADER = 4096  # bytes
MOST_TOKENS = 1 << 20  # so that the list of placeholders is bounded before the context is


class Layout(NamedTuple):
    """What a header says."""

    num_tokens: int
    width: int
    dtype: str
    start: int  # of the numbers in the file
    size: int  # in bytes


def wrong(why: str) -> InvalidRequestError:
    """A refusal in one line."""
    return InvalidRequestError(f"{FIELD}: {why}.", FIELD)


def layout_of(head: bytes, length: int) -> Layout:
    """What a file of `length` bytes says in its `head`, which has all of the header. Raises InvalidRequestError."""
    header_size = int.from_bytes(head[:8], "little") if len(head) >= 8 else 0
    if not 2 <= header_size <= MOST_HEADER or 8 + header_size > len(head):
        raise wrong(
            "not a safetensors file with a header of at most 4,096 bytes; write it with safetensors.torch.save (files of torch.save are not read, as they can hold programs)"
        )
    try:
        header: Any = json.loads(head[8 : 8 + header_size])
        [tensor] = [value for name, value in header.items() if name != "__metadata__"]
        dtype, shape, (first, end) = tensor["dtype"], tensor["shape"], tensor["data_offsets"]
        sizes = [first, end, *shape]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise wrong("its header does not describe exactly one tensor") from None
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise wrong(f"the tensor must be float32, float16 or bfloat16, not {str(dtype)[:20]}")
    if len(shape) != 2 or not all(type(each) is int and 0 <= each < 1 << 40 for each in sizes) or 0 in shape:
        raise wrong(
            f"the tensor must have the shape [num_tokens, hidden_size] with one token at least, not {str(shape)[:100]}"
        )
    num_tokens, width = shape
    if num_tokens > MOST_TOKENS:
        raise wrong(f"{num_tokens} tokens are more than {MOST_TOKENS}")
    size, start = num_tokens * width * DTYPES[dtype][1], 8 + header_size
    if first != 0 or end != size or start + size != length:
        raise wrong(f"the file must end after the {size} bytes of its tensor")
    return Layout(num_tokens, width, DTYPES[dtype][0], start, size)


def layout_in_base64(text: str) -> Layout:
    """The same of a file in base64, of which only the header is decoded. Raises InvalidRequestError."""
    head = decoded(text[: (8 + MOST_HEADER + 2) // 3 * 4].encode("ascii", "replace"))
    if len(text) % 4:
        raise wrong("the text is not base64")
    return layout_of(head, len(text) // 4 * 3 - text[-2:].count("="))


def decoded(text: bytes) -> bytes:
    """Raises InvalidRequestError."""
    try:
        return base64.b64decode(text[: len(text) // 4 * 4], validate=True)
    except binascii.Error:
        raise wrong("the text is not base64") from None


def as_file(given: bytes) -> bytes:
    """The file itself: its eighth byte is zero, which no letter of base64 is."""
    return given if given[7:8] == b"\0" else decoded(given)


def check_numbers(file: bytes, layout: Layout) -> None:
    """Raises InvalidRequestError for NaN and infinity."""
    kind = np.uint16 if layout.dtype == "bfloat16" else np.dtype(layout.dtype)
    numbers = np.frombuffer(file, kind, offset=layout.start)
    finite = (numbers & 0x7F80 != 0x7F80) if layout.dtype == "bfloat16" else np.isfinite(numbers)
    if not finite.all():
        raise wrong("the tensor holds NaN or infinity")
