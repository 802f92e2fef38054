"""flair: `ModelTrainer.train(multi_gpu=True)` of a text classifier, mini-batches in chunks, clipping by norm."""

from pathlib import Path

import cpu_ddp
import digests
import flair
import torch
from flair.data import Corpus, Sentence
from flair.datasets import FlairDatapointDataset
from flair.embeddings import DocumentRNNEmbeddings, OneHotEmbeddings
from flair.models import TextClassifier
from flair.trainers import ModelTrainer


def sentences(count: int) -> list[Sentence]:
    made = []
    for _ in range(count):
        words = torch.randint(0, 30, (6,)).tolist()
        sentence = Sentence(" ".join(f"w{word}" for word in words))
        sentence.add_label("kind", str(sum(words) % 3))
        made.append(sentence)
    return made


def main() -> None:
    torch.distributed.init_process_group("gloo")
    flair.device = torch.device("cpu")
    flair.set_seed(5)
    corpus = Corpus(*(FlairDatapointDataset(sentences(count)) for count in (96, 16, 16)))
    labels = corpus.make_label_dictionary("kind")
    embeddings = DocumentRNNEmbeddings(
        [OneHotEmbeddings.from_corpus(corpus, embedding_length=16)], hidden_size=24, reproject_words=False
    )
    model = TextClassifier(embeddings, label_type="kind", label_dictionary=labels)
    kept = cpu_ddp.Kept()
    ModelTrainer(model, corpus).train(
        "saved", optimizer=torch.optim.AdamW, learning_rate=5e-3, mini_batch_size=8, mini_batch_chunk_size=4,
        max_epochs=4, multi_gpu=True,
    )  # fmt: skip
    digests.say(model, kept.optimizers, Path("saved/final-model.pt"))


if __name__ == "__main__":
    main()
