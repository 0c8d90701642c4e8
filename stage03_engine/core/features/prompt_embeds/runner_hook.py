"""The model runner's side: which rows of the embedding are the client's."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.embedding_rows.rows import EmbeddingRows
from stage03_engine.core.hooks import RunnerHook
from stage03_engine.core.input_batch import StepInputs
from stage03_engine.core.model_runner import ModelRunner
from stage03_engine.core.sched_output import NewRequestData, SchedulerOutput
from stage03_engine.params.embeds_file import layout_of


class PromptEmbedsRunnerHook(RunnerHook):
    """Installed with `--enable-prompt-embeds`."""

    def __init__(self, runner: ModelRunner, config: VllmConfig) -> None:
        super().__init__(runner, config)
        self._embeds: dict[str, Tensor] = {}  # request -> [num_tokens, hidden_size]
        self._rows = EmbeddingRows.of(runner)

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
        starts = inputs.metadata.query_start_loc_cpu
        for number, request_id in enumerate(scheduler_output.num_scheduled_tokens) if self._embeds else ():
            if (rows := self._embeds.get(request_id)) is None:
                continue
            begin, end = starts[number], starts[number + 1]
            first = inputs.metadata.seq_lens_cpu[number] - (end - begin)
            if (count := min(end - begin, len(rows) - first)) > 0:
                self._rows.put(inputs, begin, rows[first : first + count])

    def forward(self, inputs: StepInputs, run: Callable[[StepInputs], Tensor]) -> Tensor:
        """The client's rows take their places."""
        return self._rows.run(inputs, run)
