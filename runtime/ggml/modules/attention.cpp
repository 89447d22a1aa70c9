// Attention for GGML's CPU backend, as the function of a custom operation (ggml_custom_4d).
//
// Two products by BLAS make all scores pass through memory three times. Here each thread takes a
// block of queries of one head at a time, whose scores stay in the cache of its core. BLAS built
// on OpenMP computes such a product on the calling thread, as it is inside a parallel region.
#include <cblas.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

namespace {

// struct ggml_tensor of GGML 0.15.3 up to what is read here.
struct Tensor {
    int32_t type;
    void * buffer;
    int64_t ne[4];
    size_t nb[4];
    int32_t op;
    int32_t op_params[16];
    int32_t flags;
    Tensor * src[10];
    Tensor * view_src;
    size_t view_offs;
    void * data;
};

constexpr int64_t BLOCK = 192;  // queries whose scores of 1,029 keys take 0.8 MB
constexpr int LANES = 8;

typedef float Lanes __attribute__((vector_size(4 * LANES)));
typedef float Unaligned __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t Bits __attribute__((vector_size(4 * LANES)));

// Into each caller, which may be compiled for other instructions.
#define INLINE inline __attribute__((always_inline))

// e^x for x <= 0, to 1e-7 of its value: 2^n times a polynomial in the rest (Cephes, expf).
INLINE Lanes exponential(Lanes x) {
    const Lanes least = Lanes{} - 87.0f;
    x = x < least ? least : x;  // NaN stays NaN
    // The sum's last bits are the rounded quotient.
    const Lanes shifted = x * 1.44269504f + 12582912.0f;
    const Lanes whole = shifted - 12582912.0f;
    const Lanes rest = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    Lanes p = rest * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * rest + 8.3334519073e-3f;
    p = p * rest + 4.1665795894e-2f;
    p = p * rest + 1.6666665459e-1f;
    p = p * rest + 5.0000001201e-1f;
    p = p * (rest * rest) + rest + 1.0f;
    return p * (Lanes)(((Bits)shifted + 127) << 23);
}

// Makes scores e^(score - greatest) and returns their sum.
INLINE float exponentials(float * scores, int64_t count) {
    const int64_t whole = count / (2 * LANES) * (2 * LANES);
    Lanes high[2] = {Lanes{} - INFINITY, Lanes{} - INFINITY};
    for (int64_t i = 0; i < whole; i += 2 * LANES) {
        for (int half = 0; half < 2; half++) {
            const Lanes x = *(Unaligned *)(scores + i + half * LANES);
            high[half] = x > high[half] ? x : high[half];
        }
    }
    float greatest = -INFINITY;
    for (int lane = 0; lane < LANES; lane++) {
        greatest = std::max({greatest, high[0][lane], high[1][lane]});
    }
    for (int64_t i = whole; i < count; i++) {
        greatest = std::max(greatest, scores[i]);
    }
    Lanes sums[2] = {};
    for (int64_t i = 0; i < whole; i += 2 * LANES) {
        for (int half = 0; half < 2; half++) {
            Unaligned * place = (Unaligned *)(scores + i + half * LANES);
            const Lanes value = exponential(*place - greatest);
            *place = value;
            sums[half] += value;
        }
    }
    const Lanes both = sums[0] + sums[1];
    float sum = 0;
    for (int lane = 0; lane < LANES; lane++) {
        sum += both[lane];
    }
    for (int64_t i = whole; i < count; i++) {
        scores[i] = exponential(Lanes{} + (scores[i] - greatest))[0];
        sum += scores[i];
    }
    return sum;
}

float exponentials_plain(float * scores, int64_t count) {
    return exponentials(scores, count);
}

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) float exponentials_avx2(float * scores, int64_t count) {
    return exponentials(scores, count);
}

const bool AVX2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
const auto row_exponentials = AVX2 ? exponentials_avx2 : exponentials_plain;
#else
const auto row_exponentials = exponentials_plain;
#endif

float * at(const Tensor * tensor, int64_t i1, int64_t i2, int64_t i3) {
    return (float *)((char *)tensor->data + i1 * tensor->nb[1] + i2 * tensor->nb[2] + i3 * tensor->nb[3]);
}

int stride(const Tensor * tensor, int dimension) {
    return (int)(tensor->nb[dimension] / sizeof(float));
}

}  // namespace

extern "C" {

// What the caller compares with its own: the struct's layout, and the rows of a thread's scratch.
extern const int64_t sam3d_attention_layout[3];
const int64_t sam3d_attention_layout[3] = {offsetof(Tensor, src), offsetof(Tensor, data), BLOCK};

// softmax(q k' / sqrt(width)) v.
//
// Sources: q [B, heads, N, width], k and v [B, heads, M, width], each with packed rows, and scratch
// [threads, BLOCK, M]. Result: [B, N, heads, width], packed. All float32.
void sam3d_attention(Tensor * result, int thread, int threads, void *) {
    const Tensor * q = result->src[0];
    const Tensor * k = result->src[1];
    const Tensor * v = result->src[2];
    float * scores = at(result->src[3], 0, thread, 0);
    const int64_t width = q->ne[0], queries = q->ne[1], heads = q->ne[2], keys = k->ne[1];
    const int64_t blocks = (queries + BLOCK - 1) / BLOCK;
    const int64_t items = q->ne[3] * heads * blocks;
    const float factor = 1.0f / std::sqrt((float)width);
    for (int64_t item = items * thread / threads; item < items * (thread + 1) / threads; item++) {
        const int64_t person = item / (heads * blocks), head = item / blocks % heads;
        const int64_t start = item % blocks * BLOCK;
        const int64_t rows = std::min(BLOCK, queries - start);
        float * out = at(result, head, start, person);
        const int between = stride(result, 2);
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)rows, (int)keys, (int)width, factor,
                    at(q, start, head, person), stride(q, 1), at(k, 0, head, person), stride(k, 1),
                    0.0f, scores, (int)keys);
        float sums[BLOCK];
        for (int64_t row = 0; row < rows; row++) {
            sums[row] = row_exponentials(scores + row * keys, keys);
        }
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)rows, (int)width, (int)keys, 1.0f,
                    scores, (int)keys, at(v, 0, head, person), stride(v, 1), 0.0f, out, between);
        for (int64_t row = 0; row < rows; row++) {
            for (int64_t i = 0; i < width; i++) {
                out[row * between + i] /= sums[row];
            }
        }
    }
}
}
