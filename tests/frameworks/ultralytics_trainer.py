"""ultralytics: `DetectionTrainer` of a small YOLO on made-up images: an average of weights, warm-up, checkpoints."""

import os
import random
from pathlib import Path
from typing import Any

import cpu_ddp  # noqa: F401
import digests
import torch
import yaml
from PIL import Image, ImageDraw
from ultralytics.models.yolo.detect import DetectionTrainer


def write_data(folder: Path) -> Path:
    generator = random.Random(5)
    for part, count in (("train", 32), ("val", 8)):
        (folder / "images" / part).mkdir(parents=True)
        (folder / "labels" / part).mkdir(parents=True)
        for index in range(count):
            image = Image.new("RGB", (64, 64), (generator.randrange(99),) * 3)
            x, y, size = generator.randrange(8, 36), generator.randrange(8, 36), generator.randrange(10, 24)
            ImageDraw.Draw(image).rectangle((x, y, x + size, y + size), fill=(220, 40, generator.randrange(256)))
            image.save(folder / "images" / part / f"{index}.png")
            box = [(x + size / 2) / 64, (y + size / 2) / 64, size / 64, size / 64]
            (folder / "labels" / part / f"{index}.txt").write_text("0 " + " ".join(f"{value:.4f}" for value in box))
    (folder / "data.yaml").write_text(
        yaml.safe_dump({"path": str(folder), "train": "images/train", "val": "images/val", "names": {0: "box"}})
    )
    return folder / "data.yaml"


class CpuTrainer(DetectionTrainer):
    """ultralytics trains on CPUs in one process; here two ranks meet over gloo."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.world_size, self.ddp = 2, False

    def _setup_ddp(self) -> None:
        self.device = torch.device("cpu")

    def final_eval(self) -> None:
        """Left out: it looks for a GPU."""


def main() -> None:
    torch.distributed.init_process_group("gloo")
    folder = Path(f"of_rank{os.environ['RANK']}").absolute()
    folder.mkdir()
    data = write_data(folder)
    trainer = CpuTrainer(
        overrides={
            "model": "yolov8n.yaml", "data": str(data), "epochs": 2, "batch": 8, "imgsz": 64, "device": "cpu",
            "workers": 0, "amp": False, "plots": False, "project": str(Path("saved").absolute()), "name": "run",
            "exist_ok": True, "seed": 5, "val": False, "verbose": False, "warmup_epochs": 1.0, "nbs": 8,
        }
    )  # fmt: skip
    trainer.train()
    torch.distributed.barrier()
    digests.say(trainer.model, trainer.optimizer, trainer.last)


if __name__ == "__main__":
    main()
