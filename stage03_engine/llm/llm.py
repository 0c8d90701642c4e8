"""Offline inference without HTTP or an event loop (vllm/entrypoints/llm.py, vllm/v1/engine/llm_engine.py)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any

from msgspec.structs import replace

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.config import VllmConfig
from stage03_engine.errors import InvalidRequestError
from stage03_engine.frontend.core_client import EngineCoreClient
from stage03_engine.frontend.input_processor import InputProcessor
from stage03_engine.frontend.metrics import IterationStats
from stage03_engine.frontend.output_processor import OutputProcessor
from stage03_engine.frontend.tokenizer import init_tokenizer_from_configs
from stage03_engine.messages import EngineCoreRequest
from stage03_engine.outputs import RequestOutput
from stage03_engine.plugins import find, wanted
from stage03_engine.sampling_params import RequestOutputKind, SamplingParams
from stage03_engine.tracing import open_trace
from stagetrace import trace

Prompt = str | list[int]
AnyPrompt = Prompt | Mapping[str, Any]  # vLLM's dictionaries: `plain_prompt` says which


class LLM:
    """An engine driven by plain function calls.

    >>> LLM("gpt2-tiny").generate("To be, or", SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].text

    `multiprocess` puts the engine core into a process of its own, as the server does; False (the default, unless
    VLLM_ENABLE_V1_MULTIPROCESSING=1) lets it run right here. The
    keywords are the fields of the configuration classes, e.g. `block_size=8`; `trace=DIR` records until
    `shutdown`. Raises ConfigError, ModelNotFoundError.
    """

    _records = False  # the trace of this process is this object's

    def __init__(self, model: str = "gpt2-tiny", *, multiprocess: bool | None = None, **engine_args: Any) -> None:
        if multiprocess is None:
            says = find("engine", "multiprocessing")
            multiprocess = says is not None and says()
        config = EngineArgs.from_kwargs(model=model, **engine_args)
        if not trace.on and config.hooks("trace"):
            trace.hold("LLM")
            open_trace(config)
            self._records = True
        try:
            self._setup(config, multiprocess)
        except BaseException:
            self._close_trace()
            raise

    @classmethod
    def from_vllm_config(cls, config: VllmConfig, *, multiprocess: bool = False) -> LLM:
        """The same from a resolved configuration."""
        llm = cls.__new__(cls)
        llm._setup(config, multiprocess)
        return llm

    def _setup(self, config: VllmConfig, multiprocess: bool) -> None:
        self.vllm_config = config
        self.tokenizer = init_tokenizer_from_configs(config)
        self.input_processor = InputProcessor(config, self.tokenizer)
        self.output_processor = OutputProcessor(self.tokenizer)
        client = "client_without_event_loop" if multiprocess else "client_in_this_process"
        self.engine_core: EngineCoreClient = wanted("engine", client, "an engine without an event loop")(config)
        self._ids = itertools.count()

    def generate(
        self,
        prompts: AnyPrompt | Sequence[AnyPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
        lora_request: Any = None,
        priority: Sequence[int] | None = None,
        *,
        add_special_tokens: bool = True,
    ) -> list[RequestOutput]:
        """Complete all prompts together; results come in the order of the prompts. `sampling_params` are for all or one for each;
        without them the model's generation_config.json decides. A `lora_request` names the adapter for all, which is loaded if it is not there;
        `priority` has one number for each. `use_tqdm` shows a progress bar when stderr is a terminal.

        Raises InvalidRequestError before anything runs if a prompt or a setting is impossible.
        """
        batch = self._salted(prompts)
        defaults = self.vllm_config.model_config.default_sampling_params or {}
        same = sampling_params or SamplingParams(**defaults)
        each = list(same) if isinstance(same, Sequence) else [same] * len(batch)
        first = list(priority) if priority is not None else [0] * len(batch)
        for what, many in (("sampling parameters", each), ("priorities", first)):
            if len(many) != len(batch):
                raise InvalidRequestError(f"{len(batch)} prompts but {len(many)} {what}.", "params")
        # All n answers of a prompt come at once.
        changes: dict[str, Any] = {"output_kind": RequestOutputKind.FINAL_ONLY}
        if lora_request is not None:
            changes |= wanted("engine", "adapter_of", "an adapter")(self, lora_request)
        whole = [replace(own, **changes) for own in each]
        process = partial(find("engine", "processed") or InputProcessor.process_inputs, self.input_processor)
        requests = [
            process(self.next_id(), text, own, add_special_tokens=add_special_tokens, priority=rank, cache_salt=salt)
            for (text, salt), own, rank in zip(batch, whole, first)
        ]
        return self.run_all(requests, [text for text, _ in batch], use_tqdm)

    def __getattr__(self, name: str) -> Any:
        """The methods of features, such as `chat(messages)`, `encode(prompts, params)` and `beam_search(prompts, params)`."""
        if (method := find("llm", name)) is None:
            raise AttributeError(f"LLM has no attribute {name!r}")
        return partial(method, self)

    def as_list(self, prompts: AnyPrompt | Sequence[AnyPrompt]) -> list[Prompt]:
        """One prompt is a batch of one."""
        return [prompt for prompt, _ in self._salted(prompts)]

    def _salted(self, prompts: AnyPrompt | Sequence[AnyPrompt]) -> list[tuple[Prompt, str | None]]:
        """Each prompt with its cache_salt."""
        single = isinstance(prompts, str | Mapping) or (bool(prompts) and isinstance(prompts[0], int))
        plain = find("engine", "plain_prompt") or (lambda prompt: (prompt, None))
        return [plain(prompt) for prompt in ([prompts] if single else prompts)]

    def next_id(self) -> str:
        """A fresh request id."""
        return f"r{next(self._ids)}"

    def add_request(self, request: EngineCoreRequest, prompt: Prompt | None = None) -> None:
        """Hand a request to the engine core, which runs it in the next steps. Raises ValueError if the core refuses it."""
        parts = self.output_processor.add_request(request, prompt if isinstance(prompt, str) else None)
        try:
            for part in parts:
                self.engine_core.add_request(part)
        except ValueError:  # the caller gets no outputs, so the others must stop too
            self._abort_all()
            raise

    def run_all(
        self, requests: Sequence[EngineCoreRequest], prompts: Sequence[Prompt], use_tqdm: bool = False
    ) -> list[RequestOutput]:
        """Add these requests and run them to the end. Returns their last outputs, in the same order."""
        for request, prompt in zip(requests, prompts):
            self.add_request(request, prompt)
        finished: Iterable[RequestOutput] = (output for output in self.run() if output.finished)
        if use_tqdm:
            from tqdm import tqdm

            finished = tqdm(finished, total=len(requests), unit="request", disable=None)
        outputs = {output.request_id: output for output in finished}
        return [outputs[request.request_id] for request in requests]

    def run(self) -> Iterator[RequestOutput]:
        """Step until every request is finished, yielding outputs as they come."""
        try:
            while self.output_processor.request_states:
                yield from self.step()
        finally:  # interrupted: the engine must not continue requests that have no reader
            self._abort_all()

    def _abort_all(self) -> None:
        left = list(self.output_processor.request_states)
        if left:
            self.output_processor.abort_requests(left)
            self.engine_core.abort_requests(left)

    def step(self) -> list[RequestOutput]:
        """Run one engine step and return its outputs."""
        outputs = self.engine_core.get_output()
        request_outputs, reqs_to_abort = self.output_processor.process_outputs(outputs.outputs, IterationStats())
        if reqs_to_abort:
            self.engine_core.abort_requests(reqs_to_abort)
        return request_outputs

    def stream(self, prompt: Prompt, params: SamplingParams) -> Iterator[RequestOutput]:
        """Complete one prompt, yielding outputs of the kind `params.output_kind` as they come."""
        request = self.input_processor.process_inputs(self.next_id(), prompt, params)
        self.add_request(request, prompt)
        yield from self.run()

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the engine core that is not part of serving requests; False if it did nothing."""
        return self.engine_core.call(method, *args)

    def shutdown(self) -> None:
        """End the engine. May be called twice."""
        self.engine_core.shutdown()
        self._close_trace()

    def _close_trace(self) -> None:
        if self._records:
            trace.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.shutdown()
