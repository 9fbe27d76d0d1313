/* What a read of the device's memory yields that no copy has brought: an answer that was left for it, else zeros.
 *
 * Sizes that a kernel counts (nonzero, unique) are read by torch's own code from memory that no operator hands out. Who
 * has computed the operator on the CPU leaves the answer here, for the next such read of the thread.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

#include "dry.h"

/* Python's: returns an exception's type, for the thread that reads, or NULL. */
typedef void *told_function(size_t size);

static told_function *told; /* is told of each read that nothing answers */
static __thread const int64_t *answers; /* the next one */
static __thread size_t left;

static unsigned listeners = 1;        /* that have been told until now */
static __thread unsigned interrupted; /* which of them has interrupted the thread */

/* Small copies alone bring values, until values of any size are computed. */
static bool unbounded;

bool values_interrupted(void) { return interrupted == listeners; }

bool values_are_copied(size_t size, size_t most) { return unbounded || size <= most; }

/* Raise an exception in this thread as soon as it is back in Python, which the caller is not. */
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
    memset(to, 0, size); /* the host's memory may hold anything */
    size_t count = (size + sizeof *answers - 1) / sizeof *answers;
    if (count <= left) {
        memcpy(to, answers, size); /* of a number the least significant bytes come first */
        answers += count;
        left -= count;
        return;
    }
    /* With an exception under way no more of Python can run in the thread, who is told neither. */
    if (told == NULL || values_interrupted())
        return;
    void *exception = told(size);
    if (exception != NULL) {
        interrupted = listeners;
        interrupt(exception);
    }
}

API void pytest_gpumem_dry_tell(told_function *function)
{
    told = function;
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

/* Leave answers for the reads that follow, until others are left; a read of 16 bytes takes two. */
API void pytest_gpumem_dry_answer(const int64_t *numbers, size_t count)
{
    answers = numbers;
    left = count;
}
