"""Train a vision-language model on a TMDB with ODB or fixed batches.

One process: python workflow_scripts/train_accelerate.py ...
Several:     accelerate launch --num_processes 8 workflow_scripts/train_accelerate.py ...
On CPU:      torchrun --nproc_per_node 2 workflow_scripts/train_accelerate.py --cpu --precision fp32 ...
"""

from __future__ import annotations

import os
import sys
import time
import warnings

PROCESS_START = time.time()

from odb_workflow.runtime.errors import run_main  # noqa: E402

CODE_VERSION = 1


def main() -> int:
    """Parse the command line and train."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the loaders fork
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # before torch is imported
    from odb_workflow.training.arguments import parse_arguments
    from odb_workflow.training.faults import readable_faults
    from odb_workflow.training.process import end_with_launcher, raise_file_limit

    end_with_launcher()
    raise_file_limit()
    # torch 2.14 renames calls that odb 0.1.2 and older versions of torch know by their old names only
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    with readable_faults():
        args = parse_arguments(sys.argv[1:])
        from odb_workflow.training.program import train

        return train(args, CODE_VERSION, PROCESS_START)


if __name__ == "__main__":
    run_main(main)
