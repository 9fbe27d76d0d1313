/* Threads at the end of the process.
 *
 * Up to Python 3.13 a thread that requests the GIL while the interpreter finalizes is ended by pthread_exit (take_gil
 * of Python/ceval_gil.h). In a thread of autograd, which releases Python objects after a backward pass, that aborts the
 * process: "terminate called without an active exception". On a GPU the pass ends long before the host has waited for
 * the device; here it may end during finalization. So the thread waits for the end of the process, as in Python 3.14,
 * and torch waits for the thread: ten seconds, unless a variable says otherwise (Engine::stop of
 * torch/csrc/autograd/engine.cpp).
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#include "dry.h"

static bool is_python_ending(void)
{
    static const char *const NAMES[] = {"Py_IsFinalizing", "_Py_IsFinalizing"};
    for (int i = 0; i < 2; i++) {
        int (*is_ending)(void);
        *(void **)&is_ending = dlsym(RTLD_DEFAULT, NAMES[i]);
        if (is_ending != NULL)
            return is_ending();
    }
    return false;
}

__attribute__((constructor)) static void shorten_wait(void)
{
    enum { KEEP_THE_USERS = 0 };
    setenv("TORCH_AUTOGRAD_SHUTDOWN_WAIT_LIMIT", "0.1", KEEP_THE_USERS);
}

API void pthread_exit(void *result)
{
    void (*own)(void *) __attribute__((noreturn));
    while (is_python_ending())
        pause();
    *(void **)&own = dlsym(RTLD_NEXT, "pthread_exit");
    own(result);
}
