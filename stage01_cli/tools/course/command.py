"""`stages course`: the exercises, from a terminal. vLLM has no counterpart."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import stage01_cli.tools.course as course
from stage03_engine.args.command import CLISubcommand
from stage03_engine.args.parser import FlexibleArgumentParser
from stage03_engine.errors import ConfigError

WITH_NUMBER: dict[str, tuple[Callable[..., object], str]] = {
    "start": (course.start, "copy the starter of an exercise into work/"),
    "check": (course.check, "judge your file; the exit code is 1 until it passes"),
    "hint": (course.hint, "one more hint"),
    "serve": (
        course.serve,
        "the real server with your part: a load that puts it to the test, its trace beside the reference's",
    ),
    "compare": (course.compare, "your part and the reference: speed and trace"),
}
WITHOUT: dict[str, tuple[Callable[..., object], str]] = {
    "list": (course.list_exercises, "what there is to do"),
    "progress": (course.progress, "what you have begun, passed and served"),
}
GRADE = "judge a folder of submissions, each in a sandbox of its own (Linux)"
HANDOUT = "write a copy of the project without the answers to the exercises, for a class"
SPEED = "measure what passes beside the plain twin: the ratio of their times (exercises that have a [speed])"
LEADERBOARD = "engines of exercise 16 under a load that nobody has seen, ranked by goodput"
UNPROTECTED = """ An engine needs sockets and a process, so it cannot run in the sandbox of `grade`: a submission is read before it runs, as there, and then
runs with your rights. Let those of others run only on a machine that you can throw away."""


def _numbers(text: str) -> tuple[int, ...]:
    """`4,5`. Raises ValueError."""
    return tuple(int(each) for each in text.split(","))


class CourseSubcommand(CLISubcommand):
    """Rebuild a part, have it judged, and let it serve."""

    def add_arguments(self, parser: FlexibleArgumentParser) -> None:
        """A subcommand per verb."""
        self._print_help = parser.print_help
        verbs = parser.add_subparsers(dest="verb", metavar="VERB")
        for name, (function, help) in (WITHOUT | WITH_NUMBER).items():
            verb = verbs.add_parser(name, help=help, description=help)
            if name in WITH_NUMBER:
                verb.add_argument("exercise", metavar="N", help="its number or name: 5, ex05, scheduler")
            verb.add_argument(
                "--work", type=Path, default=course.WORK, help="the folder of your files and your progress"
            )
            if name == "start":
                verb.add_argument(
                    "--again", action="store_true", help="begin anew; your file is kept with the ending .old"
                )
            if name == "check":
                verb.add_argument("--watch", action="store_true", help="check again whenever the file is saved")
                verb.add_argument("--speed", action="store_true", help=SPEED)
            verb.set_defaults(course_function=function)
        handout = verbs.add_parser("handout", help=HANDOUT, description=HANDOUT)
        handout.add_argument("folder", metavar="DIR", type=Path, help="a new folder")
        handout.add_argument(
            "--exercises",
            type=_numbers,
            default=(),
            metavar="N,...",
            help="withhold the answers to these exercises; to all if not given",
        )
        grade = verbs.add_parser("grade", help=GRADE, description=GRADE)
        grade.add_argument("folder", metavar="DIR", type=Path, help="it holds files such as STUDENT/ex05_scheduler.py")
        grade.add_argument("--csv", nargs="?", const="-", metavar="FILE", help="write CSV to this file, or print it")
        grade.add_argument("--results", type=Path, metavar="FILE", help="write one student's grades for Gradescope")
        grade.add_argument(
            "--jobs", type=int, default=0, help="how many are judged at a time; one per core if not given"
        )
        grade.add_argument(
            "--partial", action="store_true", help="points for each sentence of the contract that is kept"
        )
        grade.add_argument("--due", metavar="TIME", help="mark what was written later, such as 2026-11-30T23:59")
        grade.add_argument(
            "--late",
            type=float,
            default=0.0,
            metavar="PERCENT",
            help="of the points, lost for each day that has begun since",
        )
        grade.add_argument("--speed", action="store_true", help=f"{SPEED}; a column, and no points")
        self._add_leaderboard(verbs)

    @staticmethod
    def _add_leaderboard(verbs: Any) -> None:
        board = verbs.add_parser("leaderboard", help=LEADERBOARD, description=LEADERBOARD + "." + UNPROTECTED)
        board.add_argument(
            "folder",
            metavar="DIR",
            type=Path,
            nargs="?",
            help="it holds files such as STUDENT/ex16_engine.py; without it yours runs",
        )
        board.add_argument("--work", type=Path, default=course.WORK, help="the folder of your files")
        board.add_argument(
            "--rounds", type=int, default=3, help="how many; in each, every engine runs once (%(default)s)"
        )
        board.add_argument("--seed", type=int, help="of the load; without it, one that nobody knows")
        board.add_argument("--requests", type=int, default=24, help="in a round (%(default)s)")
        board.add_argument("--rate", type=float, default=4.0, help="requests per second (%(default)s)")
        board.add_argument(
            "--ttft",
            type=float,
            default=500.0,
            metavar="MS",
            help="the first token is in time after so long (%(default)s)",
        )
        board.add_argument("--tpot", type=float, default=50.0, metavar="MS", help="and each further one (%(default)s)")

    def cmd(self, args: argparse.Namespace) -> int:
        """Do it. 1 if a check does not pass or a trace differs. Raises ConfigError for a file or folder that cannot be used."""
        if args.verb is None:
            self._print_help(sys.stderr)
            return 2
        try:
            return self._do(args)
        except OSError as error:
            if error.filename is None:
                raise
            raise ConfigError(f"{error.filename}: {error.strerror}") from error

    def _do(self, args: argparse.Namespace) -> int:
        if args.verb == "check" and args.watch:
            course.watch(args.exercise, args.work, args.speed)
            return 0
        if args.verb == "handout":
            course.handout(args.folder, args.exercises)
            return 0
        if args.verb == "grade":
            course.grade(args.folder, args.csv, args.jobs, args.due, args.late, args.partial, args.results, args.speed)
            return 0
        if args.verb == "leaderboard":
            course.leaderboard(
                args.folder, args.work, args.rounds, args.seed, args.requests, args.rate, args.ttft, args.tpot
            )
            return 0
        arguments = [args.exercise] if args.verb in WITH_NUMBER else []
        more = {name: vars(args)[name] for name in ("again", "speed") if name in vars(args)}
        return 1 if args.course_function(*arguments, work=args.work, **more) is False else 0
