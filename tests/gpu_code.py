"""Compile, without a GPU, kernels that one would run: of a layer, loss or Muon's update.

    python tests/gpu_code.py h100 2025-01-26_BatchSize on layer loss muon

The arguments are one of CARDS, a record of train_gpt.py or of a fork of 2026, --kernels on or off,
and parts: `square` is Muon's update of square matrices alone.

A line of JSON for each kernel, in each configuration that a GPU would choose from, has its graph,
its name, and one of three: what it takes (bytes of shared memory and of stack, registers,
instructions); "too large", if it does not fit the card; or "error", if it does not build.

torch.compile captures the graphs on a CPU. Their values become fake tensors of a made-up GPU,
Inductor lowers them to Triton, and Triton compiles that to machine code. Nothing is computed.
"""

import json
import logging
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.utils._triton

# Compute capability, bytes of shared memory for a program, gigabytes, multiprocessors.
CARDS = {
    "h100": ((9, 0), 232448, 80, 132),
    "a100": ((8, 0), 166912, 80, 108),
    "4090": ((8, 9), 101376, 24, 128),
    "3090": ((8, 6), 101376, 24, 82),
    "5090": ((12, 0), 101376, 32, 170),
    "b200": ((10, 0), 232448, 180, 148),
}
(major, minor), shared, memory, processors = CARDS[sys.argv[1]]
CARD = SimpleNamespace(  # what torch.cuda.get_device_properties would return
    name=sys.argv[1],
    type="cuda",
    index=0,
    major=major,
    minor=minor,
    multi_processor_count=processors,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048 if minor == 0 else 1536,
    max_threads_per_block=1024,
    warp_size=32,
    total_memory=memory << 30,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=shared,
    L2_cache_size=50 << 20,
    gcnArchName="",
)
CAPABILITY = 10 * major + minor
lowering = False  # there is a GPU while a graph is lowered, not while it is captured

torch.utils._triton.has_triton = lambda: True  # read when torch.compile is imported
torch.utils._triton.has_triton_package = lambda: True
torch.utils._triton._device_supports_tma = lambda: major >= 9
torch.cuda.is_available = lambda: lowering
torch.cuda.device_count = lambda: 1
torch.cuda.current_device = lambda: 0
torch.cuda.get_device_properties = lambda *device: CARD
torch.cuda.get_device_capability = lambda *device: (major, minor)
torch.version.cuda = torch.version.cuda or "13.0"

import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler.errors import CompilationError  # noqa: E402
from triton.runtime.errors import OutOfResources, PTXASError  # noqa: E402

TARGET = GPUTarget("cuda", CAPABILITY, 32)


class Driver:
    """Triton's driver, of a GPU to compile for."""

    utils = SimpleNamespace(
        get_device_properties=lambda device: {
            "max_shared_mem": CARD.shared_memory_per_block_optin,
            "max_num_regs": 65536,
            "multiprocessor_count": CARD.multi_processor_count,
            "warpSize": 32,
        }
    )
    get_current_target = staticmethod(lambda: TARGET)
    get_current_device = staticmethod(lambda: 0)
    get_active_torch_device = staticmethod(lambda: torch.device("cuda", 0))
    get_device_interface = staticmethod(lambda: torch.cuda)


triton.runtime.driver.set_active(Driver())

import torch._inductor.config as inductor_config  # noqa: E402
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition  # noqa: E402
from torch._dynamo.backends.common import aot_autograd  # noqa: E402
from torch._dynamo.device_interface import get_interface_for_device  # noqa: E402
from torch._inductor import decomposition  # noqa: E402
from torch._inductor.codecache import PyCodeCache  # noqa: E402
from torch._inductor.debug import DebugContext  # noqa: E402
from torch._inductor.fx_passes.post_grad import post_grad_passes  # noqa: E402
from torch._inductor.graph import GraphLowering  # noqa: E402
from torch._inductor.runtime import triton_helpers  # noqa: E402
from torch._inductor.virtualized import V  # noqa: E402
from torch._subclasses import fake_tensor  # noqa: E402
from torch.fx.experimental.symbolic_shapes import ShapeEnv  # noqa: E402
from torch.nn.attention import flex_attention  # noqa: E402
from torch.utils._pytree import tree_map  # noqa: E402

inductor_config.compile_threads = 1
inductor_config.use_static_cuda_launcher = False  # it would load the code into a GPU
if hasattr(inductor_config, "use_static_triton_launcher"):
    inductor_config.use_static_triton_launcher = False
fake_tensor.init_gpu_context = lambda *device: None
flex_attention._validate_device = lambda *qkv: None  # it refuses a backward pass on a CPU
triton_helpers.set_driver_to_gpu = lambda: None
interface = get_interface_for_device("cuda")
interface.Worker.get_device_properties = staticmethod(lambda device=None: CARD)
interface.get_compute_capability = staticmethod(lambda device=None: CAPABILITY)
logging.getLogger("torch._inductor.runtime.triton_heuristics").setLevel(logging.CRITICAL)


def captured(function, *arguments, **named) -> list[torch.fx.GraphModule]:
    """Return the forward graph of a call, and the backward one if there is any."""
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        results = [getattr(n, "meta", {}).get("val") for n in graph.graph.output_node().args[0]]
        # Called, the graph returns uninitialized memory.
        empty = [v if v is None else (v.shape, v.stride(), v.dtype) for v in results]
        return make_boxed_func(
            lambda *inputs: [e and torch.empty_strided(e[0], e[1], dtype=e[2]) for e in empty]
        )

    backend = aot_autograd(
        fw_compiler=keep,
        bw_compiler=keep,
        inference_compiler=keep,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=decomposition.select_decomp_table(),
    )
    torch._dynamo.reset()
    out = torch.compile(function, backend=backend, dynamic=False, fullgraph=True)(
        *arguments, **named
    )
    out = out[0] if isinstance(out, tuple) else out
    if out.requires_grad:
        out.backward(torch.empty_like(out))
    return graphs


def moved(graph: torch.fx.GraphModule) -> list:
    """Make the graph's values fake tensors of the made-up GPU; return its inputs there."""
    there = {}

    def move(value):
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in there:
            layout = value.shape, value.stride()
            fake = torch.empty_strided(*layout, dtype=value.dtype, device="cuda:0")
            there[id(value)] = fake, value  # which must live as long as its id is used
        return there[id(value)][0]

    for part in graph.modules():
        if not isinstance(part, torch.fx.GraphModule):
            continue
        for node in part.graph.nodes:
            if node.kwargs.get("device") is not None:
                node.kwargs = {**node.kwargs, "device": torch.device("cuda", 0)}
            for key in node.meta.keys() & {"val", "example_value"}:
                node.meta[key] = tree_map(move, node.meta[key])
        part.recompile()
    return [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]


def source_of(graph: torch.fx.GraphModule) -> str:
    """Return the code that Inductor generates for the graph."""
    global lowering
    lowering = True
    mode = fake_tensor.FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with mode:
        inputs = moved(graph)
    keep_values = patch.object(torch.Tensor, "copy_", lambda self, *others, **options: self)
    with V.set_fake_mode(mode), keep_values:
        post_grad_passes(graph, is_inference=False)
        lowered = GraphLowering(graph, example_inputs=inputs, shape_env=mode.shape_env)
        with V.set_graph_handler(lowered), V.set_debug_handler(DebugContext()):
            lowered.run(*inputs)
            code = lowered.codegen()[0]
    lowering = False
    return getattr(code, "value", code)


def taken(kernel) -> dict:
    """Return the resources and the instructions of a compiled kernel."""
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
    }


def compiled(source: str):
    """Yield a row for each configuration of a kernel that Inductor generated."""
    name = re.search(r"^def (\w+)\(", source, re.MULTILINE)[1]
    tuner = getattr(PyCodeCache.load(source), name)
    for config in tuner.configs:
        try:
            row = taken(tuner._precompile_config(config).kernel)
            fits = row["shared"] <= CARD.shared_memory_per_block_optin
            yield row if fits else {"too large": row["shared"]}
        except OutOfResources as error:
            yield {"too large": str(error)}
        except (CompilationError, PTXASError) as error:
            yield {"error": str(error).splitlines()[-1]}


def report(label: str, graphs: list[torch.fx.GraphModule]) -> None:
    """Compile and print all kernels in the graphs."""
    pattern = r"^(\w+) = async_compile\.triton\('\w+', '''(.*?)''', device_str='cuda'\)"
    for graph, direction in zip(graphs, ("", " backward")[: len(graphs)], strict=True):
        for name, source in re.findall(pattern, source_of(graph), re.DOTALL | re.MULTILINE):
            for row in compiled(source):
                print(json.dumps({"graph": label + direction, "kernel": name} | row), flush=True)


HERE = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(HERE), str(HERE / "forks")]
import anvil  # noqa: E402
import gpu_kernels  # noqa: E402
import train_gpt  # noqa: E402
import train_gpt_2026 as fork  # noqa: E402
import train_gpt_2026_07 as newest  # noqa: E402
import train_gpt_2026_08 as of_august  # noqa: E402

for option, value in train_gpt.compiled.options.items():
    setattr(inductor_config, option, value)
# These ask for the device; they answer as on the card.
gpu_kernels.card = torch.compiler.assume_constant_result(lambda device: (processors, shared >> 10))
train_gpt.fp8_supported = torch.compiler.assume_constant_result(lambda device: CAPABILITY >= 89)
train_gpt.memory_is_small = torch.compiler.assume_constant_result(
    lambda device, tokens=49152: memory < 40
)
train_gpt.make_mask = train_gpt.block_lists  # as on any GPU


def activations(hp, count: int) -> list[torch.Tensor]:
    """Return so many inputs of a layer."""
    shape = 1, hp.seq_len, hp.model_dim
    return [torch.empty(shape, dtype=torch.bfloat16).requires_grad_() for _ in range(count)]


def layer_graphs(hp):
    """Yield the graphs of the last layer with values from elsewhere."""
    table = train_gpt.layer_table(hp)
    attending = [i for i, row in enumerate(table) if row.window != "none"]
    last = max(attending, key=lambda i: (table[i].values is not None, i))
    x, x0, value = activations(hp, 3)
    if table[last].values is None:
        value = None
    elif table[last].values == "first":  # another layer's v (1, T, H, D)
        value = value.view(1, -1, hp.num_heads, hp.head_dim)
    tokens, window = torch.zeros(hp.seq_len, dtype=torch.int32), torch.tensor(896)
    first = train_gpt.first_visible(tokens, window, hp.window_rule)
    frequencies = train_gpt.rotary_frequencies(hp, torch.device("cpu"))
    rotary = train_gpt.rotary_table(torch.arange(hp.seq_len)[:, None], frequencies)
    mask = train_gpt.block_lists(first)
    block = train_gpt.Block(hp, table[last])
    yield "layer", captured(block, x, x0, value, rotary, mask)


def layer_graphs_2026(hp, run):
    """Yield the graphs of a fork's layers: of those with paired heads, and of those without, the
    one that has most; then the one that has most of what a mixer tells each head."""
    with torch.device("meta"):
        model = run.GPT(hp)
    now = run.Moment(0, hp)
    made = {}
    for layer in model.layers:
        told = vars(layer).get("xsa", False)
        label = "paired layer" if layer.paired else "layer with xsa" if told else "layer"
        features = sum(bool(value) for value in vars(layer).values()), layer.window == "long"
        if layer.window != "none" and features >= made.get(label, ((), None))[0]:
            made[label] = features, layer
    for label, (_, layer) in sorted(made.items()):
        x, added, value, source = activations(hp, 4)
        tokens = torch.zeros(hp.seq_len, dtype=torch.int32)
        long, short = torch.tensor(now.window), torch.tensor(now.short)
        mask = model.masks(tokens, long, short)[layer.mask]
        rotary = model.rotary(torch.arange(hp.seq_len), now)[layer.rotary]
        value, source = (
            tensor if named is not None else None
            for tensor, named in ((value, layer.values), (source, layer.source))
        )
        arguments = [x, added, value, rotary, mask, source]
        if issubclass(run, newest.Run):
            sizes = dict.fromkeys(("alpha", "gate", "w1", "w2"), hp.num_heads)
            if layer.mudd:
                sizes |= dict.fromkeys(("keep", "attention", "keep mlp", "mlp"), 1)
            shapes = {name: (1, hp.seq_len, size) for name, size in sizes.items()}
            bf16 = {"dtype": torch.bfloat16, "requires_grad": True}
            arguments.append({name: torch.empty(shape, **bf16) for name, shape in shapes.items()})
        yield label, captured(run.GPT.block_class(hp, layer), *arguments)


def loss_graphs(hp, run):
    """Yield the graphs of the head and its loss, as a run compiles them."""
    with torch.device("meta"):
        head = run.GPT(hp).lm_head
    head = head.to_empty(device="cpu")
    tokens = head.chunk_len(torch.device("cuda"))
    x = torch.empty(tokens, hp.model_dim, dtype=torch.bfloat16)
    targets, scale, several = (
        torch.zeros(tokens, dtype=torch.int64),
        head.grad_scale or 1 / hp.seq_len,
        (),
    )
    trained = targets
    if getattr(hp, "most_targets", 1) > 1:
        trained, several = (
            fork.next_targets(targets, hp.most_targets),
            (torch.ones(hp.most_targets),),
        )
    learning = x.clone().requires_grad_()
    yield "loss", captured(head.chunk_loss, learning, trained, scale, *several)
    with torch.no_grad():
        yield "loss of validation", captured(head.eval().chunk_loss, x, targets, scale)


@torch.no_grad()
def muon_graphs(hp, run, square_only=False):
    """Yield the graphs of all matrices of a shape, as a run on one GPU has them."""
    orthogonalise = train_gpt.zeropower_via_newtonschulz5
    if run is not train_gpt.Run and hp.polar_express:
        orthogonalise = fork.polar_express
    is_anvil = getattr(hp, "optimizer", "muon") == "anvil"
    if is_anvil:
        orthogonalise = anvil.orthogonalise

    def as_on_a_gpu(direction):
        return orthogonalise(direction.bfloat16())

    with torch.device("meta"):
        optimizers = run.Optimizers(run.GPT(hp), hp)
    for group, rows in optimizers.groups:
        *_, height, width = rows.own.shape
        if group.name not in ("muon", "pairs") or (square_only and height != width):
            continue
        grad, buffer = (torch.zeros(rows.own.shape) for _ in range(2))
        arguments = grad, buffer, torch.tensor(0.9), hp.momentum_damped, as_on_a_gpu
        if is_anvil:
            anvil.orthogonalise = as_on_a_gpu
            numbers = [torch.tensor(number) for number in (0.9, 0.85, 0.4)]
            arguments = grad, buffer, grad.clone(), *numbers, hp.slow_momentum
            yield f"anvil {height} x {width}", captured(anvil.anvil_updates, *arguments)
            continue
        yield f"muon {height} x {width}", captured(train_gpt.muon_updates, *arguments)


def graphs_of(part: str, hp, run):
    """Return what yields the graphs of a part, with their names."""
    if part == "layer":
        return layer_graphs(hp) if run is train_gpt.Run else layer_graphs_2026(hp, run)
    if part == "loss":
        return loss_graphs(hp, run)
    return muon_graphs(hp, run, square_only=part == "square")


def main(record: str, choice: str, *parts: str) -> None:
    """Report on the parts of a record, with the kernels or without them."""
    runs = train_gpt.Run, fork.Run, newest.Run, of_august.Run
    run = next(run for run in runs if record in run.records)
    hp = run.records[record]
    if run is of_august.Run:
        hp = replace(hp, canonical_mask=False, ngram_rows=1234)  # what the kernels do not see
    if choice == "on":
        has_fp8 = CAPABILITY >= 89
        names = [name for name in gpu_kernels.WRITTEN_FOR if has_fp8 or name != "fp8_mlp"]
        gpu_kernels.IN_USE.update(names)
    for part in parts:
        # Capturing a graph forgets the Triton kernels of the one before, which is compiled by then.
        for label, graphs in graphs_of(part, hp, run):
            report(label, graphs)


if __name__ == "__main__":
    main(*sys.argv[2:])
