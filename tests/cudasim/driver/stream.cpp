// Streams and events. All work runs at once and in order, so waiting is free and a recorded event has happened.
#include "driver.h"

#include <chrono>

using Clock = std::chrono::steady_clock;
struct CUstream_st {};
struct CUevent_st {
    unsigned flags;
    bool recorded;
    Clock::time_point time;
};

DRIVER_API cuStreamCreate(CUstream *stream, unsigned) { NEED_CONTEXT(); *stream = new CUstream_st; return CUDA_SUCCESS; }
DRIVER_API cuStreamDestroy(CUstream stream) { delete stream; return CUDA_SUCCESS; }
DRIVER_API cuStreamSynchronize(CUstream) { NEED_CONTEXT(); return CUDA_SUCCESS; }
DRIVER_API cuStreamQuery(CUstream) { NEED_CONTEXT(); return CUDA_SUCCESS; }
DRIVER_API cuStreamWaitEvent(CUstream, CUevent, unsigned) { NEED_CONTEXT(); return CUDA_SUCCESS; }

DRIVER_API cuEventCreate(CUevent *event, unsigned flags) {
    NEED_CONTEXT();
    *event = new CUevent_st{flags, false, {}};
    return CUDA_SUCCESS;
}
DRIVER_API cuEventDestroy(CUevent event) { delete event; return CUDA_SUCCESS; }
DRIVER_API cuEventRecord(CUevent event, CUstream) {
    NEED_CONTEXT();
    event->time = Clock::now();
    event->recorded = true;
    return CUDA_SUCCESS;
}
DRIVER_API cuEventSynchronize(CUevent) { NEED_CONTEXT(); return CUDA_SUCCESS; }
DRIVER_API cuEventQuery(CUevent) { return CUDA_SUCCESS; }
DRIVER_API cuEventElapsedTime(float *elapsed_ms, CUevent start, CUevent end) {
    if (!start->recorded || !end->recorded || ((start->flags | end->flags) & CU_EVENT_DISABLE_TIMING))
        return CUDA_ERROR_INVALID_HANDLE;
    *elapsed_ms = std::chrono::duration<float, std::milli>(end->time - start->time).count();
    return CUDA_SUCCESS;
}
