"""Judging results: input sets, error bounds, comparisons, and kernels that users wrote."""
