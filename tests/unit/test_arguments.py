"""Command line of the training program."""

from __future__ import annotations

import pytest
from odb_workflow.runtime.errors import UserError
from odb_workflow.training.arguments import loader_settings, parse_arguments, training_identity

BASE = ["--model", "m", "--loader", "odb"]


def test_defaults_are_those_of_the_published_run() -> None:
    args = parse_arguments(BASE)
    assert (args.token_budget, args.buffer_size, args.prefetch_factor, args.num_workers) == (
        12288,
        1024,
        512,
        4,
    )
    assert (args.lr, args.lr_scheduler, args.warmup_ratio, args.max_grad_norm) == (1e-5, "cosine", 0.03, 4.0)
    assert (args.loss_scaling, args.join, args.fixed_batch_size, args.seed) == ("label_tokens", True, 1, 42)
    assert (args.max_length, args.image_max_pixels, args.val_size, args.split_seed) == (
        16384,
        589824,
        0.05,
        42,
    )
    assert (args.freeze_vision_tower, args.freeze_multimodal_projector, args.freeze_language_model) == (
        True,
        True,
        False,
    )
    assert (args.arm, str(args.output_dir)) == ("odb", "outputs/accelerate-real/odb")
    assert parse_arguments(["--model", "m", "--loader", "standard"]).prefetch_factor == 2


def test_the_published_command_line_is_taken() -> None:
    line = (
        "--loader odb --data data/mm-mix-tmdb --model Qwen/Qwen3-VL-2B-Instruct --token-budget 12288 "
        "--buffer-size 1024 --loss-scaling exact --join --deepspeed-config config/ds_z2.json "
        "--train-size 128 --max-steps 0"
    )
    args = parse_arguments(line.split())
    assert loader_settings(args).odb_loss_scaling == "exact"
    assert (args.train_size, args.max_steps, args.join) == (128, 0, True)


def test_label_token_scaling_is_not_odbs() -> None:
    assert loader_settings(parse_arguments(BASE)).odb_loss_scaling == "none"


def test_all_faults_are_listed_with_their_flags() -> None:
    with pytest.raises(UserError) as caught:
        parse_arguments(
            [*BASE, "--num-workers", "0", "--token-budget", "0", "--epochs", "0", "--warmup-ratio", "1"]
        )
    text = str(caught.value)
    for flag in ("--num-workers 0", "--token-budget 0", "--epochs 0", "--warmup-ratio 1"):
        assert flag in text


@pytest.mark.parametrize(
    ("flags", "same"),
    [
        (["--num-workers", "2"], True),
        (["--prefetch-factor", "7"], True),
        (["--checkpoint-every-samples", "5"], True),
        (["--output-dir", "elsewhere"], True),
        (["--performance", "reference"], True),
        (["--fixed-batch-size", "4"], True),  # another loader's key
        (["--lr", "1e-4"], False),
        (["--token-budget", "99"], False),
        (["--buffer-size", "99"], False),
        (["--padding", "pack"], False),
        (["--train-size", "9"], False),
        (["--optimizer-states", "16bit"], False),
    ],
)
def test_identity_holds_what_decides_the_result(flags: list[str], same: bool) -> None:
    assert (
        training_identity(parse_arguments(BASE)) == training_identity(parse_arguments([*BASE, *flags]))
    ) is same
