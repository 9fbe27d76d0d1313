/* Declarations that the parts of the dry runtime share; NVIDIA's interfaces are not declared here.
 *
 * The dry runtime stands in for NVIDIA's libraries under the CUDA build of torch. It keeps track of memory, streams,
 * events and graphs, and returns a device's properties; kernels and library calls return success and compute nothing.
 * Handles and structures have the documented layout (CUDA Runtime API and Driver API reference); abi.h has the numbers.
 */
#ifndef DRY_H
#define DRY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A name that programs link with; everything else is hidden by -fvisibility=hidden. */
#define API __attribute__((visibility("default")))
/* A parameter of the interface that memory does not depend on. */
#define IGNORED __attribute__((unused))

#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)
#define GIB ((size_t)1 << 30)

static inline size_t round_up(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

/* errors.c: sets the last error of this thread, which cudaGetLastError returns. */
int fail(int error);

/* trace.c: a line on stderr for each call, where PYTEST_GPUMEM_DRY_TRACE is set. */
void trace(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* devices.c: the GPUs of this machine, from PYTEST_GPUMEM_DRY_DEVICES. */
struct device {
    char name[256];
    size_t memory;
    int64_t major, minor, sms, threads, l2, shared, optin, blocks, bus_width;
    int64_t bandwidth; /* of the memory, GB/s */
    unsigned char uuid[16];
    int64_t instance;  /* not 0: a MIG instance of the GPU that is listed before it */
    int64_t instances; /* the most MIG instances; 0: MIG cannot divide it */
    bool is_divided;   /* a GPU that has instances */
    int index;         /* in the machine, without CUDA_VISIBLE_DEVICES; instances count */
    int gpu;           /* the number of the GPU; instances have that of theirs */
};
enum { UUID_TEXT = 48 };
#define MOST_DEVICES 120 /* C10_COMPILE_TIME_MAX_GPUS of c10/cuda/CUDAMacros.h */
int device_count(void);
void driver_begin(void);
int current_device(void);
int set_current_device(int index);
const struct device *device_at(int index);
int machine_count(void); /* of GPUs and instances */
const struct device *machine_at(int index);
const struct device *gpu_at(int number);
void device_uuid(const struct device *device, char text[UUID_TEXT]);

/* allocations.c: how many blocks torch has allocated on the device so far. */
uint64_t blocks_allocated_on(int device);

/* memory.c: the allocations of the driver, by address. */
enum kind { DEVICE_MEMORY, HOST_MEMORY, VIRTUAL_RANGE, REGISTERED_HOST, MANAGED_MEMORY };
struct block {
    char *start;
    size_t size;
    int device;
    enum kind kind;
};
void *memory_take(size_t size, enum kind kind, int device); /* NULL: the device is full */
bool memory_give(void *start, enum kind kind);
bool memory_register(void *start, size_t size);
bool memory_find(const void *address, struct block *found);
bool on_device(const void *address);
bool memory_charge(int device, size_t size); /* counts physical memory that cuMemCreate takes */
void memory_refund(int device, size_t size);
size_t memory_free_bytes(int device);
void memory_copy(void *to, const void *from, size_t size);
void memory_set(void *at, int value, size_t size);

/* shared.c: the memory that the processes of this machine hold, by the GPU's index in the machine. */
void shared_join(void);
bool shared_take(int device, size_t size); /* false: there is no room */
void shared_give(int device, size_t size);
size_t shared_used(int device); /* by all of them */
bool shared_process(int index, int device, int *pid, size_t *used);

/* written.c: the values on the device that copies have written. */
void written_note(const void *start, size_t size);
void written_note_within(const void *start, size_t size); /* until the next kernel */
void written_by_kernel(void);
void written_drop(const void *start, size_t size);
bool written_has(const void *start, size_t size);
bool written_is_followed(void); /* whether Python records the values that each operator writes */

/* values.c: reads of unknown values. */
bool values_are_copied(size_t size, size_t most);
void values_answer(void *to, size_t size);
bool values_interrupted(void); /* an exception is pending until this thread returns to Python */

/* captures.c: SUCCESS, or the error of a call that is unsafe during graph captures, which it invalidates. */
int captures_refuse(void);

/* streams.c: the order of work on streams, as far as the host knows it. */
struct stream;
struct stream *stream_of(void *handle);
int stream_add_node(void *handle); /* an error where the stream's capture has been invalidated */
int stream_add_kernel(void *handle);
void stream_sleep(void *handle);
void stream_finish(void *handle);
void device_finish(int device);

#endif
