"""Compile every kernel launch of the record for a GPU that is not here, and print what it needs.

    python tests/build_kernels.py 90     # compute capability: 90 is an H100, 89 an RTX 4090

The record's functions run on meta tensors, and each launch is compiled in place of running. Prints
JSON, a row a launch: kernel, shared (bytes), registers, spilled (bytes a thread) and instructions.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

import train_gpt  # noqa: E402

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float8_e5m2: "*fp8e5",
    torch.int64: "*i64",
}


class Launch:
    """kernel[grid](...) compiles the kernel as Triton would for these arguments."""

    def __init__(self, kernel, capability: int, rows: list):
        self.kernel, self.capability, self.rows = kernel, capability, rows

    def __getitem__(self, grid):
        return self.build

    def build(self, *arguments, num_warps: int, num_stages: int = 3, **more) -> None:
        arguments = dict(zip(self.kernel.arg_names, arguments, strict=False)) | more
        signature, constants, aligned = {}, {}, {}
        for i, parameter in enumerate(self.kernel.params):
            value = arguments[parameter.name]
            if parameter.is_constexpr or (isinstance(value, int) and value == 1):
                signature[parameter.name], constants[(i,)] = "constexpr", value
            elif isinstance(value, float):
                signature[parameter.name] = "fp32"
            else:
                tensor = isinstance(value, torch.Tensor)
                signature[parameter.name] = TYPES[value.dtype] if tensor else "i32"
                if tensor or value % 16 == 0:
                    aligned[(i,)] = [["tt.divisibility", 16]]
        source = triton.compiler.ASTSource(self.kernel, signature, constants, aligned)
        options = {"num_warps": num_warps, "num_stages": num_stages}
        built = triton.compile(source, GPUTarget("cuda", self.capability, 32), options)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(built.asm["cubin"])
            file.flush()
            command = [CUOBJDUMP, "-res-usage", file.name]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        usage = dict(re.findall(r"([A-Z]+):(\d+)", text))
        self.rows.append(
            {
                "kernel": self.kernel.fn.__name__,
                "shared": built.metadata.shared + int(usage["SHARED"]),
                "registers": int(usage["REG"]),
                "spilled": int(usage["STACK"]) + int(usage["LOCAL"]),
                "instructions": sorted(
                    set(re.findall(r"wgmma|mma\.sync|cp\.async", built.asm["ptx"]))
                ),
            }
        )


def main(capability: int) -> None:
    rows, hp, meta = [], train_gpt.RECORDS["2025-01-26_BatchSize"], torch.device("meta")
    train_gpt.shared_memory_is_small = lambda device: capability in (86, 89, 120)
    train_gpt.activation_dtype = lambda device: torch.bfloat16
    train_gpt.LOSS_CHUNK["meta"] = train_gpt.LOSS_CHUNK["cuda"]
    for name in ("softcap_kernel", "relu2_kernel", "symmetric_kernel"):
        setattr(train_gpt, name, Launch(getattr(train_gpt, name), capability, rows))
    logits, targets, cap, scale, _ = train_gpt.loss_example(hp, meta)
    for grads in (None, logits, torch.empty_like(logits, dtype=torch.float8_e5m2)):
        train_gpt.fused_loss(logits, targets, cap, scale, grads)
    x, *weights = train_gpt.mlp_example(hp, meta)
    out = train_gpt.FusedMLP.apply(x, *weights)
    out.backward(torch.empty_like(out))
    a, *others = train_gpt.symmetric_example(hp, meta)
    train_gpt.fused_symmetric(a)
    train_gpt.fused_symmetric(a, *others)
    print(json.dumps(rows))


if __name__ == "__main__":
    main(int(sys.argv[1]))
