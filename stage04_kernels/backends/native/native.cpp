// What torch is slow at on a CPU, compiled for the processor at hand (native.py builds and loads it; its functions say
// what each argument is). Plain C functions over plain memory: no torch header, so it compiles in seconds.
//
// A vector has as many float32 as the processor's registers hold. The compiler's vector types are used instead of one
// processor's intrinsics: the same source serves AVX2, AVX-512 and NEON, and whatever it does not know as vectors of 4.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#if defined(__AVX512F__)
constexpr int V = 16;  // float32 in a vector
constexpr int MR = 12;  // rows of a tile: its 2 * MR sums fill the registers, but for those that hold weights and an input
#elif defined(__AVX__)
constexpr int V = 8, MR = 6;
#elif defined(__aarch64__)
constexpr int V = 4, MR = 12;
#else
constexpr int V = 4, MR = 6;
#endif

typedef float floats __attribute__((vector_size(V * 4)));
typedef float any_floats __attribute__((vector_size(V * 4), aligned(4)));  // at any address
typedef int32_t ints __attribute__((vector_size(V * 4)));
typedef int32_t any_ints __attribute__((vector_size(V * 4), aligned(1)));

struct bfloat16 {
  uint16_t bits;  // the upper half of a float32
  operator float() const {
    uint32_t wide = uint32_t(bits) << 16;
    float value;
    __builtin_memcpy(&value, &wide, 4);
    return value;
  }
  bfloat16() = default;
  bfloat16(float value) {  // to the nearest, ties to even; NaN stays NaN
    uint32_t wide;
    __builtin_memcpy(&wide, &value, 4);
    bits = value != value ? 0x7fc0 : (wide + 0x7fff + (wide >> 16 & 1)) >> 16;
  }
};

static floats exp_of(floats x) {
  // 2 ** whole by its bits, 2 ** rest by a polynomial (minimax of degree 5 on [0, 1), off by 2e-7 of the value at most).
  floats power = x * 1.44269504f;
  power = power < -126.0f ? floats{} - 126.0f : power;
  power = power > 127.0f ? floats{} + 127.0f : power;
  ints whole = __builtin_convertvector(power, ints);
  whole += __builtin_convertvector(whole, floats) > power;  // true is -1: round down, not towards zero
  floats rest = power - __builtin_convertvector(whole, floats);
  floats poly = floats{} + 1.8775767e-3f;
  for (float coefficient : {8.9893397e-3f, 5.5826318e-2f, 2.4015361e-1f, 6.9315308e-1f, 9.9999994e-1f})
    poly = poly * rest + coefficient;
  return poly * (floats)((whole + 127) << 23);
}

// Matrix products
//
// y[m, n] = activation(sum over k of x[m, k] * w[n, k] + bias[n])
//
// Weights are packed in panels of NR = 2 * V outputs. A panel holds its weights in the order in which they are read: for
// each k, NR numbers. Few rows are bound by reading the weights: each is read once, in order, in its own format. Many rows
// are bound by arithmetic: a tile of MR rows keeps its MR x NR sums in registers, and KC numbers of a panel stay in the
// nearest cache while all tiles use them (Goto and van de Geijn 2008, "Anatomy of High-Performance Matrix Multiplication").
//
// Every sum is one chain of multiply-adds in the order of k, whatever the number of rows: so a row's result does not depend,
// in any bit, on its neighbours.

constexpr int NR = 2 * V, KC = 256, AHEAD = 32;

// STEP<T> values of k lie side by side for each output of a panel; `unpack` makes float32 of STEP * NR weights.
template <class T> constexpr int STEP = 1;
template <> constexpr int STEP<int8_t> = 4;

static inline void unpack(const float* w, floats out[1][2]) {
  out[0][0] = *(const any_floats*)w;
  out[0][1] = *(const any_floats*)(w + V);
}

static inline void unpack(const bfloat16* w, floats out[1][2]) {  // outputs j and j + V share a lane: low half, high half
  ints both = *(const any_ints*)w;
  out[0][0] = (floats)(both << 16);
  out[0][1] = (floats)(both & -65536);
}

static inline void unpack(const int8_t* w, floats out[4][2]) {  // four values of k share a lane
  for (int half = 0; half < 2; half++) {
    ints four = *(const any_ints*)(w + half * V * 4);
    for (int i = 0; i < 4; i++) out[i][half] = __builtin_convertvector(four << (24 - 8 * i) >> 24, floats);
  }
}

// M rows times P panels, k from 0 to `count`. `sums` [M, P * NR] is continued, or begun if `first`.
template <int M, int P, class T>
static inline void tile(
    const float* x, long row, const T* w, long panel, float* sums, int count, bool first, const T* prefetch
) {
  floats sum[M][P][2];
  for (int m = 0; m < M; m++)
    for (int p = 0; p < P; p++)
      for (int half = 0; half < 2; half++)
        sum[m][p][half] = first ? floats{} : (floats)*(any_floats*)(sums + m * P * NR + p * NR + half * V);
  for (int k = 0; k < count; k += STEP<T>) {
    if (prefetch) __builtin_prefetch(prefetch + k * NR);
    for (int p = 0; p < P; p++) {
      floats weights[STEP<T>][2];
      unpack(w + p * panel + k * NR, weights);
      for (int i = 0; i < STEP<T>; i++)
        for (int m = 0; m < M; m++) {
          float input = x[m * row + k + i];
          sum[m][p][0] += input * weights[i][0];
          sum[m][p][1] += input * weights[i][1];
        }
    }
  }
  for (int m = 0; m < M; m++)
    for (int p = 0; p < P; p++)
      for (int half = 0; half < 2; half++) *(any_floats*)(sums + m * P * NR + p * NR + half * V) = sum[m][p][half];
}

// `tile` for a number of rows that is only known now, 1 to MR.
template <class T, int M = MR>
static void rows_tile(
    int rows, const float* x, long row, const T* w, float* sums, int count, bool first, const T* prefetch
) {
  if constexpr (M > 1)
    if (rows < M) return rows_tile<T, M - 1>(rows, x, row, w, sums, count, first, prefetch);
  tile<M, 1, T>(x, row, w, 0, sums, count, first, prefetch);
}

enum Activation { NONE, GELU_TANH };

static inline floats activated(floats x, int activation) {
  if (activation == NONE) return x;
  floats inner = 1.59576912f * (x + 0.044715f * x * x * x);  // 2 sqrt(2 / pi): 1 + tanh(z) = 2 / (1 + exp(-2 z))
  return x / (1.0f + exp_of(-inner));
}

// Makes results of a panel's sums [rows, NR]. `first` is the panel's first output.
template <class Y>
static void finish(
    const float* sums, const float* scale, const float* bias, int activation, Y* y, long rows, long first, long outputs
) {
  alignas(64) float factor[NR], offset[NR], result[NR];
  const int count = std::min<long>(NR, outputs - first);
  for (int j = 0; j < NR; j++) {
    factor[j] = scale && j < count ? scale[first + j] : 1.0f;
    offset[j] = bias && j < count ? bias[first + j] : 0.0f;
  }
  for (long m = 0; m < rows; m++, sums += NR, y += outputs) {
    for (int j = 0; j < NR; j += V)
      *(floats*)(result + j) =
          activated(*(any_floats*)(sums + j) * *(floats*)(factor + j) + *(floats*)(offset + j), activation);
    if (count == NR)
      for (int j = 0; j < NR; j++) y[first + j] = result[j];
    else
      for (int j = 0; j < count; j++) y[first + j] = result[j];
  }
}

// x [rows, inputs] float32; `inputs` is a multiple of STEP<T>.
template <class T, class Y>
static void linear(
    const float* x, const T* w, const float* scale, const float* bias, int activation, Y* y, long rows, long inputs,
    long outputs, int threads
) {
  const long num_panels = (outputs + NR - 1) / NR, panel = inputs * NR;
  if (rows == 1) {
    constexpr int P = 4;  // panels side by side: their sums are independent, so no multiply-add waits for the one before
    const long groups = (num_panels + P - 1) / P;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 4)
    for (long group = 0; group < groups; group++) {
      alignas(64) float sums[P * NR];
      const long first = group * P;
      const int here = std::min<long>(P, num_panels - first);
      if (here == P)
        tile<1, P, T>(x, inputs, w + first * panel, panel, sums, inputs, true, nullptr);
      else
        for (int p = 0; p < here; p++) tile<1, 1, T>(x, inputs, w + (first + p) * panel, 0, sums + p * NR, inputs, true, nullptr);
      for (int p = 0; p < here; p++) finish(sums + p * NR, scale, bias, activation, y, 1, (first + p) * NR, outputs);
    }
    return;
  }
  const long num_tiles = (rows + MR - 1) / MR;  // as equal as possible: 8 rows are 4 and 4, not 6 and 2
#pragma omp parallel num_threads(threads)
  {
    float* sums = new float[rows * NR];
    alignas(64) float wide[KC * NR];
#pragma omp for schedule(dynamic, 4)
    for (long p = 0; p < num_panels; p++) {
      const T* own = w + p * panel;
      if (rows <= MR)
        rows_tile<T>(rows, x, inputs, own, sums, inputs, true, own + AHEAD * NR);
      else
        for (long k = 0; k < inputs; k += KC) {
          const int count = std::min<long>(KC, inputs - k);
          const float* weights = wide;
          const float* prefetch = nullptr;
          if constexpr (std::is_same_v<T, float>) {
            weights = own + k * NR;
            prefetch = weights + KC * NR;
          } else
            for (int i = 0; i < count; i += STEP<T>) unpack(own + (k + i) * NR, (floats(*)[2])(wide + i * NR));
          for (long t = 0; t < num_tiles; t++) {
            const long low = t * rows / num_tiles, high = (t + 1) * rows / num_tiles;
            rows_tile<float>(high - low, x + low * inputs + k, inputs, weights, sums + low * NR, count, k == 0, t == 1 ? prefetch : nullptr);
          }
        }
      finish(sums, scale, bias, activation, y, rows, p * NR, outputs);
    }
    delete[] sums;
  }
}

// w [outputs, inputs], each row `row` and each column `column` numbers from the next; outputs past the last are zeros.
template <class T>
static void pack(const T* w, long row, long column, T* packed, long inputs, long outputs, int threads) {
  const long num_panels = (outputs + NR - 1) / NR;
#pragma omp parallel for num_threads(threads)
  for (long p = 0; p < num_panels; p++)
    for (long k = 0; k < inputs; k++)
      for (int j = 0; j < NR; j++) {
        long place = k * NR + j;
        if (std::is_same_v<T, bfloat16>) place = k * NR + j % V * 2 + j / V;
        if (STEP<T> == 4) place = k / 4 * 4 * NR + j * 4 + k % 4;
        const long n = p * NR + j;
        packed[p * inputs * NR + place] = n < outputs ? w[n * row + k * column] : T(0);
      }
}

template <class X>
static void widen(const X* x, float* out, long count, int threads) {
#pragma omp parallel for num_threads(threads) if (count > 65536)
  for (long i = 0; i < count; i++) out[i] = x[i];
}

extern "C" {
int panel_width() { return NR; }

#define LINEAR(T, NAME) \
  void linear_##NAME(const float* x, const T* w, const float* scale, const float* bias, int activation, float* y, long rows, \
                     long inputs, long outputs, int threads) { \
    linear(x, w, scale, bias, activation, y, rows, inputs, outputs, threads); \
  } \
  void linear_##NAME##_bf16(const bfloat16* x, const T* w, const float* scale, const float* bias, int activation, bfloat16* y, \
                            long rows, long inputs, long outputs, int threads) { \
    float* wide = new float[rows * inputs]; \
    widen(x, wide, rows * inputs, threads); \
    linear(wide, w, scale, bias, activation, y, rows, inputs, outputs, threads); \
    delete[] wide; \
  } \
  void pack_##NAME(const T* w, long row, long column, T* packed, long inputs, long outputs, int threads) { \
    pack(w, row, column, packed, inputs, outputs, threads); \
  }
LINEAR(float, float32)
LINEAR(bfloat16, bfloat16)
LINEAR(int8_t, int8)
}
