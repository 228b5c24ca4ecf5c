"""Find and import the script that a tool works on.

A script is train_gpt.py, an edited copy of it, or a fork that imports it. Tools use its class Run
and the functions of its core: train_gpt.py, or the edited copy, in which Run's base class is.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[:2]]  # tools, project
import train_gpt  # noqa: E402
from train_gpt import HERE, UserError  # noqa: E402

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


def check_imports(path: Path) -> None:
    """Raise UserError if the script, started by Python, would import a file that differs from the
    module of that name in this process. A process has one module of a name."""
    above = [path.parent.parent] if path.parent.name == "forks" else []
    for other in train_gpt.project_files(path)[1:]:
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
