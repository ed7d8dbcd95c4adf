"""CUDA through PyCUDA, with kernels that nvcc compiles for the device at hand. Importing this loads no CUDA
library."""

from dispatcher.backends.cuda.backend import CudaBackend

BACKEND = CudaBackend()
