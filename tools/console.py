"""What a tool shows: errors as a line, tables, and progress while nothing else reports it."""

import os
import re
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread, Timer

# Any Python may start a tool, from any folder. Each tool imports this module first, so that it and
# the programs that it starts find the project.
HERE = Path(__file__).resolve().parents[1]
FOLDERS = [str(HERE), str(HERE / "data"), str(HERE / "forks")]
sys.path[1:1] = FOLDERS
os.environ.pop("PYTHONSAFEPATH", None)  # a script finds what lies beside it
os.environ["PYTHONPATH"] = ":".join([*FOLDERS, *filter(None, [os.environ.get("PYTHONPATH")])])

waiting = Timer(2, print, ["importing torch"], {"file": sys.stderr})  # from a slow disk: minutes
waiting.daemon = True
if sys.stderr.isatty():
    waiting.start()
try:
    import train_gpt  # noqa: E402
except (ImportError, OSError) as error:  # such as a library that torch does not find
    reason = f"{type(error).__name__}: {str(error).strip()}".split("\n")[-1]
    helps = "start this by ./run.sh, if need be with another PYTHON=path"
    sys.exit(f"run.sh: error: {sys.executable} cannot train ({reason}): {helps}")
waiting.cancel()

FIRST, NEXT = 2.0, 10.0  # seconds of silence before the first line of `doing`, and the next ones


def program(name: str) -> Callable:
    """Make a tool's main from its work, a function of the command line's words. An error prints a
    line that begins with the name, and ends with status 1, as in train_gpt.py."""

    def decorate(work: Callable[[list[str]], None]) -> Callable:
        def main(words: list[str] | None = None) -> None:
            words = sys.argv[1:] if words is None else words
            train_gpt.as_program(name, lambda: work(list(words)))

        return main

    return decorate


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
def doing(what: str | Callable[[], str], in_place: bool = False) -> Iterator[None]:
    """Print `what` on standard error after two seconds, and then every ten. It may be a
    function; if that returns "", nothing is printed, and it is called again after two seconds.
    On a terminal, a line that is `in_place` replaces the one before."""
    start, is_over = time.monotonic(), Event()
    erase, end = ("\033[2K", "\r") if in_place and sys.stderr.isatty() else ("", "\n")

    def say() -> None:
        wait = FIRST
        while not is_over.wait(wait):
            text, wait = what() if callable(what) else what, FIRST
            if text:
                text = f"{erase}{text}, {time.monotonic() - start:.0f} s"
                print(text, end=end, file=sys.stderr, flush=True)
                wait = NEXT

    thread = Thread(target=say, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        print(end=erase, file=sys.stderr, flush=True)


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
