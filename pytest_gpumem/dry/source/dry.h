/* The parts of the dry runtime talk through this header; it declares nothing of NVIDIA's.
 *
 * The dry runtime stands in for NVIDIA's libraries under the CUDA build of torch. It keeps memory, streams, events and
 * graphs, and answers what a program asks of a device; kernels and library calls return success and compute nothing.
 * Handles and structures have the layout that the documented interfaces give them (CUDA Runtime API and Driver API
 * reference); abi.h has the numbers.
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

/* errors.c: the last error of each thread, as cudaGetLastError gives it. */
int fail(int error);

/* trace.c: a line on stderr for each call, where PYTEST_GPUMEM_DRY_TRACE is set. */
void trace(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* devices.c: the GPUs of this machine, from PYTEST_GPUMEM_DRY_DEVICES. */
struct device {
    char name[256];
    size_t memory;
    int64_t major, minor, sms, threads, l2, shared, optin, blocks, bus_width;
    unsigned char uuid[16];
    int64_t instance;  /* not 0: one of MIG's, of the GPU that is listed before it */
    int64_t instances; /* into which MIG can divide it, 0: none */
    bool is_divided;   /* a GPU that has instances */
    int index;         /* in the machine, whatever CUDA_VISIBLE_DEVICES hides; instances count */
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

/* memory.c: what each address belongs to. */
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
bool memory_charge(int device, size_t size); /* counts physical memory that cuMemCreate takes */
void memory_refund(int device, size_t size);
size_t memory_free_bytes(int device);
void memory_copy(void *to, const void *from, size_t size);
void memory_set(void *at, int value, size_t size);

/* shared.c: what the processes of this machine hold of its GPUs, by their index in it. */
void shared_join(void);
bool shared_take(int device, size_t size); /* false: there is no room */
void shared_give(int device, size_t size);
size_t shared_used(int device); /* by all of them */
bool shared_process(int index, int device, int *pid, size_t *used);

/* written.c: which values on the device a copy has brought. */
void written_note(const void *start, size_t size);
void written_note_within(const void *start, size_t size); /* until the next kernel */
void written_by_kernel(void);
void written_drop(const void *start, size_t size);
bool written_has(const void *start, size_t size);
bool written_is_followed(void); /* whether it is known of each operator what it has written */

/* values.c: reads of values that no copy has brought. */
bool values_are_copied(size_t size, size_t most);
void values_answer(void *to, size_t size);
bool values_interrupted(void); /* an exception waits for this thread to be back in Python */

/* captures.c: SUCCESS, or the error of a call that is unsafe beside captures of graphs, which it ends. */
int captures_refuse(void);

/* streams.c: order of work, as far as the host knows it. */
struct stream;
struct stream *stream_of(void *handle);
int stream_add_node(void *handle); /* an error where the stream's capture has been invalidated */
int stream_add_kernel(void *handle);
void stream_sleep(void *handle);
void stream_finish(void *handle);
void device_finish(int device);

#endif
