// One team of threads for all operators of a process: bounded spinning, then sleep; no thread is waited for that has no
// part in hand.
//
// A region has an epoch, and each of its shares a counter of (epoch, parts left). A part is claimed by counting down;
// that fails when the epoch is another one, so a thread that slept through a region cannot take a part of the next one
// for one of its own. The caller leaves when all parts are done, by any thread. Bits do not depend on it: a part is
// computed the same way by every thread.
//
// HOW MANY THREADS. The caller measures how long it waits for parts that others have in hand, and what they are worth:
// the time that its own pace would have taken alone, over the time of the region. A thread whose core another process
// has costs all of them its absence: more than it gives, from one nth of the time on. So one is left out then, or where
// regions are so short that threads are of little use, for a pause that doubles as long as this is so; then it is tried
// again.
#include "team.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <system_error>
#include <thread>

#include "api.h"
#include "spin.h"

namespace loraplex {
namespace {

constexpr long kMaxShares = 1024;
constexpr int kLeftBits = 24;                // of a share's counter; the epoch has the rest
constexpr double kSpinS = 100e-6;            // longer than what lies between the regions of a step
constexpr double kWaitSpinS = 50e-6;         // then the caller's core is free for the thread that is waited for
constexpr double kMemoryS = 50e-3;           // of what was measured
constexpr double kEvidenceS = 5e-3;
constexpr double kLateS = 200e-6;            // a part takes less: a thread that is waited for so long has lost its core
constexpr double kAbsence = .8;              // of one nth of the time, which is what a thread gives
constexpr double kUse = .55;                 // of n threads: 1.1 for two
constexpr double kShortS = 30e-6;            // of a region: threads that are of little use in longer ones have no cores
constexpr double kLeastPauseS = 10e-3, kMostPauseS = 1;
constexpr double kProvedPauses = 4;          // that a thread has to stay, to begin with the least one again

// Whether to use all threads: what they were worth lately.
class Judge {
 public:
  long active(long wanted) {
    if (left_out_ > 0 && now() >= try_at_) {
      left_out_--;
      began_ = now(), try_at_ = began_ + kLeastPauseS;
      alone_ = taken_ = late_ = regions_ = 0;
    }
    return std::max(1L, wanted - left_out_);
  }

  // The caller did `own` of `parts` in `computed` seconds and waited for the rest.
  void see(double computed, double waited, long own, long parts, long threads) {
    const double seconds = computed + waited, kept = std::max(0., 1 - seconds / kMemoryS), n = double(threads);
    alone_ = alone_ * kept + std::min(computed * double(parts) / double(std::max(own, 1L)), seconds * n);
    taken_ = taken_ * kept + seconds;
    late_ = late_ * kept + (waited > kLateS ? waited : 0);
    regions_ = regions_ * kept + 1;
    const bool is_late = late_ * n > kAbsence * taken_;
    if (taken_ < kEvidenceS || !(is_late || alone_ < kUse * n * taken_)) return;
    const double at = now();
    pause_ = at - began_ > kProvedPauses * pause_ ? kLeastPauseS : std::min(2 * pause_, kMostPauseS);
    left_out_++;
    try_at_ = at + pause_;
    is_core_taken_ = is_late || taken_ > kShortS * regions_;
    alone_ = taken_ = late_ = regions_ = 0;
  }

  // Threads that would be used if no other process had their cores; 0 where regions are too short for them.
  long missing() const { return is_core_taken_ ? left_out_ : 0; }

 private:
  long left_out_ = 0;
  bool is_core_taken_ = false;
  double alone_ = 0, taken_ = 0, late_ = 0, regions_ = 0;  // sums that fade; seconds but for the last
  double pause_ = kLeastPauseS, try_at_ = 0, began_ = 0;
};

struct alignas(64) Share {
  std::atomic<uint64_t> left{0};
};

class Team {
 public:
  void run(long shares, long parts, Part part, const void* context) {
    if (shares <= 1 || shares > kMaxShares || is_busy_.exchange(true, std::memory_order_acquire)) {
      for (long share = 0; share < shares; share++)
        for (long p = 0; p < parts; p++) part(context, share, p);
      return;
    }
    run_together(ready(shares), shares, parts, part, context);
    is_busy_.store(false, std::memory_order_release);
  }

  TeamStats stats() {
    const std::lock_guard lock(stats_mutex_);
    return stats_;
  }

 private:
  struct alignas(64) Sleep {
    std::atomic<int32_t> is_asleep{0};
  };

  // How many threads there are for a region of so many shares: those that are left, and as many as could be started.
  long ready(long shares) {
    const long wanted = judge_.active(shares);
    try {
      for (; started_ < std::min(wanted, can_start_); started_++)
        std::thread([this, self = started_] { work(self); }).detach();
    } catch (const std::system_error&) {
      can_start_ = started_;
    }
    return std::min(wanted, started_);
  }

  void run_together(long threads, long shares, long parts, Part part, const void* context) {
    part_ = part, context_ = context, parts_ = parts;
    shares_.store(shares, std::memory_order_relaxed);
    unfinished_.store(int32_t(shares * parts), std::memory_order_relaxed);
    const uint64_t epoch = epoch_.load(std::memory_order_relaxed) + 1;
    for (long i = 0; i < shares; i++)
      share_[i].left.store(epoch << kLeftBits | uint64_t(parts), std::memory_order_release);
    threads_.store(threads, std::memory_order_relaxed);
    epoch_.store(epoch, std::memory_order_seq_cst);
    for (long i = 1; i < threads; i++)
      if (sleep_[i].is_asleep.load(std::memory_order_seq_cst) != 0 && sleep_[i].is_asleep.exchange(0) != 0)
        sleep_[i].is_asleep.notify_one();
    const double began = now();
    const long own = help(epoch, 0);
    const double done = now();
    int32_t left = unfinished_.fetch_sub((int32_t)own, std::memory_order_acq_rel) - (int32_t)own;
    double waited = 0;
    if (left != 0) {
      if (!spin(kWaitSpinS, [&] { return unfinished_.load(std::memory_order_acquire) == 0; }))
        while ((left = unfinished_.load(std::memory_order_acquire)) != 0)
          unfinished_.wait(left, std::memory_order_acquire);
      waited = now() - done;
    }
    if (threads > 1) judge_.see(done - began, waited, own, shares * parts, threads);
    const std::lock_guard lock(stats_mutex_);
    stats_.computed += done - began, stats_.waited += waited;
    stats_.left_out += (done - began) * double(std::min(judge_.missing(), shares - threads));
    stats_.threads = shares, stats_.active = threads;
  }

  // Does parts until none is left; returns how many.
  long help(uint64_t epoch, long self) {
    const long shares = shares_.load(std::memory_order_relaxed);
    long count = 0;
    for (long i = 0; i < shares; i++) {
      const long share = (self + i) % shares;
      std::atomic<uint64_t>& left = share_[share].left;
      uint64_t seen = left.load(std::memory_order_acquire);
      while (seen >> kLeftBits == epoch && (seen & ((1u << kLeftBits) - 1)) != 0) {
        if (!left.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
        part_(context_, share, parts_ - long(seen & ((1u << kLeftBits) - 1)));
        count++;
        seen = left.load(std::memory_order_acquire);
      }
    }
    return count;
  }

  [[noreturn]] void work(long self) {
    sigset_t all;  // signals are for the threads that Python knows
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);
#if defined(__linux__)
    pthread_setname_np(pthread_self(), "loraplex-cpu");
#endif
    for (uint64_t epoch = 0;;) {
      epoch = next(epoch, self);
      const long count = help(epoch, self);
      if (count > 0 && unfinished_.fetch_sub((int32_t)count, std::memory_order_acq_rel) == count)
        unfinished_.notify_one();
    }
  }

  // Waits for a region after `seen` that this thread has a place in.
  uint64_t next(uint64_t seen, long self) {
    auto is_there = [&] { return epoch_.load(std::memory_order_acquire) != seen; };
    for (;;) {
      const bool is_wanted = self < threads_.load(std::memory_order_relaxed);
      if (is_wanted && spin(kSpinS, is_there)) {
        seen = epoch_.load(std::memory_order_acquire);
        if (self < threads_.load(std::memory_order_relaxed)) return seen;
        continue;
      }
      sleep_[self].is_asleep.store(1, std::memory_order_seq_cst);
      if (epoch_.load(std::memory_order_seq_cst) != seen && self < threads_.load(std::memory_order_seq_cst)) {
        sleep_[self].is_asleep.store(0, std::memory_order_seq_cst);
        return epoch_.load(std::memory_order_acquire);
      }
      while (sleep_[self].is_asleep.load(std::memory_order_seq_cst) != 0) sleep_[self].is_asleep.wait(1);
    }
  }

  std::atomic<bool> is_busy_{false};  // what follows, up to the epoch, is that caller's
  long started_ = 1, can_start_ = kMaxShares;
  Judge judge_;
  std::mutex stats_mutex_;
  TeamStats stats_{};
  Part part_ = nullptr;
  const void* context_ = nullptr;
  long parts_ = 0;
  alignas(64) std::atomic<uint64_t> epoch_{0};
  std::atomic<long> threads_{0}, shares_{0};
  alignas(64) std::atomic<int32_t> unfinished_{0};
  Share share_[kMaxShares];
  Sleep sleep_[kMaxShares];
};

// Never destroyed: its threads outlive static destructors. A forked child has none of them, so it makes its own team.
std::atomic<Team*>& team() {
  static std::atomic<Team*> current = [] {
    pthread_atfork(nullptr, nullptr, [] { team().store(new Team); });
    return new Team;
  }();
  return current;
}

}  // namespace

void run_shares(long shares, long parts, Part part, const void* context) {
  team().load(std::memory_order_acquire)->run(shares, parts, part, context);
}

}  // namespace loraplex

LORAPLEX_API void loraplex_team_stats(loraplex::TeamStats* stats) {
  *stats = loraplex::team().load(std::memory_order_acquire)->stats();
}
