"""Hugging Face's Trainer with ranks whose batches have different numbers of tokens.

    torchrun --nproc-per-node 2 docs/recipes/hf_token_weights.py --weights batch

Gradients are those of the mean over all tokens of all ranks and micro-batches. `--weights trainer` is what the Trainer
does by itself, which is right for this model, too. `--weights none` shows what is wrong without either: each rank's
mean counts the same. The data are random tokens from a seed, in sequences of 4 to 16, and the model is tiny, so that it
runs anywhere.
"""

import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from ddp_crossover.integrations.transformers import DearCallback

VOCABULARY, LENGTH, IGNORED, GLOBAL_BATCH = 64, 16, -100, 8


def sentences() -> list[dict[str, torch.Tensor]]:
    """192 sequences of random tokens, each its own target, and padding that the loss ignores."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(VOCABULARY, (192, LENGTH), generator=generator)
    lengths = torch.randint(4, LENGTH + 1, (192, 1), generator=generator)
    labels = tokens.where(torch.arange(LENGTH) < lengths, IGNORED)
    return [{"input_ids": ids, "labels": targets} for ids, targets in zip(tokens, labels, strict=True)]


def tokens_of(inputs) -> int:
    """Over how many tokens the loss of a micro-batch is a sum: the first one of a sequence is no target."""
    return int((inputs["labels"][:, 1:] != IGNORED).sum())


class WeightedTrainer(Trainer):
    """Divides losses by the tokens of this rank in all micro-batches of a step, and weights ranks by these.

    Args:
        dear: a `DearCallback(weighted=True)`.
    """

    def __init__(self, *args, dear: DearCallback, **kwargs) -> None:
        super().__init__(*args, callbacks=[dear], **kwargs)
        self.args.average_tokens_across_devices = False  # would weight a second time
        self.dear = dear

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        return batches, sum(map(tokens_of, batches))

    def training_step(self, model, inputs, num_items_in_batch=None):
        with self.dear.batch(tokens_of(inputs)):
            return super().training_step(model, inputs, num_items_in_batch)


def main() -> None:
    """Train, and save what came out of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--weights", choices=["batch", "trainer", "none"], default="batch")
    parser.add_argument("--out", type=Path, help="folder for the final state of every rank")
    parser.add_argument("--max-steps", type=int, default=16)
    parser.add_argument("--accumulate", type=int, default=2, help="backward passes per optimizer step")
    args = parser.parse_args()

    set_seed(3)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        **dict.fromkeys(("bos_token_id", "eos_token_id")),
    )
    options = TrainingArguments(
        "runs",
        average_tokens_across_devices=args.weights == "trainer",
        gradient_accumulation_steps=args.accumulate,
        max_steps=args.max_steps,
        optim="sgd",
        learning_rate=0.1,
        save_strategy="no",
        ddp_find_unused_parameters=False,
        use_cpu=not torch.cuda.is_available(),
        logging_steps=4,
        disable_tqdm=True,
        report_to="none",
    )
    options.per_device_train_batch_size = GLOBAL_BATCH // options.world_size
    model = LlamaForCausalLM(config)
    if args.weights == "batch":
        dear = DearCallback(weighted=True, fusion_mb=0.02)  # without fusion_mb the size is searched for
        trainer = WeightedTrainer(model, options, train_dataset=sentences(), dear=dear)
    else:
        trainer = Trainer(model, options, train_dataset=sentences())
    trainer.train()

    if args.weights == "batch" and dear.state and trainer.is_world_process_zero():
        print(dear.state.stats())
    if args.out:
        torch.save(trainer.model.state_dict(), args.out / f"{trainer.args.process_index}.pt")


if __name__ == "__main__":
    main()
