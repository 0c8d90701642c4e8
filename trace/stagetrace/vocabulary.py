"""The closed vocabulary: every event that may be emitted, one row each.

`args` names the arguments and their types. `main_path` marks the rows that every served streaming request (start-up
included) must produce; the others are for what does not always happen (preemption, abort, death, a non-streaming answer).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One kind of event."""

    name: str
    phase: int  # of the nine phases; 0 for records about the recording itself
    stage: str  # the folder that emits it
    args: dict[str, str]  # argument name -> type
    meaning: str  # one sentence
    vllm: str  # where the same thing happens in vLLM V1
    main_path: bool = True


SERVER, ENGINE, KERNELS = "stage02_server", "stage03_engine", "stage04_kernels"


def _optional(name: str, phase: int, stage: str, args: dict[str, str], meaning: str, vllm: str) -> Row:
    return Row(name, phase, stage, args, meaning, vllm, main_path=False)


_ROWS = [
    Row("run.start", 0, "trace", {"run_id": "str", "monotonic_ns": "int", "wall_clock_ns": "int", "filter": "dict[str, Any]", "prompts": "bool", "part": "int"},
        "First record of a file: which run, which versions, how to turn monotonic time into wall clock time; what a filter left out (nothing when it is empty), and how "
        "many older files of this process came before, kept or gone.", "-"),
    # Phase 1: CLI entry
    Row("cli.main", 1, ENGINE, {"argv": "list[str]"}, "The command line program started.", "entrypoints/cli/main.py main"),
    Row("cli.env_setup", 1, ENGINE, {"set": "dict[str, str]"}, "Process-wide environment variables were set, before any library reads them.",
        "entrypoints/utils.py cli_env_setup"),
    Row("cli.parser_created", 1, ENGINE, {"program": "str", "subcommands": "list[str]"}, "The parser exists: these subcommands, and the flags of the chosen one.",
        "entrypoints/cli/main.py FlexibleArgumentParser, add_subparsers"),
    Row("cli.parsed", 1, ENGINE, {"subparser": "str"}, "Arguments were parsed; the subcommand is known.", "utils FlexibleArgumentParser.parse_args"),
    Row("cli.dispatch", 1, ENGINE, {"function": "str"}, "Control passes to the subcommand.", "entrypoints/cli/main.py dispatch_function"),
    # Phase 2: serve
    Row("serve.model_tag", 2, SERVER, {"model": "str", "source": "str"}, "The model to serve was chosen (positional tag before --model).",
        "entrypoints/cli/serve.py ServeSubcommand.cmd"),
    Row("serve.decision", 2, SERVER, {"branch": "str", "headless": "bool", "api_server_count": "int"},
        "The decision tree: headless, one API server, or several.", "entrypoints/cli/serve.py ServeSubcommand.cmd"),
    Row("config.resolved", 2, ENGINE, {"settings": "dict[str, str]", "defaults": "int"},
        "Every setting has its value: where the non-default ones came from, and how many are defaults.", "engine/arg_utils.py EngineArgs.create_engine_config"),
    # Phase 3: API server
    Row("server.socket_bound", 3, SERVER, {"address": "str"}, "The HTTP port is ours, before the engine spends seconds on loading.",
        "openai/api_server.py setup_server"),
    Row("server.engine_config", 3, SERVER, {"model": "str", "dtype": "str", "max_model_len": "int", "device": "str"},
        "Arguments became a VllmConfig.", "engine/arg_utils.py AsyncEngineArgs.create_engine_config"),
    Row("server.app_built", 3, SERVER, {"routes": "int"}, "The FastAPI application and its routes exist.", "openai/api_server.py build_app"),
    Row("server.state_ready", 3, SERVER, {"served_model_names": "list[str]"}, "The serving handlers were put into the app state.",
        "openai/api_server.py init_app_state"),
    Row("server.listening", 3, SERVER, {"address": "str"}, "The engine is ready and requests are served; earlier connections were told that it was not ready.", "entrypoints/launcher.py serve_http"),
    _optional("server.state", 3, SERVER, {"state": "str"}, "The server is now starting, ready, draining, stopped or failed.", "-"),
    _optional("server.draining", 3, SERVER, {"signal": "str"}, "A signal came: no new connections, running requests finish.",
        "entrypoints/launcher.py signal_handler"),
    _optional("server.stopped", 3, SERVER, {"exit_code": "int"}, "The API server is done.", "openai/api_server.py run_server_worker"),
    _optional("batch.started", 3, SERVER, {"requests": "int", "resumed": "int"}, "A batch file is about to be run; resumed = how many of its answers are there from an earlier run.",
        "entrypoints/openai/run_batch.py run_batch"),
    _optional("batch.finished", 3, SERVER, {"requests": "int", "refused": "int"}, "Every request of a batch file has its answer; refused = how many are refusals.",
        "entrypoints/openai/run_batch.py run_batch"),
    # Phase 4: AsyncLLM
    Row("async_llm.init", 4, ENGINE, {"model": "str"}, "The front end of the engine begins to assemble itself.", "v1/engine/async_llm.py AsyncLLM.__init__"),
    Row("tokenizer.loaded", 4, ENGINE, {"vocab_size": "int", "source": "str"}, "The tokenizer is ready.", "transformers_utils/tokenizer.py init_tokenizer_from_configs"),
    Row("input_processor.created", 4, ENGINE, {}, "Text to EngineCoreRequest.", "v1/engine/processor.py Processor"),
    Row("output_processor.created", 4, ENGINE, {}, "EngineCoreOutput to text.", "v1/engine/output_processor.py OutputProcessor"),
    Row("client.created", 4, ENGINE, {"kind": "str"}, "The client that reaches the engine core exists.", "v1/engine/core_client.py EngineCoreClient"),
    Row("output_handler.started", 4, ENGINE, {}, "The background task that pulls outputs from the engine core runs.",
        "v1/engine/async_llm.py _run_output_handler"),
    # Phase 5: EngineCore
    Row("engine.spawned", 5, ENGINE, {"pid": "int"}, "The front end started the engine process.", "v1/engine/utils.py CoreEngineProcManager"),
    Row("engine.hello", 5, ENGINE, {"identity": "int"}, "The engine process is alive and asks for its configuration.", "v1/engine/core.py startup_handshake"),
    Row("engine.init_sent", 5, ENGINE, {"clock_offset_ns": "int"}, "The front end sent configuration and socket addresses; offset = its clock minus the engine's, at most.",
        "v1/engine/utils.py wait_for_engine_startup"),
    Row("executor.created", 5, ENGINE, {"kind": "str"}, "The executor and its worker exist.", "v1/executor/uniproc_executor.py UniProcExecutor"),
    Row("worker.created", 5, ENGINE, {"device": "str", "dtype": "str", "threads": "int"}, "The worker holds its device; the number of compute threads counts on a CPU.",
        "v1/worker/gpu_worker.py Worker.init_device"),
    _optional("logits_processor.loaded", 5, ENGINE, {"path": "str", "argmax_invariant": "bool"}, "A user's own logits processor is in place.",
        "v1/sample/logits_processor/__init__.py build_logitsprocs"),
    Row("weights.loaded", 5, ENGINE, {"tensors": "int", "bytes": "int", "seconds": "float"}, "The model's weights are in place.",
        "v1/worker/gpu_model_runner.py load_model"),
    _optional("batch_invariant.checked", 5, ENGINE, {"rows": "int"}, "With --batch-invariant: how many rows each call of the model has.",
        "model_executor/layers/batch_invariant.py"),
    _optional("whisper.loaded", 5, ENGINE, {"tensors": "int", "bytes": "int"}, "A Whisper model is in place, in an engine core of its own.",
        "model_executor/models/whisper.py"),
    _optional("memory.profiled", 5, ENGINE, {"total": "int", "used": "int", "utilization": "float", "available": "int"},
        "After a trial of the largest step: bytes of the device, bytes in use at its peak, the share that we may use, and what is left for the KV cache.",
        "v1/worker/gpu_worker.py determine_available_memory"),
    Row("kv_cache.profiled", 5, ENGINE, {"available_bytes": "int", "block_bytes": "int", "num_blocks": "int", "rule": "str"},
        "How many KV-cache blocks there will be, and which rule decided.", "v1/engine/core.py _initialize_kv_caches"),
    Row("kv_cache.allocated", 5, ENGINE, {"num_blocks": "int", "block_size": "int", "bytes": "int"}, "The KV-cache tensors exist.",
        "v1/worker/gpu_model_runner.py initialize_kv_cache"),
    Row("scheduler.created", 5, ENGINE, {"max_num_seqs": "int", "max_num_batched_tokens": "int", "max_model_len": "int", "num_blocks": "int", "num_swap_blocks": "int",
        "scheduler_config": "dict[str, Any]", "cache_config": "dict[str, Any]"}, "The scheduler exists, made from these settings: a replay makes it again.",
        "v1/core/sched/scheduler.py Scheduler"),
    Row("engine.threads_started", 5, ENGINE, {"threads": "list[str]"}, "The input and output threads of the engine process run.",
        "v1/engine/core.py process_input_sockets, process_output_sockets"),
    Row("engine.ready", 5, ENGINE, {"num_blocks": "int", "max_model_len": "int"}, "The engine told the front end that it can serve.", "v1/engine/core.py EngineCoreProc"),
    Row("engine.busy_loop", 5, ENGINE, {}, "The busy loop began.", "v1/engine/core.py run_busy_loop"),
    _optional("profiler.started", 5, ENGINE, {}, "torch's profiler records the engine's steps from now on.", "v1/worker/gpu_worker.py profile"),
    _optional("profiler.stopped", 5, ENGINE, {"file": "str"}, "The profile was written.", "v1/worker/gpu_worker.py profile"),
    _optional("engine.stopped", 5, ENGINE, {}, "The engine process ends because it was told to.", "v1/engine/core.py EngineCoreProc.shutdown"),
    _optional("engine.failed", 5, ENGINE, {"message": "str"}, "The engine could not start, or died of an exception; its text, which may quote a client, only with --trace-prompts.", "v1/engine/core.py _send_engine_dead"),
    _optional("engine.dead", 5, ENGINE, {"message": "str"}, "The front end noticed that the engine process is gone.", "v1/engine/core_client.py EngineDeadError"),
    # Phase 6: request
    Row("http.request", 6, SERVER, {"method": "str", "path": "str", "trace_id": "str | None", "parent_id": "str | None"},
        "An HTTP request was parsed; the ids are those of the client's own trace, from its header traceparent. Its `req` is the id of its first prompt (stagetrace.ids has the rule).",
        "openai/api_server.py create_completion, vllm/tracing.py extract_trace_context"),
    _optional("connection.ended", 6, SERVER, {"reason": "str"},
        "A connection was closed by the server: its client sent the header or the body too slowly, left an answer unread, or was the oldest of too many.", "-"),
    Row("request.validated", 6, SERVER, {"model": "str", "stream": "bool", "prompts": "int"}, "The body passed validation; the request has its id.",
        "openai/serving_completion.py create_completion"),
    _optional("template.spawned", 6, SERVER, {"pid": "int"}, "A process that renders chat templates was started, the first one or after one that took too long.", "-"),
    _optional("request.templated", 6, SERVER, {"messages": "int", "characters": "int"}, "The chat template turned messages into one prompt.",
        "openai/serving_chat.py _preprocess_chat"),
    Row("request.sampling_params", 6, SERVER, {"temperature": "float", "max_tokens": "int"}, "SamplingParams were made from the body and the defaults.",
        "openai/protocol.py to_sampling_params"),
    _optional("request.named", 6, SERVER, {"response": "str"}, "The body chose the id that the client sees; the engine keeps its own.",
        "openai/serving_engine.py _base_request_id"),
    _optional("request.echoed", 6, SERVER, {"logprobs": "int | None", "prompt_only": "bool"},
        "Every answer begins with its prompt, or consists of it alone.", "openai/serving_completion.py request_output_to_completion_response"),
    _optional("request.language_detected", 6, SERVER, {"language": "str"}, "The model detected the language of the audio, because the request does not say.",
        "openai/speech_to_text.py _detect_language"),
    _optional("request.refused", 6, SERVER, {"status": "int", "type": "str"}, "The request was answered with an error object.", "openai/serving_engine.py create_error_response"),
    # Phase 7: into the engine
    Row("generate.start", 7, ENGINE, {}, "AsyncLLM.generate was called.", "v1/engine/async_llm.py generate"),
    Row("request.tokenized", 7, ENGINE, {"num_tokens": "int", "prompt": "str | None", "token_ids": "list[int]"},
        "The prompt became token ids; text and ids only with --trace-prompts.", "v1/engine/processor.py process_inputs"),
    _optional("request.fanned_out", 7, ENGINE, {"children": "int"}, "A request for several answers became one request per answer.",
        "v1/engine/parallel_sampling.py ParentRequest"),
    _optional("beam.step", 7, ENGINE, {"length": "int", "running": "int", "finished": "int"},
        "A beam search took one more token: the length of its sequences, how many go on, how many are finished.", "entrypoints/llm.py LLM.beam_search"),
    Row("request.registered", 7, ENGINE, {}, "The output processor and the collector expect this request.", "v1/engine/output_processor.py add_request"),
    Row("zmq.request_sent", 7, ENGINE, {"type": "str", "bytes": "int"}, "A message for the engine core left.", "v1/engine/core_client.py add_request_async"),
    Row("zmq.request_received", 7, ENGINE, {"type": "str"}, "The engine's input thread decoded it.", "v1/engine/core.py process_input_sockets"),
    # Phase 8: execution
    Row("sched.queued", 8, ENGINE, {"waiting": "int", "num_prompt_tokens": "int", "params": "dict[str, Any]", "block_hashes": "list[str]"},
        "The request waits for its first step. The hashes are of the full blocks of its prompt: equal hashes, equal prefixes.", "v1/core/sched/scheduler.py add_request"),
    _optional("grammar.compiled", 8, ENGINE, {"kind": "str", "seconds": "float", "cached": "bool"},
        "The request's grammar is ready; cached: an earlier request had brought the same.", "v1/structured_output/__init__.py grammar_init"),
    _optional("grammar.refused", 8, ENGINE, {"message": "str"}, "The request ends: its grammar is impossible, or cost more than it may; text that may quote it only with --trace-prompts.",
        "v1/structured_output/__init__.py grammar_init"),
    _optional("grammar.ready", 8, ENGINE, {}, "The scheduler saw that the request's grammar is compiled: it may be admitted.", "v1/core/sched/scheduler.py schedule"),
    Row("engine.step", 8, ENGINE, {"running": "int", "waiting": "int"}, "A span: schedule, execute, update.", "v1/engine/core.py EngineCore.step"),
    Row("sched.admit", 8, ENGINE, {"new_blocks": "list[int]", "num_prompt_tokens": "int"}, "A waiting request joined the running ones.", "v1/core/sched/scheduler.py schedule"),
    Row("sched.scheduled", 8, ENGINE, {"num_tokens": "int", "num_computed": "int", "missing": "int", "budget_left": "int", "new_blocks": "list[int]"},
        "The request gets this many tokens in this step, of those that it was missing, from a budget of which this much was left.", "v1/core/sched/scheduler.py schedule"),
    _optional("sched.held_back", 8, ENGINE, {"rule": "str", "first": "str | None", "behind": "list[str]", "grammar": "list[str]", "budget_left": "int",
                                             "free_blocks": "int", "num_running": "int"},
        "Requests still wait after this decision: `first` because of `rule` (budget, max_num_seqs, blocks, no_chunking, preempted), those behind because none overtakes, "
        "others for their grammar.", "v1/core/sched/scheduler.py schedule"),
    _optional("sched.preempt", 8, ENGINE, {"freed_blocks": "int", "num_computed": "int", "swapped": "bool", "needed_by": "str", "free_before": "int"},
        "Too few blocks were free for `needed_by`: the request gave its own back and waits again; swapped = its keys and values went to CPU memory.",
        "v1/core/sched/scheduler.py _preempt_request"),
    _optional("sched.resume", 8, ENGINE, {"new_blocks": "list[int]", "num_tokens": "int"}, "A preempted request was admitted again; what is neither cached nor swapped is computed again.",
        "v1/core/sched/scheduler.py schedule"),
    _optional("sched.prefix_hit", 8, ENGINE, {"blocks": "list[int]", "num_tokens": "int"}, "The beginning of the request was found in the prefix cache.",
        "v1/core/kv_cache_manager.py get_computed_blocks"),
    _optional("sched.state", 8, ENGINE, {"requests": "list[dict[str, Any]]", "running": "int", "waiting": "int", "free_blocks": "int", "cached": "list[int]", "settings": "dict[str, int]"},
        "A client began to watch the scheduler: who runs and waits (the first of them), how far each has come, which blocks it holds, and which blocks are in the prefix cache.", "-"),
    _optional("kv.allocated", 8, ENGINE, {"blocks": "list[int]"}, "The request took these blocks out of the free ones.", "v1/core/block_pool.py get_new_blocks"),
    _optional("kv.freed", 8, ENGINE, {"blocks": "list[int]"}, "The request gave these blocks back; a block that others share stays in use.", "v1/core/block_pool.py free_blocks"),
    _optional("kv.reset", 8, ENGINE, {"done": "bool"}, "The prefix cache was asked to forget everything; done = it did, because no request held a block.", "v1/core/block_pool.py reset_prefix_cache"),
    _optional("kv.cached", 8, ENGINE, {"blocks": "list[int]"}, "These blocks are full and can be found by their hash from now on.",
        "v1/core/block_pool.py cache_full_blocks"),
    _optional("kv.evicted", 8, ENGINE, {"block": "int"}, "A free block was handed out again: the cached tokens in it are forgotten.",
        "v1/core/block_pool.py _maybe_evict_cached_block"),
    _optional("kv.swapped", 8, ENGINE, {"num_out": "int", "num_in": "int"}, "Blocks were copied to CPU memory (out) and back (in).", "-"),
    _optional("spec.scheduled", 8, ENGINE, {"num_tokens": "int", "new_blocks": "list[int]"}, "This many drafts of the request are verified in this step, besides its own tokens.",
        "v1/core/sched/scheduler.py schedule"),
    _optional("spec.verified", 8, ENGINE, {"accepted": "int", "drafted": "int"}, "The model verified the drafts: how many it accepted.",
        "v1/core/sched/scheduler.py update_from_output"),
    _optional("spec.proposed", 8, ENGINE, {"num_tokens": "int", "token_ids": "list[int]"}, "Draft tokens for the next step to verify; their ids only with --trace-prompts.",
        "v1/spec_decode/ngram_proposer.py NgramProposer.propose"),
    Row("sched.output", 8, ENGINE, {"total_tokens": "int", "budget": "int", "free_blocks": "int"}, "The decision of this step is complete.", "v1/core/sched/output.py SchedulerOutput"),
    Row("runner.prepared", 8, ENGINE, {"num_reqs": "int", "num_tokens": "int", "max_query_len": "int", "max_seq_len": "int"},
        "Input tensors were built from the persistent batch.", "v1/worker/gpu_model_runner.py _prepare_inputs"),
    Row("model.forward", 8, ENGINE, {"num_tokens": "int"}, "A span: embedding, blocks, final norm.", "v1/worker/gpu_model_runner.py execute_model"),
    _optional("model.embedding", 8, ENGINE, {}, "A span, with --trace-layers: token ids and positions become the first hidden states.", "model_executor/models/gpt2.py GPT2Model"),
    _optional("model.attention", 8, ENGINE, {"layer": "int"}, "A span, with --trace-layers: queries, keys, values, paged attention, output projection. On a GPU: until launched.",
        "model_executor/models/gpt2.py GPT2Attention"),
    _optional("model.mlp", 8, ENGINE, {"layer": "int"}, "A span, with --trace-layers: the other half of the layer.", "model_executor/models/gpt2.py GPT2MLP"),
    Row("model.logits", 8, ENGINE, {"rows": "int", "vocab_size": "int"}, "Logits exist for the rows that will be sampled.", "model_executor/layers/logits_processor.py"),
    _optional("sampler.rules", 8, ENGINE, {"allowed": "int", "forbidden": "int", "biased": "int", "penalised_rows": "int"},
        "Masks, biases and penalties will change the logits: how many they name.", "v1/sample/sampler.py apply_logits_processors"),
    Row("sampler.transform", 8, ENGINE, {"transform": "str", "rows": "int"},
        "One thing that the sampler does to the logits of this many rows: a mask, a rule, temperature, a cut-off, a user's own class, and last the argmax or the random draw.",
        "v1/sample/sampler.py Sampler.forward"),
    Row("sampler.sampled", 8, ENGINE, {"num_greedy": "int", "num_random": "int"}, "Next tokens were drawn.", "v1/sample/sampler.py Sampler"),
    _optional("kernel.checked", 8, KERNELS, {"what": "str", "against": "str", "cases": "int", "max_error": "float", "ok": "bool"},
        "A fast tensor function was compared with its slow twin.", "tests/kernels"),
    Row("sched.token", 8, ENGINE, {"num_tokens": "int", "sampled": "int", "num_output_tokens": "int", "token_ids": "list[int]", "block_hashes": "list[str]"},
        "The request received new tokens, of those that were sampled: what comes after its end is dropped. Their ids only with --trace-prompts; the hashes are of the blocks "
        "that they filled.", "v1/core/sched/scheduler.py update_from_output"),
    _optional("whisper.encoded", 8, ENGINE, {"seconds": "float"}, "This much audio went through Whisper's encoder; the decoder's tokens follow.",
        "model_executor/models/whisper.py WhisperEncoder"),
    _optional("whisper.aligned", 8, ENGINE, {"tokens": "int"}, "The decoder's attention to the audio showed when each of this many tokens was spoken.", "-"),
    _optional("pooler.classified", 8, ENGINE, {"rows": "int", "num_labels": "int", "activation": "str"},
        "The classification head turned pooled hidden states into a number per class; activation = softmax, sigmoid, or identity for raw logits.",
        "model_executor/layers/pooler/seqwise/heads.py ClassifierPoolerHead"),
    _optional("sched.pooled", 8, ENGINE, {"vectors": "int", "dimensions": "int"}, "The prompt of a pooling request is computed to its end and has become vectors.",
        "v1/core/sched/scheduler.py update_from_output"),
    Row("sched.finished", 8, ENGINE, {"reason": "str", "freed_blocks": "int", "by": "str"},
        "The request ended in the engine and its blocks are free; by = eos, stop_token, length, grammar or pooled, or outside (abort, stop string).", "v1/core/sched/scheduler.py _free_request"),
    # Phase 9: response
    Row("zmq.outputs_sent", 9, ENGINE, {"num_outputs": "int", "bytes": "int"}, "The engine's output thread sent a step's outputs.", "v1/engine/core.py process_output_sockets"),
    Row("zmq.outputs_received", 9, ENGINE, {"num_outputs": "int"}, "The front end decoded them.", "v1/engine/core_client.py get_output_async"),
    Row("request.detokenized", 9, ENGINE, {"num_tokens": "int", "characters": "int", "text": "str | None", "token_ids": "list[int]"},
        "New tokens became text that is safe to send; text and ids only with --trace-prompts.", "v1/engine/detokenizer.py IncrementalDetokenizer.update"),
    _optional("request.repetition_found", 9, ENGINE, {"pattern_size": "int"}, "The output ended with one pattern of tokens several times in a row; the engine is told to stop.",
        "v1/core/sched/utils.py check_sequence_repetition"),
    _optional("request.stop_matched", 9, ENGINE, {"stop": "str | None"}, "A stop string appeared (which one: only with --trace-prompts); the engine is told to stop.", "v1/engine/detokenizer.py check_stop_strings"),
    Row("request.collected", 9, ENGINE, {"finished": "bool"}, "The output is in the request's collector.", "v1/engine/output_processor.py RequestOutputCollector.put"),
    Row("generate.yield", 9, ENGINE, {"finished": "bool"}, "AsyncLLM.generate handed an output to its caller.", "v1/engine/async_llm.py generate"),
    Row("sse.chunk", 9, SERVER, {"bytes": "int"}, "A server-sent event left for the client; its cause is the http.request.", "openai/serving_completion.py completion_stream_generator"),
    _optional("response.stored", 9, SERVER, {"response": "str", "status": "str", "evicted": "int"},
        "A response of /v1/responses can be asked for from now on, or has ended; how many older ones were forgotten.",
        "openai/responses/serving.py OpenAIServingResponses.response_store"),
    _optional("http.response", 9, SERVER, {"status": "int"}, "A whole (not streamed) answer left for the client; its cause is the http.request.", "openai/api_server.py create_completion"),
    _optional("answer.parsed", 9, SERVER, {"index": "int", "reasoning_characters": "int", "tool_calls": "int"},
        "An answer was taken apart: how long its reasoning is, and how many tools it calls.", "openai/serving_chat.py chat_completion_stream_generator"),
    Row("request.finished", 9, ENGINE, {"reason": "str", "num_output_tokens": "int"}, "The request is complete for its client.", "v1/engine/output_processor.py"),
    _optional("request.aborted", 9, ENGINE, {"reason": "str"}, "The client left, or an error ended the request.", "v1/engine/async_llm.py abort"),
]  # fmt: skip

VOCABULARY: dict[str, Row] = {row.name: row for row in _ROWS}
"""Event name -> its row."""
