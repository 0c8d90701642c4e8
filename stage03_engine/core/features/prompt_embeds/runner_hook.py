"""The model runner's side: rows of the embedding are replaced by the client's (vllm/v1/worker/gpu_model_runner.py, inputs_embeds).

The model files know nothing of it. Each of these positions gets a token id beyond the vocabulary, a number of its own; around the embedding, such ids become 0 and
their rows the client's. So it does not matter in which pieces the embedding is called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from stage03_engine.config import VllmConfig
from stage03_engine.core.hooks import RunnerHook
from stage03_engine.core.input_batch import StepInputs
from stage03_engine.core.model_runner import ModelRunner
from stage03_engine.core.sched_output import NewRequestData, SchedulerOutput
from stage03_engine.params.embeds_file import layout_of

BEYOND = 1 << 40  # greater than any token id


class PromptEmbedsRunnerHook(RunnerHook):
    """Installed with `--enable-prompt-embeds`."""

    def __init__(self, runner: ModelRunner, config: VllmConfig) -> None:
        super().__init__(runner, config)
        self._embeds: dict[str, Tensor] = {}  # request -> [num_tokens, hidden_size]
        self._places: list[tuple[int, Tensor]] = []  # of this step: index of a token, and the rows from there on
        self._around: nn.Module | None = None  # the embedding that is watched
        self._values = self._here = self._numbers = torch.empty(0)

    def received(self, scheduler_output: SchedulerOutput) -> SchedulerOutput:
        """Forget requests that ended; one that was preempted brings its embeddings again."""
        for request_id in (*scheduler_output.finished_req_ids, *scheduler_output.preempted_req_ids):
            self._embeds.pop(request_id, None)
        return scheduler_output

    def request_added(self, new: NewRequestData) -> None:
        """Keep its embeddings, in the model's number format."""
        if (file := new.sampling_params.prompt_embeds) is not None:
            layout = layout_of(file[: 8 + 4096], len(file))
            flat = torch.frombuffer(bytearray(file[layout.start :]), dtype=getattr(torch, layout.dtype))
            rows = flat.view(layout.num_tokens, layout.width)
            self._embeds[new.request_id] = rows.to(self.runner.device, self.runner.dtype)

    def prepared(self, inputs: StepInputs, scheduler_output: SchedulerOutput) -> None:
        """Which tokens of the step are embeddings."""
        self._places, starts = [], inputs.metadata.query_start_loc_cpu
        for number, request_id in enumerate(scheduler_output.num_scheduled_tokens) if self._embeds else ():
            if (rows := self._embeds.get(request_id)) is None:
                continue
            begin, end = starts[number], starts[number + 1]
            first = int(inputs.positions[begin])
            if (count := min(end - begin, len(rows) - first)) > 0:
                self._places.append((begin, rows[first : first + count]))
        if self._places:
            inputs.replayable = False
            self._watch()

    def forward(self, inputs: StepInputs, run: Callable[[StepInputs], Tensor]) -> Tensor:
        """Run the model over ids that say which rows are the client's."""
        if not self._places:
            return run(inputs)
        ids, known = inputs.input_ids.clone(), BEYOND
        for begin, rows in self._places:
            ids[begin : begin + len(rows)] = torch.arange(known, known + len(rows), device=ids.device)
            known += len(rows)
        self._values = torch.cat([rows for _, rows in self._places])
        self._places = []
        return run(replace(inputs, input_ids=ids))

    def _watch(self) -> None:
        """Around the embedding of the model that runs now: it may have been loaded again."""
        named = {name.rpartition(".")[2]: module for name, module in reversed(list(self.runner.model.named_modules()))}
        embedding = named.get("wte", named.get("embed_tokens"))
        assert embedding is not None, "a model without an embedding"
        if embedding is not self._around:
            embedding.register_forward_pre_hook(self._before)
            embedding.register_forward_hook(self._after)
            self._around = embedding

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Ids that the embedding knows."""
        self._here = args[0] >= BEYOND
        self._numbers = args[0][self._here] - BEYOND
        return (args[0].masked_fill(self._here, 0), *args[1:]) if len(self._numbers) else None

    def _after(self, module: nn.Module, args: tuple[Any, ...], x: Tensor) -> Tensor | None:
        """Rows that the client gave."""
        if not len(self._numbers):
            return None
        x = x.clone()
        x[self._here] = self._values[self._numbers]
        return x
