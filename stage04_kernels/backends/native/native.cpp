// What torch is slow at on a CPU, compiled for the processor at hand (native.py builds and loads it; its functions say
// what each argument is). Plain C functions over plain memory: no torch header, so it compiles in seconds.
//
// A vector has as many float32 as the processor's registers hold. The compiler's vector types are used instead of one
// processor's intrinsics: the same source serves AVX2, AVX-512 and NEON, and whatever it does not know as vectors of 4.

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>
#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__AMX_INT8__) && defined(__linux__)
#include <csetjmp>
#include <csignal>
#include <sys/syscall.h>
#include <unistd.h>
#endif
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
typedef uint32_t uints __attribute__((vector_size(V * 4)));
typedef int16_t shorts __attribute__((vector_size(V * 4))), half_shorts __attribute__((vector_size(V * 2)));
typedef int32_t any_ints __attribute__((vector_size(V * 4), aligned(1), may_alias));

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

// Each function is told how many threads it may use at most; a machine that is busy with other work allows fewer. Every number is summed
// by one thread, in one order, so how many there are shows in no result.
static int most_threads = INT_MAX;

extern "C" void limit_threads(int count) { most_threads = count; }

static int allowed(int threads) { return std::min(threads, most_threads); }

// Has the system find the memory of `bytes` bytes at each start, which others may write to meanwhile: a page is there once it is written to, so each
// gets a byte that it has. In a thread that runs when a core has nothing else to do (where there is such a thread), and that never holds Python's lock.
extern "C" void prefault(char** starts, long count, long bytes) {
  std::thread([=] {
#if defined(__linux__)
    sched_param none{};
    sched_setscheduler(0, SCHED_IDLE, &none);
#endif
    for (long piece = 0; piece < count; piece++)
      for (long at = 0; at < bytes + 4095; at += 4096) {
        char same = 0, *byte = starts[piece] + std::min(at, bytes - 1);
        __atomic_compare_exchange_n(byte, &same, same, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
      }
  }).join();
}

static floats exp_of(floats x) {
  // 2 ** whole by its bits, 2 ** rest by a polynomial (minimax of degree 5 on [0, 1), off by 2e-7 of the value at most).
  floats power = x * 1.44269504f;
  power = power < -126.0f ? floats{} - 126.0f : power;
  power = power > 127.0f ? floats{} + 127.0f : power;
#if defined(__AVX512F__)
  const floats whole = (floats)_mm512_floor_ps((__m512)power), rest = power - whole;
#else
  ints whole = __builtin_convertvector(power, ints);
  whole += __builtin_convertvector(whole, floats) > power;  // true is -1: round down, not towards zero
  const floats rest = power - __builtin_convertvector(whole, floats);
#endif
  floats poly = floats{} + 1.8775767e-3f;
  for (float coefficient : {8.9893397e-3f, 5.5826318e-2f, 2.4015361e-1f, 6.9315308e-1f, 9.9999994e-1f})
    poly = poly * rest + coefficient;
#if defined(__AVX512F__)
  return (floats)_mm512_scalef_ps((__m512)poly, (__m512)whole);
#else
  return poly * (floats)((whole + 127) << 23);
#endif
}

// Matrix products
//
// y[m, n] = activation(sum over k of x[m, k] * w[n, k] + bias[n])
//
// Weights are packed in panels of NR = 2 * V outputs. A panel holds its weights in the order in which they are read: for
// each k, NR numbers; in bfloat16 for each two k, NR pairs, since there are instructions that multiply and add pairs. Few rows are bound by reading the weights: each is read once, in order, in its own format. Many rows
// are bound by arithmetic: a tile of MR rows keeps its MR x NR sums in registers, and KC numbers of a panel stay in the
// nearest cache while all tiles use them (Goto and van de Geijn 2008, "Anatomy of High-Performance Matrix Multiplication").
//
// Every sum is one chain of multiply-adds in the order of k, whatever the number of rows: so a row's result does not depend,
// in any bit, on its neighbours. Where the processor multiplies bfloat16 (AVX512-BF16), a link of the chain adds the products of a
// pair, whose sum is rounded once less or more than two links are, and what is smaller than normal numbers counts as 0.

constexpr int NR = 2 * V, KC = 256, AHEAD = V == 16 ? 96 : 32, BLOCK = 1 << 16;
// Side by side for few rows: no multiply-add waits for the one before, and memory is read in four places. With AVX-512 one panel is enough to
// wait for memory alone, and a thread that reads from one end to the other gets it sooner.
constexpr int PANELS = V == 16 ? 1 : 4;
// From so many rows on a tile computes for longer than it reads, and asks the memory in advance. With fewer that took up to half as long again
// on Zen 4; on AVX2 only one row is faster without.
constexpr int CALLING_ROWS = V == 16 ? 9 : 2;
// Where what is asked for goes: 2, the second cache, since the first one is full of what is in use; as small as AVX2's tiles are, 3, the first.
constexpr int CALLED_CACHE = V == 16 ? 2 : 3;
constexpr int FEW_ROWS = 3;  // measured on AVX2: 2 and 3 rows cost 1.05 and 1.15 times one row, in tiles 1.35 and 1.4 times

#if defined(__AVX512BF16__)
constexpr bool PAIRS = true;
#else
constexpr bool PAIRS = false;
#endif

// How many k lie side by side for one output, and the numbers that a product of such weights needs in memory.
template <class T> constexpr int SIDE = std::is_same_v<T, bfloat16> ? 2 : std::is_same_v<T, int8_t> ? 4 : 1;
template <class T> static long padded(long inputs) { return (inputs + SIDE<T> - 1) / SIDE<T> * SIDE<T>; }

static inline void unpack(const float* w, floats out[2]) {
  out[0] = *(const any_floats*)w;
  out[1] = *(const any_floats*)(w + V);
}

static inline void unpack(const bfloat16* w, floats out[2]) {  // neighbours share a lane: low half, high half
  ints both = *(const any_ints*)w;
  out[0] = (floats)(both << 16);
  out[1] = (floats)(both & -65536);
}

// A panel's weights of SIDE<T> values of k, as float32.
static inline void unpack_weights(const float* w, floats out[1][2]) { unpack(w, out[0]); }

static inline void unpack_weights(const bfloat16* w, floats out[2][2]) {
  for (int half = 0; half < 2; half++) {
    floats pair[2];
    unpack(w + half * 2 * V, pair);
    for (int i = 0; i < 2; i++) out[i][half] = pair[i];
  }
}

// Adds to each lane the products of its two numbers of x and of y.
static inline floats dot_pairs(floats sum, ints x, ints y) {
#if defined(__AVX512BF16__)
  return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512i)x, (__m512bh)(__m512i)y);
#else
  return sum + (floats)(x << 16) * (floats)(y << 16) + (floats)(x & -65536) * (floats)(y & -65536);
#endif
}

// M rows times P panels, k from 0 to `count`. `sums` [M, P * NR] is continued, or begun if `first`.
template <int M, int P, class X, class T>
static inline void tile(
    const X* x, long row, const T* w, long panel, float* sums, int count, bool first, const T* prefetch
) {
  constexpr int S = SIDE<T>;
  floats sum[M][P][2];
#pragma GCC unroll 16
  for (int m = 0; m < M; m++)
#pragma GCC unroll 4
    for (int p = 0; p < P; p++)
      for (int half = 0; half < 2; half++)
        sum[m][p][half] = first ? floats{} : (floats)*(any_floats*)(sums + m * P * NR + p * NR + half * V);
  const auto step = [&](int k, int here) {  // `here` of S values of k
    for (int p = 0; p < P; p++) {
      if constexpr (std::is_same_v<X, bfloat16>) {
        for (int m = 0; m < M; m++) {
          int32_t inputs = 0;
          __builtin_memcpy(&inputs, x + m * row + k, here * 2);
          for (int half = 0; half < 2; half++)
            sum[m][p][half] = dot_pairs(sum[m][p][half], *(const any_ints*)(w + p * panel + k * NR + half * 2 * V), ints{} + inputs);
        }
      } else {
        floats weights[S][2];
        unpack_weights(w + p * panel + k * NR, weights);
        for (int i = 0; i < here; i++)
          for (int m = 0; m < M; m++) {
            const float input = x[m * row + k + i];
            sum[m][p][0] += input * weights[i][0];
            sum[m][p][1] += input * weights[i][1];
          }
      }
    }
  };
  int k = 0;
  for (; k + S <= count; k += S) {
    if (prefetch)
      for (int line = 0; line < S * NR; line += 64 / sizeof(T)) __builtin_prefetch(prefetch + k * NR + line, 0, CALLED_CACHE);
    step(k, S);
  }
  if (k < count) step(k, 1);
#pragma GCC unroll 16
  for (int m = 0; m < M; m++)
#pragma GCC unroll 4
    for (int p = 0; p < P; p++)
      for (int half = 0; half < 2; half++) *(any_floats*)(sums + m * P * NR + p * NR + half * V) = sum[m][p][half];
}

// `tile` for a number of rows that is only known now, 1 to M.
template <int M = MR, int P = 1, class X, class T>
static void rows_tile(
    int rows, const X* x, long row, const T* w, long panel, float* sums, int count, bool first, const T* prefetch
) {
  if constexpr (M > 1)
    if (rows < M) return rows_tile<M - 1, P>(rows, x, row, w, panel, sums, count, first, prefetch);
  tile<M, P>(x, row, w, panel, sums, count, first, prefetch);
}

enum Activation { NONE, GELU_TANH };

static inline floats activated(floats x, int activation) {
  if (activation == NONE) return x;
  floats inner = 1.59576912f * (x + 0.044715f * x * x * x);  // 2 sqrt(2 / pi): 1 + tanh(z) = 2 / (1 + exp(-2 z))
  return x / (1.0f + exp_of(-inner));
}

// Makes results of a panel's sums [rows, NR], `row` numbers apart. `first` is the panel's first output.
template <class Y>
static void finish(
    const float* sums, const float* scale, const float* bias, int activation, Y* y, long rows, long first, long outputs,
    long row = NR
) {
  alignas(64) float factor[NR], offset[NR], result[NR];
  const int count = std::min<long>(NR, outputs - first);
  std::fill(factor, factor + NR, 1.0f);
  std::fill(offset, offset + NR, 0.0f);
  if (scale) std::copy(scale + first, scale + first + count, factor);
  if (bias) std::copy(bias + first, bias + first + count, offset);
  for (long m = 0; m < rows; m++, sums += row, y += outputs) {
    for (int j = 0; j < NR; j += V)
      *(floats*)(result + j) =
          activated(*(any_floats*)(sums + j) * *(floats*)(factor + j) + *(floats*)(offset + j), activation);
    if (count == NR)
      for (int j = 0; j < NR; j++) y[first + j] = result[j];
    else
      for (int j = 0; j < count; j++) y[first + j] = result[j];
  }
}

// x [rows, inputs] float32, or bfloat16 with such weights where the processor multiplies pairs of them.
template <class X, class T, class Y>
static void linear(
    const X* x, const T* w, const float* scale, const float* bias, int activation, Y* y, long rows, long inputs,
    long outputs, int threads
) {
  constexpr bool as_they_are = std::is_same_v<T, float> || std::is_same_v<X, bfloat16>;  // else weights are widened, once for all tiles
  const long num_panels = (outputs + NR - 1) / NR, panel = padded<T>(inputs) * NR;
  if (rows <= FEW_ROWS) {
    constexpr int P = PANELS;
    const long groups = (num_panels + P - 1) / P;
#pragma omp parallel for num_threads(allowed(threads)) schedule(guided)
    for (long group = 0; group < groups; group++) {
      alignas(64) float sums[FEW_ROWS * P * NR];
      const long first = group * P;
      const int here = std::min<long>(P, num_panels - first), each = here == P ? P : 1;
      const T* own = w + first * panel;
      if (here == P)
        rows_tile<FEW_ROWS, P>(rows, x, inputs, own, panel, sums, inputs, true, (const T*)nullptr);
      else
        for (int p = 0; p < here; p++)
          rows_tile<FEW_ROWS>(rows, x, inputs, own + p * panel, 0, sums + p * rows * NR, inputs, true, (const T*)nullptr);
      for (int p = 0; p < here; p++)
        finish(
            sums + p * (here == P ? 1 : rows) * NR, scale, bias, activation, y, rows, (first + p) * NR, outputs, each * NR
        );
    }
    return;
  }
  // Rows go through the panels in blocks whose inputs stay in the second cache, and a block in tiles, as equal as possible: 8 rows
  // are 4 and 4, not 6 and 2.
  const long num_tiles = (rows + MR - 1) / MR, num_blocks = std::max(1L, rows * inputs / BLOCK);
  const auto row_of = [&](long tile) { return tile * rows / num_tiles; };
#pragma omp parallel num_threads(allowed(threads))
  {
    float* sums = new float[rows * NR];
    alignas(64) float wide[KC * NR];
#pragma omp for schedule(guided, 2)
    for (long item = 0; item < num_blocks * num_panels; item++) {
      const long block = item / num_panels, p = item % num_panels;
      const long begin = block * num_tiles / num_blocks, end = (block + 1) * num_tiles / num_blocks;
      const T* own = w + p * panel;
      if (rows <= MR)
        rows_tile(rows, x, inputs, own, 0, sums, inputs, true, rows < CALLING_ROWS ? (const T*)nullptr : own + AHEAD * NR);
      else
        for (long k = 0; k < inputs; k += KC) {
          const int count = std::min<long>(KC, inputs - k);
          const auto all_tiles = [&](const auto* weights, const auto* prefetch) {
            for (long t = begin; t < end; t++) {
              const long low = row_of(t);
              rows_tile(
                  row_of(t + 1) - low, x + low * inputs + k, inputs, weights, 0, sums + low * NR, count, k == 0,
                  t == begin + 1 ? prefetch : nullptr
              );
            }
          };
          if constexpr (as_they_are)
            all_tiles(own + k * NR, own + (k + KC) * NR);
          else {
            for (int i = 0; i < count; i += SIDE<T>) unpack_weights(own + (k + i) * NR, (floats(*)[2])(wide + i * NR));
            all_tiles((const float*)wide, (const float*)nullptr);
          }
        }
      const long low = row_of(begin);
      finish(sums + low * NR, scale, bias, activation, y + low * outputs, row_of(end) - low, p * NR, outputs);
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

// Matrices of 16 rows of 64 bytes in registers of their own (AMX), which multiply 8 bits some times as fast as vectors do: a group of inputs is a row
// of one. Integers are exact, so the numbers are the same.
#if defined(__AVX512F__) && (defined(EMULATED_TILES) || (defined(__AMX_INT8__) && defined(__linux__)))
#define TILES 1
constexpr int TILE_ROWS = 16;
#if defined(EMULATED_TILES)  // what the manual says that they do, for tests on processors that have none
static thread_local int8_t tile_registers[8][TILE_ROWS * 64];
extern "C" {
long num_tile_products = 0;
}
static void TILE_LOAD(int to, const void* from, long stride) {
  for (int row = 0; row < TILE_ROWS; row++) std::memcpy(tile_registers[to] + row * 64, (const char*)from + row * stride, 64);
}
static void TILE_STORE(int from, void* to, long stride) {
  for (int row = 0; row < TILE_ROWS; row++) std::memcpy((char*)to + row * stride, tile_registers[from] + row * 64, 64);
}
static void TILE_ZERO(int tile) { std::memset(tile_registers[tile], 0, sizeof tile_registers[tile]); }
static void TILE_DOT(int sums, int a, int b) {
  num_tile_products++;
  for (int m = 0; m < TILE_ROWS; m++)
    for (int n = 0; n < 16; n++) {
      int32_t sum;
      std::memcpy(&sum, tile_registers[sums] + m * 64 + n * 4, 4);
      for (int k = 0; k < 64; k++) sum += tile_registers[a][m * 64 + k] * tile_registers[b][k / 4 * 64 + n * 4 + k % 4];
      std::memcpy(tile_registers[sums] + m * 64 + n * 4, &sum, 4);
    }
}
static void begin_tiles() {}
static void end_tiles() {}
static bool ask_for_tiles() { return true; }
#else
#define TILE_LOAD(to, from, stride) _tile_loadd(to, from, stride)
#define TILE_STORE(from, to, stride) _tile_stored(from, to, stride)
#define TILE_ZERO(tile) _tile_zero(tile)
#define TILE_DOT(sums, a, b) _tile_dpbssd(sums, a, b)
// In each thread: all registers hold whole matrices.
static void begin_tiles() {
  struct {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  for (int tile = 0; tile < 8; tile++) config.row_bytes[tile] = 64, config.rows[tile] = TILE_ROWS;
  _tile_loadconfig(&config);
}
static void end_tiles() { _tile_release(); }
// The system lets a process have these registers when it asks (Linux 5.16, ARCH_REQ_XCOMP_PERM for XTILEDATA).
static bool ask_for_tiles() { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }
#endif
#else
#define TILES 0
constexpr int TILE_ROWS = 1;
#endif

// How inputs are held: LANES lanes for four of them.
struct Bits8 {
  static constexpr int LANES = 1, QUADS = 16, UNIT = QUAD, START = -OFFSET, ROWS = V == 16 ? 8 : MR, KEPT = V == 16 ? 6 : 0;
  static constexpr float MOST = 127;
  static inline void pack(const int* k, int count, int32_t* lanes) {
    int8_t narrow[QUADS * QUAD];
    for (int i = 0; i < QUADS * QUAD; i++) narrow[i] = k[i];
    __builtin_memcpy(lanes, narrow, (count + QUAD - 1) / QUAD * QUAD);
  }
  static inline void unpack(ints weights, ints out[LANES]) { out[0] = weights; }
  static inline ints dot(ints sum, ints weights, int32_t inputs) { return dot4(sum, weights, inputs); }
};

struct Bits16 {
  static constexpr int LANES = 2, QUADS = 64, UNIT = QUAD, START = 0, ROWS = V == 16 ? MR : 4, KEPT = 0;
  static constexpr float MOST = 32767;
  static inline void pack(const int* k, int count, int32_t* lanes) {
    for (int i = 0; i < count; i += QUAD) {
      *lanes++ = (k[i] & 65535) | k[i + 2] << 16;
      *lanes++ = (k[i + 1] & 65535) | k[i + 3] << 16;
    }
  }
  static inline void unpack(ints weights, ints out[LANES]) {
    out[0] = (ints)((shorts)weights << 8 >> 8);
    out[1] = (ints)((shorts)weights >> 8);
  }
  static inline ints dot(ints sum, ints weights, int32_t inputs) { return dot2(sum, weights, inputs); }
};

constexpr int SPARE_ROWS = TILE_ROWS - 1;  // behind the last one: a tile reads whole ones

// Rows of inputs as integers. `lanes` [rows, row], `scale` and `start` [rows, groups]: what an integer of a group is worth, and
// where the sum of the group begins.
template <class Bits> struct Integers {
  static constexpr int GROUP = Bits::QUADS * QUAD;
  long row, groups;
  std::vector<int32_t> lanes, start;
  std::vector<float> scale;

  // The inputs, taken in `order` if there is one, lie in spans of `width`: a group has no numbers of two of them. The lanes of each span
  // are filled up with zeros to whole `UNIT`s.
  template <class X> Integers(const X* x, long rows, long inputs, long width, const int32_t* order, int threads)
      : row((inputs + width - 1) / width * padded(width) / QUAD * Bits::LANES),
        groups((inputs + width - 1) / width * each(width)), lanes((rows + SPARE_ROWS) * row), start(rows * groups), scale(rows * groups) {
#pragma omp parallel for num_threads(allowed(threads)) if (rows * inputs > 65536)
    for (long m = 0; m < rows; m++)
      for (long g = 0; g < groups; g++) {
        const long first = g / each(width) * width + g % each(width) * GROUP;
        const long end = std::min(inputs, (g / each(width) + 1) * width), count = std::min<long>(GROUP, end - first);
        if (count > 0) group(x + m * inputs, order, first, count, m * groups + g, &lanes[m * row + place(width, g) / QUAD * Bits::LANES]);
      }
  }

  static long padded(long width) { return (width + Bits::UNIT - 1) / Bits::UNIT * Bits::UNIT; }
  static long each(long width) { return (width + GROUP - 1) / GROUP; }  // groups in a span
  static long place(long width, long g) { return g / each(width) * padded(width) + g % each(width) * GROUP; }

  template <class X> void group(const X* x, const int32_t* order, long first, int count, long index, int32_t* out) {
    float values[GROUP] = {};
    int whole[GROUP];
    int32_t most_bits = 0, total = 0;
    if (!order && count == GROUP)
      for (int i = 0; i < GROUP; i++) values[i] = x[first + i];
    else
      for (int i = 0; i < count; i++) values[i] = x[order ? order[first + i] : first + i];
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
    Bits::pack(whole, count, out);
    scale[index] = most / Bits::MOST;
    start[index] = Bits::START * total;
  }
};

// Rows go through a panel in tiles, as equal as possible. What fits into one tile reads the weights once; more rows go in tiles whose totals stay in
// registers, where groups are so short that this matters.
template <class Bits> static long tiles_of(long rows) {
  const long most = rows <= Bits::ROWS || !Bits::KEPT ? Bits::ROWS : Bits::KEPT;
  return (rows + most - 1) / most;
}

// M rows times a panel. `sums` [M, NR] is written; weights `ahead` bytes further on are asked for, if not 0. A function of its own: the compiler keeps its sums in registers then, and, where there are enough
// of them, what the groups before came to as well.
template <int M, class Bits>
__attribute__((noinline)) static void integer_tile(const Integers<Bits>& x, long first, const int8_t* w, long quads, float* sums, long ahead) {
  constexpr bool IN_REGISTERS = M <= Bits::KEPT;
  const int32_t *lanes = &x.lanes[first * x.row], *start = &x.start[first * x.groups];
  const float* scale = &x.scale[first * x.groups];
  const long row = x.row, groups = x.groups;
  floats total[IN_REGISTERS ? M : 0][2] = {};
  if (!IN_REGISTERS) std::fill_n(sums, M * NR, 0.0f);
  for (long g = 0; g < groups; g++, quads -= Bits::QUADS) {
    ints sum[M][2];
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) sum[m][0] = sum[m][1] = ints{} + start[m * groups + g];
    for (const int8_t* end = w + std::min<long>(Bits::QUADS, quads) * QUAD * NR; w < end; w += QUAD * NR, lanes += Bits::LANES) {
      if (V < 16 && M > 1)
        for (int line = 0; line < QUAD * NR; line += 64) __builtin_prefetch(w + 64 * AHEAD + line);
      if (ahead)
        for (int line = 0; line < QUAD * NR; line += 64) __builtin_prefetch(w + ahead + line, 0, CALLED_CACHE);
      ints weights[2][Bits::LANES];
      for (int half = 0; half < 2; half++) Bits::unpack(*(const any_ints*)(w + half * V * QUAD), weights[half]);
#pragma GCC unroll 16
      for (int m = 0; m < M; m++)
        for (int i = 0; i < Bits::LANES; i++)
          for (int half = 0; half < 2; half++) sum[m][half] = Bits::dot(sum[m][half], weights[half][i], lanes[m * row + i]);
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
      for (int half = 0; half < 2; half++) {
        const floats more = __builtin_convertvector(sum[m][half], floats) * scale[m * groups + g];
        if constexpr (IN_REGISTERS) total[m][half] += more;
        else *(any_floats*)(sums + m * NR + half * V) += more;
      }
  }
  if constexpr (IN_REGISTERS)
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
      for (int half = 0; half < 2; half++) *(any_floats*)(sums + m * NR + half * V) = total[m][half];
}

// `integer_tile` for a number of rows that is only known now, 1 to Bits::ROWS.
template <class Bits, int M = Bits::ROWS>
static void integer_rows(int rows, const Integers<Bits>& x, long first, const int8_t* w, long quads, float* sums, long ahead) {
  if constexpr (M > 1)
    if (rows < M) return integer_rows<Bits, M - 1>(rows, x, first, w, quads, sums, ahead);
  integer_tile<M, Bits>(x, first, w, quads, sums, ahead);
}

#if TILES
// TILE_ROWS rows times a panel, by tiles: groups are whole. `sums` [count, NR] is written.
static void tile_rows(const Integers<Bits8>& x, long first, int count, const int8_t* w, float* sums) {
  alignas(64) int32_t whole[2][TILE_ROWS * V];
  std::fill_n(sums, count * NR, 0.0f);
  __asm__ volatile("" ::: "memory");  // the compiler does not know what loading a tile reads
  for (long g = 0; g < x.groups; g++, w += Bits8::QUADS * QUAD * NR) {
    TILE_LOAD(2, &x.lanes[first * x.row + g * Bits8::QUADS], x.row * 4);
    TILE_LOAD(3, w, QUAD * NR);
    TILE_LOAD(4, w + 64, QUAD * NR);
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_DOT(0, 2, 3);
    TILE_DOT(1, 2, 4);
    TILE_STORE(0, whole[0], 64);
    TILE_STORE(1, whole[1], 64);
    for (int m = 0; m < count; m++)
      for (int half = 0; half < 2; half++)
        *(any_floats*)(sums + m * NR + half * V) +=
            __builtin_convertvector(*(const ints*)(whole[half] + m * V), floats) * x.scale[(first + m) * x.groups + g];
  }
}

// Do tiles give what they should? A processor or a system that has something against them ends here, and nowhere else.
static bool tiles_work() {
  const int8_t values[] = {127, -127, -1, 3, 0};
  std::vector<float> input(TILE_ROWS * 64);
  std::vector<int8_t> w(64 * NR);
  for (size_t i = 0; i < input.size(); i++) input[i] = i % 64 ? values[i % 5] : 127;
  for (size_t i = 0; i < w.size(); i++) w[i] = values[i % 3];
  const Integers<Bits8> x(input.data(), TILE_ROWS, 64, 64, nullptr, 1);
  float sums[TILE_ROWS * NR], wanted[NR];
  begin_tiles();
  tile_rows(x, 0, TILE_ROWS, w.data(), sums);
  end_tiles();
  for (int m = 0; m < TILE_ROWS; m++) {
    integer_tile<1, Bits8>(x, m, w.data(), Bits8::QUADS, wanted, 0);
    if (std::memcmp(wanted, sums + m * NR, sizeof wanted)) return false;
  }
  return true;
}

#if defined(EMULATED_TILES)
static bool may_use_tiles() { return tiles_work(); }
#else
static sigjmp_buf no_tiles;
static bool may_use_tiles() {
  if (!ask_for_tiles()) return false;
  struct sigaction own = {}, before;
  own.sa_handler = [](int) { siglongjmp(no_tiles, 1); };
  sigaction(SIGILL, &own, &before);
  const bool work = sigsetjmp(no_tiles, 1) == 0 && tiles_work();
  sigaction(SIGILL, &before, nullptr);
  return work;
}
#endif

template <class X>
static bool tile_linear(
    const Integers<Bits8>& x, const int8_t* w, const float* scale, const float* bias, int activation, X* y, long rows, long quads, long outputs,
    int threads
) {
  static const bool usable = may_use_tiles();
  if (rows <= Bits8::ROWS || quads % Bits8::QUADS || !usable) return false;
  const long num_panels = (outputs + NR - 1) / NR;
#pragma omp parallel num_threads(allowed(threads))
  {
    begin_tiles();
#pragma omp for schedule(guided, 2)
    for (long p = 0; p < num_panels; p++)
      for (long low = 0; low < rows; low += TILE_ROWS) {
        alignas(64) float sums[TILE_ROWS * NR];
        const int here = std::min<long>(TILE_ROWS, rows - low);
        tile_rows(x, low, here, w + p * quads * QUAD * NR, sums);
        finish(sums, scale, bias, activation, y + low * outputs, here, p * NR, outputs);
      }
    end_tiles();
  }
  return true;
}
#endif

template <class Bits, class X>
static void integer_linear(
    const X* input, const int8_t* w, const float* scale, const float* bias, int activation, X* y, long rows, long inputs,
    long outputs, int threads
) {
  const Integers<Bits> x(input, rows, inputs, inputs, nullptr, threads);
  const long num_panels = (outputs + NR - 1) / NR, quads = (inputs + QUAD - 1) / QUAD, num_tiles = tiles_of<Bits>(rows);
#if TILES
  if constexpr (std::is_same_v<Bits, Bits8>)
    if (tile_linear(x, w, scale, bias, activation, y, rows, quads, outputs, threads)) return;
#endif
#pragma omp parallel for num_threads(allowed(threads)) schedule(guided, 2)
  for (long p = 0; p < num_panels; p++)
    for (long t = 0; t < num_tiles; t++) {
      alignas(64) float sums[Bits::ROWS * NR];
      const long low = t * rows / num_tiles, here = (t + 1) * rows / num_tiles - low;
      integer_rows<Bits>(here, x, low, w + p * quads * QUAD * NR, quads, sums, V == 16 && t == 1 ? quads * QUAD * NR : 0);
      finish(sums, scale, bias, activation, y + low * outputs, here, p * NR, outputs);
    }
}

// Products of int4 weights
//
// w[n, k] = scale[n, group of k] * (code[n, k] - zero[n, group of k]), codes from 0 to 15, groups of `width` neighbours. The inputs become integers
// of 8 bits, in groups of their own within those: the sum of input * code is exact, and so is what is subtracted from it, zero * the
// sum of inputs. What a group is worth is added as float32, in the order of k.
//
// A panel holds OCTET values of k side by side for each output, in a lane of 32 bits: byte i has the codes of k = i, in its low half, and
// of k = i + 4. So one mask gives four bytes to multiply, and a shift and a mask the other four.

constexpr int OCTET = 8;

struct Codes : Bits8 {
  static constexpr int UNIT = OCTET, START = 1;  // a group starts with the sum of its inputs
  static constexpr int ROWS = V == 16 ? 8 : MR > 6 ? MR : 4;
};

// Adds to each lane the products of its eight codes and eight inputs.
static inline ints dot8(ints sum, ints low, ints high, int32_t first, int32_t last) {
#if defined(__ARM_FEATURE_DOTPROD)
  sum = (ints)vdotq_s32((int32x4_t)sum, (int8x16_t)low, vreinterpretq_s8_s32(vdupq_n_s32(first)));
  return (ints)vdotq_s32((int32x4_t)sum, (int8x16_t)high, vreinterpretq_s8_s32(vdupq_n_s32(last)));
#elif defined(__AVX512F__) && defined(__AVX512VNNI__)
  sum = (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)low, _mm512_set1_epi32(first));
  return (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)high, _mm512_set1_epi32(last));
#elif !defined(__AVX512F__) && defined(__AVXVNNI__)
  sum = (ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)low, _mm256_set1_epi32(first));
  return (ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)high, _mm256_set1_epi32(last));
#elif defined(__AVX512BW__)  // four products of 15 * 127 at most fit into 16 bits
  const __m512i pairs = _mm512_add_epi16(
      _mm512_maddubs_epi16((__m512i)low, _mm512_set1_epi32(first)), _mm512_maddubs_epi16((__m512i)high, _mm512_set1_epi32(last)));
  return sum + (ints)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif !defined(__AVX512F__) && defined(__AVX2__)
  const __m256i pairs = _mm256_add_epi16(
      _mm256_maddubs_epi16((__m256i)low, _mm256_set1_epi32(first)), _mm256_maddubs_epi16((__m256i)high, _mm256_set1_epi32(last)));
  return sum + (ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
  for (int i = 0; i < QUAD; i++)
    sum += (low >> 8 * i & 15) * int32_t(int8_t(first >> 8 * i)) + (high >> 8 * i & 15) * int32_t(int8_t(last >> 8 * i));
  return sum;
#endif
}

// What all panels have in common. `scale` and `zero` are [panels, groups, NR].
struct Int4 {
  const uint8_t* codes;
  const float* scale;
  const uint8_t* zero;
  long panel, groups, each, padded;  // bytes of codes in a panel; groups of weights; groups of inputs in one; k in one, with zeros behind
};

typedef uint8_t bytes __attribute__((vector_size(V)));

// M rows times panel p, with `each` groups of inputs in a group of weights that is `padded` wide. `sums` [M, NR] is written.
template <int M>
__attribute__((noinline)) static void code_tile(const Integers<Codes>& x, const Int4& a, long first, long p, float* sums) {
  constexpr bool IN_REGISTERS = M <= Codes::KEPT;
  const int32_t *lanes = &x.lanes[first * x.row], *start = &x.start[first * x.groups];
  const float* worth = &x.scale[first * x.groups];
  const uint8_t* w = a.codes + p * a.panel;
  const long row = x.row, groups = x.groups;
  floats total[IN_REGISTERS ? M : 0][2] = {};
  if (!IN_REGISTERS) std::fill_n(sums, M * NR, 0.0f);
  for (long g = 0; g < groups; g++) {
    const long inner = g % a.each, place = (p * a.groups + g / a.each) * NR;
    const uint8_t* end = w + std::min<long>(Integers<Codes>::GROUP, a.padded - inner * Integers<Codes>::GROUP) / OCTET * NR * 4;
    ints sum[M][2] = {};
    for (; w < end; w += NR * 4, lanes += 2) {
      if (V < 16) __builtin_prefetch(w + AHEAD * NR * 4);  // with AVX-512 it won nothing
      for (int half = 0; half < 2; half++) {
        const ints both = *(const any_ints*)(w + half * V * 4);
        const ints low = both & 0x0f0f0f0f, high = both >> 4 & 0x0f0f0f0f;
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) sum[m][half] = dot8(sum[m][half], low, high, lanes[m * row], lanes[m * row + 1]);
      }
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      bytes zero;
      __builtin_memcpy(&zero, a.zero + place + half * V, V);
      const ints zeros = __builtin_convertvector(zero, ints);
      const floats scale = *(const any_floats*)(a.scale + place + half * V);
#pragma GCC unroll 16
      for (int m = 0; m < M; m++) {
        const long index = m * groups + g;
        const floats more = __builtin_convertvector(sum[m][half] - zeros * start[index], floats) * (scale * worth[index]);
        if constexpr (IN_REGISTERS) total[m][half] += more;
        else *(any_floats*)(sums + m * NR + half * V) += more;
      }
    }
  }
  if constexpr (IN_REGISTERS)
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
      for (int half = 0; half < 2; half++) *(any_floats*)(sums + m * NR + half * V) = total[m][half];
}

// `code_tile` for a number of rows that is only known now, 1 to Codes::ROWS.
template <int M = Codes::ROWS>
static void code_rows(int rows, const Integers<Codes>& x, const Int4& a, long first, long p, float* sums) {
  if constexpr (M > 1)
    if (rows < M) return code_rows<M - 1>(rows, x, a, first, p, sums);
  code_tile<M>(x, a, first, p, sums);
}

template <class X>
static void int4_linear(
    const X* input, const uint8_t* w, const float* scale, const uint8_t* zero, const int32_t* order, const float* bias,
    int activation, X* y, long rows, long inputs, long outputs, long width, int threads
) {
  typedef Integers<Codes> Inputs;
  const Inputs x(input, rows, inputs, width, order, threads);
  const long num_panels = (outputs + NR - 1) / NR, groups = (inputs + width - 1) / width, num_tiles = tiles_of<Codes>(rows);
  const long wide = Inputs::padded(width);
  const Int4 a = {w, scale, zero, groups * wide * NR / 2, groups, Inputs::each(width), wide};
#pragma omp parallel for num_threads(allowed(threads)) schedule(guided, 2)
  for (long p = 0; p < num_panels; p++)
    for (long t = 0; t < num_tiles; t++) {
      alignas(64) float sums[Codes::ROWS * NR];
      const long low = t * rows / num_tiles, here = (t + 1) * rows / num_tiles - low;
      code_rows(here, x, a, low, p, sums);
      finish(sums, nullptr, bias, activation, y + low * outputs, here, p * NR, outputs);
    }
}

// codes [outputs, inputs], one to a byte; what lies past the last is zeros.
static void pack_codes(const uint8_t* codes, uint8_t* packed, long inputs, long outputs, long width, int threads) {
  typedef Integers<Codes> Inputs;
  const long num_panels = (outputs + NR - 1) / NR, groups = (inputs + width - 1) / width, panel = groups * Inputs::padded(width) * NR / 2;
#pragma omp parallel for num_threads(allowed(threads))
  for (long p = 0; p < num_panels; p++) {
    std::fill_n(packed + p * panel, panel, 0);
    for (int j = 0; j < std::min<long>(NR, outputs - p * NR); j++)
      for (long k = 0; k < inputs; k++) {
        const long at = k / width * Inputs::padded(width) + k % width;
        packed[p * panel + (at / OCTET * NR + j) * 4 + at % 4] |= codes[(p * NR + j) * inputs + k] << at % OCTET / 4 * 4;
      }
  }
}

// w [outputs, inputs], each row `row` and each column `column` numbers from the next; what lies past the last is zeros.
template <class T>
static void pack(const T* w, long row, long column, T* packed, long inputs, long outputs, int threads) {
  constexpr int S = SIDE<T>;
  const long num_panels = (outputs + NR - 1) / NR, all = padded<T>(inputs);
#pragma omp parallel for num_threads(allowed(threads))
  for (long p = 0; p < num_panels; p++)
    for (long k = 0; k < all; k++)
      for (int j = 0; j < NR; j++) {
        const long n = p * NR + j;
        packed[p * all * NR + (k / S * NR + j) * S + k % S] = n < outputs && k < inputs ? w[n * row + k * column] : T(0);
      }
}

template <class X>
static void widen(const X* x, float* out, long count, int threads) {
#pragma omp parallel for num_threads(allowed(threads)) if (count > 65536)
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
    if constexpr (PAIRS && std::is_same_v<T, bfloat16>) return linear(x, w, scale, bias, activation, y, rows, inputs, outputs, threads); \
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
#define INT4_LINEAR(X, NAME) \
  void linear_##NAME(const X* x, const uint8_t* w, const float* scale, const uint8_t* zero, const int32_t* order, const float* bias, \
                     int activation, X* y, long rows, long inputs, long outputs, long width, int threads) { \
    int4_linear(x, w, scale, zero, order, bias, activation, y, rows, inputs, outputs, width, threads); \
  }
LINEAR(float, float32)
LINEAR(bfloat16, bfloat16)
PACK(int8_t, int8)
INTEGER_LINEAR(float, int8_by_8, Bits8)
INTEGER_LINEAR(bfloat16, int8_by_8_bf16, Bits8)
INTEGER_LINEAR(float, int8_by_16, Bits16)
INTEGER_LINEAR(bfloat16, int8_by_16_bf16, Bits16)
INT4_LINEAR(float, int4)
INT4_LINEAR(bfloat16, int4_bf16)

long int4_bytes(long inputs, long outputs, long width) {
  return (outputs + NR - 1) / NR * ((inputs + width - 1) / width) * Integers<Codes>::padded(width) * NR / 2;
}

void pack_int4(const uint8_t* codes, uint8_t* packed, long inputs, long outputs, long width, int threads) {
  pack_codes(codes, packed, inputs, outputs, width, threads);
}
}

static inline floats load(const float* x) { return *(const any_floats*)x; }

static inline void store(float* to, floats x) { *(any_floats*)to = x; }

// Codes: numbers of 8 bits in the KV cache
//
// A block of codes is [block_size, kv_heads, dim], and behind it are float32 scales [block_size, kv_heads], if the format has any. Rounding
// is to the nearest, ties to even, as in torch: what is written, and what is read, is the slow twin's, bit for bit.

static inline ints widen(const int8_t* codes) {  // V of them
#if defined(__AVX512F__)
  return (ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)codes));
#elif defined(__AVX2__)
  return (ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)codes));
#else  // compilers widen a vector of bytes one by one
  ints wide;
  for (int i = 0; i < V; i++) wide[i] = codes[i];
  return wide;
#endif
}

struct Int8 {
  static constexpr float LARGEST = 127.0f;
  static floats decode(ints code) { return __builtin_convertvector(code, floats); }
  static int8_t encode(float x) { return int8_t(std::nearbyint(x)); }
};

// A sign, E bits of an exponent, M of a mantissa. Above LARGEST there is NaN, and in E5M2 infinity, which is never written.
template <int E, int M> struct Fp8 {
  static constexpr int BIAS = (1 << (E - 1)) - 1, LAST = E == 4 ? 0x7e : 0x7b;  // the code of LARGEST
  static constexpr float LARGEST = E == 4 ? 448.0f : 57344.0f, SMALLEST_NORMAL = 1.0f / (1 << (BIAS - 1));

  static floats decode(ints code) {
    const ints rest = code & 0x7f, bits = rest << (23 - M);
    // Without an exponent the mantissa counts in steps: it gets the smallest normal number's exponent, and loses that number again.
    const floats normal = (floats)(bits + ((127 - BIAS) << 23)), below = (floats)(bits + ((128 - BIAS) << 23)) - SMALLEST_NORMAL;
    floats x = rest < (1 << M) ? below : normal;
    x = rest > LAST ? floats{} + NAN : x;
    return (floats)((ints)x | (code & 0x80) << 24);
  }

  static int8_t encode(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint32_t sign = bits >> 24 & 0x80;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return int8_t(sign | 0x7f);  // NaN
    if (std::fabs(x) < SMALLEST_NORMAL) return int8_t(sign | uint32_t(std::nearbyint(std::fabs(x) * (1 << (BIAS - 1 + M)))));
    bits += (1u << (22 - M)) - 1 + (bits >> (23 - M) & 1);
    return int8_t(sign | ((bits >> (23 - M)) - ((127 - BIAS) << M)));
  }
};

// One head of one token as float32, times its scale, with zeros up to `wide`.
template <class F> static void decode_head(const int8_t* codes, float scale, float* to, long dim, long wide) {
  for (long d = 0; d < wide; d += V) {
    int8_t tail[V] = {};
    if (d + V > dim) std::copy(codes + std::min(d, dim), codes + dim, tail);
    store(to + d, F::decode(widen(d + V > dim ? tail : codes + d)) * scale);
  }
}

template <class F> static void encode_head(const float* x, int8_t* codes, float* scale, long dim) {
  float step = 1.0f;
  if (scale) {
    float peak = 0.0f;
    for (long d = 0; d < dim && peak == peak; d++) peak = std::fabs(x[d]) <= peak ? peak : std::fabs(x[d]);  // NaN stays
    step = peak / F::LARGEST;
    *scale = step = step < 1.17549435e-38f ? 0.0f : step;
  }
  for (long d = 0; d < dim; d++) {
    float number = step == 0.0f ? 0.0f : x[d] / step;
    number = number > F::LARGEST ? F::LARGEST : number;
    codes[d] = F::encode(number < -F::LARGEST ? -F::LARGEST : number);
  }
}

struct Coding {
  void (*decode)(const int8_t* codes, float scale, float* to, long dim, long wide);
  void (*encode)(const float* x, int8_t* codes, float* scale, long dim);
};
static const Coding CODINGS[] = {
    {decode_head<Int8>, encode_head<Int8>},
    {decode_head<Fp8<4, 3>>, encode_head<Fp8<4, 3>>},
    {decode_head<Fp8<5, 2>>, encode_head<Fp8<5, 2>>},
};

// Paged attention
//
// The cache of one layer's keys, and that of its values, is [num_blocks, block_size, kv_heads, dim], or codes as above; a request's blocks
// are in its row of the block table. An item of work is a tile of query rows of one request that read the same key/value head; where these are
// few, as in decodes, those of several heads, so that memory is read in the order in which it lies. It
// runs through the context in spans of SPAN positions: the keys of a span are copied side by side, then its values, and each row takes
// what it sees of them. For many rows the keys are turned besides, so that a vector holds a number of each of V keys: no sums over lanes. All are float32 then, unless the processor multiplies pairs of bfloat16: then the weights of values have 8 bits too. The softmax is the online one (Milakov and Gimelshein 2018; FlashAttention, Dao et al.
// 2022): no score is kept longer than its span. Source of the tiles: FlashAttention-2, Dao 2023.
//
// Spans begin at fixed positions, every sum has one order, and rows share nothing but the copies: so a row's result does not
// depend, in any bit, on the rest of its chunk or of the batch.

constexpr int SPAN = 64, TILE = 128;
constexpr int KEYS = V < 8 ? 8 : V;  // scored side by side: enough sums that no multiply-add waits for the one before
constexpr int ROWS = 3;  // mixed side by side
constexpr int MIN_MEMBERS = 4;  // so many requests share what they read
constexpr int MANY = 8;  // with so many rows it pays to turn the keys
constexpr int FEW = 3;  // with so few rows the copies cost more than they save: keys and values are taken where they lie

template <class T> using Kept = std::conditional_t<PAIRS, T, float>;  // what numbers of a cache of T are while they are used

#if defined(__has_builtin) && __has_builtin(__builtin_shufflevector)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, ints{__VA_ARGS__})
#endif

// Half of a and half of b, each number added to its neighbour: pairs within 4 lanes for W = 0, else stretches of W lanes.
template <int W, int... J>
static inline floats fold(floats a, floats b, std::integer_sequence<int, J...>) {
  if constexpr (W == 0)
    return SHUFFLE(a, b, (J / 4 * 4 + J % 2 * 2 + (J % 4 < 2 ? 0 : V))...) +
           SHUFFLE(a, b, (J / 4 * 4 + J % 2 * 2 + (J % 4 < 2 ? 0 : V) + 1)...);
  else
    return SHUFFLE(a, b, (J % (2 * W) < W ? J : J - W + V)...) + SHUFFLE(a, b, (J % (2 * W) < W ? J + W : J + V)...);
}

static inline floats fused(floats sum, floats x, floats y) {  // sum + x * y, rounded once where the processor can
#if defined(__AVX512F__)
  return (floats)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)sum);
#elif defined(__FMA__)
  return (floats)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)sum);
#elif defined(__aarch64__)
  return (floats)vfmaq_f32((float32x4_t)sum, (float32x4_t)x, (float32x4_t)y);
#else
  return sum + x * y;
#endif
}

// The sums over the lanes of V vectors, as one vector.
static inline floats lane_sums(floats* x) {
  constexpr auto lanes = std::make_integer_sequence<int, V>();
  for (int i = 0; i < V / 2; i++) x[i] = fold<0>(x[2 * i], x[2 * i + 1], lanes);
  for (int i = 0; i < V / 4; i++) x[i] = fold<0>(x[2 * i], x[2 * i + 1], lanes);
  if constexpr (V >= 8)
    for (int i = 0; i < V / 8; i++) x[i] = fold<4>(x[2 * i], x[2 * i + 1], lanes);
  if constexpr (V >= 16) x[0] = fold<8>(x[0], x[1], lanes);
  return x[0];
}

// What requests of one token each that begin with the same blocks have in common. It is read once for all of them (as in cascade attention, but
// nothing is merged: each row goes on where it is, so no bit changes).
struct Prefixes {
  struct Group {
    std::vector<long> members;  // requests
    long end;  // their common positions are 0 to `end`
  };
  std::vector<Group> groups;
  std::vector<long> end, place;  // of each request: how much of it is read so, and where its state is
  std::vector<float> states;  // of each member and query head: its sums, largest score and total
};

template <class T> struct Attention {
  const T* query;  // [num_tokens, heads, dim], `query_row` numbers from token to token
  const T *keys, *values;
  T* out;  // [num_tokens, heads, dim]
  const int32_t *starts, *lengths, *table;  // first query row and length of the context of each request; its blocks
  long query_row, table_row, block_size, heads, kv_heads, dim, window;
  float scale;
  const Coding* coding = nullptr;  // keys and values are codes, whatever their type says
  long scale_bytes = 0;  // of one head of one token: 4 or 0
  Prefixes* prefixes = nullptr;

  long wide() const { return (dim + NR - 1) / NR * NR; }
  long read_before(long request) const { return prefixes->end[request]; }
  float* state(long request, long query_head) const {
    return prefixes->states.data() + (prefixes->place[request] * heads + query_head) * (wide() + 2);
  }

  // Where a head of a token lies.
  const T* place(const T* cache, int64_t block, long offset, long head) const {
    return cache + ((block * block_size + offset) * kv_heads + head) * dim;
  }

  // The same among codes, and where its scale lies.
  template <class P> P* code_place(P* cache, int64_t block, long offset, long head) const {
    return cache + block * (block_size * kv_heads * (dim + scale_bytes)) + (offset * kv_heads + head) * dim;
  }
  template <class P> P* scale_place(P* cache, int64_t block, long offset, long head) const {
    return cache + (block + 1) * (block_size * kv_heads * (dim + 4)) + ((offset - block_size) * kv_heads + head) * 4;
  }
};

// Positions low to high of some key/value heads of one request.
struct Region {
  const int32_t* blocks;
  long head, heads, low, high;
};

// Asks the memory for a region of a cache before it is read, some lines at a time. No processor guesses which block comes after one. Heads that lie
// side by side are asked for in one stretch, and into the second cache: the first has no room for a span of all heads.
template <class T> struct Caller {
  const Attention<T>& a;
  const T* cache;
  Region region;
  const char *next = nullptr, *end = nullptr;

  void call(long lines) {
    asm volatile("");  // GCC leaves out a function that does nothing else, as if it did nothing
    for (; lines > 0; lines--, next += 64) {
      if (next >= end && !more()) return;
      __builtin_prefetch(next, 0, 2);
    }
  }

  // To the next stretch.
  bool more() {
    if (region.low >= region.high) return false;
    const long size = a.coding ? 1 : sizeof(T), offset = region.low % a.block_size;
    const long count = region.heads < a.kv_heads ? 1 : std::min(a.block_size - offset, region.high - region.low);
    const int64_t block = region.blocks[region.low / a.block_size];
    next = a.coding ? (const char*)a.code_place((const int8_t*)cache, block, offset, region.head)
                    : (const char*)a.place(cache, block, offset, region.head);
    end = next + count * region.heads * a.dim * size;
    region.low += count;
    return true;
  }
};

// scores[k] = query . key k * scale for `count` keys, rounded up to whole vectors.
template <class Q, class K>
static inline void score(const Q* query, const K* keys, long stride, long wide, float scale, float* scores, int count) {
  for (int k = 0; k < count; k += KEYS) {
    floats sum[KEYS] = {};
    const K* key = keys + k * stride;
    for (long d = 0; d < wide; d += NR) {
      if constexpr (std::is_same_v<Q, bfloat16>) {
        const ints some = *(const any_ints*)(query + d);
        for (int i = 0; i < KEYS; i++) sum[i] = dot_pairs(sum[i], *(const any_ints*)(key + i * stride + d), some);
      } else {
        const floats low = load(query + d), high = load(query + d + V);
        for (int i = 0; i < KEYS; i++) {
          floats x[2];
          unpack(key + i * stride + d, x);
          sum[i] = fused(fused(sum[i], low, x[0]), high, x[1]);
        }
      }
    }
    for (int i = 0; i < KEYS; i += V) store(scores + k + i, lane_sums(sum + i) * scale);
  }
}

// The rows of V vectors become columns.
template <int W = V / 2, int... J> static inline void transpose(floats* x, std::integer_sequence<int, J...> lanes) {
  for (int i = 0; i < V; i++)
    if (!(i & W)) {
      const floats a = x[i], b = x[i + W];
      x[i] = SHUFFLE(a, b, (J & W ? J - W + V : J)...);
      x[i + W] = SHUFFLE(a, b, (J & W ? J + V : J + W)...);
    }
  if constexpr (W > 1) transpose<W / 2>(x, lanes);
}

// Keys [SPAN, wide] as units of 32 bits, a number or a pair, become [units, SPAN].
static inline void turn(const float* keys, float* turned, long units) {
  for (long k = 0; k < SPAN; k += V)
    for (long u = 0; u < units; u += V) {
      floats x[V];
      for (int i = 0; i < V; i++) x[i] = load(keys + (k + i) * units + u);
      transpose(x, std::make_integer_sequence<int, V>());
      for (int i = 0; i < V; i++) store(turned + (u + i) * SPAN + k, x[i]);
    }
}

// Lanes `lane` to lane + L - 1 of the sums of `score`, added up in the same order, for M queries and V keys.
template <class Q, int M, int L>
static inline void turned_sum(const int32_t* const* query, const float* keys, long units, int lane, floats* sum) {
  if constexpr (L == 1) {
    for (int m = 0; m < M; m++) sum[m] = floats{};
    for (long u = lane; u < units; u += V) {
      const floats some = load(keys + u * SPAN);
      for (int m = 0; m < M; m++) {
        const ints input = ints{} + query[m][u];
        if constexpr (std::is_same_v<Q, bfloat16>)
          sum[m] = dot_pairs(sum[m], (ints)some, input);
        else
          sum[m] = fused(sum[m], (floats)input, some);
      }
    }
  } else {
    floats other[M];
    turned_sum<Q, M, L / 2>(query, keys, units, lane, sum);
    turned_sum<Q, M, L / 2>(query, keys, units, lane + L / 2, other);
    for (int m = 0; m < M; m++) sum[m] += other[m];
  }
}

// `score` for M rows of queries and turned keys low to high: the same numbers, without sums over lanes.
template <class Q, int M>
static void score_turned(const Q* queries, const float* keys, long wide, float scale, float* scores, int low, int high) {
  const long units = wide * sizeof(Q) / 4;
  const int32_t* query[M];
  for (int m = 0; m < M; m++) query[m] = (const int32_t*)(queries + m * wide);
  for (int k = low; k < high; k += V) {
    floats sum[M];
    turned_sum<Q, M, V>(query, keys + k, units, 0, sum);
    for (int m = 0; m < M; m++) store(scores + m * SPAN + k, sum[m] * scale);
  }
}

// What bfloat16(x) stands for.
static inline floats to_bfloat16(floats x) {
  const ints bits = (ints)x;
  return x != x ? x : (floats)((bits + 0x7fff + (bits >> 16 & 1)) & -65536);
}

// The other way round than `unpack`.
static inline void repack(floats low, floats high, float* to) { store(to, low), store(to + V, high); }

static inline void repack(floats low, floats high, bfloat16* to) {
  *(any_ints*)to = ((ints)to_bfloat16(low) >> 16 & 0xffff) | (ints)to_bfloat16(high);
}

// Scores low to high become weights W in their place, relative to the largest score so far. Returns what earlier sums are multiplied by.
template <class W> static inline float weigh(float* scores, int low, int high, float& largest, float& total) {
  ints lane;
  for (int i = 0; i < V; i++) lane[i] = i;
  floats peak = floats{} + largest, sum = {};
  const floats never = floats{} - INFINITY;
  for (int k = low / V * V; k < high; k += V) {
    floats x = load(scores + k);
    if (k < low || k + V > high) {
      x = (lane + k >= low) & (lane + k < high) ? x : never;
      store(scores + k, x);
    }
    peak = x > peak ? x : peak;
  }
  float top = largest;
  for (int i = 0; i < V; i++) top = std::max(top, peak[i]);
  for (int k = low / V * V; k < high; k += V) {
    floats x = load(scores + k), weight = exp_of(x - top);
    weight = x == never ? floats{} : weight;
    if constexpr (std::is_same_v<W, bfloat16>) {  // a row takes half the place then: what is written has been read
#if defined(__AVX512BF16__)
      const auto upper = _mm512_cvtneps_pbh((__m512)weight);
      weight = (floats)_mm512_cvtpbh_ps(upper);
#else
      weight = to_bfloat16(weight);
      const auto upper = __builtin_convertvector((ints)weight >> 16, half_shorts);
#endif
      __builtin_memcpy((char*)scores + k * 2, &upper, V * 2);
    } else
      store(scores + k, weight);
    sum += weight;
  }
  const float rescale = top == largest ? 1.0f : exp_of(floats{} + (largest - top))[0];
  float here = 0.0f;
  for (int i = 0; i < V; i++) here += sum[i];
  total = total * rescale + here;
  largest = top;
  return rescale;
}

// mixed += the weighted values of keys low to high, for M rows and P pairs of vectors of each. `values` are those of `low`.
template <int M, int P, class W, class K>
static inline void mix_part(const W* weights, const K* values, long stride, long wide, float* mixed, int low, int high) {
  constexpr int row = SPAN * sizeof(float) / sizeof(W);
  floats sum[M][P][2];
  for (int m = 0; m < M; m++)
    for (int p = 0; p < P * 2; p++) sum[m][p / 2][p % 2] = load(mixed + m * wide + p * V);
  if constexpr (std::is_same_v<W, bfloat16>) {
    // Two keys from an even one on: a pair for each number of their values. One of the two may be no key of these rows.
    const auto pair = [&](int k, bool has_first, bool has_second) {
      for (int p = 0; p < P; p++) {
        const K* first = values + (k - low) * stride + p * NR;
        const ints x = has_first ? *(const any_ints*)first : ints{}, y = has_second ? *(const any_ints*)(first + stride) : ints{};
        const ints pairs[2] = {(x & 0xffff) | y << 16, (ints)((uints)x >> 16) | (y & -65536)};
        for (int m = 0; m < M; m++) {
          int32_t both;
          __builtin_memcpy(&both, weights + m * row + k, 4);
          for (int half = 0; half < 2; half++) sum[m][p][half] = dot_pairs(sum[m][p][half], pairs[half], ints{} + both);
        }
      }
    };
    int k = low;
    if (k % 2) pair(k++ - 1, false, true);
    for (; k + 2 <= high; k += 2) pair(k, true, true);
    if (k < high) pair(k, true, false);
  } else
    for (int k = low; k < high; k++)
      for (int p = 0; p < P; p++) {
        floats x[2];
        unpack(values + (k - low) * stride + p * NR, x);
        for (int m = 0; m < M; m++)
          for (int half = 0; half < 2; half++) sum[m][p][half] += weights[m * row + k] * x[half];
      }
  for (int m = 0; m < M; m++)
    for (int p = 0; p < P * 2; p++) store(mixed + m * wide + p * V, sum[m][p / 2][p % 2]);
}

template <int M, class W, class K>
static inline void mix(const W* weights, const K* values, long stride, long wide, float* mixed, int low, int high) {
  if (low >= high) return;
  long d = 0;
  if constexpr (M == 1)
    for (; d + 4 * NR <= wide; d += 4 * NR) mix_part<M, 4>(weights, values + d, stride, wide, mixed + d, low, high);
  for (; d + 2 * NR <= wide; d += 2 * NR) mix_part<M, 2>(weights, values + d, stride, wide, mixed + d, low, high);
  for (; d < wide; d += NR) mix_part<M, 1>(weights, values + d, stride, wide, mixed + d, low, high);
}

// One key/value head of one request, read in spans.
template <class T> struct Reader {
  const Attention<T>& a;
  const int32_t* blocks;
  long head, wide;
  bool in_place;
  Kept<T>* span;

  // Hands positions low to high of a cache to use(data, stride, first, last): position at + k, for k from `first` to `last`, is
  // data + (k - first) * stride. Before each part, ahead(first position, number of positions) calls for what is read later.
  template <class Ahead, class Use> void read(const T* cache, long at, long low, long high, Ahead ahead, Use use) {
    const long row = a.kv_heads * a.dim;
    for (long p = low / KEYS * KEYS; p < high;) {
      const long offset = p % a.block_size, count = std::min(a.block_size - offset, high - p);
      const int64_t block = blocks[p / a.block_size];
      const T* data = a.place(cache, block, offset, head);
      ahead(count);
      if (in_place)
        use(data, row, int(p - at), int(p - at + count));
      else if (a.coding)
        for (long i = std::max(0L, low - p); i < count; i++)
          decode((const int8_t*)cache, block, offset + i, span + (p - at + i) * wide);
      else
        for (long i = std::max(0L, low - p); i < count; i++) copy(data + i * row, span + (p - at + i) * wide);
      p += count;
    }
    if (!in_place) use((const Kept<T>*)span, wide, 0, int(high - at));
  }

  void decode(const int8_t* cache, int64_t block, long offset, Kept<T>* to) {
    float scale = 1.0f;
    if (a.scale_bytes) std::memcpy(&scale, a.scale_place(cache, block, offset, head), 4);
    a.coding->decode(a.code_place(cache, block, offset, head), scale, (float*)to, a.dim, wide);
  }

  // One head's numbers, with zeros up to `wide`: as they are, or as float32 in the order of `unpack`.
  void copy(const T* from, Kept<T>* to) {
    for (long d = 0; d < wide; d += NR) {
      T tail[NR] = {};
      if (d + NR > a.dim) std::copy(from + d, from + a.dim, tail);
      const T* some = d + NR > a.dim ? tail : from + d;
      if constexpr (std::is_same_v<T, Kept<T>>)
        std::copy_n(some, NR, to + d);
      else
        unpack(some, (floats*)(to + d));
    }
  }
};

struct Item {
  long request, first, head, heads;  // query rows from `first` on, at most TILE for all heads together; key/value heads from `head` on
};

// What an item reads in the span that begins at `at`, or in its first one.
template <class T> static Region region_of(const Attention<T>& a, const Item& item, long at) {
  const long group = a.heads / a.kv_heads, num_tokens = a.starts[item.request + 1] - a.starts[item.request];
  const long before = a.lengths[item.request] - num_tokens, last_row = std::min(item.first + TILE, num_tokens * group) - 1;
  const long begin = a.window > 0 ? std::max(0L, before + item.first / group + 1 - a.window) : 0, end = before + last_row / group + 1;
  const long low = std::max({at, begin, a.read_before(item.request)});
  return {a.table + item.request * a.table_row, item.head, item.heads, low, std::min(low / SPAN * SPAN + SPAN, end)};
}

// Rows of queries that read the same key/value head, and what has come of them so far.
template <class T> struct Rows {
  int count;
  const long *begin, *end;  // the positions that each sees
  const Kept<T>* queries;  // [count, wide]
  float *mixed, *scores, *largest, *total;  // [count, wide], [count, SPAN], [count], [count]
};

// Each row takes what it sees of positions low to high, in the span that begins at `at`. Before each part that is read, keys_ahead or
// values_ahead (number of positions) asks for what is read later.
template <class T, class KeysAhead, class ValuesAhead>
static void attend_span(
    const Attention<T>& a, Reader<T>& reader, const Rows<T>& rows, float* turned, long at, long low, long high, KeysAhead keys_ahead,
    ValuesAhead values_ahead
) {
  const long wide = reader.wide;
  const bool is_turned = !reader.in_place && rows.count >= MANY;
  int from[TILE], to[TILE];
  reader.read(a.keys, at, low, high, keys_ahead, [&](const auto* keys, long stride, int first, int last) {
    if (is_turned) turn((const float*)reader.span, turned, wide * sizeof(Kept<T>) / 4);
    int r = 0;
    for (; is_turned && r + ROWS <= rows.count; r += ROWS) {
      const int begins = (*std::min_element(rows.begin + r, rows.begin + r + ROWS) - at) / KEYS * KEYS;
      const int ends = std::min<long>(last, *std::max_element(rows.end + r, rows.end + r + ROWS) - at);
      score_turned<Kept<T>, ROWS>(
          rows.queries + r * wide, turned, wide, a.scale, rows.scores + r * SPAN, std::max(first, begins), ends
      );
    }
    for (; r < rows.count; r++) {
      const int begins = std::max<long>(first, (rows.begin[r] - at) / KEYS * KEYS), ends = std::min<long>(last, rows.end[r] - at);
      const auto* own = keys + (begins - first) * stride;
      score(rows.queries + r * wide, own, stride, wide, a.scale, rows.scores + r * SPAN + begins, ends - begins);
    }
  });
  for (int r = 0; r < rows.count; r++) {
    from[r] = std::max(rows.begin[r] - at, 0L), to[r] = std::min<long>(rows.end[r] - at, SPAN);
    if (from[r] >= to[r]) continue;
    const float rescale = weigh<Kept<T>>(rows.scores + r * SPAN, from[r], to[r], rows.largest[r], rows.total[r]);
    float* mixed = rows.mixed + r * wide;
    if (rescale != 1.0f)
      for (long d = 0; d < wide; d += V) store(mixed + d, load(mixed + d) * rescale);
  }
  reader.read(a.values, at, low, high, values_ahead, [&](const auto* values, long stride, int first, int last) {
    const auto part = [&](auto m, int r, int low, int high) {  // keys low to high, as far as they are here
      low = std::max(low, first), high = std::min(high, last);
      const auto* weights = (const Kept<T>*)(rows.scores + r * SPAN);
      mix<m>(weights, values + (low - first) * stride, stride, wide, rows.mixed + r * wide, low, high);
    };
    const std::integral_constant<int, 1> one;
    const std::integral_constant<int, ROWS> together;
    int r = 0;
    for (; r + ROWS <= rows.count; r += ROWS) {  // what all of them see, they take together, from an even key on, so that no pair is divided
      const int low = (*std::max_element(from + r, from + r + ROWS) + 1) & -2;
      const int high = std::max(low, *std::min_element(to + r, to + r + ROWS) & -2);
      for (int m = r; m < r + ROWS; m++) part(one, m, from[m], std::min(low, to[m]));
      part(together, r, low, high);
      for (int m = r; m < r + ROWS; m++) part(one, m, std::max(high, from[m]), to[m]);
    }
    for (; r < rows.count; r++) part(one, r, from[r], to[r]);
  });
}

// The memory of a tile of rows.
template <class T> struct Work {
  float *mixed, *scores, *turned;
  Kept<T> *span, *queries;
  float largest[TILE], total[TILE];
  long begin[TILE] = {}, end[TILE] = {};

  Work(float* memory, long wide) : mixed(memory), scores(mixed + TILE * wide), turned(scores + TILE * SPAN),
                                   span((Kept<T>*)(turned + SPAN * wide)), queries(span + SPAN * wide) {}
  static size_t size(long wide) { return (2 * SPAN + 2 * TILE) * wide + TILE * SPAN; }

  // `count` rows from `first` on, which see what rows 0 to `count` see.
  Rows<T> rows(long first, int count, long wide) {
    return {count, begin, end, queries + first * wide, mixed + first * wide, scores + first * SPAN, largest + first, total + first};
  }

  // Row i before it has seen anything, or what it has seen.
  void begin_row(long i, long wide, const float* state) {
    if (state)
      std::copy_n(state, wide, mixed + i * wide), largest[i] = state[wide], total[i] = state[wide + 1];
    else
      std::fill_n(mixed + i * wide, wide, 0.0f), largest[i] = -INFINITY, total[i] = 0.0f;
  }
};

// An item. Row r of a head is token r / group of the request, and one of the `group` query heads that share the key/value head. While one
// span is read, the memory is asked for the next one, at last for the first span of the item that follows; `is_called`: that was done for this one.
// `memory` is for Work, whatever is in it.
template <class T>
static void attend_tile(const Attention<T>& a, const Item& item, const Item* following, bool is_called, float* memory) {
  const auto [request, first, head, heads] = item;
  const long group = a.heads / a.kv_heads, wide = a.wide(), before = a.read_before(request);
  const long start = a.starts[request], num_tokens = a.starts[request + 1] - start;
  const int rows = std::min<long>(TILE, num_tokens * group - first);
  Work<T> work(memory, wide);
  const bool in_place = !a.coding && rows <= FEW && a.dim % NR == 0 && a.block_size % KEYS == 0;
  Reader<T> reader{a, a.table + request * a.table_row, head, wide, in_place, work.span};
  for (int r = 0; r < rows; r++) {
    const long token = (first + r) / group;
    for (long h = 0; h < heads; h++) {
      const long query_head = (head + h) * group + (first + r) % group, i = h * rows + r;
      reader.copy(a.query + (start + token) * a.query_row + query_head * a.dim, work.queries + i * wide);
      work.begin_row(i, wide, before ? a.state(request, query_head) : nullptr);
    }
    work.end[r] = a.lengths[request] - num_tokens + token + 1;
    work.begin[r] = a.window > 0 ? std::max(0L, work.end[r] - a.window) : before;
  }
  const long first_span = work.begin[0] / SPAN * SPAN, last = work.end[rows - 1];
  Region now = region_of(a, item, first_span);
  const long lines = (a.dim * (a.coding ? 1 : sizeof(T)) + 63) / 64;  // of one head of one position
  Caller<T> its_values{a, a.values, now};
  if (!is_called) Caller<T>{a, a.keys, now}.call(lines * heads * SPAN);
  for (long at = first_span; at < last; at += SPAN) {
    const Region next = at + SPAN < last ? region_of(a, item, at + SPAN) : following ? region_of(a, *following, 0) : Region{};
    Caller<T> next_keys{a, a.keys, next}, next_values{a, a.values, next};
    for (long h = 0; h < heads; h++) {
      const auto values_and_keys = [&](long count) {
        if (at == first_span && !is_called) its_values.call(count * lines);
        next_keys.call(count * lines);
      };
      const auto values = [&](long count) { next_values.call(count * lines); };
      reader.head = head + h;
      attend_span(a, reader, work.rows(h * rows, rows, wide), work.turned, at, now.low, now.high, values_and_keys, values);
    }
    next_keys.call(lines * heads * SPAN), next_values.call(lines * heads * SPAN);  // what this span was too short for
    now = next;
  }
  for (long i = 0; i < rows * heads; i++) {
    const long r = i % rows, token = (first + r) / group, place = ((head + i / rows) * group + (first + r) % group) * a.dim;
    T* out = a.out + (start + token) * a.heads * a.dim + place;
    const float *mixed = work.mixed + i * wide, total = work.total[i];
    long d = 0;
    for (; d + NR <= a.dim; d += NR) repack(load(mixed + d) / total, load(mixed + d + V) / total, out + d);
    for (; d < wide; d++) {
      const long own = std::is_same_v<T, bfloat16> ? d / NR * NR + d % V * 2 + d / V % 2 : d;  // undoes `unpack`
      if (own < a.dim) out[own] = mixed[d] / total;
    }
  }
}

// The common positions of a group, for one key/value head: a tile whose rows are the queries of all members. Each row computes what it would
// compute alone, so its bits are the same.
template <class T> static void attend_prefix(const Attention<T>& a, const Prefixes::Group& group, long head, float* memory) {
  const long num_heads = a.heads / a.kv_heads, wide = a.wide();
  const int rows = group.members.size() * num_heads;
  Work<T> work(memory, wide);
  const Region all{a.table + group.members[0] * a.table_row, head, 1, 0, group.end};
  Reader<T> reader{a, all.blocks, head, wide, false, work.span};
  const auto query_head = [&](int r) { return head * num_heads + r % num_heads; };
  for (int r = 0; r < rows; r++) {
    reader.copy(a.query + a.starts[group.members[r / num_heads]] * a.query_row + query_head(r) * a.dim, work.queries + r * wide);
    work.begin_row(r, wide, nullptr);
    work.end[r] = group.end;
  }
  const long lines = (a.dim * (a.coding ? 1 : sizeof(T)) + 63) / 64;
  Caller<T> keys{a, a.keys, all}, values{a, a.values, all};
  keys.call(SPAN * lines), values.call(SPAN * lines);
  for (long at = 0; at < group.end; at += SPAN)
    attend_span(
        a, reader, work.rows(0, rows, wide), work.turned, at, at, at + SPAN, [&](long count) { keys.call(count * lines); },
        [&](long count) { values.call(count * lines); }
    );
  for (int r = 0; r < rows; r++) {
    float* state = a.state(group.members[r / num_heads], query_head(r));
    std::copy_n(work.mixed + r * wide, wide, state), state[wide] = work.largest[r], state[wide + 1] = work.total[r];
  }
}

// Groups the requests of one token each whose first span lies in the same blocks. One that leaves early shortens what its group shares.
template <class T> static void find_prefixes(const Attention<T>& a, long num_requests, Prefixes& found) {
  const long blocks = (SPAN + a.block_size - 1) / a.block_size, most = TILE / (a.heads / a.kv_heads);
  const auto row = [&](long request) { return a.table + request * a.table_row; };
  std::vector<long> those;
  for (long r = 0; r < num_requests; r++)
    if (a.starts[r + 1] - a.starts[r] == 1 && a.lengths[r] > SPAN) those.push_back(r);
  found.groups.clear(), found.end.assign(num_requests, 0);
  if (a.window > 0 || long(those.size()) < MIN_MEMBERS) return;
  std::stable_sort(those.begin(), those.end(), [&](long one, long other) {
    return std::lexicographical_compare(row(one), row(one) + blocks, row(other), row(other) + blocks);
  });
  found.place.resize(num_requests);
  long count = 0;
  for (size_t at = 0, next; at < those.size(); at = next) {
    const int32_t* first = row(those[at]);
    long end = a.lengths[those[at]];
    for (next = at; next < those.size() && long(next - at) < most && std::equal(first, first + blocks, row(those[next])); next++) {
      const int32_t* own = row(those[next]);
      end = std::min<long>(end, a.lengths[those[next]]);
      end = std::min<long>(end, (std::mismatch(first, first + end / a.block_size, own).first - first) * a.block_size);
    }
    end = end / SPAN * SPAN;
    if (end == 0 || long(next - at) < MIN_MEMBERS) continue;
    found.groups.push_back({{those.begin() + at, those.begin() + next}, end});
    for (long member : found.groups.back().members) found.end[member] = end, found.place[member] = count++;
  }
  if (const size_t size = count * a.heads * (a.wide() + 2); found.states.size() < size) found.states.resize(size);
}

// All heads of one token into a cache of codes; the model's numbers are float32 then.
template <class T> static void encode(const Attention<T>& a, const T* from, T* cache, int64_t slot) {
  const int64_t block = slot / a.block_size, offset = slot % a.block_size;
  for (long head = 0; head < a.kv_heads; head++) {
    int8_t* scale = a.scale_bytes ? a.scale_place((int8_t*)cache, block, offset, head) : nullptr;
    a.coding->encode((const float*)from + head * a.dim, a.code_place((int8_t*)cache, block, offset, head), (float*)scale, a.dim);
  }
}

// Keys and values of the step go to their slots; a slot of -1 is padding. Then all queries attend.
template <class T>
static void attention(
    Attention<T> a, const T* key, const T* value, long key_row, long value_row, const int64_t* slots, T* keys,
    T* values, long num_tokens, long num_requests, int threads
) {
  std::vector<Item> items;
  double products = 0.0;
  const long group = a.heads / a.kv_heads;
  for (long request = 0; request < num_requests; request++)
    products += double(a.starts[request + 1] - a.starts[request]) * a.lengths[request] * a.heads * a.dim;
  if (products < 1e5) threads = 1;  // sooner done than another thread wakes up
  const long parts = threads == 1 ? 1 : 4L * threads / std::max(1L, num_requests) + 1;  // of the heads, so that all threads have work
  for (long request = 0; request < num_requests; request++) {
    const long rows = (a.starts[request + 1] - a.starts[request]) * group;
    const long most = std::max(1L, std::min(TILE / std::max(1L, rows), (a.kv_heads + parts - 1) / parts));
    for (long first = (rows - 1) / TILE * TILE; rows > 0 && first >= 0; first -= TILE)
      for (long head = 0; head < a.kv_heads; head += most) items.push_back({request, first, head, std::min(most, a.kv_heads - head)});
  }
  static thread_local Prefixes memory_of_prefixes;
  Prefixes& prefixes = memory_of_prefixes;  // the other threads' too
  find_prefixes(a, num_requests, prefixes);
  a.prefixes = &prefixes;
  const long num_items = items.size(), num_prefixes = prefixes.groups.size();
  const size_t row = a.kv_heads * a.dim, work_size = Work<T>::size(a.wide());
#pragma omp parallel num_threads(allowed(threads))
  {
    if (key)
#pragma omp for
      for (long token = 0; token < num_tokens; token++)
        if (slots[token] >= 0) {
          if (a.coding) {
            encode(a, key + token * key_row, keys, slots[token]);
            encode(a, value + token * value_row, values, slots[token]);
          } else {
            std::copy_n(key + token * key_row, row, keys + slots[token] * row);
            std::copy_n(value + token * value_row, row, values + slots[token] * row);
          }
        }
    static thread_local std::vector<float> memory;  // kept: to fill it with zeros takes as long as a short context
    if (memory.size() < work_size + 16) memory.resize(work_size + 16);
    float* work = (float*)((uintptr_t(memory.data()) + 63) / 64 * 64);
#pragma omp for schedule(dynamic)
    for (long i = 0; i < num_prefixes * a.kv_heads; i++) attend_prefix(a, prefixes.groups[i / a.kv_heads], i % a.kv_heads, work);
    long called = -1;  // the item whose first span this thread has asked for
#pragma omp for schedule(dynamic, std::max(1L, num_items / (4 * threads)))
    for (long i = 0; i < num_items; i++) {
      attend_tile(a, items[i], i + 1 < num_items ? &items[i + 1] : nullptr, i == called, work);
      called = i + 1;
    }
  }
}

extern "C" {
#define ATTENTION(T, NAME) \
  void attention_##NAME(const T* query, const T* key, const T* value, T* keys, T* values, T* out, const int32_t* starts, \
                        const int32_t* lengths, const int32_t* table, const int64_t* slots, long num_tokens, long num_requests, \
                        long query_row, long key_row, long value_row, long table_row, long block_size, long heads, \
                        long kv_heads, long dim, long window, float scale, int threads) { \
    attention<T>({query, keys, values, out, starts, lengths, table, query_row, table_row, block_size, heads, kv_heads, dim, \
                  window, scale}, key, value, key_row, value_row, slots, keys, values, num_tokens, num_requests, threads); \
  }
ATTENTION(float, float32)
ATTENTION(bfloat16, bfloat16)

void attention_codes(
    const float* query, const float* key, const float* value, void* keys, void* values, float* out, const int32_t* starts,
    const int32_t* lengths, const int32_t* table, const int64_t* slots, long num_tokens, long num_requests, long query_row,
    long key_row, long value_row, long table_row, long block_size, long heads, long kv_heads, long dim, long window, float scale,
    int threads, long scale_bytes, int coding
) {
  float *own_keys = (float*)keys, *own_values = (float*)values;
  attention<float>({query, own_keys, own_values, out, starts, lengths, table, query_row, table_row, block_size, heads, kv_heads, dim,
                    window, scale, &CODINGS[coding], scale_bytes},
                   key, value, key_row, value_row, slots, own_keys, own_values, num_tokens, num_requests, threads);
}
}

// Norms and activations

// LayerNorm of x + residual if `centred`, else RMSNorm; x, residual and out [rows, size]. The sum replaces the residual; it and
// RMSNorm's quotient are rounded to T, as in the models' own code.
template <class T>
static void norm(
    const T* x, T* residual, const T* weight, const T* bias, T* out, long rows, long size, float eps, bool centred, int threads
) {
  const long wide = (size + V - 1) / V * V;
#pragma omp parallel num_threads(rows * size < 32768 ? 1 : allowed(threads))
  {
    std::vector<float> row(wide);
#pragma omp for
    for (long r = 0; r < rows; r++) {
      const T* from = x + r * size;
      if (residual) {
        for (long i = 0; i < size; i++) residual[r * size + i] = T(float(from[i]) + float(residual[r * size + i]));
        from = residual + r * size;
      }
      for (long i = 0; i < size; i++) row[i] = from[i];
      std::fill(row.begin() + size, row.end(), 0.0f);
      floats sum = {}, squares = {};
      float mean = 0.0f, square = 0.0f;
      if (centred) {
        for (long i = 0; i < wide; i += V) sum += load(&row[i]);
        for (int i = 0; i < V; i++) mean += sum[i];
        mean /= size;
        for (long i = 0; i < size; i++) row[i] -= mean;
      }
      for (long i = 0; i < wide; i += V) squares += load(&row[i]) * load(&row[i]);
      for (int i = 0; i < V; i++) square += squares[i];
      const float factor = 1.0f / std::sqrt(square / size + eps);
      T* to = out + r * size;
      if (centred)
        for (long i = 0; i < size; i++) to[i] = row[i] * factor * weight[i] + bias[i];
      else
        for (long i = 0; i < size; i++) to[i] = T(row[i] * factor) * weight[i];
    }
  }
}

// out = use(x, y) number by number, computed in float32.
template <class T, class Use>
static void each(const T* x, const T* y, T* out, long count, int threads, Use use) {
  const auto some = [&](const T* x, const T* y, T* out) {
    floats a[2], b[2];
    unpack(x, a), unpack(y, b);
    repack(use(a[0], b[0]), use(a[1], b[1]), out);
  };
#pragma omp parallel for num_threads(count < 32768 ? 1 : allowed(threads))
  for (long at = 0; at < count / NR * NR; at += NR) some(x + at, y + at, out + at);
  if (const long at = count / NR * NR; at < count) {
    T a[NR] = {}, b[NR] = {};
    std::copy(x + at, x + count, a), std::copy(y + at, y + count, b);
    some(a, b, a);
    std::copy_n(a, count - at, out + at);
  }
}

extern "C" {
#define LAYERS(T, NAME) \
  void norm_##NAME(const T* x, T* residual, const T* weight, const T* bias, T* out, long rows, long size, float eps, \
                   int centred, int threads) { \
    norm(x, residual, weight, bias, out, rows, size, eps, centred, threads); \
  } \
  void gelu_##NAME(const T* x, T* out, long count, int threads) { \
    each(x, x, out, count, threads, [](floats a, floats) { return activated(a, GELU_TANH); }); \
  } \
  void silu_and_mul_##NAME(const T* gate, const T* up, T* out, long count, int threads) { \
    each(gate, up, out, count, threads, [](floats a, floats b) { \
      a = a / (1.0f + exp_of(-a)); \
      return (std::is_same_v<T, float> ? a : to_bfloat16(a)) * b; \
    }); \
  }
LAYERS(float, float32)
LAYERS(bfloat16, bfloat16)
}

// Low-rank sums of several adapters
//
// y[r] += B[place of r] (A[place of r] x[r]). A lies as [places, rank, inputs] and B as [places, rank, outputs], so both are read from one end to
// the other. Rows of one place go together, a few at a time: a pair is read once for them.
//
// A number of the middle is V sums, each a chain in the order of k, and these are added up in pairs; one of the result is a chain in the order of the
// rank. What stands beside it plays no part: so here too a row's result does not depend on its neighbours. For that each step must be rounded
// alike. Left to itself GCC multiplies and adds in one instruction where it sees many chains, and in two where it sees one (on Zen, where
// one chain is faster so).

constexpr int TOGETHER = MR / 2;  // rows; with RANKS or VECTORS sums each they fill the registers
constexpr int RANKS = 4, VECTORS = 4, CHUNK_OUTPUTS = 512;

typedef uint16_t halves __attribute__((vector_size(V * 2)));

static inline floats load(const bfloat16* x) {
  halves narrow;
  std::memcpy(&narrow, x, sizeof narrow);
  return (floats)(__builtin_convertvector(narrow, ints) << 16);
}

static inline void store(bfloat16* to, floats x) {
  const halves narrow = __builtin_convertvector((ints)to_bfloat16(x) >> 16 & 0xffff, halves);
  std::memcpy(to, &narrow, sizeof narrow);
}

struct Whole {  // how a vector is read and written: all of it
  template <class T> floats from(const T* x) const { return load(x); }
  template <class T> void to(T* out, floats x) const { store(out, x); }
};

struct Part {  // its first numbers; zeros stand for the rest
  long count;
  template <class T> floats from(const T* x) const {
    T some[V] = {};
    std::copy_n(x, count, some);
    return load(some);
  }
  template <class T> void to(T* out, floats x) const {
    T some[V];
    store(some, x);
    std::copy_n(some, count, out);
  }
};

// hidden[m, j] = x[m] . a[j] for M rows and J numbers of the rank.
template <int M, int J, class X, class T>
static inline void shrink(const X* const* x, const T* a, long inputs, float* hidden, long rank) {
  floats sum[M][J] = {};
  const auto step = [&](long k, auto vector) {
    floats weights[J];
    for (int j = 0; j < J; j++) weights[j] = vector.from(a + j * inputs + k);
    for (int m = 0; m < M; m++) {
      const floats input = vector.from(x[m] + k);
      for (int j = 0; j < J; j++) sum[m][j] = fused(sum[m][j], input, weights[j]);
    }
  };
  long k = 0;
  for (; k + V <= inputs; k += V) step(k, Whole());
  if (k < inputs) step(k, Part{inputs - k});
  for (int m = 0; m < M; m++)
    for (int j = 0; j < J; j++) {
      floats total = sum[m][j];
      for (int half = V / 2; half; half /= 2)
        for (int i = 0; i < half; i++) total[i] += total[i + half];
      hidden[m * rank + j] = total[0];
    }
}

// y[m, o] += hidden[m] . b[:, o] for M rows and P vectors of outputs.
template <int M, int P, class X, class T, class Vector>
static inline void expand(const float* hidden, long rank, const T* b, long outputs, X* const* y, long at, Vector vector) {
  floats sum[M][P] = {};
  for (long j = 0; j < rank; j++) {
    floats weights[P];
    for (int p = 0; p < P; p++) weights[p] = vector.from(b + j * outputs + at + p * V);
    for (int m = 0; m < M; m++)
      for (int p = 0; p < P; p++) sum[m][p] = fused(sum[m][p], floats{} + hidden[m * rank + j], weights[p]);
  }
  for (int m = 0; m < M; m++)
    for (int p = 0; p < P; p++) vector.to(y[m] + at + p * V, vector.from(y[m] + at + p * V) + sum[m][p]);
}

// Calls use(std::integral_constant<int, rows>()) for a number of rows that is only known now, 1 to M.
template <int M = TOGETHER, class Use> static inline void with_rows(int rows, Use use) {
  if constexpr (M > 1)
    if (rows < M) return with_rows<M - 1>(rows, use);
  use(std::integral_constant<int, M>());
}

template <class X, class T>
static void low_rank(
    X* y, const X* x, const T* a, const T* b, const int64_t* places, long rows, long inputs, long outputs, long rank, int threads
) {
  std::vector<long> order;  // the rows that have a place, those of one place side by side
  for (long r = 0; r < rows; r++)
    if (places[r] >= 0) order.push_back(r);
  if (order.empty()) return;
  std::stable_sort(order.begin(), order.end(), [&](long one, long other) { return places[one] < places[other]; });
  std::vector<long> tiles;  // where in `order` each begins
  for (long at = 0, count = order.size(); at < count; at++)
    if (!at || places[order[at]] != places[order[at - 1]] || at - tiles.back() == TOGETHER) tiles.push_back(at);
  const long num_tiles = tiles.size(), num_parts = (rank + RANKS - 1) / RANKS, num_chunks = (outputs + CHUNK_OUTPUTS - 1) / CHUNK_OUTPUTS;
  tiles.push_back(order.size());
  std::vector<float> middle(order.size() * rank);
  const bool few = long(order.size()) * rank * (inputs + outputs) < 1 << 16;
#pragma omp parallel num_threads(few ? 1 : allowed(threads))
  {
#pragma omp for schedule(static)
    for (long item = 0; item < num_tiles * num_parts; item++) {
      const long tile = item / num_parts, first = item % num_parts * RANKS, begin = tiles[tile];
      const X* inputs_of[TOGETHER];
      for (long i = begin; i < tiles[tile + 1]; i++) inputs_of[i - begin] = x + order[i] * inputs;
      const T* own = a + (places[order[begin]] * rank + first) * inputs;
      float* to = middle.data() + begin * rank + first;
      with_rows(tiles[tile + 1] - begin, [&](auto count) {
        if (first + RANKS <= rank)
          shrink<count, RANKS>(inputs_of, own, inputs, to, rank);
        else
          for (long j = 0; j < rank - first; j++) shrink<count, 1>(inputs_of, own + j * inputs, inputs, to + j, rank);
      });
    }
#pragma omp for schedule(static)
    for (long item = 0; item < num_tiles * num_chunks; item++) {
      const long tile = item / num_chunks, first = item % num_chunks * CHUNK_OUTPUTS, begin = tiles[tile];
      const long end = std::min(outputs, first + CHUNK_OUTPUTS);
      X* outputs_of[TOGETHER];
      for (long i = begin; i < tiles[tile + 1]; i++) outputs_of[i - begin] = y + order[i] * outputs;
      const T* own = b + places[order[begin]] * rank * outputs;
      const float* from = middle.data() + begin * rank;
      with_rows(tiles[tile + 1] - begin, [&](auto count) {
        long at = first;
        for (; at + VECTORS * V <= end; at += VECTORS * V) expand<count, VECTORS>(from, rank, own, outputs, outputs_of, at, Whole());
        for (; at + V <= end; at += V) expand<count, 1>(from, rank, own, outputs, outputs_of, at, Whole());
        if (at < end) expand<count, 1>(from, rank, own, outputs, outputs_of, at, Part{end - at});
      });
    }
  }
}

extern "C" {
#define LOW_RANK(X, T, NAME) \
  void low_rank_##NAME(X* y, const X* x, const T* a, const T* b, const int64_t* places, long rows, long inputs, long outputs, \
                       long rank, int threads) { \
    low_rank(y, x, a, b, places, rows, inputs, outputs, rank, threads); \
  }
LOW_RANK(float, float, float32)
LOW_RANK(float, bfloat16, bfloat16)
LOW_RANK(bfloat16, float, float32_bf16)
LOW_RANK(bfloat16, bfloat16, bfloat16_bf16)
}

// Draws
//
// Token t of a row arrives after noise[t] / weight[t], and the first one wins: sampler.py explains the race. The noise is counter-based
// (Philox4x32-10, Salmon et al. 2011): a function of seed, position and token, four tokens to a counter.

constexpr int GROUPS = 64;  // counters at a time: loops long enough to become vector instructions

static inline floats log_of(floats x) {  // of normal numbers; relative error 1e-7, also beside 1 (polynomial: Moshier, Cephes)
  ints bits = (ints)x - 0x3f3504f3;  // sqrt(1/2) becomes the lowest mantissa
  const floats exponent = __builtin_convertvector(bits >> 23, floats);
  const floats rest = (floats)((bits & 0x7fffff) + 0x3f3504f3) - 1.0f, square = rest * rest;
  floats poly = floats{} + 7.0376836e-2f;
  for (float coefficient : {-1.1514610e-1f, 1.1676998e-1f, -1.2420141e-1f, 1.4249323e-1f, -1.6668058e-1f, 2.0000715e-1f,
                            -2.4999994e-1f, 3.3333331e-1f})
    poly = poly * rest + coefficient;
  return rest + (rest * square * poly - 0.5f * square + exponent * -2.1219444e-4f) + exponent * 0.693359375f;
}

// noise[i] for the 4 * GROUPS tokens from 4 * first on: exponential, from uniform numbers of 23 bits in (0, 1).
static void exponential_noise(uint64_t seed, uint32_t position, uint32_t first, float* noise) {
  uint32_t c[4][GROUPS];
  for (uint32_t i = 0; i < GROUPS; i++) c[0][i] = first + i, c[1][i] = position, c[2][i] = 0, c[3][i] = 0;
  uint32_t key[2] = {uint32_t(seed), uint32_t(seed >> 32)};
  for (int round = 0; round < 10; round++, key[0] += 0x9E3779B9u, key[1] += 0xBB67AE85u)
    for (int i = 0; i < GROUPS; i++) {
      const uint64_t a = uint64_t(c[0][i]) * 0xD2511F53u, b = uint64_t(c[2][i]) * 0xCD9E8D57u;
      c[0][i] = uint32_t(b >> 32) ^ c[1][i] ^ key[0], c[2][i] = uint32_t(a >> 32) ^ c[3][i] ^ key[1];
      c[1][i] = uint32_t(b), c[3][i] = uint32_t(a);
    }
  for (int i = 0; i < GROUPS; i++)
    for (int j = 0; j < 4; j++) noise[i * 4 + j] = (float(int32_t(c[j][i] >> 9)) + 0.5f) * 0x1p-23f;
  for (int i = 0; i < 4 * GROUPS; i += V) store(noise + i, -log_of(load(noise + i)));
}

static inline float largest_of(const float* x, int count) {  // a multiple of V
  floats largest = load(x);
  for (int i = V; i < count; i += V) largest = load(x + i) > largest ? load(x + i) : largest;
  return *std::max_element((const float*)&largest, (const float*)(&largest + 1));
}

static long race(const float* logits, long vocab, uint64_t seed, uint32_t position) {
  constexpr int CHUNK = 4 * GROUPS;
  alignas(64) float noise[CHUNK], x[CHUNK];
  float top = -INFINITY, best = 0.0f;  // the largest logit; the largest weight / noise so far
  long at = 0, winner = 0;
  for (; at + CHUNK <= vocab; at += CHUNK) top = std::max(top, largest_of(logits + at, CHUNK));
  for (; at < vocab; at++) top = std::max(top, logits[at]);
  for (at = 0; at < vocab; at += CHUNK) {
    const int here = std::min<long>(CHUNK, vocab - at);
    std::copy_n(logits + at, here, x);
    std::fill(x + here, x + CHUNK, -INFINITY);
    const float peak = largest_of(x, CHUNK);
    if (peak == -INFINITY || exp_of(floats{} + (peak - top))[0] * 0x1.01p24f < best) continue;  // no noise is below 2 ** -24
    exponential_noise(seed, position, at / 4, noise);
    for (int i = 0; i < CHUNK; i += V) {
      const floats logit = load(x + i), speed = exp_of(logit - top) / load(noise + i);
      store(x + i, logit == floats{} - INFINITY ? floats{} : speed);
    }
    const float fastest = largest_of(x, CHUNK);
    if (fastest > best) best = fastest, winner = at + (std::find(x, x + CHUNK, fastest) - x);
  }
  return winner;
}

extern "C" void draw(
    const float* logits, const int64_t* seeds, const int64_t* positions, int64_t* tokens, long rows, long vocab, int threads
) {
#pragma omp parallel for num_threads(allowed(threads)) schedule(dynamic)
  for (long r = 0; r < rows; r++) tokens[r] = race(logits + r * vocab, vocab, seeds[r], positions[r]);
}

// Recorded calls (graph.py): a function and its arguments, in the form in which Python hands them over

union Slot {
  int64_t whole;
  float real;
  void* pointer;
};

struct Call {
  void (*function)(const Slot*);
  const Slot* slots;
};

template <class A> static A argument(const Slot& slot) {
  if constexpr (std::is_pointer_v<A>)
    return (A)slot.pointer;
  else if constexpr (std::is_same_v<A, float>)
    return slot.real;
  else
    return A(slot.whole);
}

template <class... A, size_t... I>
static void call(void (*function)(A...), const Slot* slots, std::index_sequence<I...>) {
  function(argument<A>(slots[I])...);
}

template <class... A> static void call(void (*function)(A...), const Slot* slots) {
  call(function, slots, std::index_sequence_for<A...>());
}

extern "C" {
#define RECORDABLE(NAME) void recorded_##NAME(const Slot* slots) { call(NAME, slots); }
#define RECORDABLE_BOTH(NAME) RECORDABLE(NAME##_float32) RECORDABLE(NAME##_bfloat16)
RECORDABLE_BOTH(linear)
RECORDABLE(linear_float32_bf16)
RECORDABLE(linear_bfloat16_bf16)
RECORDABLE(linear_int8_by_8)
RECORDABLE(linear_int8_by_8_bf16)
RECORDABLE(linear_int8_by_16)
RECORDABLE(linear_int8_by_16_bf16)
RECORDABLE(linear_int4)
RECORDABLE(linear_int4_bf16)
RECORDABLE_BOTH(attention)
RECORDABLE(attention_codes)
RECORDABLE_BOTH(norm)
RECORDABLE_BOTH(gelu)
RECORDABLE_BOTH(silu_and_mul)
RECORDABLE_BOTH(low_rank)
RECORDABLE(low_rank_float32_bf16)
RECORDABLE(low_rank_bfloat16_bf16)

void replay(const Call* calls, long count) {
  for (long i = 0; i < count; i++) calls[i].function(calls[i].slots);
}
}
