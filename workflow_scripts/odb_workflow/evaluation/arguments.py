"""Command-line arguments that both evaluations share."""

from __future__ import annotations

import argparse

from odb_workflow.runtime.errors import UserError, combine_errors


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Checkpoint, output, precision and speed."""
    parser.add_argument(
        "--checkpoint", required=True, help="model folder, checkpoint.json of a training, or Hub id"
    )
    parser.add_argument("--revision", help="branch, tag or commit of a Hub checkpoint")
    parser.add_argument("--base-model", help="its processor is used if the checkpoint has none")
    parser.add_argument("--base-model-revision", help="branch, tag or commit of a base model from the Hub")
    parser.add_argument("--output-dir", help="folder of the result files; default: beside the checkpoint")
    parser.add_argument(
        "--max-samples", type=int, default=0, metavar="N", help="score the first N samples only; 0 = all"
    )
    parser.add_argument(
        "--image-max-pixels", type=int, default=589824, help="larger images are scaled down; 0 keeps"
    )
    parser.add_argument(
        "--precision",
        choices=["auto", "bf16", "fp16", "fp32"],
        default="auto",
        help="auto: bf16 on a GPU, else fp32",
    )
    parser.add_argument("--trust-remote-code", action=argparse.BooleanOptionalAction, default=False)
    speed = parser.add_argument_group("speed; nothing here changes a result")
    speed.add_argument(
        "--token-budget",
        "--batch-token-budget",
        dest="token_budget",
        type=int,
        default=0,
        metavar="TOKENS",
        help="most tokens in a batch; 1 = one sample a batch; 0 chooses by device",
    )
    speed.add_argument(
        "--batch-max-samples", type=int, default=256, metavar="N", help="most samples in a batch"
    )
    speed.add_argument("--padding", choices=["auto", "pad", "pack"], default="auto")
    speed.add_argument("--performance", default="auto", help="auto, reference, or named switches as JSON")
    speed.add_argument("--attn-implementation", help="attention of the plain transformers forward")
    speed.add_argument(
        "--num-workers", type=int, default=-1, help="loader workers per rank; -1 chooses by device"
    )
    speed.add_argument(
        "--prefetch-factor", type=int, default=2, help="batches that each worker prepares ahead"
    )
    speed.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")


def check_common_arguments(arguments: argparse.Namespace) -> None:
    """Refuse numbers that mean nothing, all in one message.

    Raises:
        UserError: names each flag and its value.
    """
    least = {"max_samples": 0, "image_max_pixels": 0, "token_budget": 0, "batch_max_samples": 1}
    least |= {"num_workers": -1, "prefetch_factor": 1}
    faults: list[UserError | str] = [
        f"--{name.replace('_', '-')} is {getattr(arguments, name)}, it must be at least {limit}"
        for name, limit in least.items()
        if getattr(arguments, name) < limit
    ]
    if faults:
        raise combine_errors(faults, "wrong arguments:")


def choose_precision(choice: str, device_type: str) -> str:
    """``auto`` as what it stands for on this device."""
    if choice != "auto":
        return choice
    return "bf16" if device_type == "cuda" else "fp32"


def choose_token_budget(choice: int, device_type: str) -> int:
    """0 as what it stands for on this device: the best measured, see benchmarks/evaluation.md."""
    if choice > 0:
        return choice
    return 49152 if device_type == "cuda" else 16384
