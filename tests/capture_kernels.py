"""Let torch.compile take every use of the kernels into its graphs, without a GPU and without a run.

A stand-in for Triton's driver says that there is an H100. Graphs answer with zeros in the shapes of
their results. Prints JSON: of each use, how many launches its graphs hold, forward and backward.
"""

import json
import sys
from pathlib import Path

import torch.utils._triton

torch.utils._triton.has_triton = lambda: True  # asked when torch.compile is imported

import triton  # noqa: E402
from functorch.compile import make_boxed_func  # noqa: E402
from torch._dynamo.backends.common import aot_autograd  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_gpt  # noqa: E402


class Driver:
    """What torch.compile asks to find out which arguments a kernel writes to."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


launches = []


def count(graph, inputs):
    nodes = graph.graph.nodes
    launches.append(sum("TritonKernelWrapper" in type(node.target).__name__ for node in nodes))
    results = [getattr(node, "meta", {}).get("val") for node in graph.graph.output_node().args[0]]
    shapes = [None if v is None else (tuple(v.shape), v.dtype) for v in results]
    return make_boxed_func(lambda *arguments: [s and torch.zeros(s[0], dtype=s[1]) for s in shapes])


def captured(function, *arguments) -> list[int]:
    """Launches in the graphs of a call and its backward pass; a graph break raises."""
    launches.clear()
    backend = aot_autograd(fw_compiler=count, bw_compiler=count)
    out = torch.compile(function, backend=backend, dynamic=False, fullgraph=True)(*arguments)
    if isinstance(out, torch.Tensor) and out.requires_grad:
        out.sum().backward()
    return list(launches)


triton.runtime.driver.set_active(Driver())
train_gpt.LOSS_ROWS = 256
for kernel in train_gpt.KERNELS.values():
    kernel.use = True
half = {"dtype": torch.bfloat16}
x, w_in, w_out = (
    torch.randn(s, **half, requires_grad=True) for s in ((1, 256, 64), (256, 64), (64, 256))
)
found = {"mlp": captured(train_gpt.relu2_mlp, x, w_in, w_out)}
found["muon"] = captured(train_gpt.zeropower_via_newtonschulz5, torch.randn(4, 64, 64))
head, targets = torch.randn(512, 64, **half), torch.zeros(256, dtype=torch.int64)
rows, grad_w = x.detach()[0], torch.zeros(512, 64)
with torch.no_grad():
    for scales in (None, (2.0, 512.0, 2.0**19)):
        weight = [train_gpt.to_fp8(head, 1.0, torch.float8_e4m3fn)] * 2 if scales else head
        arguments = rows, weight, targets, 15.0, 1 / 256, grad_w, scales
        found["loss in float8" if scales else "loss"] = captured(train_gpt.loss_chunk, *arguments)
print(json.dumps(found))
