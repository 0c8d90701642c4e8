"""`{"prompt_embeds": tensor}`, as callers in Python write such a prompt (vllm/inputs: EmbedsPrompt)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stage03_engine.config import VllmConfig
from stage03_engine.params.embeds_file import FIELD, layout_of, wrong


class EmbedsPrompt(list[int]):
    """As many placeholders as there are embeddings."""

    def __init__(self, file: bytes) -> None:
        super().__init__([0] * layout_of(file[: 8 + 4096], len(file)).num_tokens)
        self._file = file

    def params(self, config: VllmConfig) -> dict[str, Any]:
        """What the request's SamplingParams get."""
        return {FIELD: self._file}


def embeds_prompt(given: Mapping[str, Any]) -> EmbedsPrompt:
    """Raises InvalidRequestError for anything but a tensor [num_tokens, hidden_size], alone or with a cache_salt."""
    import torch
    from safetensors.torch import save

    if more := given.keys() - {FIELD, "cache_salt"}:
        raise wrong(f"a prompt of embeddings has no {str(min(more, key=str))[:100]!r} beside them")
    rows = given[FIELD]
    if not isinstance(rows, torch.Tensor):
        raise wrong(f"this is no tensor, but {type(rows).__name__}")
    if rows.layout != torch.strided or rows.is_nested or rows.is_meta:
        raise wrong("the tensor must be dense, and have values")
    if rows.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise wrong(f"the tensor must be float32, float16 or bfloat16, not {str(rows.dtype).removeprefix('torch.')}")
    return EmbedsPrompt(save({"x": rows.detach().to("cpu").contiguous()}))
