"""sentence-transformers: `SentenceTransformerTrainer`, clipping and checkpoints; with `--cached` its cached loss."""

import os
import sys
from pathlib import Path

import digests
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import CachedMultipleNegativesRankingLoss, MultipleNegativesRankingLoss
from sentence_transformers.models import Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast, set_seed


def make_encoder(folder: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{i}" for i in range(60))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]"
    )
    tokenizer.save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    BertModel(config).save_pretrained(folder)


def main() -> None:
    set_seed(5)
    folder = Path(f"encoder{os.environ['RANK']}")
    make_encoder(folder)
    encoder = Transformer(str(folder), max_seq_length=16)
    model = SentenceTransformer(modules=[encoder, Pooling(32)], device="cpu")

    def sentence() -> str:
        return " ".join(f"w{i}" for i in torch.randint(0, 60, (8,)).tolist())

    data = Dataset.from_dict({name: [sentence() for _ in range(128)] for name in ("anchor", "positive")})
    loss = (
        CachedMultipleNegativesRankingLoss(model, mini_batch_size=4)
        if "--cached" in sys.argv
        else MultipleNegativesRankingLoss(model)
    )
    arguments = SentenceTransformerTrainingArguments(
        "saved",
        num_train_epochs=5,
        per_device_train_batch_size=8,
        use_cpu=True,
        save_strategy="epoch",
        report_to=[],
        disable_tqdm=True,
        learning_rate=1e-3,
        warmup_ratio=0.1,
        ddp_backend="gloo",
        seed=5,
    )
    trainer = SentenceTransformerTrainer(model, arguments, train_dataset=data, loss=loss)
    trainer.train()
    trainer.accelerator.wait_for_everyone()
    last = Path(f"saved/checkpoint-{trainer.state.max_steps}")
    digests.say(model, trainer.optimizer.optimizer, last / "model.safetensors", last / "optimizer.pt")


if __name__ == "__main__":
    main()
