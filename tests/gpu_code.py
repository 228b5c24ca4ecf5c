"""Compile what a GPU would run, without one: each kernel of a layer, the loss or Muon's update.

    python tests/gpu_code.py h100 2025-01-26_BatchSize on layer loss muon

The card is one of CARDS; on or off as in --kernels; with --no_fp8 the head is in bfloat16. Of
Muon's update, `square` is that of square matrices alone.
Prints a line of JSON for each kernel and each of the configurations that it may be launched in:
graph, kernel, and either what it takes (shared memory, registers and stack in bytes, instructions),
or that it does not fit the card ("too large": a GPU takes another configuration then, if there is
one), or why it does not build ("error").

torch.compile captures the graphs on a CPU, and nothing is computed. Their values then become fake
tensors of a made-up GPU, Inductor lowers them to Triton, and Triton compiles that to machine code.
"""

import json
import logging
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.utils._triton

# Compute capability, bytes of shared memory that a program may have, gigabytes, multiprocessors.
CARDS = {
    "h100": ((9, 0), 232448, 80, 132),
    "a100": ((8, 0), 166912, 80, 108),
    "4090": ((8, 9), 101376, 24, 128),
    "3090": ((8, 6), 101376, 24, 82),
    "5090": ((12, 0), 101376, 32, 170),
    "b200": ((10, 0), 232448, 180, 148),
}


def made_up(name: str) -> SimpleNamespace:
    """What torch.cuda.get_device_properties would say of a card."""
    (major, minor), shared, memory, processors = CARDS[name]
    return SimpleNamespace(
        name=name,
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


CARD = made_up(sys.argv[1])
CAPABILITY = 10 * CARD.major + CARD.minor
lowering = False  # the GPU is there only then: not while a graph is captured

torch.utils._triton.has_triton = lambda: True  # asked when torch.compile is imported
torch.utils._triton.has_triton_package = lambda: True
torch.cuda.is_available = lambda: lowering
torch.cuda.device_count = lambda: 1
torch.cuda.current_device = lambda: 0
torch.cuda.get_device_properties = lambda *device: CARD
torch.cuda.get_device_capability = lambda *device: (CARD.major, CARD.minor)
torch.version.cuda = torch.version.cuda or "13.0"

import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler.errors import CompilationError  # noqa: E402
from triton.runtime.errors import OutOfResources, PTXASError  # noqa: E402

TARGET = GPUTarget("cuda", CAPABILITY, 32)


class Driver:
    """Triton's, of a GPU to compile for."""

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


def captured(function, *arguments) -> list[torch.fx.GraphModule]:
    """The forward graph of function(*arguments), and the backward one if there is any."""
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        results = [getattr(n, "meta", {}).get("val") for n in graph.graph.output_node().args[0]]
        # Called, it answers with memory as it is.
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
    out = torch.compile(function, backend=backend, dynamic=False, fullgraph=True)(*arguments)
    out = out[0] if isinstance(out, tuple) else out
    if out.requires_grad:
        out.backward(torch.empty_like(out))
    return graphs


def moved(graph: torch.fx.GraphModule) -> list:
    """Move all that is known of the graph's values to the made-up GPU; the graph's inputs there."""
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
    """What Inductor writes for the graph."""
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
    """What a compiled kernel asks of the GPU."""
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
    """A row for each configuration of a kernel that Inductor wrote."""
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


sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_gpt  # noqa: E402

# The functions by which train_gpt asks for a device, as they answer on the card.
always = torch.compiler.assume_constant_result
small_memory = CARD.total_memory < 40e9
train_gpt.activation_dtype = lambda device: torch.bfloat16
train_gpt.shared_memory_is_small = always(
    lambda device: CARD.shared_memory_per_block_optin < 160_000
)
train_gpt.memory_is_small = always(lambda device, tokens=49152: small_memory)
TOKENS = train_gpt.loss_chunk_len(torch.device("cuda"))
train_gpt.LOSS_ROWS = TOKENS  # all rows of a chunk at once


def layer_graphs(hp):
    """The layer that has most: earlier outputs, values from elsewhere, a long window; and the same
    of those whose heads are paired."""
    shape, table = (1, hp.seq_len, hp.model_dim), train_gpt.layer_table(hp)

    def features(row) -> tuple[int, bool]:
        more = row.values, row.skip_from, row.source
        return sum(field is not None for field in more), row.window == "long"

    for paired in sorted({row.paired for row in table}):
        row = max([row for row in table if row.paired == paired], key=features)
        x, x0, value, skip, bigram, source = (
            torch.empty(shape, dtype=torch.bfloat16).requires_grad_() for _ in range(6)
        )
        tokens = torch.zeros(hp.seq_len * (1 + paired), dtype=torch.int32)
        first = train_gpt.first_visible(tokens, torch.tensor(896), hp.window_rule)
        rotary = train_gpt.rotary_table(hp.seq_len, hp, "cpu", pair=1 + paired)
        if row.values == "first":
            value = value.view(1, hp.seq_len, hp.num_heads, hp.head_dim)
        skip = None if row.skip_from is None else (torch.ones(()), skip)
        source = None if row.source is None else source
        bigram = bigram if hp.bigram_rows else None
        arguments = x, x0, value, skip, rotary, train_gpt.flex_mask(first), False
        block, name = train_gpt.Block(hp, row), "paired layer" if paired else "layer"
        yield name, captured(block, *arguments, train_gpt.attend, bigram, source)


@torch.no_grad()
def loss_graphs(hp):
    """The steps of the head and its loss, one by one, as a run compiles them."""
    vocab, fp8 = train_gpt.padded_vocab(hp), hp.fp8 and CAPABILITY >= 89
    x, targets = torch.empty(TOKENS, hp.model_dim, dtype=torch.bfloat16), torch.zeros(TOKENS).long()
    count = max(len(stage.targets) for stage in train_gpt.stage_table(hp.stages))
    several = train_gpt.next_targets(targets, count) if count > 1 else targets
    shares = torch.ones(count) if count > 1 else None
    weight, grad_w = torch.empty(vocab, hp.model_dim), torch.zeros(vocab, hp.model_dim)
    w, scales = weight.bfloat16(), (hp.x_s, hp.w_s, hp.grad_s) if fp8 else None
    quantize, forward, backward = train_gpt.HEAD_STEPS
    if fp8:
        yield "head in float8", captured(quantize, weight, hp.w_s)
        w = quantize(weight, hp.w_s)
    grads = torch.empty(TOKENS, vocab, dtype=torch.float8_e5m2 if fp8 else torch.bfloat16)
    form = hp.logit_sigmoid if hp.logit_sigmoid[0] else hp.logit_softcap
    softcap, scale = train_gpt.sigmoid_form(form), 1.0 if hp.loss_sum else 1 / hp.seq_len
    yield "loss", captured(forward, x, w, several, softcap, shares, scale, scales)
    inputs = train_gpt.to_fp8(x, hp.x_s, torch.float8_e4m3fn) if fp8 else x
    yield "loss backward", captured(backward, inputs, w, grads, grad_w, scales)
    arguments = x, weight.bfloat16(), targets, softcap, None, None, None
    yield "loss of validation", captured(forward, *arguments)


@torch.no_grad()
def muon_graphs(hp, square_only=False):
    """Updates of all matrices of a shape, by the buckets in which one GPU has them all."""
    with torch.device("meta"):
        optimizers = train_gpt.Optimizers(train_gpt.GPT(hp), hp)
    buckets = next(buckets for group, buckets in optimizers.groups if group.name == "muon")
    for shape in dict.fromkeys(bucket.row_shape for bucket in buckets):
        if square_only and shape[0] != shape[1]:
            continue
        counts = [bucket.share_len for bucket in buckets if bucket.row_shape == shape]
        grads, momenta = ([torch.zeros(count, *shape) for count in counts] for _ in range(2))
        arguments = grads, momenta, torch.tensor(0.9), hp.momentum_damped, hp.polar_express
        name = " x ".join(map(str, shape))
        yield f"muon {name}", captured(train_gpt.muon_updates, *arguments)
        if hp.muon_beta2:
            updates, rows = torch.zeros(counts[0], *shape).bfloat16(), shape[0] >= shape[1]
            second = torch.zeros(counts[0], *((shape[0], 1) if rows else (1, shape[1])))
            yield f"normuon {name}", captured(train_gpt.normuon_, updates, second, hp.muon_beta2)


def main(record: str, kernels: str, *parts: str) -> None:
    hp = train_gpt.RECORDS[record]
    hp = replace(hp, fp8=hp.fp8 and "--no_fp8" not in parts)
    for kernel in train_gpt.KERNELS.values():
        kernel.use = kernels == "on"
    graphs_of = {"layer": layer_graphs, "loss": loss_graphs, "muon": muon_graphs}
    graphs_of["square"] = partial(muon_graphs, square_only=True)
    for part in [part for part in parts if part != "--no_fp8"]:
        # Capturing a graph forgets the Triton kernels of the one before, which is compiled by then.
        for label, graphs in graphs_of[part](hp):
            report(label, graphs)


main(*sys.argv[2:])
