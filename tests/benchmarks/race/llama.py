"""llama.cpp: its library through llama-cpp-python without HTTP, in the Python that LLAMA_PYTHON names, and `llama-server`.
That Python also writes the GGUF files, with the `gguf` package."""

from __future__ import annotations

import ctypes
import os
import shutil
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from race.entrant import MODEL_NAME, Command, Entrant, Failed, Setup, ask_python
from race.worker import Settings, serve
from race.workloads import Generate

DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "bfloat16", "q8_0": "int8", "q4_0": "int4", "q4_k": "int4"}
"""Type of a GGUF file -> the precision that it is compared in."""
FIND = "import gguf, llama_cpp; print(llama_cpp.__version__)"
BATCH = 2048  # tokens of one call, as many as our engine gives a step
UBATCH = 512  # that are computed together: llama.cpp's default


def find(setup: Setup, python: str, server_program: str) -> list[Entrant]:
    """One per type. Raises Failed."""
    version = ask_python(python, FIND)
    if version is None:
        raise Failed(f"{python} cannot import llama_cpp and gguf; set LLAMA_PYTHON or --llama-python")
    program = shutil.which(server_program)
    scale = setup.scale
    env = {"OMP_NUM_THREADS": str(setup.threads)}

    def entrant(dtype: str) -> Entrant:
        model = setup.checkpoint / f"{dtype}.gguf"
        settings = setup.settings(model, dtype)
        offline = Command([python, "-m", "race.llama", *settings.argv()], env)
        write = Command([python, "-m", "race.gguf_file", str(setup.checkpoint), dtype, str(model)])
        prepare = None if model.exists() else write
        served = partial(server, str(model)) if program else None
        return Entrant("llama.cpp", version, DTYPES[dtype], dtype, offline, served, prepare)

    def server(model: str, port: int) -> Command:
        clients = max(load.clients for load in scale.loads.values())
        threads = str(setup.threads)
        argv = [
            str(program), "--model", model, "--alias", MODEL_NAME, "--host", "127.0.0.1", "--port", str(port),
            "--parallel", str(clients), "--ctx-size", str(clients * scale.positions), "--threads", threads,
            "--threads-batch", threads,
        ]  # fmt: skip
        return Command(argv, env)

    return [entrant(dtype) for dtype in DTYPES]


@dataclass
class Sequence:
    """A request that is being computed: its place in llama.cpp's cache is a sequence id."""

    request: int
    position: int  # of the next token
    answer: list[int] = field(default_factory=list)


class Llama:
    """A model and a context of llama.cpp. Free sequence ids take the next prompts in the same call that computes a token
    for those under way: continuous batching, as its server does it."""

    def __init__(self, settings: Settings) -> None:
        import llama_cpp
        import numpy as np

        self.api, self.np = llama_cpp, np
        self.scale, self.threads = settings.scale, settings.threads
        llama_cpp.llama_backend_init()
        parameters = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(os.fsencode(settings.model), parameters)
        if not self.model:
            raise ValueError(f"llama.cpp cannot load {settings.model}")
        self.batch = llama_cpp.llama_batch_init(BATCH, 0, self.scale.slots)
        self.contexts: dict[int, Any] = {}

    def generate(self, prompts: list[list[int]], output: int, shared: int) -> list[list[int]]:
        """What is shared is computed once, for all sequence ids together: the library has no prefix cache of its own."""
        slots = min(len(prompts), self.scale.slots)
        self.context = self._context(slots, shared)
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), False)
        if shared:
            self._start()
            for position, token in enumerate(prompts[0][:shared]):
                self._add(token, position, range(slots), wanted=False)
            self._decode()
        waiting, free = list(range(len(prompts)))[::-1], list(range(slots))
        running: dict[int, Sequence] = {}
        answers: dict[int, list[int]] = {}
        while waiting or running:
            self._start()
            rows = {slot: self._add(own.answer[-1], own.position - 1, [slot]) for slot, own in running.items()}
            while waiting and free and self.batch.n_tokens + len(prompts[waiting[-1]]) - shared <= BATCH:
                slot, request = free.pop(), waiting.pop()
                rows[slot] = self._add_prompt(prompts[request], shared, slot)
                running[slot] = Sequence(request, len(prompts[request]))
            self._decode()
            for slot, row in rows.items():
                own = running[slot]
                own.answer.append(self._likeliest(row))
                own.position += 1
                if len(own.answer) == output:
                    answers[own.request] = running.pop(slot).answer
                    free.append(slot)
                    self.api.llama_memory_seq_rm(self.api.llama_get_memory(self.context), slot, shared, -1)
        return [answers[request] for request in range(len(prompts))]

    def _context(self, slots: int, shared: int) -> Any:
        """Made once for each number of sequences. One sequence has the whole length; what is shared needs one cache for all."""
        if slots not in self.contexts:
            parameters = self.api.llama_context_default_params()
            parameters.n_ctx = self.scale.positions * slots
            parameters.n_seq_max, parameters.n_batch, parameters.n_ubatch = slots, BATCH, UBATCH
            parameters.n_threads = parameters.n_threads_batch = self.threads
            parameters.kv_unified = True
            self.contexts[slots] = self.api.llama_init_from_model(self.model, parameters)
            if not self.contexts[slots]:
                raise ValueError(f"llama.cpp cannot make a context for {slots} sequences")
        return self.contexts[slots]

    def _start(self) -> None:
        self.batch.n_tokens = 0

    def _add(self, token: int, position: int, slots: Any, wanted: bool = True) -> int:
        """`wanted`: its logits are read. Returns the token's row in the batch."""
        row, batch = self.batch.n_tokens, self.batch
        batch.token[row], batch.pos[row], batch.n_seq_id[row] = token, position, len(slots)
        for index, slot in enumerate(slots):
            batch.seq_id[row][index] = slot
        batch.logits[row] = wanted
        batch.n_tokens = row + 1
        return row

    def _add_prompt(self, prompt: list[int], shared: int, slot: int) -> int:
        last = len(prompt) - 1
        return [self._add(prompt[at], at, [slot], wanted=at == last) for at in range(shared, len(prompt))][-1]

    def _decode(self) -> None:
        code = self.api.llama_decode(self.context, self.batch)
        if code != 0:
            raise ValueError(f"llama_decode returned {code}")

    def _likeliest(self, row: int) -> int:
        logits = self.api.llama_get_logits_ith(self.context, row)
        values = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
        return int(self.np.ctypeslib.as_array(values, (self.scale.vocab_size,)).argmax())


def start(settings: Settings) -> Generate:
    """Runs in the Python that has llama_cpp."""
    return Llama(settings).generate


if __name__ == "__main__":
    serve(start)
