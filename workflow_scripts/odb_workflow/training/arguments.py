"""Command line of ``train_accelerate.py``, and the checks that need nothing but it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..loaders.factory import FIXED_BATCH_KINDS, LOADER_KINDS, LoaderSettings
from ..runtime.errors import UserError, combine_errors
from ..tmdb.split import SPLIT_MODES

LOSS_SCALINGS = ("label_tokens", "exact", "approx", "none")
AUTO = "auto"
LR_SCHEDULERS = ("cosine", "linear", "constant")

# Keys that cannot change what is learned: leaving one of them out of a fingerprint lets a run be resumed with
# more workers or another checkpoint interval.
WITHOUT_INFLUENCE = (
    "output_dir",
    "validation",
    "local_data",
    "source_data",
    "data",
    "num_workers",
    "prefetch_factor",
    "save_final_model",
    "checkpoint_every_samples",
    "checkpoint_every_minutes",
    "log_with",
    "logging_steps",
    "performance",
    "attn_implementation",
    "gradient_checkpointing",
    "arm",
    "cpu",
)


def build_parser() -> argparse.ArgumentParser:
    """The parser of the training program."""
    parser = argparse.ArgumentParser(
        prog="train_accelerate.py",
        description="Train a vision-language model on a TMDB with one kind of loader. Start it "
        "with `accelerate launch` or `torchrun` for several processes, or plainly with `python` for one.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    where = parser.add_argument_group("what to train on what")
    add = where.add_argument
    add("--arm", default=None, help="name of the arm; by default the kind of its loader")
    add("--data", default="data/mm-mix-tmdb", help="TMDB directory")
    add("--source-data", default=None, help="TMDB directory on a slow shared disk, read instead of --data")
    add("--local-data", default=None, help="copy the TMDB to this folder of the node once, and read it there")
    add(
        "--validation",
        default=None,
        help="result of validate_tmdb.py; without it the TMDB is validated first",
    )
    add("--model", required=True, help="model directory or Hub id")
    add("--revision", default=None, help="Hub id: branch, tag or commit")
    add("--output-dir", default=None, help="folder of this arm; by default outputs/accelerate-real/ARM")
    add("--trust-remote-code", action="store_true", help="let the model bring its own code")

    loader = parser.add_argument_group("loader")
    add = loader.add_argument
    add("--loader", choices=LOADER_KINDS, required=True, help="how batches are formed")
    add("--token-budget", type=int, default=12288, help="most tokens in a batch (odb, token_budget)")
    add("--buffer-size", type=int, default=1024, help="samples that odb looks at together")
    add("--loss-scaling", choices=LOSS_SCALINGS, default="label_tokens", help="how ranks are weighted")
    add("--join", action=argparse.BooleanOptionalAction, default=True, help="odb's join mode")
    add("--no-warmup-buffer", action="store_true", help="odb looks at a full buffer from the start")
    add(
        "--group-order-flip",
        nargs="?",
        const="rank_window_balanced",
        default="none",
        help="odb emits its groups in reversed order on some ranks (given alone: rank_window_balanced)",
    )
    add("--max-patches", type=int, default=0, help="most image patches in a batch of odb (0: no limit)")
    add(
        "--fixed-batch-size",
        type=_batch_size,
        default=1,
        help="samples in a batch (standard, length_grouped); auto: the most that fit this device's memory",
    )
    add("--padding", choices=("pad", "pack"), default="pad", help="pad rows, or pack samples into one row")
    add("--num-workers", type=int, default=4, help="loader processes of each rank")
    add(
        "--prefetch-factor", type=int, default=None, help="samples (odb: 512) or batches (2) ahead per worker"
    )

    split = parser.add_argument_group("split")
    add = split.add_argument
    add("--train-size", type=int, default=0, help="training samples; 0 takes all")
    add(
        "--val-size",
        type=float,
        default=0.05,
        help="share of the records for validation, or their number if > 1",
    )
    add("--split-seed", type=int, default=42)
    add("--split-mode", choices=SPLIT_MODES, default="lf_val_size")
    add("--val-start", type=int, default=None, help="first validation record of split mode tail")
    add("--max-length", type=int, default=16384, help="longest sample in tokens")
    add("--image-max-pixels", type=int, default=589824, help="larger images are scaled down")

    optim = parser.add_argument_group("optimization")
    add = optim.add_argument
    add("--epochs", type=float, default=1.0, help="passes over the training samples; fractions are allowed")
    add("--max-steps", type=int, default=0, help="stop after so many optimizer steps; 0 means no limit")
    add("--lr", type=float, default=1e-5)
    add("--warmup-ratio", type=float, default=0.03, help="share of the training over which the rate rises")
    add("--lr-scheduler", choices=LR_SCHEDULERS, default="cosine")
    add(
        "--schedule-basis",
        choices=("samples", "label_tokens"),
        default="samples",
        help="what progress counts",
    )
    add("--max-grad-norm", type=float, default=4.0, help="clip gradients to this norm; 0 never clips")
    add("--weight-decay", type=float, default=0.0)
    add(
        "--gradient-accumulation-steps",
        type=int,
        default=1,
        help="batches of each rank in one optimizer step",
    )
    add("--seed", type=int, default=42)
    add("--precision", choices=("bf16", "fp16", "fp32"), default="bf16")
    add(
        "--optimizer-states",
        choices=("float32", "16bit"),
        default="float32",
        help="bf16 without DeepSpeed: float32 keeps a float32 copy of the weights for the optimizer; 16bit "
        "updates the weights themselves, with less memory and rounded updates",
    )
    add("--deepspeed-config", default=None, help="DeepSpeed JSON (ZeRO stage 0, 1 or 2); without it DDP")
    add("--gradient-checkpointing", choices=("auto", "on", "off"), default="auto")
    add("--attn-implementation", default=None, help="attention of transformers; by default its own choice")
    add("--performance", default="auto", help="auto, reference, or a JSON object of named switches")
    add("--cpu", action="store_true", help="train on the CPU even where there is a GPU")

    freeze = parser.add_argument_group("what is trained")
    add = freeze.add_argument
    add("--freeze-vision-tower", action=argparse.BooleanOptionalAction, default=True)
    add("--freeze-multimodal-projector", action=argparse.BooleanOptionalAction, default=True)
    add("--freeze-language-model", action=argparse.BooleanOptionalAction, default=False)
    add(
        "--trainable-keywords",
        default="",
        help="train only parameters whose name holds one of these (commas)",
    )

    keep = parser.add_argument_group("what is kept")
    add = keep.add_argument
    add("--save-final-model", type=int, choices=(0, 1), default=1)
    add("--checkpoint-every-samples", type=int, default=0, help="resume point every so many samples; 0: none")
    add(
        "--checkpoint-every-minutes",
        type=float,
        default=30.0,
        help="resume point every so many minutes; 0: none",
    )
    add("--logging-steps", type=int, default=None, help="steps between looks at the loss (CPU 1, GPU 10)")
    add("--log-with", default=None, help="trackers of accelerate, such as tensorboard (commas)")
    return parser


def _batch_size(text: str) -> int | str:
    return AUTO if text == AUTO else int(text)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line.

    Raises:
        UserError: lists every wrong value with its flag.
    """
    args = build_parser().parse_args(argv)
    args.arm = args.arm or args.loader
    args.output_dir = Path(args.output_dir or f"outputs/accelerate-real/{args.arm}")
    args.data = Path(args.source_data or args.data)
    args.local_data = Path(args.local_data) if args.local_data else None
    args.trainable_keywords = [word.strip() for word in args.trainable_keywords.split(",") if word.strip()]
    args.log_with = [name.strip() for name in (args.log_with or "").split(",") if name.strip()]
    if args.prefetch_factor is None:
        args.prefetch_factor = 512 if args.loader == "odb" else 2
    faults = [message for wrong, message in _faults(args) if wrong]
    if faults:
        raise combine_errors(faults, "wrong arguments:")
    return args


def _faults(args: argparse.Namespace) -> list[tuple[bool, str]]:
    return [
        (args.epochs <= 0, f"--epochs {args.epochs}: must be above 0"),
        (args.max_steps < 0, f"--max-steps {args.max_steps}: must be 0 (no limit) or more"),
        (args.train_size < 0, f"--train-size {args.train_size}: must be 0 (all) or more"),
        (args.lr <= 0, f"--lr {args.lr}: must be above 0"),
        (not 0 <= args.warmup_ratio < 1, f"--warmup-ratio {args.warmup_ratio}: must be in [0, 1)"),
        (args.max_grad_norm < 0, f"--max-grad-norm {args.max_grad_norm}: must be 0 (never clip) or more"),
        (args.weight_decay < 0, f"--weight-decay {args.weight_decay}: must be 0 or more"),
        (args.gradient_accumulation_steps < 1, "--gradient-accumulation-steps: must be at least 1"),
        (args.num_workers < 0, f"--num-workers {args.num_workers}: must be 0 or more"),
        (args.num_workers < 1 and args.loader == "odb", "--num-workers 0: the odb loader needs at least 1"),
        (args.prefetch_factor < 1, f"--prefetch-factor {args.prefetch_factor}: must be at least 1"),
        (
            args.loader == "odb" and args.buffer_size < 1,
            f"--buffer-size {args.buffer_size}: must be at least 1",
        ),
        (
            args.loader in ("odb", "token_budget") and args.token_budget < 1,
            f"--token-budget {args.token_budget}: must be at least 1",
        ),
        (
            args.fixed_batch_size != AUTO and args.fixed_batch_size < 1,
            f"--fixed-batch-size {args.fixed_batch_size}: must be at least 1",
        ),
        (args.max_patches < 0, f"--max-patches {args.max_patches}: must be 0 (no limit) or more"),
        (args.max_length < 1, f"--max-length {args.max_length}: must be at least 1"),
        (args.checkpoint_every_samples < 0, "--checkpoint-every-samples: must be 0 (none) or more"),
        (args.checkpoint_every_minutes < 0, "--checkpoint-every-minutes: must be 0 (none) or more"),
    ]


def loader_settings(args: argparse.Namespace) -> LoaderSettings:
    """The loader's part of the arguments; a batch size of ``auto`` stands as 1 until it was found."""
    return LoaderSettings(
        kind=args.loader,
        token_budget=args.token_budget,
        buffer_size=args.buffer_size,
        odb_loss_scaling="none" if args.loss_scaling == "label_tokens" else args.loss_scaling,
        join=args.join,
        no_warmup=args.no_warmup_buffer,
        group_order_flip=args.group_order_flip,
        max_patches=args.max_patches,
        fixed_batch_size=1 if args.fixed_batch_size == AUTO else args.fixed_batch_size,
        padding=args.padding,
        num_workers=args.num_workers,
        prefetch_factor=args.prefetch_factor,
        seed=args.seed,
    )


def training_identity(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments that decide what is learned (see ``WITHOUT_INFLUENCE``), ready for JSON."""
    own = vars(args)
    loader_only = {
        "token_budget": ("odb", "token_budget"),
        "fixed_batch_size": FIXED_BATCH_KINDS,
        "buffer_size": ("odb",),
        "join": ("odb",),
        "no_warmup_buffer": ("odb",),
        "group_order_flip": ("odb",),
        "max_patches": ("odb",),
    }
    return {
        key: str(value) if isinstance(value, Path) else value
        for key, value in sorted(own.items())
        if key not in WITHOUT_INFLUENCE and args.loader in loader_only.get(key, (args.loader,))
    }


def require_directory(path: Path, what: str, fix: str) -> None:
    """Raise a UserError where ``path`` is no directory."""
    if not path.is_dir():
        raise UserError(f"{what} not found", where=str(path), fix=fix)
