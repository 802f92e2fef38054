"""Hugging Face's Trainer on a small GPT-2: accumulation, clipping, checkpoints and resuming.

    torchrun --nproc-per-node 2 docs/recipes/hf_trainer.py --dear --output-dir runs
    torchrun --nproc-per-node 2 docs/recipes/hf_trainer.py --dear --output-dir runs --resume runs/checkpoint-8

`--dear` adds one callback. The data are random tokens from a seed, and the model is tiny, so that it runs anywhere.
"""

import argparse
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from ddp_crossover.integrations.transformers import DearCallback

VOCABULARY, LENGTH = 64, 16


def sentences() -> list[dict[str, torch.Tensor]]:
    """192 sequences of random tokens, each its own target."""
    tokens = torch.randint(VOCABULARY, (192, LENGTH), generator=torch.Generator().manual_seed(7))
    return [{"input_ids": row, "labels": row} for row in tokens]


def main() -> None:
    """Train, and save what came out of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dear", action="store_true", help="overlap communication with compute")
    parser.add_argument("--out", type=Path, help="folder for the final state of every rank")
    parser.add_argument("--output-dir", default="runs", help="folder for checkpoints")
    parser.add_argument("--resume", help="checkpoint to go on from")
    parser.add_argument("--max-steps", type=int, default=16)
    parser.add_argument("--save-steps", type=int, default=0, help="0: no checkpoints")
    parser.add_argument("--accumulate", type=int, default=2, help="backward passes per optimizer step")
    args = parser.parse_args()

    set_seed(3)
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2)
    callbacks = [DearCallback(fusion_mb=0.02)] if args.dear else []  # without fusion_mb the size is searched for
    trainer = Trainer(
        GPT2LMHeadModel(config),
        TrainingArguments(
            args.output_dir,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=args.accumulate,
            max_steps=args.max_steps,
            save_strategy="steps" if args.save_steps else "no",
            save_steps=args.save_steps or 500,
            ddp_find_unused_parameters=False,
            use_cpu=not torch.cuda.is_available(),
            logging_steps=4,
            disable_tqdm=True,
            report_to="none",
        ),
        train_dataset=sentences(),
        callbacks=callbacks,
    )
    trainer.train(resume_from_checkpoint=args.resume)

    if args.dear and trainer.is_world_process_zero():
        print(callbacks[0].state.stats())
    if args.out:
        state = {"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()}
        torch.save(state, args.out / f"{trainer.args.process_index}.pt")


if __name__ == "__main__":
    main()
