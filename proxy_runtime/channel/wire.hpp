// How operators, tensors and results are written as 64-bit words. Shared by rank and device so that
// the two cannot drift apart.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace ergo {

// A key word: the tag in bits 0..7, tag-specific fields above. The key holds everything that decides
// shapes, kernels and results except what changes every step (floats, Scalars, generator ids, 0-dim CPU
// tensor contents), which goes to the payload.
enum class Tag : uint8_t {
  None = 1,
  UndefinedTensor,
  Tensor,     // bits 8..15 dtype, 16..23 ndim, 24..31 TensorFlag; sizes[ndim]; unless Canonical: strides[ndim], storage
              // offset. One handle
  CpuTensor,  // same header word; sizes[ndim]; if ndim > 0 one word: content hash for integral dtypes, else 0. Contents
              // in the payload (padded)
  Int,        // 1 word
  Bool,       // bit 8
  Float,      // bits 8..15 its range, which only tells templates apart. Payload: 1 word (double)
  ScalarInt,  // bits 8..15 as Float. Payload: 1 word (an int given for a Scalar argument)
  ScalarBool,    // payload: 1 word (a bool given for a Scalar argument)
  String,        // bits 8..39 length; bytes padded
  Device,        // bit 8: 1 = cpu, 0 = the device
  IntList,       // bits 8..39 n; n words
  BoolList,      // bits 8..39 n; n words
  FloatList,     // bits 8..39 n; n words in the key (double): they decide shapes (scale factors)
  List,          // bits 8..39 n, 40..47 ListElement; n encoded values
  Generator,     // payload: generator id
  Complex,       // payload: 2 words
  FloatKey,      // 1 word (double): a float that decides the shape (arange, linspace)
  Layout,        // bits 8..15
  DType,         // bits 8..15 (ScalarType that arrives as its own kind)
  MemoryFormat,  // bits 8..15
  Composed,      // a sparse or nested tensor: bits 8..15 Composition, 16..23 sparse dims, 24 coalesced; n, geometry[n]
                 // (composed.hpp); then the Tensor encodings of its components. As an argument it comes after these
  SameTensor  // bits 8..39 number of an earlier Tensor-tagged argument, which this one is; no number of its own. Some
              // kernels take another path for it (attention to oneself)
};
enum class Composition : uint8_t { Coo = 0, Csr = 1, Csc = 2, Bsr = 3, Bsc = 4, Nested = 5 };
enum TensorFlag : uint8_t { Canonical = 1, Conj = 2, Neg = 4, WrappedNumber = 8 };
// Canonical: offset 0 and every stride, those of size-1 dimensions too, as a fresh contiguous tensor has.
enum class ListElement : uint8_t { Other = 0, Tensor = 1, OptionalTensor = 2, Number = 3 };

inline uint64_t key_word(Tag tag, uint64_t fields = 0) { return static_cast<uint64_t>(tag) | (fields << 8); }

// The first key word of every template: op-independent state that changes results.
// bits 0..7 default dtype, 8 deterministic algorithms, 9 deterministic warn-only, 16..47 the rank's number of its
// flags (torch_flags.hpp), which travel in a Flags message of their own: the number keeps templates apart.
inline uint64_t globals_word(uint8_t default_dtype, bool deterministic, bool warn_only) {
  return uint64_t{default_dtype} | (uint64_t{deterministic} << 8) | (uint64_t{warn_only} << 9);
}

// Flags message: words in this order (torch_flags.hpp).
enum class FlagWord : uint8_t {
  Float32Precision,  // the table of precisions per back-end and operator, packed
  MatmulPrecision,
  AllowTf32Cudnn,
  AllowTf32Onednn,
  CudnnEnabled,
  CudnnBenchmark,
  CudnnBenchmarkLimit,
  CudnnDeterministic,
  MkldnnEnabled,
  MkldnnDeterministic,
  NnpackEnabled,
  FlashSdp,
  MemEfficientSdp,
  MathSdp,
  CudnnSdp,
  OverrideableSdp,
  MathSdpReduction,
  SdpPriorities,  // packed
  LinalgBackend,
  BlasBackend,
  Fp16ReductionCublas,
  Bf16ReductionCublas,
  Fp16AccumulationCublas,
  Fp16ReductionCpu,
  FillUninitialized,
  FlushDenormal,  // 0: the proxy's own, 1: off, 2: on
  Threads,        // 0: the job's own
  Count
};

// Response of Define, words: n_new, bytes_of_new[n_new], n_returns, returns..., n_post, posts...
// return := 'T' out | 'L' n out[n] | 'I' int | 'B' bool | 'D' double | 'N'
// out := header [offset, sizes[ndim], strides[ndim]] ; header 0 = undefined tensor
//   header bits 0..7 OutKind, 8..15 dtype, 16..23 ndim, 24..31 TensorFlag, 32..63 reference
//   Composed: header bits 16..23 Composition, 24 coalesced, 32..63 sparse dims; n, geometry[n], then out of each
//   component
// post := argument index, storage bytes after the op, out     (arguments that the op resized or restrided;
//         of a composed one all of its new state, after posts of its components)
// References count the Tensor-tagged arguments of the call in order; OutKind::New counts new storages.
enum class OutKind : uint8_t { Undefined = 0, SameAsArgument = 1, AliasOfArgument = 2, New = 3, Composed = 4 };

// Store request bytes: u8 op, u32 key length, key, u32 value length, value, i64 number.
// Reply: u8 ok (0: key missing), then the bytes (Get, CompareSet) or an i64 (Add, NumKeys, Check, Delete).
// None of them blocks in the proxy: waiting is the rank's, by Check.
enum class StoreOp : uint8_t {
  Set,
  Get,
  Add,
  Check,
  CompareSet /* value = u32 len + expected + desired */,
  Delete,
  NumKeys,
  Append
};

// Reads words with bounds checks: a malformed message is an exception, never a read past its end.
class WordReader {
 public:
  WordReader(const uint64_t* begin, size_t n) : p_(begin), end_(begin + n) {}
  uint64_t word() {
    need(1);
    return *p_++;
  }
  const uint64_t* words(size_t n) {
    need(n);
    const uint64_t* q = p_;
    p_ += n;
    return q;
  }
  const char* bytes(size_t n) { return reinterpret_cast<const char*>(words(n / 8 + (n % 8 != 0))); }
  double real() {
    uint64_t w = word();
    double d;
    std::memcpy(&d, &w, 8);
    return d;
  }
  size_t left() const { return static_cast<size_t>(end_ - p_); }
  const uint64_t* position() const { return p_; }

 private:
  void need(size_t n) const {
    if (n > left()) throw std::runtime_error("ergosphere: message shorter than its contents say");
  }
  const uint64_t *p_, *end_;
};

class WordWriter {
 public:
  void word(uint64_t w) { words_.push_back(w); }
  void real(double d) {
    uint64_t w;
    std::memcpy(&w, &d, 8);
    word(w);
  }
  void bytes(const void* data, size_t n) {
    size_t at = words_.size();
    words_.resize(at + (n + 7) / 8, 0);
    if (n) std::memcpy(&words_[at], data, n);
  }
  void append(const WordWriter& o) { words_.insert(words_.end(), o.words_.begin(), o.words_.end()); }
  void clear() { words_.clear(); }
  const std::vector<uint64_t>& words() const { return words_; }
  size_t size() const { return words_.size(); }

 private:
  std::vector<uint64_t> words_;
};

}  // namespace ergo
