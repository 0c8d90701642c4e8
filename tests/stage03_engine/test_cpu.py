"""What a process may use of a CPU: cores, quotas, and the number format that is fastest; on machines that are only files."""

from __future__ import annotations

import os
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from stage03_engine.args import cpu
from stage03_engine.args.cpu import Cores
from stage03_engine.args.features.cores.cores import count_physical, find_quota, measure
from stage03_engine.args.features.number_format.number_format import bfloat16_flag, cpu_dtype
from stage03_engine.args.resolve import detect_settings
from stage03_engine.core.features.dummy_weights.shapes import KNOWN_SHAPES
from stage03_engine.model_shape import ModelShape

GPT2 = KNOWN_SHAPES["gpt2"]
TINY = ModelShape("GPT2LMHeadModel", 2048, 4, 4, 4, 32, 128, 512, 512)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def topology(siblings: dict[int, str], name: str = "core_cpus_list") -> dict[str, str]:
    return {f"sys/devices/system/cpu/cpu{n}/topology/{name}": f"{text}\n" for n, text in siblings.items()}


TWO_BY_TWO = {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}


@pytest.mark.parametrize(
    ("files", "allowed", "cores"),
    [
        (topology(TWO_BY_TWO), {0, 1, 2, 3}, 2),
        (topology(TWO_BY_TWO, "thread_siblings_list"), {0, 1, 2, 3}, 2),
        (topology({0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3"}), {0, 1, 2, 3}, 2),
        (topology(TWO_BY_TWO), {0, 2}, 1),  # both threads of one core
        (topology(TWO_BY_TWO), {0, 3}, 2),
        (topology(dict.fromkeys(range(8), "0-7")), set(range(8)), 1),  # eight threads a core
        (topology({0: "0", 1: "1"}), {0, 1}, 2),
        ({}, {0, 1, 5}, 3),  # the system does not say
        (topology({0: "", 1: "nonsense"}), {0, 1}, 2),
        (topology({0: "1-0", 1: "0-99999999999"}), {0, 1}, 2),
        (topology({0: "1", 1: "0"}), {0, 1}, 2),  # a core without itself
        (topology({0: "0-", 1: "-1"}), {0, 1}, 2),
        (topology({0: "0,1"}), {0, 1}, 2),  # only one of them says it
    ],
)
def test_two_threads_of_a_core_are_one(tmp_path: Path, files: dict[str, str], allowed: set[int], cores: int) -> None:
    assert count_physical(allowed, write(tmp_path, files)) == cores


V2, V1 = "0::/a/b\n", "4:memory:/x\n2:cpu,cpuacct:/a/b\n0::/\n"
OF = "sys/fs/cgroup"


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, inf),
        ({f"{OF}/cpu.max": "150000 100000\n"}, 1.5),  # in a container, even if /proc is hidden
        ({f"{OF}/cpu.max": "max 100000\n", "proc/self/cgroup": "0::/\n"}, inf),
        ({"proc/self/cgroup": V2, f"{OF}/a/b/cpu.max": "200000 100000"}, 2),
        ({"proc/self/cgroup": V2, f"{OF}/a/b/cpu.max": "400000 100000", f"{OF}/a/cpu.max": "300000 100000"}, 3),
        ({"proc/self/cgroup": V2, f"{OF}/a/b/cpu.max": "max 100000", f"{OF}/cpu.max": "50000 100000"}, 0.5),
        ({"proc/self/cgroup": "0::/../../x\n", f"{OF}/cpu.max": "100000 100000"}, 1),
        (
            {"proc/self/cgroup": V1, f"{OF}/cpu,cpuacct/a/b/cpu.cfs_quota_us": "250000\n",
             f"{OF}/cpu,cpuacct/a/b/cpu.cfs_period_us": "100000\n"},
            2.5,
        ),
        (
            {"proc/self/cgroup": V1, f"{OF}/cpu/a/cpu.cfs_quota_us": "100000\n", f"{OF}/cpu/a/cpu.cfs_period_us": "100000\n"},
            1,
        ),
        (
            {"proc/self/cgroup": V1, f"{OF}/cpu/cpu.cfs_quota_us": "-1\n", f"{OF}/cpu/cpu.cfs_period_us": "100000\n"},
            inf,
        ),
        *(({f"{OF}/cpu.max": text}, inf) for text in ("", "nonsense", "1", "max", "5 0", "0 5", "-5 5", "1 2 3", "x y")),
        ({"proc/self/cgroup": "nonsense\n\n::\n"}, inf),
    ],
)  # fmt: skip
def test_the_tightest_quota_counts(tmp_path: Path, files: dict[str, str], quota: float) -> None:
    assert find_quota(write(tmp_path, files)) == quota


@pytest.mark.parametrize(
    ("cores", "usable", "compute", "shown"),
    [
        (Cores(8, 4), 8, 4, "4 cores, 8 hardware threads"),
        (Cores(2, 2), 2, 2, "2 cores"),
        (Cores(8, 4, 1.5), 1, 1, "4 cores, 8 hardware threads, quota 1.5"),
        (Cores(8, 8, 0.25), 1, 1, "8 cores, quota 0.25"),
        (Cores(8, 4, 6), 6, 4, "4 cores, 8 hardware threads"),
    ],
)
def test_a_core_computes_once(cores: Cores, usable: int, compute: int, shown: str) -> None:
    assert (cores.usable, cores.compute, str(cores)) == (usable, compute, shown)


@pytest.mark.parametrize(
    ("given", "compute", "shown"),
    [
        ("1", 1, "4 cores, OMP_NUM_THREADS 1"),
        (" 3 ,2", 3, "4 cores, OMP_NUM_THREADS 3"),
        ("64", 4, "4 cores, OMP_NUM_THREADS 64"),
        *((text, 4, "4 cores") for text in ("", "0", "-1", "two", "1.5", ",2", "²", "9" * 5000)),
    ],
)  # fmt: skip
def test_openmps_variable_lets_only_so_many_compute(
    given: str, compute: int, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    found = measure(tmp_path)
    assert (found.usable, found.compute, str(found)) == (4, compute, shown)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")  # torchrun, which sets the variable whatever the machine has
    assert measure(tmp_path) == Cores(4, 4)


def test_without_affinity_masks_the_system_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 6)
    assert cpu.find_cores() == Cores(12, 6)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: None)
    assert cpu.find_cores() == Cores(12, 12)


def info(flags: str) -> dict[str, str]:
    return {
        "proc/cpuinfo": f"processor\t: 0\nmodel name\t: A CPU with amx_bf16\nflags\t\t: fpu {flags} sse\n\nprocessor\t: 1\n"
    }


@pytest.mark.parametrize(
    ("files", "flag"),
    [
        (info("avx2 avx512f avx512_bf16"), "avx512_bf16"),
        (info("avx512_bf16 amx_bf16 amx_tile"), "amx_bf16"),
        (info("avx2 avx512f avx512_vnni amx_int8 amx_tile"), None),
        (info(""), None),
        ({"proc/cpuinfo": "Features\t: fp asimd bf16 i8mm\n"}, None),  # ARM
        ({"proc/cpuinfo": ""}, None),
        ({}, None),
    ],
)
def test_auto_takes_bfloat16_for_a_large_model_where_it_is_fast(
    tmp_path: Path, files: dict[str, str], flag: str | None
) -> None:
    root = write(tmp_path, files)
    assert bfloat16_flag(root) == flag
    chosen, why = cpu_dtype(GPT2, root)
    assert chosen == ("float32" if flag is None else "bfloat16")
    assert (flag or "neither AMX nor AVX512-BF16") in why
    assert cpu_dtype(replace(GPT2, torch_dtype="float16"), root)[0] == chosen  # whatever the checkpoint has
    assert cpu_dtype(TINY, root) == ("float32", "a small model on a CPU")


def test_what_was_not_text_says_nothing(tmp_path: Path) -> None:
    write(tmp_path, {"proc/cpuinfo": "", "proc/self/cgroup": ""})
    for name in ("proc/cpuinfo", "proc/self/cgroup"):
        (tmp_path / name).write_bytes(b"flags : \xff\xfe amx_bf16")
    assert bfloat16_flag(tmp_path) is None and find_quota(tmp_path) == inf


def test_without_the_features_a_thread_is_a_core_and_nothing_is_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stage03_engine.plugins.INDEX", ())
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 5}, raising=False)
    assert cpu.find_cores() == Cores(3, 3)
    own = replace(GPT2, torch_dtype="float16")
    assert [detect_settings(own, device)["dtype"][0] for device in ("cpu", "cuda")] == ["float32", "float16"]
