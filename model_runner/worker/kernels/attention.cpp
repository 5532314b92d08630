// Attention of packed query tokens over a block-paged KV cache, in the manner of FlashAttention: one pass over the
// keys with a running maximum and sum (Milakov & Gimelshein, "Online normalizer calculation for softmax", 2018).
//
// The work is cut into tasks of (sequence, tile of its query tokens, KV head). A task reads each key and value once
// for all query heads that share it. A sequence's result depends on no other sequence.
#include <algorithm>
#include <limits>
#include <vector>

#include "common.h"

namespace plimsoll {

constexpr int kTileTokens = 16;  // query tokens of one task
constexpr int kChunk = 64;       // keys handled between two rescalings

// Mirrored by AttentionArguments in native.py. Strides are in elements; the head dimension is contiguous everywhere.
struct AttentionArguments {
    const void* query;  // [T, query_heads, head_dim]
    const void* key_cache;  // [blocks, kv_heads, block_size, head_dim]
    const void* value_cache;
    void* output;  // [T, query_heads, head_dim], contiguous
    const int32_t* query_start_loc;  // [S + 1]
    const int32_t* seq_lens;  // [S]
    const int32_t* block_tables;  // [S, table_stride]
    const float* sinks;  // [query_heads] or null
    int64_t query_token_stride, query_head_stride;
    int64_t block_stride, head_stride, token_stride;  // of both caches
    int64_t table_stride;
    int64_t sequences, query_heads, kv_heads, head_dim, block_size;
    int64_t window;  // tokens attended to, the query's own included; 0 is no limit
    float scale;
    float softcap;  // 0 is none
};

struct Task {
    int32_t sequence, first_token, tokens, kv_head;  // first_token counts from the sequence's first in this batch
    int64_t cost;
};

template <typename T, int D>
class TaskRunner {
  public:
    explicit TaskRunner(const AttentionArguments& a)
        : a_(a),
          dim_(D ? D : static_cast<int>(a.head_dim)),
          group_(static_cast<int>(a.query_heads / a.kv_heads)),
          queries_(kTileTokens * group_ * dim_),
          outputs_(kTileTokens * group_ * dim_),
          maxima_(kTileTokens * group_),
          sums_(kTileTokens * group_),
          scores_(kTileTokens * group_ * kChunk),
          keys_(kChunk * dim_),
          values_(kChunk * dim_) {}

    void run(const Task& task) {
        const int rows = task.tokens * group_;
        const int begin = a_.query_start_loc[task.sequence];
        const int length = a_.query_start_loc[task.sequence + 1] - begin;
        const int start = a_.seq_lens[task.sequence] - length + task.first_token;  // position of the tile's first token
        load_queries(task, begin);
        const int last = start + task.tokens;  // keys that the tile's last token sees end here
        int first = a_.window ? std::max<int64_t>(0, start - a_.window + 1) : 0;
        first -= first % kChunk;
        for (int base = first; base < last; base += kChunk) {
            const int count = std::min(kChunk, last - base);
            load_values(task, base, count);
            if (rows >= 8) {
                scores_by_columns(task, base, count, rows);
            } else {
                scores_by_rows(task, base, count, rows);
            }
            for (int row = 0; row < rows; ++row) accumulate(row, start + row / group_, base, count);
        }
        store(task, begin);
    }

  private:
    const T* cached(const void* cache, const Task& task, int position) const {
        const int64_t block = a_.block_tables[task.sequence * a_.table_stride + position / a_.block_size];
        return static_cast<const T*>(cache) + block * a_.block_stride + task.kv_head * a_.head_stride +
               (position % a_.block_size) * a_.token_stride;
    }

    void load_queries(const Task& task, int begin) {
        for (int token = 0; token < task.tokens; ++token) {
            for (int head = 0; head < group_; ++head) {
                const int row = token * group_ + head;
                const int query_head = task.kv_head * group_ + head;
                const T* source = static_cast<const T*>(a_.query) +
                                  (begin + task.first_token + token) * a_.query_token_stride +
                                  query_head * a_.query_head_stride;
                for (int d = 0; d < dim(); ++d) {
                    queries_[row * dim() + d] = to_float(source[d]) * a_.scale;
                    outputs_[row * dim() + d] = 0.0f;
                }
                // A sink is a logit without a value: the softmax starts from it.
                maxima_[row] = a_.sinks ? a_.sinks[query_head] : -std::numeric_limits<float>::infinity();
                sums_[row] = a_.sinks ? 1.0f : 0.0f;
            }
        }
    }

    void load_values(const Task& task, int base, int count) {
        for (int t = 0; t < count; ++t) {
            const T* source = cached(a_.value_cache, task, base + t);
            for (int d = 0; d < dim(); ++d) values_[t * dim() + d] = to_float(source[d]);
        }
    }

    // Few rows: one dot product after the other.
    void scores_by_rows(const Task& task, int base, int count, int rows) {
        for (int t = 0; t < count; ++t) {
            const T* key = cached(a_.key_cache, task, base + t);
            for (int row = 0; row < rows; ++row) {
                const float* query = &queries_[row * dim()];
                float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
                for (int d = 0; d < dim(); ++d) sum += query[d] * to_float(key[d]);
                scores_[row * kChunk + t] = sum;
            }
        }
    }

    // Many rows: the keys are transposed once, and all dot products of a row advance together.
    void scores_by_columns(const Task& task, int base, int count, int rows) {
        for (int t = 0; t < kChunk; ++t) {
            if (t < count) {
                const T* key = cached(a_.key_cache, task, base + t);
                for (int d = 0; d < dim(); ++d) keys_[d * kChunk + t] = to_float(key[d]);
            } else {
                for (int d = 0; d < dim(); ++d) keys_[d * kChunk + t] = 0.0f;
            }
        }
        for (int row = 0; row < rows; ++row) {
            float sums[kChunk] = {};
            for (int d = 0; d < dim(); ++d) {
                const float query = queries_[row * dim() + d];
                const float* column = &keys_[d * kChunk];
#pragma omp simd
                for (int t = 0; t < kChunk; ++t) sums[t] += query * column[t];
            }
            std::copy_n(sums, kChunk, &scores_[row * kChunk]);
        }
    }

    void accumulate(int row, int position, int base, int count) {
        float* scores = &scores_[row * kChunk];
        if (a_.softcap != 0.0f) {
            for (int t = 0; t < count; ++t) scores[t] = a_.softcap * std::tanh(scores[t] / a_.softcap);
        }
        const int end = std::min(count, position + 1 - base);
        const int begin = a_.window ? std::max<int64_t>(0, position + 1 - a_.window - base) : 0;
        if (begin >= end) return;
        float maximum = maxima_[row];
#pragma omp simd reduction(max : maximum)
        for (int t = begin; t < end; ++t) maximum = scores[t] > maximum ? scores[t] : maximum;
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int t = begin; t < end; ++t) {
            scores[t] = exp_approximate(scores[t] - maximum);
            sum += scores[t];
        }
        const float rescale = exp_approximate(maxima_[row] - maximum);
        sums_[row] = sums_[row] * rescale + sum;
        maxima_[row] = maximum;
        add_values(&outputs_[row * dim()], scores, begin, end, rescale);
    }

    void add_values(float* output, const float* weights, int begin, int end, float rescale) {
        if constexpr (D != 0) {  // the compiler keeps the sums in registers
            float sums[D];
            for (int d = 0; d < D; ++d) sums[d] = output[d] * rescale;
            for (int t = begin; t < end; ++t) {
                for (int d = 0; d < D; ++d) sums[d] += weights[t] * values_[t * D + d];
            }
            for (int d = 0; d < D; ++d) output[d] = sums[d];
        } else {
            for (int d = 0; d < dim_; ++d) output[d] *= rescale;
            for (int t = begin; t < end; ++t) {
                for (int d = 0; d < dim_; ++d) output[d] += weights[t] * values_[t * dim_ + d];
            }
        }
    }

    void store(const Task& task, int begin) {
        for (int token = 0; token < task.tokens; ++token) {
            for (int head = 0; head < group_; ++head) {
                const int row = token * group_ + head;
                T* target = static_cast<T*>(a_.output) +
                            ((begin + task.first_token + token) * a_.query_heads + task.kv_head * group_ + head) * dim();
                const float inverse = 1.0f / sums_[row];
                for (int d = 0; d < dim(); ++d) target[d] = from_float<T>(outputs_[row * dim() + d] * inverse);
            }
        }
    }

    int dim() const { return D ? D : dim_; }

    const AttentionArguments& a_;
    const int dim_, group_;
    std::vector<float> queries_, outputs_, maxima_, sums_, scores_, keys_, values_;
};

std::vector<Task> cut(const AttentionArguments& a) {
    std::vector<Task> tasks;
    for (int s = 0; s < a.sequences; ++s) {
        const int length = a.query_start_loc[s + 1] - a.query_start_loc[s];
        for (int first = 0; first < length; first += kTileTokens) {
            const int tokens = std::min(kTileTokens, length - first);
            int64_t visible = a.seq_lens[s] - length + first + tokens;
            if (a.window) visible = std::min(visible, a.window + tokens);
            for (int head = 0; head < a.kv_heads; ++head) tasks.push_back({s, first, tokens, head, visible * tokens});
        }
    }
    // The costliest first, so that threads end together.
    std::stable_sort(tasks.begin(), tasks.end(), [](const Task& x, const Task& y) { return x.cost > y.cost; });
    return tasks;
}

template <typename T, int D>
void run_tasks(const AttentionArguments& a) {
    const std::vector<Task> tasks = cut(a);
#pragma omp parallel
    {
        TaskRunner<T, D> runner(a);
#pragma omp for schedule(dynamic)
        for (size_t i = 0; i < tasks.size(); ++i) runner.run(tasks[i]);
    }
}

template <typename T>
void paged_attention(const AttentionArguments& a) {
    if (a.head_dim == 64) {
        run_tasks<T, 64>(a);
    } else if (a.head_dim == 128) {
        run_tasks<T, 128>(a);
    } else {
        run_tasks<T, 0>(a);
    }
}

// Mirrored by WriteArguments in native.py.
struct WriteArguments {
    const void* key;  // [T, kv_heads, head_dim]
    const void* value;
    void* key_cache;  // [blocks, kv_heads, block_size, head_dim]
    void* value_cache;
    const int64_t* slots;  // [T]
    int64_t key_token_stride, key_head_stride, value_token_stride, value_head_stride;
    int64_t block_stride, head_stride, token_stride;  // of both caches
    int64_t tokens, kv_heads, head_bytes, element_bytes, block_size;
};

void write_kv(const WriteArguments& a) {
    const int64_t bytes = a.element_bytes;
    for (int64_t t = 0; t < a.tokens; ++t) {
        const int64_t block = a.slots[t] / a.block_size, offset = a.slots[t] % a.block_size;
        for (int64_t h = 0; h < a.kv_heads; ++h) {
            const int64_t to = (block * a.block_stride + h * a.head_stride + offset * a.token_stride) * bytes;
            std::memcpy(static_cast<char*>(a.key_cache) + to,
                        static_cast<const char*>(a.key) + (t * a.key_token_stride + h * a.key_head_stride) * bytes,
                        a.head_bytes);
            std::memcpy(static_cast<char*>(a.value_cache) + to,
                        static_cast<const char*>(a.value) + (t * a.value_token_stride + h * a.value_head_stride) * bytes,
                        a.head_bytes);
        }
    }
}

}  // namespace plimsoll

extern "C" {

void plimsoll_paged_attention_float32(const plimsoll::AttentionArguments* a) { plimsoll::paged_attention<float>(*a); }

void plimsoll_paged_attention_bfloat16(const plimsoll::AttentionArguments* a) {
    plimsoll::paged_attention<plimsoll::bfloat16>(*a);
}

void plimsoll_write_kv(const plimsoll::WriteArguments* a) { plimsoll::write_kv(*a); }
}
