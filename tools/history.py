"""Lists your runs: what was tried, and what came out, from logs/results.jsonl.

    ./run.sh tools/history.py                          all runs, in the order of their ends
    ./run.sh tools/history.py muon_lr --sort val_loss  those with muon_lr in their row, best first

"what" has script, record and changed flags. A run that was made in several starts has one row.
result.py lists what else the file holds of each run.
"""

import console
import result
from train_gpt import UserError

# The columns, which are keys of results.jsonl but for the last, and how a number is shown.
COLUMNS = {"run": "", "status": "", "steps": "", "val_loss": ".4f", "bits_per_byte": ".4f"}
COLUMNS |= {"ms_per_step": ".1f", "what": ""}


def cells_of(run: dict) -> list[str]:
    """Return a run's row; - for what is unknown."""
    return ["-" if run[key] is None else format(run[key], form) for key, form in COLUMNS.items()]


@console.program("history.py")
def main(words: list[str]) -> None:
    """Print the table. UserError if there is no run."""
    parser = console.parser_of(__doc__)
    parser.add_argument("text", nargs="?", default="", help="show rows that have this [all]")
    parser.add_argument("--sort", choices=COLUMNS, help="sort by this column, smallest first")
    args = parser.parse_args(words)
    runs = result.runs_noted()
    for run in runs:
        what = run["script"], run["record"], run["flags"]
        run["what"] = " ".join(word for word in what if word)
    runs = [run for run in runs if args.text in " ".join(cells_of(run))]
    if not runs:
        raise UserError(f"{result.RESULTS} has no such run")
    if args.sort:
        runs.sort(key=lambda run: (run[args.sort] is None, run[args.sort]))  # unknown ones last
    console.print_table([list(COLUMNS), *map(cells_of, runs)])


if __name__ == "__main__":
    main()
