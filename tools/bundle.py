"""One file that trains alone: a script, with the project's files that it imports.

    ./run.sh tools/bundle.py SCRIPT.py OUT.py

Each source is in OUT.py as it is, the script's at the end; the others run when imported.
A log of such a run begins with all the code that trained.
"""

import ast
import sys
from pathlib import Path

sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[:2]]  # tools, project
import script  # noqa: E402

from train_gpt import UserError, as_program, project_files  # noqa: E402

BEGINNING = '''"""{name} in one file. {about}

In front of it are modules that it imports: {modules}. tools/bundle.py made this.
"""

import importlib.abc
import importlib.util
import os
import sys


class Bundled(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A module whose source is in this file. It runs when it is first imported."""

    def __init__(self, name, source):
        self.name = name  # lines get this file's numbers, which Triton and tracebacks read
        self.source = "\\n" * (sys._getframe(1).f_lineno - 1) + source
        sys.modules.pop(name, None)
        sys.meta_path.insert(0, self)

    def find_spec(self, name, path, target=None):
        return importlib.util.spec_from_loader(name, self) if name == self.name else None

    def exec_module(self, module):
        module.__file__ = os.path.realpath(__file__)
        exec(compile(self.source, module.__file__, "exec", dont_inherit=True), vars(module))


'''


def bundle(path: Path) -> str:
    """Return a script and all that it imports of the project as one source. UserError."""
    _, *others = project_files(path)
    # A file's users import it and all that it imports, so their lists are longer: it comes first.
    others.sort(key=lambda other: len(project_files(other)))
    source = path.read_text("utf-8")
    if "\nfrom __future__" in source:
        raise UserError(f"{path} imports from __future__, which only a file's beginning can")
    about = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
    modules = ", ".join(other.name for other in others) or "none"
    whole = BEGINNING.format(name=path.name, about=about, modules=modules)
    for other in others:
        text = other.read_text("utf-8")
        if "'''" in text:
            raise UserError(f"{other} has three ' in a row, which end a source here: change them")
        whole += f"Bundled({other.stem!r}, r'''\n{text}''')\n\n"
    return whole + source


def write(words: list[str]) -> None:
    """Write the bundle of a script, the first word, to the file that is the second."""
    if len(words) != 2:
        raise UserError("two words are wanted, SCRIPT.py and OUT.py")
    path, out = script.find(words[0]), Path(words[1]).resolve()
    if out in project_files(path):
        raise UserError(f"{out} is a source itself: choose another name")
    out.write_text(bundle(path), "utf-8")
    print(f"wrote {out}, which trains alone")


if __name__ == "__main__":
    as_program("bundle.py", lambda: sys.argv[1:], write)
