"""The OpenKernel challenge."""
