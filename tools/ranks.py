"""torchrun, without its own report: no traceback hides what a rank has said in a line.

Its flags are torchrun's: ranks.py --nproc_per_node=2 SCRIPT.py [flags].
"""

import logging
import sys

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

if __name__ == "__main__":
    logging.disable(logging.CRITICAL)  # in this process, not in the ranks
    try:
        run(parse_args(sys.argv[1:]))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:
            sys.exit(failure.exitcode)
        print(f"{failure.signal_name()} ended rank {rank}", file=sys.stderr)  # launch.py reads it
        sys.exit(128 - failure.exitcode)
    except SignalException as error:
        sys.exit(128 + error.sigval)
