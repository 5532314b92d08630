// What the kernels share: element types, conversions, and an exponential that compilers vectorise.
//
// Plain C++17 and OpenMP, no torch headers: the functions are called through ctypes with data pointers. Everything
// accumulates in float32. Written so that -O3 -march=native vectorises it on x86-64 and aarch64; intrinsics are used
// only where a comment says why.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace plimsoll {

struct bfloat16 {
    uint16_t bits;
};

inline float to_float(float value) { return value; }

inline float to_float(bfloat16 value) {
    const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

template <typename T>
T from_float(float value);

template <>
inline float from_float<float>(float value) {
    return value;
}

// Rounds to nearest, ties to even, as torch does. A NaN stays one.
template <>
inline bfloat16 from_float<bfloat16>(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    return {static_cast<uint16_t>(value != value ? 0x7FC0 : rounded)};
}

// e^x by Cody-Waite reduction and a polynomial (Cephes expf), within 2 ulp; 0 below -87.
inline float exp_approximate(float x) {
    const float clamped = x < -87.0f ? -87.0f : (x > 88.0f ? 88.0f : x);
    // Adding and subtracting 1.5 * 2^23 rounds to an integer without a call.
    const float n = (clamped * 1.44269504088896341f + 12582912.0f) - 12582912.0f;
    const float r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const int32_t exponent = (static_cast<int32_t>(n) + 127) << 23;
    float scale;
    std::memcpy(&scale, &exponent, sizeof scale);
    return x < -87.0f ? 0.0f : p * scale;
}

}  // namespace plimsoll
