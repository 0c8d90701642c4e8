"""A prefix that one engine has computed, and another one needs: with a shared folder it travels."""

from __future__ import annotations

import asyncio
from pathlib import Path

from patience import PATIENCE, wait_until

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.frontend.async_llm import AsyncLLM
from stage03_engine.frontend.features.data_parallel.client import DPLBAsyncMPClient
from stage03_engine.outputs import RequestOutput
from stage03_engine.sampling_params import RequestOutputKind, SamplingParams

SIZE, BLOCKS = 16, 6
PROMPT = list(range(20, 20 + SIZE * BLOCKS + 3))


def test_an_engine_finds_in_the_folder_what_another_has_computed(tmp_path: Path) -> None:
    """And answers with the same tokens. The second time, the first engine is busy."""
    extra = {"shared_storage_path": str(tmp_path), "max_read_seconds": PATIENCE}
    config = EngineArgs.from_kwargs(
        model="gpt2-tiny", data_parallel_size=2, num_threads=1, kv_cache_memory_bytes=50_000_000, block_size=SIZE,
        prefix_caching_hash_seed="shared", dtype="float32",
        kv_transfer_config={"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": extra},
    )  # fmt: skip

    async def test() -> None:
        llm = AsyncLLM.from_vllm_config(config, stat_loggers=[])
        try:
            await llm.start()
            first = await ask(llm, "first")
            await asyncio.to_thread(wait_until, lambda: len(list(tmp_path.rglob("*.kv"))) >= BLOCKS, "no blocks")
            begun = asyncio.Event()
            long = asyncio.create_task(ask(llm, "long", [7] * 5, 380, begun))
            await begun.wait()
            second = await ask(llm, "second")
            assert not long.done(), "nobody was busy"
            long.cancel()
            assert (first[0], second[0]) == (0, 1)
            assert (first[1].num_cached_tokens, second[1].num_cached_tokens) == (0, SIZE * BLOCKS)
            assert first[1].outputs[0].token_ids == second[1].outputs[0].token_ids
        finally:
            llm.shutdown()

    asyncio.run(asyncio.wait_for(test(), PATIENCE))


async def ask(
    llm: AsyncLLM, name: str, prompt: list[int] = PROMPT, max_tokens: int = 16, begun: asyncio.Event | None = None
) -> tuple[int | None, RequestOutput]:
    """(its engine, its answer)."""
    params = SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, output_kind=RequestOutputKind.CUMULATIVE
    )
    request = llm.input_processor.process_inputs(name, prompt, params)
    client, engine, last = llm.engine_core, None, None
    assert isinstance(client, DPLBAsyncMPClient)
    async for output in llm.generate(request, params, name):
        last = output
        engine = client.engine_of(name) if engine is None else engine
        if begun is not None:
            begun.set()
    assert last is not None
    return engine, last
