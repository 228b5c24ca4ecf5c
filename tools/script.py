"""Find and import the script that a tool works on, and choose the checkpoint that a tool reads.

A script is train_gpt.py, an edited copy of it, or a fork that imports it. Tools use its class Run
and the functions of its core: train_gpt.py, or the edited copy, in which Run's base class is.
"""

import argparse
import importlib.util
import re
import sys
import time
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import torch

import train_gpt
from train_gpt import END_OF_TEXT, GPT, HERE, Hyperparameters, Moment, UserError

OWN = Path(train_gpt.__file__).resolve()  # the default script


def find(name: str | Path) -> Path:
    """Return the path of a script, which is looked for in the current folder, then in the project,
    then in forks/. UserError if there is none."""
    path = Path(name).expanduser()
    places = [folder / path for folder in (Path.cwd(), HERE, HERE / "forks")]
    found = [place.resolve() for place in places if place.is_file()]
    if not found or path.suffix != ".py":
        known = ", ".join(show(path) for path in (OWN, *sorted(HERE.glob("forks/*.py"))))
        raise UserError(f"there is no script {name}: name one by its path, such as {known}")
    return found[0]


def show(script: Path) -> str:
    """Return a script's path, relative to the project if it lies there."""
    return str(script).removeprefix(f"{HERE}/")


def take_script(words: list[str]) -> tuple[Path, list[str]]:
    """Return the script to work on, and the other words: it is the first word if that ends in .py,
    or else train_gpt.py. UserError if it cannot be found."""
    if words and words[0].endswith(".py"):
        return find(words[0]), list(words[1:])
    return OWN, list(words)


def sources(path: Path) -> list[Path]:
    """Return a script, and the files beside it or in the project that it imports, directly or
    indirectly. They need not be imported, or importable, here."""
    folders = [path.parent, HERE]
    if path.parent.name == "forks":
        folders.insert(1, path.parents[1])
    found = [path]
    for file in found:  # found grows in the loop
        names = re.findall(r"^ *(?:import|from) (\w+)", file.read_text("utf-8"), re.MULTILINE)
        for name in sorted(set(names)):
            there = [folder / f"{name}.py" for folder in folders]
            there = [place for place in there if place.exists()][:1]
            found += [place for place in there if place not in found]
    return found


def load(path: Path) -> type[train_gpt.Run]:
    """Import a script and return its class Run. UserError if it does not define one, or if this
    process has imported another file under its name, or under that of a file that it imports."""
    if path == OWN:
        return train_gpt.Run
    name = path.stem
    if getattr(sys.modules.get(name), "__file__", None) != str(path):
        for source in sources(path):
            imported = getattr(sys.modules.get(source.stem), "__file__", str(source))
            if Path(imported).resolve() != source:
                remedy = f"rename {source.name}, or use the tools of its own project"
                raise UserError(f"{source} would replace {imported} here: {remedy}")
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        sys.path.insert(0, str(path.parent))
        spec.loader.exec_module(sys.modules[name])
    run_class = getattr(sys.modules[name], "Run", None)
    if getattr(run_class, "__module__", None) != name:
        raise UserError(f'{path} has no Run of its own: "class Run(train_gpt.Run)" is wanted')
    # An edited copy defines its own UserError: replace that by the one that tools catch.
    core(run_class).UserError = UserError
    return run_class


def core(run_class: type[train_gpt.Run]) -> ModuleType:
    """Return the module that defines Run's base class: train_gpt, or an edited copy of it."""
    root = next(one for one in reversed(run_class.__mro__) if hasattr(one, "records"))
    return sys.modules[root.__module__]


def parse(path: Path, flags: list[str]) -> tuple[Hyperparameters, str]:
    """Return the settings of a script with these flags, and the record's name. UserError for bad
    flags."""
    run_class = load(path)
    return core(run_class).parse_args(flags, run_class)


def fail(message: str):
    """Raise UserError: a tool's argparse calls this for a bad flag."""
    raise UserError(message)


def new_name() -> str:
    """Return a name for a run: the time, and some letters."""
    return time.strftime("%Y-%m-%d_%H-%M-%S_") + uuid.uuid4().hex[:6]


# -----------------------------------------------------------------------------
# The checkpoint that a tool reads


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint, its settings, and the Run of the script that reads it."""

    path: Path
    saved: dict
    hp: Hyperparameters
    run_class: type[train_gpt.Run]

    def __str__(self) -> str:
        script = self.saved.get("script", "a script that it does not name")
        return f"{self.path}, saved by {script}"

    @property
    def now(self) -> Moment:
        """The moment of its step, or of the last step if it names none."""
        return self.run_class.moment(self.saved.get("step", self.hp.num_iterations), self.hp)

    def model(self, device: torch.device, **changed) -> GPT:
        """Return its model on a device, for evaluation; `changed` replaces settings. UserError if
        its weights are those of other settings."""
        hp = replace(self.hp, **changed)
        try:
            model = core(self.run_class).build(self.run_class, hp, device)
            model.load_state_dict(self.saved["model"])
        except RuntimeError as error:
            raise UserError(f"{self.path} has other weights than its settings: {error}") from error
        return model.eval()


def script_that_saved(path: Path) -> Path:
    """Return the script that a checkpoint names; train_gpt.py if it names none. UserError if the
    project and forks/ have no script of that name: a checkpoint chooses no code elsewhere."""
    try:  # with mmap, weights stay in the file
        saved = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
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
    UserError if the file or the script is missing, if its tokens are not GPT-2's, or if its step is
    no number."""
    if not path.is_file():
        raise UserError(f"there is no checkpoint {path}")
    run_class = load(script or script_that_saved(path))
    saved = core(run_class).load_checkpoint(path, run_class)
    words = getattr(saved.get("hyperparameters"), "vocab_size", END_OF_TEXT + 1)
    if words <= END_OF_TEXT:
        raise UserError(f"{path}: {words} tokens are not GPT-2's vocabulary")
    step = saved.get("step", 0)
    if not isinstance(step, int) or step < 0:
        raise UserError(f"{path}: its step is {step!r:.80}: no program of this project saved it")
    return saved, run_class


def newest(run_id: str, script: Path | None) -> tuple[Path, dict, type[train_gpt.Run]]:
    """Return the path of the newest checkpoint under logs/ that can be read, of a run or of all
    runs ("*"), and what `read` returns. UserError if there is none."""
    found = list(Path("logs").glob(f"{run_id}/state_step*.pt"))
    found.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
    reason = "train a model first, or name one"
    for path in found:
        try:
            return path, *read(path, script)
        except UserError as error:
            reason = str(error)
            print(f"{reason}; trying an older one", file=sys.stderr)
    raise UserError(f"no checkpoint under logs/: {reason}")


def settings_of(saved: dict, run_class: type[train_gpt.Run], flags: list[str]) -> Hyperparameters:
    """Return a checkpoint's settings, changed by flags. A published checkpoint has none: they are
    those of --record, or of the default record. UserError for a bad flag."""
    if "hyperparameters" not in saved:
        flags = ["--record", run_class.default_record, *flags]
        return core(run_class).parse_args(flags, run_class)[0]
    # The machine, and how it is used, may be others now.
    here = {name: getattr(Hyperparameters(), name) for name in ("device", "compile", "kernels")}
    own = replace(saved["hyperparameters"], run_id="", resume=False, **here)
    names = {"records": {saved["record"]: own}, "default_record": saved["record"]}
    with_own = type("Run", (run_class,), {"__module__": run_class.__module__, **names})
    return core(run_class).parse_args(flags, with_own)[0]


def parse_with_checkpoint(
    parser: argparse.ArgumentParser, argv: list[str] | None
) -> tuple[argparse.Namespace, Checkpoint]:
    """Return a tool's own flags, and the checkpoint: the first word, or else the newest one under
    logs/. All other flags are for the script that saved it."""
    parser.formatter_class, parser.allow_abbrev = argparse.RawDescriptionHelpFormatter, False
    parser.error = fail
    parser.usage = f"{parser.prog} [CHECKPOINT] [--FLAG VALUE ...]"
    parser.add_argument("--script", metavar="FILE", help="what saved it [as the checkpoint says]")
    parser.add_argument("--run_id", default="*", help="take the newest one of this run [of all]")
    words = list(sys.argv[1:] if argv is None else argv)
    path = Path(words.pop(0)) if words and not words[0].startswith("-") else None
    args, flags = parser.parse_known_args(words)
    script = find(args.script) if args.script else None
    if path is None:
        path, saved, run_class = newest(args.run_id, script)
    else:
        saved, run_class = read(path, script)
    return args, Checkpoint(path, saved, settings_of(saved, run_class, flags), run_class)
