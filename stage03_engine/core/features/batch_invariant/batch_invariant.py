"""`--batch-invariant`: the model, called with the same number of rows every time (vLLM: VLLM_BATCH_INVARIANT).

A step of any size becomes model calls of ROWS tokens each, the last one padded. So every matrix product, norm and activation
of any model has one shape, whatever is in the batch and however prompts are chunked. To the model each token
is a request of its own with a query of one token; the tokens before it are in the cache already, or are written first.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from stage03_engine.config import VllmConfig
from stage03_engine.core.hooks import RunnerHook
from stage03_engine.core.model_runner import ModelRunner
from stage03_engine.core.models.layers import LanguageModel
from stage04_kernels.attention import AttentionMetadata
from stage04_kernels.backends.batch_invariant import ROWS, rows_of
from stagetrace import trace


class BatchInvariantModel(LanguageModel):
    """Takes the place of the model it wraps. `rows` is the number of rows of each call."""

    def __init__(self, model: LanguageModel, rows: int) -> None:
        super().__init__()
        self.model, self.rows = model, rows

    def forward(
        self, input_ids: Tensor, positions: Tensor, kv_caches: list[Tensor], metadata: AttentionMetadata
    ) -> Tensor:
        """As the model's own."""
        outputs = []
        for start in range(0, len(input_ids), self.rows):
            tile = slice(start, start + self.rows)
            ids, places = self._padded(input_ids[tile], 0), self._padded(positions[tile], 0)
            outputs.append(self.model(ids, places, kv_caches, self._tile_metadata(metadata, tile)))
        return torch.cat(outputs)[: len(input_ids)]

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """As the model's own."""
        tiles = [self._padded(tile, 0.0) for tile in hidden_states.split(self.rows)]
        return torch.cat([self.model.compute_logits(t) for t in tiles])[: len(hidden_states)]

    def _padded(self, tile: Tensor, value: float) -> Tensor:
        """`self.rows` rows, in memory of their own: a kernel may choose its path by the alignment of its arguments."""
        return pad(tile, (0, 0) * (tile.dim() - 1) + (0, self.rows - len(tile)), value=value).clone()

    def _tile_metadata(self, metadata: AttentionMetadata, tile: slice) -> AttentionMetadata:
        """One request per token. Padding rows read the first token of the null block, and write nothing."""
        requests, visible = (each[tile] for each in rows_of(metadata))
        seq_lens = self._padded(visible, 1)
        table = metadata.block_table[requests]
        starts = list(range(self.rows + 1))
        return AttentionMetadata(
            query_start_loc=torch.tensor(starts, dtype=torch.int32, device=table.device),
            seq_lens=seq_lens.int(),
            block_table=self._padded(table, 0),
            slot_mapping=self._padded(metadata.slot_mapping[tile], -1),
            query_start_loc_cpu=starts,
            seq_lens_cpu=seq_lens.tolist(),
            max_query_len=1,
            max_seq_len=int(seq_lens.max()),
        )


class BatchInvariantHook(RunnerHook):
    """Installed with `--batch-invariant`."""

    def __init__(self, runner: ModelRunner, config: VllmConfig) -> None:
        super().__init__(runner, config)
        if runner.device.type == "cpu" and config.device_config.num_threads is not None:
            # A power of two cuts a tensor into equal parts of whole vectors. Otherwise elements are left over at the
            # seams, for a loop that rounds differently, and which ones depends on the place in the batch.
            torch.set_num_threads(1 << (config.device_config.num_threads.bit_length() - 1))

    def model_loaded(self, model: LanguageModel) -> LanguageModel:
        """The model in tiles of one size."""
        return make_batch_invariant(model, self.config, self.runner.dtype, self.runner.device)


def make_batch_invariant(
    model: LanguageModel, config: VllmConfig, dtype: torch.dtype, device: torch.device
) -> LanguageModel:
    """Wrap the model, with ROWS rows a call if its rows really are independent on this machine, else with one."""
    rows = ROWS if rows_are_independent(BatchInvariantModel(model, ROWS), config, dtype, device) else 1
    if trace.on:
        trace.emit("batch_invariant.checked", rows=rows)
    return BatchInvariantModel(model, rows)


@torch.inference_mode()
def rows_are_independent(
    model: BatchInvariantModel, config: VllmConfig, dtype: torch.dtype, device: torch.device
) -> bool:
    """Does a row come out bit for bit the same at every place, and beside any neighbours?

    One token in all rows, in the even ones, in the odd ones, with others between. Libraries promise nothing here: it
    depends on the processor and the sizes of the model.
    """
    shape, rows = config.shape, model.rows
    size = (2, rows + 1, config.cache_config.block_size, shape.num_kv_heads, shape.head_dim)
    caches = [torch.zeros(size, dtype=dtype, device=device) for _ in range(shape.num_layers)]
    blocks = torch.arange(1, rows + 1, device=device)
    starts = list(range(rows + 1))
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=torch.ones(rows, dtype=torch.int32, device=device),
        block_table=blocks[:, None].int(),
        slot_mapping=blocks * config.cache_config.block_size,
        query_start_loc_cpu=starts,
        seq_lens_cpu=[1] * rows,
        max_query_len=1,
        max_seq_len=1,
    )
    index = torch.arange(rows, device=device)
    token, others = shape.vocab_size // 2, (index * 37 + 11) % shape.vocab_size
    wanted: Tensor | None = None
    for chosen in (index >= 0, index % 2 == 0, index % 2 == 1):
        input_ids = torch.where(chosen, token, others)
        hidden = model(input_ids, torch.zeros_like(index), caches, metadata)
        results = torch.cat([hidden.float(), model.compute_logits(hidden)], dim=1)[chosen]
        wanted = results[:1] if wanted is None else wanted
        if not torch.equal(results, wanted.expand_as(results)):
            return False
    return True
