#!/usr/bin/env python3
"""Start a training or evaluation program on its devices: one process, several, or several machines.

The rules call every GPU program through this one, so that
- a job with GPUs holds a lock on each of its devices and sees no others, also beside a second Snakemake;
- a job without GPUs sees none;
- a port in use is told before anything is loaded;
- SIGTERM and SIGINT reach all processes of the job, and none is left behind.

    launch.py --processes 2 --gpus 2 --threads 8 -- workflow_scripts/train_accelerate.py --loader odb ...
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from odb_workflow.runtime.errors import UserError, run_main
from odb_workflow.workflow.devices import lock_devices
from odb_workflow.workflow.nodes import allocated_nodes, job_port, node_address, srun_command
from odb_workflow.workflow.ports import choose_port
from odb_workflow.workflow.supervise import supervise

CHECKOUT = Path(__file__).resolve().parent.parent


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=1, help="processes on each machine")
    parser.add_argument(
        "--machines", type=int, default=1, help="machines; more than 1 inside a SLURM job only"
    )
    parser.add_argument("--gpus", type=int, default=0, help="GPUs on each machine; 0 hides all of them")
    parser.add_argument("--threads", type=int, default=1, help="CPU cores on each machine")
    parser.add_argument("--port", type=int, default=0, help="port of the rendezvous; 0: a free one")
    parser.add_argument(
        "--accelerate", action="store_true", help="start through `accelerate launch`, as trainings are"
    )
    parser.add_argument("--node", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("program", nargs=argparse.REMAINDER, help="-- PROGRAM ARGUMENTS")
    options = parser.parse_args()
    options.program = options.program[1:] if options.program[:1] == ["--"] else options.program
    if not options.program:
        parser.error("no program given after --")
    return options


def command(options: argparse.Namespace, port: int) -> list[str]:
    """The command line of one machine's launcher."""
    python = sys.executable
    if options.machines > 1:
        first = node_address(allocated_nodes()[0])
        return [
            python,
            *("-m", "torch.distributed.run", "--nnodes", str(options.machines)),
            *("--nproc-per-node", str(options.processes), "--node-rank", os.environ.get("SLURM_NODEID", "0")),
            *("--master-addr", first, "--master-port", str(port)),
            *options.program,
        ]
    if not options.accelerate and options.processes == 1:
        return [python, *options.program]
    launcher = [
        *(python, "-m", "accelerate.commands.accelerate_cli", "launch"),
        *("--config_file", str(CHECKOUT / "config" / "accelerate.yaml")),
        *("--num_machines", "1", "--num_processes", str(options.processes)),
        *("--num_cpu_threads_per_process", str(max(1, options.threads // options.processes))),
    ]
    if options.processes > 1:
        # Also on CPU: `accelerate launch --cpu --num_processes 2` would silently start one process.
        launcher += ["--multi_gpu", "--main_process_port", str(port)]
    elif options.gpus == 0:
        launcher.append("--cpu")
    return [*launcher, *options.program]


def environment(options: argparse.Namespace, devices: list[str]) -> dict[str, str]:
    """Environment of the program."""
    result = dict(os.environ)
    result["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    result.setdefault("OMP_NUM_THREADS", str(max(1, options.threads // options.processes)))
    # Threads that spin while they wait starve the data workers: on two busy cores 10 samples/s instead of 71.
    result.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    result.setdefault("TOKENIZERS_PARALLELISM", "false")
    result.setdefault("PYTHONUNBUFFERED", "1")
    if options.gpus == 0:
        result["ACCELERATE_USE_CPU"] = "true"
        result["ODB_WORKFLOW_DEVICE"] = "cpu"
    return result


def main() -> int:
    options = parse_arguments()
    if options.machines > 1 and not options.node:
        return supervise(
            srun_command(options, [sys.executable, __file__, "--node", *sys.argv[1:]]), dict(os.environ)
        )
    if options.processes < 1 or options.gpus not in (0, options.processes):
        raise UserError(
            f"{options.processes} processes cannot share {options.gpus} GPUs: one GPU per process"
        )
    port = options.port
    if options.machines > 1:
        port = port or job_port()
    elif options.processes > 1:
        port = choose_port(port)
    with lock_devices(options.gpus) as devices:
        return supervise(command(options, port), environment(options, devices))


if __name__ == "__main__":
    run_main(main)
