"""Products of int8 weights by AMX's tiles, on processors that have none: what the tiles do is computed, number by number."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from patience import PATIENCE
from torch import Tensor

from stage04_kernels.backends.native import library

pytestmark = [
    pytest.mark.skipif(library.problem() is not None, reason=str(library.problem())),
    pytest.mark.slow,  # a compiler takes half a minute; test_native.py has the products of the library that is there
]
POINTER, LONG, INT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int


def compiled(folder: Path, *flags: str) -> Path:
    """native.cpp with more flags of the compiler."""
    command, target = library.compiler(), folder / "native.so"
    assert command is not None
    subprocess.run(
        [command, *library.FLAGS, "-fopenmp", *flags, str(library.SOURCE), "-o", str(target)],
        check=True,
        timeout=PATIENCE,
    )
    return target


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    cpu = Path("/proc/cpuinfo")
    if not cpu.exists() or "avx512bw" not in cpu.read_text().split():
        pytest.skip("no AVX-512")
    return ctypes.CDLL(str(compiled(tmp_path_factory.mktemp("tiles"), "-march=native", "-DEMULATED_TILES")))


def multiply(lib: ctypes.CDLL, x: Tensor, w: Tensor, scale: Tensor, bias: Tensor, threads: int) -> Tensor:
    outputs, inputs = w.shape
    panels, padded = -(-outputs // lib.panel_width()), -(-inputs // 4) * 4
    packed = torch.zeros(panels * lib.panel_width() * padded, dtype=torch.int8)
    lib.pack_int8.argtypes = [POINTER, LONG, LONG, POINTER, LONG, LONG, INT]
    lib.linear_int8_by_8.argtypes = [*[POINTER] * 4, INT, POINTER, LONG, LONG, LONG, INT]
    lib.pack_int8(w.data_ptr(), *w.stride(), packed.data_ptr(), inputs, outputs, 1)
    y = torch.full((len(x), outputs), float("nan"))
    lib.linear_int8_by_8(
        x.data_ptr(), packed.data_ptr(), scale.data_ptr(), bias.data_ptr(), 1, y.data_ptr(), len(x), inputs, outputs, threads
    )  # fmt: skip
    return y


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "by_tiles"),
    [
        (9, 64, 32, True), (15, 128, 33, True), (16, 64, 70, True), (17, 192, 31, True), (50, 320, 100, True),
        (8, 64, 32, False),  # few rows are bound by reading
        (20, 68, 40, False),  # the last group is not whole
    ],
)  # fmt: skip
def test_tiles_give_the_same_bits(
    emulated: ctypes.CDLL, rows: int, inputs: int, outputs: int, by_tiles: bool, threads: int
) -> None:
    generator = torch.Generator().manual_seed(rows * inputs)
    x = torch.randn(rows, inputs, generator=generator) * torch.logspace(-3, 3, rows)[:, None]
    w = torch.randint(-127, 128, (outputs, inputs), generator=generator, dtype=torch.int8)
    scale, bias = torch.rand(outputs, generator=generator), torch.randn(outputs, generator=generator)
    alone = [multiply(emulated, row[None], w, scale, bias, 1) for row in x]  # by vectors
    count = ctypes.c_long.in_dll(emulated, "num_tile_products")
    before = count.value
    found = multiply(emulated, x, w, scale, bias, threads)
    assert torch.equal(found, torch.cat(alone))
    assert (count.value > before) is by_tiles  # False also if what is tried at the start came out wrong


@pytest.mark.long
def test_a_compiler_makes_tiles_of_it(tmp_path: Path) -> None:
    """For a processor that nobody may have here."""
    try:
        made = compiled(tmp_path, "-march=sapphirerapids")
    except subprocess.CalledProcessError:
        pytest.skip("this compiler does not know the processor")
    if (objdump := shutil.which("objdump")) is not None:
        text = subprocess.run([objdump, "-d", str(made)], capture_output=True, text=True, check=True).stdout
        assert "tdpbssd" in text
