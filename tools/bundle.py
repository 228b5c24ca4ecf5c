"""Bundle a training script and the project's files that it imports into one file.

    ./run.sh tools/bundle.py SCRIPT.py OUT.py

OUT.py must be new, or an older bundle. It holds each source unchanged, the script's at the end;
the others run when they are imported. Its log begins with all the code that trained.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out

import console
import script
from train_gpt import UserError, regular

MADE = "made by tools/bundle.py"
BEGINNING = '''"""{name} and the modules that it imports, in one file: {made}."""

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


def bundle(path: Path, wrapper: str = "") -> str:
    """Return the source of a script and all that it imports from the project. A wrapper is source
    that stands at the end and can import the script. UserError if it cannot be one file."""
    modules, source = script.sources(path), wrapper
    if not wrapper:
        source = modules.pop(0).read_text("utf-8")
    if "\nfrom __future__" in source:
        raise UserError(f"{path} imports from __future__, which must begin a file")
    whole = BEGINNING.format(name=path.name, made=MADE)
    for module in modules:
        # Three ' would end the string, so they become a separate string.
        text = module.read_text("utf-8").replace("'''", "''' \"'''\" r'''")
        whole += f"Bundled({module.stem!r}, r'''\n{text}''')\n\n"
    return whole + source


@console.program("bundle.py")
def main(words: list[str]) -> None:
    """Bundle the script that is the first word into the file that is the second."""
    if "--help" in words:
        return print(__doc__)
    if len(words) != 2:
        raise UserError("expected two words, SCRIPT.py and OUT.py")
    path, out = script.find(words[0]), Path(words[1]).resolve()
    if out in script.sources(path):
        raise UserError(f"{out} is one of the sources: choose another name")
    begins = regular(out).read_text("utf-8", errors="replace") if out.exists() else MADE
    if MADE not in begins.split("\n")[0]:
        raise UserError(f"{out} exists, and is no bundle: choose another name")
    out.write_text(bundle(path), "utf-8")
    print(f"wrote {out}, which needs no other Python file of the project")
    if names := script.not_found(path):
        print(f"it imports {', '.join(names)}: not in it, and not found here")


if __name__ == "__main__":
    main()
