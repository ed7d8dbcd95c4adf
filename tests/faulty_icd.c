/* A faulty OpenCL runtime for tests: a real one with one function replaced.
 *
 * FAULTY_REAL names the real runtime's library, FAULTY_MODE what goes wrong:
 *   list-abort  the process aborts while the loader asks for platforms
 *   closed      no context can be created
 *   abort       the process aborts while a program is built
 *   hang        building a program never ends
 *   refuse      a program is refused
 *   refuse-once the first program is refused
 *   lie         kernels are not run, but report success
 * FAULTY_COUNT, when set, names a file that gets a byte for every context that is created.
 *
 * The numbers are places in the table of functions that every OpenCL object begins with; the ICD extension fixes them.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { CREATE_CONTEXT = 4, BUILD_PROGRAM = 30, ENQUEUE_ND_RANGE_KERNEL = 59, ENQUEUE_MARKER = 62 };

typedef int32_t (*get_platforms_t)(uint32_t, void **, uint32_t *);
typedef void *(*get_address_t)(const char *);
typedef int32_t (*get_platform_info_t)(void *, uint32_t, size_t, void *, size_t *);
typedef void *(*create_context_t)(const void *, uint32_t, const void *, void *, void *, int32_t *);
typedef int32_t (*build_program_t)(void *, uint32_t, const void *, const char *, void *, void *);
typedef int32_t (*enqueue_marker_t)(void *, void **);

static void **table;
static create_context_t real_create_context;

static int mode_is(const char *name) { return strcmp(getenv("FAULTY_MODE"), name) == 0; }

static void *real(const char *name) {
    static void *library;
    if (!library) library = dlopen(getenv("FAULTY_REAL"), RTLD_NOW | RTLD_GLOBAL);
    return library ? dlsym(library, name) : NULL;
}

static void *create_context(const void *a, uint32_t b, const void *c, void *d, void *e, int32_t *status) {
    const char *count = getenv("FAULTY_COUNT");
    if (count) {
        int file = open(count, O_WRONLY | O_CREAT | O_APPEND, 0600);
        if (file < 0 || write(file, "x", 1) != 1) abort();
        close(file);
    }
    if (mode_is("closed")) {
        *status = -6; /* CL_OUT_OF_HOST_MEMORY */
        return NULL;
    }
    return real_create_context(a, b, c, d, e, status);
}

static int32_t build_aborts(void) { abort(); }

static int32_t build_hangs(void) {
    for (;;) pause();
    return 0;
}

static int32_t build_refuses(void) { return -11; /* CL_BUILD_PROGRAM_FAILURE */ }

static build_program_t real_build_program;

static int32_t build_refuses_once(void *a, uint32_t b, const void *c, const char *d, void *e, void *f) {
    static int asked;
    return asked++ ? real_build_program(a, b, c, d, e, f) : build_refuses();
}

static int32_t enqueue_nothing(void *queue, void *kernel, uint32_t dimensions, const size_t *offset,
                               const size_t *global, const size_t *local, uint32_t count, const void *wait,
                               void **event) {
    (void)kernel, (void)dimensions, (void)offset, (void)global, (void)local, (void)count, (void)wait;
    void *ignored;
    return ((enqueue_marker_t)table[ENQUEUE_MARKER])(queue, event ? event : &ignored);
}

static void replace(int place, void *function) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    uintptr_t start = (uintptr_t)&table[place] & ~(page - 1);
    if (mprotect((void *)start, 2 * page, PROT_READ | PROT_WRITE)) abort();
    table[place] = function;
}

static int32_t get_platforms(uint32_t wanted, void **platforms, uint32_t *found) {
    if (mode_is("list-abort")) abort();
    int32_t status = ((get_platforms_t)((get_address_t)real("clGetExtensionFunctionAddress"))(
        "clIcdGetPlatformIDsKHR"))(wanted, platforms, found);
    if (status || !platforms || table) return status;
    table = *(void ***)platforms[0];
    real_create_context = (create_context_t)table[CREATE_CONTEXT];
    replace(CREATE_CONTEXT, (void *)create_context);
    if (mode_is("abort")) replace(BUILD_PROGRAM, (void *)build_aborts);
    if (mode_is("hang")) replace(BUILD_PROGRAM, (void *)build_hangs);
    real_build_program = (build_program_t)table[BUILD_PROGRAM];
    if (mode_is("refuse-once")) replace(BUILD_PROGRAM, (void *)build_refuses_once);
    if (mode_is("refuse")) replace(BUILD_PROGRAM, (void *)build_refuses);
    if (mode_is("lie")) replace(ENQUEUE_ND_RANGE_KERNEL, (void *)enqueue_nothing);
    return status;
}

int32_t clGetPlatformInfo(void *platform, uint32_t name, size_t size, void *value, size_t *needed) {
    return ((get_platform_info_t)real("clGetPlatformInfo"))(platform, name, size, value, needed);
}

void *clGetExtensionFunctionAddress(const char *name) {
    if (strcmp(name, "clIcdGetPlatformIDsKHR") == 0) return (void *)get_platforms;
    return ((get_address_t)real("clGetExtensionFunctionAddress"))(name);
}
