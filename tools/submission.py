"""Makes the folder for a pull request to github.com/KellerJordan/modded-nanogpt.

    ./run.sh tools/submission.py DIR BASELINE_LOGS... LOGS...

Logs are grouped as in tools/leaderboard.py. The first group is the baseline, and the second group
is the submission; a single group is a submission without a baseline. DIR gets:

    README.md            statistics, what differs, all runs, how to repeat them
    changes.diff         settings and source of the submission against those of the baseline
    baseline/RUN.txt     logs of the baseline
    this_pr/RUN.txt      logs of the submission; without a baseline, they lie beside README.md

The tool names the public rules by their numbers. Rule 2: the mean loss is at most 3.28 at p < 0.01.
Rule 4: the runs take less time than the baseline on the same hardware. The optimizer benchmark has
its own rules: times do not count, and rule 3 is its statistic.
"""

import argparse
import ast
import math
import re
import shutil
import sys
import tempfile
from pathlib import Path
from time import strptime

import numpy as np

sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[:2]]  # tools, project
from leaderboard import (  # noqa: E402
    ALPHA,
    BENCHMARK_MARGIN,
    OF_ONE_RUN,
    Run,
    aligned,
    columns,
    deviation,
    differing_settings,
    groups_of,
    margin,
    of_benchmark,
    p_at_most,
    print_leaderboard,
    read_logs,
    seed_twice,
    sentence,
    show,
    show_p,
    source_diffs,
)

from train_gpt import UserError  # noqa: E402

TARGET = 3.28  # of rule 2

# Of the 32 public records of 2026 up to July, 15 have a folder for the baseline's runs and one for
# their own, mostly with these two names: 2026-02-28_TransposeCopyBackward, for example. Another 15
# have no baseline, and their logs lie beside README.md: 2026-03-06_SimplifyHC, for example.
BASELINE, OURS = "baseline", "this_pr"

# -----------------------------------------------------------------------------
# Rules, and the order of the runs


def verdict(losses: list[float], benchmark: bool = False) -> str:
    """Say whether rule 2 is met, and what to do if not; or rule 3 of the optimizer benchmark."""
    if benchmark:
        found = margin(losses, TARGET)
        state = "met" if found >= BENCHMARK_MARGIN else "not met"
        statistic = f"({TARGET} - mean loss) * sqrt(runs)"
        return f"Rule 3 is {state}: {statistic} = {found:.5f}, {BENCHMARK_MARGIN} is needed."
    p = p_at_most(TARGET, losses)
    if math.isnan(p):
        return "Rule 2 is not met: one run, or runs with equal losses, have no p. Make more runs."
    if p < ALPHA:
        return f"Rule 2 is met: the mean loss is at most {TARGET} with p = {show_p(p)} < {ALPHA}."
    advice = "Adding runs until p is low proves nothing: fix their number, and repeat all runs."
    if np.mean(losses) > TARGET:
        advice = f"The mean loss is above {TARGET}."
    waived = "The rule is waived for changes that only make the same training faster."
    return f"Rule 2 is not met: p = {show_p(p)} is not below {ALPHA}. {advice} {waived}"


def in_order(runs: list[Run]) -> tuple[list[Run], str]:
    """Return the runs in the order in which they began, and the name of the clock: the first of
    three clocks that has a time for each run."""

    def in_log(r: Run):
        """Return the date that nvidia-smi wrote: copying or renaming does not change it."""
        date = re.search(r"^\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4}", r.machine, re.M)
        return strptime(date[0], "%a %b %d %H:%M:%S %Y") if date else None

    def in_name(r: Run):
        """Return the date in the name. Runs of one --runs or --compare share it: the seed tells
        their order."""
        date = re.search(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", r.path.stem)
        return (date[0], int(r.settings.get("seed", 0)), of_file(r)) if date else None

    def of_file(r: Run):
        """Return when its last line was written, or when it was copied."""
        return r.path.stat().st_mtime_ns

    clocks = {
        "dates in the logs": in_log,
        "dates in the names of the logs": in_name,
        "times of the log files, which copying may have changed": of_file,
    }
    for name, clock in clocks.items():
        if None not in [clock(r) for r in runs]:
            return sorted(runs, key=clock), name
    raise AssertionError("a file has a time")


def in_turn(order: list[str]) -> bool:
    """Return whether runs of two groups took turns: each two in a row are one of each group. Runs
    after the last one of the smaller group do not count."""
    if len(set(order)) < 2:
        return False
    both = 2 * min(order.count(name) for name in set(order))
    return all(a != b for a, b in zip(order[0:both:2], order[1:both:2], strict=True))


def notes_of(folder: Path, parts: dict[str, list[Run]], took_turns: bool) -> list[str]:
    """Return why the public project may refuse the submission, a sentence or two for each
    reason."""
    notes = []
    public_name, form = r"\d{4}-\d\d-\d\d[-_]\w", "YYYY-MM-DD_Name"
    if of_benchmark(parts[OURS]):
        public_name, form = r"\d{8}_\w", "YYYYMMDD_name"
    if not re.match(public_name, folder.name):
        notes += [f"Name: {folder.name} does not have the public form {form}."]
    if not all(r.on_fineweb for runs in parts.values() for r in runs):
        notes += ["Not FineWeb: the public project does not accept other data."]
    notes += [note + "." for name, runs in parts.items() if (note := seed_twice(name, runs))]
    ours = parts[OURS]
    if of_benchmark(ours):  # times do not count, and old results are the baselines
        return notes
    if BASELINE not in parts:
        return notes + [
            "No baseline: rule 4 needs runs of the baseline on the same hardware. Make both in "
            'turn, with ./run.sh --compare "BASELINE.py" "SCRIPT.py FLAGS". Then name the logs of '
            "the baseline first."
        ]
    base = parts[BASELINE]
    if base[0].gpu != ours[0].gpu:
        notes += ["Hardware differs: rule 4 needs both groups of runs on the same hardware."]
    if base[0].torch != ours[0].torch:
        notes += ["PyTorch differs: the difference in time is not that of the change alone."]
    if np.mean(columns(ours)[0]) >= np.mean(columns(base)[0]):
        notes += [f"Not faster: by rule 4, {OURS} must take less time than {BASELINE}."]
    if not took_turns:
        notes += [
            "Not in turn: a machine that became slower or faster affects one group more. Make one "
            "run of each group in turn, as ./run.sh --compare does."
        ]
    return notes


# -----------------------------------------------------------------------------
# The files


def statistics(parts: dict[str, list[Run]]) -> list[str]:
    """Return the table of the public READMEs: times in seconds, differences to the first group."""
    heads = ["Time μ", "Time σ", "Time +/-", "Loss μ", "Loss σ", "Loss +/-", "p"]
    rows = [["", "Runs", "Steps", *heads]]
    first = [np.mean(values) for values in columns(next(iter(parts.values())))]
    for name, runs in parts.items():
        steps = "/".join(str(number) for number in sorted({r.steps for r in runs}))
        row = [name, str(len(runs)), steps]
        for values, mean in zip(columns(runs), first, strict=True):
            more = f"{np.mean(values) - mean:+.4f}"
            row += [f"{np.mean(values):.4f}", show(deviation(values), ".4f"), more]
        row.append(show_p(p_at_most(TARGET, columns(runs)[1])))
        rows.append(row)
    return aligned(rows)


def lists(name: str, runs: list[Run]) -> list[str]:
    """Return losses and times in seconds as Python lists, in the order of the runs."""
    times, losses = columns(runs)
    return ["", f"{name}:", f"  losses = {losses}", f"  times  = {times}"]


def table(rows: list[list[str]]) -> list[str]:
    """Return a table in Markdown; the first row is its head."""
    rows = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]


def differences(a: Run, b: Run) -> list[list[str]]:
    """Return the name and both values of what differs, except sources and settings of single
    runs."""
    machine = ["kernels", a.kernels, b.kernels], ["torch", a.torch, b.torch], ["GPU", a.gpu, b.gpu]
    rows = [row for row in differing_settings(a, b) if row[0] not in OF_ONE_RUN]
    rows += [[name, x or "-", y or "-"] for name, x, y in machine if x != y]
    return rows


def changes(a: Run, b: Run) -> str:
    """Return changes.diff: settings as comments, which `patch` skips, then the diff of the
    sources."""
    lines = [f"# {name}: {x} -> {y}" for name, x, y in differences(a, b)]
    if not a.settings:
        lines.append("# the logs hold no settings apart from the source")
    diffs = source_diffs(a, b, (BASELINE, OURS))
    for diff in diffs:
        lines += diff
    if not diffs:
        lines.append("# the sources are equal")
    return "\n".join(lines) + "\n"


def what_changed(a: Run, b: Run) -> list[str]:
    """Return the lines of README.md about sources, settings and machines that differ."""
    text = "The source is the same; the settings or the machine differ (`changes.diff`)."
    if diffs := source_diffs(a, b, (BASELINE, OURS)):
        signs = [line[0] for diff in diffs for line in diff[2:]]  # without the two lines with names
        added, removed = signs.count("+"), signs.count("-")
        text = f"Lines of source: {added} added, {removed} removed (`changes.diff`)."
    if not a.settings:
        text += " The logs hold no settings apart from the source."
    rows = [[name, f"`{x}`", f"`{y}`"] for name, x, y in differences(a, b)]
    return [text, "", *table([["", BASELINE, OURS], *rows])] if rows else [text]


def commands(name: str, runs: list[Run]) -> list[str]:
    """Return shell commands that repeat the runs of a group."""
    first = runs[0]
    if not first.settings:  # a public log
        return [f"# {name}: start the source at the head of its logs as its project says"]
    script = f"{name}.py"
    flags = f"{script} --record {first.record}{first.flags}"
    seeds = " ".join(r.settings["seed"] for r in runs)
    command = f"for seed in {seeds}; do ./run.sh {flags} --seed $seed; done"
    return [f"# {name}: {script} is the source at the head of its logs", command]


def readme(folder: Path, parts: dict[str, list[Run]]) -> tuple[str, list[str]]:
    """Return the text of README.md, and its notes."""
    order, clock = in_order([r for runs in parts.values() for r in runs])
    name_of = {r.path: name for name, runs in parts.items() for r in runs}
    whose = [name_of[r.path] for r in order]
    parts = {name: [r for r in order if name_of[r.path] == name] for name in parts}
    ours, base = parts[OURS], parts.get(BASELINE)
    turns = f"The runs are in the order in which they began, by the {clock}."
    if base:
        turns += f" Runs of {BASELINE} and {OURS} were {'' if in_turn(whose) else 'not '}in turn."
    notes = notes_of(folder, parts, in_turn(whose))

    title = re.sub(r"^\d{4}-\d\d-\d\d[-_](?=\w)", "", folder.name)
    figures = [*statistics(parts), *(x for name, runs in parts.items() for x in lists(name, runs))]
    text = [
        f"# {title}",
        "",
        "```",
        *figures,
        "```",
        "",
        verdict(columns(ours)[1], of_benchmark(ours)),
    ]
    text += [f"Times are in seconds; p is that of a one-sided t-test: mean loss <= {TARGET}."]
    if base:
        compared = sentence(base, ours, (BASELINE, OURS))
        text += [f"Welch's t-test, with 95 % intervals: {compared}."]
    if notes:
        text += ["", "## Notes", "", *(f"- {note}" for note in notes)]
    changed = what_changed(base[0], ours[0]) if base else ["Without a baseline, there is no diff."]
    text += ["", "## What changed", "", *changed]

    machines = dict.fromkeys(f"{r.gpu or 'unknown GPU'}, torch {r.torch or '-'}" for r in order)
    rows = [["", "group", "log", "seed", "loss", "time (s)"]]
    for i, (r, name) in enumerate(zip(order, whose, strict=True), 1):
        known = [name, f"{r.path.stem}.txt", r.settings.get("seed", "-")]
        rows += [[str(i), *known, f"{r.loss:.{r.digits}f}", f"{r.seconds:.3f}"]]
    text += ["", "## Runs", "", f"On {'; '.join(machines)}. {turns}", "", *table(rows)]
    repeat = [line for name, runs in parts.items() for line in commands(name, runs)]
    text += ["", "## How to repeat the runs", "", "```bash", *repeat, "```"]
    return "\n".join(text) + "\n", notes


def missing_files(run: Run) -> list[str]:
    """Return the names of the files that the source at the head of a log cannot run without.

    These are the files that the source imports and that have a part in the log. gpu_kernels.py
    counts only if the run used kernels.
    """
    if not run.files:
        return []
    imported = set()
    for node in ast.walk(ast.parse(run.source)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module)
    needed = {f"{name}.py" for name in imported}
    if not set(re.findall(r"\w+", run.kernels)) - {"none"}:
        needed.discard("gpu_kernels.py")
    return sorted(needed & run.files.keys())


def check_alone(run: Run) -> None:
    """Raise UserError if the source in a log cannot run alone, as sources in public logs can."""
    if not run.source:
        raise UserError(f"{run.path} has no source: public logs begin with it. Leave it out")
    try:
        missing = missing_files(run)
    except SyntaxError as error:
        raise UserError(
            f"{run.path}: Python cannot read the source at its head: {error}"
        ) from error
    if missing:
        names = " and ".join(missing)
        raise UserError(
            f"{run.path} begins with a source that cannot run alone: it imports {names}. Make one "
            "file with ./run.sh tools/bundle.py SCRIPT.py OUT.py, and repeat the runs with it"
        )


def submit(folder: Path, groups: list[list[Run]]) -> None:
    """Make the whole folder of a submission or nothing, and print what is left to do.

    `groups` has the runs of the baseline and those of the submission, or only the latter. UserError
    or OSError if the folder is not empty, if a source is missing or cannot run alone, or if there
    are more groups.
    """
    folder = folder.resolve()
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError("it exists and is not an empty folder: name another one")
    if not folder.parent.is_dir():
        raise UserError(f"there is no folder {folder.parent}: create it first")
    if len(groups) not in (1, 2):
        raise UserError(
            f"the logs are of {len(groups)} groups, listed above: name first the logs of the "
            "baseline, then those of the submission, and no others"
        )
    parts = dict(zip((BASELINE, OURS) if len(groups) == 2 else (OURS,), groups, strict=True))
    for name, runs in parts.items():
        stems = [r.path.stem for r in runs]
        for r in runs:
            check_alone(r)
            if stems.count(r.path.stem) > 1:
                raise UserError(f"two logs of {name} are named {r.path.name}: rename one of them")
    text, notes = readme(folder, parts)

    with tempfile.TemporaryDirectory(prefix=".submission-", dir=folder.parent) as temporary:
        new = Path(temporary, folder.name)
        for name, runs in parts.items():
            place = new / name if BASELINE in parts else new
            place.mkdir(parents=True)
            for r in runs:
                shutil.copy2(r.path, place / f"{r.path.stem}.txt")
        (new / "README.md").write_text(text, "utf-8")
        if BASELINE in parts:
            diff = changes(parts[BASELINE][0], parts[OURS][0])
            (new / "changes.diff").write_text(diff, "utf-8")
        new.rename(folder)

    print(f"\nwrote {folder}: logs of {', '.join(f'{len(r)} x {n}' for n, r in parts.items())}")
    for line in (verdict(columns(parts[OURS])[1], of_benchmark(parts[OURS])), *notes):
        print(f"- {line}")
    print(f'next: in {folder / "README.md"}, under "What changed", say what you changed and why')


def main(argv: list[str] | None = None) -> None:
    """Make the folder, and print what the logs tell; exit status 1 if the folder was not made."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("submission.py", description=__doc__, formatter_class=form)
    parser.add_argument("folder", type=Path, metavar="DIR", help="YYYY-MM-DD_Name")
    parser.add_argument("logs", nargs="+", type=Path, metavar="LOG", help="logs of runs")
    args = parser.parse_args(argv)
    runs, skipped = read_logs(args.logs, parser.prog)
    groups = groups_of(runs)
    if groups:
        print_leaderboard(groups, TARGET)
    try:
        if skipped:
            raise UserError("repeat the runs named above, or leave out their logs")
        submit(args.folder, groups)
    except (UserError, OSError) as error:
        sys.exit(f"{parser.prog}: {args.folder} was not made: {error}")


if __name__ == "__main__":
    main()
