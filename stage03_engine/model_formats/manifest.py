"""Other models than GPT-2, and other tokenizers: the Llama family."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

LLAMA = ("Llama", "Mistral", "Qwen2", "Qwen3")

FEATURE = Feature(
    name="model_formats",
    help="the Llama family (Llama, Mistral, Qwen2, Qwen3), GPT-2 with other activations, tokenizers in other files than tokenizer.json",
    room=__package__,
    also=(
        "stage03_engine.core.features.llama",
        "stage04_kernels.features.activations",
        "stage04_kernels.features.rope",
    ),
    parts=(
        Part("shape", ".shape_fields:LlamaShape"),
        Part("shape", ".shape_fields:WhisperShape"),
        Part("shape", ".shape_fields:ClassifierShape"),
        Part("engine", "stage04_kernels.features.activations.names:ACTIVATIONS", key="activations"),
        Part("engine", ".llama:KNOWN_SHAPES", key="known_shapes"),
        Part("engine", ".tokenizer_files:stand_in", key="stand_in_tokenizer"),
        Part("engine", ".tokenizer_files:read_pair", key="pair_of_files"),
        Part("engine", ".tokenizer_files:read_chat_template", key="chat_template"),
        *(
            part
            for name in LLAMA
            for part in (
                Part("architecture", ".llama:read_llama", key=f"{name}ForCausalLM", model_type=name.lower()),
                Part("model", "stage03_engine.core.features.llama.llama:LlamaForCausalLM", key=f"{name}ForCausalLM"),
            )
        ),
    ),
)
