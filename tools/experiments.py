"""Which of many changes look better? A table of single runs beside a baseline with several seeds.

    ./run.sh --runs 4 --seconds 300 --run_id base       the baseline
    ./run.sh my_copy.py --like base                     a quick look at a change, with its steps
    ./run.sh tools/experiments.py [--base NAME] [--json]

Reads only logs/results.jsonl. Runs of --runs and --compare are left out. The baseline is the group
that --like named last, or --base. `deviations` is how far a loss lies from the baseline's mean, in
standard deviations of the baseline. A verdict:

    better, worse     of a hundred changes that do nothing, two or three look better (p < 0.05), and
                      as many worse
    too close         this run is inconclusive
    not comparable    its steps, tokens, data, machine or torch differ from the baseline's
    diverged, failed, stopped    as result.py says

--json prints a list of objects with the same keys, and `reason`.
"""

import signal
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out

import console
import result
import significance
from logfile import flags_in
from significance import show
from train_gpt import UserError, to_json

SURE = 0.05  # a smaller p is a verdict: a first look is followed by others
EQUAL = ("steps", "tokens", "data", "machine", "host", "torch")  # in all that can be compared


def baseline_of(runs: list[dict], name: str) -> list[dict]:
    """Return the finished runs of the group of that name or, without a name, of the last group that
    --like named. UserError if they are fewer than three, or if all their losses are equal."""
    named = [run["like"] for run in runs if run["like"]]
    if not name and not named:
        raise UserError("no run has --like: name the group of the baseline by --base NAME")
    name = name or named[-1]
    found = [run for run in runs if run["group"] == name and run["status"] == "finished"]
    found = [run for run in found if run["val_loss"] is not None]
    if len(found) < 3 or np.ptp([run["val_loss"] for run in found]) == 0:
        remedy = f"make it by ./run.sh --runs 4 --run_id {name}"
        text = f"{len(found)} finished runs, three with unequal losses are needed"
        raise UserError(f"{result.RESULTS}: the baseline {name} has {text}: {remedy}")
    return found


def change_of(run: dict, base: dict) -> str:
    """Return in what a run differs from the baseline: its source, and its flags."""
    if run["flags"] is None:
        return ""  # they could not be read
    own, others = ({"record": f" {of['record']}"} | flags_in(of["flags"]) for of in (run, base))
    changed = [f"--{name}{own[name]}" for name in own if own[name] != others.get(name)]
    changed += [f"--{name} as in the record" for name in others if name not in own]
    return " ".join(["source"] * (run["digest"] != base["digest"]) + changed)


def row_of(run: dict, base: list[dict]) -> dict:
    """Return a row of the table."""
    keys = "run", "script", "steps", "val_loss", "reason"
    row = {**{key: run[key] for key in keys}, "change": change_of(run, base[0]), "deviations": None}
    if run["status"] != "finished":
        return row | {"verdict": run["status"]}
    unequal = [key for key in EQUAL if run[key] != base[0][key]]
    if unequal:
        found = [f"{key} {run[key]}, not {base[0][key]}" for key in unequal]
        return row | {"verdict": "not comparable", "reason": "; ".join(found)}
    found = significance.of_one(run["val_loss"], [of["val_loss"] for of in base])
    verdict = "better" if found.mean < 0 else "worse"
    verdict = verdict if found.p < SURE else "too close"
    return row | {"deviations": found.mean, "verdict": verdict}


@console.program("experiments.py")
def main(words: list[str]) -> None:
    """Print the table. UserError if there is no baseline."""
    parser = console.parser_of(__doc__)
    parser.add_argument("--base", default="", metavar="NAME", help="group of the baseline")
    parser.add_argument("--json", action="store_true", help="print a list of objects")
    args = parser.parse_args(words)
    runs = result.runs_noted()
    base = baseline_of(runs, args.base)
    rows = [row_of(run, base) for run in runs if not run["group"]]
    if args.json:
        return print(to_json(rows, indent=1))
    losses = [run["val_loss"] for run in base]
    text = f"loss {np.mean(losses):.4f}, standard deviation {np.std(losses, ddof=1):.4f}"
    first = f"{base[0]['script']} {base[0]['flags']}".strip()
    print(f"baseline {base[0]['group']}: {len(base)} runs of {first}: {text}\n")
    table = [["run", "script", "change", "steps", "loss", "deviations", "verdict"]]
    for row in rows:
        numbers = [show(row["val_loss"], ".4f"), show(row["deviations"], "+.1f")]
        verdict = row["verdict"] + (f": {row['reason']}" if row["reason"] else "")
        known = [row["run"] or "-", row["script"], row["change"] or "-", str(row["steps"] or "-")]
        table.append([*known, *numbers, verdict])
    console.print_table(table)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # "| head" is no error
    main()
