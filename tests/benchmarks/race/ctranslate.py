"""CTranslate2: its generator, in the Python that CTRANSLATE2_PYTHON names, where `pip install ctranslate2` was said. It has no
HTTP server."""

from __future__ import annotations

from collections.abc import Callable

from race.entrant import PEERS, Command, Entrant, Failed, Setup, ask_python
from race.worker import Settings, serve
from race.workloads import Generate

NAME = "ctranslate2"
FIND = "import ctranslate2 as c; print(c.__version__, *sorted(c.get_supported_compute_types('cpu')))"


def find(setup: Setup, python: str, problem: Callable[[str, str], None]) -> list[Entrant]:
    """One per precision that it has on this processor; `problem` is told of the others. Raises Failed."""
    found = ask_python(python, FIND)
    if found is None:
        raise Failed(f"{python} cannot import ctranslate2; set CTRANSLATE2_PYTHON or --ctranslate2-python")
    version, *types = found.split()
    model = setup.checkpoint.with_name(f"{setup.checkpoint.name}-ctranslate2")
    write = Command([python, "-m", "race.ctranslate_file", str(setup.checkpoint), str(model)])
    env = {"OMP_NUM_THREADS": str(setup.threads)}

    def entrant(dtype: str) -> Entrant:
        offline = Command([python, "-m", "race.ctranslate", *setup.settings(model, dtype).argv()], env)
        return Entrant(NAME, version, dtype, dtype, offline, None, None if model.exists() else write)

    for dtype in PEERS[NAME]:
        if dtype not in types:
            problem(dtype, f"it has no {dtype} on this processor")
    return [entrant(dtype) for dtype in PEERS[NAME] if dtype in types]


def start(settings: Settings) -> Generate:
    """Runs in CTranslate2's Python."""
    import ctranslate2

    generator = ctranslate2.Generator(settings.model, compute_type=settings.dtype, intra_threads=settings.threads)
    slots = settings.scale.slots

    def generate(prompts: list[list[int]], output: int, shared: int) -> list[list[int]]:
        """Batches that begin and end together, which equal lengths do not notice. What is shared is computed once and
        kept, as a static prompt."""
        words = [[str(token) for token in prompt] for prompt in prompts]
        results = generator.generate_batch(
            [each[shared:] for each in words], max_batch_size=slots, max_length=output, min_length=output,
            static_prompt=words[0][:shared] if shared else None, include_prompt_in_result=False,
        )  # fmt: skip
        return [result.sequences_ids[0] for result in results]

    return generate


if __name__ == "__main__":
    serve(start)
