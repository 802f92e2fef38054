"""The parts of the check, in the order in which their answers matter where a GPU is first at hand."""

from gpu_check_parts import exact, host, killed_rank, lease, rest, smoke, spin, tuner, wire
from gpu_check_parts.runner import Part

# What most parts may take. A caller with a limit of 600 s for a command has time left for starting and for the report.
USUAL_S = 450.0


PARTS = (
    Part("smoke", "whether anything runs at all, and how long one case takes", 150.0, smoke.run),
    Part("spin", "what a waiting kernel of one process costs the compute of another, with and without MPS", 150.0,
         spin.run),
    Part("wire-resnet50", "how much of an emulated wire DeAR and plain DDP hide: ResNet-50", USUAL_S,
         wire.runs("resnet50")),
    Part("wire-vit_b_16", "the same: ViT-B/16", USUAL_S, wire.runs("vit_b_16")),
    Part("wire-bert_base", "the same: BERT-base", USUAL_S, wire.runs("bert_base")),
    Part("host", "host microseconds of a bucket, a leg, an update; memory beside plain DDP's", 300.0, host.run),
    Part("tuner", "whether the tuner and the plain path work, and whether the probe measures the wire", 400.0,
         tuner.run),
    Part("lease", "drains, gaps, run-ahead and two jobs on one GPU, with and without MPS", USUAL_S, lease.run),
    Part("killed-rank", "how soon and how the other rank ends when one is killed", 240.0, killed_rank.run),
    Part("exact", "the bits of plain DDP at world size 1, in every setting", USUAL_S, exact.run_exact),
    Part("streams", "no wait of the host, and no stream that reads too early", USUAL_S, exact.run_streams),
    Part("two-ranks", "the bits of plain DDP on two ranks, over gloo and NCCL", USUAL_S, exact.run_two_ranks),
    Part("rest", "traces, CUDA graphs, DDP built on another stream, torch.compile, alignment of groups", 400.0,
         rest.run),
)  # fmt: skip
