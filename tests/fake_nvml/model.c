/* A board as a controller sees it: power limit in; clocks, draw, temperature and energy out.
 *
 * Full load would draw the board's maximum; the enforced limit caps it. The clock follows
 * (draw / maximum) ^ exponent. Temperature goes exponentially to ambient + c_per_w * draw; above
 * slowdown_c the clock drops to 80 % and stays there until the board is 3 degrees cooler. */
#include "state.h"

#include <math.h>

static const uint32_t IDLE_MW = 70000;
static const double THROTTLED_SHARE = 0.8, HYSTERESIS_C = 3.0;

enum {
    REASON_IDLE = 0x1, REASON_SW_POWER_CAP = 0x4, REASON_SW_THERMAL = 0x20
};

static double demand_mw(const struct fake_gpu *gpu) {
    return gpu->load * gpu->gpu_limit.max_mw;
}

uint32_t model_enforced_mw(const struct fake_gpu *gpu) {
    uint32_t limit = gpu->gpu_limit.requested_mw;
    if (gpu->external_cap_mw && gpu->external_cap_mw < limit)
        limit = gpu->external_cap_mw;
    return limit;
}

uint32_t model_draw_mw(const struct fake_gpu *gpu) {
    double draw = fmin(demand_mw(gpu), model_enforced_mw(gpu));
    return draw > IDLE_MW ? (uint32_t)draw : IDLE_MW;
}

uint32_t model_clock_mhz(const struct fake_gpu *gpu) {
    double share = pow((double)model_draw_mw(gpu) / gpu->gpu_limit.max_mw, gpu->exponent);
    double clock = gpu->max_clock_mhz * share * (gpu->throttled ? THROTTLED_SHARE : 1.0);
    if (gpu->locked_max_mhz && clock > gpu->locked_max_mhz)
        clock = gpu->locked_max_mhz;
    return (uint32_t)clock;
}

uint64_t model_reasons(const struct fake_gpu *gpu) {
    uint64_t reasons = gpu->extra_reasons;
    if (gpu->load == 0)
        reasons |= REASON_IDLE;
    if (demand_mw(gpu) > model_enforced_mw(gpu))
        reasons |= REASON_SW_POWER_CAP;
    if (gpu->throttled)
        reasons |= REASON_SW_THERMAL;
    return reasons;
}

void model_advance(struct fake_gpu *gpu, double now_s) {
    double elapsed_s = now_s - gpu->updated_s;
    double draw_mw = model_draw_mw(gpu);
    double target_c = gpu->ambient_c + gpu->c_per_w * draw_mw / 1000.0;

    gpu->updated_s = now_s;
    if (elapsed_s <= 0)
        return;
    gpu->temperature_c = target_c + (gpu->temperature_c - target_c) * exp(-elapsed_s / gpu->tau_s);
    gpu->energy_mj += draw_mw * elapsed_s;
    if (gpu->temperature_c >= gpu->slowdown_c)
        gpu->throttled = 1;
    else if (gpu->temperature_c < gpu->slowdown_c - HYSTERESIS_C)
        gpu->throttled = 0;
}
