"""OpenCL backend: any OpenCL device through PyOpenCL; CPUs through PoCL or Intel's runtime."""

from dispatcher.backends.opencl.backend import OpenClBackend

BACKEND = OpenClBackend()
