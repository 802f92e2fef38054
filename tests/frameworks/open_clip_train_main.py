"""open_clip: `open_clip_train.main` on a csv file of images, with accumulation if told so, and checkpoints."""

import json
import os
import random
import sys
from pathlib import Path

import cpu_ddp
import digests
import open_clip
from open_clip_train.main import main
from PIL import Image

CONFIG = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 64, "patch_size": 8, "head_width": 32},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 64, "heads": 2, "layers": 2},
}


def write_data(folder: Path) -> Path:
    folder.mkdir()
    generator = random.Random(5)
    rows = ["filepath,title"]
    for index in range(64):
        color = tuple(generator.randrange(256) for _ in range(3))
        path = folder / f"{index}.png"
        Image.new("RGB", (40, 40), color).save(path)
        rows.append(f"{path},a square of {color[0]} red {color[1]} green {color[2]} blue")
    (folder / "data.csv").write_text("\n".join(rows))
    return folder / "data.csv"


if __name__ == "__main__":
    folder = Path(f"of_rank{os.environ['RANK']}").absolute()
    data = write_data(folder)
    (folder / "tiny.json").write_text(json.dumps(CONFIG))
    open_clip.add_model_config(folder / "tiny.json")
    kept = cpu_ddp.Kept()
    arguments = ["--model", "tiny", "--train-data", str(data), "--dataset-type", "csv", "--csv-separator", ","]
    arguments += ["--batch-size", "8", "--epochs", "5", "--workers", "0", "--lr", "1e-3", "--warmup", "4"]
    arguments += ["--device", "cpu", "--precision", "fp32", "--dist-backend", "gloo", "--logs", "logs", "--name", "run"]
    main([*arguments, *sys.argv[1:]])
    digests.say(kept.model, kept.optimizers, Path("logs/run/checkpoints/epoch_5.pt"))
