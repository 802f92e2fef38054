"""Memory of the fusion buffers, and copies of gradients into it."""
