/* The memory of each GPU that the processes of this machine hold.
 *
 * By default a process has its own GPUs, so that its numbers do not depend on other processes. If
 * PYTEST_GPUMEM_DRY_SHARED names a folder, all processes with the same GPUs and the same folder share them, as on a
 * machine with GPUs: memory of one is not available to the others, and NVML lists all of them. They share a file with a
 * slot for each process. A slot whose process no longer exists is free.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "dry.h"

enum { MOST_PROCESSES = 256, MOST_SHARED = 16 };

struct slot {
    atomic_int pid;         /* 0: free */
    _Atomic uint64_t start; /* start time of that process, which differs from that of a later one with the same PID */
    _Atomic int64_t used[MOST_SHARED];
};

static struct slot own_table[1];
static struct slot *table = own_table;
static int slots = 1;
static struct slot *own;

static uint64_t hash_of_devices(void)
{
    uint64_t hash = 0xcbf29ce484222325;
    const char *text = getenv("PYTEST_GPUMEM_DRY_DEVICES");
    for (; text != NULL && *text != '\0'; text++)
        hash = (hash ^ (unsigned char)*text) * 0x100000001b3;
    return hash;
}

static void open_table(void)
{
    const char *folder = getenv("PYTEST_GPUMEM_DRY_SHARED");
    char path[4096];
    size_t size = MOST_PROCESSES * sizeof *table;
    if (folder == NULL || *folder == '\0')
        return;
    snprintf(path, sizeof path, "%s/dry-%016lx", folder, (unsigned long)hash_of_devices());
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0)
        return;
    void *mapped = ftruncate(file, (off_t)size) == 0
                       ? mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0)
                       : MAP_FAILED;
    close(file);
    if (mapped == MAP_FAILED)
        return;
    table = mapped;
    slots = MOST_PROCESSES;
}

/* Start time of a process in ticks: field 22 of /proc/PID/stat, counted from the name, which may contain spaces. */
static uint64_t start_of(int pid)
{
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t size = file < 0 ? 0 : read(file, text, sizeof text - 1);
    if (file >= 0)
        close(file);
    text[size > 0 ? size : 0] = '\0';
    char *at = strrchr(text, ')');
    for (int field = 2; at != NULL && field < 22; field++)
        at = strchr(at + 1, ' ');
    return at == NULL ? 0 : strtoull(at, NULL, 10);
}

static bool lives(struct slot *slot)
{
    int pid = atomic_load(&slot->pid);
    if (pid == 0 || slot == own)
        return pid != 0;
    return (kill(pid, 0) == 0 || errno != ESRCH) && start_of(pid) == atomic_load(&slot->start);
}

static void leave(void)
{
    if (own != NULL && atomic_load(&own->pid) == getpid())
        atomic_store(&own->pid, 0);
    own = NULL;
}

/* A forked child holds no device memory yet; it gets a slot when it allocates some. */
static void forget_own(void)
{
    own = NULL;
    atomic_store(&own_table->pid, 0);
}

static void begin(void)
{
    open_table();
    pthread_atfork(NULL, NULL, forget_own);
    atexit(leave);
}

static void open_once(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, begin);
}

/* This process uses the GPUs from now on. */
void shared_join(void)
{
    open_once();
    for (int i = 0; own == NULL && i < slots; i++) {
        int before = atomic_load(&table[i].pid);
        if (lives(&table[i]) || !atomic_compare_exchange_strong(&table[i].pid, &before, getpid()))
            continue;
        own = &table[i];
        atomic_store(&own->start, start_of(getpid()));
        for (int device = 0; device < MOST_SHARED; device++)
            atomic_store(&own->used[device], 0);
    }
}

static int64_t used_by_all(int device)
{
    int64_t bytes = 0;
    for (int i = 0; i < slots; i++)
        if (lives(&table[i]))
            bytes += atomic_load(&table[i].used[device]);
    return bytes;
}

bool shared_take(int device, size_t size)
{
    shared_join();
    if (own == NULL || device >= MOST_SHARED)
        return true; /* there are more processes or GPUs than the file has room for */
    atomic_fetch_add(&own->used[device], (int64_t)size);
    if (used_by_all(device) <= (int64_t)machine_at(device)->memory)
        return true;
    atomic_fetch_sub(&own->used[device], (int64_t)size);
    return false;
}

void shared_give(int device, size_t size)
{
    if (own != NULL && device < MOST_SHARED)
        atomic_fetch_sub(&own->used[device], (int64_t)size);
}

size_t shared_used(int device)
{
    open_once();
    return device < MOST_SHARED ? (size_t)used_by_all(device) : 0;
}

bool shared_process(int index, int device, int *pid, size_t *used)
{
    open_once();
    for (int i = 0; device < MOST_SHARED && i < slots; i++) {
        if (!lives(&table[i]) || index-- > 0)
            continue;
        *pid = atomic_load(&table[i].pid);
        *used = (size_t)atomic_load(&table[i].used[device]);
        return true;
    }
    return false;
}
