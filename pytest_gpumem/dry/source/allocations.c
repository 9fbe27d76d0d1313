/* The blocks of torch's caching allocator, which it allocates and frees without calling the runtime.
 *
 * The allocator reports each allocation and free of a block to c10::reportMemoryUsageToProfiler (c10/core/Allocator.h),
 * torch 2.6 to 2.15. That function is libc10's, but libc10_cuda finds the one in this file first.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>

#include "dry.h"
#include "libraries.h"

#define REPORT "_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE"
/* DeviceType of torch/headeronly/core/DeviceType.h, the first byte of a c10::Device; the second one is its index. */
#define CUDA 1

/* The allocated blocks by their address: an open hash table. */
struct handed {
    uintptr_t start; /* 0: the place was never used, 1: its block was freed */
    size_t size;
    uint64_t number; /* the count of all allocations so far */
    bool watched;
};

/* The allocation of a block, or its free (with a negative size), while there is a log. */
struct logged {
    int64_t start, size, device;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct handed *table;
static uint64_t blocks, blocks_on[MOST_DEVICES];
static size_t room, used; /* a power of two; places that are not empty */
static size_t grown;  /* blocks made since the collector ran less those freed, but never below zero, as CPython counts */
static size_t growth; /* the number of them at which the collector runs; 0: it does not */
static void (*collect)(void);
static bool asked;
static struct logged *entries;
static size_t logged, log_room;
static int logs;
static uintptr_t *dead;
static size_t dead_count, dead_room;

static struct handed *place_of(uintptr_t start)
{
    size_t at = (start >> 9) * 0x9E3779B97F4A7C15u & (room - 1);
    while (table[at].start != 0 && table[at].start != start)
        at = (at + 1) & (room - 1);
    return &table[at];
}

static void make_room(void)
{
    if (2 * used < room)
        return;
    struct handed *old = table;
    size_t old_room = room;
    room = room ? 2 * room : 4096;
    used = 0;
    table = calloc(room, sizeof *table);
    if (table == NULL)
        abort();
    for (size_t i = 0; i < old_room; i++)
        if (old[i].start > 1) {
            *place_of(old[i].start) = old[i];
            used++;
        }
    free(old);
}

/* Called by Python in its main thread, between two bytecode instructions. */
static int run_collector(IGNORED void *nothing)
{
    asked = false;
    if (growth > 0)
        collect();
    return 0;
}

/* Torch's allocator holds its lock here, and a thread with the GIL may wait for that lock: so Python runs later. */
static void ask_for_collector(void)
{
    int (*add)(int (*)(void *), void *) = (int (*)(int (*)(void *), void *))dlsym(RTLD_DEFAULT, "Py_AddPendingCall");
    asked = add != NULL && add(run_collector, NULL) == 0;
}

static void hand_out(uintptr_t start, size_t size)
{
    if (++grown > growth && growth > 0 && !asked) {
        grown = 0;
        ask_for_collector();
    }
    make_room();
    struct handed *place = place_of(start);
    used += place->start == 0;
    *place = (struct handed){start, size, ++blocks, false};
}

static void take_back(uintptr_t start)
{
    struct handed *place = room ? place_of(start) : NULL;
    if (place == NULL || place->start == 0)
        return;
    grown -= grown > 0;
    if (place->watched) {
        if (dead_count == dead_room) {
            dead_room = dead_room ? 2 * dead_room : 256;
            dead = realloc(dead, dead_room * sizeof *dead);
            if (dead == NULL)
                abort();
        }
        dead[dead_count++] = start;
    }
    *place = (struct handed){.start = 1};
}

static void write_log(uintptr_t start, int64_t size, int device)
{
    if (logs == 0)
        return;
    if (logged == log_room) {
        log_room = log_room ? 2 * log_room : 256;
        entries = realloc(entries, log_room * sizeof *entries);
        if (entries == NULL)
            abort();
    }
    entries[logged++] = (struct logged){(int64_t)start, size, device};
}

/* Begin or end a log. Logs may be nested: entries are dropped when the outermost one ends. */
API void pytest_gpumem_dry_log(int begins)
{
    pthread_mutex_lock(&lock);
    logs += begins ? 1 : -1;
    if (logs == 0)
        logged = 0;
    pthread_mutex_unlock(&lock);
}

/* Returns the number of log entries so far; copies those from `first` on, unless `into` is NULL. */
API size_t pytest_gpumem_dry_logged(struct logged *into, size_t first)
{
    pthread_mutex_lock(&lock);
    size_t count = logged;
    if (into != NULL && first < count)
        __builtin_memcpy(into, &entries[first], (count - first) * sizeof *into);
    pthread_mutex_unlock(&lock);
    return count;
}

/* Returns the bytes of the block at the address; 0: there is no block. */
API size_t pytest_gpumem_dry_block(const void *start)
{
    pthread_mutex_lock(&lock);
    struct handed *place = room ? place_of((uintptr_t)start) : NULL;
    size_t size = place != NULL && place->start != 0 ? place->size : 0;
    pthread_mutex_unlock(&lock);
    return size;
}

/* Call the function each time that the number of blocks has grown by so many; 0: no longer. */
API void pytest_gpumem_dry_collect(void (*function)(void), size_t blocks_more)
{
    pthread_mutex_lock(&lock);
    collect = function;
    growth = blocks_more;
    grown = 0;
    pthread_mutex_unlock(&lock);
}

/* Returns how many blocks have been allocated so far: the number of the last one. */
API uint64_t pytest_gpumem_dry_handed_out(void)
{
    pthread_mutex_lock(&lock);
    uint64_t last = blocks;
    pthread_mutex_unlock(&lock);
    return last;
}

uint64_t blocks_allocated_on(int device)
{
    pthread_mutex_lock(&lock);
    uint64_t count = blocks_on[device];
    pthread_mutex_unlock(&lock);
    return count;
}

/* Returns the number of the block at the address; 0: there is no block. */
API uint64_t pytest_gpumem_dry_number(const void *start)
{
    pthread_mutex_lock(&lock);
    struct handed *place = room ? place_of((uintptr_t)start) : NULL;
    uint64_t number = place != NULL && place->start != 0 ? place->number : 0;
    pthread_mutex_unlock(&lock);
    return number;
}

/* Let pytest_gpumem_dry_dead report the free of the block at the address. Returns the block's number. */
API uint64_t pytest_gpumem_dry_watch(const void *start)
{
    uint64_t number = 0;
    pthread_mutex_lock(&lock);
    struct handed *place = room ? place_of((uintptr_t)start) : NULL;
    if (place != NULL && place->start != 0) {
        place->watched = true;
        number = place->number;
    }
    pthread_mutex_unlock(&lock);
    return number;
}

/* Returns the address of a watched block that was freed, each once; NULL: there is none. */
API void *pytest_gpumem_dry_dead(void)
{
    pthread_mutex_lock(&lock);
    uintptr_t start = dead_count > 0 ? dead[--dead_count] : 0;
    pthread_mutex_unlock(&lock);
    return (void *)start;
}

typedef void report_function(void *block, int64_t size, size_t allocated, size_t reserved, uint16_t device);

API report_function report __asm__(REPORT);

static report_function *torchs_own(void)
{
    static report_function *known;
    if (known == NULL) {
        void *library = dlopen("libc10.so", RTLD_LAZY | RTLD_NOLOAD);
        void *symbol = library == NULL ? NULL : dlsym(library, REPORT);
        __builtin_memcpy(&known, &symbol, sizeof known);
        if (known == NULL)
            abort();
    }
    return known;
}

void report(void *block, int64_t size, size_t allocated, size_t reserved, uint16_t device)
{
    if ((device & 0xff) == CUDA) {
        pthread_mutex_lock(&lock);
        write_log((uintptr_t)block, size, device >> 8);
        if (size > 0) {
            hand_out((uintptr_t)block, (size_t)size);
            blocks_on[device >> 8]++;
        } else
            take_back((uintptr_t)block);
        pthread_mutex_unlock(&lock);
        if (size > 0) {
            written_drop(block, (size_t)size); /* values of an earlier tensor there are not this one's */
            estimate_allocated(block, (size_t)size, allocated, device >> 8);
        } else
            estimate_freed(block, (size_t)-size, device >> 8);
    }
    torchs_own()(block, size, allocated, reserved, device);
}
