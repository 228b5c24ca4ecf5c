"""Two nodes of two ranks, each with its own torchrun; they meet on the loopback interface."""

import socket
import subprocess
import sys

from runs import HANGS, RUNS, console_of
from test_ranks import check_ranks, flags  # noqa: F401


def test_two_nodes_of_two_ranks_equal_one(flags, tmp_path):  # noqa: F811
    alone, together = tmp_path / "alone", tmp_path / "together"
    for folder in (alone, together):
        folder.mkdir()
    console_of(flags, alone)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=2"]
    launcher += [f"--rdzv_endpoint=127.0.0.1:{port}", "--rdzv_backend=c10d", "--rdzv_id=x"]
    command = [*launcher, RUNS, "spy:main", *flags]
    nodes = [subprocess.Popen(command, cwd=together) for _ in range(2)]
    assert [node.wait(HANGS) for node in nodes] == [0, 0]
    check_ranks(flags, alone, together, 4)
