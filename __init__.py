"""attnforge: generated attention kernels for mixed-mask multimodal training."""
