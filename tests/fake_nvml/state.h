/* The state of an imagined node, shared by every process that loads this library.
 *
 * It is one file, mapped by the library and by tests/fake_nvml/node.py, whose ctypes structures
 * mirror these field by field (node.py compares sizes when it loads). Every access holds an
 * exclusive lock on the file, so processes and threads see whole states only. */
#ifndef FAKE_NVML_STATE_H
#define FAKE_NVML_STATE_H

#include <stdint.h>

enum { MAX_GPUS = 16, MAX_RULES = 32, MAX_PIDS = 8, MAX_LINKS = 18, MAX_XIDS = 16, MAX_MIG = 7 };
enum { TEXT = 96, SHORT_TEXT = 32 };

/* Who may change limits, as the driver sees it. */
enum { SET_ANYONE = 0, SET_ROOT = 1, SET_NOBODY = 2 };

struct limits {
    uint32_t min_mw, max_mw, default_mw, requested_mw;
};

struct fake_gpu {
    char uuid[TEXT];
    char name[TEXT];
    char pci_bus_id[SHORT_TEXT];
    char mig_uuids[MAX_MIG][TEXT];

    /* Thermal and performance model, see model.c. */
    double load;              /* share of full load that the running kernels ask for, 0 to 1 */
    double exponent;          /* clock ~ power ^ exponent */
    double ambient_c, c_per_w, tau_s, slowdown_c;
    double temperature_c, energy_mj, updated_s;

    uint64_t extra_reasons;   /* clock-event bits on top of those that the model sets */
    uint64_t xids[MAX_XIDS];
    uint64_t ecc_corrected, ecc_uncorrected;

    struct limits gpu_limit, module_limit;
    uint32_t present;         /* 0: not enumerated at all */
    uint32_t lost;            /* 1: enumerated, every call answers GPU_IS_LOST */
    uint32_t external_cap_mw; /* another limiter below the requested limit; 0: none */
    uint32_t max_clock_mhz, locked_min_mhz, locked_max_mhz;
    uint32_t throttled;       /* thermal slowdown is on (with hysteresis) */
    uint32_t supports_limits, supports_module;
    uint32_t ignores_sets;    /* 1: a set succeeds and changes nothing */
    uint32_t remap_corrected, remap_uncorrected, remap_pending, remap_failure;
    uint32_t recovery_action;
    uint32_t num_links, link_active[MAX_LINKS];
    uint32_t num_pids, pids[MAX_PIDS];
    uint32_t num_xids;
    uint32_t num_mig;
};

/* What a call of a function answers, or how long it hangs first. The first match counts. */
struct rule {
    char function[64];        /* exact name, or a prefix that ends in '*' */
    int32_t gpu;              /* index; -1: any, and calls that name no GPU */
    int32_t result;           /* an NVML error code; 0: go on and answer */
    int32_t hang_ms;
    int32_t remaining;        /* how often it still applies; -1: for ever; 0: spent */
};

struct fake_node {
    uint32_t magic, num_gpus;
    uint32_t set_privilege;   /* SET_* */
    uint32_t trace;           /* 1: log every call, not only those that set something */
    double virtual_now_s;     /* the model's clock; negative: the real monotonic clock */
    struct rule rules[MAX_RULES];
    struct fake_gpu gpus[MAX_GPUS];
};

enum { FAKE_MAGIC = 0x4e54502 };

/* model.c */
void model_advance(struct fake_gpu *gpu, double now_s);
uint32_t model_enforced_mw(const struct fake_gpu *gpu);
uint32_t model_draw_mw(const struct fake_gpu *gpu);
uint32_t model_clock_mhz(const struct fake_gpu *gpu);
uint64_t model_reasons(const struct fake_gpu *gpu);

/* state.c: both return an NVML code; after 0 the state is locked until leave(). */
int state_open(void);
int enter(const char *function, int gpu_index, struct fake_node **node);
int leave(int code);
const struct fake_node *current_node(void);
/* To be called locked: one line in the log of writes. */
void log_write(const char *function, const struct fake_gpu *gpu, uint32_t value, int code);

#endif
