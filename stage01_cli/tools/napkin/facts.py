"""What the napkin knows of models and chips: data, with their sources."""

from __future__ import annotations

from stage01_cli.tools.napkin.arithmetic import Chip, Model
from stage03_engine.model_shape import ModelShape
from stage04_kernels.lab.roofline import RATES

MODELS = {
    model.name: model
    for model in (
        Model("gpt2", 50_257, 1024, 768, 3072, 12, 12, 12, 64, gated=False, tied=True, learned_positions=True),
        Model("gpt2-xl", 50_257, 1024, 1600, 6400, 48, 25, 25, 64, gated=False, tied=True, learned_positions=True),
        Model("Llama-2-7B", 32_000, 4096, 4096, 11_008, 32, 32, 32, 128, gated=True, tied=False, learned_positions=False),
        Model("Llama-3.1-8B", 128_256, 131_072, 4096, 14_336, 32, 32, 8, 128, gated=True, tied=False, learned_positions=False),
        Model("Llama-3.1-70B", 128_256, 131_072, 8192, 28_672, 80, 64, 8, 128, gated=True, tied=False, learned_positions=False),
    )
}  # fmt: skip
"""From their config.json."""

_MEMORY = {"a100": 80e9, "h100": 80e9, "h200": 141e9, "mi300x": 192e9}
CHIPS = {
    name.upper(): Chip(name.upper(), memory, RATES[name].memory, RATES[name].matrix) for name, memory in _MEMORY.items()
}
"""From the makers' data sheets: A100 80GB SXM, H100 SXM, H200 SXM, MI300X; bfloat16 without sparsity, as in `stage04_kernels roofline`."""

WALLS = {
    "memory": ("no further context fits beside the weights", "not even one context fits beside the weights"),
    "bandwidth": (
        "for one user more, reading weights and contexts would take longer than the promised TPOT",
        "reading takes longer than the promised TPOT for one user already",
    ),
    "arithmetic": (
        "for one user more, computing would take longer than the promised TPOT",
        "computing takes longer than the promised TPOT for one user already",
    ),
}
"""What each wall says to the next user, and to the first one."""


def model_of(name: str, shape: ModelShape) -> Model:
    """The napkin's model of a model that the engine knows."""
    gpt2 = shape.architecture.startswith("GPT2")
    return Model(
        name, shape.vocab_size, shape.max_position_embeddings, shape.hidden_size, shape.intermediate_size, shape.num_layers,
        shape.num_heads, shape.num_kv_heads, shape.head_dim,
        gated=not gpt2, tied=shape.tie_word_embeddings, learned_positions=gpt2,
    )  # fmt: skip
