/* The shared state file: mapping, locking, planned faults and the log of writes.
 *
 * The file is named by FAKE_NVML_STATE; the log is FILE.log, one JSON object a line. A fork gets the
 * same mapping; its lock is taken on a descriptor of its own, since flock belongs to the open file. */
#define _GNU_SOURCE
#include "state.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { NVML_SUCCESS = 0, NVML_UNINITIALIZED = 1, NVML_DRIVER_NOT_LOADED = 9 };

static struct fake_node *node;
static char mapped_path[4000];
static int lock_fd = -1, log_fd = -1;
static pid_t owner;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static int map_file(const char *path) {
    char log_path[4096];
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return NVML_DRIVER_NOT_LOADED;
    if (node)
        munmap(node, sizeof *node);
    node = mmap(NULL, sizeof *node, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (node == MAP_FAILED || node->magic != FAKE_MAGIC) {
        fprintf(stderr, "fake NVML: %s is not a state file of this version\n", path);
        abort();
    }
    if (lock_fd >= 0 && owner == getpid())
        close(lock_fd);
    if (log_fd >= 0)
        close(log_fd);
    snprintf(log_path, sizeof log_path, "%s.log", path);
    log_fd = open(log_path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    lock_fd = fd;
    owner = getpid();
    snprintf(mapped_path, sizeof mapped_path, "%s", path);
    return NVML_SUCCESS;
}

int state_open(void) {
    const char *path = getenv("FAKE_NVML_STATE");
    int code = NVML_SUCCESS;
    if (!path)
        return NVML_DRIVER_NOT_LOADED;
    pthread_mutex_lock(&mutex);
    if (!node || owner != getpid() || strcmp(path, mapped_path) != 0)
        code = map_file(path);
    pthread_mutex_unlock(&mutex);
    return code;
}

static void lock(void) {
    pthread_mutex_lock(&mutex);
    flock(lock_fd, LOCK_EX);
}

static void unlock(void) {
    flock(lock_fd, LOCK_UN);
    pthread_mutex_unlock(&mutex);
}

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static int matches(const struct rule *rule, const char *function, int gpu_index) {
    size_t length = strlen(rule->function);
    if (rule->remaining == 0 || length == 0)
        return 0;
    if (rule->gpu >= 0 && rule->gpu != gpu_index)
        return 0;
    if (rule->function[length - 1] == '*')
        return strncmp(rule->function, function, length - 1) == 0;
    return strcmp(rule->function, function) == 0;
}

/* Sleeps unlocked, since a call that hangs must not stop the other processes of the node, and until
 * the time is over or a test clears the rule. */
static void hang(const struct rule *rule, int hang_ms) {
    enum { SLICE_MS = 5 };
    unlock();
    for (; hang_ms > 0 && rule->function[0]; hang_ms -= SLICE_MS)
        usleep(SLICE_MS * 1000);
    lock();
}

static int apply_rules(const char *function, int gpu_index) {
    for (int i = 0; i < MAX_RULES; i++) {
        struct rule *rule = &node->rules[i];
        if (!matches(rule, function, gpu_index))
            continue;
        int result = rule->result, hang_ms = rule->hang_ms;
        if (rule->remaining > 0)
            rule->remaining--;
        if (hang_ms > 0)
            hang(rule, hang_ms);
        return result;
    }
    return NVML_SUCCESS;
}

static void log_line(const char *line, int length) {
    if (log_fd >= 0 && write(log_fd, line, (size_t)length) != length)
        perror("fake NVML: log");
}

static void log_call(const char *function, int gpu_index) {
    char line[512];
    int length = snprintf(
        line, sizeof line,
        "{\"event\": \"call\", \"time_ns\": %llu, \"pid\": %d, \"tid\": %ld, \"function\": \"%s\", "
        "\"gpu\": %d}\n",
        (unsigned long long)now_ns(), (int)getpid(), syscall(SYS_gettid), function, gpu_index);
    log_line(line, length);
}

void log_write(const char *function, const struct fake_gpu *gpu, uint32_t value, int code) {
    char line[1024];
    uint64_t sum_mw = 0;
    for (uint32_t i = 0; i < node->num_gpus; i++)
        if (node->gpus[i].present && !node->gpus[i].lost)
            sum_mw += node->gpus[i].gpu_limit.requested_mw;
    int length = snprintf(
        line, sizeof line,
        "{\"event\": \"write\", \"time_ns\": %llu, \"pid\": %d, \"euid\": %d, \"function\": \"%s\", "
        "\"uuid\": \"%s\", \"value\": %u, \"result\": %d, \"sum_requested_mw\": %llu}\n",
        (unsigned long long)now_ns(), (int)getpid(), (int)geteuid(), function, gpu->uuid, value, code,
        (unsigned long long)sum_mw);
    log_line(line, length);
}

int enter(const char *function, int gpu_index, struct fake_node **out) {
    struct timespec now;
    if (!node)
        return NVML_UNINITIALIZED;
    if (owner != getpid()) {
        int code = state_open();
        if (code)
            return code;
    }
    lock();
    if (node->trace)
        log_call(function, gpu_index);
    int result = apply_rules(function, gpu_index);
    if (result)
        return leave(result);
    clock_gettime(CLOCK_MONOTONIC, &now);
    double now_s = node->virtual_now_s >= 0 ? node->virtual_now_s : now.tv_sec + now.tv_nsec * 1e-9;
    for (uint32_t i = 0; i < node->num_gpus; i++)
        model_advance(&node->gpus[i], now_s);
    *out = node;
    return NVML_SUCCESS;
}

const struct fake_node *current_node(void) {
    return node;
}

int leave(int code) {
    unlock();
    return code;
}
