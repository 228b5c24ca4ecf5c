"""Prints the records of a script, and their published results.

    ./run.sh tools/records.py [SCRIPT.py]              a line for each: steps, published time, loss
    ./run.sh tools/records.py [SCRIPT.py] --all        every setting of every record
    ./run.sh tools/records.py [SCRIPT.py] --diff A B   the settings in which two records differ
    ./run.sh tools/records.py logs/RUN.txt             a run's losses beside the published ones

The published losses are those on FineWeb. A run on one GPU is also compared with a run on one H100,
if there is a public log of one. The last loss is inside the published spread if it is at most two
standard deviations from the mean of the record's runs.
"""

import argparse
import itertools
import json
import re
import signal
import sys
from dataclasses import fields
from functools import cache
from pathlib import Path

sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[:2]]  # tools, project
import script  # noqa: E402

import train_gpt  # noqa: E402
from train_gpt import HERE, RunSettings, UserError, show  # noqa: E402


@cache
def published() -> dict[str, dict]:
    """Return the published results of records on 8 H100s, by name; {} if the file is missing.

    minutes: the official time. mean, deviation, runs: the last validation loss over that many runs.
    (2024-11-19 has one run, and an estimated deviation; adamw has one run, and the deviation that
    the optimizer benchmark takes as known.) losses, seconds: by step, the means of all runs if all
    logs are public, and then with deviations; else those of one run. one_h100: the result of a run
    on one H100, if its log is public.
    """
    path = HERE / "tools" / "published.json"
    return json.loads(path.read_text("utf-8")) if path.exists() else {}


def on_fineweb(*patterns: str) -> bool:
    """Return whether patterns of shards are those of FineWeb."""
    return all(Path(pattern).name.startswith("fineweb_") for pattern in patterns)


# -----------------------------------------------------------------------------
# A table of records, and two or more side by side


def print_list(records: dict[str, train_gpt.Hyperparameters]) -> None:
    """Print a line for each record: its steps, and its published time and last loss."""
    width = max(map(len, records))
    print(f"{'record':<{width}}  steps  minutes  final loss (published, on 8 H100s)")
    for name, hp in records.items():
        minutes = loss = "-"
        if known := published().get(name):
            minutes, loss = known["minutes"], f"{known['mean']:.4f}, 1 run"
            if known["runs"] > 1:
                loss = f"{known['mean']:.4f} ± {known['deviation']:.4f}, {known['runs']} runs"
        print(f"{name:<{width}}  {hp.num_iterations:>5}  {minutes:>7}  {loss}")


def print_records(run_class: type[train_gpt.Run], names: list[str], differing: bool) -> None:
    """Print records of a script in columns: all settings, or only those that differ."""
    records = [vars(run_class.records[name]) for name in names]
    rows = {}
    for setting in records[0]:
        cells = [show(settings[setting]) for settings in records]
        if not any("," in cell for cell in cells):
            rows[setting] = cells
            continue
        # A setting that is a table, such as `layers`, has a row here for each of its rows.
        tables = [cell.split(",") for cell in cells]
        for i, parts in enumerate(itertools.zip_longest(*tables, fillvalue="")):
            rows[f"{setting.removesuffix('s')} {i}"] = [part or "-" for part in parts]
    rows["published minutes"] = [str(published().get(n, {}).get("minutes", "-")) for n in names]
    if differing:
        rows = {title: cells for title, cells in rows.items() if len(set(cells)) > 1}
    widths = [2 + max(map(len, column)) for column in zip(names, *rows.values(), strict=True)]
    for title, cells in [("", names), *rows.items()]:
        columns = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        print(f"{title:<24}{''.join(columns)}".rstrip())


# -----------------------------------------------------------------------------
# A run beside the published results


def print_against_published(log: Path) -> None:
    """Print a run's losses beside those of its record; UserError if none are published."""
    import leaderboard  # here, because it imports this file, and needs scipy

    try:
        run = leaderboard.read_log(log, whole=False)
    except ValueError as error:
        raise UserError(f"{log} {error}") from error
    known = published().get(run.record)
    if known is None:
        raise UserError(f"{log}: nothing is published of {run.record or 'its record'}")
    if not run.on_fineweb:
        raise UserError(f"{log}: the run was not on FineWeb, on which losses are published")
    # Times on eight H100s tell nothing about one: these are of a public log of one H100.
    on_one = known.get("one_h100") if (run.gpu or "").startswith("1 x NVIDIA") else None
    form = f".{5 if run.of_benchmark else 4}f"  # as published
    rows = [["step", "loss", "published", "deviation", "difference"]]
    if on_one:
        rows[0] += ["on one H100", "seconds", "on one H100", "difference"]
    for step, (loss, seconds) in run.curve.items():
        expected = known["losses"].get(str(step))
        if expected is None:
            continue
        deviation = known.get("deviations", {}).get(str(step))
        row = [f"{step}", f"{loss:{form}}", f"{expected:{form}}"]
        row += [leaderboard.show(deviation, form), f"{loss - expected:+{form}}"]
        if on_one:
            then = on_one["seconds"][str(step)]
            row += [f"{on_one['losses'][str(step)]:.4f}"]
            row += [f"{seconds:.1f}", f"{then:.1f}", f"{seconds - then:+.1f}"]
        rows.append(row)
    source = "one run" if "deviations" not in known else f"{known['runs']} runs"
    print(f"{run.record}: published losses are those of {source} on 8 H100s")
    if len(rows) > 1:
        leaderboard.print_table(rows)
    if run.steps in run.curve:
        mean, deviation = known["mean"], known["deviation"]
        inside = abs(run.loss - mean) <= 2 * deviation
        place = "inside" if inside else "outside"
        spread = f"{mean:{form}} +- 2 x {deviation:{form}}"
        print(f"{run.loss:{form}} is {place} the published spread, {spread}")
    others = {"seed", *(f.name for f in fields(RunSettings))}
    changed = sorted(set(re.findall(r" --(\w+) ", run.flags)) - others)
    if changed:
        print(f"other than the record's: {', '.join(changed)}")


def work(argv: list[str] | None) -> None:
    """Print what the flags ask for."""
    path, words = script.take_script(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.error = script.fail
    parser.add_argument("log", nargs="*", type=Path, help="a run's log, logs/RUN.txt")
    parser.add_argument("--all", action="store_true", help="print every setting of every record")
    parser.add_argument(
        "--diff", nargs=2, metavar=("A", "B"), help="print the settings in which two records differ"
    )
    args = parser.parse_args(words)
    if len(args.log) > 1:
        raise UserError(f"{len(args.log)} logs: name one; tools/leaderboard.py takes several")
    if args.log:
        print_against_published(args.log[0])
        return
    run_class = script.load(path)
    if args.diff:
        parse = script.core(run_class).parse_args
        names = [parse(["--record", name], run_class)[1] for name in args.diff]
        print_records(run_class, names, differing=True)
    elif args.all:
        print_records(run_class, list(run_class.records), differing=False)
    else:
        print_list(run_class.records)


def main(argv: list[str] | None = None) -> None:
    """Print as the flags say; errors are those of train_gpt.py."""
    train_gpt.as_program("records.py", lambda: work(argv))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # "| head" is no error
    main()
