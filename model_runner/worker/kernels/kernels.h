// The kernels' arguments, and those kernels that others call.
#pragma once

#include "common.h"

namespace plimsoll {

// Mirrored by AttentionArguments in native.py. Strides are in elements; the head dimension is contiguous everywhere.
struct AttentionArguments {
    const void* query;      // [T, query_heads, head_dim]
    const void* key_cache;  // [blocks, kv_heads, head_dim, block_size]
    const void* value_cache;  // [blocks, kv_heads, block_size, head_dim]
    void* output;  // [T, query_heads, head_dim], contiguous
    const int32_t* query_start_loc;  // [S + 1]
    const int32_t* seq_lens;  // [S]
    const int32_t* block_tables;  // [S, table_stride]
    const float* sinks;  // [query_heads] or null
    int64_t query_token_stride, query_head_stride;
    int64_t block_stride, head_stride;  // of both caches
    int64_t table_stride;
    int64_t sequences, query_heads, kv_heads, head_dim, block_size;
    int64_t window;  // tokens attended to, the query's own included; 0 is no limit
    float scale;
    float softcap;  // 0 is none
};

// Mirrored by WriteArguments in native.py.
struct WriteArguments {
    const void* key;  // [T, kv_heads, head_dim]
    const void* value;
    void* key_cache;    // [blocks, kv_heads, head_dim, block_size]
    void* value_cache;  // [blocks, kv_heads, block_size, head_dim]
    const int64_t* slots;  // [T]
    int64_t key_token_stride, key_head_stride, value_token_stride, value_head_stride;
    int64_t block_stride, head_stride;  // of both caches
    int64_t tokens, kv_heads, head_dim, block_size;
};

// Mirrored by LinearArguments in native.py. `gated`: each panel holds 16 gate and 16 up outputs, and
// y = silu(gate) · up has N / 2 columns.
struct LinearArguments {
    const bfloat16* x;  // [rows, inputs], rows x_stride apart
    const bfloat16* panels;  // [ceil(outputs / 32), inputs / 2, 32, 2]
    const float* bias;  // [outputs, padded to 32] or null
    bfloat16* y;  // [rows, outputs], contiguous
    int64_t x_stride;
    int64_t rows, inputs, outputs;
    int64_t gated;
};

void linear(const LinearArguments& a);

template <typename T>
void paged_attention(const AttentionArguments& a);

template <typename T>
void write_kv(const WriteArguments& a);

template <typename T>
void rms_norm(const T* x, const float* weight, T* y, int64_t rows, int64_t width, float eps, int round_first);

template <typename T>
void rotate(T* x, const T* cosine, const T* sine, int64_t tokens, int64_t heads, int64_t half, int64_t token_stride);

}  // namespace plimsoll
