"""What does this machine offer, and can a run start here? `./run.sh setup` ends with this report.

Its last line says what ./run.sh will train, or why no run can use this machine's GPUs.

memory.json has the GB that records reserve on one GPU, with their own settings and with flags that
need less. They were counted for an RTX 4090 ("small") and for an H100 ("large"), as BENCHMARKS.md
says, and not measured on a GPU. With several GPUs, a run needs less.
"""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import warnings
from collections import Counter
from functools import cache
from glob import glob
from pathlib import Path

import torch

import console
import script
import train_gpt
from train_gpt import BYTES_PER_TOKEN, FINEWEB, HERE, VISIBLE, UserError, fp8_supported

# A GPU's line in nvidia-smi's list. Without a memory of its own, as in GB10, it has [N/A].
GPU = re.compile(r"\S.*, (\d+ MiB|\[.+\])")

SMALL_GB = BYTES_PER_TOKEN * 49152 / 1e9  # on cards with less, memory_is_small

# Torch warns in several lines that it cannot use a GPU. `fault` says so in one.
warnings.filterwarnings("ignore", "CUDA initialization")


def nvidia_smi(flags: str = "") -> str:
    """Return what nvidia-smi prints, even if it fails; "" if there is none."""
    return subprocess.getoutput(f"nvidia-smi {flags}") if shutil.which("nvidia-smi") else ""


def gpus_and_complaints() -> tuple[list[str], list[str]]:
    """Return the name and the memory of each GPU that nvidia-smi lists, and what else it says."""
    lines = nvidia_smi("--query-gpu=name,memory.total --format=csv,noheader").splitlines()
    gpus = [line for line in lines if GPU.fullmatch(line)]
    return gpus, [line for line in lines if line.strip() and line not in gpus]


def number_of(gpus: int) -> str:
    return f"{gpus} GPU" if gpus == 1 else f"{gpus} GPUs"


def driver() -> str:
    """Return the version of the GPUs' driver, and the newest CUDA that it supports."""
    text = nvidia_smi()
    version = re.search(r"(?:Driver|KMD) Version: *([\d.]+)", text)
    cuda = re.search(r"CUDA (UMD )?Version: *([\d.]+)", text)
    known = version[1] if version else "unknown"
    return f"{known} (for CUDA up to {cuda[2] if cuda else 'an unknown version'})"


def torch_here() -> str:
    """Return torch's version, and the CUDA that it was built with."""
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    return f"{torch.__version__} ({built})"


def fault() -> str:
    """Return why torch cannot use the GPUs that nvidia-smi lists, and a remedy; "" if it can, if
    there are none, or if CUDA_VISIBLE_DEVICES hides them."""
    hidden = not re.match(VISIBLE, os.environ.get("CUDA_VISIBLE_DEVICES", "0"))
    if hidden or torch.cuda.is_available() or not (gpus := gpus_and_complaints()[0]):
        return ""
    if torch.version.cuda:
        remedy = "update the driver, or install a torch with an older CUDA by that Python's pip"
        try:
            torch.cuda.init()
        except RuntimeError as error:
            if "too old" not in str(error):
                remedy = f"torch says: {error}"
    else:
        remedy = "delete .venv if run.sh made it, or install a torch with CUDA by that Python's pip"
    found = f"{sys.executable} has torch {torch_here()}, the driver is {driver()}"
    return f"torch cannot use the {number_of(len(gpus))} of this machine: {found}: {remedy}"


def compiler_fault() -> str:
    """Return why torch.compile finds no compiler here, and a remedy; "" if it finds one. On a GPU,
    Triton builds its launcher in C. Without one, Inductor writes C++. Both include Python.h, which
    is in a package of its own in Debian."""
    on_gpu = torch.cuda.is_available()
    variable, language, package = ("CC", "c", "gcc") if on_gpu else ("CXX", "c++", "g++")
    usual = next(filter(shutil.which, (package, "clang")), package)
    compiler = os.environ.get(variable, usual)
    include = sysconfig.get_path("include", "posix_prefix")
    command = [compiler, "-fsyntax-only", "-x", language, "-I", include, "-"]
    options = {"input": b"#include <Python.h>\n", "capture_output": True}
    if shutil.which(compiler) and not subprocess.run(command, **options).returncode:
        return ""
    packages = f"{package} python{sys.version_info.major}.{sys.version_info.minor}-dev"
    remedy = f"apt-get install {packages} (Debian, Ubuntu), or name a compiler with {variable}=path"
    return f"{compiler} cannot compile Python.h, or is missing; torch.compile needs it: {remedy}"


@cache
def counted() -> dict[str, dict[str, dict[str, float]]]:
    """Return the table of memory.json: record, flags, card, GB."""
    return json.loads(Path(__file__).with_name("memory.json").read_text("utf-8"))


def gigabytes() -> float | None:
    """Return the memory of a GPU of this machine; None if GPUs differ, or share their memory with
    the CPU or, as MIG, with each other."""
    sizes = {re.sub(r".*, ", "", gpu) for gpu in gpus_and_complaints()[0]}
    if len(sizes) != 1 or "MIG" in os.environ.get("CUDA_VISIBLE_DEVICES", ""):
        return None
    found = re.fullmatch(r"(\d+) MiB", *sizes)
    return found and int(found[1]) * 2**20 / 1e9


def memory_of(path: Path, record: str) -> str:
    """Return what a record reserves on one GPU, beside what a GPU here has; "" if it was not
    counted for such a card, and for scripts outside the project."""
    known = counted().get(record, {})
    has = known and path in script.of_project() and gigabytes()  # nvidia-smi may take seconds
    card, name = ("small", "an RTX 4090") if (has or 0) < SMALL_GB else ("large", "an H100")
    rows = {flags or "its own settings": row[card] for flags, row in known.items() if card in row}
    if not (has and rows):
        return ""
    sizes = ", or ".join(f"{needs} GB with {flags}" for flags, needs in rows.items())
    return f"{record} reserves {sizes} on one GPU, by count for {name}; this one has {has:.1f} GB"


def kernels_here() -> str:
    """Return whether the Triton kernels can run, or why not."""
    try:
        import gpu_kernels
    except ImportError as error:
        return f"none: {error}"
    triton_runs = torch.cuda.is_available() or gpu_kernels.triton.knobs.runtime.interpret
    works = "works" if triton_runs else "wants a CUDA GPU"
    return f"Triton {gpu_kernels.triton.__version__} {works}"


def rows() -> dict[str, str]:
    """Return what this machine has, by name."""
    gpus, complaints = gpus_and_complaints()
    kinds = [f"{n} x {gpu}" for gpu, n in Counter(gpus).items()]
    shards = {kind: len(glob(f"{FINEWEB}_{kind}_*.bin")) for kind in ("train", "val")}
    found = {
        "Python": f"{platform.python_version()}, {sys.executable}",
        "torch": torch_here(),
        "driver": driver() if gpus else "nvidia-smi lists no GPU",
        "GPUs": "; ".join(kinds + complaints) or "none",
        "processor": f"{os.cpu_count()} cores, {platform.machine()}",
        "kernels": kernels_here(),
        "compiler": compiler_fault() or "works",
        "FineWeb": f"{shards['train']} train and {shards['val']} validation shards",
        "free disk": f"{shutil.disk_usage(HERE).free / 1e9:.1f} GB in {HERE}",
    }
    if torch.cuda.is_available():
        works = fp8_supported(torch.device("cuda"))
        found["FP8"] = "works" if works else "wants compute capability 8.9: the head is in bfloat16"
        if text := memory_of(script.OWN, train_gpt.Run.default_record):
            found["memory"] = text
    if os.path.exists("/dev/shm"):  # not on macOS
        found["shared memory"] = f"{shutil.disk_usage('/dev/shm').free / 1e9:.1f} GB free"
    return found


@console.program("run.sh")
def main(_: list[str]) -> None:
    """Print what this machine has. UserError if it has GPUs that torch, or a run, cannot use."""
    for name, value in rows().items():
        print(f"{name:15}{value}")
    if reason := fault() or (torch.cuda.is_available() and compiler_fault()):
        raise UserError(reason)
    count = torch.cuda.device_count()
    what = f"on {number_of(count)}" if count else "the demo, without a GPU"
    print("run.sh: ready to train", what)


if __name__ == "__main__":
    main()
