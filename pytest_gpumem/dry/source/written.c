/* What copies have brought to the device: where each begins, and how long it is.
 *
 * A kernel writes nothing, so a result that lies where an earlier tensor lay would read as that tensor's values. Torch's
 * blocks begin at multiples of 512 bytes (kMinBlockSize of c10/cuda/CUDACachingAllocator.cpp): a read that begins at
 * such an address, within what one copy brought and shorter than that, is such a result, a sum, a flag or a count. It
 * reads as zero, as every number that no copy has brought. So does the first element of a longer tensor, read alone.
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "dry.h"

#define BLOCK 512

struct copy {
    uintptr_t start, end;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct copy *copies; /* sorted, disjoint */
static size_t count, room;

/* Position of the first copy that ends behind the address. */
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

/* What is left of earlier copies, before and behind the new one, stays known. */
void written_note(const void *address, size_t size)
{
    struct copy added[3];
    size_t more = 0;
    struct copy copy = {(uintptr_t)address, (uintptr_t)address + size};
    pthread_mutex_lock(&lock);
    make_room();
    size_t first = position_of(copy.start), behind = first;
    while (behind < count && copies[behind].start < copy.end)
        behind++;
    if (behind > first && copies[first].start < copy.start)
        added[more++] = (struct copy){copies[first].start, copy.start};
    added[more++] = copy;
    if (behind > first && copies[behind - 1].end > copy.end)
        added[more++] = (struct copy){copy.end, copies[behind - 1].end};
    memmove(&copies[first + more], &copies[behind], (count - behind) * sizeof *copies);
    memcpy(&copies[first], added, more * sizeof *copies);
    count = count - (behind - first) + more;
    pthread_mutex_unlock(&lock);
}

bool written_is_stale(const void *address, size_t size)
{
    uintptr_t start = (uintptr_t)address;
    if (start % BLOCK != 0)
        return false;
    pthread_mutex_lock(&lock);
    size_t at = position_of(start);
    bool inside = at < count && copies[at].start <= start;
    bool stale = inside && (copies[at].start < start || start + size < copies[at].end);
    pthread_mutex_unlock(&lock);
    return stale;
}

void written_forget(void)
{
    pthread_mutex_lock(&lock);
    count = 0;
    pthread_mutex_unlock(&lock);
}
