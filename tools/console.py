"""What a tool shows: errors as a line, tables, and progress while nothing else reports it."""

import os
import re
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

# Any Python may start a tool, from any folder. Each tool imports this module first, so that it and
# the programs that it starts find the project.
HERE = Path(__file__).resolve().parents[1]
FOLDERS = [str(HERE), str(HERE / "data"), str(HERE / "forks")]
sys.path[1:1] = FOLDERS
os.environ.pop("PYTHONSAFEPATH", None)  # a script finds what lies beside it
os.environ["PYTHONPATH"] = ":".join([*FOLDERS, *filter(None, [os.environ.get("PYTHONPATH")])])

import train_gpt  # noqa: E402

FIRST, NEXT = 2.0, 10.0  # seconds of silence before the first line of `doing`, and the next ones


def program(name: str) -> Callable:
    """Make a tool's main from its work, a function of the command line's words. An error prints a
    line that begins with the name, and ends with status 1, as in train_gpt.py."""

    def decorate(work: Callable[[list[str]], None]) -> Callable:
        def main(words: list[str] | None = None) -> None:
            if ticker := os.environ.pop("RUN_SH_TICKER", ""):  # run.sh's lines about Python's start
                os.close(int(ticker))
            words = sys.argv[1:] if words is None else words
            train_gpt.as_program(name, lambda: work(checked(words)))

        return main

    return decorate


def checked(words: list[str]) -> list[str]:
    """Return the words of a command line. UserError for one that is not UTF-8, and for a value of
    --, which argparse drops."""
    for word in words:
        if re.search("[\ud800-\udfff]", word):
            raise train_gpt.UserError(f"{word} is not UTF-8 text")
        if re.fullmatch(r"--\w+=--", word):
            raise train_gpt.UserError(f"{word}: -- is not a value of a flag")
    return list(words)


def parser_of(description: str | None = None) -> ArgumentParser:
    """Return a parser of flags, with help if there is a description. UserError for a bad flag."""
    parser = ArgumentParser(
        description=description,
        formatter_class=RawDescriptionHelpFormatter,
        add_help=bool(description),
        allow_abbrev=False,
    )
    parser.error = fail
    return parser


def fail(message: str):
    """Raise UserError: argparse calls this for a bad flag."""
    raise train_gpt.UserError(message)


@contextmanager
def doing(what: str | Callable[[], str]) -> Iterator[None]:
    """Print `what` on standard error after two seconds, and then every ten. It may be a
    function; if that returns "", nothing is printed, and it is called again after two seconds."""
    start, is_over = time.monotonic(), Event()

    def say() -> None:
        wait = FIRST
        while not is_over.wait(wait):
            text, wait = what() if callable(what) else what, FIRST
            if text:
                print(f"{text}, {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
                wait = NEXT

    thread = Thread(target=say, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def print_table(rows: list[list[str]]) -> None:
    """Print rows in columns, words to the left, numbers to the right."""
    rows = [[train_gpt.printable(cell) for cell in cells] for cells in rows]
    number = re.compile(r"[-+]?[\d.]+(e[-+]\d+)?(/\d+)?|-")
    padded = []
    for cells in zip(*rows, strict=True):  # of a column
        width = max(map(len, cells))
        right = all(number.fullmatch(cell) for cell in cells[1:])
        padded.append([cell.rjust(width) if right else cell.ljust(width) for cell in cells])
    for cells in zip(*padded, strict=True):
        print("  ".join(cells).rstrip())
