"""Data larger than memory, and several workers: Dask is the engine."""
