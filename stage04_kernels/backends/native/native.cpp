// What torch is slow at on a CPU, compiled for the processor at hand (native.py builds and loads it; its functions say
// what each argument is). Plain C functions over plain memory: no torch header, so it compiles in seconds.
//
// A vector has as many float32 as the processor's registers hold. The compiler's vector types are used instead of one
// processor's intrinsics: the same source serves AVX2, AVX-512 and NEON, and whatever it does not know as vectors of 4.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

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
typedef int16_t shorts __attribute__((vector_size(V * 4)));
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
constexpr int PANELS = 4;  // side by side for one row: no multiply-add waits for the one before, and memory is read in four places

static inline void unpack(const float* w, floats out[2]) {
  out[0] = *(const any_floats*)w;
  out[1] = *(const any_floats*)(w + V);
}

static inline void unpack(const bfloat16* w, floats out[2]) {  // outputs j and j + V share a lane: low half, high half
  ints both = *(const any_ints*)w;
  out[0] = (floats)(both << 16);
  out[1] = (floats)(both & -65536);
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
  for (int k = 0; k < count; k++) {
    if (prefetch) __builtin_prefetch(prefetch + k * NR);
    for (int p = 0; p < P; p++) {
      floats weights[2];
      unpack(w + p * panel + k * NR, weights);
      for (int m = 0; m < M; m++) {
        float input = x[m * row + k];
        sum[m][p][0] += input * weights[0];
        sum[m][p][1] += input * weights[1];
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
  std::fill(factor, factor + NR, 1.0f);
  std::fill(offset, offset + NR, 0.0f);
  if (scale) std::copy(scale + first, scale + first + count, factor);
  if (bias) std::copy(bias + first, bias + first + count, offset);
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

// x [rows, inputs] float32.
template <class T, class Y>
static void linear(
    const float* x, const T* w, const float* scale, const float* bias, int activation, Y* y, long rows, long inputs,
    long outputs, int threads
) {
  const long num_panels = (outputs + NR - 1) / NR, panel = inputs * NR;
  if (rows == 1) {
    constexpr int P = PANELS;
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
            for (int i = 0; i < count; i++) unpack(own + (k + i) * NR, (floats*)(wide + i * NR));
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

// Products of int8 weights
//
// Turning int8 into float32 takes longer than reading it, so inputs become integers instead: in groups of QUADS * 4 numbers
// of a row, each number is a whole multiple of the group's largest one / most. A group's sum is one of integers, which is exact;
// groups are added as float32, in the order of k. So here too a row's result does not depend on its neighbours.
//
// 16 bits hold an input about as well as float32 does: only the weights are quantized. 8 bits are coarser, and four times as
// fast where the processor multiplies them in one instruction: VNNI on x86, dotprod on ARM.
//
// A panel holds QUAD values of k side by side for each output, so a lane of 32 bits is an output's next four weights.

constexpr int QUAD = 4;

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(__ARM_FEATURE_DOTPROD)
constexpr int INPUT_BITS = 8;
#else
constexpr int INPUT_BITS = 16;
#endif
#if defined(__ARM_FEATURE_DOTPROD)
constexpr int OFFSET = 0;
#else
constexpr int OFFSET = 128;  // x86 multiplies unsigned by signed numbers: by weight + 128. 128 * input is subtracted beforehand
#endif

// Adds to each lane the products of its four weights and four inputs.
static inline ints dot4(ints sum, ints weights, int32_t inputs) {
#if defined(__ARM_FEATURE_DOTPROD)
  return (ints)vdotq_s32((int32x4_t)sum, (int8x16_t)weights, vreinterpretq_s8_s32(vdupq_n_s32(inputs)));
#else
  weights ^= 0x80808080;
#if defined(__AVX512F__) && defined(__AVX512VNNI__)
  return (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(inputs));
#elif defined(__AVXVNNI__)
  return (ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)weights, _mm256_set1_epi32(inputs));
#else
  for (int i = 0; i < QUAD; i++) sum += (weights >> 8 * i & 255) * int32_t(int8_t(inputs >> 8 * i));
  return sum;
#endif
#endif
}

// The same for pairs of 16 bits.
static inline ints dot2(ints sum, ints weights, int32_t inputs) {
#if defined(__AVX512BW__)
  return sum + (ints)_mm512_madd_epi16((__m512i)weights, _mm512_set1_epi32(inputs));
#elif defined(__AVX2__)
  return sum + (ints)_mm256_madd_epi16((__m256i)weights, _mm256_set1_epi32(inputs));
#elif defined(__SSE2__) && !defined(__AVX__)
  return sum + (ints)_mm_madd_epi16((__m128i)weights, _mm_set1_epi32(inputs));
#else
  return sum + (weights << 16 >> 16) * int32_t(int16_t(inputs)) + (weights >> 16) * (inputs >> 16);
#endif
}

// How inputs are held: LANES lanes for four of them.
struct Bits8 {
  static constexpr int LANES = 1, QUADS = 16, START = -OFFSET, ROWS = MR;
  static constexpr float MOST = 127;
  static inline void pack(const int* k, int32_t* lanes) {
    lanes[0] = (k[0] & 255) | (k[1] & 255) << 8 | (k[2] & 255) << 16 | k[3] << 24;
  }
  static inline void unpack(ints weights, ints out[LANES]) { out[0] = weights; }
  static inline ints dot(ints sum, ints weights, int32_t inputs) { return dot4(sum, weights, inputs); }
};

struct Bits16 {
  static constexpr int LANES = 2, QUADS = 64, START = 0, ROWS = V == 16 ? MR : 4;
  static constexpr float MOST = 32767;
  static inline void pack(const int* k, int32_t* lanes) {
    lanes[0] = (k[0] & 65535) | k[2] << 16;
    lanes[1] = (k[1] & 65535) | k[3] << 16;
  }
  static inline void unpack(ints weights, ints out[LANES]) {
    out[0] = (ints)((shorts)weights << 8 >> 8);
    out[1] = (ints)((shorts)weights >> 8);
  }
  static inline ints dot(ints sum, ints weights, int32_t inputs) { return dot2(sum, weights, inputs); }
};

// Rows of inputs as integers. `lanes` [rows, row], `scale` and `start` [rows, groups]: what an integer of a group is worth, and
// where the sum of the group begins.
template <class Bits> struct Integers {
  static constexpr int GROUP = Bits::QUADS * QUAD;
  long row, groups;
  std::vector<int32_t> lanes, start;
  std::vector<float> scale;

  template <class X> Integers(const X* x, long rows, long inputs, int threads)
      : row((inputs + QUAD - 1) / QUAD * Bits::LANES), groups((inputs + GROUP - 1) / GROUP),
        lanes(rows * row), start(rows * groups), scale(rows * groups) {
#pragma omp parallel for num_threads(threads) if (rows * inputs > 65536)
    for (long m = 0; m < rows; m++)
      for (long g = 0; g < groups; g++) {
        const long first = g * GROUP, count = std::min<long>(GROUP, inputs - first);
        group(x + m * inputs + first, count, m * groups + g, &lanes[m * row + first / QUAD * Bits::LANES]);
      }
  }

  template <class X> void group(const X* x, int count, long index, int32_t* out) {
    float values[GROUP] = {};
    int whole[GROUP];
    int32_t most_bits = 0, total = 0;
    for (int i = 0; i < count; i++) values[i] = x[i];
    for (int i = 0; i < GROUP; i++) {  // the bits of floats without sign are in their order, with NaN above all
      int32_t bits;
      __builtin_memcpy(&bits, values + i, 4);
      most_bits = std::max(most_bits, bits & 0x7fffffff);
    }
    float most;
    __builtin_memcpy(&most, &most_bits, 4);
    const float inverse = Bits::MOST / most;
    const bool usable = inverse > 0 && inverse <= 3e38f;  // else all are as good as zero, or one is no number
    for (int i = 0; i < GROUP; i++) {
      const float rounder = 12582912.0f;  // 1.5 * 2 ** 23: the sum has no room for a fraction, so it is rounded, ties to even
      whole[i] = usable ? int((values[i] * inverse + rounder) - rounder) : 0;
      total += whole[i];
    }
    for (int i = 0; i < count; i += QUAD) Bits::pack(whole + i, out + i / QUAD * Bits::LANES);
    scale[index] = most / Bits::MOST;
    start[index] = Bits::START * total;
  }
};

// M rows times P panels, `quads` * 4 values of k: one group. Adds to `sums` [M, P * NR]. A function of its own: the compiler
// keeps its sums in registers then.
template <int M, int P, class Bits>
__attribute__((noinline)) static void group_tile(
    const Integers<Bits>& x, long first, long g, const int8_t* w, long panel, long quads, float* sums
) {
  ints sum[M][P][2];
  const int32_t* lanes = &x.lanes[first * x.row + g * Bits::QUADS * Bits::LANES];
  for (int m = 0; m < M; m++)
    for (int p = 0; p < P; p++) sum[m][p][0] = sum[m][p][1] = ints{} + x.start[(first + m) * x.groups + g];
  for (long q = 0; q < quads; q++, w += QUAD * NR, lanes += Bits::LANES) {
    if (P == 1) __builtin_prefetch(w + AHEAD * NR * QUAD);
    for (int p = 0; p < P; p++) {
      ints weights[2][Bits::LANES];
      for (int half = 0; half < 2; half++)
        Bits::unpack(*(const any_ints*)(w + p * panel + half * V * QUAD), weights[half]);
      for (int m = 0; m < M; m++)
        for (int i = 0; i < Bits::LANES; i++)
          for (int half = 0; half < 2; half++)
            sum[m][p][half] = Bits::dot(sum[m][p][half], weights[half][i], lanes[m * x.row + i]);
    }
  }
  for (int m = 0; m < M; m++)
    for (int p = 0; p < P; p++)
      for (int half = 0; half < 2; half++)
        *(any_floats*)(sums + m * P * NR + p * NR + half * V) +=
            __builtin_convertvector(sum[m][p][half], floats) * x.scale[(first + m) * x.groups + g];
}

// `group_tile` for a number of rows that is only known now, 1 to Bits::ROWS.
template <class Bits, int M = Bits::ROWS>
static void group_rows(int rows, const Integers<Bits>& x, long first, long g, const int8_t* w, long quads, float* sums) {
  if constexpr (M > 1)
    if (rows < M) return group_rows<Bits, M - 1>(rows, x, first, g, w, quads, sums);
  group_tile<M, 1, Bits>(x, first, g, w, 0, quads, sums);
}

template <class Bits, class X>
static void integer_linear(
    const X* input, const int8_t* w, const float* scale, const float* bias, int activation, X* y, long rows, long inputs,
    long outputs, int threads
) {
  const Integers<Bits> x(input, rows, inputs, threads);
  const long num_panels = (outputs + NR - 1) / NR, all_quads = (inputs + QUAD - 1) / QUAD, panel = all_quads * QUAD * NR;
  const long num_tiles = (rows + Bits::ROWS - 1) / Bits::ROWS;
  const long P = rows == 1 ? PANELS : 1, num_blocks = (num_panels + P - 1) / P;
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> sums(rows * P * NR);
#pragma omp for schedule(dynamic, 4)
    for (long block = 0; block < num_blocks; block++) {
      const long p = block * P, here = std::min(P, num_panels - p);
      std::fill(sums.begin(), sums.end(), 0.0f);
      for (long g = 0; g < x.groups; g++) {
        const int8_t* own = w + p * panel + g * Bits::QUADS * QUAD * NR;
        const long quads = std::min<long>(Bits::QUADS, all_quads - g * Bits::QUADS);
        if (here == PANELS)
          group_tile<1, PANELS, Bits>(x, 0, g, own, panel, quads, &sums[0]);
        else if (rows == 1)
          for (long i = 0; i < here; i++) group_tile<1, 1, Bits>(x, 0, g, own + i * panel, 0, quads, &sums[i * NR]);
        else
          for (long t = 0; t < num_tiles; t++) {
            const long low = t * rows / num_tiles, high = (t + 1) * rows / num_tiles;
            group_rows<Bits>(high - low, x, low, g, own, quads, &sums[low * NR]);
          }
      }
      for (long i = 0; i < here; i++) finish(&sums[i * NR], scale, bias, activation, y, rows, (p + i) * NR, outputs);
    }
  }
}

// w [outputs, inputs], each row `row` and each column `column` numbers from the next; what lies past the last is zeros.
template <class T>
static void pack(const T* w, long row, long column, T* packed, long inputs, long outputs, int threads) {
  constexpr bool quads = std::is_same_v<T, int8_t>;
  const long num_panels = (outputs + NR - 1) / NR, padded = quads ? (inputs + QUAD - 1) / QUAD * QUAD : inputs;
#pragma omp parallel for num_threads(threads)
  for (long p = 0; p < num_panels; p++)
    for (long k = 0; k < padded; k++)
      for (int j = 0; j < NR; j++) {
        long place = k * NR + j;
        if (std::is_same_v<T, bfloat16>) place = k * NR + j % V * 2 + j / V;
        if (quads) place = (k / QUAD * NR + j) * QUAD + k % QUAD;
        const long n = p * NR + j;
        packed[p * padded * NR + place] = n < outputs && k < inputs ? w[n * row + k * column] : T(0);
      }
}

template <class X>
static void widen(const X* x, float* out, long count, int threads) {
#pragma omp parallel for num_threads(threads) if (count > 65536)
  for (long i = 0; i < count; i++) out[i] = x[i];
}

extern "C" {
int panel_width() { return NR; }

int input_bits() { return INPUT_BITS; }

#define PACK(T, NAME) \
  void pack_##NAME(const T* w, long row, long column, T* packed, long inputs, long outputs, int threads) { \
    pack(w, row, column, packed, inputs, outputs, threads); \
  }
#define LINEAR(T, NAME) \
  PACK(T, NAME) \
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
  }
#define INTEGER_LINEAR(X, NAME, BITS) \
  void linear_##NAME(const X* x, const int8_t* w, const float* scale, const float* bias, int activation, X* y, long rows, \
                     long inputs, long outputs, int threads) { \
    integer_linear<BITS>(x, w, scale, bias, activation, y, rows, inputs, outputs, threads); \
  }
LINEAR(float, float32)
LINEAR(bfloat16, bfloat16)
PACK(int8_t, int8)
INTEGER_LINEAR(float, int8_by_8, Bits8)
INTEGER_LINEAR(bfloat16, int8_by_8_bf16, Bits8)
INTEGER_LINEAR(float, int8_by_16, Bits16)
INTEGER_LINEAR(bfloat16, int8_by_16_bf16, Bits16)
}
