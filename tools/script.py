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

sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[:2]]  # tools, project
import train_gpt  # noqa: E402
from train_gpt import END_OF_TEXT, GPT, HERE, Hyperparameters, Moment, UserError  # noqa: E402

OWN = Path(train_gpt.__file__).resolve()  # the default script


def find(name: str | Path) -> Path:
    """Return the path of a script. A file name without a folder is looked for in the project, in
    forks/ and in the current folder. UserError if no script is found, or more than one."""
    path = Path(name).expanduser()
    if path.name == str(name):
        places = [folder / name for folder in (HERE, HERE / "forks", Path.cwd())]
    elif path.parent == Path("forks") and not path.exists():
        places = [HERE / path]
    else:
        places = [path]
    found = list(dict.fromkeys(path.resolve() for path in places if path.is_file()))
    if not found or path.suffix != ".py":
        known = ", ".join(show(path) for path in (OWN, *sorted(HERE.glob("forks/*.py"))))
        raise UserError(f"there is no script {name}: name one by its path, such as {known}")
    if len(found) > 1:
        paths = " and ".join(map(str, found))
        raise UserError(f"there are {paths}: name one with its folder")
    return found[0]


def show(script: Path) -> str:
    """Return a script's path, relative to the project if it lies there."""
    return str(script).removeprefix(f"{HERE}/")


def load(path: Path) -> type[train_gpt.Run]:
    """Import a script and return its class Run. UserError if it does not define one."""
    if path == OWN:
        return train_gpt.Run
    name = path.stem
    while getattr(sys.modules.get(name), "__file__", str(path)) != str(path):
        name += "_"  # another file's module has this name, such as an edited copy's
    if name not in sys.modules:
        check_imports(path)
        import_file(path, name)
    run_class = getattr(sys.modules[name], "Run", None)
    if getattr(run_class, "__module__", None) != name:
        raise UserError(f'{path} has no Run of its own: "class Run(train_gpt.Run)" is wanted')
    # An edited copy defines its own UserError: replace that by the one that tools catch.
    core(run_class).UserError = UserError
    return run_class


def sources(path: Path) -> list[Path]:
    """Return a script, and the files beside it or in the project that it imports, directly or
    indirectly. They need not be imported, or importable, here."""
    found = [path]
    for file in found:  # found grows in the loop
        names = re.findall(r"^ *(?:import|from) (\w+)", file.read_text("utf-8"), re.MULTILINE)
        for name in sorted(set(names)):
            places = [path.with_name(f"{name}.py"), HERE / f"{name}.py"]
            there = [place for place in places if place.exists()][:1]
            found += [place for place in there if place not in found]
    return found


def check_imports(path: Path) -> None:
    """Raise UserError if the script, started by Python, would import a file that differs from the
    module of that name in this process. A process has one module of a name."""
    above = [path.parent.parent] if path.parent.name == "forks" else []
    for other in sources(path)[1:]:
        imported = getattr(sys.modules.get(other.stem), "__file__", None)
        if imported is None:
            continue
        for place in (folder / other.name for folder in (path.parent, *above)):
            if place.exists() and place.read_bytes() != Path(imported).read_bytes():
                remedy = f"rename {place.name}, or use the tools of its own project"
                raise UserError(f"{path} imports {place}, which is not {imported}: {remedy}")


def import_file(path: Path, name: str) -> None:
    """Import a file as a module of that name. Its own imports are looked for beside it first, then
    in the project."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    before = list(sys.path)
    sys.path[:0] = [str(path.parent), str(HERE)]
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path[:] = before


def core(run_class: type[train_gpt.Run]) -> ModuleType:
    """Return the module that defines Run's base class: train_gpt, or an edited copy of it."""
    root = next(one for one in reversed(run_class.__mro__) if hasattr(one, "records"))
    return sys.modules[root.__module__]


def take_script(argv: list[str]) -> tuple[Path, list[str]]:
    """Return the script to work on, and the other words: that of --script, or the first word if it
    ends in .py, or the project's train_gpt.py. UserError if it cannot be found."""
    rest = list(argv)
    for i, word in enumerate(rest):
        if word == "--script":
            if i + 1 == len(rest):
                raise UserError("--script wants a path, or the name of a file")
            name = rest[i + 1]
            del rest[i : i + 2]
            return find(name), rest
        if word.startswith("--script="):
            return find(rest.pop(i).removeprefix("--script=")), rest
    if rest and rest[0].endswith(".py"):
        return find(rest.pop(0)), rest
    return OWN, rest


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

    @property
    def now(self) -> Moment:
        """The moment of its step, or of the last step if it names none."""
        return self.run_class.moment(self.saved.get("step", self.hp.num_iterations), self.hp)

    def model(self, device: torch.device, **changed) -> GPT:
        """Return its model on a device, for evaluation; `changed` replaces settings. UserError if
        its weights are those of other settings."""
        hp = replace(self.hp, **changed)
        model = core(self.run_class).build(self.run_class, hp, device)
        try:
            model.load_state_dict(self.saved["model"])
        except RuntimeError as error:
            raise UserError(f"{self.path} has other weights than its settings: {error}") from error
        return model.eval()


def script_that_saved(path: Path) -> Path:
    """Return the script that saved a checkpoint; train_gpt.py if the checkpoint names none.
    UserError if the script is not found."""
    try:  # with mmap, weights stay in the file
        saved = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        # The name alone counts: a checkpoint from elsewhere must not choose what code runs.
        name = Path(saved["script"]).name
    except Exception:  # a published one, or load_checkpoint will say what is wrong
        return OWN
    try:
        return find(name)
    except UserError as error:
        raise UserError(f"{path} was saved by {name}; {error}") from error


def newest_checkpoint(run_id: str, path: Path | None) -> tuple[Path, dict, type[train_gpt.Run]]:
    """Return the newest checkpoint under logs/ that can be read, of a run or of all runs ("*"),
    its content, and the Run of the script that saved it: of the script `path` if that is given.
    UserError if there is none."""
    found = list(Path("logs").glob(f"{run_id}/state_step*.pt"))
    found.sort(key=lambda checkpoint: checkpoint.stat().st_mtime_ns, reverse=True)
    reason = "train a model first, or name one"
    for checkpoint in found:
        try:
            run_class = load(path or script_that_saved(checkpoint))
            saved = core(run_class).load_checkpoint(checkpoint, run_class)
            if path is None or saved.get("script", path.name) == path.name:
                return checkpoint, saved, run_class
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
    wanted = Path(words.pop(0)) if words and not words[0].startswith("-") else None
    args, flags = parser.parse_known_args(words)
    for word in flags:
        if word.endswith(".pt"):
            raise UserError(f"{word}: name the checkpoint first, before all flags")
    path = find(args.script) if args.script else None
    if wanted is None:
        wanted, saved, run_class = newest_checkpoint(args.run_id, path)
    else:
        run_class = load(path or script_that_saved(wanted))
        saved = core(run_class).load_checkpoint(wanted, run_class)
    hp = settings_of(saved, run_class, flags)
    if hp.vocab_size <= END_OF_TEXT:
        raise UserError(f"{wanted}: {hp.vocab_size} tokens are not GPT-2's vocabulary")
    return args, Checkpoint(wanted, saved, hp, run_class)
