/* Streams, events, and the work that the host knows to be done.
 *
 * Kernels take no time here, but on a GPU they do: a block that another stream has used can be reused only after that
 * stream's work, for which torch's allocator queries events (process_events of c10/cuda/CUDACachingAllocator.cpp). A
 * GPU with long steps returns "not ready" until the host has waited, and so does the dry device to the allocator, until
 * so many blocks were allocated later that launches would have waited (MOST_AHEAD of allocator/stream_uses.py). A query
 * by a program returns that all work is done, which then also holds for the allocator; one by torch's CUDA library
 * changes nothing for the allocator: ProcessGroupNCCL queries at times that a clock decides, and the flight recorder
 * (FlightRecorderHook.cpp) as soon as a collective is issued. But a stream on which torch.cuda._sleep was called is
 * busy until the host has waited for it.
 */
#define _GNU_SOURCE
#include <execinfo.h>
#include <link.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "abi.h"
#include "dry.h"
#include "streams.h"

#define MOST_AHEAD 1024

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct stream *streams; /* all that were made */
static struct stream defaults[120];

/* Handles 0, 1 and 2 mean the default stream: none, cudaStreamLegacy, cudaStreamPerThread. */
struct stream *stream_of(void *handle)
{
    if ((uintptr_t)handle > 2)
        return handle;
    struct stream *stream = &defaults[current_device()];
    stream->device = current_device();
    return stream;
}

static void finish(struct stream *stream, uint64_t until)
{
    if (stream->done >= until)
        return;
    stream->done = until;
    for (struct dependency **link = &stream->dependencies; *link != NULL;) {
        struct dependency *one = *link;
        if (one->at > until) {
            link = &one->next;
            continue;
        }
        *link = one->next;
        finish(one->on, one->until);
        free(one);
    }
}

void stream_finish(void *handle)
{
    pthread_mutex_lock(&lock);
    struct stream *stream = stream_of(handle);
    finish(stream, stream->issued);
    pthread_mutex_unlock(&lock);
}

void device_finish(int device)
{
    pthread_mutex_lock(&lock);
    finish(&defaults[device], defaults[device].issued);
    for (struct stream *stream = streams; stream != NULL; stream = stream->next)
        if (stream->device == device)
            finish(stream, stream->issued);
    pthread_mutex_unlock(&lock);
}

void streams_leave(const struct capture *capture)
{
    pthread_mutex_lock(&lock);
    for (struct stream *stream = streams; stream != NULL; stream = stream->next)
        if (stream->capture == capture) {
            stream->capture = NULL;
            stream->last.count = 0;
        }
    pthread_mutex_unlock(&lock);
}

void stream_sleep(void *handle)
{
    struct stream *stream = stream_of(handle);
    if (stream->slept <= stream->done)
        stream->slept = stream->issued;
}

/* Whether work up to `until` contains a sleep or waits for one; no stream is searched again for earlier work. */
static bool sleeps(struct stream *stream, uint64_t until, uint64_t search)
{
    if (stream->done >= until || (stream->search == search && stream->searched >= until))
        return false;
    stream->search = search;
    stream->searched = until;
    if (stream->slept > stream->done && stream->slept <= until)
        return true;
    for (struct dependency *one = stream->dependencies; one != NULL; one = one->next)
        if (one->at <= until && sleeps(one->on, one->until, search))
            return true;
    return false;
}

static bool is_asleep(struct stream *stream, uint64_t until)
{
    static uint64_t searches;
    pthread_mutex_lock(&lock);
    bool answer = sleeps(stream, until, ++searches);
    pthread_mutex_unlock(&lock);
    return answer;
}

int stream_add_node(void *handle)
{
    struct stream *stream = stream_of(handle);
    struct capture *capture = stream->capture;
    if (capture == NULL) {
        stream->issued++;
        return SUCCESS;
    }
    return capture->broken ? fail(CAPTURE_INVALIDATED) : capture_add_node(stream);
}

/* Adds a node for a kernel, or for a library call that launches some. */
int stream_add_kernel(void *handle)
{
    written_by_kernel();
    return stream_add_node(handle);
}

API int cudaStreamCreateWithPriority(struct stream **handle, IGNORED unsigned flags, int priority)
{
    struct stream *stream = calloc(1, sizeof *stream);
    if (stream == NULL)
        return fail(OUT_OF_MEMORY);
    stream->device = current_device();
    stream->priority = priority;
    pthread_mutex_lock(&lock);
    stream->next = streams;
    streams = stream;
    pthread_mutex_unlock(&lock);
    *handle = stream;
    return SUCCESS;
}

API int cudaStreamCreateWithFlags(struct stream **handle, unsigned flags)
{
    return cudaStreamCreateWithPriority(handle, flags, 0);
}

API int cudaStreamCreate(struct stream **handle) { return cudaStreamCreateWithPriority(handle, 0, 0); }

/* Events may still point to the stream, so its memory is not freed. */
API int cudaStreamDestroy(void *handle)
{
    stream_finish(handle);
    return SUCCESS;
}

API int cudaStreamGetPriority(void *handle, int *priority)
{
    *priority = stream_of(handle)->priority;
    return SUCCESS;
}

API int cudaStreamSynchronize(void *handle)
{
    struct stream *stream = stream_of(handle);
    if (stream->capture != NULL)
        return capture_break(stream->capture);
    stream_finish(handle);
    return SUCCESS;
}

API int cudaStreamQuery(void *handle)
{
    struct stream *stream = stream_of(handle);
    if (stream->capture == NULL && is_asleep(stream, stream->issued))
        return fail(NOT_READY);
    return cudaStreamSynchronize(handle);
}

API int cudaDeviceSynchronize(void)
{
    int error = captures_refuse();
    if (error != SUCCESS)
        return error;
    device_finish(current_device());
    return SUCCESS;
}

/* Whether the event was recorded in a capture that has not ended. */
static bool is_captured(const struct event *event)
{
    const struct capture *capture = event->stream->capture;
    return capture != NULL && event->capture == capture->number;
}

API int cudaStreamWaitEvent(void *handle, struct event *event, IGNORED unsigned flags)
{
    struct stream *stream = stream_of(handle);
    if (event->stream == NULL || event->stream == stream)
        return SUCCESS;
    if (is_captured(event)) {
        if (event->stream->capture->broken)
            return fail(CAPTURE_INVALIDATED);
        stream->capture = event->stream->capture;
        return frontier_join(&stream->last, &event->last);
    }
    pthread_mutex_lock(&lock);
    struct dependency *one = malloc(sizeof *one);
    if (one != NULL) {
        *one = (struct dependency){++stream->issued, event->at, event->stream, stream->dependencies};
        stream->dependencies = one;
    }
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

API int cudaEventCreateWithFlags(struct event **event, IGNORED unsigned flags)
{
    *event = calloc(1, sizeof **event);
    return *event == NULL ? fail(OUT_OF_MEMORY) : SUCCESS;
}

API int cudaEventCreate(struct event **event) { return cudaEventCreateWithFlags(event, 0); }

API int cudaEventDestroy(struct event *event)
{
    free(event->last.nodes);
    free(event);
    return SUCCESS;
}

API int cudaEventRecord(struct event *event, void *handle)
{
    struct stream *stream = stream_of(handle);
    struct capture *capture = stream->capture;
    if (capture != NULL && capture->broken)
        return fail(CAPTURE_INVALIDATED);
    *event = (struct event){stream, ++stream->issued, capture == NULL ? 0 : capture->number, {0, event->last.nodes},
                            blocks_allocated_on(stream->device)};
    return frontier_join(&event->last, &stream->last);
}

API int cudaEventRecordWithFlags(struct event *event, void *handle, IGNORED unsigned flags)
{
    return cudaEventRecord(event, handle);
}

API int cudaEventSynchronize(struct event *event)
{
    if (event->stream == NULL)
        return SUCCESS;
    if (is_captured(event))
        return capture_break(event->stream->capture);
    pthread_mutex_lock(&lock);
    finish(event->stream, event->at);
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

/* Who queries an event: torch's allocator, other code of torch's CUDA library, or other code. */
enum caller { OTHERS, ALLOCATOR, TORCH };

struct search {
    uintptr_t address;
    enum caller caller;
};

static int look_at_library(struct dl_phdr_info *library, IGNORED size_t size, void *data)
{
    struct search *search = data;
    if (library->dlpi_name == NULL)
        return 0;
    enum caller caller = strstr(library->dlpi_name, "libc10_cuda.so")     ? ALLOCATOR
                         : strstr(library->dlpi_name, "libtorch_cuda.so") ? TORCH
                                                                          : OTHERS;
    for (int i = 0; caller != OTHERS && i < library->dlpi_phnum; i++) {
        uintptr_t start = library->dlpi_addr + library->dlpi_phdr[i].p_vaddr;
        if (search->address - start < library->dlpi_phdr[i].p_memsz)
            search->caller = caller;
    }
    return search->caller;
}

static enum caller library_of(void *address)
{
    struct search search = {(uintptr_t)address, OTHERS};
    dl_iterate_phdr(look_at_library, &search);
    return search.caller;
}

/* The allocator queries from one place. Its library also has torch.Event's query, which other libraries call. */
static enum caller caller_at(void *address)
{
    static __thread void *last;
    static __thread enum caller of_last;
    if (last == address)
        return of_last;
    last = address;
    of_last = library_of(address);
    void *frames[5];
    int count = backtrace(frames, 5);
    for (int i = 0; of_last == ALLOCATOR && i + 1 < count; i++)
        if (frames[i] == address)
            of_last = library_of(frames[i + 1]);
    return of_last;
}

API int cudaEventQuery(struct event *event)
{
    if (event->stream == NULL || event->stream->done >= event->at)
        return SUCCESS;
    if (is_captured(event))
        return capture_break(event->stream->capture);
    enum caller caller = caller_at(__builtin_return_address(0));
    if (caller == ALLOCATOR) {
        uint64_t later = blocks_allocated_on(event->stream->device) - event->blocks;
        return later < MOST_AHEAD ? fail(NOT_READY) : SUCCESS;
    }
    if (is_asleep(event->stream, event->at))
        return fail(NOT_READY);
    return caller == TORCH ? SUCCESS : cudaEventSynchronize(event);
}

/* There is no clock: any two events are a millisecond apart, so that code that compares times chooses the first. */
API int cudaEventElapsedTime(float *milliseconds, struct event *start, struct event *end)
{
    if (start->stream == NULL || end->stream == NULL || start->stream->device != end->stream->device)
        return fail(INVALID_HANDLE);
    *milliseconds = 1;
    return SUCCESS;
}

/* CUDA 12.8 added a second version, with different rules for events that were not recorded. */
API int cudaEventElapsedTime_v2(float *milliseconds, struct event *start, struct event *end)
{
    return cudaEventElapsedTime(milliseconds, start, end);
}

/* Host functions run at once: all earlier work is done. */
API int cudaLaunchHostFunc(void *handle, void (*function)(void *), void *data)
{
    int error = stream_add_node(handle);
    if (error == SUCCESS && stream_of(handle)->capture == NULL)
        function(data);
    return error;
}

API int cudaStreamAddCallback(void *handle, void (*function)(void *, int, void *), void *data, IGNORED unsigned flags)
{
    function(handle, SUCCESS, data);
    return SUCCESS;
}
