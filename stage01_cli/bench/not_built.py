"""Flags of vLLM's benchmarks that are not built here; the tables have the form of stage03_engine/args/not_built.py."""

from __future__ import annotations

DATASET_FLAGS: dict[str, str] = {
    "the data sets are those of --dataset-name": """
        --random-batch-size=1 --no-reranker --random-mm-base-items-per-request=1
        --random-mm-num-mm-items-range-ratio=0 --random-mm-limit-mm-per-prompt= --random-mm-bucket-config=
        --hf-subset= --hf-split= --hf-name= --hf-output-len= --bfcl-categories= --spec-bench-output-len=256
        --spec-bench-category= --speed-bench-dataset-subset=qualitative --speed-bench-output-len=4096
        --speed-bench-category= --timed-trace-chunk-hash-size=16 --timed-trace-sec-multiplier=1
        --timed-trace-label-timestamp=timestamp --timed-trace-label-input-length=input_length
        --timed-trace-label-output-length=output_length --timed-trace-label-hash-ids=hash_ids
        --blazedit-min-distance=0 --blazedit-max-distance=1 --asr-max-audio-len-sec=inf --asr-min-audio-len-sec=0
        --custom-ensure-client-side-data --enable-multimodal-chat --skip-chat-template --prefix-len=0""",
}
"""Those about prompts."""

SERVE_FLAGS: dict[str, str] = {
    "a field of the request goes into --extra-body": "--use-beam-search --chat-template-kwargs=",
    "LoRA adapters are not built": "--lora-assignment=random --lora-modules=",
    "requests are streamed, and begin when --request-rate says so": "--no-stream --probe-request-rate=0 --self-timed",
    "figures are drawn from the result's JSON by whoever wants them": """
        --plot-timeline --timeline-itl-thresholds=25,50 --plot-dataset-stats""",
    "a tokenizer is a folder or a name in the Hugging Face cache": """
        --trust-remote-code* --tokenizer-mode=auto --skip-tokenizer-init""",
}
"""Those of `bench serve`."""

OFFLINE_FLAGS: dict[str, str] = {
    "the engine is measured without a server around it": """
        --reasoning-parser= --reasoning-parser-plugin= --log-config-file= --shutdown-timeout=0
        --served-model-name= --enable-log-requests""",
    "profiles are what --profiler-dir writes": "--profile",
    "text is made of tokens in the engine's front end, which takes part": "--disable-detokenize",
}
"""Those of the benchmarks of the engine."""

THROUGHPUT_FLAGS: dict[str, str] = {
    "the engine here is what is measured": """
        --backend=vllm --hf-max-batch-size= --hf-enable-torch-compile --lora-path= --lora-assignment=random""",
    "all prompts are handed over at once": "--async-engine --prequeue-requests",
}
"""Those of `bench throughput`."""
