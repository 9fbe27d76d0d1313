/* The bytes of each GPU's peak whose size is an estimate, counted as in pytest_gpumem/simulated/gpu/estimates.py, for
 * the blocks that torch's allocator reports (allocations.c).
 *
 * A block is recognised as a library's workspace when the library is called with it, right after its allocation.
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "dry.h"
#include "libraries.h"

enum { LATEST = 8 };

struct estimated {
    const void *address;
    size_t size;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct account {
    size_t live, peak, in_peak, largest;
    int64_t peak_number; /* of the allocation that made the peak */
    int64_t at_peak, at_largest;
    struct estimated *blocks;
    size_t count, room;
    uint64_t events;
} accounts[MOST_DEVICES];
static int64_t allocations;
static bool paused;

/* The last allocation of this thread. */
static __thread struct {
    const void *address;
    size_t size;
    int64_t number;
} latest[LATEST];
static __thread unsigned next;

/* FNV-1a, of a number at a time. */
static void hash(struct account *account, uint64_t event)
{
    account->events = (account->events ^ event) * 0x100000001b3;
}

void estimate_allocated(const void *address, size_t size, size_t allocated, int device)
{
    if (device < 0 || device >= MOST_DEVICES)
        return;
    struct account *account = &accounts[device];
    pthread_mutex_lock(&lock);
    int64_t number = ++allocations;
    hash(account, size);
    if (allocated > account->peak && !paused) {
        account->peak = allocated;
        account->in_peak = account->live;
        account->peak_number = number;
    }
    pthread_mutex_unlock(&lock);
    latest[next].address = address;
    latest[next].size = size;
    latest[next].number = number;
    next = (next + 1) % LATEST;
}

void estimate_freed(const void *address, size_t size, int device)
{
    if (device < 0 || device >= MOST_DEVICES)
        return;
    struct account *account = &accounts[device];
    pthread_mutex_lock(&lock);
    hash(account, ~(uint64_t)size);
    for (size_t i = 0; i < account->count; i++)
        if (account->blocks[i].address == address) {
            account->live -= account->blocks[i].size;
            account->blocks[i] = account->blocks[--account->count];
            break;
        }
    pthread_mutex_unlock(&lock);
}

static bool is_known(const struct account *account, const void *address)
{
    for (size_t i = 0; i < account->count; i++)
        if (account->blocks[i].address == address)
            return true;
    return false;
}

static void remember(struct account *account, const void *address, size_t size)
{
    if (account->count == account->room) {
        account->room = account->room ? 2 * account->room : 16;
        account->blocks = realloc(account->blocks, account->room * sizeof *account->blocks);
        if (account->blocks == NULL)
            abort();
    }
    account->blocks[account->count++] = (struct estimated){address, size};
    account->live += size;
}

void estimate_used(const void *address, size_t size, int64_t sentence)
{
    struct account *account = &accounts[current_device()];
    int64_t number = 0, place = 0;
    bool is_new_peak = false, is_largest = false;
    size = round_up(size, 512);
    for (int i = 0; i < LATEST; i++)
        if (latest[i].address == address && latest[i].number > number) {
            number = latest[i].number;
            size = latest[i].size;
        }
    pthread_mutex_lock(&lock);
    bool known = address == NULL || is_known(account, address);
    if (!known) {
        remember(account, address, size);
        is_new_peak = !paused && number > 0 && account->peak_number >= number;
        is_largest = !paused && size > account->largest;
        account->in_peak += is_new_peak ? size : 0;
        account->largest = is_largest ? size : account->largest;
    }
    pthread_mutex_unlock(&lock);
    if (!is_new_peak && !is_largest)
        return;
    int64_t answers[MOST_ANSWERS];
    if (library_asks(PLACE, &sentence, 1, answers))
        place = answers[0];
    if (is_new_peak)
        account->at_peak = place;
    if (is_largest)
        account->at_largest = place;
}

/* Forget peaks and places; what is live stays so. */
API void pytest_gpumem_dry_forget_estimates(void);
API void pytest_gpumem_dry_forget_estimates(void)
{
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MOST_DEVICES; i++) {
        struct account *account = &accounts[i];
        account->peak = account->in_peak = account->largest = 0;
        account->peak_number = account->at_peak = account->at_largest = 0;
        account->events = 0xcbf29ce484222325;
    }
    pthread_mutex_unlock(&lock);
}

/* Ignore peaks from now on, or no longer. */
API void pytest_gpumem_dry_pause_estimates(int pause);
API void pytest_gpumem_dry_pause_estimates(int pause) { paused = pause != 0; }

/* A hash of the allocated and freed sizes, in order. */
API uint64_t pytest_gpumem_dry_events(int device);
API uint64_t pytest_gpumem_dry_events(int device) { return accounts[device].events; }

/* Returns the largest estimate, the estimated bytes of the peak, and the sentences on both. */
API void pytest_gpumem_dry_estimates(int device, int64_t results[4]);
API void pytest_gpumem_dry_estimates(int device, int64_t results[4])
{
    const struct account *account = &accounts[device];
    int64_t known[] = {(int64_t)account->largest, (int64_t)account->in_peak, account->at_largest, account->at_peak};
    memcpy(results, known, sizeof known);
}
