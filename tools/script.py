"""Find and import the script that a tool works on.

A script is train_gpt.py, an edited copy of it, or a fork that imports it. Tools use its class Run
and the functions of its core: train_gpt.py, or the edited copy, which defines Run's base class.
"""

import ast
import importlib.util
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import train_gpt
from tokenizer import GPT2, HuggingFace, tokenizer_of
from train_gpt import HERE, Hyperparameters, UserError, show

OWN = Path(train_gpt.__file__).resolve()  # the default script
PACKAGES = {"torch", "numpy", "tqdm", "triton"}  # that the project's scripts import


def check_name(run_id: str) -> None:
    """Raise UserError for what is not the name of a run: train_gpt.py's check, and not empty."""
    if not run_id:
        raise UserError("--run_id: the name is empty")
    train_gpt.check(replace(train_gpt.RECORDS["demo"], run_id=run_id))


def of_project() -> list[Path]:
    """Return the project's scripts. Other files in forks/ are parts of these, without a Run."""
    forks = sorted(HERE.glob("forks/*.py"))
    return [OWN, *(path for path in forks if "\nclass Run(" in path.read_text("utf-8"))]


def find(name: str | Path) -> Path:
    """Return the path of a script, which is looked for in the current folder, then in the project,
    then in forks/. UserError if there is none."""
    path = Path(os.path.expanduser(name))  # Path.expanduser raises for unknown users
    places = [folder / path for folder in (Path.cwd(), HERE, HERE / "forks")]
    found = [place.resolve() for place in places if place.is_file()]
    if not found or path.suffix != ".py":
        known = ", ".join(show(path) for path in of_project())
        raise UserError(f"there is no script {name}: name one by its path, such as {known}")
    return found[0]


def take_script(words: list[str]) -> tuple[Path, list[str]]:
    """Return the script to work on, and the other words: it is the first word if that ends in .py,
    or else train_gpt.py. UserError if it cannot be found."""
    if words and words[0].endswith(".py"):
        return find(words[0]), list(words[1:])
    return OWN, list(words)


def names_in(tree: ast.Module) -> set[str]:
    """Return the names of the modules that a source imports, anywhere in it."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module.split(".")[0])
    return names


def names_imported(path: Path) -> list[str]:
    """Return the names of the modules that a file imports, sorted. UserError if the file is not
    text; SyntaxError."""
    try:
        return sorted(names_in(ast.parse(path.read_text("utf-8-sig"), str(path))))
    except ValueError as error:
        raise UserError(f"{path} is not Python source in UTF-8: {error}") from error


def other_packages(source: str) -> list[str]:
    """Return what a script in one file, such as a bundle, imports besides the standard library and
    PACKAGES. In a bundle, each module is a call of Bundled with its name and its source."""
    names, own, sources = set(), set(), [source]
    for text in sources:  # sources grows in the loop
        tree = ast.parse(text)
        names |= names_in(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "Bundled":
                name, inner = map(ast.literal_eval, node.args)
                own.add(name)
                sources.append(inner)
    return sorted(names - own - PACKAGES - sys.stdlib_module_names)


def sources(path: Path) -> list[Path]:
    """Return a script, and the files beside it or in the project that it imports, directly or
    indirectly. They need not be imported, or importable, here."""
    folders = [path.parent, HERE, HERE / "forks"]
    if path.parent.name == "forks":
        folders.insert(1, path.parents[1])
    folders += [folder / "optimizers" for folder in folders]
    found = [path]
    for file in found:  # found grows in the loop
        for name in names_imported(file):
            there = [folder / f"{name}.py" for folder in folders]
            there = [place for place in there if place.exists()][:1]
            found += [place for place in there if place not in found]
    return found


def load(path: Path) -> type[train_gpt.Run]:
    """Import a script and return its class Run. UserError if it does not define one, or if this
    process has imported another file under its name, or under the name of a file it imports."""
    path = path.resolve()
    if path == OWN:
        return train_gpt.Run
    name = path.stem
    imported = getattr(sys.modules.get(name), "__file__", None)
    if imported is None or path != Path(imported).resolve():
        for source in sources(path):
            imported = getattr(sys.modules.get(source.stem), "__file__", source)
            if source.resolve() != Path(imported).resolve():
                remedy = f"rename {source.name}, or use the tools of its own project"
                raise UserError(f"{source} would replace {imported} here: {remedy}")
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        sys.path.insert(0, str(path.parent))
        try:
            spec.loader.exec_module(sys.modules[name])
        except Exception as error:
            del sys.modules[name]
            if isinstance(error, ModuleNotFoundError):
                places = "neither beside it, nor in the project and its forks/, nor a package"
                error.msg = f"{path} imports {error.name}, which is {places} of {sys.executable}"
            raise
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
    try:
        return core(run_class).parse_args(flags, run_class)
    except UserError as error:
        asked = re.match(r"--record (\S+): must be one of", str(error))
        if asked and not any(name.startswith(asked[1]) for name in run_class.records):
            for other in of_project():
                if f'\n    "{asked[1]}' in other.read_text("utf-8"):
                    raise UserError(f"--record {asked[1]}: {show(other)} has it") from error
        raise


def tokenizer_for(hp: Hyperparameters) -> GPT2 | HuggingFace | None:
    """Return the tokenizer of a run; None if its tokens have no text. UserError if it cannot be
    read."""
    try:
        return tokenizer_of(hp.tokenizer, hp.end_of_text)
    except ValueError as error:
        raise UserError(str(error)) from error
