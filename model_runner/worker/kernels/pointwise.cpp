// The small operations between the matrix products, each one pass over its data.
#include "kernels.h"

namespace plimsoll {

// Below this many elements a second thread costs more than it brings.
constexpr int64_t kParallelElements = 1 << 14;

// y = x / sqrt(mean(x²) + eps) · weight (Zhang & Sennrich, "Root Mean Square Layer Normalization", 2019).
// `round_first`: the normalised x is rounded to T before it is scaled, as Llama's does; Gemma's is not.
template <typename T>
void rms_norm(const T* x, const float* weight, T* y, int64_t rows, int64_t width, float eps, int round_first) {
#pragma omp parallel for if (rows * width > kParallelElements)
    for (int64_t row = 0; row < rows; ++row) {
        const T* source = x + row * width;
        T* target = y + row * width;
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < width; ++i) sum += to_float(source[i]) * to_float(source[i]);
        const float scale = 1.0f / std::sqrt(sum / width + eps);
        for (int64_t i = 0; i < width; ++i) {
            float value = to_float(source[i]) * scale;
            if (round_first) value = to_float(from_float<T>(value));
            target[i] = from_float<T>(value * weight[i]);
        }
    }
}

// Rotary position embedding in place (Su et al., "RoFormer", 2021), halves rotated against each other.
// x: [tokens, heads, 2 · half], tokens token_stride apart; cosine, sine: [tokens, 2 · half].
template <typename T>
void rotate(T* x, const T* cosine, const T* sine, int64_t tokens, int64_t heads, int64_t half, int64_t token_stride) {
#pragma omp parallel for if (tokens * heads * half > kParallelElements)
    for (int64_t token = 0; token < tokens; ++token) {
        const T* c = cosine + token * 2 * half;
        const T* s = sine + token * 2 * half;
        for (int64_t head = 0; head < heads; ++head) {
            T* first = x + token * token_stride + head * 2 * half;
            T* second = first + half;
#pragma omp simd
            for (int64_t i = 0; i < half; ++i) {
                const float a = to_float(first[i]), b = to_float(second[i]);
                first[i] = from_float<T>(a * to_float(c[i]) - b * to_float(s[i]));
                second[i] = from_float<T>(b * to_float(c[half + i]) + a * to_float(s[half + i]));
            }
        }
    }
}

template void rms_norm<float>(const float*, const float*, float*, int64_t, int64_t, float, int);
template void rms_norm<bfloat16>(const bfloat16*, const float*, bfloat16*, int64_t, int64_t, float, int);
template void rotate<float>(float*, const float*, const float*, int64_t, int64_t, int64_t, int64_t);
template void rotate<bfloat16>(bfloat16*, const bfloat16*, const bfloat16*, int64_t, int64_t, int64_t, int64_t);

}  // namespace plimsoll

using plimsoll::bfloat16;

extern "C" {

void plimsoll_rms_norm_float32(const float* x, const float* weight, float* y, int64_t rows, int64_t width, float eps,
                               int round_first) {
    plimsoll::rms_norm(x, weight, y, rows, width, eps, round_first);
}

void plimsoll_rms_norm_bfloat16(const bfloat16* x, const float* weight, bfloat16* y, int64_t rows, int64_t width,
                                float eps, int round_first) {
    plimsoll::rms_norm(x, weight, y, rows, width, eps, round_first);
}

void plimsoll_rotate_float32(float* x, const float* cosine, const float* sine, int64_t tokens, int64_t heads,
                             int64_t half, int64_t token_stride) {
    plimsoll::rotate(x, cosine, sine, tokens, heads, half, token_stride);
}

void plimsoll_rotate_bfloat16(bfloat16* x, const bfloat16* cosine, const bfloat16* sine, int64_t tokens, int64_t heads,
                              int64_t half, int64_t token_stride) {
    plimsoll::rotate(x, cosine, sine, tokens, heads, half, token_stride);
}
}
