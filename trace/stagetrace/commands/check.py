"""`check RUN`: whether the recording is consistent, and what is missing"""

from __future__ import annotations

import argparse

from stagetrace.check.invariants import check
from stagetrace.commands.common import add_run
from stagetrace.read.terminal import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The recording."""
    add_run(parser)


def run(args: argparse.Namespace) -> int:
    """One line per finding; 0 if there is none."""
    report = check(args.run)
    for line in report.deaths:
        say(line)
    for finding in report.findings:
        say(str(finding))
    processes = ", ".join(f"{name} (pid {pid})" for pid, name in report.processes.items())
    for name in report.rotated:
        say(f"the first files of {name} were rotated away: only single events and their numbers can be checked")
    left_out = f" (a filter left some out: {report.left_out})" if report.left_out else ""
    unexplained = sum(not finding.explained for finding in report.findings)
    result = (
        "consistent" if report.consistent else f"{len(report.findings)} findings, {unexplained} of them unexplained"
    )
    say(f"{report.events} events{left_out} of {processes}: {result}")
    return 0 if report.consistent else 1
