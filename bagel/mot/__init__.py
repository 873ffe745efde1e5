"""A Mixture-of-Transformers layer and a small model on packed sequences."""
