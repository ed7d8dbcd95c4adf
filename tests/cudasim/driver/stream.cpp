// Streams, events and graphs. An operation may run once those have that it comes after: the one before it in its stream,
// those of events that it waits for, and, by the rules of the legacy default stream, some in other streams. Which of
// those that may run do run, and when, DISPATCHER_CUDA_SIM_STREAMS says: all at once ("eager"); only what somebody waits
// for ("late"); or any of them, whenever somebody waits, by a seed for the choice ("7").
#include "driver.h"

#include <algorithm>
#include <chrono>
#include <random>
#include <set>
#include <thread>
#include <utility>

using Clock = std::chrono::steady_clock;

namespace {

struct Operation;
using OperationPtr = std::shared_ptr<Operation>;
struct Operation {
    driver::Work work;  // may be empty
    std::vector<OperationPtr> after;
    bool done = false;
    Clock::time_point time;
};

// A sequence of operations that becomes a graph.
struct Capture {
    uint64_t id;
    CUstreamCaptureMode mode;
    CUstream origin;
    std::thread::id thread = std::this_thread::get_id();
    bool active = true, valid = true;
    std::vector<OperationPtr> nodes;
};
using CapturePtr = std::shared_ptr<Capture>;

std::vector<OperationPtr> pending;  // in the order in which they were put in
std::set<CUstream> streams;         // all that were ever made: a stale handle is never another stream
std::vector<CapturePtr> captures;   // under way
thread_local CUstreamCaptureMode interaction = CU_STREAM_CAPTURE_MODE_GLOBAL;

}  // namespace

struct CUstream_st {
    int device;
    bool blocking, legacy, alive = true;
    OperationPtr last, before_capture;
    CapturePtr capture;
};
struct CUevent_st {
    unsigned flags;
    OperationPtr operation;
    CapturePtr capture;  // that it was recorded in
};
struct CUgraph_st {
    std::vector<OperationPtr> nodes;
};
struct CUgraphExec_st {
    std::vector<OperationPtr> nodes;
};

namespace driver {

// ---- running
static CUresult run(const OperationPtr &operation) {
    CUresult error = operation->work ? operation->work() : CUDA_SUCCESS;
    operation->work = nullptr;
    operation->after.clear();
    operation->time = Clock::now();
    operation->done = true;
    return error;
}

static std::set<OperationPtr> all_before(const OperationPtr &target) {
    if (!target || target->done) return {};
    std::set<OperationPtr> found{target};
    for (std::vector<OperationPtr> open{target}; !open.empty();) {
        OperationPtr operation = open.back();
        open.pop_back();
        for (const OperationPtr &other : operation->after)
            if (!other->done && found.insert(other).second) open.push_back(other);
    }
    return found;
}

static bool ready(const OperationPtr &operation) {
    return std::all_of(operation->after.begin(), operation->after.end(), [](const OperationPtr &o) { return o->done; });
}

// Runs what `target` needs, or at most `count` operations of that; returns the first error.
static CUresult finish(const OperationPtr &target, size_t count = SIZE_MAX) {
    CUresult first = CUDA_SUCCESS;
    std::set<OperationPtr> wanted = all_before(target);
    static std::mt19937 generator;
    static int seed = -1;
    if (seed != stream_seed()) generator.seed(seed = stream_seed());
    for (; !wanted.empty() && count; count--) {
        std::vector<OperationPtr> choice;
        for (const OperationPtr &operation : pending)
            if ((seed >= 0 || wanted.count(operation)) && ready(operation)) choice.push_back(operation);
        OperationPtr chosen = choice[seed >= 0 ? generator() % choice.size() : 0];
        CUresult error = run(chosen);
        if (!first) first = error;
        wanted.erase(chosen);
        pending.erase(std::find(pending.begin(), pending.end(), chosen));
    }
    return first;
}

CUresult finish_all() {
    Lock lock(mutex);
    CUresult first = CUDA_SUCCESS;
    while (!pending.empty()) {
        CUresult error = finish(pending.back());
        if (!first) first = error;
    }
    return first;
}

bool anything_pending() { return !pending.empty(); }

// ---- putting in
static CUstream resolve(CUstream handle) {
    static std::map<int, CUstream> legacy;
    if (handle == nullptr || handle == CU_STREAM_LEGACY) {
        CUstream &own = legacy[current_context()->device];
        if (!own) own = new CUstream_st{current_context()->device, false, true};
        return own;
    }
    return streams.count(handle) && handle->alive ? handle : nullptr;
}

static CUresult invalidate(const CapturePtr &capture, CUresult error, const char *reason) {
    capture->valid = false;
    return fail(error, reason);
}

// What the legacy default stream and the others wait for in each other.
static void add_implicit(CUstream stream, std::vector<OperationPtr> &after) {
    if (stream->blocking && resolve(nullptr)->last) after.push_back(resolve(nullptr)->last);
    if (stream->legacy)
        for (CUstream other : streams)
            if (other->blocking && other->device == stream->device && other->last) after.push_back(other->last);
}

static CUresult put(CUstream stream, Work work, std::vector<OperationPtr> after = {}) {
    auto operation = std::make_shared<Operation>();
    if (stream->last) after.push_back(stream->last);
    if (stream->capture) {
        if (!stream->capture->valid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        stream->capture->nodes.push_back(operation);
    } else {
        for (const CapturePtr &capture : captures)
            if (stream->legacy && capture->origin->blocking)
                return invalidate(capture, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, "the legacy stream, while a stream is captured that waits for it");
        add_implicit(stream, after);
        pending.push_back(operation);
    }
    operation->work = std::move(work);
    operation->after = std::move(after);
    stream->last = operation;
    return !stream->capture && eager_streams() ? finish_all() : CUDA_SUCCESS;
}

CUresult enqueue(CUstream handle, Work work) {
    Lock lock(mutex);
    CUstream stream = resolve(handle);
    return stream ? put(stream, std::move(work)) : fail(CUDA_ERROR_INVALID_HANDLE, "no such stream, or not any more");
}

bool is_capturing(CUstream handle) {
    Lock lock(mutex);
    CUstream stream = resolve(handle);
    return stream && stream->capture;
}

CUresult finish_stream(CUstream handle) {
    Lock lock(mutex);
    CUstream stream = resolve(handle);
    if (!stream) return fail(CUDA_ERROR_INVALID_HANDLE, "no such stream, or not any more");
    if (stream->capture)
        return invalidate(stream->capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "waiting for a stream that is captured");
    return finish(stream->last);
}

CUresult unsafe_in_capture(const char *what) {
    Lock lock(mutex);
    if (interaction == CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_SUCCESS;
    for (const CapturePtr &capture : captures) {
        bool own = capture->thread == std::this_thread::get_id() && capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED;
        bool global = interaction == CU_STREAM_CAPTURE_MODE_GLOBAL && capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
        if (own || global) {
            capture->valid = false;
            return fail(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, std::string(what) + " while a stream is captured");
        }
    }
    return CUDA_SUCCESS;
}

}  // namespace driver

using namespace driver;

#define NEED_STREAM(stream) NEED_CONTEXT(); Lock lock(mutex); \
    if (!(stream = resolve(stream))) return fail(CUDA_ERROR_INVALID_HANDLE, "no such stream, or not any more")

// ---- streams
DRIVER_API cuStreamCreate(CUstream *stream, unsigned flags) {
    NEED_CONTEXT();
    Lock lock(mutex);
    *stream = new CUstream_st{current_context()->device, !(flags & CU_STREAM_NON_BLOCKING), false};
    streams.insert(*stream);
    return CUDA_SUCCESS;
}
DRIVER_API cuStreamDestroy(CUstream stream) {
    NEED_STREAM(stream);
    stream->alive = false;
    return CUDA_SUCCESS;
}
DRIVER_API cuStreamSynchronize(CUstream stream) {
    NEED_CONTEXT();
    NEED_SAFE("cuStreamSynchronize");
    return finish_stream(stream);
}
DRIVER_API cuStreamQuery(CUstream stream) {
    NEED_SAFE("cuStreamQuery");
    NEED_STREAM(stream);
    if (stream->capture)
        return invalidate(stream->capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "asking a stream that is captured");
    if (!stream->last || stream->last->done) return CUDA_SUCCESS;
    CUresult error = finish(stream->last, 1);  // so that whoever keeps asking comes to an end
    return error ? error : CUDA_ERROR_NOT_READY;
}
DRIVER_API cuStreamWaitEvent(CUstream stream, CUevent event, unsigned) {
    NEED_STREAM(stream);
    if (!event->operation) return CUDA_SUCCESS;
    if (event->capture && !event->capture->active) return CUDA_ERROR_CAPTURED_EVENT;
    if (stream->capture && event->capture != stream->capture)
        return event->capture ? invalidate(stream->capture, CUDA_ERROR_STREAM_CAPTURE_MERGE, "two captures meet")
                              : invalidate(stream->capture, CUDA_ERROR_STREAM_CAPTURE_ISOLATION,
                                           "a captured stream waits for an event that is not captured");
    if (event->capture && !stream->capture) {  // the stream becomes part of the capture
        if (stream->legacy)
            return invalidate(event->capture, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, "the legacy stream waits for a capture");
        stream->capture = event->capture;
        stream->before_capture = std::exchange(stream->last, nullptr);
    }
    return put(stream, nullptr, {event->operation});
}
DRIVER_API cuCtxSynchronize() {
    NEED_CONTEXT();
    for (const CapturePtr &capture : captures)
        return invalidate(capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "cuCtxSynchronize while a stream is captured");
    return finish_all();
}

// ---- events
DRIVER_API cuEventCreate(CUevent *event, unsigned flags) {
    NEED_CONTEXT();
    *event = new CUevent_st{flags, nullptr, nullptr};
    return CUDA_SUCCESS;
}
DRIVER_API cuEventDestroy(CUevent event) { delete event; return CUDA_SUCCESS; }
DRIVER_API cuEventRecord(CUevent event, CUstream stream) {
    NEED_STREAM(stream);
    CUresult error = put(stream, nullptr);
    event->operation = stream->last;
    event->capture = stream->capture;
    return error;
}
DRIVER_API cuEventSynchronize(CUevent event) {
    NEED_CONTEXT();
    NEED_SAFE("cuEventSynchronize");
    Lock lock(mutex);
    return event->capture ? CUDA_ERROR_CAPTURED_EVENT : finish(event->operation);
}
DRIVER_API cuEventQuery(CUevent event) {
    NEED_SAFE("cuEventQuery");
    Lock lock(mutex);
    if (event->capture) return CUDA_ERROR_CAPTURED_EVENT;
    if (!event->operation || event->operation->done) return CUDA_SUCCESS;
    CUresult error = finish(event->operation, 1);
    return error ? error : CUDA_ERROR_NOT_READY;
}
DRIVER_API cuEventElapsedTime(float *elapsed_ms, CUevent start, CUevent end) {
    if (!start->operation || !end->operation || ((start->flags | end->flags) & CU_EVENT_DISABLE_TIMING))
        return CUDA_ERROR_INVALID_HANDLE;
    if (!start->operation->done || !end->operation->done) return CUDA_ERROR_NOT_READY;
    *elapsed_ms = std::chrono::duration<float, std::milli>(end->operation->time - start->operation->time).count();
    return CUDA_SUCCESS;
}

// ---- capture, and graphs
DRIVER_API cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
    std::swap(*mode, interaction);
    return CUDA_SUCCESS;
}
DRIVER_API cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode mode) {
    NEED_STREAM(stream);
    static uint64_t count;
    if (stream->legacy) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (stream->capture) return CUDA_ERROR_ILLEGAL_STATE;
    stream->capture = std::make_shared<Capture>(Capture{++count, mode, stream});
    stream->before_capture = std::exchange(stream->last, nullptr);
    captures.push_back(stream->capture);
    return CUDA_SUCCESS;
}
DRIVER_API cuStreamGetCaptureInfo_v2(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *,
                                     const CUgraphNode **, size_t *) {
    NEED_STREAM(stream);
    for (const CapturePtr &capture : captures)
        if (stream->legacy && capture->origin->blocking) return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    *status = !stream->capture         ? CU_STREAM_CAPTURE_STATUS_NONE
              : stream->capture->valid ? CU_STREAM_CAPTURE_STATUS_ACTIVE
                                       : CU_STREAM_CAPTURE_STATUS_INVALIDATED;
    if (id && stream->capture) *id = stream->capture->id;
    return CUDA_SUCCESS;
}
DRIVER_API cuStreamEndCapture(CUstream stream, CUgraph *graph) {
    NEED_STREAM(stream);
    CapturePtr capture = stream->capture;
    *graph = nullptr;
    if (!capture || capture->origin != stream) return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && capture->thread != std::this_thread::get_id())
        return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    std::set<OperationPtr> joined = all_before(stream->last);
    bool all_joined = true;
    for (CUstream other : streams) {
        if (other->capture != capture) continue;
        all_joined = all_joined && (!other->last || joined.count(other->last));
        other->last = std::exchange(other->before_capture, nullptr);
        other->capture = nullptr;
    }
    capture->active = false;
    captures.erase(std::find(captures.begin(), captures.end(), capture));
    if (!capture->valid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (!all_joined) return fail(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, "a stream of the capture was not joined");
    *graph = new CUgraph_st{capture->nodes};
    return CUDA_SUCCESS;
}
DRIVER_API cuGraphInstantiateWithFlags(CUgraphExec *executable, CUgraph graph, unsigned long long) {
    *executable = new CUgraphExec_st{graph->nodes};
    return CUDA_SUCCESS;
}
DRIVER_API cuGraphDestroy(CUgraph graph) { delete graph; return CUDA_SUCCESS; }
DRIVER_API cuGraphExecDestroy(CUgraphExec executable) { delete executable; return CUDA_SUCCESS; }
DRIVER_API cuGraphLaunch(CUgraphExec executable, CUstream stream) {
    NEED_STREAM(stream);
    if (stream->capture)
        return invalidate(stream->capture, CUDA_ERROR_NOT_SUPPORTED, "a graph in a graph");
    CUresult error = put(stream, nullptr);
    std::map<OperationPtr, OperationPtr> copies;
    std::vector<OperationPtr> all;
    for (const OperationPtr &node : executable->nodes) {
        auto copy = std::make_shared<Operation>(Operation{node->work, {stream->last}});
        for (const OperationPtr &other : node->after) copy->after.push_back(copies.at(other));
        copies[node] = copy;
        all.push_back(copy);
        pending.push_back(copy);
    }
    CUresult end = put(stream, nullptr, all);
    return error ? error : end;
}
