/* Asks Python for the size of a library's workspace; libraries.h lists the queries. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

#include "dry.h"
#include "libraries.h"

typedef int answer_function(int question, const int64_t *numbers, int count, int64_t *answers);

static answer_function *answer;

/* Called by workspaces.py. */
API void pytest_gpumem_dry_answer_with(answer_function *function);
API void pytest_gpumem_dry_answer_with(answer_function *function) { answer = function; }

static const char BEGIN[] = "try:\n"
                            "    from pytest_gpumem.dry.workspaces import begin_answering\n"
                            "except ImportError:\n"
                            "    pass\n"
                            "else:\n"
                            "    begin_answering()\n";

/* Python's functions are looked up by name, because Python is not linked; threads of autograd do not hold the GIL. */
static void find_python(void)
{
    int (*is_there)(void);
    int (*enter)(void);
    void (*leave)(int);
    int (*run)(const char *, void *);
    *(void **)&is_there = dlsym(RTLD_DEFAULT, "Py_IsInitialized");
    *(void **)&enter = dlsym(RTLD_DEFAULT, "PyGILState_Ensure");
    *(void **)&leave = dlsym(RTLD_DEFAULT, "PyGILState_Release");
    *(void **)&run = dlsym(RTLD_DEFAULT, "PyRun_SimpleStringFlags");
    if (is_there == NULL || enter == NULL || leave == NULL || run == NULL || !is_there())
        return;
    int state = enter();
    run(BEGIN, NULL);
    leave(state);
}

bool library_asks(enum question question, const int64_t *numbers, int count, int64_t *answers)
{
    memset(answers, 0, MOST_ANSWERS * sizeof *answers);
    if (values_interrupted()) /* the pending exception would be raised in this call and lost; the run is invalid anyway */
        return false;
    if (answer == NULL)
        find_python();
    return answer != NULL && answer(question, numbers, count, answers) == 0;
}

enum { MOST_LEFT_OUT = 256 };
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const char *left_out[MOST_LEFT_OUT];
static int left_out_count;

void library_leaves_out(const char *name)
{
    pthread_mutex_lock(&lock);
    int at = 0;
    while (at < left_out_count && strcmp(left_out[at], name) != 0)
        at++;
    if (at == left_out_count && at < MOST_LEFT_OUT)
        left_out[left_out_count++] = name;
    pthread_mutex_unlock(&lock);
}

/* The names of calls without an estimate, in the order of their first call; NULL after the last. */
API const char *pytest_gpumem_dry_left_out(int index);
API const char *pytest_gpumem_dry_left_out(int index) { return index < left_out_count ? left_out[index] : NULL; }

API void pytest_gpumem_dry_forget_left_out(void);
API void pytest_gpumem_dry_forget_left_out(void) { left_out_count = 0; }
