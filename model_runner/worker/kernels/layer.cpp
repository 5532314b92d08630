// A whole decoder layer of Llama's kind in one call, in bfloat16:
//
//     h = x + out(attention(rotate(qkv(norm(x)))));  y = h + down(gate_up(norm(h)))
//
// It calls the other kernels one after the other. What it saves is what stands between them when each is called
// from Python, which at small batches takes as long as the products do.
#include <vector>

#include "kernels.h"

namespace plimsoll {

// Mirrored by LayerArguments in native.py.
struct LayerArguments {
    const bfloat16* x;  // [T, hidden]
    bfloat16* y;        // [T, hidden]
    const bfloat16* cosine;  // [T, head_dim], or null where nothing is rotated
    const bfloat16* sine;
    const float* input_norm;  // [hidden]
    const float* post_norm;
    float input_eps, post_eps;
    int64_t input_round_first, post_round_first;
    int64_t tokens, hidden;
    LinearArguments qkv, out, gate_up, down;  // without x, y and rows
    WriteArguments write;          // without key and value
    AttentionArguments attention;  // without query and output
};

struct Scratch {
    std::vector<bfloat16> normed, mixed, attended, opened;
};

void apply(LinearArguments linear_arguments, const bfloat16* x, bfloat16* y, int64_t rows) {
    linear_arguments.x = x;
    linear_arguments.x_stride = linear_arguments.inputs;
    linear_arguments.y = y;
    linear_arguments.rows = rows;
    linear(linear_arguments);
}

// y += x, each sum rounded, as torch's addition of bfloat16 is.
void add(const bfloat16* x, bfloat16* y, int64_t count) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) y[i] = from_float<bfloat16>(to_float(x[i]) + to_float(y[i]));
}

// Rotates `mixed` [T, (query_heads + 2 kv_heads) · head_dim], writes its keys and values, and attends.
void attend(const LayerArguments& a, bfloat16* mixed, bfloat16* output) {
    WriteArguments write = a.write;
    AttentionArguments attention = a.attention;
    const int64_t query_width = attention.query_heads * attention.head_dim;
    const int64_t key_width = attention.kv_heads * attention.head_dim;
    const int64_t row = query_width + 2 * key_width;
    if (a.cosine) {
        rotate(mixed, a.cosine, a.sine, a.tokens, attention.query_heads + attention.kv_heads, attention.head_dim / 2,
               row);
    }
    write.key = mixed + query_width;
    write.value = mixed + query_width + key_width;
    write.key_token_stride = write.value_token_stride = row;
    write.key_head_stride = write.value_head_stride = attention.head_dim;
    write_kv<bfloat16>(write);
    attention.query = mixed;
    attention.query_token_stride = row;
    attention.query_head_stride = attention.head_dim;
    attention.output = output;
    paged_attention<bfloat16>(attention);
}

void decoder_layer(const LayerArguments& a) {
    thread_local Scratch scratch;  // one thread runs the model
    const int64_t tokens = a.tokens, count = tokens * a.hidden;
    scratch.normed.resize(count);
    scratch.mixed.resize(tokens * a.qkv.outputs);
    scratch.attended.resize(tokens * a.out.inputs);
    scratch.opened.resize(tokens * a.down.inputs);
    bfloat16* normed = scratch.normed.data();

    rms_norm<bfloat16>(a.x, a.input_norm, normed, tokens, a.hidden, a.input_eps, static_cast<int>(a.input_round_first));
    apply(a.qkv, normed, scratch.mixed.data(), tokens);
    attend(a, scratch.mixed.data(), scratch.attended.data());
    apply(a.out, scratch.attended.data(), a.y, tokens);
    add(a.x, a.y, count);

    rms_norm<bfloat16>(a.y, a.post_norm, normed, tokens, a.hidden, a.post_eps, static_cast<int>(a.post_round_first));
    apply(a.gate_up, normed, scratch.opened.data(), tokens);
    apply(a.down, scratch.opened.data(), normed, tokens);
    add(normed, a.y, count);
}

}  // namespace plimsoll

extern "C" {

void plimsoll_decoder_layer(const plimsoll::LayerArguments* a) { plimsoll::decoder_layer(*a); }
}
