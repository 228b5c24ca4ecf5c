"""Make the folder for a pull request to github.com/KellerJordan/modded-nanogpt.

    ./run.sh tools/submission.py DIR BASELINE_LOGS... LOGS... [--target LOSS] [--at STEP]

Logs are grouped as in tools/leaderboard.py. The first group is the baseline, and the second the
submission; a single group is a submission without a baseline. DIR gets:

    README.md            statistics of all runs, and which rules are met
    baseline/RUN.txt     logs of the baseline
    this_pr/RUN.txt      logs of the submission; without a baseline, they lie beside README.md

A log's source must repeat its run alone, without flags: tools/bundle.py makes such a script. The
tool names the public rules by their numbers. Rule 1: the data is FineWeb. Rule 2: at p < 0.01, the
mean loss is at most the target: 3.28, 2.92 for our records of GPT-2 medium, or --target. Rule 4:
the runs take less time than the baseline on the same hardware.

Logs of the optimizer benchmark follow its rules. Rule 1: model, data and batch are the benchmark's.
Rule 3: (3.28 - mean loss) sqrt(n) is at least 0.004. Rule 4: all code is in the log. Rule 5: the
earliest step that meets rule 3 may be claimed (--at), the same one for all runs. Time does not
count.
"""

import contextlib
import io
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np

import console
import leaderboard
from leaderboard import columns
from logfile import FINEWEB, TARGET, Run, flags_in
from script import other_packages
from significance import ALPHA, show_p
from train_gpt import UserError

MARGIN = 0.004  # of the optimizer benchmark's rule 3
ROUNDING = 1e-9  # a mean at the limit meets the rule: losses have five digits

# Of the 32 public records of 2026 up to July, 15 have two folders, mostly of these names.
BASELINE, OURS = "baseline", "this_pr"


def margin(runs: list[Run], step: int) -> float:
    """Return what the optimizer benchmark's rule 3 compares with MARGIN, at a step."""
    return leaderboard.margin(TARGET, [r.curve[step][0] for r in runs])


def verdict_of_benchmark(runs: list[Run]) -> str:
    """Say whether rules 1 and 3 of the optimizer benchmark are met."""
    if differences := runs[0].against_benchmark:
        return f"The benchmark's rule 1 is not met: {'; '.join(differences)}."
    step, n = runs[0].steps, len(runs)
    p = show_p(leaderboard.p_at_most(TARGET, columns(runs)[1], runs[0].known_deviation))
    words = "met" if margin(runs, step) >= MARGIN - ROUNDING else "not met"
    return (
        f"The benchmark's rule 3 is {words} at step {step}: ({TARGET} - mean loss) sqrt({n}) = "
        f"{margin(runs, step):.5f}, and {MARGIN} is enough (p = {p}), if the number of runs was "
        "fixed beforehand."
    )


def notes_of_benchmark(runs: list[Run]) -> list[str]:
    """Return what rules 4 and 5 of the optimizer benchmark say, a sentence or two for each."""
    notes = []
    if names := other_packages(runs[0].source):
        notes += [
            f"The benchmark's rule 4 is not met: the source imports {', '.join(names)}. Copy the "
            "code that it needs into the script, and repeat the runs."
        ]
    steps = set.intersection(*(set(r.curve) for r in runs))
    early = [step for step in sorted(steps) if margin(runs, step) >= MARGIN - ROUNDING]
    if early and early[0] < runs[0].steps and not runs[0].against_benchmark:
        notes += [
            f"Rule 3 is met at step {early[0]}, with {margin(runs, early[0]):.5f}: by the "
            f"benchmark's rule 5, --at {early[0]} may claim that step."
        ]
    return notes


def verdict(runs: list[Run], target: float) -> str:
    """Say whether rule 2 is met, and what to do if not."""
    p = leaderboard.p_at_most(target, columns(runs)[1])
    if math.isnan(p):
        return "Rule 2 is not met: one run, or runs with equal losses, have no p. Make more runs."
    if p < ALPHA:
        return f"Rule 2 is met: the mean loss is at most {target} with p = {show_p(p)} < {ALPHA}."
    return (
        f"Rule 2 is not met: p = {show_p(p)} is not below {ALPHA}. Adding runs until p is low "
        "proves nothing: fix their number, and repeat all runs. The rule is waived for changes "
        "that only make the same training faster."
    )


def notes_of(parts: dict[str, list[Run]]) -> list[str]:
    """Return why the public project may refuse the submission, a sentence or two for each
    reason."""
    notes = []
    ours, base = parts[OURS], parts.get(BASELINE)
    if not all(r.on_fineweb for runs in parts.values() for r in runs):
        notes += ["Not FineWeb: rule 1 does not accept other data."]
    for r in [r for runs in parts.values() for r in runs if r.replaced]:
        notes += [
            f"{r.path.name} does not repeat its run, as the rules want: the run was resumed with "
            f"another {' and '.join(r.replaced)}. Make it anew."
        ]
    if ours[0].is_of_benchmark:
        return notes + notes_of_benchmark(ours)
    if base is None:
        return notes + [
            "No baseline: rule 4 needs runs of the baseline on the same hardware. Make both in "
            'turn (./run.sh --compare "BASELINE.py" "SCRIPT.py"), and name its logs first.'
        ]
    if (base[0].gpu, base[0].torch) != (ours[0].gpu, ours[0].torch):
        notes += ["GPU or PyTorch differs: rule 4 needs all runs on the same hardware."]
    if np.mean(columns(ours)[0]) >= np.mean(columns(base)[0]):
        notes += [f"Not faster: by rule 4, {OURS} must take less time than {BASELINE}."]
    return notes


def check_alone(run: Run) -> None:
    """Raise UserError if the source in a log does not repeat the run alone, as sources in public
    logs do: if it needs other files, flags, or another record than its own. Flags may say where the
    data is, and the kernels' file counts only if the run used kernels."""
    if not run.source:
        raise UserError(f"{run.path} has no source: public logs begin with it. Leave it out")
    needed, reason = set(run.files), ""
    if not set(re.findall(r"\w+", run.kernels)) - {"none"}:
        needed.discard("gpu_kernels.py")
    flags = [f"--{k}{values}" for k, values in flags_in(run.flags).items() if k not in FINEWEB]
    words = " ".join([f"--record {run.record}", *flags])
    own = re.findall(r"^    (?:records, )?default_record = .*?[\"'](\S+?)[\"']", run.source, re.M)
    if needed:
        reason = f"cannot run alone: it imports other files, such as {max(needed)}"
    elif run.settings and (flags or own[-1:] not in ([], [run.record])):  # not a public log
        reason = "trains something else without the run's flags"
    if reason:
        rule = " (the benchmark's rule 4)" if run.is_of_benchmark else ""
        raise UserError(
            f"{run.path} begins with a source that {reason}{rule}. Make one file with ./run.sh "
            f"tools/bundle.py SCRIPT.py OUT.py {words}, and repeat the runs with it"
        )


def submit(folder: Path, groups: dict[str, list[Run]], target: float | None) -> None:
    """Make the folder of a submission; print its statistics, and what is left to do.

    `groups` holds the runs of the baseline and of the submission, or only the latter. The target
    is the loss to reach; None: the record's. UserError or OSError if the folder is not empty, if a
    source is missing or does not repeat its run, or if groups are more, or have different targets.
    """
    folder = folder.resolve()
    if folder.exists() and any(folder.iterdir()):
        raise UserError("it exists and is not an empty folder: name another one")
    if len(groups) not in (1, 2):
        leaderboard.print_leaderboard(groups, target)
        raise UserError(
            f"the logs are of {len(groups)} groups, listed above: name first the logs of the "
            "baseline, then the submission's, and no others"
        )
    targets = {target or runs[0].target for runs in groups.values()}
    if len(targets) > 1:
        raise UserError(f"the baseline and the submission have different targets: {targets}")
    parts = dict(zip((BASELINE, OURS)[-len(groups) :], groups.values(), strict=True))
    for name, runs in parts.items():
        stems = [r.path.stem for r in runs]
        for r in runs:
            check_alone(r)
            if stems.count(r.path.stem) > 1:
                raise UserError(f"two logs of {name} are named {r.path.name}: rename one of them")
    ours, notes = parts[OURS], notes_of(parts)
    benchmark = ours[0].is_of_benchmark
    rule = verdict_of_benchmark(ours) if benchmark else verdict(ours, *targets)

    copies = {}  # the runs, with paths in the folder
    for name, runs in parts.items():
        place = Path(name if len(parts) > 1 else "")
        (folder / place).mkdir(parents=True, exist_ok=True)
        copies[name] = [replace(r, path=place / f"{r.path.stem}.txt") for r in runs]
        for r, copy in zip(runs, copies[name], strict=True):
            shutil.copyfile(r.path, folder / copy.path)
    statistics = io.StringIO()
    with contextlib.redirect_stdout(statistics):
        leaderboard.print_leaderboard(copies, target)
    text = [f"# {folder.name}", "", rule, ""]
    if notes:
        text += ["## Notes", "", *(f"- {note}" for note in notes), ""]
    text += ["## Statistics", "", "```", statistics.getvalue().strip(), "```", ""]
    text += ["## What changed", ""]
    if len(parts) > 1:
        both = " ".join(str(runs[0].path) for runs in copies.values())
        text += [f"A log begins with its source, machine, settings and flags: `diff {both}`"]
    (folder / "README.md").write_text("\n".join(text) + "\n", "utf-8")
    print(statistics.getvalue())
    print("\n".join([f"wrote {folder}", *(f"- {line}" for line in (rule, *notes))]))
    print(f'next: in {folder / "README.md"}, under "What changed", say what you changed and why')


@console.program("submission.py")
def main(words: list[str]) -> None:
    """Make the folder of some logs. UserError if that is impossible."""
    parser = console.parser_of(__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR", help="YYYY-MM-DD_Name")
    parser.add_argument("logs", nargs="+", type=Path, metavar="LOG", help="logs of runs")
    parser.add_argument("--target", type=float, help="loss to reach [the record's]")
    parser.add_argument("--at", type=int, metavar="STEP", help="claim this step [the last]")
    args = parser.parse_args(words)
    runs, skipped = leaderboard.read_logs(args.logs, "submission.py", args.at)
    if args.at is not None and not all(r.is_of_benchmark for r in runs):
        raise UserError("--at: only rules of the optimizer benchmark let you claim an earlier step")
    try:
        if skipped:
            raise UserError("repeat the runs named above, or leave out their logs")
        submit(args.folder, leaderboard.groups_of(runs), args.target)
    except (UserError, OSError) as error:
        raise UserError(f"{args.folder} was not made: {error}") from error


if __name__ == "__main__":
    main()
