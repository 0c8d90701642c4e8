"""Every kernel once, before the first request (vllm/v1/worker/gpu_worker.py, compile_or_warm_up_model).

Triton compiles a kernel when it is launched for the first time, for seconds. Without this, the first prompt, the first request with top-p
and the first one with logprobs would each wait, and all others with them.
"""

from __future__ import annotations

import torch

from stage03_engine.core.features.memory_profile.memory_profile import dummy_inputs, sampling_settings
from stage03_engine.core.hooks import RunnerHook
from stage03_engine.core.model_runner import ModelRunner
from stage04_kernels.sampler import sample

PROMPT_TOKENS = 32  # more than the tile of a decode holds


class WarmUpHook(RunnerHook):
    """Installed with the Triton kernels on a GPU."""

    def cache_allocated(self, num_blocks: int) -> None:
        """The last moment before requests."""
        warm_up(self.runner)


@torch.inference_mode()
def warm_up(runner: ModelRunner) -> None:
    """Run a decode and a prompt on a throw-away cache, and each kernel of the sampler."""
    kv_caches = runner.new_kv_caches(2, runner.device)
    for length in (1, min(PROMPT_TOKENS, runner.config.max_model_len)):
        inputs = dummy_inputs(runner.batch, [length], runner.device)
        runner.model(inputs.input_ids, inputs.positions, kv_caches, inputs.metadata)
    vocab = runner.config.shape.vocab_size
    logits = torch.zeros(1, vocab, device=runner.device)
    draws = [(filtered, penalised, None) for filtered in (False, True) for penalised in (False, True)]
    for filtered, penalised, num_logprobs in (*draws, (False, False, 0), (False, False, 1)):
        metadata = sampling_settings(1, vocab, runner.device, filtered, penalised, num_logprobs)
        sample(logits, metadata, runner.config.device_config.attention_backend)
