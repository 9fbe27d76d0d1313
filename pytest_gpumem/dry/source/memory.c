/* Device memory as address space of the host, in which untouched pages use no memory.
 *
 * Every device has a part of one reserved range. Segments are placed as by NVIDIA's driver for Linux, because torch
 * orders free blocks of the same size by address: whole ranges of 32 MiB from the top downwards; the rest of a
 * segment's last range goes to later segments that fit, the lowest rest first. The rule is from recorded traces;
 * pytest_gpumem/allocator/device_memory.py has the same.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "dry.h"

#define RANGE (32 * MIB)
/* The driver's unit of allocation, which cudaMemGetInfo counts ("CUDA C++ Best Practices Guide": 2 MiB pages). */
#define PAGE (2 * MIB)
/* Larger copies are not made: they hold data, and not masks, lengths or flags. */
#define MOST_COPIED_FROM_HOST MIB
#define MOST_COPIED_ON_DEVICE (64 * KIB)

struct place {
    char *start;
    size_t size;
};

struct list {
    struct place *items;
    size_t count, room;
};

struct area {
    char *start, *end;
    char *lowest; /* the lowest address used since the device was empty */
    struct list rests;
    size_t segments;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct area *areas;
static struct block *blocks; /* sorted by address */
static size_t block_count, block_room;

static void *grown(void *items, size_t count, size_t *room, size_t size)
{
    if (count < *room)
        return items;
    *room = *room ? 2 * *room : 64;
    items = realloc(items, *room * size);
    if (items == NULL)
        abort();
    return items;
}

static void reserve_areas(void)
{
    int count = device_count();
    /* Expandable segments reserve more than the whole device for each stream and size. */
    size_t each = 16 * 1024 * GIB;
    char *start = MAP_FAILED;
    areas = calloc(count ? count : 1, sizeof *areas);
    while (count && each * count > 64 * 1024 * GIB)
        each /= 2;
    /* A machine with fewer address bits has less room. */
    for (; count && start == MAP_FAILED && each >= GIB; each /= 2)
        start = mmap((void *)0x200000000000, each * count, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    each *= 2;
    for (int i = 0; i < count && start != MAP_FAILED; i++) {
        char *aligned = (char *)round_up((uintptr_t)start, RANGE) + i * each;
        areas[i] = (struct area){.start = aligned, .end = aligned + each - RANGE, .lowest = aligned + each - RANGE};
    }
}

static struct area *area_of(int device)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, reserve_areas);
    return &areas[device];
}

static char *from_rests(struct area *area, size_t size)
{
    struct place *best = NULL;
    for (size_t i = 0; i < area->rests.count; i++) {
        struct place *rest = &area->rests.items[i];
        if (rest->size >= size && (best == NULL || rest->start < best->start))
            best = rest;
    }
    if (best == NULL)
        return NULL;
    char *start = best->start;
    best->start += size;
    best->size -= size;
    if (best->size == 0)
        *best = area->rests.items[--area->rests.count];
    return start;
}

static bool lives_in(const char *start, const char *end);

/* The next lower place without a live segment; at the end of the area, the search continues at the top. */
static char *from_ranges(struct area *area, size_t room)
{
    for (int round = 0; round < 2; round++) {
        while ((size_t)(area->lowest - area->start) >= room) {
            area->lowest -= room;
            if (!lives_in(area->lowest, area->lowest + room))
                return area->lowest;
        }
        area->lowest = area->end;
        area->rests.count = 0;
    }
    return NULL;
}

static char *place(struct area *area, size_t size)
{
    char *start = from_rests(area, size);
    if (start != NULL)
        return start;
    size_t room = round_up(size, RANGE);
    start = from_ranges(area, room);
    if (start != NULL && room > size) {
        struct list *rests = &area->rests;
        rests->items = grown(rests->items, rests->count, &rests->room, sizeof *rests->items);
        rests->items[rests->count++] = (struct place){start + size, room - size};
    }
    return start;
}

/* Position of the first block that begins after the address. */
static size_t position_of(const char *address)
{
    size_t low = 0, high = block_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (blocks[middle].start <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static bool lives_in(const char *start, const char *end)
{
    size_t next = position_of(start);
    return (next < block_count && blocks[next].start < end) ||
           (next > 0 && blocks[next - 1].start + blocks[next - 1].size > start);
}

static void add_block(struct block block)
{
    blocks = grown(blocks, block_count, &block_room, sizeof *blocks);
    size_t at = position_of(block.start);
    memmove(&blocks[at + 1], &blocks[at], (block_count - at) * sizeof *blocks);
    blocks[at] = block;
    block_count++;
}

static void *take_on_device(size_t size, enum kind kind, int device)
{
    struct area *area = area_of(device);
    size_t physical = kind == DEVICE_MEMORY ? size : 0;
    if (!shared_take(device_at(device)->index, physical))
        return NULL;
    char *start = place(area, size);
    if (start == NULL || mprotect(start, size, PROT_READ | PROT_WRITE) != 0) {
        shared_give(device_at(device)->index, physical);
        return NULL;
    }
    /* A small value must not use a huge page of the host. */
    madvise(start, size, MADV_NOHUGEPAGE);
    area->segments++;
    return start;
}

void *memory_take(size_t size, enum kind kind, int device)
{
    bool on_device = kind == DEVICE_MEMORY || kind == VIRTUAL_RANGE;
    size_t rounded = round_up(size, on_device ? PAGE : 4 * KIB);
    pthread_mutex_lock(&lock);
    void *start;
    if (on_device) {
        start = take_on_device(rounded, kind, device);
    } else {
        start = mmap(NULL, rounded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        start = start == MAP_FAILED ? NULL : start;
    }
    if (start != NULL)
        add_block((struct block){start, rounded, device, kind});
    pthread_mutex_unlock(&lock);
    return start;
}

static void give_pages(struct block *block)
{
    if (block->kind == REGISTERED_HOST)
        return;
    if (block->kind != DEVICE_MEMORY && block->kind != VIRTUAL_RANGE) {
        munmap(block->start, block->size);
        return;
    }
    struct area *area = area_of(block->device);
    written_drop(block->start, block->size);
    mmap(block->start, block->size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    shared_give(device_at(block->device)->index, block->kind == DEVICE_MEMORY ? block->size : 0);
    if (--area->segments == 0) {
        /* An empty device places segments as a new process does, so that no number depends on earlier tests. */
        area->lowest = area->end;
        area->rests.count = 0;
    }
}

bool memory_give(void *start, enum kind kind)
{
    pthread_mutex_lock(&lock);
    size_t next = position_of(start);
    bool found = next > 0 && blocks[next - 1].start == start && blocks[next - 1].kind == kind;
    if (found) {
        give_pages(&blocks[next - 1]);
        memmove(&blocks[next - 1], &blocks[next], (block_count - next) * sizeof *blocks);
        block_count--;
    }
    pthread_mutex_unlock(&lock);
    return found;
}

bool memory_register(void *start, size_t size)
{
    pthread_mutex_lock(&lock);
    bool known = lives_in(start, (char *)start + size);
    if (!known)
        add_block((struct block){start, size, current_device(), REGISTERED_HOST});
    pthread_mutex_unlock(&lock);
    return !known;
}

bool memory_find(const void *address, struct block *found)
{
    pthread_mutex_lock(&lock);
    size_t next = position_of(address);
    bool inside = next > 0 && (const char *)address < blocks[next - 1].start + blocks[next - 1].size;
    if (inside)
        *found = blocks[next - 1];
    pthread_mutex_unlock(&lock);
    return inside;
}

bool memory_charge(int device, size_t size) 
{
    return shared_take(device_at(device)->index, size);
}

void memory_refund(int device, size_t size) { shared_give(device_at(device)->index, size); }

size_t memory_free_bytes(int device)
{
    size_t total = device_at(device)->memory, used = shared_used(device_at(device)->index);
    return used < total ? total - used : 0;
}

bool on_device(const void *address)
{
    struct block block;
    return memory_find(address, &block) && (block.kind == DEVICE_MEMORY || block.kind == VIRTUAL_RANGE);
}

void memory_copy(void *to, const void *from, size_t size)
{
    if (size == 0)
        return;
    bool to_device = on_device(to), from_device = on_device(from);
    size_t most = to_device && from_device ? MOST_COPIED_ON_DEVICE : MOST_COPIED_FROM_HOST;
    bool small = values_are_copied(size, most);
    bool known = from_device ? small && written_has(from, size) : !to_device || small;
    if (known)
        memmove(to, from, size);
    else if (!to_device)
        values_answer(to, size);
    if (!to_device)
        return;
    if (!known)
        written_drop(to, size);
    else if (from_device)
        written_note_within(to, size);
    else
        written_note(to, size);
}

void memory_set(void *at, int value, size_t size)
{
    bool known = values_are_copied(size, MOST_COPIED_ON_DEVICE);
    if (known)
        memset(at, value, size);
    if (!on_device(at))
        return;
    if (known)
        written_note_within(at, size);
    else
        written_drop(at, size);
}

/* Begin a test: rests of earlier segments' ranges are not used, as if the process were new. */
API void pytest_gpumem_dry_begin(void)
{
    pthread_mutex_lock(&lock);
    for (int i = 0; i < device_count(); i++)
        area_of(i)->rests.count = 0;
    pthread_mutex_unlock(&lock);
}
