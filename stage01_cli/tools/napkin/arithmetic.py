"""The napkin's arithmetic: from the sizes of a model and of a chip to users and cost. vLLM has no counterpart: it measures.

A step takes at least its bytes divided by the memory's rate, and at least its operations divided by the arithmetic rate: the roofline
(Williams et al. 2009) of a whole step. Bytes are weights, and keys and values, each read once; operations are those of matrix products, two for
each weight a token meets. Biases, norms, activations, and all time in which a chip waits for a program are left out, so everything here is a bound that a
real engine does not reach.

`static/arithmetic.js` says the same for the page, function by function and in the same order; a test compares both over a grid.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MEMORY_SHARE = 0.9
"""Of a chip's memory, what weights and KV cache may take (--gpu-memory-utilization); the rest is for activations."""


@dataclass(frozen=True)
class Model:
    """The sizes of a decoder, as its config.json gives them."""

    name: str
    vocab_size: int
    max_position_embeddings: int  # the longest context
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    gated: bool  # the MLP has three matrices (the Llama family) or two (GPT-2)
    tied: bool  # the output matrix is the token embedding
    learned_positions: bool

    @property
    def layer_weights(self) -> int:
        """Weights in the matrices of all layers: every token meets each of them once."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (queries + 2 * keys) + queries * self.hidden_size
        mlp = (3 if self.gated else 2) * self.hidden_size * self.intermediate_size
        return self.num_layers * (attention + mlp)

    @property
    def output_weights(self) -> int:
        """Of the output matrix: only tokens whose successor is sampled meet it."""
        return self.vocab_size * self.hidden_size

    @property
    def looked_up_weights(self) -> int:
        """Of embeddings that are nothing else: a token reads one row of each. They take memory and hardly any time."""
        rows = self.max_position_embeddings if self.learned_positions else 0
        return (rows + (0 if self.tied else self.vocab_size)) * self.hidden_size

    @property
    def weights(self) -> int:
        """All of them, without biases and norms (less than 1 % of it)."""
        return self.layer_weights + self.output_weights + self.looked_up_weights


@dataclass(frozen=True)
class Chip:
    """What a chip has and does at best: bytes, bytes per second, operations per second."""

    name: str
    memory: float
    bandwidth: float
    arithmetic: float


@dataclass(frozen=True)
class Load:
    """What users do, what they are promised, and what the chip costs."""

    prompt: int  # tokens
    answer: int  # tokens
    tpot: float  # seconds for a further token, at most, on average
    weight_bytes: float = 2.0  # of one number; fewer than two are unpacked on the chip, the arithmetic stays the same
    kv_bytes: float = 2.0
    price: float = 0.0  # of an hour, in any currency
    reach: float = 1.0  # the share of bandwidth and arithmetic that a program gets out of the chip


def weight_bytes(model: Model, load: Load) -> float:
    """Memory for the weights."""
    return model.weights * load.weight_bytes


def kv_bytes_per_token(model: Model, load: Load) -> float:
    """Memory for a token of context: a key and a value in each layer, for each key/value head."""
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * load.kv_bytes


def read_weights_seconds(model: Model, chip: Chip, load: Load) -> float:
    """A decode step reads every weight that is multiplied, once for all users."""
    return (model.layer_weights + model.output_weights) * load.weight_bytes / (chip.bandwidth * load.reach)


def read_context_seconds(model: Model, chip: Chip, load: Load) -> float:
    """And for each user the keys and values so far: on average half the answer is there."""
    context = load.prompt + load.answer / 2
    return context * kv_bytes_per_token(model, load) / (chip.bandwidth * load.reach)


def compute_token_seconds(model: Model, chip: Chip, load: Load) -> float:
    """A multiplication and an addition for each weight and user, and four for each pair of query and key per number of a head."""
    context = load.prompt + load.answer / 2
    pairs = 4 * model.num_layers * model.num_heads * model.head_dim * context
    return (2 * (model.layer_weights + model.output_weights) + pairs) / (chip.arithmetic * load.reach)


def step_seconds(model: Model, chip: Chip, load: Load, batch: float) -> float:
    """A decode step of `batch` users: what memory needs or what arithmetic needs, whichever is longer."""
    memory = read_weights_seconds(model, chip, load) + batch * read_context_seconds(model, chip, load)
    return max(memory, batch * compute_token_seconds(model, chip, load))


def prefill_seconds(model: Model, chip: Chip, load: Load) -> float:
    """A whole prompt at once: every token meets the layers, and sees those before it; the last one meets the output matrix."""
    pairs = 4 * model.num_layers * model.num_heads * model.head_dim * (load.prompt * (load.prompt + 1) / 2)
    operations = 2 * model.layer_weights * load.prompt + 2 * model.output_weights + pairs
    return max(read_weights_seconds(model, chip, load), operations / (chip.arithmetic * load.reach))


def tpot_seconds(model: Model, chip: Chip, load: Load, batch: float) -> float:
    """Time for a further token with `batch` users who ask without a pause: a step, and the share of it that prompts take. While one user gets
    an answer, each of them sends a prompt once, and everybody waits for it."""
    return step_seconds(model, chip, load, batch) + batch * (prefill_seconds(model, chip, load) / load.answer)


def crossing(model: Model, chip: Chip, load: Load) -> float:
    """The batch from which on a decode step is bound by arithmetic. Infinite if reading a context takes longer than computing with it."""
    gain = compute_token_seconds(model, chip, load) - read_context_seconds(model, chip, load)
    return read_weights_seconds(model, chip, load) / gain if gain > 0 else math.inf


def memory_wall(model: Model, chip: Chip, load: Load) -> int:
    """How many whole contexts fit beside the weights."""
    left = chip.memory * MEMORY_SHARE - weight_bytes(model, load)
    return max(0, math.floor(left / ((load.prompt + load.answer) * kv_bytes_per_token(model, load))))


def bandwidth_wall(model: Model, chip: Chip, load: Load) -> int:
    """How many users the promised TPOT leaves time to read for."""
    each = read_context_seconds(model, chip, load) + prefill_seconds(model, chip, load) / load.answer
    return max(0, math.floor((load.tpot - read_weights_seconds(model, chip, load)) / each))


def arithmetic_wall(model: Model, chip: Chip, load: Load) -> int:
    """How many users the promised TPOT leaves time to compute for."""
    each = compute_token_seconds(model, chip, load) + prefill_seconds(model, chip, load) / load.answer
    return max(0, math.floor(load.tpot / each))


@dataclass(frozen=True)
class Napkin:
    """All of it. Seconds, bytes, tokens; `cost` is the price of a million tokens of answers, infinite for no users."""

    weight_bytes: float
    kv_bytes_per_token: float
    kv_bytes_per_user: float
    prefill: float
    step_of_one: float
    crossing: float
    memory_wall: int
    bandwidth_wall: int
    arithmetic_wall: int
    users: int
    wall: str  # the lowest: "memory", "bandwidth" or "arithmetic"
    tpot: float
    tokens_per_second: float
    cost: float


def napkin(model: Model, chip: Chip, load: Load) -> Napkin:
    """How many users, and at what cost. Raises ValueError if a prompt and its answer are longer than the model's context."""
    if load.prompt + load.answer > model.max_position_embeddings:
        raise ValueError(f"the context of {model.name} ends at {model.max_position_embeddings:,} tokens")
    walls = {
        "memory": memory_wall(model, chip, load),
        "bandwidth": bandwidth_wall(model, chip, load),
        "arithmetic": arithmetic_wall(model, chip, load),
    }
    wall = min(walls, key=lambda name: walls[name])
    users = walls[wall]
    tpot = tpot_seconds(model, chip, load, users)
    rate = users / tpot
    return Napkin(
        weight_bytes(model, load), kv_bytes_per_token(model, load),
        (load.prompt + load.answer) * kv_bytes_per_token(model, load),
        prefill_seconds(model, chip, load), step_seconds(model, chip, load, 1), crossing(model, chip, load),
        walls["memory"], walls["bandwidth"], walls["arithmetic"], users, wall, tpot, rate, load.price / 3600 / rate * 1e6 if users else math.inf,
    )  # fmt: skip
