"""The settings: what a flag may look like, what a number may look like, and who decides.

Five functions that do not know each other: write them from the top, and check after each.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from stage03_engine.args.fields import Setting
from stage03_engine.args.resolve import Resolved, accepted

__all__ = ["Resolved", "accepted", "difflib"]  # given, for you to use


def parse_int(text: str) -> int:
    """The integer that a text stands for: `2048`, or shorter with a suffix, `2k` = 2000 and `2K` = 2048.

    A number is: a sign or none; digits 0 to 9; if there is a fraction, a point and more digits; a suffix or none. Spaces
    around it do not matter. Suffixes: k m g t are 1000, 1000**2, 1000**3, 1000**4, and K M G T are 1024, ..., 1024**4.
    A fraction needs a lower-case suffix, and the result must be whole.
    Raises ValueError(f"{text!r} is not an integer") for everything else.
    """
    raise NotImplementedError


def with_dashes(args: Sequence[str]) -> list[str]:
    """A command line on which each flag is spelled with dashes: `--max_num_seqs` becomes `--max-num-seqs`.

    Only the name of a flag changes. A word is a flag if it begins with `--`, and its name ends before the first `=` or `.`,
    whichever comes first: `--a_b.c_d=e_f` becomes `--a-b.c_d=e_f`. A bare `--` and all words after it stay as they are.
    """
    raise NotImplementedError


def did_you_mean(word: str, known: Iterable[str], works: Callable[[str], bool] = lambda name: True) -> str:
    """`; did you mean --port?` if a known word is close enough to `word`; otherwise an empty text.

    "Close enough" is `difflib.get_close_matches` with a cutoff of 0.6. Only the closest counts: if that one does not work
    (`works(closest)` is false), there is no advice. (A flag may be known and yet not work: that of a feature that is not installed.)
    """
    raise NotImplementedError


def decide(
    setting: Setting,
    given: Mapping[str, Any],
    environ: Mapping[str, str],
    from_file: Mapping[str, Any],
    config_file: str,
) -> Resolved:
    """The value of one setting, and who decided it.

    setting      .name (max_num_seqs), .flag (--max-num-seqs), .variable (STAGES_MAX_NUM_SEQS), .default
    given        what the command line gave: name of a setting -> value
    environ      the environment: name of a variable -> text
    from_file    what the config file says: name of a setting -> value
    config_file  the path of that file, for messages

    Returns Resolved(value, source, detail), where source and detail are
        "command line" and the flag, "environment" and the variable, "config file" and its path, or "default" and nothing.
    Each value, but for the default, goes through `accepted(setting, value, where)`, which gives it the type of the setting, or
    raises a ConfigError that begins with `where`. Here, `where` is
        the flag, "environment variable <the variable>", or "config file <its path>: <the name of the setting>".
    """
    raise NotImplementedError


def with_detected(resolved: Mapping[str, Resolved], detected: Mapping[str, tuple[Any, str]]) -> dict[str, Resolved]:
    """The same settings, with what is still open filled in. Open is a value that is None or "auto", whoever said so.

    `detected` maps the name of a setting, which `resolved` has too, to (what was found on this machine, what was looked at).
    A value that is filled in has the source "detected", and what was looked at as its detail. `resolved` itself stays as it is.
    """
    raise NotImplementedError
