"""Prints the records of a script, and their published results.

    ./run.sh tools/records.py [SCRIPT.py]              a line for each: steps, published time, loss
    ./run.sh tools/records.py [SCRIPT.py] --diff A B   the settings that differ between two records,
                                                       of this script or of others in the project
    ./run.sh tools/records.py logs/RUN.txt             a run's losses beside the published ones

Published losses are on FineWeb: means of all runs if their logs are public, else of one run. A run
on one GPU is also compared with a public run on one H100, if there is one. The last loss is
inside the published spread if it is at most two standard deviations from the mean of the runs. The
target is 3.28, and 2.92 for GPT-2 medium, of which one run of January 2025 is published, without a
spread.

All times are published. 2025-01-26 was timed twice: its first time, 2.933 minutes, leaves out ten
steps. The second, 2.997 minutes, and the curve are from 2025-02-01, under the rules since then.
"""

import itertools
from pathlib import Path

import console
import script
import train_gpt
from logfile import published, read_log
from train_gpt import UserError, show


def print_list(records: dict[str, train_gpt.Hyperparameters]) -> None:
    """Print a line for each record: its steps, and its published time and last loss."""
    rows = [["record", "steps", "minutes", "final loss (published, on 8 H100s)"]]
    for name, hp in records.items():
        forms = [form for form in published() if form == name or form.startswith(f"{name} --")]
        for form in forms or [name]:
            minutes = loss = "-"
            if known := published().get(form):
                minutes, loss = str(known["minutes"]), f"{known['mean']:.4f}"
                if known["runs"] > 1:
                    loss += f" ± {known['deviation']:.4f}, {known['runs']} runs"
            rows.append([form, str(hp.num_iterations), minutes, loss])
    console.print_table(rows)
    for name in records:
        for form, known in published().items():
            if "note" in known and form.split()[0] == name:
                print(f"{form}: {known['note']}")


def script_with(path: Path, *records: str) -> Path | None:
    """Return the first script with records whose names begin so: this one, or one of the
    project's."""
    for other in (path, *script.of_project()):
        known = script.load(other).records
        if all(any(name.startswith(record) for name in known) for record in records):
            return other
    return None


def print_difference(path: Path, names: list[str]) -> None:
    """Print the settings that differ between two records. A script may lack a setting: -."""
    both = script_with(path, *names)
    (a, name_a), (b, name_b) = (
        script.parse(both or script_with(path, name) or path, ["--record", name]) for name in names
    )
    rows = [["setting", name_a, name_b]]
    for setting in vars(a) | vars(b):
        # A setting that is a table, such as `layers`, has a row here for each of its rows.
        tables = [show(getattr(hp, setting, "-")).split(",") for hp in (a, b)]
        for i, (one, other) in enumerate(itertools.zip_longest(*tables, fillvalue="-")):
            title = f"{setting} {i}" if max(map(len, tables)) > 1 else setting
            if one != other:
                rows.append([title, one, other])
    console.print_table(rows)


def print_against_published(log: Path) -> None:
    """Print a run's losses beside its record's; UserError if none are published."""
    try:
        run = read_log(log, whole=False)
    except ValueError as error:
        raise UserError(f"{log}: {error}") from error
    known = run.published
    if known is None or not run.on_fineweb:
        raise UserError(f"{log}: nothing is published of {run.record or 'its record'} on its data")
    # Times on eight H100s say nothing about one: these come from a public log of one H100.
    on_one = known.get("one_h100") if (run.gpu or "").startswith("1 x NVIDIA") else None
    rows = [["step", "loss", "published", "difference"]]
    if on_one:
        rows[0] += ["on one H100", "seconds", "on one H100", "difference"]
    for step, (loss, seconds) in run.curve.items():
        if str(step) not in known["losses"]:
            continue
        then = known["losses"][str(step)]
        rows.append([f"{step}", f"{loss:.4f}", f"{then:.4f}", f"{loss - then:+.4f}"])
        if on_one:
            then, there = on_one["losses"][str(step)], on_one["seconds"][str(step)]
            rows[-1] += [f"{then:.4f}", f"{seconds:.1f}", f"{there:.1f}", f"{seconds - there:+.1f}"]
    print(f"{run.record}: published losses are from 8 H100s")
    if "note" in known:
        print(f"they are {known['note']}")
    if on_one and "note" in on_one:
        print(f"on one H100, {on_one['note']}")
    console.print_table(rows)
    if run.steps in run.curve:
        if "deviation" in known:
            mean, deviation = known["mean"], known["deviation"]
            place = "inside" if abs(run.loss - mean) <= 2 * deviation else "outside"
            spread = f"{mean:.4f} +- 2 x {deviation:.4f}"
            print(f"{run.loss:.4f} is {place} the published spread, {spread}")
        missed = f"missed by {run.loss - run.target:.5f}" if run.loss > run.target else "reached"
        p = f"tools/leaderboard.py prints p(<={run.target:g}) of several runs"
        print(f"the target of {run.target:g} is {missed}; {p}")
    if run.flags:
        print(f"other than the record:{run.flags}")


@console.program("records.py")
def main(words: list[str]) -> None:
    """Print what the flags ask for."""
    path, words = script.take_script(words)
    parser = console.parser_of(__doc__)
    parser.add_argument("logs", nargs="*", type=Path, metavar="LOG", help="one log, logs/RUN.txt")
    parser.add_argument("--diff", nargs=2, metavar=("A", "B"), help="compare two records' settings")
    args = parser.parse_args(words)
    if len(args.logs) > 1:
        parser.error(f"name one log, not {len(args.logs)}: tools/leaderboard.py compares several")
    if args.logs:
        print_against_published(args.logs[0])
    elif args.diff:
        print_difference(path, args.diff)
    else:
        print_list(script.load(path).records)


if __name__ == "__main__":
    main()
