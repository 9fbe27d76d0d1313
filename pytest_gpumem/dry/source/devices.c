/* The GPUs: read once from PYTEST_GPUMEM_DRY_DEVICES, which gpus.py writes.
 *
 * One GPU is "name=NVIDIA A100-SXM4-40GB,memory=42298834944,major=8,..."; several are separated by ";". MIG instances
 * follow their GPU and have "instance=1".
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "abi.h"
#include "dry.h"

static struct device all[MOST_DEVICES], devices[MOST_DEVICES];
static int count, all_count;
static __thread int current;

static void read_field(struct device *device, char *field)
{
    static const struct {
        const char *key;
        size_t offset;
    } numbers[] = {
        {"major", offsetof(struct device, major)},   {"minor", offsetof(struct device, minor)},
        {"sms", offsetof(struct device, sms)},       {"threads", offsetof(struct device, threads)},
        {"l2", offsetof(struct device, l2)},         {"shared", offsetof(struct device, shared)},
        {"optin", offsetof(struct device, optin)},   {"blocks", offsetof(struct device, blocks)},
        {"bus", offsetof(struct device, bus_width)}, {"memory", offsetof(struct device, memory)},
        {"bandwidth", offsetof(struct device, bandwidth)},
        {"instance", offsetof(struct device, instance)},
        {"instances", offsetof(struct device, instances)},
    };
    char *value = strchr(field, '=');
    if (value == NULL)
        return;
    *value++ = '\0';
    if (strcmp(field, "name") == 0)
        snprintf(device->name, sizeof device->name, "%s", value);
    if (strcmp(field, "uuid") == 0)
        for (int i = 0; i < 16 && sscanf(value + 2 * i, "%2hhx", &device->uuid[i]) == 1; i++)
            ;
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (strcmp(field, numbers[i].key) == 0)
            *(int64_t *)((char *)device + numbers[i].offset) = strtoll(value, NULL, 10);
}

void device_uuid(const struct device *device, char text[UUID_TEXT])
{
    strcpy(text, device->instance ? "MIG-" : "GPU-");
    for (int i = 0; i < 16; i++)
        sprintf(text + strlen(text), i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x", device->uuid[i]);
}

/* Gives each GPU a number, and its instances the same one. */
static void number_all(void)
{
    int gpu = -1;
    for (int i = 0; i < all_count; i++) {
        gpu += !all[i].instance;
        all[i].index = i;
        all[i].gpu = gpu;
        all[i].is_divided = !all[i].instance && i + 1 < all_count && all[i + 1].instance;
    }
}

static const struct device *gpu_among_all(int number)
{
    for (int i = 0; i < all_count; i++)
        if (!all[i].instance && all[i].gpu == number)
            return &all[i];
    return NULL;
}

/* The device of an entry of CUDA_VISIBLE_DEVICES: the number of a GPU, or the beginning of a UUID. */
static const struct device *named(const char *entry)
{
    char *end, text[UUID_TEXT];
    size_t length = strcspn(entry, ",");
    long number = strtol(entry, &end, 10);
    if (end != entry)
        return gpu_among_all((int)number);
    for (int i = 0; length > strlen("GPU-") && i < all_count; i++) {
        device_uuid(&all[i], text);
        if (strncmp(entry, text, length) == 0)
            return &all[i];
    }
    return NULL;
}

/* Makes a device visible to CUDA; returns whether others may follow. For a divided GPU that is its first instance, and
 * with an instance CUDA shows no other device ("NVIDIA Multi-Instance GPU User Guide", CUDA Device Enumeration). */
static bool show(const struct device *device)
{
    if (device->is_divided)
        device++;
    if (device->instance)
        count = 0;
    devices[count++] = *device;
    return !device->instance;
}

/* CUDA_VISIBLE_DEVICES hides and orders devices, as it does for the real runtime; an entry that is no device ends the
 * list ("CUDA C++ Programming Guide", environment variables). */
static void choose_visible(void)
{
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    const struct device *device;
    if (visible == NULL) {
        for (int i = 0; (device = gpu_among_all(i)) != NULL && show(device);)
            i++;
        return;
    }
    while (count < MOST_DEVICES && (device = named(visible)) != NULL && show(device) &&
           (visible = strchr(visible, ',')) != NULL)
        visible++;
}

static void read_devices(void)
{
    const char *text = getenv("PYTEST_GPUMEM_DRY_DEVICES");
    char *copy = strdup(text == NULL ? "" : text), *rest = copy, *one;
    while (copy != NULL && (one = strsep(&rest, ";")) != NULL && all_count < MOST_DEVICES) {
        if (*one == '\0')
            continue;
        char *field;
        while ((field = strsep(&one, ",")) != NULL)
            read_field(&all[all_count], field);
        all_count++;
    }
    free(copy);
    number_all();
}

static void read_once(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, read_devices);
}

/* Read late: a program may query NVML first, and then set the variable. */
int device_count(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    read_once();
    pthread_once(&once, choose_visible);
    driver_begin();
    return count;
}

int current_device(void) { return current; }

int set_current_device(int index)
{
    if (index < 0 || index >= device_count())
        return fail(INVALID_DEVICE);
    current = index;
    return SUCCESS;
}

const struct device *device_at(int index)
{
    return index < 0 || index >= device_count() ? NULL : &devices[index];
}

int machine_count(void)
{
    read_once();
    return all_count;
}

const struct device *machine_at(int index) { return index < 0 || index >= machine_count() ? NULL : &all[index]; }

const struct device *gpu_at(int number)
{
    read_once();
    return gpu_among_all(number);
}
