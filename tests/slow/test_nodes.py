"""Two nodes of two ranks, each with its own torchrun; they meet on the loopback interface."""

import socket
import subprocess
import sys

from runs import HANGS, RUNS
from test_ranks import assert_same, assert_shared, flags, outcome, unclipped  # noqa: F401


def test_two_nodes_of_two_ranks_equal_one(flags, unclipped, tmp_path):  # noqa: F811
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=2"]
    launcher += [f"--rdzv_endpoint=127.0.0.1:{port}", "--rdzv_backend=c10d", "--rdzv_id=x"]
    command = [*launcher, RUNS, "spy:main", *flags]
    options = {"stdout": subprocess.PIPE, "text": True, "cwd": tmp_path}
    nodes = [subprocess.Popen(command, **options) for _ in range(2)]
    texts = [node.communicate(timeout=HANGS)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0]
    found = outcome(tmp_path, "".join(texts))
    assert_same(found, unclipped, 4)
    assert_shared(flags, found.reports, 4)
