"""Train for five minutes on one card, with the techniques of 2025-01-26_BatchSize.

    ./run.sh forks/five_minutes.py --seconds 300                      # an H100; on a CPU, a demo
    ./run.sh forks/five_minutes.py --record rtx_4090 --seconds 300    # a card of 24 GB

It has not run on a GPU. Sizes follow a rule (Hoffmann et al., arXiv 2203.15556): N parameters need
D = 20 N tokens, which cost 6 N D FLOP. N counts matrices, including the head, but no embeddings. We
assume the rates: the published time of 2025-01-26 means 350 TFLOP/s for each of its 8 H100s, 35 %
of their bfloat16 peak; an RTX 4090 gets 36 %. --seconds measures the rate, and sets the steps.

    record         TFLOP/s   FLOP in 300 s       N       D   FLOP of D   seconds   batch   steps
    five_minutes       350         1.05e17   29.9M  598.7M     1.08e17       307  393216    1522
    rtx_4090            60         1.80e16   12.6M  252.1M     1.91e16       318  196608    1282

They need about 8 GB and 5 GB of memory (estimates). The six layers are 2025-01-26's first three and
last three, with all value tables. The batch grows with D, not with N (arXiv 2410.21676): here about
as its square root. Learning rates are 2025-01-26's: the spectral norm of Muon's updates, on which
they depend, is the same at all widths (arXiv 2310.17813).

The demo follows the rule roughly. At 40 GFLOP/s, a CPU core gets N = 0.3M; at width 64, four layers
and a head of 4096 tokens have 0.5M. Single trials of 40 to 60 s, with all of GPT-2's tokens, chose
this width among 32 to 128, and 512 tokens a step among 256 to 2048.
"""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # where train_gpt.py lies
import train_gpt as t

# The ramp of the momentum takes the same share of the steps as in 2025-01-26.
H100 = replace(
    t.RECORDS["2025-01-26_BatchSize"],
    num_iterations=1522,
    momentum_warmup_steps=258,
    num_layers=6,
    num_heads=3,
    model_dim=384,
)
SMALL = dict(num_iterations=1282, momentum_warmup_steps=217, seq_len=24576, num_heads=2)
CPU = dict(num_iterations=1050, momentum_warmup_steps=178, batch_seqs=2, val_loss_every=525)
RECORDS = {
    "five_minutes": H100,
    "rtx_4090": replace(H100, model_dim=192, **SMALL),
    "demo": replace(t.RECORDS["demo"], model_dim=64, num_heads=1, **CPU),
}


class Run(t.Run):
    records, default_record = RECORDS, "five_minutes"


if __name__ == "__main__":
    t.main(run=Run)
