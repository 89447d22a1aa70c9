// Custom operations of GGML's CPU backend (ggml_custom_4d, ggml_custom_inplace), for use with BLAS.
//
// GGML's own operations pass through memory one after the other, which costs a tenth of a forward
// pass beside the products. Each of these does with one pass what takes GGML several.
//
// Attention: two products by BLAS write and read all scores. Here each thread takes a block of
// queries of one head at a time, whose scores stay in the cache. BLAS built on OpenMP computes such
// a product on the calling thread, as it is inside a parallel region.
#include <cblas.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

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

// e^x for x <= 88, to 1e-7 of its value: 2^n times a polynomial in the rest (Cephes, expf).
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

INLINE float greatest(const float * scores, int64_t count) {
    const int64_t whole = count / (2 * LANES) * (2 * LANES);
    Lanes high[2] = {Lanes{} - INFINITY, Lanes{} - INFINITY};
    for (int64_t i = 0; i < whole; i += 2 * LANES) {
        for (int half = 0; half < 2; half++) {
            const Lanes x = *(Unaligned *)(scores + i + half * LANES);
            high[half] = x > high[half] ? x : high[half];
        }
    }
    float most = -INFINITY;
    for (int lane = 0; lane < LANES; lane++) {
        most = std::max({most, high[0][lane], high[1][lane]});
    }
    for (int64_t i = whole; i < count; i++) {
        most = std::max(most, scores[i]);
    }
    return most;
}

// Makes scores e^(score - most) and returns their sum.
INLINE float exponentials(float * scores, int64_t count, float most) {
    const int64_t whole = count / (2 * LANES) * (2 * LANES);
    Lanes sums[2] = {};
    for (int64_t i = 0; i < whole; i += 2 * LANES) {
        for (int half = 0; half < 2; half++) {
            Unaligned * place = (Unaligned *)(scores + i + half * LANES);
            const Lanes value = exponential(*place - most);
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
        scores[i] = exponential(Lanes{} + (scores[i] - most))[0];
        sum += scores[i];
    }
    return sum;
}

INLINE float * at(const Tensor * tensor, int64_t i1, int64_t i2, int64_t i3) {
    return (float *)((char *)tensor->data + i1 * tensor->nb[1] + i2 * tensor->nb[2] + i3 * tensor->nb[3]);
}

INLINE int stride(const Tensor * tensor, int dimension) {
    return (int)(tensor->nb[dimension] / sizeof(float));
}

INLINE int64_t row_count(const Tensor * tensor) {
    return tensor->ne[1] * tensor->ne[2] * tensor->ne[3];
}

// A row of a packed tensor.
INLINE float * row_of(const Tensor * tensor, int64_t row) {
    return (float *)tensor->data + row * tensor->ne[0];
}

// softmax(q k' / sqrt(width)) v.
//
// Sources: q [B, heads, N, width], k and v [B, heads, M, width], each with packed rows, and scratch
// [threads, BLOCK, keys], where `keys` is how many are taken at a time: of more, what was summed is
// scaled whenever a greater score is found. Result: [B, N, heads, width], packed.
INLINE void attention(Tensor * result, int thread, int threads, void *) {
    const Tensor * q = result->src[0];
    const Tensor * k = result->src[1];
    const Tensor * v = result->src[2];
    float * scores = at(result->src[3], 0, thread, 0);
    const int64_t width = q->ne[0], queries = q->ne[1], heads = q->ne[2], keys = k->ne[1];
    const int64_t part = result->src[3]->ne[0];
    const int64_t blocks = (queries + BLOCK - 1) / BLOCK;
    const int64_t items = q->ne[3] * heads * blocks;
    const float factor = 1.0f / std::sqrt((float)width);
    for (int64_t item = items * thread / threads; item < items * (thread + 1) / threads; item++) {
        const int64_t person = item / (heads * blocks), head = item / blocks % heads;
        const int64_t start = item % blocks * BLOCK;
        const int64_t rows = std::min(BLOCK, queries - start);
        float * out = at(result, head, start, person);
        const int between = stride(result, 2);
        float sums[BLOCK], highest[BLOCK];
        for (int64_t first = 0; first < keys; first += part) {
            const int64_t count = std::min(part, keys - first);
            cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)rows, (int)count, (int)width, factor,
                        at(q, start, head, person), stride(q, 1), at(k, first, head, person), stride(k, 1),
                        0.0f, scores, (int)count);
            for (int64_t row = 0; row < rows; row++) {
                float * those = scores + row * count;
                float most = greatest(those, count);
                float before = 0;
                if (first > 0) {
                    most = most > highest[row] ? most : highest[row];
                    before = std::exp(highest[row] - most);
                    for (int64_t i = 0; i < width; i++) {
                        out[row * between + i] *= before;
                    }
                    before *= sums[row];
                }
                highest[row] = most;
                sums[row] = before + exponentials(those, count, most);
            }
            cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)rows, (int)width, (int)count, 1.0f,
                        scores, (int)count, at(v, first, head, person), stride(v, 1),
                        first > 0 ? 1.0f : 0.0f, out, between);
        }
        for (int64_t row = 0; row < rows; row++) {
            for (int64_t i = 0; i < width; i++) {
                out[row * between + i] /= sums[row];
            }
        }
    }
}

// The same with all sums in F64, for few queries. Scratch is [threads, 2 * (M + width)].
INLINE void exact_attention(Tensor * result, int thread, int threads, void *) {
    const Tensor * q = result->src[0];
    const Tensor * k = result->src[1];
    const Tensor * v = result->src[2];
    const int64_t width = q->ne[0], queries = q->ne[1], heads = q->ne[2], keys = k->ne[1];
    double * scores = (double *)at(result->src[3], thread, 0, 0);
    double * sums = scores + keys;
    const int64_t items = q->ne[3] * heads * queries;
    const double factor = 1.0 / std::sqrt((double)width);
    for (int64_t item = items * thread / threads; item < items * (thread + 1) / threads; item++) {
        const int64_t person = item / (heads * queries), head = item / queries % heads;
        const float * query = at(q, item % queries, head, person);
        double most = -INFINITY;
        for (int64_t key = 0; key < keys; key++) {
            const float * other = at(k, key, head, person);
            double parts[4] = {};
            for (int64_t i = 0; i < width / 4 * 4; i += 4) {
                for (int part = 0; part < 4; part++) {
                    parts[part] += (double)query[i + part] * other[i + part];
                }
            }
            for (int64_t i = width / 4 * 4; i < width; i++) {
                parts[0] += (double)query[i] * other[i];
            }
            scores[key] = ((parts[0] + parts[1]) + (parts[2] + parts[3])) * factor;
            most = std::max(most, scores[key]);
        }
        std::fill(sums, sums + width, 0.0);
        double sum = 0;
        for (int64_t key = 0; key < keys; key++) {
            const double share = std::exp(scores[key] - most);
            const float * value = at(v, key, head, person);
            for (int64_t i = 0; i < width; i++) {
                sums[i] += share * value[i];
            }
            sum += share;
        }
        float * out = at(result, head, item % queries, person);
        for (int64_t i = 0; i < width; i++) {
            out[i] = (float)(sums[i] / sum);
        }
    }
}

INLINE float sum_of(const float * values, int64_t count, float centre, bool squares) {
    const int64_t whole = count / (4 * LANES) * (4 * LANES);
    Lanes sums[4] = {};
    for (int64_t i = 0; i < whole; i += 4 * LANES) {
        for (int part = 0; part < 4; part++) {
            const Lanes x = *(Unaligned *)(values + i + part * LANES) - centre;
            sums[part] += squares ? x * x : x;
        }
    }
    const Lanes all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    float sum = 0;
    for (int64_t i = whole; i < count; i++) {
        const float x = values[i] - centre;
        sum += squares ? x * x : x;
    }
    for (int lane = 0; lane < LANES; lane++) {
        sum += all[lane];
    }
    return sum;
}

// Layer norm over rows. Sources: x, weight and bias of a row; the parameter is epsilon's bits.
INLINE void norm(Tensor * result, int thread, int threads, void * parameter) {
    const Tensor * x = result->src[0];
    const float * weight = (const float *)result->src[1]->data;
    const float * bias = (const float *)result->src[2]->data;
    const int64_t count = x->ne[0], rows = row_count(x);
    const uint32_t bits = (uint32_t)(uintptr_t)parameter;
    float epsilon;
    std::memcpy(&epsilon, &bits, sizeof epsilon);
    for (int64_t row = rows * thread / threads; row < rows * (thread + 1) / threads; row++) {
        const float * from = row_of(x, row);
        float * to = row_of(result, row);
        const float mean = sum_of(from, count, 0, false) / (float)count;
        // What the mean's rounding leaves over.
        const float rest = sum_of(from, count, mean, false) / (float)count;
        const float variance = sum_of(from, count, mean, true) / (float)count - rest * rest;
        const float factor = 1.0f / std::sqrt(variance + epsilon);
        for (int64_t i = 0; i < count; i++) {
            to[i] = ((from[i] - mean) - rest) * factor * weight[i] + bias[i];
        }
    }
}

// A convolution over rows. Sources: x [rows, channels], a table [outputs, taps] of its row numbers, weight
// [out, taps * channels], bias [out], and scratch [threads, ...]; the parameter is how many taps are
// multiplied at once. A number that is no row of x adds nothing: outputs without any of the taps are left
// out of the product, which is what makes it sparse.
INLINE void convolve(Tensor * result, int thread, int threads, void * parameter) {
    const Tensor * x = result->src[0];
    const int32_t * table = (const int32_t *)result->src[1]->data;
    const float * weight = (const float *)result->src[2]->data;
    const float * bias = (const float *)result->src[3]->data;
    const Tensor * scratch = result->src[4];
    const int64_t channels = x->ne[0], rows = x->ne[1], out = result->ne[0], outputs = result->ne[1];
    const int64_t columns = result->src[2]->ne[0], taps = columns / channels;
    const int64_t group = (int64_t)(uintptr_t)parameter, width = group * channels;
    const int64_t most = scratch->ne[0] / (width + out + 1);
    float * gathered = at(scratch, thread, 0, 0);
    float * sums = gathered + most * width;
    int32_t * places = (int32_t *)(sums + most * out);
    const int64_t rounds = (outputs + most * threads - 1) / (most * threads);
    for (int64_t round = 0; round < rounds; round++) {
        const int64_t block = thread * rounds + round, blocks = threads * rounds;
        const int64_t start = outputs * block / blocks;
        const int64_t count = outputs * (block + 1) / blocks - start;
        float * to = row_of(result, start);
        for (int64_t i = 0; i < count; i++) {
            std::memcpy(to + i * out, bias, out * sizeof(float));
        }
        for (int64_t tap = 0; tap < taps; tap += group) {
            int64_t found = 0;
            for (int64_t i = 0; i < count; i++) {
                const int32_t * numbers = table + (start + i) * taps + tap;
                float * place = gathered + found * width;
                bool any = false;
                for (int64_t j = 0; j < group; j++) {
                    any |= numbers[j] < rows;
                }
                for (int64_t j = 0; any && j < group; j++) {
                    if (numbers[j] < rows) {
                        std::memcpy(place + j * channels, row_of(x, numbers[j]), channels * sizeof(float));
                    } else {
                        std::memset(place + j * channels, 0, channels * sizeof(float));
                    }
                }
                places[found] = (int32_t)i;
                found += any;
            }
            const bool whole = found == count;
            if (found > 0) {
                cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)found, (int)out, (int)width, 1.0f,
                            gathered, (int)width, weight + tap * channels, (int)columns,
                            whole ? 1.0f : 0.0f, whole ? to : sums, (int)out);
            }
            for (int64_t i = 0; !whole && i < found; i++) {
                for (int64_t j = 0; j < out; j++) {
                    to[places[i] * out + j] += sums[i * out + j];
                }
            }
        }
    }
}

// 1 + e^-x.
INLINE Lanes sigmoid_divisor(Lanes x) {
    const Lanes most = Lanes{} + 88.0f;
    return 1.0f + (-x > most ? Lanes{} + INFINITY : exponential(-x));
}

INLINE Lanes gated(Lanes gate, Lanes x) {
    return gate / sigmoid_divisor(gate) * x;
}

// silu(gate + gate's bias) * (x + x's bias), in place of gate. Sources: gate, x, both biases.
INLINE void gate(Tensor * result, int thread, int threads, void *) {
    const Tensor * x = result->src[1];
    const float * gate_bias = (const float *)result->src[2]->data;
    const float * x_bias = (const float *)result->src[3]->data;
    const int64_t count = x->ne[0], rows = row_count(x), whole = count / LANES * LANES;
    for (int64_t row = rows * thread / threads; row < rows * (thread + 1) / threads; row++) {
        float * gates = row_of(result, row);
        const float * values = row_of(x, row);
        for (int64_t i = 0; i < whole; i += LANES) {
            Unaligned * place = (Unaligned *)(gates + i);
            *place = gated(*place + *(Unaligned *)(gate_bias + i),
                           *(Unaligned *)(values + i) + *(Unaligned *)(x_bias + i));
        }
        for (int64_t i = whole; i < count; i++) {
            gates[i] = gated(Lanes{} + (gates[i] + gate_bias[i]), Lanes{} + (values[i] + x_bias[i]))[0];
        }
    }
}

INLINE Lanes gelu_of(Lanes x) {
    return x / sigmoid_divisor(x * (1.59576912f + 0.0713548163f * x * x));
}

// GELU with the hyperbolic tangent of x + bias, in place of x. Sources: x, bias.
INLINE void gelu(Tensor * result, int thread, int threads, void *) {
    const float * bias = (const float *)result->src[1]->data;
    const int64_t count = result->ne[0], rows = row_count(result), whole = count / LANES * LANES;
    for (int64_t row = rows * thread / threads; row < rows * (thread + 1) / threads; row++) {
        float * values = row_of(result, row);
        for (int64_t i = 0; i < whole; i += LANES) {
            Unaligned * place = (Unaligned *)(values + i);
            *place = gelu_of(*place + *(Unaligned *)(bias + i));
        }
        for (int64_t i = whole; i < count; i++) {
            values[i] = gelu_of(Lanes{} + (values[i] + bias[i]))[0];
        }
    }
}

// x * cosine + (x with its halves swapped) * sine. Sources: x [B, N, heads, width] with packed
// rows, cosine and sine [N, 1, width].
INLINE void rotate(Tensor * result, int thread, int threads, void *) {
    const Tensor * x = result->src[0];
    const int64_t width = x->ne[0], half = width / 2, heads = x->ne[1], tokens = x->ne[2];
    const int64_t items = tokens * x->ne[3];
    for (int64_t item = items * thread / threads; item < items * (thread + 1) / threads; item++) {
        const int64_t token = item % tokens;
        const float * cosine = row_of(result->src[1], token);
        const float * sine = row_of(result->src[2], token);
        for (int64_t head = 0; head < heads; head++) {
            const float * from = at(x, head, token, item / tokens);
            float * to = at(result, head, token, item / tokens);
            for (int64_t i = 0; i < half; i++) {
                const float low = from[i], high = from[i + half];
                to[i] = low * cosine[i] + high * sine[i];
                to[i + half] = high * cosine[i + half] + low * sine[i + half];
            }
        }
    }
}

#if defined(__x86_64__)
const bool AVX2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#define EXPORT(name)                                                                               \
    __attribute__((target("avx2,fma"))) static void name##_avx2(Tensor * r, int t, int n,          \
                                                                void * p) {                        \
        name(r, t, n, p);                                                                          \
    }                                                                                              \
    extern "C" void sam3d_##name(Tensor * r, int t, int n, void * p) {                             \
        AVX2 ? name##_avx2(r, t, n, p) : name(r, t, n, p);                                         \
    }
#else
#define EXPORT(name)                                                                               \
    extern "C" void sam3d_##name(Tensor * r, int t, int n, void * p) { name(r, t, n, p); }
#endif

}  // namespace

// GGML calls each from `threads` threads, numbered from 0. All values but a table's are float32.
EXPORT(attention)
EXPORT(convolve)
EXPORT(exact_attention)
EXPORT(gelu)
EXPORT(norm)
EXPORT(gate)
EXPORT(rotate)

// What the caller compares with its own: the struct's layout, and the rows of a thread's scratch.
extern "C" {
extern const int64_t sam3d_kernels_layout[3];
const int64_t sam3d_kernels_layout[3] = {offsetof(Tensor, src), offsetof(Tensor, data), BLOCK};
}
