// The half type of CUDA, for programs that pass it on; arithmetic is the host compiler's.
#pragma once
using __half = _Float16;
