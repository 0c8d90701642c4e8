"""When something was said (Radford et al. 2022, sections 2.3 and 4.5; transformers, WhisperTimeStampLogitsProcessor).

Whisper writes times as tokens: from one id on, each stands for 0.02 seconds more. These rules make them a frame around
each segment. When a single word was said is nowhere in the text: it is read from where the decoder looked in the sound.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

SECONDS_PER_TIMESTAMP = 0.02  # also of one position of the encoder's output


def apply_timestamp_rules(
    logits: Tensor, output: list[int], timestamps_from: int, eos_token_id: int, max_first: int | None = None
) -> Tensor:
    """Forbid what may not follow `output` (token ids after the prompt): logits [1, vocab_size] in and out.

    The text begins with a time, at most `max_first` steps of 0.02 seconds from the start. A time that ends a segment is
    followed by the one that begins the next, or by the end. Times do not decrease, and no segment has length 0. A time
    comes when all times together are likelier than any one piece of text.
    """
    logits = logits.clone()
    logits[:, timestamps_from - 1] = -torch.inf  # <|notimestamps|>
    if not output:
        logits[:, :timestamps_from] = -torch.inf
        if max_first is not None:
            logits[:, timestamps_from + max_first + 1 :] = -torch.inf
    times = [token for token in output if token >= timestamps_from]
    after_time = bool(output) and output[-1] >= timestamps_from
    begins = after_time and (len(output) < 2 or output[-2] >= timestamps_from)  # the last time begins a segment
    if begins:
        logits[:, timestamps_from:] = -torch.inf
    elif after_time:
        logits[:, :eos_token_id] = -torch.inf
    if times:
        # The time that ends a segment may come again, to begin the next one.
        first_allowed = times[-1] if after_time and not begins else times[-1] + 1
        logits[:, timestamps_from:first_allowed] = -torch.inf
    logprobs = logits.log_softmax(dim=-1)[0]
    if logprobs[timestamps_from:].logsumexp(dim=-1) > logprobs[:timestamps_from].max():
        logits[:, :timestamps_from] = -torch.inf
    return logits


def token_ends(model: Any, encoded: Any, tokens: list[int], num_prompt: int, seconds: float) -> list[float]:
    """When each token after the prompt ends, in seconds of this piece of sound; the last has the time of the one before.

    One more pass of the decoder over all tokens shows how much each looked at each 0.02 seconds, in the attention heads
    that follow the sound (`alignment_heads` of the model's generation config).
    """
    if len(tokens) - num_prompt < 2:
        return [0.0] * (len(tokens) - num_prompt)
    num_positions = max(1, round(seconds / SECONDS_PER_TIMESTAMP))
    weights = _looks(model, encoded, tokens[:-1])
    weights = weights[:, num_prompt:, :num_positions]  # [num_heads, num_tokens - 1, num_positions]
    weights = (weights - weights.mean(dim=1, keepdim=True)) / weights.std(dim=1, keepdim=True, unbiased=False)
    # With one token its share of each position is the only one: 0 / 0.
    weights = median_filter(weights.nan_to_num(), model.config.median_filter_width)
    rows, columns = align(-weights.mean(dim=0).double().cpu().numpy())
    begins = np.diff(rows, prepend=-1) > 0
    ends = (columns[begins] * SECONDS_PER_TIMESTAMP).tolist()
    return [*ends, ends[-1]]


def _looks(model: Any, encoded: Any, tokens: list[int]) -> Tensor:
    """How much each token looked at each position of the sound, in the heads that follow it: [num_heads, num_tokens,
    num_positions] float32. Only these heads are kept: all of a large model's would be gigabytes."""
    heads = [(layer, head) for layer, head in model.generation_config.alignment_heads]
    kept: dict[tuple[int, int], Tensor] = {}

    def keep(layer: int) -> Any:
        def hook(module: Any, inputs: Any, outputs: tuple[Tensor, Tensor]) -> None:
            kept.update({(layer, head): outputs[1][0, head].float() for at, head in heads if at == layer})

        return model.model.decoder.layers[layer].encoder_attn.register_forward_hook(hook)

    fast = model.config._attn_implementation
    model.set_attn_implementation("eager")  # the one that returns its weights
    hooks = [keep(layer) for layer in {layer for layer, _ in heads}]
    try:
        ids = torch.tensor([tokens], device=model.device)
        model(encoder_outputs=encoded, decoder_input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
        model.set_attn_implementation(fast)
    return torch.stack([kept[layer, head] for layer, head in heads])


def median_filter(values: Tensor, width: int) -> Tensor:
    """Each number of the last dimension becomes the median of the `width` (odd) around it; the ends are mirrored."""
    half = width // 2
    if values.shape[-1] <= half:
        return values
    padded = torch.nn.functional.pad(values, (half, half), mode="reflect")
    return padded.unfold(-1, width, 1).sort(dim=-1).values[..., half]


# Invariant: totals[i, j] is the cheapest way from (0, 0) to the cell (i - 1, j - 1); cells of one anti-diagonal depend only
# on the two before, so that each is computed at once.
def align(costs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The cheapest way from the first to the last cell of costs [num_rows, num_columns], as the rows and the columns that it
    passes (dynamic time warping): each step goes down, to the right, or both."""
    num_rows, num_columns = costs.shape
    totals = np.full((num_rows + 1, num_columns + 1), np.inf, dtype=np.float32)
    totals[0, 0] = 0
    steps = np.full((num_rows + 1, num_columns + 1), 2, dtype=np.int8)  # 0: both, 1: down, 2: to the right
    steps[1:, 0] = 1
    for diagonal in range(2, num_rows + num_columns + 1):
        i = np.arange(max(1, diagonal - num_columns), min(num_rows, diagonal - 1) + 1)
        j = diagonal - i
        both, down, right = totals[i - 1, j - 1], totals[i - 1, j], totals[i, j - 1]
        step = np.where((both < down) & (both < right), 0, np.where((down < both) & (down < right), 1, 2))
        totals[i, j] = costs[i - 1, j - 1] + np.choose(step, [both, down, right])
        steps[i, j] = step
    way, cell = [], (num_rows, num_columns)
    while cell != (0, 0):
        way.append(cell)
        step = steps[cell]
        cell = (cell[0] - (step != 2), cell[1] - (step != 1))
    rows, columns = np.array(way[::-1]).T - 1
    return rows, columns
