"""Rotary embedding, RMSNorm and the sliding window: against their twins, and against transformers' own modules."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from stage04_kernels.attention import BACKENDS, get_backend
from stage04_kernels.backends.native import library
from stage04_kernels.features.rope import apply_rope, rope_cos_sin, rope_frequencies, scale_linear, scale_llama3
from stage04_kernels.lab import layers_reference
from stage04_kernels.lab.cases import make_attention_case
from stage04_kernels.lab.tolerances import TOLERANCES
from stage04_kernels.layers import rms_norm
from stage04_kernels.paged_attention import gather_plan

DTYPES = list(TOLERANCES)
ABSENT = {"triton"} | ({"native"} if library.problem() else set())


def assert_close(fast: torch.Tensor, slow: torch.Tensor) -> None:
    tolerance = TOLERANCES[slow.dtype]
    torch.testing.assert_close(fast, slow, atol=tolerance.atol, rtol=tolerance.rtol)


@given(
    dtype=st.sampled_from(DTYPES), shape=st.tuples(st.integers(0, 5), st.integers(1, 3), st.integers(1, 40)),
    scale=st.sampled_from([1e-4, 1.0, 300.0]), eps=st.sampled_from([1e-6, 1e-5]), seed=st.integers(0, 2**32),
)  # fmt: skip
def test_rms_norm_equals_its_twin(
    dtype: torch.dtype, shape: tuple[int, ...], scale: float, eps: float, seed: int
) -> None:
    """Also where the squares leave the range of float16, which is why the mean is taken in float32."""
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(shape, generator=generator) * scale).to(dtype)
    weight = torch.rand(shape[-1], generator=generator).to(dtype)
    assert_close(rms_norm(x, None, weight, eps)[0], layers_reference.rms_norm(x, weight, eps))


@given(
    dtype=st.sampled_from(DTYPES), positions=st.lists(st.integers(0, 2**20), max_size=5), heads=st.integers(1, 3),
    half=st.integers(1, 20), theta=st.sampled_from([100.0, 1e4, 5e5]), seed=st.integers(0, 2**32),
)  # fmt: skip
def test_rope_equals_its_twin(
    dtype: torch.dtype, positions: list[int], heads: int, half: int, theta: float, seed: int
) -> None:
    x = torch.randn(len(positions), heads, 2 * half, generator=torch.Generator().manual_seed(seed)).to(dtype)
    where, frequencies = torch.tensor(positions, dtype=torch.int64), rope_frequencies(2 * half, theta)
    assert_close(apply_rope(x, *rope_cos_sin(where, frequencies)), layers_reference.apply_rope(x, where, frequencies))


@given(position=st.integers(0, 500), distance=st.integers(0, 500), shift=st.integers(0, 500))
def test_a_product_of_turned_vectors_depends_on_the_distance_only(position: int, distance: int, shift: int) -> None:
    query, key = torch.randn(2, 1, 1, 16, generator=torch.Generator().manual_seed(distance))
    frequencies = rope_frequencies(16, 1e4)

    def product(at: int) -> float:
        turned = [
            apply_rope(x, *rope_cos_sin(torch.tensor([p]), frequencies)) for x, p in ((query, at + distance), (key, at))
        ]
        return float((turned[0] * turned[1]).sum())

    assert math.isclose(product(position), product(position + shift), abs_tol=2e-3)


SCALINGS = {
    "default": ({"rope_type": "default"}, lambda f: f),
    "linear": ({"rope_type": "linear", "factor": 3.0}, lambda f: scale_linear(f, 3.0)),
    "llama3": (
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 64},
        lambda f: scale_llama3(f, 8.0, 1.0, 4.0, 64),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCALINGS)
def test_rope_is_that_of_transformers(name: str) -> None:
    parameters, scale = SCALINGS[name]
    config = LlamaConfig(
        hidden_size=128, num_attention_heads=4, head_dim=32, max_position_embeddings=512,
        rope_parameters=parameters | {"rope_theta": 5e3},
    )  # fmt: skip
    theirs, positions = LlamaRotaryEmbedding(config), torch.arange(0, 500, 7)
    frequencies = scale(rope_frequencies(32, 5e3))
    torch.testing.assert_close(frequencies, theirs.inv_freq, atol=0, rtol=1e-6)
    if name != "default":
        assert not torch.allclose(frequencies, rope_frequencies(32, 5e3)), "the scaling must matter here"
    query, key = torch.randn(2, len(positions), 3, 32)
    cos, sin = theirs(query, positions[None])
    expected = apply_rotary_pos_emb(query[None], key[None], cos, sin, unsqueeze_dim=2)
    for ours, wanted in zip((query, key), expected):
        torch.testing.assert_close(
            apply_rope(ours, *rope_cos_sin(positions, frequencies)), wanted[0], atol=1e-4, rtol=0
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_is_that_of_transformers(dtype: torch.dtype) -> None:
    theirs = LlamaRMSNorm(24, eps=1e-5).to(dtype)
    theirs.weight.data.uniform_(0.5, 2.0)
    x = (3 * torch.randn(7, 24)).to(dtype)
    assert torch.equal(rms_norm(x, None, theirs.weight, 1e-5)[0], theirs(x))


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name not in ABSENT])
@given(length=st.integers(1, 30), computed=st.integers(0, 29), window=st.integers(1, 40))
def test_sliding_window_equals_dense_attention_under_a_band(
    backend: str, length: int, computed: int, window: int
) -> None:
    """Dense attention with an explicit mask over the whole sequence; the cache holds what came before the last tokens."""
    computed = min(computed, length - 1)
    case = make_attention_case([length - computed], [computed], num_heads=2, num_kv_heads=2, block_size=4)
    slots = [case.metadata.block_table[0, p // 4].item() * 4 + p % 4 for p in range(computed)]
    past = case.kv_cache.view(2, -1, 2, 16)[:, slots]
    key, value = torch.cat([past[0], case.key]), torch.cat([past[1], case.value])
    distance = torch.arange(computed, length)[:, None] - torch.arange(length)[None, :]
    mask = (distance >= 0) & (distance < window)
    q, k, v = (t.transpose(0, 1) for t in (case.query, key, value))
    dense = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=case.scale).transpose(0, 1)
    ours = get_backend(backend)(case.query, case.key, case.value, case.kv_cache, case.metadata, case.scale, window)
    assert_close(ours, dense)


def test_each_window_of_a_batch_has_a_plan_of_its_own() -> None:
    """Layers with and without a window share one metadata."""
    case = make_attention_case([5, 1], [20, 30])
    plans = [gather_plan(case.metadata, 16, window) for window in (None, 8, None, 8)]
    assert plans[0] is plans[2] and plans[1] is plans[3] and plans[0] is not plans[1]
    assert len(plans[1].decodes[0].slots) == 8 and len(plans[1].prefills[0].slots) == 12
