"""A part of the help (vLLM: FlexibleArgumentParser, `--help=listgroup` and its like)."""

from __future__ import annotations

import argparse

from stage03_engine.errors import ConfigError


def part_of_help(parser: argparse.ArgumentParser, word: str) -> str:
    """What `--help=WORD` prints: the groups (`listgroup`), one group by its name, or all flags with `word` in their names. Raises ConfigError."""
    groups = {
        group: [action for action in group._group_actions if action.help != argparse.SUPPRESS]
        for group in parser._action_groups
    }
    shown = {group: actions for group, actions in groups.items() if actions}
    formatter = parser._get_formatter()
    if word == "listgroup":
        chosen: dict[argparse._ArgumentGroup, list[argparse.Action]] = {group: [] for group in shown}
    else:
        chosen = {group: actions for group, actions in shown.items() if (group.title or "").lower() == word.lower()}
        chosen = chosen or _with_flags_like(shown, word.lstrip("-").replace("_", "-").lower())
    if not chosen:
        raise ConfigError(f"no group and no flag has {word!r} in its name; see {parser.prog} --help=listgroup")
    for group, actions in chosen.items():
        formatter.start_section(group.title)
        formatter.add_text(group.description)
        formatter.add_arguments(actions)
        formatter.end_section()
    return formatter.format_help()


def _with_flags_like(
    groups: dict[argparse._ArgumentGroup, list[argparse.Action]], word: str
) -> dict[argparse._ArgumentGroup, list[argparse.Action]]:
    found = {
        group: [action for action in actions if word and any(word in flag for flag in action.option_strings)]
        for group, actions in groups.items()
    }
    return {group: actions for group, actions in found.items() if actions}
