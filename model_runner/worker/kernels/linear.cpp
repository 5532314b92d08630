// y = x · Wᵀ + b in bfloat16 with float32 sums, for the few to few hundred rows of a serving step.
//
// W [N, K] is packed once into panels of 32 outputs: for each pair of inputs, 32 · 2 elements, in the order that
// AVX-512's VDPBF16PS (sixteen sums of two products) takes them. A panel is read front to back: one row of x is bound
// by memory, and from some twenty rows on by the multipliers. Compiled in where the CPU has AVX512-BF16; elsewhere
// `plimsoll_linear_supported` says no.
#include <algorithm>
#include <atomic>

#include "kernels.h"

#if defined(__AVX512BF16__) && defined(__AVX512F__)
#include <immintrin.h>
#define PLIMSOLL_HAS_LINEAR 1
#endif

namespace plimsoll {

constexpr int kPanel = 32;
constexpr int kRows = 12;        // 12 rows · 2 vectors of sums fill 24 of the 32 registers
constexpr int kRowsInCache = 96;  // rows of x that stay in the second-level cache beside a panel

#ifdef PLIMSOLL_HAS_LINEAR

inline __m512 silu(__m512 x) {
    alignas(64) float lanes[16];
    _mm512_store_ps(lanes, x);
#pragma omp simd
    for (int i = 0; i < 16; ++i) lanes[i] = lanes[i] / (1.0f + exp_approximate(-lanes[i]));
    return _mm512_load_ps(lanes);
}

inline void store(bfloat16* target, __m512 values, int columns) {
    const __mmask16 mask = columns >= 16 ? 0xFFFF : static_cast<__mmask16>((1u << std::max(columns, 0)) - 1);
    _mm256_mask_storeu_epi16(target, mask, reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(values)));
}

// On the way, memory is asked for from `ahead.begin` on, `ahead.step` elements for each pair of inputs.
struct Ahead {
    const bfloat16* begin;
    int64_t step;
};

template <int R>
void multiply(const LinearArguments& a, int64_t row, int64_t panel, Ahead ahead) {
    const bfloat16* x = a.x + row * a.x_stride;
    const bfloat16* weights = a.panels + panel * kPanel * a.inputs;
    __m512 low[R], high[R];
    const __m512 zero = _mm512_setzero_ps();
    const float* bias = a.bias ? a.bias + panel * kPanel : nullptr;
    for (int r = 0; r < R; ++r) {
        low[r] = bias ? _mm512_loadu_ps(bias) : zero;
        high[r] = bias ? _mm512_loadu_ps(bias + 16) : zero;
    }
    for (int64_t k = 0; k < a.inputs; k += 2) {
        const bfloat16* asked = ahead.begin + k / 2 * ahead.step;
        __builtin_prefetch(asked, 0, 2);
        if (ahead.step > 32) __builtin_prefetch(asked + 32, 0, 2);  // a line has 32 elements
        const __m512bh w_low = reinterpret_cast<__m512bh>(_mm512_loadu_si512(weights + k * kPanel));
        const __m512bh w_high = reinterpret_cast<__m512bh>(_mm512_loadu_si512(weights + k * kPanel + 32));
        for (int r = 0; r < R; ++r) {
            int32_t pair;
            std::memcpy(&pair, x + r * a.x_stride + k, sizeof pair);
            const __m512bh both = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
            low[r] = _mm512_dpbf16_ps(low[r], both, w_low);
            high[r] = _mm512_dpbf16_ps(high[r], both, w_high);
        }
    }
    for (int r = 0; r < R; ++r) {
        if (a.gated) {
            const int64_t width = a.outputs / 2, column = panel * 16;
            store(a.y + (row + r) * width + column, _mm512_mul_ps(silu(low[r]), high[r]), width - column);
        } else {
            const int64_t column = panel * kPanel;
            bfloat16* target = a.y + (row + r) * a.outputs + column;
            store(target, low[r], a.outputs - column);
            store(target + 16, high[r], a.outputs - column - 16);
        }
    }
}

template <int R = kRows>
void multiply_rows(const LinearArguments& a, int64_t row, int64_t panel, Ahead ahead, int64_t rows) {
    if (rows == R) {
        multiply<R>(a, row, panel, ahead);
    } else if constexpr (R > 1) {
        multiply_rows<R - 1>(a, row, panel, ahead, rows);
    }
}

// All rows by one panel, in tiles as equal as can be. Each tile asks for its share of the next panel.
void multiply_panel(const LinearArguments& a, int64_t first, int64_t last, int64_t panel, int64_t next_panel) {
    const int64_t tiles = (last - first + kRows - 1) / kRows;
    const bfloat16* next = a.panels + next_panel * kPanel * a.inputs;
    for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t begin = first + (last - first) * tile / tiles, end = first + (last - first) * (tile + 1) / tiles;
        const Ahead ahead{next + kPanel * a.inputs * tile / tiles, 2 * kPanel / tiles};
        multiply_rows(a, begin, panel, ahead, end - begin);
    }
}

void linear(const LinearArguments& a) {
    const int64_t panels = (a.outputs + kPanel - 1) / kPanel;
    for (int64_t first = 0; first < a.rows; first += kRowsInCache) {
        const int64_t last = std::min(a.rows, first + kRowsInCache);
        // Panels are claimed as threads come, because a neighbour on one of the cores must not hold up the other;
        // and one ahead, so that a thread knows what to ask for.
        std::atomic<int64_t> unclaimed{0};
        const auto claim = [&] { return unclaimed.fetch_add(1, std::memory_order_relaxed); };
#pragma omp parallel
        for (int64_t panel = claim(), next; panel < panels; panel = next) {
            next = claim();
            multiply_panel(a, first, last, panel, std::min(next, panels - 1));
        }
    }
}

#else

void linear(const LinearArguments&) {}

#endif

}  // namespace plimsoll

extern "C" {

int plimsoll_linear_supported() {
#ifdef PLIMSOLL_HAS_LINEAR
    return 1;
#else
    return 0;
#endif
}

void plimsoll_linear(const plimsoll::bfloat16* x, const plimsoll::bfloat16* panels, const float* bias,
                     plimsoll::bfloat16* y, int64_t x_stride, int64_t rows, int64_t inputs, int64_t outputs,
                     int64_t gated) {
    plimsoll::linear({x, panels, bias, y, x_stride, rows, inputs, outputs, gated});
}
}
