"""Compilers, the cache of compiled kernels, settings and errors."""
