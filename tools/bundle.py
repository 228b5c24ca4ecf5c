"""Bundle a training script and the project's files that it imports into one file.

    ./run.sh tools/bundle.py SCRIPT.py OUT.py [--record NAME] [--SETTING VALUE ...]

Without flags, OUT.py trains what SCRIPT.py trains with these. The file has one record: NAME, or the
script's default, with the settings. It holds each source unchanged, which runs when it is imported.
Its log begins with all that trained. OUT.py must be new, or an older bundle. A package beside the
script, in a folder of its own, is refused.
"""

from dataclasses import replace
from pathlib import Path

import console
import script
from train_gpt import UserError

MADE = "made by tools/bundle.py"
BEGINNING = '''"""{name} and the modules that it imports, in one file: {made}."""

import dataclasses
import importlib.abc
import importlib.util
import os
import sys


class Bundled(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A module whose source is in this file. It runs when it is first imported."""

    def __init__(self, name, source):
        self.name = name  # for Triton and tracebacks, lines get this file's numbers
        self.source = "\\n" * (sys._getframe(1).f_lineno - 1) + source
        sys.modules.pop(name, None)
        sys.meta_path.insert(0, self)

    def find_spec(self, name, path, target=None):
        return importlib.util.spec_from_loader(name, self) if name == self.name else None

    def exec_module(self, module):
        module.__file__ = os.path.realpath(__file__)
        exec(compile(self.source, module.__file__, "exec", dont_inherit=True), vars(module))


'''


ENDING = '''script = importlib.import_module({script!r})


class Run(script.Run):
    """What this file trains without flags."""

    records = {{
        {record!r}: dataclasses.replace(script.Run.records[{record!r}], {settings})
    }}
    default_record = {record!r}


if __name__ == "__main__":
    importlib.import_module({core!r}).main(run=Run)
'''


def bundle(path: Path, ending: str) -> str:
    """Return the source of a script and all that it imports from the project, as modules, and at
    the end a source that can import them."""
    whole = BEGINNING.format(name=path.name, made=MADE)
    for module in script.sources(path):
        # Three ' would end the string, so they become a separate string.
        text = module.read_text("utf-8").replace("'''", "''' \"'''\" r'''")
        whole += f"Bundled({module.stem!r}, r'''\n{text}''')\n\n"
    return whole + ending


def ending_of(path: Path, flags: list[str]) -> str:
    """Return the end of a bundle that trains by itself what the script does with these flags."""
    run_class = script.load(path)
    hp, record = script.parse(path, ["--record", run_class.default_record, *flags])
    usual, hp = run_class.records[record], replace(hp, run_id="", resume=False)
    changed = [f"{k}={v!r}" for k, v in vars(hp).items() if v != getattr(usual, k)]
    core = script.core(run_class).__name__
    return ENDING.format(script=path.stem, record=record, settings=", ".join(changed), core=core)


@console.program("bundle.py")
def main(words: list[str]) -> None:
    """Bundle the script that is the first word into the file that is the second."""
    if "--help" in words:
        return print(__doc__)
    if len(words) < 2 or words[1].startswith("-"):
        raise UserError("expected SCRIPT.py, OUT.py, and then flags")
    path, out = script.find(words[0]), Path(words[1]).resolve()
    if out in script.sources(path):
        raise UserError(f"{out} is one of the sources: choose another name")
    begins = out.read_text("utf-8", errors="replace") if out.exists() else MADE
    if MADE not in begins.split("\n")[0]:
        raise UserError(f"{out} exists, and is no bundle: choose another name")
    whole = bundle(path, ending_of(path, words[2:]))
    names = script.other_packages(whole)
    for folder in [path.parent / name for name in names]:
        if any(folder.glob("*.py")):
            remedy = f"copy what it needs of that into files beside {path.name}"
            raise UserError(f"{path} imports {folder}, a package, which no bundle holds: {remedy}")
    out.write_text(whole, "utf-8")
    print(f"wrote {out}, which needs no other Python file of the project")
    if names:
        rule = "rule 4 of the optimizer benchmark wants their code in the file"
        print(f"it imports {', '.join(names)}: {rule}")


if __name__ == "__main__":
    main()
