"""Compile gpu_kernels.py's kernels for cards that need not be here:

    python tests/gpu_code.py h100 4090

Each kernel of each record is launched as in a step, with tensors of full size that have no numbers.
Instead of a launch, Triton compiles it. A line of JSON says what it takes: bytes of shared memory
and of stack, registers, instructions, and the types of its arguments.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

HERE = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(HERE), str(HERE / "forks")]
import gpu_kernels  # noqa: E402
import train_gpt  # noqa: E402
import train_gpt_2026  # noqa: E402
import train_gpt_2026_08  # noqa: E402

# Compute capability, kilobytes of shared memory for a program, multiprocessors.
CARDS = {
    "h100": (90, 227, 132),
    "a100": (80, 163, 108),
    "4090": (89, 99, 128),
    "3090": (86, 99, 82),
    "5090": (120, 99, 170),
    "b200": (100, 227, 148),
}
SCRIPTS = train_gpt, train_gpt_2026, train_gpt_2026_08


class Driver:
    """Triton's driver, of a GPU to compile for."""

    def __init__(self, card: str):
        capability, kilobytes, processors = CARDS[card]
        sizes = {"max_shared_mem": kilobytes << 10, "multiprocessor_count": processors}
        self.utils = SimpleNamespace(get_device_properties=lambda device: sizes)
        self.get_current_target = lambda: GPUTarget("cuda", capability, 32)
        self.get_current_device = lambda: card
        self.get_current_stream = lambda device: 0


def taken(kernel) -> dict:
    """Return what a compiled kernel takes of a card."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        command = [tool, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = {name: int(count) for name, count in re.findall(r"([A-Z]+):(\d+)", text)}
    return {
        "shared": kernel.metadata.shared + usage["SHARED"],
        "registers": usage["REG"],
        "stack": usage["STACK"] + usage["LOCAL"],
        "instructions": sorted(set(re.findall(r"wgmma|mma\.sync|\.f64", kernel.asm["ptx"]))),
        "types": sorted(set(kernel.src.signature.values())),
    }


def report(kernel: JITFunction, arguments: tuple, grid, options: dict) -> None:
    """Compile a kernel for these arguments, and print what it takes."""
    row = taken(kernel.warmup(*arguments, grid=grid, **options))
    print(json.dumps({"kernel": kernel.__name__} | row), flush=True)


JITFunction.__getitem__ = lambda kernel, grid: (
    lambda *arguments, **options: report(kernel, arguments, grid, options)
)


def compile_all(card: str) -> None:
    """Launch the kernels of all records on a card, forward and backward."""
    capability, kilobytes, processors = CARDS[card]
    triton.runtime.driver.set_active(Driver(card))
    gpu_kernels.card = lambda device: (processors, kilobytes)
    train_gpt.fp8_supported = lambda device: capability >= 89
    train_gpt.memory_is_small = lambda device: kilobytes < 100
    device = torch.device("meta")
    for script in SCRIPTS:
        for hp in script.RECORDS.values():
            with device:
                model = script.GPT(hp)
            for name in model.kernels:
                if name.startswith("fp8") and capability < 89:
                    continue
                case = gpu_kernels.example(name, model, hp, device, torch.bfloat16, hp.seq_len)
                function = gpu_kernels.functions(model, name)[0]
                gpu_kernels.outcome(function, case, {name})


if __name__ == "__main__":
    for card in sys.argv[1:]:
        compile_all(card)
