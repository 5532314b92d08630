// Attention of packed query tokens over a block-paged KV cache, in the manner of FlashAttention: one pass over the
// keys with a running maximum and sum (Milakov & Gimelshein, "Online normalizer calculation for softmax", 2018).
//
// The work is cut into tasks of (sequence, tile of its query tokens, KV head). A task reads each key and value once
// for all query heads that share it. A sequence's result depends on no other sequence.
//
// Within its block, a key lies transposed, [head_dim, block_size]: sixteen keys then meet one element of a query in
// one instruction, and no sum runs across a register. Values lie as [block_size, head_dim].
//
// A task of many query rows (a prefill chunk) first converts a chunk of keys and values to float32, and reads that
// many times. One of few rows (a decode) is bound by memory: it reads the cache itself, and while it works on one
// chunk it prefetches the next, because blocks lie anywhere and no hardware foresees where.
#include <algorithm>
#include <atomic>
#include <limits>
#include <type_traits>
#include <vector>

#include "kernels.h"

namespace plimsoll {

constexpr int kTileTokens = 16;  // query tokens of one task
constexpr int kChunk = 64;       // keys handled between two rescalings
constexpr int kLanes = 16;
constexpr int kBlockedRows = 6;  // 6 rows · 4 vectors of sums fill 24 of AVX-512's 32 registers
constexpr int kDirectRows = 12;  // with more, converting once pays
constexpr int kSpans = kChunk / kLanes;  // a span: sixteen keys side by side in one block

// GCC and Clang lower it to what the CPU has.
typedef float Vector __attribute__((vector_size(4 * kLanes), aligned(4)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes), aligned(2)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes), aligned(4)));

inline Vector load(const float* source) { return *reinterpret_cast<const Vector*>(source); }

inline Vector load(const bfloat16* source) {
    const Words words = __builtin_convertvector(*reinterpret_cast<const Halves*>(source), Words) << 16;
    return reinterpret_cast<const Vector&>(words);
}

struct Task {
    int32_t sequence, first_token, tokens, kv_head;  // first_token counts from the sequence's first in this batch
    int64_t cost;
};

// c[R, V vectors] = c · factors + a[R, inner] · b[inner, V vectors]; without factors c starts from 0.
template <int R, int V>
void multiply(const float* a, int a_stride, const float* b, int b_stride, float* c, int c_stride, int inner,
              const float* factors) {
    Vector sums[R][V];
    for (int r = 0; r < R; ++r) {
        for (int v = 0; v < V; ++v) {
            sums[r][v] = factors ? reinterpret_cast<Vector*>(c + r * c_stride)[v] * factors[r] : Vector{};
        }
    }
    for (int k = 0; k < inner; ++k) {
        const Vector* row = reinterpret_cast<const Vector*>(b + k * b_stride);
        Vector columns[V];
        for (int v = 0; v < V; ++v) columns[v] = row[v];
        for (int r = 0; r < R; ++r) {
            for (int v = 0; v < V; ++v) sums[r][v] += a[r * a_stride + k] * columns[v];
        }
    }
    for (int r = 0; r < R; ++r) {
        for (int v = 0; v < V; ++v) reinterpret_cast<Vector*>(c + r * c_stride)[v] = sums[r][v];
    }
}

// The same for any number of rows and of columns, a multiple of kLanes.
void multiply_all(const float* a, int a_stride, const float* b, int b_stride, float* c, int c_stride, int rows,
                  int inner, int columns, const float* factors) {
    for (int row = 0; row < rows;) {
        const int left = rows - row;
        const float* a_row = a + row * a_stride;
        const float* f = factors ? factors + row : nullptr;
        const int step = std::min(left, kBlockedRows);
        for (int column = 0; column < columns;) {
            float* target = c + row * c_stride + column;
            const bool wide = columns - column >= 4 * kLanes;
#define PLIMSOLL_MULTIPLY(R)                                                                          \
    wide ? multiply<R, 4>(a_row, a_stride, b + column, b_stride, target, c_stride, inner, f)          \
         : multiply<R, 1>(a_row, a_stride, b + column, b_stride, target, c_stride, inner, f)
            switch (step) {
                case 1: PLIMSOLL_MULTIPLY(1); break;
                case 2: PLIMSOLL_MULTIPLY(2); break;
                case 3: PLIMSOLL_MULTIPLY(3); break;
                case 4: PLIMSOLL_MULTIPLY(4); break;
                case 5: PLIMSOLL_MULTIPLY(5); break;
                default: PLIMSOLL_MULTIPLY(6); break;
            }
#undef PLIMSOLL_MULTIPLY
            column += wide ? 4 * kLanes : kLanes;
        }
        row += step;
    }
}

template <int N, typename T>
inline void convert(const T* __restrict source, float* __restrict target) {
#pragma omp simd
    for (int i = 0; i < N; ++i) target[i] = to_float(source[i]);
}

template <typename T>
class TaskRunner {
  public:
    explicit TaskRunner(const AttentionArguments& a)
        : a_(a),
          dim_(static_cast<int>(a.head_dim)),
          padded_((dim_ + kLanes - 1) / kLanes * kLanes),
          group_(static_cast<int>(a.query_heads / a.kv_heads)),
          queries_(kTileTokens * group_ * dim_),
          outputs_(kTileTokens * group_ * padded_),
          maxima_(kTileTokens * group_),
          sums_(kTileTokens * group_),
          factors_(kTileTokens * group_),
          scores_(kTileTokens * group_ * kChunk),
          keys_(dim_ * kChunk),
          values_(kChunk * padded_) {}

    // `next` is the task that this thread runs after it, or null.
    void run(const Task& task, const Task* next) {
        const int rows = task.tokens * group_;
        if (reads_directly(rows)) {
            run_directly(task, next);
            return;
        }
        const int begin = a_.query_start_loc[task.sequence];
        const int length = a_.query_start_loc[task.sequence + 1] - begin;
        const int start = a_.seq_lens[task.sequence] - length + task.first_token;  // position of the tile's first
        load_queries(task, begin);
        const int last = start + task.tokens;  // the keys that the tile's last token sees end here
        // The blocks before the first token that the window shows may be someone else's by now.
        const int first = a_.window ? std::max<int64_t>(0, start - a_.window + 1) : 0;
        for (int base = first; base < last; base += kChunk) {
            const int count = std::min(kChunk, last - base);
            load_keys(task, base, count);
            multiply_all(queries_.data(), dim_, keys_.data(), kChunk, scores_.data(), kChunk, rows, dim_, kChunk,
                         nullptr);
            for (int row = 0; row < rows; ++row) weigh(row, start + row / group_, base, count);
            load_values(task, base, count);
            multiply_all(scores_.data(), kChunk, values_.data(), padded_, outputs_.data(), padded_, rows, count,
                         padded_, factors_.data());
        }
        store(task, begin);
    }

  private:
    struct Span {
        const T* keys;    // row d of its keys begins at keys + d · block_size
        const T* values;  // row t of its values at values + t · head_dim
    };

    bool reads_directly(int rows) const {
        return rows <= kDirectRows && dim_ % kLanes == 0 && a_.block_size % kLanes == 0;
    }

    int first_position(const Task& task) const {
        const int length = a_.query_start_loc[task.sequence + 1] - a_.query_start_loc[task.sequence];
        const int64_t start = a_.seq_lens[task.sequence] - length + task.first_token;
        const int64_t first = a_.window ? std::max<int64_t>(0, start - a_.window + 1) : 0;
        return static_cast<int>(first / kLanes * kLanes);  // what is read beside is not looked at
    }

    void run_directly(const Task& task, const Task* next) {
        const int rows = task.tokens * group_;
        const int begin = a_.query_start_loc[task.sequence];
        const int length = a_.query_start_loc[task.sequence + 1] - begin;
        const int start = a_.seq_lens[task.sequence] - length + task.first_token;
        load_queries(task, begin);
        const int last = start + task.tokens;
        const int first = first_position(task);
        Span spans[kSpans], ahead[kSpans];
        find_spans(task, first, last, spans);
        std::copy_n(spans, kSpans, ahead);
        for (int base = first; base < last; base += kChunk) {
            const int count = std::min(kChunk, last - base);
            if (base + kChunk < last) {
                find_spans(task, base + kChunk, last, ahead);
            } else if (next) {
                find_spans(*next, first_position(*next), a_.seq_lens[next->sequence], ahead);
            }
            for_rows<kBlockedRows>(rows, [&](auto r, int row) { score<r.value>(row, spans, ahead); });
            for (int row = 0; row < rows; ++row) weigh(row, start + row / group_, base, count);
            for_rows<kBlockedRows>(rows, [&](auto r, int row) { gather<r.value>(row, spans, count); });
            std::copy_n(ahead, kSpans, spans);
        }
        store(task, begin);
    }

    // Calls visit(constant number of rows, first row) until all rows are seen.
    template <int R, typename Visit>
    static void for_rows(int rows, Visit visit, int row = 0) {
        for (; rows - row >= R; row += R) visit(std::integral_constant<int, R>{}, row);
        if constexpr (R > 1) {
            if (row < rows) for_rows<R - 1>(rows, visit, row);
        }
    }

    // The spans of the keys from `base` on. Past `last` the first one stands in: it is read, and not looked at.
    void find_spans(const Task& task, int base, int last, Span* spans) const {
        for (int i = 0; i < kSpans; ++i) {
            const int position = base + (base + i * kLanes < last ? i * kLanes : 0);
            const int64_t block = a_.block_tables[task.sequence * a_.table_stride + position / a_.block_size];
            const int64_t offset = position % a_.block_size;
            const int64_t at = block * a_.block_stride + task.kv_head * a_.head_stride;
            spans[i].keys = static_cast<const T*>(a_.key_cache) + at + offset;
            spans[i].values = static_cast<const T*>(a_.value_cache) + at + offset * dim_;
        }
    }

    // Scores of R query rows with a chunk's keys. On the way, what `ahead` says is asked for, a line now and then.
    template <int R>
    void score(int first_row, const Span* spans, const Span* ahead) {
        constexpr int kLineElements = 64 / sizeof(T);
        Vector sums[R][kSpans] = {};
        const float* queries = &queries_[first_row * dim_];
        for (int d = 0; d < dim_; ++d) {
            const bool new_line = d * kLanes % kLineElements == 0;
            Vector keys[kSpans];
            for (int i = 0; i < kSpans; ++i) {
                if (new_line || a_.block_size > kLanes) __builtin_prefetch(ahead[i].keys + d * a_.block_size, 0, 2);
                if (new_line) __builtin_prefetch(ahead[i].values + d * kLanes, 0, 2);
                keys[i] = load(spans[i].keys + d * a_.block_size);
            }
            for (int r = 0; r < R; ++r) {
                for (int i = 0; i < kSpans; ++i) sums[r][i] += queries[r * dim_ + d] * keys[i];
            }
        }
        for (int r = 0; r < R; ++r) {
            Vector* scores = reinterpret_cast<Vector*>(&scores_[(first_row + r) * kChunk]);
            for (int i = 0; i < kSpans; ++i) scores[i] = sums[r][i];
        }
    }

    // Adds a chunk's weighed values to R rows of outputs.
    template <int R>
    void gather(int first_row, const Span* spans, int count) {
        int d = 0;
        for (; d + 4 * kLanes <= dim_; d += 4 * kLanes) gather_columns<R, 4>(first_row, d, spans, count);
        for (; d < dim_; d += kLanes) gather_columns<R, 1>(first_row, d, spans, count);
    }

    template <int R, int V>
    void gather_columns(int first_row, int d, const Span* spans, int count) {
        Vector sums[R][V];
        for (int r = 0; r < R; ++r) {
            const float* outputs = &outputs_[(first_row + r) * padded_ + d];
            for (int v = 0; v < V; ++v) sums[r][v] = load(outputs + v * kLanes) * factors_[first_row + r];
        }
        for (int t = 0; t < count; ++t) {
            const T* source = spans[t / kLanes].values + t % kLanes * dim_ + d;
            Vector values[V];
            for (int v = 0; v < V; ++v) values[v] = load(source + v * kLanes);
            for (int r = 0; r < R; ++r) {
                const float weight = scores_[(first_row + r) * kChunk + t];
                for (int v = 0; v < V; ++v) sums[r][v] += weight * values[v];
            }
        }
        for (int r = 0; r < R; ++r) {
            Vector* outputs = reinterpret_cast<Vector*>(&outputs_[(first_row + r) * padded_ + d]);
            for (int v = 0; v < V; ++v) outputs[v] = sums[r][v];
        }
    }

    void load_queries(const Task& task, int begin) {
        std::fill(outputs_.begin(), outputs_.end(), 0.0f);
        for (int row = 0; row < task.tokens * group_; ++row) {
            const int query_head = task.kv_head * group_ + row % group_;
            const T* source = static_cast<const T*>(a_.query) +
                              (begin + task.first_token + row / group_) * a_.query_token_stride +
                              query_head * a_.query_head_stride;
            for (int d = 0; d < dim_; ++d) queries_[row * dim_ + d] = to_float(source[d]) * a_.scale;
            // A sink is a logit without a value: the softmax starts from it.
            maxima_[row] = a_.sinks ? a_.sinks[query_head] : -std::numeric_limits<float>::infinity();
            sums_[row] = a_.sinks ? 1.0f : 0.0f;
        }
    }

    // Calls visit(head's part of the block, offset in the block, index in the chunk, tokens) for each block's run.
    template <typename Visit>
    void for_each_run(const void* cache, const Task& task, int base, int count, Visit visit) const {
        const int block_size = static_cast<int>(a_.block_size);
        for (int t = 0; t < count;) {
            const int offset = (base + t) % block_size;
            const int run = std::min(block_size - offset, count - t);
            const int64_t block = a_.block_tables[task.sequence * a_.table_stride + (base + t) / block_size];
            visit(static_cast<const T*>(cache) + block * a_.block_stride + task.kv_head * a_.head_stride, offset, t,
                  run);
            t += run;
        }
    }

    void load_keys(const Task& task, int base, int count) {
        const int block_size = static_cast<int>(a_.block_size);
        for_each_run(a_.key_cache, task, base, count, [&](const T* block, int offset, int t, int run) {
            for (int d = 0; d < dim_; ++d) {
                const T* source = block + d * block_size + offset;
                float* target = &keys_[d * kChunk + t];
                if (run == kLanes) {  // the common case, with a length that the compiler knows
                    convert<kLanes>(source, target);
                } else {
                    for (int i = 0; i < run; ++i) target[i] = to_float(source[i]);
                }
            }
        });
    }

    void load_values(const Task& task, int base, int count) {
        for_each_run(a_.value_cache, task, base, count, [&](const T* block, int offset, int t, int run) {
            for (int i = 0; i < run; ++i) {
                const T* source = block + (offset + i) * dim_;
                float* target = &values_[(t + i) * padded_];
                int d = 0;
                for (; d + kLanes <= dim_; d += kLanes) convert<kLanes>(source + d, target + d);
                for (; d < dim_; ++d) target[d] = to_float(source[d]);
            }
        });
    }

    // Turns a row of scores into weights, 0 where the query does not look, and sets the factor for what came before.
    void weigh(int row, int position, int base, int count) {
        float* scores = &scores_[row * kChunk];
        const int end = std::min(count, position + 1 - base);
        const int begin = a_.window ? std::max<int64_t>(0, position + 1 - a_.window - base) : 0;
        factors_[row] = 1.0f;
        if (begin >= end) {
            std::fill_n(scores, count, 0.0f);
            return;
        }
        if (a_.softcap != 0.0f) {
            for (int t = begin; t < end; ++t) scores[t] = a_.softcap * std::tanh(scores[t] / a_.softcap);
        }
        constexpr float kNever = -std::numeric_limits<float>::infinity();
        std::fill(scores, scores + begin, kNever);
        std::fill(scores + end, scores + kChunk, kNever);
        float maximum = maxima_[row];
#pragma omp simd reduction(max : maximum)
        for (int t = 0; t < kChunk; ++t) maximum = scores[t] > maximum ? scores[t] : maximum;
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int t = 0; t < kChunk; ++t) {
            scores[t] = exp_approximate(scores[t] - maximum);
            sum += scores[t];
        }
        factors_[row] = exp_approximate(maxima_[row] - maximum);
        sums_[row] = sums_[row] * factors_[row] + sum;
        maxima_[row] = maximum;
    }

    void store(const Task& task, int begin) {
        for (int row = 0; row < task.tokens * group_; ++row) {
            const int64_t token = begin + task.first_token + row / group_;
            T* target = static_cast<T*>(a_.output) +
                        (token * a_.query_heads + task.kv_head * group_ + row % group_) * dim_;
            const float inverse = 1.0f / sums_[row];
            for (int d = 0; d < dim_; ++d) target[d] = from_float<T>(outputs_[row * padded_ + d] * inverse);
        }
    }

    const AttentionArguments& a_;
    const int dim_, padded_, group_;
    std::vector<float> queries_, outputs_, maxima_, sums_, factors_, scores_, keys_, values_;
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

template <typename T>
void paged_attention(const AttentionArguments& a) {
    const std::vector<Task> tasks = cut(a);
    std::atomic<size_t> unclaimed{0};
    // Each thread claims a task ahead, so that it knows what to prefetch.
    const auto claim = [&]() -> const Task* {
        const size_t i = unclaimed.fetch_add(1, std::memory_order_relaxed);
        return i < tasks.size() ? &tasks[i] : nullptr;
    };
#pragma omp parallel
    {
        TaskRunner<T> runner(a);
        for (const Task *task = claim(), *next; task; task = next) {
            next = claim();
            runner.run(*task, next);
        }
    }
}

template <typename T>
void write_kv(const WriteArguments& a) {
#pragma omp parallel for if (a.tokens > 4)
    for (int64_t t = 0; t < a.tokens; ++t) {
        const int64_t block = a.slots[t] / a.block_size, offset = a.slots[t] % a.block_size;
        for (int64_t h = 0; h < a.kv_heads; ++h) {
            const int64_t start = block * a.block_stride + h * a.head_stride;
            const T* key = static_cast<const T*>(a.key) + t * a.key_token_stride + h * a.key_head_stride;
            const T* value = static_cast<const T*>(a.value) + t * a.value_token_stride + h * a.value_head_stride;
            T* keys = static_cast<T*>(a.key_cache) + start + offset;
            for (int64_t d = 0; d < a.head_dim; ++d) keys[d * a.block_size] = key[d];
            std::copy_n(value, a.head_dim, static_cast<T*>(a.value_cache) + start + offset * a.head_dim);
        }
    }
}

template void paged_attention<float>(const AttentionArguments&);
template void paged_attention<bfloat16>(const AttentionArguments&);
template void write_kv<float>(const WriteArguments&);
template void write_kv<bfloat16>(const WriteArguments&);

}  // namespace plimsoll

using plimsoll::bfloat16;

extern "C" {

void plimsoll_paged_attention_float32(const plimsoll::AttentionArguments* a) { plimsoll::paged_attention<float>(*a); }

void plimsoll_paged_attention_bfloat16(const plimsoll::AttentionArguments* a) {
    plimsoll::paged_attention<bfloat16>(*a);
}

void plimsoll_write_kv_float32(const plimsoll::WriteArguments* a) { plimsoll::write_kv<float>(*a); }

void plimsoll_write_kv_bfloat16(const plimsoll::WriteArguments* a) { plimsoll::write_kv<bfloat16>(*a); }
}
