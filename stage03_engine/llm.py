"""Offline inference without HTTP or an event loop (vllm/entrypoints/llm.py, vllm/v1/engine/llm_engine.py)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

import msgspec

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.config import VllmConfig
from stage03_engine.errors import InvalidRequestError
from stage03_engine.frontend.core_client import EngineCoreClient, InprocClient, SyncMPClient
from stage03_engine.frontend.features.beam_search import BeamSearch, BeamSearchParams, candidates_of
from stage03_engine.frontend.input_processor import InputProcessor
from stage03_engine.frontend.metrics import IterationStats
from stage03_engine.frontend.output_processor import OutputProcessor
from stage03_engine.frontend.tokenizer import init_tokenizer_from_configs
from stage03_engine.messages import EngineCoreRequest
from stage03_engine.outputs import RequestOutput
from stage03_engine.params.pooling_params import PoolingParams
from stage03_engine.sampling_params import RequestOutputKind, SamplingParams

Prompt = str | list[int]


class LLM:
    """An engine that is driven by plain function calls.

    >>> LLM("gpt2-tiny").generate("To be, or", SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].text

    `multiprocess` puts the engine core into a process of its own, as the server does; otherwise it runs right here. The
    keywords are the fields of the configuration classes, e.g. `block_size=8`. Raises ConfigError, ModelNotFoundError.
    """

    def __init__(self, model: str = "gpt2-tiny", *, multiprocess: bool = False, **engine_args: Any) -> None:
        self._setup(EngineArgs.from_kwargs(model=model, **engine_args), multiprocess)

    @classmethod
    def from_vllm_config(cls, config: VllmConfig, *, multiprocess: bool = False) -> LLM:
        """The same from a configuration that is already resolved."""
        llm = cls.__new__(cls)
        llm._setup(config, multiprocess)
        return llm

    def _setup(self, config: VllmConfig, multiprocess: bool) -> None:
        self.vllm_config = config
        self.tokenizer = init_tokenizer_from_configs(config)
        self.input_processor = InputProcessor(config, self.tokenizer)
        self.output_processor = OutputProcessor(self.tokenizer)
        self.engine_core: EngineCoreClient
        if multiprocess:
            self.engine_core = SyncMPClient(config)
        else:
            from stage03_engine.core.make_core import make_core  # imports torch: only for whoever runs it here

            self.engine_core = InprocClient(make_core(config))
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Complete all prompts together; the results are in their order. `params` is one for all or one for each; without
        them the model's generation_config.json decides.
        `use_tqdm` shows a progress bar when stderr is a terminal.

        Raises InvalidRequestError before anything runs when a prompt or a setting is impossible.
        """
        batch = self._batch(prompts)
        defaults = self.vllm_config.model_config.default_sampling_params or {}
        each = [params or SamplingParams(**defaults)] * len(batch) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(batch):
            raise InvalidRequestError(f"{len(batch)} prompts but {len(each)} sampling parameters.", "params")
        whole = [
            msgspec.structs.replace(p, output_kind=RequestOutputKind.FINAL_ONLY) for p in each
        ]  # all n answers at once
        requests = [
            self.input_processor.process_inputs(f"r{next(self._ids)}", prompt, p) for prompt, p in zip(batch, whole)
        ]
        for request, prompt in zip(requests, batch):
            self._add(request, prompt)
        order = {request.request_id: i for i, request in enumerate(requests)}
        running: Iterable[RequestOutput] = (output for output in self._run() if output.finished)
        if use_tqdm:
            from tqdm import tqdm

            running = tqdm(running, total=len(requests), unit="request", disable=None)
        finished = list(running)
        return sorted(finished, key=lambda output: order[output.request_id])

    def encode(
        self, prompts: Prompt | Sequence[Prompt], params: PoolingParams | Sequence[PoolingParams] | None = None
    ) -> list[RequestOutput]:
        """Vectors of all prompts, in their order: `pooled` of each output holds them, as the bytes of float32 numbers.

        The engine must run with `runner="pooling"`, or its model be a classifier, whose vectors have a number per class.
        `params` is one for all or one for each. Raises InvalidRequestError.
        """
        batch, default = self._batch(prompts), PoolingParams(task=self.vllm_config.supported_tasks[0])
        each = list(params) if isinstance(params, Sequence) else [params or default] * len(batch)
        requests = [
            self.input_processor.process_pooling_inputs(f"r{next(self._ids)}", prompt, p)
            for prompt, p in zip(batch, each, strict=True)
        ]
        for request, prompt in zip(requests, batch):
            self._add(request, prompt)
        outputs = {output.request_id: output for output in self._run()}
        return [outputs[request.request_id] for request in requests]

    def beam_search(self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams) -> list[RequestOutput]:
        """The `beam_width` best sequences for each prompt, the best first; all prompts advance together.

        Raises InvalidRequestError before anything runs when a prompt or a setting is impossible.
        """
        batch = self._batch(prompts)
        ids = [f"r{next(self._ids)}" for _ in batch]
        requests = [self.input_processor.process_inputs(i, p, params.prompt_params()) for i, p in zip(ids, batch)]
        searches = [BeamSearch(request, params, self.vllm_config.shape.vocab_size) for request in requests]
        while open_searches := [search for search in searches if not search.done]:
            steps = [search.step_requests() for search in open_searches]
            for request in itertools.chain(*steps):
                self._add(request, request.prompt_token_ids)
            answers = {output.request_id: candidates_of(output) for output in self._run() if output.finished}
            for search, step in zip(open_searches, steps):
                search.advance([answers[request.request_id] for request in step])
        texts = [prompt if isinstance(prompt, str) else None for prompt in batch]
        return [search.output(text, self.tokenizer) for search, text in zip(searches, texts)]

    @staticmethod
    def _batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
        """One prompt is a batch of one."""
        single = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], int))
        return [prompts] if single else list(prompts)  # type: ignore[list-item, arg-type]

    def _add(self, request: EngineCoreRequest, prompt: Prompt) -> None:
        children = self.output_processor.add_request(request, prompt if isinstance(prompt, str) else None)
        try:
            for child in children:
                self.engine_core.add_request(child)
        except ValueError:  # the engine core refuses it: nobody will wait for those that came with it
            self._abort_all()
            raise

    def _run(self) -> Iterator[RequestOutput]:
        """Step until every request is finished, yielding outputs as they come."""
        try:
            while self.output_processor.request_states:
                yield from self.step()
        finally:  # interrupted: the engine must not go on with what nobody waits for
            self._abort_all()

    def _abort_all(self) -> None:
        left = list(self.output_processor.request_states)
        if left:
            self.output_processor.abort_requests(left)
            self.engine_core.abort_requests(left)

    def step(self) -> list[RequestOutput]:
        """One engine step and what came out of it."""
        outputs = self.engine_core.get_output()
        request_outputs, reqs_to_abort = self.output_processor.process_outputs(outputs.outputs, IterationStats())
        if reqs_to_abort:
            self.engine_core.abort_requests(reqs_to_abort)
        return request_outputs

    def stream(self, prompt: Prompt, params: SamplingParams) -> Iterator[RequestOutput]:
        """Complete one prompt, yielding outputs as they come (of the kind that `params.output_kind` says)."""
        request = self.input_processor.process_inputs(f"r{next(self._ids)}", prompt, params)
        self._add(request, prompt)
        yield from self._run()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes."""
        return self.engine_core.reset_prefix_cache()

    def shutdown(self) -> None:
        """End the engine. May be called twice."""
        self.engine_core.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.shutdown()
