"""Set up and train, with one command on any machine.

    ./run.sh [SCRIPT.py] [flags]        train: a record on GPUs, a demo of 1 to 2 minutes without.
                                        SCRIPT.py is a fork; the default is train_gpt.py
    ./run.sh [SCRIPT.py] --runs N       make N runs with seeds from --seed on, and print statistics;
                                        weights are saved only with --keep 1 or more
    ./run.sh [SCRIPT.py] --seconds N    train for about N seconds; also with --runs and --compare
    ./run.sh --compare "A" "B" [flags]  make runs with flags A and with flags B in turn, until it is
                                        clear whether B helps; A and B may begin with a SCRIPT.py
    ./run.sh tools/NAME.py [flags]      run this tool
    ./run.sh setup                      only set up, and print what this machine has
    ./run.sh test [PATH] [flags]        run the tests of PATH (slow, gpu or a file), with flags of
                                        pytest's; alone, all but the slow ones in up to 4 processes
    ./run.sh [SCRIPT.py] --help         print this page, and the flags of a script

What a command needs is first installed into .venv, unless python3 or a .venv of yours has it.
NPROC=n uses n GPUs. PYTHON=path names another Python (3.11 or later), also for making .venv.
"""

import fcntl
import hashlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
VENV = HERE / ".venv"
STAMP = VENV / ".made-by-run.sh"  # the requirements that .venv has; empty until it is complete
THIS, IN_VENV = sys.executable, str(VENV / "bin/python")
NAMED = os.environ.get("PYTHON")  # if there is none, THIS is python3

COMMANDS = {  # what starts, and in which folders it needs a requirements.txt beside the project's
    "--compare": ["tools/compare.py", "tools"],
    "--runs": ["tools/launch.py", "tools"],  # which ends with statistics
    **dict.fromkeys(["--seconds", "train"], ["tools/launch.py"]),
    "setup": ["tools/machine.py"],
    "test": ["pytest", "tools", "tests"],
}
TOOLS = {  # such folders for tools/NAME.py
    **dict.fromkeys(["bench", "bundle", "evaluate", "history", "machine", "records"], []),
    **dict.fromkeys(["compare", "export", "leaderboard", "submission"], ["tools"]),
    "sample": ["data"],
}


def read(file: Path) -> str:
    return file.read_text("utf-8") if file.exists() else ""


def has_gpu() -> bool:
    return "GPU 0: " in subprocess.getoutput("nvidia-smi -L")  # it may also say that it found none


def by_name(text: str) -> dict[str, str]:
    """Return the lines of a requirements.txt that count on this system, by their packages."""
    lines = [line for line in text.split("\n") if sys.platform == "linux" or "linux" not in line]
    return {name[0]: line for line in lines if (name := re.match(r"[\w-]+", line))}


def missing(names: list[str]) -> list[str]:
    """Return the packages that this Python lacks. It imports none: torch would take seconds."""
    lacking = []
    for name in names:
        versions = [re.findall(r"\d+", str(found.version)) for found in distributions(name=name)]
        if not versions or (name == "torch" and [*map(int, versions[0][:2])] < [2, 11]):
            lacking.append(name.replace("torch", "torch 2.11"))
    # It downloads FineWeb, for GPUs alone: NVIDIA's, or AMD's, whose driver makes this file.
    if "huggingface-hub" in lacking and not (has_gpu() or os.path.exists("/dev/kfd")):
        lacking.remove("huggingface-hub")
    return lacking


def lacks(python: str, wanted: dict[str, str]) -> list[str]:
    """Return which of these packages this Python, or .venv's, lacks."""
    if python != IN_VENV:
        return missing([*wanted])
    made_of = f"executable = {os.path.realpath(sys._base_executable)}\n"
    if not os.path.exists(python) or (NAMED and made_of not in read(VENV / "pyvenv.cfg")):
        return ["Python"]
    if STAMP.exists():  # which lists a torch that is not in .venv by its name alone
        known = by_name(read(STAMP))
        return [name for name, line in wanted.items() if known.get(name) not in (line, name)]
    code = f"import sys; sys.path.insert(0, {str(HERE / 'tools')!r}); import setup; "
    code += f"print('\\n'.join(setup.missing({[*wanted]})), end='')"
    done = subprocess.run([python, "-P", "-c", code], capture_output=True, text=True)
    return ["Python 3.11"] if done.returncode else done.stdout.splitlines()


def choose(folders: list[str]) -> str:
    """Return a Python that has, or now gets, what the project and these folders require."""
    files = [HERE / folder / "requirements.txt" for folder in ("", *folders)]
    wanted = by_name("\n".join(map(read, files)))
    pythons = [THIS, IN_VENV] if NAMED else [IN_VENV, THIS]
    for python in pythons:
        if not lacks(python, wanted):
            return python
    if VENV.is_symlink() or (any(VENV.glob("*")) and not STAMP.exists()):
        found = f"{pythons[0]} lacks {', '.join(lacks(pythons[0], wanted))}, and {VENV} is"
        helps = shlex.join([pythons[0], "-m", "pip", "install", *(f"-r{file}" for file in files)])
        helps += f" (or move {VENV} away, or name another Python with PYTHON=path)"
        sys.exit(f"run.sh: {found} not run.sh's to change. This helps: {helps}")
    waits = "run.sh: waiting for another run.sh, which is installing"
    signal.signal(signal.SIGALRM, lambda *_: print(waits, file=sys.stderr))
    with open(HERE / ".run.lock", "w") as lock:
        os.set_inheritable(lock.fileno(), True)  # pip holds it, too, and may outlive this
        signal.alarm(2)
        with suppress(OSError):  # some file systems have no locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        signal.alarm(0)
        if lacks(IN_VENV, wanted):
            install(wanted)
    return IN_VENV


def install(wanted: dict[str, str]) -> None:
    """Install what .venv lacks of these packages. It is made first, if it is not complete."""
    options = {"stdout": sys.stderr, "close_fds": False}  # what pip prints is no command's output
    VENV.mkdir(exist_ok=True)
    known, lacking = by_name(read(STAMP)), lacks(IN_VENV, wanted)
    if not known or lacking == ["Python"]:
        print(f"run.sh: making a new {VENV}", file=sys.stderr)
        STAMP.write_text("")
        subprocess.run(["rm", "-rf", *(path for path in VENV.iterdir() if path != STAMP)])
        subprocess.run([sys._base_executable, "-P", "-m", "venv", VENV], check=True, **options)
        known = {} if missing(["torch"]) else {"torch": "torch"}
        if known:  # this Python lends its torch
            folders = [path for path in sys.path if path.endswith("-packages")]
            line = f"import site; list(map(site.addsitedir, {folders}))"
            next(VENV.glob("lib/*/site-packages")).joinpath("torch.pth").write_text(line)
        lacking = wanted.keys() - known.keys()
    new = {name: line for name, line in wanted.items() if name in lacking}
    print(f"run.sh: installing {', '.join(new)} into {VENV} (once)", file=sys.stderr)
    pip = [IN_VENV, "-P", "-m", "pip", "--disable-pip-version-check", "install"]
    if "torch" in new and not has_gpu():  # a smaller build; if this fails, pip's own follows
        words = ["--retries=1", "--timeout=20", "--index-url=https://download.pytorch.org/whl/cpu"]
        subprocess.run([*pip, *words, new["torch"]], stderr=subprocess.DEVNULL, **options)
    subprocess.run([*pip, *new.values()], check=True, **options)
    STAMP.write_text("\n".join((known | new).values()))


def start(python: str, *words) -> None:
    """Start a program in place of this one."""
    cpu = re.findall(r"(?m)^(?:flags|Features).*", read(Path("/proc/cpuinfo")))[:1]
    folders = [*map(str, Path(python).parents[1].glob("lib/*/site-packages")), *sys.path]
    torch = [found.version for found in distributions(name="torch", path=folders)][:1]
    limits = [os.environ.get(name) for name in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")]
    made_for = hashlib.sha256(repr([os.uname().machine, cpu, torch, limits]).encode()).hexdigest()
    if os.access(HERE, os.W_OK):  # /tmp may be emptied; another CPU's code computes wrong numbers
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{HERE}/.cache/inductor-{made_for[:12]}")
        os.environ.setdefault("TRITON_CACHE_DIR", f"{HERE}/.cache/triton")
    # OpenMP's threads spin while they wait for each other. On a busy machine, a long spin makes a
    # step several times as long; on an idle one, a short spin costs a little (BENCHMARKS.md).
    running = []
    for _ in range(3):
        running += re.findall(r" (\d+)/", read(Path("/proc/loadavg")))  # 2/80: 2 threads of 80
        time.sleep(0.01)
    if running and "1" not in running and not os.environ.get("OMP_WAIT_POLICY"):
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    os.execv(python, [python, *map(str, words)])


def main(words: list[str]) -> None:
    first = words[0].removeprefix("./").removesuffix(".py") if words else ""
    flags = [word.split("=")[0] for word in words]
    if first in ("setup", "test"):
        program, *folders = COMMANDS[first]
        words = words[1:]
    elif first.split("/")[0] == "tools":
        if (name := first.removeprefix("tools/")) not in TOOLS:
            sys.exit(f"run.sh: there is no tool {words[0]}; there are {', '.join(TOOLS)}")
        program, folders, words = f"tools/{name}.py", TOOLS[name], words[1:]
    else:
        command = next((key for key in COMMANDS if key[0] == "-" and key in flags), "train")
        program, *folders = COMMANDS[command]
        if "--help" in flags or "-h" in flags:
            if command == "--compare":
                return print(read(HERE / program).split('"""')[1])
            print(__doc__, flush=True)
    if program != "pytest":
        start(choose(folders), HERE / program, *words)
    if not words and not has_gpu():  # whose memory fits one process
        # Each process begins with neighbouring tests, which share fixtures, then takes others'.
        words = ["-n", "auto", "--maxprocesses", "4", "--dist", "worksteal"]
    elif words and os.path.isdir(f"{HERE}/tests/{words[0]}"):
        words[0] = f"tests/{words[0]}"
    for index, word in enumerate(words):  # paths of the current folder
        if re.search(r"/|\.py", word) and os.path.exists(word.split("::")[0]):
            words[index] = os.path.abspath(word)
    os.chdir(HERE)  # where pyproject.toml names the tests
    start(choose(folders), "-P", "-m", "pytest", *words)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # --help | head
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # which a job in the background has
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # end at once, while pip cleans up
    try:
        main(sys.argv[1:])
    except OSError as error:
        sys.exit(f"run.sh: {error}: copy the project to a folder that you can write to")
    except subprocess.CalledProcessError as error:
        helps = {"venv": ": apt-get install python3-venv (Debian, Ubuntu)"}.get(error.cmd[3], "")
        sys.exit(f"run.sh: {error.cmd[3]} failed, see above{helps}")
