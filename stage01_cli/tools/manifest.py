"""The other subcommands of `stages`."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

FEATURE = Feature(
    name="tools_of_the_command_line",
    help="clients, batches, recordings, and what a bug report should say",
    room=__package__,
    parts=(
        Part("command", ".openai_client:ChatCommand", key="chat", help="chat with a running server"),
        Part("command", ".openai_client:CompleteCommand", key="complete", help="let a running server complete a text"),
        Part(
            "command",
            ".run_batch:RunBatchSubcommand",
            key="run-batch",
            help="answer a file of requests (OpenAI's batches)",
        ),
        Part("command", ".trace:TraceSubcommand", key="trace", help="look at recordings made with --trace"),
        Part(
            "command",
            ".collect_env:CollectEnvSubcommand",
            key="collect-env",
            help="describe this machine, for a report",
        ),
    ),
)
