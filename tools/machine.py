"""What does this machine have, and can a run start here? `./run.sh setup` ends with this report.

Its last line says what ./run.sh will train, or why torch cannot use the GPUs that are here.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import warnings
from collections import Counter
from glob import glob
from pathlib import Path

import torch

from console import program
from train_gpt import FINEWEB, HERE, UserError, fp8_supported

# A GPU's line in nvidia-smi's list. Without a memory of its own, as in GB10, it has [N/A].
GPU = re.compile(r"\S.*, (\d+ MiB|\[.+\])")

# Torch warns in several lines that it cannot use a GPU. `fault` says so in one.
warnings.filterwarnings("ignore", "CUDA initialization")


def nvidia_smi(flags: str = "") -> str:
    """Return what nvidia-smi prints, also if it fails; "" if there is none."""
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
    hidden = not re.match(r"\d|GPU-|MIG-", os.environ.get("CUDA_VISIBLE_DEVICES", "0"))
    if hidden or torch.cuda.is_available() or not (gpus := gpus_and_complaints()[0]):
        return ""
    venv = HERE / ".venv"
    if torch.version.cuda:
        remedy = "update the driver, or install a torch with an older CUDA by that Python's pip"
        try:
            torch.cuda.init()
        except RuntimeError as error:
            if "too old" not in str(error):
                remedy = f"torch says: {error}"
    elif venv.resolve() in Path(torch.__file__).resolve().parents:
        remedy = f"delete {venv}, and ./run.sh installs a torch with CUDA"
    else:
        remedy = "install a torch with CUDA there, or name another Python with PYTHON=path"
    found = f"{sys.executable} has torch {torch_here()}, the driver is {driver()}"
    return f"torch cannot use the {number_of(len(gpus))} of this machine: {found}: {remedy}"


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
        "FineWeb": f"{shards['train']} train and {shards['val']} validation shards",
        "free disk": f"{shutil.disk_usage(HERE).free / 1e9:.1f} GB in {HERE}",
    }
    if torch.cuda.is_available():
        works = fp8_supported(torch.device("cuda"))
        found["FP8"] = "works" if works else "wants compute capability 8.9: the head is in bfloat16"
    if os.path.exists("/dev/shm"):  # not on macOS
        found["shared memory"] = f"{shutil.disk_usage('/dev/shm').free / 1e9:.1f} GB free"
    return found


@program("run.sh")
def main(_: list[str]) -> None:
    """Print what this machine has. UserError if it has GPUs that torch cannot use."""
    for name, value in rows().items():
        print(f"{name:15}{value}")
    if reason := fault():
        raise UserError(reason)
    count = torch.cuda.device_count()
    what = f"on {number_of(count)}" if count else "the demo, without a GPU"
    print("run.sh: ready to train", what)


if __name__ == "__main__":
    main()
