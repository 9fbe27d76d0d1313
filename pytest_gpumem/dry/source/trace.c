/* A log of calls on stderr, to find a call with a wrong result. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "dry.h"

void trace(const char *format, ...)
{
    static int on = -1;
    if (on < 0)
        on = getenv("PYTEST_GPUMEM_DRY_TRACE") != NULL;
    if (!on)
        return;
    va_list values;
    va_start(values, format);
    fputs("dry: ", stderr);
    vfprintf(stderr, format, values);
    fputc('\n', stderr);
    va_end(values);
}

/* Called by the generated stubs (build.py): the function named has no effect on memory. */
int trace_stub(const char *name);
int trace_stub(const char *name)
{
    trace("%s", name);
    return 0;
}
