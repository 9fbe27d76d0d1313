/* The ranges of device memory that copies and memset have written.
 *
 * A kernel writes nothing. So a value is known only if a copy has written it since its block was allocated
 * (allocations.c); every other value reads as zero.
 *
 * A copy on the device or a memset is often the first step of an operator whose kernel then writes to the same memory:
 * scatter copies its input. Such values are known until the next kernel of any kind, unless operators are followed:
 * then Python records the values that each of them writes.
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "dry.h"

struct copy {
    uintptr_t start, end;
    unsigned long kernels; /* number of launches so far, if the next kernel ends the copy; else 0 */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct copy *copies; /* sorted, disjoint */
static size_t count, room;
static unsigned long kernels = 1;
static bool followed;

API void pytest_gpumem_dry_follow(int follow) { followed = follow; }

bool written_is_followed(void) { return followed; }

void written_by_kernel(void) { __atomic_add_fetch(&kernels, 1, __ATOMIC_RELAXED); }

static bool is_over(const struct copy *copy)
{
    return !followed && copy->kernels && copy->kernels != __atomic_load_n(&kernels, __ATOMIC_RELAXED);
}

/* Position of the first copy that ends after the address. */
static size_t position_of(uintptr_t address)
{
    size_t low = 0, high = count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (copies[middle].end <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static void make_room(void)
{
    if (count + 2 < room)
        return;
    room = room ? 2 * room : 256;
    copies = realloc(copies, room * sizeof *copies);
    if (copies == NULL)
        abort();
}

/* Mark the range as known or unknown; parts of earlier ranges before and after it stay known. */
static void replace(const void *address, size_t size, bool known, unsigned long until)
{
    struct copy added[3];
    size_t more = 0;
    struct copy copy = {(uintptr_t)address, (uintptr_t)address + size, until};
    pthread_mutex_lock(&lock);
    make_room();
    size_t first = position_of(copy.start), behind = first;
    while (behind < count && copies[behind].start < copy.end)
        behind++;
    if (behind > first && copies[first].start < copy.start)
        added[more++] = (struct copy){copies[first].start, copy.start, copies[first].kernels};
    if (known)
        added[more++] = copy;
    if (behind > first && copies[behind - 1].end > copy.end)
        added[more++] = (struct copy){copy.end, copies[behind - 1].end, copies[behind - 1].kernels};
    memmove(&copies[first + more], &copies[behind], (count - behind) * sizeof *copies);
    memcpy(&copies[first], added, more * sizeof *copies);
    count = count - (behind - first) + more;
    pthread_mutex_unlock(&lock);
}

void written_note(const void *address, size_t size) { replace(address, size, true, 0); }

void written_note_within(const void *address, size_t size)
{
    replace(address, size, true, __atomic_load_n(&kernels, __ATOMIC_RELAXED));
}

void written_drop(const void *address, size_t size) { replace(address, size, false, 0); }

/* Returns how many parts of the range are known; writes offsets and sizes of at most `most` of them. */
API size_t pytest_gpumem_dry_written(const void *address, size_t size, int64_t *parts, size_t most)
{
    uintptr_t start = (uintptr_t)address, end = start + size;
    size_t found = 0;
    pthread_mutex_lock(&lock);
    for (size_t at = position_of(start); at < count && copies[at].start < end; at++) {
        if (is_over(&copies[at]))
            continue;
        uintptr_t from = copies[at].start > start ? copies[at].start : start;
        uintptr_t to = copies[at].end < end ? copies[at].end : end;
        if (found < most) {
            parts[2 * found] = (int64_t)(from - start);
            parts[2 * found + 1] = (int64_t)(to - from);
        }
        found++;
    }
    pthread_mutex_unlock(&lock);
    return found;
}

bool written_has(const void *address, size_t size)
{
    uintptr_t start = (uintptr_t)address, end = start + size;
    pthread_mutex_lock(&lock);
    size_t at = position_of(start);
    while (at < count && copies[at].start <= start && copies[at].end < end && !is_over(&copies[at]))
        start = copies[at++].end;
    bool has = at < count && copies[at].start <= start && copies[at].end >= end && !is_over(&copies[at]);
    pthread_mutex_unlock(&lock);
    return has;
}
