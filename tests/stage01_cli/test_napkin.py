"""The napkin's arithmetic: it counts the weights that the engine has, its walls stand where it says, and its command answers in one line what is wrong."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path

import pytest

from stage01_cli.tools.napkin import arithmetic
from stage01_cli.tools.napkin.arithmetic import Load, napkin, step_seconds, tpot_seconds
from stage01_cli.tools.napkin.command import NUMBERS
from stage01_cli.tools.napkin.facts import CHIPS, MODELS, WALLS, model_of
from stage01_cli.tools.napkin.page import read_static
from stage02_server.features.dry_run.memory import estimate_memory
from stage03_engine.arg_utils import EngineArgs
from stage03_engine.config import CacheConfig
from stage03_engine.model_path import known_shapes

LOADS = [
    Load(prompt, answer, tpot, weight_bytes, kv_bytes, 2.5, reach)
    for prompt, answer, tpot, (weight_bytes, kv_bytes), reach in itertools.product(
        (1, 17, 900), (1, 100), (0.001, 0.05), ((2, 2), (0.5, 1), (4, 4)), (1.0, 0.37)
    )
]
GRID = [(model, chip, load) for model in MODELS.values() for chip in CHIPS.values() for load in LOADS]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    from stage01_cli.main import main

    code = main(["napkin", *words])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.parametrize("name", ["gpt2", "gpt2-xl"])
def test_it_counts_the_weights_and_the_cache_that_the_engine_has(name: str) -> None:
    assert model_of(name, known_shapes()[name]) == MODELS[name]
    memory = estimate_memory(EngineArgs.from_kwargs(model=name, load_format="dummy", dtype="float16"))
    load = Load(512, 256, 0.05)
    assert 0.99 * memory.weights < arithmetic.weight_bytes(MODELS[name], load) < memory.weights
    assert arithmetic.kv_bytes_per_token(MODELS[name], load) == memory.per_token


def test_it_knows_the_sizes_that_the_models_are_named_after() -> None:
    sizes = {"gpt2": 0.124, "gpt2-xl": 1.558, "Llama-2-7B": 6.738, "Llama-3.1-8B": 8.030, "Llama-3.1-70B": 70.554}
    assert {name: round(model.weights / 1e9, 3) for name, model in MODELS.items()} == pytest.approx(sizes, rel=0.003)


def test_no_user_more_fits_within_the_walls() -> None:
    """The walls are solved for users; the times say whether the solution is one."""
    hit = set()
    for model, chip, load in GRID:
        found = napkin(model, chip, load)
        walls = {name: getattr(found, f"{name}_wall") for name in WALLS}
        assert found.users == min(walls.values()) == walls[found.wall]
        if found.users:
            assert found.tpot <= load.tpot * (1 + 1e-9)
            assert found.tokens_per_second == found.users / found.tpot
            assert found.cost * found.tokens_per_second == pytest.approx(load.price / 3600 * 1e6)
        else:
            assert math.isinf(found.cost)
        timed = min(walls["bandwidth"], walls["arithmetic"])
        assert tpot_seconds(model, chip, load, timed + 1) > load.tpot * (1 - 1e-9)
        assert timed == 0 or tpot_seconds(model, chip, load, timed) <= load.tpot * (1 + 1e-9)
        held = found.weight_bytes + (found.memory_wall + 1) * found.kv_bytes_per_user
        assert held > chip.memory * arithmetic.MEMORY_SHARE
        hit.add(found.wall)
    assert hit == set(WALLS)


def test_left_of_the_crossing_reading_binds_and_right_of_it_computing() -> None:
    model, chip, load = MODELS["Llama-3.1-8B"], CHIPS["H100"], Load(64, 64, 0.05)
    batch = napkin(model, chip, load).crossing
    assert 295 < batch < 400  # with no context it would be the chip's operations per byte, 295
    reading = arithmetic.read_weights_seconds(model, chip, load)
    for share in (0.1, 0.99):
        context = share * batch * arithmetic.read_context_seconds(model, chip, load)
        assert step_seconds(model, chip, load, share * batch) == reading + context
    for share in (1.01, 5):
        computing = share * batch * arithmetic.compute_token_seconds(model, chip, load)
        assert step_seconds(model, chip, load, share * batch) == computing
    assert math.isinf(napkin(model, chip, Load(100_000, 64, 0.05)).crossing)


def test_both_copies_of_the_memory_share_are_the_engines_default() -> None:
    assert CacheConfig().gpu_memory_utilization == arithmetic.MEMORY_SHARE
    assert f"const MEMORY_SHARE = {arithmetic.MEMORY_SHARE};" in read_static("arithmetic.js")


def test_the_command_prints_the_napkin(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--model", "llama-2-7b", "--chip", "h100")
    rows = {line[:28].strip(): line[28:].strip() for line in out.splitlines()}
    assert (code, err) == (0, "") and rows["weights"] == "13.48 GB"
    found = napkin(MODELS["Llama-2-7B"], CHIPS["H100"], Load(512, 256, 0.05, price=3))
    assert rows["users"] == f"{found.users}: memory is the wall, {WALLS['memory'][0]}"
    code, out, _ = run(capsys, "--model", "Llama-3.1-70B")
    assert code == 0 and out.splitlines()[-1].split(maxsplit=1)[1] == f"0: memory is the wall, {WALLS['memory'][1]}"


WRONG = {
    ("--model", "llama"): "unknown --model llama; known are gpt2, gpt2-xl, Llama-2-7B",
    ("--chip", "abacus"): "unknown --chip abacus; known are A100, H100",
    ("--model", "gpt2", "--prompt", "1000"): "the context of gpt2 ends at 1,024 tokens: lower --prompt or --answer",
    ("--tpot-ms", "nan"): "--tpot-ms must be 1 to 1,000, not nan",
    ("--reach", "101"): "--reach must be 1 to 100, not 101",
    ("--html", "/nowhere/page.html"): "cannot write /nowhere/page.html: No such file or directory",
}


@pytest.mark.parametrize("words", WRONG, ids=lambda words: words[-2].strip("-"))
def test_what_is_wrong_is_said_in_one_line(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *words)
    assert code == 2 and not out and WRONG[words] in err and err.count("\n") == 1


@pytest.mark.parametrize("flag", NUMBERS)
def test_every_bound_is_held(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    least, most, default, _ = NUMBERS[flag]
    assert least <= default <= most
    for value in (least / 10 if least < 1 else int(least) - 1, int(most) + 1):
        code, _, err = run(capsys, f"--{flag}={value}")
        assert code == 2 and f"--{flag} must be" in err


def test_a_page_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "napkin.html"
    code, out, _ = run(capsys, "--html", str(path))
    assert code == 0 and str(path) in out
    page = path.read_text()
    assert "@@" not in page and all(f'"{name}"' in page for name in [*MODELS, *CHIPS])
    assert {field.name for field in dataclasses.fields(arithmetic.Napkin)} <= set(
        read_static("arithmetic.js").replace(":", " ").replace(",", " ").split()
    )
