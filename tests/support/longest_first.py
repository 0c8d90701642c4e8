"""The test files that take longest, in the order in which processes of tests begin them: what begins last ends last, and all others wait for it."""

from __future__ import annotations

LONGEST = (
    "notebooks/test_notebooks.py",
    "exercises/test_judges.py",
    "test_rooms.py",
    "stage01_cli/test_cli_main.py",
    "test_readme.py",
    "stage01_cli/test_terminal.py",
    "stage03_engine/test_pipeline_parallel.py",
    "stage02_server/test_tool_formats.py",
    "stage03_engine/test_eagle.py",
    "stage03_engine/test_kv_transfer.py",
    "stage03_engine/test_quantized_checkpoints.py",
    "stage02_server/test_pipelining.py",
    "test_linear_time.py",
    "trace/test_figure_drawing.py",
    "stage03_engine/test_model_parity.py",
    "exercises/test_doors.py",
    "stage03_engine/test_compilation.py",
    "stage03_engine/test_executors.py",
    "stage01_cli/test_course_attacks.py",
    "stage03_engine/test_llama_parity.py",
    "stage03_engine/test_model_path.py",
    "stage01_cli/test_course_grade.py",
    "stage01_cli/test_course.py",
    "stage01_cli/test_book.py",
    "stage02_server/test_chat_template.py",
    "stage02_server/test_api_structured_outputs.py",
    "exercises/test_own.py",
    "stage03_engine/test_kv_offloading.py",
    "trace/test_player.py",
    "stage01_cli/test_cli_walk.py",
    "stage01_cli/test_course_handout.py",
    "stage03_engine/test_cascade.py",
    "stage03_engine/test_disaggregation.py",
    "stage01_cli/test_own_text.py",
    "trace/test_figure_layout.py",
    "stage03_engine/test_heads.py",
    "stage01_cli/test_lab_page.py",
    "stage01_cli/test_lab_server.py",
)
"""In `tests`, by measured time, from more than four minutes to half a minute. All others come after them, as they lie in their folders."""


def place(path: str) -> int:
    """Where a file stands in the order. Those that are not in the list share the last place."""
    return _places.get(path, len(LONGEST))


_places = {path: number for number, path in enumerate(LONGEST)}
