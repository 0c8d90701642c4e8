"""From the command line to settings: what stage 1 and the commands of stages 2 and 3 are built on.

vLLM keeps these in vllm/utils (FlexibleArgumentParser) and vllm/engine/arg_utils.py. They live in this stage
because stages 1, 2 and 3 each have a command of their own, and nothing may import from a stage above.
"""

from stage03_engine.args.command import CLISubcommand, cli_env_setup, run_command, run_program
from stage03_engine.args.fields import Setting, add_flags, check_at_least, settings_of
from stage03_engine.args.parser import FlexibleArgumentParser, did_you_mean
from stage03_engine.args.resolve import Resolved, resolve_cli, resolve_settings, with_detected

__all__ = [
    "CLISubcommand",
    "FlexibleArgumentParser",
    "Resolved",
    "Setting",
    "add_flags",
    "check_at_least",
    "cli_env_setup",
    "did_you_mean",
    "resolve_cli",
    "resolve_settings",
    "run_command",
    "run_program",
    "settings_of",
    "with_detected",
]
