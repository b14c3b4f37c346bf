// One machine vector of floats, and the few operations on it that the model needs.
//
// Everything here has a fixed order of additions: a result depends on the numbers alone, never on
// how many rows are computed together or by how many threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

namespace blinkbed {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;  // wider than some machines' registers: the compiler divides it
#endif

typedef float Vector __attribute__((vector_size(kLanes * 4)));
typedef std::int32_t IntVector __attribute__((vector_size(kLanes * 4)));

inline Vector load(const float* from) {
  Vector v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

inline void store(float* to, Vector v) { std::memcpy(to, &v, sizeof v); }

// The first `count` lanes; the others are zero.
inline Vector load_part(const float* from, int count) {
  Vector v = {};
  std::memcpy(&v, from, static_cast<std::size_t>(count) * sizeof(float));
  return v;
}

inline void store_part(float* to, Vector v, int count) {
  std::memcpy(to, &v, static_cast<std::size_t>(count) * sizeof(float));
}

// Keeps a value that several multiplications use in a register: as an operand in memory each of
// them would load it again, and loads are what the machine is short of here.
inline Vector in_register(Vector v) {
#if defined(__AVX512F__)
  asm("" : "+v"(v));
#elif defined(__AVX__)
  asm("" : "+x"(v));
#endif
  return v;
}

inline Vector splat(float x) { return Vector{} + x; }

#if defined(__clang__) || __GNUC__ >= 12
template <int... kIndex>
inline Vector shuffle(Vector a, Vector b) {
  return __builtin_shufflevector(a, b, kIndex...);
}
#else
template <int... kIndex>
inline Vector shuffle(Vector a, Vector b) {
  return __builtin_shuffle(a, b, IntVector{kIndex...});
}
#endif

// Where lane `lane` of a merge comes from: segments of `half` lanes, a's and b's in turn.
constexpr int merge_source(int lane, int half, bool upper) {
  const int segment = lane / half;
  return 2 * half * (segment / 2) + lane % half + (upper ? half : 0) +
         (segment % 2 ? kLanes : 0);
}

template <int kHalf, int... kLane>
inline Vector merge(Vector a, Vector b, std::integer_sequence<int, kLane...>) {
  return shuffle<merge_source(kLane, kHalf, false)...>(a, b) +
         shuffle<merge_source(kLane, kHalf, true)...>(a, b);
}

template <int kHalf>
inline void merge_all(Vector* v) {
  for (int i = 0; i < kHalf; ++i)
    v[i] = merge<kHalf>(v[i], v[i + kHalf], std::make_integer_sequence<int, kLanes>());
  if constexpr (kHalf > 1) merge_all<kHalf / 2>(v);
}

// Lane i of the result is the sum of v[i]'s lanes; v is overwritten.
inline Vector sums(Vector (&v)[kLanes]) {
  merge_all<kLanes / 2>(v);
  return v[0];
}

inline float largest(Vector v) {
  float lane[kLanes];
  store(lane, v);
  float most = lane[0];
  for (int i = 1; i < kLanes; ++i) most = lane[i] > most ? lane[i] : most;
  return most;
}

inline float sum(Vector v) {
  float lane[kLanes];
  store(lane, v);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
  return lane[0];
}

// e^x, within 2 units in the last place; 0 below -87, e^88 above 88, NaN for NaN.
inline Vector exp(const Vector argument) {
  Vector x = argument;
  const Vector lowest = splat(-87.0f), highest = splat(88.0f);
  const IntVector underflow = x < lowest;
  x = x < lowest ? lowest : x;
  x = x > highest ? highest : x;
  const Vector magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vector shifted = x * 1.44269504f + magic;
  const Vector n = shifted - magic;
  Vector r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  Vector p = splat(1.9875691500e-4f);  // Cephes' polynomial for expf
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  IntVector bits, exponent;
  std::memcpy(&bits, &p, sizeof bits);
  std::memcpy(&exponent, &shifted, sizeof exponent);
  bits = (bits + (exponent << 23)) & ~underflow;
  std::memcpy(&p, &bits, sizeof p);
  return argument == argument ? p : argument;
}

}  // namespace blinkbed
