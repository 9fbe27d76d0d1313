/* Threads at the end of the process.
 *
 * A thread that asks for Python's lock while the interpreter ends is ended by pthread_exit, up to Python 3.13
 * (take_gil of Python/ceval_gil.h). In a thread of autograd, which gives back Python objects when a backward pass is
 * over, that ends the process: "terminate called without an active exception". On a GPU the pass is over much earlier
 * than the host has waited for it; here it is over just now. Such a thread waits for the end of the process, as in
 * Python 3.14.
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

API void pthread_exit(void *result)
{
    void (*own)(void *) __attribute__((noreturn));
    while (is_python_ending())
        pause();
    *(void **)&own = dlsym(RTLD_NEXT, "pthread_exit");
    own(result);
}
