"""The checkpoint that a tool works on: the one it is given, or the newest one under logs/."""

import argparse
from dataclasses import dataclass, replace
from os.path import getmtime
from pathlib import Path

import torch

import train_gpt
from console import doing
from script import OWN, check_name, core, find, load
from train_gpt import GPT, HERE, Hyperparameters, Moment, UserError, printable


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint, its settings, and the Run of the script that reads it."""

    path: Path
    saved: dict
    hp: Hyperparameters
    run_class: type[train_gpt.Run]

    def __str__(self) -> str:
        script = self.saved.get("script", "a script that it does not name")
        return printable(f"{self.path}, saved by {script}")

    @property
    def now(self) -> Moment:
        """The moment of its step, or of the last step if it names none."""
        return self.run_class.Moment(self.saved.get("step", self.hp.num_iterations), self.hp)

    def model(self, device: torch.device, **changed) -> GPT:
        """Return its model on a device, for evaluation; `changed` replaces settings. UserError if
        its weights do not fit its settings."""
        hp = replace(self.hp, **changed)
        try:
            with doing("building the model"):
                model = core(self.run_class).build(self.run_class, hp, device)
                model.load_state_dict(self.saved["model"])
                model.load_pieces(self.path, weights_only=True)
        except RuntimeError as error:
            raise UserError(f"{self.path} has other weights than its settings: {error}") from error
        return model.eval()


def script_that_saved(path: Path) -> Path:
    """Return the script that a checkpoint names; train_gpt.py if it names none. UserError if the
    project and forks/ have no script of that name: a checkpoint chooses no code elsewhere."""
    try:  # on the device meta, weights are not read
        saved = torch.load(path, map_location="meta", weights_only=True)
        name = saved.get("script", OWN.name)
    except Exception:  # load_checkpoint will say what is wrong
        return OWN
    for script in (*HERE.glob("*.py"), *HERE.glob("forks/*.py")):
        if script.name == name:
            return script
    remedy = "name that script: --script PATH"
    raise UserError(f"{path} was saved by {name!r:.80}, not by a script of the project: {remedy}")


def read(path: Path, script: Path | None) -> tuple[dict, type[train_gpt.Run]]:
    """Return a checkpoint's content, and the Run of `script`, or else of the script that saved it.
    UserError if the script is missing."""
    with doing(f"reading {path}"):
        run_class = load(script or script_that_saved(path))
        saved = core(run_class).load_checkpoint(path, run_class)
    return saved, run_class


def settings_of(saved: dict, run_class: type[train_gpt.Run], flags: list[str]) -> Hyperparameters:
    """Return a checkpoint's settings, changed by flags. A published checkpoint has none: they
    come from --record, or from the default record. UserError for a bad flag."""
    if "hyperparameters" not in saved:
        flags = ["--record", run_class.default_record, *flags]
        return core(run_class).parse_args(flags, run_class)[0]
    # The machine, and how it is used, may differ now.
    here = {name: getattr(Hyperparameters(), name) for name in ("device", "compile", "kernels")}
    own = replace(saved["hyperparameters"], run_id="", resume=False, **here)
    names = {"records": {saved["record"]: own}, "default_record": saved["record"]}
    with_own = type("Run", (run_class,), {"__module__": run_class.__module__, **names})
    return core(run_class).parse_args(flags, with_own)[0]


def parse_with_checkpoint(
    parser: argparse.ArgumentParser, words: list[str], of_text: bool
) -> tuple[argparse.Namespace, Checkpoint]:
    """Return a tool's own flags, and the checkpoint: the first word, or else the newest one under
    logs/. All other flags are for the script that saved it. UserError for a tool of text, if the
    tokens have none."""
    parser.usage = f"{parser.prog} [CHECKPOINT] [--FLAG VALUE ...]"
    parser.add_argument("--script", metavar="FILE", help="what saved it [as the checkpoint says]")
    parser.add_argument("--run_id", default="*", help="take the newest one of this run [of all]")
    path = Path(words.pop(0)) if words and not words[0].startswith("-") else None
    args, flags = parser.parse_known_args(words)
    if args.run_id != "*":
        check_name(args.run_id)
    found = Path("logs").glob(f"{args.run_id}/state_step*.pt")
    path = path or max(found, key=getmtime, default=None)
    if path is None:
        raise UserError("no checkpoint under logs/: train a model first, or name one")
    saved, run_class = read(path, find(args.script) if args.script else None)
    hp = settings_of(saved, run_class, flags)
    if of_text and hp.tokenizer == "none":
        raise UserError(f"{path}: its tokens have no text: its run had --tokenizer none")
    return args, Checkpoint(path, saved, hp, run_class)
