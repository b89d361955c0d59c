"""The training loop."""

from __future__ import annotations

from typing import Literal

from .faults import shape_told
from .loss_scaling import loss_factor
from .run import TrainingRun
from .steps import agreed_steps

Ending = Literal["finished", "max_steps", "stopped"]


def train_epochs(run: TrainingRun) -> Ending:
    """Train until every sample of every epoch was emitted, or the run is stopped.

    Returns:
        ``finished``, ``max_steps`` (the limit was reached), or ``stopped`` (SIGTERM or Ctrl-C; a resume point
        is kept).
    """
    for epoch in run.remaining_epochs():
        with run.open_epoch(epoch) as loader:
            for step in agreed_steps(
                loader,
                run.ranks,
                run.stop,
                run.mover,
                run.args.gradient_accumulation_steps,
                run.resume_point_due,
            ):
                rate = run.schedule.rate(run.progress(step))
                losses = []
                for number, micro in enumerate(step.micro_batches, start=1):
                    factor = loss_factor(
                        run.args.loss_scaling,
                        micro.counts,
                        step_label_tokens=step.counts.label_tokens,
                        step_real_tokens=step.counts.real_tokens,
                        micro_batches=len(step.micro_batches),
                        world_size=run.ranks.world_size,
                    )
                    last = number == len(step.micro_batches)
                    with shape_told(micro):
                        losses.append(run.engine.accumulate(micro.tensors, factor, last))
                norm = run.engine.step(rate)
                run.note(step, epoch, rate, losses, norm)

                if step.counts.save or step.counts.stop:
                    run.save_resume_point()
                if step.counts.stop:
                    return "stopped"
                if run.book.totals.step == run.args.max_steps:
                    return "max_steps"
        run.close_epoch(epoch)
    return "finished"
