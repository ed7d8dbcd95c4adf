"""Users' own CUDA kernels, on the simulator or a GPU: both forms, their signatures, and what nvcc is told."""
