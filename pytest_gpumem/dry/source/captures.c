/* Capture of graphs: a graph is the number of its nodes.
 *
 * A call that no graph can contain, such as to wait for a captured stream, fails and invalidates the capture; whatever is
 * called in it then fails, too, until cudaStreamEndCapture, which takes its streams out of it and returns an error and
 * no graph (CUDA C++ Programming Guide, "Prohibited and Unhandled Operations"). Calls that are unsafe beside captures,
 * depending on the mode of each and of the calling thread, do the same (cudaThreadExchangeStreamCaptureMode).
 */
#include <stdlib.h>

#include "abi.h"
#include "dry.h"
#include "streams.h"

enum mode { GLOBAL = 0, THREAD_LOCAL = 1, RELAXED = 2 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct capture *captures; /* that go on */
static unsigned long long begun;
static __thread int thread_mode = GLOBAL;

int capture_break(struct capture *capture)
{
    capture->broken = true;
    return fail(CAPTURE_UNSUPPORTED);
}

/* Whether an unsafe call of this thread must not be made during the capture. */
static bool forbids(const struct capture *capture)
{
    if (thread_mode == RELAXED || capture->mode == RELAXED)
        return false;
    if (pthread_equal(capture->thread, pthread_self()))
        return true;
    return thread_mode == GLOBAL && capture->mode == GLOBAL;
}

int captures_refuse(void)
{
    int error = SUCCESS;
    pthread_mutex_lock(&lock);
    for (struct capture *capture = captures; capture != NULL; capture = capture->next)
        if (forbids(capture))
            error = capture_break(capture);
    pthread_mutex_unlock(&lock);
    return error;
}

API int cudaThreadExchangeStreamCaptureMode(int *mode)
{
    int before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return SUCCESS;
}

static int begin_capture(void *handle, int mode, struct graph *graph)
{
    struct stream *stream = stream_of(handle);
    if ((uintptr_t)handle <= 2)
        return fail(CAPTURE_UNSUPPORTED);
    if (stream->capture != NULL)
        return fail(INVALID_VALUE);
    struct capture *capture = malloc(sizeof *capture);
    if (graph == NULL)
        graph = calloc(1, sizeof *graph);
    if (capture == NULL || graph == NULL)
        return fail(OUT_OF_MEMORY);
    pthread_mutex_lock(&lock);
    *capture = (struct capture){++begun, graph, mode, pthread_self(), false, captures};
    captures = capture;
    pthread_mutex_unlock(&lock);
    stream->capture = capture;
    return SUCCESS;
}

API int cudaStreamBeginCapture(void *handle, int mode) { return begin_capture(handle, mode, NULL); }

API int cudaStreamBeginCaptureToGraph(void *handle, struct graph *graph, IGNORED const void *nodes,
                                      IGNORED const void *edges, IGNORED size_t count, int mode)
{
    return begin_capture(handle, mode, graph);
}

API int cudaStreamEndCapture(void *handle, struct graph **graph)
{
    struct capture *capture = stream_of(handle)->capture;
    *graph = NULL;
    if (capture == NULL)
        return fail(INVALID_VALUE);
    streams_leave(capture);
    pthread_mutex_lock(&lock);
    struct capture **link = &captures;
    while (*link != capture)
        link = &(*link)->next;
    *link = capture->next;
    pthread_mutex_unlock(&lock);
    bool broken = capture->broken;
    if (!broken)
        *graph = capture->graph;
    free(capture);
    return broken ? fail(CAPTURE_INVALIDATED) : SUCCESS;
}

API int cudaStreamIsCapturing(void *handle, int *status)
{
    const struct capture *capture = stream_of(handle)->capture;
    *status = capture == NULL ? CAPTURE_NONE : capture->broken ? CAPTURE_BROKEN : CAPTURE_ACTIVE;
    return SUCCESS;
}

/* Up to CUDA 12 without the edges' data, as _v2; CUDA 13 has the name to itself, and edges before the count. */
API int cudaStreamGetCaptureInfo_v2(void *handle, int *status, unsigned long long *identity, void **graph,
                                    const void ***dependencies, size_t *count)
{
    const struct capture *capture = stream_of(handle)->capture;
    cudaStreamIsCapturing(handle, status);
    if (identity != NULL)
        *identity = capture == NULL ? 0 : capture->number;
    if (graph != NULL)
        *graph = capture == NULL ? NULL : capture->graph;
    if (dependencies != NULL)
        *dependencies = NULL;
    if (count != NULL)
        *count = 0;
    return SUCCESS;
}

API int cudaStreamGetCaptureInfo_v3(void *handle, int *status, unsigned long long *identity, void **graph,
                                    const void ***dependencies, const void **edges, size_t *count)
{
    if (edges != NULL)
        *edges = NULL;
    return cudaStreamGetCaptureInfo_v2(handle, status, identity, graph, dependencies, count);
}

API int cudaStreamGetCaptureInfo(void *handle, int *status, unsigned long long *identity, void **graph,
                                 const void ***dependencies, const void **edges, size_t *count)
{
    return cudaStreamGetCaptureInfo_v3(handle, status, identity, graph, dependencies, edges, count);
}

API int cudaGraphInstantiate(void **executable, void *graph, IGNORED unsigned long long flags)
{
    *executable = graph;
    return SUCCESS;
}

API int cudaGraphInstantiateWithFlags(void **executable, void *graph, unsigned long long flags)
{
    return cudaGraphInstantiate(executable, graph, flags);
}

API int cudaGraphLaunch(IGNORED void *executable, void *handle)
{
    return stream_add_kernel(handle);
}

API int cudaGraphGetNodes(struct graph *graph, IGNORED void **nodes, size_t *count)
{
    *count = graph->nodes;
    return SUCCESS;
}
