// The SmartNIC's side of the ring: CRC32C, writes in order, and the wait for tokens, called without the
// interpreter's lock. Works on any memory that holds token entries: the window itself (shared memory) or
// the copy that an RDMA READ made.
#include <sys/prctl.h>

#include "platform.cuh"

using namespace blinkbed;

namespace {

constexpr uint64_t kSpinNs = 5000;
constexpr uint64_t kNapNs = 50000;         // wakes well within 100 us
constexpr uint64_t kLongestNapNs = 500000;  // while nothing is expected yet

bool is_whole(const TokenEntry& entry) {
  return entry.check == crc32c(&entry, offsetof(TokenEntry, check));
}

void nap(uint64_t ns) {
  static thread_local const int slack = prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0);
  (void)slack;
  const timespec t{0, long(ns)};
  nanosleep(&t, nullptr);
}

// Steps come at a pace: sleep longer during the first three quarters of the last wait, shortly after.
uint64_t nap_ns(uint64_t waited_ns, uint64_t last_wait_ns) {
  const uint64_t quiet_ns = last_wait_ns / 4 * 3;
  if (waited_ns + kNapNs >= quiet_ns) return kNapNs;
  return quiet_ns - waited_ns < kLongestNapNs ? quiet_ns - waited_ns : kLongestNapNs;
}

}  // namespace

extern "C" uint32_t bb_crc32c(const void* data, size_t n) { return crc32c(data, n); }

// Store `n` bytes such that whoever sees them sees all that was written before. A word of 8 or 4 bytes is
// stored in one piece.
extern "C" void bb_write(uint8_t* to, const uint8_t* from, size_t n) {
  if (n == 8 && reinterpret_cast<uintptr_t>(to) % 8 == 0) {
    uint64_t word;
    memcpy(&word, from, 8);
    return store_release(reinterpret_cast<uint64_t*>(to), word);
  }
  if (n == 4 && reinterpret_cast<uintptr_t>(to) % 4 == 0) {
    uint32_t word;
    memcpy(&word, from, 4);
    return store_release(reinterpret_cast<uint32_t*>(to), word);
  }
  __atomic_thread_fence(__ATOMIC_RELEASE);
  memcpy(to, from, n);
}

// Copy the whole entries of the log from index `head` on, `max` at most; returns how many. `log` has
// `entries` places, a power of two.
extern "C" int bb_take_entries(const TokenEntry* log, uint64_t entries, uint64_t head, TokenEntry* out,
                               int max) {
  int n = 0;
  for (; n < max; n++) {
    const TokenEntry* from = log + ((head + n) & (entries - 1));
    if (load_acquire(&from->sequence) != head + n + 1) break;
    memcpy(&out[n], from, sizeof(TokenEntry));
    if (out[n].sequence != head + n + 1 || !is_whole(out[n])) break;  // torn: looked at again
  }
  return n;
}

// The same, waiting up to `timeout_ns` for the first.
extern "C" int bb_wait_entries(const TokenEntry* log, uint64_t entries, uint64_t head, TokenEntry* out,
                               int max, uint64_t timeout_ns) {
  static thread_local uint64_t last_wait_ns = 0;
  const uint64_t started = clock_ns();
  while (true) {
    const int n = bb_take_entries(log, entries, head, out, max);
    const uint64_t waited = clock_ns() - started;
    if (n) last_wait_ns = waited;
    if (n || waited > timeout_ns) return n;
    if (waited > kSpinNs) nap(nap_ns(waited, last_wait_ns));
  }
}

// A producer in one call, for measuring the ring and torturing it: posts `count` copies of the record at
// `record` (whose header it completes) through the port at `base`, waiting for free slots by reading the
// token ring; returns how many terminals it saw.
extern "C" uint64_t bb_produce(uint8_t* base, uint64_t count, Record* record, uint64_t slots_offset,
                               uint64_t tokens_offset, uint64_t token_ring_entries,
                               uint64_t timeout_ns) {
  const Identity* identity = reinterpret_cast<const Identity*>(base);
  Control* control = reinterpret_cast<Control*>(base + kControlOffset);
  const Progress* progress = reinterpret_cast<const Progress*>(base + kProgressOffset);
  const TokenEntry* log = reinterpret_cast<const TokenEntry*>(base + tokens_offset);
  uint64_t* doorbells = reinterpret_cast<uint64_t*>(base + kDoorbellsOffset);
  const uint32_t num_slots = identity->num_slots;
  uint64_t head = load_acquire(&progress->token_tail);
  uint64_t sequence = load_acquire(&progress->picked_up);
  uint64_t posted = 0, ended = 0;
  const uint64_t started = clock_ns();
  while (ended < count && clock_ns() - started < timeout_ns) {
    while (posted < count && posted - ended < num_slots) {
      const uint32_t slot = uint32_t(posted % num_slots);
      record->sequence = ++sequence;
      record->slot = slot;
      record->generation++;  // the caller starts it at the slots' common generation
      if (slot) record->generation--;
      record->crc32c = crc32c(&record->record_bytes, record->record_bytes - 4);
      memcpy(base + slots_offset + uint64_t(slot) * identity->slot_bytes, record, record->record_bytes);
      store_release(&doorbells[sequence & (num_slots - 1)],
                    sequence << 32 | (record->session & 0xffffull) << 16 | slot);
      posted++;
    }
    TokenEntry entries[64];
    const int n = bb_take_entries(log, token_ring_entries, head, entries, 64);
    for (int i = 0; i < n; i++) ended += entries[i].finish_reason != 0;
    head += n;
    if (n) store_release(&control->consumer_index, head);
  }
  return ended;
}
