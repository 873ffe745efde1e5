"""Training BAGEL on our kernels: the patch of its trainers, recording of packs, compiling ahead."""
