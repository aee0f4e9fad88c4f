/* libnvidia-ml.so.1 for tests: the part of NVML's ABI that nvidia-ml-py calls for us.
 *
 * Symbols, argument types, struct layouts and error codes are those of the driver's library, so the
 * real nvidia-ml-py runs on top. Handles are small integers that are never dereferenced: GPU i is
 * i + 1, MIG slice m of it is (m + 1) * 1000 + i + 1. */
#include "state.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef int nvmlReturn_t;
typedef void *nvmlDevice_t;

enum {
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4,
    NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, TIMEOUT = 10, GPU_IS_LOST = 15, VERSION_MISMATCH = 25
};
enum { MIG_STRIDE = 1000, CLOCK_SM = 1, UNCORRECTED = 1, SCOPE_GPU = 0, SCOPE_MODULE = 1 };

static int initialized;

static int gpu_index(nvmlDevice_t device) { return (int)((uintptr_t)device % MIG_STRIDE) - 1; }
static int mig_index(nvmlDevice_t device) { return (int)((uintptr_t)device / MIG_STRIDE) - 1; }

static nvmlDevice_t handle(uint32_t gpu, int mig) {
    return (nvmlDevice_t)(uintptr_t)((mig + 1) * MIG_STRIDE + (int)gpu + 1);
}

/* Enters a call about one GPU; on success *gpu is locked until leave(). */
static int enter_gpu(const char *function, nvmlDevice_t device, struct fake_gpu **gpu) {
    struct fake_node *node;
    int index = gpu_index(device);
    if (!initialized)
        return UNINITIALIZED;
    int code = enter(function, index, &node);
    if (code)
        return code;
    if (index < 0 || index >= (int)node->num_gpus)
        return leave(INVALID_ARGUMENT);
    *gpu = &node->gpus[index];
    if (!(*gpu)->present || (*gpu)->lost)
        return leave(GPU_IS_LOST);
    return SUCCESS;
}

#define GPU_CALL(device)                                     \
    struct fake_gpu *gpu;                                    \
    int entered = enter_gpu(__func__, device, &gpu);         \
    if (entered)                                             \
        return entered;

#define NODE_CALL()                                          \
    struct fake_node *node;                                  \
    if (!initialized)                                        \
        return UNINITIALIZED;                                \
    int entered = enter(__func__, -1, &node);                \
    if (entered)                                             \
        return entered;

static int copy_text(char *out, unsigned size, const char *text) {
    if (strlen(text) >= size)
        return INSUFFICIENT_SIZE;
    strcpy(out, text);
    return SUCCESS;
}

/* ---- library and enumeration ---- */

nvmlReturn_t nvmlInitWithFlags(unsigned flags) {
    struct fake_node *node;
    (void)flags;
    int code = state_open();
    if (!code)
        code = enter(__func__, -1, &node);
    if (code)
        return code;
    initialized++;
    return leave(SUCCESS);
}

nvmlReturn_t nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

nvmlReturn_t nvmlShutdown(void) {
    if (!initialized)
        return UNINITIALIZED;
    initialized--;
    return SUCCESS;
}

const char *nvmlErrorString(nvmlReturn_t code) {
    static char text[32];
    snprintf(text, sizeof text, "error %d", code);
    return text;
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned length) {
    NODE_CALL()
    (void)node;
    return leave(copy_text(version, length, "570.86.15"));
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count) {
    NODE_CALL()
    *count = 0;
    for (uint32_t i = 0; i < node->num_gpus; i++)
        *count += node->gpus[i].present;
    return leave(SUCCESS);
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device) {
    NODE_CALL()
    for (uint32_t i = 0, seen = 0; i < node->num_gpus; i++) {
        if (!node->gpus[i].present || seen++ != index)
            continue;
        if (node->gpus[i].lost)
            return leave(GPU_IS_LOST);
        *device = handle(i, -1);
        return leave(SUCCESS);
    }
    return leave(INVALID_ARGUMENT);
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
    NODE_CALL()
    for (uint32_t i = 0; i < node->num_gpus; i++) {
        struct fake_gpu *gpu = &node->gpus[i];
        int found = strcmp(gpu->uuid, uuid) == 0 ? 0 : -1;
        for (uint32_t m = 0; m < gpu->num_mig; m++)
            if (strcmp(gpu->mig_uuids[m], uuid) == 0)
                found = (int)m + 1;
        if (found < 0 || !gpu->present)
            continue;
        if (gpu->lost)
            return leave(GPU_IS_LOST);
        *device = handle(i, found - 1);
        return leave(SUCCESS);
    }
    return leave(NOT_FOUND);
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned length) {
    GPU_CALL(device)
    int mig = mig_index(device);
    return leave(copy_text(uuid, length, mig < 0 ? gpu->uuid : gpu->mig_uuids[mig]));
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned length) {
    GPU_CALL(device)
    return leave(copy_text(name, length, gpu->name));
}

struct pci_info {
    char bus_id_legacy[16];
    unsigned domain, bus, device, pci_device_id, pci_subsystem_id;
    char bus_id[32];
};

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, struct pci_info *info) {
    GPU_CALL(device)
    memset(info, 0, sizeof *info);
    snprintf(info->bus_id, sizeof info->bus_id, "%s", gpu->pci_bus_id);
    sscanf(gpu->pci_bus_id, "%x:%x:%x", &info->domain, &info->bus, &info->device);
    return leave(SUCCESS);
}

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned *current, unsigned *pending) {
    GPU_CALL(device)
    *current = *pending = gpu->num_mig > 0;
    return leave(SUCCESS);
}

nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned *count) {
    GPU_CALL(device)
    (void)gpu;
    *count = MAX_MIG;
    return leave(SUCCESS);
}

nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned index,
                                                 nvmlDevice_t *mig) {
    GPU_CALL(device)
    if (index >= gpu->num_mig)
        return leave(NOT_FOUND);
    *mig = handle((uint32_t)gpu_index(device), (int)index);
    return leave(SUCCESS);
}

/* ---- power ---- */

static int read_limit(nvmlDevice_t device, const char *function, uint32_t *value,
                      uint32_t (*pick)(const struct fake_gpu *)) {
    struct fake_gpu *gpu;
    int code = enter_gpu(function, device, &gpu);
    if (code)
        return code;
    if (!gpu->supports_limits)
        return leave(NOT_SUPPORTED);
    *value = pick(gpu);
    return leave(SUCCESS);
}

static uint32_t pick_requested(const struct fake_gpu *gpu) { return gpu->gpu_limit.requested_mw; }
static uint32_t pick_default(const struct fake_gpu *gpu) { return gpu->gpu_limit.default_mw; }

nvmlReturn_t nvmlDeviceGetPowerManagementLimit(nvmlDevice_t device, unsigned *limit_mw) {
    return read_limit(device, __func__, limit_mw, pick_requested);
}

nvmlReturn_t nvmlDeviceGetPowerManagementDefaultLimit(nvmlDevice_t device, unsigned *limit_mw) {
    return read_limit(device, __func__, limit_mw, pick_default);
}

nvmlReturn_t nvmlDeviceGetEnforcedPowerLimit(nvmlDevice_t device, unsigned *limit_mw) {
    return read_limit(device, __func__, limit_mw, model_enforced_mw);
}

nvmlReturn_t nvmlDeviceGetPowerManagementLimitConstraints(nvmlDevice_t device, unsigned *min_mw,
                                                          unsigned *max_mw) {
    GPU_CALL(device)
    if (!gpu->supports_limits)
        return leave(NOT_SUPPORTED);
    *min_mw = gpu->gpu_limit.min_mw;
    *max_mw = gpu->gpu_limit.max_mw;
    return leave(SUCCESS);
}

static int may_set(void) {
    const struct fake_node *node = current_node();
    return node->set_privilege == SET_ANYONE || (node->set_privilege == SET_ROOT && geteuid() == 0);
}

static int set_limit(nvmlDevice_t device, const char *function, unsigned scope, uint32_t value_mw) {
    struct fake_gpu *gpu;
    int code = enter_gpu(function, device, &gpu);
    if (code)
        return code;
    struct limits *limits = scope == SCOPE_MODULE ? &gpu->module_limit : &gpu->gpu_limit;
    int supported = scope == SCOPE_MODULE ? gpu->supports_module : gpu->supports_limits;
    if (!supported || mig_index(device) >= 0)
        code = NOT_SUPPORTED;
    else if (!may_set())
        code = NO_PERMISSION;
    else if (value_mw < limits->min_mw || value_mw > limits->max_mw)
        code = INVALID_ARGUMENT;
    else if (!gpu->ignores_sets)
        limits->requested_mw = value_mw;
    log_write(function, gpu, value_mw, code);
    return leave(code);
}

nvmlReturn_t nvmlDeviceSetPowerManagementLimit(nvmlDevice_t device, unsigned limit_mw) {
    return set_limit(device, __func__, SCOPE_GPU, limit_mw);
}

struct power_value_v2 { unsigned version, scope, value_mw; };

nvmlReturn_t nvmlDeviceSetPowerManagementLimit_v2(nvmlDevice_t device, struct power_value_v2 *value) {
    if (value->version != (2u << 24 | sizeof *value))
        return VERSION_MISMATCH;
    if (value->scope != SCOPE_GPU && value->scope != SCOPE_MODULE)
        return NOT_SUPPORTED;
    return set_limit(device, __func__, value->scope, value->value_mw);
}

nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned *draw_mw) {
    GPU_CALL(device)
    *draw_mw = model_draw_mw(gpu);
    return leave(SUCCESS);
}

nvmlReturn_t nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_t device, unsigned long long *energy_mj) {
    GPU_CALL(device)
    *energy_mj = (unsigned long long)gpu->energy_mj;
    return leave(SUCCESS);
}

/* ---- clocks and temperature ---- */

nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, int type, unsigned *clock_mhz) {
    GPU_CALL(device)
    if (type != CLOCK_SM)
        return leave(NOT_SUPPORTED);
    *clock_mhz = model_clock_mhz(gpu);
    return leave(SUCCESS);
}

nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, int type, unsigned *clock_mhz) {
    GPU_CALL(device)
    if (type != CLOCK_SM)
        return leave(NOT_SUPPORTED);
    *clock_mhz = gpu->max_clock_mhz;
    return leave(SUCCESS);
}

static int read_reasons(nvmlDevice_t device, const char *function, unsigned long long *reasons) {
    struct fake_gpu *gpu;
    int code = enter_gpu(function, device, &gpu);
    if (code)
        return code;
    *reasons = model_reasons(gpu);
    return leave(SUCCESS);
}

nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t device,
                                                    unsigned long long *reasons) {
    return read_reasons(device, __func__, reasons);
}

nvmlReturn_t nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t device,
                                                       unsigned long long *reasons) {
    return read_reasons(device, __func__, reasons);
}

nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, int sensor, unsigned *temperature_c) {
    GPU_CALL(device)
    if (sensor != 0)
        return leave(INVALID_ARGUMENT);
    *temperature_c = (unsigned)gpu->temperature_c;
    return leave(SUCCESS);
}

static int lock_clocks(nvmlDevice_t device, const char *function, unsigned min_mhz,
                       unsigned max_mhz) {
    struct fake_gpu *gpu;
    int code = enter_gpu(function, device, &gpu);
    if (code)
        return code;
    code = !may_set() ? NO_PERMISSION : max_mhz > gpu->max_clock_mhz ? INVALID_ARGUMENT : SUCCESS;
    if (!code) {
        gpu->locked_min_mhz = min_mhz;
        gpu->locked_max_mhz = max_mhz;
    }
    log_write(function, gpu, max_mhz, code);
    return leave(code);
}

nvmlReturn_t nvmlDeviceSetGpuLockedClocks(nvmlDevice_t device, unsigned min_mhz, unsigned max_mhz) {
    return lock_clocks(device, __func__, min_mhz, max_mhz);
}

nvmlReturn_t nvmlDeviceResetGpuLockedClocks(nvmlDevice_t device) {
    return lock_clocks(device, __func__, 0, 0);
}

/* ---- health ---- */

nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, int error_type, int counter_type,
                                         unsigned long long *count) {
    GPU_CALL(device)
    (void)counter_type;
    *count = error_type == UNCORRECTED ? gpu->ecc_uncorrected : gpu->ecc_corrected;
    return leave(SUCCESS);
}

nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned *corrected,
                                       unsigned *uncorrected, unsigned *pending,
                                       unsigned *failure) {
    GPU_CALL(device)
    *corrected = gpu->remap_corrected;
    *uncorrected = gpu->remap_uncorrected;
    *pending = gpu->remap_pending;
    *failure = gpu->remap_failure;
    return leave(SUCCESS);
}

nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned link, unsigned *active) {
    GPU_CALL(device)
    if (link >= MAX_LINKS || link >= gpu->num_links)
        return leave(link >= MAX_LINKS ? INVALID_ARGUMENT : NOT_SUPPORTED);
    *active = gpu->link_active[link];
    return leave(SUCCESS);
}

struct process_info {
    unsigned pid;
    unsigned long long used_bytes;
    unsigned gpu_instance, compute_instance;
};

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *count,
                                                     struct process_info *infos) {
    GPU_CALL(device)
    unsigned room = *count;
    *count = gpu->num_pids;
    if (room < gpu->num_pids)
        return leave(INSUFFICIENT_SIZE);
    for (uint32_t i = 0; i < gpu->num_pids; i++)
        infos[i] = (struct process_info){gpu->pids[i], 1u << 30, ~0u, ~0u};
    return leave(SUCCESS);
}

enum {
    FIELD_REMAP_PENDING = 144, FIELD_REMAP_FAILURE = 145, FIELD_POWER_MIN = 187,
    FIELD_POWER_MAX = 188, FIELD_POWER_DEFAULT = 189, FIELD_POWER_CURRENT = 190,
    FIELD_POWER_REQUESTED = 192, FIELD_RECOVERY_ACTION = 230
};

struct field_value {
    uint32_t field, scope;
    int64_t timestamp_us, latency_us;
    int value_type, result;
    union { double d; uint32_t ui; unsigned long ul; unsigned long long ull; long long sll; } value;
};

static int read_field(const struct fake_gpu *gpu, struct field_value *out) {
    const struct limits *limits = &gpu->gpu_limit;
    int power = out->field >= FIELD_POWER_MIN && out->field <= FIELD_POWER_REQUESTED;
    if (power && out->scope == SCOPE_MODULE) {
        if (!gpu->supports_module)
            return NOT_SUPPORTED;
        limits = &gpu->module_limit;
    }
    switch (out->field) {
    case FIELD_REMAP_PENDING: out->value.ui = gpu->remap_pending; break;
    case FIELD_REMAP_FAILURE: out->value.ui = gpu->remap_failure; break;
    case FIELD_POWER_MIN: out->value.ui = limits->min_mw; break;
    case FIELD_POWER_MAX: out->value.ui = limits->max_mw; break;
    case FIELD_POWER_DEFAULT: out->value.ui = limits->default_mw; break;
    case FIELD_POWER_CURRENT:
        out->value.ui = out->scope == SCOPE_MODULE ? limits->requested_mw : model_enforced_mw(gpu);
        break;
    case FIELD_POWER_REQUESTED: out->value.ui = limits->requested_mw; break;
    case FIELD_RECOVERY_ACTION: out->value.ui = gpu->recovery_action; break;
    default: return NOT_SUPPORTED;
    }
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, struct field_value *values) {
    GPU_CALL(device)
    for (int i = 0; i < count; i++) {
        values[i].value_type = 1; /* unsigned int */
        values[i].result = read_field(gpu, &values[i]);
    }
    return leave(SUCCESS);
}

/* ---- events: XIDs that were added to a GPU after it was registered ---- */

struct event_set { uint32_t registered[MAX_GPUS], seen[MAX_GPUS]; };
struct event_data {
    nvmlDevice_t device;
    unsigned long long type, data;
    unsigned gpu_instance, compute_instance;
};
enum { EVENT_XID = 0x8, POLL_US = 2000 };

nvmlReturn_t nvmlEventSetCreate(struct event_set **set) {
    *set = calloc(1, sizeof **set);
    return SUCCESS;
}

nvmlReturn_t nvmlEventSetFree(struct event_set *set) {
    free(set);
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types) {
    GPU_CALL(device)
    (void)gpu;
    *types = EVENT_XID;
    return leave(SUCCESS);
}

nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types,
                                      struct event_set *set) {
    GPU_CALL(device)
    if (types & ~(unsigned long long)EVENT_XID)
        return leave(NOT_SUPPORTED);
    set->registered[gpu_index(device)] = 1;
    set->seen[gpu_index(device)] = gpu->num_xids;
    return leave(SUCCESS);
}

nvmlReturn_t nvmlEventSetWait_v2(struct event_set *set, struct event_data *data,
                                 unsigned timeout_ms) {
    for (long left_us = timeout_ms * 1000L;; left_us -= POLL_US) {
        NODE_CALL()
        for (uint32_t i = 0; i < node->num_gpus; i++) {
            struct fake_gpu *gpu = &node->gpus[i];
            if (!set->registered[i] || set->seen[i] >= gpu->num_xids)
                continue;
            *data = (struct event_data){handle(i, -1), EVENT_XID,
                                        gpu->xids[set->seen[i]++ % MAX_XIDS], ~0u, ~0u};
            return leave(SUCCESS);
        }
        leave(SUCCESS);
        if (left_us <= 0)
            return TIMEOUT;
        usleep(POLL_US);
    }
}

/* For node.py, which compares its mirror of the structs with these. */
unsigned fakeSizeofNode(void) { return sizeof(struct fake_node); }
unsigned fakeSizeofGpu(void) { return sizeof(struct fake_gpu); }
