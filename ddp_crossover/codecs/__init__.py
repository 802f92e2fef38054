"""What gradients are on the wire: codes of flat slices. Pure: knows no ranks, messages or optimizers."""
