"""trl: `SFTTrainer`, or `DPOTrainer` (`--dpo`) or `GRPOTrainer` (`--grpo`) with LoRA adapters."""

import sys
from pathlib import Path

import digests
import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

WORDS = ["<pad>", "<unk>", "<s>", "</s>", *(f"w{i}" for i in range(60))]


def make_tokenizer() -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def sentence() -> str:
    return " ".join(f"w{i}" for i in torch.randint(0, 60, (8,)).tolist())


def main() -> None:
    set_seed(5)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=2, eos_token_id=3,
        )
    )  # fmt: skip
    common = {
        "output_dir": "saved", "max_steps": 14, "per_device_train_batch_size": 4, "use_cpu": True, "seed": 5,
        "save_strategy": "steps", "save_steps": 7, "report_to": [], "disable_tqdm": True, "learning_rate": 1e-3,
        "bf16": False, "gradient_checkpointing": "--checkpointing" in sys.argv, "ddp_backend": "gloo",
        "max_grad_norm": 0.0, "logging_steps": 5,
    }  # fmt: skip
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    tokenizer = make_tokenizer()
    if "--dpo" in sys.argv:
        data = [{"prompt": sentence(), "chosen": sentence(), "rejected": sentence()} for _ in range(64)]
        trainer = DPOTrainer(
            model, args=DPOConfig(**common), train_dataset=Dataset.from_list(data), processing_class=tokenizer,
            peft_config=adapters,
        )  # fmt: skip
    elif "--grpo" in sys.argv:
        data = [{"prompt": sentence()} for _ in range(64)]
        trainer = GRPOTrainer(
            model, args=GRPOConfig(**common, num_generations=4, max_completion_length=8, beta=0.1),
            train_dataset=Dataset.from_list(data), processing_class=tokenizer,
            reward_funcs=lambda completions, **_: [float(len(set(text.split()))) for text in completions],
            peft_config=adapters,
        )  # fmt: skip
    else:
        data = [{"text": sentence()} for _ in range(64)]
        trainer = SFTTrainer(
            model, args=SFTConfig(**common, packing=False), train_dataset=Dataset.from_list(data),
            processing_class=tokenizer,
        )  # fmt: skip
    trainer.train()
    trainer.accelerator.wait_for_everyone()
    (weights,) = Path("saved/checkpoint-14").glob("*model.safetensors")
    optimizer = trainer.optimizer.optimizer
    trained = trainer.accelerator.unwrap_model(trainer.model)
    digests.say(trained, optimizer, weights, Path("saved/checkpoint-14/optimizer.pt"))


if __name__ == "__main__":
    main()
