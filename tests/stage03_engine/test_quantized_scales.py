"""Scales that cannot be right are refused while a checkpoint is loaded, in one line that names the layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from quantized_checkpoints import CASES, changed, small_models, weights_of, write
from safetensors.torch import load_file
from torch import Tensor

from stage03_engine.errors import ConfigError

LAYER = "model.layers.0.self_attn.o_proj"
SIGNED = ("gptq", "awq")
"""Methods whose tools write negative scales, too, or round small ones to 0."""
VALUES = (math.inf, -math.inf, math.nan, 1e38, -1e38, 1e36, 1e18, 0.0, -0.5)
Make = Callable[[str], Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Make:
    llama = small_models(tmp_path_factory.mktemp("plain"))["llama"]
    known: dict[str, Path] = {}

    def make(case: str) -> Path:
        if case not in known:
            config, quantize, settings = CASES[case]
            known[case], _ = write(llama, tmp_path_factory.mktemp("case"), config, quantize, **settings)
        return known[case]

    return make


def put(name: str, value: float) -> Callable[[dict[str, Tensor]], None]:
    """One of the numbers of a tensor, which becomes float32 so that it can hold it."""

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name].float()
        tensors[name].view(-1)[-1] = value

    return change


def scales_of(folder: Path) -> list[str]:
    return [name for name in load_file(folder / "model.safetensors") if name.startswith(LAYER) and "scale" in name]


@pytest.mark.slow(keep=("gptq act", "awq]", "fp8 blocks", "packed zeros", "int8 tensor"))
@pytest.mark.parametrize("case", CASES)
def test_a_scale_that_cannot_be_right_is_refused(case: str, made: Make, tmp_path: Path) -> None:
    names = scales_of(made(case))
    assert len(names) == 1
    for value in VALUES:
        folder = changed(made(case), tmp_path / str(value), put(names[0], value))
        if value in (0.0, -0.5) and CASES[case][0]["quant_method"] in SIGNED:
            weights_of(folder)
            continue
        with pytest.raises(ConfigError, match=f"scale of {LAYER}") as refused:
            weights_of(folder)
        assert "\n" not in str(refused.value) and len(str(refused.value)) < 200, value


@pytest.mark.parametrize("case", ["gptq", "awq"])
def test_negative_scales_are_numbers_like_others(case: str, made: Make, tmp_path: Path) -> None:
    def negate(tensors: dict[str, Tensor]) -> None:
        tensors[f"{LAYER}.scales"].neg_()

    name = f"{LAYER.removeprefix('model.')}.weight"
    found, wanted = weights_of(changed(made(case), tmp_path, negate))[name], weights_of(made(case))[name]
    assert torch.equal(found, -wanted) and found.any()


def test_what_fits_float32_may_not_fit_float16(made: Make, tmp_path: Path) -> None:
    folder = changed(made("gptq"), tmp_path, put(f"{LAYER}.scales", 1e5))
    weights_of(folder)
    with pytest.raises(ConfigError, match=f"scale of {LAYER} makes weights of up to .* whose products overflow"):
        weights_of(folder, dtype="float16")


@pytest.mark.parametrize("case", ["float8 channels", "fp8", "fp8 blocks"])
def test_codes_that_are_no_numbers_are_refused(case: str, made: Make, tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{LAYER}.weight"].view(torch.uint8)[0, 0] = 0x7F

    with pytest.raises(ConfigError, match=rf"{LAYER}\.weight holds NaN"):
        weights_of(changed(made(case), tmp_path, change))
