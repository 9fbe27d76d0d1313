/* Reads of device memory with unknown values: they return an answer that was stored before, else zeros.
 *
 * torch's own code reads sizes that kernels count (nonzero, unique) from internal memory. After Python has computed the
 * operator on the CPU, it stores the answer here for the next such read of the thread.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

#include "dry.h"

/* A function of Python: returns an exception's type, for the thread that reads, or NULL. */
typedef void *unknown_read_function(size_t size);

static unknown_read_function *on_unknown_read; /* called for each read without an answer */
static __thread const int64_t *answers; /* the next one */
static __thread size_t left;

static unsigned listeners = 1;        /* number of functions set so far */
static __thread unsigned interrupted; /* which of them has interrupted the thread */

/* Whether copies of any size write values, and not only small ones. */
static bool unbounded;

bool values_interrupted(void) { return interrupted == listeners; }

bool values_are_copied(size_t size, size_t most) { return unbounded || size <= most; }

/* Raise an exception in this thread as soon as it returns to Python. */
static void interrupt(void *exception)
{
    int (*ensure)(void) = (int (*)(void))dlsym(RTLD_DEFAULT, "PyGILState_Ensure");
    void (*release)(int) = (void (*)(int))dlsym(RTLD_DEFAULT, "PyGILState_Release");
    int (*raise)(unsigned long, void *) =
        (int (*)(unsigned long, void *))dlsym(RTLD_DEFAULT, "PyThreadState_SetAsyncExc");
    if (ensure == NULL || release == NULL || raise == NULL)
        return;
    int state = ensure();
    raise((unsigned long)pthread_self(), exception);
    release(state);
}

void values_answer(void *to, size_t size)
{
    memset(to, 0, size); /* the host's memory may contain old data */
    size_t count = (size + sizeof *answers - 1) / sizeof *answers;
    if (count <= left) {
        memcpy(to, answers, size); /* little-endian: the least significant bytes come first */
        answers += count;
        left -= count;
        return;
    }
    /* While an exception is pending, Python code must not run in the thread. */
    if (on_unknown_read == NULL || values_interrupted())
        return;
    void *exception = on_unknown_read(size);
    if (exception != NULL) {
        interrupted = listeners;
        interrupt(exception);
    }
}

API void pytest_gpumem_dry_tell(unknown_read_function *function)
{
    on_unknown_read = function;
    listeners++;
}

API void pytest_gpumem_dry_copy_all(int all) { unbounded = all; }

API int pytest_gpumem_dry_knows(const void *start, size_t size) { return written_has(start, size); }

/* Whether the range lies in a segment that is still there. */
API int pytest_gpumem_dry_holds(const char *start, size_t size)
{
    struct block block;
    return memory_find(start, &block) && start + size <= block.start + block.size;
}

API void pytest_gpumem_dry_know(const void *start, size_t size) { written_note(start, size); }

API void pytest_gpumem_dry_forget(const void *start, size_t size) { written_drop(start, size); }

/* Store answers for the next reads, in place of earlier ones; a read of 16 bytes uses two. */
API void pytest_gpumem_dry_answer(const int64_t *numbers, size_t count)
{
    answers = numbers;
    left = count;
}
